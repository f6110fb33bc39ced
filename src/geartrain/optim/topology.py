"""Who is whose neighbour.

ring   0 ─ 1 ─ 2 ─ 0          full   everybody with everybody          edges   as given
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from geartrain.optim.exchange import AbstractTopology


@final
class Ring:
    """Each copy with the one before it and the one behind it."""

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        return [sorted({(k - 1) % copies, (k + 1) % copies} - {k}) for k in range(copies)]


@final
class Full:
    """Everybody with everybody."""

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        return [[j for j in range(copies) if j != k] for k in range(copies)]


def topology_of(given: Any) -> AbstractTopology:
    """What the user wrote, as a topology.

    Raises:
        ValueError: It is none.
    """
    named: dict[str, AbstractTopology] = {"ring": Ring(), "full": Full()}
    if isinstance(given, str) and given in named:
        return named[given]
    if hasattr(given, "neighbours"):
        return given  # type: ignore[no-any-return]
    raise ValueError(f"topology={given!r}: give one of {sorted(named)}")

"""A kernel as two: what some inputs decide by themselves, and the rest.

    rows that many others read ─► early, once each ─► read many times ─► late, with other inputs

Where an edge, a child or a step reads a row that others read as well, what a module makes of that
row alone is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import Tensor

from geartrain.nodes.kernel import AbstractKernel


@final
@dataclass(frozen=True, slots=True)
class Hoisted:
    """A kernel as two.

    Args:
        early: Of some of the inputs; its outputs are the first inputs of the other.
        late: Of those and other inputs; its outputs are the kernel's.
        early_reads, late_reads: Which inputs of the kernel each reads.
    """

    early: AbstractKernel
    late: AbstractKernel
    early_reads: tuple[int, ...]
    late_reads: tuple[int, ...]


Hoist: TypeAlias = Callable[
    [AbstractKernel, Callable[..., Any], Sequence[Tensor], frozenset[int]], Hoisted | None
]
_HOISTS: list[Hoist] = []


def register_hoist(hoist: Hoist) -> None:
    """Let ``hoisted`` answer; ``geartrain.nn`` registers the one that traces."""
    _HOISTS[:] = [hoist]


def hoisted(
    kernel: AbstractKernel,
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    early: frozenset[int],
) -> Hoisted | None:
    """A kernel as two; None: there is nothing worth it that these inputs decide.

    Args:
        kernel: It.
        function: What it computes.
        inputs: Rows like those it is called with, also none.
        early: Which of them are known before the others.
    """
    (hoist,) = _HOISTS
    return hoist(kernel, function, inputs, early)

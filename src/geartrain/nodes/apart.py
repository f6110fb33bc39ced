"""Rows of several updates, put apart before they are multiplied or added up.

rows of updates 0 1 1 2 0 2  ─►  0 0 │ 1 1 │ 2 2        a product each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import ProtocolError
from geartrain.frames.message import IntArray, join_arrays
from geartrain.native.rows import take
from geartrain.nodes.slot import Runs

Piece: TypeAlias = tuple[int, Tensor, "Tensor | None"]
"""An update and its rows, as ``RowsOfUpdates`` has them."""

_MANY: Final = 512
"""Rows of several updates that are put apart at once: such few updates have many rows each."""


@final
class RowsOfUpdates(NamedTuple):
    """Rows of several updates.

    Args:
        left: ``(n, a)``.
        right: ``(n, b)``, of a product; None: rows are added up.
        updates: int64 ``(n,)``, that of each row, counted from the present one.
    """

    left: Tensor
    right: Tensor | None
    updates: IntArray

    def by_update(self) -> Iterator[Piece]:
        """Each update that there is, and its rows; they are copied unless they lie in order."""
        left, right, updates = self
        if (np.diff(updates) < 0).any():
            order = np.argsort(updates, kind="stable")
            (left,) = take([left.contiguous()], order)
            if right is not None:
                (right,) = take([right.contiguous()], order)
        start = 0
        for update, n in enumerate(np.bincount(updates).tolist()):
            if n:
                end = start + n
                yield update, left[start:end], None if right is None else right[start:end]
                start = end


@final
class PutApart:
    """Rows of several updates that wait, by parameter and its columns."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[torch.nn.Parameter, dict[Runs | None, list[RowsOfUpdates]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, parameter: torch.nn.Parameter, columns: Runs | None, rows: RowsOfUpdates) -> bool:
        """Have rows wait, unless they are many; whether they do."""
        few = rows.updates.size < _MANY
        if few:
            self._waiting.setdefault(parameter, {}).setdefault(columns, []).append(rows)
        return few

    def take(self) -> Iterator[tuple[torch.nn.Parameter, Runs | None, RowsOfUpdates]]:
        """All that waits, joined; nothing does afterwards."""
        waiting, self._waiting = self._waiting, {}
        for parameter, of in waiting.items():
            for columns, pieces in of.items():
                yield parameter, columns, _joined(pieces)


def _joined(pieces: list[RowsOfUpdates]) -> RowsOfUpdates:
    if len(pieces) == 1:
        return pieces[0]
    rights = [each.right for each in pieces if each.right is not None]
    return RowsOfUpdates(
        torch.cat([each.left for each in pieces]),
        torch.cat(rights) if rights else None,
        join_arrays([each.updates for each in pieces]),
    )


def cut(left: Tensor, right: Tensor | None, many: Mapping[int, int]) -> Iterator[Piece]:
    """Each update that there is, and its rows, which lie one update after the other.

    Args:
        left, right: As ``RowsOfUpdates`` has them.
        many: Rows of each update, in their order.
    """
    sizes = [*many.values()]
    rights = [None] * len(sizes) if right is None else right.split_with_sizes(sizes)
    return zip(many, left.split_with_sizes(sizes), rights, strict=True)


def for_rows(updates: IntArray, n: int) -> IntArray:
    """The update of each of n rows, of which the rows of a call have one or some side by side.

    Raises:
        ProtocolError: They have not.
    """
    if updates.size == n:
        return updates
    if not updates.size or n % updates.size:
        raise ProtocolError(f"{n} rows of a gradient came of a call with {updates.size} rows")
    return updates.repeat(n // updates.size)


def in_order(updates: IntArray) -> list[tuple[int, slice]]:
    """Rows of one update that follow upon one another: the update, and where they are."""
    ends = [*(np.flatnonzero(np.diff(updates)) + 1).tolist(), updates.size]
    starts = [0, *ends[:-1]]
    return [(int(updates[a]), slice(a, b)) for a, b in zip(starts, ends, strict=True)]


def of_rows(updates: IntArray | int, n: int) -> IntArray | int:
    """The updates of n rows: one for all, or each row's."""
    return updates if isinstance(updates, int) else for_rows(updates, n)

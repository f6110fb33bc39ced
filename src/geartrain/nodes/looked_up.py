"""Gradients of a table and of the weight that its rows meet first, from sums by row of the table.

    y = W T[id]                    d (n, out), id (n,)
    s[v] = sum of d where id = v   U rows, those of ids that came
    dW = sᵀ T        dT = s W      two products of U rows, not of n

A table has few rows, or the same few come again and again: tags, letters, frequent words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.message import IntArray, distinct
from geartrain.native import operations
from geartrain.native.rows import take
from geartrain.native.sums import SumsById, may_multiply, multiply_sums
from geartrain.nodes.apart import of_rows
from geartrain.nodes.products import times
from geartrain.nodes.slot import Pairs

_MOST_SUMS: Final = 4096
"""Sums by row of a table after which they are multiplied, where it has more rows."""


class AbstractSums(Protocol):
    """What gradients are added to: as ``GradientSum`` has it."""

    def add_product(
        self,
        parameter: nn.Parameter,
        left: Tensor,
        right: Tensor,
        *,
        columns: tuple[tuple[int, int], ...] | None = None,
    ) -> None:
        """Add ``left.T @ right`` to these columns."""

    def begun(self, parameter: nn.Parameter) -> Tensor:
        """A dense gradient, to be added to."""

    def add_rows(self, parameter: nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add rows to a gradient of rows."""

    def add_at(self, parameter: nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add rows to a dense gradient."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Rows of a table, and what they meet.

    Args:
        table: ``(v, w)``.
        weight: ``(out, in)``, of which w columns meet rows of the table; None: gradients are of the
            rows themselves.
        weighs: Whether the weight gets its gradient by this too.
        bias: ``(width,)``, added to each row; or None.
        columns: First column that meets the table, and the one after the last, as the one pair of
            them; None: all.
        padding: The row that gets no gradient, or -1.
        sparse: Whether the table gets its gradient as rows.
        rows: How many rows it is seen as, if they are not its own; else 0.

    Attributes:
        key: Equal for lookups that are alike, as long as their tensors live.
    """

    table: Tensor
    weight: Tensor | None = None
    weighs: bool = False
    bias: Tensor | None = None
    columns: tuple[tuple[int, int], ...] | None = None
    padding: int = -1
    sparse: bool = False
    rows: int = 0
    key: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        some = tuple([None if x is None else id(x) for x in (self.weight, self.bias)])
        rest = self.columns, self.padding, self.sparse, self.rows
        object.__setattr__(self, "key", (id(self.table), some, self.weighs, *rest))

    @property
    def width(self) -> int:
        """Of rows of the gradient."""
        return int(
            self.table.numel() // self.limit if self.weight is None else self.weight.shape[0]
        )

    @property
    def limit(self) -> int:
        """How many rows are looked up in."""
        return self.rows or self.table.shape[0]

    def seen(self, table: Tensor) -> Tensor:
        """The table, or its gradient, as it is looked up in."""
        return table.view(self.rows, -1) if self.rows else table

    @property
    def learns(self) -> bool:
        """Whether anything gets a gradient."""
        weight, bias = self.weight, self.bias
        return (
            self.table.requires_grad
            or (self.weighs and weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )

    def tell(self, n: int) -> None:
        """Of the products that n rows ask for, one by one, to who counts operations."""
        if self.weight is not None:
            out, width = self.weight.shape[0], self.table.shape[1]
            if self.weighs and self.weight.requires_grad:
                operations.tell(out, n, width)
            if self.table.requires_grad:
                operations.tell(n, out, width)

    def add(self, ids: Tensor, sums: Tensor, into: AbstractSums) -> None:
        """Add the gradients that sums are of.

        Args:
            ids: int64 ``(u,)``, no two of them the same.
            sums: ``(u, width)``.
            into: Where to.
        """
        table, weight = self.table, self.weight
        if self.bias is not None and self.bias.requires_grad:
            into.begun(cast(nn.Parameter, self.bias)).add_(sums.sum(0))
        seen = self.seen(table) if table.is_contiguous() else table
        if not self.sparse and not operations.listening and may_multiply(sums, seen, weight):
            first = 0 if self.columns is None else self.columns[0][0]
            weighs = weight is not None and self.weighs and weight.requires_grad
            to_weight = into.begun(cast(nn.Parameter, weight)) if weighs else None
            to_table = None
            if table.requires_grad:
                to_table = self.seen(into.begun(cast(nn.Parameter, table)))
            multiply_sums(
                ids,
                sums,
                seen,
                weight,
                first,
                self.padding,
                to_weight=to_weight,
                to_table=to_table,
            )
            return
        if weight is not None and self.weighs and weight.requires_grad:
            rows = table.index_select(0, ids)
            into.add_product(cast(nn.Parameter, weight), sums.clone(), rows, columns=self.columns)
        if not table.requires_grad:
            return
        back = sums.clone() if weight is None else times(sums, self._met(weight))
        if self.padding >= 0:
            learns = ids != self.padding
            ids, back = ids[learns], back[learns]
        if self.sparse:
            into.add_rows(cast(nn.Parameter, table), ids.clone(), back)
        else:
            into.add_at(cast(nn.Parameter, table), ids, back)

    @torch.no_grad()
    def add_all(self, found: SumsById, of: Callable[[int], AbstractSums]) -> None:
        """Add what has been summed to the gradients of each update."""
        ids, rows = found.take()
        limit = self.limit
        if ids.max() < limit:
            self.add(torch.from_numpy(ids), rows, of(0))
            return
        updates = ids // limit
        for update in distinct(updates).tolist():
            at = np.flatnonzero(updates == update)
            (some,) = take([rows], at)
            self.add(torch.from_numpy(ids[at] - update * limit), some, of(update))

    def _met(self, weight: Tensor) -> Tensor:
        """The columns that meet the table."""
        if self.columns is None:
            return weight
        ((first, end),) = self.columns
        return weight[:, first:end].contiguous()


@final
class LookedUpSums:
    """Sums by row of tables that wait, each of a lookup, of the present update and later ones."""

    __slots__ = ("_known", "ahead")

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Lookup, SumsById]] = {}
        self.ahead = False
        """Whether some are of a later update."""

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(
        self,
        lookup: Lookup,
        pieces: Pairs,
        updates: IntArray | int | None,
        settle: Callable[[Lookup, SumsById], None],
    ) -> None:
        """Add gradients, each with the table's rows that they are of.

        Args:
            lookup: Which.
            pieces: Rows ``(n, lookup.width)`` of the gradient, and int64 ``(n,)``.
            updates: Of them, counted from the present one; None: they are of that.
            settle: What makes sums gradients of weights, where there are many of them.
        """
        if not lookup.learns:
            return
        rows, n = lookup.limit, sum([ids.shape[0] for _, ids in pieces])
        if operations.listening:
            lookup.tell(n)
        known = self._known.get(lookup.key)
        if known is None:
            found = SumsById(lookup.width, rows, lookup.table.dtype)
            known = self._known[lookup.key] = lookup, found
        elif len(known[1]) + n > _MOST_SUMS < known[1].limit:
            settle(*known)
        found = known[1]
        if updates is not None:
            most = updates if isinstance(updates, int) else int(updates.max(initial=0))
            self.ahead = self.ahead or most > 0
            if found.limit < (most + 1) * rows:
                found.extend((most + 1) * rows)
            pieces = [
                (x, _by_update(of_rows(updates, ids.shape[0]), ids, rows)) for x, ids in pieces
            ]
        found.add([(x.contiguous(), ids.contiguous()) for x, ids in pieces])

    def settle(self, settle: Callable[[Lookup, SumsById], None]) -> None:
        """Make all of them gradients of weights; what nothing came for is forgotten."""
        known, self._known, self.ahead = self._known, {}, False
        for key, (lookup, found) in known.items():
            if len(found):
                settle(lookup, found)
                self._known[key] = lookup, found


def _by_update(updates: IntArray | int, ids: Tensor, rows: int) -> Tensor:
    """Ids of a table with so many rows, of each update others."""
    if isinstance(updates, int):
        return ids + updates * rows
    return torch.from_numpy(ids.numpy() + updates * rows)

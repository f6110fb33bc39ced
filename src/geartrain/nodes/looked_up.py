"""Gradients of a table and of the weight that its rows meet first, from sums by row of the table.

    y = W T[id]                    d (n, out), id (n,)
    s[v] = sum of d where id = v   U rows, those of ids that came
    dW = sᵀ T        dT = s W      two products of U rows, not of n

A table has few rows, or the same few come again and again: tags, letters, frequent words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast, final

import torch
from torch import Tensor, nn

from geartrain.native import operations
from geartrain.native.sums import may_multiply, multiply_sums
from geartrain.nodes.products import times


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
    """

    table: Tensor
    weight: Tensor | None = None
    weighs: bool = False
    bias: Tensor | None = None
    columns: tuple[tuple[int, int], ...] | None = None
    padding: int = -1
    sparse: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for lookups that are alike, as long as their tensors live."""
        some = tuple([None if x is None else id(x) for x in (self.weight, self.bias)])
        return id(self.table), some, self.weighs, self.columns, self.padding, self.sparse

    @property
    def width(self) -> int:
        """Of rows of the gradient."""
        return int(self.table.shape[1] if self.weight is None else self.weight.shape[0])

    @property
    def learns(self) -> bool:
        """Whether anything gets a gradient."""
        weight = self.weight if self.weighs else None
        return any(x is not None and x.requires_grad for x in (self.table, weight, self.bias))

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
        if not self.sparse and not operations.listening and may_multiply(sums, table, weight):
            first = 0 if self.columns is None else self.columns[0][0]
            weighs = weight is not None and self.weighs and weight.requires_grad
            to_weight = into.begun(cast(nn.Parameter, weight)) if weighs else None
            to_table = into.begun(cast(nn.Parameter, table)) if table.requires_grad else None
            multiply_sums(
                ids,
                sums,
                table,
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

    def _met(self, weight: Tensor) -> Tensor:
        """The columns that meet the table."""
        if self.columns is None:
            return weight
        ((first, end),) = self.columns
        return weight[:, first:end].contiguous()


def by_update(updates: object, ids: Tensor, rows: int) -> Tensor:
    """Ids of a table with so many rows, of each update others.

    Args:
        updates: An update; or int64 ``(n,)``.
    """
    if isinstance(updates, int):
        return ids + updates * rows
    return ids + torch.as_tensor(updates) * rows

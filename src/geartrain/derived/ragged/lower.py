"""From the operators of a ragged trace to steps, forward and back.

joint graph, at two sizes ─► axes: rows of which kind ─► steps over rows
    what depends on a tangent            ─► the way back
    integers that integers alone make    ─► computed before, by torch
    a mask of what is padded             ─► true: nothing is padded

A file for each idea: ``views`` (nothing is moved), ``apart`` (entry by entry), ``matrices``
(products), ``over`` (along an axis), ``most`` (one member of each bundle),
``numbered`` (rows by number), ``pairs`` (members that meet).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch import fx

from geartrain.derived.ragged.along import ALONG, goes_beyond, is_of_first
from geartrain.derived.ragged.apart import APART, arithmetic
from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.chance import CHANCE
from geartrain.derived.ragged.chosen import is_of_chosen
from geartrain.derived.ragged.exact import check_exact, is_compared_exactly
from geartrain.derived.ragged.front import added_in_front
from geartrain.derived.ragged.integers import COUNTS, begins_with, counts_rows
from geartrain.derived.ragged.matrices import MATRICES
from geartrain.derived.ragged.most import MOST
from geartrain.derived.ragged.numbered import NUMBERED_ROWS
from geartrain.derived.ragged.others import OTHERS, among_all
from geartrain.derived.ragged.over import OVER, sums_rows
from geartrain.derived.ragged.pairs import PAIRED_ROWS, fit_pairs, of_places
from geartrain.derived.ragged.traced import SAME, numbers_of
from geartrain.derived.ragged.values import (
    EDGES,
    MEMBERS,
    NO_ROWS,
    Axes,
    Constant,
    CountedRows,
    Known,
    RaggedValue,
)
from geartrain.derived.ragged.views import VIEWS
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op

aten = torch.ops.aten

_ZEROS: Final = frozenset(
    {
        aten.zeros.default,
        aten.zeros_like.default,
        aten.new_zeros.default,
        aten.empty_like.default,
    }
)
_ONES: Final = frozenset({aten.ones.default, aten.ones_like.default, aten.new_ones.default})
_FULL: Final = frozenset(
    {
        aten.full.default,
        aten.fill.Scalar,
        aten.full_like.default,
        aten.new_full.default,
        aten.scalar_tensor.default,
    }
)
_CHOOSING: Final = frozenset({aten.where.self, aten.masked_fill.Scalar})
_WAYS: Final[Mapping[Any, Convert]] = {
    **VIEWS,
    **APART,
    **CHANCE,
    **MATRICES,
    **OVER,
    **NUMBERED_ROWS,
    **PAIRED_ROWS,
    **MOST,
    **OTHERS,
    **ALONG,
}


@final
class Lowering(AbstractLowering):
    """The operators that have steps."""

    def convert(self, x: fx.Node) -> None:
        if x.target is aten.index.Tensor and self._has_as_many_as(x):
            raise Refused("rows are chosen by a mask, as many as it says: multiply by it instead")
        if self.padding is None or self.late(x):
            self._convert_any(x)
            return
        true = self.padding.true(x)
        if true is not None:
            self.values[x] = Constant(float(true))
            return
        try:
            self._convert_any(x)
        except Refused:
            if not self.padding.knows(x):
                raise
            self.values[x] = None  # of use where rows are taken by it, or put

    def paired(self, value: RaggedValue, mine: Axes, like: Axes, *, late: bool) -> RaggedValue:
        return fit_pairs(self, value, mine, like, late=late)

    def of_constant(self, x: fx.Node, found: torch.Tensor) -> Known:
        return of_places(self, x, found)

    def make(self, x: fx.Node) -> None:
        for source in x.all_input_nodes:
            if self.values.get(source) is None and self.is_of_matrices(source):
                self.make(source)
        _WAYS.get(x.target, arithmetic)(self, x)

    def _convert_any(self, x: fx.Node) -> None:
        target: Any = x.target
        args: Any = x.args
        if target in _ZEROS or target in _ONES:
            self.values[x] = Constant(float(target in _ONES))
            return
        if target in _FULL:
            self.values[x] = Constant(float(args[-1]))
            return
        if target in COUNTS:
            self._count_up(x)
        elif self._is_counted(x):
            self._count(x)
        elif (named := among_all(self, x)) is not None:
            self.values[x] = named
        elif goes_beyond(self, x) or is_of_first(self, x) or is_of_chosen(self, x):
            pass
        elif target in _WAYS:
            _WAYS[target](self, x)
        elif target is aten.add.Tensor and added_in_front(self, x):
            pass
        elif target is aten.t.default or sums_rows(self, x) or self._of_weights(x):
            self.values[x] = None  # of use for the gradients of weights alone
        else:
            arithmetic(self, x)
        check_exact(self, x)

    def _has_as_many_as(self, x: fx.Node) -> bool:
        """Whether a mask says how many rows there are, and they are not those of anything."""
        masks = [s for s in x.all_input_nodes[1:] if s.meta.get("dtype") is torch.bool]
        return bool(masks) and not self.has_rows_first(x)

    def _count_up(self, x: fx.Node) -> None:
        """0, 1, ...: the numbers of rows, or of members in their bundle."""
        like = self.like(x)
        if like.alone and (begin := begins_with(x, self.twin[x], self.shapes[x])):
            place, one = self.place(late=False), self.room(like, late=False)
            self.plain(Op.ADD_NUMBER, one, place, number=float(begin), late=False)
            self.values[x] = one
            return
        if like.kind == NO_ROWS:  # of no use but for other integers
            self.values[x] = CountedRows(x)
            return
        if not counts_rows(x, self.shapes[x]) or (like.times, like.width) != (1, 1):
            raise Refused("numbers that do not count rows")
        if like.alone:
            self.values[x] = self.place(late=False)
            self.number_members(x)
            return
        source = self._integers_of(like)
        if source is None:
            raise Refused("numbers that do not count rows")
        self.counting[x] = source
        self.values[x] = CountedRows(x)

    def _integers_of(self, like: Axes) -> fx.Node | None:
        """An input that is integers, one for each of such rows."""
        every = [self.segment if like.kind == MEMBERS else self.lengths]
        if like.kind == EDGES:
            every = [x for x in self.inputs if isinstance(self.values[x], CountedRows)]
        return next((x for x in every if x is not None and self.like(x) == like), None)

    def _is_counted(self, x: fx.Node) -> bool:
        """Whether integers alone make it, and it is one, or the same as one, or a truth that steps
        may not find."""
        dtype = x.meta.get("dtype")
        chosen = x.target in _CHOOSING and dtype is torch.int64
        known = [s for s in x.all_input_nodes if not self._is_whole(s)]
        if not known or not all(self._is_of_integers(s, truths=chosen) for s in known):
            return False
        if x.target in SAME or dtype is torch.int64:
            return True
        return dtype is torch.bool and not is_compared_exactly(self, x)

    def _is_of_integers(self, x: fx.Node, *, truths: bool) -> bool:
        """Whether integers alone make integers, or truths if those count, whoever else does so."""
        if isinstance(self.values.get(x), CountedRows):
            return True
        if not truths or x.meta.get("dtype") is not torch.bool:
            return False
        of = [s for s in x.all_input_nodes if not self._is_whole(s)]
        return bool(of) and all(self._is_of_integers(s, truths=True) for s in of)

    def _is_same(self, x: fx.Node) -> bool:
        """Whether it has the integers of what it is made of, or these as numbers."""
        before, dtype = x.all_input_nodes[0].meta.get("dtype"), x.meta.get("dtype")
        return x.target in SAME and (dtype is before or dtype is self.dtype)

    def _is_whole(self, x: fx.Node) -> bool:
        """Whether it is one integer everywhere, however many rows there are."""
        whole = isinstance(self.values.get(x), Constant) and x.meta.get("dtype") is torch.int64
        return whole and x.op == "call_function" and not self.varies(x)

    def _of_weights(self, x: fx.Node) -> bool:
        """Whether it puts gradients of weights together."""
        return self.late(x) and self.like(x).kind == NO_ROWS

    def _count(self, x: fx.Node) -> None:
        """Integers of integers, or truths."""
        if self._is_same(x):
            self.values[x] = self.values[x.all_input_nodes[0]]
            return
        same, dtype = numbers_of(x) == numbers_of(self.twin[x]), x.meta.get("dtype")
        single = len(self.shapes[x]) == 1 or (dtype is torch.bool and self.like(x).width == 1)
        counts = dtype in (torch.int64, torch.bool) and same and single
        self.values[x] = CountedRows(x) if counts else None

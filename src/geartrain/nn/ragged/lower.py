"""From the operators of a ragged trace to steps, forward and back.

joint graph, at two sizes ─► axes: rows of which kind ─► steps over rows
    what depends on a tangent            ─► the way back
    integers that integers alone make    ─► computed before, by torch
    a mask of what is padded             ─► true: nothing is padded
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias, final

import torch
from torch import fx

from geartrain.native.fused import Op
from geartrain.native.ragged import Way
from geartrain.nn.places import Refused
from geartrain.nn.ragged.base import AbstractLowering, lie_alike
from geartrain.nn.ragged.values import (
    BUNDLES,
    HELD,
    MEMBERS,
    NO_ROWS,
    PADDED,
    TURNED,
    Axes,
    Buffer,
    Constant,
    CountedRows,
    HeldValue,
    RaggedValue,
    Role,
)
from geartrain.nn.ways import NUMBERS, ONE, TWO

aten = torch.ops.aten

_SAME: Final = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
        aten._to_copy.default,
    }
)
"""The same numbers, in the same order."""
_ZEROS: Final = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
_ONES: Final = frozenset({aten.ones.default, aten.ones_like.default, aten.new_ones.default})
_FULL: Final = frozenset(
    {
        aten.full.default,
        aten.full_like.default,
        aten.new_full.default,
        aten.scalar_tensor.default,
    }
)


@final
class Lowering(AbstractLowering):
    """The operators that have steps."""

    def convert(self, x: fx.Node) -> None:
        target: Any = x.target
        args: Any = x.args
        if target in _ZEROS or target in _ONES:
            self.values[x] = Constant(float(target in _ONES))
            return
        if target in _FULL:
            self.values[x] = Constant(float(args[-1]))
            return
        sources = x.all_input_nodes
        if sources and all(isinstance(self.values.get(s), CountedRows) for s in sources):
            self._count(x)
            return
        if target in _SAME or target is aten.expand.default:
            self._view(x)
        elif target in _WAYS:
            _WAYS[target](self, x)
        elif target is aten.t.default or self._sums_rows(x):
            self.values[x] = None  # of use for the gradients of weights alone
        else:
            self._arithmetic(x)

    def _count(self, x: fx.Node) -> None:
        """Integers of integers."""
        if x.target in _SAME or x.target is aten.expand.default:
            self.values[x] = self.values[x.all_input_nodes[0]]
            return
        dtype = x.meta.get("dtype")
        twin = self._twin[x]
        same = all(a == b for a, b in zip(_numbers(x), _numbers(twin), strict=True))
        counts = dtype is torch.int64 and same and len(self._shapes[x]) == 1
        self.values[x] = CountedRows(x) if counts else None

    def _sums_rows(self, x: fx.Node) -> bool:
        """Whether it adds up all rows of a matrix, or multiplies those of two."""
        args: Any = x.args
        if x.target is aten.mm.default:
            return args[0].target is aten.t.default
        if x.target is not aten.sum.dim_IntList:
            return False
        like = self.like(args[0])
        return like.kind != NO_ROWS and sorted(args[1]) == list(range(like.lead))

    def _view(self, x: fx.Node) -> None:
        args: Any = x.args
        known = self.values.get(args[0])
        if isinstance(known, Constant) or known is None:
            self.values[x] = known
            return
        if x.target is aten._to_copy.default and x.meta["dtype"] is not self._dtype:
            raise Refused("numbers of another dtype")
        like = self.like(x)
        if isinstance(known, HeldValue):
            alike = lie_alike(self.like(args[0]), like) and math.prod(known.tail) == like.width
            if (like.kind, like.times) == (MEMBERS, 1) and alike:
                self.values[x] = replace(known, tail=like.tail)
                return
        self._view_rows(x, args[0], like)

    def _view_rows(self, x: fx.Node, source: fx.Node, like: Axes) -> None:
        value, late = self.value(source, late=self.late(x)), self.late(x)
        if value.kind == NO_ROWS:
            self.values[x] = replace(value, tail=like.tail) if like.kind == NO_ROWS else None
            if like.kind != NO_ROWS or like.width != value.width:
                self.values[x] = self.fit(source, like, late=late)
        elif x.target is aten.expand.default:
            self.values[x] = self.fit(source, like, late=late)
        elif (like.kind, like.times) == (value.kind, value.times):
            if not lie_alike(self.like(source), like):
                raise Refused("members become something else")
            self.values[x] = replace(value, tail=like.tail)
        elif like.kind == value.kind:
            value = self.dense(value, late=late)
            self.values[x] = replace(value, row=like.width, times=like.times, tail=like.tail)
        else:
            raise Refused("rows of one kind are taken for rows of another")

    def _arithmetic(self, x: fx.Node) -> None:
        target: Any = x.target
        args: list[Any] = [self._plain_number(a) for a in x.args]
        if x.kwargs and dict(x.kwargs) != {"approximate": "none"}:
            raise Refused(f"{target} with options")
        if target in ONE and len(args) == 1:
            self._elementwise(x, ONE[target], args)
            return
        number = args[1] if len(args) == 2 else None
        if isinstance(number, (int, float)) and target in NUMBERS:
            _same_numbers(x, self._twin[x])
            op, number = NUMBERS[target](float(number))
            if (op, number) in ((Op.TIMES_NUMBER, 1.0), (Op.ADD_NUMBER, 0.0)):
                self.values[x] = self.fit(args[0], self.like(x), late=self.late(x))
            else:
                self._elementwise(x, op, args[:1], number)
        elif target in TWO and len(args) == 2:
            first = args[0]
            if isinstance(first, float):
                swapped = {Op.ADD: Op.ADD_NUMBER, Op.MUL: Op.TIMES_NUMBER, Op.SUB: Op.NUMBER_LESS}
                if TWO[target] not in swapped:
                    raise Refused(f"{target} of a number")
                self._elementwise(x, swapped[TWO[target]], args[1:], first)
            else:
                self._elementwise(x, TWO[target], args, ones=1)
        else:
            raise Refused(f"{target} has no steps")

    def _plain_number(self, x: Any) -> Any:
        """An argument, or the number that it is everywhere."""
        known = self.values.get(x) if isinstance(x, fx.Node) else None
        return known.number if isinstance(known, Constant) else x

    def weight(self, x: Any) -> tuple[RaggedValue, int, int]:
        """What a product reads of an operand, its depth and its width."""
        turned = True
        while isinstance(x, fx.Node) and x.target is aten.t.default:
            turned, x = not turned, x.args[0]
        if x not in self.operands:
            raise Refused("a product of what is no weight")
        k = self.operands.index(x)
        out, into = self._shapes[x]
        role: Role = "turned" if turned else "weight"
        found = self._weights.setdefault(
            (k, turned), Buffer(NO_ROWS, out * into, role=role, number=k)
        )
        depth, width = (out, into) if turned else (into, out)
        return RaggedValue(found, 0, 0, NO_ROWS, 1, (out, into)), depth, width

    def _product(self, x: fx.Node) -> None:
        args: Any = x.args
        if self._sums_rows(x):
            self.values[x] = None
            return
        *bias, rows, weight = args
        late, like = self.late(x), self.like(x)
        packed, depth, width = self.weight(weight)
        value = self.full(self.value(rows, late=late), late=late)
        if x.kwargs or value.tail != (depth,) or value.kind == NO_ROWS or like.tail != (width,):
            raise Refused("a product of other than rows and a weight")
        added = None
        if bias:
            added = self.value(bias[0], late=late)
            if added.kind != NO_ROWS or added.tail != (width,):
                raise Refused("a product with a bias of rows")
        out = self.values[x] = self.room(like, late=late)
        self.plain(Op.PRODUCT, out, value, packed, added, many=depth, late=late)

    def _axis(self, x: fx.Node, dim: int) -> int:
        """Which axis of the tail."""
        like = self.like(x)
        at = dim % len(self._shapes[x]) - like.lead
        if at < 0 or like.kind == NO_ROWS or math.prod(like.tail[:at]) != 1:
            raise Refused("an axis of rows is cut")
        return at

    def _part(
        self, x: fx.Node, value: RaggedValue, at: int, start: int, tail: tuple[int, ...]
    ) -> RaggedValue:
        inner = math.prod(value.tail[at + 1 :])
        return replace(value, at=value.at + start * inner, tail=tail)

    def _slice(self, x: fx.Node) -> None:
        args: Any = x.args
        dim = args[1] if len(args) > 1 else 0
        source = args[0]
        if self._shapes[x] == self._shapes[source]:
            self._view(x)
            return
        _same_numbers(x, self._twin[x])
        if len(args) > 4 and args[4] != 1:
            raise Refused("a slice with gaps")
        at = self._axis(source, dim)
        late = self.late(x)
        value = self.full(self.value(source, late=late), late=late)
        start = args[2] if len(args) > 2 and args[2] is not None else 0
        start = start + value.tail[at] if start < 0 else start
        self.values[x] = self._part(x, value, at, start, self.like(x).tail)

    def _select(self, x: fx.Node) -> None:
        source, dim, which = x.args
        _same_numbers(x, self._twin[x])
        assert isinstance(source, fx.Node)
        assert isinstance(dim, int)
        assert isinstance(which, int)
        if self.like(source).lead == TURNED and self.like(source).tail == (1,) and dim == 1:
            self._view(x)
            return
        at, late = self._axis(source, dim), self.late(x)
        value = self.full(self.value(source, late=late), late=late)
        self.values[x] = self._part(x, value, at, which % value.tail[at], self.like(x).tail)

    def _split(self, x: fx.Node) -> None:
        args: Any = x.args
        dim = args[2] if len(args) > 2 else 0
        at, late = self._axis(args[0], dim), self.late(x)
        _same_numbers(x, self._twin[x])
        value, sizes = self.full(self.value(args[0], late=late), late=late), args[1]
        if isinstance(sizes, int):
            whole = value.tail[at]
            sizes = [min(sizes, whole - begin) for begin in range(0, whole, sizes)]
        found, start = [], 0
        for size in sizes:
            tail = (*value.tail[:at], size, *value.tail[at + 1 :])
            found.append(self._part(x, value, at, start, tail))
            start += size
        self.values[x] = found

    def _item(self, x: fx.Node) -> None:
        args: Any = x.args
        found = self.values.get(args[0])
        self.values[x] = found[args[1]] if isinstance(found, list) else None

    def _cat(self, x: fx.Node) -> None:
        args: Any = x.args
        late, like = self.late(x), self.like(x)
        dim = args[1] if len(args) > 1 else 0
        at = self._axis(x, dim)
        out, start = self.room(like, late=late), 0
        for y in args[0]:
            piece = self.full(self.value(y, late=late), late=late)
            if (piece.kind, piece.times) != (like.kind, like.times):
                raise Refused("rows of two kinds side by side")
            home = self._part(x, out, at, start, piece.tail)
            self.plain(Op.COPY, home, piece, late=late)
            start += piece.tail[at]
        self.values[x] = out

    def _put_back(self, x: fx.Node) -> None:
        """The gradient of a part."""
        args: Any = x.args
        _same_numbers(x, self._twin[x], but=1)
        late, like = self.late(x), self.like(x)
        if like.lead == TURNED and like.tail == (1,) and args[2] == 1:
            self._view(x)
            return
        at = self._axis(x, args[2])
        piece = self.full(self.value(args[0], late=late), late=late)
        if len(args) > 5 and args[5] != 1:
            raise Refused("a slice with gaps")
        if piece.width == like.width:
            self.values[x] = replace(piece, tail=like.tail)
            return
        out, start = self.room(like, late=late), args[3]
        start = start + like.tail[at] if start < 0 else start
        self.plain(Op.ZERO, out, late=late)
        self.plain(Op.COPY, self._part(x, out, at, start, piece.tail), piece, late=late)
        self.values[x] = out

    def _sum(self, x: fx.Node) -> None:
        args: Any = x.args
        if self._sums_rows(x):
            self.values[x] = None
            return
        if x.kwargs:
            raise Refused("a sum of another dtype")
        like, late, rank = self.like(args[0]), self.late(x), len(self._shapes[args[0]])
        dims = sorted(d % rank for d in args[1])
        value = self.full(self.value(args[0], late=late), late=late)
        out = self.room(self.like(x), late=late)
        over = (like.lead, dims) in ((PADDED, [1]), (TURNED, [2]))
        if over and x.target is aten.sum.dim_IntList:
            self.step(Way.SUM_OVER, out, value, kind=BUNDLES, late=late, inside=True)
        elif dims and dims[0] >= max(like.lead, 1) and dims == list(range(dims[0], dims[-1] + 1)):
            first, last = dims[0] - like.lead, dims[-1] - like.lead
            many = math.prod(like.tail[first : last + 1])
            inner = math.prod(like.tail[last + 1 :])
            number = 1 / many if x.target is aten.mean.dim else 1.0
            self.plain(Op.REDUCE, out, value, number=number, many=many, inner=inner, late=late)
        else:
            raise Refused("a sum over rows")
        self.values[x] = out

    def _softmax(self, x: fx.Node) -> None:
        args: Any = x.args
        back = x.target in (
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
        )
        log = x.target in (aten._log_softmax.default, aten._log_softmax_backward_data.default)
        late, like = self.late(x), self.like(x)
        reads = [self.full(self.value(y, late=late), late=late) for y in args[: 2 if back else 1]]
        dim = args[2 if back else 1] % len(self._shapes[x])
        if not back and len(args) > 2 and args[2]:
            raise Refused("a softmax of another dtype")
        out = self.room(like, late=late)
        if (like.lead, dim) in ((PADDED, 1), (TURNED, 2)):
            way = (Way.LOG_SOFT_BACK if log else Way.SOFT_BACK) if back else Way.SOFT
            way = Way.LOG_SOFT if log and not back else way
            self.step(way, out, *reads, kind=BUNDLES, late=late, inside=True)
        elif dim == len(self._shapes[x]) - 1 and len(like.tail) == 1 and not log:
            self.plain(Op.SOFTMAX_BACK if back else Op.SOFTMAX, out, *reads, late=late)
        else:
            raise Refused("a softmax over other than members, or the last axis")
        self.values[x] = out

    def _turn(self, x: fx.Node) -> None:
        """Two axes change places: of members and what each has, or of one that is of one."""
        (source, *_), like, known = x.all_input_nodes, self.like(x), None
        known, mine = self.values.get(source), self.like(source)
        if isinstance(known, Constant):
            self.values[x] = known
            return
        if self._keeps_order(x, source):
            self._view(x)
            return
        if like.kind == MEMBERS:
            fits = {mine.lead, like.lead} == {PADDED, TURNED} and mine.tail == like.tail
        else:
            fits = mine.tail[::-1] == like.tail and len(like.tail) == 2 and 1 in like.tail
        if not fits or (like.kind, like.times) != (mine.kind, mine.times):
            raise Refused("axes change places")
        if isinstance(known, HeldValue):
            self.values[x] = known
        else:
            self.values[x] = replace(self.value(source, late=self.late(x)), tail=like.tail)

    def _keeps_order(self, x: fx.Node, source: fx.Node) -> bool:
        """Whether only axes of one entry change places."""
        args: Any = x.args
        shape = self._shapes[source]
        order = list(range(len(shape)))
        if x.target is aten.permute.default:
            order = [k % len(shape) for k in args[1]]
        else:
            a, b = args[1] % len(shape), args[2] % len(shape)
            order[a], order[b] = order[b], order[a]
        long = [k for k in order if shape[k] != 1]
        return long == sorted(long)

    def _matrices(self, x: fx.Node) -> None:
        """Products of a matrix for each row, of which one is of members and one but a vector."""
        a, b = x.all_input_nodes if len(x.all_input_nodes) == 2 else (x.args[0], x.args[1])
        assert isinstance(a, fx.Node)
        assert isinstance(b, fx.Node)
        late, like, one, other = self.late(x), self.like(x), self.like(a), self.like(b)
        left, right = (self.full(self.value(y, late=late), late=late) for y in (a, b))
        if (one.lead, other.lead) == (TURNED, PADDED):  # (p, members) times (members, r)
            p, r = one.tail[0], other.tail[0]
            rows, numbers = (right, left) if p == 1 else (left, right)
            out = self.room(like, late=late)
            each = self._times(rows, numbers, like.width, late=late)
            self.step(Way.SUM_OVER, out, each, kind=BUNDLES, late=late, inside=True)
            fits = 1 in (p, r)
        elif one.lead == PADDED and other.kind == BUNDLES:  # (members, q) times (q, r)
            q, r = other.tail
            out = self._met(left, right, q, r, like, late=late)
            fits = 1 in (q, r)
        elif one.kind == BUNDLES and other.lead == TURNED:  # (p, q) times (q, members)
            p, q = one.tail
            out = self._met(right, left, q, p, like, late=late)
            fits = 1 in (p, q)
        else:
            fits = False
        if not fits:
            raise Refused("a product of matrices")
        self.values[x] = replace(out, tail=like.tail)

    def _times(
        self, rows: RaggedValue, numbers: RaggedValue, width: int, *, late: bool
    ) -> RaggedValue:
        """Members times a number each."""
        out = self.room(Axes(MEMBERS, 1, (width,), 1), late=late)
        many = replace(numbers, tail=(width,), one=width > 1)
        self.plain(Op.MUL, out, replace(rows, tail=(width,)), many, late=late)
        return out

    def _met(
        self, members: RaggedValue, rows: RaggedValue, q: int, width: int, like: Axes, *, late: bool
    ) -> RaggedValue:
        """Members, with q entries each, times what their bundle has: q entries, or as many as
        wide for one."""
        if width == 1:
            spread = self.spread(replace(rows, tail=(q,)), late=late)
            each = self.room(Axes(MEMBERS, 1, (q,), 1), late=late)
            self.plain(Op.MUL, each, replace(members, tail=(q,)), spread, late=late)
            out = self.room(like, late=late)
            self.plain(Op.REDUCE, out, each, number=1.0, many=q, inner=1, late=late)
            return out
        if q != 1:
            raise Refused("a product of matrices")
        spread = self.spread(replace(rows, tail=(width,)), late=late)
        return self._times(spread, members, width, late=late)

    def _embed(self, x: fx.Node) -> None:
        args: Any = x.args
        index = args[1][0] if isinstance(args[1], (list, tuple)) else args[1]
        self._take(x, args[0], index)

    def _index_select(self, x: fx.Node) -> None:
        args: Any = x.args
        if args[1] != 0:
            raise Refused("an axis of rows is cut")
        self._take(x, args[0], args[2])

    def _take(self, x: fx.Node, source: fx.Node, index: Any) -> None:
        """Rows by number, of rows or of a table."""
        found = self.ints_of(index) if isinstance(index, fx.Node) else None
        late, like = self.late(x), self.like(x)
        value = self.full(self.value(source, late=late), late=late)
        if found is None or like.kind == NO_ROWS:
            raise Refused("rows are taken by numbers that are computed")
        base, rows = found
        if (rows.kind, rows.times) != (like.kind, like.times):
            raise Refused("rows are taken by numbers of several axes")
        if value.kind == NO_ROWS:
            if len(value.tail) != 2 or value.buffer.role != "operand":
                raise Refused("a table that is no weight")
            numbers = RaggedValue(self.ints(base), 0, 1, rows.kind, rows.times, ())
            if like.width != value.tail[1]:
                raise Refused("a table by numbers of several axes")
            out = self.room(like, late=late)
            self.plain(Op.EMBED, out, numbers, value, many=value.tail[0], late=late)
        elif base is self._segment and (value.kind, value.times) == (BUNDLES, 1):
            out = replace(self.spread(value, late=late), tail=like.tail)
        else:
            out = self.room(like, late=late)
            self.step(
                Way.TAKE,
                out,
                value,
                kind=like.kind,
                times=like.times,
                source=value.kind,
                source_times=value.times,
                index=self.ints(base),
                late=late,
            )
        self.values[x] = out

    def _index_add(self, x: fx.Node) -> None:
        args: Any = x.args
        if x.target is aten.index_put.default:
            if len(args[1]) != 1 or len(args) < 4 or not args[3]:
                raise Refused("rows are written over")
            base, index, source = args[0], args[1][0], args[2]
        else:
            base, dim, index, source = args
            if dim != 0 or x.kwargs:
                raise Refused("an axis of rows is cut")
        self.add_at(x, base, index, source)

    def add_at(self, x: fx.Node, base: fx.Node, index: Any, source: fx.Node) -> None:
        """Rows added to others by number."""
        like, late = self.like(x), self.late(x)
        if like.kind == NO_ROWS:
            self.values[x] = None  # of a table: the gradient of a weight
            return
        found = self.ints_of(index) if isinstance(index, fx.Node) else None
        if found is None:
            raise Refused("rows are added by numbers that are computed")
        numbers, rows = found
        value = self.full(self.value(source, late=late), late=late)
        if (rows.kind, rows.times) != (value.kind, value.times) or value.width != like.width:
            raise Refused("rows are added by numbers of several axes")
        begun = self.values.get(base)
        empty = isinstance(begun, Constant) and begun.number == 0
        out = self.room(like, late=late)
        whole = numbers is self._segment and (like.kind, like.times) == (BUNDLES, 1)
        if empty and whole and (value.kind, value.times) == (MEMBERS, 1):
            self.step(Way.SUM_OVER, out, value, kind=BUNDLES, late=late, inside=True)
        else:
            if empty:
                self.plain(Op.ZERO, out, late=late)
            else:
                self.plain(Op.COPY, out, self.fit(base, like, late=late), late=late)
            self.step(
                Way.ADD_AT,
                out,
                value,
                kind=value.kind,
                times=value.times,
                source=like.kind,
                source_times=like.times,
                index=self.ints(numbers),
                late=late,
            )
        self.values[x] = out

    def _gather(self, x: fx.Node) -> None:
        """One member of each bundle, or rows by number."""
        args: Any = x.args
        source, dim, index = args[:3]
        like, late = self.like(x), self.late(x)
        if dim == 0:
            self._take(x, source, index)
            return
        found, of = self.ints_of(index), self.like(source)
        single = found is not None and found[1] == Axes(BUNDLES, 1, (), 1)
        if found is None or not single or dim != 1 or of.lead != PADDED or x.kwargs:
            raise Refused("an axis is gathered")
        if like.kind != BUNDLES or like.width != of.width:
            raise Refused("an axis is gathered")
        out = self.values[x] = self.room(like, late=late)
        ints, known = self.ints(found[0]), self.values.get(source)
        cells, of_kind = None, MEMBERS
        if isinstance(known, HeldValue):  # that member alone is read
            at = self.held(known.number, like.width)
            value = RaggedValue(at, 0, like.width, HELD, 1, known.tail)
            cells, of_kind = self.cells, HELD
        else:
            value = self.full(self.value(source, late=late), late=late)
        self.step(
            Way.TAKE_INSIDE,
            out,
            value,
            kind=BUNDLES,
            source=of_kind,
            index=ints,
            inside=True,
            cells=cells,
            late=late,
        )

    def _scatter(self, x: fx.Node) -> None:
        """``_gather`` back."""
        args: Any = x.args
        base, dim, index, source = args
        like, late = self.like(x), self.late(x)
        if dim == 0:
            self.add_at(x, base, index, source)
            return
        found, begun = self.ints_of(index), self.values.get(base)
        single = found is not None and found[1] == Axes(BUNDLES, 1, (), 1)
        if found is None or not single or dim != 1 or like.lead != PADDED:
            raise Refused("an axis is scattered")
        value = self.full(self.value(source, late=late), late=late)
        if not isinstance(begun, Constant) or begun.number or value.width != like.width:
            raise Refused("an axis is scattered")
        out = self.values[x] = self.room(like, late=late)
        self.plain(Op.ZERO, out, late=late)
        ints = self.ints(found[0])
        self.step(
            Way.ADD_INSIDE,
            out,
            value,
            kind=BUNDLES,
            source=MEMBERS,
            index=ints,
            inside=True,
            late=late,
        )

    def _fill(self, x: fx.Node) -> None:
        source, mask, number = x.args
        if not isinstance(number, (int, float)):
            raise Refused("filled with other than a number")
        known = self._plain_number(mask)
        if isinstance(known, float):
            if known:
                self.values[x] = Constant(float(number))
            else:
                self.values[x] = self.fit(source, self.like(x), late=self.late(x))
            return
        self._elementwise(x, Op.FILL, [source, mask], float(number), ones=1)

    def _where(self, x: fx.Node) -> None:
        mask, one, other = x.args
        known = self._plain_number(mask)
        if isinstance(known, float):
            which = one if known else other
            number = self._plain_number(which)
            if isinstance(number, float):
                self.values[x] = Constant(number)
            else:
                self.values[x] = self.fit(which, self.like(x), late=self.late(x))
            return
        self._elementwise(x, Op.WHERE, [mask, one, other])

    def _not(self, x: fx.Node) -> None:
        known = self._plain_number(x.args[0])
        if isinstance(known, float):
            self.values[x] = Constant(1.0 - known)
        else:
            self._elementwise(x, Op.NUMBER_LESS, x.args, 1.0)

    def _power(self, x: fx.Node) -> None:
        if len(x.args) != 2 or x.args[1] != 2:
            raise Refused("a power other than a square")
        self._elementwise(x, Op.SQUARE, x.args[:1])

    def _threshold(self, x: fx.Node) -> None:
        args: Any = x.args
        self._elementwise(x, Op.THRESHOLD_BACK, args[:2], float(args[2]))

    def _table_back(self, x: fx.Node) -> None:
        self.values[x] = None  # the gradient of a weight


def _numbers(x: fx.Node) -> list[Any]:
    """Arguments of a node that are no nodes."""
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for each in value:
                look(each)
        elif not isinstance(value, fx.Node):
            found.append(value)

    look(list(x.args))
    look(list(x.kwargs.values()))
    return found


def _same_numbers(x: fx.Node, twin: fx.Node, but: int | None = None) -> None:
    """Raises:
    Refused: It depends on how many rows there are.
    """
    for k, (a, b) in enumerate(zip(x.args, twin.args, strict=True)):
        if k != but and not isinstance(a, (fx.Node, tuple, list)) and a != b:
            raise Refused(f"{x.target} with {a} in one trace and {b} in another")


_Way: TypeAlias = Callable[[Lowering, fx.Node], None]
_WAYS: Final[Mapping[Any, _Way]] = {
    aten.mm.default: Lowering._product,
    aten.addmm.default: Lowering._product,
    aten.slice.Tensor: Lowering._slice,
    aten.select.int: Lowering._select,
    aten.split.Tensor: Lowering._split,
    aten.unsafe_split.Tensor: Lowering._split,
    aten.split_with_sizes.default: Lowering._split,
    operator.getitem: Lowering._item,
    aten.cat.default: Lowering._cat,
    aten.transpose.int: Lowering._turn,
    aten.permute.default: Lowering._turn,
    aten.bmm.default: Lowering._matrices,
    aten.slice_backward.default: Lowering._put_back,
    aten.select_backward.default: Lowering._put_back,
    aten.sum.dim_IntList: Lowering._sum,
    aten.mean.dim: Lowering._sum,
    aten._softmax.default: Lowering._softmax,
    aten._safe_softmax.default: Lowering._softmax,
    aten._log_softmax.default: Lowering._softmax,
    aten._softmax_backward_data.default: Lowering._softmax,
    aten._log_softmax_backward_data.default: Lowering._softmax,
    aten.embedding.default: Lowering._embed,
    aten.index.Tensor: Lowering._embed,
    aten.index_select.default: Lowering._index_select,
    aten.index_add.default: Lowering._index_add,
    aten.index_put.default: Lowering._index_add,
    aten.gather.default: Lowering._gather,
    aten.scatter_add.default: Lowering._scatter,
    aten.masked_fill.Scalar: Lowering._fill,
    aten.where.self: Lowering._where,
    aten.bitwise_not.default: Lowering._not,
    aten.logical_not.default: Lowering._not,
    aten.pow.Tensor_Scalar: Lowering._power,
    aten.threshold_backward.default: Lowering._threshold,
    aten.embedding_dense_backward.default: Lowering._table_back,
}

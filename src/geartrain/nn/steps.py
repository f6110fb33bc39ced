"""From the two graphs of a trace to steps in C, where every operator in them has one.

    forward graph  ─► steps     what is kept for the backward alone lies side by side, column by
    backward graph ─► steps     column, in one block
    an operator that has no step, or rows that are not first ─► None: torch runs them

A value is a place: so many entries of each row of some tensor. Parts, views and items are places in
another's tensor, and cost nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast, final

import torch
from torch import fx

from geartrain.native.fused import At, Op, Step, Steps
from geartrain.nn.fused import MadeTensor, Pair, Routine
from geartrain.nodes.products import affine, times

aten = torch.ops.aten

MOST_WEIGHTS: Final = 1 << 18
"""Entries of all weights in products: of larger ones nearly all the time is theirs, and they would
be packed for each firing."""


class _Refused(Exception):
    """There are no steps for it."""


@final
@dataclass(frozen=True, slots=True)
class Like:
    """What is known of a tensor in a trace.

    Args:
        tail: Its shape, without the rows if it has any.
        rows: Whether it has one row for each row, first axis.
        dtype: Of it.
    """

    tail: tuple[int, ...]
    rows: bool
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return math.prod(self.tail)


def fuse(forward: fx.Graph, backward: fx.Graph, operands: int, outputs: int) -> Pair | None:
    """Both graphs as steps; None: something in them has none.

    Args:
        forward: Of the number of rows, operands and inputs; nodes know what they are ``Like``.
        backward: Of the number of rows, operands, residuals and tangents.
        operands, outputs: How many.
    """
    try:
        return _Both(forward, backward, operands, outputs).pair()
    except _Refused:
        return None


@final
class _Both:
    """Residuals that nobody but the backward's steps reads lie side by side in one tensor."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph, operands: int, outputs: int) -> None:
        self._graphs = forward, backward
        self._operands, self._outputs = operands, outputs

    def pair(self) -> Pair:
        forward, backward = self._graphs
        results = _results(forward)
        kept = results[self._outputs :]
        places = _placeholders(backward)[1 + self._operands :]
        ways = set(_results(backward))
        likes = {_like(x) for x in (*results, *_results(backward))}
        found = {like.dtype for like in likes if like.dtype.is_floating_point}
        if len(found) != 1:
            raise _Refused
        (dtype,) = found
        if dtype not in (torch.float32, torch.float64):
            raise _Refused
        block: list[int] = []
        own: list[int] = []
        for k, x in enumerate(kept):
            alone = x.op == "placeholder" or x in results[: self._outputs] or places[k] in ways
            (own if alone else block).append(k)
        columns, width = {}, 0
        for k in block:
            columns[k] = width
            width += _like(kept[k]).width
        one = _Steps(forward, self._operands, dtype)
        first = one.routine(
            [*results[: self._outputs], *(kept[k] for k in own)],
            {kept[k]: at for k, at in columns.items()},
            width,
        )
        order = [*(places[k] for k in own), *([None] if block else [])]
        order += places[len(kept) :]
        other = _Steps(backward, self._operands, dtype)
        other.given_as(order, {places[k]: at for k, at in columns.items()}, width)
        return Pair(first, other.routine(_results(backward), {}, 0), dtype)


@final
@dataclass(frozen=True, slots=True)
class _Value:
    """Entries of each row of a slot."""

    at: At
    like: Like

    def part(self, first: int, tail: tuple[int, ...]) -> _Value:
        at = replace(self.at, at=self.at.at + first)
        return _Value(at, replace(self.like, tail=tail))


@final
class _Steps:
    """One graph on its way to steps."""

    def __init__(self, graph: fx.Graph, operands: int, dtype: torch.dtype) -> None:
        self._graph, self._operands, self._dtype = graph, operands, dtype
        self._places = _placeholders(graph)[1:]
        self._order: list[fx.Node | None] = list(self._places[operands:])
        self._columns: Mapping[fx.Node, int] = {}
        self._width = 0
        self._values: dict[fx.Node, Any] = {}
        self._room: list[int] = []
        self._steps: list[Step] = []
        self._given: list[tuple[int, int, int, bool]] = []
        self._weights: dict[tuple[int, bool], int] = {}
        self._weighed = 0
        self._made: list[MadeTensor] = []
        self._homes: dict[fx.Node, _Value] = {}
        self._free: dict[int, list[int]] = {}
        self._owned: dict[fx.Node, int] = {}
        self._last = _last_uses(graph)

    def given_as(
        self, order: Sequence[fx.Node | None], columns: Mapping[fx.Node, int], width: int
    ) -> None:
        """Which placeholders arguments are, and where in the one that is None the others lie."""
        self._order, self._columns, self._width = list(order), columns, width

    def routine(
        self, results: Sequence[fx.Node], columns: Mapping[fx.Node, int], width: int
    ) -> Routine:
        """The program.

        Args:
            results: Each a tensor.
            columns: Results that lie side by side in one more tensor, and where.
            width: Of that.
        """
        self._take_arguments()
        found = self._make_results(results)
        if width:
            found.append(~len(self._made))
            self._made.append(MadeTensor(self._slot(0), (width,), True))
            for x, at in columns.items():
                self._homes[x] = _Value(At(self._made[-1].slot, at, width), _like(x))
        for number, x in enumerate(self._graph.nodes):
            if x.op == "call_function" and x.target is not operator.mul:
                self._convert(x)
                home = self._homes.get(x)
                if home is not None and self._values.get(x) is not home:
                    self._copy(self._values.get(x), home)
            for y in self._last.get(number, ()):
                self._release(y)
        if self._weighed > MOST_WEIGHTS:
            raise _Refused
        return Routine(
            Steps(self._steps, self._room, self._dtype),
            len(self._room),
            self._dtype,
            [(k, slot) for k, slot, *_ in self._given if k < self._operands],
            [(k, turned, slot) for (k, turned), slot in self._weights.items()],
            [given for given in self._given if given[0] >= self._operands],
            self._made,
            found,
        )

    def _make_results(self, results: Sequence[fx.Node]) -> list[int]:
        """Which argument each is, or what is made."""
        numbers: dict[fx.Node, int] = {}
        for x in results:
            if x not in self._argument and x not in numbers:
                if not _like(x).dtype.is_floating_point:
                    raise _Refused
                numbers[x] = ~len(self._made)
                self._home(x, _like(x))
        return [self._argument[x] if x in self._argument else numbers[x] for x in results]

    def _take_arguments(self) -> None:
        self._argument = {x: k for k, x in enumerate(self._places[: self._operands])}
        for k, x in enumerate(self._order):
            if x is not None:
                self._argument[x] = self._operands + k
        self._slots: dict[int, int] = {}

    # Where tensors lie.

    def _slot(self, room: int) -> int:
        self._room.append(room)
        return len(self._room) - 1

    def _home(self, x: fx.Node, like: Like) -> None:
        """A tensor of its own."""
        slot = self._slot(0)
        self._made.append(MadeTensor(slot, like.tail, like.rows))
        self._homes[x] = _Value(At(slot, 0, like.width if like.rows else 0), like)

    def _of_argument(self, k: int, width: int, *, whole: bool = False) -> int:
        slot = self._slots.get(k)
        if slot is None:
            slot = self._slots[k] = self._slot(0)
            self._given.append((k, slot, width, whole))
        return slot

    def _value(self, x: Any) -> _Value:
        """Where the numbers of a node lie."""
        if not isinstance(x, fx.Node):
            raise _Refused
        found = self._values.get(x)
        if found is not None:
            if not isinstance(found, _Value):
                raise _Refused
            return found
        like = _like(x)
        if x in self._columns:
            k = self._operands + self._order.index(None)
            at = At(self._of_argument(k, self._width), self._columns[x], self._width)
            found = _Value(at, like)
        elif x in self._argument:
            k = self._argument[x]
            if like.dtype is not self._dtype:
                raise _Refused
            width = like.width if like.rows else 0
            found = _Value(At(self._of_argument(k, width), 0, width), like)
        else:
            raise _Refused
        self._values[x] = found
        return found

    def _weight(self, x: Any, *, turned: bool) -> tuple[At, int, int]:
        """What a product reads of an operand, its depth and its width."""
        if not isinstance(x, fx.Node) or x not in self._places[: self._operands]:
            raise _Refused
        like, k = _like(x), self._argument[x]
        if len(like.tail) != 2 or like.dtype is not self._dtype:
            raise _Refused
        slot = self._weights.get((k, turned))
        if slot is None:
            slot = self._weights[k, turned] = self._slot(0)
            self._weighed += like.width
        out, into = like.tail
        return At(slot), (out if turned else into), (into if turned else out)

    def _out(self, x: fx.Node, like: Like | None = None) -> _Value:
        """Where a node's numbers are to be written."""
        home = self._homes.get(x)
        if home is None:
            like = like or _like(x)
            if not like.rows or not like.width:
                raise _Refused
            free = self._free.get(like.width)
            slot = free.pop() if free else self._slot(like.width)
            self._owned[x] = slot
            home = _Value(At(slot, 0, like.width), like)
        return home

    def _release(self, x: fx.Node) -> None:
        """Nobody reads this node any more."""
        slot = self._owned.pop(x, None)
        if slot is not None:
            self._free.setdefault(self._room[slot], []).append(slot)

    # Operators.

    def _convert(self, x: fx.Node) -> None:
        target: Any = x.target
        if target in _VIEWS:
            self._values[x] = _VIEWS[target](self, x)
            return
        if target in _WAYS:
            _WAYS[target](self, x)
            return
        if target not in _NUMBERS and target not in _ONE and target not in _TWO:
            raise _Refused
        args: Any = x.args
        if x.kwargs and dict(x.kwargs) != {"approximate": "none"}:
            raise _Refused
        if target in _ONE and len(args) == 1:
            self._step(x, _ONE[target], [args[0]])
        elif target in _NUMBERS and isinstance(args[1], (int, float)) and len(args) == 2:
            op, number = _NUMBERS[target](float(args[1]))
            self._step(x, op, [args[0]], number)
        elif target in _TWO and len(args) == 2:
            self._step(x, _TWO[target], args)
        else:
            raise _Refused

    def _step(
        self, x: fx.Node, op: Op, sources: Sequence[Any], number: float = 0.0, *, all_: bool = False
    ) -> None:
        """An element-wise step."""
        like = _like(x)
        read = [self._broadcast(self._value(y), like) for y in sources]
        if sum(at.one for at in read) > (0 if all_ or len(read) == 1 else 1):
            raise _Refused
        out = self._out(x)
        self._values[x] = out
        self._add(op, out, *read, number=number)

    def _broadcast(self, value: _Value, like: Like) -> At:
        """Where it is read for a result like this."""
        tail = value.like.tail
        if not like.rows:
            raise _Refused
        if not value.like.rows and len(tail) == len(like.tail) + 1 and tail[0] == 1:
            tail = tail[1:]
        if tail == like.tail:
            return value.at
        ranks = len(tail) == len(like.tail) or not value.like.rows
        if ranks and math.prod(tail) == 1:
            return replace(value.at, one=like.width > 1)
        raise _Refused

    def _add(
        self,
        op: Op,
        out: _Value,
        *read: At,
        number: float = 0.0,
        width: int = 0,
        many: int = 0,
        inner: int = 0,
    ) -> None:
        step = Step(op, width or out.like.width, (out.at, *read), many, inner, number)
        self._steps.append(step)

    def _copy(self, value: Any, home: _Value) -> None:
        if not isinstance(value, _Value) or not (value.like.rows or not home.like.rows):
            raise _Refused
        self._add(Op.COPY, home, value.at)

    def _product(self, x: fx.Node, *, turned: bool) -> None:
        args: Any = x.args
        rows = self._value(args[0])
        weight, depth, width = self._weight(args[1], turned=turned)
        bias = At()
        if not turned and args[2] is not None:
            bias = self._value(args[2]).at
            if _like(args[2]).rows or _like(args[2]).tail != (width,):
                raise _Refused
        if rows.like.tail != (depth,) or not rows.like.rows:
            raise _Refused
        out = self._values[x] = self._out(x)
        self._add(Op.PRODUCT, out, rows.at, weight, bias, many=depth)

    def _embed(self, x: fx.Node) -> None:
        args: Any = x.args
        table, which = self._value(args[0]), _like(args[1])
        if table.like.rows or len(table.like.tail) != 2 or args[1] not in self._argument:
            raise _Refused
        if which != Like((), True, torch.int64):
            raise _Refused
        k = self._argument[args[1]]
        at = At(self._of_argument(k, 1, whole=True), 0, 1)
        out = self._values[x] = self._out(x)
        self._add(Op.EMBED, out, at, table.at, many=table.like.tail[0])

    def _cat(self, x: fx.Node) -> None:
        args: Any = x.args
        like = _like(x)
        dim = args[1] if len(args) > 1 else 0
        if dim % (len(like.tail) + 1) != 1:
            raise _Refused
        out, at = self._out(x), 0
        for y in args[0]:
            piece = self._value(y)
            if not piece.like.rows or piece.like.tail[1:] != like.tail[1:]:
                raise _Refused
            self._copy(piece, out.part(at, piece.like.tail))
            at += piece.like.width
        self._values[x] = out

    def _sum(self, x: fx.Node, *, mean: bool) -> None:
        args: Any = x.args
        if x.kwargs:
            raise _Refused
        source = self._value(args[0])
        tail = source.like.tail
        dims = sorted(d % (len(tail) + 1) for d in (args[1] or range(len(tail) + 1)))
        if not source.like.rows:
            raise _Refused
        if dims == [0] and not mean and x in self._homes:
            self._values[x] = self._homes[x]
            self._add(Op.SUM_OF_ROWS, self._homes[x], source.at)
            return
        if dims[0] == 0 or dims != list(range(dims[0], dims[-1] + 1)):
            raise _Refused
        many, inner = math.prod(tail[dims[0] - 1 : dims[-1]]), math.prod(tail[dims[-1] :])
        out = self._values[x] = self._out(x)
        number = 1 / many if mean else 1.0
        self._add(Op.REDUCE, out, source.at, number=number, many=many, inner=inner)

    def _softmax(self, x: fx.Node) -> None:
        args: Any = x.args
        source = self._value(args[0])
        if args[1] % 2 != 1 or len(source.like.tail) != 1 or args[2]:
            raise _Refused
        out = self._values[x] = self._out(x)
        self._add(Op.SOFTMAX, out, source.at)

    def _softmax_back(self, x: fx.Node) -> None:
        args: Any = x.args
        came, made = self._value(args[0]), self._value(args[1])
        if args[2] % 2 != 1 or len(came.like.tail) != 1 or not came.like.rows:
            raise _Refused
        out = self._values[x] = self._out(x)
        self._add(Op.SOFTMAX_BACK, out, came.at, made.at)

    def _items(self, x: fx.Node) -> dict[int, fx.Node]:
        """The readers of a tuple's items."""
        return {k: y for y in x.users if isinstance(k := y.args[1], int)}

    def _norm(self, x: fx.Node) -> None:
        args: Any = x.args
        source = self._value(args[0])
        if len(args[1]) != 1 or source.like.tail != (args[1][0],) or not source.like.rows:
            raise _Refused
        weight, bias = self._value(args[2]), self._value(args[3])
        small = replace(source.like, tail=(1,))
        items = self._items(x)
        found = [
            self._out(items.get(k, x), like) if k in items else self._spare(like)
            for k, like in enumerate((source.like, small, small))
        ]
        self._values[x] = found
        places = [source.at, weight.at, bias.at, found[1].at, found[2].at]
        self._add(Op.NORM, found[0], *places, number=args[4])

    def _spare(self, like: Like) -> _Value:
        return _Value(At(self._slot(like.width), 0, like.width), like)

    def _norm_back(self, x: fx.Node) -> None:
        args: Any = x.args
        came, source = self._value(args[0]), self._value(args[1])
        if (
            len(args[2]) != 1
            or came.like.tail != (args[2][0],)
            or source.like.tail != came.like.tail
        ):
            raise _Refused
        mean, less, weight = self._value(args[3]), self._value(args[4]), self._value(args[5])
        items = self._items(x)
        found: list[_Value | None] = [None] * 3
        if 0 in items:
            out = found[0] = self._out(items[0])
            self._add(Op.NORM_BACK, out, came.at, source.at, weight.at, mean.at, less.at)
        for k in (1, 2):
            if k in items:
                home = found[k] = self._homes.get(items[k])
                if home is None:
                    raise _Refused
                if k == 1:
                    self._add(Op.NORM_WEIGHT, home, came.at, source.at, At(), mean.at, less.at)
                else:
                    self._add(Op.SUM_OF_ROWS, home, came.at)
        self._values[x] = found

    def _threshold(self, x: fx.Node) -> None:
        args: Any = x.args
        self._step(x, Op.THRESHOLD_BACK, args[:2], float(args[2]))

    def _where(self, x: fx.Node) -> None:
        self._step(x, Op.WHERE, x.args, all_=True)

    def _fill(self, x: fx.Node) -> None:
        args: Any = x.args
        if not isinstance(args[2], (int, float)):
            raise _Refused
        self._step(x, Op.FILL, args[:2], float(args[2]))

    def _zeros(self, x: fx.Node) -> None:
        out = self._values[x] = self._out(x)
        self._add(Op.ZERO, out)

    def _slice_back(self, x: fx.Node) -> None:
        args: Any = x.args
        _, _, dim, start, end, step = args
        like, piece = _like(x), self._value(args[0])
        size = like.tail[0] if like.tail else 0
        if dim != 1 or step != 1 or not 0 <= start <= min(end, size) or not like.rows:
            raise _Refused
        out = self._values[x] = self._out(x)
        self._add(Op.ZERO, out)
        self._copy(piece, out.part(start * math.prod(like.tail[1:]), piece.like.tail))

    def _select_back(self, x: fx.Node) -> None:
        args: Any = x.args
        _, _, dim, index = args
        like, piece = _like(x), self._value(args[0])
        if dim != 1 or index < 0 or not like.rows:
            raise _Refused
        out = self._values[x] = self._out(x)
        self._add(Op.ZERO, out)
        self._copy(piece, out.part(index * math.prod(like.tail[1:]), piece.like.tail))

    def _power(self, x: fx.Node) -> None:
        if len(x.args) != 2 or x.args[1] != 2:
            raise _Refused
        self._step(x, Op.SQUARE, x.args[:1])

    def _expand(self, x: fx.Node) -> None:
        like, source = _like(x), self._value(x.args[0])
        tail = source.like.tail
        if tail == like.tail and source.like.rows == like.rows:
            self._values[x] = _Value(source.at, like)
            return
        if not source.like.rows or not like.rows or len(tail) != len(like.tail):
            raise _Refused
        wide = [k for k, (a, b) in enumerate(zip(tail, like.tail, strict=True)) if a != b]
        if wide != list(range(wide[0], wide[-1] + 1)):
            raise _Refused
        many = math.prod(like.tail[wide[0] : wide[-1] + 1])
        inner = math.prod(like.tail[wide[-1] + 1 :])
        out = self._values[x] = self._out(x)
        self._add(Op.EXPAND, out, source.at, width=source.like.width, many=many, inner=inner)

    # Views.

    def _same(self, x: fx.Node) -> _Value:
        like, source = _like(x), self._value(x.args[0])
        if like.rows != source.like.rows or like.width != source.like.width:
            raise _Refused
        return _Value(source.at, like)

    def _slice(self, x: fx.Node) -> _Value:
        args: Any = x.args
        source, dim = self._value(args[0]), args[1] if len(args) > 1 else 0
        like = _like(x)
        if not source.like.rows or not like.rows or len(args) > 4:
            raise _Refused
        if dim == 0 and like.tail == source.like.tail:
            return source
        start = args[2] if len(args) > 2 and args[2] is not None else 0
        if dim != 1 or not isinstance(start, int) or start < 0:
            raise _Refused
        return source.part(start * math.prod(like.tail[1:]), like.tail)

    def _select(self, x: fx.Node) -> _Value:
        args: Any = x.args
        source, like = self._value(args[0]), _like(x)
        if args[1] != 1 or args[2] < 0 or not source.like.rows or not like.rows:
            raise _Refused
        return source.part(args[2] * like.width, like.tail)

    def _split(self, x: fx.Node) -> list[_Value]:
        args: Any = x.args
        source, dim = self._value(args[0]), args[2] if len(args) > 2 else 0
        tail = source.like.tail
        if not tail or dim % (len(tail) + 1) != 1 or not source.like.rows:
            raise _Refused
        each = math.prod(tail[1:])
        sizes = args[1]
        if isinstance(sizes, int):
            sizes = [min(sizes, tail[0] - at) for at in range(0, tail[0], sizes)]
        found, first = [], 0
        for size in sizes:
            found.append(source.part(first * each, (size, *tail[1:])))
            first += size
        return found

    def _item(self, x: fx.Node) -> _Value:
        args: Any = x.args
        found = self._values.get(args[0])
        value = found[args[1]] if isinstance(found, list) else None
        if not isinstance(value, _Value):
            raise _Refused
        return value


_Way = Callable[[_Steps, fx.Node], Any]
_VIEWS: Final[Mapping[Any, _Way]] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.unsqueeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.clone.default,
        ),
        _Steps._same,
    ),
    aten.slice.Tensor: _Steps._slice,
    aten.select.int: _Steps._select,
    aten.split.Tensor: _Steps._split,
    aten.split_with_sizes.default: _Steps._split,
    operator.getitem: _Steps._item,
}
_SHARING: Final = {*_VIEWS, aten.expand.default}
"""What may lie in another's place."""
_WAYS: Final[Mapping[Any, _Way]] = {
    affine: lambda steps, x: steps._product(x, turned=False),
    times: lambda steps, x: steps._product(x, turned=True),
    aten.embedding.default: _Steps._embed,
    aten.cat.default: _Steps._cat,
    aten.sum.dim_IntList: lambda steps, x: steps._sum(x, mean=False),
    aten.mean.dim: lambda steps, x: steps._sum(x, mean=True),
    aten._softmax.default: _Steps._softmax,
    aten._softmax_backward_data.default: _Steps._softmax_back,
    aten.native_layer_norm.default: _Steps._norm,
    aten.native_layer_norm_backward.default: _Steps._norm_back,
    aten.threshold_backward.default: _Steps._threshold,
    aten.where.self: _Steps._where,
    aten.masked_fill.Scalar: _Steps._fill,
    aten.zeros_like.default: _Steps._zeros,
    aten.slice_backward.default: _Steps._slice_back,
    aten.select_backward.default: _Steps._select_back,
    aten.pow.Tensor_Scalar: _Steps._power,
    aten.expand.default: _Steps._expand,
}
_ONE: Final[Mapping[Any, Op]] = {
    aten.neg.default: Op.NEG,
    aten.exp.default: Op.EXP,
    aten.sigmoid.default: Op.SIGMOID,
    aten.tanh.default: Op.TANH,
    aten.relu.default: Op.RELU,
    aten.gelu.default: Op.GELU,
    aten.silu.default: Op.SILU,
}
_NUMBERS: Final[Mapping[Any, Callable[[float], tuple[Op, float]]]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), lambda v: (Op.ADD_NUMBER, v)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), lambda v: (Op.ADD_NUMBER, -v)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), lambda v: (Op.TIMES_NUMBER, v)),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), lambda v: (Op.TIMES_NUMBER, 1 / v)),
    aten.rsub.Scalar: lambda v: (Op.NUMBER_LESS, v),
}
_TWO: Final[Mapping[Any, Op]] = {
    aten.add.Tensor: Op.ADD,
    aten.sub.Tensor: Op.SUB,
    aten.mul.Tensor: Op.MUL,
    aten.div.Tensor: Op.DIV,
    aten.tanh_backward.default: Op.TANH_BACK,
    aten.sigmoid_backward.default: Op.SIGMOID_BACK,
    aten.gelu_backward.default: Op.GELU_BACK,
    aten.silu_backward.default: Op.SILU_BACK,
    aten.minimum.default: Op.MINIMUM,
    aten.maximum.default: Op.MAXIMUM,
    aten.eq.Tensor: Op.EQUAL,
    aten.lt.Tensor: Op.LESS,
    aten.gt.Tensor: Op.GREATER,
}


def _like(x: fx.Node) -> Like:
    found = x.meta.get("like")
    if not isinstance(found, Like):
        raise _Refused
    return found


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [x for x in graph.nodes if x.op == "placeholder"]


def _results(graph: fx.Graph) -> list[fx.Node]:
    (results,) = next(iter(reversed(graph.nodes))).args
    return list(cast("Sequence[fx.Node]", results))


def _last_uses(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By position of a node: those that nobody reads after it, in their own place or as a view."""
    nodes = list(graph.nodes)
    at = {x: k for k, x in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for x in reversed(nodes):
        ends = [
            last[y] if y.target in _VIEWS or y.target is aten.expand.default else at[y]
            for y in x.users
        ]
        last[x] = max(ends, default=at[x])
    found: dict[int, list[fx.Node]] = {}
    for x, k in last.items():
        found.setdefault(k, []).append(x)
    return found

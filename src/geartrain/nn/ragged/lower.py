"""From the operators of a ragged trace to steps, forward and back.

joint graph, at two sizes ─► axes: rows of which kind ─► steps over rows
    what depends on a tangent            ─► the way back
    integers that integers alone make    ─► computed before, by torch
    a mask of what is padded             ─► true: nothing is padded
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, final

import torch
from torch import fx

from geartrain.native.fused import Op
from geartrain.native.ragged import Way
from geartrain.nn.places import Refused
from geartrain.nn.ragged.values import (
    BUNDLES,
    HELD,
    MEMBERS,
    NO_ROWS,
    Buffer,
    Constant,
    Counts,
    Draft,
    Drafts,
    HeldValue,
    Like,
    Role,
    RowNumbers,
    Value,
)
from geartrain.nn.record import Trace, draws
from geartrain.nn.ways import NUMBERS, ONE, TWO

aten = torch.ops.aten
Known: TypeAlias = Value | Constant | HeldValue | RowNumbers | list[Any] | None

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
class Lowering:
    """A joint graph on its way.

    Args:
        traces: At two sizes, of ``operands``, inputs and tangents.
        counts: The sizes.
        operands: How many.
        given: Of each input what it is: a float of rows ("given"), a tensor of a memory ("held"),
            a mask ("mask"), or integers ("ints").
        segment: Which of the inputs numbers the bundle of each member, or None.
        dtype: Of all numbers.

    Attributes:
        forward, back: Their steps.
        ends: Where bundles begin and end.

    Raises:
        Refused: An operator has no steps.
    """

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        counts: Counts,
        operands: int,
        given: Sequence[str],
        segment: int | None,
        dtype: torch.dtype,
    ) -> None:
        small, large = traces
        self._counts, self._dtype = counts, dtype
        self._shapes, self._constants = small.shapes, small.constants
        self.nodes = list(small.graph.nodes)
        others = list(large.graph.nodes)
        if [(x.op, x.target) for x in self.nodes if x.op == "call_function"] != [
            (x.op, x.target) for x in others if x.op == "call_function"
        ]:
            raise Refused("it computes otherwise for other numbers of rows")
        if any(draws(x) for x in self.nodes):
            raise Refused("chance has a part in it")
        self._twin = dict(zip(self.nodes, others, strict=True))
        self._large = large.shapes
        places = [x for x in self.nodes if x.op == "placeholder"]
        self.operands = places[:operands]
        self.inputs = places[operands : operands + len(given)]
        self.tangents = places[operands + len(given) :]
        self._segment = None if segment is None else self.inputs[segment]
        self.forward, self.back = Drafts(), Drafts()
        self.ends = Buffer(BUNDLES, 1, role="ends")
        self.cells = Buffer(MEMBERS, 1, role="cells")
        self._ints: dict[fx.Node, Buffer] = {}
        self._floats: dict[fx.Node, Buffer] = {}
        self._weights: dict[tuple[int, bool], Buffer] = {}
        self._held: dict[int, Buffer] = {}
        self.values: dict[fx.Node, Known] = {}
        self.of: dict[fx.Node, frozenset[int]] = {}
        for k, x in enumerate(self.operands):
            shape = self._shapes[x]
            at = Buffer(NO_ROWS, math.prod(shape), role="operand", number=k)
            self.values[x] = Value(at, 0, 0, NO_ROWS, 1, shape)
        for k, (x, what) in enumerate(zip(self.inputs, given, strict=True)):
            self.values[x] = self._input(x, k, what)
        for k, x in enumerate(self.tangents):
            at = Buffer(0, 0, True, "given", len(given) + k)
            self.values[x] = self._whole(x, at)
        for x in self.nodes:
            own = {self.tangents.index(x)} if x in self.tangents else set()
            self.of[x] = frozenset(own.union(*(self.of[s] for s in x.all_input_nodes)))
            if x.op == "get_attr":
                self.values[x] = self._constant(x)
            elif x.op == "call_function":
                self._convert(x)

    def _input(self, x: fx.Node, k: int, what: str) -> Known:
        if what == "mask":
            return Constant(1.0)
        if what == "held":
            return HeldValue(k, self.like(x).tail)
        if what == "ints":
            return RowNumbers(x)
        return self._whole(x, Buffer(0, 0, False, "given", k))

    def _whole(self, x: fx.Node, buffer: Buffer) -> Value:
        like = self.like(x)
        if x.meta.get("dtype") is not self._dtype or like.kind == NO_ROWS:
            raise Refused(f"it is given {x.meta.get('dtype')}")
        buffer.kind, buffer.entries = like.kind, like.times * like.width
        return Value(buffer, 0, like.width, like.kind, like.times, like.tail)

    def _constant(self, x: fx.Node) -> Known:
        found = self._constants[str(x.target)]
        return Constant(float(found)) if found.numel() == 1 else None

    # What is known of nodes.

    def like(self, x: fx.Node) -> Like:
        """Its axes."""
        return self._counts.like(self._shapes[x], self._large[self._twin[x]])

    def late(self, x: fx.Node) -> bool:
        """Whether it depends on a tangent."""
        return bool(self.of[x])

    def drafts(self, *, late: bool) -> Drafts:
        return self.back if late else self.forward

    def ints_of(self, x: fx.Node) -> tuple[fx.Node, Like] | None:
        """What integers are made of, without views, and its axes; None: they are no row numbers."""
        found = self.values.get(x)
        return (found.node, self.like(found.node)) if isinstance(found, RowNumbers) else None

    def ints(self, node: fx.Node) -> Buffer:
        """Row numbers, for an index."""
        found = self._ints.get(node)
        if found is None:
            like = self.like(node)
            if node.meta.get("dtype") is not torch.int64 or like.tail or like.kind == NO_ROWS:
                raise Refused("row numbers of several axes")
            found = self._ints[node] = Buffer(like.kind, like.times, role="ints", node=node)
        return found

    def value(self, x: Any, *, late: bool) -> Value:
        """Where the numbers of a node lie, for steps of one way."""
        if not isinstance(x, fx.Node):
            raise Refused("a number where a tensor is wanted")
        found = self.values.get(x)
        if isinstance(found, Value):
            return found
        if isinstance(found, HeldValue):
            return self._recalled(found, late=late)
        if isinstance(found, RowNumbers):
            return self._as_float(x, found.node)
        if isinstance(found, Constant):
            out = self.room(self.like(x), late=late)
            self.plain(Op.ZERO, out, late=late)
            if found.number:
                self.plain(Op.ADD_NUMBER, out, out, number=found.number, late=late)
            return out
        raise Refused(f"{x.target} has no steps")

    def _recalled(self, held: HeldValue, *, late: bool) -> Value:
        drafts = self.drafts(late=late)
        found = drafts.held.get(held.number)
        if found is None:
            width = math.prod(held.tail)
            source = Value(self.held(held.number, width), 0, width, HELD, 1, held.tail)
            found = self.room(Like(MEMBERS, 1, held.tail, 1), late=late)
            self.step(
                Way.TAKE, found, source, kind=MEMBERS, late=late, index=self.cells, source=HELD
            )
            drafts.held[held.number] = found
        return replace(found, tail=held.tail)

    def held(self, number: int, width: int) -> Buffer:
        """A tensor of the memory."""
        return self._held.setdefault(number, Buffer(HELD, width, role="held", number=number))

    def _as_float(self, x: fx.Node, node: fx.Node) -> Value:
        self.ints(node)
        found = self._floats.get(node)
        if found is None:
            base = self.like(node)
            found = Buffer(base.kind, base.times, role="as_float", node=node)
            self._floats[node] = found
        like = self.like(x)
        if like.width != 1 or (like.kind, like.times) != (found.kind, found.entries):
            raise Refused("integers of several axes are computed with")
        return Value(found, 0, 1, like.kind, like.times, like.tail)

    # Steps.

    def room(self, like: Like, *, late: bool) -> Value:
        """Numbers to be written."""
        if like.kind == NO_ROWS:
            raise Refused("something is computed of weights alone")
        buffer = Buffer(like.kind, like.times * like.width, late)
        return Value(buffer, 0, like.width, like.kind, like.times, like.tail)

    def step(
        self,
        way: Way,
        out: Value,
        *reads: Value,
        kind: int,
        late: bool,
        times: int = 1,
        source: int = 0,
        source_times: int = 1,
        index: Buffer | None = None,
        inside: bool = False,
        cells: Buffer | None = None,
    ) -> None:
        """One that leads from rows to others."""
        ends = self.ends if inside else None
        draft = Draft(way, 0, out, list(reads), reads[0].width, kind, times)
        draft.source, draft.source_times, draft.index, draft.ends = (
            source,
            source_times,
            index,
            ends,
        )
        draft.cells = cells
        self.drafts(late=late).steps.append(draft)

    def plain(
        self,
        op: Op,
        out: Value,
        *reads: Value | None,
        late: bool,
        width: int = 0,
        many: int = 0,
        inner: int = 0,
        number: float = 0.0,
    ) -> None:
        """One of rows apart."""
        width = width or out.width
        draft = Draft(Way.PLAIN, op, out, list(reads), width, out.kind, out.times)
        draft.many, draft.inner, draft.number = many, inner, number
        self.drafts(late=late).steps.append(draft)

    def full(self, value: Value, *, late: bool) -> Value:
        """With all numbers that a row has."""
        if not value.one:
            return value
        like = Like(value.kind, value.times, value.tail, 1)
        out = self.room(like, late=late)
        many = math.prod(value.tail)
        self.plain(
            Op.EXPAND, out, replace(value, one=False), late=late, width=1, many=many, inner=1
        )
        return out

    def dense(self, value: Value, *, late: bool) -> Value:
        """All of a buffer."""
        value = self.full(value, late=late)
        if value.dense:
            return value
        out = self.room(Like(value.kind, value.times, value.tail, 1), late=late)
        self.plain(Op.COPY, out, value, late=late)
        return out

    def spread(self, value: Value, *, late: bool) -> Value:
        """What bundles have, for each of their members."""
        drafts = self.drafts(late=late)
        found = drafts.spread.get(value)
        if found is None:
            tail = () if value.one else value.tail
            found = self.room(Like(MEMBERS, 1, tail, 1), late=late)
            one = replace(value, one=False, tail=tail)
            self.step(Way.SPREAD, found, one, kind=BUNDLES, late=late, inside=True)
            drafts.spread[value] = found = replace(found, tail=value.tail, one=value.one)
        return found

    def fit(self, x: Any, like: Like, *, late: bool) -> Value:
        """A node as it is read for a result with these axes."""
        value = self.value(x, late=late)
        tail, mine = value.tail, self.like(x)
        if value.kind == NO_ROWS:
            while tail[:1] == (1,) and len(tail) > len(like.tail):
                tail = tail[1:]
        elif (value.kind, value.times) != (like.kind, like.times):
            if (mine.kind, mine.times, like.kind) != (BUNDLES, 1, MEMBERS) or like.lead != 2:
                raise Refused("rows of two kinds meet")
            if tail[:1] != (1,):
                raise Refused("rows of two kinds meet")
            tail = tail[1:]
            value = self.spread(replace(value, tail=tail), late=late)
        if tail == like.tail:
            return replace(value, tail=tail)
        if math.prod(tail) == 1 or value.one:
            return replace(value, tail=like.tail, one=like.width > 1)
        if value.kind == NO_ROWS or len(tail) != len(like.tail):
            raise Refused("axes that do not fit")
        wide = [k for k, (a, b) in enumerate(zip(tail, like.tail, strict=True)) if a != b]
        if wide != list(range(wide[0], wide[-1] + 1)):
            raise Refused("axes that do not fit")
        out = self.room(replace(like, lead=1), late=late)
        many = math.prod(like.tail[wide[0] : wide[-1] + 1])
        inner = math.prod(like.tail[wide[-1] + 1 :])
        self.plain(Op.EXPAND, out, value, late=late, width=value.width, many=many, inner=inner)
        return out

    def _elementwise(
        self, x: fx.Node, op: Op, sources: Sequence[Any], number: float = 0.0, ones: int = 0
    ) -> None:
        late, like = self.late(x), self.like(x)
        reads = []
        for source in sources:
            read = self.fit(source, like, late=late)
            if read.one:
                ones -= 1
                read = read if ones >= 0 else self.full(read, late=late)
            reads.append(read)
        out = self.room(like, late=late)
        self.plain(op, out, *reads, number=number, late=late)
        self.values[x] = out

    # Operators.

    def _convert(self, x: fx.Node) -> None:
        """Write the steps of a node."""
        target: Any = x.target
        args: Any = x.args
        if target in _ZEROS or target in _ONES:
            self.values[x] = Constant(float(target in _ONES))
            return
        if target in _FULL:
            self.values[x] = Constant(float(args[-1]))
            return
        sources = x.all_input_nodes
        if sources and all(isinstance(self.values.get(s), RowNumbers) for s in sources):
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
        self.values[x] = RowNumbers(x) if counts else None

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
            if (like.kind, like.times) == (MEMBERS, 1) and math.prod(known.tail) == like.width:
                self.values[x] = replace(known, tail=like.tail)
                return
        value, late = self.value(args[0], late=self.late(x)), self.late(x)
        if value.kind == NO_ROWS:
            self.values[x] = replace(value, tail=like.tail) if like.kind == NO_ROWS else None
            if like.kind != NO_ROWS or like.width != value.width:
                self.values[x] = self.fit(args[0], like, late=late)
        elif x.target is aten.expand.default:
            self.values[x] = self.fit(args[0], like, late=late)
        elif (like.kind, like.times) == (value.kind, value.times):
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

    def weight(self, x: Any) -> tuple[Value, int, int]:
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
        return Value(found, 0, 0, NO_ROWS, 1, (out, into)), depth, width

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

    def _part(self, x: fx.Node, value: Value, at: int, start: int, tail: tuple[int, ...]) -> Value:
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
        if like.lead == 2 and dims == [1] and x.target is aten.sum.dim_IntList:
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
        if not back and args[2]:
            raise Refused("a softmax of another dtype")
        out = self.room(like, late=late)
        if like.lead == 2 and dim == 1:
            way = (Way.LOG_SOFT_BACK if log else Way.SOFT_BACK) if back else Way.SOFT
            way = Way.LOG_SOFT if log and not back else way
            self.step(way, out, *reads, kind=BUNDLES, late=late, inside=True)
        elif dim == len(self._shapes[x]) - 1 and len(like.tail) == 1 and not log:
            self.plain(Op.SOFTMAX_BACK if back else Op.SOFTMAX, out, *reads, late=late)
        else:
            raise Refused("a softmax over other than members, or the last axis")
        self.values[x] = out

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
            numbers = Value(self.ints(base), 0, 1, rows.kind, rows.times, ())
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
        single = found is not None and found[1] == Like(BUNDLES, 1, (), 1)
        if found is None or not single or dim != 1 or of.lead != 2 or x.kwargs:
            raise Refused("an axis is gathered")
        if like.kind != BUNDLES or like.width != of.width:
            raise Refused("an axis is gathered")
        out = self.values[x] = self.room(like, late=late)
        ints, known = self.ints(found[0]), self.values.get(source)
        cells, of_kind = None, MEMBERS
        if isinstance(known, HeldValue):  # that member alone is read
            at = self.held(known.number, like.width)
            value = Value(at, 0, like.width, HELD, 1, known.tail)
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
        single = found is not None and found[1] == Like(BUNDLES, 1, (), 1)
        if found is None or not single or dim != 1 or like.lead != 2:
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
    aten.split_with_sizes.default: Lowering._split,
    operator.getitem: Lowering._item,
    aten.cat.default: Lowering._cat,
    aten.slice_backward.default: Lowering._put_back,
    aten.select_backward.default: Lowering._put_back,
    aten.sum.dim_IntList: Lowering._sum,
    aten.mean.dim: Lowering._sum,
    aten._softmax.default: Lowering._softmax,
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

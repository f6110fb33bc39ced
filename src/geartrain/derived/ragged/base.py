"""A ragged trace on its way to steps: what is known of its nodes, and how steps are written."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from geartrain.derived.ragged.padding import Padding
from geartrain.derived.ragged.traced import SAME, TwoTraces
from geartrain.derived.ragged.values import (
    BUNDLES,
    HELD,
    MEMBERS,
    NO_ROWS,
    PADDED,
    Axes,
    Buffer,
    ChosenMatrices,
    Constant,
    CountedRows,
    DraftStep,
    HeldValue,
    Known,
    OuterProducts,
    RaggedValue,
    TraceCounts,
    WayOfSteps,
)
from geartrain.derived.steps.places import Refused, called
from geartrain.derived.traces.record import Trace
from geartrain.native.fused import Op
from geartrain.native.ragged import Way


class AbstractLowering(TwoTraces, ABC):
    """A joint graph on its way; who derives from it knows the operators.

    Args:
        traces, counts: As for ``TwoTraces``, of ``operands``, inputs and tangents.
        operands: How many.
        given: Of each input what it is: a float of rows ("given"), a tensor of a memory ("held"),
            a mask ("mask"), or integers ("ints").
        segment: Which of the inputs numbers the bundle of each member, or None.
        dtype: Of all numbers.
        settled: Whether all that is drawn is the same.

    Attributes:
        forward, back: Their steps.
        drawn: What is drawn.
        ends: Where bundles begin and end.
        pairs: Where the pairs of members do.

    Raises:
        Refused: An operator has no steps.
    """

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        counts: TraceCounts,
        operands: int,
        given: Sequence[str],
        segment: int | None,
        dtype: torch.dtype,
        *,
        settled: bool = False,
    ) -> None:
        super().__init__(traces, counts)
        self.dtype, self.settled, self.drawn = dtype, settled, list[fx.Node]()
        places = [x for x in self.nodes if x.op == "placeholder"]
        self.operands = places[:operands]
        self.inputs = places[operands : operands + len(given)]
        self.tangents = places[operands + len(given) :]
        self.segment = None if segment is None else self.inputs[segment]
        self.lengths = None if segment is None else self.inputs[segment - 1]
        self.padding = self._padding()
        """What is known of what it pads by itself; None: it does not."""
        self.counting: dict[fx.Node, fx.Node] = {}
        """Nodes that count the rows of an input, or say how many members each bundle has."""
        self.placing: set[fx.Node] = set()
        """Those of them that number the members of each bundle."""
        self.forward, self.back = WayOfSteps(), WayOfSteps()
        self.ends = Buffer(BUNDLES, 1, role="ends")
        self.cells = Buffer(MEMBERS, 1, role="cells")
        self.pairs = Buffer(MEMBERS, 1, role="pairs")
        self.seeds = Buffer(MEMBERS, 1, role="seeds")
        """A number for each member, of which follows what is drawn for it."""
        self._ints: dict[fx.Node, Buffer] = {}
        self._floats: dict[fx.Node, Buffer] = {}
        self.weights: dict[tuple[int, bool], Buffer] = {}
        self._held: dict[int, Buffer] = {}
        self.values: dict[fx.Node, Known] = {}
        self.matrices: dict[fx.Node, ChosenMatrices | OuterProducts] = {}
        """What rows have as matrices, which are not made unless somebody reads them."""
        self.most: dict[fx.Node, float] = {}
        """What none of the integers is above that steps have made: see ``exact.py``."""
        self.beside: dict[fx.Node, float] = {}
        """How much may have been added to integers that may be above anything."""
        self.summed: dict[fx.Node, RaggedValue] = {}
        """Nodes that are sums of rows, of which nothing is known but the rows."""
        self.products: dict[fx.Node, tuple[RaggedValue, RaggedValue]] = {}
        """Nodes that are products of rows, likewise."""
        self.of: dict[fx.Node, frozenset[int]] = {}
        for k, x in enumerate(self.operands):
            shape = self.shapes[x]
            at = Buffer(NO_ROWS, math.prod(shape), role="operand", number=k)
            self.values[x] = RaggedValue(at, 0, 0, NO_ROWS, 1, shape)
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

    def _padding(self) -> Padding | None:
        padded, (rows, members, *_) = self.counts.padded, self.counts.sizes
        if padded is None or self.lengths is None or self.segment is None:
            return None
        return Padding(self.lengths, self.segment, self.twin, (rows, padded, members))

    def _convert(self, x: fx.Node) -> None:
        try:
            self.convert(x)
        except Refused as error:
            name, why = called(x), str(error)
            raise Refused(why if name in why else f"{name}: {why}") from error

    def _input(self, x: fx.Node, k: int, what: str) -> Known:
        if what == "mask":
            return Constant(1.0)
        if what == "held":
            return HeldValue(k, self.like(x).tail, x.meta.get("dtype") is torch.int64)
        if what == "ints":
            return CountedRows(x)
        return self._whole(x, Buffer(0, 0, False, "given", k))

    def _whole(self, x: fx.Node, buffer: Buffer) -> RaggedValue:
        like = self.like(x)
        if x.meta.get("dtype") is not self.dtype or like.kind == NO_ROWS:
            raise Refused(f"it is given {x.meta.get('dtype')}")
        buffer.kind, buffer.entries = like.kind, like.times * like.width
        return RaggedValue(buffer, 0, like.width, like.kind, like.times, like.tail)

    def _constant(self, x: fx.Node) -> Known:
        found = self.constants[str(x.target)]
        return Constant(float(found)) if found.numel() == 1 else self.of_constant(x, found)

    # What is known of nodes.

    def late(self, x: fx.Node) -> bool:
        """Whether it depends on a tangent."""
        return bool(self.of[x])

    @staticmethod
    def like_value(value: RaggedValue) -> Axes:
        """Axes of numbers like these, that lie by themselves."""
        return Axes(value.kind, value.times, value.tail, 1)

    def drafts(self, *, late: bool) -> WayOfSteps:
        return self.back if late else self.forward

    def ints_of(self, x: fx.Node) -> tuple[fx.Node, Axes] | None:
        """What integers are made of, without views, and its axes; None: they are no row numbers."""
        found, source = self.values.get(x), x
        if isinstance(found, CountedRows):
            return found.node, self.like(found.node)
        while source.target in SAME and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        return (source, self.like(source)) if source in self.placing else None

    def ints(self, node: fx.Node) -> Buffer:
        """Row numbers, for an index."""
        found = self._ints.get(node)
        if found is None:
            like = self.like(node)
            plain = node.meta.get("dtype") is torch.int64 and not like.tail
            if like.kind == NO_ROWS or not (plain or node in self.placing):
                raise Refused("row numbers of several axes")
            found = self._ints[node] = Buffer(like.kind, like.times, role="ints", node=node)
        return found

    def value(self, x: Any, *, late: bool) -> RaggedValue:
        """Where the numbers of a node lie, for steps of one way."""
        if not isinstance(x, fx.Node):
            raise Refused("a number where a tensor is wanted")
        found = self.values.get(x)
        if found is None and self.is_of_matrices(x):
            self.make(x)
            found = self.values[x]
        if isinstance(found, RaggedValue):
            return found
        if isinstance(found, HeldValue):
            return self._recalled(found, late=late)
        if isinstance(found, CountedRows):
            return self._as_float(x, found.node)
        if isinstance(found, Constant):
            return self._everywhere(found.number, self.like(x), late=late)
        raise Refused(f"{x.target} has no steps")

    def is_of_matrices(self, x: fx.Node) -> bool:
        """Whether it is matrices of rows that were not made, or these seen otherwise."""
        while x not in self.matrices and len(x.all_input_nodes) == 1:
            (x,) = x.all_input_nodes
        return x in self.matrices

    def _everywhere(self, number: float, like: Axes, *, late: bool) -> RaggedValue:
        """The same number in all entries."""
        out = self.room(like, late=late)
        self.plain(Op.ZERO, out, late=late)
        if number:
            self.plain(Op.ADD_NUMBER, out, out, number=number, late=late)
        return out

    def _recalled(self, held: HeldValue, *, late: bool) -> RaggedValue:
        if held.whole:
            raise Refused("integers of a memory are computed with")
        drafts = self.drafts(late=late)
        found = drafts.held.get(held.number)
        if found is None:
            width = math.prod(held.tail)
            source = RaggedValue(self.held(held.number, width), 0, width, HELD, 1, held.tail)
            found = self.room(Axes(MEMBERS, 1, held.tail, 1), late=late)
            self.step(
                Way.TAKE, found, source, kind=MEMBERS, late=late, index=self.cells, source=HELD
            )
            drafts.held[held.number] = found
        return replace(found, tail=held.tail)

    def held(self, number: int, width: int) -> Buffer:
        """A tensor of the memory."""
        return self._held.setdefault(number, Buffer(HELD, width, role="held", number=number))

    def _as_float(self, x: fx.Node, node: fx.Node) -> RaggedValue:
        base = self.like(node)
        truths = node.meta.get("dtype") is torch.bool and base.kind != NO_ROWS and base.width == 1
        if not truths:
            self.ints(node)
        found = self._floats.get(node)
        if found is None:
            found = Buffer(base.kind, base.times, role="as_float", node=node)
            self._floats[node] = found
        like = self.like(x)
        if like.width != 1 or (like.kind, like.times) != (found.kind, found.entries):
            raise Refused("integers of several axes are computed with")
        return RaggedValue(found, 0, 1, like.kind, like.times, like.tail)

    # Steps.

    def room(self, like: Axes, *, late: bool) -> RaggedValue:
        """Numbers to be written."""
        if like.kind == NO_ROWS:
            raise Refused("something is computed of weights alone")
        buffer = Buffer(like.kind, like.times * like.width, late)
        return RaggedValue(buffer, 0, like.width, like.kind, like.times, like.tail)

    def step(
        self,
        way: Way,
        out: RaggedValue,
        *reads: RaggedValue,
        kind: int,
        late: bool,
        times: int = 1,
        source: int = 0,
        source_times: int = 1,
        index: Buffer | None = None,
        inside: bool = False,
        pairs: bool = False,
        cells: Buffer | None = None,
        width: int = 0,
        many: int = 0,
        inner: int = 0,
        number: float = 0.0,
    ) -> None:
        """One that leads from rows to others: of bundles, to or from what is inside, or of members,
        to or from their pairs."""
        ends = self.ends if inside else self.pairs if pairs else None
        draft = DraftStep(way, 0, out, list(reads), width or reads[0].width, kind, times)
        draft.many, draft.inner, draft.number = many, inner, number
        draft.source, draft.source_times = source, source_times
        draft.index, draft.ends, draft.cells = index, ends, cells
        self.drafts(late=late).steps.append(draft)

    def plain(
        self,
        op: Op,
        out: RaggedValue,
        *reads: RaggedValue | None,
        late: bool,
        width: int = 0,
        many: int = 0,
        inner: int = 0,
        number: float = 0.0,
    ) -> None:
        """One of rows apart."""
        width = width or out.width
        draft = DraftStep(Way.PLAIN, op, out, list(reads), width, out.kind, out.times)
        draft.many, draft.inner, draft.number = many, inner, number
        self.drafts(late=late).steps.append(draft)

    def full(self, value: RaggedValue, *, late: bool) -> RaggedValue:
        """With all numbers that a row has."""
        if not value.one:
            return value
        like = Axes(value.kind, value.times, value.tail, 1)
        out = self.room(like, late=late)
        many = math.prod(value.tail)
        self.plain(
            Op.EXPAND, out, replace(value, one=False), late=late, width=1, many=many, inner=1
        )
        return out

    def turned_over(self, value: RaggedValue, *, late: bool) -> RaggedValue:
        """Less than nothing: of which the most is the least."""
        out = self.room(self.like_value(value), late=late)
        self.plain(Op.NEG, out, value, late=late)
        return out

    def dense(self, value: RaggedValue, *, late: bool) -> RaggedValue:
        """All of a buffer."""
        value = self.full(value, late=late)
        if value.dense:
            return value
        out = self.room(Axes(value.kind, value.times, value.tail, 1), late=late)
        self.plain(Op.COPY, out, value, late=late)
        return out

    def spread(self, value: RaggedValue, *, late: bool) -> RaggedValue:
        """What bundles have, for each of their members."""
        drafts = self.drafts(late=late)
        found = drafts.spread.get(value)
        if found is None:
            tail = () if value.one else value.tail
            found = self.room(Axes(MEMBERS, 1, tail, 1), late=late)
            one = replace(value, one=False, tail=tail)
            self.step(Way.SPREAD, found, one, kind=BUNDLES, late=late, inside=True)
            drafts.spread[value] = found = replace(found, tail=value.tail, one=value.one)
        return found

    def number_members(self, x: fx.Node) -> None:
        """A node stands for the numbers of members in their bundles, if lengths are known."""
        if self.lengths is not None:
            self.counting[x] = self.lengths
            self.placing.add(x)

    def place(self, *, late: bool) -> RaggedValue:
        """The number of each member in its bundle."""
        drafts = self.drafts(late=late)
        if drafts.place is None:
            drafts.place = self.room(Axes(MEMBERS, 1, (), 1), late=late)
            self.step(Way.PLACE, drafts.place, kind=BUNDLES, late=late, inside=True, width=1)
        return drafts.place

    def _alone(self, x: fx.Node, value: RaggedValue, like: Axes, *, late: bool) -> RaggedValue:
        """What all bundles have in common along the axis of members, where they have that."""
        mine, rank = self.like(x), like.rank
        at = rank - len(self.shapes[x]) + mine.at
        if (like.kind, like.lead) != (MEMBERS, PADDED) or at != like.members:
            raise Refused("axes that do not fit")
        if value.width == 1:
            return replace(value, tail=like.tail, one=like.width > 1)
        tail = (1,) * (len(like.tail) - len(value.tail)) + value.tail
        while len(tail) > len(like.tail) and tail[0] == 1:
            tail = tail[1:]
        if tail == like.tail:
            return replace(value, tail=tail)
        return self._widened(value, tail, replace(like, at=0), late=late)

    def fit(self, x: Any, like: Axes, *, late: bool) -> RaggedValue:
        """A node as it is read for a result with these axes."""
        known = self.values.get(x) if isinstance(x, fx.Node) else None
        if isinstance(known, Constant):
            return self._everywhere(known.number, like, late=late)
        value, mine = self.value(x, late=late), self.like(x)
        if like.second >= 0:
            return self.widened(self.paired(value, mine, like, late=late), like, late=late)
        tail = value.tail
        if value.kind == NO_ROWS:
            tail = like.behind_rows(tail)
        elif (value.kind, value.times) != (like.kind, like.times):
            value = self._met(value, mine, like, late=late)
            tail = value.tail
        elif mine.alone and not like.alone:
            return self._alone(x, value, like, late=late)
        elif mine.place != like.place:
            raise Refused("axes that do not fit")
        return self.widened(replace(value, tail=tail), like, late=late)

    def widened(self, value: RaggedValue, like: Axes, *, late: bool) -> RaggedValue:
        """Numbers of rows like these, where some may have one along axes of several."""
        if value.tail == like.tail:
            return value
        if math.prod(value.tail) == 1 or value.one:
            return replace(value, tail=like.tail, one=like.width > 1)
        return self._widened(value, value.tail, like, late=late)

    def _met(self, value: RaggedValue, mine: Axes, like: Axes, *, late: bool) -> RaggedValue:
        """What bundles have, where members are."""
        heads = like.tail[0] if like.merged else 1
        if (mine.kind, mine.times) != (BUNDLES, heads) or (like.kind, like.lead) != (
            MEMBERS,
            PADDED,
        ):
            raise Refused("rows of two kinds meet")
        at = like.members - 1
        if like.at < 0 or len(mine.tail) <= at or mine.tail[at] != 1:
            raise Refused("rows of two kinds meet")
        tail = (*mine.tail[:at], *mine.tail[at + 1 :])
        if like.merged:
            value = self.dense(value, late=late)
            tail = heads, *tail
            value = replace(value, times=1, row=math.prod(tail))
        return self.spread(replace(value, tail=tail), late=late)

    def _widened(
        self, value: RaggedValue, tail: tuple[int, ...], like: Axes, *, late: bool
    ) -> RaggedValue:
        """With some axes of one entry made as long as they are read."""
        if len(tail) != len(like.tail):
            raise Refused("axes that do not fit")
        wide = [k for k, (a, b) in enumerate(zip(tail, like.tail, strict=True)) if a != b]
        if wide != list(range(wide[0], wide[-1] + 1)):
            raise Refused("axes that do not fit")
        out = self.room(replace(like, lead=1), late=late)
        many = math.prod(like.tail[wide[0] : wide[-1] + 1])
        inner = math.prod(like.tail[wide[-1] + 1 :])
        self.plain(Op.EXPAND, out, value, late=late, width=value.width, many=many, inner=inner)
        return out

    def elementwise(
        self, x: fx.Node, op: Op, sources: Sequence[Any], number: float = 0.0, ones: int = 0
    ) -> None:
        """A step that is done entry by entry.

        Args:
            x: What it makes.
            op: The step.
            sources: What it reads.
            number: Of the step.
            ones: How many of them may have one entry that is read for all.
        """
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

    def whole(self, x: Any, *, late: bool) -> RaggedValue:
        """A node with all numbers that a row has."""
        return self.full(self.value(x, late=late), late=late)

    def number(self, x: Any) -> Any:
        """An argument, or the number that it is everywhere."""
        known = self.values.get(x) if isinstance(x, fx.Node) else None
        return known.number if isinstance(known, Constant) else x

    @abstractmethod
    def paired(self, value: RaggedValue, mine: Axes, like: Axes, *, late: bool) -> RaggedValue:
        """Numbers of rows of any kind, with axes of their own, for pairs of members."""

    @abstractmethod
    def of_constant(self, x: fx.Node, found: torch.Tensor) -> Known:
        """What is known of a tensor that a trace has found as it is."""

    @abstractmethod
    def make(self, x: fx.Node) -> None:
        """Write the steps of matrices of rows that somebody reads."""

    @abstractmethod
    def convert(self, x: fx.Node) -> None:
        """Write the steps of a node.

        Raises:
            Refused: It has none.
        """


Convert: TypeAlias = Callable[[AbstractLowering, fx.Node], None]
"""Writes the steps of a node."""

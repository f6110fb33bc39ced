"""A lowered trace as two programs, and what they hand to one another.

steps forward ─► those that outputs or the way back need ─► slots ─► a routine
steps back    ─► those that gradients need               ─► slots ─► a routine
rooms that are written forward and read back             ─► residuals, side by side
    those of pairs of members                            ─► made again by the way back
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

import torch
from torch import fx

from geartrain.derived.computed import ComputedWeights
from geartrain.derived.ragged.computed import viewed
from geartrain.derived.ragged.drafts import needed, of_named, parts_added, together
from geartrain.derived.ragged.integers import above, are_of_each, counts
from geartrain.derived.ragged.looked_up import learned_of
from geartrain.derived.ragged.lower import Lowering
from geartrain.derived.ragged.over import sum_of_entries, sums_all, sums_rows
from geartrain.derived.ragged.pairs import sum_of_firsts
from geartrain.derived.ragged.parted import by_parts, made_again
from geartrain.derived.ragged.routine import RaggedRoutine
from geartrain.derived.ragged.values import (
    HELD,
    MEMBERS,
    NO_ROWS,
    PAIRS,
    Axes,
    Buffer,
    Constant,
    DraftStep,
    NamedParts,
    OuterProducts,
    RaggedValue,
)
from geartrain.derived.steps.lower import MOST_WEIGHTS
from geartrain.derived.steps.places import Refused
from geartrain.derived.traces.counted import needed_by
from geartrain.derived.traces.emit import emit
from geartrain.derived.traces.unsearched import Unsearched
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

aten = torch.ops.aten
How: TypeAlias = Literal["product", "sum", "sum of axes", "rows", "products"]
"""The last two are by number."""


@final
@dataclass(frozen=True, slots=True)
class Tensors:
    """A tensor of rows that a call makes, or finds.

    Args:
        buffer: Where.
        tail: Its shape, behind the rows.
    """

    buffer: Buffer
    tail: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class RaggedTerm:
    """A summand of an operand's gradient.

    Args:
        operand: Its number.
        how: What it is of its tensors.
        tensors: One or two.
        tangents: It is zero where these are.
        padding: Of ``rows``: the index that gets nothing, or -1.
        index: Of ``rows`` and ``products``: their numbers.
        named: Of ``product``: the parts of rows of the first tensor that are not zero; None: all
            may be something.
        table: Of ``rows``: as of ``Term``.
    """

    operand: int
    how: How
    tensors: tuple[Tensors, ...]
    tangents: frozenset[int]
    padding: int = -1
    index: fx.Node | None = None
    named: NamedParts | None = None
    table: int = 0


def _of_parts(term: RaggedTerm, added: Mapping[Buffer, NamedParts]) -> RaggedTerm:
    """The same term, of the parts of rows alone that something was added to."""
    rows = term.tensors[0]
    named = added.get(rows.buffer)
    if term.how != "product" or named is None or rows.tail != (rows.buffer.entries,):
        return term
    return replace(term, named=named)


@final
@dataclass(frozen=True, slots=True)
class CountedInts:
    """Row numbers that are read.

    Args:
        node: What they are computed by.
        kind, times: They are so many times the rows of that kind.
        inputs: Of which inputs.
        apart: Whether those of a bundle are the same in whatever company it comes.
    """

    node: fx.Node
    kind: int
    times: int
    inputs: frozenset[int]
    apart: bool


@final
@dataclass(frozen=True, slots=True)
class RaggedCut:
    """Both ways of a module.

    Args:
        forward: Makes outputs and residuals.
        back: Makes gradients of inputs, and what those of weights are made of.
        without: The same but for gradients of a memory.
        outputs: Each a tensor that is made, or the number of an input.
        residuals: What lies side by side.
        gradients: By input that has one: where it is made, and the tangents that it comes from.
        held: By input that a memory holds: the sums that are added to, and their tangents.
        terms: What the operands get.
        inputs: How many.
        memory: Those of them that a memory holds.
        ints: Row numbers that are read.
        count: Computes them, of the inputs.
        made: Of the way back, the tensors of its own.
        tangents: The output of each tangent.
        used: Inputs that are read.
        dtype: Of all numbers.
        draws: Whether chance has a part in it.
        computed: Operands behind those of the module, which are computed of these; None: no such.
    """

    forward: RaggedRoutine
    back: RaggedRoutine
    without: RaggedRoutine
    outputs: tuple[Tensors | int, ...]
    residuals: tuple[Buffer, ...]
    gradients: dict[int, tuple[Tensors, frozenset[int]]]
    held: dict[int, frozenset[int]]
    terms: tuple[RaggedTerm, ...]
    inputs: int
    memory: tuple[int, ...]
    ints: tuple[CountedInts, ...]
    count: Callable[..., tuple[torch.Tensor, ...]]
    made: tuple[Tensors, ...]
    tangents: tuple[int, ...]
    used: frozenset[int]
    dtype: torch.dtype
    draws: bool
    computed: ComputedWeights | None = None


@final
class Cutter:
    """Cuts what was lowered.

    Args:
        low: It.
        outputs: How many.
        of_output: The output of each tangent.
        learned, wanted: Operands and inputs that were differentiated.
        held: Which of the inputs a memory holds.
        dtype: Of all numbers.

    Raises:
        Refused: A gradient is of a kind that cannot be told apart by rows.
    """

    def __init__(
        self,
        low: Lowering,
        outputs: int,
        of_output: tuple[int, ...],
        learned: Sequence[int],
        wanted: Sequence[int],
        held: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._low, self._dtype, self._of_output = low, dtype, of_output
        (results,) = low.nodes[-1].args
        nodes: Any = results
        self._outputs = nodes[:outputs]
        self._answers = nodes[outputs:]
        self._learned, self._wanted, self._held = learned, wanted, held

    def cut(self) -> RaggedCut:
        low = self._low
        outputs = [self._output(y) for y in self._outputs]
        terms: list[RaggedTerm] = []
        for k, d in zip(self._learned, self._answers, strict=False):
            terms += self._terms(k, d)
        gradients, held, sums = self._given_back()
        results = [t.buffer for t, _ in gradients.values()]
        results += [t.buffer for term in terms for t in term.tensors]
        again = made_again(low.forward.steps)
        back = needed([*again, *low.back.steps, *sums], results, sums)
        without = needed([*again, *low.back.steps], results, [])
        asked = {b for d in back for b in d.read()} | set(results)
        anew = {d.out.buffer for d in again}
        ours = [d.out.buffer for d in low.forward.steps if d.out.buffer not in anew]
        residuals = tuple(dict.fromkeys(b for b in ours if b in asked and b.role == "room"))
        made = [t for t in outputs if isinstance(t, Tensors)]
        forward = needed(low.forward.steps, [*residuals, *(t.buffer for t in made)], [])
        kept = set(residuals)
        tensors = {t.buffer: t for t, _ in gradients.values()}
        tensors |= {t.buffer: t for term in terms for t in term.tensors}
        own = tuple(t for b, t in tensors.items() if b.role == "room" and b not in kept)
        given = kept | {t.buffer for t in made}
        of_back = kept | {t.buffer for t in own}
        outer = kept | {t.buffer for t in [*made, *tensors.values()]}
        forward, back, without = (
            of_named(by_parts(together(steps, outer), outer), outer)
            for steps in (forward, back, without)
        )
        added = parts_added(back)
        terms = [_of_parts(t, added) for t in terms]
        if sum(b.entries for b in low.weights.values()) > MOST_WEIGHTS:
            raise Refused("its weights are large")
        outside = {t.buffer for t in made} & kept
        if outside:  # an output that is kept too lies by itself, and is copied
            raise Refused("an output that is kept")
        return RaggedCut(
            RaggedRoutine(forward, given, low.ends, self._dtype),
            RaggedRoutine(back, of_back, low.ends, self._dtype),
            RaggedRoutine(without, of_back, low.ends, self._dtype),
            tuple(outputs),
            residuals,
            gradients,
            held,
            tuple(terms),
            len(low.inputs),
            tuple(self._held),
            *self._counted([*forward, *back], terms),
            own,
            self._of_output,
            self._used([*forward, *back], terms, outputs),
            self._dtype,
            bool(low.drawn),
        )

    def _given_back(
        self,
    ) -> tuple[
        dict[int, tuple[Tensors, frozenset[int]]], dict[int, frozenset[int]], list[DraftStep]
    ]:
        """Gradients by input, and of which tangents each is; of memories the latter, and the steps
        that add them up where these are held."""
        low = self._low
        gradients: dict[int, tuple[Tensors, frozenset[int]]] = {}
        held: dict[int, frozenset[int]] = {}
        sums: list[DraftStep] = []
        for i, d in zip(self._wanted, self._answers[len(self._learned) :], strict=True):
            known = low.values.get(d)
            if isinstance(known, Constant):
                if known.number:
                    raise Refused("a gradient is the same everywhere")
                continue
            value = low.value(d, late=True)
            if i not in self._held:
                gradients[i] = self._tensor(value, late=True), low.of[d]
                continue
            held[i] = low.of[d]
            sums.append(self._into_memory(i, low.full(value, late=True)))
        return gradients, held, sums

    def _into_memory(self, i: int, value: RaggedValue) -> DraftStep:
        """The gradient of a memory, where it is held."""
        into = Buffer(HELD, value.width, True, "sums", i)
        out = RaggedValue(into, 0, value.width, HELD, 1, value.tail)
        writing = [d for d in self._low.back.steps if d.out.buffer is value.buffer]
        if [d.way for d in writing] == [Way.PLAIN, Way.ADD_INSIDE]:  # of one member of each bundle
            return replace(writing[1], out=out, source=HELD, cells=self._low.cells)
        draft = DraftStep(Way.ADD_AT, 0, out, [value], value.width, MEMBERS, 1, source=HELD)
        draft.index = self._low.cells
        return draft

    def _output(self, y: fx.Node) -> Tensors | int:
        low = self._low
        source = y
        while source.target in (aten.clone.default, aten.alias.default, aten.detach.default):
            (source,) = source.all_input_nodes
        if source in low.inputs:
            return low.inputs.index(source)
        if y.meta.get("dtype") is not self._dtype:
            raise Refused(f"an output is {y.meta.get('dtype')}")
        like = low.like(y)
        if like.times != 1 or like.kind == NO_ROWS or like.lead != 1:
            raise Refused("an output is not of rows")
        value = low.full(low.value(y, late=False), late=False)
        # Of its own, as others may keep it, and the way back may read what it was made of.
        out = low.room(Axes(value.kind, 1, like.tail, 1), late=False)
        low.plain(Op.COPY, out, value, late=False)
        return Tensors(out.buffer, like.tail)

    def _tensor(self, value: RaggedValue, *, late: bool) -> Tensors:
        value = self._low.dense(value, late=late)
        return Tensors(value.buffer, value.tail)

    def _terms(self, operand: int, d: fx.Node, *, turned: bool = False) -> Iterator[RaggedTerm]:
        """The summands of an operand's gradient."""
        low = self._low
        of, target = low.of[d], d.target
        args: Any = d.args
        if not of:
            self._check_nothing(d)
            return
        if d in low.products:
            both = [(self._tensor(v, late=True).buffer, (v.width,)) for v in low.products[d]]
            yield self._product(operand, [Tensors(*each) for each in both], of)
            return
        if target is aten.add.Tensor and len(args) == 2:
            yield from self._terms(operand, args[0], turned=turned)
            yield from self._terms(operand, args[1], turned=turned)
        elif target is aten.t.default:
            yield from self._terms(operand, args[0], turned=not turned)
        elif target is aten.mm.default and args[0].target is aten.t.default:
            pair = [self._rows(args[0].args[0]), self._rows(args[1])]
            yield self._product(operand, pair[::-1] if turned else pair, of)
        elif not turned and (found := self._added_up(d)) is not None:
            shape = low.shapes[low.operands[operand]]
            if math.prod(shape) != math.prod(found.tail):
                raise Refused("a sum of rows for other than all entries")
            yield RaggedTerm(operand, "sum" if len(shape) == 1 else "sum of axes", (found,), of)
        elif not turned and (table := self._table(viewed(d))) is not None:
            yield from self._of_table(operand, *table[:2], of, table[2], viewed(d))
        else:
            raise Refused(f"a weight's gradient is of {target}")

    def _check_nothing(self, d: fx.Node) -> None:
        known = self._low.values.get(d)
        if not isinstance(known, Constant) or known.number:
            raise Refused("a weight's gradient is of no output")

    def _product(self, operand: int, both: Sequence[Tensors], of: frozenset[int]) -> RaggedTerm:
        if len({(t.buffer.kind, t.buffer.entries // t.tail[0]) for t in both}) != 1:
            raise Refused("a product of rows of two kinds")
        return RaggedTerm(operand, "product", tuple(both), of)

    def _added_up(self, d: fx.Node) -> Tensors | None:
        """The rows of whose sum a node is, as a matrix."""
        low = self._low
        while d.target in (aten.view.default, aten.squeeze.dim, aten.squeeze.dims):
            d = d.all_input_nodes[0]
        if d in low.summed:
            return self._added(low.full(low.summed[d], late=True))
        rows = self._summed(d)
        if rows is None:
            return None
        late = low.late(rows)
        value = low.full(low.value(rows, late=late), late=late)
        if math.prod(low.shapes[d]) == 1:
            value = sum_of_entries(low, value, late=late)
        return self._added(value, late=late)

    def _added(self, value: RaggedValue, *, late: bool = True) -> Tensors:
        """Rows of which weights get the sum: of pairs, those of each member are added up before."""
        if value.kind == PAIRS and value.times == 1:
            value = sum_of_firsts(self._low, value, late=late)
        return Tensors(self._tensor(value, late=late).buffer, (value.width,))

    def _table(self, d: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
        """Rows that are added to a table's, their numbers, and the number that gets nothing."""
        args: Any = d.args
        if d.target is aten.embedding_dense_backward.default:
            if args[4]:
                raise Refused("a table's scale_grad_by_freq")
            return args[0], args[1], args[3]
        if d.target is aten.index_add.default:
            return args[3], args[2], -1
        if d.target is aten.index_put.default and len(args[1]) == 1:
            return args[2], args[1][0], -1
        if d.target is aten.slice_backward.default and self._low.like(args[0]).alone:
            found = [x for x in self._low.placing if x.target is aten.slice.Tensor]
            if found and args[2:4] == (0, 0):
                return args[0], found[0], -1
        return None

    def _of_table(
        self,
        operand: int,
        rows: fx.Node,
        index: fx.Node,
        of: frozenset[int],
        padding: int,
        table: fx.Node,
    ) -> Iterator[RaggedTerm]:
        """Rows of a weight by number, or of a table that it is seen as."""
        found, shape = self._low.ints_of(index), self._low.shapes[self._low.operands[operand]]
        seen = self._low.shapes[table]
        many = 0 if seen == shape else seen[0]
        if found is None:
            if padding >= 0 or many:
                raise Refused("rows of a table by numbers that are computed")
            rows_of = self._tensor(learned_of(self._low, rows, index, shape), late=True)
            yield RaggedTerm(operand, "sum" if len(shape) == 1 else "sum of axes", (rows_of,), of)
            return
        self._low.ints(found[0])
        outer = self._low.matrices.get(rows)
        if not isinstance(outer, OuterProducts) or padding >= 0:
            flat = (self._rows(rows, flat=True),)
            yield RaggedTerm(operand, "rows", flat, of, padding, found[0], table=many)
            return
        for pair in outer.pairs:
            both = [self._rows(y, flat=True) for y in pair]
            tensors = tuple(reversed(both) if outer.turned else both)
            yield RaggedTerm(operand, "products", tensors, of, index=found[0])

    def _rows(self, x: fx.Node, *, flat: bool = False) -> Tensors:
        """A node as a matrix."""
        late = self._low.late(x)
        value = self._low.full(self._low.value(x, late=late), late=late)
        found = self._tensor(value, late=late)
        width = value.width
        if not flat and len(value.tail) != 1:
            raise Refused("a product of other than matrices")
        return Tensors(found.buffer, (width,))

    def _summed(self, d: fx.Node) -> fx.Node | None:
        """The rows whose sum d is."""
        args: Any = d.args
        if not sums_rows(self._low, d) and not sums_all(self._low, d):
            return None
        rows: fx.Node = args[0]
        return rows

    def _used(
        self,
        drafts: Sequence[DraftStep],
        terms: Sequence[RaggedTerm],
        outputs: Sequence[Tensors | int],
    ) -> frozenset[int]:
        """Inputs that somebody reads."""
        buffers = [b for d in drafts for b in d.read()]
        buffers += [t.buffer for term in terms for t in term.tensors]
        found = {b.number for b in buffers if b.role in ("given", "held")}
        found |= {y for y in outputs if isinstance(y, int)}
        waiting = [b.node for b in buffers if b.node is not None]
        waiting += [term.index for term in terms if term.index is not None]
        seen = above(self._low, waiting)
        return frozenset(found | {k for k, x in enumerate(self._low.inputs) if x in seen})

    def _counted(
        self, drafts: Sequence[DraftStep], terms: Sequence[RaggedTerm]
    ) -> tuple[tuple[CountedInts, ...], Callable[..., tuple[torch.Tensor, ...]]]:
        """Row numbers that are read, and what computes them."""
        found: dict[fx.Node, None] = {}
        for buffer in (b for d in drafts for b in d.read()):
            if buffer.node is not None:
                found[buffer.node] = None
        for term in terms:
            if term.index is not None:
                found[term.index] = None
        graph, made = Unsearched(), {}
        for x in self._low.inputs:
            made[x] = graph.placeholder(x.name)
        needed = needed_by(found, {*made, *self._low.operands})
        counting = self._low.counting
        for x in self._low.nodes:
            if x in needed and x in counting:
                made[x] = graph.call_function(counts(self._low, x), (made[counting[x]],))
            elif x in needed:
                made[x] = graph.node_copy(x, made.__getitem__)
        graph.output(tuple([_as_integers(graph, x, made[x]) for x in found]))
        return tuple(map(self._ints_of, found)), emit(graph, self._low.constants)

    def _ints_of(self, node: fx.Node) -> CountedInts:
        like, inputs = self._low.like(node), self._low.inputs
        seen = above(self._low, [node])
        read = frozenset(k for k, x in enumerate(inputs) if x in seen)
        return CountedInts(node, like.kind, like.times, read, are_of_each(self._low, node))


def _as_integers(graph: fx.Graph, x: fx.Node, made: fx.Node) -> fx.Node:
    """What a node has made, and truths as integers."""
    if x.meta.get("dtype") is not torch.bool:
        return made
    return graph.call_function(aten._to_copy.default, (made,), {"dtype": torch.int64})

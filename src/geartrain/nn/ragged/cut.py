"""A lowered trace as two programs, and what they hand to one another.

steps forward ─► those that outputs or the way back need ─► slots ─► a routine
steps back    ─► those that gradients need               ─► slots ─► a routine
rooms that are written forward and read back             ─► residuals, side by side
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import fx

from geartrain.native.fused import At, Op, Step
from geartrain.native.ragged import RaggedStep, RaggedSteps, Way
from geartrain.nn.emit import emit
from geartrain.nn.places import Refused
from geartrain.nn.ragged.lower import Lowering
from geartrain.nn.ragged.over import sums_rows
from geartrain.nn.ragged.values import (
    BUNDLES,
    HELD,
    MEMBERS,
    NO_ROWS,
    Axes,
    Buffer,
    Constant,
    DraftStep,
    RaggedValue,
)
from geartrain.nn.split import needed_by

aten = torch.ops.aten
How: TypeAlias = Literal["product", "sum", "rows"]

MOST_WEIGHTS: Final = 1 << 18
"""As of derived kernels of rows."""


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
        index: Of ``rows``: their numbers.
    """

    operand: int
    how: How
    tensors: tuple[Tensors, ...]
    tangents: frozenset[int]
    padding: int = -1
    index: fx.Node | None = None


@final
class RaggedRoutine:
    """One program, and where a call finds its tensors.

    Args:
        drafts: Its steps.
        given: Buffers that lie elsewhere than in room of the call.
        ends: Where bundles begin and end.
        dtype: Of all numbers.

    Attributes:
        slots: By buffer that is not in between.
    """

    def __init__(
        self,
        drafts: Sequence[DraftStep],
        given: set[Buffer],
        ends: Buffer,
        dtype: torch.dtype,
    ) -> None:
        self.slots: dict[Buffer, int] = {}
        self._room: list[int] = []
        self._kinds: list[int] = []
        local = all(map(_is_local, drafts))
        if local:
            self._outer(ends)
        last: dict[Buffer, int] = {}
        for number, draft in enumerate(drafts):
            for buffer in (draft.out.buffer, *draft.read()):
                last[buffer] = number
        ending: dict[int, list[Buffer]] = {}
        for buffer, number in last.items():
            ending.setdefault(number, []).append(buffer)
        free: dict[tuple[int, int], list[int]] = {}
        own: dict[Buffer, int] = {}
        steps = []
        for number, draft in enumerate(drafts):
            places = [self._at(v, own, free, given) for v in (draft.out, *draft.reads)]
            index = -1 if draft.index is None else self._outer(draft.index)
            inside = -1 if draft.ends is None else self._outer(draft.ends)
            cells = -1 if draft.cells is None else self._outer(draft.cells)
            step = Step(
                Op(draft.op), draft.width, tuple(places), draft.many, draft.inner, draft.number
            )
            steps.append(
                RaggedStep(
                    Way(draft.way),
                    step,
                    draft.kind,
                    draft.times,
                    draft.source,
                    draft.source_times,
                    index,
                    inside,
                    cells,
                )
            )
            for buffer in ending.get(number, ()):
                slot = own.pop(buffer, None)
                if slot is not None:
                    free.setdefault((buffer.kind, buffer.entries), []).append(slot)
        self.steps = RaggedSteps(
            steps, self._room, self._kinds, dtype, self.slots[ends] if local else -1
        )
        self.size = len(self._room)

    def _outer(self, buffer: Buffer) -> int:
        """The slot of what lies elsewhere."""
        found = self.slots.get(buffer)
        if found is None:
            found = self.slots[buffer] = len(self._room)
            self._room.append(0)
            self._kinds.append(0)
        return found

    def _at(
        self,
        value: RaggedValue | None,
        own: dict[Buffer, int],
        free: dict[tuple[int, int], list[int]],
        given: set[Buffer],
    ) -> At:
        if value is None:
            return At()
        buffer = value.buffer
        if buffer.role != "room" or buffer in given:
            slot = self._outer(buffer)
        elif buffer in own:
            slot = own[buffer]
        else:
            unused = free.get((buffer.kind, buffer.entries))
            slot = unused.pop() if unused else len(self._room)
            if slot == len(self._room):
                self._room.append(buffer.entries)
                self._kinds.append(buffer.kind)
            own[buffer] = slot
        return At(slot, value.at, value.row, value.one)


def _is_local(draft: DraftStep) -> bool:
    """Whether a step leads from no bundle to another."""
    if draft.way is Way.MOVE:
        return False
    if draft.way is Way.TAKE:
        return draft.source == HELD and draft.kind == MEMBERS
    if draft.way is Way.ADD_AT:
        return draft.source == HELD and draft.kind == MEMBERS
    return draft.kind in (BUNDLES, MEMBERS)


@final
@dataclass(frozen=True, slots=True)
class CountedInts:
    """Row numbers that are read.

    Args:
        node: What they are computed by.
        kind, times: They are so many times the rows of that kind.
        inputs: Of which inputs.
    """

    node: fx.Node
    kind: int
    times: int
    inputs: frozenset[int]


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
        results = [t.buffer for t, _ in gradients.values()]
        results += [t.buffer for term in terms for t in term.tensors]
        back = _needed([*low.back.steps, *sums], results, sums)
        without = _needed(low.back.steps, results, [])
        asked = {b for d in back for b in d.read()} | set(results)
        ours = [d.out.buffer for d in low.forward.steps]
        residuals = tuple(dict.fromkeys(b for b in ours if b in asked and b.role == "room"))
        made = [t for t in outputs if isinstance(t, Tensors)]
        forward = _needed(low.forward.steps, [*residuals, *(t.buffer for t in made)], [])
        kept = set(residuals)
        tensors = {t.buffer: t for t, _ in gradients.values()}
        tensors |= {t.buffer: t for term in terms for t in term.tensors}
        own = tuple(t for b, t in tensors.items() if b.role == "room" and b not in kept)
        given = kept | {t.buffer for t in made}
        of_back = kept | {t.buffer for t in own}
        forward, back, without = (
            _together(steps, kept | {t.buffer for t in [*made, *tensors.values()]})
            for steps in (forward, back, without)
        )
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
        )

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
            known = low.values.get(d)
            if not isinstance(known, Constant) or known.number:
                raise Refused("a weight's gradient is of no output")
            return
        if target is aten.add.Tensor and len(args) == 2:
            yield from self._terms(operand, args[0], turned=turned)
            yield from self._terms(operand, args[1], turned=turned)
        elif target is aten.t.default:
            yield from self._terms(operand, args[0], turned=not turned)
        elif target is aten.mm.default and args[0].target is aten.t.default:
            pair = [args[0].args[0], args[1]]
            tensors = tuple(self._rows(x) for x in (reversed(pair) if turned else pair))
            if len({(t.buffer.kind, t.buffer.entries // t.tail[0]) for t in tensors}) != 1:
                raise Refused("a product of rows of two kinds")
            yield RaggedTerm(operand, "product", tensors, of)
        elif not turned and (found := self._added_up(d)) is not None:
            if low.shapes[low.operands[operand]] != found.tail:
                raise Refused("a sum of rows for other than a vector")
            yield RaggedTerm(operand, "sum", (found,), of)
        elif not turned and (table := self._table(d)) is not None:
            yield self._of_table(operand, *table[:2], of, table[2])
        else:
            raise Refused(f"a weight's gradient is of {target}")

    def _added_up(self, d: fx.Node) -> Tensors | None:
        """The rows of whose sum a node is, as a matrix."""
        low = self._low
        if d in low.summed:
            value = low.full(low.summed[d], late=True)
            return Tensors(self._tensor(value, late=True).buffer, (value.width,))
        rows = self._summed(d)
        return None if rows is None else self._rows(rows, flat=True)

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
        return None

    def _of_table(
        self, operand: int, rows: fx.Node, index: fx.Node, of: frozenset[int], padding: int
    ) -> RaggedTerm:
        found = self._low.ints_of(index)
        if found is None:
            raise Refused("rows of a table by numbers that are computed")
        self._low.ints(found[0])
        tensors = (self._rows(rows, flat=True),)
        return RaggedTerm(operand, "rows", tensors, of, padding, found[0])

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
        while d.target in (aten.view.default, aten.squeeze.dim, aten.squeeze.dims):
            d, args = args[0], args[0].args
        if d.target is not aten.sum.dim_IntList or not sums_rows(self._low, d):
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
        seen = _above(waiting)
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
        graph, made = fx.Graph(), {}
        for x in self._low.inputs:
            made[x] = graph.placeholder(x.name)
        needed = needed_by(found, made)
        for x in self._low.nodes:
            if x in needed:
                made[x] = graph.node_copy(x, made.__getitem__)
        graph.output(tuple(made[x] for x in found))
        return tuple(map(self._ints_of, found)), emit(graph, {})

    def _ints_of(self, node: fx.Node) -> CountedInts:
        like, inputs = self._low.like(node), self._low.inputs
        seen = _above([node])
        return CountedInts(
            node, like.kind, like.times, frozenset(k for k, x in enumerate(inputs) if x in seen)
        )


def _above(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they are made of."""
    seen: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        x = waiting.pop()
        if x not in seen:
            seen.add(x)
            waiting += x.all_input_nodes
    return seen


def _together(drafts: Sequence[DraftStep], asked: set[Buffer]) -> list[DraftStep]:
    """The same steps, with products that are just added up made and added in one,
    and rows that are just taken and added moved."""
    written, read = Counter(d.out.buffer for d in drafts), Counter()  # type: ignore[var-annotated]
    for draft in drafts:
        read.update(draft.read())
    factors: dict[Buffer, DraftStep] = {}
    found: list[DraftStep] = []
    for draft in drafts:
        buffer = draft.out.buffer
        factor = draft.way is Way.PLAIN and draft.op == Op.MUL
        if (factor or draft.way is Way.TAKE) and buffer.role == "room":
            if buffer not in asked and written[buffer] == read[buffer] == 1:
                factors[buffer] = draft
        (source, *_) = draft.reads or [None]
        product = factors.get(source.buffer) if source is not None else None
        if product is not None and source is not None and source.dense:
            if product.way is Way.TAKE:
                if draft.way is Way.ADD_AT:
                    found = [d for d in found if d is not product]
                    moved = replace(product, way=Way.MOVE, out=draft.out, cells=draft.index)
                    moved.many, moved.inner = draft.source, draft.source_times
                    found.append(moved)
                else:
                    found.append(draft)
                continue
            a, b = product.reads
            ones = [v for v in (a, b) if v is not None and v.one]
            of = replace(draft, reads=[a, b], width=product.width, op=0)
            whole = draft.op == Op.REDUCE and draft.inner == 1 and draft.many == product.width
            if draft.way is Way.PLAIN and whole and not ones:
                found = [d for d in found if d is not product]
                found.append(replace(of, way=Way.DOT, many=0))
                continue
            if draft.way is Way.SUM_OVER and len(ones) == 1:
                found = [d for d in found if d is not product]
                rows = b if ones[0] is a else a
                found.append(replace(of, way=Way.SUM_TIMES, reads=[rows, ones[0]]))
                continue
        found.append(draft)
    return found


def _needed(
    drafts: Sequence[DraftStep], roots: Sequence[Buffer], always: Sequence[DraftStep]
) -> list[DraftStep]:
    """Steps without which these buffers would not be what they are."""
    wanted, found = set(roots), []
    for draft in reversed(drafts):
        if draft.out.buffer in wanted or any(draft is each for each in always):
            found.append(draft)
            wanted.update(draft.read())
    return found[::-1]

"""Kinds of cases of ``hostile``: derived programs, as loops and bundles and memories call them, and
rows that are added up by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.derived.operands import Operands
from geartrain.derived.ragged.derivation import MOST_SEEN, derive_inside, derive_memory
from geartrain.derived.ragged.for_nodes import DerivedRagged
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.frames.message import Payload
from geartrain.native import calls, library, sums
from geartrain.native.ragged import RaggedSteps
from geartrain.native.sums import SumsById
from geartrain.nodes import looked_up
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import Held, Recalled
from geartrain.nodes.inside import Inside
from geartrain.nodes.looked_up import Lookup
from geartrain.nodes.loop.bound import CalledModules
from geartrain.nodes.loop.reads import Read, ReadTensor
from geartrain.nodes.ragged import AbstractRaggedChoice, AbstractRaggedProgram
from geartrain.nodes.remembering import Remembering, RememberingRead
from tests.rigs.called import CASES, DRAWING, WIDTH, random_trees
from tests.rigs.ragged_modules import H, Look, Meet, Mix, Pass, Point, Pool, Products
from tests.rigs.spoilt import EXTREMES, F64, REFUSALS, Draw, session_of

Found = Callable[[], list[Tensor | None]]
FAR = [x for x in EXTREMES if x < 0 or x > 2**30]
"""No row has such a number."""

MADE: Counter[str] = Counter()
"""How much C has been asked for, by what."""


def story() -> str:
    """What C has been asked for."""
    return "in C: " + ", ".join(f"{n} {what}" for what, n in sorted(MADE.items()))


def _counted(what: str, before: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any, **named: Any) -> Any:
        MADE[what] += 1
        return before(*args, **named)

    return counting


calls.forward = _counted("forwards", calls.forward)  # type: ignore[assignment]
calls.backward = _counted("backwards", calls.backward)  # type: ignore[assignment]
looked_up.multiply_sums = _counted(  # type: ignore[attr-defined]
    "products of sums", sums.multiply_sums
)
RaggedSteps.run = _counted("ragged", RaggedSteps.run)  # type: ignore[method-assign]


# Rows by number.


def id_sums(draw: Draw) -> Found:
    """Rows are added up in several goes; what is refused adds nothing."""
    limit, width = draw.one_of(0, 1, 5, 300), draw.one_of(0, 1, 3, 17)
    dtype = draw.one_of(F64, torch.float32)
    goes: list[list[tuple[Tensor, Tensor]]] = []
    for _ in range(draw.n(1, 5)):
        goes.append([])
        for _ in range(draw.n(0, 3)):
            n = draw.one_of(0, 1, 7, 80)
            ids = torch.from_numpy(draw.spoilt(draw.ints(limit, n), 0.15))
            rows = draw.floats(n, width, dtype=dtype)
            if draw.chance(0.1):
                rows = draw.one_of(rows[1:], rows[:, 1:], rows.half(), rows.flatten())
            if draw.chance(0.05):
                ids = draw.one_of(ids.int(), ids[:-1], ids[None])
            goes[-1].append((rows, ids))
    more = draw.n(0, 9)

    def run() -> list[Tensor | None]:
        total = SumsById(width, limit, dtype)
        found: list[Tensor | None] = []
        for number, pieces in enumerate(goes):
            try:
                total.add(pieces)
            except REFUSALS:
                found.append(torch.tensor(len(total)))
            if number == 2:
                total.extend(limit + more)
            if number % 2:
                ids, rows = total.take()
                found += [torch.from_numpy(ids.copy()), rows.clone()]
        ids, rows = total.take()
        return [*found, torch.from_numpy(ids), rows]

    return run


def tables(draw: Draw) -> Found:
    """Sums by row of a table meet it, and the weight behind it."""
    v, width, out, into = (
        draw.one_of(0, 1, 6, 300),
        draw.one_of(1, 4, 17),
        draw.n(1, 9),
        draw.n(0, 6),
    )
    table = nn.Parameter(draw.floats(v, width))
    first = draw.n(0, into)
    weight = nn.Parameter(draw.floats(out, width + into)) if draw.chance(0.8) else None
    bias = nn.Parameter(torch.zeros(out)) if weight is not None and draw.chance(0.5) else None
    columns = ((first, first + width),) if weight is not None and draw.chance(0.7) else None
    padding = draw.one_of(-1, -1, 0, v)
    ids = draw.random.permutation(v)[: draw.n(0, v)].astype(np.int64)
    ids = draw.spoilt(ids, 0.3)
    u = ids.size + (draw.one_of(-1, 1) if draw.chance(0.1) else 0)
    rows = draw.floats(max(u, 0), width if weight is None else out).nan_to_num()
    lookup = Lookup(table, weight, draw.chance(0.8), bias, columns, padding, draw.chance(0.2))
    parameters = [x for x in (table, weight, bias) if x is not None]
    # A weight of other columns than meet the table is one that nobody could have multiplied.
    odd = weight is not None and weight.shape[1] != width and columns is None

    def run() -> list[Tensor | None]:
        if odd:
            raise ValueError("no such product")
        grads = GradientSum(parameters)
        with torch.no_grad():
            lookup.add(torch.from_numpy(ids), rows, grads)
        return [grads.take(x) for x in parameters]

    return run


# Programs over rows of several kinds.


class Given(AbstractRaggedChoice):
    """A program from the first call on, where C is there."""

    light = True  # type: ignore[assignment]
    undecided = False  # type: ignore[assignment]

    def __init__(self, program: AbstractRaggedProgram | None) -> None:
        self._program = program

    @property
    def program(self) -> AbstractRaggedProgram | None:
        return None if library.current() is None else self._program

    @property
    def replaced(self) -> bool:
        return self.program is not None

    def take_over(self, before: AbstractRaggedChoice) -> None:
        return None  # its program is given

    def inside(self, inputs: Payload, inside: Inside) -> AbstractRaggedProgram | None:
        return self.program

    def at_once(self, inputs: Payload, inside: Inside) -> AbstractRaggedProgram | None:
        return self._program

    def memory(self, inputs: Payload, memory: Recalled) -> AbstractRaggedProgram | None:
        return self.program if memory.lengths.all() else None

    def read_at_once(self, inputs: Payload, memory: Payload) -> None:
        return None  # it has its program

    def listed(self, inputs: Payload, memory: Payload | None) -> None:
        return None  # C would ask a loop for the rows

    def give_up(self, why: str) -> None:
        self._program = None


CUTS: dict[type[nn.Module], Any] = {}


def _gradients(outputs: Sequence[Tensor]) -> Payload:
    return tuple([torch.linspace(-1, 1, y.numel(), dtype=F64).view(y.shape) for y in outputs])


def bundles(draw: Draw) -> Found:
    """Modules that look inside their bundles."""
    kind = draw.one_of(Pool, Mix, Pass, Meet)
    module, true = kind().double(), draw.lengths()
    lengths = draw.spoilt(true, 0.2)
    n = int(true.sum())
    edges = {}
    if kind is Pass:
        edges = draw.edges(true, 3)
        edges["bond"] = edges.pop("type")
        if draw.chance(0.1) and edges["source"].size:
            name = draw.one_of("source", "target", "bond")
            edges[name] = edges[name][1:]
    columns = {k: torch.from_numpy(x) for k, x in edges.items()}
    x = draw.laid_out(draw.floats(n, H))
    # Who only reads edges does not mind.
    wrong = (lengths < 0).any() or float(lengths.astype(np.float64).sum()) != n
    wrong = wrong and kind is not Pass
    segment = torch.from_numpy(np.arange(true.size).repeat(true))
    inside = Inside(torch.from_numpy(lengths), segment, columns)

    def run() -> list[Tensor | None]:
        program = None
        if library.current() is not None:
            if kind not in CUTS:
                CUTS[kind] = derive_inside(kind().double(), (x,), columns, pools=kind is Pool)
            cut = RaggedProgram(CUTS[kind], Operands(module))
            program = DerivedRagged(cut, 0, dict.fromkeys(columns, True))
        elif wrong:
            raise ValueError("no such bundles")
        kernel = Remembering(module, list(module.parameters()), Given(program))
        into = GradientSum(module.parameters())
        with torch.no_grad():
            outputs, graph = kernel.record((x,), inside)
            found = kernel.answer(graph, _gradients(outputs), (x,), None, into, inside)
        return [*outputs, *found, *map(into.take, module.parameters())]

    return run


def memories(draw: Draw) -> Found:
    """Rows that read a memory, by handles that may be anything."""
    kind = draw.one_of(Point, Look, Products)
    module, lengths = kind().double(), draw.lengths()
    if draw.chance(0.8):
        lengths = lengths + 1
    many = 2 if kind is Point else 1
    payload = tuple([draw.floats(int(lengths.sum()), H).nan_to_num() for _ in range(many)])
    n = draw.one_of(0, 1, 5) if lengths.size else 0
    which = draw.spoilt(draw.ints(lengths.size, n), 0.15)
    column = torch.from_numpy(draw.spoilt(draw.ints(1, n), 0.3))
    inputs = draw.laid_out(draw.floats(n, H).nan_to_num()), column

    def run() -> list[Tensor | None]:
        program = None
        held = Held("memory")
        first = held.hold(payload, np.full(lengths.size, 1 << 60), lengths, sums=True)
        held.hold(payload, np.full(lengths.size, 1 << 60), lengths, sums=True)
        memory = Recalled(held, which + first)
        if library.current() is not None:
            if kind not in CUTS:
                CUTS[kind] = derive_memory(kind().double(), inputs, memory.some(MOST_SEEN), 1)
            program = DerivedRagged(RaggedProgram(CUTS[kind], Operands(module)), 1, {})
        kernel = RememberingRead(module, list(module.parameters()), 1, Given(program))
        into = GradientSum(module.parameters())
        with torch.no_grad():
            outputs, graph = kernel.record(inputs, memory)
            found = kernel.answer(graph, _gradients(outputs), inputs, None, memory, into)
        rest = [total[: payload[0].shape[0]] for total in held.sums() if total is not None]
        weights = map(into.take, module.parameters())
        return [*outputs, *found, *rest, *map(_filled, module.parameters(), weights)]

    return run


def _filled(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """A gradient of nothing is zero."""
    return torch.zeros_like(parameter) if gradient is None else gradient


# Loops.


def _modules(graph: gt.Graph) -> list[nn.Module]:
    return [t.function for t in graph.throughs() if isinstance(t.function, nn.Module)]


def _spoilt_instances(draw: Draw, name: str) -> list[gt.Instance]:
    """Trees, or sets that go round, of which columns mean harm."""
    found = []
    children = {"sums of children": None, "means of children": None, "children side by side": 2}
    trees = name in children
    rng = draw.random
    for k in range(draw.n(1, 6)):
        if trees:
            one = random_trees(children[name])[k % 5]
            vertex = {c: draw.spoilt(x, 0.08) for c, x in one.vertex.items()}
            found.append(gt.Instance(one.inputs, vertex))
            continue
        rows = draw.one_of(0, 1, 3, 9)
        x = torch.from_numpy(rng.standard_normal((rows, WIDTH)))
        turns = draw.one_of(-(2**63), -1, 0, 1, 2, 5)
        token = draw.spoilt(draw.ints(5, rows), 0.1)
        found.append(gt.Instance({"x": x}, {"token": token}, value={"turns": turns}))
    return found


def loops(draw: Draw) -> Found:
    """Loops whose calls C makes, with columns that mean harm."""
    name = draw.one_of(*CASES)
    make, _ = CASES[name]

    def made() -> tuple[gt.Graph, list[nn.Module]]:
        graph = make("whole")
        return graph, _modules(graph)

    # Rows of tables that meet a weight are of the weights of now in C, elsewhere of those of then.
    found: Found = session_of(draw, made, _spoilt_instances(draw, name), drain="words" in name)
    return found


def drawing(draw: Draw) -> Found:
    """The same of modules that draw for each row, with and without C as much as each other."""
    name = draw.one_of(*DRAWING)
    make = DRAWING[name]

    def made() -> tuple[gt.Graph, list[nn.Module]]:
        graph = make("whole")
        return graph, _modules(graph)

    found: Found = session_of(draw, made, _spoilt_instances(draw, name), drain=True)
    return found


def reads(draw: Draw) -> Found:
    """Rows that C is told to read and that are not there."""
    name = draw.one_of("sums of children", "children side by side", "an input that goes on")
    make, data = CASES[name]
    at, shift, far = draw.n(0, 5), draw.n(0, 99), draw.one_of(*FAR)
    spoilt: list[bool] = []

    def made() -> tuple[gt.Graph, list[nn.Module]]:
        graph = make("whole")
        return graph, _modules(graph)

    run: Found = session_of(draw, made, data())
    before = CalledModules.made_of

    def made_of(self: CalledModules, stage: Any, rows: Any) -> list[ReadTensor] | None:
        tensors = before(self, stage, rows)
        told = sum(len(t.reads) for t in tensors or ())
        if tensors is None or len(spoilt) != at or not told:
            spoilt.append(False)
            return tensors
        harmed = [replace(t, reads=[_harmed(r, shift, far) for r in t.reads]) for t in tensors]
        spoilt.append(any(a is not b for a, b in zip(harmed, tensors, strict=True)))
        return harmed

    def both() -> list[Tensor | None]:
        if library.current() is None:
            if any(spoilt):
                raise ValueError("rows that are not there")
            return run()
        with mock.patch.object(CalledModules, "made_of", made_of):
            return run()

    return both


def _harmed(read: Read, shift: int, far: int) -> Read:
    """A row that is not there, or members that begin behind their end."""
    starts, rows = read.starts, read.rows.copy()
    if starts is not None and shift % 2 and starts[-1] > 0:
        starts = starts.copy()
        starts[:-1][shift % (starts.size - 1)] = starts[-1] + 1 + abs(far) // 2
        return replace(read, starts=starts)
    if rows.size:
        rows[shift % rows.size] = far
    return replace(read, rows=rows)


KINDS = [id_sums, tables, bundles, memories, loops, reads, drawing]

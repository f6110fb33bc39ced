"""Run by ``test_devices``: the models of the oracle on devices that do not exist.

torch's fake tensors have shapes and devices and no numbers. An operation on tensors of two devices
raises as on real ones, and so does a look at a number, which would wait for the device. All that
routes is numpy and real, so that graphs run to their end. It is a program of its own, as the
imagined kind of device stays registered. Its arguments are the names of cases, behind "all" or
"few": with "few", a case runs on a few small instances in one way, and the next case in the next
way, as an operation on a fake tensor takes a thousand times as long as on a real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from benchmarks.own.programs import PROGRAMS
from geartrain import device as transfer
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.frames import packer
from geartrain.frames.instance import Instance
from geartrain.frames.precision import Precision
from geartrain.graph import owners
from geartrain.graph.ends import Losing
from geartrain.graph.graph import Graph
from geartrain.graph.region import Run
from geartrain.graph.through import Through
from geartrain.nn import TreeLSTMBranch
from geartrain.nodes import sums
from geartrain.nodes.inside import Inside
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loss import Metric, Objective, accuracy, cross_entropy
from geartrain.nodes.stack import StackNode
from geartrain.nodes.sums import Sums
from geartrain.parts.rules import Clip, Flush, Instances, Rules
from geartrain.runtime.base import Feeder
from geartrain.runtime.simulated import Simulated
from geartrain.sharing.locks import NoLock
from geartrain.sharing.shared_weights import SharedWeightsState
from geartrain.whole.tree import module as tree_module
from geartrain.whole.tree.loader import Forest, forest_of
from tests.rigs import models, whole
from tests.rigs.passes import AT_ONCE, Quiet

_setup_privateuseone_for_python_backend("imagined")
ONE, TWO, HOST = (torch.device(name) for name in ("imagined:0", "imagined:1", "cpu"))
H = models.H
fetched: list[torch.Size] = []


class Never:
    """An event that a device never reaches; nobody reads what was copied."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        """As if it had been reached."""


def fetch(x: Tensor) -> Tensor:
    fetched.append(x.shape)
    return torch.empty(x.shape, dtype=x.dtype)


def chains(parent: Tensor, slot: Tensor, inside: Inside) -> Forest:
    """Trees of the same sizes: those of the columns have no numbers, but are on the host."""
    assert parent.is_cpu and slot.is_cpu
    lengths = inside.lengths_on_host()
    vertices = [np.arange(n) for n in lengths.tolist()]
    above = [np.where(v == v.size - 1, -1, v + 2 - v % 2) for v in vertices]
    return forest_of(np.concatenate(above), np.concatenate(vertices) % 2, lengths)


owners.asked_for = lambda region: True  # else run="whole" would have to be said of each
transfer.pinned = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # type: ignore[misc]
transfer.recorded = lambda device: Never()  # type: ignore[assignment, misc]
sums.read = lambda values: [0.0] * len(values)  # type: ignore[assignment, attr-defined, misc]
transfer._fetched = fetch
tree_module._forest = chains
transfer.Verdicts.look = lambda self, wait=False: None  # type: ignore[method-assign, misc]
add = Sums.add
Sums.add = lambda s, name, values, *rest: None if values.is_cpu else add(s, name, values, *rest)  # type: ignore[method-assign, misc]
# These look at numbers on the host, and tensors of the host are fake here too.
Objective._refuse_classes = lambda *args: None  # type: ignore[method-assign, misc]
packer.check_finite = lambda *args: None  # type: ignore[assignment, attr-defined]


def cells(run: Run = "steps") -> models.Model:
    """``trees`` with a row kernel for its branches, a broadcast, and losses of some rows."""
    model = models.trees()
    words, branch = nn.Embedding(11, 2 * H), TreeLSTMBranch(H)
    readout = nn.Sequential(nn.Linear(H, H), nn.ReLU(), nn.Linear(H, 5))
    graph = Graph(vertex=("parent", "slot", "label"))
    nodes = graph.loop(name="nodes", run=run)
    leaves = graph.input("word").through(words, name="words")
    h, c = leaves.split(H, H)
    nodes.join(graph.concat(h, c, on=("vertex",), how="tuple"))
    some = Metric(accuracy, where=lambda m: m.slot == 0)
    nodes.through(readout, name="readout", take=0).loss(
        cross_entropy, target="label", metrics={"accuracy": Metric(accuracy), "left": some}
    )
    inner, root = nodes.where(lambda m: m.parent >= 0)
    pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
    nodes.join(pairs.through(branch, name="branch"))
    root.stop()
    return models.Model(graph, {"w": words, "b": branch, "r": readout}, model.plain, model.data, {})


def lists(keep: str, run: Run = "steps") -> models.Model:
    """``lists`` without torch's fused cells, which know no fake tensors."""
    model = models.lists()
    word, step = nn.Linear(H, H).double(), nn.Sequential(nn.Linear(H, H), nn.Tanh()).double()
    graph = Graph(vertex=("token",), value=("label",))
    state = graph.loop(run=run)
    state.join(graph.input("h"))
    more, done = state.through(step, name="step", keep=keep).where(lambda m: m.vertex < m.size - 1)
    state.join(more.move(vertex=lambda m: m.vertex + 1))
    read = done.through(word, name="word", keep=keep)
    read.loss(cross_entropy, target="label", metrics={"accuracy": accuracy})
    return models.Model(graph, {"w": word, "s": step}, model.plain, model.data, {})


def flat() -> models.Model:
    """A message an edge, added up where it arrives, beside what is there."""
    model = models.edges()
    sent, both = nn.Linear(H, H).double(), nn.Linear(2 * H, 1).double()
    graph = Graph(edge=("type",), value=("aim",))
    rows = graph.input("h")
    some, alone = rows.where(lambda m: m.in_degree > 0)
    arrived = rows.flatmap("edge").through(sent, name="sent").move(vertex=lambda m: m.target)
    sums = arrived.group("vertex", "in_degree", how="sum")
    messages = graph.merge(sums, alone.through(torch.zeros_like, name="nothing"))
    some.stop()
    graph.concat(rows, messages, on="vertex").through(both, name="both").loss(
        lambda y, aim: (y[:, 0] - aim) ** 2, target="aim"
    )
    return models.Model(graph, {"s": sent, "b": both}, model.plain, model.data, {})


def reduced(how: str) -> models.Model:
    """Vertices grouped whole: sums, means and maxima of unequally many."""
    model = models.edges()
    first, last = nn.Linear(H, H).double(), nn.Linear(H, 1).double()
    graph = Graph(edge=("type",), value=("aim",))
    rows = graph.input("h").through(first, name="first")
    rows.group("instance", "size", how=how).through(last, name="last").loss(
        lambda y, aim: (y[:, 0] - aim) ** 2, target="aim"
    )
    return models.Model(graph, {"f": first, "l": last}, model.plain, model.data, {})


def modules_to_a_loss() -> models.Model:
    """Modules that one node computes, one of which reads a column."""
    model = models.edges()
    first, last = nn.Linear(H, H).double(), nn.Linear(H, 1).double()
    graph = Graph(edge=("type",), value=("aim",))
    rows = graph.input("h").through(first, name="first")
    rows = rows.through(lambda h, at: h * at[:, None], name="at", read="vertex")
    rows.through(last, name="last").loss(lambda y, aim: (y[:, 0] - aim) ** 2, target="aim")
    return models.Model(graph, {"f": first, "l": last}, model.plain, model.data, {})


def own(name: str) -> models.Model:
    """A program of ``benchmarks.own``, whose loops do not look at payloads."""
    program = PROGRAMS[name](H)
    data = [program.instance(item) for item in program.generate(4, seed=1)]
    return models.Model(program.graph(), dict(program.named_children()), None, data, {})


OWN = ("childsum", "seq2seq", "pointer")
WHOLE = ("whole trees", "whole trees, own cells", "whole lists", "whole lists, RNN")

CASES: Mapping[str, partial[models.Model]] = {
    **{f"lists, {keep}": partial(lists, keep) for keep in ("activations", "inputs", "graph")},
    "trees": partial(models.trees),
    "lists in one firing": partial(lists, "inputs", "auto"),
    "trees in one firing": partial(models.trees, run="auto"),
    "cells in one firing": partial(cells, "auto"),
    "modules in one firing": partial(modules_to_a_loss),
    **{f"{name} in one firing": partial(own, name) for name in OWN},
    "flat": partial(flat),
    "cells": partial(cells),
    "gated": partial(whole.gated),
    "choice": partial(whole.choice),
    **{name: partial(whole.MODELS[name]) for name in WHOLE},
    **{how: partial(reduced, how) for how in ("sum", "mean", "max")},
}


class Way(NamedTuple):
    """Where parts and rows are, and whether no row is fetched."""

    name: str
    devices: Sequence[torch.device]
    fed: torch.device | None
    nobody_waits: bool


WAYS = (
    Way("all on one device, fed there", (ONE,), ONE, True),
    Way("all on one device, fed on the host", (ONE,), None, True),
    Way("two devices", (TWO, ONE), TWO, True),
    Way("a device and the host", (ONE, HOST), None, False),
)


class How(NamedTuple):
    """What else a session may ask for."""

    name: str
    precision: Precision = "full"
    shared: bool = False


HOWS = (How("as it comes"), How("bf16 in shared weights", "bf16", True))


def put(module: nn.Module, device: torch.device) -> None:
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and parameter.device != device:
                shape, dtype = parameter.shape, parameter.dtype
                inner._parameters[name] = nn.Parameter(
                    torch.empty(shape, dtype=dtype, device=device)
                )


def few(data: list[Instance]) -> list[Instance]:
    """Two instances of different sizes, neither the largest nor the very smallest."""

    def size(given: Instance) -> int:
        return sum(len(column) for column in (*given.vertex.values(), *given.edge.values()))

    return sorted(data, key=size)[1:8:5]


def run(
    model: models.Model,
    data: list[Instance],
    devices: Sequence[torch.device],
    fed: torch.device | None,
    how: How,
    *,
    in_one_firing: bool,
) -> None:
    """Train and evaluate a pass."""
    there: Iterator[torch.device] = cycle(devices)
    for module in model.modules.values():
        put(module if how.precision == "full" else module.float(), next(there))
    often = 7 if len(data) > 7 else 2
    every = Instances(often // 2) if in_one_firing else often
    rules = Rules(
        optimizer=partial(torch.optim.SGD, lr=0.1, foreach=False),
        # A step on the host looks at numbers.
        update_every=Flush() if HOST in devices else every,
        clip=Clip(1.0, 2.0),
    )
    for operator in model.graph.operators:
        if isinstance(operator, Through | Losing):
            operator.dry_run.settled = True  # which looks at numbers, and here there are none
    parts = make_parts(model.graph, rules)
    settings = Settings(max_active=5, ramp=AT_ONCE, precision=how.precision, device=fed)
    sharing = SharedWeightsState(parts, 2, NoLock) if how.shared else None
    workers = 1 if in_one_firing and sharing is None else 2  # its parts may not live apart
    engine = Engine(model.graph, parts, settings, workers, sharing=sharing)
    whole = [
        node for node in engine.wiring.nodes.values() if isinstance(node, LoopNode | StackNode)
    ]
    assert whole or not in_one_firing or len(devices) > 1
    for train in (True, False):
        engine.begin(train=train)
        Simulated(workers, seed=1).run(engine, Feeder(iter(data)), Quiet())
        engine.check_empty()
        engine.sums()
    assert all(part.version or HOST in devices for part in parts.values())
    assert {part.device for part in parts.values()} == set(devices)


BY_AUTOGRAD = (
    *("lists, inputs", "lists, graph", "lists in one firing", "trees", "trees in one firing"),
    *("choice", "whole trees, own cells", "modules in one firing"),
)
"""Autograd has one queue for imagined devices, so these are not spread over two."""


def ways_of(case: str) -> Iterator[tuple[Way, How]]:
    """All ways in which a case may go."""
    alone = case in [f"{name} in one firing" for name in OWN]  # by steps, if on several
    for way in WAYS[:2] if alone else WAYS:
        if TWO not in way.devices or case not in BY_AUTOGRAD:
            for how in HOWS if way.fed is None else HOWS[:1]:
                yield way, how


imagined = FakeTensorMode(allow_non_fake_inputs=True)
how_much, *names = sys.argv[1:]
for case in names:
    build, number, ways = CASES[case], [*CASES].index(case), [*ways_of(case)]
    if how_much == "few":
        ways = [ways[(number + 3) % len(ways)]]
    for way, how in ways:
        # Zeros like rows of the host are the host's, and so is their gradient.
        nobody_waits = way.nobody_waits and (case != "flat" or way.fed is not None)
        fetched.clear()
        made = build()
        data = made.data if how_much == "all" else few(made.data)
        with imagined:
            run(made, data, way.devices, way.fed, how, in_one_firing="in one firing" in case)
        assert bool(fetched) != nobody_waits, f"{case}, {way}, {how}: fetched {fetched[:5]}"
        sys.stdout.write(f"{case}, {way.name}, {how.name}\n")

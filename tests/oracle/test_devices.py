"""Parts on devices: rows meet their weights wherever those are, and firings wait for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from benchmarks.own.programs import PROGRAMS
from geartrain import device as transfer
from geartrain.derived.kernel import DerivedKernel
from geartrain.engine import engine as engine_module
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.engine.worker import WorkerState
from geartrain.errors import GraphError, NonFiniteError
from geartrain.frames.instance import Instance
from geartrain.frames.message import Forward
from geartrain.graph import owners
from geartrain.graph.graph import Graph
from geartrain.graph.region import Run
from geartrain.nn import TreeLSTMBranch, TreeLSTMLeaf, WholeTree
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loss import cross_entropy
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.stack import StackNode
from geartrain.parts import part as part_module
from geartrain.parts.rules import Flush, Instances, Part, Rules
from geartrain.parts.usable import require_one_device
from geartrain.runtime.base import Feeder
from geartrain.runtime.threads import Threads
from geartrain.sharing.shared_weights import SharedWeights
from geartrain.train.options import Compute
from geartrain.train.session import Session
from tests.rigs import models, whole
from tests.rigs.passes import AT_ONCE, Order, Quiet, assert_same_loss, one_pass

ROOT = Path(__file__).parents[2]
IMAGINED = ROOT / "tests" / "rigs" / "imagined.py"
cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: torch sees no CUDA device here"
)
IN_ONE_FIRING = {
    "lists in one firing": lambda: models.lists(run="auto"),
    "trees in one firing": lambda: models.trees(run="auto"),
    "edges in one firing": lambda: models.edges(run="auto"),
    "bundles in one firing": lambda: models.bundles(run="auto"),
}
ALL = {
    **models.MODELS,
    **whole.MODELS,
    **IN_ONE_FIRING,
}
LOOKING = ("halting", "moe", "depths")
"""Programs of ``benchmarks.own`` whose loops look at payloads."""
OWN = ("childsum", "typed", "seq2seq", "messages", "hierarchy", "skip", "pointer", "grower")
"""Programs whose loops do not."""
HOST, GPU, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


def in_all_ways(how_much: str, cases: tuple[str, ...], ways: int) -> None:
    """Run the cases of ``imagined``; each tells of every way that it went."""
    environment = os.environ | {
        "GEARTRAIN_NATIVE": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(ROOT / "tests" / "rigs" / "imagined.py"),
            how_much,
            *cases,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == ways


CASES = [
    (("lists, activations", "lists, inputs", "trees", "flat", "sum"), 28),
    (("cells", "lists, graph", "gated", "mean", "max", "choice"), 34),
    (("whole trees", "whole trees, own cells", "whole lists", "whole lists, RNN"), 26),
    (("lists in one firing", "trees in one firing", "cells in one firing"), 16),
    (("modules in one firing",), 5),
    (("childsum in one firing", "pointer in one firing", "seq2seq in one firing"), 9),
]


@pytest.mark.timeout(300)
def test_no_operation_meets_two_devices_and_no_firing_looks_at_a_number() -> None:
    """Of every other model: all of them, in every way, are slow."""
    in_all_ways("few", tuple(case for cases, _ in CASES for case in cases)[::2], 11)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cases", "ways"), CASES)
def test_nor_with_more_data_in_every_way(cases: tuple[str, ...], ways: int) -> None:
    in_all_ways("all", cases, ways)


def graph_on(devices: dict[str, str]) -> tuple[Graph, list[Instance]]:
    """Rows through two parts, ``first`` and ``last``."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    graph = Graph(value=("label",))
    rows = graph.input("x").through(Part(first, "first", device=devices.get("first")))
    rows.through(Part(last, "last", device=devices.get("last"))).loss(cross_entropy, target="label")
    data = [Instance({"x": torch.randn(2, 3)}, value={"label": i % 2}) for i in range(9)]
    return graph, data


@pytest.mark.parametrize(("devices", "default"), [({"last": "cuda:97"}, "cpu"), ({}, "cuda:97")])
def test_a_device_that_is_not_there_is_named_with_what_there_is(
    devices: dict[str, str], default: str
) -> None:
    graph, _ = graph_on(devices)
    whose = "part 'last'" if devices else "Compute"
    with pytest.raises(ValueError, match=rf"^{whose}: device='cuda:97' does not exist; .*sees cpu"):
        Session(graph, compute=Compute(device=default))


def test_a_session_on_the_cpu_by_name_trains_as_one_without() -> None:
    weights = []
    for device in (None, "cpu", torch.device("cpu")):
        graph, data = graph_on({})
        Session(graph, rules=Rules(update_every=4), compute=Compute(device=device)).fit(
            data, epochs=2
        )
        weights.append([p.detach().clone() for m in graph.modules() for p in m.parameters()])
    for other in weights[1:]:
        assert_close(other, weights[0], rtol=0, atol=0)


def test_only_a_graph_with_something_elsewhere_asks_where_rows_are() -> None:
    def spread(
        graph: Graph, device: torch.device | None = None, moved: torch.nn.Module | None = None
    ) -> bool:
        parts = make_parts(graph, Rules())
        if moved is not None:  # weights without numbers are refused before
            moved.to("meta")
        engine = Engine(graph, parts, Settings(device=device))
        found = {node.place.spread for node in engine.wiring.nodes.values()}
        assert len(found) == 1
        return found.pop()

    graph, _ = graph_on({})
    assert not spread(graph)
    assert not spread(graph, HOST)
    assert spread(graph, torch.device("meta"))
    graph, _ = graph_on({})
    assert spread(graph, moved=next(iter(graph.modules())))
    graph = Graph(value=("label",))
    weighing = torch.nn.CrossEntropyLoss(torch.ones(2, device="meta"), reduction="none")
    graph.input("x").through(torch.nn.Linear(3, 2)).loss(weighing, target="label")
    assert spread(graph)


def test_rows_that_lie_elsewhere_come_to_a_graph_that_is_all_on_the_host() -> None:
    moved = []
    graph, data = graph_on({})
    engine = Engine(graph, make_parts(graph, Rules()), Settings())
    packed = engine.controller.packer.pack(data[:2])
    there = packed.inputs["x"].payload.to("meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_fetched", lambda x: moved.append(x.shape) or torch.zeros(x.shape))
        engine.controller.admit(
            replace(packed, inputs={"x": replace(packed.inputs["x"], payload=there)})
        )
    assert moved == [(4, 3)]


def own(name: str) -> models.Model:
    """A program of ``benchmarks.own``."""
    torch.manual_seed(0)
    program = PROGRAMS[name](8).double()
    items = program.generate(12, seed=1)

    def plain(given: Instance) -> torch.Tensor:
        return program.plain(items[data.index(given)])

    data = [program.instance(item, torch.float64) for item in items]
    return models.Model(program.graph(), dict(program.named_children()), plain, data, {})


def gradients(name: str, devices: list[torch.device], workers: int) -> dict[str, torch.Tensor]:
    model = ALL[name]() if name in ALL else own(name)
    for k, module in enumerate(model.modules.values()):
        module.to(devices[k % len(devices)])
    parts = make_parts(model.graph, Rules(update_every=Flush()))
    engine = Engine(model.graph, parts, Settings(max_active=7, ramp=AT_ONCE), workers)
    engine.begin(train=True)
    Threads(workers, kernel_threads=1).run(engine, Feeder(iter(model.data)), Quiet())
    engine.check_empty()
    found = {"loss": torch.tensor(engine.sums()["loss"])}
    for part in parts.values():
        names = {p: n for n, p in part.module.named_parameters()}
        for parameter in part.parameters:
            gradient = part.gradient.take(parameter)
            if gradient is None and name in LOOKING:  # no row may have come to an expert
                continue
            assert gradient is not None and gradient.device == part.device
            found[f"{part.name}.{names[parameter]}"] = gradient.to_dense().cpu().clone()
    return found


@cuda
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "devices", [[GPU], [GPU, HOST], [HOST, GPU]], ids=["gpu", "gpu and cpu", "cpu and gpu"]
)
def test_gradients_of_a_gpu_are_those_of_the_cpu(
    name: str, workers: int, devices: list[torch.device]
) -> None:
    assert_close(
        gradients(name, devices, workers), gradients(name, [HOST], 1), rtol=1e-9, atol=1e-11
    )


@cuda
@pytest.mark.parametrize("name", [*OWN, *LOOKING])
@pytest.mark.parametrize("workers", [1, 2])
def test_so_are_those_of_programs_whose_loops_run_whole_there(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_are_asked_for(monkeypatch)
    assert_close(gradients(name, [GPU], workers), gradients(name, [HOST], 1), rtol=1e-9, atol=1e-11)


def all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can runs whole on a device, as if run="whole" had been said of it."""
    monkeypatch.setattr(owners, "asked_for", lambda region: True)


def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes ask where rows are, and run loops as where C cannot read these."""
    all_are_asked_for(monkeypatch)
    monkeypatch.setattr(engine_module, "_is_spread", lambda *args: True)
    monkeypatch.setattr(Place, "on_host", False)


@pytest.mark.parametrize("name", [*IN_ONE_FIRING, *OWN, *LOOKING])
def test_loops_that_run_whole_as_on_a_device_find_the_gradients_of_autograd(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_device(monkeypatch)
    model = ALL[name]() if name in ALL else own(name)
    outcome = one_pass(model.graph, model.data, order=Order(max_active=7))
    loops = [n for n in outcome.engine.wiring.nodes.values() if isinstance(n, LoopNode)]
    assert loops and all(loop.place.device == HOST for loop in loops)
    assert not any(loop.listing.firings or loop.taping.used or loop.together for loop in loops)
    assert all(loop.calls for loop in loops)
    total = model.total()
    assert_same_loss(outcome, total)
    weights = [p for part in outcome.parts.values() for p in part.parameters]
    wanted = torch.autograd.grad(total, weights, materialize_grads=True)
    sums = [outcome.parts[part] for part in outcome.parts for _ in outcome.parts[part].parameters]
    for weight, part, gradient in zip(weights, sums, wanted, strict=True):
        found = part.gradient.take(weight)
        found = torch.zeros_like(weight) if found is None else found.to_dense()
        assert_close(found, gradient, rtol=1e-9, atol=1e-11)


def nodes_where(
    graph: Graph, moved: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> list[AbstractNode]:
    """Nodes of a graph of which some modules are elsewhere."""
    all_are_asked_for(monkeypatch)
    monkeypatch.setattr(part_module, "require_made", lambda *args: None)  # these have no numbers
    for module in moved:
        module.to("meta")
    parts = make_parts(graph, Rules(update_every=Flush()))
    return [*Engine(graph, parts, Settings(device=META)).wiring.nodes.values()]


def test_a_loop_runs_whole_on_the_device_of_all_of_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.trees(run="whole")
    nodes = nodes_where(model.graph, [*model.modules.values()], monkeypatch)
    (loop,) = [node for node in nodes if isinstance(node, LoopNode)]
    assert loop.place.device == META and not loop.place.on_host
    model = models.edges(run="whole")
    first, *_ = model.modules.values()
    with pytest.raises(GraphError, match="its modules lie on several devices: cpu, meta; give run"):
        nodes_where(model.graph, [first], monkeypatch)


@pytest.mark.parametrize(("run", "whole"), [("auto", False), ("whole", True)])
def test_on_a_device_a_loop_runs_whole_where_that_is_asked_for(run: Run, whole: bool) -> None:
    model = models.trees(run=run)
    parts = make_parts(model.graph, Rules(update_every=Flush()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_is_spread", lambda *args: True)
        nodes = Engine(model.graph, parts, Settings()).wiring.nodes.values()
    assert any(isinstance(node, LoopNode) for node in nodes) == whole
    assert not any(isinstance(node, StackNode) for node in nodes)


def test_a_loop_of_functions_alone_runs_by_steps_where_rows_may_lie_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_are_asked_for(monkeypatch)
    for device, runs_whole in ((None, True), (META, False)):
        graph = Graph(value=("label",))
        state = graph.loop(name="state", run="auto")
        state.join(graph.input("x", step=0).through(torch.nn.Linear(3, 2)))
        on, done = state.through(torch.tanh).where(lambda m: m.step < 2)
        state.join(on.move(step=lambda m: m.step + 1))
        done.loss(cross_entropy, target="label")
        engine = Engine(graph, make_parts(graph, Rules()), Settings(device=device, reach=False))
        found = any(isinstance(node, LoopNode) for node in engine.wiring.nodes.values())
        assert found == runs_whole


def test_modules_up_to_their_losses_run_as_one_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = graph_on({})
    (stack,) = nodes_where(graph, [*graph.modules()], monkeypatch)
    assert isinstance(stack, StackNode) and stack.place.device == META
    graph, _ = graph_on({})
    nodes = nodes_where(graph, [next(iter(graph.modules()))], monkeypatch)
    assert len(nodes) > 1 and not any(isinstance(node, StackNode) for node in nodes)


def test_they_learn_there_what_they_learn_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for _ in range(2):
        graph, data = graph_on({})
        Session(graph, rules=Rules(update_every=4)).fit(data, epochs=2)
        weights.append([p.detach() for m in graph.modules() for p in m.parameters()])
        as_on_a_device(monkeypatch)
    assert_close(weights[1], weights[0], rtol=0, atol=0)


@cuda
def test_shared_weights_in_bf16_on_a_gpu_learn_as_on_the_cpu() -> None:
    losses = []
    for device in ("cpu", "cuda"):
        graph, data = graph_on({})
        rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Flush())
        two = Threads(2, kernel_threads=1)
        session = Session(
            graph,
            rules=rules,
            runtime=two,
            compute=Compute(device=device, precision="bf16"),
            sharing=SharedWeights(),
        )
        losses.append([epoch.loss for epoch in session.fit(data, epochs=3).history])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@cuda
def test_a_derived_kernel_finds_the_same_gradient_on_a_gpu() -> None:
    found = []
    for device in (HOST, GPU):
        torch.manual_seed(0)
        norm = torch.nn.LayerNorm(3, dtype=torch.float64)
        kernel = DerivedKernel("norm", norm.to(device))
        x, dy = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
        _, residuals = kernel.forward((x.to(device),))
        assert kernel.refused is None
        into = GradientSum(norm.parameters())
        (dx,) = kernel.backward((dy.to(device),), residuals, None, into)
        assert dx is not None and dx.device == device
        weight = into.take(norm.weight)
        assert weight is not None
        found.append((dx.cpu(), weight.cpu()))
    assert_close(found[1], found[0])


@cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parts_on_two_gpus_find_the_gradients_of_the_cpu() -> None:
    two = [GPU, torch.device("cuda", 1)]
    assert_close(gradients("trees", two, 2), gradients("trees", [HOST], 1), rtol=1e-9, atol=1e-11)


@cuda
@pytest.mark.parametrize(
    "name",
    [
        *("lists", "trees", "edges", *whole.MODELS),
        *(*IN_ONE_FIRING, *OWN),
    ],
)
def test_no_firing_on_a_gpu_waits_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first of a function that could not be tried before: its rows are looked at."""
    fire = WorkerState.fire

    def watched(worker: WorkerState) -> Firing:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return fire(worker)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    loops, forward = [], LoopNode.forward

    def noted(node: LoopNode, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        loops.append(node.name)
        return forward(node, port, batches, train)

    monkeypatch.setattr(LoopNode, "forward", noted)
    model = ALL[name]() if name in ALL else own(name)
    in_one_firing = name in IN_ONE_FIRING or name in OWN
    if in_one_firing:
        all_are_asked_for(monkeypatch)
    every = Instances(5) if in_one_firing else 5  # loops go by steps where parts count rows
    rules = Rules(optimizer=partial(torch.optim.Adam, lr=1e-3), update_every=every)
    session = Session(model.graph, rules=rules, compute=Compute(device="cuda"))
    session.fit(model.data, epochs=1)
    monkeypatch.setattr(WorkerState, "fire", watched)
    fit = session.fit(model.data, epochs=3)
    assert sum(fit.history[-1].updates.values()) and fit.history[-1].loss > 0
    assert bool(loops) == in_one_firing


@cuda
def test_ids_that_no_table_has_do_not_end_the_process_when_a_module_is_tried() -> None:
    """A look-up out of bounds is an error on the host; on a GPU every later call would fail."""
    losses = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        tree = WholeTree(TreeLSTMLeaf(4, 4, vocabulary=5), TreeLSTMBranch(4))
        graph = Graph(vertex=("parent", "slot"))
        words = graph.input("word", shape=(), dtype=torch.int64, bundle=True)
        h = words.through(tree, read=("parent", "slot"), inside=True)
        h.through(torch.nn.Linear(4, 2)).loss(cross_entropy, target="slot")
        columns = {"parent": [2, 2, -1], "slot": [0, 1, 0]}
        data = [Instance({"word": torch.tensor([k, 4 - k, -1])}, columns) for k in range(5)]
        rules = Rules(optimizer=partial(torch.optim.Adagrad, lr=0.1), update_every=Flush())
        session = Session(graph, rules=rules, compute=Compute(device=device))
        losses.append([epoch.loss for epoch in session.fit(data, epochs=2).history])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@cuda
def test_a_checkpoint_of_a_gpu_continues_on_the_cpu_and_back(tmp_path: Path) -> None:
    path, losses = tmp_path / "kept.safetensors", []
    for epochs, device in ((1, "cuda"), (2, "cpu"), (3, "cuda")):
        graph, data = graph_on({})
        session = Session(graph, rules=Rules(update_every=4), compute=Compute(device=device))
        if epochs > 1:
            session.load(path)
        losses.append(session.fit(data, epochs=epochs).history[-1].loss)
        session.save(path)
    graph, data = graph_on({})
    history = Session(graph, rules=Rules(update_every=4)).fit(data, epochs=3).history
    assert losses == pytest.approx([epoch.loss for epoch in history], rel=1e-4)


@cuda
def test_predictions_of_a_gpu_are_on_the_cpu() -> None:
    graph, data = graph_on({"last": "cuda"})
    first = Session(graph).predict(data)
    graph, _ = graph_on({})
    assert_close(first, Session(graph).predict(data), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_finite_weights(device: str) -> None:
    graph, data = graph_on({})
    bad = torch.full((2, 3), 3e38)
    data[4] = Instance({"x": bad}, value={"label": 1}, key="the bad one")
    session = Session(graph, rules=Rules(update_every=4), compute=Compute(device=device))
    with pytest.raises(NonFiniteError, match=r"'loss|part '"):
        session.fit(data, epochs=1)
    assert all(p.isfinite().all() for m in graph.modules() for p in m.parameters())


def test_a_part_whose_weights_lie_on_two_devices_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module.bias = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"part 'torn': its parameters lie on cpu, meta"):
        require_one_device("torn", module)

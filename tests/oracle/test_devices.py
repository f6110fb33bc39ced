"""Parts on devices: rows meet their weights wherever those are, and firings wait for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from geartrain import device as transfer
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.engine.worker import Firing, WorkerState
from geartrain.errors import NonFiniteError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nn import TreeLSTMBranch, TreeLSTMLeaf, WholeTree
from geartrain.nn.derived import DerivedKernel
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.loss import cross_entropy
from geartrain.parts.rules import Flush, Part, Rules
from geartrain.parts.usable import require_one_device
from geartrain.runtime.base import Feeder
from geartrain.runtime.threads import Threads
from geartrain.sharing.shared_weights import SharedWeights
from geartrain.train.options import Compute
from geartrain.train.session import Session
from tests.rigs import models, whole
from tests.rigs.passes import AT_ONCE, Quiet

ROOT = Path(__file__).parents[2]
IMAGINED = ROOT / "tests" / "rigs" / "imagined.py"
cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: torch sees no CUDA device here"
)
ALL = {**models.MODELS, **whole.MODELS}
HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
]


@pytest.mark.timeout(300)
def test_no_operation_meets_two_devices_and_no_firing_looks_at_a_number() -> None:
    in_all_ways("few", tuple(case for cases, _ in CASES for case in cases), 15)


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


def gradients(name: str, devices: list[torch.device], workers: int) -> dict[str, torch.Tensor]:
    model = ALL[name]()
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
@pytest.mark.parametrize("name", ["lists", "trees", "edges", *whole.MODELS])
def test_no_firing_on_a_gpu_waits_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first of a function that could not be tried before: its rows are looked at."""
    fire = WorkerState.fire

    def watched(worker: WorkerState) -> Firing:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return fire(worker)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model = ALL[name]()
    rules = Rules(optimizer=partial(torch.optim.Adam, lr=1e-3), update_every=5)
    session = Session(model.graph, rules=rules, compute=Compute(device="cuda"))
    session.fit(model.data, epochs=1)
    monkeypatch.setattr(WorkerState, "fire", watched)
    fit = session.fit(model.data, epochs=3)
    assert sum(fit.history[-1].updates.values()) and fit.history[-1].loss > 0


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

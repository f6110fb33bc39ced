"""Parts on devices: rows meet their weights wherever those are, and firings wait for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import models
import pytest
import torch
from rig import AT_ONCE, Quiet
from torch.testing import assert_close

from geartrain.engine.engine import Engine, Settings, make_parts
from geartrain.engine.worker import Firing, WorkerState
from geartrain.errors import NonFiniteError
from geartrain.ir.graph import Graph
from geartrain.ir.instance import Instance
from geartrain.ir.loss import cross_entropy
from geartrain.optim.part import Flush, Part, PartState, Rules
from geartrain.runtime.base import Feeder
from geartrain.runtime.threads import Threads
from geartrain.train.session import Session

HERE = Path(__file__).parent
cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: torch sees no CUDA device here"
)
HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_no_operation_meets_two_devices_and_no_firing_looks_at_a_number() -> None:
    environment = os.environ | {
        "GEARTRAIN_NATIVE": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "imagined.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 37


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
    whose = "part 'last'" if devices else "Session"
    with pytest.raises(ValueError, match=rf"^{whose}: device='cuda:97' does not exist; .*sees cpu"):
        Session(graph, device=default)


def test_a_session_on_the_cpu_by_name_trains_as_one_without() -> None:
    weights = []
    for device in (None, "cpu", torch.device("cpu")):
        graph, data = graph_on({})
        Session(graph, rules=Rules(update_every=4), device=device).fit(data, epochs=2)
        weights.append([p.detach().clone() for m in graph.modules() for p in m.parameters()])
    for other in weights[1:]:
        assert_close(other, weights[0], rtol=0, atol=0)


def gradients(name: str, devices: list[torch.device], workers: int) -> dict[str, torch.Tensor]:
    model = models.MODELS[name]()
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
@pytest.mark.parametrize("name", models.MODELS)
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
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parts_on_two_gpus_find_the_gradients_of_the_cpu() -> None:
    two = [GPU, torch.device("cuda", 1)]
    assert_close(gradients("trees", two, 2), gradients("trees", [HOST], 1), rtol=1e-9, atol=1e-11)


@cuda
@pytest.mark.parametrize("name", ["lists", "trees", "edges"])
def test_no_firing_on_a_gpu_waits_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fire = WorkerState.fire

    def watched(worker: WorkerState) -> Firing:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return fire(worker)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(WorkerState, "fire", watched)
    model = models.MODELS[name]()
    rules = Rules(optimizer=partial(torch.optim.Adam, lr=1e-3), update_every=20)
    fit = Session(model.graph, rules=rules, device="cuda").fit(model.data, epochs=2)
    assert sum(fit.history[-1].updates.values()) and fit.history[-1].loss > 0


@cuda
def test_a_checkpoint_of_a_gpu_continues_on_the_cpu_and_back(tmp_path: Path) -> None:
    path, losses = tmp_path / "kept.safetensors", []
    for epochs, device in ((1, "cuda"), (2, "cpu"), (3, "cuda")):
        graph, data = graph_on({})
        session = Session(graph, rules=Rules(update_every=4), device=device)
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


@cuda
def test_a_loss_of_a_gpu_that_is_nan_stops_the_run_and_leaves_finite_weights() -> None:
    graph, data = graph_on({})
    bad = torch.full((2, 3), 3e38)
    data[4] = Instance({"x": bad}, value={"label": 0}, key="the bad one")
    session = Session(graph, rules=Rules(update_every=4), device="cuda")
    with pytest.raises(NonFiniteError, match=r"'loss|part '"):
        session.fit(data, epochs=1)
    assert all(p.isfinite().all() for m in graph.modules() for p in m.parameters())


def test_a_part_whose_weights_lie_on_two_devices_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module.bias = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"part 'torn': its parameters lie on cpu, meta"):
        PartState("torn", module, Rules())

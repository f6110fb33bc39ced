"""What comes back from worker processes at the end of a pass: buffers of every kind, errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.processes.returned import Returned
from tests.rigs.passes import hosts, processes

SGD = gt.Rules(optimizer=partial(torch.optim.SGD, lr=1e-3), update_every=4)


class Centred(nn.Module):
    """Less a running mean, which is written to; what it counts, and has seen, it makes anew."""

    mean: Tensor
    calls: Tensor
    seen: Tensor
    last: Tensor | None

    def __init__(self, width: int, *, kept: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width), persistent=kept)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=kept)
        self.register_buffer("seen", torch.zeros(0), persistent=kept)
        self.register_buffer("last", None, persistent=kept)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            self.calls = self.calls + 1
            self.seen = torch.cat([self.seen, x.detach().mean().view(1)])
            self.last = x.detach()
        return x - self.mean


def trained(runtime: AbstractRuntime, *, weights: bool, kept: bool) -> tuple[Any, Centred]:
    torch.manual_seed(0)
    centred = Centred(3, kept=kept)
    module = nn.Sequential(nn.Linear(3, 3), centred) if weights else centred
    graph = gt.Graph()
    rows = graph.input("x", bundle=True).through(nn.Linear(3, 3), name="below")
    rows = rows.through(module, name="centred", keep="graph")
    rows.through(nn.Linear(3, 2), name="out").loss(lambda x: x.square().sum(1))
    session = gt.Session(graph, rules=SGD, runtime=runtime, max_active=1)
    data = [gt.Instance({"x": torch.randn(4, 3) + 7}) for _ in range(6)]
    fit = session.fit(data, epochs=2, valid=data)
    return [(e.loss, e.valid["loss"]) for e in fit.history], centred


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_buffers_that_grow_appear_or_are_kept_in_no_checkpoint_come_back(weights, kept) -> None:
    losses, mine = trained(gt.Threads(1), weights=weights, kept=kept)
    for runtime in (processes(2), hosts(2)):
        found, there = trained(runtime, weights=weights, kept=kept)
        assert_close(torch.tensor(found), torch.tensor(losses))
        assert int(there.calls) == int(mine.calls) == 12 and len(there.seen) == 12
        assert_close(dict(there.named_buffers()), dict(mine.named_buffers()))


def test_statistics_of_a_module_without_weights_are_in_checkpoints(tmp_path: Path) -> None:
    def session() -> tuple[gt.Session, nn.BatchNorm1d]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3, affine=False)
        graph = gt.Graph()
        rows = graph.input("x", bundle=True).through(norm, name="norm", keep="graph")
        rows.through(nn.Linear(3, 2), name="out").loss(lambda x: x.square().sum(1))
        return gt.Session(graph, rules=SGD), norm

    data = [gt.Instance({"x": torch.randn(4, 3) + 7}) for _ in range(6)]
    (first, norm), (second, other) = session(), session()
    first.fit(data, epochs=1)
    first.save(tmp_path / "it.safetensors")
    second.load(tmp_path / "it.safetensors")
    assert_close(other.state_dict(), norm.state_dict())
    assert float(norm.running_mean.mean()) > 1  # type: ignore[union-attr, operator]
    assert second.evaluate(data).metrics == pytest.approx(first.evaluate(data).metrics)


def test_an_error_while_parts_are_taken_back_is_raised_when_all_others_have_been_heard(
    monkeypatch,
) -> None:
    def take(self: Returned, what: str, document: Any, tensors: Any) -> None:
        raise RuntimeError(f"no room for {what}")

    graph = gt.Graph()
    rows = graph.input("x").through(nn.Linear(3, 3), name="below")
    rows.through(nn.Linear(3, 2), name="out").loss(lambda x: x.square().sum(1))
    runtime = gt.Processes(2, kernel_threads=1, patience_s=0.5)
    session = gt.Session(graph, rules=SGD, runtime=runtime)
    data = [gt.Instance({"x": torch.randn(1, 3)}) for _ in range(6)]
    session.fit(data, epochs=1)
    living = runtime._pool
    with monkeypatch.context() as patched:
        patched.setattr(Returned, "take", take)
        with pytest.raises(RuntimeError, match="no room for part"):
            session.fit(data, epochs=2)
    assert session.fit(data, epochs=2).history[-1].epoch == 2
    assert living is not None and runtime._pool is living  # nobody was ended
    runtime.close()


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_module_with_parametrizations_trains_as_on_threads(wrap) -> None:
    found = []
    for runtime in (gt.Threads(1), processes(2), hosts(2)):
        torch.manual_seed(0)
        module = getattr(nn.utils.parametrizations, wrap)(nn.Linear(3, 3))
        graph = gt.Graph()
        rows = graph.input("x").through(nn.Sequential(module, nn.Tanh()), name="below")
        rows.through(nn.Linear(3, 2), name="out").loss(lambda x: x.square().sum(1))
        session = gt.Session(graph, rules=SGD, runtime=runtime, max_active=1)
        session.fit([gt.Instance({"x": torch.randn(1, 3)}) for _ in range(8)], epochs=2)
        found.append(dict(module.named_parameters()) | dict(module.named_buffers()))
    for there in found[1:]:
        assert_close(there, found[0])

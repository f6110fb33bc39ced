"""A next fit is that of a fresh session: nothing of those before is in it but what is saved.

one session   fit ─► something happens ─► fit
a fresh one   what was saved ─► the same happens ─► fit     ─► equal to the last bit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.derived import auto
from geartrain.derived.auto import MeasuredChoice
from geartrain.derived.program import Program
from geartrain.graph.streams import LoopStreams
from geartrain.nodes.loop.bound import CalledModules
from geartrain.nodes.loop.listing import Listing
from geartrain.nodes.loop.module import TurnModule
from geartrain.nodes.loop.node import LoopNode
from tests.rigs.products import halved

WIDTH, EXPERTS, MOST = 6, 2, 5
MANY = 72
"""Instances after which, twice, kernels have been chosen."""


@pytest.fixture(autouse=True)
def _derived_kernels_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured, and found better or not, is the same every time; little work is enough."""
    monkeypatch.setattr(auto, "compare", lambda *given: 0.5)
    monkeypatch.setattr(auto, "FIRINGS", 4)
    monkeypatch.setattr(auto, "ROWS", 120)


class Step(nn.Module):
    """A new state, and what is spent by it."""

    def __init__(self) -> None:
        super().__init__()
        self.new, self.halt = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.worth = 1.5
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, h: Tensor, spent: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.worth * self.new(h) + self.shift)
        return h, spent + torch.sigmoid(self.halt(h))


class Expert(nn.Module):
    """Adds something to a state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, spent: Tensor) -> tuple[Tensor, Tensor]:
        return h + torch.relu(self.inner(h)), spent


class Halting(nn.Module):
    """A loop that payloads end, with one of several experts in each of its turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.step, self.readout = Step(), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def graph(self) -> gt.Graph:
        graph = gt.Graph(value=("label",))
        states = graph.loop(name="states")
        begun = graph.input("h", step=0).through(lambda h: (h, h[:, :1] * 0), name="begun")
        states.join(begun)
        routed = states.route(lambda m: (m.payload[0][:, 0] > 0).long(), EXPERTS)
        said = [
            s.through(e, name=f"e{k}")
            for k, (s, e) in enumerate(zip(routed, self.experts, strict=True))
        ]
        stepped = graph.merge(*said).through(self.step, name="step")
        done, more = stepped.where(
            lambda m: (m.payload[1][:, 0] > 1.6) | torch.from_numpy(m.step + 1 >= MOST)
        )
        states.join(more.move(step=lambda m: m.step + 1))
        scores = done.through(self.readout, name="readout", take=0)
        scores.loss(gt.cross_entropy, target="label")
        return graph


def instances(n: int, seed: int) -> list[gt.Instance]:
    random = np.random.default_rng(seed)
    h = torch.from_numpy(random.standard_normal((n, WIDTH)).astype(np.float32))
    return [gt.Instance({"h": h[i : i + 1]}, value={"label": i % 3}, key=i) for i in range(n)]


def session(update: int = 24, **more: Any) -> tuple[Halting, gt.Session]:
    network = Halting()
    rules = gt.Rules(
        optimizer=partial(gt.FusedAdam, lr=1e-2),
        update_every=gt.Instances(update),
        average="instances",
    )
    ramp = gt.Schedule(ramp=gt.Ramp(over=0))
    return network, gt.Session(network.graph(), rules=rules, max_active=24, schedule=ramp, **more)


def by_hand(session: gt.Session) -> None:
    """Weights are written to, once so that torch counts it, and once so that it does not."""
    with torch.no_grad():
        for part in session.parts.values():
            for k, parameter in enumerate(part.module.parameters()):
                where = parameter if k % 2 else parameter.data
                where.mul_(0.5)


def other_memory(session: gt.Session) -> None:
    """Parameters lie elsewhere."""
    for part in session.parts.values():
        for parameter in part.module.parameters():
            parameter.data = parameter.data.clone() - 0.125


def other_rate(session: gt.Session) -> None:
    for part in session.parts.values():
        assert part.optimizer is not None
        part.optimizer.param_groups[0]["lr"] = 0.07


def frozen(session: gt.Session) -> None:
    session.parts["step"].frozen = True


def hooked(session: gt.Session) -> None:
    """A hook makes another function of a module that had a derived kernel."""
    module = session.parts["step"].module
    assert isinstance(module, nn.Module)
    module.register_forward_hook(lambda module, given, found: (found[0] * 0.5, found[1]))


def step_of(session: gt.Session) -> Step:
    module = session.parts["step"].module
    assert isinstance(module, Step)
    return module


def other_number(session: gt.Session) -> None:
    """A number that code of a module reads."""
    step_of(session).worth = 0.75


def other_buffer(session: gt.Session) -> None:
    """Another tensor stands in the place of a buffer."""
    step_of(session).shift = torch.full((WIDTH,), 0.25)


def other_forward(session: gt.Session) -> None:
    """A module has a forward of its own."""
    step = step_of(session)
    inner = step.forward
    step.forward = lambda h, spent: inner(0.5 * h, spent)


def no_gradient(session: gt.Session) -> None:
    """A weight learns no more."""
    step_of(session).new.weight.requires_grad_(False)


def evaluated(session: gt.Session) -> None:
    session.evaluate(instances(30, 9))
    session.predict(instances(7, 8))


def nothing(session: gt.Session) -> None:
    pass


HAPPENINGS = (
    *(nothing, by_hand, other_memory, other_rate, frozen, hooked, evaluated),
    *(other_number, other_buffer, other_forward, no_gradient),
)
"""Each is asked of both sessions."""


@halved(happens={f.__name__: f for f in HAPPENINGS}, update=[24, 10])
def test_the_next_fit_is_that_of_a_fresh_session(
    happens: Callable[[gt.Session], None], update: int, tmp_path: Path
) -> None:
    network, one = session(update)
    for epoch in (1, 2, 3):
        one.fit(instances(MANY, 0), epochs=epoch)
    steps = {t.name: t for t in one.graph.throughs()}
    assert steps["step"].experience.chosen == "derived"
    one.save(tmp_path / "before.safetensors")
    fresh_network, fresh = session(update)
    fresh.load(tmp_path / "before.safetensors")
    for each in (one, fresh):
        happens(each)
        each.fit(instances(50, 1), epochs=4)  # other data, and fewer of them
        each.fit(instances(72, 0), epochs=5)
    require_equal(network, one, fresh_network, fresh)
    assert one.statistics()["versions"] == fresh.statistics()["versions"]


@pytest.mark.usefixtures("needs_kernels")
def test_a_fit_calls_modules_as_the_one_before_and_has_none_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    for owner, name in ((CalledModules, "shaped"), (LoopStreams, "__init__")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), told))
    _, one = session()
    for epoch in (1, 2, 3):
        one.fit(instances(MANY, 0), epochs=epoch)
    assert told
    told.clear()
    one.fit(instances(MANY, 0), epochs=4)
    assert not told
    room = listing_of(one)._room
    assert room is not None and room.modules and room.buffers is not None
    assert not room.buffers.buffers and not room.words.size
    for module in room.modules.values():
        assert isinstance(module, TurnModule) and not module.slots
        assert not module.arena.rows and not module.fleeting.rows


def counted(call: Callable[..., Any], told: list[str]) -> Callable[..., Any]:
    def noted(*given: Any, **more: Any) -> Any:
        told.append(call.__qualname__)
        return call(*given, **more)

    return noted


def listing_of(session: gt.Session) -> Listing:
    assert session.state.engine is not None
    (node,) = [n for n in session.state.engine.wiring.nodes.values() if isinstance(n, LoopNode)]
    return node.listing


def test_the_next_fit_is_that_of_a_fresh_session_with_other_updates(tmp_path: Path) -> None:
    """What was kept of updates of one size is not what those of another want."""
    network, one = session(24)
    one.fit(instances(MANY, 0), epochs=2)
    one.save(tmp_path / "before.safetensors")
    found = []
    for update in (24, 8):
        network, each = session(update)
        each.load(tmp_path / "before.safetensors")
        each.fit(instances(72, 0), epochs=4)
        found.append([p.detach().clone() for p in network.parameters()])
    assert not all(map(torch.equal, *found))
    again, other = session(8)
    other.load(tmp_path / "before.safetensors")
    for epoch in (3, 4):
        other.fit(instances(72, 0), epochs=epoch)
    assert all(map(torch.equal, again.parameters(), found[1]))


@pytest.mark.parametrize("at", [0, 1, 30, 71])
def test_after_a_failure_in_the_middle_a_fit_is_that_of_a_fresh_session(
    at: int, tmp_path: Path
) -> None:
    network, one = session()
    one.fit(instances(MANY, 0), epochs=2)
    bad = instances(72, 0)
    bad[at] = gt.Instance({"h": torch.full((1, WIDTH), torch.nan)}, value={"label": 0}, key="bad")
    with pytest.raises(gt.DataError, match="bad"):
        one.fit(bad, epochs=3)
    require_fresh(network, one, tmp_path)


def test_after_a_module_has_raised_a_fit_is_that_of_a_fresh_session(tmp_path: Path) -> None:
    network, one = session()
    one.fit(instances(MANY, 0), epochs=2)
    calls: Iterator[int] = iter(range(100))

    def raises(*given: object) -> None:
        if next(calls) == 2:
            raise RuntimeError("enough")

    hook = network.readout.register_forward_pre_hook(raises)
    with pytest.raises(gt.WorkerError, match="enough"):
        one.fit(instances(144, 0), epochs=3)
    hook.remove()
    require_fresh(network, one, tmp_path)


def require_fresh(network: Halting, one: gt.Session, folder: Path) -> None:
    """The next fit is that of a session that was loaded with what this one has."""
    one.save(folder / "after.safetensors")
    fresh_network, fresh = session()
    fresh.load(folder / "after.safetensors")
    for each in (one, fresh):
        each.fit(instances(72, 0), epochs=3)
    require_equal(network, one, fresh_network, fresh)


def require_equal(network: Halting, one: gt.Session, other: Halting, fresh: gt.Session) -> None:
    for mine, its in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    losses = [each.state.position.history[-1].loss for each in (one, fresh)]
    assert losses[0] == losses[1]
    staleness = [each.state.position.history[-1].staleness for each in (one, fresh)]
    assert staleness[0] == staleness[1]


def programs_of(session: gt.Session) -> dict[str, Program]:
    """The derived kernels of the last fit, by name of the module."""
    assert session.state.engine is not None
    found: dict[str, Program] = {}
    for node in session.state.engine.wiring.nodes.values():
        for inner in node._inner if isinstance(node, LoopNode) else ():
            if isinstance(inner.choice, MeasuredChoice) and inner.choice._derived is not None:
                found[inner.name] = inner.choice._derived
    return found


STAY = (nothing, by_hand, other_memory, other_rate, frozen, evaluated, no_gradient)
GO = (other_number, other_buffer, hooked, other_forward)


@pytest.mark.parametrize("happens", STAY + GO, ids=lambda f: f.__name__)
def test_programs_stay_from_fit_to_fit_unless_what_they_are_made_of_has_changed(
    happens: Callable[[gt.Session], None],
) -> None:
    _, one = session()
    one.fit(instances(MANY, 0), epochs=2)
    before = programs_of(one)
    assert {"step", "e0", "e1"} <= before.keys()
    happens(one)
    one.fit(instances(50, 1), epochs=3)
    after = programs_of(one)
    assert after["e0"] is before["e0"] and after["e1"] is before["e1"]
    assert (after.get("step") is before["step"]) is (happens in STAY)


def test_programs_stay_where_an_engine_in_between_had_no_rows() -> None:
    _, one = session()
    one.fit(instances(MANY, 0), epochs=2)
    before = programs_of(one)
    one.state.ready_again()
    assert not programs_of(one)
    one.fit(instances(50, 1), epochs=3)
    assert programs_of(one) == before

"""One pass over data without a session: graph, parts, engine, feeder and runtime put together.

Order(...)  how deliveries are permuted: runtime, workers, policy, seed, max_active, max_rows
accumulate  a pass without a step ─► losses, and the gradient of every parameter
train       a pass with steps     ─► losses, versions, staleness
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from geartrain.engine.controller import Ramp
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.mailbox import (
    AbstractPolicy,
    BackwardFirst,
    FullestFirst,
    OldestFirst,
    RandomOrder,
    Sweeps,
)
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.parts.part import PartState
from geartrain.parts.rules import Flush, Rules
from geartrain.parts.trained import StepTaken
from geartrain.runtime.base import AbstractRuntime, Feeder
from geartrain.runtime.hosts.hosts import Hosts
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.simulated import Simulated
from geartrain.runtime.threads import Threads
from tests.rigs.on_ray import on_ray

POLICIES = ("sweeps", "fullest", "backward", "oldest", "random")
AT_ONCE = Ramp(over=0)


class Quiet:
    """A watch that looks at nothing."""

    def fired(self, worker: int, firing: Firing, start_s: float, end_s: float) -> None:
        """Not of interest."""

    def stepped(self, worker: int, step: StepTaken, now_s: float) -> None:
        """Not of interest."""

    def finished(self, engine: Engine, now_s: float) -> None:
        """Not of interest."""

    def waited(self, worker: int, seconds: float) -> None:
        """Not of interest."""

    def carried(self, sender: int, receiver: int, messages: int, nbytes: int) -> None:
        """Not of interest."""


@cache
def processes(workers: int) -> Processes:
    """One for all tests of a process: making workers takes longer than most tests."""
    return Processes(workers, kernel_threads=1)


@cache
def hosts(workers: int) -> Hosts:
    """Likewise, with workers that have nothing in common with this process, reached by tcp."""
    return Hosts(workers, kernel_threads=1, socket_files=False)


@dataclass(frozen=True)
class Order:
    """One way to permute deliveries."""

    runtime: str = "simulated"
    workers: int = 1
    policy: str = "sweeps"
    seed: int = 0
    jitter: float = 0.0
    max_active: int = 16
    max_rows: int = 4096
    reach: bool = True

    def make_runtime(self) -> AbstractRuntime:
        if self.runtime == "threads":
            return Threads(self.workers, kernel_threads=1)
        if self.runtime == "processes":
            return processes(self.workers)
        if self.runtime == "hosts":
            return hosts(self.workers)
        if self.runtime == "ray":
            return on_ray(self.workers)
        return Simulated(self.workers, seed=self.seed, jitter=self.jitter)

    def make_policy(self, worker: int) -> AbstractPolicy:
        if self.policy == "random":
            return RandomOrder(97 * self.seed + worker)
        known = {
            "sweeps": lambda: Sweeps(enough=20),
            "fullest": FullestFirst,
            "backward": BackwardFirst,
            "oldest": OldestFirst,
        }
        return known[self.policy]()

    def settings(self) -> Settings:
        return Settings(
            max_active=self.max_active,
            ramp=AT_ONCE,
            max_rows=self.max_rows,
            policy=self.make_policy,
            reach=self.reach,
        )


ORDERS = (
    Order(),
    Order(policy="fullest"),
    Order(max_active=1),
    Order(policy="random", seed=1, max_active=50),
    Order(policy="backward", max_rows=1, max_active=7),
    Order(policy="oldest", max_rows=3),
    Order(workers=3, jitter=0.9, seed=2, policy="random"),
    Order(workers=4, jitter=0.5, seed=3, policy="backward", max_rows=5),
    Order("threads", 1),
    Order(reach=False, max_rows=5),
    Order("threads", 2, "random", 4),
    Order("threads", 4, "backward", max_active=50, max_rows=7),
    Order("processes", 2, "random", 5, max_active=7),
    Order("hosts", 2, "random", 6, max_active=7),
)
"""A fixed few, for graphs that are not drawn at random."""


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Any order of deliveries."""
    runtime = draw(st.sampled_from(("simulated", "simulated", "simulated", "threads")))
    return Order(
        runtime,
        draw(st.sampled_from((1, 2, 4)) if runtime == "threads" else st.integers(1, 4)),
        draw(st.sampled_from(POLICIES)),
        draw(st.integers(0, 999)),
        draw(st.sampled_from((0.0, 0.3, 0.9))),
        draw(st.integers(1, 50)),
        draw(st.sampled_from((1, 2, 3, 5, 17, 4096))),
        draw(st.booleans()),
    )


@dataclass
class Outcome:
    """What a pass left behind."""

    sums: Mapping[str, tuple[float, float]]
    engine: Engine
    parts: Mapping[str, PartState]
    feeder: Feeder
    seconds: float
    gradients: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    collected: Mapping[str, Sequence[object]] = field(default_factory=dict)


def one_pass(
    graph: Graph,
    data: Iterable[Instance],
    order: Order = Order(),
    *,
    parts: Mapping[str, PartState] | None = None,
    rules: Rules | None = None,
    train: bool = True,
    collect: bool = False,
    watch: Quiet | None = None,
    placement: Mapping[str, int] | None = None,
    on_bad: str = "raise",
    engine: Engine | None = None,
    runtime: AbstractRuntime | None = None,
) -> Outcome:
    """Feed all instances; nothing may be left anywhere afterwards."""
    runtime = runtime or order.make_runtime()
    if engine is None:
        if parts is None:
            parts = make_parts(graph, rules or Rules(update_every=Flush()))
        engine = Engine(graph, parts, order.settings(), runtime.workers, placement)
    engine.begin(train=train, collect=collect)
    feeder = Feeder(iter(data), on_bad)  # type: ignore[arg-type]
    seconds = runtime.run(engine, feeder, watch or Quiet())
    engine.check_empty()
    collected = engine.collected() if collect else {}
    return Outcome(engine.sums(), engine, engine.parts, feeder, seconds, {}, collected)


def accumulate(
    graph: Graph,
    data: Iterable[Instance],
    order: Order = Order(),
    **more: object,
) -> Outcome:
    """A pass without steps; ``gradients`` holds the sum for every parameter that got one."""
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Flush())
    outcome = one_pass(graph, data, order, rules=rules, **more)  # type: ignore[arg-type]
    for part, state in outcome.parts.items():
        for name, parameter in state.module.named_parameters():
            gradient = state.gradient.take(parameter)
            if gradient is not None:
                outcome.gradients[part, name] = (
                    gradient.to_dense() if gradient.is_sparse else gradient.clone()
                )
    return outcome


def autograd(total: Tensor, modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], Tensor]:
    """Plain PyTorch's gradient of a total, by part and parameter; zero where there is none."""
    named = {
        (part, name): p for part, module in modules.items() for name, p in module.named_parameters()
    }
    for p in named.values():
        p.grad = None
    if total.requires_grad:
        total.backward()
    found = {
        key: torch.zeros_like(p)
        if p.grad is None
        else (p.grad.to_dense() if p.grad.is_sparse else p.grad).clone()
        for key, p in named.items()
    }
    for p in named.values():
        p.grad = None
    return found


def assert_same_gradients(
    got: Mapping[tuple[str, str], Tensor],
    want: Mapping[tuple[str, str], Tensor],
    tolerance: float = 1e-12,
) -> None:
    """Per parameter, relative to its largest entry."""
    assert set(got) <= set(want)
    for key, expected in want.items():
        found = got.get(key, torch.zeros_like(expected))
        scale = max(float(expected.abs().max()), 1e-8)
        worst = float((found - expected).abs().max()) / scale
        assert worst < tolerance, f"gradient of {key} is off by {worst:.2e} of its largest entry"


def assert_same_loss(outcome: Outcome, total: Tensor, tolerance: float = 1e-12) -> None:
    loss = outcome.sums.get("loss", (0.0, 0.0))[0]
    assert abs(loss - float(total.detach())) <= tolerance * max(1.0, abs(float(total.detach())))


def weights_of(modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], Tensor]:
    """Copies of all parameters."""
    return {
        (part, name): p.detach().clone()
        for part, module in modules.items()
        for name, p in module.named_parameters()
    }


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

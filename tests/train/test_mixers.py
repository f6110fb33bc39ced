"""Every way of mixing in a session: both runtimes, resuming, workers that come and go."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.engine.instrument import AbstractInstrument, Exchanged
from geartrain.errors import WorkerError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loss import cross_entropy
from geartrain.parts.rules import Rules
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.costs import Costs
from geartrain.runtime.events import Join, Leave, Pause
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.simulated import Simulated
from geartrain.runtime.threads import Threads
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.exchanges.centre import DelayedNesterov, ElasticAverage
from geartrain.sharing.exchanges.foreign import CompensatedNeighbours, StalenessAware
from geartrain.sharing.exchanges.gossip import DecentralizedSGD, PairAverage
from geartrain.sharing.exchanges.periodic import DiLoCo, PeriodicAverage
from geartrain.sharing.exchanges.pushsum import PushSum
from geartrain.sharing.mixing import metropolis
from geartrain.sharing.neighbours import EXCHANGES, Neighbours
from geartrain.sharing.replicas import Replicas
from geartrain.sharing.topology import Ring
from geartrain.train.session import Session
from tests.rigs.products import halved, in_pairs
from tests.rigs.sessions import session_of

EACH, RATE = 4, 0.1
MIXERS: dict[str, Callable[[], AbstractExchange]] = {
    "average": lambda: PeriodicAverage(3),
    "d-psgd": DecentralizedSGD,
    "ad-psgd": PairAverage,
    "push-sum": PushSum,
    "elastic": lambda: ElasticAverage(every=2),
    "diloco": lambda: DiLoCo(3),
    "async local sgd": lambda: DelayedNesterov(3),
    "staleness-aware": StalenessAware,
    "delay-compensated": lambda: CompensatedNeighbours(adaptive=True),
}
RUNTIMES: dict[str, Callable[[], AbstractRuntime]] = {
    "simulated": lambda: Simulated(3, seed=3, jitter=0.3, speeds=[1, 0.25, 2]),
    "threads": lambda: Threads(2, kernel_threads=1),
}
processes = cache(lambda: Processes(2, kernel_threads=1))


@pytest.fixture(params=MIXERS)
def mixer(request):
    return MIXERS[request.param]()


@pytest.fixture(params=[*RUNTIMES, pytest.param("processes", marks=pytest.mark.slow)])
def runtime(request):
    return {**RUNTIMES, "processes": processes}[request.param]()


class Seen(AbstractInstrument):
    """Keeps what copies have said."""

    def __init__(self) -> None:
        self.events: list[Exchanged] = []

    def on_exchanged(self, event: Exchanged) -> None:
        self.events.append(event)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def data(n: int) -> list[Instance]:
    rng = np.random.default_rng(0)
    w, made = rng.standard_normal((5, 3)), []
    for i in range(n):
        x = rng.standard_normal((EACH, 5))
        made.append(Instance({"x": torch.from_numpy(x)}, {"label": (x @ w).argmax(1)}, key=i))
    return made


def session(exchange, runtime=None, *, copies=3, optimizer=None, **settings) -> Session:
    graph = Graph(vertex=("label",))
    x = graph.input("x", shape=(5,), dtype=torch.float64, bundle=True)
    x.through(net(), name="p", alone=True).loss(cross_entropy, "label")
    made = optimizer or partial(torch.optim.SGD, lr=RATE)
    return session_of(
        graph,
        rules=Rules(optimizer=made, update_every=EACH),
        runtime=runtime or Simulated(1),
        **({"max_active": 1, "sharing": Neighbours(copies=copies, exchange=exchange)} | settings),
    )


def weights(s: Session) -> list[Tensor]:
    return [w.clone() for w in s.parts["p"].module.state_dict().values()]


def gradients(model: nn.Linear, instance: Instance) -> list[Tensor]:
    model.zero_grad()
    label = torch.from_numpy(np.asarray(instance.vertex["label"]))
    nn.functional.cross_entropy(model(instance.inputs["x"]), label).backward()
    return [p.grad.clone() for p in model.parameters()]


GRAPHS = {
    "ring of 3": (3, "ring"),
    "ring of 5": (5, "ring"),
    "ring of 7": (7, "ring"),
    "torus 3x3": (9, "torus"),
    "full 4": (4, "full"),
}
WAYS = {
    "equal": Simulated,
    "far": lambda n: Simulated(n, costs=Costs(latency_s=3e-4), speeds=[0.25] + [1.0] * (n - 1)),
    "threads": lambda _: Threads(2, kernel_threads=1),
}


def begin_apart(module: nn.Module, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))


@halved(graph=[*GRAPHS], way=[*WAYS])
def test_pairs_that_begin_apart_come_together(graph, way):
    come_together("ad-psgd", graph, way)


@halved(name=["d-psgd", "push-sum"], way=[*WAYS])
def test_copies_that_begin_apart_come_together(name, way):
    come_together(name, "torus 3x3", way)


def come_together(name, graph, way):
    copies, topology = GRAPHS[graph]
    seen = Seen()
    neighbours = Neighbours(
        copies=copies, topology=topology, exchange=MIXERS[name](), start=begin_apart
    )
    frozen = partial(torch.optim.SGD, lr=0.0)
    s = session(
        neighbours.exchange, WAYS[way](copies), optimizer=frozen, sharing=neighbours,
        instruments=[seen],
    )  # fmt: skip
    assert isinstance(s.state.sharing, Replicas)
    before = s.state.sharing.distance()
    s.fit(data(14 * copies), epochs=1)
    assert s.state.sharing.distance() < 0.5 * before
    found = seen.events[-1].copies
    assert all(c.meetings_per_round > 0.05 for c in found)
    assert sum(c.declined for c in found) == 0


@in_pairs(mixer=MIXERS, runtime=RUNTIMES, max_active=[1, 4])
def test_every_mixer_learns_in_every_runtime_and_leaves_no_letter(mixer, runtime, max_active):
    learn(mixer(), runtime(), max_active)


@pytest.mark.slow
@pytest.mark.parametrize("max_active", [1, 4])
def test_every_mixer_learns_in_processes_and_leaves_no_letter(mixer, max_active):
    learn(mixer, processes(), max_active)


def learn(mixer, runtime, max_active):
    seen = Seen()
    s = session(mixer, runtime, instruments=[seen], max_active=max_active)
    before = s.evaluate(data(24)).metrics["loss"]
    s.fit(data(24), epochs=3)  # which raises where a letter is left
    assert s.evaluate(data(24)).metrics["loss"] < 0.8 * before
    assert sum(c.instances for e in seen.events for c in e.copies) == 72
    assert sum(c.applied for e in seen.events for c in e.copies) > 0


@pytest.mark.parametrize("name", ["average", "d-psgd", "ad-psgd", "push-sum", "elastic"])
def test_one_copy_is_plain_training_to_the_bit(runtime, name):
    adam = partial(torch.optim.Adam, lr=0.01)
    one = session(MIXERS[name](), runtime, copies=1, optimizer=adam)
    one.fit(data(9), epochs=2)
    plain = session("gradients", copies=1, optimizer=adam)
    plain.fit(data(9), epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(plain), strict=True))


@pytest.mark.parametrize(
    "exchange", [PeriodicAverage(1), DiLoCo(1, rate=1.0, momentum=0.0)], ids=["average", "diloco"]
)
@pytest.mark.parametrize("workers", [1, 3])
def test_meeting_at_every_step_is_all_reduce(workers, exchange):
    found = []
    for each in (exchange, "all-reduce"):
        s = session(each, Simulated(workers))
        s.fit(data(24), epochs=2)
        found.append(weights(s))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("exchange", ["d-psgd", "all-reduce", "average", "diloco"])
def test_copies_in_rounds_have_each_instance_once_an_epoch_however_fast_they_are(exchange):
    seen = Seen()
    fast = Simulated(5, seed=2, jitter=0.5, speeds=[1, 0.1, 1, 1, 0.3])
    s = session(EXCHANGES[exchange](), fast, copies=5, instruments=[seen], max_active=2)
    s.fit(data(30), epochs=2)
    assert [[c.instances for c in e.copies] for e in seen.events] == [[6] * 5] * 2


@pytest.mark.parametrize(
    "runtime", [Simulated(4), Threads(2, kernel_threads=1)], ids=["simulated", "threads"]
)
def test_d_psgd_is_w_x_minus_the_step(runtime):
    s = session(DecentralizedSGD(), runtime, copies=4, shuffle=False)
    s.fit(data(24), epochs=1)
    models, matrix = [copy.deepcopy(net()) for _ in range(4)], metropolis(Ring().neighbours(4))
    for begin in range(0, 24, 4):
        moved = [gradients(m, x) for m, x in zip(models, data(24)[begin : begin + 4], strict=True)]
        old = [[p.detach().clone() for p in m.parameters()] for m in models]
        for i, model in enumerate(models):
            for k, p in enumerate(model.parameters()):
                p.data = sum(matrix[i][j] * old[j][k] for j in range(4)) - RATE * moved[i][k]
    for k, p in enumerate(weights(s)):
        mean = torch.stack([list(m.parameters())[k].detach() for m in models]).mean(0)
        torch.testing.assert_close(p, mean, rtol=1e-9, atol=1e-12)


def test_push_sum_weights_sum_to_n(runtime):
    s = session(PushSum(), runtime, copies=5)
    s.fit(data(25), epochs=2)
    assert isinstance(s.state.sharing, Replicas)
    members = [e.member for e in s.state.sharing.endpoints["p"]]
    assert sum(m.numbers["omega"] for m in members) == pytest.approx(5)


def test_a_resumed_run_goes_on_as_the_uninterrupted_one(tmp_path, mixer):
    def made():
        return session(
            copy.deepcopy(mixer),
            Simulated(3, speeds=[1, 0.5, 2]),
            optimizer=partial(torch.optim.Adam, lr=0.05),
        )

    whole = made()
    whole.fit(data(24), epochs=2)
    first = made()
    first.fit(data(24), epochs=1)
    first.save(tmp_path / "c")
    second = made()
    second.load(tmp_path / "c")
    second.fit(data(24), epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))


def test_workers_pause_leave_and_join(mixer):
    seen = Seen()
    events = [
        Pause(2, 0.001, 0.002),
        Leave(0, 0.002),
        Join(0, 0.006),
        Join(1, 0.003),
        Leave(3, 0.005),
    ]
    s = session(
        mixer, Simulated(4, events=events, seed=1, jitter=0.2), copies=4, instruments=[seen]
    )
    before = s.evaluate(data(40)).metrics["loss"]
    s.fit(data(40), epochs=3)
    assert sum(c.instances for e in seen.events for c in e.copies) == 120
    assert [c.present for c in seen.events[-1].copies] == [True, True, True, False]
    assert s.evaluate(data(40)).metrics["loss"] < 0.8 * before


def test_what_goes_wrong_in_a_copy_stops_the_run_and_a_second_fit_works(mixer, runtime, tmp_path):
    armed = tmp_path / "armed"  # where worker processes see it too
    armed.touch()
    left = 9  # fewer than any worker takes

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            nonlocal left
            left -= 1
            if left == 0 and armed.exists():
                raise RuntimeError("no more ink")
            return super().step(closure)

    s = session(mixer, runtime, optimizer=partial(Failing, lr=0.1))
    with pytest.raises(WorkerError, match="no more ink"):
        s.fit(data(30), epochs=1)
    armed.unlink()
    assert s.fit(data(30), epochs=1).instances == 30


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_may_be_asked_for_by_name(name):
    s = session(name, copies=4)
    s.fit(data(8), epochs=1)
    every = Neighbours(exchange=name, when=7) if name != "all-reduce" else None
    assert every is None or every.made_exchange().every == 7


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"exchange": "all-reduce", "when": 2}, "exchange 'all-reduce' knows no when=2"),
        ({"exchange": PairAverage(), "when": 2}, "when=2 beside an exchange.*to PairAverage"),
        ({"exchange": "rumours"}, "give one of gradients, weights, all-reduce"),
    ],
)
def test_settings_without_effect_are_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        Neighbours(**given)


def test_a_torus_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="7 copies do not fit"):
        Session(session("gradients").graph, sharing=Neighbours(copies=7, topology="torus"))

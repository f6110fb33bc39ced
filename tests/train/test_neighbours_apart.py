"""Copies of the model in worker processes: what they share, checkpoints both ways, deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import cache, partial

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.instrument import AbstractInstrument, Exchanged
from geartrain.errors import LeakError, ProtocolError, WorkerDiedError, WorkerError
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.simulated import Simulated
from geartrain.runtime.threads import Threads
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.letters import SHARE, Letter, Tensors
from geartrain.sharing.member import Member
from geartrain.sharing.neighbours import Neighbours
from geartrain.sharing.replicas import Replicas
from geartrain.train.session import Session
from tests.rigs.left import living
from tests.rigs.passes import hosts

SLOW = pytest.mark.slow
EACH = 4  # rows of a minibatch, which is one instance
ADAM = partial(torch.optim.Adam, lr=0.01)


@cache
def processes() -> Processes:
    """One for all tests: cheaper."""
    return Processes(2, kernel_threads=1)


@cache
def restoring() -> Processes:
    return Processes(2, kernel_threads=1, on_worker_death="restore", most_deaths=3)


RUNTIMES = {
    "simulated": lambda: Simulated(3, speeds=[1, 0.4, 2]),
    "threads": lambda: Threads(2, kernel_threads=1),
    "processes": processes,
    "hosts": partial(hosts, 2),
}


class Seen(AbstractInstrument):
    """Keeps what copies have said."""

    def __init__(self) -> None:
        self.events: list[Exchanged] = []

    def on_exchanged(self, event: Exchanged) -> None:
        self.events.append(event)

    def total(self, name: str) -> int:
        return sum(getattr(c, name) for e in self.events for c in e.copies)


def data(n: int) -> list[gt.Instance]:
    drawn = torch.Generator().manual_seed(0)
    return [
        gt.Instance(
            {"word": torch.randint(9, (EACH,), generator=drawn)},
            {"label": torch.randint(3, (EACH,), generator=drawn).numpy()},
            key=i,
        )
        for i in range(n)
    ]


def session(
    sharing: Neighbours,
    runtime: AbstractRuntime,
    optimizer: object = ADAM,
    *,
    sparse: bool = False,
    **settings: object,
) -> Session:
    """Words, a part of rows that are looked up, and one that maps them."""
    torch.manual_seed(0)
    graph = gt.Graph(vertex=("label",))
    x = graph.input("word", shape=(), dtype=torch.int64, bundle=True)
    h = x.through(nn.Embedding(9, 5, sparse=sparse).double(), name="table", alone=True)
    y = h.through(nn.Linear(5, 3).double(), name="map", alone=True)
    y.loss(gt.cross_entropy, "label")
    rules = gt.Rules(optimizer=optimizer, update_every=EACH)  # type: ignore[arg-type]
    given = {"max_active": 1, "sharing": sharing, **settings}
    return Session(graph, rules=rules, runtime=runtime, **given)  # type: ignore[arg-type]


def replicas_of(s: Session) -> Replicas:
    assert isinstance(s.state.sharing, Replicas)
    return s.state.sharing


def weights(s: Session) -> list[torch.Tensor]:
    """Of all copies, with what Adam has of them; and of the consensus."""
    found = []
    for part in (*s.trained_parts.values(), *s.parts.values()):
        found += [p.detach().clone() for p in part.module.parameters()]
        if part.optimizer is not None:
            found += [x.clone() for one in part.optimizer.state.values() for x in one.values()]
    return found


def same(a: Session, b: Session) -> bool:
    return all(x.equal(y) for x, y in zip(weights(a), weights(b), strict=True))


IN_ROUNDS = {
    "all-reduce": lambda: "all-reduce",
    "lockstep": lambda: NearestNeighbours(lockstep=True),
    "d-psgd": lambda: "d-psgd",
    "diloco": lambda: gt.DiLoCo(3),
    "average": lambda: gt.PeriodicAverage(3),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (k > 2)) for k, name in enumerate(IN_ROUNDS)]
)
@pytest.mark.parametrize("shards", ["static", pytest.param("pull", marks=SLOW)])
@pytest.mark.parametrize("apart", ["processes", "hosts"])
def test_copies_that_go_in_rounds_come_to_the_same_weights_in_processes(name, shards, apart):
    """11 instances of three copies: some wait at the end, and are released."""
    found = []
    for runtime in ("simulated", apart):
        sharing = Neighbours(copies=3, exchange=IN_ROUNDS[name](), shards=shards)
        s = session(sharing, RUNTIMES[runtime](), reading=gt.Reading(shuffle=False))
        s.fit(data(12 if shards == "pull" else 11), epochs=2)
        found.append(s)
    if shards == "static":  # who pulls what is a matter of time
        assert same(*found)
    else:
        assert found[1].statistics()["trained"] == 24


@pytest.mark.parametrize(
    ("exchange", "there"),
    [
        ("all-reduce", "simulated"),
        ("d-psgd", "threads"),
        pytest.param("all-reduce", "threads", marks=SLOW),
        pytest.param("d-psgd", "simulated", marks=SLOW),
    ],
)
def test_a_run_goes_on_in_processes_and_back(tmp_path, exchange, there):
    def made(runtime: str) -> Session:
        return session(Neighbours(copies=3, exchange=exchange), RUNTIMES[runtime]())

    whole = made(there)
    whole.fit(data(20), epochs=3, folder=tmp_path / "a", keep_last=10)
    first = sorted((tmp_path / "a").glob("checkpoint-*.safetensors"))[0]
    resumed = made("processes")
    resumed.load(first)
    resumed.fit(data(20), epochs=2, folder=tmp_path / "b")
    back = made(there)
    back.load(tmp_path / "b" / "latest.safetensors")
    assert same(resumed, back)
    back.fit(data(20), epochs=3)
    assert same(whole, back)


def test_what_exchanges_keep_comes_back_and_goes_on():
    """The centre lives in the process of the first copy, the shares of push-sum in each."""
    elastic = session(Neighbours(copies=3, exchange=gt.ElasticAverage(every=2)), processes())
    before = [e.member.tensors.get("centre") for e in replicas_of(elastic).all_endpoints()]
    elastic.fit(data(24), epochs=1)
    after = [e.member.tensors.get("centre") for e in replicas_of(elastic).all_endpoints()]
    assert [x is None for x in before] == [x is None for x in after] == [False, True, True] * 2
    assert not torch.equal(before[0][0], after[0][0])
    push = session(Neighbours(copies=3, exchange="push-sum"), processes())
    push.fit(data(24), epochs=2)
    for endpoints in replicas_of(push).endpoints.values():
        members = [e.member for e in endpoints]
        assert sum(m.numbers["omega"] for m in members) == pytest.approx(3.0, abs=1e-12)
        assert all(m.numbers["pushes"] > 0 for m in members)
        assert sum(m.rounds for m in members) == 48


def test_rows_of_a_table_travel_as_rows():
    seen = Seen()
    s = session(Neighbours(copies=2), processes(), torch.optim.SGD, sparse=True, instruments=[seen])
    s.fit(data(20), epochs=1)
    sent = {k: e.member.ledger for k, e in enumerate(replicas_of(s).endpoints["table"])}
    dense = 9 * 5 * 8
    assert seen.total("sent") == seen.total("applied") + seen.total("dropped") > 0
    assert 0 < sent[0].bytes < sent[0].sent * dense


@pytest.mark.parametrize(
    ("apart", "topology"),
    [
        ("processes", "ring"),
        pytest.param("hosts", "ring", marks=SLOW),
        ("hosts", gt.Exponential()),
    ],
    ids=["processes", "hosts", "hosts, one way"],
)
def test_a_letter_knows_its_receivers_version_in_another_process(apart, topology):
    """Else the age of letters would grow with the pass, and steps of StalenessAware shrink."""
    seen = Seen()
    sharing = Neighbours(copies=2 if topology == "ring" else 5, topology=topology)
    s = session(sharing, RUNTIMES[apart](), instruments=[seen])
    s.fit(data(200), epochs=1)
    last = seen.events[-1].copies
    assert sum(c.rounds for c in last) == 200
    assert all(c.staleness.mean < 20 for c in last)


@pytest.mark.parametrize("exchange", ["weights", "all-reduce"])
def test_more_copies_than_workers_and_one_alone_live_where_they_belong(exchange):
    for copies in (1, 5):
        seen = Seen()
        s = session(Neighbours(copies=copies, exchange=exchange), processes(), instruments=[seen])
        s.fit(data(20), epochs=1)
        assert seen.total("instances") == 20
        assert seen.total("sent") == seen.total("applied")


class Killer(AbstractInstrument):
    """Kills a worker at these steps of the first copy of a part."""

    def __init__(self, runtime: Processes, at: set[int]) -> None:
        self.runtime, self.at, self.steps = runtime, at, 0

    def on_updated(self, event):
        if event.part == "map#0":
            self.steps += 1
            if self.steps in self.at:
                os.kill(self.runtime.pids[1], signal.SIGKILL)


@pytest.mark.parametrize("exchange", ["gradients", "all-reduce"])
def test_a_worker_that_dies_takes_the_run_and_leaves_copies_that_go_on(exchange):
    s = session(
        Neighbours(copies=3, exchange=exchange),
        processes(),
        instruments=[Killer(processes(), {4})],
    )
    with pytest.raises(WorkerDiedError):
        s.fit(data(400), epochs=1)
    assert living(processes().pids) == list(processes().pids)
    s.instruments.clear()
    fit = s.fit(data(24), epochs=1)
    assert fit.instances == 24
    assert all(bool(w.isfinite().all()) for w in weights(s))


def test_copies_are_gone_on_with_after_a_death_to_the_last_bit(tmp_path):
    found = []
    for runtime, at in ((restoring(), {13}), (processes(), set())):
        sharing = Neighbours(copies=3, exchange="all-reduce")
        killer = Killer(runtime, at)
        s = session(sharing, runtime, instruments=[killer])
        folder = tmp_path / str(len(found))
        fit = s.fit(data(30), epochs=2, folder=folder)
        assert fit.deaths == len(at) and fit.instances == 60
        found.append(s)
    assert same(*found)


class Together(AbstractExchange):
    """Counts the steps of all copies, which wants one memory."""

    needs_neighbours = False
    steps = 0

    def stepped(self, me: Member, gradients: Tensors) -> None:
        with self.lock:
            self.steps += 1

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        raise AssertionError("nobody has sent anything")


def test_an_exchange_that_wants_one_memory_is_refused_by_name_with_the_remedy():
    sharing = Neighbours(copies=2, exchange=Together())
    with pytest.raises(WorkerError, match=r"Together keeps something .* self.lock.*gt.Threads"):
        session(sharing, processes()).fit(data(8), epochs=1)
    s = session(sharing, RUNTIMES["threads"]())
    s.fit(data(8), epochs=1)
    exchange = replicas_of(s).endpoints["map"][0].exchange
    assert isinstance(exchange, Together) and exchange.steps == 8


def test_a_share_for_an_exchange_that_keeps_no_collective_is_refused():
    s = session(Neighbours(copies=2), processes())
    endpoint = replicas_of(s).endpoints["map"][0]
    with pytest.raises(ProtocolError, match="NearestNeighbours of part 'map' keeps no collective"):
        endpoint.exchange.contributed(Letter("map", 1, 0, SHARE, ()))


def test_a_letter_that_nobody_got_is_a_leak():
    s = session(Neighbours(copies=2), processes())
    s.fit(data(8), epochs=1)
    replicas_of(s).endpoints["map"][1].member.ledger.sent += 1
    with pytest.raises(LeakError, match="copies of part 'map' sent"):
        s.fit(data(8), epochs=2)

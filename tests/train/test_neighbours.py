"""Copies of the model in a session, in both runtimes: identities, ledger, shards, resuming."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.engine.instrument import AbstractInstrument, Exchanged
from geartrain.errors import CheckpointError, StuckError, WorkerError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loss import accuracy, cross_entropy
from geartrain.parts.rules import Instances, Rows, Rules
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.costs import Costs
from geartrain.runtime.events import Join, Leave, Pause
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.simulated import Simulated
from geartrain.runtime.threads import Threads
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.exchanges.allreduce import AllReduce
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.letters import Inbox, Letter
from geartrain.sharing.member import Member
from geartrain.sharing.neighbours import Neighbours
from geartrain.sharing.replicas import Replicas
from geartrain.train.session import Session
from tests.rigs.products import in_pairs
from tests.rigs.sessions import session_of

EACH = 4  # rows of a minibatch, which is one instance
SGD = partial(torch.optim.SGD, lr=0.1)

RUNTIMES = {
    "simulated 1": lambda: Simulated(1),
    "simulated 4": lambda: Simulated(4, seed=3, jitter=0.3, speeds=[1, 0.25, 2, 1]),
    "threads 1": lambda: Threads(1, kernel_threads=1),
    "threads 2": lambda: Threads(2, kernel_threads=1),
}
APART = {"processes 2": cache(lambda: Processes(2, kernel_threads=1))}
"""Slow, as a pass takes some 0.2 s; the fast cases are in ``test_neighbours_apart``."""


SLOW = pytest.mark.slow


@pytest.fixture(
    params=[
        *(pytest.param(name, marks=[SLOW] * name.endswith("1")) for name in RUNTIMES),
        *(pytest.param(name, marks=SLOW) for name in APART),
    ]
)
def runtime(request: pytest.FixtureRequest) -> AbstractRuntime:
    made: AbstractRuntime = (RUNTIMES | APART)[request.param]()
    return made


class Alone(AbstractExchange):
    """Nobody says anything."""

    needs_neighbours = False

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        raise AssertionError("nobody has sent anything")


class Seen(AbstractInstrument):
    """Keeps what copies have said."""

    def __init__(self) -> None:
        self.events: list[Exchanged] = []

    def on_exchanged(self, event: Exchanged) -> None:
        self.events.append(event)

    def total(self, name: str) -> int:
        return sum(getattr(c, name) for e in self.events for c in e.copies)


def graph(dtype: torch.dtype = torch.float64, keep: str = "auto") -> Graph:
    torch.manual_seed(0)
    made = Graph(vertex=("label",))
    x = made.input("x", shape=(5,), dtype=dtype, bundle=True)
    first = nn.Sequential(nn.Linear(5, 6), nn.Tanh()).to(dtype)
    h = x.through(first, name="one", alone=True, keep=keep)
    y = h.through(nn.Linear(6, 3).to(dtype), name="two", alone=True)
    y.loss(cross_entropy, "label", metrics={"accuracy": accuracy})
    return made


def data(n: int, dtype: torch.dtype = torch.float64) -> list[Instance]:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 3))
    made = []
    for i in range(n):
        x = rng.standard_normal((EACH, 5))
        rows = torch.from_numpy(x).to(dtype)
        made.append(Instance({"x": rows}, {"label": (x @ w).argmax(1)}, key=f"minibatch {i}"))
    return made


def session(
    sharing: Neighbours | None,
    runtime: AbstractRuntime | None = None,
    *,
    optimizer: Any = SGD,
    update_every: Any = EACH,
    keep: str = "auto",
    **settings: Any,
) -> Session:
    return session_of(
        graph(keep=keep),
        rules=Rules(optimizer=optimizer, update_every=update_every),
        runtime=runtime or Simulated(1),
        **({"max_active": 1, "sharing": sharing} | settings),
    )


def weights(module_of: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.clone()
        for name, part in module_of.items()
        for key, value in part.module.state_dict().items()
    }


def replicas_of(s: Session) -> Replicas:
    assert isinstance(s.state.sharing, Replicas)
    return s.state.sharing


def copies_of(s: Session) -> list[dict[str, Tensor]]:
    sharing = replicas_of(s)
    return [
        {
            f"{name}.{key}": value.clone()
            for name, endpoints in sharing.endpoints.items()
            for key, value in endpoints[k].member.part.module.state_dict().items()
        }
        for k in range(sharing.copies)
    ]


def net() -> nn.Sequential:
    """The graph's modules, as plain torch."""
    inner = [copy.deepcopy(m) for m in graph().modules()]
    return nn.Sequential(*inner)


def gradients(model: nn.Sequential, instance: Instance) -> list[Tensor]:
    model.zero_grad()
    rows = instance.inputs["x"]
    assert isinstance(rows, Tensor)
    label = torch.from_numpy(np.asarray(instance.vertex["label"]))
    nn.functional.cross_entropy(model(rows), label).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def sgd(model: nn.Sequential, gradient: Sequence[Tensor], lr: float = 0.1) -> None:
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradient, strict=True):
            p.sub_(g, alpha=lr)


@in_pairs(runtime=RUNTIMES, keep=["auto", "graph", "inputs"], exchange=["gradients", "all-reduce"])
def test_one_copy_is_plain_training_to_the_bit(runtime, exchange, keep):
    adam = partial(torch.optim.Adam, lr=0.01)
    plain = session(None, Threads(1, kernel_threads=1), optimizer=adam, keep=keep)
    plain.fit(data(9), epochs=2)
    one = session(Neighbours(copies=1, exchange=exchange), runtime(), optimizer=adam, keep=keep)
    one.fit(data(9), epochs=2)
    expected, found = weights(plain.parts), weights(one.parts)
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("update_every", [Rows(EACH), Instances(1), Instances(2)])
def test_without_neighbours_each_copy_is_plain_training_of_its_shard(runtime, update_every):
    instances = data(9)
    s = session(
        Neighbours(copies=3, exchange=Alone()), runtime, update_every=update_every, shuffle=False
    )
    s.fit(instances, epochs=1)
    for k, found in enumerate(copies_of(s)):
        plain = session(None, update_every=update_every, shuffle=False)
        shard = instances[k::3]
        taken = s.state.sharing.positions[k]
        plain.fit([shard[i % len(shard)] for i in range(taken)], epochs=1)
        expected = weights(plain.parts)
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-12, atol=0)


@in_pairs(runtime=RUNTIMES, update_every=[Rows(EACH), Instances(1)], keep=["auto", "graph"])
def test_lockstep_and_fully_connected_is_the_sequence_of_sub_steps(runtime, update_every, keep):
    instances, n = data(12), 3
    exchange = NearestNeighbours(lockstep=True)
    s = session(
        Neighbours(copies=n, topology="full", exchange=exchange),
        runtime(),
        update_every=update_every,
        keep=keep,
        shuffle=False,
    )
    s.fit(instances, epochs=1)
    models = [net() for _ in range(n)]
    for at in range(0, 12, n):
        own = [gradients(models[k], instances[at + k]) for k in range(n)]
        for k, model in enumerate(models):
            for j in [k, *(j for j in range(n) if j != k)]:
                sgd(model, own[j])
    for k, found in enumerate(copies_of(s)):
        for value, expected in zip(found.values(), models[k].state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_lockstep_on_a_ring_uses_the_gradients_of_the_two_neighbours_alone():
    instances, n = data(5), 5
    s = session(
        Neighbours(copies=n, exchange=NearestNeighbours(lockstep=True)),
        Simulated(n),
        shuffle=False,
    )
    s.fit(instances, epochs=1)
    own = [gradients(net(), instance) for instance in instances]
    for k, found in enumerate(copies_of(s)):
        model = net()
        for j in (k, (k - 1) % n, (k + 1) % n):
            sgd(model, own[j])
        for value, expected in zip(found.values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_all_reduce_is_minibatch_training_with_the_mean_gradient(runtime):
    instances, n = data(12), 4
    s = session(Neighbours(copies=n, exchange="all-reduce"), runtime, shuffle=False)
    s.fit(instances, epochs=1)
    model = net()
    for at in range(0, 12, n):
        given = [gradients(model, x) for x in instances[at : at + n]]
        sgd(model, [torch.stack(g).mean(0) for g in zip(*given, strict=True)])
    for found in copies_of(s):
        for value, expected in zip(found.values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_all_reduce_keeps_copies_equal_where_the_data_do_not_come_out_even(runtime):
    s = session(Neighbours(copies=4, exchange=AllReduce()), runtime)
    s.fit(data(11), epochs=2)
    first, *others = copies_of(s)
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_every_gradient_is_applied_once_by_every_neighbour(runtime):
    seen = Seen()
    inbox = Inbox(limit=1000)
    s = session(Neighbours(copies=4, inbox=inbox), runtime, instruments=[seen])
    s.fit(data(24), epochs=2)
    sent, applied = seen.total("sent"), seen.total("applied")
    assert seen.total("instances") == 48
    assert sent == applied == 2 * 2 * 48  # two neighbours, two parts
    assert seen.total("dropped") == seen.total("merged") == seen.total("lost") == 0
    versions = sum(p.version for p in s.trained_parts.values())
    assert versions == 2 * 48 + applied  # an own step and one for each that came


@pytest.mark.parametrize("full", ["drop", "merge"])
def test_a_full_inbox_drops_or_merges_and_counts(full):
    seen = Seen()
    s = session(
        Neighbours(copies=2, inbox=Inbox(1, full)),
        Simulated(2, speeds=[1, 0.1]),
        instruments=[seen],
    )
    s.fit(data(40), epochs=1)
    slow = seen.events[-1].copies[1]
    fast = seen.events[-1].copies[0]
    assert fast.sent == slow.applied + slow.dropped
    assert (slow.dropped if full == "drop" else slow.merged) > 10
    assert (slow.merged if full == "drop" else slow.dropped) == 0


def test_training_says_once_that_gradients_of_neighbours_drive_copies_apart(caplog):
    with caplog.at_level("WARNING", "geartrain"):
        s = session(Neighbours(copies=4), Simulated(4))
        s.fit(data(8), epochs=2)
        s.fit(data(8), epochs=3)
    (said,) = caplog.messages
    assert said.startswith("4 copies, NearestNeighbours, topology='ring': the least eigenvalue")
    assert "is -1.00" in said and "exchange='weights'" in said
    assert caplog.records[0].name.startswith("geartrain.")


@pytest.mark.parametrize(
    "setting",
    [
        Neighbours(copies=4, topology="full"),
        Neighbours(copies=2),
        Neighbours(copies=4, exchange=NearestNeighbours(scale=0.33)),
        Neighbours(copies=4, when=4),
        Neighbours(copies=4, exchange="weights"),
        Neighbours(copies=4, exchange="d-psgd"),
        Neighbours(copies=4, exchange="all-reduce"),
    ],
)
def test_nothing_is_said_where_copies_come_together_or_stay_as_far(setting, caplog):
    with caplog.at_level("WARNING", "geartrain"):
        session(setting, Simulated(4)).fit(data(8), epochs=1)
    assert not caplog.messages


def test_letters_are_applied_between_minibatches_never_inside_one():
    """A part's rows are answered at the version at which they left."""
    s = session(Neighbours(copies=4), Simulated(4, seed=1, jitter=0.5))
    fit = s.fit(data(40), epochs=1)
    assert all(found.max == 0 for found in fit.staleness.values())


def test_the_users_modules_hold_the_mean(runtime):
    s = session(Neighbours(copies=5), runtime)
    s.fit(data(15), epochs=1)
    own, found = weights(s.parts), copies_of(s)
    for key in own:
        mean = torch.stack([c[key] for c in found]).mean(0)
        torch.testing.assert_close(own[key], mean, rtol=1e-12, atol=1e-15)
    assert not torch.equal(found[0]["one.0.weight"], found[1]["one.0.weight"])


def test_the_best_copy_is_the_one_that_validates_best():
    s = session(Neighbours(copies=5, consensus="best"), Simulated(5))
    valid = data(7)
    fit = s.fit(data(15), epochs=1, valid=valid)
    losses = []
    for k in range(5):
        s.state.sharing.agree(k)
        losses.append(s.evaluate(valid).metrics["loss"])
    assert fit.valid["loss"] == min(losses) < max(losses)


def test_evaluation_does_not_disturb_the_copies():
    found = []
    for valid in (None, data(5)):
        s = session(Neighbours(copies=3), Simulated(3))
        s.fit(data(9), epochs=2, valid=valid)
        found.append(copies_of(s))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_staged_consensus_makes_copies_equal_and_forgets_the_optimisers():
    adagrad = partial(torch.optim.Adagrad, lr=0.01)
    s = session(Neighbours(copies=3, restart_every=1), Simulated(3), optimizer=adagrad)
    s.fit(data(9), epochs=1)
    found = copies_of(s)
    assert all(torch.equal(found[0][key], other[key]) for other in found for key in other)
    for part in s.trained_parts.values():
        assert part.optimizer is not None
        assert all(not part.optimizer.state[p]["sum"].any() for p in part.parameters)


@pytest.mark.parametrize("exchange", ["gradients", "all-reduce"])
@pytest.mark.parametrize("shards", ["static", "pull"])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(tmp_path, exchange, shards):
    setting = Neighbours(copies=3, exchange=exchange, shards=shards)
    adam = partial(torch.optim.Adam, lr=0.01)

    def made() -> Session:
        return session(setting, Simulated(3, speeds=[1, 0.4, 2]), optimizer=adam)

    whole = made()
    whole.fit(data(20), epochs=2, folder=tmp_path / "a", checkpoint_every=7, keep_last=10)
    middle = sorted((tmp_path / "a").glob("*7*.safetensors"))[0]
    resumed = made()
    resumed.load(middle)
    resumed.fit(data(20), epochs=2, folder=tmp_path / "b", checkpoint_every=7)
    for one, other in zip(copies_of(whole), copies_of(resumed), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert resumed.state.position.trained == whole.state.position.trained == 40


def test_a_checkpoint_of_other_copies_is_refused_and_gives_its_weights(tmp_path):
    s = session(Neighbours(copies=3), Simulated(3))
    s.fit(data(9), epochs=1)
    s.save(tmp_path / "x.safetensors")
    other = session(Neighbours(copies=2), Simulated(2))
    with pytest.raises(CheckpointError, match=r"3 copies .* the session 2"):
        other.load(tmp_path / "x.safetensors")
    other.load(tmp_path / "x.safetensors", weights_only=True)
    mean = weights(s.parts)
    for found in copies_of(other):
        assert all(torch.equal(found[key], mean[key]) for key in mean)


def test_a_fast_copy_begins_its_shard_anew_and_the_epoch_ends_by_the_total():
    seen = Seen()
    s = session(Neighbours(copies=2), Simulated(2, speeds=[1, 0.2]), instruments=[seen])
    s.fit(data(20), epochs=1)
    fast, slow = (c.instances for c in seen.events[-1].copies)
    assert fast + slow == 20
    assert fast > 15


def test_copies_may_begin_with_weights_of_their_own():
    def start(module: nn.Module, k: int) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(k)

    s = session(Neighbours(copies=2, start=start), Simulated(2))
    assert [float(c["two.bias"][0]) for c in copies_of(s)] == [0.0, 1.0]


def test_many_in_flight_in_each_copy_leave_nothing_behind(runtime):
    seen = Seen()
    s = session(Neighbours(copies=4), runtime, max_active=4, instruments=[seen])
    s.fit(data(24), epochs=2)
    assert seen.total("instances") == 48
    assert seen.total("sent") == seen.total("applied") + seen.total("dropped")


def test_many_in_flight_and_all_reduce_go_together(runtime):
    s = session(Neighbours(copies=3, exchange="all-reduce"), runtime, max_active=3)
    s.fit(data(25), epochs=2)
    first, *others = copies_of(s)
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_bytes_for_each_round_do_not_depend_on_the_number_of_copies():
    found = {}
    for n in (4, 16):
        seen = Seen()
        s = session(Neighbours(copies=n), Simulated(n), instruments=[seen])
        s.fit(data(3 * n), epochs=1)
        found[n] = {c.bytes_per_round for c in seen.events[-1].copies}
    elements = sum(p.numel() for p in graph().modules()[0].parameters())
    elements += sum(p.numel() for p in graph().modules()[1].parameters())
    assert found[4] == found[16] == {2 * 8 * elements}


def seconds(exchange: str, n: int, speeds: Sequence[float] | None = None, **costs: Any) -> float:
    s = session(
        Neighbours(copies=n, exchange=exchange),  # type: ignore[arg-type]
        Simulated(n, costs=Costs(**costs), speeds=speeds),
    )
    return s.fit(data(8 * n), epochs=1).train_seconds


def test_latency_is_hidden_from_neighbours_and_paid_by_all_reduce():
    free, far = seconds("gradients", 8), seconds("gradients", 8, latency_s=1e-3)
    assert far < free + 2e-3  # the last letters
    paid = seconds("all-reduce", 8, latency_s=1e-3) - seconds("all-reduce", 8)
    assert paid == pytest.approx(8 * 2 * 7 * 1e-3)  # rounds, and latencies of a ring all-reduce


def test_bandwidth_of_an_all_reduce_is_that_of_a_ring():
    nbytes = 8 * (5 * 6 + 6 + 6 * 3 + 3)
    paid = seconds("all-reduce", 4, bytes_per_s=1e5) - seconds("all-reduce", 4)
    # Of the two parts, the upper one's mean travels while the lower one still computes.
    most = 8 * 2 * 3 / 4 * nbytes / 1e5
    assert 0.7 * most < paid <= most


def test_a_slow_worker_costs_all_reduce_its_time_and_neighbours_little():
    speeds = [1, 1, 1, 0.25]
    lost_by_all = seconds("all-reduce", 4, speeds) - seconds("all-reduce", 4)
    lost = seconds("gradients", 4, speeds) - seconds("gradients", 4)
    assert lost < lost_by_all / 2


def test_sixty_four_copies_run_in_seconds():
    seen = Seen()
    costs = Costs(latency_s=1e-4, bytes_per_s=1e8)
    s = session(Neighbours(copies=64), Simulated(64, costs=costs), instruments=[seen])
    fit = s.fit(data(128), epochs=1)
    one = session(Neighbours(copies=1), Simulated(1, costs=costs)).fit(data(128), epochs=1)
    assert one.train_seconds / fit.train_seconds > 0.8 * 64


@pytest.mark.parametrize("exchange", ["gradients", "all-reduce", "lockstep"])
def test_workers_pause_leave_and_join(exchange):
    seen = Seen()
    events = [Pause(0, 0.002, 0.01), Leave(1, 0.004), Join(1, 0.02), Join(2, 0.003), Leave(3, 0.01)]
    chosen = NearestNeighbours(lockstep=True) if exchange == "lockstep" else exchange
    s = session(
        Neighbours(copies=4, exchange=chosen),
        Simulated(4, events=events, seed=1, jitter=0.2),
        instruments=[seen],
    )
    s.fit(data(40), epochs=3)
    assert seen.total("instances") == 120
    assert [c.present for c in seen.events[-1].copies] == [True, True, True, False]
    assert seen.events[-1].copies[3].instances == 0
    if exchange == "gradients":
        assert seen.total("lost") > 0


def test_a_joining_copy_begins_with_weights_and_optimiser_of_one_of_the_others():
    adam = partial(torch.optim.Adam, lr=0.01)
    exchange = Alone()
    exchange.needs_neighbours = True  # those of a ring, though nobody says anything
    s = session(
        Neighbours(copies=4, exchange=exchange),
        Simulated(4, events=[Join(2, 1e-9)]),
        optimizer=adam,
    )
    replicas = replicas_of(s)
    s.fit(data(12), epochs=1)
    replicas.leave(2)
    replicas.join(2)
    copies = copies_of(s)
    for key in copies[2]:
        assert torch.equal(copies[2][key], copies[1][key])  # its first neighbour
        assert not torch.equal(copies[0][key], copies[1][key])
    for endpoints in replicas.endpoints.values():
        mine, theirs = (endpoints[k].member.part.optimizer for k in (2, 1))
        assert mine is not None and theirs is not None
        a, b = mine.state_dict()["state"], theirs.state_dict()["state"]
        assert a.keys() == b.keys() != set()
        for k in a:
            assert all(torch.equal(a[k][name], b[k][name]) for name in a[k])
            assert a[k]["exp_avg"].data_ptr() != b[k]["exp_avg"].data_ptr()


def test_data_without_a_copy_that_takes_part_is_refused():
    s = session(Neighbours(copies=2), Simulated(2, events=[Leave(0, 0.001), Leave(1, 0.001)]))
    with pytest.raises(StuckError, match="no copy"):
        s.fit(data(40), epochs=1)


def test_a_shard_without_data_is_refused():
    s = session(Neighbours(copies=4), Simulated(4))
    with pytest.raises(ValueError, match=r"4 copies and 3 instances: 1 shards would have no data"):
        s.fit(data(3), epochs=1)


def test_shards_of_a_stream_are_refused_and_pulled():
    class Stream:
        def __iter__(self) -> Any:
            return iter(data(8))

    s = session(Neighbours(copies=2), Simulated(2))
    with pytest.raises(ValueError, match="shards='pull'"):
        s.fit(Stream(), epochs=1)
    seen = Seen()
    s = session(Neighbours(copies=2, shards="pull"), Simulated(2), instruments=[seen])
    s.fit(Stream(), epochs=2)
    assert seen.total("instances") == 16


@pytest.mark.parametrize(
    "given", [{"copies": 0}, {"consensus": "x"}, {"shards": "x"}, {"exchange": "x"},
              {"restart_every": 0}, {"when": 0}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given)) if "when" not in given else "every"):
        Neighbours(**given)


@pytest.mark.parametrize(
    "exchange",
    ["gradients", "all-reduce", NearestNeighbours(lockstep=True)],
    ids=["gradients", "all-reduce", "lockstep"],
)
def test_what_goes_wrong_in_a_copy_stops_the_run_and_a_second_fit_works(
    runtime, exchange, tmp_path
):
    armed = tmp_path / "armed"  # where worker processes see it too
    armed.touch()
    left = 20

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and armed.exists():
                raise RuntimeError("no more ink")
            return super().step(closure)

    s = session(
        Neighbours(copies=2, exchange=exchange), runtime, optimizer=partial(Failing, lr=0.1)
    )
    with pytest.raises(WorkerError, match="no more ink"):
        s.fit(data(24), epochs=1)
    armed.unlink()
    assert s.fit(data(24), epochs=1).instances == 24


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=SLOW) for k in range(2, 6))])
@pytest.mark.parametrize("exchange", ["gradients", "all-reduce", "lockstep"])
def test_copies_come_and_go_at_any_moment_and_nothing_is_left_behind(exchange, seed):
    rng = np.random.default_rng(seed)
    events: list[Any] = [Pause(0, float(rng.uniform(0, 0.01)), 0.01)]
    for worker in (1, 2):
        at = float(rng.uniform(0, 0.01))
        events += [Leave(worker, at), Join(worker, at + float(rng.uniform(0, 0.01)))]
    runtime = Simulated(
        4, seed=seed, jitter=0.5, speeds=[1, 2, 0.25, 1], costs=Costs(latency_s=1e-3), events=events
    )
    chosen = NearestNeighbours(lockstep=True) if exchange == "lockstep" else exchange
    seen = Seen()
    s = session(Neighbours(copies=4, exchange=chosen), runtime, max_active=2, instruments=[seen])
    s.fit(data(30), epochs=2)
    assert seen.total("instances") == 60
    assert seen.total("sent") == sum(seen.total(n) for n in ("applied", "dropped", "lost"))


@pytest.mark.parametrize("exchange", ["gradients", "all-reduce"])
def test_evaluations_within_an_epoch_leave_the_shards_where_they_are(exchange):
    seen = Seen()
    s = session(Neighbours(copies=3, exchange=exchange), Simulated(3), instruments=[seen])
    fit = s.fit(data(24), epochs=2, valid=data(3), evaluate_every=0.25)
    assert [e.instances for e in fit.history] == [6] * 8
    assert len(seen.events) == 8
    assert s.state.sharing.positions == [8, 8, 8]


def test_a_session_with_copies_predicts_with_their_consensus():
    s = session(Neighbours(copies=3), Simulated(3))
    s.fit(data(9), epochs=1)
    rows = data(2)
    model = nn.Sequential(*[p.module for p in s.parts.values()])
    for found, instance in zip(s.predict(rows), rows, strict=True):
        given = instance.inputs["x"]
        assert isinstance(given, Tensor)
        torch.testing.assert_close(found.flatten(), model(given).flatten(), rtol=1e-9, atol=1e-12)

"""Workers that wait for nobody: what firings see of steps, and that nothing is lost."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.engine.instrument import Fired, Updated
from geartrain.frames.tables import look_up
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.products import matching
from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.sharing.guarded import GuardedShare
from geartrain.sharing.locks import NoLock
from geartrain.sharing.share import AbstractShare, SharedPart
from geartrain.sharing.shared_weights import share
from geartrain.sharing.snapshots import SnapshotPart, SnapshotShare, twin
from tests.rigs.pairs import graph_of_pairs, pairs

WIDTH = 4096


class Uniform(nn.Module):
    """y = x + w[0]; all entries of w, and of v, are minus the number of steps taken."""

    def __init__(self, *, table: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH))
        self.v = nn.Parameter(torch.zeros(64, 64))
        self.words = nn.Embedding(WIDTH, 8, sparse=True) if table else None
        if self.words is not None:
            nn.init.zeros_(self.words.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w[0]

    def row_kernel(self) -> AbstractKernel:
        return UniformKernel(self)


class UniformKernel(AbstractKernel):
    looks_up = True

    def __init__(self, module: Uniform) -> None:
        self.module = module

    def forward(self, inputs, inside=None, room=None):
        (x,) = inputs
        self._check()
        return (x + self.module.w[0],), (x,)

    def backward(self, gradients, kept, rows, into, inside=None, *, wanted=True):
        self._check()
        module, n = self.module, gradients[0].shape[0]
        for p in (module.w, module.v):  # the mean over rows is one: a step of SGD takes 1 away
            into.add(p, torch.full_like(p, float(n)))
        if module.words is not None:
            ids = torch.arange(WIDTH)
            into.add_rows(module.words.weight, ids, torch.full((WIDTH, 8), float(n)))
        self._check()
        return (gradients[0],)

    def _check(self) -> None:
        module = self.module
        seen = {float(module.w[0])}
        for _ in range(3):
            for p in (module.w.detach(), module.v.detach()):
                seen |= {float(p.min()), float(p.max())}
        assert len(seen) == 1, f"a firing saw weights of several versions: {seen}"
        if module.words is not None:
            rows = look_up(module.words.weight, torch.arange(WIDTH))
            assert float(rows.min()) == float(rows.max()), "a firing saw half a step of the table"


def uniform(table: bool) -> tuple[gt.Graph, Uniform]:
    graph, module = gt.Graph(), Uniform(table=table)
    middle = graph.input("x").through(module, name="uniform").through(torch.tanh, name="tanh")
    still = gt.Part(nn.Linear(2, 1), optimizer=partial(torch.optim.SGD, lr=0.0))
    middle.through(still, name="last").loss(lambda y: y.square().sum(1))
    return graph, module


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("runtime", [gt.Threads(2), gt.Threads(3), gt.Simulated(3, jitter=0.5)])
def test_no_firing_sees_half_a_step_and_nothing_is_lost(runtime, table) -> None:
    graph, module = uniform(table)
    steps: list[Updated] = []

    class Counts(gt.AbstractInstrument):
        def on_updated(self, event: Updated) -> None:
            steps.append(event)

    session = gt.Session(
        graph,
        rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=1.0), update_every=3),
        runtime=runtime,
        sharing=gt.SharedWeights(),
        max_active=24,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        instruments=[Counts()],
    )
    data = [gt.Instance({"x": torch.ones(2, 2)}) for _ in range(60)]
    fit = session.fit(data, epochs=2)
    part = session.parts["uniform"]
    assert sum(s.rows for s in steps if s.part == "uniform") == 2 * 120
    versions = sorted(s.version for s in steps if s.part == "uniform")
    assert versions == [*range(1, part.version + 1)]
    for p in map(Tensor.detach, module.parameters()):
        assert float(p.min()) == float(p.max())
        # The last step of an epoch may be cut short, and counts for less.
        assert float(p.min()) == pytest.approx(-part.version, abs=2.5)
    assert part.version > 50
    assert sum(part.histogram()) == 0 and fit.history[-1].staleness["uniform"].max >= 0


def test_parts_with_kernels_are_free_and_others_guarded() -> None:
    graph = gt.Graph()
    x = graph.input("x").through(nn.Linear(2, 2), name="free")
    x = x.through(nn.Linear(2, 2), name="again", keep="inputs")
    bounded = gt.Part(nn.Linear(2, 1), max_staleness=2)
    x.through(bounded, name="bounded").loss(lambda y: y.square().sum(1))
    session = gt.Session(graph, runtime=gt.Simulated(2), sharing=gt.SharedWeights())
    session.fit([gt.Instance({"x": torch.ones(1, 2)}) for _ in range(9)], epochs=1)
    kinds = {}
    for name, part in session.parts.items():
        assert isinstance(part.ownership, SharedPart)
        kinds[name] = {type(share) for share in part.ownership.shares}
    assert kinds == {"free": {SnapshotShare}, "again": {GuardedShare}, "bounded": {GuardedShare}}


def test_a_module_that_cannot_be_copied_is_guarded() -> None:
    module = nn.Linear(2, 1)
    module.lock = threading.Lock()
    part = PartState("p", module, Rules())
    assert {type(s) for s in share(part, 2, NoLock, free=True)} == {GuardedShare}


class Recorded:
    """A lock that counts."""

    def __init__(self) -> None:
        self.times = 0

    def acquire(self, blocking: bool = True) -> bool:
        self.times += 1
        return True

    def release(self) -> None: ...

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *rest: object) -> None: ...


@pytest.mark.parametrize("looks_up", [True, False])
def test_tables_are_stepped_in_place_under_the_guards_of_all_workers(looks_up: bool) -> None:
    module = nn.Embedding(5, 2, sparse=True)
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=1.0), update_every=1)
    part = PartState("p", module, rules)
    one, two = share(part, 2, Recorded, free=True, looks_up=looks_up)
    for _ in range(2):
        with one.guard:
            one.gradient.add_rows(one.module.weight, torch.tensor([1]), torch.ones(1, 2))
            one.answered(1, 1)
        one.step_if_due(0)
    assert part.tables == {module.weight}
    with two.guard:
        assert two.module.weight.data_ptr() == module.weight.data_ptr()
        before = two.tables.times  # type: ignore[attr-defined]
        look_up(two.module.weight, torch.tensor([1]))
        assert two.tables.times == before + 1  # type: ignore[attr-defined]
    assert two.tables.times - before == 1 and before == 2 + (not looks_up)  # type: ignore[attr-defined]


def made(*, workers: int = 2) -> tuple[PartState, list[SnapshotShare]]:
    part = PartState(
        "p", nn.Linear(2, 1), Rules(optimizer=partial(torch.optim.SGD, lr=1.0), update_every=1)
    )
    found = share(part, workers, NoLock, free=True, looks_up=True)
    return part, [s for s in found if isinstance(s, SnapshotShare)]


def test_a_firing_keeps_the_weights_that_it_began_with_while_another_lane_steps() -> None:
    part, (one, two) = made()
    before = part.module.weight.detach().clone()
    with one.guard:
        for _ in range(5):
            with two.guard:
                two.gradient.add(two.module.weight, torch.ones(1, 2))
                two.answered(1, 1)
            assert two.step_if_due(0) is not None
        assert torch.equal(one.module.weight, before) and one.version == 0
        one.gradient.add(one.module.weight, torch.ones(1, 2))
        one.answered(1, 1)
    assert part.histogram() == (5, 0, 0, 0, 0, 1)  # it is five versions late, and counted so
    assert one.step_if_due(0) is not None
    with one.guard:
        assert one.version == 6
        assert_close(one.module.weight, before - 6)
    shared = part.ownership
    assert isinstance(shared, SnapshotPart) and len(shared._all) <= 2 + 2


def test_weights_of_now_are_as_they_are_until_others_are_in_their_place(monkeypatch) -> None:
    """A firing of another worker may begin at any moment of a step."""
    part, (one, two) = made()
    snapshot, seen = SnapshotPart._snapshot, []

    def watched(self: SnapshotPart, version: int) -> object:
        made = snapshot(self, version)
        seen.append((self.current.version, self.current.tensors[0].clone()))
        return made

    monkeypatch.setattr(SnapshotPart, "_snapshot", watched)
    before = part.module.weight.detach().clone()
    with one.guard:
        one.gradient.add(one.module.weight, torch.ones(1, 2))
        one.answered(1, 1)
        with two.guard:
            two.gradient.add(two.module.weight, torch.ones(1, 2))
            two.answered(1, 1)
        assert two.step_if_due(0) is not None
    assert one.step_if_due(0) is not None  # nobody has fired with the weights of the first step
    assert [version for version, _ in seen] == [0, 1]
    for version, weights in seen:
        assert_close(weights, before - version)


def test_copies_of_weights_in_bfloat16_are_those_of_the_snapshot_that_a_firing_sees() -> None:
    _, (one, two) = made()
    rows = torch.ones(1, 2, dtype=torch.bfloat16)
    seen = []
    for _ in range(3):
        with one.guard:
            assert torch.equal(matching(one.module.weight, rows), one.module.weight.bfloat16())
            seen.append(one.module.weight.detach().clone())
        with two.guard:
            two.gradient.add(two.module.weight, torch.ones(1, 2))
            two.answered(1, 1)
        assert two.step_if_due(0) is not None
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("update_every", [gt.Rows(12), gt.Messages(4), gt.Instances(4)])
def test_who_completes_an_update_alone_waits_for_those_who_step(update_every, free: bool) -> None:
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=1.0), update_every=update_every)
    part = PartState("p", nn.Linear(2, 1), rules)
    shares = share(part, 2, Recorded, free=free, looks_up=True)
    shared = part.ownership
    assert isinstance(shared, SharedPart)
    asked = []
    for number in range(8):
        mine = shares[number % 2]
        with mine.guard:
            mine.gradient.add(mine.module.weight, torch.ones(1, 2))
            mine.answered(3, 1)
        mine.finished(1)
        asked.append(shared.step_lock.times)  # type: ignore[attr-defined]
        mine.heard(number)
    assert asked == [0, 0, 0, 1, 1, 1, 1, 2]
    assert part.version == 2


def test_what_a_failed_firing_has_added_is_dropped_with_the_rows_in_flight() -> None:
    part, (one, two) = made()
    with pytest.raises(ZeroDivisionError), one.guard:
        one.gradient.add(one.module.weight, torch.ones(1, 2))
        one.answered(1, 1)
        1 / 0  # noqa: B018
    assert part.counting.rows == 0
    with two.guard:
        two.gradient.add(two.module.weight, torch.ones(1, 2))
        two.answered(1, 1)
    part.abandon()
    assert part.counting.rows == 0 and part.pending_gradients() == {}


def of_rows(n: int, *, free: bool) -> tuple[PartState, AbstractShare, AbstractShare]:
    """A part that steps every n rows, and two shares of it."""
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=1.0), update_every=n, average="none")
    part = PartState("p", nn.Linear(2, 1), rules)
    one, two = share(part, 2, NoLock, free=free, looks_up=True)
    return part, one, two


def fire(mine: AbstractShare, rows: int) -> None:
    with mine.guard:
        mine.gradient.add(mine.module.weight, torch.full((1, 2), float(rows)))
        mine.answered(rows, 1)


@pytest.mark.parametrize("free", [True, False])
def test_what_firings_under_way_are_adding_is_lacking_no_more(free: bool) -> None:
    part, one, two = of_rows(6, free=free)
    assert one.lacking == two.lacking == 6
    one.reserve(2)
    assert two.lacking == 4
    two.reserve(4)
    assert one.lacking == 6  # nothing is left of this update: it would be of the next
    fire(one, 2)
    fire(two, 4)
    assert part.version == 1 and one.lacking == 6
    one.reserve(3)
    assert two.lacking == 3


@pytest.mark.parametrize("free", [True, False])
def test_a_part_goes_on_after_a_failure_as_if_nothing_had_been_added(free: bool) -> None:
    part, one, two = of_rows(4, free=free)
    fire(one, 4)  # a step that nobody has been told of
    before = part.module.weight.detach().clone()
    fire(two, 1)
    two.reserve(2)
    one.reserve(1)
    with pytest.raises(ZeroDivisionError), two.guard:
        two.gradient.add(two.module.weight, torch.ones(1, 2))
        two.answered(2, 1)
        1 / 0  # noqa: B018
    part.abandon()
    assert one.step_if_due(0) is None and part.version == 1
    assert one.lacking == two.lacking == 4 and part.pending_gradients() == {}
    fire(two, 2)
    assert part.counting.rows == 2 and one.lacking == 2
    fire(one, 2)
    assert part.version == 2
    assert_close(part.module.weight.detach(), before - 4)


def test_weights_that_were_written_to_between_passes_are_seen_in_the_next() -> None:
    part, (one, _) = made()
    with torch.no_grad():
        part.module.weight.fill_(7)
    part.module.weight.requires_grad_(False)
    part.module.eval()
    part.begin()
    with one.guard:
        assert (one.module.weight == 7).all()
    assert not one.module.training and not one.module.weight.requires_grad


def test_gradients_that_are_not_finite_stop_workers_before_the_weights() -> None:
    part, (one, _) = made()
    before = part.module.weight.detach().clone()
    with (
        pytest.raises(gt.NonFiniteError, match=r"gradient of \['weight'\] is NaN"),
        one.guard,
    ):
        one.gradient.add(one.module.weight, torch.full((1, 2), torch.nan))
        one.answered(1, 1)
    assert torch.equal(part.module.weight, before) and part.version == 0


def test_a_twin_shares_storage_and_buffers_and_nothing_that_is_set_afterwards() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module.register_buffer("mean", torch.zeros(1))
    other = twin(module)
    assert other[1].weight is other[0].weight is not module[0].weight
    assert other[0].weight.data_ptr() == module[0].weight.data_ptr()
    assert other.mean is module.mean


def test_a_lane_that_is_sooner_done_gets_more() -> None:
    rows = [0, 0]

    class Counts(gt.AbstractInstrument):
        wants_firings = True

        def on_fired(self, event: Fired) -> None:
            rows[event.worker] += event.rows

    session = gt.Session(
        graph_of_pairs(),
        runtime=gt.Simulated(2, costs=gt.Costs(row_s=1e-3), speeds=[1.0, 0.05]),
        sharing=gt.SharedWeights(),
        max_active=8,
        instruments=[Counts()],
    )
    session.fit(pairs(200), epochs=1)
    assert rows[0] > 3 * rows[1] > 0  # a slow worker holds nobody up


def test_a_lock_is_free_after_a_failure_in_a_lane() -> None:
    class Fails(nn.Linear):
        pass

    graph = gt.Graph()
    calls = iter(range(10_000))

    def bad(y: Tensor) -> Tensor:
        if next(calls) == 5:
            raise RuntimeError("no")
        return y.square().sum(1)

    graph.input("x").through(nn.Linear(2, 1), name="map").loss(bad)
    session = gt.Session(graph, runtime=gt.Threads(2), sharing=gt.SharedWeights(), max_active=8)
    data = [gt.Instance({"x": torch.ones(1, 2)}) for _ in range(64)]
    before = threading.active_count()
    with pytest.raises(gt.WorkerError):
        session.fit(data, epochs=1)
    session.fit(data, epochs=1)
    assert threading.active_count() == before

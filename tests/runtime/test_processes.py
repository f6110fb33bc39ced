"""Sessions on worker processes: what comes back from them, and what does not go there."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.instrument import Progress, Updated, Worked
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.observe.flops import FlopMeter
from geartrain.runtime.base import AbstractRuntime, Feeder
from geartrain.runtime.processes.parent import Parent
from tests.rigs.left import living, wait_until
from tests.rigs.pairs import WorkSeen, graph_of_pairs, pairs, pass_of_two, square
from tests.rigs.passes import Quiet, processes

ADAM = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4)


def weights_of(session: gt.Session) -> list[Tensor]:
    return [p.detach().clone() for part in session.parts.values() for p in part.parameters]


def one_at_a_time(runtime: AbstractRuntime, rules: gt.Rules = ADAM, **more: object) -> gt.Session:
    """A session whose order is the same on every runtime."""
    return gt.Session(graph_of_pairs(), rules=rules, runtime=runtime, max_active=1, **more)  # type: ignore[arg-type]


def test_a_run_goes_as_it_does_on_one_thread_to_the_last_bit() -> None:
    """Optimisers, versions, gradients that wait: all is there again in the next epoch."""
    found = []
    for runtime in (gt.Threads(1), processes(2)):
        session = one_at_a_time(runtime)
        fit = session.fit(pairs(30), epochs=3, valid=pairs(7), evaluate_every=0.4)
        found.append((weights_of(session), [e.loss for e in fit.history], fit.history[-1].valid))
    (a, losses, valid), (b, others, validated) = found
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert losses == pytest.approx(others, rel=1e-12) and valid == pytest.approx(validated)


@pytest.mark.parametrize("back", [False, True])
def test_a_run_begun_on_one_runtime_resumes_on_another(tmp_path, back) -> None:
    whole = one_at_a_time(gt.Threads(1))
    whole.fit(pairs(30), epochs=2, folder=tmp_path / "a", checkpoint_every=7, keep_last=20)
    first, second = (processes(2), gt.Threads(1)) if back else (gt.Threads(1), processes(2))
    begun = one_at_a_time(first)
    begun.fit(pairs(30), epochs=1, folder=tmp_path / "b", checkpoint_every=7, keep_last=20)
    middle = sorted((tmp_path / "b").glob("*-*.safetensors"))[1]
    resumed = one_at_a_time(second)
    resumed.load(middle)
    resumed.fit(pairs(30), epochs=2, folder=tmp_path / "c", checkpoint_every=7)
    pairs_of = zip(weights_of(whole), weights_of(resumed), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs_of)


def test_the_modules_of_the_user_see_every_step_while_it_trains() -> None:
    graph = graph_of_pairs()
    session = gt.Session(graph, rules=ADAM, runtime=processes(2))
    before = weights_of(session)
    moved: list[bool] = []

    class Looks(gt.AbstractInstrument):
        def on_updated(self, event: Updated) -> None:
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, now(), strict=True)))

    def now() -> list[Tensor]:
        return weights_of(session)

    session.instruments.append(Looks())
    session.fit(pairs(40), epochs=1)
    assert moved and moved[-1]


def test_evaluation_and_prediction_are_those_of_one_thread() -> None:
    here, there = (gt.Session(graph_of_pairs(), runtime=r) for r in (gt.Threads(1), processes(2)))
    assert here.evaluate(pairs(20)).metrics == pytest.approx(there.evaluate(pairs(20)).metrics)
    for a, b in zip(here.predict(pairs(20)), there.predict(pairs(20)), strict=True):
        assert_close(a, b)


class Normed(nn.Module):
    """Counts in buffers, one of which it makes anew at every call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(3, 1), nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        y: Tensor = self.map(self.norm(x))
        return y


def test_many_are_judged_at_once_where_one_worker_is_fed_and_another_answers() -> None:
    def session(runtime: AbstractRuntime, last: int) -> gt.Session:
        torch.manual_seed(0)
        graph = gt.Graph()
        rows = graph.input("x").through(nn.Linear(3, 3), name="first")
        rows.through(nn.Linear(3, 1), name="last").loss(square)
        placed = gt.Schedule(placement={"first": 0, "last": last})
        return gt.Session(graph, rules=ADAM, runtime=runtime, schedule=placed, max_active=150)

    data = [gt.Instance({"x": torch.randn(1, 3)}) for _ in range(300)]
    mine, same = session(processes(2), 1), session(gt.Threads(1), 0)
    found, wanted = (x.evaluate(data) for x in (mine, same))
    assert found.instances == 300 and found.metrics == pytest.approx(wanted.metrics)
    assert mine.fit(data, epochs=1, valid=data).history[-1].instances == 300


def test_buffers_come_back_also_those_that_a_module_makes_anew() -> None:
    module = Normed()
    graph = gt.Graph()
    graph.input("x", bundle=True).through(module, name="map", keep="graph").loss(square)
    session = gt.Session(graph, rules=ADAM, runtime=processes(2))
    session.fit([gt.Instance({"x": torch.randn(5, 3) + 7}) for _ in range(10)], epochs=2)
    assert int(module.calls) == int(module.norm.num_batches_tracked) == 20
    assert float(module.norm.running_mean.mean()) > 1  # type: ignore[union-attr, operator]


def test_rows_of_tables_reach_the_workers_that_share_them() -> None:
    """Each word is seen by one instance a worker; all must learn the same of it."""
    found = []
    for runtime, sharing in ((gt.Threads(1), None), (processes(2), gt.SharedWeights())):
        torch.manual_seed(0)
        graph = gt.Graph()
        words = graph.input("words").through(nn.Embedding(50, 3, sparse=True), name="table")
        words.through(nn.Linear(3, 1), name="map").loss(square)
        rules = gt.Rules(optimizer=partial(gt.FusedAdagrad, lr=0.1), update_every=gt.Instances(2))
        schedule = gt.Schedule(ramp=gt.Ramp(over=0))
        session = gt.Session(
            graph,
            rules=rules,
            runtime=runtime,
            sharing=sharing,
            schedule=schedule,
            max_active=4,
        )
        data = [gt.Instance({"words": torch.tensor([i % 50])}) for i in range(200)]
        fit = session.fit(data, epochs=4)
        found.append(fit.history[-1])
    assert found[1].loss < 2 * found[0].loss + 1e-3
    assert found[1].updates == found[0].updates
    assert 0 < found[1].staleness["table"].mean < 8


@pytest.mark.parametrize("in_flight", ["all", "each"])
def test_a_bound_on_staleness_holds_for_workers_that_share_weights(in_flight) -> None:
    """On threads: ``tests/engine/test_shared_weights.py``."""
    oldest, means = [], []
    for bound in (None, 2, 1):
        rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=2)
        session = gt.Session(
            graph_of_pairs(),
            rules=replace(rules, max_staleness=bound),
            runtime=processes(2),
            sharing=gt.SharedWeights(in_flight=in_flight),
            max_active=16,
            schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        )
        fit = session.fit(pairs(120), epochs=1)
        assert fit.instances == 120
        oldest.append(max(s.max for s in fit.history[0].staleness.values()))
        means.append(sum(sum(s.histogram) for s in fit.history[0].staleness.values()))
        assert all(n > 0 for n in fit.history[0].updates.values())
    assert oldest[0] > 2 >= oldest[1] and oldest[2] <= 1
    assert len(set(means)) == 1  # every gradient is in a step, however long it waited


@pytest.mark.parametrize("rules", [{"max_staleness": 1}, {"window": 2}], ids=str)
def test_an_epoch_in_one_update_is_that_of_one_worker_with_a_bound(rules) -> None:
    """No gradient is lost or counted twice where steps, or rows, wait."""
    found = []
    for runtime, sharing in ((gt.Threads(1), None), (processes(2), gt.SharedWeights())):
        torch.manual_seed(0)
        graph = gt.Graph()
        rows = graph.input("x", bundle=True).through(nn.Linear(2, 3).double(), alone=True)
        rows.through(nn.Linear(3, 1).double(), alone=True).loss(square, alone=True)
        sgd = partial(torch.optim.SGD, lr=0.1)
        given = gt.Rules(optimizer=sgd, update_every=gt.Flush(), **rules)
        session = gt.Session(graph, rules=given, runtime=runtime, sharing=sharing, max_active=6)
        data = [gt.Instance({"x": torch.randn(1 + i % 3, 2).double()}) for i in range(40)]
        session.fit(data, epochs=2)
        found.append(weights_of(session))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-12)


def scaled() -> gt.Graph:
    """Rows at vertices that are kept go on; those of others are answered as they come in."""
    torch.manual_seed(0)
    graph = gt.Graph(vertex=("scale", "keep"))
    kept, others = graph.input("x").where(lambda m: m.keep > 0)
    others.stop()
    first = kept.through(nn.Linear(3, 1, dtype=torch.float64), name="map")
    first.through(Scale(), name="scale", read=("scale",)).loss(square)
    return graph


class Scale(nn.Module):
    """Multiplies rows by a column of their frames."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale[:, None]


def scaled_data(n: int, *, spoiled: bool = False) -> list[gt.Instance]:
    torch.manual_seed(2)
    found = []
    for k in range(n):
        size = 1 + k % 4
        column = {"scale": np.arange(size) + k % 3, "keep": (np.arange(size) + k) % 3}
        width = 2 if spoiled and k % 7 == 3 else 3
        found.append(
            gt.Instance({"x": torch.randn(size, width, dtype=torch.float64)}, vertex=column)
        )
    return found


@pytest.mark.parametrize("spoiled", [False, True])
def test_instances_that_wait_at_workers_are_computed_with_frames_of_their_own(spoiled) -> None:
    """Also those that come one by one, as bad ones are among them, or finish as they come in."""
    found = []
    for runtime, sharing in (
        (gt.Threads(1), None),
        (processes(2), gt.SharedWeights(in_flight="each")),
    ):
        session = gt.Session(
            scaled(),
            rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=gt.Flush()),
            runtime=runtime,
            sharing=sharing,
            max_active=6,
            schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
            reading=gt.Reading(on_bad="skip"),
        )
        before = session.evaluate(scaled_data(100, spoiled=spoiled))
        fit = session.fit(scaled_data(100, spoiled=spoiled), epochs=2)
        found.append(([before.metrics["loss"], fit.history[-1].loss], weights_of(session)))
    assert found[0][0] == pytest.approx(found[1][0])
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_copies_of_a_part_meet_between_passes_as_on_threads() -> None:
    found = []
    for runtime in (gt.Threads(2, kernel_threads=1), processes(2)):
        copies = gt.PartCopies({"first": 2}, gt.Average(every=8))
        session = one_at_a_time(runtime, sharing=copies)
        session.fit(pairs(30), epochs=2)
        found.append(weights_of(session))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_progress_tells_of_loss_and_staleness_while_it_trains() -> None:
    heard: list[Progress] = []

    class Listens(gt.AbstractInstrument):
        def on_progress(self, event: Progress) -> None:
            heard.append(event)

    session = gt.Session(
        graph_of_pairs(), rules=ADAM, runtime=processes(2), instruments=[Listens()]
    )
    session.fit(pairs(60), epochs=1)
    assert heard[-1].finished == 60 and heard[-1].loss == heard[-1].loss
    assert heard[-1].staleness > 0


def test_what_cannot_be_handed_over_is_refused_with_a_remedy() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.lock = nn.Linear(2, 2), threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                y: Tensor = self.map(x)
                return y

    graph = gt.Graph()
    graph.input("x", bundle=True).through(Locked(), name="map", keep="graph").output()
    session = gt.Session(graph, runtime=processes(2))
    with pytest.raises(ValueError, match=r"cannot pickle '_thread.lock'.*use runtime=gt.Threads"):
        session.predict([gt.Instance({"x": torch.ones(1, 2)})])


@pytest.mark.parametrize(
    ("rules", "sharing", "words"),
    [
        (gt.Rules(max_staleness=0), gt.SharedWeights(), r"part 'first': max_staleness=0 wants"),
    ],
)
def test_ways_of_sharing_that_need_one_memory_are_refused(rules, sharing, words) -> None:
    with pytest.raises(ValueError, match=words):
        gt.Session(graph_of_pairs(), rules=rules, runtime=processes(2), sharing=sharing).fit(
            pairs(3), epochs=1
        )


class Draws(nn.Module):
    """Adds columns with what the random generators give."""

    def forward(self, x: Tensor) -> Tensor:
        here = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.cat([x, torch.tensor([here])], 1)


def test_workers_draw_numbers_of_their_own_and_repeat_them() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        graph = gt.Graph()
        both = graph.input("x", bundle=True).through(Draws(), name="a", keep="graph")
        both.through(Draws(), name="b", keep="graph").output()
        session = gt.Session(
            graph, runtime=processes(2), schedule=gt.Schedule(placement={"a": 0, "b": 1})
        )
        told = session.predict([gt.Instance({"x": torch.zeros(1, 1)})])
        found.append(told[0].flatten().tolist())
    assert found[0] == found[1]
    assert len(set(found[0])) == 7  # workers are forks of one process, and yet they differ


def test_a_meter_is_refused_as_it_would_count_elsewhere() -> None:
    compute = gt.Compute(meter=FlopMeter())
    session = gt.Session(graph_of_pairs(), runtime=processes(2), compute=compute)
    with pytest.raises(ValueError, match=r"FlopMeter counts in one process; measure with .*Thr"):
        session.fit(pairs(3), epochs=1)


def test_misuse_is_refused() -> None:
    for make, words in (
        (lambda: gt.Processes(0), r"Processes\(workers=0\): give 1 or more"),
        (lambda: gt.Processes(1 << 40), r"Processes\(workers="),
        (lambda: gt.Processes(2, kernel_threads=1 << 40), r"Processes\(kernel_threads="),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_closing_ends_the_workers_and_the_next_pass_makes_new_ones() -> None:
    runtime = gt.Processes(2, kernel_threads=1)
    session = gt.Session(graph_of_pairs(), rules=ADAM, runtime=runtime)
    session.fit(pairs(5), epochs=1)
    before = runtime.pids
    runtime.close()
    assert len(before) == 2 and runtime.pids == ()
    session.fit(pairs(5), epochs=2)
    assert len(runtime.pids) == 2 and not set(before) & set(runtime.pids)
    runtime.close()


def test_a_session_that_nobody_has_any_more_leaves_no_process_and_no_memory() -> None:
    """Whenever Python next looks for cycles: a program that makes many would have all of them."""
    runtime = gt.Processes(2, kernel_threads=1)
    session = gt.Session(graph_of_pairs(), rules=ADAM, runtime=runtime)
    parts = len(session.parts)
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        session.fit(pairs(5), epochs=2, valid=pairs(3))
        pids = runtime.pids
        assert len(pids) == 2 and len(os.listdir("/proc/self/fd")) > files + 2
        del session, runtime
        wait_until(lambda: not living(pids), "the workers have ended")
        assert len(os.listdir("/proc/self/fd")) <= files + parts  # the weights of each
    finally:
        gc.enable()


def test_large_rows_gradients_and_letters_are_those_of_one_thread() -> None:
    """They lie in memory that processes have in common, and do not travel."""

    def trained(runtime: AbstractRuntime, sharing: gt.AbstractSharing | None) -> list[Tensor]:
        torch.manual_seed(0)
        graph = gt.Graph()
        x = graph.input("x", shape=(120,), dtype=torch.float64, bundle=True)
        for name in ("lower", "upper"):
            x = x.through(nn.Linear(120, 120).double(), name=name, alone=True)
        x.loss(square)
        every = 1 if sharing is None else gt.Flush()  # else whoever is first sees which weights
        rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=1e-3), update_every=every)
        session = gt.Session(graph, rules=rules, runtime=runtime, max_active=1, sharing=sharing)
        session.fit(data, epochs=2)
        return weights_of(session)

    torch.manual_seed(0)
    data = [gt.Instance({"x": torch.randn(100, 120).double()}) for _ in range(6)]
    for sharing in (None, gt.SharedWeights()):
        found = (trained(runtime, sharing) for runtime in (gt.Threads(1), processes(2)))
        for a, b in zip(*found, strict=True):
            assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_worker_has_waited_while_the_pass_was_handed_over(monkeypatch) -> None:
    """The parent's clock goes on by an hour meanwhile."""
    hour, ahead, waits = 3600.0, [0.0], {}
    hand_over = Parent._hand_over

    def slow(self: Parent) -> None:
        hand_over(self)
        ahead[0] = hour

    class Told(Quiet):
        def waited(self, worker: int, seconds: float) -> None:
            waits[worker] = seconds

    clock = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + ahead[0], monotonic=time.monotonic
    )
    monkeypatch.setattr("geartrain.runtime.processes.parent.time", clock)
    monkeypatch.setattr(Parent, "_hand_over", slow)
    graph = graph_of_pairs()
    engine = Engine(graph, make_parts(graph, ADAM), Settings(), 2)
    engine.begin(train=True)
    processes(2).run(engine, Feeder(iter(pairs(4))), Told())
    assert {*waits} == {0, 1} and all(hour <= s < 1.1 * hour for s in waits.values())


def test_workers_with_a_stock_report_by_lots_and_not_by_firings() -> None:
    _, event = pass_of_two(2000, 64, max_rows=4)
    for w in (0, 1):
        firings = sum(n.firings for n in event.nodes if n.worker == w)
        (told,) = (x.messages for x in event.links if (x.sender, x.receiver) == (w, 2))
        # A lot is half of max_active, 16 firings and more of 4 rows each; then by the clock.
        assert firings > 500 and told < firings / 4, (told, firings)


def test_shared_weights_of_one_memory_travel_no_more_once_their_optimiser_remembers() -> None:
    """Steps are as many as before, and each is told once; every gradient is in one of them."""
    seen: list[Worked] = []
    steps: list[Updated] = []

    class Listens(gt.AbstractInstrument):
        def on_worked(self, event: Worked) -> None:
            seen.append(event)

        def on_updated(self, event: Updated) -> None:
            steps.append(event)

    session = gt.Session(
        graph_of_pairs(),
        rules=ADAM,
        runtime=processes(2),
        sharing=gt.SharedWeights(in_flight="each"),
        instruments=[Listens()],
    )
    fit = session.fit(pairs(400), epochs=2)
    between = [
        sum(x.messages for x in event.links if {x.sender, x.receiver} == {0, 1}) for event in seen
    ]
    first, second = fit.history
    assert second.updates == first.updates and sum(second.updates.values()) > 100
    assert between[0] > 100 and between[1] <= 8, between
    told = [(e.part, e.version) for e in steps]
    assert len(told) == len({*told}) == 2 * sum(second.updates.values())
    for a, b in zip(first.staleness.values(), second.staleness.values(), strict=True):
        assert sum(a.histogram) == sum(b.histogram) > 0
    for name, part in session.parts.items():
        assert part.version == 2 * second.updates[name]


class Stream:
    """Pairs that are no list: when the next one comes is not known."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[gt.Instance]:
        return iter(pairs(self.n))


def test_rows_of_a_list_go_to_workers_by_lots_which_are_told_of_by_lots() -> None:
    seen = WorkSeen()
    session = gt.Session(
        graph_of_pairs(),
        rules=ADAM,
        runtime=processes(2),
        max_active=8,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0), max_rows=2),
        instruments=[seen],
    )
    fit = session.fit(pairs(400), epochs=1)
    (event,) = seen.passes
    told = [x.messages for x in event.links if x.sender == 2]
    heard = [x.messages for x in event.links if x.receiver == 2]
    assert fit.history[-1].instances == 400
    # 50 lots of 8, and what a pass begins and ends with; some 300 if each is waited for. What
    # workers say goes by the clock, too: 100 on a quiet machine, and more the longer a pass takes.
    assert max(told) < 150 and max(heard) < 250, (told, heard)


@pytest.mark.parametrize("listed", [True, False])
def test_what_the_program_says_to_a_worker_goes_with_what_it_feeds_unless_that_may_take_long(
    listed: bool,
) -> None:
    """That an instance has finished, the frame of the one in its place, and its rows."""
    seen = WorkSeen()
    session = one_at_a_time(processes(2), instruments=[seen])
    session.fit(pairs(200) if listed else Stream(200), epochs=1)
    (event,) = seen.passes
    told = {x.receiver: x.messages for x in event.links if x.sender == 2}
    assert told.keys() == {0, 1}
    # One for each instance, and what a pass begins and ends with; or the former by itself.
    least, most = (200, 300) if listed else (400, 500)
    assert all(least <= n < most for n in told.values()), told


@pytest.mark.parametrize("rule", ["optimizer", "schedule"])
def test_a_rule_that_cannot_be_carried_is_named(rule) -> None:
    lock = threading.Lock()

    def schedule(trained: int) -> float:
        return float(lock.locked())

    def optimizer(parameters: object) -> torch.optim.Optimizer:
        with lock:
            return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]

    given = {"optimizer": optimizer} if rule == "optimizer" else {"schedule": schedule}
    session = one_at_a_time(processes(2), gt.Rules(**given))  # type: ignore[arg-type]
    name = next(iter(session.parts))
    with pytest.raises(ValueError, match=f"it is in the rules of part '{name}': its {rule}"):
        session.fit(pairs(8), epochs=1)

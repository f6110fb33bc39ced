"""One contract, checked for every runtime that runs in this process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.engine.engine import Engine
from geartrain.engine.mailbox import RandomOrder
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.errors import (
    DataError,
    GraphError,
    NonFiniteError,
    ProtocolError,
    StuckError,
    WorkerError,
)
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.parts.rules import Flush, Instances, Rules
from geartrain.runtime.base import AbstractRuntime, Feeder
from geartrain.runtime.costs import Costs
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.simulated import Simulated
from geartrain.runtime.threads import Threads
from tests.rigs.on_ray import RAY, on_ray
from tests.rigs.passes import AT_ONCE, Quiet, hosts, one_pass, weights_of

RUNTIMES = {
    "simulated 1": lambda: Simulated(1),
    "simulated 3": lambda: Simulated(3, seed=1, jitter=0.5),
    "threads 1": lambda: Threads(1, kernel_threads=1),
    "threads 2": lambda: Threads(2, kernel_threads=1),
    "threads 4": lambda: Threads(4, kernel_threads=1),
    "processes 2": cache(lambda: Processes(2, kernel_threads=1)),  # one for all tests: cheaper
    "processes 3": cache(lambda: Processes(3, kernel_threads=1)),
    "hosts 2": partial(hosts, 2),
    "ray 2": partial(on_ray, 2),
}
MARKS = {"ray 2": RAY, "processes 3": pytest.mark.slow}
APART = ("processes", "hosts", "ray")  # workers have engines of their own


@pytest.fixture(params=[pytest.param(n, marks=MARKS.get(n, ())) for n in RUNTIMES])
def runtime(request) -> AbstractRuntime:
    return RUNTIMES[request.param]()


@pytest.fixture(params=[name for name in RUNTIMES if name.split()[0] not in APART])
def runtime_here(request) -> AbstractRuntime:
    """Those whose workers run the engine that a test holds."""
    return RUNTIMES[request.param]()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("geartrain")] == []


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def chain(*more: nn.Module) -> Graph:
    """Three maps one behind the other, so that there is work for several workers."""
    torch.manual_seed(0)
    graph = Graph(vertex=("slot",))
    x = graph.input("x")
    for k, module in enumerate((nn.Linear(2, 3), *more, nn.Tanh(), nn.Linear(3, 2))):
        x = x.through(module, name=f"map {k}")
    x.loss(squares)
    return graph


def rows(n: int, each: int = 4, start: int = 0) -> list[Instance]:
    rng = np.random.default_rng(0)
    return [
        Instance(
            {"x": torch.from_numpy(rng.standard_normal((each, 2)).astype(np.float32))},
            {"slot": np.arange(each)},
            key=f"line {start + i}",
        )
        for i in range(n)
    ]


def engine_of(graph: Graph, workers: int, *, max_active: int = 8, **rules: object) -> Engine:
    given = {"optimizer": partial(torch.optim.SGD, lr=0.01), "update_every": 7} | rules
    parts = make_parts(graph, Rules(**given))
    settings = Settings(max_active=max_active, ramp=AT_ONCE, max_rows=16)
    return Engine(graph, parts, settings, workers)


class Log(Quiet):
    """Writes down what a runtime says."""

    def __init__(self) -> None:
        self.fired_rows = Counter()
        self.steps = Counter()
        self.finished_last = 0
        self.most_active = 0
        self.inside = threading.Lock()
        self.times: dict[int, list[float]] = defaultdict(list)

    def fired(self, worker, firing, start_s, end_s):
        assert self.inside.acquire(blocking=False), "two calls at once"
        assert 0 <= start_s <= end_s
        self.times[worker].append(end_s)
        self.fired_rows[firing.node, firing.forward] += firing.rows
        self.inside.release()

    def stepped(self, worker, step, now_s):
        assert self.inside.acquire(blocking=False), "two calls at once"
        self.steps[step.part] += 1
        self.inside.release()

    def finished(self, engine, now_s):
        assert self.inside.acquire(blocking=False), "two calls at once"
        self.finished_last = engine.controller.finished
        self.most_active = max(self.most_active, engine.controller.active)
        self.inside.release()


def test_it_returns_when_all_have_finished(runtime):
    log, engine = Log(), engine_of(chain(), runtime.workers)
    outcome = one_pass(chain(), rows(40), engine=engine, runtime=runtime, watch=log)
    assert engine.controller.finished == log.finished_last == 40
    assert outcome.seconds > 0
    assert outcome.feeder.taken == 40 and outcome.feeder.source_ended
    assert log.most_active <= 8


def test_the_watch_hears_of_every_row_and_step(runtime):
    log, engine = Log(), engine_of(chain(), runtime.workers)
    one_pass(chain(), rows(40), engine=engine, runtime=runtime, watch=log)
    for node in ("map 0", "map 1"):
        assert log.fired_rows[node, True] == log.fired_rows[node, False] == 160
    assert log.fired_rows["map 2", True] == 160  # the loss is inside
    assert log.fired_rows["map 2", False] == log.fired_rows["loss", True] == 0
    assert log.steps == {name: part.version for name, part in engine.parts.items()}
    assert min(log.steps.values()) > 5
    assert all(times == sorted(times) for times in log.times.values())


def test_at_its_end_a_pass_tells_who_waited_and_what_went_between_processes(runtime):
    class Told(Quiet):
        def __init__(self) -> None:
            self.waits: dict[int, float] = {}
            self.sent: dict[tuple[int, int], tuple[int, int]] = {}

        def waited(self, worker, seconds):
            assert worker not in self.waits
            self.waits[worker] = seconds

        def carried(self, sender, receiver, messages, nbytes):
            assert (sender, receiver) not in self.sent
            self.sent[sender, receiver] = messages, nbytes

    told, n = Told(), runtime.workers
    engine = engine_of(chain(), n)
    outcome = one_pass(chain(), rows(40), engine=engine, runtime=runtime, watch=told)
    assert set(told.waits) == set(range(n))
    assert all(0 <= seconds <= 1.01 * outcome.seconds + 0.1 for seconds in told.waits.values())
    if runtime.lock is not None:  # one memory
        assert told.sent == {}
        return
    assert {(n, w) for w in range(n)} | {(w, n) for w in range(n)} <= set(told.sent)
    assert all(0 < messages < nbytes for messages, nbytes in told.sent.values())
    homes = {engine.homes.of_node[i] for i in engine.wiring.nodes}
    between = [pair for pair in told.sent if n not in pair]
    assert bool(between) == (len(homes) > 1)
    for pair in between:  # rows of 160 messages go over, or their gradients
        assert told.sent[pair][1] > 160 * 8


def test_a_pass_over_nothing_is_over_at_once(runtime):
    engine = engine_of(chain(), runtime.workers)
    outcome = one_pass(chain(), [], engine=engine, runtime=runtime)
    assert outcome.sums == {} and engine.controller.finished == 0


def test_a_pass_follows_a_pass(runtime):
    engine = engine_of(chain(), runtime.workers, update_every=Flush())
    sums = [one_pass(chain(), rows(9), engine=engine, runtime=runtime).sums for _ in range(3)]
    assert sums[0]["loss"] == pytest.approx(sums[2]["loss"])
    assert engine.controller.trained == 27


def test_a_feeder_gives_no_more_than_its_limit(runtime):
    engine = engine_of(chain(), runtime.workers)
    engine.begin(train=True)
    source = iter(rows(40))
    feeder = Feeder(source, limit=13)
    runtime.run(engine, feeder, Quiet())
    engine.check_empty()
    assert engine.controller.finished == feeder.taken == 13
    assert feeder.exhausted and not feeder.source_ended
    assert next(source).key == "line 13"


def test_instances_are_pulled_only_when_there_is_room(runtime):
    engine = engine_of(chain(), runtime.workers, max_active=3)
    pulled, most = 0, 0

    def source():
        nonlocal pulled, most
        for instance in rows(30):
            pulled += 1
            most = max(most, pulled - engine.controller.finished)
            yield instance

    one_pass(chain(), source(), engine=engine, runtime=runtime)
    assert pulled == 30 and most <= 3


def test_one_in_flight_gives_the_same_weights_on_every_runtime(runtime):
    found = []
    for each in (Simulated(1), runtime):
        graph = chain()
        engine = engine_of(graph, each.workers, max_active=1, update_every=Instances(1))
        one_pass(graph, rows(30), engine=engine, runtime=each)
        found.append(weights_of({n: p.module for n, p in engine.parts.items()}))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


class Brittle(nn.Module):
    """Raises on its thousandth row."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.seen = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        if self.seen >= 1000:
            raise RuntimeError("the thousandth row")
        return self.map(x)


def test_a_module_that_raises_reaches_the_caller_with_its_story(runtime):
    graph = chain(Brittle())
    engine = engine_of(graph, runtime.workers)
    engine.begin(train=True)
    with pytest.raises(WorkerError) as caught:
        runtime.run(engine, Feeder(iter(rows(1000))), Quiet())
    told = str(caught.value)
    for word in ("RuntimeError", "'map 1'", "part 'map 1'", "float32 (", ", 3)", "rows"):
        assert word in told
    assert "the thousandth row" in told
    assert isinstance(caught.value.__cause__, RuntimeError)
    if "forward" in told:
        assert "(line " in told


def test_a_predicate_that_raises_is_named(runtime):
    def fussy(m):
        if (m.slot == 3).any():
            raise ZeroDivisionError("no threes")
        return m.slot > 0

    for first in (True, False):  # behind the input, and behind a node
        graph = Graph(vertex=("slot",))
        x = graph.input("x")
        x = x if first else x.through(nn.Linear(2, 2), name="map")
        yes, no = x.where(fussy, name="fussy")
        yes.stop()
        no.loss(squares)
        engine = engine_of(graph, runtime.workers)
        engine.begin(train=True)
        with pytest.raises(WorkerError, match=r"ZeroDivisionError in 'fussy'.*no threes"):
            runtime.run(engine, Feeder(iter(rows(3))), Quiet())


def test_a_group_that_waits_for_a_member_that_never_comes_is_told_quickly(runtime):
    graph = Graph(vertex=("slot",))
    x = graph.input("x").through(nn.Linear(2, 2), name="map")
    x.group("instance", 5, order="slot", name="five").through(squares).loss(lambda y: y)
    engine = engine_of(graph, runtime.workers)
    engine.begin(train=True)
    started = time.perf_counter()
    with pytest.raises(StuckError) as caught:
        runtime.run(engine, Feeder(iter(rows(3))), Quiet())
    assert time.perf_counter() - started < 5
    told = str(caught.value)
    assert "3 instances are unfinished and no node can fire" in told
    assert "instance 0 (line 0): 4 rows open" in told
    assert "'five' waits for members of instance 0 (line 0): positions [0, 1, 2, 3] of 0..4" in told
    assert "'map' waits for the gradients of 12 rows" in told


def test_a_join_that_waits_for_a_port_is_told(runtime):
    graph = Graph(vertex=("slot",))
    x = graph.input("x")
    some, rest = x.where(lambda m: m.slot > 0)
    rest.stop()
    both = graph.concat(x.through(torch.sin), some, on="vertex", name="both")
    both.loss(squares)
    engine = engine_of(graph, runtime.workers)
    engine.begin(train=True)
    with pytest.raises(
        StuckError, match=r"'both' waits for port \[1\] \('where'\) of instance 0 .*, vertex=0"
    ):
        runtime.run(engine, Feeder(iter(rows(2))), Quiet())


def test_a_graph_error_while_running_comes_as_it_is_with_the_place_as_a_note(runtime):
    graph = Graph(vertex=("slot",))
    graph.input("x").through(nn.Linear(2, 2), name="map").group(
        "instance", 3, order="slot", name="three"
    ).stop()
    engine = engine_of(graph, runtime.workers)
    engine.begin(train=True)
    with pytest.raises(GraphError, match="'three': a member of instance") as caught:
        runtime.run(engine, Feeder(iter(rows(2))), Quiet())
    assert any("'three'" in note for note in caught.value.__notes__)


def test_nan_is_refused_before_it_enters(runtime):
    data = rows(12)
    data[7].inputs["x"][2, 1] = float("nan")
    engine = engine_of(chain(), runtime.workers, max_active=4)
    engine.begin(train=True)
    with pytest.raises(DataError, match=r"instance line 7: input 'x' holds NaN"):
        runtime.run(engine, Feeder(iter(data)), Quiet())


def test_a_loss_that_is_not_finite_names_its_instance(runtime):
    graph = Graph(vertex=("slot",))
    graph.input("x").loss(lambda x: torch.where(x[:, 0] == 0, torch.nan, x[:, 0]), name="sum")
    data = rows(9)
    data[5].inputs["x"][1, 0] = 0
    engine = engine_of(graph, runtime.workers)
    engine.begin(train=True)
    with pytest.raises(NonFiniteError, match=r"'sum': loss is nan at a row of .*\(line 5\)"):
        runtime.run(engine, Feeder(iter(data)), Quiet())


def bad_instances() -> list[Instance]:
    """Twenty good ones and seven that are refused, each for a reason of its own."""
    x = torch.zeros(2, 2)
    slots = np.arange(2)
    return [
        *rows(5),
        Instance({"x": torch.full((2, 2), torch.inf)}, {"slot": slots}, key="infinite"),
        Instance({"x": x}, {}, key="no column"),
        *rows(5, start=5),
        Instance({"x": x}, {"slot": np.arange(3.0)}, key="floats"),
        Instance({"x": (x, [0, 2])}, {"slot": slots}, key="outside"),
        Instance({"y": x}, {"slot": slots}, key="other input"),
        Instance({"x": x.double()}, {"slot": slots}, key="double"),
        *rows(10, start=10),
        Instance({"x": x[:0]}, {"slot": slots[:0]}, key="empty"),
    ]


@pytest.mark.parametrize("max_active", [1, 4, 30])
def test_bad_instances_are_skipped_counted_and_logged(runtime, max_active, caplog):
    engine = engine_of(chain(), runtime.workers, max_active=max_active)
    with caplog.at_level(logging.WARNING, "geartrain.runtime"):
        outcome = one_pass(chain(), bad_instances(), engine=engine, runtime=runtime, on_bad="skip")
    assert outcome.feeder.skipped == 7
    assert engine.controller.finished == 20
    for key in ("infinite", "no column", "floats", "outside", "other input", "double", "empty"):
        assert any(key in r.message for r in caplog.records), key
    assert len(caplog.records) == 7


def test_a_source_of_other_things_is_refused(runtime):
    engine = engine_of(chain(), runtime.workers)
    engine.begin(train=True)
    with pytest.raises(DataError, match=r"the data gave a dict; .*Reading\(convert="):
        runtime.run(engine, Feeder(iter([*rows(1), {}])), Quiet())


def test_a_source_that_raises_reaches_the_caller(runtime):
    def source():
        yield from rows(20)
        raise OSError("the disk is gone")

    engine = engine_of(chain(), runtime.workers)
    engine.begin(train=True)
    with pytest.raises(OSError, match="the disk is gone"):
        runtime.run(engine, Feeder(source()), Quiet())


class Interrupting(Quiet):
    """Asks to stop after ten instances, as Ctrl-C does."""

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def finished(self, engine, now_s):
        while engine.controller.finished >= 10 and self.times:
            self.times -= 1
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_finishes_what_is_in_flight(runtime):
    handler = signal.getsignal(signal.SIGINT)
    graph = chain()
    engine = engine_of(graph, runtime.workers)
    engine.begin(train=True)
    endless = (instance for _ in range(100_000) for instance in rows(10))
    with pytest.raises(KeyboardInterrupt, match="everything that was in flight has finished"):
        runtime.run(engine, Feeder(endless), Interrupting())
    engine.check_empty()
    assert engine.controller.finished >= 10
    assert signal.getsignal(signal.SIGINT) is handler


def test_two_interrupts_abandon_what_is_in_flight(runtime):
    engine = engine_of(chain(), runtime.workers)
    engine.begin(train=True)
    endless = (instance for _ in range(100_000) for instance in rows(10))

    class Twice(Quiet):
        def finished(self, engine, now_s):
            if engine.controller.finished >= 10:
                signal.raise_signal(signal.SIGINT) if threading.current_thread() is (
                    threading.main_thread()
                ) else os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        runtime.run(engine, Feeder(endless), Twice())


def test_a_failure_after_an_interrupt_is_what_the_caller_hears(runtime, tmp_path):
    here = os.getpid()

    class LateFailure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fail = tmp_path / "fail"  # which workers see, wherever they are
            self.firings = 0

        def forward(self, x: Tensor) -> Tensor:
            self.firings += 1
            slow = 0.05 if self.firings > 110 else 0.004  # about then the first have finished
            until = time.monotonic() + (slow if os.getpid() != here else 0.0)
            while not self.fail.exists() and time.monotonic() < until:
                time.sleep(0.001)  # else all may be through before the parent has heard of ten
            if self.fail.exists():
                raise RuntimeError("while finishing")
            return x

    late = LateFailure()
    engine = engine_of(chain(late), runtime.workers, max_active=2000)  # some are still to come by
    engine.begin(train=True)

    class Watching(Interrupting):
        def finished(self, engine, now_s):
            if engine.controller.finished >= 10:
                late.fail.touch()
            super().finished(engine, now_s)

    endless = (instance for _ in range(100_000) for instance in rows(10))
    with pytest.raises(WorkerError, match="while finishing"):
        runtime.run(engine, Feeder(endless), Watching())


def test_a_watch_that_raises_stops_the_run(runtime):
    class Angry(Quiet):
        def finished(self, engine, now_s):
            raise ArithmeticError("seen enough")

    engine = engine_of(chain(), runtime.workers)
    engine.begin(train=True)
    with pytest.raises(ArithmeticError, match="seen enough"):
        runtime.run(engine, Feeder(iter(rows(100))), Angry())


def test_an_instance_answered_too_often_is_a_protocol_error(runtime_here):
    engine = engine_of(chain(), runtime_here.workers)
    engine.begin(train=True)
    node = next(n for n in engine.wiring.nodes.values() if n.name == "map 2")
    original = node.forward

    def twice(*args):
        emission = original(*args)
        emission.backward += emission.backward
        return emission

    node.forward = twice
    with pytest.raises(ProtocolError, match=r"'map 1': rows \[.*\] came back but do not wait here"):
        runtime_here.run(engine, Feeder(iter(rows(3))), Quiet())


def test_grad_mode_and_kernel_threads_of_the_caller_are_as_before(runtime):
    threads = torch.get_num_threads()
    with torch.no_grad():
        one_pass(chain(), rows(5), engine=engine_of(chain(), runtime.workers), runtime=runtime)
        assert not torch.is_grad_enabled()
    assert torch.get_num_threads() == threads


def test_misuse_is_refused_with_what_was_expected():
    for make, words in (
        (lambda: Simulated(0), r"Simulated\(workers=0\)"),
        (lambda: Simulated(1, jitter=1.0), "0 <= jitter < 1"),
        (lambda: Simulated(2, speeds=(1.0,)), "2 positive numbers"),
        (lambda: Threads(0), r"Threads\(workers=0\)"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_the_virtual_clock_counts_firings_rows_and_links():
    graph = Graph(vertex=("slot",), run="steps")  # a node for each
    x = graph.input("x").through(nn.Linear(2, 2), name="a")
    x.through(nn.Linear(2, 2), name="b").loss(squares, name="loss")
    data = rows(1)

    def seconds(runtime: Simulated, **placed: int) -> float:
        parts = make_parts(graph, Rules(update_every=Flush()))
        engine = Engine(graph, parts, Settings(ramp=AT_ONCE), runtime.workers, placed)
        return one_pass(graph, data, engine=engine, runtime=runtime).seconds

    costs = Costs(firing_s=1.0, row_s=0.5, backward=2.0)  # 3 firings, one of them both ways
    assert seconds(Simulated(1, costs=costs)) == pytest.approx(3 + 0.5 * 4 * (2 + 2 * 2))
    assert seconds(Simulated(1, costs=costs), loss=0) == pytest.approx(5 + 0.5 * 4 * (3 + 2 * 2))
    assert seconds(Simulated(1, costs=costs, speeds=(2.0,))) == pytest.approx(15 / 2)
    linked = Costs(firing_s=1.0, row_s=0.5, latency_s=10.0, bytes_per_s=None)
    apart = seconds(Simulated(2, costs=linked), a=0, b=1)
    assert apart == pytest.approx(15 + 2 * 10)
    own = Costs(firing_s=1.0, row_s=0.5, nodes={"a": (3.0, 0.0)})
    assert seconds(Simulated(1, costs=own)) == pytest.approx(15 + 2 * 2 - 0.5 * 4 * 3)


def test_a_narrow_link_takes_its_time():
    graph = Graph()
    graph.input("x").through(nn.Linear(2, 2), name="a").through(nn.Linear(2, 2), name="b").loss(
        squares
    )
    parts = make_parts(graph, Rules(update_every=Flush()))
    narrow = Costs(firing_s=0.0, row_s=0.0, bytes_per_s=8.0)
    engine = Engine(graph, parts, Settings(ramp=AT_ONCE), 2, {"a": 0, "b": 1})
    data = [Instance({"x": torch.zeros(3, 2)})]
    seconds = one_pass(graph, data, engine=engine, runtime=Simulated(2, costs=narrow)).seconds
    there = 3 * 2 * 4 + 2 * 3 * 8 + 3 * 8  # payload, two state columns, addresses
    back = 3 * 2 * 4 + 3 * 8
    assert seconds == pytest.approx((there + back) / 8)


def test_batches_between_two_workers_arrive_in_the_order_they_were_sent():
    """However the link jitters: rows of one stream reach the other worker in their order."""
    graph = Graph(vertex=("slot",))
    seen = []

    def look(m):
        seen.extend(m.instance.tolist())
        return m.slot >= 0

    x = graph.input("x").through(nn.Linear(2, 2), name="a")
    yes, no = x.through(nn.Linear(2, 2), name="b").where(look)
    yes.loss(squares)
    no.stop()
    parts = make_parts(graph, Rules(update_every=Flush()))
    settings = Settings(max_active=20, ramp=AT_ONCE, max_rows=2)
    engine = Engine(graph, parts, settings, 2, {"a": 0, "b": 1})
    runtime = Simulated(2, seed=3, jitter=0.9, costs=Costs(latency_s=0.1))
    one_pass(graph, rows(20), engine=engine, runtime=runtime)
    assert seen == sorted(seen) and len(seen) == 80


def test_policies_that_pick_at_random_pick_the_same_for_the_same_seed():
    def order(seed: int) -> list[str]:
        graph = chain()
        parts = make_parts(graph, Rules(update_every=Flush()))
        settings = Settings(ramp=AT_ONCE, policy=lambda w: RandomOrder(seed))
        fired = []

        class Listing(Quiet):
            def fired(self, worker, firing, start_s, end_s):
                fired.append((firing.node, firing.forward, firing.rows))

        engine = Engine(graph, parts, settings, 1)
        one_pass(graph, rows(5), engine=engine, runtime=Simulated(1), watch=Listing())
        return fired

    assert order(1) == order(1) != order(2)


def test_threads_leave_the_interpreter_and_torch_as_they_were():
    before = sys.getswitchinterval(), torch.get_num_threads()
    runtime = Threads(2)
    engine = engine_of(chain(), 2)
    engine.begin(train=True)
    runtime.run(engine, Feeder(iter(rows(20))), Quiet())
    assert (sys.getswitchinterval(), torch.get_num_threads()) == before

"""What is advised, from costs that are given: each rule of docs/how-to/workers.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geartrain.engine.advice import Advice, Machine, Sampled, Ways, advise

TWO = Machine(cores=2)


def measured(*shares: float, of: float = 10.0, **others) -> Sampled:
    """Of 100 instances in so many seconds; parts take these of the time of firings."""
    total = sum(shares)
    given = {
        "instances": 100,
        "seconds": of,
        "firing_s": 0.95 * of,
        "long_s": 1e-3,
        "gathered": 1.0,
        "kernels": 1.0,
        "shares": {(f"part {k}",): 0.95 * of * s / total for k, s in enumerate(shares)},
        "updates": 100,
        "update_bytes": 1e8,
        "max_active": 4,
    }
    return Sampled(**(given | others))


def spread(seen: Sampled, *workers: list[list[int]]) -> Ways:
    """Parts placed so, nothing else possible."""
    seconds = [*seen.shares.values()]
    loads = {len(w): [sum(seconds[k] for k in at) for at in w] for w in workers}
    return Ways(spread=loads, shared="keep='graph' of part 0")


def test_balanced_parts_of_a_pipeline_get_two_worker_processes():
    seen = measured(26, 24, 25, 25)
    plan = advise(seen, TWO, spread(seen, [[0, 1], [2, 3]]))
    assert plan == Advice(runtime="processes", workers=2, kernel_threads=1)
    # Both cores are busy with all of it, but for what is told, and while nothing is there to do.
    assert plan.speedup == pytest.approx(0.97 * 2 * 4 / 4.5, rel=0.01)
    assert plan.why == (
        "two worker processes: of 100 ms an instance parts take 'part 0' 26 %, 'part 2' 25 %, "
        "'part 3' 25 %, 'part 1' 24 %; expected 1.72 times one worker"
    )
    assert plan.expected == {"two worker processes": plan.speedup, "one worker": 1.0}


def test_few_instances_in_flight_and_small_ones_gain_less_by_a_pipeline():
    def expected(seen: Sampled) -> float:
        return advise(seen, TWO, spread(seen, [[0, 1], [2, 3]])).expected["two worker processes"]

    usual = expected(measured(1, 1, 1, 1))
    assert expected(measured(1, 1, 1, 1, max_active=2)) == pytest.approx(usual * 4.5 / 5, rel=0.01)
    # 0.05 s for the 100 instances, of which 0.7 ms each is for messages of program and workers.
    assert expected(measured(1, 1, 1, 1, of=0.1)) < 0.8 * usual
    # Those of many that are admitted together are shared by them.
    many = measured(1, 1, 1, 1, of=0.1, gathered=50.0)
    assert expected(many) == pytest.approx(usual, rel=0.02)


def test_a_pipeline_is_worth_less_gain_than_shared_weights_as_its_gradients_are_no_older():
    seen = measured(25, 25, 25, 25, kernels=1.55)
    plan = advise(seen, TWO, spread(seen, [[0, 1], [2, 3]]))
    assert (plan.runtime, plan.workers) == ("processes", 2)
    assert plan.expected["one worker with 2 kernel threads"] == 1.55
    shares, ways = whole(kernels=1.5)
    assert advise(shares, TWO, ways).workers == 1


def test_a_pipeline_with_one_instance_in_flight_stays_with_one_worker():
    seen = measured(25, 25, 25, 25, max_active=1)
    plan = advise(seen, TWO, spread(seen, [[0, 1], [2, 3]]))
    assert (plan.runtime, plan.workers) == ("threads", 1)


def test_copies_of_a_bottleneck_pay_for_batches_as_placed_parts_do():
    seen = measured(60, 40)
    seconds = sum(seen.shares.values())

    def expected(carried_s: float, **more: float) -> float:
        loads = {2: [0.6 * seconds + carried_s / 2, 0.4 * seconds + carried_s / 2]}
        ways = Ways(spread=loads, shared="keep='graph'", copied=("part 0",))
        found = advise(replace(seen, **more), TWO, ways).expected
        return found["two worker processes with copies of 'part 0'"]

    plain = expected(0.0)
    assert 1.3 < plain < 1.5
    assert expected(0.2 * seconds) == pytest.approx(plain / 1.2, rel=0.03)
    assert expected(0.0, fed_s=0.2 * seconds) == pytest.approx(plain / 1.2, rel=0.03)


def test_a_bottleneck_leaves_one_worker_unless_it_may_have_copies():
    seen = measured(90, 5, 5)
    ways = spread(seen, [[0], [1, 2]])
    assert advise(seen, TWO, ways).workers == 1
    plan = advise(seen, TWO, replace(ways, copied=("part 0",)))
    assert (plan.way, plan.part, plan.workers) == ("copies", "part 0", 2)
    # Copies have half of the rows each: where a firing gathers instances it does not pay.
    fewer = replace(seen, gathered=20.0)
    assert advise(fewer, TWO, replace(ways, copied=("part 0",))).workers == 1


def whole(**others) -> tuple[Sampled, Ways]:
    """Trees that are one firing each part, several instances together."""
    seen = measured(90, 10, gathered=20.0, max_active=64, updates_each=0.01, **others)
    return seen, Ways(spread={2: [8.55, 0.95]}, shared=None)


def test_whole_instances_share_all_weights():
    seen, ways = whole()
    plan = advise(seen, TWO, ways)
    assert (plan.runtime, plan.workers, plan.way) == ("processes", 2, "each")
    assert plan.speedup > 1.3


def test_long_firings_share_weights_as_threads_where_nothing_has_to_travel():
    seen, ways = whole(long_s=5e-3)
    assert advise(seen, TWO, ways).runtime == "threads"


def test_weights_are_not_shared_where_rows_would_grow_too_old():
    seen, ways = whole(long_s=5e-3)
    many = replace(seen, updates_each=0.05)  # 6.4 updates in flight with 128, 3.2 with 64
    assert many.staleness(128) == pytest.approx(2.7)
    assert advise(many, TWO, ways).way == "all"
    assert advise(many, TWO, ways, max_staleness=5.5).way == "each"
    more = replace(seen, updates_each=0.1)
    plan = advise(more, TWO, ways)
    assert plan.workers == 1


def test_a_tiny_network_stays_with_one_worker_as_starting_takes_longer():
    seen, ways = whole(of=0.01, left=10_000, updates=1, update_bytes=1e3)
    plan = advise(seen, TWO, ways)
    assert plan.workers == 1
    assert "would save" in plan.why and "5 s" in plan.why
    long = replace(seen, left=10**8)
    assert advise(long, TWO, ways).workers == 2


def test_small_firings_that_cost_as_much_as_their_messages_stay_with_one_worker():
    seen, ways = whole(of=0.01, left=None)
    busy = replace(seen, firing_s=0.004, updates=100)  # the program takes the rest; 6 ms of locks
    assert advise(busy, TWO, ways).workers == 1


def test_one_core_has_one_worker():
    seen, ways = whole()
    plan = advise(seen, Machine(cores=1), ways)
    assert plan == Advice(runtime="threads", workers=1, kernel_threads=1)
    assert plan.why == "one worker, as the machine has one core"


def test_kernel_threads_go_before_where_they_are_about_as_fast():
    seen = measured(25, 25, 25, 25, kernels=1.65)
    plan = advise(seen, TWO, spread(seen, [[0, 1], [2, 3]]))
    assert plan == Advice(runtime="threads", workers=1, kernel_threads=2)
    assert "which has 1.65 with 2 kernel threads" in plan.why


def test_a_graph_that_cannot_be_pickled_gets_threads_or_one_worker():
    machine = Machine(cores=2, processes="the graph cannot be handed to worker processes: a lock")
    seen, ways = whole()
    plan = advise(seen, machine, ways)
    assert (plan.runtime, plan.workers) == ("threads", 1)
    assert "a lock" in plan.why
    seen, ways = whole(long_s=5e-3)
    plan = advise(seen, machine, ways)
    assert (plan.runtime, plan.workers, plan.way) == ("threads", 2, "each")


def test_a_worker_more_has_to_bring_something():
    seen = measured(1, 1, 1)
    ways = spread(seen, [[0, 1], [2]], [[0], [1], [2]], [[0], [1], [2], []])
    plan = advise(seen, Machine(cores=4), ways)
    assert (plan.workers, plan.kernel_threads) == (3, 1)
    assert advise(seen, Machine(cores=4), ways, most=2).workers == 2

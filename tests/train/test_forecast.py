"""What imagined hosts and links would do, from costs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import geartrain as gt
from geartrain.observe.recorded import recorded
from geartrain.runtime.costs import Costs
from geartrain.runtime.simulated import Simulated
from geartrain.train.forecast import copies, forecast, pipeline
from tests.train.test_recorded import chain, logged
from tests.train.test_recorded import data as some

FREE = Costs()
LINKS = [Costs(latency_s=ms / 1e3, bytes_per_s=12.5e6) for ms in (0, 1, 10, 50)]
STAGE = {"forward_s": 0.010, "backward_s": 0.020, "nbytes": 100_000}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_synchronous_pipeline_takes_what_a_schedule_on_paper_takes(microbatches: int) -> None:
    parts, latency = 3, 0.05
    found = pipeline(
        parts, **STAGE, links=Costs(latency_s=latency), in_flight=microbatches, synchronous=True,
        minibatches=8,
    )  # fmt: skip
    # The first goes there and back, and each other one is a firing of the last part behind it.
    there_and_back = parts * 0.03 + 2 * (parts - 1) * latency
    step = there_and_back + (microbatches - 1) * 0.03
    assert found.seconds == pytest.approx(8 / microbatches * step)
    assert found.staleness == 0.0
    assert found.busy == pytest.approx(8 * 0.03 / found.seconds)


def test_more_latency_never_helps_those_who_wait_and_less_bandwidth_neither() -> None:
    for microbatches in (1, 4):
        took = [
            pipeline(4, **STAGE, links=x, in_flight=microbatches, synchronous=True, minibatches=4)
            for x in (FREE, *LINKS[1:])
        ]
        seconds = [x.seconds for x in took]
        assert seconds == sorted(set(seconds))


def test_an_asynchronous_pipeline_with_enough_in_flight_is_as_fast_as_its_slowest_part() -> None:
    found = pipeline(4, **STAGE, links=LINKS[2], in_flight=24, minibatches=100)
    assert found.throughput == pytest.approx(1 / 0.03, rel=0.1)
    assert found.staleness > 1.0
    few = pipeline(4, **STAGE, links=LINKS[2], in_flight=4, minibatches=40)
    assert few.throughput < 0.8 * found.throughput


def test_a_link_that_is_too_narrow_is_what_a_pipeline_waits_for() -> None:
    narrow = Costs(bytes_per_s=1e6)  # 100 kB in 0.1 s
    found = pipeline(2, **STAGE, links=narrow, in_flight=64, minibatches=60)
    assert found.throughput == pytest.approx(1e6 / 100_000, rel=0.05)
    assert found.bytes == pytest.approx(60 * 2 * 100_000, rel=0.01)


def test_without_latency_and_bounds_a_forecast_is_what_the_simulator_does() -> None:
    graph, data = chain(), some(40)
    costs = Costs(firing_s=0.003, row_s=0.001)

    def make(runtime: Simulated, instruments: list) -> gt.Session:
        return gt.Session(
            graph, rules=gt.Rules(update_every=4), runtime=runtime, max_active=8,
            instruments=instruments,
        )  # fmt: skip

    plain = make(Simulated(3, costs=costs), []).fit(data, epochs=1)
    free = forecast(make, data, 3, Costs(firing_s=0.003, row_s=0.001, bytes_per_s=1e300))
    assert free.seconds == plain.train_seconds
    assert free.instances == 40
    slow = forecast(make, data, 3, Costs(firing_s=0.003, row_s=0.001, latency_s=0.01))
    assert slow.seconds > free.seconds


def test_neighbours_send_as_much_however_many_they_are_and_do_not_wait_as_all_reduce_does() -> None:
    link = Costs(latency_s=0.005, bytes_per_s=12.5e6)
    each = {"step_s": 0.02, "nbytes": 400_000, "links": link, "steps": 8}
    four, sixteen = (copies(n, **each, exchange="weights") for n in (4, 16))
    assert sixteen.throughput == pytest.approx(4 * four.throughput, rel=0.15)
    per_host = [x.bytes / x.instances for x in (four, sixteen)]
    assert per_host[1] == pytest.approx(per_host[0], rel=0.1)
    together = [copies(n, **each, exchange="all-reduce") for n in (4, 16)]
    assert four.throughput > 2 * together[0].throughput
    # A step, and 2 (n - 1) latencies and 2 (n - 1) / n of the bytes at the bandwidth.
    on_paper = 16 / (0.02 + 30 * 0.005 + 30 / 16 * 400_000 / 12.5e6)
    assert together[1].throughput == pytest.approx(on_paper, rel=0.05)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_star_has_the_ways_of_its_middle_and_a_ring_those_of_all(n: int) -> None:
    each = {"step_s": 0.02, "nbytes": 400_000, "exchange": "all-reduce", "steps": 20}
    links = Costs(latency_s=0.005, bytes_per_s=40e6, shared=True, collective="star")
    star = copies(n, **each, links=links)
    # Who gets the mean first sends his next share first: all copies' bytes pass by the middle once.
    on_paper = n / (0.02 + 2 * 0.005 + n * 400_000 / 40e6)
    assert star.throughput == pytest.approx(on_paper, rel=0.05)
    ring = copies(n, **each, links=replace(links, collective="ring"))
    on_paper = n / (0.02 + 2 * (n - 1) * (0.005 + 400_000 / 40e6 / n))
    assert ring.throughput == pytest.approx(on_paper, rel=0.05)
    assert star.staleness == ring.staleness


def test_all_reduce_by_letters_has_the_weights_of_all_reduce_at_once() -> None:
    def trained(collective: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        graph, model = gt.Graph(), torch.nn.Linear(2, 1)
        graph.input("x").through(model, name="m").loss(lambda y: (y[:, 0] - 1) ** 2, name="loss")
        costs = Costs(latency_s=0.01, collective=collective)
        session = gt.Session(
            graph,
            rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=2),
            runtime=Simulated(3, costs=costs),
            sharing=gt.Neighbours(copies=3, exchange="all-reduce"),
            max_active=2,
        )
        draw = torch.Generator().manual_seed(1)
        data = [gt.Instance({"x": torch.randn(1, 2, generator=draw)}) for _ in range(20)]
        session.fit(data, epochs=2)
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(trained("star"), trained("ring"), strict=True):
        torch.testing.assert_close(a, b)


def test_how_a_mean_is_made_is_a_ring_or_a_star() -> None:
    with pytest.raises(ValueError, match=r"collective='tree'.*'ring' or 'star'"):
        Costs(collective="tree")


def test_a_slow_host_costs_neighbours_less_than_it_costs_all_reduce() -> None:
    each = {"step_s": 0.02, "nbytes": 4000, "links": FREE, "steps": 12}
    speeds = [1.0, 1.0, 1.0, 0.25]
    kept = {
        exchange: copies(4, **each, exchange=exchange, speeds=speeds).throughput
        / copies(4, **each, exchange=exchange).throughput
        for exchange in ("weights", "all-reduce")
    }
    assert kept["all-reduce"] == pytest.approx(0.25, rel=0.1)
    assert kept["weights"] > 0.6


def test_recorded_costs_make_the_throughput_that_was_recorded() -> None:
    true = Costs(firing_s=0.004, row_s=0.0015)
    events = logged(chain(), 2, true, 60)
    found = recorded(events)
    again = recorded(logged(chain(), 2, found.costs(), 60))
    assert again.throughput == pytest.approx(found.throughput, rel=0.02)


def test_the_program_that_admits_is_a_message_away_and_a_latency_unless_on_the_host() -> None:
    graph, data = chain(), some(12)
    costs = Costs(firing_s=0.003, row_s=0.0, latency_s=0.02, message_s=0.001)

    def make(runtime: Simulated, instruments: list) -> gt.Session:
        return gt.Session(
            graph, rules=gt.Rules(update_every=4), runtime=runtime, max_active=1,
            instruments=instruments,
        )  # fmt: skip

    near, beside, away = (forecast(make, data, 1, costs, parent=x).seconds for x in (None, 0, 1))
    assert beside - near == pytest.approx(12 * 2 * 0.001)  # told to begin, and that it is through
    assert away - near == pytest.approx(12 * 2 * (0.001 + 0.02))


def test_weights_are_those_of_training_without_the_way_to_the_program() -> None:
    data = some(12)

    def weights(parent: int | None) -> list[float]:
        graph = chain()
        runtime = Simulated(3, costs=Costs(latency_s=0.02), parent=parent)
        rules = gt.Rules(update_every=gt.Instances(1))
        gt.Session(graph, rules=rules, runtime=runtime, max_active=1).fit(data, epochs=1)
        tensors = [p.detach().flatten() for m in graph.modules() for p in m.parameters()]
        return torch.cat(tensors).tolist()

    assert weights(None) == weights(0) == weights(3)


def test_hosts_that_share_a_way_in_are_slower_than_links_of_their_own() -> None:
    each = {"step_s": 0.001, "nbytes": 400_000, "steps": 6, "exchange": "gradients"}
    own = Costs(latency_s=0.001, bytes_per_s=12.5e6)
    shared = Costs(latency_s=0.001, bytes_per_s=12.5e6, shared=True)
    apart, together = (copies(4, **each, links=x) for x in (own, shared))
    assert together.seconds > 1.5 * apart.seconds  # a copy sends to both of its neighbours
    assert together.bytes == apart.bytes


def test_a_place_that_no_program_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="parent=3"):
        Simulated(2, parent=3)

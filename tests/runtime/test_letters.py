"""How letters travel in the simulator, and what its events do."""

from __future__ import annotations

import random

import pytest
import torch

from geartrain.engine.firing import Firing
from geartrain.runtime.costs import Costs
from geartrain.runtime.events import Join, Leave, Pause
from geartrain.runtime.links import Links
from geartrain.runtime.simulated import Simulated
from geartrain.sharing.letters import Letter


def letter(sender: int, receiver: int, nbytes: int, hops: int = 1, collective: bool = False):
    return Letter(
        "map", sender, receiver, "gradient", (torch.zeros(1),), nbytes=nbytes, hops=hops,
        collective=collective,
    )  # fmt: skip


def links(**costs: float | None) -> Links:
    return Links(Costs(**costs), lambda seconds: seconds)


def test_letters_of_a_link_leave_one_after_the_other_and_latencies_overlap():
    here = links(latency_s=1.0, bytes_per_s=10.0)
    assert here.letter(0, 1, letter(0, 1, 20), 0.0) == pytest.approx(3.0)
    assert here.letter(0, 1, letter(0, 1, 10), 0.0) == pytest.approx(4.0)
    assert here.letter(0, 2, letter(0, 2, 10), 0.0) == pytest.approx(2.0)  # a link of its own


def test_what_a_host_sends_and_gets_shares_its_ways_out_and_in():
    here = links(latency_s=1.0, bytes_per_s=10.0, shared=True)
    assert here.letter(0, 1, letter(0, 1, 20), 0.0) == pytest.approx(3.0)
    assert here.batch(0, 2, 10, 0.0) == pytest.approx(4.0)  # behind the letter, on the way out
    assert here.batch(3, 2, 10, 1.5) == pytest.approx(5.0)  # on the way in, behind that
    assert here.letter(3, 4, letter(3, 4, 10), 2.5) == pytest.approx(4.5)  # disturbed by nobody
    assert here.carried == {(0, 2): (1, 10), (3, 2): (1, 10)}


def test_what_finds_no_room_before_a_way_in_is_sent_again():
    here = links(latency_s=1.0, bytes_per_s=10.0, shared=True, buffer_bytes=15, again_s=50.0)
    came = [here.letter(k, 9, letter(k, 9, 10), 0.0) for k in range(1, 5)]
    # 10 and 20 bytes wait behind the first: of the latter 5 are dropped, and of the next all 10.
    assert came == pytest.approx([2.0, 3.0, 52.5, 53.5])
    assert here.letter(5, 9, letter(5, 9, 10), 10.0) == pytest.approx(12.0)  # it has passed by
    assert here.letter(5, 9, letter(5, 9, 900), 60.0) == pytest.approx(151.0)  # a host by itself


def test_what_finds_no_room_before_a_way_out_is_sent_again():
    here = links(latency_s=1.0, bytes_per_s=10.0, shared=True, buffer_bytes=15, again_s=50.0)
    came = [here.letter(0, k, letter(0, k, 10), 0.0) for k in range(1, 6)]
    # 20 bytes are before the third: of it 5 find room; of those behind it nothing.
    assert came == pytest.approx([2.0, 3.0, 54.0, 55.0, 56.0])
    assert here.letter(0, 9, letter(0, 9, 10), 10.0) == pytest.approx(12.0)


def test_a_buffer_that_is_large_enough_changes_nothing():
    came = []
    for room in (30, None):
        here = links(latency_s=1.0, bytes_per_s=10.0, shared=True, buffer_bytes=room)
        came.append([here.letter(k, 9, letter(k, 9, 10), 0.0) for k in range(1, 5)])
    assert came[0] == came[1] == pytest.approx([2.0, 3.0, 4.0, 5.0])


@pytest.mark.parametrize(
    ("given", "said"),
    [({"buffer_bytes": 0, "shared": True}, "buffer_bytes=0.*: give more than 0"),
     ({"buffer_bytes": 9, "again_s": 0.0, "shared": True}, "more than 0 seconds"),
     ({"buffer_bytes": 9}, "shared=True")],
)  # fmt: skip
def test_buffers_that_are_none_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Costs(**given)


def test_programs_on_one_host_are_a_message_apart():
    costs = Costs(latency_s=1.0, bytes_per_s=10.0, message_s=0.25, shared=True)
    here = Links(costs, lambda seconds: seconds, {3: 0})
    assert here.batch(3, 0, 100, 0.0) == 0.25
    assert here.batch(3, 1, 100, 0.0) == 11.25


def test_letters_between_copies_on_one_worker_take_no_time():
    assert links(latency_s=1.0).letter(1, 1, letter(1, 4, 10), 0.0) == 0.0


def test_an_all_reduce_takes_its_hops_and_its_bytes():
    here = links(latency_s=1.0, bytes_per_s=10.0)
    assert here.letter(0, 0, letter(0, 0, 15, 4, True), 0.0) == pytest.approx(5.5)


def test_jitter_overtakes_nobody():
    draw = random.Random(0)
    here = Links(Costs(latency_s=1.0), lambda seconds: seconds * draw.uniform(0.1, 1.9))
    arrivals = [here.letter(0, 1, letter(0, 1, 0), 0.0) for _ in range(50)]
    assert arrivals == sorted(arrivals) and arrivals[0] < arrivals[-1]


def test_costs_of_copies_are_those_of_the_node():
    costs = Costs(nodes={"map": (1.0, 0.5), "map backward": (3.0, 0.0), "map exchange": (0.0, 2.0)})
    assert costs.firing(Firing("map#7", "map#7", True, 4)) == 3.0
    assert costs.firing(Firing("map#7", "map#7", False, 4)) == 3.0
    assert costs.firing(Firing("map", "map", False, 9)) == 3.0
    taken = [letter(0, 1, 10), letter(0, 1, 10)]
    assert costs.firing(Firing("map#1 exchange", "map#1", True, 2, taken=taken)) == 4.0


def test_letters_cost_what_the_settings_say():
    costs = Costs(letter_s=1.0, letter_byte_s=0.1)
    taken = [letter(0, 1, 10), letter(0, 1, 20)]
    assert costs.firing(Firing("map exchange", "map", True, 2, taken=taken)) == pytest.approx(5.0)


@pytest.mark.parametrize("event", [Pause(3, 0.0, 1.0), Leave(0, -1.0), Join(-1, 0.0)])
def test_events_of_no_worker_or_time_are_refused(event):
    with pytest.raises(ValueError, match="worker from 0 to 2"):
        Simulated(3, events=[event])

"""What is told of waiting is what was waited in the pass."""

import json

import pytest

from geartrain.runtime.processes.waiting import Waiting, waited_of


def told(*waits: tuple[float, float], began: float = 100.0) -> object:
    waiting = Waiting(began)
    for since, until in waits:
        waiting.add(since, until)
    return json.loads(json.dumps(waiting.document()))


@pytest.mark.parametrize(
    ("waits", "over", "seconds"),
    [
        ((), 9.0, 1.0),
        (((101.0, 102.0),), 9.0, 2.0),
        (((101.0, 102.0), (104.0, 104.5), (106.0, 108.0)), 9.0, 4.5),
        (((101.0, 102.0), (106.0, 110.0)), 9.0, 4.0),  # the pass was over while it waited
        (((101.0, 102.0), (109.0, 110.0)), 9.0, 2.0),  # and before it did
        (((101.0, 102.0), (106.0, 109.0), (109.5, 110.0)), 9.0, 4.0),  # twice behind its end
        (((101.0, 102.0), (106.0, 110.0)), 0.0, 6.0),  # it has not come to its end
    ],
)
def test_waiting_is_counted_until_the_pass_is_over(waits, over, seconds):
    found = waited_of(told(*waits), ahead_s=-99.0, apart_s=0.5, over_s=over)
    assert found == pytest.approx(seconds)


def test_nobody_works_before_all_have_what_they_are_handed():
    found = waited_of(told((103.0, 104.0)), ahead_s=-99.0, apart_s=2.5, over_s=9.0)
    assert found == pytest.approx(2.5 + 1.0)

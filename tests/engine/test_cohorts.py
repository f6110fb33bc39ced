"""Which instances are of which update, where several copies of a part have a share of them."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.engine.cohorts import Cohorts
from geartrain.frames.frame import Arena

N = 3  # instances of an update


@pytest.mark.parametrize("copies", [1, 2, 3, 5])
@pytest.mark.parametrize("first", [0, 1, 2, 7])
@pytest.mark.parametrize("begun", [0, 2])
def test_updates_of_a_copy_are_of_its_own_turns_in_their_order(copies, first, begun) -> None:
    for copy in range(copies):
        own = [turn for turn in range(first, first + 12 * copies) if turn % copies == copy]
        cohorts = Cohorts(Arena(), N, first, begun, copy, copies)
        of = [(begun + place) // N for place in range(len(own))]
        assert [cohorts.ahead(turn) for turn in own] == of
        everybody = np.arange(own[0], own[N - begun])  # and of the next update nobody
        assert list(cohorts.finished(everybody)) == [N - begun, 0]
        assert [cohorts.ahead(turn) for turn in own] == [max(0, k - 1) for k in of]

"""Members that wait for their groups, as numpy keeps them where there is no C."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.native.groups import MemberRecords


@pytest.mark.parametrize("n", [0, 3, 64, 65, 1000])
def test_as_many_wait_as_are_kept_and_no_others(n: int) -> None:
    records = MemberRecords(1, 4, ordered=False, keys=[3], more=[], alike=[])
    first = np.arange(4 * n).reshape(4, n)
    records.keep(first)
    assert np.array_equal(records.waiting, first)
    records.keep(first[:, n // 2 :].copy())
    assert np.array_equal(records.waiting, first[:, n // 2 :])

"""What updates may be counted in."""

from __future__ import annotations

import pytest

from geartrain.parts.triggers import Instances, Messages, Rows


@pytest.mark.parametrize("trigger", [Rows, Instances, Messages])
def test_an_update_is_of_one_at_least_and_of_no_more_than_a_run_can_count(trigger) -> None:
    assert trigger(1).n == 1 and trigger(2**53).n == 2**53
    with pytest.raises(ValueError, match=rf"{trigger.__name__}\(0\): give 1 or more"):
        trigger(0)
    with pytest.raises(ValueError, match=r"give 9,007,199,254,740,992 at most, as no run counts"):
        trigger(2**53 + 1)

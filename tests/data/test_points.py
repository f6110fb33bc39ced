"""Where in an epoch to evaluate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.data.points import evaluation_points


@pytest.mark.parametrize(
    ("length", "every", "whole", "points"),
    [
        (100, None, 1, [100]),
        (100, 1, 1, [100]),
        (100, 0.25, 1, [25, 50, 75, 100]),
        (10, 0.1, 1, list(range(1, 11))),
        (100, 0.4, 1, [40, 80, 100]),
        (10, 0.25, 1, [3, 5, 8, 10]),
        (100, 0.25, 10, [30, 50, 80, 100]),
        (3, 0.1, 1, [1, 2, 3]),
        (3, 0.5, 10, [3]),
        (0, 0.5, 1, [0]),
    ],
)
def test_points_are_shares_of_the_epoch_and_its_end(length, every, whole, points) -> None:
    assert evaluation_points(length, every, whole) == points


@given(st.integers(1, 500), st.floats(0.001, 1.0), st.integers(1, 40))
def test_points_rise_to_the_end_and_are_no_closer_than_they_should_be(
    length: int, every: float, whole: int
) -> None:
    points = evaluation_points(length, every, whole)
    assert points == sorted(set(points))
    assert points[-1] == length
    assert all(point % whole == 0 for point in points[:-1])
    gaps = [b - a for a, b in zip([0, *points], points[:-1], strict=False)]
    assert all(gap > every * length - whole - 1 for gap in gaps)


@pytest.mark.parametrize("every", [0.0, -0.5, 1.5, float("nan")])
def test_what_is_no_share_of_an_epoch_is_refused(every: float) -> None:
    with pytest.raises(ValueError, match=f"evaluate_every={every:g}: give a share of an epoch"):
        evaluation_points(10, every)

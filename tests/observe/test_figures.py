import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.observe.figures import duration, epochs, is_lower_better, measure, number, rate


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("accuracy", 0.8071, "80.7%"),
        ("accuracy", 1.0, "100.0%"),
        ("error", 0.25, "25.0%"),
        ("loss", 0.5, "0.5000"),
        ("valid_mae", 0.012, "0.0120"),
        ("reward", 1.5, "1.5000"),
        ("reward", -0.5, "-0.5000"),
        ("accuracy", math.nan, "-"),
    ],
)
def test_shares_are_said_in_per_cent_and_distances_are_not(name, value, said):
    assert measure(name, value) == said


def test_numbers_keep_about_four_digits_at_any_size():
    said = [number(v) for v in (0.0, 8.123e-5, 0.81234, 12.345, 1234.5, 3.2e7, math.inf)]
    assert said == ["0.0000", "8.1e-05", "0.8123", "12.35", "1,234", "3.2e+07", "inf"]


@settings(deadline=None, derandomize=True)
@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_never_takes_more_than_nine_characters(value):
    assert 1 <= len(number(value)) <= 9


def test_durations_carry_over_into_minutes_and_hours():
    said = [duration(s) for s in (0.0123, 5.06, 59.96, 185.2, 3599.7, 3725.0, math.nan)]
    assert said == ["12 ms", "5.1 s", "1 min 00 s", "3 min 05 s", "1 h 00 min", "1 h 02 min", "- s"]


def test_rates_keep_two_digits_when_slow():
    assert [rate(v) for v in (1712.3, 12.34, 0.1234, math.nan)] == [
        "1,712/s",
        "12.3/s",
        "0.12/s",
        "-/s",
    ]


def test_losses_and_errors_improve_downwards():
    falls = [
        n for n in ("loss", "root_error", "MAE", "accuracy", "f1", "glossary") if is_lower_better(n)
    ]
    assert falls == ["loss", "root_error", "MAE"]


def test_epochs_are_whole_or_have_two_digits():
    assert [epochs(e) for e in (1, 2.0, 0.25, 10, 0.250029)] == ["1", "2", "0.25", "10", "0.25"]

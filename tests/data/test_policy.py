import logging

import pytest

from geartrain.data.policy import Refusals
from geartrain.errors import DataError


def test_raise_hands_the_error_to_the_caller():
    error = DataError("bad", path="f", line=3)
    with pytest.raises(DataError) as caught:
        Refusals("raise", "f").refuse(error)
    assert caught.value is error


def test_skip_counts_all_and_logs_the_first_ten_and_the_total(caplog):
    refusals = Refusals("skip", "f")
    with caplog.at_level(logging.WARNING, "geartrain.data"):
        for line in range(25):
            refusals.refuse(DataError("bad", path="f", line=line))
        assert refusals.close(kept=1) == 25
    assert [record.getMessage() for record in caplog.records] == [
        *(f"skipped: f:{line}: bad" for line in range(10)),
        "f: 1 records kept, 25 skipped",
    ]


def test_a_source_of_nothing_but_bad_records_is_refused_even_when_skipping():
    refusals = Refusals("skip", "f")
    refusals.refuse(DataError("bad"))
    with pytest.raises(DataError, match="all 1 records were refused"):
        refusals.close(kept=0)


def test_nothing_is_logged_when_nothing_was_skipped(caplog):
    assert Refusals("skip", "f").close(kept=0) == 0
    assert not caplog.records


def test_another_policy_is_refused():
    with pytest.raises(ValueError, match=r"'ignore'.*raise, skip"):
        Refusals("ignore")  # type: ignore[arg-type]

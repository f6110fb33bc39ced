"""Errors of one process as another one raises them: what led to them comes along."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

import pytest

from geartrain.errors import DataError, WorkerError
from geartrain.runtime.processes.failures import error_of_json, error_to_json


class OutOfInk(Exception):
    """A user's own, which the other process may not know."""

    def __init__(self, colour: str, cartridge: int) -> None:
        super().__init__(f"{colour} in {cartridge}")


def raised(by: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        by()
    return caught.value


def told(error: BaseException) -> BaseException:
    return error_of_json(json.loads(json.dumps(error_to_json(error))), 3)


def of_a_cause() -> None:
    try:
        try:
            raise OutOfInk("cyan", 4)
        except OutOfInk as error:
            error.add_note("it was new")
            raise DataError("line 7") from error
    except DataError as error:
        raise ValueError("no page") from error


def of_a_context() -> None:
    try:
        {}["page"]
    except KeyError:
        raise OutOfInk("black", 1)  # noqa: B904


def of_nothing() -> None:
    try:
        {}["page"]
    except KeyError:
        raise ValueError("no page") from None


def test_causes_of_causes_come_by_class_message_and_notes() -> None:
    error = told(raised(of_a_cause))
    first, second = error.__cause__, error.__cause__ and error.__cause__.__cause__
    assert isinstance(error, ValueError) and isinstance(first, DataError)
    assert isinstance(second, WorkerError) and str(second) == "OutOfInk: cyan in 4"
    assert second.__notes__ == ["it was new"]
    text = "".join(traceback.format_exception(error))
    assert text.index("OutOfInk: cyan in 4") < text.index("line 7") < text.index("no page")
    assert "direct cause of the following" in text


def test_what_was_handled_meanwhile_comes_as_well_unless_it_was_to_be_hidden() -> None:
    error = told(raised(of_a_context))
    assert str(error) == "OutOfInk in worker 3: black in 1"
    assert error.__cause__ is None and isinstance(error.__context__, KeyError)
    assert "During handling of the above" in "".join(traceback.format_exception(error))
    hidden = told(raised(of_nothing))
    assert isinstance(hidden.__context__, KeyError) and hidden.__suppress_context__


def test_a_chain_that_ends_in_itself_is_cut() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    error: BaseException | None = told(one)
    seen = []
    while error is not None:
        seen.append(str(error))
        error = error.__cause__
    assert seen[:3] == ["one", "other", "one"] and len(seen) < 30


def test_errors_of_two_reasons_each_are_bounded_in_all_and_not_along_each_way() -> None:
    error = ValueError("first")
    for k in range(14):
        error, one, other = ValueError(f"later {k}"), error, error
        error.__cause__, error.__context__ = one, KeyError(k)
        error.__context__.__cause__, error.__context__.__context__ = other, TypeError(str(k))
    record = json.dumps(error_to_json(error))
    assert record.count('"class"') == 17 and '"later 13"' in record

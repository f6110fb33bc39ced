"""Products inside kernels, counted and noted, by thread; and nothing is counted unasked."""

from __future__ import annotations

import threading

import pytest
import torch

from geartrain.native import library, operations
from geartrain.whole.graph.readouts import choice_backward, choice_forward

ROWS, WIDTH = 7, 5
FORWARD = 2 * ROWS * WIDTH


def choose(use, native: library.Library) -> None:
    """A kernel that multiplies: scores of 7 vertices of 5 entries."""
    use(native)
    h, w = torch.ones(ROWS, WIDTH), torch.ones(1, WIDTH)
    lengths = torch.tensor([3, 4])
    answers = torch.zeros(ROWS, dtype=torch.int64)
    found = choice_forward(h, answers, lengths, w)
    assert found is not None
    assert choice_backward(torch.ones(2), h, found[2], None, lengths, w) is not None


def test_operations_are_counted_while_entered_and_several_may_be(native, use) -> None:
    choose(use, native)
    with operations.Counted() as outer:
        choose(use, native)
        with operations.Counted() as inner:
            choose(use, native)
    choose(use, native)
    assert inner.operations == 3 * FORWARD
    assert outer.operations == 2 * 3 * FORWARD
    assert operations.listening == 0


def test_a_thread_counts_its_own(native, use) -> None:
    use(native)
    with operations.Counted() as counted:
        thread = threading.Thread(target=choose, args=(use, native))
        thread.start()
        thread.join()
    assert counted.operations == 0


def test_products_are_noted_in_order(native, use) -> None:
    use(native)
    with operations.Noted() as noted:
        choose(use, native)
    size = torch.float32.itemsize
    assert noted.products.tolist() == [
        [ROWS, WIDTH, 1, size, 0],
        [ROWS, 1, WIDTH, size, 0],
        [1, ROWS, WIDTH, size, 0],
    ]
    with operations.Noted() as noted:
        pass
    assert noted.products.shape == (0, 5)


def test_more_products_than_there_is_room_for_are_refused(native, use, monkeypatch) -> None:
    use(native)
    monkeypatch.setattr(operations, "ROOM", 2)
    with pytest.raises(OverflowError, match="3 products"), operations.Noted():
        choose(use, native)


def test_without_kernels_nothing_is_counted_but_what_is_told(use) -> None:
    use(None)
    with operations.Noted() as noted, operations.Counted() as counted:
        operations.tell(2, 3, 4)
    assert counted.operations == 2 * 2 * 3 * 4
    assert noted.products.shape == (0, 5)


def test_a_failure_inside_ends_the_count(native, use) -> None:
    use(native)
    with pytest.raises(ZeroDivisionError), operations.Counted(), operations.Noted():
        1 / 0  # noqa: B018
    assert operations.listening == 0
    assert not operations.is_told_before()

"""What is said together goes in one message to each, and is heard in causal order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.errors import TransportError
from geartrain.transport.link import Transport
from geartrain.transport.record import GONE, SEVERAL, Record, joined, parted

LONG_S = 20.0

Make = Callable[..., list[Transport]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(n: int, **more: object) -> list[Transport]:
            return [stack.enter_context(Transport(k, n, tmp_path, **more)) for k in range(n)]

        yield made


def take(transport: Transport, n: int) -> list[Record]:
    found: list[tuple[int, Record]] = []
    end = time.monotonic() + LONG_S
    while len(found) < n:
        assert time.monotonic() < end, f"{len(found)} of {n} have come"
        found += transport.poll(0.5)
    assert len(found) == n
    return [record for _, record in found]


records = st.lists(
    st.builds(
        lambda kind, ints, floats, sizes: Record(
            kind, tuple(ints), tuple(floats), tuple(None if n > 3 else np.arange(n) for n in sizes)
        ),
        st.integers(0, 60_000),
        st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=3),
        st.lists(st.floats(allow_nan=False), max_size=3),
        st.lists(st.integers(0, 4), max_size=3),
    ),
    min_size=2,
    max_size=5,
)


@given(records)
def test_several_records_are_one_and_several_again(some: list[Record]) -> None:
    one = joined(some)
    assert one.kind == SEVERAL
    for a, b in zip(some, parted(one), strict=True):
        assert (a.kind, a.ints, a.floats) == (b.kind, b.ints, b.floats)
        assert len(a.arrays) == len(b.arrays)
        assert all(x is y for x, y in zip(a.arrays, b.arrays, strict=True))


@pytest.mark.parametrize(
    "ints",
    [
        (9,),
        (9, 0, 0, 2),
        (9, 1, 0, 1),
        (9, -1, 0, 1),
        (SEVERAL, 0, 0, 1),
        (9, 0, 1, 1),
        (9, 0, 0, 0),
    ],
)
def test_counts_that_do_not_agree_are_refused(ints: tuple[int, ...]) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        parted(Record(SEVERAL, ints, (), (np.arange(2),)))


def test_to_each_goes_one_message_with_all_in_their_order(make: Make) -> None:
    a, b, c = make(3)
    with a.together():
        for k in range(5):
            a.send(1, Record(16, (k,), arrays=(torch.full((k,), float(k)),)))
            a.send(2, Record(17, (k,)))
        a.send(0, Record(18))
        with a.together():  # the inner one adds to the outer one
            a.send(1, Record(16, (5,), arrays=(torch.full((5,), 5.0),)))
        assert a.monitor().sent_messages == (0, 0, 0)
    assert a.monitor().sent_messages == (0, 1, 1)
    found = take(b, 6)
    assert [record.ints for record in found] == [(k,) for k in range(6)]
    for k, record in enumerate(found):
        assert torch.equal(record.arrays[0], torch.full((k,), float(k)))
    assert [record.kind for record in take(c, 5)] == 5 * [17]
    assert [record.kind for record in take(a, 1)] == [18]
    a.send(1, Record(19))
    assert take(b, 1)[0].kind == 19


def test_whoever_goes_on_by_it_is_heard_after_it_wherever_that_goes(make: Make) -> None:
    """0 tells 1 and 2; what 1 says to 2 by it waits there for what 0 has said to 2, and back."""
    a, b, c = make(3)
    with a.together():
        a.send(1, Record(16))
        a.send(2, Record(17))
    take(b, 1)
    take(c, 1)
    assert b._order.sent[0].tolist() == c._order.sent[0].tolist() == [0, 1, 1]
    # The same with a message to 2 that is late: it is taken off the stamps of what is there.
    stamp = a._order.sent.copy()
    stamp[0, 2] += 1  # known to 1, and not come to 2
    b._order.sent[:] = stamp
    b.send(2, Record(18))
    end = time.monotonic() + LONG_S
    while not c.held:
        assert c.poll(0.05) == [] and time.monotonic() < end
    a.send(2, Record(19))
    assert [record.kind for record in take(c, 2)] == [19, 18]


def test_large_records_have_messages_of_their_own(make: Make) -> None:
    a, b = make(2)
    with a.together():
        for k in (1, 400_000, 400_000, 1, 1):
            a.send(1, Record(16, (k,), arrays=(torch.zeros(k, dtype=torch.uint8),)))
        for k in range(200):
            a.send(1, Record(16, (k,)))
    assert a.monitor().sent_messages[1] == 4  # the first five, and 200 in lots of 64
    assert [r.ints[0] for r in take(b, 205)] == [1, 400_000, 400_000, 1, 1, *range(200)]
    with a.together():
        for k in (3, 1 << 20, 3):
            a.send(1, Record(16, (k,), arrays=(torch.zeros(k, dtype=torch.uint8),)))
    assert a.monitor().sent_messages[1] == 7
    found: list[Record] = []
    while len(found) < 3:
        a.poll()
        found += [record for _, record in b.poll(0.01)]
    assert [r.ints[0] for r in found] == [3, 1 << 20, 3]


def test_one_that_is_refused_does_not_keep_the_others_from_going(make: Make) -> None:
    a, b, c = make(3)
    with pytest.raises(TransportError, match="cannot be sent"), a.together():
        a.send(1, Record(16, arrays=(np.array(["no number"]),)))
        a.send(2, Record(17))
    assert take(c, 1)[0].kind == 17
    a.send(1, Record(18))
    assert take(b, 1)[0].kind == 18
    c.send(1, Record(19))
    assert take(b, 1)[0].kind == 19


def test_what_was_said_goes_even_if_something_is_raised_meanwhile(make: Make) -> None:
    a, b = make(2)
    with pytest.raises(RuntimeError, match="on the way"), a.together():
        a.send(1, Record(16))
        raise RuntimeError("on the way")
    a.send(1, Record(17))
    assert [record.kind for record in take(b, 2)] == [16, 17]


def test_that_somebody_is_gone_is_said_at_once_after_what_was_said_before(make: Make) -> None:
    a, b, _ = make(3)
    with a.together():
        a.send(1, Record(16))
        a.send(2, Record(16))
        a.forget(2)
        a.send(1, Record(GONE, (2,)))
        assert [record.kind for record in take(b, 2)] == [16, GONE]
        a.send(1, Record(17))
    assert take(b, 1)[0].kind == 17
    assert a.monitor().sent_messages == (0, 3, 0)

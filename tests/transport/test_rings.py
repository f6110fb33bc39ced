"""Messages in memory that processes have in common: once, in order, whoever dozes or is slow."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from geartrain.errors import TransportError
from geartrain.runtime.processes.memory import SharedRegion
from geartrain.transport.link import Transport
from geartrain.transport.record import Record
from geartrain.transport.rings import Bells, Rings, bytes_of_rings, clear_rings

LONG_S = 20.0

Make = Callable[[int], list[Rings]]


@pytest.fixture
def bells() -> Iterator[Bells]:
    found = Bells.make(3)
    yield found
    found.close()


@pytest.fixture
def memory() -> NDArray[np.uint8]:
    return np.zeros(bytes_of_rings(3), np.uint8)


@pytest.fixture
def make(memory: NDArray[np.uint8], bells: Bells) -> Make:
    return lambda n: [Rings(memory, k, 3, bells) for k in range(n)]


def rung(rings: Rings) -> bool:
    poll = select.poll()
    poll.register(rings.bell, select.POLLIN)
    return bool(poll.poll(0))


def some(rings: Rings, most: int = 1000) -> list[bytes]:
    """What is in the rings to a process."""
    found: list[bytes] = []
    while len(found) < most and (one := rings.next()) is not None:
        found.append(bytes(one[1]))
    return found


def test_messages_come_once_in_their_order_over_the_end_of_a_ring(make: Make) -> None:
    a, b, _ = make(3)
    sizes = [1, 8, 7000, 16_384, 0, 13, 16_377]
    sent = [bytes([k % 251]) * sizes[k % len(sizes)] for k in range(200)]
    found, waiting = [], 0
    for message in sent:
        while not a.put(1, message):  # no room
            found += some(b, 1)
            waiting += 1
    found += some(b)
    assert found == sent and waiting > 100
    assert a.next() is None


def test_all_senders_are_heard_in_turn(make: Make) -> None:
    a, b, c = make(3)
    for k in range(4):
        assert a.put(2, b"a%d" % k) and b.put(2, b"b%d" % k)
    assert some(c) == [b"b0", b"a0", b"b1", b"a1", b"b2", b"a2", b"b3", b"a3"]


def test_who_dozes_is_woken_once_and_who_is_awake_is_not(make: Make) -> None:
    a, b, _ = make(3)
    assert a.put(1, b"x") and not rung(b)
    assert not b.doze()  # something is there
    assert some(b) == [b"x"] and b.doze()
    assert a.put(1, b"y") and rung(b)
    b.wake(rung=True)
    assert not rung(b)
    assert a.put(1, b"z") and not rung(b)
    assert some(b) == [b"y", b"z"] and b.doze()
    b.wake(rung=False)
    assert a.put(1, b"w") and not rung(b)


def test_nobody_writes_where_nobody_reads_nor_what_is_too_large(
    make: Make, memory: NDArray[np.uint8], bells: Bells
) -> None:
    a, _ = make(2)
    assert not a.put(2, b"x")  # the third reads no rings
    assert not a.put(1, bytes(16_385))
    third = Rings(memory, 2, 3, bells)
    assert third.next() is None
    assert a.put(2, b"x") and some(third) == [b"x"]


def test_rings_that_are_cleared_are_empty_and_not_read(
    make: Make, memory: NDArray[np.uint8], bells: Bells
) -> None:
    a, b, _ = make(3)
    for _ in range(9):
        a.put(1, bytes(5000))
    clear_rings(memory, 3)
    assert b.next() is None and not a.put(1, b"x")
    again = Rings(memory, 1, 3, bells)
    assert a.put(1, b"y") and some(again) == [b"y"]


@pytest.mark.parametrize("size", [-2, 1 << 40, 60_000])
def test_what_is_no_message_is_refused(make: Make, memory: NDArray[np.uint8], size: int) -> None:
    a, b, _ = make(3)
    assert a.put(1, b"abc")
    at = memory.tobytes().index(b"abc") - 8
    memory[at : at + 8] = np.frombuffer(np.int64(size).tobytes(), np.uint8)
    with pytest.raises(TransportError, match="ring of messages to process 1"):
        b.next()


def test_who_is_closed_rings_for_nobody(make: Make, bells: Bells) -> None:
    """Its descriptors may be somebody else's by then."""
    a, b, _ = make(3)
    assert b.doze()
    bells.close()
    bells.close()
    assert a.put(1, b"x") and some(b) == [b"x"]


def test_another_process_is_heard_whether_one_dozes_or_not(tmp_path: Path) -> None:
    """5,000 messages each way: none is lost, and nobody waits for ever."""
    region, bells, many = SharedRegion.make(bytes_of_rings(2)), Bells.make(2), 5000
    child = os.fork()
    me = 1 if child == 0 else 0
    status = 1
    try:
        rings = Rings(region.bytes.numpy(), me, 2, bells)
        poll = select.poll()
        poll.register(rings.bell, select.POLLIN)
        sent, had, end = 0, 0, time.monotonic() + LONG_S
        while had < many and time.monotonic() < end:
            while sent < many and sent - had < 1 + sent % 40 and rings.put(1 - me, b"%d" % sent):
                sent += 1
            if (message := rings.next()) is not None:
                assert message[0] == 1 - me and int(message[1]) == had
                had += 1
            elif rings.doze():
                rings.wake(rung=bool(poll.poll(1000)))
        while sent < many and rings.put(1 - me, b"%d" % sent):
            sent += 1
        status = 0 if had == many and sent == many else 1
    finally:
        if child == 0:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and status == 0
    bells.close()


@pytest.fixture
def pair(tmp_path: Path, memory: NDArray[np.uint8], bells: Bells) -> Iterator[list[Transport]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Transport(k, 3, tmp_path, rings=Rings(memory, k, 3, bells)),
            )
            for k in range(3)
        ]


def taken(transport: Transport, n: int) -> list[Record]:
    found: list[Record] = []
    end = time.monotonic() + LONG_S
    while len(found) < n:
        assert time.monotonic() < end, f"{len(found)} of {n} have come"
        found += [record for _, record in transport.poll(0.5)]
    return found


def test_what_goes_by_a_ring_and_what_goes_by_a_socket_come_in_the_order_they_were_sent(
    pair: list[Transport],
) -> None:
    a, b, _ = pair
    sizes = [1, 30_000, 2, 3, 200_000, 1, 60_000, 5] * 20
    for k, size in enumerate(sizes):
        a.send(1, Record(16, (k,), (), (torch.full((size,), k),)))
    found = taken(b, len(sizes))
    assert [x.ints[0] for x in found] == [*range(len(sizes))]
    assert all((x.arrays[0] == k).all() for k, x in enumerate(found))
    assert b.held == 0


def test_who_has_something_to_do_sees_what_comes_by_sockets_too(pair: list[Transport]) -> None:
    """Though it does not look there every time."""
    a, b, _ = pair
    a.send(1, Record(16, (7,), (), (torch.zeros(100_000),)))
    end, found = time.monotonic() + LONG_S, []
    while not found and time.monotonic() < end:
        found = b.poll()
    assert found[0][1].ints == (7,)


def test_nobody_speaks_for_another_one(pair: list[Transport]) -> None:
    a, b, _ = pair
    a._me = 2
    a.send(1, Record(16, (1,)))
    with pytest.raises(TransportError, match="from process 2 came by the ring of process 0"):
        b.poll(LONG_S)


def test_a_message_that_is_lost_shows(pair: list[Transport]) -> None:
    a, b, _ = pair
    a._order.count(1)  # as if it had been sent
    a.send(1, Record(16, (1,)))
    a.send(1, Record(16, (2,), (), (torch.zeros(100_000),)))
    end = time.monotonic() + LONG_S
    with pytest.raises(TransportError, match="from process 0 to process 1 were lost"):
        while time.monotonic() < end:
            b.poll(0.2)


def test_a_sleeper_is_woken_by_a_ring(pair: list[Transport], memory: NDArray[np.uint8]) -> None:
    a, b, _ = pair

    def write() -> None:
        end = time.monotonic() + LONG_S
        while memory[64] != 2 and time.monotonic() < end:  # until it dozes
            pass
        a.send(1, Record(16, (1,)))

    thread = threading.Thread(target=write)
    began = time.monotonic()
    thread.start()
    assert len(b.poll(LONG_S)) == 1  # one wait, which nothing else ends
    thread.join()
    waited_s = time.monotonic() - began
    b.poll(0.0)
    assert waited_s < LONG_S / 2 and memory[64] == 1


def test_of_who_is_gone_nothing_more_is_heard(pair: list[Transport]) -> None:
    a, b, c = pair
    a.send(1, Record(16, (1,)))
    b.forget(0)
    a.send(1, Record(16, (2,)))
    c.send(1, Record(16, (3,)))
    assert [x.ints for x in taken(b, 1)] == [(3,)]
    assert b.poll(0.1) == []

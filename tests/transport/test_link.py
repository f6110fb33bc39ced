"""Transports deliver what was sent, once, in causal order, and never block."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from geartrain.errors import TransportError
from geartrain.transport.link import Transport
from geartrain.transport.record import GONE, Record
from tests.rigs.programs import Nursery, Program

LONG_S = 20.0
"""No wait of these tests is as long unless something is broken."""

Make = Callable[..., list[Transport]]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def make(tmp_path: Path, stack: ExitStack) -> Make:
    """Transports of one generation in a folder."""

    def made(n: int, generation: int = 0, **settings: object) -> list[Transport]:
        return [
            stack.enter_context(Transport(k, n, tmp_path, generation, **settings)) for k in range(n)
        ]

    return made


def take(transport: Transport, n: int) -> list[tuple[int, Record]]:
    """The next n records, waited for."""
    found: list[tuple[int, Record]] = []
    end = time.monotonic() + LONG_S
    while len(found) < n:
        assert time.monotonic() < end, f"{len(found)} of {n} have come"
        found += transport.poll(0.5)
    assert len(found) == n
    return found


def test_records_go_both_ways_with_their_arrays(make: Make) -> None:
    a, b = make(2)
    a.send(1, Record(16, (3,), (0.5,), (np.arange(3), torch.ones(2, 3), None)))
    ((sender, record),) = take(b, 1)
    assert (sender, record.kind, record.ints, record.floats) == (0, 16, (3,), (0.5,))
    assert record.arrays[0].tolist() == [0, 1, 2]
    assert torch.equal(record.arrays[1], torch.ones(2, 3))
    b.send(0, Record(17, arrays=(torch.arange(1 << 18),)))
    ((sender, record),) = take(a, 1)
    assert (sender, record.kind) == (1, 17)
    assert torch.equal(record.arrays[0], torch.arange(1 << 18))


def test_large_and_small_records_of_one_sender_come_in_the_order_they_were_sent(make: Make) -> None:
    a, b = make(2)
    sizes = [1, 70_000, 3, 40_000, 500_000, 2, 2]
    for k, size in enumerate(sizes):
        a.send(1, Record(16, (k,), arrays=(torch.full((size,), k), np.full(5, k))))
    for k, (_, record) in enumerate(take(b, len(sizes))):
        assert record.ints == (k,)
        assert record.arrays[0].shape == (sizes[k],) and (record.arrays[0] == k).all()
        assert (record.arrays[1] == k).all()


def test_a_record_to_oneself_comes_with_the_next_poll(make: Make) -> None:
    a, _ = make(2)
    records = [Record(16, (k,)) for k in range(3)]
    for record in records:
        a.send(0, record)
    found = a.poll()
    assert [sender for sender, _ in found] == [0, 0, 0]
    assert all(x is y for (_, x), y in zip(found, records, strict=True))
    assert a.poll() == []


def test_what_was_caused_is_delivered_after_its_cause_however_late_that_comes(
    stack: ExitStack,
) -> None:
    a, b, c = (
        stack.enter_context(Transport(k, 3, "tcp://127.0.0.1:*", plain=True)) for k in range(3)
    )
    context = stack.enter_context(zmq.Context())
    detour = stack.enter_context(context.socket(zmq.PULL))
    port = detour.bind_to_random_port("tcp://127.0.0.1")
    onward = stack.enter_context(context.socket(zmq.PUSH))
    onward.connect(c.address)
    a.connect({1: b.address, 2: f"tcp://127.0.0.1:{port}"})
    b.connect({2: c.address})
    a.send(2, Record(16, (0,)))
    a.send(1, Record(16, (1,)))
    take(b, 1)
    b.send(2, Record(16, (2,)))
    b.send(2, Record(16, (3,)))
    while c.held < 2:
        assert c.poll(0.5) == []
    assert c.waits_for() == ["1 of 1 messages from 0 to 2"]
    assert detour.poll(1000 * LONG_S)
    onward.send_multipart(detour.recv_multipart())
    assert [record.ints[0] for _, record in take(c, 3)] == [0, 2, 3]
    assert c.held == 0 and c.waits_for() == []


def test_four_that_talk_at_random_hear_all_of_it_in_the_order_of_causes(make: Make) -> None:
    n, draw = 4, np.random.default_rng(5)
    transports = make(n)
    before: list[set[int]] = []  # of each message, those that happened before it
    seen: list[set[int]] = [set() for _ in range(n)]
    told: list[list[int]] = [[] for _ in range(n)]
    expected = [0] * n

    def hear(k: int) -> None:
        for _, record in transports[k].poll(0.0):
            (number,) = record.ints
            told[k].append(number)
            assert (record.arrays[0] == number).all()
            seen[k] |= before[number] | {number}

    for number in range(600):
        k, to = draw.integers(0, n, 2).tolist()
        before.append(set(seen[k]))
        seen[k].add(number)
        expected[to] += 1
        size = int(draw.choice([1, 100, 3000, 20_000], p=[0.5, 0.3, 0.15, 0.05]))
        transports[k].send(to, Record(16, (number,), arrays=(torch.full((size,), number),)))
        if draw.random() < 0.3:
            hear(int(draw.integers(0, n)))
    end = time.monotonic() + LONG_S
    while sum(map(len, told)) < 600 and time.monotonic() < end:
        for k in range(n):
            hear(k)
    assert [len(each) for each in told] == expected
    for order in told:
        place = {number: at for at, number in enumerate(order)}
        for late, at in place.items():
            assert all(place[early] < at for early in before[late] & place.keys())
    assert all(x.held == 0 for x in transports)


def test_a_send_does_not_wait_for_a_receiver_that_is_not_there_yet(
    make: Make, tmp_path: Path
) -> None:
    with Transport(0, 2, tmp_path) as a:
        for k in range(500):
            a.send(1, Record(16, (k,), arrays=(torch.zeros(2000),)))
        assert a.in_flight_bytes(1) > 500 * 8000
        with Transport(1, 2, tmp_path) as b:
            assert [record.ints[0] for _, record in take(b, 500)] == list(range(500))


def test_bytes_are_counted_by_edge_and_what_is_in_flight_is_what_is_not_known_to_be_there(
    make: Make,
) -> None:
    a, b, _ = make(3)
    a.send(1, Record(16, arrays=(np.arange(100),)))
    a.send(1, Record(16))
    sent = a.monitor()
    assert sent.sent_messages == (0, 2, 0)
    assert sent.sent_bytes[1] == sent.in_flight_bytes[1] == a.in_flight_bytes(1) > 800
    take(b, 2)
    assert b.monitor().received_bytes == (sent.sent_bytes[1], 0, 0)
    assert b.monitor().received_messages == (2, 0, 0)
    b.send(0, Record(16))
    take(a, 1)
    assert a.in_flight_bytes(1) == 0
    assert b.in_flight_bytes(0) > 0


@pytest.mark.parametrize("arrays", [(), (torch.zeros(1 << 16),)], ids=["many", "large"])
def test_a_sender_that_never_hears_anything_is_told_what_has_come(
    make: Make, arrays: tuple[torch.Tensor, ...]
) -> None:
    a, b = make(2)
    for _ in range(200):
        a.send(1, Record(16, arrays=arrays))
    before = a.in_flight_bytes(1)
    take(b, 200)
    while a.in_flight_bytes(1) > before // 2:
        assert a.poll(0.01) == []
    assert a.monitor().received_messages[1] > 0


def test_a_poll_ends_in_time_if_nothing_comes(make: Make) -> None:
    a, _ = make(2)
    assert a.poll(0.0) == []
    assert a.poll(0.002) == []
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite"):
            a.poll(wrong)


def test_a_poll_also_waits_for_other_descriptors(make: Make, tmp_path: Path) -> None:
    with ExitStack() as stack:
        here, there = socket.socketpair()
        stack.enter_context(here)
        stack.enter_context(there)
        a, b = make(2, watch=(here.fileno(),))
        assert a.poll() == [] and a.ready == ()
        there.send(b"x")
        assert a.poll(LONG_S) == []
        assert a.ready == (here.fileno(),)
        b.send(0, Record(16))
        while not (found := a.poll(LONG_S)):
            assert a.ready
        assert found[0][0] == 1
        assert a.ready == (here.fileno(),), "also when something has come"
        a.unwatch(here.fileno())
        b.unwatch(here.fileno())
        assert a.poll() == [] and a.ready == ()


def test_a_signal_is_handled_and_the_wait_goes_on(make: Make) -> None:
    a, b = make(2)
    handled = threading.Event()

    def handle(*_: object) -> None:
        handled.set()
        b.send(0, Record(16))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        main = threading.main_thread().ident
        killer = threading.Timer(0.02, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        killer.start()
        assert len(a.poll(LONG_S)) == 1
        killer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled.is_set()


def test_a_wait_ends_in_time_however_often_it_is_interrupted(make: Make) -> None:
    a, _ = make(2)
    handled: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: handled.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        assert a.poll(0.05) == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert handled


def test_messages_of_an_older_generation_are_dropped_and_of_a_newer_one_refused(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        old, new, a = (
            stack.enter_context(Transport(k, 3, "tcp://127.0.0.1:*", generation, plain=True))
            for k, generation in ((0, 4), (1, 5), (2, 4))
        )
        old.connect({1: new.address})
        old.send(1, Record(16))
        while not new.monitor().dropped:
            assert new.poll(0.05) == []
        new.connect({2: a.address})
        new.send(2, Record(16))
        with pytest.raises(TransportError, match="process 1 is of generation 5, process 2 of 4"):
            while True:
                assert a.poll(LONG_S) == []


def test_a_receiver_that_was_replaced_notices_what_was_lost(tmp_path: Path) -> None:
    with Transport(0, 2, tmp_path) as a:
        with Transport(1, 2, tmp_path) as b:
            a.send(1, Record(16))
            take(b, 1)
        with Transport(1, 2, tmp_path) as b:
            a.send(1, Record(16))
            with pytest.raises(TransportError, match="from process 0 to process 1 were lost"):
                take(b, 1)


def test_what_is_no_message_is_an_error_that_says_so(tmp_path: Path) -> None:
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    try:
        with Transport(0, 2, tmp_path) as a:
            push.connect(a.address)
            push.send_multipart([b"GET / HTTP/1.1\r\n\r\n" * 4, b"x"])
            with pytest.raises(TransportError, match="cannot be read"):
                take(a, 1)
    finally:
        context.destroy(linger=0)


def test_a_record_that_is_too_large_is_refused_and_the_next_one_arrives(make: Make) -> None:
    a, b = make(2, most_bytes=10_000)
    for size in (2000, 30_000):
        with pytest.raises(TransportError, match="10,000 are the most; send fewer rows"):
            a.send(1, Record(16, arrays=(np.zeros(size),)))
    a.send(1, Record(16, (1,)))
    assert take(b, 1)[0][1].ints == (1,)


def test_a_folder_is_used_once_in_a_generation_and_empty_after_it(tmp_path: Path) -> None:
    with Transport(0, 2, tmp_path, 1), Transport(1, 2, tmp_path, 1), Transport(0, 2, tmp_path, 2):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0.1", "0.2", "1.1"]
        with pytest.raises(TransportError, match="is there already"):
            Transport(0, 2, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot be reached"):
        Transport(0, 2, tmp_path / "absent")
    with pytest.raises(ValueError, match="107 are the most"):
        Transport(0, 2, tmp_path / ("x" * 100))
    with pytest.raises(ValueError, match="generation=-1"):
        Transport(0, 2, tmp_path, -1)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_transport_says_so_and_may_be_closed_again(tmp_path: Path) -> None:
    a = Transport(0, 2, tmp_path)
    a.close()
    a.close()
    for use in (lambda: a.send(1, Record(16)), a.poll, lambda: a.connect({})):
        with pytest.raises(TransportError, match="is closed"):
            use()


def test_what_was_sent_before_closing_arrives_if_it_is_given_the_time(tmp_path: Path) -> None:
    with Transport(1, 2, tmp_path) as b:
        a = Transport(0, 2, tmp_path)
        a.send(1, Record(16, arrays=(torch.zeros(1 << 20),)))
        a.close(LONG_S)
        assert len(take(b, 1)) == 1


def test_whoever_is_not_there_is_refused_by_number(make: Make) -> None:
    with Transport(0, 2, "tcp://127.0.0.1:*", plain=True) as a:
        with pytest.raises(TransportError, match="process 1 is not connected"):
            a.send(1, Record(16))
        a.connect({0: "tcp://127.0.0.1:1", 1: "tcp://127.0.0.1:1"})
        with pytest.raises(ValueError, match="connected already"):
            a.connect({1: "tcp://127.0.0.1:2"})
        a.send(1, Record(16))


def test_a_fork_has_no_part_in_it(tmp_path: Path) -> None:
    a = Transport(0, 2, tmp_path)
    a._pid += 1
    with pytest.raises(TransportError, match=f"this is pid {os.getpid()}"):
        a.send(0, Record(16))
    a.close()
    assert (tmp_path / "0.0").exists()
    a._pid, a._closed = os.getpid(), False
    a.close()


ECHO = """
import sys
from pathlib import Path
from geartrain.transport.link import Transport
with Transport(1, 2, Path(sys.argv[1])) as me:
    left = int(sys.argv[2])
    while left:
        for sender, record in me.poll(20.0):
            me.send(sender, record)
            left -= 1
    me.close(20.0)
"""


def test_two_processes_exchange_records_both_ways_at_once(nursery: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    with Transport(0, 2, folder) as a:
        echo = Program(nursery, tmp_path / "echo", ECHO, folder, 60)
        try:
            draw = np.random.default_rng(0)
            rows = [torch.from_numpy(draw.normal(size=(n, 61))) for n in (1, 32, 3000) * 20]
            for k, payload in enumerate(rows):
                a.send(1, Record(16, (k,), arrays=(np.arange(len(payload)), payload)))
            for k, (sender, record) in enumerate(take(a, 60)):
                assert (sender, record.ints) == (1, (k,))
                assert np.array_equal(record.arrays[0], np.arange(len(rows[k])))
                assert torch.equal(record.arrays[1], rows[k])
            assert echo.end() == (0, "")
        finally:
            echo.close()
    assert list(folder.iterdir()) == []


def test_a_close_that_lingers_for_one_does_not_wait_for_another_that_is_gone(
    tmp_path: Path,
) -> None:
    a, b = (Transport(k, 3, tmp_path) for k in range(2))
    a.send(2, Record(16))  # which never was there
    a.send(1, Record(17))
    began = time.monotonic()
    a.close(3 * LONG_S, to=1)
    assert time.monotonic() - began < LONG_S
    ((sender, record),) = take(b, 1)
    assert (sender, record.kind) == (0, 17)
    b.close()


def test_those_who_hear_that_one_is_gone_wait_for_nothing_of_it(tmp_path):
    """0 had sent something to 2 that is lost; 1 knows of it, and 2 would wait for it."""
    until = time.monotonic() + 30
    zero, one, two = (Transport(k, 3, tmp_path) for k in range(3))
    with one, two:
        with zero:
            zero._order.stamp(2)  # counted, and never on its way
            zero.send(1, Record(8))
            got: list[tuple[int, Record]] = []
            while not got and time.monotonic() < until:
                got = one.poll(0.1)
        one.send(2, Record(9))
        one.forget(0)
        one.send(2, Record(GONE, (0,)))
        one.send(0, Record(9))  # to nobody
        found: list[tuple[int, Record]] = []
        while len(found) < 2 and time.monotonic() < until:
            found += two.poll(0.1)
        assert [(sender, record.kind) for sender, record in found] == [(1, 9), (1, GONE)]
        assert two.held == 0 and one.in_flight_bytes(0) == 0
        with pytest.raises(TransportError, match="process 2 was told that process 2 is gone"):
            two.forget(2)

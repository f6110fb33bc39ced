"""Sockets without a thread: whole messages, in order, and no send that waits."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.errors import TransportError
from geartrain.transport.direct import Direct
from geartrain.transport.link import Transport
from geartrain.transport.record import Frame, Record

LONG_S = 20.0
"""No wait of these tests is as long unless something is broken."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def make(tmp_path: Path, stack: ExitStack) -> Callable[..., list[Direct]]:
    """So many processes' sockets in a folder."""

    def made(n: int, most_bytes: int = 1 << 30) -> list[Direct]:
        files = [str(tmp_path / str(k)) for k in range(n)]
        found = [Direct(file, files, most_bytes) for file in files]
        for direct in found:
            stack.callback(direct.close, 0.0)
        return found

    return made


def taken(receiver: Direct, n: int, *others: Direct) -> list[list[bytes]]:
    """The next n messages, waited for; others look for theirs meanwhile, and have none."""
    found: list[list[bytes]] = []
    end = time.monotonic() + LONG_S
    while len(found) < n:
        assert time.monotonic() < end, f"{len(found)} of {n} have come"
        found += [[bytes(frame) for frame in frames] for frames in receiver.take()]
        for other in others:
            assert other.take() == []
    assert len(found) == n
    return found


def polled(transport: Transport, n: int, *others: Transport) -> list[tuple[int, Record]]:
    """The next n records, waited for."""
    found: list[tuple[int, Record]] = []
    end = time.monotonic() + LONG_S
    while len(found) < n:
        assert time.monotonic() < end, f"{len(found)} of {n} have come"
        found += transport.poll(0.01)
        for other in others:
            assert other.poll() == []
    assert len(found) == n
    return found


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(st.integers(0, 400_000), min_size=1, max_size=4), min_size=1, max_size=6))
def test_messages_of_all_sizes_come_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("direct")
    files = [str(folder / str(k)) for k in range(2)]
    a, b = (Direct(file, files, 1 << 30) for file in files)
    try:
        draw = np.random.default_rng(len(sizes))
        sent = [[draw.bytes(size) for size in frames] for frames in sizes]
        for frames in sent:
            a.send(1, frames)
        assert taken(b, len(sent), a) == sent
    finally:
        a.close(0.0)
        b.close(0.0)


def test_what_the_kernel_has_no_room_for_waits_and_nothing_overtakes_it(
    make: Callable[..., list[Direct]],
) -> None:
    a, b = make(2)
    sent = [[bytes([k]) * 50_000] for k in range(200)]  # ten megabytes
    for frames in sent:
        a.send(1, frames)
    assert taken(b, 200, a) == sent
    assert not a._full  # it is not asked for room any more


def test_a_sender_that_is_faster_does_not_keep_the_receiver(
    make: Callable[..., list[Direct]],
) -> None:
    """It sends on as it is read, as if it ran meanwhile."""
    a, b = make(2)
    a.send(1, [b"begin"])
    taken(b, 1, a)
    (coming,) = b._coming.values()

    class Fast:
        reads = 0

        def recv_into(self, into: memoryview) -> int:
            self.reads += 1
            assert self.reads < 1000, "it never comes to an end"
            some = len(into) // 64 * 64
            into[:some] = (56).to_bytes(8, "little").ljust(64, b"x") * (some // 64)
            return some

    fast = Fast()
    found: list[list[Frame]] = []
    b._read(-1, cast(Any, SimpleNamespace(socket=fast, whole=None, filled=0, rest=b"")), found)
    assert fast.reads > 1 and len(found) > 1000 and coming.socket


def test_a_message_may_come_in_pieces(make: Callable[..., list[Direct]], tmp_path: Path) -> None:
    (direct,) = make(1)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with stream:
        stream.connect(str(tmp_path / "0"))
        said = (3).to_bytes(4, "little") + (2).to_bytes(4, "little")
        whole = [b"abc", b"d", b"efgh"]
        said += (1).to_bytes(8, "little") + (4).to_bytes(8, "little") + b"".join(whole)
        found: list[list[Frame]] = []
        for byte in 2 * said:
            stream.sendall(bytes([byte]))
            found += direct.take()
        assert [[bytes(frame) for frame in frames] for frames in found] == 2 * [whole]
        for piece in (said[:-1], said[-1:] + said + said[:5], said[5:]):
            stream.sendall(piece)
        assert taken(direct, 3) == 3 * [whole]
        stream.sendall(said[:-1])
    while direct._coming:  # who hangs up in the middle has said nothing
        assert direct.take() == []


def test_who_is_not_there_yet_is_written_to_when_he_is(tmp_path: Path) -> None:
    files = [str(tmp_path / str(k)) for k in range(2)]
    a = Direct(files[0], files, 1 << 30)
    for k in range(3):
        a.send(1, [bytes([k])])
    assert a.unreached
    b = Direct(files[1], files, 1 << 30)
    assert taken(b, 3, a) == [[b"\0"], [b"\1"], [b"\2"]]
    assert not a.unreached
    a.close(0.0)
    b.close(0.0)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (1 << 20).to_bytes(4, "little") + bytes(4),
        (8).to_bytes(4, "little") + (1).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little"),
        (8).to_bytes(4, "little") + (1 << 31).to_bytes(4, "little"),
    ],
    ids=["no message", "a large frame", "a large frame behind", "many frames"],
)
def test_what_is_no_message_or_too_large_is_refused_before_there_is_room_for_it(
    make: Callable[..., list[Direct]], tmp_path: Path, said: bytes
) -> None:
    (direct,) = make(1, most_bytes=100_000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(str(tmp_path / "0"))
        stream.sendall(said)
        with pytest.raises(TransportError, match="cannot be read: it begins with"):
            taken(direct, 1)


def test_no_thread_is_started_and_all_descriptors_are_closed(tmp_path: Path) -> None:
    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    before, files = tasks(), len(os.listdir("/proc/self/fd"))
    with (
        Transport(0, 2, tmp_path, direct=True) as a,
        Transport(1, 2, tmp_path, direct=True) as b,
    ):
        a.send(1, Record(16, (7,), arrays=(torch.ones(3),)))
        b.send(0, Record(16, (8,)))
        ((sender, record),) = polled(b, 1)
        assert (sender, record.ints) == (0, (7,))
        assert [record.ints for _, record in polled(a, 1)] == [(8,)]
        assert tasks() == before
    assert len(os.listdir("/proc/self/fd")) == files
    assert list(tmp_path.iterdir()) == []


def test_arrays_apart_come_as_they_went_and_may_be_written_to(tmp_path: Path) -> None:
    with (
        Transport(0, 2, tmp_path, direct=True) as a,
        Transport(1, 2, tmp_path, direct=True) as b,
    ):
        large = [torch.randn(300, 301), torch.arange(100_001, dtype=torch.uint8)]
        a.send(1, Record(16, arrays=(*large, np.arange(5))))
        ((_, record),) = polled(b, 1, a)
        for x, y in zip(large, record.arrays, strict=False):
            assert isinstance(y, torch.Tensor) and torch.equal(x, y)
            y.zero_()


def test_a_wait_ends_as_soon_as_something_comes(tmp_path: Path) -> None:
    with (
        Transport(0, 2, tmp_path, direct=True) as a,
        Transport(1, 2, tmp_path, direct=True) as b,
    ):
        b.poll()
        timer = threading.Timer(0.05, lambda: None)
        sender = threading.Thread(target=lambda: (timer.run(), a.send(1, Record(16)))[1])
        began = time.monotonic()
        sender.start()
        assert len(b.poll(LONG_S)) == 1
        assert time.monotonic() - began < LONG_S / 2
        sender.join()


def test_a_wait_that_has_something_for_who_is_not_there_tries_again(tmp_path: Path) -> None:
    with Transport(0, 2, tmp_path, direct=True) as a:
        a.send(1, Record(16))
        waits = threading.Thread(target=a.poll, args=(LONG_S,))
        waits.start()
        with Transport(1, 2, tmp_path, direct=True) as b:
            assert len(polled(b, 1)) == 1
            b.send(0, Record(16))
            waits.join(LONG_S)
            assert not waits.is_alive()


def test_a_receiver_that_was_replaced_notices_what_was_lost(tmp_path: Path) -> None:
    with Transport(0, 2, tmp_path, direct=True) as a:
        with Transport(1, 2, tmp_path, direct=True) as b:
            a.send(1, Record(16))
            polled(b, 1)
        with Transport(1, 2, tmp_path, direct=True) as b:
            a.send(1, Record(16))
            with pytest.raises(TransportError, match="from process 0 to process 1 were lost"):
                polled(b, 1)


def test_what_was_sent_before_closing_arrives_if_it_is_given_the_time(tmp_path: Path) -> None:
    came: list[tuple[int, Record]] = []
    with Transport(1, 2, tmp_path, direct=True) as b:
        a = Transport(0, 2, tmp_path, direct=True)
        for _ in range(10):
            a.send(1, Record(16, arrays=(torch.zeros(1 << 20),)))
        reader = threading.Thread(target=lambda: came.extend(polled(b, 10)))
        reader.start()
        a.close(LONG_S)
        reader.join(2 * LONG_S)
        assert len(came) == 10
    a = Transport(0, 2, tmp_path, direct=True)
    a.send(1, Record(16))  # which is not there any more
    began = time.monotonic()
    a.close(LONG_S, to=0)
    assert time.monotonic() - began < LONG_S / 2


def test_where_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a folder"):
        Transport(0, 2, "tcp://127.0.0.1:*", plain=True, direct=True)
    with pytest.raises(TransportError, match="cannot be reached"):
        Transport(0, 2, tmp_path / "absent", direct=True)
    with (
        Transport(0, 2, tmp_path, direct=True),
        pytest.raises(TransportError, match="there already"),
    ):
        Transport(0, 2, tmp_path, direct=True)
    tmp_path.chmod(0o755)
    with pytest.raises(TransportError, match="others could write"):
        Transport(1, 2, tmp_path, direct=True)
    tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_leaves_the_socket_file_of_its_parent(tmp_path: Path) -> None:
    a = Transport(0, 2, tmp_path, direct=True)
    a._pid += 1
    a.close()
    assert (tmp_path / "0.0").exists()
    a._pid, a._closed = os.getpid(), False
    a.close()
    assert not (tmp_path / "0.0").exists()

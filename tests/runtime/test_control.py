"""The private channel between parent and child: messages, and open files with them."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from geartrain.runtime.processes.control import Control


@pytest.fixture
def ends() -> Iterator[tuple[Control, Control]]:
    here, there = map(Control, socket.socketpair())
    there.socket.settimeout(5.0)  # what waits for ever fails
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("count", [0, 1, 300])
def test_a_message_comes_with_its_open_files(ends: tuple[Control, Control], count: int) -> None:
    here, there = ends
    with open(os.devnull, "rb") as nothing:
        here.send(b"content", [nothing.fileno()] * count)
    content, fds = there.receive()
    for fd in fds:
        os.close(fd)
    assert content == b"content" and len(fds) == count


def test_open_files_without_room_are_told_and_not_waited_for(ends: tuple[Control, Control]) -> None:
    here, there = ends
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull, "rb") as nothing:
        here.send(b"content", [nothing.fileno()] * 5)
        inside = {int(fd) for fd in os.listdir("/proc/self/fd")}
        next_one = min({*range(1000)} - inside)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one + 1, before[1]))
        try:
            with pytest.raises(OSError, match="no room for the open files"):
                there.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            os.close(next_one)

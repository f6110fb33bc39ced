"""What is started on a host: it has imported torch, runs no thread, forks workers, tells of deaths.

    python -m geartrain.runtime.hosts

    stdin   {"fork": greeting}   {"kill": pid}   {"ping": n}    a line each; its end ends all
    stdout  {"ready": ...} {"forked": pid, "worker": w} {"hello": ...} {"died": pid, "status": ...}
            {"pong": n}, or {"unable": why} and its end

What workers print goes to stderr. When stdin ends, as the parent has ended in whatever way, workers
are killed and the keeper ends; when the keeper ends, the kernel ends the workers.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from geartrain.runtime.hosts.near import Near
from geartrain.runtime.hosts.worker import Greeting, RemoteWorker
from geartrain.runtime.processes.forking import be_a_worker, ended, get_ready

PROTOCOL: Final = 4
_MOST: Final = 1 << 16
_DEAF: Final = (
    "has /dev/null or a file for stdin, but is told there what to do, and when to end: have the "
    "command pass stdin through (without -n and -f of ssh)"
)


def main() -> None:
    """Until stdin ends."""
    out = os.dup(1)
    os.dup2(2, 1)  # what is printed here, by modules in workers too, is for people
    workers: set[int] = set()
    meetings: set[Near] = set()
    try:
        _serve(out, workers, meetings)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for near in meetings:
            near.remove()


def _tell(out: int, **what: Any) -> None:
    os.write(out, json.dumps(what).encode() + b"\n")  # short enough to go in one piece


def _serve(out: int, workers: set[int], meetings: set[Near]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    with selectors.DefaultSelector() as selector:
        try:
            selector.register(0, selectors.EVENT_READ)
        except OSError:  # nobody can wait for the end of a file
            _tell(out, unable=_DEAF)
            return
        heard, rings = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        selector.register(heard, selectors.EVENT_READ)
        signal.set_wakeup_fd(rings)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        get_ready()
        version = ".".join(map(str, sys.version_info[:2]))
        _tell(out, ready=os.getpid(), protocol=PROTOCOL, python=version, host=socket.gethostname())
        left = b""
        while True:
            for key, _ in selector.select():
                if key.fd == heard:
                    os.read(heard, 4096)
                    for pid, status in ended(workers):
                        _tell(out, died=pid, status=status)
                    continue
                some = os.read(0, _MOST)
                if not some:
                    return
                *lines, left = (left + some).split(b"\n")
                for line in lines:
                    _obey(json.loads(line), out, workers, meetings, [heard, rings])


def _obey(told: Any, out: int, workers: set[int], meetings: set[Near], ours: Sequence[int]) -> None:
    if "ping" in told:
        _tell(out, pong=told["ping"])
        return
    if "kill" in told:
        if told["kill"] in workers:
            os.kill(told["kill"], signal.SIGKILL)
        return
    greeting = Greeting.of_json(told["fork"])
    if greeting.near is not None:
        meetings.clear()  # the parent has removed those of before
        meetings.add(greeting.near)
    keeper = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _tell(out, refused=str(error), worker=greeting.worker)
        return
    if pid == 0:
        be_a_worker(keeper, partial(_live, greeting, out, ours))
    workers.add(pid)
    _tell(out, forked=pid, worker=greeting.worker)


def _live(greeting: Greeting, out: int, ours: Sequence[int]) -> None:
    for each in ours:
        os.close(each)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    worker = RemoteWorker(greeting)
    _tell(out, hello=worker.hello.to_json())
    os.close(out)
    worker.live()

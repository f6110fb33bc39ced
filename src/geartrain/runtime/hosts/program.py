"""The program on one host, as it is seen from here: ``keeper`` is what it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Final, final

from geartrain.bounds import require_whole
from geartrain.errors import GeartrainError
from geartrain.kinds import require_each, require_kind
from geartrain.runtime.base import log
from geartrain.runtime.hosts.keeper import PROTOCOL
from geartrain.runtime.hosts.worker import Hello
from geartrain.runtime.processes.pool import how_ended

_END_S: Final = 5.0
_PING_S: Final = 1.0
_PONG_S: Final = 3.0
"""A program that has not answered for so long is not there."""
_PROGRAM: Final = "geartrain.runtime.hosts"


@final
@dataclass(frozen=True, slots=True)
class Host:
    """Where workers may be.

    Args:
        address: Of that host, as this one and the other hosts reach it.
        command: What starts a program there: ``("ssh", "-T", "-o", "BatchMode=yes", "b.example")``.
            Empty: this host. It passes stdin and stdout through, and ends when these do.
        python: The interpreter there, one that has geartrain; None: the name of this one.
        workers: How many there may be.

    Raises:
        ValueError: No address of its own, such as ``0.0.0.0``, or no workers.
    """

    address: str
    command: Sequence[str] = ()
    python: str | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        wanted = "the address by which other hosts reach it, such as '10.0.0.2'"
        require_kind("Host", str, wanted, address=self.address)
        wanted = "the path of the interpreter there, or None"
        require_kind("Host", str | os.PathLike | None, wanted, python=self.python)
        require_each("Host", str, "words: ('ssh', 'b.example')", command=self.command)
        if not self.address or self.address in ("*", "0.0.0.0") or "://" in self.address:
            raise ValueError(
                f"Host(address={self.address!r}): give the address by which other hosts reach it, "
                "such as '10.0.0.2'"
            )
        require_whole(f"Host(workers={self.workers!r})", self.workers, 1)


@final
class Keeper:
    """The program on one host, as it is seen from here."""

    def __init__(self, host: Host) -> None:
        self.host = host
        python = host.python or sys.executable
        self._words = [*host.command, python, "-m", _PROGRAM]
        path = os.pathsep.join(filter(None, sys.path))
        try:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # a terminal's signals pass it by
            )
        except OSError as error:
            raise self._failed(f"cannot be run: {error}") from error
        self._left = b""
        self.ready: dict[str, Any] | None = None
        self.forked: dict[int, int] = {}  # workers' processes, of the last that were asked for
        self.hellos: dict[int, Hello] = {}  # by process
        self.died: dict[int, int] = {}
        self.suspect = False  # a worker of it does not answer
        self.began_s = time.monotonic()
        self._pinged = self._ponged = 0
        self._pinged_s = 0.0
        self._doubted: int | None = None  # the question whose answer ends the doubt
        self._end = weakref.finalize(self, _end, self._process, os.getpid())

    @property
    def lives(self) -> bool:
        """Whether it can start workers."""
        return self._end.alive and self._process.poll() is None

    def fileno(self) -> int:
        """Something is to be read from it when a worker has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def closed(self) -> bool:
        """Whether it has been given up."""
        return not self._end.alive

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it is gone; whoever waits for an answer hears of that
            os.write(self._process.stdin.fileno(), json.dumps(what).encode() + b"\n")

    @property
    def overdue(self) -> bool:
        """Whether an answer should have come by now; what has come is to be heard before."""
        return self._ponged < self._pinged and time.monotonic() > self._pinged_s + _PONG_S

    def ping(self) -> None:
        """Ask now and then whether it is there, so that it is known when there is a doubt."""
        now_s = time.monotonic()
        if self._ponged == self._pinged and now_s - self._pinged_s >= _PING_S:
            self._pinged += 1
            self._pinged_s = now_s
            self.tell(ping=self._pinged)

    def answers(self) -> bool:
        """Whether it is there, if there was a doubt; waits for some seconds at most."""
        if not self.suspect:
            return self.lives
        try:
            self.listen()
            if self._ponged == self._pinged:
                self._pinged_s = 0.0
                self.ping()
            while self._ponged < self._pinged and not self.overdue:
                wait([self.fileno()], 0.1)
                self.listen()
        except GeartrainError as error:
            log.warning("%s", error)
            return False
        self.suspect, self._doubted = self._ponged < self._pinged, None
        return not self.suspect

    def seems_there(self) -> bool:
        """The same by what is known now: it is asked, and waits for nothing.

        Raises:
            GeartrainError: It has ended, or says something else than it should.
        """
        self.listen()
        if self.suspect:
            if self._doubted is None:
                self._pinged_s = min(self._pinged_s, time.monotonic() - _PING_S)
                self.ping()
                self._doubted = self._pinged
            if self._ponged < self._doubted:
                return False
            self.suspect, self._doubted = False, None
        return self.lives and not self.overdue

    def listen(self) -> None:
        """Take what it has said; waits for nothing.

        Raises:
            GeartrainError: It has ended, or says something else than it should.
        """
        if self.closed:
            raise self._failed("has been given up")
        while wait([self.fileno()], 0):
            some = os.read(self.fileno(), 1 << 16)
            if not some:
                raise self._failed(f"has ended ({_status(self._process)})")
            *lines, self._left = (self._left + some).split(b"\n")
            for line in lines:
                try:
                    self._note(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise self._failed(
                        f"says {line[:80]!r} on stdout, where nothing but its own words may be "
                        f"({type(error).__name__})"
                    ) from error

    def _note(self, told: Mapping[str, Any]) -> None:
        if "ready" in told:
            if told["protocol"] != PROTOCOL:
                raise self._failed(
                    f"has another version of geartrain (it speaks {told['protocol']}, this process "
                    f"{PROTOCOL}): install the same one there"
                )
            ours = ".".join(map(str, sys.version_info[:2]))
            if told["python"] != ours:
                raise self._failed(
                    f"has Python {told['python']}, and this process {ours}: functions that are "
                    "handed over want the same; give Host(python=...)"
                )
            self.ready = dict(told)
        elif "pong" in told:
            self._ponged = told["pong"]
        elif "hello" in told:
            hello = Hello(**told["hello"])
            self.hellos[hello.pid] = hello
        elif "forked" in told:
            self.forked[told["worker"]] = told["forked"]
            self.died.pop(told["forked"], None)  # of one that had the number before
        elif "unable" in told:
            raise self._failed(told["unable"])
        elif "refused" in told:
            raise self._failed(f"has no room for a process more: {told['refused']}")
        else:
            self.died[told["died"]] = told["status"]

    def _failed(self, how: str) -> GeartrainError:
        return GeartrainError(
            f"host {self.host.address}: '{' '.join(self._words)}' {how}; see what it printed"
        )

    def close(self) -> None:
        """End it, and by that its workers."""
        if self.suspect and not self.closed:  # the command would wait for a host that is gone
            self._process.kill()
        self._end()


def _status(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        return how_ended(process.wait(_END_S))[0]
    return "it closed stdout"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # of the process that has forked this one
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()

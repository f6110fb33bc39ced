"""Hosts by a program on each, started by a command of yours: ssh, ip netns exec, or none."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, final

from geartrain.errors import GeartrainError
from geartrain.runtime.base import log
from geartrain.runtime.hosts.keeper import PROTOCOL
from geartrain.runtime.hosts.launcher import START_S, AbstractLauncher
from geartrain.runtime.hosts.worker import Greeting, Hello
from geartrain.runtime.processes.pool import how_ended

_END_S: Final = 5.0
_PING_S: Final = 1.0
_PONG_S: Final = 3.0
"""A program that has not answered for so long is not there."""
_TRY_S: Final = 2.0
"""Between two trials to start a program on a host."""
BACK_S: Final = 60.0
"""So long one waits for a host where a worker can be made anew, if nothing else is said."""
_FORK_S: Final = 30.0
"""Until a worker is there, of a program that was ready."""
_PROGRAM: Final = "geartrain.runtime.hosts"
_NOBODY: Final = -1
"""In the place of a process."""


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
        if not self.address or self.address in ("*", "0.0.0.0") or "://" in self.address:
            raise ValueError(
                f"Host(address={self.address!r}): give the address by which other hosts reach it, "
                "such as '10.0.0.2'"
            )
        if self.workers < 1:
            raise ValueError(f"Host(workers={self.workers}): give 1 or more")
        if isinstance(self.command, str):
            raise ValueError(f"Host(command={self.command!r}): give words: ('ssh', 'b.example')")


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
                select.select([self], [], [], 0.1)
                self.listen()
        except GeartrainError as error:
            log.warning("%s", error)
            return False
        self.suspect = self._ponged < self._pinged
        return not self.suspect

    def listen(self) -> None:
        """Take what it has said; waits for nothing.

        Raises:
            GeartrainError: It has ended, or says something else than it should.
        """
        if self.closed:
            raise self._failed("has been given up")
        while select.select([self.fileno()], [], [], 0)[0]:
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


@final
class Keepers(AbstractLauncher):
    """Starts workers by keepers, which stay when workers are over with.

    Args:
        hosts: In the order in which they are taken; more than are needed are spare, for when one
            cannot be reached.
        workers: How many.
        ready: Whether programs are started on spare hosts, too, and again on hosts that were lost,
            while the workers work: so a worker is made anew there without waiting for an import.
        wait_s: With ``ready``, so long in all one waits for a host that has room for a worker, when
            one was lost.
    """

    told_s = 0.5

    def __init__(
        self, hosts: Sequence[Host], workers: int, *, ready: bool = False, wait_s: float = BACK_S
    ) -> None:
        self._hosts, self._workers, self._ready = list(hosts), workers, ready
        self._wait_s = wait_s if ready else 0.0
        self._lacking_s: float | None = None  # since when there has been too little room
        self._keepers: dict[int, Keeper] = {}  # by place in the list of hosts
        self._homes: list[Keeper] = []  # by worker
        self._pids: list[int] = []
        self._out: set[int] = set()  # hosts that could not be reached when last tried
        self._late: list[int] = []  # hosts that were lost: others are taken before them
        self._avoided: set[int] = set()  # hosts that others do not reach
        self._tried_s: dict[int, float] = {}  # when a program was last started on a host
        self._had_all = False

    def binds(self) -> Sequence[str]:
        places = self._places()
        self._homes = [self._keepers[k] for k in places]
        return [keeper.host.address for keeper in self._homes]

    def _places(self) -> list[int]:
        """A host for each worker, each with a keeper that is ready.

        Raises:
            GeartrainError: Too few hosts can be reached; where all were, not for ``wait_s``.
        """
        while (places := self._places_now()) is None:
            if not self._had_all or self._waited():
                told = ", ".join(self._hosts[k].address for k in sorted(self._out))
                room = sum(h.workers for k, h in enumerate(self._hosts) if k not in self._out)
                raise GeartrainError(
                    f"{self._workers} workers want a host, and {self._workers - room} of them have "
                    f"none: {told} could not be reached{self._for_long()} (see what was printed); "
                    "mend that, or name more hosts: those that are not needed are spare"
                )
            time.sleep(_TRY_S)
        self._had_all, self._lacking_s = True, None
        return places

    def _waited(self) -> bool:
        """There is too little room: whether that has been so for as long as one waits."""
        if self._lacking_s is None:
            self._lacking_s = time.monotonic()
        return time.monotonic() >= self._lacking_s + self._wait_s

    def _for_long(self) -> str:
        return f" for {self._wait_s:g} s (wait_s=)" if self._had_all and self._ready else ""

    def _places_now(self) -> list[int] | None:
        """The same; None: there is not one for each."""
        self._out.clear()
        self._leave_the_lost()
        while True:
            chosen, left = [], self._workers
            for k in sorted(range(len(self._hosts)), key=self._order):
                if k not in self._out and left:
                    some = min(left, self._hosts[k].workers)
                    chosen.append((k, some))
                    left -= some
            if left:
                return None
            if self._await([k for k, _ in chosen]):
                self.tend()
                return [k for k, some in chosen for _ in range(some)]

    def _order(self, k: int) -> tuple[int, int]:
        return (self._late.index(k) + 1 if k in self._late else 0), k

    def _leave_the_lost(self) -> None:
        """Give up the programs on hosts that do not answer."""
        for k, keeper in list(self._keepers.items()):
            if not keeper.answers():
                self._lose(k)

    def _lose(self, k: int) -> None:
        """Give up the program on a host."""
        keeper = self._keepers.pop(k)
        if keeper.suspect:
            log.warning("host %s does not answer", keeper.host.address)
        self._put_last(k)
        keeper.close()

    def _put_last(self, k: int) -> None:
        """Other hosts are taken before this one."""
        self._late = [*(j for j in self._late if j != k), k]

    def _await(self, chosen: Sequence[int]) -> bool:
        """Have keepers there; whether all are ready, or some of the hosts have been struck out."""
        fine = True
        for k in chosen:
            try:
                if k not in self._keepers:
                    self._begin(k)
            except GeartrainError as error:
                self._strike(k, error)
                fine = False
        for k in chosen:
            keeper = self._keepers.get(k)
            while keeper is not None and keeper.ready is None:
                left = keeper.began_s + START_S - time.monotonic()
                try:
                    if left <= 0.0:
                        raise GeartrainError(
                            f"host {keeper.host.address} has started no worker in {START_S:.0f} s"
                        )
                    select.select([keeper], [], [], min(left, 1.0))
                    keeper.listen()
                except GeartrainError as error:
                    self._strike(k, error)
                    keeper, fine = None, False
        return fine

    def _begin(self, k: int) -> None:
        """Start a program on a host; it is ready some seconds later.

        Raises:
            GeartrainError: Its command cannot be run.
        """
        self._tried_s[k] = time.monotonic()
        self._keepers[k] = Keeper(self._hosts[k])

    def tend(self) -> None:
        if not self._ready:
            return
        at_work = {id(keeper) for keeper in self._homes}
        for k in range(len(self._hosts)):
            keeper = self._keepers.get(k)
            if keeper is None:
                if time.monotonic() - self._tried_s.get(k, -_TRY_S) >= _TRY_S:
                    self._try(k)
            elif id(keeper) in at_work:  # what it says, ``deaths`` hears
                keeper.ping()
            else:
                self._tend_spare(k, keeper)

    def _try(self, k: int) -> None:
        """Start a program on a host that may be gone."""
        try:
            self._begin(k)
        except GeartrainError as error:
            log.info("%s", error)

    def _tend_spare(self, k: int, keeper: Keeper) -> None:
        """Hear what a program without workers says, and whether it is there."""
        try:
            keeper.listen()
        except GeartrainError as error:  # it is tried again
            log.info("%s", error)
            self._keepers.pop(k).close()
            return
        late = time.monotonic() > keeper.began_s + START_S
        if keeper.overdue or (keeper.ready is None and late):
            keeper.suspect = True
            self._lose(k)
        elif keeper.ready is not None:
            keeper.ping()

    def _strike(self, k: int, error: GeartrainError) -> None:
        log.warning("%s", error)
        self._out.add(k)
        if (keeper := self._keepers.pop(k, None)) is not None:
            keeper.close()

    def start(self, greetings: Sequence[Greeting]) -> Sequence[Hello]:
        for keeper in {id(x): x for x in self._homes}.values():
            keeper.forked.clear()
            keeper.hellos.clear()
        for keeper, greeting in zip(self._homes, greetings, strict=True):
            keeper.tell(fork=greeting.to_json())
        began_s = time.monotonic()
        try:
            found = [
                self._started(w, keeper, began_s, START_S) for w, keeper in enumerate(self._homes)
            ]
        except BaseException:
            for worker, keeper in enumerate(self._homes):
                if worker in keeper.forked:
                    keeper.tell(kill=keeper.forked[worker])
            raise
        self._pids = [hello.pid for hello in found]
        return found

    def places_again(self, workers: Sequence[int]) -> Sequence[str] | None:
        for k, keeper in list(self._keepers.items()):
            if any(self._homes[w] is keeper for w in workers) and not keeper.answers():
                self._lose(k)
        found: dict[int, int] = {}
        while True:
            self.tend()
            for w in workers:
                place = None if w in found else self._place_for(w, workers, found)
                if place is not None:
                    found[w] = place
            if len(found) == len(workers):
                break
            if not self._ready or self._waited():
                return None
            self._hear_spare(0.1)
        self._avoided.clear()
        self._lacking_s = None
        for w, k in found.items():
            if self._homes[w] is not self._keepers[k]:
                log.warning("worker %d is made anew on host %s", w, self._hosts[k].address)
                self._homes[w], self._pids[w] = self._keepers[k], _NOBODY
        return [self._homes[w].host.address for w in workers]

    def _place_for(self, w: int, workers: Sequence[int], found: Mapping[int, int]) -> int | None:
        """A host with a program that is ready, and room; that of the worker before others.

        Args:
            w: The worker.
            workers: All that are to be made anew.
            found: The hosts of some of them.
        """
        taken = [id(keeper) for v, keeper in enumerate(self._homes) if v not in workers]
        taken += [id(self._keepers[k]) for k in found.values()]
        home = self._homes[w]
        room = [
            k
            for k, keeper in self._keepers.items()
            if keeper.ready is not None and taken.count(id(keeper)) < self._hosts[k].workers
        ]
        for k in sorted(
            room,
            key=lambda k: (k in self._avoided, self._keepers[k] is not home, self._order(k)),
        ):
            keeper = self._keepers[k]
            if keeper is not home:  # nobody has looked at it for a while
                keeper.suspect = True
            if keeper.answers():
                return k
            self._lose(k)
        return None

    def _hear_spare(self, wait_s: float) -> None:
        """Wait a moment for programs on hosts to become ready."""
        select.select([*self._keepers.values()], [], [], wait_s)

    def start_again(self, greetings: Sequence[Greeting]) -> Sequence[Hello] | None:
        homes = [self._homes[greeting.worker] for greeting in greetings]
        for keeper, greeting in zip(homes, greetings, strict=True):
            keeper.forked.pop(greeting.worker, None)
            keeper.tell(fork=greeting.to_json())
        began_s = time.monotonic()
        found = []
        for keeper, greeting in zip(homes, greetings, strict=True):
            hello = self._started(greeting.worker, keeper, began_s, _FORK_S)
            self._pids[greeting.worker] = hello.pid
            found.append(hello)
        return found

    def _started(self, worker: int, keeper: Keeper, began_s: float, wait_s: float) -> Hello:
        """What a worker says first; deaths of others, which may be told late, are not its own.

        Args:
            worker: Its number.
            keeper: Of its host.
            began_s: When it was asked for.
            wait_s: How long after that it may say nothing.

        Raises:
            GeartrainError: It has ended before, or says nothing for too long.
        """
        at = keeper.host.address
        while True:
            pid = keeper.forked.get(worker, -1)
            if pid in keeper.hellos:
                return keeper.hellos.pop(pid)
            if pid in keeper.died:
                raise GeartrainError(
                    f"worker {worker} could not begin on host {at}; see what it printed"
                )
            left = began_s + wait_s - time.monotonic()
            if left <= 0.0:
                keeper.suspect = True
                raise GeartrainError(
                    f"worker {worker} has not come up on host {at} in {wait_s:g} s: the host does "
                    "not answer, or is too busy to start a process"
                )
            select.select([keeper], [], [], min(left, 0.5))
            keeper.listen()

    def deaths(self, wait_s: float = 0.0) -> Mapping[int, str]:
        until = time.monotonic() + wait_s
        while True:
            found = self._deaths()
            left = until - time.monotonic()
            if found or left <= 0.0:
                return found
            some = {id(keeper): keeper for keeper in self._homes if not keeper.closed}
            select.select([*some.values()], [], [], left)

    def _deaths(self) -> dict[int, str]:
        found = {}
        for worker, (keeper, pid) in enumerate(zip(self._homes, self._pids, strict=True)):
            try:
                keeper.listen()
            except GeartrainError as error:
                found[worker] = f"has ended, as {error}"
            else:
                if pid in keeper.died:
                    how, more = how_ended(keeper.died[pid])
                    found[worker] = f"{how}{more}"
        return found

    def suspect(self, worker: int) -> None:
        self._homes[worker].suspect = True

    def avoid(self, worker: int) -> None:
        home = self._homes[worker]
        self._avoided |= {k for k, keeper in self._keepers.items() if keeper is home}

    def kill(self, worker: int) -> None:
        self._homes[worker].tell(kill=self._pids[worker])

    def forget(self) -> None:
        for keeper, pid in zip(self._homes, self._pids, strict=False):
            keeper.tell(kill=pid)
        self._homes, self._pids = [], []

    def close(self) -> None:
        """End the programs on all hosts."""
        for keeper in self._keepers.values():
            keeper.close()
        self._keepers = {}
        self._homes, self._pids = [], []

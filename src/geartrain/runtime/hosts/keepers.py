"""Hosts by a program on each, started by a command of yours: ssh, ip netns exec, or none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Final, final

from geartrain.errors import GeartrainError
from geartrain.runtime.base import log
from geartrain.runtime.hosts.launcher import START_S, AbstractLauncher
from geartrain.runtime.hosts.program import Host, Keeper
from geartrain.runtime.hosts.worker import Greeting, Hello
from geartrain.runtime.processes.pool import how_ended

_TRY_S: Final = 2.0
"""Between two trials to start a program on a host."""
BACK_S: Final = 60.0
"""So long one waits for a host where a worker can be made anew, if nothing else is said."""
_FORK_S: Final = 30.0
"""Until a worker is there, of a program that was ready."""
_NOBODY: Final = -1
"""In the place of a process."""


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
    renews = True

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
        self._begun_s: dict[int, float] = {}  # when a worker was last to be started anew
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
                    wait([keeper.fileno()], min(left, 1.0))
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
        return self._placed(workers, found)

    def at_hand(self, workers: Sequence[int]) -> Sequence[str] | None:
        for k, keeper in list(self._keepers.items()):
            wanted = k not in self._avoided and any(self._homes[w] is keeper for w in workers)
            if wanted and not self._seems_there(k, keeper) and k in self._keepers:
                return None  # its answer tells whether anybody has to move
        found: dict[int, int] = {}
        for w in workers:
            place = self._place_for(w, workers, found, waits=False)
            if place is None:
                return None
            found[w] = place
        return self._placed(workers, found)

    def _placed(self, workers: Sequence[int], found: Mapping[int, int]) -> list[str]:
        """Workers are to be made anew on these hosts; their addresses."""
        self._avoided.clear()
        self._lacking_s = None
        for w, k in found.items():
            if self._homes[w] is not self._keepers[k]:
                log.warning("worker %d is made anew on host %s", w, self._hosts[k].address)
                self._homes[w], self._pids[w] = self._keepers[k], _NOBODY
        return [self._homes[w].host.address for w in workers]

    def _place_for(
        self, w: int, workers: Sequence[int], found: Mapping[int, int], *, waits: bool = True
    ) -> int | None:
        """A host with a program that is ready, and room; that of the worker before others.

        Args:
            w: The worker.
            workers: All that are to be made anew.
            found: The hosts of some of them.
            waits: For the answer of a program that may not be there.
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
            if waits:
                if keeper is not home:  # nobody has looked at it for a while
                    keeper.suspect = True
                if keeper.answers():
                    return k
                self._lose(k)
            elif self._seems_there(k, keeper):
                return k
        return None

    def _seems_there(self, k: int, keeper: Keeper) -> bool:
        """Whether a program is there, by what is known now; one that is not is given up."""
        try:
            if keeper.seems_there():
                return True
            if not keeper.overdue:
                return False
            keeper.suspect = True
        except GeartrainError as error:
            log.warning("%s", error)
        self._lose(k)
        return False

    def _hear_spare(self, wait_s: float) -> None:
        """Wait a moment for programs on hosts to become ready."""
        wait([k.fileno() for k in self._keepers.values()], wait_s)

    def begin_again(self, greetings: Sequence[Greeting]) -> None:
        for greeting in greetings:
            keeper = self._homes[greeting.worker]
            keeper.forked.pop(greeting.worker, None)
            keeper.tell(fork=greeting.to_json())
            self._begun_s[greeting.worker] = time.monotonic()

    def begun(self, worker: int) -> bool | None:
        keeper = self._homes[worker]
        try:
            keeper.listen()
        except GeartrainError as error:
            log.warning("%s", error)
            return None
        pid = keeper.forked.get(worker, _NOBODY)
        if pid in keeper.hellos:
            return True
        late = time.monotonic() > self._begun_s[worker] + _FORK_S
        if pid in keeper.died or keeper.overdue or late:
            keeper.suspect |= pid not in keeper.died
            return None
        return False

    def hellos_again(self, workers: Sequence[int]) -> Sequence[Hello]:
        found = []
        for w in workers:
            found.append(self._started(w, self._homes[w], self._begun_s[w], _FORK_S))
            self._pids[w] = found[-1].pid
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
            wait([keeper.fileno()], min(left, 0.5))
            keeper.listen()

    def deaths(self, wait_s: float = 0.0) -> Mapping[int, str]:
        until = time.monotonic() + wait_s
        while True:
            found = self._deaths()
            left = until - time.monotonic()
            if found or left <= 0.0:
                return found
            some = {id(keeper): keeper for keeper in self._homes if not keeper.closed}
            wait([keeper.fileno() for keeper in some.values()], left)

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
        for w, (keeper, pid) in enumerate(zip(self._homes, self._pids, strict=False)):
            for each in {pid, keeper.forked.get(w, pid)}:  # one that was to take its place, too
                keeper.tell(kill=each)
        self._homes, self._pids = [], []

    def close(self) -> None:
        """End the programs on all hosts."""
        for keeper in self._keepers.values():
            keeper.close()
        self._keepers = {}
        self._homes, self._pids = [], []

"""Workers on hosts as a pass sees them: nothing in common, all by tcp, watched by asking.

launcher    who has ended, and how, where its host can say so
pulse       who does not answer: stopped, or the host or the link is gone
"""

from __future__ import annotations

import json
import math
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from geartrain.engine.firing import Firing
from geartrain.errors import GeartrainError, WorkerDiedError
from geartrain.runtime.base import log
from geartrain.runtime.hosts.control import CLOCK, WAIT_S, RemoteMember, Switchboard
from geartrain.runtime.hosts.launcher import AbstractLauncher
from geartrain.runtime.hosts.near import Meeting
from geartrain.runtime.hosts.worker import Greeting, Hello
from geartrain.runtime.processes.members import AbstractPool, death
from geartrain.runtime.processes.memory import Apart, SharedTensors, dumps
from geartrain.transport.keys import Keys
from geartrain.transport.link import Transport
from geartrain.transport.pulse import DEAD_S, Pulse

_LOOK_S: Final = 0.5
_REACHED_S: Final = 20.0
_END_S: Final = 5.0
_ASK_S: Final = 0.02  # between two looks at whether newcomers are there
_CLOCKS: Final = 8  # questions for a worker's clock
_NEAR_ENOUGH_S: Final = 0.001


@final
class RemotePool(AbstractPool):
    """So many workers on hosts.

    Args:
        launcher: Starts them.
        workers: How many.
        address: Of this host, as the workers reach it.
        path: Where this process finds modules.
        kind: The runtime's name, for errors.
        plain: Whether tcp goes without keys.
        again: Whether these are in place of others that were reached.
        meets: Whether socket files serve a pass if all workers are on this host.

    Raises:
        GeartrainError: They could not be started, or cannot be reached.
        WorkerDiedError: They take the place of others, and cannot be reached now.
    """

    members: list[RemoteMember]
    shares = False

    def __init__(
        self,
        launcher: AbstractLauncher,
        workers: int,
        address: str,
        path: Sequence[str],
        kind: str,
        *,
        plain: bool = False,
        again: bool = False,
        meets: bool = True,
    ) -> None:
        self.shared = SharedTensors()
        self._launcher, self._address, self._kind = launcher, address, kind
        self._n, self._generation, self._again = workers, 0, again
        self._nodes: Mapping[int, str] = {}
        self._last: dict[int, tuple[Firing, float]] = {}
        self._looked_s = 0.0
        self.gone: set[int] = set()
        self._keys = None if plain else Keys.make()
        self._path = tuple(path)
        self._binds = [*launcher.binds()]
        self._publics: dict[int, bytes] = {}
        self._told: dict[int, str] = {}  # the same and our own, as workers are told
        if self._keys is not None:
            self._told[workers] = self._keys.public.decode()
        self._ahead_s = [0.0] * workers
        self._near: set[int] = set()
        self._controls: list[Transport] = []  # one for all workers that were started together
        self._coming: dict[int, Transport] = {}  # to workers that are to be anew
        self._asked_s = 0.0  # when it was last looked whether they are there
        self._modules: dict[str, None] = {}  # that workers had to import, in their order
        self._meeting = Meeting() if meets and not plain else None
        self._end = weakref.finalize(
            self, _end, self._controls, launcher, self._meeting, os.getpid()
        )
        self.members = []
        try:
            control = self._control()
            self._welcome(control, launcher.start(self._greetings(range(workers), control)))
        except BaseException:
            self._end()
            raise

    def _transport(self, generation: int, pulse: Pulse) -> Transport:
        return Transport(
            self._n,
            self._n + 1,
            f"tcp://{self._address}:*",
            generation,
            keys=self._keys,
            plain=self._keys is None,
            pulse=pulse,
        )

    def _control(self) -> Transport:
        """For workers that are started together."""
        control = self._transport(0, Pulse(asks=True))
        self._controls.append(control)
        return control

    def _greetings(self, workers: Sequence[int], control: Transport) -> list[Greeting]:
        near = None if self._meeting is None else self._meeting.near
        public = None if self._keys is None else self._keys.public.decode()
        more = self._path, near, tuple(self._modules)
        return [
            Greeting(w, self._n, self._binds[w], control.address, public, *more) for w in workers
        ]

    def _welcome(self, control: Transport, hellos: Sequence[Hello]) -> None:
        """Connect with workers that have been started, and have them connect."""
        publics = {h.worker: h.public.encode() for h in hellos if h.public is not None}
        control.connect({h.worker: h.address for h in hellos}, publics or None)
        board = Switchboard(control, self._n)
        for hello in hellos:
            w = hello.worker
            self.members[w : w + 1] = [RemoteMember(w, hello.pid, hello.where, board, self._told)]
            self.members[w].send(b"welcome")
        self._publics |= publics
        self._told |= {w: key.decode() for w, key in publics.items()}
        workers = {hello.worker for hello in hellos}
        self._near = self._near - workers | {h.worker for h in hellos if h.near}
        self.gone -= workers
        until = time.monotonic() + _REACHED_S
        for hello in hellos:
            self._await(hello.worker, hello, until)
        for hello in hellos:
            self._ahead_s[hello.worker] = self._measured(hello.worker, hello, until)

    @property
    def _folder(self) -> Path | None:
        """Of socket files, if all are near."""
        all_near = self._meeting is not None and len(self._near) == self._n
        return self._meeting.folder if all_near and self._meeting is not None else None

    def _measured(self, w: int, hello: Hello, until: float) -> float:
        """How far this clock is ahead of a worker's, by the quickest of some answers.

        It is wrong by half of what the way there and back took at most (Cristian 1989).
        """
        best_s, ahead_s, member = math.inf, 0.0, self.members[w]
        for _ in range(_CLOCKS):
            asked_s = time.perf_counter()
            member.send(CLOCK)
            told = json.loads(self._await(w, hello, until))["clock"]
            heard_s = time.perf_counter()
            if heard_s - asked_s < best_s:
                best_s, ahead_s = heard_s - asked_s, (asked_s + heard_s) / 2 - told
            if best_s < _NEAR_ENOUGH_S:
                break
        member.send(b"")
        return ahead_s

    def _await(self, w: int, hello: Hello, until: float) -> bytes:
        """The next message of a worker."""
        while (content := self.members[w].board.take(w, WAIT_S)) is None:
            self._look()
            if time.monotonic() > until:
                self._raise_unreached(w, self.members[w], hello)
        return content

    def ahead_s(self, worker: int) -> float:
        return self._ahead_s[worker]

    def _raise_unreached(self, w: int, member: RemoteMember, hello: Hello) -> None:
        if self._again:  # a link that is cut may be mended; a call that goes on tries again
            self._launcher.suspect(w)
            how = f"cannot be reached at {hello.address}"
            raise death(f"worker {w}, made anew on {member.where}, {how}", w)
        control = member.board.transport
        if control.reached(w):
            raise GeartrainError(
                f"worker {w} on {member.where} was reached, but does not reach this process at "
                f"{control.address}: give gt.{self._kind}(..., address=...), an address of "
                "this host that the others can reach, and let tcp through to it"
            )
        raise GeartrainError(
            f"worker {w} on {member.where} listens at {hello.address}, which cannot be reached "
            "from here: give an address of that host that the others can reach, and let tcp "
            "through to it (all ports that programs are given by the system)"
        )

    @property
    def alive(self) -> bool:
        if not self._end.alive:
            return False
        return not (self._ended() or self._lost())

    def _lost(self) -> tuple[int, ...]:
        """Workers that do not answer any more."""
        lost = {id(control): control.lost() for control in self._controls}
        return tuple(
            w
            for w, member in enumerate(self.members)
            if w not in self.gone and w in lost[id(member.board.transport)]
        )

    def begin(self, nodes: Mapping[int, str]) -> None:
        self._nodes, self._last = nodes, {}

    def place(self) -> tuple[str | None, int]:
        self._generation += 1
        return None if self._folder is None else str(self._folder), self._generation

    def transport(self, place: tuple[str | None, int]) -> Transport:
        if self._folder is not None:
            return Transport(self._n, self._n + 1, self._folder, place[1])
        transport = self._transport(place[1], Pulse(asks=False))
        transport.admit(self._publics)
        return transport

    def join(self, transport: Transport, told: Sequence[Mapping[str, Any]]) -> bytes:
        if self._folder is not None:
            return json.dumps({"addresses": {}}).encode()
        self._modules |= {name: None for answer in told for name in answer.get("modules", ())}
        theirs = {w: answer["address"] for w, answer in enumerate(told)}
        transport.connect(theirs, self._publics if self._publics else None)
        return json.dumps({"addresses": {**theirs, self._n: transport.address}}).encode()

    def tidy(self, place: tuple[str | None, int]) -> None:
        if self._folder is not None:  # a worker may be killed before it has come to that
            for w in range(self._n):
                (self._folder / f"{w}.{place[1]}").unlink(missing_ok=True)

    def dumps(self, thing: object, apart: Apart | None = None) -> bytes:
        return dumps(thing, self.shared, apart)

    def reported(self, worker: int, firing: Firing) -> None:
        self._last[worker] = firing, time.monotonic()

    def check(self, wait_s: float = 0.0) -> None:
        until = time.monotonic() + min(wait_s, 2 * self._launcher.told_s)
        while True:
            self._look()
            left = until - time.monotonic()
            if left <= 0.0:
                return
            self._launcher.deaths(min(left, WAIT_S))

    def look(self) -> None:
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._look()

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        self._launcher.tend()
        ended = self._ended()
        lost = () if ended else self._lost()
        if lost:
            ended = self._ended(self._launcher.told_s)
        for w, how in ended.items():
            raise self._death(w, how)
        for w in lost:
            self._launcher.suspect(w)
            how = (
                f"does not answer (for {DEAD_S:.0f} s, or the connection has ended): it is "
                "stopped, or its host or the link to it is gone"
            )
            raise self._death(w, how)

    def _ended(self, wait_s: float = 0.0) -> Mapping[int, str]:
        deaths = self._launcher.deaths(wait_s)
        return {w: how for w, how in deaths.items() if w not in self.gone}

    def bury(self, worker: int) -> None:
        self.gone.add(worker)
        self._launcher.kill(worker)

    def avoid(self, worker: int) -> None:
        self._launcher.avoid(worker)

    def ready_to_renew(self) -> bool:
        launcher, now_s = self._launcher, time.monotonic()
        if not launcher.renews:
            return True
        if now_s < self._asked_s + _ASK_S:
            return False
        self._asked_s = now_s
        self._give_up_the_lost()
        fresh = sorted(self.gone - self._coming.keys())
        places = launcher.at_hand(fresh) if fresh else ()
        if places is None:
            return False
        self._greet(fresh, places)
        return all(launcher.begun(w) for w in self.gone)

    def _greet(self, workers: Sequence[int], places: Sequence[str]) -> None:
        """Start workers anew on hosts; it waits for nothing."""
        if not workers:
            return
        for w, place in zip(workers, places, strict=True):
            self._binds[w] = place
        control = self._control()
        self._launcher.begin_again(self._greetings(workers, control))
        self._coming |= dict.fromkeys(workers, control)

    def _give_up_the_lost(self) -> None:
        """Of workers that are to be anew: wait no more for those that will not come."""
        for w in [w for w in self._coming if self._launcher.begun(w) is None]:
            del self._coming[w]

    def renew(self) -> bool:
        if not self.alive:
            return False
        for control in self._controls:
            for w in self.gone:
                if self._coming.get(w) is not control:
                    control.forget(w)
        self._give_up_the_lost()
        late = sorted(self.gone - self._coming.keys())
        try:
            if late:
                places = self._launcher.places_again(late)
                if places is None:
                    return False
                self._greet(late, places)
            for control in {id(each): each for each in self._coming.values()}.values():
                some = [w for w, its in self._coming.items() if its is control]
                self._welcome(control, self._launcher.hellos_again(some))
        except GeartrainError as error:  # all are started again, perhaps elsewhere
            log.warning("%s", error)
            return False
        self._coming.clear()
        used = {id(member.board.transport) for member in self.members}
        for control in [each for each in self._controls if id(each) not in used]:
            control.close()
            self._controls.remove(control)
        return True

    def _death(self, w: int, how: str) -> WorkerDiedError:
        if not self.members:
            return death(f"worker {w} {how}, as it began", w)
        member = self.members[w]
        return death(
            f"worker {w} (process {member.pid} on {member.where}) {how}{self._last_of(w)}", w
        )

    def _last_of(self, w: int) -> str:
        """What it was known to be at."""
        if w not in self._last:
            return ", before it had fired anything"
        firing, at = self._last[w]
        way = "forward" if firing.forward else "backward"
        ago = time.monotonic() - at
        return f", last heard of {ago:.1f} s ago, after firing '{firing.node}' {way}"

    def close(self, *, busy: bool = False) -> None:
        alive = self._end.alive
        pids = len(self.members)
        if alive and busy:
            for w in range(pids):
                self._launcher.kill(w)
        if alive:
            _close(self._controls)
            until = time.monotonic() + _END_S
            while len(self._launcher.deaths(WAIT_S)) < pids and time.monotonic() < until:
                time.sleep(0.01)
        self._end()


def _close(controls: Sequence[Transport]) -> None:
    for control in controls:
        control.close()


def _end(
    controls: Sequence[Transport],
    launcher: AbstractLauncher,
    meeting: Meeting | None,
    owner: int,
) -> None:
    """Idle workers end as nobody asks any more; others are killed."""
    if os.getpid() == owner:
        _close(controls)
        launcher.forget()
        if meeting is not None:
            meeting.close()

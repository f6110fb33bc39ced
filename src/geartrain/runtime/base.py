"""What a runtime is: it delivers events, carries out effects, waits, and decides nothing.

The contract, which one test suite checks for every runtime:

1. ``run`` returns when the feeder is exhausted and every admitted instance has finished.
2. Batches from one worker to another arrive in the order they were sent. What a firing says to the
   controller is settled before any of its batches travels on; the controller's word on finished
   instances reaches every worker before rows that were fed after it. Where nothing hangs on either
   (``Ahead.may_go``), both may come later: rows wait at worker processes ahead of time.
3. The first failure stops the run and is raised to the caller, later ones as its notes; nothing is
   left running. No wait is without a bound.
4. Where the engine has copies of the model, letters arrive in order too, and ``run`` returns when
   all have been taken or lost and nothing that waits for letters is left.
5. When nothing can move and instances are unfinished, ``StuckError`` tells who waits for what.
6. After Ctrl-C or SIGTERM the data are not waited for any more, and what is in flight finishes;
   after a second Ctrl-C nothing of the user's code is waited for. ``Interruptible`` hears them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, Protocol, final

import numpy as np
import torch

from geartrain.bounds import MOST_WORKERS, WORKERS, require_at_most, require_number, require_whole
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.router import Outbox
from geartrain.errors import DataError
from geartrain.frames.columns import Columns
from geartrain.frames.instance import InOrder, Instance
from geartrain.frames.packed import Packed
from geartrain.frames.packer import Packer
from geartrain.parts.trained import StepTaken
from geartrain.sharing.locks import MakeLock, NoLock

log = logging.getLogger("geartrain.runtime")

OnBadInstance = Literal["raise", "skip"]

_END: Final = object()


class Watch(Protocol):
    """Told what happens, with the runtime's clock; never steers. Calls come one at a time."""

    def fired(self, worker: int, firing: Firing, start_s: float, end_s: float) -> None:
        """A firing is over."""

    def stepped(self, worker: int, step: StepTaken, now_s: float) -> None:
        """A part has stepped."""

    def finished(self, engine: Engine, now_s: float) -> None:
        """Instances have finished."""

    def waited(self, worker: int, seconds: float) -> None:
        """A worker has had nothing to do for so long in this pass; told at its end."""

    def left(self, worker: int | None, how: str, unfinished: int, now_s: float) -> None:
        """A worker has died, and the others go on without its copies of the model.

        Args:
            worker: Its number; None: it is not known, or all.
            how: Who has died, and of what.
            unfinished: Instances that were in flight there, and are fed again to others.
            now_s: In the pass.
        """

    def joined(self, worker: int, copies: Sequence[int], now_s: float) -> None:
        """Copies of the model on a worker take part from now on that did not before."""

    def carried(self, sender: int, receiver: int, messages: int, nbytes: int) -> None:
        """So much went between two processes in this pass; told at its end.

        Args:
            sender, receiver: Workers; as many as there are: the controller's process.
            messages, nbytes: As they are on the wire.
        """


class AbstractDoor(Protocol):
    """Where instances are admitted: the controller, or one copy of the model."""

    packer: Packer
    one_by_one: bool
    whole: bool
    """Whether all that are wanted go in together: a minibatch, which nothing cuts."""

    def want(self) -> int: ...

    def admit(self, instances: Sequence[Instance] | Packed) -> Outbox: ...


class AbstractFeeder(ABC):
    """Gives instances to an engine when there is room for them.

    Attributes:
        taken: Instances pulled, skipped ones among them.
        skipped: Instances that were refused.
        exhausted: Whether nothing more is admitted.
        source_ended: Whether that is the end of the data.
        closed: Whether that is because somebody asked for the end.
        waits_for_nobody: Whether the data are a list: to ask for the next ones takes no longer than
            to make them, and what they are hangs on nothing that training has yet to do.
        left: Instances that are still to come, where the data are a list; else 0.
    """

    taken = 0
    skipped = 0
    exhausted = False
    source_ended = False
    closed = False
    waits_for_nobody = False
    left = 0
    outside: AbstractContextManager[object] = nullcontext()

    def close(self) -> None:
        """Admit nothing more, and ask the data for nothing more."""
        self.closed = self.exhausted = True

    def surround(self, outside: AbstractContextManager[object]) -> None:
        """Have the user's code that gives instances run inside of this.

        ``KeyboardInterrupt`` may be raised there once the feeder is closed: what the data were
        about to give is then left out, and not counted.

        Args:
            outside: Entered once for each admission that runs such code.
        """
        self.outside = outside

    def pause(self) -> None:
        """Admit nothing more in this pass: another one follows, with what is left of the data."""
        self.exhausted = True

    def look_ahead(self, engine: Engine) -> None:  # noqa: B027 - most have nothing to look at
        """A pass is about to begin: make ready what may be admitted first, as nobody waits for it
        now."""

    @abstractmethod
    def admit(self, engine: Engine) -> Outbox | None:
        """Admit as many as the controller wants; None when there is nothing to admit now.

        Raises:
            DataError: An instance is refused and the policy is to raise.
        """


@final
class Feeder(AbstractFeeder):
    """Instances for one pass, pulled when there is room for them.

    Args:
        instances: Pulled one by one.
        on_bad: ``raise`` on an instance that is refused, or ``skip`` it: counted and logged.
        limit: Most instances to pull, or None. Where minibatches go in whole, one that has been
            begun is filled all the same.
    """

    def __init__(
        self,
        instances: Iterator[Instance],
        on_bad: OnBadInstance = "raise",
        limit: int | None = None,
    ) -> None:
        self._instances, self._on_bad = instances, on_bad
        self._left = limit
        self._block = PackedAhead(instances) if isinstance(instances, InOrder) else None
        self.waits_for_nobody = self._block is not None
        self._fed, self._admitted = Outbox(), 0  # of a minibatch that is not whole yet

    @property
    def left(self) -> int:  # type: ignore[override]
        if self._block is None or self.exhausted:
            return 0
        left = self._block.left
        return left if self._left is None else min(left, self._left)

    @property
    def begun(self) -> bool:
        """Whether instances were admitted that ``feed`` has not handed over: the data block."""
        return self._admitted > 0

    def look_ahead(self, engine: Engine) -> None:
        door = engine.controller
        if self._block is not None and not (self.exhausted or door.one_by_one):
            self._block.look_ahead(door.want() * door.copies, door.packer)

    def admit(self, engine: Engine) -> Outbox | None:
        return self.feed(engine.controller)

    def feed(self, door: AbstractDoor) -> Outbox | None:
        """Admit as many as are wanted at a door; None when there is nothing to admit now.

        Raises:
            DataError: An instance is refused and the policy is to raise.
        """
        wanted = 0 if self.exhausted else door.want()
        while self._admitted < wanted and self._goes_on(door):
            n, taken = wanted - self._admitted, self.taken
            if self._left is not None and not door.whole:
                n = min(n, self._left)
            self._admitted += self._feed_some(door, n, self._fed)
            if (self._admitted and not door.whole) or self.taken == taken:
                break
        self.exhausted |= self._left is not None and self._left <= 0
        fed, admitted = self._fed, self._admitted
        self._fed, self._admitted = Outbox(), 0
        return fed if admitted else None

    def _goes_on(self, door: AbstractDoor) -> bool:
        """Whether more may be pulled for what is admitted together."""
        if self.source_ended:
            return False
        if self.begun and door.whole:
            return not self.exhausted or self._block is not None  # what is in memory makes it whole
        return not self.exhausted and (self._left is None or self._left > 0)

    def _feed_some(self, door: AbstractDoor, n: int, fed: Outbox) -> int:
        """Pull up to n instances, and admit those that are good; returns how many were."""
        if door.one_by_one:
            n = 1
        elif self._block is not None and (packed := self._block.take(n, door.packer)) is not None:
            self._count(len(packed))
            fed.add(door.admit(packed))
            return len(packed)
        batch = self._take(n)
        if not batch:
            return 0  # the source has ended, or all of them were skipped
        try:
            fed.add(door.admit(batch))
        except DataError:
            if self._on_bad == "raise":
                raise
            return self._admit_singly(door, batch, fed)
        return len(batch)

    def _count(self, taken: int) -> None:
        self.taken += taken
        if self._left is not None:
            self._left -= taken

    def _take(self, n: int) -> list[Instance]:
        if self._block is not None and self._block.loose:
            n = min(n, self._block.loose)
            self._block.loose -= n
        try:
            with self.outside:
                batch, refused, ended = self._pull(n)
        except (KeyboardInterrupt, Exception) as error:
            if not (self.closed and _came_of_an_interrupt(error)):
                raise  # the user's own
            if not isinstance(error, KeyboardInterrupt):
                log.warning("interrupted, the data raised %s: %s", type(error).__name__, error)
            return []
        self._count(len(batch) + refused)
        self.skipped += refused
        self.source_ended |= ended
        self.exhausted |= ended
        return batch

    def _pull(self, n: int) -> tuple[list[Instance], int, bool]:
        """Up to n instances, how many more were refused, and whether the data have ended."""
        batch: list[Instance] = []
        refused = 0
        for _ in range(n):
            try:
                instance = next(self._instances, _END)
            except DataError as error:
                if self._on_bad == "raise":
                    raise
                refused += 1
                log.warning("skipped: %s", error)
                continue
            if instance is _END:
                return batch, refused, True
            if not isinstance(instance, Instance):
                raise DataError(
                    f"the data gave a {type(instance).__name__}; it gives gt.Instance objects: "
                    "pass reading=Reading(convert=...) to turn yours into them"
                )
            batch.append(instance)
            if self.closed:
                break
        return batch, refused, False

    def _admit_singly(self, door: AbstractDoor, batch: list[Instance], fed: Outbox) -> int:
        admitted = 0
        for instance in batch:
            try:
                fed.add(door.admit([instance]))
                admitted += 1
            except DataError as error:
                self.skipped += 1
                log.warning("skipped: %s", error)
        return admitted


def _came_of_an_interrupt(error: BaseException | None) -> bool:
    """Whether it is an interrupt, or was raised on one's way out, as by a lock just let go of."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@final
class PackedAhead:
    """Instances of a list, packed some way ahead of their admission.

    A block holds as many instances as are wanted, and once their bytes are known, several times as
    many, up to 1024 of 1 MiB together; the first ones fewer, as those who begin with them wait. One
    that cannot be packed is left to be taken instance by instance, so that an error comes with the
    instance that it is about.

    Args:
        instances: Taken in their order.
    """

    def __init__(self, instances: InOrder) -> None:
        self._instances = instances
        self._packed: Packed | None = None
        self._at = 0
        self._size = 1
        self.loose = 0  # instances that are left to be taken singly

    @property
    def left(self) -> int:
        """How many have not been taken."""
        return self._instances.left

    def look_ahead(self, n: int, packer: Packer) -> None:
        """Pack the first n instances, before any has been taken."""
        if n and self._packed is None and not self.loose:
            self._packed = self._pack(n, packer)

    def take(self, n: int, packer: Packer) -> Packed | None:
        """The next instances, up to n; None: they are loose, or there are none."""
        if self.loose:
            return None
        if self._packed is None or self._at == len(self._packed):
            size = max(n, self._size - self._size % n)  # or a few would go by themselves
            self._packed, self._at = self._pack(size, packer), 0
            if self._packed is None:
                return None
        start = self._at
        self._at = min(start + n, len(self._packed))
        self._instances.skip(self._at - start)
        return self._packed.part(start, self._at)

    def _pack(self, n: int, packer: Packer) -> Packed | None:
        ahead = self._instances
        columns = ahead.items if isinstance(ahead.items, Columns) else None
        places = np.asarray(ahead.places(n), np.int64)
        if not places.size:
            return None
        instances = [] if columns is not None else ahead.ahead(n)
        if columns is not None or {*map(type, instances)} == {Instance}:
            try:
                packed = (
                    packer.pack(instances)
                    if columns is None
                    else packer.pack_columns(columns, places)
                )
            except (DataError, TypeError, ValueError) as error:
                log.debug("%d instances are admitted singly: %s", places.size, error)
            else:
                many = _BLOCK_BYTES * len(packed) // max(1, packed.nbytes())
                self._size = min(_BLOCK, many, _GROWS * len(packed))
                return packed
        self.loose = places.size
        return None


def threads_each(
    kind: str, workers: int, kernel_threads: int | None, patience_s: float = 0.0
) -> int:
    """Threads inside torch's kernels of each worker; None shares out torch's own number.

    Raises:
        ValueError: A number is out of range; names the runtime and its argument.
        TypeError: A number is none, or not whole.
    """
    require_whole(f"{kind}(workers={workers!r})", workers, 1)
    require_at_most(f"{kind}(workers={workers})", workers, MOST_WORKERS, WORKERS)
    if kernel_threads is not None:
        what = f"{kind}(kernel_threads={kernel_threads!r})"
        require_whole(what, kernel_threads, 1, "1 or more, or None for an equal share")
        require_at_most(what, kernel_threads, MOST_WORKERS, WORKERS)
    what = f"{kind}(patience_s={patience_s!r})"
    require_number(what, patience_s, "seconds, 0 or more", least=0)
    return kernel_threads or max(1, torch.get_num_threads() // workers)


_BLOCK = 1024  # instances
_GROWS = 4  # so many times the block before, at most
_BLOCK_BYTES = 1 << 20


class AbstractRuntime(ABC):
    """Carries messages between the workers of an engine."""

    name: str
    workers: int
    virtual = False
    """Whether its seconds are imagined."""

    kernel_threads: int | None = None
    """Threads inside torch kernels of a worker; None: as many as torch's own number."""

    lock: MakeLock | None = NoLock
    """Makes a lock between its workers; None: they have no memory in common."""

    most_deaths = 0
    """How many deaths of workers a call of the session goes on after; 0: the first is raised."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.workers})"

    @abstractmethod
    def run(self, engine: Engine, feeder: AbstractFeeder, watch: Watch) -> float:
        """Feed instances until the feeder is exhausted and all have finished.

        Returns:
            Seconds that it took, by the runtime's clock.

        Raises:
            WorkerError: A node raised.
            StuckError: Nothing can move.
            KeyboardInterrupt: Ctrl-C or SIGTERM; once: what is in flight is finished first; Ctrl-C
                twice: abandoned.
        """

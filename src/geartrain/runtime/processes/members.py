"""Workers in processes of their own, as the parent of a pass and the worker itself see the way
between them, however it was made.

    parent                                  worker
    AbstractPool of AbstractMembers  ◄───►  AbstractChannel       what a pass is, ready, go
    Transport                        ◄═══►  Transport             the pass itself (messages.py)

    forked by a server (pool.py)            memory in common; socket files
    on this or another host (hosts)         nothing in common: weights go there when a pass begins
                                            and come back at its end; tcp
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from geartrain.engine.firing import Firing
from geartrain.errors import GeartrainError, WorkerDiedError
from geartrain.runtime.processes.memory import Apart, SharedRegion, SharedTensors
from geartrain.sharing.locks import AbstractLock
from geartrain.transport.link import Transport


class AbstractMember(ABC):
    """One worker, as the parent sees it.

    Attributes:
        pid: Of its process, where that is.
        meanwhile: Called whenever nothing has moved for a moment while something is waited for.
    """

    pid: int
    meanwhile: Callable[[], None] | None = None

    @abstractmethod
    def hand_over(self, content: bytes, own: bytes) -> None:
        """Send what a pass is; with it whatever memory it needs and has not.

        Args:
            content: As ``AbstractPool.dumps`` has it, the same for all.
            own: What goes apart to this worker, as ``Apart.content`` has it.

        Raises:
            OSError, EOFError: The worker is gone.
        """

    @abstractmethod
    def send(self, content: bytes) -> None:
        """Send a message.

        Raises:
            OSError, EOFError: The worker is gone.
        """

    @abstractmethod
    def hear(self) -> dict[str, Any]:
        """Wait for what ``AbstractChannel.tell`` sends.

        Raises:
            OSError, EOFError: The worker is gone.
        """

    def untaken(self) -> int:
        """Bytes that were sent to it, and that are not known to be there, where that is told."""
        return 0

    def last_words(self) -> str:
        """What the system says of its process, where it is on this host; it prints where it is."""
        return ""


class AbstractPool(ABC):
    """So many workers, made when they are first wanted, watched, ended.

    Attributes:
        members: By number.
        shared: What they have in common memory with the parent; without a region: nothing.
        shares: Whether there may be any: else weights come back at the end of a pass.
        gone: Workers that have died, without which a pass goes on; they are not looked at.
    """

    members: Sequence[AbstractMember]
    shared: SharedTensors
    shares: bool
    gone: set[int]

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can work: it has not been closed, and nobody has died."""

    @abstractmethod
    def begin(self, nodes: Mapping[int, str]) -> None:
        """A pass begins.

        Args:
            nodes: Names by number, to say what a worker was at when it died.
        """

    @abstractmethod
    def place(self) -> tuple[str | None, int]:
        """Where the sockets of a pass that begins are to be.

        Returns:
            A folder, or None: each process binds an address of its own; and their generation.
        """

    @abstractmethod
    def transport(self, place: tuple[str | None, int]) -> Transport:
        """The parent's end for a pass; its number is that of the workers."""

    @abstractmethod
    def join(self, transport: Transport, told: Sequence[Mapping[str, Any]]) -> bytes:
        """All workers are ready: connect with them.

        Args:
            transport: The parent's end.
            told: What each has said of itself when it was ready.

        Returns:
            What each is to be told of the others.
        """

    @abstractmethod
    def dumps(self, thing: object, apart: Apart | None = None) -> bytes:
        """A pickle for the workers.

        Args:
            thing: Whatever cloudpickle can carry.
            apart: What goes beside it, to each worker what it needs.

        Raises:
            Exception: What says that something cannot be pickled, of whatever type.
        """

    @abstractmethod
    def check(self, wait_s: float = 0.0) -> None:
        """Look whether all live and move.

        Args:
            wait_s: Somebody has died, and it may be so long until that is told.

        Raises:
            WorkerDiedError: A worker has died, or is silent, or has been stopped for some seconds.
        """

    @abstractmethod
    def look(self) -> None:
        """As ``check``, but only now and then."""

    @abstractmethod
    def close(self, *, busy: bool = False) -> None:
        """End the processes, and see that they have; the next pass makes new ones.

        Args:
            busy: They may be in the middle of something, and are killed.
        """

    @abstractmethod
    def bury(self, worker: int) -> None:
        """A pass goes on without a worker: end it, if it still lives, and look at it no more."""

    def avoid(self, worker: int) -> None:  # noqa: B027 - may do nothing
        """The link between a worker and another one is cut: a worker elsewhere is better."""

    def ready_to_renew(self) -> bool:
        """Whether ``renew`` would wait for nothing; asked now and then while the others go on.

        Whatever it can do meanwhile it begins.
        """
        return True

    def renew(self) -> bool:
        """Between two passes: start workers in the place of those that are gone.

        Returns:
            Whether that can be; else all are to be started again.
        """
        return not self.gone

    def fileno(self) -> int | None:
        """Something is to be read from it when a worker has died; None: ``look`` alone tells."""
        return None

    def ahead_s(self, worker: int) -> float:
        """How far the clock of this process (``time.perf_counter``) is ahead of a worker's."""
        return 0.0  # one host, one clock

    def reported(self, worker: int, firing: Firing) -> None:  # noqa: B027 - may do nothing
        """The last firing that a worker has told of."""

    def tidy(self, place: tuple[str | None, int]) -> None:  # noqa: B027 - may do nothing
        """A pass is over: remove what its workers may have left, as some may have been killed."""


class AbstractChannel(ABC):
    """The way to the parent, as a worker sees it.

    Attributes:
        regions: Memory that both have, by number.
        shares: Whether there may be any.
    """

    regions: Mapping[int, SharedRegion]
    shares: bool

    @abstractmethod
    def await_pass(self) -> bytes:
        """Wait for the next pass, and return what it is, pickled.

        Raises:
            EOFError, ConnectionError: The parent is gone, or has no more.
        """

    @abstractmethod
    def loads(self, content: bytes) -> Any:
        """What ``AbstractPool.dumps`` wrote."""

    @abstractmethod
    def transport(self, me: int, n: int, place: tuple[str | None, int]) -> Transport:
        """This worker's end for a pass."""

    @abstractmethod
    def join(self, transport: Transport, told: bytes) -> None:
        """Connect with the others, as ``AbstractPool.join`` has said."""

    @abstractmethod
    def note(self, worker: int) -> memoryview:
        """An int64 where a worker writes what it is at, for the parent to see where it can."""

    def lock(self, number: int) -> AbstractLock:
        """The lock of a number, which is one for all workers, where they have memory in common.

        Raises:
            ValueError: They have none.
        """
        raise ValueError(f"lock {number}: workers have nothing in common")

    @abstractmethod
    def tell(self, **what: Any) -> None:
        """Send something that JSON can hold."""

    @abstractmethod
    def hear(self) -> bytes:
        """Wait for a message.

        Raises:
            EOFError, ConnectionError: The parent is gone.
        """

    def check(self) -> None:  # noqa: B027 - may do nothing
        """Look whether the parent is there, where nothing has come for a while.

        Raises:
            EOFError: It is gone.
        """

    def about(self, transport: Transport) -> dict[str, Any]:
        """What the parent has to know before others can reach this transport."""
        return {}


_AGAIN: Final = (
    "the weights are those of the last steps, and a call goes on with new processes: load a "
    "checkpoint to go back, or have the runtime's on_worker_death='restore' do so"
)


def death(how: str, worker: int | None = None) -> WorkerDiedError:
    """The error of a worker that has died.

    Args:
        how: Who, and how.
        worker: Its number; None: it is not known, or all.
    """
    return WorkerDiedError(f"{how}; {_AGAIN}", worker, how)


def raise_missing(
    pool: AbstractPool,
    who: int,
    lost: Collection[int],
    unreached: Mapping[int, str],
    *,
    reached: bool,
) -> None:
    """Processes that live have no connection with one another.

    Args:
        pool: Whose workers these are; the number after theirs is the parent's.
        who: One of them.
        lost: Those with whom it had one.
        unreached: Those with whom it has had none, and their addresses.
        reached: Whether it had in passes before.

    Raises:
        WorkerDiedError: The link between two is cut; a worker elsewhere is better.
        GeartrainError: It never was there.
    """
    names = {len(pool.members): "the parent"}
    first = names.get(who, f"worker {who}")
    for k in lost:
        pool.avoid(min(who, k))
        how = f"the connection between {first} and {names.get(k, f'worker {k}')} has ended"
        raise death(f"{how}, and both live: the link between them was cut", min(who, k))
    for k, address in unreached.items():
        how = f"{first} does not reach {names.get(k, f'worker {k}')} at {address}"
        if reached:
            pool.avoid(min(who, k))
            raise death(f"{how}: the link between them is cut", min(who, k))
        raise GeartrainError(
            f"{how}: hosts have to let tcp through to one another, on all ports that programs are "
            "given by the system"
        )

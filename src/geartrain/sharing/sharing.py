"""How the workers share weights: the seam between an engine and a session, and each way to do it.

    AbstractSharing ── make ──► AbstractSharingState
    what a user writes          who has copies of what, who gets which instance, what is settled
                                when, how copies meet, what ends a pass, what a checkpoint holds

    Alone             every part lives on one worker, which alone has its weights
    PartCopies        so does each copy of a part; copies meet when nothing is in flight
    SharedWeights     every worker has the graph, all with the same weights
    Neighbours        copies of the graph have weights of their own, and talk while they train

Engine, session and runtimes ask the state and know no way by name: a new way is a file with these
two classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, final

from torch import Tensor

from geartrain.graph.graph import Graph
from geartrain.graph.through import Through
from geartrain.parts.part import PartState
from geartrain.parts.trained import AbstractPart, StepTaken
from geartrain.sharing.assignment import AbstractAssignment
from geartrain.sharing.communicator import AbstractCommunicator, Silent
from geartrain.sharing.letters import Letter
from geartrain.sharing.locks import AbstractLock, MakeLock, NoLock
from geartrain.sharing.totals import Totals

Shards: TypeAlias = Literal["static", "pull"]


def _nothing() -> None:
    pass


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """What ``AbstractSharingState.check`` has found in order.

    Args:
        numbers: Of the instance in training that comes next, by part.
        parts: The parts that are not in ``consensus``, as JSON.
        copied: Copies what is to be put back, and returns what puts it back.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    copied: Callable[[], Callable[[], None]] = lambda: _nothing


class AbstractSharing(ABC):
    """A way to share weights, as ``Session(sharing=...)`` takes it; stateless.

    Attributes:
        spreads: Whether parts live on workers one by one, so that they may be placed by hand.
    """

    spreads: ClassVar[bool] = False

    @property
    def may_drain(self) -> bool:
        """Whether it goes together with minibatches: ``Schedule(drain=True)``."""
        return True

    def workers_at_once(self, most: int) -> int | None:
        """How many workers it wants of so many from its first instance on, if it cannot be made
        anew for others later; None: it can."""
        return None

    def splits(self, workers: int) -> bool:
        """Whether every copy of the graph has several of so many workers to itself, so that its
        parts may be placed on these by hand."""
        return False

    @abstractmethod
    def make(
        self,
        graph: Graph,
        parts: Mapping[str, PartState],
        workers: int = 1,
        lock: MakeLock | None = NoLock,
    ) -> AbstractSharingState:
        """The way at work on the parts of a graph.

        Args:
            graph: Holds the modules.
            parts: By name, as the graph has them.
            workers: Of the runtime.
            lock: Makes a lock between them; None: they have no memory in common.

        Raises:
            ValueError: It does not go together with the graph or with the rules of a part.
        """


class AbstractSharingState(ABC):
    """A way to share weights, at work on the parts of one graph; of a session, over all its passes.

    Attributes:
        name: What it is called where a run is announced; empty: nothing.
        parts: The parts that learn, by name.
        copies: Of every node of the graph.
        apart: Whether each copy of the graph has instances of its own, and lives on one worker (k
            mod their number) or, where there are more workers, on several that have no other copy;
            else parts are spread over the workers.
        talks: Whether copies send letters while they train: a pass then ends when none is under way
            or waits, and copies may come and go.
        by_letters: Whether workers need no memory in common: they are told all by messages.
        releases: Whether copies may be left waiting at the end of a pass, so that ``release`` is to
            be asked.
        least: Of copies that talk, that train at least.
        shards: How data are given to copies: ``static`` or ``pull``; None: no copy has its own.
        positions: Instances of this epoch that each copy has taken; empty without shards.
    """

    name: str = ""
    parts: Mapping[str, PartState]
    copies: int = 1
    apart: bool = False
    talks: bool = False
    by_letters: bool = True
    releases: bool = False
    least: int = 1
    shards: Shards | None = None

    def __init__(self) -> None:
        self.positions: list[int] = []

    # For an engine, and in a pass.

    @abstractmethod
    def weights(self, name: str, nodes: Sequence[Through]) -> Sequence[AbstractPart]:
        """What the copies of some nodes compute with, an entry a copy; fresh for each engine.

        Args:
            name: Of their part, as the graph has it.
            nodes: All that use it.
        """

    @abstractmethod
    def assignment(self) -> AbstractAssignment:
        """Which copy gets which instance; fresh for each engine."""

    def communicator(self, parts: Collection[str]) -> AbstractCommunicator:
        """What a worker sends and receives for the parts that live there; fresh for each engine."""
        return Silent()

    def live_on(  # noqa: B027 - may do nothing
        self,
        worker: int,
        workers: int,
        *,
        in_common: bool,
        lock: Callable[[int], AbstractLock] | None = None,
    ) -> None:
        """This process is that of one of so many workers; said before an engine is made in it.

        Args:
            worker, workers: Its number, and how many there are.
            in_common: Whether they have memory in common, and ``in_common()`` lies there.
            lock: Gives the lock of a number, which is one for all of them; None: there is none.
        """

    def live_apart(self, apart: bool) -> None:  # noqa: B027 - may do nothing
        """Whether workers that are all in this process are to be taken for processes: what copies
        of several give to a mean of all goes by letters."""

    def leave_pass(self) -> None:  # noqa: B027 - may do nothing
        """The pass is over in this process: parts are to be given back as all workers have them."""

    def hold(self, parts: Collection[str]) -> None:  # noqa: B027 - may do nothing
        """Of all parts and their copies, these live in this process; said when its engine is
        made."""

    def in_common(self) -> Sequence[Tensor]:
        """Tensors besides those of parts that all processes are to have in one memory."""
        return ()

    def resting(self) -> Any:
        """Nothing moves: what other processes need to know, before ``release``, of the copies that
        live in this one; JSON."""
        return None

    def heard(self, told: Sequence[Any]) -> None:  # noqa: B027 - may do nothing
        """What ``resting`` gave in each process."""

    def give_back(self, *, abandoned: bool) -> Iterator[tuple[dict[str, Tensor], Any]]:
        """What is kept besides parts for copies that live in this process, for ``take_back``.

        Args:
            abandoned: The pass has failed: what waits is dropped.
        """
        yield from ()

    def take_back(self, tensors: Mapping[str, Tensor], document: Any) -> None:  # noqa: B027 - s. a.
        """What ``give_back`` gave in the process where copies have lived."""

    def keeps(self, worker: int, part: str) -> bool:
        """Whether of the workers that compute with a part this is the one that has its state."""
        return True

    def release(self) -> bool:
        """Nothing moves and no letter is under way: let those that wait for letters go on without.

        Returns:
            Whether there was anybody.
        """
        return False

    def set_present(self, copy: int, present: bool) -> None:  # noqa: B027 - may do nothing
        """A copy takes part from now on, or does so no more; between firings."""

    def lose(self, copy: int) -> None:  # noqa: B027 - may do nothing
        """The worker of a copy has died, and what the copy has not sent is gone; between firings,
        where all copies are in this process, else when nothing moves."""

    def lost(self, letter: Letter) -> None:  # noqa: B027 - may do nothing
        """A letter is for a copy whose worker is gone, and is not sent."""

    def mislay(self, letter: Letter) -> None:  # noqa: B027 - may do nothing
        """A copy has sent a letter that died with its worker before it was on its way."""

    def regroup(self) -> None:  # noqa: B027 - may do nothing
        """Nothing moves, and copies may have come or gone: link those that are there."""

    def balance(self, copy: int) -> None:  # noqa: B027 - may do nothing
        """A copy was lost with what it had counted: from what others have counted follows what it
        sent that came, and what was lost on its way to it. Nothing moves, and all is given back."""

    def present(self) -> Sequence[bool]:
        """Which copies take part."""
        return [True] * self.copies

    def going_together(self) -> Collection[int]:
        """Copies none of which begins its shard anew before all of them are through with theirs."""
        return ()

    def settle(self) -> list[StepTaken]:
        """Bring what the steps of a flush have caused to rest, outside of time; steps by that."""
        return []

    def check_settled(self) -> None:  # noqa: B027 - may do nothing
        """Raises:
        LeakError: Letters were neither applied nor counted as dropped or lost.
        """

    def abandon(self) -> None:
        """A pass has failed: forget what was in flight."""
        for part in self.parts.values():
            part.abandon()

    # Between passes.

    @property
    def consensus(self) -> AbstractSharingState:
        """What evaluates, and is saved first: the model that stands for all copies.

        It is in the user's modules; where it is another one than this, ``agree`` writes it.
        """
        return self

    def agree(self, best: int | None = None) -> None:  # noqa: B027 - may do nothing
        """Write the consensus.

        Args:
            best: The copy that stands for all; None: as the way of sharing has it.
        """

    def candidates(self) -> Sequence[int]:
        """The copies of which the one that validates best is to stand for all."""
        return ()

    def restart(self) -> None:  # noqa: B027 - may do nothing
        """The consensus has been given other weights: all go on from it."""

    def epoch_begins(self) -> None:  # noqa: B027 - may do nothing
        """No instance of it has been taken."""

    def epoch_ended(self, epoch: int) -> None:  # noqa: B027 - may do nothing
        """All have agreed, and the epoch is entered in the history."""

    def meet(self, since: int, trained: int, *, now: bool) -> None:  # noqa: B027 - may do nothing
        """Let the copies meet whose time has come; nothing is in flight.

        Args:
            since: Instances trained at the call before.
            trained: Instances trained.
            now: All meet, whatever the time.
        """

    def until_meeting(self, trained: int) -> int | None:
        """Instances until copies meet for which the graph is drained; None: never."""
        return None

    def advice(self) -> str | None:
        """What speaks against training so; None: nothing, or it has been said."""
        return None

    def totals(self) -> Totals | None:
        """What copies have said and done since the beginning; None: they do not talk."""
        return None

    # For checkpoints: what is not in the parts of ``consensus``.

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What is kept besides parts, as tensors by name and JSON.

        Asked where the consensus is another than this; the session adds ``parts`` to the JSON, all
        that ``self.parts`` remember.
        """
        return {}, {}

    def check(self, tensors: Mapping[str, Tensor], document: Any) -> Kept:
        """Look at what ``to_tensors`` gave; nothing is changed.

        Args:
            tensors: By name.
            document: The JSON, and in it ``parts``, which goes into ``Kept.parts`` as it is.

        Returns:
            What the session then puts back, parts first.

        Raises:
            ValueError, CheckpointError: It is damaged, or of another way of sharing.
        """
        return Kept()

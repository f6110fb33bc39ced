"""What copies of a part say to one another while they train.

    own gradient ─► stepping ─► optimiser step ─► stepped ─► letters ─► links ─► inbox
                       └ or held, until letters come                               │
                         (synchronous)                 a step, a mix, letters ◄ received

A copy is a ``Member``. An exchange is called with the member whose turn it is, on that member's
worker; it changes that member alone, and reaches the others by letters. Nothing here waits: a
synchronous method holds its step and says ``waiting``. Where workers are processes, each has an
object of its own, with the other copies as they were when the pass began (``Member.here``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from geartrain.bounds import require_whole
from geartrain.errors import ProtocolError
from geartrain.sharing.letters import Inbox, Letter, Tensors
from geartrain.sharing.locks import AbstractLock
from geartrain.sharing.member import Member


class AbstractExchange(ABC):
    """How copies of one part exchange. Each part has an object of its own, copied from the user's.

    Hooks are called on the worker of the member that they are given, and change it alone. State of
    a member is kept in ``me.tensors`` and ``me.numbers``; state of all in ``self`` is to be guarded
    with ``self.lock``, and empty between segments. Between processes there is none: a lock refuses.

    Args:
        every: Own gradients between two exchanges.
        inbox: How many letters may wait.

    Raises:
        ValueError: ``every`` is not positive.
    """

    bounded: frozenset[str] = frozenset()
    """Kinds of letters that inboxes bound: those that may be dropped or merged without harm."""

    needs_neighbours: ClassVar[bool] = True
    """Whether it follows a topology."""

    in_rounds: bool = False
    """Whether copies wait for one another, so that each is to have as many instances as others."""

    lock: AbstractLock
    """Between the workers; given by the engine before ``prepare``."""

    def __init__(self, every: int = 1, inbox: Inbox | None = None) -> None:
        what = f"{type(self).__name__}(every={every!r})"
        require_whole(what, every, 1, "1 or more own gradients")
        if inbox is not None and not isinstance(inbox, Inbox):
            kind = type(self).__name__
            raise TypeError(f"{kind}(inbox={inbox!r:.80}): give an inbox: Inbox(limit=4)")
        self.every, self.inbox = every, inbox or Inbox()
        self.members: Sequence[Member] = ()

    def prepare(self, members: Sequence[Member]) -> None:
        """Before training, and before every resumed run: look at the members, make their state.

        State that a checkpoint holds is put back after it.

        Raises:
            ValueError: This cannot work with these members; says why.
        """
        self.members = members

    def advice(self) -> str | None:
        """What speaks against training so, as it was prepared, and what to do; None: nothing.

        It is said once, when training begins.
        """
        return None

    def due(self, me: Member) -> bool:
        """Whether this own gradient is one to exchange at."""
        return me.rounds % self.every == 0

    def stepping(self, me: Member, gradients: Tensors) -> Tensors | None:
        """Before an own step.

        Args:
            me: Whose; ``me.rounds`` counts this gradient.
            gradients: Averaged and clipped; copy what is kept.

        Returns:
            What to step with, or None: the step is held, and ``received`` takes it by ``me.apply``.
        """
        return gradients

    def stepped(self, me: Member, gradients: Tensors) -> None:  # noqa: B027 - may do nothing
        """After an own step that was not held; the place to send from."""

    @abstractmethod
    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        """Letters have come. It may step, mix and send.

        It is called between firings, when no row of this part is in flight; where rows always are,
        after a step of the part's own; and at once while it is ``waiting``.
        """

    def waiting(self, me: Member) -> bool:
        """Whether the copy computes nothing until letters come, as synchronous methods do."""
        return False

    def finish(self, members: Sequence[Member]) -> bool:
        """Nothing moves any more and no letter is under way: release what is held.

        It may step and send; it is called again when that has come to rest.

        Args:
            members: Those that live in this process, which alone may be changed; ``self.members``
                are all of them, with their numbers as of now.

        Returns:
            Whether there was anything.
        """
        return False

    def resting(self, me: Member) -> dict[str, float]:
        """Nothing moves: what other processes need to know of a member before ``finish``, besides
        its ``numbers``."""
        return {}

    def heard(self, other: Member, told: Mapping[str, float]) -> None:  # noqa: B027 - may do nothing
        """What ``resting`` said of a member that lives in another process; its numbers are set."""

    def contributed(self, letter: Letter) -> None:
        """A member in another process gives its share to a collective that is kept here."""
        raise ProtocolError(f"{type(self).__name__} of part '{letter.part}' keeps no collective")

    def left(self, me: Member) -> None:  # noqa: B027 - may do nothing
        """A copy takes part no more (``me.present`` is False): nobody may wait for it.

        It is called between firings, in every process, for a copy that has left or whose worker
        has died. Of the others those that are ``here`` may be changed. Until the pass is over,
        which is soon, neighbours are those that they were.
        """

    def joined(self, me: Member) -> None:  # noqa: B027 - may do nothing
        """A copy takes part (again); it has been given weights and optimiser of one of those
        present."""

    def regrouped(self) -> None:  # noqa: B027 - may do nothing
        """Nothing is under way, and copies have come or gone since members were last looked at:
        their ``neighbours`` and ``senders`` are other ones."""

    def abandoned(self, members: Sequence[Member]) -> None:  # noqa: B027 - may do nothing
        """The run has failed, letters under way are lost: forget what was held or awaited."""

    def check(self, members: Sequence[Member]) -> None:
        """What a checkpoint keeps of these members has been put back, for a look.

        Raises:
            ValueError: It cannot be what members keep between two segments.
        """
        if held := [m.index for m in members if self.waiting(m)]:
            raise ValueError(f"copies {held[:8]} wait for letters that nobody has sent")

    def loaded(self, members: Sequence[Member]) -> None:  # noqa: B027 - may do nothing
        """What a checkpoint keeps of these members has been put back, for good."""

    def consensus(self, members: Sequence[Member]) -> Sequence[Tensor] | None:
        """The weights that stand for all, by parameter; None: as the user's setting says."""
        return None

    def restarted(self, members: Sequence[Member]) -> None:  # noqa: B027 - may do nothing
        """All copies have been given equal weights: whatever is kept of the old ones is void."""

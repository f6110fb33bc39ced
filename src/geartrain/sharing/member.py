"""One copy of a part, as its exchange sees it: weights, letters, and what is kept for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from geartrain.parts.part import PartState
from geartrain.parts.trained import StepTaken
from geartrain.sharing.letters import (
    SHARE,
    Inbox,
    Ledger,
    Letter,
    Tensors,
    copies,
    merged,
    tensor_bytes,
)


@final
class Member:
    """One copy of a part, as its exchange sees it.

    Args:
        name: The part, without the number of the copy.
        index: Number of the copy.
        part: Its weights and optimiser.
        neighbours: Copies that it sends to.
        senders: Copies that send to it.
        inbox: How many letters may wait.
        bounded: Kinds of letters that the inbox bounds.

    Attributes:
        rounds: Own gradients so far; the current one counts when ``stepping`` is called.
        tensors, numbers: What the exchange keeps for this copy; they are saved in checkpoints.
        peers: All members, by index. Only what never changes may be read of another one.
        present: Whether the copy takes part now.
        here: Whether it lives in this process; of others only what never changes is known, and what
            ``AbstractExchange.heard`` is told.
        apart: Whether copies that are here, too, are reached by letters alone, as on imagined hosts
            that add up a mean at one of them.
        board: int64, the versions of all copies of this part in memory that all processes have;
            None: all copies are here, or processes have nothing in common: then that of a copy
            elsewhere is what its last letter said, and as many steps more as were taken here since.
        began: Version when the pass began, where copies are elsewhere.
    """

    def __init__(
        self,
        name: str,
        index: int,
        part: PartState,
        neighbours: Sequence[int] = (),
        senders: Sequence[int] = (),
        inbox: Inbox | None = None,
        bounded: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.index, self.part = name, index, part
        self.neighbours, self.senders = tuple(neighbours), tuple(senders)
        self.rounds = 0
        self.tensors: dict[str, list[Tensor]] = {}
        self.numbers: dict[str, float] = {}
        self.peers: Sequence[Member] = ()
        self.present = self.here = True
        self.apart = False
        self.board: NDArray[np.int64] | None = None
        self.began = 0
        self._heard: dict[int, tuple[int, int]] = {}  # copy to its version, and our own then
        self.ledger = Ledger()
        self.outbox: list[Letter] = []
        self.steps: list[StepTaken] = []
        self._inbox, self._bounded = inbox or Inbox(), bounded
        self._waiting: deque[Letter] = deque()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that learn."""
        return self.part.parameters

    @property
    def version(self) -> int:
        """Steps of this copy up to now, wherever it lives."""
        if self.here or self.board is None:
            return self.part.version
        return int(self.board[self.index])

    def show_version(self) -> None:
        """Let other processes see how many steps it has taken."""
        if self.board is not None:
            self.board[self.index] = self.part.version

    def weights(self) -> list[Tensor]:
        """The weights themselves, without a graph; ``copies`` of them are safe to keep."""
        return [p.detach() for p in self.parameters]

    def apply(
        self,
        gradients: Tensors,
        scale: float = 1.0,
        *,
        own: bool = False,
        progress: int | None = None,
    ) -> None:
        """Take an optimiser step of its own with these gradients, which stay as they are.

        Args:
            gradients: As they would be in ``.grad``.
            scale: They are multiplied by it.
            own: Whether it is the own step that was held; torch schedulers then step too.
            progress: Instances trained, for the schedule; None: as at its last own gradient.
        """
        if progress is not None:
            self.part.progress = progress
        step = self.part.step_with([_scaled(g, scale) for g in gradients], own=own)
        if step is not None:
            self.steps.append(step)

    def write(self, weights: Sequence[Tensor]) -> None:
        """Overwrite the weights; the version grows by one, the optimiser's state stays."""
        self.part.overwrite(weights)

    def meet(self, weights: Sequence[Tensor]) -> None:
        """Overwrite the weights with what they have become by those of others; it is counted."""
        self.ledger.meetings += 1
        self.write(weights)

    def send(self, to: int, kind: str, tensors: Tensors, weight: float = 1.0) -> None:
        """Send a letter with copies of the tensors."""
        self._post(to, kind, copies(tensors), weight)

    def send_all(self, kind: str, tensors: Tensors, weight: float = 1.0) -> None:
        """Send to all neighbours; copied once."""
        if self.neighbours:
            copied = copies(tensors)
            for to in self.neighbours:
                self._post(to, kind, copied, weight)

    def _post(self, to: int, kind: str, tensors: tuple[Tensor | None, ...], weight: float) -> None:
        letter = Letter(
            self.name,
            self.index,
            to,
            kind,
            tensors,
            self.part.version,
            self.rounds,
            weight,
            self._version_of(self.peers[to]),
            tensor_bytes(tensors),
        )
        self.ledger.sent += 1
        self.ledger.bytes += letter.nbytes
        self.outbox.append(letter)

    def _version_of(self, peer: Member) -> int:
        """Steps of another copy up to now, as far as that can be known."""
        if peer.here or peer.board is not None:
            return peer.version
        theirs, ours = self._heard.get(peer.index, (peer.part.version, self.began))
        return theirs + self.part.version - ours

    def put(self, letter: Letter) -> None:
        """A letter has come; it waits, is merged, or drives the oldest of its sender out."""
        self._heard[letter.sender] = letter.version, self.part.version
        self.ledger.came += letter.count
        if letter.collective:
            self.count_collective(letter)
        if letter.kind in self._bounded:
            same = [x for x in self._waiting if (x.sender, x.kind) == (letter.sender, letter.kind)]
            if len(same) >= self._inbox.limit:
                if self._inbox.full == "merge":
                    self._waiting[self._waiting.index(same[-1])] = merged(same[-1], letter)
                    self.ledger.merged += letter.count
                    return
                self._waiting.remove(same[0])
                self.ledger.dropped += same[0].count
        self._waiting.append(letter)

    def count_collective(self, letter: Letter) -> None:
        """On a ring each sends as much as it gets."""
        self.ledger.sent += 1
        self.ledger.bytes += letter.nbytes

    def take(self) -> list[Letter]:
        """All that wait, in the order in which they came; they count as applied."""
        letters = list(self._waiting)
        self._waiting.clear()
        for letter in letters:
            self.ledger.applied += letter.count
            age = max(0, self.part.version - letter.seen)
            self.ledger.staleness[age] = self.ledger.staleness.get(age, 0) + letter.count
        return letters

    @property
    def mail(self) -> int:
        """Letters that wait."""
        return len(self._waiting)

    def forget_mail(self) -> None:
        """What waits is dropped, and what was to be sent is not."""
        self.ledger.dropped += sum(x.count for x in self._waiting)
        self._waiting.clear()
        # Results of collectives are counted as they come, shares of them by nobody.
        counted = [x for x in self.outbox if not x.collective and x.kind != SHARE]
        self.ledger.sent -= len(counted)
        self.ledger.bytes -= sum(x.nbytes for x in counted)
        self.outbox.clear()
        self.steps.clear()


def _scaled(gradient: Tensor | None, scale: float) -> Tensor | None:
    """A copy, as optimisers may write to what they are given."""
    if gradient is None:
        return None
    return gradient.clone() if scale == 1.0 else gradient * scale

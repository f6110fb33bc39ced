"""The mean of all copies: a collective, and the synchronous baseline that steps with it.

contribute ─┐
contribute ─┼─► mean ─► a letter to everybody
contribute ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.letters import SHARE, Letter, Tensors, copies, mean_of, tensor_bytes
from geartrain.sharing.locks import AbstractLock
from geartrain.sharing.member import Member


@final
@dataclass(frozen=True, slots=True)
class _Given:
    """What a member has contributed, with its version and instances trained then."""

    tensors: tuple[Tensor | None, ...]
    version: int
    progress: int


@final
class Collective:
    """The mean of what all present members contribute, as of a ring all-reduce.

    The last to contribute sends the mean to everybody (to itself too), as a letter that takes
    2 (n - 1) latencies and carries 2 (n - 1) / n of the bytes, charged to the receiver: on a ring
    each sends as much as it gets. Sums are in the order of the members.

    Where members live in several processes, that of the first one present adds up (a star): the
    others send it what they give, which is counted as if it went round the ring. If that dies, what
    it had is given again, to the next one, when nothing moves. So it is on imagined hosts, too,
    where that is asked for (``Member.apart``).

    Args:
        kind: Of those letters.
        members: All of them.
        lock: Held while contributions are counted.
    """

    def __init__(self, kind: str, members: Sequence[Member], lock: AbstractLock) -> None:
        self.kind, self._members, self._lock = kind, members, lock
        self._given: dict[int, _Given] = {}
        self._waiting = [False] * len(members)
        self._shares: dict[int, _Given] = {}  # of those here that wait
        self._lost: set[int] = set()  # whose share was with a member that is gone

    def contribute(self, me: Member, tensors: Tensors) -> None:
        """Add copies of one's own; the mean comes as a letter, and ``waits`` until it is taken."""
        given = _Given(copies(tensors), me.part.version, me.part.progress)
        self._waiting[me.index] = True
        self._shares[me.index] = given
        self._give(me, given)

    @property
    def _keeper(self) -> Member:
        """In whose process contributions are added up."""
        return next((m for m in self._members if m.present), self._members[0])

    def _give(self, me: Member, given: _Given) -> None:
        keeper = self._keeper
        if not keeper.here or (me.apart and keeper is not me):
            me.outbox.append(
                Letter(
                    *(me.name, me.index, keeper.index, SHARE),
                    *(given.tensors, given.version, me.rounds),
                    nbytes=tensor_bytes(given.tensors),
                    progress=given.progress,
                )
            )
            return
        with self._lock:
            self._add(me.index, given, me)

    def give_again(self) -> bool:
        """Nothing moves: those here that wait for a mean that was lost give their share again.

        Returns:
            Whether there was anybody.
        """
        here = self._keeper.here
        again = [
            k
            for k in sorted(self._shares)
            if self._members[k].present
            and k not in self._given
            and (k in self._lost or (here and self._alone))
        ]
        self._lost.clear()
        for k in again:
            self._give(self._members[k], self._shares[k])
        return bool(again)

    @property
    def _alone(self) -> bool:
        """Whether all members are here, so that what is not with the keeper is nowhere."""
        return all(m.here for m in self._members)

    def take(self, letter: Letter) -> None:
        """What a member in another process contributes; here is the first one."""
        given = _Given(letter.tensors, letter.version, letter.progress or 0)
        self._add(letter.sender, given, self._keeper)

    def _add(self, index: int, given: _Given, sender: Member) -> None:
        self._given[index] = given
        if all(m.index in self._given for m in self._members if m.present):
            self._send(sender)

    def note(self, other: Member, *, waits: bool) -> None:
        """Whether a member in another process waits for the mean."""
        self._waiting[other.index] = waits

    def waits(self, me: Member) -> bool:
        """Whether a member has contributed and has not had the mean."""
        return self._waiting[me.index]

    def taken(self, me: Member) -> None:
        """A member has the mean."""
        self._waiting[me.index] = False
        self._shares.pop(me.index, None)
        self._lost.discard(me.index)

    def release(self) -> bool:
        """Give those that wait the mean of what is there; the others get it too. True if any."""
        again = self.give_again()
        with self._lock:
            if not self._given:
                return again
            first = self._members[min(self._given)]
            self._send(first if first.here and first.present else self._keeper)
            return True

    def left(self, me: Member) -> None:
        """A member is absent now; if the others have all contributed, they go on."""
        with self._lock:
            self._waiting[me.index] = False
            self._shares.pop(me.index, None)
            if not me.here and me.index < self._keeper.index:
                self._lost |= self._shares.keys()  # it has added up until now
            there = [m for m in self._members if m.present]
            if not (there and there[0].here):
                return
            if self._given and all(m.index in self._given for m in there):
                self._send(there[0])

    def _send(self, me: Member) -> None:
        given = [self._given[k].tensors for k in sorted(self._given)]
        there = [m for m in self._members if m.present]
        n = max(1, len(there))
        mean = tuple(mean_of(column) for column in zip(*given, strict=True))
        nbytes = 2 * (n - 1) * tensor_bytes(mean) // n
        members = self._members
        progress = max(
            members[k].part.progress if members[k].here else each.progress
            for k, each in self._given.items()
        )
        for m in there:
            version = self._given[m.index].version if m.index in self._given else m.version
            me.outbox.append(
                Letter(
                    me.name,
                    m.index,
                    m.index,
                    self.kind,
                    mean,
                    version,
                    m.rounds,
                    1.0,
                    version,
                    nbytes,
                    2 * (n - 1),
                    collective=True,
                    progress=progress,
                )
            )
        self._given.clear()


@final
class AllReduce(AbstractExchange):
    """The synchronous baseline: every step is taken with the mean gradient of all copies.

    Copies that are equal stay equal; one that joins has their weights of then, and not what is just
    under way to them. At the end of a segment, those that have no partner for their
    last gradients step, with all others, with the mean of what there is.
    """

    needs_neighbours = False
    in_rounds = True

    def __init__(self) -> None:
        super().__init__()
        self._sum: Collective | None = None
        self._equal = False  # when training began

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        self._sum = Collective("mean", members, self.lock)
        self._equal = all(_are_equal(me, members[0]) for me in members)

    @property
    def _collective(self) -> Collective:
        assert self._sum is not None, "prepare comes first"
        return self._sum

    def stepping(self, me: Member, gradients: Tensors) -> Tensors | None:
        if len(self.members) == 1:
            return gradients
        self._collective.contribute(me, gradients)
        return None

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._collective.taken(me)
            me.apply(letter.tensors, own=True, progress=letter.progress)

    def waiting(self, me: Member) -> bool:
        return self._collective.waits(me)

    def finish(self, members: Sequence[Member]) -> bool:
        return self._collective.release()

    def contributed(self, letter: Letter) -> None:
        self._collective.take(letter)

    def left(self, me: Member) -> None:
        self._collective.left(me)

    def regrouped(self) -> None:
        """Of those who wait for the last mean of one that died, some may have had it."""
        there = [m for m in self.members if m.present]
        for me in there[1:]:
            if self._equal and not _are_equal(me, there[0]):
                me.part.adopt(there[0].part)

    def abandoned(self, members: Sequence[Member]) -> None:
        self._sum = Collective("mean", members, self.lock)


def _are_equal(a: Member, b: Member) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.weights(), b.weights(), strict=True))

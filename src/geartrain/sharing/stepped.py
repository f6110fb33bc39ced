"""One worker's share of a part that every worker steps, as the weights lie where all have them.

    worker 0   gathers an update ─► lock ─► steps the common weights ─┐
    worker 1   gathers an update ─► lock ─► steps the common weights ─┤
                                                    version on the board
    firing begins ─► another version there? ─► lock ─► copies the weights, if nobody steps just now

A firing computes with a copy of the worker's own, so nobody sees half of a step and nobody waits
for weights, but for those that it has stepped itself. One that goes back copies none but for these.
An update is stepped with the gradient where it was added. Steps come one after the other, and what
an update costs is a lock and a copy: neither gradients nor weights travel. Of tables whose
gradients are rows there is no copy; rows are read under the lock. What is left of updates at the
end of a pass goes to the part's owner by letter.

The weights and all that their optimiser remembers have to lie in common memory, so a part is
stepped so if a step is known to read and write nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.frames.message import IntArray
from geartrain.frames.tables import guard_table, sparse_tables
from geartrain.graph.through import Through
from geartrain.native import library
from geartrain.native.rows import Moves
from geartrain.nodes.unrecorded import Unrecorded
from geartrain.parts.ahead import AbstractAhead, UpdatesAhead
from geartrain.parts.counting import Told
from geartrain.parts.fresh import remembers_all
from geartrain.parts.part import PartState
from geartrain.parts.trained import StepTaken
from geartrain.sharing.arrivals import AGES, told_ages
from geartrain.sharing.letters import Letter, Tensors
from geartrain.sharing.locks import AbstractLock
from geartrain.sharing.published_share import PublishedShare
from geartrain.transport.common import may_lie_in_common


def may_be_stepped_by_all(part: PartState, nodes: Sequence[Through]) -> bool:
    """Whether whoever has an update may step a part, where all have its memory.

    Args:
        part: As all have it when a pass begins.
        nodes: That compute with it.
    """
    rules, optimizer = part.rules, part.optimizer
    bounded = rules.max_staleness is not None or rules.window is not None
    if bounded or part.norms is not None or part.scheduler is not None:
        return False
    if optimizer is None or not remembers_all(optimizer, part.parameters):
        return False
    remembered = [x for state in optimizer.state.values() for x in state.values()]
    if not all(may_lie_in_common(x) for x in [*remembered, *part.parameters]):
        return False
    return not _tables(part) or _reads_rows(nodes)


def _reads_rows(nodes: Sequence[Through]) -> bool:
    """Whether nodes read tables in no other way than row by row, under their guard."""
    kernels = [node.written_kernel() for node in nodes]
    return all(kernel is not None and kernel.looks_up for kernel in kernels)


def _tables(part: PartState) -> list[Tensor]:
    learning = {id(p) for p in part.parameters}
    return [x for x in sparse_tables(part.module) if id(x) in learning]


def _renewal(own: Sequence[Tensor], common: Sequence[Tensor]) -> Moves | None:
    """What copies common weights into a worker's own, as often as wanted: a share looks at weights
    in nearly every firing, and torch looks at every tensor anew. None: torch is to do it."""
    both = [*own, *common]
    if library.current() is None or any(x.is_complex() for x in both):
        return None
    if not all(x.is_contiguous() and x.numel() for x in both):
        return None
    moves = Moves()
    for mine, theirs in zip(own, common, strict=True):
        moves.add(mine.view(1, -1), None, theirs.view(1, -1), None)
    return moves


@final
class SteppedShare(AbstractAhead, PublishedShare):
    """A part as the worker of this process has it.

    Args:
        part: The part; its weights and its optimiser's state lie in common memory.
        copy: Number of the worker.
        owner: That of the worker that has what is left of updates.
        copies: Workers.
        lock: Held by who steps, and by who reads weights that may be stepped.
        board: int64 ``(1,)``, in common memory: the version of the part.
    """

    def __init__(
        self,
        part: PartState,
        copy: int,
        owner: int,
        copies: int,
        *,
        lock: AbstractLock,
        board: NDArray[np.int64],
    ) -> None:
        super().__init__(part, copy, owner, copies, works=False)
        self._lock, self._board, self.steppers = lock, board, copies
        self._ahead = UpdatesAhead(self._local, self._count)
        self._rests = False
        self._unseen = False  # whether it has stepped since it looked
        self._back = _Back(self)
        tables = {id(x) for x in _tables(part)}
        for table in _tables(part):
            guard_table(table, lock)
        self._copied = [p for p in part.parameters if id(p) not in tables]
        self._common = [p.data for p in self._copied]
        for p in self._copied:
            p.data = p.data.clone()
        self._own = [p.data for p in self._copied]
        self._renewed = _renewal(self._own, self._common)
        if not self.owns:  # what was left before this pass is with the owner
            part.abandon()
            part.counting.staleness.clear()
        self._left = part.gradient.holds  # whether the part has gradients of before

    @property
    def guard_back(self) -> _Back:
        return self._back

    def enter_back(self) -> None:
        """Before a firing that goes back: its rows saw older weights than these anyway, so those of
        others are not copied for it."""
        if self._unseen:
            self.__enter__()

    def __enter__(self) -> None:
        if self._board[0] != self.version and self._lock.acquire(blocking=self._unseen):
            try:
                self._look()
            finally:
                self._lock.release()

    def _look(self) -> None:
        """Have the weights of now; under the lock."""
        self.gradient.settle()
        self.version, self._unseen = int(self._board[0]), False
        if self._copied:
            if self._renewed is not None:
                self._renewed.run()
            else:
                with Unrecorded():
                    torch._foreach_copy_(self._own, self._common)
            # Copies in bfloat16 are made anew for what torch counts: not steps of others.
            torch.autograd.graph.increment_version(self._copied)

    # Gradients of updates of this worker that follow the one in the making.

    @property
    def takes_ahead(self) -> bool:  # type: ignore[override]
        return self._part.takes_ahead

    def in_cohorts(
        self,
        ahead: Callable[[int], int] | None,
        updates: Callable[[IntArray], IntArray | None] | None,
    ) -> None:
        self._ahead.of_slots = updates

    def _count(self, told: Told) -> None:
        n, lengths = told.versions.size, told.lengths
        each = np.ones(n, np.int64) if lengths is None else lengths
        self._local.added(n if lengths is None else int(lengths.sum()), n)
        if not told.answered:
            self._local.returned(told.versions)
        self._note(told.versions, each, left=not told.answered)

    def _hand_in_if_whole(self) -> None:
        if self._local.due(self.version):  # there are no floors, as nothing is bounded
            self._hand_in()

    def next_update(self) -> bool:
        found = super().next_update()
        if found:
            self._hand_in_if_whole()
        return found

    def rest(self) -> StepTaken | None:
        self._rests = True
        found = super().rest()
        self._rests = False
        if not self.owns and (ages := self._part.histogram()):
            self._part.counting.staleness.clear()
            self._post(AGES, self._owner, (torch.tensor(ages, dtype=torch.int64),))
        return found

    def take(self) -> list[Letter]:
        self._part.version = int(self._board[0])
        found = [x for x in self._mail if x.kind == AGES and self.owns]
        for letter in found:
            self._part.counting.staleness.add(told_ages(letter))
        self._mail = [x for x in self._mail if x not in found]
        return [*found, *super().take()]

    @property
    def _settles(self) -> bool:
        return self.owns or not self._rests

    def _settle_own(self, versions: IntArray, lengths: IntArray, instances: int) -> None:
        part, mine = self._part, self._part.gradient
        if self._left:
            super()._settle_own(versions, lengths, instances)
            return
        # The step takes them from where they were added: no second buffer is filled.
        part.gradient = self.gradient
        try:
            self._settle((), versions, lengths, instances)
        finally:
            part.gradient = mine
        if self._left:
            mine.absorb(self.gradient)

    def _settle(
        self, tensors: Tensors, versions: IntArray, lengths: IntArray, instances: int
    ) -> None:
        # Nothing waits for this worker while it multiplies.
        multiplied = nullcontext() if tensors else self._part.gradient.multiplied()
        with multiplied, self._lock:
            self._part.version = int(self._board[0])
            super()._settle(tensors, versions, lengths, instances)

    def _step(self) -> None:
        seen = self.version
        self.gradient.settle()
        self._lay(self._common)
        try:
            super()._step()
        finally:
            self._lay(self._own)
        # Several steps may come one after the other: what they have made is copied once.
        self.version, now = seen, self._part.version
        self._left = now == self._board[0]
        self._unseen |= not self._left
        self._board[0] = now

    def _lay(self, tensors: Sequence[Tensor]) -> None:
        """The part's weights are these: those that all have, or this worker's."""
        for p, x in zip(self._copied, tensors, strict=True):
            p.data = x

    def leave_pass(self) -> None:
        """The pass is over: the part is what all have."""
        self._lay(self._common)
        self._part.version = int(self._board[0])


@final
class _Back:
    """What firings that go back enter.

    Args:
        share: The part as their worker has it.
    """

    def __init__(self, share: SteppedShare) -> None:
        self._share = share

    def __enter__(self) -> None:
        self._share.enter_back()

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self._share.__exit__(kind, error, trace)

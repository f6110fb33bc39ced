"""Instances for copies of a model: each has a shard of its own, or takes the next of all.

    order    0 1 2 3 4 5 6 7
    static   copy 0: 0 3 6 0 3 6 ...   copy 1: 1 4 7 1 ...   copy 2: 2 5 2 5 ...
    pull     whoever has room takes the next

A copy that is through with its shard begins it anew, and waits for none; where copies go in rounds
none is ahead of the others, so it begins anew when all are through. The pass is over when as many
instances were taken, by all together, as the data have.

Of the last ones that are pulled a slow copy takes none that others will be through with sooner, or
all would wait for it at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, final

import numpy as np

from geartrain.engine.controller import ControllerState
from geartrain.engine.engine import Engine
from geartrain.engine.router import Outbox
from geartrain.frames.instance import Instance
from geartrain.frames.message import IntArray
from geartrain.frames.packed import Packed
from geartrain.frames.packer import Packer
from geartrain.runtime.base import AbstractFeeder, Feeder, OnBadInstance

Shard: TypeAlias = Callable[[int, int], Iterator[Instance]]
"""Copy and position in its shard to the instances from there to the shard's end."""


@final
class CopyDoor:
    """The controller, for so many instances that one copy wants."""

    def __init__(
        self, controller: ControllerState, copy: int, wanted: int, *, whole: bool = False
    ) -> None:
        self._controller, self._copy, self._wanted = controller, copy, wanted
        self.packer: Packer = controller.packer
        self.one_by_one, self.whole = controller.one_by_one, whole

    def want(self) -> int:
        return self._wanted

    def admit(self, instances: Sequence[Instance] | Packed) -> Outbox:
        return self._controller.admit(instances, self._copy)


@final
class ShardFeeder(AbstractFeeder):
    """Feeds each copy from its own shard.

    Args:
        shard: Gives a copy its instances.
        lengths: Instances of each shard, one or more.
        positions: How many each copy has taken before; counted on here.
        limit: Instances to take by all together; where minibatches go in whole, one that has been
            begun is filled all the same.
        ends: Whether the end of this pass is that of the data.
        beyond: Instances that the epoch has beyond the limit, and that may fill a minibatch.
        on_bad: As for ``Feeder``.
        together: Asked for copies that begin their shards anew together; it may change.
    """

    def __init__(
        self,
        shard: Shard,
        lengths: Sequence[int],
        positions: list[int],
        limit: int,
        *,
        ends: bool,
        beyond: int = 0,
        on_bad: OnBadInstance = "raise",
        together: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._together = together
        self._shard, self._lengths, self._positions = shard, lengths, positions
        self._left, self._ends, self._on_bad = limit, ends, on_bad
        self._beyond = beyond
        self._feeders = [self._lap(k) for k in range(len(lengths))]
        self._counted = [(0, 0) for _ in lengths]  # of what each lap has taken and skipped
        self._fed = [Outbox() for _ in lengths]  # of minibatches that are not whole yet
        self._admitted = [0 for _ in lengths]
        self._close_if_done()

    def close(self) -> None:
        super().close()
        for feeder in self._feeders:
            feeder.close()

    def surround(self, outside: AbstractContextManager[object]) -> None:
        super().surround(outside)
        for feeder in self._feeders:
            feeder.surround(outside)

    def admit(self, engine: Engine) -> Outbox | None:
        for k in range(len(self._feeders)):
            out = self._feed(k, engine.controller)
            if out is not None:
                return out
        return None

    def _feed(self, k: int, controller: ControllerState) -> Outbox | None:
        """For one copy; goes on to the next lap where a shard ends."""
        whole = controller.whole
        wanted = 0 if self.exhausted or self._waits(k) else controller.want_of(k)
        while self._wants(k, wanted):
            n = min(wanted - self._admitted[k], self._left + self._beyond if whole else self._left)
            feeder = self._feeders[k]
            out = feeder.feed(CopyDoor(controller, k, n))
            good = self._count(k)
            if out is not None:
                self._fed[k].add(out)
                self._admitted[k] += good
            if feeder.exhausted and not self.closed:
                self._feeders[k], self._counted[k] = self._lap(k), (0, 0)
            if self.closed or (self._admitted[k] and not whole):
                break
        fed, admitted = self._fed[k], self._admitted[k]
        self._fed[k], self._admitted[k] = Outbox(), 0
        return fed if admitted else None

    def _waits(self, k: int) -> bool:
        """Whether it would begin its shard anew, and others of those it goes with are not through.

        A minibatch that has been begun is filled all the same.
        """
        together = self._together()
        if k not in together or self._admitted[k]:
            return False
        return self._laps(k) > min(map(self._laps, together))

    def _laps(self, k: int) -> int:
        return self._positions[k] // self._lengths[k]

    def _wants(self, k: int, wanted: int) -> bool:
        if self.closed:
            return self._feeders[k].begun
        begun = self._admitted[k]
        return begun < wanted and not self.source_ended and (begun > 0 or not self.exhausted)

    def _count(self, k: int) -> int:
        """What a copy has taken since it was counted; returns how many of it were not skipped."""
        feeder, (taken, skipped) = self._feeders[k], self._counted[k]
        self._counted[k] = feeder.taken, feeder.skipped
        taken, skipped = feeder.taken - taken, feeder.skipped - skipped
        self._positions[k] += taken
        self.taken += taken
        self.skipped += skipped
        self._left -= taken
        self._close_if_done()
        return taken - skipped

    def _lap(self, k: int) -> Feeder:
        feeder = Feeder(self._shard(k, self._positions[k] % self._lengths[k]), self._on_bad)
        feeder.surround(self.outside)
        return feeder

    def _close_if_done(self) -> None:
        if self._left <= 0:
            self.exhausted = True
            self.source_ended = self._ends or 0 < self._beyond <= -self._left


@final
class PullFeeder(AbstractFeeder):
    """Feeds all copies from one stream.

    Args:
        instances: In their order.
        positions: How many each copy has taken before; counted on here.
        on_bad, limit: As for ``Feeder``.
        left: How many there are; None: nobody knows.
    """

    def __init__(
        self,
        instances: Iterator[Instance],
        positions: list[int],
        on_bad: OnBadInstance = "raise",
        limit: int | None = None,
        left: int | None = None,
    ) -> None:
        self._feeder, self._positions = Feeder(instances, on_bad, limit), positions
        self._left = limit if left is None else left if limit is None else min(left, limit)
        self._given = np.zeros(len(positions), np.int64)  # to each copy, here
        self._turn = 0  # the copy that is fed

    def close(self) -> None:
        super().close()
        self._feeder.close()

    def pause(self) -> None:
        super().pause()
        self._feeder.pause()

    def surround(self, outside: AbstractContextManager[object]) -> None:
        self._feeder.surround(outside)

    def admit(self, engine: Engine) -> Outbox | None:
        controller, feeder = engine.controller, self._feeder
        for k in range(controller.copies):
            if not feeder.begun:  # else a minibatch was begun and data did not answer
                self._count()
                self._turn = k
            door = CopyDoor(controller, k, self._wanted(k, controller), whole=controller.whole)
            out = feeder.feed(door)
            self._count()
            if out is not None:
                return out
        return None

    def _wanted(self, k: int, controller: ControllerState) -> int:
        """How many a copy may have now: none that others will be through with sooner."""
        wanted = controller.want_of(k)
        left = 0 if self._left is None else self._left - self.taken
        if not wanted or left <= 0 or controller.whole:
            return wanted
        active = controller.assignment.active
        done = np.maximum(self._given - active, 0) * controller.assignment.open
        if not done[k] or left * done[k] > (active[k] + wanted) * done.sum():
            return wanted  # nothing is known of it, or there is enough for all
        return sooner(k, wanted, left, active, done)

    def _count(self) -> None:
        feeder = self._feeder
        taken = feeder.taken - self.taken
        self._positions[self._turn] += taken
        self._given[self._turn] += taken
        self.taken, self.skipped = feeder.taken, feeder.skipped
        self.exhausted, self.source_ended = feeder.exhausted, feeder.source_ended


def sooner(k: int, wanted: int, left: int, active: IntArray, done: IntArray) -> int:
    """How many of the last instances a copy is to take, by the pace of all so far.

    By the time that it will be through with one, others may be with all that are left. The pace so
    far is not known to a tenth; and the quickest of all is never put off for good.

    Args:
        k: The copy, which has done some.
        wanted: How many it has room for.
        left: How many there are, 1 or more.
        active: int64 ``(copies,)``, how many are in flight at each.
        done: int64 ``(copies,)``, how many each has done in the same time; 0: it does not count.
    """
    mine, most = int(done[k]), min(wanted, left)
    for n in range(most):
        ahead = 9 * (int(active[k]) + n + 1) * done - 10 * mine * active
        others = np.maximum(0, ahead // (10 * mine))
        others[k] = 0
        if left - n <= int(others.sum()):
            return n
    return most

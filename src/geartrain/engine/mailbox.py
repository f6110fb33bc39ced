"""What waits at a node, and which node goes next.

    policy          picks
    Sweeps          what comes next in the graph; there and back, loops until they are empty;
                    bundles portion by portion
    FullestFirst    the queue with most rows; backward on a tie
    BackwardFirst   any backward before any forward, then the fullest (the paper's)
    OldestFirst     the queue whose first batch has waited longest
    RandomOrder     anything, any number of rows: for tests of order

A policy sees queues that hold something and picks one of them; it never waits.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar, final

import numpy as np

from geartrain.bounds import require_whole
from geartrain.frames.message import Backward, Forward, IntArray

B = TypeVar("B", Forward, Backward)
Batch: TypeAlias = Forward | Backward


@final
class Queue:
    """Batches for one port of a node, or its answers.

    Args:
        node: Number of the node.
        port: Input port; ``BACKWARD`` for answers.
        alone: Whether messages are taken one at a time.
        rank: Its place in the order of the graph, there and back; see ``engine.order``.
        loops: The first and the last place of each loop around it, the innermost first.

    Attributes:
        rows: Messages that wait.
        portion: Most messages that one firing may take, where they are bundles and the worker has
            said; else None.
        changed: Whether others wait than when the worker last looked.
    """

    __slots__ = (
        "_batches", "_sums", "alone", "bundled", "changed", "loops", "node", "port", "portion",
        "rank", "rows", "since",
    )  # fmt: skip

    def __init__(
        self,
        node: int,
        port: int,
        alone: bool,
        rank: int = 0,
        loops: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.node, self.port, self.alone, self.rank, self.loops = node, port, alone, rank, loops
        self.rows = 0
        self.changed = True
        self.since = 0
        self.bundled = False
        self.portion: int | None = None
        self._batches: deque[Forward | Backward] = deque()
        self._sums: dict[str, dict[int, int]] = {}

    def put(self, batch: Forward | Backward, now: int) -> None:
        if not self._batches:
            self.since = now
        self._batches.append(batch)
        self.bundled = batch.lengths is not None
        self.rows += len(batch)
        self.changed = True

    def messages_with(
        self, rows: int, lengths: Callable[[Batch], IntArray | None], of: str = ""
    ) -> int:
        """How many messages, oldest first, have so many payload rows; one more than there are if
        these are too few.

        Args:
            rows: Payload rows, at least.
            lengths: Payload rows of each message of a batch; None: one each.
            of: Whose rows these are; sums of batches are remembered under it while they wait.
        """
        messages, sums = 0, self._sums.setdefault(of, {})
        for batch in self._batches:
            n, found = len(batch), sums.get(id(batch))
            if found is None:
                each = lengths(batch)
                found = sums[id(batch)] = n if each is None else int(each.sum())
            if found >= rows:
                each = lengths(batch)
                here = rows if each is None else int(each.cumsum().searchsorted(rows)) + 1
                return messages + here
            messages += n
            rows -= found
        return messages + 1

    def take(self, max_rows: int) -> list[Forward | Backward]:
        """Up to so many rows, oldest first; the rest stays."""
        self.changed = True
        if self.alone:
            max_rows = 1
        if self.rows <= max_rows:
            taken = list(self._batches)
            self._empty()
            self.rows = 0
            return taken
        taken, left = [], max_rows
        while left:
            batch = self._batches.popleft()
            for sums in self._sums.values():
                sums.pop(id(batch), None)
            n = len(batch)
            if n > left:
                batch, rest = batch.cut(left)
                self._batches.appendleft(rest)
                n = left
            taken.append(batch)
            left -= n
        self.rows -= max_rows
        return taken

    def take_earliest(
        self, max_rows: int, turns: Callable[[Batch], IntArray]
    ) -> list[Forward | Backward]:
        """Up to so many rows, of the instances that were admitted first; the rest stays.

        What is taken in portions then falls into those of updates, and comes back as it went.

        Args:
            max_rows: Rows, at most.
            turns: When the instance of each row of a batch was admitted.
        """
        if self.alone or self.rows <= max_rows:
            return self.take(max_rows)
        batches = list(self._batches)
        found = [turns(batch) for batch in batches]
        every = np.concatenate(found)
        if (every[1:] >= every[:-1]).all():
            return self.take(max_rows)
        first = np.zeros(every.size, np.bool_)
        first[every.argsort(kind="stable")[:max_rows]] = True
        taken: list[Forward | Backward] = []
        self._empty()
        begin = 0
        for batch in batches:
            mine = first[begin : begin + len(batch)]
            begin += len(batch)
            for rows, into in ((mine, taken), (~mine, self._batches)):
                which = np.flatnonzero(rows)
                if which.size:
                    into.append(batch if which.size == mine.size else batch.take(which))
        self.rows -= max_rows
        return taken

    def take_latest(
        self, max_rows: int, left_by: Callable[[Backward], IntArray | None]
    ) -> list[Forward | Backward]:
        """Those that left a node by the latest of its firings, if they are so few; else ``take``.

        Args:
            max_rows: Rows, at most.
            left_by: The firing of each row of a batch.
        """
        oldest = self._batches[0]
        if self.alone or not isinstance(oldest, Backward) or left_by(oldest) is None:
            return self.take(max_rows)
        batches = [b for b in self._batches if isinstance(b, Backward)]
        known = [f for b in batches if (f := left_by(b)) is not None]
        latest = max(int(f.max()) for f in known)
        chosen = [np.flatnonzero(f == latest) for f in known]
        rows = sum(which.size for which in chosen)
        if rows in (0, self.rows) or rows > max_rows:
            return self.take(max_rows)
        taken: list[Forward | Backward] = []
        self._empty()
        for batch, which in zip(batches, chosen, strict=True):
            if which.size == len(batch):
                taken.append(batch)
                continue
            others = np.ones(len(batch), np.bool_)
            others[which] = False
            self._batches.append(batch.take(np.flatnonzero(others)))
            if which.size:
                taken.append(batch.take(which))
        self.rows -= rows
        return taken

    def _empty(self) -> None:
        self.changed = True
        self._batches.clear()
        self._sums.clear()


class AbstractPolicy(ABC):
    """Says which queue fires next."""

    @abstractmethod
    def choose(self, queues: Sequence[Queue]) -> Queue:
        """One of these queues; each holds at least one row."""

    def limit(self, queue: Queue, max_rows: int) -> int:
        """How many rows to take."""
        return max_rows


@final
class Sweeps(AbstractPolicy):
    """Through the graph and back, again and again; a place is left when nothing waits there.

    What stands further on collects rows meanwhile, and what has been left collects those that
    enter behind the sweep, so that firings are full even where few instances are in flight. A loop
    is swept round and round until it is empty, an inner one within each round of the outer one: so
    rows that a route has parted are together again where the branches meet, and those that enter
    at one time go round as one wave. A queue that has enough does not wait for the sweep, as
    waiting would make its rows staler and its firing no cheaper; of several, the one nearest to
    the end.

    Bundles are batches already, and more of them than an update wants would only be staler. So
    while some wait, a firing takes a portion, and the sweep follows it to the end before it takes
    the next: what is ahead goes first, and of that, what has a portion and stands nearest to the
    end. Where each is fired alone, the fullest queue goes first.

    Args:
        enough: Rows from which on a firing gains little by more.

    Raises:
        ValueError: ``enough`` is not positive.
    """

    def __init__(self, enough: int = 512) -> None:
        require_whole(f"Sweeps(enough={enough!r})", enough, 1, "1 row or more")
        self.enough = enough
        self._at = 0
        self._loops: Sequence[tuple[int, int]] = ()

    def choose(self, queues: Sequence[Queue]) -> Queue:
        follows = False
        for q in queues:
            if q.bundled and q.alone:
                return _fullest(queues)
            follows = follows or q.bundled or q.portion is not None
        if not follows:
            full = [q for q in queues if q.rows >= self.enough]
            if full:
                return max(full, key=lambda q: (q.rank, q.rows))
        chosen = self._next(self._around(queues), follows)
        self._at, self._loops = chosen.rank, chosen.loops
        return chosen

    def _around(self, queues: Sequence[Queue]) -> Sequence[Queue]:
        """What waits in the innermost loop that the sweep is in and that is not empty."""
        for first, last in self._loops:
            inside = [q for q in queues if first <= q.rank <= last]
            if inside:
                return inside
        return queues

    def _next(self, queues: Sequence[Queue], follows: bool) -> Queue:
        """What is ahead of the last firing, or, if nothing is, what comes first."""
        if len(queues) == 1:
            return queues[0]
        at = self._at
        ahead = [q for q in queues if q.rank > at or (q.rank == at and not q.bundled)] or queues
        if follows:
            full = [q for q in ahead if q.rows >= (q.portion or self.enough)]
            if full:
                return max(full, key=lambda q: (q.rank, q.rows))
        return min(ahead, key=lambda q: (q.rank, -q.rows))


@final
class FullestFirst(AbstractPolicy):
    """Most rows first; backward first on a tie."""

    def choose(self, queues: Sequence[Queue]) -> Queue:
        return _fullest(queues)


def _fullest(queues: Sequence[Queue]) -> Queue:
    return max(queues, key=lambda q: (q.rows, q.port < 0))


@final
class BackwardFirst(AbstractPolicy):
    """Answers before rows, so that instances finish and make room; then the fullest."""

    def choose(self, queues: Sequence[Queue]) -> Queue:
        return max(queues, key=lambda q: (q.port < 0, q.rows))


@final
class OldestFirst(AbstractPolicy):
    """The queue that has waited longest."""

    def choose(self, queues: Sequence[Queue]) -> Queue:
        return min(queues, key=lambda q: q.since)


@final
class RandomOrder(AbstractPolicy):
    """Any queue, any number of rows; the same for the same seed.

    Args:
        seed: Of the choices.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, queues: Sequence[Queue]) -> Queue:
        return self._random.choice(sorted(queues, key=lambda q: (q.node, q.port)))

    def limit(self, queue: Queue, max_rows: int) -> int:
        return self._random.randint(1, min(max_rows, queue.rows))

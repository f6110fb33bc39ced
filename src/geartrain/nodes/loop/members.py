"""Members of a group, collected while a plan is made: by one sort of those that wait.

    columns of members ─► pool ─► sorted by key and place ─► groups that are complete
                           ▲                                 │ the others
                           └─────────────────────────────────┘

A group by steps keeps payload, so its members have cells, and a table finds them. A plan has row
numbers and columns alone, of a few hundred members: to sort them again whenever some come takes a
quarter of what cells and tables take.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from geartrain.frames.message import IntArray
from geartrain.nodes.gather import Group

_NUMBER, _SIZE, _POSITION, _STATE = range(4)
_SHOWN: Final = 5
_NONE: Final = np.zeros(0, np.int64)


@final
class Members:
    """Those of the groups of one operator.

    Args:
        node: Says what columns mean, and refuses what is wrong.
    """

    __slots__ = ("_columns", "_node", "_pool")

    def __init__(self, node: Group) -> None:
        self._node = node
        self._columns = 0
        self._pool: IntArray | None = None

    def complete(self, numbers: IntArray, state: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Take members in, and forget the groups that are complete by that.

        Args:
            numbers: int64 ``(n,)``, of their rows.
            state: int64 ``(columns, n)``.

        Returns:
            The numbers of all members of these groups, group by group in the order of their places;
            how many each group has; and the groups' states.

        Raises:
            GraphError: A place is none of its group's, or taken.
        """
        node = self._node
        told = node.told(state)
        self._columns = state.shape[0]
        parts = [numbers[None], told.sizes[None], told.positions[None], told.state]
        if not node.ordered and told.state is not state:
            parts.append(state)  # by which they are sorted: what it was before it moved
        pool = np.concatenate(parts)
        if self._pool is not None:
            pool = np.concatenate([self._pool, pool], axis=1)
        self._pool = pool
        order, starts, counts = self._sorted(pool)
        first = np.minimum.reduceat(order, starts)  # as they came: it has the group's size
        sizes = pool[_SIZE].take(first)
        self._check(pool, order, starts, counts, first, sizes)
        complete = counts == sizes
        (done,) = complete.nonzero()
        if not done.size:
            return _NONE, _NONE, state[:, :0]
        if done.size < counts.size:
            mask = complete.repeat(counts)
            left = order[~mask]
            left.sort()  # as they came
            self._pool = pool.take(left, 1)
            order, first, sizes = order[mask], first[done], sizes[done]
        else:
            self._pool = None
        if not node.ordered:
            order = self._by_state(pool, order, sizes)
        node.check(sizes)
        return pool[_NUMBER].take(order), sizes, self._states(pool).take(first, 1)

    def _states(self, pool: IntArray) -> IntArray:
        return pool[_STATE : _STATE + self._columns]

    def _sorted(self, pool: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Members by key and then place, where each group begins, and how many of it are here."""
        keys = [pool[_STATE + column] for column in self._node.by]
        if self._node.ordered:
            order = np.lexsort((pool[_POSITION], *keys))
        else:
            order = keys[0].argsort(kind="stable") if len(keys) == 1 else np.lexsort(keys)
        begins = np.zeros(order.size, np.bool_)
        begins[0] = True
        for key in keys:
            ranked = key.take(order)
            begins[1:] |= ranked[1:] != ranked[:-1]
        (starts,) = begins.nonzero()
        counts = np.empty_like(starts)
        counts[-1] = order.size - starts[-1]
        np.subtract(starts[1:], starts[:-1], out=counts[:-1])
        return order, starts, counts

    def _check(
        self,
        pool: IntArray,
        order: IntArray,
        starts: IntArray,
        counts: IntArray,
        first: IntArray,
        sizes: IntArray,
    ) -> None:
        node = self._node
        if node.reads_memory:
            states = self._states(pool)
            node.check_memory(states.take(first.repeat(counts), 1), states.take(order, 1))
        if not node.ordered:
            (wrong,) = (counts > sizes).nonzero()
            if wrong.size:
                size = int(sizes[wrong[0]])
                raise node.misplaced(self._states(pool)[:, first[wrong[0]]], size, size)
            return
        places = pool[_POSITION].take(order)
        same = np.zeros(order.size, np.bool_)
        np.equal(places[1:], places[:-1], out=same[1:])
        same[starts] = False
        (wrong,) = (same | (places < 0) | (places >= sizes.repeat(counts))).nonzero()
        if wrong.size:
            i = int(wrong[0])
            k = int(starts.searchsorted(i, "right")) - 1
            raise node.misplaced(self._states(pool)[:, first[k]], int(places[i]), int(sizes[k]))

    def _by_state(self, pool: IntArray, order: IntArray, sizes: IntArray) -> IntArray:
        """Members of each group by the columns that they came with."""
        came = pool[-self._columns :].take(order, 1)
        group = np.arange(sizes.size).repeat(sizes)
        return order.take(np.lexsort((*came[::-1], group)))

    def story(self) -> list[str]:
        """Who waits for whom, a line each."""
        pool = self._pool
        if pool is None:
            return []
        order, starts, counts = self._sorted(pool)
        first = np.minimum.reduceat(order, starts)
        told = []
        for k in range(min(starts.size, _SHOWN)):
            mine = order[starts[k] : starts[k] + counts[k]]
            here = pool[_POSITION, mine].tolist() if self._node.ordered else [*range(mine.size)]
            state = self._states(pool)[:, first[k]]
            told.append(self._node.waits(state, here, int(pool[_SIZE, first[k]])))
        if starts.size > _SHOWN:
            more = starts.size - _SHOWN
            told.append(f"'{self._node.name}' waits for members of {more} more groups")
        return told

"""Members of a group and sides of a join, collected while a plan is made: by one sort.

    columns of members ─► pool ─► sorted by key and place ─► groups that are complete
                           ▲                                 │ the others
                           └─────────────────────────────────┘

By steps a group or join keeps payload, so its members have cells, and a table finds them. A plan
has row numbers and columns alone, of a few hundred members: to sort them again whenever some come
takes a quarter of what cells and tables take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from geartrain.frames.message import IntArray
from geartrain.nodes.group import Group
from geartrain.nodes.join import JoinNode

_NUMBER, _SIZE, _POSITION, _STATE = range(4)
_SHOWN: Final = 5
_MANY: Final = 1024
"""Rows from which on it takes less to make one number of their keys than to sort by each."""
_ROOM: Final = 1 << 62
_NONE: Final = np.zeros(0, np.int64)


def _combined(keys: Sequence[IntArray]) -> IntArray | None:
    """One number for each row, in the order of its keys, the first of them first; None: it has no
    room for them."""
    found, room = np.zeros(keys[0].size, np.int64), 1
    for key in keys:
        least = int(key.min())
        size = int(key.max()) - least + 1
        room *= size
        if room > _ROOM:
            return None
        if size > 1:
            found *= size
            found += key
            found -= least
    return found


def _order(keys: Sequence[IntArray]) -> IntArray:
    """Rows in the order of their keys, the first of them first, and else as they are."""
    one = keys[0] if len(keys) == 1 else None
    if one is None and keys[0].size >= _MANY:
        one = _combined(keys)
    return np.lexsort(tuple(keys)[::-1]) if one is None else one.argsort(kind="stable")


def _by_key(
    keys: Sequence[IntArray], places: IntArray | None
) -> tuple[IntArray, IntArray, IntArray]:
    """An order of rows by key and then place, where in it each key begins, and how many it has."""
    keys = keys[::-1]
    if len(keys) > 1 and keys[0].size >= _MANY and (one := _combined(keys)) is not None:
        keys = [one]
    order = _order(keys if places is None else [*keys, places])
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


def _repeated(places: IntArray, starts: IntArray) -> NDArray[np.bool_]:
    """Which rows, sorted by key and place, have the place of the one before."""
    same = np.zeros(places.size, np.bool_)
    np.equal(places[1:], places[:-1], out=same[1:])
    same[starts] = False
    return same


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
        keys = [pool[_STATE + column] for column in self._node.by]
        return _by_key(keys, pool[_POSITION] if self._node.ordered else None)

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
        same = _repeated(places, starts)
        (wrong,) = (same | (places < 0) | (places >= sizes.repeat(counts))).nonzero()
        if wrong.size:
            i = int(wrong[0])
            k = int(starts.searchsorted(i, "right")) - 1
            raise node.misplaced(self._states(pool)[:, first[k]], int(places[i]), int(sizes[k]))

    def _by_state(self, pool: IntArray, order: IntArray, sizes: IntArray) -> IntArray:
        """Members of each group by the columns that they came with."""
        came = pool[-self._columns :].take(order, 1)
        group = np.arange(sizes.size).repeat(sizes)
        return order.take(_order([group, *came]))

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


_PORT = 1
_JOINED = 2


@final
class Sides:
    """Rows of the ports of one join.

    Args:
        node: Says what columns mean, and refuses what is wrong.
        ports: How many.
    """

    __slots__ = ("_came", "_node", "_ports", "_waiting")

    def __init__(self, node: JoinNode, ports: int) -> None:
        self._node, self._ports = node, ports
        self._waiting: list[IntArray] = []
        self._came = np.zeros(ports, np.bool_)  # of which ports some wait

    def complete(
        self, port: int, numbers: IntArray, state: IntArray
    ) -> tuple[list[IntArray], IntArray]:
        """Take rows of a port in, and forget those whose other ports are there too.

        Args:
            port: Theirs.
            numbers: int64 ``(n,)``.
            state: int64 ``(columns, n)``.

        Returns:
            By port the numbers of the rows that are joined, and the states of what they become.

        Raises:
            GraphError: Two rows of a port have one key.
        """
        came = np.concatenate([numbers[None], np.full((1, numbers.size), port), state])
        self._waiting.append(came)
        self._came[port] = True
        if not self._came.all():  # nothing is complete: they are sorted when all have come
            return [_NONE] * self._ports, state[:, :0]
        pool = self._pool()
        order, _, counts = self._sorted(pool)
        complete = counts == self._ports
        whole = complete.repeat(counts)
        left = pool.take(order[~whole], 1)
        self._waiting = [left] if left.size else []
        self._came = np.bincount(left[_PORT], minlength=self._ports) > 0
        members = order[whole].reshape(-1, self._ports)
        states = pool[_JOINED:].take(members[:, 0], 1)
        for k, columns in enumerate(self._node.handles):
            for column in columns:
                states[column] = pool[_JOINED + column].take(members[:, k])
        return [pool[_NUMBER].take(members[:, k]) for k in range(self._ports)], states

    def _pool(self) -> IntArray:
        """All that waits."""
        waiting = self._waiting
        return waiting[0] if len(waiting) == 1 else np.concatenate(waiting, axis=1)

    def _sorted(self, pool: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """As ``_by_key``; there are no two rows of a port with one key."""
        keys = [pool[_JOINED + column] for column in self._node.on]
        order, starts, counts = _by_key(keys, pool[_PORT])
        (wrong,) = _repeated(pool[_PORT].take(order), starts).nonzero()
        if wrong.size:
            i = order[wrong[0]]
            raise self._node.twice(int(pool[_PORT, i]), pool[_JOINED:, i])
        return order, starts, counts

    def story(self) -> list[str]:
        """Who waits for whom, a line each.

        Raises:
            GraphError: As ``complete``.
        """
        if not self._waiting:
            return []
        pool = self._pool()
        order, starts, counts = self._sorted(pool)
        told = []
        for start, count in zip(starts[:_SHOWN].tolist(), counts[:_SHOWN].tolist(), strict=True):
            here = order[start : start + count]
            absent = sorted(set(range(self._ports)) - set(pool[_PORT].take(here).tolist()))
            told.append(self._node.waits(pool[_JOINED:, here[0]], absent))
        if starts.size > _SHOWN:
            told.append(f"'{self._node.name}' waits for ports of {starts.size - _SHOWN} more rows")
        return told

"""Sides of a join, collected while a plan is made: by a table of one index, or by one sort.

    rows of a port ─► those that wait ─► rows whose other ports are there too, side by side

As of members of a group (`members`), there are row numbers and columns alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Final, final

import numpy as np

from geartrain.frames.message import VERTEX, IntArray
from geartrain.nodes.join import JoinNode
from geartrain.nodes.loop.members import SHOWN
from geartrain.nodes.loop.sorting import ascend, by_key, equal, order_of, repeated

_NONE: Final = np.zeros(0, np.int64)
_ROWS: Final = 64
"""For so many there is room at first."""
_NUMBER, _PORT, _JOINED = range(3)


@final
class Sides:
    """Rows of the ports of one join.

    Args:
        node: Says what columns mean, and refuses what is wrong.
        ports: How many.
    """

    __slots__ = ("_came", "_direct", "_index", "_left", "_new", "_node", "_ports")

    def __init__(self, node: JoinNode, ports: int) -> None:
        self._node, self._ports = node, ports
        self._left: IntArray | None = None  # those that others have not met
        self._new: list[tuple[int, IntArray, IntArray]] = []  # that came since: port, rows
        self._came = 0  # of which ports some wait, as bits
        self._direct = _DirectSides(node, ports) if len(node.on) == 1 else None
        # One key alone is an index of the arena: see ``key_columns``.
        inside = VERTEX, node.place.schema.state.get("edge")
        self._index = next((k for k, column in enumerate(node.on) if column in inside), None)

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
        if self._direct is not None:
            return self._direct.complete(port, numbers, state)
        self._new.append((port, numbers, state))
        self._came |= 1 << port
        if self._came != (1 << self._ports) - 1:
            # Nothing is complete: they are sorted when all have come.
            return [_NONE] * self._ports, state[:, :0]
        if (alike := self._alike()) is not None:
            self._new, self._came = [], 0
            return alike
        pool = self._pool()
        assert pool is not None
        order, _, counts = self._sorted(pool)
        complete = counts == self._ports
        whole = complete.repeat(counts)
        left = pool.take(order[~whole], 1)
        self._left, self._new = left if left.size else None, []
        self._came = sum([1 << p for p in set(left[_PORT].tolist())])
        members = order[whole].reshape(-1, self._ports).T
        return _side_by_side(self._node, pool[_NUMBER], pool[_JOINED:], members)

    def _alike(self) -> tuple[list[IntArray], IntArray] | None:
        """What ``complete`` gives where each port has brought rows once, all of them those of the
        same keys, none twice; in the order of these."""
        if self._left is not None or len(self._new) > self._ports:
            return None
        (_, own, states), *others = sorted(self._new, key=itemgetter(0))
        if any(numbers.size != own.size for _, numbers, _ in others):
            return None
        keys = [states[column] for column in self._node.on]
        if not ascend(keys[::-1]):
            order = order_of(keys[::-1])
            own, states = own.take(order), states.take(order, 1)
            keys = [states[column] for column in self._node.on]
            if not ascend(keys[::-1]):
                return None
        if any(self._node.handles[1:]):
            states = states.copy()
        found = [own]
        for port, numbers, state in others:
            at = self._as(keys, state)
            if at is None:
                return None
            found.append(numbers[at])
            for column in self._node.handles[port]:
                states[column] = state[column][at]
        return found, states

    def _as(self, keys: Sequence[IntArray], state: IntArray) -> IntArray | slice | None:
        """Where rows are that have these keys, none of which is there twice; None: they have
        others."""
        mine = [state[column] for column in self._node.on]
        if equal(keys, mine):
            return slice(None)
        if self._index is not None:
            key, own = keys[self._index], mine[self._index]
            places = np.zeros(max(int(key.max()), int(own.max())) + 1, np.int64)
            places[own] = np.arange(own.size)
            at = places.take(key)
            if equal(keys, [each.take(at) for each in mine]):
                return at
        at = order_of(mine[::-1])
        return at if equal(keys, [each.take(at) for each in mine]) else None

    def _pool(self) -> IntArray | None:
        """All that waits; None: nothing does."""
        pools = [] if self._left is None else [self._left]
        for port, numbers, state in self._new:
            pools.append(np.concatenate([numbers[None], np.full((1, numbers.size), port), state]))
        return np.concatenate(pools, axis=1) if pools else None

    def _sorted(self, pool: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """As ``_by_key``; there are no two rows of a port with one key."""
        keys = [pool[_JOINED + column] for column in self._node.on]
        order, starts, counts = by_key(keys, pool[_PORT])
        (wrong,) = repeated(pool[_PORT].take(order), starts).nonzero()
        if wrong.size:
            i = order[wrong[0]]
            raise self._node.twice(int(pool[_PORT, i]), pool[_JOINED:, i])
        return order, starts, counts

    def story(self) -> list[str]:
        """Who waits for whom, a line each.

        Raises:
            GraphError: As ``complete``.
        """
        if self._direct is not None:
            pool = self._direct.waiting()
        else:
            pool = self._pool()
        if pool is None:
            return []
        order, starts, counts = self._sorted(pool)
        told = []
        for start, count in zip(starts[:SHOWN].tolist(), counts[:SHOWN].tolist(), strict=True):
            here = order[start : start + count]
            absent = sorted(set(range(self._ports)) - set(pool[_PORT].take(here).tolist()))
            told.append(self._node.waits(pool[_JOINED:, here[0]], absent))
        if starts.size > SHOWN:
            told.append(f"'{self._node.name}' waits for ports of {starts.size - SHOWN} more rows")
        return told


@final
class _DirectSides:
    """Rows of the ports of one join whose key is an index of the arena, by that: a table says where
    those that wait are, so that nothing is sorted. Joined rows are in the order of those that came
    last.

    Args:
        node: Says what columns mean, and refuses what is wrong.
        ports: How many.
    """

    __slots__ = ("_held", "_node", "_size", "_table", "_waiting")

    def __init__(self, node: JoinNode, ports: int) -> None:
        self._node = node
        self._held = np.empty((0, 0), np.int64)  # numbers and columns, as they came
        self._size = self._waiting = 0
        self._table = np.full((ports, 0), -1)

    def complete(
        self, port: int, numbers: IntArray, state: IntArray
    ) -> tuple[list[IntArray], IntArray]:
        """As of ``Sides``."""
        n, key = numbers.size, state[self._node.on[0]]
        if not n:
            return [_NONE] * len(self._table), state
        first = self._keep(numbers, state)
        self._reach(int(key.max()))
        table = self._table
        mine = table[port]
        before, own = mine.take(key), np.arange(first, first + n)
        mine[key] = own
        wrong = (before >= 0) | (mine.take(key) != own)
        if wrong.any():
            raise self._node.twice(port, state[:, int(wrong.argmax())])
        members = table.take(key, 1)
        (whole,) = (members.min(0) >= 0).nonzero()
        if whole.size < n:
            members, key = members.take(whole, 1), key.take(whole)
        table[:, key] = -1
        held = self._held
        self._waiting += n - members.size
        if not self._waiting:
            self._size = 0
        return _side_by_side(self._node, held[_NUMBER], held[1:], members)

    def _keep(self, numbers: IntArray, state: IntArray) -> int:
        """Hold rows; where the first of them is."""
        first = self._size
        self._size = end = first + numbers.size
        columns, had = self._held.shape
        if end > had or columns != len(state) + 1:
            held = np.empty((len(state) + 1, max(end, 2 * had, _ROWS)), np.int64)
            if first:
                held[:, :first] = self._held[:, :first]
            self._held = held
        self._held[_NUMBER, first:end] = numbers
        self._held[1:, first:end] = state
        return first

    def _reach(self, most: int) -> None:
        """Have room for so large a key."""
        ports, had = self._table.shape
        if most >= had:
            table = np.full((ports, max(most + 1, 2 * had)), -1)
            table[:, :had] = self._table
            self._table = table

    def waiting(self) -> IntArray | None:
        """Numbers, ports and columns of rows that wait; None: there are none."""
        ports, keys = (self._table >= 0).nonzero()
        if not ports.size:
            return None
        rows = self._held.take(self._table[ports, keys], 1)
        return np.concatenate([rows[:1], ports[None], rows[1:]])


def _side_by_side(
    node: JoinNode, numbers: IntArray, state: IntArray, members: IntArray
) -> tuple[list[IntArray], IntArray]:
    """By port the numbers of rows that are joined, and the states of what they become.

    Args:
        node: Says which columns come from which port.
        numbers, state: Of all rows that are held.
        members: int64 ``(ports, n)``, where the joined rows are among those.
    """
    states = state.take(members[0], 1)
    for k, columns in enumerate(node.handles):
        for column in columns:
            states[column] = state[column].take(members[k])
    return [numbers.take(mine) for mine in members], states

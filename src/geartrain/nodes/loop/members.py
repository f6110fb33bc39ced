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
from operator import itemgetter
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from geartrain.frames.message import INSTANCE, VERTEX, IntArray
from geartrain.native.groups import AHEAD, MemberRecords
from geartrain.nodes.group import Group
from geartrain.nodes.join import JoinNode

_SHOWN: Final = 5
_MANY: Final = 1024
"""Rows from which on it takes less to make one number of their keys than to sort by each."""
_ROOM: Final = 1 << 62
_NONE: Final = np.zeros(0, np.int64)
_PLACE: Final = 2
"""Of the words of a record, that member's place in its group."""
_ROWS: Final = 64
"""For so many there is room at first."""


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


def _ascend(keys: Sequence[IntArray], *, strictly: bool = True) -> bool:
    """Whether rows are in the order of their keys, the first of them first, and none has those of
    the one before, or may."""
    equal: NDArray[np.bool_] | None = None  # to the row before, by the keys so far
    for key in keys:
        less, same = key[1:] < key[:-1], key[1:] == key[:-1]
        if equal is not None:
            less &= equal
            same &= equal
        if less.any():
            return False
        equal = same
        if not equal.any():
            return True
    return not strictly or equal is None


def _equal(some: Sequence[IntArray], others: Sequence[IntArray]) -> bool:
    """Whether columns are the same."""
    return all((a == b).all() for a, b in zip(some, others, strict=True))


def _repeated(places: IntArray, starts: IntArray) -> NDArray[np.bool_]:
    """Which rows, sorted by key and place, have the place of the one before."""
    same = np.zeros(places.size, np.bool_)
    np.equal(places[1:], places[:-1], out=same[1:])
    same[starts] = False
    return same


def _sorting(node: Group, columns: int, *, moved: bool) -> list[int]:
    """Columns by which members of a group are sorted, of so many that they came with."""
    # Those of a group are of one instance, and alike in its key where that is as it was.
    alike = {INSTANCE, *(() if moved else node.by)}
    return [k for k in range(columns) if k not in alike]


def member_words(
    node: Group, columns: int, *, moved: bool
) -> tuple[int, list[int], list[int], list[int]]:
    """What C reads of members that have so many columns: words of a record; and which of them tell
    groups apart, by which members of a group are sorted, and which these have in common."""
    keys, more, came = [AHEAD + column for column in node.by[::-1]], [_PLACE], AHEAD
    twice = moved and not node.ordered
    if not node.ordered:
        came += columns if moved else 0
        more = [came + column for column in _sorting(node, columns, moved=moved)]
    width = AHEAD + (2 if twice else 1) * columns
    return width, keys, more, [AHEAD + column for column in node.handles]


@final
class Members:
    """Those of the groups of one operator.

    Args:
        node: Says what columns mean, and refuses what is wrong.
    """

    __slots__ = ("_node", "_records")

    def __init__(self, node: Group) -> None:
        self._node = node
        self._records: MemberRecords | None = None

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
        every = [numbers, told.sizes, told.positions, told.state]
        moved = told.state is not state
        if moved and not node.ordered:
            every.append(state)  # by which they are sorted: what it was before it moved
        records = self._records
        if records is None:
            records = self._records = self._begun(len(state), moved=moved)
        every = [x if x.flags.c_contiguous else np.ascontiguousarray(x) for x in every]
        found = records.collect(every) or self._looked_through(records, every, moved=moved)
        if found[1].size:
            node.check(found[1])
        return found

    def _begun(self, columns: int, *, moved: bool) -> MemberRecords:
        """Records of members that have so many columns."""
        node = self._node
        width, keys, more, alike = member_words(node, columns, moved=moved)
        rest = {"keys": keys, "more": more, "alike": alike}
        return MemberRecords(columns, width, ordered=node.ordered, **rest)

    def _looked_through(
        self, records: MemberRecords, came: Sequence[IntArray], *, moved: bool
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The twin of ``MemberRecords.collect``, which says what is refused."""
        node, columns = self._node, len(came[AHEAD])
        every = np.concatenate([records.waiting, np.vstack(came)], axis=1)
        numbers, sizes, positions = every[:AHEAD]
        keyed = every[AHEAD : AHEAD + columns]
        order, starts, counts = self._sorted(keyed, positions)
        # As they came: the first has the group's size.
        first = np.minimum.reduceat(order, starts) if node.ordered else order.take(starts)
        sizes = sizes.take(first)
        self._check(keyed, positions, order, starts, counts, first, sizes)
        complete = counts == sizes
        (done,) = complete.nonzero()
        mask = complete.repeat(counts)
        left = order[~mask]
        left.sort()  # as they came
        records.keep(every.take(left, 1))
        order, first, sizes = order[mask], first[done], sizes[done]
        if not node.ordered and done.size:
            order = self._by_state(every[-columns:], order, sizes, moved=moved)
        return numbers.take(order), sizes, keyed.take(first, 1)

    def _sorted(self, keyed: IntArray, positions: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        keys = [keyed[column] for column in self._node.by]
        return _by_key(keys, positions if self._node.ordered else None)

    def _check(
        self,
        keyed: IntArray,
        positions: IntArray,
        order: IntArray,
        starts: IntArray,
        counts: IntArray,
        first: IntArray,
        sizes: IntArray,
    ) -> None:
        node = self._node
        if node.reads_memory:
            node.check_memory(keyed.take(first.repeat(counts), 1), keyed.take(order, 1))
        if not node.ordered:
            wrong = counts > sizes
            if wrong.any():
                i = int(wrong.argmax())
                raise node.misplaced(keyed[:, first[i]], int(sizes[i]), int(sizes[i]))
            return
        places = positions.take(order)
        wrong = _repeated(places, starts)
        wrong |= places < 0
        wrong |= places >= sizes.repeat(counts)
        if wrong.any():
            i = int(wrong.argmax())
            k = int(starts.searchsorted(i, "right")) - 1
            raise node.misplaced(keyed[:, first[k]], int(places[i]), int(sizes[k]))

    def _by_state(
        self, came: IntArray, order: IntArray, sizes: IntArray, *, moved: bool
    ) -> IntArray:
        """Members of each group by the columns that they came with.

        Args:
            came: These columns.
            order: Members, group by group.
            sizes: How many each has.
            moved: Whether columns of their key were others then.
        """
        columns = [came[k] for k in _sorting(self._node, len(came), moved=moved)]
        if _ascend(columns, strictly=False):  # so they are in each group
            return order
        group = np.arange(sizes.size).repeat(sizes)
        return order.take(_order([group, *[column.take(order) for column in columns]]))

    def story(self) -> list[str]:
        """Who waits for whom, a line each."""
        waiting = None if self._records is None else self._records.waiting
        if waiting is None or not waiting.size:
            return []
        _, sizes, positions = waiting[:AHEAD]
        keyed = waiting[AHEAD:]
        order, starts, counts = self._sorted(keyed, positions)
        first = np.minimum.reduceat(order, starts)
        told = []
        for k in range(min(starts.size, _SHOWN)):
            mine = order[starts[k] : starts[k] + counts[k]]
            here = positions[mine].tolist() if self._node.ordered else [*range(mine.size)]
            state = keyed[:, first[k]]
            told.append(self._node.waits(state, here, int(sizes[first[k]])))
        if starts.size > _SHOWN:
            more = starts.size - _SHOWN
            told.append(f"'{self._node.name}' waits for members of {more} more groups")
        return told


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
        if not _ascend(keys[::-1]):
            order = _order(keys[::-1])
            own, states = own.take(order), states.take(order, 1)
            keys = [states[column] for column in self._node.on]
            if not _ascend(keys[::-1]):
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
        if _equal(keys, mine):
            return slice(None)
        if self._index is not None:
            key, own = keys[self._index], mine[self._index]
            places = np.zeros(max(int(key.max()), int(own.max())) + 1, np.int64)
            places[own] = np.arange(own.size)
            at = places.take(key)
            if _equal(keys, [each.take(at) for each in mine]):
                return at
        at = _order(mine[::-1])
        return at if _equal(keys, [each.take(at) for each in mine]) else None

    def _pool(self) -> IntArray | None:
        """All that waits; None: nothing does."""
        pools = [] if self._left is None else [self._left]
        for port, numbers, state in self._new:
            pools.append(np.concatenate([numbers[None], np.full((1, numbers.size), port), state]))
        return np.concatenate(pools, axis=1) if pools else None

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
        if self._direct is not None:
            pool = self._direct.waiting()
        else:
            pool = self._pool()
        if pool is None:
            return []
        order, starts, counts = self._sorted(pool)
        told = []
        for start, count in zip(starts[:_SHOWN].tolist(), counts[:_SHOWN].tolist(), strict=True):
            here = order[start : start + count]
            absent = sorted(set(range(self._ports)) - set(pool[_PORT].take(here).tolist()))
            told.append(self._node.waits(pool[_JOINED:, here[0]], absent))
        if starts.size > _SHOWN:
            told.append(f"'{self._node.name}' waits for ports of {starts.size - _SHOWN} more rows")
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

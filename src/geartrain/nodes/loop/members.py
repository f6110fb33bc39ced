"""Members of a group, collected while a plan is made: by one sort.

    columns of members ─► pool ─► sorted by key and place ─► groups that are complete
                           ▲                                 │ the others
                           └─────────────────────────────────┘

By steps a group keeps payload, so its members have cells, and a table finds them. A plan has row
numbers and columns alone, of a few hundred members: to sort them again whenever some come takes a
quarter of what cells and tables take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from geartrain.frames.message import INSTANCE, IntArray
from geartrain.native.groups import AHEAD, MemberRecords
from geartrain.nodes.group import Group
from geartrain.nodes.loop.sorting import ascend, by_key, order_of, repeated

SHOWN: Final = 5
"""Who waits is told of so many."""
_SIZE: Final = 1
"""Of the words of a record, how many its group has, as this member says."""
_PLACE: Final = 2
"""That member's place in its group."""


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
    alike = [] if isinstance(node.size, int) else [_SIZE]
    return width, keys, more, [*alike, *(AHEAD + column for column in node.handles)]


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
            GraphError: A place is none of its group's, or taken; or members of a group say
                different sizes.
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
        numbers, said, positions = every[:AHEAD]
        keyed = every[AHEAD : AHEAD + columns]
        order, starts, counts = self._sorted(keyed, positions)
        # As they came: the first has the group's size.
        first = np.minimum.reduceat(order, starts) if node.ordered else order.take(starts)
        sizes = said.take(first)
        node.check_sizes(said.take(order), sizes.repeat(counts), keyed, order)
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
        return by_key(keys, positions if self._node.ordered else None)

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
        wrong = repeated(places, starts)
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
        if ascend(columns, strictly=False):  # so they are in each group
            return order
        group = np.arange(sizes.size).repeat(sizes)
        return order.take(order_of([group, *[column.take(order) for column in columns]]))

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
        for k in range(min(starts.size, SHOWN)):
            mine = order[starts[k] : starts[k] + counts[k]]
            here = positions[mine].tolist() if self._node.ordered else [*range(mine.size)]
            state = keyed[:, first[k]]
            told.append(self._node.waits(state, here, int(sizes[first[k]])))
        if starts.size > SHOWN:
            more = starts.size - SHOWN
            told.append(f"'{self._node.name}' waits for members of {more} more groups")
        return told

"""Nodes that wait for the members of a group.

    members (key, position) ─► stack (n, size, ...), sum, mean, max, or a bundle

A group of fixed size writes members straight to where the next module reads them. What comes out
does not depend on the order of arrival: positions come from ``order``, else members are sorted by
their state.

Source: Group of Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.frames.frame import View
from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    distinct,
    join_arrays,
    join_gradient,
    join_origins,
    join_states,
    ranges,
)
from geartrain.frames.rows import RowStore
from geartrain.native.rows import Moves, take
from geartrain.nodes.collector import allocate_ragged, release_ragged
from geartrain.nodes.control import Move
from geartrain.nodes.keys import describe_key, key_columns, repeated, table_for
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.reductions import How, reduced, share_of_max, shared_out

Column: TypeAlias = str | Callable[[View], Any]
_MOST_MEMBERS: Final = 1 << 24


@final
@dataclass(slots=True)
class MemberColumns:
    """What is known of members before they are collected.

    Args:
        state: int64 ``(columns, n)``, with the key of their group.
        sizes: int64 ``(n,)``, members of their group.
        positions: int64 ``(n,)``, in it; zeros where they are sorted by their state.
    """

    state: IntArray
    sizes: IntArray
    positions: IntArray


@final
class Group(AbstractNode):
    """Collect the members of a key.

    Args:
        place: Number, name, frames.
        by: State columns of the key; members of one group belong to one instance.
        move: Sets key columns first; ``size`` and ``order`` see the members as they came.
        size: How many members: a number, a column, or a function of the ``View``.
        order: Position of a member, 0..size-1: a column or a function. None: members are sorted by
            their state.
        how: What becomes of them.
        handles: State columns of handles of memories, which members of a group share.
    """

    def __init__(
        self,
        place: Place,
        by: Sequence[int],
        move: Move | None,
        size: int | Column,
        order: Column | None,
        how: How,
        handles: Sequence[int] = (),
    ) -> None:
        super().__init__(place)
        self._handles = list(handles)
        edge = place.schema.state.get("edge")
        self._by = key_columns(by, edge)
        self._table = table_for(self._by, edge)
        self._move = move
        self._size, self._order, self._how = size, order, how
        self._sorted = order is None
        self._stacked: int | None = size if isinstance(size, int) else None
        states = len(place.schema.state)
        self._groups = RowStore(place.name, ("start", "size", "arrived"), states)
        columns = ("origin", "filled", "sorted") if self._sorted else ("origin", "filled")
        self._cells = RowStore(f"{place.name} members", columns, states)

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        done, states = self._collect(batches)
        return Emission([(0, self._result(done, states))] if done.size else [])

    def _collect(self, batches: Sequence[Forward]) -> tuple[IntArray, IntArray]:
        """Take members in; the groups that are complete by that, and their states."""
        state = join_states(batches)
        view = self.place.view(Forward((), state, state[0]))
        keyed = state
        if self._move is not None:
            keyed = self._move.move(Forward((), state, state[0]), view)
        size = self._size
        sizes = None if isinstance(size, int) else self._sizes(column_of(size, view))
        groups = self._table.slots(keyed[self._by], lambda rows: self._open(rows, keyed, sizes))
        if sizes is not None:
            self.check_sizes(sizes, self._groups["size"][groups], keyed)
        if self._handles:
            self._require_one_memory(groups, state)
        cells = self._position(groups, view)
        store = self._cells
        store["origin"][cells] = join_origins(batches)
        if self._sorted:
            store.state[:, cells] = state
        self._write(batches, cells)
        arrived = self._groups["arrived"]
        np.add.at(arrived, groups, 1)
        done = distinct(groups[arrived[groups] == self._groups["size"][groups]])
        states = self._groups.state.take(done, 1)
        if done.size:
            self._table.remove(states[self._by])
            if self._sorted:
                self._sort(done)
        return done, states

    def told(self, state: IntArray) -> MemberColumns:
        """What columns of members say of their groups, for who collects them without payload."""
        view = self.place.view(Forward((), state, state[0]))
        keyed = state
        if self._move is not None:
            keyed = self._move.move(Forward((), state, state[0]), view)
        sizes, n = self._size, state.shape[1]
        if isinstance(sizes, int):
            all_sizes = np.full(n, sizes, np.int64)
        else:
            all_sizes = self._sizes(column_of(sizes, view))
        position = np.zeros(n, np.int64) if self._order is None else column_of(self._order, view)
        return MemberColumns(keyed, all_sizes, position)

    @property
    def moving(self) -> Move | None:
        """What sets key columns before."""
        return self._move

    @property
    def size(self) -> int | Column:
        """How many members a group has."""
        return self._size

    @property
    def order(self) -> Column | None:
        """The place of a member."""
        return self._order

    @property
    def by(self) -> list[int]:
        """State columns that members of a group agree in."""
        return self._by

    @property
    def handles(self) -> list[int]:
        """State columns in which they agree as well: handles of memories."""
        return self._handles

    @property
    def reads_memory(self) -> bool:
        """Whether members of a group must read one memory."""
        return bool(self._handles)

    @property
    def ordered(self) -> bool:
        """Whether members say their place; else they are sorted by their state."""
        return not self._sorted

    def check(self, sizes: IntArray) -> None:
        """Raises:
        GraphError: Groups of these sizes are to be stacked, and are not alike.
        """
        if self._how == "stack":
            self._require_equal(sizes)

    def check_sizes(
        self, said: IntArray, sizes: IntArray, state: IntArray, at: IntArray | None = None
    ) -> None:
        """Members of one group say the same of it.

        Args:
            said: int64 ``(n,)``, how many members their group has, as each of them says.
            sizes: int64 ``(n,)``, as the first of their group said.
            state: int64 ``(columns, members)``, with the keys.
            at: Which columns of it are theirs; None: all, as they are.

        Raises:
            GraphError: They do not.
        """
        wrong = said != sizes
        if wrong.any():
            i = int(wrong.argmax())
            raise GraphError(
                f"'{self.name}': members of {self.key(state[:, i if at is None else at[i]])} say "
                f"different sizes of their group: the first {int(sizes[i])}, another "
                f"{int(said[i])}; let 'size' be the same for all members of a group, as a column "
                "of the vertex or the instance that they meet at is, or let the key tell them apart"
            )

    def check_memory(self, first: IntArray, state: IntArray) -> None:
        """Raises:
        GraphError: Members, a column of ``state`` each, read others than the first of their
            group, a column of ``first`` each.
        """
        for column in self._handles:
            wrong = (first[column] != state[column]).nonzero()[0]
            if wrong.size:
                self._refuse_memories(column, self.key(first[:, wrong[0]]))

    def misplaced(self, state: IntArray, position: int, size: int) -> GraphError:
        """The error for a member of the group with this state."""
        return GraphError(
            f"'{self.name}': a member of {self.key(state)} came for position {position}, "
            f"but the group has {size} positions, 0..{size - 1}, and each is taken once; look at "
            "'size' and 'order', which counts the members of each group from 0, and at rows that "
            "reach the group twice"
        )

    def waits(self, state: IntArray, here: list[int], size: int) -> str:
        """A line about a group that is not complete."""
        return (
            f"'{self.name}' waits for members of {self.key(state)}: positions {here} of "
            f"0..{size - 1} are there"
        )

    def key(self, state: IntArray) -> str:
        """The key of the group with this state, in the user's numbers."""
        return describe_key(self.place, state[:, None], self._by)

    def _open(self, rows: IntArray, state: IntArray, said: IntArray | None) -> int:
        """New groups, one for each of these rows of the batch, of which ``said`` are the sizes."""
        size = self._size
        if said is None:
            assert isinstance(size, int)
            sizes = np.full(rows.size, size, np.int64)
        else:
            sizes = said[rows]
        start = self._groups.allocate(rows.size)
        end = start + rows.size
        self._groups["start"][start:end] = allocate_ragged(self._cells, sizes)
        self._groups["size"][start:end] = sizes
        self._groups["arrived"][start:end] = 0
        self._groups.state[:, start:end] = state.take(rows, 1)
        first = int(self._groups["start"][start])
        self._cells["filled"][first : first + int(sizes.sum())] = 0
        return start

    def _sizes(self, sizes: IntArray) -> IntArray:
        low, high = int(sizes.min()), int(sizes.max())
        if low < 1 or high > _MOST_MEMBERS:
            raise GraphError(
                f"'{self.name}': a group got size {low if low < 1 else high:,} while a member is "
                f"here; sizes are 1 or more, at most {_MOST_MEMBERS:,}, and the member says "
                "them as it came, before by= moves it: a child how many children its parent has"
            )
        return sizes

    def _require_one_memory(self, groups: IntArray, state: IntArray) -> None:
        """The row of a group has the handles of its first member: those of all."""
        for column in self._handles:
            wrong = np.flatnonzero(self._groups.state[column][groups] != state[column])
            if wrong.size:
                self._refuse_memories(column, self._key(int(groups[wrong[0]])))

    def _refuse_memories(self, column: int, key: str) -> NoReturn:
        names = {i: name for name, i in self.place.schema.state.items()}
        raise GraphError(
            f"'{self.name}': members of {key} read different "
            f"bundles of memory '{names[column][1:]}', and a group has one; let the key "
            "tell them apart, or hold one bundle for an instance"
        )

    def _position(self, groups: IntArray, view: View) -> IntArray:
        """The cell of each member."""
        sizes = self._groups["size"][groups]
        if self._order is None:
            position = self._groups["arrived"][groups] + _rank(groups)
        else:
            position = column_of(self._order, view)
        cells = self._groups["start"][groups] + position
        wrong: NDArray[np.bool_] = (position < 0) | (position >= sizes)
        if not wrong.any():
            filled = self._cells["filled"]
            twice = filled[cells] > 0
            filled[cells] = 1
            if not twice.any() and distinct(cells).size == cells.size:
                return cells
            wrong = twice if twice.any() else repeated(cells)
        i = int(np.flatnonzero(wrong)[0])
        group = int(groups[i])
        raise self.misplaced(self._groups.state[:, group], int(position[i]), int(sizes[i]))

    def _write(self, batches: Sequence[Forward], cells: IntArray) -> None:
        moves, at = Moves(), 0
        for batch in batches:
            where = cells[at : at + len(batch)]
            at += len(batch)
            for j, column in enumerate(batch.payload):
                buffer = self._cells.buffer(j, column, len(batch))
                moves.add(buffer, where, column, batch.index)
        moves.run()

    def _sort(self, done: IntArray) -> None:
        """Give members their place by their state; they stay in the cells where they are."""
        starts, sizes = self._groups["start"][done], self._groups["size"][done]
        cells = ranges(starts, sizes)
        group = np.arange(done.size).repeat(sizes)
        keys = self._cells.state[::-1].take(cells, 1)
        self._cells["sorted"][cells] = cells[np.lexsort([*keys, group])]

    def _members(self, starts: IntArray, sizes: IntArray) -> IntArray:
        """The cells of members of these groups, group by group in the order of their places."""
        cells = ranges(starts, sizes)
        if not self._sorted:
            return cells
        found: IntArray = self._cells["sorted"][cells]
        return found

    def _result(self, done: IntArray, state: IntArray) -> Forward:
        starts, sizes = self._groups["start"][done], self._groups["size"][done]
        origin = done + (self.id << 40)
        if self._how == "bundle":
            return Forward(
                self._cells.buffers(), state, origin, sizes, self._members(starts, sizes)
            )
        if self._how == "stack":
            return self._stack(starts, sizes, state, origin)
        members = take(self._cells.buffers(), self._members(starts, sizes))
        payload = tuple(reduced(self._how, b, sizes) for b in members)
        return Forward(payload, state, origin)

    def _stack(
        self, starts: IntArray, sizes: IntArray, state: IntArray, origin: IntArray
    ) -> Forward:
        k = self._require_equal(sizes)
        cells = self._members(starts, sizes)
        lie = (starts % k == 0).all() and self._cells.capacity % k == 0
        if lie and np.array_equal(cells, ranges(starts, sizes)):
            payload = tuple(b.view(-1, k, *b.shape[1:]) for b in self._cells.buffers())
            return Forward(payload, state, origin, None, starts // k)  # read where they lie
        members = take(self._cells.buffers(), cells)
        payload = tuple(b.view(starts.size, k, *b.shape[1:]) for b in members)
        return Forward(payload, state, origin)

    def _require_equal(self, sizes: IntArray) -> int:
        """How many members each group that is stacked has."""
        k = self._stacked = int(sizes[0]) if self._stacked is None else self._stacked
        if (sizes != k).any():
            other = int(sizes[sizes != k][0])
            raise GraphError(
                f"'{self.name}': groups of {k} and of {other} members cannot be stacked, as all "
                "rows of a stream have one shape; use how='bundle', or sum, mean, max"
            )
        return k

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        zero = [b.rows for b in batches if b.gradient is None]
        some = [b for b in batches if b.gradient is not None]
        if zero:
            rows = join_arrays(zero) & ROW_MASK
            cells = self._members(self._groups["start"][rows], self._groups["size"][rows])
            emission.backward.append(Backward(self._cells["origin"][cells], None))
            self._release(rows)
        if some:
            rows = join_arrays([b.rows for b in some]) & ROW_MASK
            sizes = self._groups["size"][rows]
            cells = self._members(self._groups["start"][rows], sizes)
            emission.backward.append(self._answer(join_gradient(some), cells, sizes))
            self._release(rows)
        return emission

    def _answer(
        self, gradient: tuple[Tensor | None, ...], cells: IntArray, sizes: IntArray
    ) -> Backward:
        origin = self._cells["origin"][cells]
        if self._how == "bundle":
            return Backward(origin, gradient)
        if self._how == "stack":
            return Backward(origin, tuple(None if g is None else g.flatten(0, 1) for g in gradient))
        owner = np.repeat(np.arange(sizes.size), sizes)
        if self._how == "max":
            members = take(self._cells.buffers(), cells)
            return Backward(
                origin,
                tuple(
                    None if g is None else share_of_max(members[j], owner, sizes.size, g)
                    for j, g in enumerate(gradient)
                ),
            )
        return Backward(origin, shared_out(self._how, gradient, sizes), None, owner)

    def _release(self, rows: IntArray) -> None:
        starts, sizes = self._groups["start"][rows], self._groups["size"][rows]
        self._groups.release(rows)
        release_ragged(self._cells, starts, sizes)

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self._groups.state[INSTANCE, rows]  # a slot is its own address
        return found

    def check_empty(self) -> None:
        self._groups.check_empty()

    def story(self) -> list[str]:
        told = []
        rows = self._groups.live_rows()
        missing = self._groups["arrived"][rows] < self._groups["size"][rows]
        for group in rows[missing][:5].tolist():
            start, size = int(self._groups["start"][group]), int(self._groups["size"][group])
            here = np.flatnonzero(self._cells["filled"][start : start + size]).tolist()
            told.append(self.waits(self._groups.state[:, group], here, size))
        if missing.sum() > 5:
            told.append(f"'{self.name}' waits for members of {int(missing.sum()) - 5} more groups")
        if (~missing).any():
            told.append(f"'{self.name}' waits for the gradients of {int((~missing).sum())} groups")
        return told

    def nbytes(self) -> int:
        return self._cells.nbytes()

    def _key(self, group: int) -> str:
        return self.key(self._groups.state[:, group])


def column_of(what: Column, view: View) -> IntArray:
    """A column named or computed: ours, so that what is checked is what is used."""
    return np.array(getattr(view, what) if isinstance(what, str) else what(view), np.int64)


def _rank(groups: IntArray) -> IntArray:
    """How many earlier rows of the batch have the same group."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    count = np.arange(groups.size)
    first = np.zeros_like(count)
    first[1:] = np.where(ordered[1:] != ordered[:-1], count[1:], 0)
    rank = np.empty_like(groups)
    rank[order] = count - np.maximum.accumulate(first)
    return rank

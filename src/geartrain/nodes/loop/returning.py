"""The way back of calls that C makes: what a module's weights learn of some of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Final, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.frames.message import IntArray, distinct, join_arrays
from geartrain.native.rows import pointer, take
from geartrain.native.sums import GradientCall, GradientPlace
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.loop.arenas import NO_MEMORY, PassingMemory, RowMemory, nbytes_of
from geartrain.nodes.loop.back_layout import LyingPair
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.module import TurnModule
from geartrain.nodes.loop.turn import Got
from geartrain.nodes.loop.updates import Updates
from geartrain.nodes.slot import ALONE, Slot

_Job: TypeAlias = tuple[Slot, GradientPlace, LyingPair, Sequence[tuple[int, int, int]], int, bool]
"""What a weight learns: its slot and where that lies, the rows, their runs, of which update they
are, and whether they have been added up."""

_NOBODY: Final = np.zeros(0, np.int64)

_SIDE_BY_SIDE: Final = 4
"""Rows of an update that lie side by side, at least, on an average, or they are put apart."""


@final
class Returning:
    """Some calls of a module on their way back.

    Args:
        module: It.
        records: Theirs.
        held: The tensors of the turn.
        gradients: Of its outputs.
        local: Slot to its place in the turn.
        updates: By part, of which update the gradient of each place is.
        wanted: uint8, by row; C writes to all of it.
        at_wanted: Where that lies.

    Attributes:
        nbytes: That are asked for when it gets memory for what the way back makes.
    """

    __slots__ = (
        "_arena",
        "_at_updates",
        "_at_wanted",
        "_count",
        "_cuts",
        "_first",
        "_gradients",
        "_held",
        "_known",
        "_local",
        "_most",
        "_multiplied",
        "_n",
        "_passing",
        "_records",
        "_rest",
        "_several",
        "_sums",
        "_updates",
        "_waits",
        "_wanted",
        "_where",
        "module",
        "nbytes",
    )

    def __init__(
        self,
        module: TurnModule,
        records: Sequence[Sequence[int]],
        held: FiringTensors,
        gradients: Sequence[Tensor | None],
        local: IntArray,
        updates: Updates,
        wanted: NDArray[np.uint8],
        at_wanted: int,
    ) -> None:
        self.module, self._records, self._held = module, records, held
        self._wanted, self._at_wanted = wanted, at_wanted
        self._gradients = gradients
        layout, weights = module.layout, module.weights
        first = self._first = records[0][2]
        n = self._n = records[-1][2] + records[-1][1] - first
        self._local = _NOBODY
        if weights is not None:
            self._local = local[join_arrays(module.slots)[first : first + n]]
        of = None if weights is None else updates.get(weights.name)
        self._updates = None if of is None else of[self._local]
        self._several, self._at_updates = 1, 0
        if self._updates is not None and layout.form.split:
            self._several = int(self._updates.max()) + 1
            self._at_updates = pointer(self._updates) - self._updates.itemsize * first
        self._most = max([record[1] for record in records])
        self._cuts = self._updates_end()
        # What waits for a step stays: it would hold what all others are lent, too.
        self._waits = weights is not None and (self._cuts is None or self._are_few)
        self.nbytes = 0
        if layout.back.passing_blocks:
            self.nbytes += nbytes_of(layout.back.passing_blocks, self._most)
        if layout.back.sum_blocks:
            self.nbytes += nbytes_of(layout.back.sum_blocks, self._several)
        if layout.back.blocks and not self._waits:
            self.nbytes += nbytes_of(layout.back.blocks, n)
        self._known: dict[int, list[tuple[int, int, int]]] | None = None
        self._count: int | None = None
        self._multiplied = False
        self._rest: Collection[int] = ()
        """Results of the backward that have not been multiplied, if the others have."""

    def lie(self, passing: PassingMemory) -> tuple[int, int, int]:
        """Lie in memory that is lent, and write where everything is; as the table of modules
        ends."""
        layout, first, n = self.module.layout, self._first, self._n
        self._arena = self._passing = self._sums = NO_MEMORY
        if layout.back.blocks:
            self._arena = RowMemory(layout.back.blocks, n, None if self._waits else passing)
        if layout.back.passing_blocks:
            self._passing = RowMemory(layout.back.passing_blocks, self._most, passing)
        if layout.back.sum_blocks:
            self._sums = RowMemory(layout.back.sum_blocks, self._several, passing)
            self._sums.clear()
        lent = self._arena, self._passing, self._sums
        self._where = layout.place_back(
            self.module.arena, *lent, first, self._held, self._gradients
        )
        # Where both would lie if they began with the first row of the module.
        return self._at_wanted - first, 0, self._at_updates

    @property
    def _are_few(self) -> bool:
        """Whether they had better wait for the other rows of the turn."""
        return self._n < ALONE and self._n < self.module.size

    @property
    def _came(self) -> int:
        """How many rows have got a gradient, once they have."""
        if self._count is None:
            self._count = int(np.count_nonzero(self._wanted))
        return self._count

    def _updates_end(self) -> list[int] | None:
        """Where rows of one update end that lie side by side, the last row left out; None: so few
        do that they had better be put apart."""
        if self._updates is None:
            return []
        (cuts,) = (self._updates[1:] != self._updates[:-1]).nonzero()
        cuts += 1
        return cuts.tolist() if cuts.size * _SIDE_BY_SIDE <= self._n else None

    def multiply(self, came: int, call: GradientCall) -> None:
        """Have products and sums of rows made from where they lie, before ``learn``.

        Args:
            came: Of which outputs gradients have come, as bits.
            call: Makes them.
        """
        weights = self.module.weights
        if weights is None or self._cuts is None or self._are_few or self._came < self._n:
            return
        layout = self.module.layout
        learnt, rest = layout.form.rows_learnt(came, weights.gradient)
        pairs = layout.back.pairs(learnt)
        jobs: list[_Job] = []
        adds: object = None  # a sum that is known to add what lies
        for update, runs in self._runs(self._cuts).items():
            n = sum([rows for _, _, rows in runs])
            for one, pair in zip(learnt, pairs, strict=True):
                if one.into is not adds and not one.into.adds_lying:
                    return
                many, slot, adds = pair.many, one.slot, one.into
                if update:
                    slot = one.into.of_update(update).slot(slot.parameter)
                if one.columns is not None:
                    slot = slot.part(one.columns)
                place = slot.place()
                if not many or not call.may_add(place, 1 if one.whole else n * many):
                    return
                jobs.append((slot, place, pair, runs, update, one.whole))
        for slot, place, pair, some, update, whole in jobs:
            call.add(place, self._pieces(pair, some, update), add=not slot.fresh, whole=whole)
            slot.fresh = False
        self._multiplied, self._rest = bool(learnt), rest

    def _pieces(
        self, pair: LyingPair, runs: Sequence[tuple[int, int, int]], update: int
    ) -> list[tuple[int, int, int]]:
        """Where the rows of an update lie, and how many; a piece for those that follow upon one
        another."""
        left, right, many = pair
        at, other = self._where[left.place], 0 if right is None else self._where[right.place]
        if many < 0:
            return [(at + left.row * update, 0, 1)]
        found = []
        for first, into, n in runs:
            mine = at + left.row * (into if left.of_value else first)
            its = 0 if right is None else other + right.row * (into if right.of_value else first)
            found.append((mine, its, many * n))
        return found

    def _runs(self, cuts: Sequence[int]) -> dict[int, list[tuple[int, int, int]]]:
        """By update its rows of calls that follow upon one another, in the module and in the value
        that it makes: the first in either, and how many."""
        if self._known is None:
            runs: list[tuple[int, int, int]] = []
            for _, n, begin, place, _ in self._records:
                first, into, had = runs[-1] if runs else (begin, place, 0)
                if runs and into + had == place:
                    runs[-1] = first, into, had + n
                else:
                    runs.append((begin, place, n))
            self._known = {0: runs} if self._updates is None else self._cut(runs, cuts)
        return self._known

    def _cut(
        self, runs: Sequence[tuple[int, int, int]], cuts: Sequence[int]
    ) -> dict[int, list[tuple[int, int, int]]]:
        """Runs of rows cut where the update is another."""
        updates, begin = self._updates, self._first
        assert updates is not None
        ends = sorted({*cuts, *[first + n - begin for first, _, n in runs]})
        each = updates[[end - 1 for end in ends]].tolist()
        found: dict[int, list[tuple[int, int, int]]] = {}
        left, at = iter(runs), begin
        first, into, n = begin, 0, 0
        for end, update in zip(ends, each, strict=True):
            while at == first + n:
                first, into, n = next(left)
            found.setdefault(update, []).append((at, into + at - first, begin + end - at))
            at = begin + end
        return found

    def learn(self, came: int, got: Got) -> None:
        """Tell weights what has been found for them, and has not been multiplied yet.

        Args:
            came: Of which outputs gradients have come, as bits.
            got: By part, gets the places of the instances whose rows have come back.
        """
        module, weights = self.module, self.module.weights
        if weights is None or not self._came:
            return
        form, less = module.layout.form, self._multiplied
        local, each, some = self._local, self._updates, None
        if self._came < self._n:
            some = np.flatnonzero(self._wanted)
            local, each = local[some], None if each is None else each[some]
        if module.counts:
            got[weights.name].append(local)
        if less and not self._rest:
            return
        found: list[Tensor | None] = [None] * len(form.gradients)
        for k in form.backward.results[len(form.gradients) :]:
            asked = not less or len(found) in self._rest
            found.append(self._result(k) if asked else None)
        if some is not None:
            found = self._some(found, some)
        into: GradientSum = weights.gradient
        if each is None or not form.split:
            with nullcontext() if each is None else into.of_updates(each):
                form.learn(self._of_update(found, 0), came, local.size, into, less)
            return
        for update in distinct(each).tolist():
            mine = np.flatnonzero(each == update)
            with into.of_updates(update):
                of_it = self._of_update(self._some(found, mine), update)
                form.learn(of_it, came, mine.size, into, less)

    def _of_update(self, found: Sequence[Tensor | None], update: int) -> list[Tensor | None]:
        """Of what rows were added up in, the sum of one update."""
        layout = self.module.layout
        return [
            x[update] if x is not None and k < 0 and layout.back.is_sum(~k) else x
            for k, x in zip(layout.form.backward.results, found, strict=True)
        ]

    def _result(self, k: int) -> Tensor | None:
        """A result of the backward, of the rows of all calls."""
        layout, held = self.module.layout, self._held
        form = layout.form
        if k < 0:
            block = layout.back.made_block(~k)
            if layout.back.is_sum(~k):
                return self._sums.view(block, 0, self._sums.rows)
            return self._arena.view(block, 0, self._n)
        k -= form.operands
        if k < 0:
            return None
        if k < len(form.residuals):
            how, number = home = form.residuals[k]
            if how != "output":
                return self.module.arena.view(layout.block[home], self._first, self._n)
            x = layout.outputs(held)[number]
        else:
            gradient = self._gradients[form.tangents[k - len(form.residuals)]]
            assert gradient is not None
            x = gradient
        return rows_of_calls(x, self._records)

    def _some(self, found: Sequence[Tensor | None], which: IntArray) -> list[Tensor | None]:
        """Results of the backward, of some of their rows."""
        layout = self.module.layout
        return [
            x
            if x is None or (k < 0 and layout.back.is_sum(~k))
            else take([x.contiguous()], which)[0]
            for k, x in zip(layout.form.backward.results, found, strict=True)
        ]


def rows_of_calls(x: Tensor, records: Sequence[Sequence[int]]) -> Tensor:
    """Of the rows of a value, those that some calls have made, one call after the other."""
    pieces = [x[into : into + n] for _, n, _, into, _ in records]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

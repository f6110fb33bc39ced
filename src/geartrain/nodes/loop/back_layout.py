"""Where what the way back of one module reads and makes lies, as C has it, and of which of it the
gradients of weights are made.

    inputs kept │ outputs │ their gradients │ what weights get │ what inputs get │ sums by update
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geartrain.native.calls import CallForm, Home, RowsLearnt, RowsOf
from geartrain.nodes.loop.arenas import Block


def row_of(like: Tensor) -> int:
    """Bytes of a row."""
    return prod(like.shape[1:]) * like.itemsize


class Lying(NamedTuple):
    """Where something that a weight learns of has its rows.

    Args:
        place: Which of the addresses it has that ``place_back`` gives.
        row: Bytes.
        of_value: Whether rows are where those of the value are, and not those of the module.
    """

    place: int
    row: int
    of_value: bool = False


class LyingPair(NamedTuple):
    """Rows that are multiplied, or, with nothing on the right, added up.

    Args:
        left, right: They.
        many: Of each row of the module; 0: they are not such as C could read; -1: there is one for
            each update, which is added.
    """

    left: Lying
    right: Lying | None
    many: int


_APART: Final = LyingPair(Lying(0, 0), None, 0)


@final
class BackLayout:
    """Where everything lies on the way back of one module.

    Args:
        form: The module's programs.
        kept: Blocks of the arena of a turn.
        block: Which of them each input has that is kept, and what the forward makes for itself.

    Attributes:
        blocks: Of the arena of the way back: what weights get.
        passing_blocks: Of one call: what inputs get, which is added up at once.
        sum_blocks: What rows are added up in, a sum for each update.
        places: By slot of the program the base, the bytes from row to row, and whose rows it has.
    """

    def __init__(self, form: CallForm, kept: Sequence[Block], block: Mapping[Home, int]) -> None:
        self.form, self._kept, self._block = form, kept, block
        routine = form.backward
        self.blocks: list[Block] = []
        self.passing_blocks: list[Block] = []
        self.sum_blocks: list[Block] = []
        learnt = {~k for k in routine.results[len(form.gradients) :] if k < 0}
        self._passes = [rows and m not in learnt for m, (_, _, rows, _) in enumerate(routine.made)]
        self._made: list[int] = []  # by what is made its block
        for (_, tail, rows, dtype), passes in zip(routine.made, self._passes, strict=True):
            blocks = self.passing_blocks if passes else self.blocks
            blocks = blocks if rows else self.sum_blocks
            self._made.append(len(blocks))
            blocks.append(Block(dtype if rows else form.dtype, tail))
        bases, strides, whose = np.zeros((3, routine.slots), np.int64)
        for k, slot, *_ in routine.given:
            whose[slot], strides[slot] = self._of_argument(k)
        for m, (slot, tail, _, dtype) in enumerate(routine.made):
            whose[slot], strides[slot] = self._kind_of_made(m), Block(dtype, tail).row
        self.places: tuple[NDArray[np.int64], ...] = bases, strides, whose
        self._results = dict(zip(form.gradients, routine.results, strict=False))
        self._slots = [(slot, self.place_of(k)) for k, slot, *_ in routine.given]
        self._slots += [(slot, self.place_of(~m)) for m, (slot, *_) in enumerate(routine.made)]
        self._where: tuple[list[int], list[int]] | None = None
        self._pairs: dict[tuple[int, int | None], LyingPair] = {}
        self._paired: tuple[Sequence[RowsLearnt], list[LyingPair]] = (), []

    @property
    def of_rows(self) -> list[Block]:
        """Blocks that have a row for each row that goes back."""
        return [*self.blocks, *self.passing_blocks]

    def place_of(self, k: int) -> int:
        """Of a result of the backward, or an argument, which of the addresses it has that ``write``
        is given."""
        own, out = len(self._kept), len(self.form.outputs)
        if k >= 0:
            k -= self.form.operands
            residuals = self.form.residuals
            if k >= len(residuals):
                return own + out + self.form.tangents[k - len(residuals)]
            how, number = home = residuals[k]
            return own + number if how == "output" else self._block[home]
        place = own + 2 * out + self._made[~k]
        if self.is_sum(~k):
            return place + len(self.blocks) + len(self.passing_blocks)
        return place + (len(self.blocks) if self._passes[~k] else 0)

    def answer(self, i: int) -> int:
        """The same of the gradient of an input; -1: it gets none."""
        return self.place_of(self._results[i]) if i in self._results else -1

    def whose_answer(self, i: int) -> RowsOf:
        """Whose rows the gradient of an input is."""
        k = self._results[i]
        return self._of_argument(k)[0] if k >= 0 else self._kind_of_made(~k)

    def is_sum(self, m: int) -> bool:
        """Whether rows are added up in something that the backward makes."""
        return not self.form.backward.made[m][2]

    def _kind_of_made(self, m: int) -> RowsOf:
        """Whose rows something is that the backward makes."""
        if self.is_sum(m):
            return RowsOf.OF_UPDATE
        return RowsOf.OF_CALL if self._passes[m] else RowsOf.OF_MODULE

    def _of_argument(self, k: int) -> tuple[RowsOf, int]:
        """Whose rows an argument has, and bytes from row to row."""
        form = self.form
        k -= form.operands
        if k >= len(form.residuals):
            return RowsOf.OF_VALUE, row_of(form.outputs[form.tangents[k - len(form.residuals)]])
        how, number = home = form.residuals[k]
        if how == "output":
            return RowsOf.OF_VALUE, row_of(form.outputs[number])
        return RowsOf.OF_MODULE, self._kept[self._block[home]].row

    def write(self, where: list[int]) -> bool:
        """Write where everything lies, by the addresses of it all; whether it was elsewhere."""
        operands = self.form.addresses(False)
        if self._where == (where, operands):
            return False
        bases = operands.copy()
        for slot, k in self._slots:
            bases[slot] = where[k]
        self.places[0][:] = bases
        self._where = where, operands
        return True

    def pairs(self, learnt: Sequence[RowsLearnt]) -> list[LyingPair]:
        """Where the rows lie that the gradients of weights are made of."""
        known, found = self._paired
        if known is not learnt:
            found = [self._pair(one) for one in learnt]
            self._paired = learnt, found
        return found

    def _pair(self, learnt: RowsLearnt) -> LyingPair:
        key = learnt.left, learnt.right
        found = self._pairs.get(key)
        if found is None:
            found = self._pairs[key] = self._looked_for(learnt)
        return found

    def _looked_for(self, learnt: RowsLearnt) -> LyingPair:
        if learnt.whole:
            return self._added_up(learnt)
        size, (height, width) = self.form.dtype.itemsize, learnt.widths
        left = self._lying(learnt.left)
        right = None if learnt.right is None else self._lying(learnt.right)
        if left is None or not height or (right is None) != (learnt.right is None):
            return _APART
        many, more = divmod(left.row, height * size)
        if more or (right is not None and right.row != many * width * size):
            return _APART
        return LyingPair(left, right, many)

    def _added_up(self, learnt: RowsLearnt) -> LyingPair:
        k, routine = self.form.backward.results[learnt.left], self.form.backward
        if k >= 0:
            return _APART
        _, tail, rows, dtype = routine.made[~k]
        alike = tuple(tail) == tuple(learnt.slot.parameter.shape)
        if rows or dtype is not self.form.dtype or not alike:
            return _APART
        row = self.sum_blocks[self._made[~k]].row
        return LyingPair(Lying(self.place_of(k), row), None, -1)

    def _lying(self, result: int) -> Lying | None:
        """Where a result of the backward lies; None: it is not of rows, or not of the dtype."""
        form = self.form
        k = form.backward.results[result]
        if k < 0:
            if self.is_sum(~k) or self._passes[~k]:
                return None
            return Lying(self.place_of(k), self.blocks[self._made[~k]].row)
        if k < form.operands:
            return None
        place = self.place_of(k)
        k -= form.operands
        residuals = form.residuals
        if k >= len(residuals):
            j = form.tangents[k - len(residuals)]
            return Lying(place, row_of(form.outputs[j]), of_value=True)
        how, number = home = residuals[k]
        if how == "output":
            same = form.outputs[number].dtype is form.dtype
            return Lying(place, row_of(form.outputs[number]), of_value=True) if same else None
        mine = self._kept[self._block[home]]
        return Lying(place, mine.row) if mine.dtype is form.dtype else None

    def made_block(self, m: int) -> int:
        """Of something that the backward makes, its block, of rows or of sums."""
        return self._made[m]

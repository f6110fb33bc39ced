"""The way back of calls that C makes: what a module's weights learn of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import final

import numpy as np
import torch
from torch import Tensor

from geartrain.frames.message import IntArray, distinct, join_arrays
from geartrain.native.calls import pointer
from geartrain.native.rows import take
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.loop.module import TurnModule
from geartrain.nodes.loop.tables import Arena
from geartrain.nodes.loop.tensors import FiringTensors
from geartrain.nodes.loop.turn import Got
from geartrain.nodes.loop.updates import Updates


@final
class Returning:
    """Some calls of a module on their way back.

    Args:
        module: It.
        records: Theirs.
        held: The tensors of the turn.
        gradients: Of the value that it makes.
        local: Slot to its place in the turn.
    """

    __slots__ = (
        "_arena",
        "_first",
        "_gradients",
        "_held",
        "_local",
        "_n",
        "_records",
        "_sums",
        "_wanted",
        "at_wanted",
        "module",
    )

    def __init__(
        self,
        module: TurnModule,
        records: Sequence[Sequence[int]],
        held: FiringTensors,
        gradients: Sequence[Tensor | None],
        local: IntArray,
    ) -> None:
        self.module, self._records, self._held = module, records, held
        self._gradients, self._local = gradients, local
        self._first = records[0][2]
        self._n = records[-1][2] + records[-1][1] - self._first
        layout = module.layout
        self._arena, self._sums = Arena(layout.back_blocks, self._n), layout.sums()
        layout.place_back(module.arena, self._arena, self._first, self._sums, held, gradients)
        self._wanted = np.zeros(self._n, np.uint8)
        self.at_wanted = pointer(self._wanted) - self._first
        """Where it would lie if it began with the first row of the module."""

    def learn(self, came: int, got: Got, updates: Updates) -> None:
        """Tell weights what has been found for them.

        Args:
            came: Of which outputs gradients have come, as bits.
            got: As for ``NativeCalls.backward``.
            updates: Likewise.
        """
        module, wanted = self.module, self._wanted.view(np.bool_)
        weights = None if module.inner is None else module.inner.weights
        if weights is None or not wanted.any():
            return
        form = module.layout.form
        slots = join_arrays(module.slots)[self._first : self._first + self._n]
        local = self._local[slots]
        some = None if wanted.all() else np.flatnonzero(wanted)
        found = [None] * len(form.gradients) + [
            self._result(k) for k in form.backward.results[len(form.gradients) :]
        ]
        if some is not None:
            local, found = local[some], self._some(found, some)
        got[weights.name].append(local)
        into: GradientSum = weights.gradient
        of = updates.get(weights.name)
        each = None if of is None else of[local]
        if each is None or not form.split:
            with nullcontext() if each is None else into.of_updates(each):
                form.learn(found, came, local.size, into)
            return
        for update in distinct(each).tolist():
            mine = np.flatnonzero(each == update)
            with into.of_updates(update):
                form.learn(self._some(found, mine), came, mine.size, into)

    def _result(self, k: int) -> Tensor | None:
        """A result of the backward, of the rows of all calls."""
        layout, held = self.module.layout, self._held
        form = layout.form
        if k < 0:
            total = self._sums[~k]
            return self._arena.view(layout.made_block(~k), 0, self._n) if total is None else total
        k -= form.operands
        if k < 0:
            return None
        if k < len(form.residuals):
            how, number = home = form.residuals[k]
            if how != "output":
                return self.module.arena.view(layout.block[home], self._first, self._n)
            x = (held.likes(layout.into) or ())[number]
        else:
            gradient = self._gradients[form.tangents[k - len(form.residuals)]]
            assert gradient is not None
            x = gradient
        pieces = [x[into : into + n] for _, n, _, into, _ in self._records]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _some(self, found: Sequence[Tensor | None], which: IntArray) -> list[Tensor | None]:
        """Results of the backward, of some of their rows."""
        form = self.module.layout.form
        return [
            x
            if x is None or (k < 0 and self._sums[~k] is not None)
            else take([x.contiguous()], which)[0]
            for k, x in zip(form.backward.results, found, strict=True)
        ]

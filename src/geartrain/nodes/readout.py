"""A module with the loss that alone reads it, in one node.

    x ─► y = f(x; θ) ─► one loss a row ─► dy ─► dx = (∂f/∂x)ᵀ dy, at once
                                           └──► (∂f/∂θ)ᵀ dy is added to the part's gradient

Nobody else wants y, so its gradient is known in the firing that makes it: nothing is stored, no row
waits, and there is no second firing. Forward and backward are of one version: such rows are only
stale where a firing has those of several updates. ``fusion`` says which nodes are of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import final

from geartrain.frames.message import (
    INSTANCE,
    Backward,
    Forward,
    join_lengths,
    join_origins,
    join_states,
)
from geartrain.nodes.call import Call, gather_inputs, require_rows, unsettled, where_it_computes
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import look_inside
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loss import Objective
from geartrain.nodes.node import Emission, Place
from geartrain.nodes.there_and_back import AbstractThereAndBack
from geartrain.nodes.unrecorded import Unrecorded
from geartrain.nodes.weights import AbstractWeights


@final
class ReadoutNode(AbstractThereAndBack):
    """Run a module on rows, compute their losses, and send the gradient of the rows back.

    Args:
        place: Number, name, frames.
        call: The module and how it is called.
        kernel: Computes it.
        objective: The loss.
        weights: The part, or None where there are no parameters.
    """

    def __init__(
        self,
        place: Place,
        call: Call,
        kernel: AbstractKernel,
        objective: Objective,
        weights: AbstractWeights | None,
    ) -> None:
        super().__init__(place, [call.function])
        self._call, self._kernel, self._weights = call, kernel, weights
        self._dry_run = unsettled(call)
        self.objective, self.loss_name = objective, objective.name
        self.alone = call.alone
        self.part_name = None if weights is None else weights.name
        self._bundled = call.inside or call.pool

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        state, origin = join_states(batches), join_origins(batches)
        lengths = join_lengths(batches)
        self._bundled = lengths is not None
        device = None
        if self.place.spread:
            device = where_it_computes(self._call, self._weights, batches)
        inside = None
        if self._call.inside:
            inside = look_inside(self.place, state[INSTANCE], lengths, device)
        inputs = gather_inputs(self._call, self.place, batches, state, lengths, {}, device)
        if self._dry_run is not None:
            self._dry_run.look(self._call, self.place, inputs, state, lengths, device)
            self._dry_run = unsettled(self._call)
        with Unrecorded():
            outputs, residuals = self._kernel.forward(inputs, inside)
        rows = origin.size if lengths is None else int(lengths.sum())
        pooled = lengths is None or self._call.pool
        require_rows(self.name, outputs, origin.size if pooled else rows)
        dy = self.objective.measure(outputs, state, None if pooled else lengths, train)
        if dy is None:
            if train and self._weights is not None:
                self._weights.answered(0, origin.size)
            return Emission(backward=[Backward(origin, None)])
        into = GradientSum(()) if self._weights is None else self._weights.gradient
        updates = None
        if self._weights is not None and self._kernel.apart:
            updates = self._weights.updates_of(state[INSTANCE])
        each = updates if lengths is None or updates is None else updates.repeat(lengths)
        with Unrecorded(), nullcontext() if each is None else into.of_updates(each):
            found = self._kernel.backward(dy, residuals, None, into, inside)
        if self._weights is not None and updates is not None:
            self._weights.answered_for(updates, lengths)
        elif self._weights is not None:
            self._weights.answered(rows, origin.size)
        dx = self._call.answer(found, len(batches[0].payload))
        quiet = all(d is None for d in dx)
        return Emission(
            backward=[Backward(origin, None) if quiet else Backward(origin, dx, lengths)]
        )

    @property
    def apart(self) -> bool:
        return self._kernel.apart

    @property
    def objectives(self) -> Sequence[Objective]:
        return (self.objective,)

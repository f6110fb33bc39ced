"""Nodes that run a module on rows (the paper's parameterised and plain transforms).

    forward   x  ─► y = f(x; θ)          keep residuals and return addresses in the row store
    backward  dy ─► dx = (∂f/∂x)ᵀ dy     gather the residuals of those rows, add (∂f/∂θ)ᵀ dy

What is kept decides the class: ``RowNode`` keeps a kernel's residuals (``keep="activations"``), or
the inputs alone and runs the module again (``keep="inputs"``: exact at the weights of now).
``GraphNode`` (in ``stage``) keeps autograd's own graph of one whole message (``keep="graph"``).

Where a choice finds a better kernel in the middle of the work, rows in flight are answered by that
which they left by (``eras``).

A node computes where its weights are: rows and gradients from other devices are copied there. One
without weights computes where its rows are.

Source: PPT and NPT of Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    Gradient,
    IntArray,
    Payload,
    address,
    distinct,
    join_arrays,
    join_gradient,
    join_lengths,
    join_origins,
    join_states,
    ranges,
)
from geartrain.frames.rows import RowStore
from geartrain.native import pool
from geartrain.nodes.call import (
    Call,
    as_payload,
    differentiate,
    gather_inputs,
    own_integers,
    require_rows,
    run_module,
    unsettled,
    where_it_computes,
)
from geartrain.nodes.choice import AbstractChoice
from geartrain.nodes.eras import Era, Eras, spread
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside, look_inside
from geartrain.nodes.keeping import BundleKeepingNode
from geartrain.nodes.kernel import AbstractKernel, gathered
from geartrain.nodes.node import Emission, Place
from geartrain.nodes.products import GRAIN
from geartrain.nodes.unrecorded import Unrecorded
from geartrain.nodes.weights import AbstractWeights


@final
class Recompute(AbstractKernel):
    """A kernel for any module: keeps the inputs, and runs the module again for the gradient.

    The gradient is exactly that of f at today's weights for that input, whatever weights made the
    output. Inputs of integers get none.
    """

    def __init__(self, function: Callable[..., Any], parameters: Sequence[nn.Parameter]) -> None:
        self._function = function
        self._parameters = [p for p in parameters if p.requires_grad]

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those of the module that learn."""
        return self._parameters

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        return own_integers(as_payload(run_module(self._function, inputs, inside))), inputs

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        # Run f again rather than keep its graph: an optimiser step in between would make a kept
        # graph raise, and one through ``.data`` would silently mix old activations with the new θ.
        inputs = [
            x.detach().requires_grad_() if x.is_floating_point() else x
            for x in gathered(kept, rows)
        ]
        with torch.enable_grad():
            outputs = as_payload(run_module(self._function, inputs, inside))
        asked = [x for x in inputs if x.requires_grad]
        found = differentiate(outputs, gradients, [*asked, *self._parameters])
        for parameter, d in zip(self._parameters, found[len(asked) :], strict=True):
            if d is not None:
                into.add(parameter, d)
        answers = iter(found[: len(asked)])
        return tuple(next(answers) if x.requires_grad else None for x in inputs)


@final
class RowNode(BundleKeepingNode):
    """Run a module on rows that may come back apart.

    Args:
        place: Number, name, frames.
        call: The module and how it is called.
        kernel: Computes it.
        weights: The part, or None where there are no parameters.
        choice: Chooses other kernels while it works; None: it keeps this one.
    """

    def __init__(
        self,
        place: Place,
        call: Call,
        kernel: AbstractKernel,
        weights: AbstractWeights | None,
        choice: AbstractChoice | None = None,
    ) -> None:
        columns = () if choice is None else ("era",)
        super().__init__(place, call, weights, (*columns, "firing") if call.inside else columns)
        self._kernel, self._dry_run = kernel, unsettled(call)
        self._firings = 0
        self._choice, self._eras = choice, Eras(kernel, self._rows)

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        state, origin = join_states(batches), join_origins(batches)
        lengths = join_lengths(batches)
        if self.place.spread:
            self._device = where_it_computes(self._call, self._weights, batches)
        inside = self._inside(state[INSTANCE], lengths) if self._call.inside else None
        if not train or self._owes_nothing(batches, origin):
            inputs = self._inputs(batches, state, lengths, {})
            with Unrecorded():
                outputs = self._kernel.evaluate(inputs, inside)
            return self._emit(outputs, state, origin, lengths)
        n = origin.size
        start, first, total = self._keep(origin, state, lengths)
        if self._call.inside:
            self._firings += 1
            self._rows["firing"][start : start + n] = self._firings
        buffers, era = self._buffers, self._eras.now
        in_place = self._in_place(era, buffers, batches, first, total) if era.kept_input else {}
        inputs = self._inputs(batches, state, lengths, in_place)
        if self._choice is not None:
            kernel = self._choice.kernel(inputs)
            if kernel is not era.kernel:
                self._eras.begin(kernel, n, buffers)
                era = self._eras.now
            self._rows["era"][start : start + n] = era.number
        room = self._room(era, buffers, first, total)
        with Unrecorded():
            outputs, residuals = era.kernel.forward(inputs, inside, room)
        if in_place:  # a function may return its very input: rows of the store are for this node
            stored = [x.untyped_storage().data_ptr() for x in in_place.values()]
            outputs = tuple(
                [pool.copied(y) if y.untyped_storage().data_ptr() in stored else y for y in outputs]
            )
        for j, residual in enumerate(residuals):
            if residual is room:
                continue
            i = _position(residual, inputs)
            if i is not None and i in in_place and era.kept_input.get(i) == j:
                continue
            era.buffer(buffers, j, residual)[first : first + total] = residual
            if i is not None:
                era.kept_input.setdefault(i, j)
        return self._emit(outputs, state, address(self.id, start, n), lengths)

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        some = self._answer_zero(batches, emission)
        if not some:
            return emission
        rows = join_arrays([b.rows for b in some]) & ROW_MASK
        store, inside = self._rows, None
        origin = store["origin"][rows]
        lengths, cells = self._found(rows)
        if self._call.inside:
            inside = self._inside(store["instance"][rows], lengths)
        wanted = int(origin.max()) > ROW_MASK  # the controller, at the bottom, reads none
        gradient = join_gradient(some, self._device)
        weights, updates = self._weights, None
        if weights is not None:
            updates = weights.updates_of(store["instance"][rows])
        if weights is not None and updates is not None:
            each = updates if lengths is None else updates.repeat(lengths)
            if self.apart:
                with weights.gradient.of_updates(each):
                    gradient = self._back(self._eras.now, gradient, cells, inside, wanted)
            else:
                gradient = self._back_by_update(gradient, rows, lengths, cells, wanted, updates)
            weights.received_for(updates, store["version"][rows], lengths)
        else:
            if self._eras.mixed:
                gradient = self._back_by_era(gradient, rows, lengths, cells, wanted)
            else:
                gradient = self._back(self._eras.now, gradient, cells, inside, wanted)
            if weights is not None:
                weights.received(cells.size, store["version"][rows], lengths)
        self._release(rows)
        gradient = self._call.answer(gradient, self._width)
        if all(g is None for g in gradient):
            emission.backward.append(Backward(origin, None))
        else:
            emission.backward.append(Backward(origin, gradient, lengths))
        return emission

    @property
    def grain(self) -> int:
        return 1 if self._weights is None or self._cells is not None else GRAIN

    def left_by(self, batch: Backward) -> IntArray | None:
        if not self._kernel.remembers:
            return None
        found: IntArray = self._rows["firing"][batch.rows & ROW_MASK]
        return found

    def _owes_nothing(self, batches: Sequence[Forward], origin: IntArray) -> bool:
        """Whether no gradient is wanted: no weights, and integers that instances brought.

        Then the answers to what is made of them may go straight to the controller.
        """
        return (
            self._weights is None
            and not any(x.is_floating_point() for b in batches for x in b.payload)
            and bool((origin <= ROW_MASK).all())
        )

    def _inputs(
        self,
        batches: Sequence[Forward],
        state: IntArray,
        lengths: IntArray | None,
        in_place: Mapping[int, Tensor],
    ) -> Payload:
        self._width = len(batches[0].payload)
        inputs = gather_inputs(
            self._call, self.place, batches, state, lengths, in_place, self._device
        )
        if self._dry_run is not None:
            self._dry_run.look(self._call, self.place, inputs, state, lengths, self._device)
            self._dry_run = unsettled(self._call)
        return inputs

    def _in_place(
        self, era: Era, buffers: RowStore, batches: Sequence[Forward], first: int, total: int
    ) -> dict[int, Tensor]:
        """Where in the store inputs may be joined, by number: they are residuals themselves."""
        taken = self._call.taken(len(batches[0].payload))
        found: dict[int, Tensor] = {}
        for i, j in era.kept_input.items():
            kept = era.existing(buffers, j)
            if kept is not None and (i >= len(taken) or _fits(kept, batches, taken[i])):
                found[i] = kept[first : first + total]
        return found

    def _room(self, era: Era, buffers: RowStore, first: int, total: int) -> Tensor | None:
        """Where in the store the kernel may write its residual."""
        if era.kernel.room_for is None:
            return None
        buffer = era.existing(buffers, era.kernel.room_for)
        return None if buffer is None else buffer[first : first + total]

    def _back(
        self, era: Era, gradient: Gradient, cells: IntArray, inside: Inside | None, wanted: bool
    ) -> Gradient:
        into = GradientSum(()) if self._weights is None else self._weights.gradient
        kept = era.kept(self._buffers)
        with Unrecorded():
            return era.kernel.backward(gradient, kept, cells, into, inside, wanted=wanted)

    @property
    def apart(self) -> bool:
        return self._eras.now.kernel.apart and not self._eras.mixed

    def _back_by_update(
        self,
        gradient: Gradient,
        rows: IntArray,
        lengths: IntArray | None,
        cells: IntArray,
        wanted: bool,
        updates: IntArray,
    ) -> Gradient:
        """The rows of each update by themselves: the kernel cannot tell gradients apart."""
        assert self._weights is not None
        parts = []
        ends = None if lengths is None else np.cumsum(lengths)
        for update in distinct(updates).tolist():
            which = np.flatnonzero(updates == update)
            mine, own = which, None
            if ends is not None and lengths is not None:
                own = lengths[which]
                mine = ranges((ends - lengths)[which], own)
            asked = which if self._call.pool else mine
            some = tuple(None if d is None else d[asked] for d in gradient)
            with self._weights.gradient.of_updates(update):
                if self._eras.mixed:
                    found = self._back_by_era(some, rows[which], own, cells[mine], wanted)
                else:
                    inside = None
                    if self._call.inside:
                        inside = self._inside(self._rows["instance"][rows[which]], own)
                    found = self._back(self._eras.now, some, cells[mine], inside, wanted)
            parts.append((mine, found))
        return spread(parts, cells.size)

    def _back_by_era(
        self,
        gradient: Gradient,
        rows: IntArray,
        lengths: IntArray | None,
        cells: IntArray,
        wanted: bool,
    ) -> Gradient:
        """Each row by the kernel that it left by, all before the rows are released."""
        parts = []
        ends = None if lengths is None else np.cumsum(lengths)
        for era, at in self._eras.groups(rows):
            if ends is not None and lengths is not None:
                at = ranges((ends - lengths)[at], lengths[at])
            some = tuple(None if d is None else d[at] for d in gradient)
            parts.append((at, self._back(era, some, cells[at], None, wanted)))
        return spread(parts, cells.size)

    def _emit(
        self, outputs: Payload, state: IntArray, origin: IntArray, lengths: IntArray | None
    ) -> Emission:
        if self._call.pool:
            lengths = None
        require_rows(self.name, outputs, origin.size if lengths is None else int(lengths.sum()))
        return Emission([(0, Forward(outputs, state, origin, lengths))])

    def _release(self, rows: IntArray) -> None:
        if self._eras.mixed:
            self._eras.release(rows, self._buffers)
        super()._release(rows)

    def _inside(self, slots: IntArray, lengths: IntArray | None) -> Inside:
        return look_inside(self.place, slots, lengths, self._device)


def _fits(kept: Tensor, batches: Sequence[Forward], j: int) -> bool:
    """Whether payload j can be written where it is kept (``out=`` would cast and broadcast)."""
    inner, dtype = kept.shape[1:], kept.dtype
    for batch in batches:
        x = batch.payload[j]
        if x.dtype is not dtype or x.shape[1:] != inner:
            return False
    return True


def _position(residual: Tensor, inputs: Payload) -> int | None:
    """Which of the inputs it is."""
    for i, x in enumerate(inputs):
        if x is residual:
            return i
    return None

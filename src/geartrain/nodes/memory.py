"""Bundles that are held once and read by reference, however often rows come by.

    states ─► Hold ─► the same bundle, with a handle in its state ─► ... loop ─► Read ─┐
               │ rows of the bundle, and the sum of their gradients ◄── by handle ──────┤
               │                                           ▲                            │
               └◄───────────── the bundle's own answer, when all behind has come ◄──────┘

The handle is the bundle's row in the store of its ``HoldNode``, in a state column that no user's
function sees; so it goes wherever a row goes. A ``ReadNode`` gathers by handle what its rows read,
and adds the gradient of it to the sum in the store. Every row is answered once, and whoever sends
several for one waits for all of them; so when the answer to a bundle comes, all that has read it
has been answered. Then the sum leaves for where the bundle came from, once, and the rows are free.

Reader and memory share a store, so they live on one worker.

Source: attention over an encoder's states, Bahdanau et al. 2015, arXiv:1409.0473.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import (
    ROW_MASK,
    Backward,
    Forward,
    Gradient,
    IntArray,
    Payload,
    address,
    join_arrays,
    join_gradient,
    join_lengths,
    join_origins,
    join_payload,
    join_states,
    marks,
)
from geartrain.native.rows import take
from geartrain.nodes.call import (
    Call,
    as_payload,
    differentiate,
    gather_inputs,
    own_integers,
    require_rows,
    run_module,
    where_it_computes,
)
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import Held, Recalled
from geartrain.nodes.keeping import BundleKeepingNode
from geartrain.nodes.kernel import may_have_kernel
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.weights import AbstractWeights


@final
class HoldNode(AbstractNode):
    """Hold bundles, and send them on with a handle.

    Args:
        place: Number, name, frames.
        column: State column of the handle.
    """

    eager = True

    def __init__(self, place: Place, column: int) -> None:
        super().__init__(place)
        self._column = column
        self.held = Held(place.name)

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        payload = join_payload(batches, self.place.device_for(batches))
        lengths = join_lengths(batches)
        assert lengths is not None
        origin = join_origins(batches)
        n = origin.size
        start = self.held.hold(payload, origin, lengths, sums=train)
        state = join_states(batches).copy()
        state[self._column] = np.arange(start, start + n)
        sent = address(self.id, start, n) | marks(origin)
        return Emission([(0, Forward(payload, state, sent, lengths))])

    def backward(self, batches: Sequence[Backward]) -> Emission:
        held = self.held
        for batch in batches:
            if batch.gradient is not None:
                rows = batch.rows & ROW_MASK
                held.add(rows, join_gradient([batch]), held.at(rows), None)
        rows = join_arrays([b.rows for b in batches]) & ROW_MASK
        origin, touched = held.rows["origin"][rows], held.rows["touched"][rows]
        emission = Emission()
        quiet, some = np.flatnonzero(touched == 0), np.flatnonzero(touched)
        if quiet.size:
            emission.backward.append(Backward(origin[quiet], None))
        if some.size:
            emission.backward.append(self._answer(origin[some], rows[some], touched[some]))
        held.release(rows)
        return emission

    def _answer(self, origin: IntArray, rows: IntArray, touched: IntArray) -> Backward:
        held, at = self.held, self.held.at(rows)
        bits = int(np.bitwise_or.reduce(touched))
        columns: list[Tensor | None] = []
        for j, (x, total) in enumerate(zip(held.payload(), held.sums(), strict=True)):
            if total is None or not bits >> j & 1:
                columns.append(None)
            else:
                columns.append(take([total], at)[0].to(x.dtype))
        return Backward(origin, tuple(columns), held.rows["length"][rows])

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self.held.rows["origin"][rows]
        return found

    def check_empty(self) -> None:
        self.held.rows.check_empty()

    def story(self) -> list[str]:
        n = self.held.rows.waiting
        return [f"'{self.name}' holds {n} bundles that rows behind it may still read"] if n else []

    def nbytes(self) -> int:
        return self.held.cells.nbytes()


class AbstractMemoryKernel(ABC):
    """What computes a node that reads a memory: as ``AbstractKernel``, with what its rows read.

    Attributes:
        derivable: Whether a program may be derived beside it, which C calls with those of other
            modules: it computes what the module does, and nothing else hangs on it.
    """

    derivable: bool = False

    @abstractmethod
    def forward(self, inputs: Payload, memory: Recalled) -> tuple[Payload, Payload]:
        """Run the module on n rows (also 0).

        Returns:
            Outputs with n rows, and residuals with n rows; their trailing shapes and dtypes are the
            same in every call, whatever lengths the memories have.
        """

    @abstractmethod
    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        memory: Recalled,
        into: GradientSum,
        *,
        wanted: bool = True,
    ) -> Gradient:
        """Apply the vector-Jacobian product to n' rows.

        Args:
            gradients: One per output, leading dimension n'; None is zero.
            kept: Residuals of these rows.
            memory: What these rows read; gets the gradient of that, if it ``wanted`` one.
            into: Gets the gradients of the parameters.
            wanted: Whether anybody reads the gradients of the inputs.

        Returns:
            One gradient per input.
        """


def memory_kernel_of(module: nn.Module) -> AbstractMemoryKernel | None:
    """What the module's own ``memory_kernel()`` gives, or None: then run the module again.

    Raises:
        GraphError: It gives something else.
    """
    if not may_have_kernel(module) or not hasattr(module, "memory_kernel"):
        return None
    order = type(module).__mro__
    kernel_at = next((k for k, c in enumerate(order) if "memory_kernel" in vars(c)), 0)
    if next(k for k, c in enumerate(order) if "forward" in vars(c)) < kernel_at:
        return None  # its forward is another one
    kernel = cast("Callable[[], object]", module.memory_kernel)()
    if kernel is not None and not isinstance(kernel, AbstractMemoryKernel):
        raise GraphError(
            f"{type(module).__name__}.memory_kernel() returned {type(kernel).__name__}; expected "
            "an AbstractMemoryKernel, or None to have the module run again"
        )
    return kernel


class ReadAgain(AbstractMemoryKernel):
    """A kernel for any module: keeps the inputs, and runs the module again for the gradient.

    Args:
        function: Is called with payload, memory, mask and columns, in this order.
        parameters: Of the module.
        columns: How many of the inputs are columns, which come last.
    """

    def __init__(
        self, function: Callable[..., Any], parameters: Sequence[nn.Parameter], columns: int
    ) -> None:
        self._function, self._columns = function, columns
        self._parameters = [p for p in parameters if p.requires_grad]

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those of the module that learn."""
        return self._parameters

    def forward(self, inputs: Payload, memory: Recalled) -> tuple[Payload, Payload]:
        tensors, mask = memory.padded()
        outputs = as_payload(self.called(inputs, tensors, mask))
        return own_integers(outputs), inputs

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        memory: Recalled,
        into: GradientSum,
        *,
        wanted: bool = True,
    ) -> Gradient:
        leaves, outputs = self.run(kept, memory)
        return self.back(leaves, len(kept), outputs, gradients, memory, into)

    def run(self, inputs: Payload, memory: Recalled) -> tuple[Payload, Payload]:
        """Inputs and memory as leaves, and outputs with their graph."""
        tensors, mask = memory.padded()
        # Not ``detach``: rows of a store lie beside others that are written to meanwhile.
        own = [x.data.requires_grad_() if x.is_floating_point() else x for x in inputs]
        if memory.wanted:
            for x in tensors:
                x.requires_grad_(x.is_floating_point())
        with torch.enable_grad():
            outputs = as_payload(self.called(own, tensors, mask))
        return (*own, *tensors), outputs

    def back(
        self,
        leaves: Payload,
        inputs: int,
        outputs: Payload,
        gradients: Gradient,
        memory: Recalled,
        into: GradientSum,
    ) -> Gradient:
        """The way back of what ``run`` gave, of so many inputs."""
        asked = [x for x in leaves if x.requires_grad]
        found = differentiate(outputs, gradients, [*asked, *self._parameters])
        for parameter, d in zip(self._parameters, found[len(asked) :], strict=True):
            if d is not None:
                into.add(parameter, d)
        rest = iter(found[: len(asked)])
        answers = tuple([next(rest) if x.requires_grad else None for x in leaves])
        if any(x.requires_grad for x in leaves[inputs:]):
            memory.add_padded(answers[inputs:])
        return answers[:inputs]

    def called(self, inputs: Sequence[Tensor], tensors: Payload, mask: Tensor) -> object:
        """What the module makes of inputs and of the memory, padded."""
        at = len(inputs) - self._columns
        return run_module(self._function, [*inputs[:at], *tensors, mask, *inputs[at:]], None)


@final
class ReadNode(BundleKeepingNode):
    """Run a module on rows, each with the bundle that its handle names.

    Args:
        place: Number, name, frames.
        call: The module and how it is called.
        kernel: Computes it.
        weights: The part, or None where there are no parameters.
        held: The memory, which lives on this worker.
        column: State column of the handle.
    """

    def __init__(
        self,
        place: Place,
        call: Call,
        kernel: AbstractMemoryKernel,
        weights: AbstractWeights | None,
        held: Held,
        column: int,
    ) -> None:
        super().__init__(place, call, weights, ("handle",))
        self._kernel, self._held, self._column = kernel, held, column

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        state, origin = join_states(batches), join_origins(batches)
        lengths = join_lengths(batches)
        if self.place.spread:
            self._device = where_it_computes(self._call, self._weights, batches)
        self._width = len(batches[0].payload)
        inputs = gather_inputs(self._call, self.place, batches, state, lengths, {}, self._device)
        handles = state[self._column]
        memory = self._recalled(handles, lengths)
        with torch.no_grad():
            outputs, residuals = self._kernel.forward(inputs, memory)
        require_rows(self.name, outputs, origin.size if lengths is None else int(lengths.sum()))
        if train:
            start, first, total = self._keep(origin, state, lengths)
            origin = address(self.id, start, origin.size)
            self._rows["handle"][start : start + origin.size] = handles
            for j, residual in enumerate(residuals):
                self._buffers.buffer(j, residual)[first : first + total] = residual
        return Emission([(0, Forward(outputs, state, origin, lengths))])

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        some = self._answer_zero(batches, emission)
        if not some:
            return emission
        rows = join_arrays([b.rows for b in some]) & ROW_MASK
        store = self._rows
        origin, versions = store["origin"][rows], store["version"][rows]
        lengths, cells = self._found(rows)
        memory = self._recalled(store["handle"][rows], lengths)
        into = GradientSum(()) if self._weights is None else self._weights.gradient
        kept = take(self._buffers.buffers(), cells)
        wanted = bool((origin > ROW_MASK).any())
        gradient = join_gradient(some, self._device)
        with torch.no_grad():
            gradient = self._kernel.backward(gradient, kept, memory, into, wanted=wanted)
        if self._weights is not None:
            self._weights.received(cells.size, versions, lengths)
        self._release(rows)
        gradient = self._call.answer(gradient, self._width)
        quiet = all(g is None for g in gradient)
        emission.backward.append(
            Backward(origin, None) if quiet else Backward(origin, gradient, lengths)
        )
        return emission

    def _recalled(self, handles: IntArray, lengths: IntArray | None) -> Recalled:
        """What the payload rows read."""
        if lengths is not None:
            handles = np.repeat(handles, lengths)
        return Recalled(self._held, handles, self._device)

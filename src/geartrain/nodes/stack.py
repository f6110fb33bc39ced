"""Modules that feed one another, up to their losses, in one node.

    x ─► f ─► h ─┬─► g ─► one loss a row ─► dg ─┐
                 └─► k ─► one loss a row ─► dk ─┴─► dh ─► dx, at once

All of them compute the same rows, and nobody else wants what is between them: so a firing goes
there and back, nothing is stored, and no row waits. Forward and backward are of one version: such
rows are only stale where a firing has those of several updates. ``fusion`` says which modules these
are; one with its loss alone is a ``ReadoutNode``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch

from geartrain.errors import GeartrainError, WorkerError, said
from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    Gradient,
    IntArray,
    Payload,
    join_lengths,
    join_origins,
    join_payload,
    join_states,
    shapes_of,
)
from geartrain.native.steady import steady
from geartrain.nodes.apart import in_order
from geartrain.nodes.call import Call, read_columns, require_rows, unsettled
from geartrain.nodes.choice import AbstractChoice
from geartrain.nodes.collector import both
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loss import Objective, OutputNode
from geartrain.nodes.node import Emission, Place
from geartrain.nodes.there_and_back import AbstractThereAndBack
from geartrain.nodes.unrecorded import Unrecorded
from geartrain.nodes.weights import AbstractWeights


@final
@dataclass(slots=True, eq=False)
class Layer:
    """A module of a stack; what it makes is the value with its number, the first has 1.

    Args:
        name: In errors.
        source: Number of the value that it is given; 0: the rows that come in.
        call: The module and how it is called.
        kernel: Computes it.
        choice: Chooses other kernels while it works; None: it keeps this one.
        weights: The part, or None where there are no parameters.
    """

    name: str
    source: int
    call: Call
    kernel: AbstractKernel
    choice: AbstractChoice | None
    weights: AbstractWeights | None


@final
class _Telling:
    """Says of errors in here where they were raised.

    Args:
        node: Whose they are.
        state: Of its rows.

    Attributes:
        of: Module, or the one before a loss, way, tensors and name of the loss, if it is one; None:
            of no module.

    Raises:
        WorkerError: In place of one that is not ours.
    """

    __slots__ = ("_node", "_state", "of")

    def __init__(self, node: StackNode, state: IntArray) -> None:
        self._node, self._state = node, state
        self.of: tuple[Layer | None, str, Gradient, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.of is None or not isinstance(error, Exception):
            return
        story = self._node.story_of(*self.of, self._state)
        if isinstance(error, GeartrainError):
            error.add_note(story)
        else:
            told = f"{type(error).__name__} in node {story}: {said(error)}"
            raise WorkerError(told) from error


@final
class StackNode(AbstractThereAndBack):
    """Run modules on rows, compute their losses, and send the gradient of the rows back.

    Args:
        place: Number, name, frames.
        layers: Each behind the one whose value it is given.
        losses: With the number of the value that each of them judges.
        outputs: With the number of the value that each of them puts out.

    Attributes:
        ends: What its losses compute, and what collects values of it.
    """

    def __init__(
        self,
        place: Place,
        layers: Sequence[Layer],
        losses: Sequence[tuple[Objective, int]],
        outputs: Sequence[tuple[OutputNode, int]] = (),
    ) -> None:
        super().__init__(place, [each.call.function for each in layers])
        self.ends: list[Objective | OutputNode] = [objective for objective, _ in losses]
        self.ends += [output for output, _ in outputs]
        self._layers, self._losses, self._outputs = layers, losses, outputs
        self._weights = {w.name: w for each in layers if (w := each.weights) is not None}
        self.loss_name = "', '".join(objective.name for objective, _ in losses)
        if len(self._weights) == 1:
            (self.part_name,) = self._weights

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        with steady():
            return self._there_and_back(batches, train)

    def _there_and_back(self, batches: Sequence[Forward], train: bool) -> Emission:
        state, origin = join_states(batches), join_origins(batches)
        lengths = join_lengths(batches)
        self._bundled = lengths is not None
        rows = origin.size if lengths is None else int(lengths.sum())
        values: list[Payload] = [join_payload(batches, self.place.device)]
        left: list[Payload] = []
        with _Telling(self, state) as told:
            for layer in self._layers:
                told.of = layer, "forward", values[layer.source], ""
                outputs, residuals = self._compute(
                    layer, values[layer.source], state, lengths, train
                )
                told.of = None
                require_rows(layer.name, outputs, rows)
                values.append(outputs)
                left.append(residuals)
            for output, source in self._outputs:
                output.put_out(values[source], state, lengths)
            gradients: list[Gradient | None] = [None] * len(values)
            for objective, source in self._losses:
                judged = self._layers[source - 1] if source else None
                told.of = judged, "forward", values[source], objective.name
                dy = objective.measure(values[source], state, lengths, train)
                told.of = None
                gradients[source] = _sum(gradients[source], dy)
        if train:
            self._take_back(values, left, gradients, state, origin, lengths)
        dx = gradients[0]
        return Emission(backward=[Backward(origin, dx, None if dx is None else lengths)])

    def _compute(
        self, layer: Layer, came: Payload, state: IntArray, lengths: IntArray | None, train: bool
    ) -> tuple[Payload, Payload]:
        """Outputs and residuals of a module."""
        call, inputs, device = layer.call, came, self.place.device
        if call.take is not None:
            inputs = tuple([came[j] for j in call.take])
        if call.read:
            inputs = (*inputs, *read_columns(call, self.place, state, lengths, device))
        dry_run = unsettled(call)
        if dry_run is not None:
            dry_run.look(call, self.place, inputs, state, lengths, device)
        if train and layer.choice is not None:
            layer.kernel = layer.choice.kernel(inputs)
        with Unrecorded():
            return layer.kernel.forward(inputs) if train else (layer.kernel.evaluate(inputs), ())

    def _take_back(
        self,
        values: Sequence[Payload],
        left: Sequence[Payload],
        gradients: list[Gradient | None],
        state: IntArray,
        origin: IntArray,
        lengths: IntArray | None,
    ) -> None:
        """All modules, the last one first: gradients of weights are added, and those of values."""
        slots = state[INSTANCE]
        updates = {name: w.updates_of(slots) for name, w in self._weights.items()}
        wanted = int(origin.max()) > ROW_MASK  # the controller, at the bottom, reads none
        with _Telling(self, state) as told, Unrecorded():
            for k in range(len(self._layers), 0, -1):
                layer, dy = self._layers[k - 1], gradients[k]
                weights = layer.weights
                each = None if weights is None else updates[weights.name]
                if dy is None:
                    if weights is not None:
                        weights.answered(0, origin.size)
                    continue
                asked = wanted or layer.source > 0
                told.of = layer, "backward", dy, ""
                found = _back(layer, dy, left[k - 1], each, lengths, wanted=asked)
                told.of = None
                if weights is not None and each is not None:
                    weights.answered_for(each, lengths)
                elif weights is not None:
                    weights.answered(values[k][0].shape[0], origin.size)
                dx = layer.call.answer(found, len(values[layer.source]))
                if any(d is not None for d in dx):
                    gradients[layer.source] = _sum(gradients[layer.source], dx)

    def story_of(
        self, layer: Layer | None, way: str, tensors: Gradient, loss: str, state: IntArray
    ) -> str:
        """Module, part, direction, shapes, instances: what errors of a module, or of a loss of what
        it makes, are told with."""
        name = self.name if layer is None else layer.name
        of = f" with loss '{loss}'" if loss else ""
        if layer is not None and layer.weights is not None:
            of += f" of part '{layer.weights.name}'"
        slots = state[INSTANCE]
        return (
            f"'{name}'{of}, {way}, {slots.size} rows, payload {shapes_of(tensors) or 'none'}, "
            f"{self.place.arena.describe_several(slots)}"
        )

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(self._weights)

    @property
    def apart(self) -> bool:
        return True  # a kernel that cannot tell updates apart is called for each of them

    @property
    def objectives(self) -> Sequence[Objective]:
        return [objective for objective, _ in self._losses]


def _back(
    layer: Layer,
    gradient: Gradient,
    left: Payload,
    updates: IntArray | None,
    lengths: IntArray | None,
    *,
    wanted: bool,
) -> Gradient:
    """The gradients of a module's inputs; ``updates`` are those of the messages."""
    kernel = layer.kernel
    if updates is None or layer.weights is None:
        into = GradientSum(()) if layer.weights is None else layer.weights.gradient
        return kernel.backward(gradient, left, None, into, wanted=wanted)
    into = layer.weights.gradient
    each = updates if lengths is None else updates.repeat(lengths)
    if kernel.apart:
        with into.of_updates(each):
            return kernel.backward(gradient, left, None, into, wanted=wanted)
    found: list[Gradient] = []
    for update, at in in_order(each):
        some = tuple([None if d is None else d[at] for d in gradient])
        kept = tuple([x[at] for x in left])
        with into.of_updates(update):
            found.append(kernel.backward(some, kept, None, into, wanted=wanted))
    return tuple([None if ds[0] is None else torch.cat(ds) for ds in zip(*found, strict=True)])


def _sum(one: Gradient | None, other: Gradient | None) -> Gradient | None:
    """Of two gradients of a value; None is zero."""
    if one is None or other is None:
        return other if one is None else one
    return both(one, other)

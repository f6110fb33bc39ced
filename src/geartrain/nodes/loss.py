"""Where the way back starts: losses, and outputs that are only collected.

    prediction (n, ...) + target of the frame ─► one loss a row ─► its gradient, at once

Criteria give **one loss a row**: the gradient of a row may not depend on who shares its batch. The
part's averaging over rows makes the usual mean of it. Rows in bfloat16 become float32 here; their
gradients go back as bfloat16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.device import moved
from geartrain.errors import DataError, GraphError
from geartrain.frames.frame import View
from geartrain.frames.message import (
    INSTANCE,
    VERTEX,
    Backward,
    Forward,
    Gradient,
    IntArray,
    Payload,
    join_lengths,
    join_origins,
    join_payload,
    join_states,
)
from geartrain.frames.precision import widened
from geartrain.kinds import require_kind
from geartrain.native.losses import cross_entropy as native_cross_entropy
from geartrain.nodes.call import AbstractDryRun, Call, differentiate, own_integers
from geartrain.nodes.criteria import InnerMean
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.sums import Sums
from geartrain.nodes.unrecorded import Unrecorded

Target: TypeAlias = str | Callable[[View], Any] | None
Collected: TypeAlias = tuple[IntArray, IntArray, IntArray | None, Payload]
"""Serial numbers, vertices, lengths, payload of rows that reached an output."""


@final
@dataclass(frozen=True, slots=True)
class Metric:
    """A number per row, averaged over the rows of a pass.

    Args:
        function: ``(prediction, target) -> (n,)`` float or bool tensor.
        where: Counts only these rows: gets a ``View``, returns booleans.
    """

    function: Callable[..., Tensor]
    where: Callable[[View], Any] | None = None

    def __post_init__(self) -> None:
        wanted = "a function of prediction and target that gives a number a row: accuracy"
        require_kind("Metric", Callable, wanted, function=self.function)
        wanted = "a function of a View that gives booleans, or None"
        require_kind("Metric", Callable | None, wanted, where=self.where)


def accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    """Whether the largest logit ``(n, classes)`` is at the target ``(n,)``."""
    return prediction.argmax(-1) == target


@final
class CrossEntropy:
    """Softmax cross entropy of logits ``(n, classes)`` and classes ``(n,)`` int64, one a row."""

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(prediction, target, reduction="none")

    def with_gradient(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Losses, and their gradient with respect to the prediction."""
        if (found := native_cross_entropy(prediction, target)) is not None:
            return found
        logarithms = torch.log_softmax(prediction, 1)
        at = target[:, None]
        losses = -logarithms.gather(1, at)[:, 0]
        gradient = logarithms.exp_()
        return losses, gradient.scatter_add_(1, at, gradient.new_full((1, 1), -1.0).expand_as(at))

    def __repr__(self) -> str:
        return "cross_entropy"

    def __mul__(self, factor: object) -> NoReturn:
        raise TypeError(
            "cross_entropy is a function, and is called with predictions and targets: to scale it, "
            "give loss(cross_entropy, ..., weight=lambda m: 0.3); to compute with it, give a "
            "function, loss(lambda y, t: 0.3 * cross_entropy(y, t), ...)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __rmul__ = __truediv__ = __mul__


cross_entropy = CrossEntropy()


@final
class Objective:
    """What a loss computes of predictions, and what it has counted so far.

    Args:
        place: Number, name, frames; the name is the loss's.
        criterion: ``(*prediction, target) -> (n,)`` losses; ``(*prediction) -> (n,)`` without
            target.
        target: A frame or state column, a function of the ``View``, or None.
        metrics: Name to ``Metric``, averaged over a pass.
        weight: A column or function that scales the rows' losses; None is 1.
        label: What the criterion's sum is called; None: it is not reported.
        dry_run: What is known of the criterion by trying it; None: it is trusted.

    Attributes:
        label: As given.
        sums: What is averaged over a pass; the criterion's is under the label.
    """

    def __init__(
        self,
        place: Place,
        criterion: Callable[..., Any],
        target: Target,
        metrics: Mapping[str, Metric],
        weight: Target = None,
        label: str | None = "loss",
        dry_run: AbstractDryRun | None = None,
    ) -> None:
        self.place, self.name, self.label = place, place.name, label
        self._criterion = per_row(criterion, place.name)
        self._target, self._weight = target, weight
        self._metrics = dict(metrics)
        self._check_classes = isinstance(self._criterion, CrossEntropy)
        self._dry_run = None if dry_run is None or dry_run.settled else dry_run
        self.sums = Sums(place.name, place.arena)
        self.collected: list[Collected] | None = None
        self.judge = True

    def measure(
        self, came: Payload, state: IntArray, lengths: IntArray | None, train: bool
    ) -> Gradient | None:
        """Count losses and metrics of rows, and collect the rows if they are asked for.

        Args:
            came: The prediction; bfloat16 is widened.
            state: Of its messages.
            lengths: Rows of each message where they are bundles.
            train: Whether a gradient is wanted.

        Returns:
            The gradient of each tensor of ``came``, in its dtype; None: zero.

        Raises:
            DataError: A target is none of the classes of the prediction.
            NonFiniteError: A loss is NaN or infinite.
        """
        prediction = tuple(map(widened, came))
        if self.collected is not None:
            self.collected.append(collect(self.place, state, lengths, prediction))
        if not self.judge:
            return None
        view = self.place.row_view(state, lengths)
        target = column_of(self._target, view)
        found = self._by_native_kernel(prediction, target) if train else None
        if found is None and self._check_classes and target is not None:
            self._refuse_classes(prediction[0], target, state, lengths)
        device = came[0].device if self.place.spread else None
        if target is not None and device is not None:
            target = moved(target, device)
        if self._dry_run is not None:
            args = prediction if target is None else (*prediction, target)
            self._try_out(self._dry_run, args, state)
        losses, gradient = found or self._losses(prediction, target, train)
        weight = column_of(self._weight, view)
        if weight is not None:
            weight = weight if device is None else moved(weight, device)
            losses = losses * weight
        self.sums.add(self.label, losses, None, state[INSTANCE], lengths)
        args = prediction if target is None else (*prediction, target)
        self._count_metrics(args, view, state, lengths)
        if device is not None:
            self.sums.ask(state[INSTANCE], lengths)
        if gradient is None:
            return None
        if weight is not None:
            gradient = tuple(
                None if g is None else g * weight.to(g.dtype).view(-1, *[1] * (g.ndim - 1))
                for g in gradient
            )
        return tuple(
            None if g is None else g.to(p.dtype) for g, p in zip(gradient, came, strict=True)
        )

    def _try_out(self, dry_run: AbstractDryRun, args: Payload, state: IntArray) -> None:
        """Look at the criterion, until enough rows have come for it."""
        read = () if self._target is None else (_named(self._target),)
        dry_run.look(Call(self._criterion, read), self.place, args, state, None, None)
        self._dry_run = None if dry_run.settled else dry_run

    def _count_metrics(
        self, args: Payload, view: View, state: IntArray, lengths: IntArray | None
    ) -> None:
        measured: dict[int, Tensor] = {}  # once, however many metrics have the function
        for name, metric in self._metrics.items():
            key = id(metric.function)
            if key not in measured:
                measured[key] = self._measured(name, metric.function(*args), args[0].shape[0])
            mask = None if metric.where is None else metric.where(view)
            self.sums.add(name, measured[key], mask, state[INSTANCE], lengths)

    def _measured(self, name: str, values: Any, n: int) -> Tensor:
        """Raises:
        GraphError: What a metric gave is not one number a row.
        """
        if isinstance(values, Tensor) and values.shape == (n,):
            return values
        came = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise GraphError(
            f"'{self.name}': metric '{name}' returned {came} for {n} rows; it must give one number "
            "a row, shape (n,), and no mean: they are averaged over the pass"
        )

    def _by_native_kernel(
        self, prediction: Payload, target: Tensor | None
    ) -> tuple[Tensor, Gradient] | None:
        """Cross entropy and its gradient, if all targets are classes and a kernel takes them."""
        if not self._check_classes or target is None:
            return None
        found = native_cross_entropy(prediction[0], target)
        if found is None:
            return None
        return found[0], (found[1], *[None] * (len(prediction) - 1))

    def _losses(
        self, prediction: Payload, target: Tensor | None, train: bool
    ) -> tuple[Tensor, Gradient | None]:
        args = () if target is None else (target,)
        criterion = self._criterion
        if not train:
            with torch.no_grad():
                return self._checked(criterion(*prediction, *args), prediction), None
        known = getattr(criterion, "with_gradient", None)
        if isinstance(criterion, InnerMean) and not prediction[0].is_floating_point():
            known = None
        if known and target is not None and (self._check_classes or len(prediction) == 1):
            with Unrecorded():
                losses, d = known(prediction[0], target)
            return self._checked(losses, prediction), (d, *[None] * (len(prediction) - 1))
        inputs = [p.detach().requires_grad_(p.is_floating_point()) for p in prediction]
        with torch.enable_grad():
            losses = self._checked(criterion(*inputs, *args), prediction)
            wanted = [x for x in inputs if x.requires_grad]
            if not losses.requires_grad:
                return losses, None
            if losses is inputs[0]:  # as those of a module that computes losses itself
                return losses.detach(), (torch.ones_like(losses), *[None] * (len(inputs) - 1))
            ones = losses.new_ones(()).expand_as(losses)  # of their sum
            found = iter(differentiate((losses,), (ones,), wanted))
        return losses.detach(), tuple(next(found) if x.requires_grad else None for x in inputs)

    def _checked(self, losses: Any, prediction: Payload) -> Tensor:
        n = prediction[0].shape[0]
        if not isinstance(losses, Tensor) or losses.shape != (n,):
            came = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise GraphError(
                f"'{self.name}': the criterion returned {came} for {n} rows; it must give one loss "
                "a row, shape (n,): pass reduction='none', and sum inner dimensions"
            )
        return losses

    def _refuse_classes(
        self, prediction: Tensor, target: Tensor, state: IntArray, lengths: IntArray | None
    ) -> None:
        classes = prediction.shape[1]
        if not target.is_cpu:
            target = target.cpu()  # computed on a device by the user: out of range, it would fault
        low, high = torch.aminmax(target)
        if int(low) < 0 or int(high) >= classes:
            bad = int(torch.nonzero((target < 0) | (target >= classes))[0, 0])
            slot = int(_messages(state[INSTANCE], lengths)[bad])
            raise DataError(
                f"'{self.name}': {self.place.arena.describe(slot)} has target {int(target[bad])}, "
                f"but the prediction has classes 0..{classes - 1}"
            )


@final
class LossNode(AbstractNode):
    """Compute losses and send their gradients back.

    Args:
        place: Number, name, frames.
        objective: What it computes.
        alone: Whether messages are judged one at a time.
    """

    def __init__(self, place: Place, objective: Objective, alone: bool = False) -> None:
        super().__init__(place)
        self.objective, self.alone = objective, alone

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        origin, lengths = join_origins(batches), join_lengths(batches)
        came, state = join_payload(batches, self.place.device_for(batches)), join_states(batches)
        gradient = self.objective.measure(came, state, lengths, train)
        if gradient is None:
            return Emission(backward=[Backward(origin, None)])
        return Emission(backward=[Backward(origin, gradient, lengths)])

    def backward(self, batches: Sequence[Backward]) -> Emission:
        raise AssertionError(f"'{self.name}' sends nothing, so nothing can come back")

    def check_empty(self) -> None:
        """A loss answers at once, but a device may still have to say of what value.

        Raises:
            NonFiniteError: A loss was NaN or infinite.
        """
        self.objective.sums.check_finite()


@final
class OutputNode(AbstractNode):
    """Collect rows when a prediction asks for them; answer zero.

    Args:
        place: Number, name, frames.
        take: The payload tensor that is collected; None: all.
        alone: Whether messages are collected one at a time.
    """

    def __init__(self, place: Place, take: int | None = None, alone: bool = False) -> None:
        super().__init__(place)
        self.alone, self._take = alone, take
        self.collected: list[Collected] | None = None

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        if self.collected is not None:
            came = join_payload(batches, self.place.device_for(batches))
            self.put_out(came, join_states(batches), join_lengths(batches))
        return Emission(backward=[Backward(join_origins(batches), None)])

    def put_out(self, came: Payload, state: IntArray, lengths: IntArray | None) -> None:
        """Collect rows, if a prediction asks for them."""
        if self.collected is not None:
            payload = tuple(map(widened, came))
            if self._take is not None:
                payload = (payload[self._take],)
            self.collected.append(collect(self.place, state, lengths, payload))

    def backward(self, batches: Sequence[Backward]) -> Emission:
        raise AssertionError(f"'{self.name}' sends nothing, so nothing can come back")

    def check_empty(self) -> None:
        """An output answers at once."""


def collect(place: Place, state: IntArray, lengths: IntArray | None, payload: Payload) -> Collected:
    """Rows with the serial number of their instance and their vertex inside it."""
    arena, slots = place.arena, state[INSTANCE]
    return arena.serial[slots], state[VERTEX] - arena.base[slots], lengths, payload


def column_of(what: Target, view: View) -> Tensor | None:
    """A column named or computed, as a tensor."""
    if what is None:
        return None
    if isinstance(what, str):
        return torch.from_numpy(np.ascontiguousarray(getattr(view, what)))
    found = what(view)
    column = found if isinstance(found, Tensor) else torch.from_numpy(np.ascontiguousarray(found))
    (column,) = own_integers((column,))
    return column


def _named(target: Target) -> str:
    """What messages call a target."""
    return target if isinstance(target, str) else "target"


def per_row(criterion: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The criterion with one loss a row: torch's own are asked for ``reduction='none'``.

    Raises:
        GraphError: A criterion module was built with another reduction and parameters of its own.
    """
    if criterion is F.cross_entropy:
        return cross_entropy
    if isinstance(criterion, CrossEntropy):
        return criterion
    if isinstance(criterion, nn.Module):
        if getattr(criterion, "reduction", "none") != "none":
            raise GraphError(
                f"'{name}': {type(criterion).__name__} has reduction='{criterion.reduction}', but "
                "rows of many instances share a batch; build it with reduction='none'"
            )
        return criterion
    if InnerMean.knows(criterion):
        return InnerMean(criterion)
    if callable(criterion) and "reduction" in _parameters(criterion):
        return lambda *args: criterion(*args, reduction="none")
    return criterion


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _messages(slots: IntArray, lengths: IntArray | None) -> IntArray:
    return slots if lengths is None else np.repeat(slots, lengths)

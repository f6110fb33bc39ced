"""What a part does about the age of its gradients.

    message ─► gradient at w then ─► compensate? ─► sum ─► step at η · rate(ages)

    AnnealedRate        η / τ at first, η in the end               T1 of PipeMare, arXiv:1910.05124
    ScaledByStaleness   η times the mean of 1/τ                    Zhang et al. 2016, 1511.05950
    DelayCompensated    g + λ g ⊙ g ⊙ (w now - w then)             DC-ASGD, Zheng et al., 1609.08326
    GapAware            g / (1 + |w now - w then| / mean step)     Barkai et al. 2020, 1909.10802

A rule is a setting; one that compensates has a state for each part. Ages are staleness: updates of
the part between a message's forward and its backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.bounds import require_number, require_whole
from geartrain.frames.message import IntArray


class AbstractCompensation:
    """Changes each message's gradient, by the way that the weights have gone since its forward."""

    wants_steps = False
    """Whether ``stepped`` is to be called, at the cost of a copy of the weights."""

    def apply(
        self, parameter: nn.Parameter, gradient: Tensor, then: Tensor, divisor: float
    ) -> Tensor:
        """The gradient that is added instead.

        Args:
            parameter: Has the weights of now.
            gradient: Dense, of the parameter's shape.
            then: The weights that the gradient is of.
            divisor: What this message's gradient, a sum, has to be divided by to be a mean.
        """
        return gradient

    def stepped(self, before: Mapping[nn.Parameter, Tensor]) -> None:
        """The weights have moved from there."""

    def tensors(self) -> dict[nn.Parameter, Tensor]:
        """What it remembers of each parameter; its own, not copies."""
        return {}

    def load(self, found: Mapping[nn.Parameter, Tensor]) -> None:
        """Put back what ``tensors`` gave."""


class AbstractDelay:
    """What a part does about the age of its gradients; a setting."""

    def rate(self, ages: IntArray, updates: int) -> float:
        """A factor on the learning rate of one step.

        Args:
            ages: int64, number of payload rows in the step by staleness; at least one.
            updates: That the part has made before.
        """
        return 1.0

    def start(self, parameters: Sequence[nn.Parameter]) -> AbstractCompensation | None:
        """A state for one part, or None where messages are taken as they come."""
        return None


@final
@dataclass(frozen=True, slots=True)
class AnnealedRate(AbstractDelay):
    """Divide the learning rate by the delay, less and less (T1 of PipeMare).

    Update k is taken at η / max(τ, 1)^(1 - min(k / over, 1)).

    Args:
        over: Updates of the part until the rate is whole; the schedule should have lowered it by
            then, as 1/τ is what keeps a delayed step stable.
        delay: τ; None: the mean staleness of the step's gradients.

    Raises:
        ValueError: A number is out of range.
    """

    over: int
    delay: float | None = None

    def __post_init__(self) -> None:
        wanted = "over=1 or more, and delay=0 or more or None"
        require_whole(f"{self}", self.over, 1, wanted)
        if self.delay is not None:
            require_number(f"{self}", self.delay, wanted, least=0)

    def rate(self, ages: IntArray, updates: int) -> float:
        delay = mean_age(ages) if self.delay is None else self.delay
        return float(max(delay, 1.0) ** (min(updates / self.over, 1.0) - 1.0))


@final
@dataclass(frozen=True, slots=True)
class ScaledByStaleness(AbstractDelay):
    """Divide the learning rate by the staleness of the gradients, for good.

    The factor is the mean of 1 / max(τ, 1) over the rows of the step.
    """

    def rate(self, ages: IntArray, updates: int) -> float:
        rows = int(ages.sum())
        if not rows:
            return 1.0
        return float(ages @ (1 / np.maximum(np.arange(ages.size), 1))) / rows


@final
@dataclass(frozen=True, slots=True)
class DelayCompensated(AbstractDelay):
    """Move each gradient to the weights of now by a guess of the curvature (DC-ASGD).

    Args:
        lambda_: Weight of g ⊙ g ⊙ (w now - w then), g being the mean over the message's rows.
        adaptive: None: constant. Else the decay of a running mean M of g ⊙ g, by which λ is divided
            for each weight: λ / √(M + ε). The paper has 0.95, with λ = 2.

    Raises:
        ValueError: A number is out of range.
    """

    lambda_: float = 0.04
    adaptive: float | None = None

    def __post_init__(self) -> None:
        wanted = "lambda_ of 0 or more, and adaptive None or 0 <= adaptive < 1"
        require_number(f"{self}", self.lambda_, wanted, least=0)
        if self.adaptive is not None:
            require_number(f"{self}", self.adaptive, wanted, least=0, below=1)

    def start(self, parameters: Sequence[nn.Parameter]) -> AbstractCompensation | None:
        return _Compensating(self, parameters)


@final
@dataclass(frozen=True, slots=True)
class GapAware(AbstractDelay):
    """Divide each gradient by how far the weights have gone since, counted in mean steps.

    Args:
        decay: Of the running mean of a parameter's steps, root mean square over its entries.

    Raises:
        ValueError: ``decay`` is out of range.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        require_number(f"{self}", self.decay, "0 <= decay < 1", least=0, below=1)

    def start(self, parameters: Sequence[nn.Parameter]) -> AbstractCompensation | None:
        return _Damping(self.decay, parameters)


def mean_age(ages: IntArray) -> float:
    """Mean staleness, from rows by staleness."""
    rows = int(ages.sum())
    return float(ages @ np.arange(ages.size)) / rows if rows else 0.0


_EPSILON = 1e-7


@final
class _Compensating(AbstractCompensation):
    def __init__(self, rule: DelayCompensated, parameters: Sequence[nn.Parameter]) -> None:
        self._rule = rule
        self._squares: dict[nn.Parameter, Tensor] = {}
        if rule.adaptive is not None:
            self._squares = {p: torch.zeros_like(p, requires_grad=False) for p in parameters}

    def apply(
        self, parameter: nn.Parameter, gradient: Tensor, then: Tensor, divisor: float
    ) -> Tensor:
        square = gradient.square().div_(divisor**2)
        factor = self._rule.lambda_ * divisor
        if self._rule.adaptive is None:
            return torch.addcmul(gradient, square, parameter.data - then, value=factor)
        mean = self._squares[parameter].lerp_(square, 1 - self._rule.adaptive)
        square.div_((mean + _EPSILON).sqrt_())
        return torch.addcmul(gradient, square, parameter.data - then, value=factor)

    def tensors(self) -> dict[nn.Parameter, Tensor]:
        return self._squares

    def load(self, found: Mapping[nn.Parameter, Tensor]) -> None:
        for p, tensor in found.items():
            self._squares[p].copy_(tensor)


@final
class _Damping(AbstractCompensation):
    wants_steps = True

    def __init__(self, decay: float, parameters: Sequence[nn.Parameter]) -> None:
        self._decay = decay
        self._steps = {p: torch.zeros(2, dtype=torch.float64) for p in parameters}  # mean, weight

    def apply(
        self, parameter: nn.Parameter, gradient: Tensor, then: Tensor, divisor: float
    ) -> Tensor:
        mean, weight = self._steps[parameter].tolist()
        if not mean:
            return gradient
        gap = (parameter.data - then).abs_()
        return gradient / gap.div_(mean / weight).add_(1)

    def stepped(self, before: Mapping[nn.Parameter, Tensor]) -> None:
        for p, running in self._steps.items():
            step = float((p.data - before[p]).square().mean().sqrt())
            running.lerp_(torch.tensor([step, 1.0], dtype=torch.float64), 1 - self._decay)

    def tensors(self) -> dict[nn.Parameter, Tensor]:
        return self._steps

    def load(self, found: Mapping[nn.Parameter, Tensor]) -> None:
        for p, tensor in found.items():
            self._steps[p].copy_(tensor)

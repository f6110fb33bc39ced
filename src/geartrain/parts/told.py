"""Steps of optimisers as C takes them, so that others may be taken with them.

Somebody who watches an optimiser, options that C does not know, a first step, in which torch makes
what is remembered: there it is the optimiser's own ``step`` that is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, Final, NamedTuple, final

from torch import Tensor
from torch.optim import Optimizer

from geartrain.native.steps import AdamStep
from geartrain.parts.alike import reckons_as_torch
from geartrain.parts.optimizers import FusedAdam, is_watched, with_gradients
from geartrain.parts.ways import (
    OF_TORCH,
    Group,
    StepWay,
    WeightsStep,
    adam_settings,
    adam_tensors,
)


class StepJob(NamedTuple):
    """A step of an optimiser.

    Args:
        teller: Who tells it.
        kind: What takes it.
        settings: Of it, by name.
        tensors: What it writes, kind by kind; first the weights.
        gradients: One for each weight.
    """

    teller: StepTeller
    kind: type[WeightsStep]
    settings: Mapping[str, Any]
    tensors: Sequence[Sequence[Tensor]]
    gradients: Sequence[Tensor]

    def step(self) -> WeightsStep:
        """What takes it, where its tensors lie now: that of before, if they lay there."""
        known = self.teller.known
        if type(known) is not self.kind or not known.fits(self.tensors):
            known = self.teller.known = self.kind(self.tensors)
        return known


_WAYS: Final[Mapping[type[Any], StepWay]] = {
    FusedAdam: StepWay(AdamStep, adam_settings, adam_tensors),
    **OF_TORCH,
}
_STEPS: Final[Mapping[type[Any], object]] = {kind: kind.step for kind in _WAYS}
"""As their classes have them; torch wraps each when the first optimiser of a class is made."""


def may_be_told(optimizer: Optimizer | None) -> bool:
    """Whether steps of such an optimiser may be for C."""
    return type(optimizer) in _WAYS


@final
class StepTeller:
    """Tells the steps of an optimiser.

    Args:
        optimizer: Whose.
        parameters: All of its part's.

    Attributes:
        known: What has taken its last step.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._way = _WAYS.get(type(optimizer))
        self._options: Sequence[object] = ()
        self._settings: Mapping[str, Any] | None = None
        self.known: WeightsStep | None = None

    def __getstate__(self) -> dict[str, object]:
        """Without what C was told of here: a copy's weights lie elsewhere."""
        return vars(self) | {"known": None}

    def told(self, gradients: Sequence[Tensor | None]) -> StepJob | None:
        """What a step with these gradients is; None: it is one by itself.

        Args:
            gradients: One for each parameter, or None.
        """
        optimizer, way = self._optimizer, self._way
        if way is None or self._is_its_own():
            return None
        (group, *others) = optimizer.param_groups
        mine, its = group["params"], self._parameters
        if others or len(mine) != len(its) or not all(map(is_, mine, its)):
            return None
        settings = self._known_settings(way, group)
        if settings is None:
            return None
        weights, given = with_gradients(mine, gradients)
        if not weights or not _may_step(weights, given):
            return None
        if way.step is not AdamStep and not reckons_as_torch(type(optimizer), weights[0].dtype):
            return None
        tensors = way.tensors(optimizer, group, weights)
        return None if tensors is None else StepJob(self, way.step, settings, tensors, given)

    def _is_its_own(self) -> bool:
        """Whether somebody watches, or has put another step in the place of the class's."""
        optimizer = self._optimizer
        step, before = type(optimizer).step, _STEPS[type(optimizer)]
        as_made = step is before or getattr(step, "__wrapped__", None) is before
        scaled = "grad_scale" in vars(optimizer) or "found_inf" in vars(optimizer)
        return not as_made or scaled or is_watched(optimizer)

    def _known_settings(self, way: StepWay, group: Group) -> Mapping[str, Any] | None:
        """They, found anew where an option has changed."""
        options = [*group.values()]
        known = self._options
        if len(options) != len(known) or not all(map(is_, options, known)):
            lasting = isinstance(group.get("betas", ()), tuple)
            self._options = options if lasting else ()
            self._settings = way.settings(self._optimizer, group)
        return self._settings


def _may_step(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether all gradients are dense, and go somewhere."""
    for p, g in zip(weights, gradients, strict=True):
        if g.is_sparse or not p.requires_grad:
            return False
    return True

"""What is done about gradients that are late, by name, for a pipeline of few parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

import geartrain as gt
from geartrain.parts.rules import MakeOptimizer


@dataclass(frozen=True)
class Method:
    """One way.

    Args:
        parts: What ``gt.Pipeline`` is told, by the number of minibatches.
        optimizer: Makes an optimiser of a rate and a momentum.
        alone: Share of the minibatches that go one at a time, in the beginning.
    """

    parts: Callable[[int], Mapping[str, Any]] = lambda _: {}
    optimizer: Callable[[float, float], MakeOptimizer] = lambda rate, momentum: partial(
        torch.optim.SGD, lr=rate, momentum=momentum, foreach=False
    )
    alone: float = 0.0


def _spike(rate: float, momentum: float) -> MakeOptimizer:
    return partial(gt.SpikeCompensatedSGD, lr=rate, momentum=momentum)


def _ahead(rate: float, momentum: float) -> MakeOptimizer:
    return partial(gt.LookAheadSGD, lr=rate / (1 - momentum), momentum=momentum)


def _pipemare(count: int) -> Mapping[str, Any]:
    return {"view": gt.Corrected(), "delay": gt.AnnealedRate(over=count // 4)}


METHODS: Final[Mapping[str, Method]] = {
    "stashed": Method(),
    "predicted": Method(lambda _: {"view": gt.Predicted()}),
    "scaled": Method(lambda _: {"view": gt.Predicted(), "delay": gt.ScaledByStaleness()}),
    "mixed": Method(lambda _: {"view": gt.Mixed()}),
    "recomputed": Method(lambda _: {"view": gt.Recomputed()}),
    "annealed": Method(lambda n: {"delay": gt.AnnealedRate(over=n // 4)}),
    "pipemare": Method(_pipemare),
    "pipemare, alone first": Method(_pipemare, alone=0.1),
    "predicted, alone first": Method(lambda _: {"view": gt.Predicted()}, alone=0.1),
    "predicted, annealed": Method(
        lambda n: {"view": gt.Predicted(), "delay": gt.AnnealedRate(over=n // 4)}
    ),
    "compensated": Method(lambda _: {"delay": gt.DelayCompensated(2.0, adaptive=0.95)}),
    "gap": Method(lambda _: {"delay": gt.GapAware()}),
    "spike": Method(optimizer=_spike),
    "look ahead": Method(optimizer=_ahead),
}
"""PipeMare (rate and weights, arXiv:1910.05124), SpecTrain (arXiv:1809.02839), DC-ASGD
(arXiv:1609.08326), gap-aware (arXiv:1909.10802), spike compensation (arXiv:2003.11666) and
Nesterov's look-ahead (arXiv:2505.01099), whose rate is that of the same steps in the long run."""

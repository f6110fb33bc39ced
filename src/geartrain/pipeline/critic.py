"""Local critics: a small network at a cut predicts the final loss, and trains what is below it.

    h₁ ─► critic 1 ─► L₁ ──► trains part 1        critic 1 itself learns on |L₂ - L₁|
    │ cut                ▲
    h₂ ─► critic 2 ─► L₂ ┘ a number a row, no gradient
    │ cut                ▲
    h₃ ─► head     ─► L₃ ┘ the true loss

Three gradients must not mix: that of L₁ reaches part 1 and not the critic's weights, that of the
distance reaches the critic's weights and nothing else, and L₂ gives none to what made it.

Source: Lee and Lee 2018; Lee et al. 2022, arXiv:2102.01963.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from geartrain.graph.graph import Stream
from geartrain.graph.operator import AbstractOperator
from geartrain.graph.operators import Replaying


@final
class LocalCritic(nn.Module):
    """A critic's two outputs, so that each has the gradient that it should.

    Args:
        critic: Maps h ``(n, ...)`` to a prediction.
        criterion: ``(prediction, *rest) -> (n,)``, one loss a row; ``rest`` is the payload behind
            h, such as targets.

    Called with ``(h, *rest)`` it gives ``(loss, own)``, both ``(n,)`` and of equal value where
    nothing is random: the gradient of ``loss`` reaches h and not the critic's weights, that of
    ``own`` the weights and not h. The critic runs twice; statistics of batch normalisation are
    updated once. Give it to ``Stream.overlap``, and both streams to ``teach_critics``.
    """

    def __init__(self, critic: nn.Module, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.critic = critic
        self._criterion = criterion

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        fixed = {n: p.detach() for n, p in self.critic.named_parameters(remove_duplicate=False)}
        fixed |= {n: b.clone() for n, b in self.critic.named_buffers(remove_duplicate=False)}
        loss = self._criterion(torch.func.functional_call(self.critic, fixed, (h,)), *rest)
        return loss, self._criterion(self.critic(h.detach()), *rest)


@final
class RowLoss(nn.Module):
    """The true loss as rows, for the top of a stack of critics.

    Args:
        criterion: ``(prediction, *rest) -> (n,)``, one loss a row.
    """

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self._criterion = criterion

    def forward(self, prediction: Tensor, *rest: Tensor) -> Tensor:
        return self._criterion(prediction, *rest)


def teach_critics(critics: Sequence[tuple[Stream, Stream]], true: Stream) -> None:
    """End streams of losses: each critic learns to predict the loss above it.

    Args:
        critics: From the lowest up, what ``stream.overlap(LocalCritic(...))`` gave: the part below
            has its gradient at once, whenever the loss above comes.
        true: The true loss, one number a row, from ``RowLoss``.

    Without critics this is backpropagation. Replayed rows train the parts; critics learn from fresh
    ones, which all levels have.
    """
    graph = true.graph
    levels = [*critics, (true, true)]
    for (value, loss), (above, _) in itertools.pairwise(levels):
        name = loss.operator.name
        loss.loss(_first, name=f"{name} loss")
        target = _fresh(above.detach(name=f"{name} target"))
        pairs = graph.concat(_fresh(value), target, how="tuple", name=f"{name} pairs")
        pairs.loss(_distance, name=f"{name} distance")
    true.loss(_first, name=f"{true.operator.name} loss")


def _fresh(stream: Stream) -> Stream:
    """The rows of a stream that are no replays."""
    operators: list[AbstractOperator] = [stream.operator]
    for operator in operators:
        new = {source for sources in operator.sources for source, _ in sources}
        operators.extend(new.difference(operators))
    if not any(isinstance(o, Replaying) for o in operators):
        return stream
    fresh, again = stream.where(lambda m: m.replay == 0)
    again.stop()
    return fresh


def _first(loss: Tensor, *own: Tensor) -> Tensor:
    """The loss itself, one a row."""
    return loss


def _distance(loss: Tensor, own: Tensor, above: Tensor, *rest: Tensor) -> Tensor:
    """How far the critic's own value is from the loss above, one a row."""
    return (above - own).abs()

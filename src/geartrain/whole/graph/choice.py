"""The choice of a vertex: a softmax over those of each graph.

    h, answers, Inside ─► scores w h ─► log-sum-exp over a graph ─► loss, choice

An ordinary module that also has a bundle kernel, which keeps the slope of the loss at each score.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.graph.admission import Brought
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered
from geartrain.whole.graph.readouts import choice_backward, choice_forward, no_vertex


@final
class VertexChoice(nn.Module):
    """A softmax over the vertices of each graph, and how far it is from the right one.

        score_v = w h_v     loss = log Σ_v exp(score_v) - score_answer     choice = argmax_v score_v

    Inputs: h float ``(rows, hidden)``; answers int64 ``(rows,)``, the right vertex of a graph,
    repeated over its rows, as ``read="answer"`` hands on a value column; an ``Inside``. Outputs:
    losses ``(bundles,)`` and choices int64 ``(bundles,)``, vertices of the graph. Use it with
    ``inside=True, pool=True``, and end the stream in ``choice_loss``:

        vertices.through(VertexChoice(16), read="answer", inside=True, pool=True).loss(
            choice_loss, "answer", metrics={"accuracy": choice_accuracy}
        )

    Of equal scores the first vertex is the choice.

    Args:
        hidden: Width of h.

    Raises:
        DataError: An answer is no vertex of its graph; on a device its loss becomes NaN instead.

    Source: the node selection of Li et al. 2016, arXiv:1511.05493.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden, 1, bias=False)  # a softmax does not see what all have

    def forward(self, h: Tensor, answers: Tensor, inside: Inside) -> tuple[Tensor, Tensor]:
        scores, lengths, segment = self.score(h)[:, 0], inside.lengths, inside.segment
        starts = lengths.cumsum(0) - lengths
        answer, wrong = _answers(answers, starts, lengths)
        top = _tops(scores.detach(), inside)
        total = scores.new_zeros(lengths.shape).index_add(0, segment, torch.exp(scores - top))
        losses = _marked(total.log() + (top - scores).index_select(0, starts + answer), wrong)
        return losses, _first(scores == top, inside) - starts

    def check_instances(self, brought: Brought) -> None:
        """Answers that are vertices.

        Raises:
            DataError: One of the instances brings another.
        """
        for answers in brought.columns.values():
            answer = answers[brought.lengths.cumsum() - brought.lengths]
            wrong = np.flatnonzero((answer < 0) | (answer >= brought.lengths))
            if wrong.size:
                raise no_vertex(int(answer[wrong[0]]), int(brought.lengths[wrong[0]]))

    def bundle_kernel(self) -> AbstractKernel:
        """Keeps h and the slopes of the losses at the scores."""
        return _ChoiceKernel(self)


@final
class _ChoiceKernel(AbstractKernel):
    residuals = 2

    def __init__(self, module: VertexChoice) -> None:
        self._module = module

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        assert inside is not None
        h, answers = inputs
        lengths, segment, w = inside.lengths, inside.segment, self._module.score.weight
        found = choice_forward(h, answers, lengths, w)
        if found is not None:
            losses, choices, slopes = found
            return (losses, choices), (h, slopes)
        scores = (h @ w.t())[:, 0]
        starts = lengths.cumsum(0) - lengths
        answer, wrong = _answers(answers, starts, lengths)
        at = starts + answer
        top = _tops(scores, inside)
        shares = torch.exp(scores - top)
        total = scores.new_zeros(lengths.shape).index_add_(0, segment, shares)
        losses = _marked(total.log() + (top - scores).index_select(0, at), wrong)
        slopes = shares.div_(total.index_select(0, segment))
        slopes[at] -= 1
        return (losses, _first(scores == top, inside) - starts), (h, slopes)

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
        assert inside is not None
        (d, _), (h, slopes), w = gradients, kept, self._module.score.weight
        if d is None:
            return None, None
        found = choice_backward(d.contiguous(), h, slopes, rows, inside.lengths, w)
        if found is None:
            h, slopes = gathered((h, slopes), rows)
            d_scores = (slopes * d.index_select(0, inside.segment))[:, None]
            found = d_scores * w, d_scores.t() @ h
        dh, dw = found
        if w.requires_grad:
            assert isinstance(w, nn.Parameter)
            into.add(w, dw)
        return dh, None


def _answers(answers: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
    """The answer of each graph, and on a device which of them are none, with 0 in their place.

    Raises:
        DataError: One is no vertex of its graph, on the host.
    """
    answer = answers.index_select(0, starts)
    wrong = (answer < 0) | (answer >= lengths)
    if not wrong.is_cpu:  # a look would wait for the device
        return answer.masked_fill(wrong, 0), wrong
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0, 0])
        raise no_vertex(int(answer[at]), int(lengths[at]))
    return answer, None


def _marked(losses: Tensor, wrong: Tensor | None) -> Tensor:
    """With NaN, which the loss finds without a wait, where the answer is wrong."""
    return losses if wrong is None else losses.masked_fill(wrong, torch.nan)


def _tops(scores: Tensor, inside: Inside) -> Tensor:
    """For each vertex the highest score of its graph."""
    top = scores.new_full(inside.lengths.shape, -torch.inf)
    return top.scatter_reduce(0, inside.segment, scores, "amax").index_select(0, inside.segment)


def _first(chosen: Tensor, inside: Inside) -> Tensor:
    """The first row of each graph among those chosen."""
    rows = torch.arange(len(chosen), device=chosen.device)
    best = torch.where(chosen, rows, len(chosen))
    none = torch.full_like(inside.lengths, len(chosen))
    return none.scatter_reduce(0, inside.segment, best, "amin")


def choice_loss(losses: Tensor, choices: Tensor, answers: Tensor) -> Tensor:
    """The losses of ``VertexChoice``, as a criterion."""
    return losses


def choice_accuracy(losses: Tensor, choices: Tensor, answers: Tensor) -> Tensor:
    """Whether ``VertexChoice`` chose the answer, as a metric."""
    return choices == answers


__all__ = ["VertexChoice", "choice_accuracy", "choice_loss"]

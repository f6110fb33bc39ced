"""Criteria of torch that compare entry by entry: the losses of rows and their gradient at once.

    prediction, target (n, ...) ─► an entry each ─► the mean of a row's: its loss
                                        └─► torch's own backward of entries, of the mean's gradient

Autograd calls the same operators, and takes several times as long to find out which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional as F

Back: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The gradient of predictions, of that of entries, predictions and targets."""


@final
class InnerMean:
    """A criterion of this module's, as one loss a row: the mean of the row's entries.

    Args:
        criterion: One of those for which ``knows`` is true.
    """

    def __init__(self, criterion: Callable[..., Any]) -> None:
        self._criterion, self._back = criterion, _BACK[criterion]

    @staticmethod
    def knows(criterion: Callable[..., Any]) -> bool:
        """Whether it is a criterion of this kind."""
        return any(criterion is known for known in _BACK)

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        return _row_means(self._entries(prediction, _aligned(target, prediction)))

    def with_gradient(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Losses, and their gradient with respect to the prediction."""
        target = _aligned(target, prediction)
        each = self._entries(prediction, target)
        d = each.new_ones(())
        if each.ndim > 1:
            d = d / each[:1].flatten(1).shape[1]
        return _row_means(each), self._back(d.expand_as(each), prediction, target)

    def _entries(self, prediction: Tensor, target: Tensor) -> Tensor:
        each: Tensor = self._criterion(prediction, target, reduction="none")
        return each


def _aligned(target: Tensor, prediction: Tensor) -> Tensor:
    """Of the shape and dtype of the prediction."""
    if prediction.shape != target.shape:
        target = target.view_as(prediction)
    return target.to(prediction.dtype)


def _row_means(each: Tensor) -> Tensor:
    return each.flatten(1).mean(1) if each.ndim > 1 else each


def _of_squares(d: Tensor, prediction: Tensor, target: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.mse_loss_backward(d, prediction, target, 0)
    return found


def _of_lines(d: Tensor, prediction: Tensor, target: Tensor) -> Tensor:
    return d * (prediction - target).sgn()


def _of_smooth_lines(d: Tensor, prediction: Tensor, target: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.smooth_l1_loss_backward(d, prediction, target, 0, 1.0)
    return found


def _of_huber(d: Tensor, prediction: Tensor, target: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.huber_loss_backward(d, prediction, target, 0, 1.0)
    return found


_BACK: Final[Mapping[Callable[..., Any], Back]] = {
    F.mse_loss: _of_squares,
    F.l1_loss: _of_lines,
    F.smooth_l1_loss: _of_smooth_lines,
    F.huber_loss: _of_huber,
}

"""Criteria and metrics of whole minibatches: one number a row, whatever is inside a row.

    prediction (n, k)      target (n,)      ─► (n,)
    prediction (n, t, k)   target (n, t)    ─► (n, t) ─► mean over t ─► (n,)

A part averages over the rows of a minibatch, which makes the usual mean over rows and positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias, final

from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.nodes.loss import Metric, per_row

Criterion: TypeAlias = Callable[..., Any]


@final
class RowCriterion:
    """A criterion that gives one loss a row.

    Args:
        criterion: ``(prediction, target)`` to one loss a row or position. torch's functions and
            modules are asked for no reduction. Where the prediction is ``(*target.shape, k)``,
            positions are judged like rows, classes last; else it gets both as they are.

    Raises:
        GraphError: A module weighs classes, so that its mean is not the mean over rows.
    """

    def __init__(self, criterion: Criterion) -> None:
        if isinstance(criterion, nn.Module) and hasattr(criterion, "reduction"):
            if getattr(criterion, "weight", None) is not None and criterion.reduction == "mean":
                raise GraphError(
                    f"{type(criterion).__name__}(weight=..., reduction='mean') divides by the "
                    "weights in a minibatch, a pipeline by its rows; build it with "
                    "reduction='none' if that is meant"
                )
            unreduced: Any = copy.copy(criterion)
            unreduced.reduction = "none"
            criterion = unreduced
        self._criterion = per_row(criterion, "criterion")
        self._name = getattr(criterion, "__name__", None) or repr(criterion)

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        return by_row(self._criterion, prediction, target)

    def __repr__(self) -> str:
        return self._name


@final
class RowMetric:
    """A metric that gives one number a row; see ``RowCriterion``."""

    def __init__(self, function: Criterion) -> None:
        self._function = function

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        return by_row(self._function, prediction, target)


def by_row(function: Criterion, prediction: Tensor, target: Tensor) -> Tensor:
    """A function of rows, ``(n,)``; positions inside of rows are averaged."""
    if target.ndim > 1 and prediction.shape[:-1] == target.shape:
        values = function(prediction.flatten(0, target.ndim - 1), target.flatten())
        values = values.view(target.shape)
    else:
        values = function(prediction, target)
    if not isinstance(values, Tensor) or values.ndim < 2:
        return values  # type: ignore[no-any-return]  # what is no row is refused by the loss node
    inner = values if values.is_floating_point() else values.to(prediction.dtype)
    return inner.flatten(1).mean(1)


def row_metric(metric: Criterion | Metric) -> Metric:
    """A metric that averages the positions inside of rows."""
    if isinstance(metric, Metric):
        return Metric(RowMetric(metric.function), metric.where)
    return Metric(RowMetric(metric))

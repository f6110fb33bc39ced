"""Gradients of the weights of kernels that were written by hand."""

from __future__ import annotations

from torch import Tensor, nn

from geartrain.nodes.gradient import GradientSum


def add_wanted(
    parameter: Tensor, gradient: Tensor, into: GradientSum, *, given: bool = False
) -> None:
    """Add what a weight gets, if it learns; ``given`` as for ``GradientSum.add``."""
    if parameter.requires_grad:
        assert isinstance(parameter, nn.Parameter)
        into.add(parameter, gradient, given=given)

"""Element-wise steps that the kernels share, in place and in few torch calls.

On a CPU torch's vectorised tanh costs about ten times its sigmoid (512 x 128 float32: 147 us
against 16 us on one thread), and tanh(x) = 2 sigmoid(2x) - 1. The absolute error of that is
at most two machine epsilons (1.8e-7 seen in float32), whatever the size of x: small values lose
relative precision, as they do in any sum with a value near one. It is used for float32 and float64
on a CPU, not for shorter floats, nor on devices where tanh is cheap, and where there is no native
kernel, whose tanh is exact to a few epsilons of itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.native.cells import tanh

_SHORT = (torch.float16, torch.bfloat16)
_MINUS_ONE = torch.tensor(-1.0, dtype=torch.float32)  # one more conversion for float64 only
_sigmoid_backward = torch.ops.aten.sigmoid_backward.default
_sigmoid_backward_out = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.default
_tanh_backward_out = torch.ops.aten.tanh_backward.grad_input
_threshold_backward = torch.ops.aten.threshold_backward.default
_leaky_relu_backward = torch.ops.aten.leaky_relu_backward.default
_elu_backward = torch.ops.aten.elu_backward.default
_gelu_backward = torch.ops.aten.gelu_backward.default
_silu_backward = torch.ops.aten.silu_backward.default
_softplus_backward = torch.ops.aten.softplus_backward.default


def tanh_into(x: Tensor, out: Tensor) -> None:
    """Write tanh(x) to ``out``, of x's shape; ``out`` may be ``x`` itself."""
    if tanh(x, out):
        return
    if _through_sigmoid(x):
        torch.mul(x, 2.0, out=out)
        out.sigmoid_()
        torch.add(_MINUS_ONE, out, alpha=2.0, out=out)
    else:
        torch.tanh(x, out=out)


def sigmoid_backward_(dy: Tensor, y: Tensor) -> None:
    """Turn the gradient at y = sigmoid(x) into the one at x, in place: dy y (1 - y)."""
    _sigmoid_backward_out(dy, y, grad_input=dy)


def tanh_backward_(dy: Tensor, y: Tensor) -> None:
    """Turn the gradient at y = tanh(x) into the one at x, in place: dy (1 - y²)."""
    _tanh_backward_out(dy, y, grad_input=dy)


def sigmoid_backward(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient at x of y = sigmoid(x)."""
    dx: Tensor = _sigmoid_backward(dy, y)
    return dx


def tanh_backward(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient at x of y = tanh(x)."""
    dx: Tensor = _tanh_backward(dy, y)
    return dx


def relu_backward(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient at x of y = relu(x): dy where y > 0, else zero."""
    dx: Tensor = _threshold_backward(dy, y, 0)
    return dx


def leaky_relu_backward(dy: Tensor, kept: Tensor, slope: float) -> Tensor:
    """The gradient at x of y = leaky_relu(x); ``kept`` is x, or y where no slope is negative."""
    dx: Tensor = _leaky_relu_backward(dy, kept, slope, False)
    return dx


def elu_backward(dy: Tensor, kept: Tensor, alpha: float, from_value: bool) -> Tensor:
    """The gradient at x of y = elu(x); ``kept`` is y (``from_value``, wants alpha > 0) or x."""
    dx: Tensor = _elu_backward(dy, alpha, 1.0, 1.0, from_value, kept)
    return dx


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    """The gradient at x of y = gelu(x); ``approximate`` is ``none`` or ``tanh``."""
    dx: Tensor = _gelu_backward(dy, x, approximate=approximate)
    return dx


def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient at x of y = x sigmoid(x)."""
    dx: Tensor = _silu_backward(dy, x)
    return dx


def softplus_backward(dy: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """The gradient at x of y = log(1 + exp(beta x)) / beta, linear where beta x > threshold."""
    dx: Tensor = _softplus_backward(dy, x, beta, threshold)
    return dx


def _through_sigmoid(x: Tensor) -> bool:
    return x.is_cpu and x.dtype not in _SHORT

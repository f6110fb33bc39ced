"""Casts around kernels, modules and functions that compute in float32, for rows in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.frames.precision import narrowed, widened
from geartrain.nodes.bundle import AbstractBundleKernel
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, AbstractRowKernel


def in_bf16(kernel: AbstractRowKernel) -> AbstractRowKernel:
    """The kernel for bfloat16 rows: its own, or itself with casts."""
    return kernel.for_bf16() or CastKernel(kernel)


def around(kernel: AbstractKernel, *, full: bool) -> AbstractKernel:
    """Any kernel, for bfloat16 rows.

    Args:
        kernel: For float32 rows.
        full: Whether it computes in float32 between its casts, even if it could in bfloat16.
    """
    if isinstance(kernel, AbstractBundleKernel):
        return CastBundleKernel(kernel if full else kernel.for_bf16())
    if isinstance(kernel, AbstractRowKernel):
        return CastKernel(kernel) if full else in_bf16(kernel)
    raise TypeError(f"{type(kernel).__name__} has no form for bfloat16 rows: cast what it runs")


@final
class Cast(nn.Module):
    """A module or function of float32 rows, for bfloat16 rows.

    Args:
        function: Runs in float32; autograd leads through both casts.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> object:
        outputs = self.function(*(widened(x) if isinstance(x, Tensor) else x for x in inputs))
        if isinstance(outputs, Tensor):
            return narrowed(outputs)
        if isinstance(outputs, (tuple, list)):
            return tuple(narrowed(y) if isinstance(y, Tensor) else y for y in outputs)
        return outputs


@final
class CastKernel(AbstractRowKernel):
    """A row kernel that works, and keeps its residuals, in float32, for bfloat16 rows."""

    def __init__(self, kernel: AbstractRowKernel) -> None:
        self._kernel, self.looks_up = kernel, kernel.looks_up

    def forward(self, *inputs: Tensor) -> tuple[Payload, Payload]:
        outputs, residuals = self._kernel.forward(*map(widened, inputs))
        return tuple(map(narrowed, outputs)), residuals

    def backward(self, gradients: Gradient, residuals: Payload, into: GradientSum) -> Gradient:
        return _narrow(self._kernel.backward(_widen(gradients), residuals, into))

    def backward_rows(
        self, gradients: Gradient, kept: Payload, rows: IntArray, into: GradientSum
    ) -> Gradient:
        return _narrow(self._kernel.backward_rows(_widen(gradients), kept, rows, into))


@final
class CastBundleKernel(AbstractBundleKernel):
    """A bundle kernel that works, and keeps its residuals, in float32, for bfloat16 rows.

    Args:
        kernel: As it shall compute: ``for_bf16()`` of one may round what its products multiply.
    """

    def __init__(self, kernel: AbstractBundleKernel) -> None:
        self._kernel = kernel
        self.room_for, self.looks_up = kernel.room_for, kernel.looks_up
        self.keeps_rows = kernel.keeps_rows

    def forward(
        self, *inputs: Tensor, inside: Inside, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        outputs, residuals = self._kernel.forward(*map(widened, inputs), inside=inside, room=room)
        return tuple(map(narrowed, outputs)), residuals

    def backward(
        self, gradients: Gradient, residuals: Payload, into: GradientSum, inside: Inside
    ) -> Gradient:
        return _narrow(self._kernel.backward(_widen(gradients), residuals, into, inside))

    def backward_rows(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray,
        into: GradientSum,
        inside: Inside,
        *,
        wanted: bool = True,
    ) -> Gradient:
        return _narrow(
            self._kernel.backward_rows(_widen(gradients), kept, rows, into, inside, wanted=wanted)
        )


def _widen(gradients: Gradient) -> Gradient:
    return tuple(None if g is None else widened(g) for g in gradients)


def _narrow(gradients: Gradient) -> Gradient:
    return tuple(None if g is None else narrowed(g) for g in gradients)

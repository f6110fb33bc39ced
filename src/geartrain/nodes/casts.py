"""Casts around kernels, modules and functions that compute in float32, for rows in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.frames.precision import narrowed, widened
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel


def in_bf16(kernel: AbstractKernel) -> AbstractKernel:
    """The kernel for bfloat16 rows: its own, or itself with casts."""
    return kernel.for_bf16() or CastKernel(kernel.rounded())


def around(kernel: AbstractKernel, *, full: bool) -> AbstractKernel:
    """Any kernel, for bfloat16 rows.

    Args:
        kernel: For float32 rows.
        full: Whether it computes in float32 between its casts, even if it could in bfloat16.
    """
    return CastKernel(kernel) if full else in_bf16(kernel)


@final
class Cast(nn.Module):
    """A module or function of float32 rows, for bfloat16 rows.

    Args:
        function: Runs in float32; autograd leads through both casts.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.reads_on_host = getattr(function, "reads_on_host", False)

    def forward(self, *inputs: Any) -> object:
        outputs = self.function(*(widened(x) if isinstance(x, Tensor) else x for x in inputs))
        if isinstance(outputs, Tensor):
            return narrowed(outputs)
        if isinstance(outputs, (tuple, list)):
            return tuple(narrowed(y) if isinstance(y, Tensor) else y for y in outputs)
        return outputs


@final
class CastKernel(AbstractKernel):
    """A kernel that works, and keeps its residuals, in float32, for bfloat16 rows.

    Args:
        kernel: As it shall compute: one that is ``rounded()`` may round what its products multiply.
    """

    def __init__(self, kernel: AbstractKernel) -> None:
        self._kernel, self.residuals = kernel, kernel.residuals
        self.room_for, self.looks_up = kernel.room_for, kernel.looks_up
        self.keeps_rows = kernel.keeps_rows

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        outputs, residuals = self._kernel.forward(tuple(map(widened, inputs)), inside, room)
        return tuple(map(narrowed, outputs)), residuals

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
        wide = tuple(None if g is None else widened(g) for g in gradients)
        found = self._kernel.backward(wide, kept, rows, into, inside, wanted=wanted)
        return tuple(None if g is None else narrowed(g) for g in found)

"""In which precision rows travel: as they come, or in bfloat16 around weights in float32.

    "full"   rows, products and residuals have the dtype of the data and the modules
    "bf16"   entry ─► bfloat16 rows ─► kernel ─► bfloat16 rows ─► loss in float32
                                       │ a kernel that can: residuals and products in bfloat16
                                       └ any other: float32, with a cast at either border

Weights, the sums of their gradients and what the optimiser keeps are float32 in both.

Source: Kalamkar et al. 2019, arXiv:1905.12322; weights of full precision beside short ones as in
Micikevicius et al. 2018, arXiv:1710.03740. bfloat16 has float32's range: no loss is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, cast, final, get_args

import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.ir.bundle import AbstractBundleKernel, Inside
from geartrain.ir.gradient import GradientSum
from geartrain.ir.kernel import AbstractRowKernel
from geartrain.ir.message import Gradient, IntArray, Payload

Precision: TypeAlias = Literal["full", "bf16"]
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)


def require_precision(value: str, where: str) -> Precision:
    """The value, if it is one.

    Raises:
        ValueError: It is not.
    """
    if value not in PRECISIONS:
        raise ValueError(f"{where}{value!r}: expected one of {', '.join(PRECISIONS)}")
    return cast(Precision, value)


def require_float32(part: str, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights that bfloat16 rows are not meant for.

    Raises:
        GraphError: A parameter of a part is not float32.
    """
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise GraphError(
                f"part '{part}': '{name}' is {parameter.dtype}, but precision='bf16' keeps weights "
                "in torch.float32; convert the module with .float(), or give the session "
                "precision='full'"
            )


def narrowed(x: Tensor) -> Tensor:
    """A row in bfloat16; integers stay."""
    return x.to(torch.bfloat16) if x.is_floating_point() else x


def widened(x: Tensor) -> Tensor:
    """A bfloat16 row in float32; others stay."""
    return x.float() if x.dtype is torch.bfloat16 else x


def in_bf16(kernel: AbstractRowKernel) -> AbstractRowKernel:
    """The kernel for bfloat16 rows: its own, or itself with casts."""
    return kernel.for_bf16() or CastKernel(kernel)


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

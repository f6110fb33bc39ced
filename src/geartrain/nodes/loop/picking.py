"""Functions without weights that do nothing but pick some of their arguments.

``lambda h, x, scores: (h, x)`` between two modules of a loop costs as many operations as a module
if a kernel runs it. What it returns is what it was given, which is seen where it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

from geartrain.errors import ProtocolError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel


def may_pick(function: Callable[..., Any], weightless: bool) -> bool:
    """Whether it is worth trying: no module, which may draw random numbers or have hooks."""
    return weightless and not isinstance(function, nn.Module)


def picked(function: Callable[..., Any], inputs: Payload) -> tuple[Payload, Picking] | None:
    """What a function returns, and its way back; None: it does more than to pick."""
    found = function(*inputs)
    outputs = (found,) if isinstance(found, Tensor) else found
    if not isinstance(outputs, tuple) or not outputs:
        return None
    places = {id(x): j for j, x in enumerate(inputs)}
    which = tuple(places.get(id(y), -1) for y in outputs)
    if -1 in which:
        return None
    return outputs, Picking(which, len(inputs))


@final
class Picking(AbstractKernel):
    """Gives some of its inputs.

    Args:
        which: For each output, the input that it is.
        width: Inputs.
    """

    residuals = 0
    apart = True

    def __init__(self, which: tuple[int, ...], width: int) -> None:
        self._which, self._width = which, width

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        return tuple(inputs[j] for j in self._which), ()

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
        if len(gradients) != len(self._which):
            raise ProtocolError(f"{len(gradients)} gradients of {len(self._which)} outputs came")
        found: list[Tensor | None] = [None] * self._width
        for j, g in zip(self._which, gradients, strict=True):
            before = found[j]
            if g is not None:
                found[j] = g if before is None else before + g
        return tuple(found)

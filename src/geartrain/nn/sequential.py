"""Modules one after the other, the first of which looks inside bundles: one part, one firing.

    bundle, Inside ─► over bundles ─► a row each ─► row by row ─► y

A readout behind it would be a firing of its own, and its gradient another firing of what is before
it. Together with a loss that alone reads it, all of this is one firing, forward and back: nothing
is stored, and no gradient is stale.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.graph.admission import Brought, check_of
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import (
    AbstractKernel,
    bundle_kernel_of,
    kernel_of,
    parted,
    require_counts,
)


@final
class BundleSequential(nn.Module):
    """A module over bundles, and modules of rows behind it.

    Inputs and ``Inside``: those of the first. Output: what the others make of its output, row by
    row. Use it with ``inside=True``, and ``pool=True`` where the first makes a row of a bundle.

    Args:
        first: Gets an ``Inside`` last; such as ``WholeList`` or ``GatedSum``.
        rows: Modules of its output, in turn.

    Where each has a kernel, and a loss alone reads the node, no forward runs twice; otherwise the
    node runs the modules again for the gradient.
    """

    def __init__(self, first: nn.Module, *rows: nn.Module) -> None:
        super().__init__()
        self.first, self.rows = first, nn.Sequential(*rows)

    def forward(self, *inputs: Any) -> Tensor:
        made = self.first(*inputs)
        y: Tensor = self.rows(*made) if isinstance(made, tuple) else self.rows(made)
        return y

    def check_instances(self, brought: Brought) -> None:
        """What the first demands.

        Raises:
            DataError: One of the instances brings something else.
        """
        if (check := check_of(self.first)) is not None:
            check(brought)

    def bundle_kernel(self) -> AbstractKernel | None:
        """That of the first and those of the others, for a loss in the same node."""
        first, rows = bundle_kernel_of(self.first), kernel_of(self.rows)
        if first is None or rows is None or not first.keeps_rows:
            return None
        return _Kernel(first, rows)


@final
class _Kernel(AbstractKernel):
    keeps_rows = False

    def __init__(self, first: AbstractKernel, rows: AbstractKernel) -> None:
        self._first, self._rows = first, rows
        self._counts = require_counts("BundleSequential", (first, rows))
        self.looks_up = first.looks_up and rows.looks_up

    def rounded(self) -> AbstractKernel:
        return _Kernel(self._first.rounded(), self._rows)

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        between, kept = self._first.forward(inputs, inside)
        outputs, own = self._rows.forward(between)
        return outputs, (*kept, *own)

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
        assert rows is None  # no node keeps them until rows come back
        below, own = parted("BundleSequential", kept, self._counts)
        between = self._rows.backward(gradients, own, None, into)
        return self._first.backward(between, below, None, into, inside, wanted=wanted)


__all__ = ["BundleSequential"]

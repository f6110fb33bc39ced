"""Modules one after the other, the first of which looks inside bundles: one part, one firing.

    bundle, Inside ─► over bundles ─► a row each ─► row by row ─► y

A readout behind it would be a firing of its own, and its gradient another firing of what is before
it. Together with a loss that alone reads it, all of this is one firing, forward and back: nothing
is stored, and no gradient is stale.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from geartrain.graph.admission import Brought, check_of
from geartrain.nodes.bundle import AbstractBundleKernel, bundle_kernel_of
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractRowKernel, kernel_of


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

    def bundle_kernel(self) -> AbstractBundleKernel | None:
        """That of the first and those of the others, for a loss in the same node."""
        first, rows = bundle_kernel_of(self.first), kernel_of(self.rows)
        if first is None or rows is None or not first.keeps_rows:
            return None
        return _Kernel(first, rows)


@final
class _Kernel(AbstractBundleKernel):
    keeps_rows = False

    def __init__(self, first: AbstractBundleKernel, rows: AbstractRowKernel) -> None:
        self._first, self._rows, self._cut = first, rows, 0
        self.looks_up = first.looks_up and rows.looks_up

    def for_bf16(self) -> AbstractBundleKernel:
        return _Kernel(self._first.for_bf16(), self._rows)

    def forward(
        self, *inputs: Tensor, inside: Inside, room: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        between, kept = self._first.forward(*inputs, inside=inside)
        outputs, own = self._rows.forward(*between)
        self._cut = len(kept)
        return outputs, (*kept, *own)

    def backward(
        self,
        gradients: tuple[Tensor | None, ...],
        residuals: tuple[Tensor, ...],
        into: GradientSum,
        inside: Inside,
    ) -> tuple[Tensor | None, ...]:
        kept, own = residuals[: self._cut], residuals[self._cut :]
        between = self._rows.backward(gradients, own, into)
        return self._first.backward(between, kept, into, inside)


__all__ = ["BundleSequential"]

"""Bundle kernels: what row kernels are for rows, for modules that look inside bundles.

    forward   rows of whole bundles, their Inside ─► outputs, residuals      residuals row by row
    backward  gradients, residuals of any whole bundles, the Inside of those ─► input gradients

A bundle is never cut, so a kernel may mix its rows (pass messages along its edges); it may not mix
bundles, as those of one backward come from many forwards. The same view of changed weights holds as
for row kernels.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import IntArray
from geartrain.native.rows import take
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, may_have_kernel, own_kernel


class AbstractBundleKernel(AbstractKernel):
    """Forward that returns residuals, a row each, and backward that needs no recompute.

    As for ``AbstractRowKernel``: stateless but for its module, both methods run under ``no_grad``,
    and nothing that they are given is written to, but for ``room``.
    """

    def for_bf16(self) -> AbstractBundleKernel:
        """The kernel to put between casts where rows travel in bfloat16.

        Its rows are float32, and itself will do; another one may round what its products multiply.
        """
        return self

    def run(
        self, inputs: tuple[Tensor, ...], inside: Inside | None, room: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        assert inside is not None
        with torch.no_grad():
            return self.forward(*inputs, inside=inside, room=room)

    def answer(
        self,
        gradients: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None,
        *,
        wanted: bool = True,
    ) -> tuple[Tensor | None, ...]:
        assert inside is not None
        with torch.no_grad():
            if rows is None:
                return self.backward(gradients, kept, into, inside)
            return self.backward_rows(gradients, kept, rows, into, inside, wanted=wanted)

    @abstractmethod
    def forward(
        self, *inputs: Tensor, inside: Inside, room: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run the module on whole bundles.

        Args:
            inputs: The module's inputs but for the last, leading dimension rows.
            inside: Its last.
            room: Contiguous memory of the shape of residual ``room_for``, to be returned as it.

        Returns:
            Outputs, with a row for each row, or for each bundle if the node pools; and residuals,
            with a row for each row. Their number, trailing shapes and dtypes never change.
        """

    @abstractmethod
    def backward(
        self,
        gradients: tuple[Tensor | None, ...],
        residuals: tuple[Tensor, ...],
        into: GradientSum,
        inside: Inside,
    ) -> tuple[Tensor | None, ...]:
        """Apply the vector-Jacobian product to whole bundles, gathered from any forwards.

        Args:
            gradients: One per output; None is zero. Nobody writes into them afterwards.
            residuals: Of those bundles, in the gradients' order.
            into: Gets the gradients of the parameters that require one.
            inside: Of those bundles.

        Returns:
            One gradient per input; None for an integer input and for one that got nothing.
        """

    def backward_rows(
        self,
        gradients: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        rows: IntArray,
        into: GradientSum,
        inside: Inside,
        *,
        wanted: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """The same, with the residuals where they lie; override it to spare the copy.

        Args:
            gradients: As for ``backward``.
            kept: Residuals of many bundles, ``(capacity, ...)`` each.
            rows: int64 ``(rows,)``, the rows of ``kept`` that came back, in the gradients' order.
            into: As for ``backward``.
            inside: As for ``backward``.
            wanted: Whether anybody reads the gradients of the inputs; else they may all be None.
        """
        return self.backward(gradients, take(kept, rows), into, inside)


class AbstractPlacedKernel(AbstractBundleKernel):
    """A bundle kernel whose way back reads residuals wherever they lie."""

    @abstractmethod
    def backward_at(
        self,
        gradients: tuple[Tensor | None, ...],
        residuals: tuple[Tensor, ...],
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside,
        *,
        wanted: bool,
    ) -> tuple[Tensor | None, ...]:
        """Both ways back in one.

        Args:
            gradients, into, inside, wanted: As for ``backward_rows``.
            residuals: As for ``backward``, or all those that are kept.
            rows: Which of those that are kept; None: the residuals are those.
        """

    def backward(
        self,
        gradients: tuple[Tensor | None, ...],
        residuals: tuple[Tensor, ...],
        into: GradientSum,
        inside: Inside,
    ) -> tuple[Tensor | None, ...]:
        return self.backward_at(gradients, residuals, None, into, inside, wanted=True)

    def backward_rows(
        self,
        gradients: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        rows: IntArray,
        into: GradientSum,
        inside: Inside,
        *,
        wanted: bool = True,
    ) -> tuple[Tensor | None, ...]:
        return self.backward_at(gradients, kept, rows, into, inside, wanted=wanted)


def bundle_kernel_of(module: nn.Module) -> AbstractBundleKernel | None:
    """What the module's own ``bundle_kernel()`` gives, or None: then run the module again.

    None is the answer too where a kernel would pass something over, as for ``kernel_of``.

    Raises:
        GraphError: It gives something else.
    """
    if not may_have_kernel(module) or not hasattr(module, "bundle_kernel"):
        return None
    kernel = own_kernel(module, "bundle_kernel")
    if kernel is not None and not isinstance(kernel, AbstractBundleKernel):
        raise GraphError(
            f"{type(module).__name__}.bundle_kernel() returned {type(kernel).__name__}; expected "
            "an AbstractBundleKernel, or None to have the module run again"
        )
    return kernel

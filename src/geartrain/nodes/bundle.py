"""Bundle kernels: what row kernels are for rows, for modules that look inside bundles.

    forward   rows of whole bundles, their Inside ─► outputs, residuals      residuals row by row
    backward  gradients, residuals of any whole bundles, the Inside of those ─► input gradients

A bundle is never cut, so a kernel may mix its rows (pass messages along its edges); it may not mix
bundles, as those of one backward come from many forwards. The same view of changed weights holds as
for row kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import IntArray
from geartrain.native.rows import take
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import may_have_kernel, own_kernel


@final
@dataclass(frozen=True, slots=True)
class Inside:
    """What a module may know of the bundles whose rows it gets.

    Args:
        lengths: int64 ``(n,)``, rows of each bundle.
        segment: int64 ``(rows,)``, the bundle of each row.
        edges: Edge columns ``(E,)``, int64 or float; ``source`` and ``target`` number the rows of
            this batch. Empty where instances have no edges.
        host: Edge columns as arrays, where they are at hand.

    Tensors are on the device where the module computes.
    """

    lengths: Tensor
    segment: Tensor
    edges: Mapping[str, Tensor]
    host: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def on_host(self, column: str) -> NDArray[Any]:
        """An edge column for numpy; waits for a device only where the engine did not make this."""
        found = self.host.get(column)
        return np.asarray(self.edges[column].cpu()) if found is None else found

    def edge_called(self, k: int) -> str:
        """What errors call edge k of this batch: with its instance, where that is known."""
        called: Callable[[int], str] | None = getattr(self.host, "edge_called", None)
        return f"edge {k}" if called is None else called(k)


class AbstractBundleKernel(ABC):
    """Forward that returns residuals, a row each, and backward that needs no recompute.

    As for ``AbstractRowKernel``: stateless but for its module, both methods run under ``no_grad``,
    and nothing that they are given is written to, but for ``room``.
    """

    looks_up: bool = False
    """Whether it reads parameters whose gradients are rows in no other way than ``look_up``."""

    room_for: int | None = None
    """Number of the residual that ``forward`` writes into ``room``; None: no such."""

    keeps_rows: bool = True
    """Whether residuals have a row for each row, so that a node can keep them until the gradient
    comes. If not, the kernel is only used where the loss is in the same node."""

    def for_bf16(self) -> AbstractBundleKernel:
        """The kernel to put between casts where rows travel in bfloat16.

        Its rows are float32, and itself will do; another one may round what its products multiply.
        """
        return self

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

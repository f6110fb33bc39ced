"""The running sum of one part's parameter gradients.

Kernels add to it product by product, so that a weight's gradient is never built twice; the
first addition after a step writes, later ones add, and nothing is cleared in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from geartrain.ir.products import outer, outer_suits


@final
class GradientSum:
    """Sum of gradients for a fixed set of parameters, by parameter object.

    Args:
        parameters: The parameters of one part. Others are refused with ``KeyError``.

    Every ``add_*`` call adds; a parameter that got nothing since the last ``take`` has no gradient
    (an optimiser skips it). Dense sums live in buffers that are reused from step to step.
    """

    __slots__ = ("_buffers", "_fresh", "_rows")

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._buffers: dict[torch.nn.Parameter, Tensor | None] = {p: None for p in parameters}
        self._fresh: dict[torch.nn.Parameter, bool] = dict.fromkeys(self._buffers, True)
        self._rows: dict[torch.nn.Parameter, list[tuple[Tensor, Tensor]]] = {}

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._buffers

    def add(self, parameter: torch.nn.Parameter, value: Tensor) -> None:
        """Add a gradient of the parameter's shape (dense, or sparse COO for an embedding)."""
        if value.is_sparse:
            self.add_rows(parameter, value._indices()[0], value._values())
        elif self._fresh[parameter]:
            self._buffer(parameter).copy_(value)
            self._fresh[parameter] = False
        else:
            self._buffer(parameter).add_(value)

    def add_product(self, parameter: torch.nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``; left ``(n, a)``, right ``(n, b)``, the parameter ``(a, b)``."""
        if outer_suits(left, right):
            product = outer(left, right)
            if self._fresh[parameter]:
                self._buffers[parameter], self._fresh[parameter] = product, False
            else:
                self._buffer(parameter).add_(product)
            return
        buffer = self._buffer(parameter)
        if self._fresh[parameter]:
            torch.mm(left.t(), right, out=buffer)
            self._fresh[parameter] = False
        else:
            buffer.addmm_(left.t(), right)

    def add_sum(self, parameter: torch.nn.Parameter, rows: Tensor) -> None:
        """Add ``rows.sum(0)``; rows ``(n, d)``, the parameter ``(d,)``: a bias."""
        if self._fresh[parameter]:
            torch.sum(rows, 0, out=self._buffer(parameter))
            self._fresh[parameter] = False
        else:
            self._buffer(parameter).add_(rows.sum(0))

    def add_rows(self, parameter: torch.nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]``; kept as lists, handed over as one sparse tensor.

        indices int64 ``(n,)``, rows ``(n, d)``, the parameter ``(v, d)``.
        """
        if parameter not in self._buffers:
            raise KeyError(parameter)
        self._rows.setdefault(parameter, []).append((indices, rows))

    def take(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """The sum so far (None if nothing came); the next addition starts anew.

        A dense result is a reused buffer: use it before adding again. It is sparse COO
        (uncoalesced) if only ``add_rows`` or sparse gradients came.
        """
        parts = self._rows.pop(parameter, None)
        dense = None if self._fresh[parameter] else self._buffers[parameter]
        self._fresh[parameter] = True
        if parts is None:
            return dense
        indices = torch.cat([i for i, _ in parts])
        rows = torch.cat([r for _, r in parts])
        if dense is not None:
            return dense.index_add_(0, indices, rows)
        return torch.sparse_coo_tensor(
            indices[None], rows, tuple(parameter.shape), check_invariants=False
        )

    def _buffer(self, parameter: torch.nn.Parameter) -> Tensor:
        buffer = self._buffers[parameter]
        if buffer is None:
            buffer = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            buffer.requires_grad_(False)
            self._buffers[parameter] = buffer
        return buffer

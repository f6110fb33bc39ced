"""The read-out of gated graph networks, which looks inside bundles.

    GatedSum         h, x, Inside  ─► y      one row a bundle

An ordinary module that also has a bundle kernel: no forward runs twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.graph.admission import Brought, require_range
from geartrain.nn.elementwise import sigmoid_backward_
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered
from geartrain.nodes.products import affine, times
from geartrain.whole.graph.readouts import Maps, sum_backward, sum_forward
from geartrain.whole.wanted import add_wanted


@final
class GatedSum(nn.Module):
    """A graph's value from its vertices: Σ sigmoid(gate [h, x]) · value(h).

    Inputs: h ``(rows, hidden)``; x float ``(rows, features)``, or int64 ``(rows,)`` for a one at
    that place of zeros; an ``Inside``. Output ``(bundles, out)``: use it with ``inside=True,
    pool=True``.

    Args:
        hidden: Width of h.
        features: Width of x; 0: there is no x.
        out: Width of the value.

    Raises:
        GraphError: x is missing or too much, or has another width.

    Source: the readout of Li et al. 2016, arXiv:1511.05493.
    """

    def __init__(self, hidden: int, features: int = 0, out: int = 1) -> None:
        super().__init__()
        self.hidden, self.features = hidden, features
        self.gate = nn.Linear(hidden + features, out)
        self.value = nn.Linear(hidden, out)

    def forward(self, h: Tensor, *rest: Any) -> Tensor:
        *features, inside = rest
        self.require_features(features)
        seen = torch.cat([h, *(self._columns(f, h) for f in features)], 1)
        shares = torch.sigmoid(self.gate(seen)) * self.value(h)
        total = shares.new_zeros(inside.lengths.shape[0], shares.shape[1])
        summed: Tensor = total.index_add(0, inside.segment, shares)
        return summed

    def check_instances(self, brought: Brought) -> None:
        """An x of whole numbers that the gate has columns for.

        Raises:
            DataError: One of the instances brings another.
        """
        for name, x in brought.columns.items():
            if self.features and x.ndim == 1:
                require_range(f"column '{name}' has", x, self.features)

    def bundle_kernel(self) -> AbstractKernel:
        """Keeps h, x and ``(rows, 2, out)``: gate, value."""
        return _SumKernel(self)

    def require_features(self, given: Sequence[Tensor]) -> None:
        """Refuse an x that is not what the gate was made for.

        Args:
            given: One tensor, or none.

        Raises:
            GraphError: It is missing or too much, or has another width.
        """
        wanted = 1 if self.features else 0
        if len(given) != wanted:
            raise GraphError(
                f"GatedSum(features={self.features}) got {len(given)} columns beside h, expected "
                f"{wanted}: " + ("name it by read=" if wanted else "give features, or no read=")
            )
        if wanted and given[0].ndim > 1 and given[0].shape[1:] != (self.features,):
            raise GraphError(
                f"GatedSum(features={self.features}) got x {tuple(given[0].shape)}; give features "
                f"its width, {given[0].shape[1]}"
            )

    def _columns(self, x: Tensor, h: Tensor) -> Tensor:
        return (F.one_hot(x, self.features) if x.ndim == 1 else x).to(h.dtype)


@final
class _SumKernel(AbstractKernel):
    def __init__(self, module: GatedSum) -> None:
        self._module = module
        self.residuals = 3 if module.features else 2

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        assert inside is not None
        h, *given = inputs
        self._module.require_features(given)
        x = given[0] if given else None
        if x is None or x.ndim == 1:
            found = sum_forward(h, x, inside.lengths, self._maps())
            if found is not None:
                y, made = found
                return (y,), (h, *given, made)
        gate, value = self._module.gate, self._module.value
        width = self._module.hidden
        made = affine(h, *self._both()).view(h.shape[0], 2, value.out_features)
        for x in given:
            of_x = gate.weight[:, width:]
            made[:, 0] += of_x.t().index_select(0, x) if x.ndim == 1 else x.to(h.dtype) @ of_x.t()
        made[:, 0].sigmoid_()
        y = h.new_zeros((inside.lengths.shape[0], value.weight.shape[0]))
        y.index_add_(0, inside.segment, made[:, 0] * made[:, 1])
        return (y,), (h, *given, made)

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
        assert inside is not None
        found = self._native_backward(gradients, kept, rows, into, inside)
        if found is not None:
            return found
        (dy,), (h, *given, made) = gradients, gathered(kept, rows)
        assert dy is not None
        # Gate and value change places: the slope of each is the other.
        d = made.flip(1).mul_(dy.index_select(0, inside.segment)[:, None])
        sigmoid_backward_(d[:, 0], made[:, 0])
        out = d.shape[2]
        flat = d.view(-1, 2 * out)
        d_weight, d_bias = flat.t() @ h, flat.sum(0)
        module = self._module
        columns, dx = [d_weight[:out]], []
        for x in given:
            columns.append(self._column_gradient(x, d[:, 0]))
            of_x = module.gate.weight[:, module.hidden :]
            dx.append(d[:, 0] @ of_x if x.is_floating_point() else None)
        add_wanted(module.gate.weight, torch.cat(columns, 1), into)
        add_wanted(module.gate.bias, d_bias[:out], into)
        add_wanted(module.value.weight, d_weight[out:], into)
        add_wanted(module.value.bias, d_bias[out:], into)
        return (times(flat, self._both()[0]), *dx)

    def _native_backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside,
    ) -> Gradient | None:
        """The gradients, or None where torch is to find them."""
        (dy,), (h, *given, made) = gradients, kept
        nothing = (None,) * len(given)
        if dy is None:
            return (None, *nothing)
        x = given[0] if given else None
        if x is not None and x.ndim > 1:
            return None
        maps = self._maps()
        found = sum_backward(dy.contiguous(), h, x, made, rows, inside.lengths, maps)
        if found is None:
            return None
        dh, slopes = found
        module = self._module
        add_wanted(module.gate.weight, slopes.gate, into)
        add_wanted(module.gate.bias, slopes.gate_bias, into)
        add_wanted(module.value.weight, slopes.value, into)
        add_wanted(module.value.bias, slopes.value_bias, into)
        return (dh, *nothing)

    def _maps(self) -> Maps:
        gate, value = self._module.gate, self._module.value
        return Maps(gate.weight, gate.bias, value.weight, value.bias)

    def _both(self) -> tuple[Tensor, Tensor]:
        """The maps of h to gate and value, as one."""
        gate, value = self._module.gate, self._module.value
        width = self._module.hidden
        return torch.cat([gate.weight[:, :width], value.weight]), torch.cat([gate.bias, value.bias])

    def _column_gradient(self, x: Tensor, d: Tensor) -> Tensor:
        if x.ndim > 1:
            return d.t() @ x.to(d.dtype)
        return d.new_zeros((self._module.features, d.shape[1])).index_add_(0, x, d).t()

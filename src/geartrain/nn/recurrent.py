"""Row kernels of torch's recurrent cells with gates: nn.GRUCell, nn.LSTMCell.

The layout of the weights is torch's, so a cell's parameters may come from anywhere. Each kernel
computes its gates into one buffer, works on slices of it in place, and keeps it as a residual.

    LSTM   i, f, g, o = σ σ tanh σ (W x + U h + b)     c' = f c + i g      h' = o tanh(c')
    GRU    r, z = σ (W x + U h + b)                    m = U_n h + b_n
           n = tanh(W_n x + b + r m)                   h' = n + z (h - n)
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.native.cells import gru_backward, gru_forward, lstm_backward, lstm_forward
from geartrain.native.rows import take_whole
from geartrain.nn.elementwise import (
    sigmoid_backward_,
    tanh_backward_,
    tanh_into,
)
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered
from geartrain.nodes.products import affine, filled, matching, times, whole_rows


@final
class LstmKernel(AbstractKernel):
    """nn.LSTMCell on x ``(n, D)``, h ``(n, H)``, c ``(n, H)``; outputs h', c'.

    Keeps x, h, c and ``(n, 5, H)``: i, f, g, o and tanh(c').
    """

    residuals = 4
    looks_up = True

    derivable = True

    def __init__(self, module: nn.LSTMCell) -> None:
        self._module = module

    def for_bf16(self) -> AbstractKernel:
        return self

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        x, h, c = _taken(inputs, "nn.LSTMCell", ("x", "h", "c"))
        width = self._module.hidden_size
        kept = x.new_empty((x.shape[0], 5, width))
        _both_maps(self._module, x, h, kept.view(-1, 5 * width)[:, : 4 * width])
        if (outputs := lstm_forward(kept, c)) is not None:
            return outputs, (x, h, c, kept)
        i, f, g, o, t = kept.unbind(1)
        kept[:, :2].sigmoid_()
        tanh_into(g, g)
        o.sigmoid_()
        c_new = (i * g).addcmul_(f, c)
        tanh_into(c_new, t)
        return (o * t, c_new), (x, h, c, kept)

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
        (dh, dc), (x, h, c, gates) = gradients, kept
        if dh is None and dc is None:
            return None, None, None
        if rows is not None:
            n = rows.size
            found = lstm_backward(dh, dc, gates, c, rows, whole_rows(n))
            if found is not None:
                d, d_c, total = found
                module = self._module
                for which, operand in (("ih", x), ("hh", h)):
                    _add_map(module, which, d, take_whole(operand, rows, d.shape[0]), into, total)
                return times(d, module.weight_ih)[:n], times(d, module.weight_hh)[:n], d_c
        return self._backward(dh, dc, gathered(kept, rows), into)

    def _backward(
        self, dh: Tensor | None, dc: Tensor | None, residuals: Payload, into: GradientSum
    ) -> Gradient:
        """In torch."""
        x, h, c, kept = residuals
        width = self._module.hidden_size
        i, f, g, o, t = kept.unbind(1)
        d = kept.new_empty((kept.shape[0], 4, width))
        d_i, d_f, d_g, d_o = d.unbind(1)
        dc = cell_gradient(dh, dc, o, t, d_o)
        torch.mul(dc, g, out=d_i)
        torch.mul(dc, c, out=d_f)
        torch.mul(dc, i, out=d_g)
        sigmoid_backward_(d[:, :2], kept[:, :2])
        tanh_backward_(d_g, g)
        sigmoid_backward_(d_o, o)
        d_gates = d.view(-1, 4 * width)
        _add_map(self._module, "ih", d_gates, x, into)
        _add_map(self._module, "hh", d_gates, h, into)
        module = self._module
        return times(d_gates, module.weight_ih), times(d_gates, module.weight_hh), dc * f


@final
class GruKernel(AbstractKernel):
    """nn.GRUCell on x ``(n, D)``, h ``(n, H)``; output h'.

    Keeps x, h and ``(n, 4, H)``: r, z, n, m.
    """

    residuals = 3
    looks_up = True
    room_for = 2

    derivable = True

    def __init__(self, module: nn.GRUCell) -> None:
        self._module = module

    def for_bf16(self) -> AbstractKernel:
        return self

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        x, h = _taken(inputs, "nn.GRUCell", ("x", "h"))
        module, width = self._module, self._module.hidden_size
        kept = x.new_empty((x.shape[0], 4, width)) if room is None else room
        bias_ih, bias_hh = (module.bias_ih, module.bias_hh) if module.bias else (None, None)
        of_x, of_h = affine(x, module.weight_ih, bias_ih), affine(h, module.weight_hh, bias_hh)
        if (y := gru_forward(of_x, of_h, h, kept)) is not None:
            return (y,), (x, h, kept)
        if x.is_cuda:  # torch's own kernel of all gates: r, z, n, h, m
            y, gates = torch.ops.aten._thnn_fused_gru_cell(of_x, of_h, h)
            gates = gates.view(-1, 5, width)
            kept[:, :3], kept[:, 3] = gates[:, :3], gates[:, 4]
            return (y,), (x, h, kept)
        r, z, new, m = kept.unbind(1)
        gates = kept.view(-1, 4 * width)[:, : 2 * width]
        torch.add(of_x[:, : 2 * width], of_h[:, : 2 * width], out=gates)
        gates.sigmoid_()
        m.copy_(of_h[:, 2 * width :])
        torch.addcmul(of_x[:, 2 * width :], r, m, out=new)
        tanh_into(new, new)
        return (torch.lerp(new, h, z),), (x, h, kept)

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
        (dy,), (x, h, gates) = gradients, kept
        if dy is None:
            return None, None
        whole = whole_rows(dy.shape[0])
        below = filled(h) if rows is None else take_whole(h, rows, whole)
        found = gru_backward(dy, below, gates, rows, whole)
        if found is None:
            return self._backward(dy, gathered(kept, rows), into)
        x = filled(x) if rows is None else take_whole(x, rows, whole)
        return self._below(found, x, below, into)

    def _backward(self, dy: Tensor, residuals: Payload, into: GradientSum) -> Gradient:
        """In torch."""
        x, h, kept = residuals
        module, width = self._module, self._module.hidden_size
        n = kept.shape[0]
        if kept.is_cuda:
            gates = torch.cat([kept[:, :3], h[:, None], kept[:, 3:]], 1).flatten(1)
            back = torch.ops.aten._thnn_fused_gru_cell_backward
            d_x, d_h, dh, _, _ = back(dy.contiguous(), gates, False)
            return self._below((d_x, d_h, dh), x, h, into)
        r, z, new, m = kept.unbind(1)
        # At r, z, n as W x meets them; rows of zeros after it, as its products want them.
        whole = kept.new_empty((whole_rows(n), 3, width))
        whole[n:].zero_()
        d = whole[:n]
        d_r, d_z, d_new = d.unbind(1)
        dh = dy * z
        torch.sub(dy, dh, out=d_new)
        tanh_backward_(d_new, new)
        torch.mul(dy, h - new, out=d_z)
        torch.mul(d_new, m, out=d_r)
        sigmoid_backward_(d[:, :2], kept[:, :2])
        d_x = whole.view(-1, 3 * width)
        _add_map(module, "ih", d_x, filled(x), into)
        whole = whole.clone()  # the sum keeps the first; this one is as U h meets it
        whole[:n, 2].mul_(r)
        d_h = whole.view(-1, 3 * width)
        _add_map(module, "hh", d_h, filled(h), into)
        return times(d_x, module.weight_ih)[:n], dh.add_(times(d_h, module.weight_hh)[:n])

    def _below(
        self,
        found: tuple[Tensor, Tensor, Tensor],
        x: Tensor,
        h: Tensor,
        into: GradientSum,
    ) -> tuple[Tensor, Tensor]:
        """From the gradients at both maps to those at x and h, which have rows of zeros too."""
        (d_x, d_h, dh), module = found, self._module
        _add_map(module, "ih", d_x, x, into)
        _add_map(module, "hh", d_h, h, into)
        n = dh.shape[0]
        return times(d_x, module.weight_ih)[:n], dh.add_(times(d_h, module.weight_hh)[:n])


def cell_gradient(
    dh: Tensor | None, dc: Tensor | None, o: Tensor, t: Tensor, d_o: Tensor
) -> Tensor:
    """The whole gradient at c' of h' = o t, t = tanh(c'); writes the one at o to ``d_o``.

    dh or dc, not both, may be None. The result may be ``dc`` itself.
    """
    if dh is None:
        assert dc is not None
        d_o.zero_()
        return dc
    torch.mul(dh, t, out=d_o)
    total = dh * o
    tanh_backward_(total, t)
    return total if dc is None else total.add_(dc)


def _taken(inputs: Payload, name: str, expected: tuple[str, ...]) -> Payload:
    if len(inputs) != len(expected):
        raise ValueError(
            f"{name}: {len(inputs)} inputs came, of shapes {[tuple(x.shape) for x in inputs]}; "
            f"expected {len(expected)}, {', '.join(expected)}: each state is an input of its own, "
            f"so send zeros along for the first step"
        )
    return inputs


def _map(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    weight = matching(weight, x)
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, weight.t(), out=out)


def _both_maps(module: nn.RNNCellBase, x: Tensor, h: Tensor, out: Tensor) -> None:
    """W x + U h + b, written to ``out``, whose rows may lie apart."""
    _map(x, module.weight_ih, module.bias_ih + module.bias_hh if module.bias else None, out)
    out.addmm_(h, matching(module.weight_hh, h).t())


def _add_map(
    module: nn.RNNCellBase,
    which: str,
    d: Tensor,
    x: Tensor,
    into: GradientSum,
    total: Tensor | None = None,
) -> None:
    """The gradients of one of the two maps; ``total`` is the sum of d's rows, if it is known."""
    weight, bias = getattr(module, f"weight_{which}"), getattr(module, f"bias_{which}")
    if weight.requires_grad:
        into.add_product(weight, d, x)
    if bias is not None and bias.requires_grad:
        if total is None:
            into.add_sum(bias, d)
        else:
            into.add(bias, total)

"""Row kernels of the common torch modules, and the table in which ``kernel_of`` finds them.

    module                         inputs             residuals
    nn.Linear                      x (n, ..., a)      x
    nn.Embedding                   ids (n, ...)       ids
    nn.ReLU, nn.Tanh, nn.Sigmoid   x (n, ...)         y
    nn.ELU, nn.LeakyReLU           x (n, ...)         y, or x where y does not tell the slope
    nn.GELU, nn.SiLU, nn.Softplus  x (n, ...)         x
    nn.Dropout                     x (n, ...)         the factors: 0 or 1/(1-p)
    nn.Identity                    x (n, ...)         none
    nn.LSTMCell                    x, h, c            x, h, c, gates
    nn.GRUCell                     x, h               x, h, gates
    nn.Sequential of modules with a kernel            theirs, each tensor once

The cells take their state as inputs of their own: ``nn.LSTMCell`` is called ``cell(x, (h, c))`` in
torch, its kernel gets ``x, h, c`` and returns the outputs ``h, c``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.frames.tables import look_up
from geartrain.graph.admission import Brought, check_of, register_check, require_range
from geartrain.native.maps import map_backward, map_forward
from geartrain.nn.dropout import DropoutKernel
from geartrain.nn.elementwise import (
    elu_backward,
    gelu_backward,
    leaky_relu_backward,
    relu_backward,
    sigmoid_backward,
    silu_backward,
    softplus_backward,
    tanh_backward,
    tanh_into,
)
from geartrain.nn.recurrent import GruKernel, LstmKernel
from geartrain.nodes.apart import in_order
from geartrain.nodes.casts import in_bf16
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import (
    AbstractKernel,
    gathered,
    kernel_of,
    lying,
    parted,
    register_kernel,
    require_counts,
)
from geartrain.nodes.products import affine, matching, times


def register_torch_checks() -> None:
    """Have torch's modules refuse what they cannot look up, before it enters."""
    register_check(nn.Embedding, _check_embedding)
    register_check(nn.Sequential, _check_sequential)


def _check_embedding(module: nn.Embedding, brought: Brought) -> None:
    if brought.payload is not None:
        require_range("id", brought.payload[0], module.num_embeddings)


def _check_sequential(module: nn.Sequential, brought: Brought) -> None:
    first = next(iter(module), None)
    if (check := check_of(first)) is not None:
        check(brought)


def register_torch_kernels() -> None:
    """Put the kernels of torch's modules into the table; ``import geartrain.nn`` does it."""
    register_kernel(nn.Linear, LinearKernel)
    register_kernel(nn.Embedding, _embedding)
    register_kernel(nn.Identity, lambda _: IdentityKernel())
    register_kernel(nn.ReLU, lambda _: ElementwiseKernel(torch.relu, relu_backward))
    register_kernel(nn.Tanh, lambda _: ElementwiseKernel(_tanh, tanh_backward))
    register_kernel(nn.Sigmoid, lambda _: ElementwiseKernel(torch.sigmoid, sigmoid_backward))
    register_kernel(nn.ELU, _elu)
    register_kernel(nn.LeakyReLU, _leaky_relu)
    register_kernel(nn.GELU, _gelu)
    register_kernel(nn.SiLU, lambda _: ElementwiseKernel(F.silu, silu_backward, "input"))
    register_kernel(nn.Softplus, _softplus)
    register_kernel(nn.Dropout, DropoutKernel)
    register_kernel(nn.LSTMCell, LstmKernel)
    register_kernel(nn.GRUCell, GruKernel)
    register_kernel(nn.Sequential, _sequential)


_SMALL: Final = 4096
_FEW: Final = 32
"""A map of so few weights is done in one call of C, if there are so many rows: fewer wait."""


@final
class LinearKernel(AbstractKernel):
    """y = x Wᵀ + b on the last dimension of x ``(n, ..., a)``; keeps x."""

    residuals = 1
    keeps = "input"
    looks_up = True
    apart = True

    derivable = True

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        (x,) = inputs
        weight, bias = self._module.weight, self._module.bias
        if x.ndim == 2:
            made = map_forward(x, weight, bias) if weight.numel() <= _SMALL else None
            return (affine(x, weight, bias) if made is None else made,), (x,)
        added = None if bias is None else matching(bias, x)
        return (F.linear(x, matching(weight, x), added),), (x,)

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
        (dy,) = gradients
        if dy is None:
            return (None,)
        weight, bias = self._module.weight, self._module.bias
        if weight.numel() <= _SMALL and dy.ndim == 2 and dy.shape[0] >= _FEW and self._learns():
            (x,) = lying(kept, rows) or gathered(kept, rows)
            found = self._in_one_call(dy.contiguous(), x, into, wanted=wanted)
            if found is not None:
                return found
        (x,) = gathered(kept, rows)
        flat = dy if dy.dim() == 2 else dy.flatten(0, -2)
        if weight.requires_grad:
            into.add_product(
                cast(nn.Parameter, weight),
                flat,
                x if x.dim() == 2 else x.flatten(0, -2),
            )
        if bias is not None and bias.requires_grad:
            into.add_sum(bias, flat)
        if not wanted:
            return (None,)
        return (times(dy, weight),) if dy.ndim == 2 else (dy @ matching(weight, dy),)

    def _in_one_call(
        self, dy: Tensor, x: Tensor, into: GradientSum, *, wanted: bool
    ) -> Gradient | None:
        """The gradients of these rows, a call of C for each update; None: C has none for them."""
        if not into.of_several:
            return self._where_they_lie(dy, x, into, wanted=wanted)
        pieces = in_order(into.updates_of(dy.shape[0]))
        if dy.shape[0] < _FEW * len(pieces):
            return None
        each = [map_backward(dy[a], x[a], self._module.weight, wanted=wanted) for _, a in pieces]
        d_x: list[Tensor] = []
        for (update, _), one in zip(pieces, each, strict=True):
            if one is None:
                return None  # as all are, which are of one kind
            with into.of_updates(update):
                self._add(into, one[1], one[2])
            d_x += [] if one[0] is None else [one[0]]
        return (torch.cat(d_x) if wanted else None,)

    def _where_they_lie(
        self, dy: Tensor, x: Tensor, into: GradientSum, *, wanted: bool
    ) -> Gradient | None:
        """The same of one update, written over buffers in which there is nothing."""
        weight, bias = cast(nn.Parameter, self._module.weight), self._module.bias
        slots = [into.slot(p) for p in (weight, bias) if p is not None] if into.adds_lying else []
        buffers = [(slot.fresh, slot.written()) for slot in slots]
        rooms = [x if fresh and x.is_contiguous() else None for fresh, x in buffers]
        found = map_backward(dy, x, weight, wanted=wanted, rooms=rooms)
        if found is None:
            return None
        if not slots:
            self._add(into, found[1], found[2])
        for slot, sums in zip(slots, found[1:], strict=False):
            slot.add(sums, given=True)
        return (found[0],)

    def _add(self, into: GradientSum, weight: Tensor, bias: Tensor) -> None:
        into.add(cast(nn.Parameter, self._module.weight), weight, given=True)
        if self._module.bias is not None:
            into.add(self._module.bias, bias, given=True)

    def _learns(self) -> bool:
        weight, bias = self._module.weight, self._module.bias
        return weight.requires_grad and (bias is None or bias.requires_grad)

    def for_bf16(self) -> AbstractKernel:
        return self


@final
class EmbeddingKernel(AbstractKernel):
    """y = E[ids], ids integers ``(n, ...)``; keeps the ids.

    A sparse table gets its gradient as rows, a dense one as a whole table.

    Args:
        module: The table.
        dtype: Of y; None: the table's.
    """

    residuals = 1
    keeps = "input"
    looks_up = True

    derivable = True

    def __init__(self, module: nn.Embedding, dtype: torch.dtype | None = None) -> None:
        self._module, self._dtype = module, dtype
        self.apart = module.padding_idx is None  # rows that do not learn are left out

    def for_bf16(self) -> AbstractKernel:
        return EmbeddingKernel(self._module, torch.bfloat16)

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        (ids,) = inputs
        y = look_up(self._module.weight, ids)
        return (y if self._dtype is None else y.to(self._dtype),), (ids,)

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
        (dy,), (ids,) = gradients, gathered(kept, rows)
        module = self._module
        weight = cast(nn.Parameter, module.weight)
        if dy is None or not weight.requires_grad:
            return (None,)
        flat = ids.reshape(-1)
        slopes = dy.reshape(flat.shape[0], weight.shape[1])
        if module.padding_idx is not None:
            learns = flat != module.padding_idx
            flat, slopes = flat[learns], slopes[learns]
        if module.sparse:
            into.add_rows(weight, flat.long(), slopes)
        else:
            # Several times faster than embedding_dense_backward, which counts and sorts the ids.
            into.add_at(weight, flat, slopes)
        return (None,)


@final
class ElementwiseKernel(AbstractKernel):
    """A function of each element, whose slope is told by its value or by its argument.

    Args:
        function: y of x.
        vjp: The gradient at x of that at y, and what is kept.
        keeps: y or x.
    """

    residuals = 1
    looks_up = True
    apart = True

    derivable = True

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        vjp: Callable[[Tensor, Tensor], Tensor],
        keeps: Literal["input", "output"] = "output",
    ) -> None:
        self._function, self._vjp, self.keeps = function, vjp, keeps

    def for_bf16(self) -> AbstractKernel:
        return self

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        (x,) = inputs
        y = self._function(x)
        return (y,), (x if self.keeps == "input" else y,)

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
        (dy,), (x_or_y,) = gradients, gathered(kept, rows)
        return (None if dy is None else self._vjp(dy, x_or_y),)


@final
class IdentityKernel(AbstractKernel):
    """y = x; keeps nothing."""

    residuals = 0
    looks_up = True
    apart = True

    def for_bf16(self) -> AbstractKernel:
        return self

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        (x,) = inputs
        return (x,), ()

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
        return gradients


@final
class SequentialKernel(AbstractKernel):
    """Kernels one behind the other; a tensor that two neighbours keep is kept once.

    Args:
        kernels: In the order of the forward; each has one input and one output, the last one may
            have several outputs.

    With tensors x0 ─k1─► x1 ─k2─► x2 ... the residuals are first those xj that some kernel keeps
    (a linear map its input, an activation its output), in order, then the other kernels' own.

    Raises:
        ValueError: A kernel before the last has not exactly one output.
        GraphError: Of two kernels it is not known how many residuals they have.
        ProtocolError: A backward before any forward.
    """

    def __init__(self, kernels: tuple[AbstractKernel, ...]) -> None:
        self._kernels = kernels
        self.looks_up = all(kernel.looks_up for kernel in kernels)
        self.apart = all(kernel.apart for kernel in kernels)
        self.derivable = all(kernel.derivable for kernel in kernels)
        self._keeps = tuple(kernel.keeps for kernel in kernels)
        at = {k + (kept == "output") for k, kept in enumerate(self._keeps) if kept != "own"}
        self._kept_at = tuple(sorted(at))
        owners = [k for k, keeps in zip(kernels, self._keeps, strict=True) if keeps == "own"]
        own = require_counts("nn.Sequential", owners)
        self._counts = (len(at), *own)
        self.residuals = None if None in own else len(at) + sum(map(int, filter(None, own)))

    def for_bf16(self) -> AbstractKernel:
        return SequentialKernel(tuple(map(in_bf16, self._kernels)))

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        values: list[Payload] = [inputs]
        owned: list[Tensor] = []
        for kernel, keeps in zip(self._kernels, self._keeps, strict=True):
            if len(values[-1]) != 1:
                raise ValueError(
                    f"nn.Sequential: {kernel!r} gets {len(values[-1])} tensors; expected one, as a "
                    f"sequence passes one value on; write a module that takes and returns several"
                )
            outputs, residuals = kernel.forward(values[-1])
            values.append(outputs)
            if keeps == "own":
                owned += residuals
        return values[-1], (*(values[k][0] for k in self._kept_at), *owned)

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
        split = self._split(gathered(kept, rows))
        for k, (kernel, mine) in reversed([*enumerate(zip(self._kernels, split, strict=True))]):
            if all(each is None for each in gradients):
                return (None,)
            gradients = kernel.backward(gradients, mine, None, into, wanted=wanted or k > 0)
        return gradients

    def _split(self, residuals: Payload) -> list[Payload]:
        """Each kernel's residuals, in the order of the kernels."""
        values, *own = parted("nn.Sequential", residuals, self._counts)
        value, of_its_own = dict(zip(self._kept_at, values, strict=True)), iter(own)
        return [
            next(of_its_own) if keeps == "own" else (value[k + (keeps == "output")],)
            for k, keeps in enumerate(self._keeps)
        ]


def _elu(module: nn.ELU) -> AbstractKernel:
    alpha = module.alpha
    from_value = alpha > 0  # else x below zero may give what x above zero gives
    return ElementwiseKernel(
        lambda x: F.elu(x, alpha),
        lambda dy, kept: elu_backward(dy, kept, alpha, from_value),
        "output" if from_value else "input",
    )


def _leaky_relu(module: nn.LeakyReLU) -> AbstractKernel:
    slope = module.negative_slope
    return ElementwiseKernel(
        lambda x: F.leaky_relu(x, slope),
        lambda dy, kept: leaky_relu_backward(dy, kept, slope),
        "output" if slope >= 0 else "input",
    )


def _gelu(module: nn.GELU) -> AbstractKernel:
    how = module.approximate
    return ElementwiseKernel(
        lambda x: F.gelu(x, approximate=how), lambda dy, x: gelu_backward(dy, x, how), "input"
    )


def _softplus(module: nn.Softplus) -> AbstractKernel:
    beta, threshold = module.beta, module.threshold
    return ElementwiseKernel(
        lambda x: F.softplus(x, beta, threshold),
        lambda dy, x: softplus_backward(dy, x, beta, threshold),
        "input",
    )


def _embedding(module: nn.Embedding) -> AbstractKernel | None:
    # max_norm rewrites the table in the forward; scale_grad_by_freq makes a row's gradient depend
    # on the rows that happen to come back with it.
    if module.max_norm is not None or module.scale_grad_by_freq:
        return None
    return EmbeddingKernel(module)


def _sequential(module: nn.Sequential) -> AbstractKernel | None:
    kernels: list[AbstractKernel] = []
    for layer in _layers(module):
        # A cell inside a sequence gets x alone, and its kernel wants its state too.
        kernel = None if isinstance(layer, nn.RNNCellBase) else kernel_of(layer)
        if kernel is None:
            return None
        kernels.append(kernel)
    return SequentialKernel(tuple(kernels)) if kernels else IdentityKernel()


def _layers(module: nn.Sequential) -> Iterator[nn.Module]:
    for layer in module:
        if type(layer) is nn.Sequential:
            yield from _layers(layer)
        else:
            yield layer


def _tanh(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return torch.tanh(x)  # of integers it makes floats
    y = torch.empty_like(x)
    tanh_into(x, y)
    return y

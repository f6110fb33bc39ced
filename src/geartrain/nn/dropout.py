"""Dropout whose mask stays with its row.

A row's backward must see the mask of its forward. There are two ways to keep that promise:

    as a kernel     y = x m, m kept with the row                 keep="activations"
    with a key      m = hash(seed, key of the row, column)       also when the forward runs again

Without a key, ``forward`` in training mode is refused: run again at backward time, it would draw
another mask and nothing would show it. The kernel never calls it.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from geartrain.derived.draws import mixed, ones_of
from geartrain.errors import GraphError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.native.fused import drawn
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered

_LOW = 0xFFFFFFFF  # the hash is 32 bits wide, in int64 so that nothing overflows unseen


@final
class RowDropout(nn.Module):
    """Drop elements with probability p and scale the rest by 1/(1-p); identity in eval mode.

    Inputs: x float ``(n, ...)`` and, optionally, key int64 ``(n,)``. Without a key the mask comes
    from torch's default generator of x's device and the module must run as a kernel (that is what
    ``keep="activations"`` does). With a key the mask is a function of (seed, key, position in the
    row) and the same on every machine and in every dtype, so the module may run in any way. Rows
    with equal keys get equal masks: give each row of each epoch a key of its own (a running number
    that the loader counts).

    Args:
        p: Probability that an element is dropped, 0 <= p < 1.
        seed: Of the masks that are made from keys.

    Raises:
        ValueError: p outside [0, 1), or a key that is not int64 of shape ``(n,)``.
        GraphError: ``forward`` in training mode without a key.

    Source: Srivastava et al. 2014, JMLR 15; the mixing steps are murmur3's 32-bit finaliser
    (A. Appleby, public domain).
    """

    def __init__(self, p: float = 0.5, *, seed: int = 0) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"RowDropout: p is {p}; expected 0 <= p < 1")
        self.p, self.seed = p, seed

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if key is None:
            raise GraphError(
                f"RowDropout(p={self.p}) ran forward in training mode without a key, so that its "
                f"mask could not be drawn again; expected to run as a kernel or with keys: use "
                f'keep="activations" for its part, or pass a key, int64 (n,), as second input'
            )
        return x * _factors_of_keys(x, key, self.p, self.seed)

    def row_kernel(self) -> AbstractKernel:
        """A kernel for x, or for x and key; it keeps the factors, 0 or 1/(1-p), and the key."""
        return DropoutKernel(self)

    def extra_repr(self) -> str:
        return f"p={self.p}, seed={self.seed}"


@final
class DropoutKernel(AbstractKernel):
    """y = x m with m kept: for ``RowDropout`` and ``nn.Dropout``.

    Keeping the factors rather than a mask of bits makes the backward right whatever the module's
    mode and p are by then; a forward in eval mode keeps ones, without memory until they are stored.
    """

    residuals = 1
    looks_up = True

    def __init__(self, module: RowDropout | nn.Dropout) -> None:
        self._module = module
        self.derivable = isinstance(module, nn.Dropout)

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        x, *keys = inputs
        module = self._module
        if keys and not isinstance(module, RowDropout):
            raise ValueError(
                f"nn.Dropout: {len(inputs)} inputs came; expected x alone: RowDropout takes a key"
            )
        if not module.training or module.p == 0.0:
            return (x,), (x.new_ones(()).expand_as(x), *keys)
        if keys:
            assert isinstance(module, RowDropout)
            factors = _factors_of_keys(x, keys[0], module.p, module.seed)
        elif module.p == 1.0:
            factors = torch.zeros_like(x)
        else:
            factors = _factors_of_rows(x, 1.0 - module.p)
        return (x * factors,), (factors, *keys)

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
        (dy,), (factors, *keys) = gradients, gathered(kept, rows)
        return (None if dy is None else dy * factors, *(None for _ in keys))


def _factors_of_rows(x: Tensor, kept: float) -> Tensor:
    """Of rows that have no keys; off the host it draws there."""
    if not x.is_cpu:
        return torch.empty_like(x).bernoulli_(kept).div_(kept)
    seeds = row_seeds(x.shape[0])
    ones = drawn(seeds, x, kept)
    if ones is None:
        ones = ones_of(seeds, x.shape[1:], kept, 0).to(x.dtype)
    return ones.mul_(1.0 / kept)


def _factors_of_keys(x: Tensor, key: Tensor, p: float, seed: int) -> Tensor:
    if key.dtype != torch.int64 or key.shape != x.shape[:1]:
        raise ValueError(
            f"RowDropout: key is {key.dtype} of shape {tuple(key.shape)}; expected torch.int64 of "
            f"shape ({x.shape[0]},), one for each row of x {tuple(x.shape)}"
        )
    width = x[0].numel() if x.shape[0] else 0
    low, high = mixed(key & _LOW ^ seed & _LOW), (key >> 32) & _LOW
    row = mixed(low ^ high ^ (seed >> 32) & _LOW)
    column = mixed(torch.arange(1, width + 1, device=x.device) * 0x9E3779B9 & _LOW)
    kept = mixed(row[:, None] ^ column) >= round(p * 2**32)
    return kept.view(x.shape).to(x.dtype).div_(1.0 - p)

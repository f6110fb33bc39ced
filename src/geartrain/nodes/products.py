"""Matrix products of rows, by the faster of the libraries that torch carries.

    affine(x, W, b)   x Wᵀ + b        times(d, W)   d W        outer(d, x)   dᵀ x

torch sends float32 products on a CPU to MKL, which runs generic kernels on processors that are not
Intel's; oneDNN, also inside torch, uses AVX-512 there: at 512 x 256 x 640 on one Zen 5 core 250
against 115 GFLOP/s. oneDNN makes code for every shape it meets, which costs about as much as the
product, so it is asked for few numbers of rows: whole multiples of ``GRAIN``, or those that
``whole_rows`` fills up to with zeros. The engine fires multiples where it can; bundles have what
they have.

Rows in bfloat16 meet a copy of the weight in bfloat16, made once for each version of it. Such a
product adds up in float32 and is rounded once; torch sends it to oneDNN by itself.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from geartrain.errors import GraphError
from geartrain.native.rows import transposed
from geartrain.native.steady import this_pass

GRAIN: Final = 32
"""Rows of a batch are best a multiple of this."""

_MOST_ROWS = 4096
# In bfloat16 every product is oneDNN's, which keeps code for a thousand shapes, a quarter of a
# megabyte each: so there are not to be many shapes.
_SHORT_GRAIN = 8
# So many bits of the number of rows differ between shapes: 16 shapes from n rows to 2 n. With fewer
# shapes, zeros cost more than new code: 100 rows filled up to 128 take 1.4 times as long.
_OCTAVE = 5
# Rows are filled up where oneDNN gains more than the copy and the zeros cost: multiplications.
_FILLED_FROM = 1 << 21
_FILLED_FROM_OUTER = 1 << 23


def matrix(weight: Tensor) -> Tensor:
    """A weight ``(out, ...)`` as ``(out, in)``, where it lies if it is contiguous."""
    return weight if weight.ndim <= 2 else weight.reshape(weight.shape[0], -1)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``; x ``(n, i)``, weight ``(o, i)``, bias ``(o,)``."""
    if _suits(x, weight, weight.numel()):
        return _onednn(filled(x), weight, bias)[: x.shape[0]]
    if x.dtype is not weight.dtype:
        n, x = x.shape[0], _filled(x, _whole_short(x))
        weight, bias = matching(weight, x), None if bias is None else matching(bias, x)
        return affine(x, weight, bias)[:n]
    if bias is None:
        return torch.mm(x, weight.t())
    return torch.addmm(bias, x, weight.t())


def times(d: Tensor, weight: Tensor) -> Tensor:
    """``d @ weight``; d ``(n, o)``, weight ``(o, i)``."""
    if _suits(d, weight, weight.numel()):
        return _onednn(filled(d), weight.t(), None)[: d.shape[0]]
    if d.dtype is not weight.dtype:
        return torch.mm(_filled(d, _whole_short(d)), matching(weight, d))[: d.shape[0]]
    return torch.mm(d, weight)


def outer(d: Tensor, x: Tensor) -> Tensor:
    """``d.T @ x``; d ``(n, o)``, x ``(n, i)``: the gradient of a weight."""
    if d.dtype is torch.bfloat16:
        rows = _whole_short(d)
        return torch.mm(_filled(d, rows).t(), _filled(x, rows))
    # The first operand would be copied to this order anyway, and by a slower copy.
    return _onednn(transposed(filled(d)), filled(x).t(), None)


def outer_suits(d: Tensor, x: Tensor) -> bool:
    """Whether ``outer`` is faster than torch's own product, which can add in place."""
    if d.dtype is torch.bfloat16:
        return True  # and that one would add in bfloat16
    entries = d.shape[1] * x.shape[1]
    return _suits(d, x, entries, _FILLED_FROM_OUTER) and x.shape[1] >= GRAIN


def matching(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in the dtype of the rows that it meets: itself, or a copy in bfloat16.

    The copy is kept; it is made anew after a step, as torch counts what is written to a tensor.

    Raises:
        GraphError: The rows are neither of the weight's dtype nor bfloat16: of a weight in integers
            nothing would be left.
    """
    if weight.dtype is x.dtype:
        return weight
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.float32:
        raise GraphError(
            f"rows of {x.dtype} meet a weight of {weight.dtype}; bring rows of {weight.dtype}: "
            f"x.to({weight.dtype}), or convert the module"
        )
    version, copy = _COPIES.get(weight, (-1, weight))
    if version != weight._version or copy.dtype is not x.dtype:
        version, copy = weight._version, weight.detach().to(x.dtype)
        _COPIES[weight] = version, copy
    return copy


def forget_copies() -> None:
    """Make the copies of all weights anew when they are next asked for, and what is packed."""
    _COPIES.clear()
    this_pass.number += 1


def whole_rows(n: int) -> int:
    """n, or a few more where so many rows are worth filling up: at most a sixteenth of them."""
    if _KERNEL is None or n <= 2 * GRAIN:
        return n
    return n + -n % min(GRAIN, 1 << (n.bit_length() - _OCTAVE))


def filled(x: Tensor) -> Tensor:
    """x ``(n, d)`` with rows of zeros after it, to ``whole_rows(n)``; off the host x itself."""
    return _filled(x, whole_rows(x.shape[0]) if x.is_cpu else x.shape[0])


def _whole_short(x: Tensor) -> int:
    """Rows to fill up to in bfloat16: ``whole_rows``, or a few more."""
    n = x.shape[0]
    if not x.is_cpu or _KERNEL is None:
        return n
    rows = whole_rows(n)
    return rows + -rows % _SHORT_GRAIN


def _filled(x: Tensor, rows: int) -> Tensor:
    n = x.shape[0]
    if rows == n:
        return x
    whole = x.new_empty((rows, *x.shape[1:]))
    whole[:n] = x
    whole[n:].zero_()
    return whole


def _suits(x: Tensor, weight: Tensor, entries: int, filled_from: int = _FILLED_FROM) -> bool:
    n = x.shape[0]
    return (
        _KERNEL is not None
        and 0 < n <= _MOST_ROWS
        and (n % GRAIN == 0 or (n > 2 * GRAIN and n * entries >= filled_from))
        and x.dtype == torch.float32 == weight.dtype
        and x.is_cpu
        and min(x.shape[1], weight.shape[0], weight.shape[1]) >= GRAIN
        and not torch.is_grad_enabled()
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _KERNEL is not None
    product: Tensor = _KERNEL(x, weight, bias, "none", [], "")
    return product


# By weight, and gone with it: its version when it was copied, and the copy.
_COPIES: Final[MutableMapping[Tensor, tuple[int, Tensor]]] = WeakTensorKeyDictionary()


def _find() -> Callable[..., Tensor] | None:
    """torch's fused linear map of oneDNN, if this build has it, it is right, and it is wanted.

    It is not a documented function, hence the care: it is called once on known numbers.
    """
    if not torch._C._has_mkldnn or _mkl_is_at_its_best():
        return None
    try:
        kernel: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        x = torch.arange(64.0 * GRAIN).view(GRAIN, 64) / 64
        w = torch.arange(48.0 * 64).view(48, 64) / 64
        with torch.no_grad():
            plain = kernel(x, w, None, "none", [], "")
            turned = kernel(x, w.t().contiguous().t(), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    right = all(torch.allclose(y, x @ w.t(), rtol=1e-4) for y in (plain, turned))
    return kernel if right else None


def _mkl_is_at_its_best() -> bool:
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "intel" in str(capabilities.get("cpu_name", "")).lower()


_KERNEL = _find()

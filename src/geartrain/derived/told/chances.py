"""Numbers drawn for rows, told by those that are even: from 0 to 1.

    randn_like(x)  ─►  u, v = rand_like(x), rand_like(x);  sqrt(-2 log(1 - u)) * cos(2 pi v)

As in ``simpler.py``. ``draws.py`` says which numbers a row gets; here they are torch's.

Source: Box and Muller 1958, doi:10.1214/aoms/1177706645.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten
_KNOWN: Final = (torch.float32, torch.float64)


def _may(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in _KNOWN


def _normal_of(one: Tensor, other: Tensor) -> Tensor:
    return (-2 * (1 - one).log()).sqrt() * (2 * math.pi * other).cos()


def _normal(x: Tensor, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor | None:
    if not _may(x) or dtype not in (None, x.dtype):
        return None
    return _normal_of(torch.rand_like(x), torch.rand_like(x))


def _normal_of_size(size: Sequence[int], **how: Any) -> Tensor | None:
    kept = {name: how[name] for name in ("dtype", "device") if how.get(name) is not None}
    plain = how.get("generator") is None and kept.get("dtype", torch.float32) in _KNOWN
    if not plain or torch.device(kept.get("device", "cpu")).type != "cpu":
        return None
    return _normal_of(*(torch.rand(size, **kept) for _ in range(2)))


def _normal_around(
    x: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None
) -> Tensor | None:
    found = _normal(x) if generator is None else None
    return None if found is None else found * std + mean


def _even(x: Tensor, least: float = 0, most: float = 1, *, generator: Any = None) -> Tensor | None:
    if not _may(x) or generator is not None:
        return None
    return torch.rand_like(x) * (most - least) + least


def _exponential(x: Tensor, rate: float = 1, *, generator: Any = None) -> Tensor | None:
    """Above zero, as torch's: whoever asks takes its logarithm."""
    if not _may(x) or generator is not None:
        return None
    found = -(1 - torch.rand_like(x)).log()
    return found.clamp_min(torch.finfo(x.dtype).eps / 2) / rate


def _by_shares(x: Tensor, *, generator: Any = None) -> Tensor | None:
    """Ones, each with a probability of its own, else zeros."""
    if not _may(x) or generator is not None:
        return None
    one, none = (torch.full((), k, dtype=x.dtype) for k in (1.0, 0.0))
    return torch.where(torch.rand_like(x) < x, one, none)


CHANCES: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.randn_like.default: _normal,
    aten.randn.default: _normal_of_size,
    aten.normal_functional.default: _normal_around,
    aten.uniform.default: _even,
    aten.exponential.default: _exponential,
    aten.bernoulli.default: _by_shares,
}
"""As ``SIMPLER``."""

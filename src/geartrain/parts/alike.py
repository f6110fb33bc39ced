"""Whether C takes the steps of torch's own optimisers bit by bit, which is tried.

torch rounds as its operators were compiled, for several kinds of processors, and one of them is
chosen when it is imported; the next version may round otherwise. So both take a step of weights of
many sizes, once for a class, a dtype and a process.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from geartrain.native import library
from geartrain.nodes.uncompiled import uncompiled
from geartrain.parts.ways import OF_TORCH

_OF_ADAM: Final = (
    {"weight_decay": 0.03, "betas": (0.8, 0.95)},
    {"weight_decay": 0.0, "betas": (0.3, 0.9), "maximize": True},
)
_OPTIONS: Final[Mapping[type[Any], Sequence[Mapping[str, Any]]]] = {
    Adam: _OF_ADAM,
    AdamW: _OF_ADAM,
    SGD: (
        {"weight_decay": 0.03},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.03},
    ),
}
_SIZES: Final = (*range(1, 20), 31, 32, 33, 67, 131)
"""torch takes several entries at once, and those that are left at the end by themselves."""


def reckons_as_torch(kind: Any, dtype: torch.dtype) -> bool:
    """Whether C gives the bits of torch's.

    Args:
        kind: Of ``OF_TORCH``.
        dtype: Of weights.
    """
    native = library.current()
    if native is None or dtype not in (torch.float32, torch.float64):
        return False
    return _tried(native, kind, dtype, torch.get_default_dtype())


@cache
def _tried(native: library.Library, kind: Any, dtype: torch.dtype, of_counts: torch.dtype) -> bool:
    with torch.no_grad(), uncompiled():
        return all(_is_alike(kind, options, dtype) for options in _OPTIONS[kind])


def _is_alike(kind: Any, options: Mapping[str, Any], dtype: torch.dtype) -> bool:
    mine, its = _Trial(kind, options, dtype), _Trial(kind, options, dtype)
    for trial in (mine, its):
        trial.step_by_torch()  # which makes the states
    its.step_by_torch()
    return mine.step_by_c() and all(map(torch.equal, mine.all(), its.all()))


@final
class _Trial:
    """An optimiser of weights of many sizes, and gradients for it."""

    def __init__(self, kind: Any, options: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._draw, self._dtype = torch.Generator().manual_seed(0), dtype
        self._weights = [nn.Parameter(x) for x in self._drawn()]
        self._optimizer = kind(self._weights, lr=0.07, **options)

    def _drawn(self) -> list[Tensor]:
        return [torch.randn(n, dtype=self._dtype, generator=self._draw) for n in _SIZES]

    def step_by_torch(self) -> None:
        """A step, of which nobody hears."""
        for p, g in zip(self._weights, self._drawn(), strict=True):
            p.grad = g
        inspect.unwrap(type(self._optimizer).step)(self._optimizer)

    def step_by_c(self) -> bool:
        """A step; False: C is not for it."""
        optimizer, drawn = self._optimizer, self._drawn()
        way, group = OF_TORCH[type(optimizer)], optimizer.param_groups[0]
        settings = way.settings(optimizer, group)
        tensors = way.tensors(optimizer, group, self._weights)
        if settings is None or tensors is None:
            return False
        step = way.step(tensors)
        if not step.suits(drawn):
            return False
        step.take(drawn, factors=[1.0] * len(drawn), **settings)
        return True

    def all(self) -> Iterator[Tensor]:
        """All that a step writes."""
        yield from self._weights
        for state in self._optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor))

"""Steps of torch's own optimisers, bit by bit, for many small weights in few calls.

    gradients ─► means, squares (C) ─► roots (torch) ─► weights (C)

torch calls nine operators for each weight, and what is around them takes longer than they do. Each
entry is reckoned as theirs is, and rounded where theirs is; roots are torch's, as they are others
than those of C. Who uses this is to find out whether torch rounds so here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, Self, final

import torch
from torch import Tensor

from geartrain.native.steps import AbstractWeightsStep

_MOST: Final = 1 << 16
"""Entries whose roots are taken at once, unless one weight has more: they stay in the cache."""


@final
class AdamOfTorch(AbstractWeightsStep):
    """Steps of ``torch.optim.Adam`` and ``AdamW``, as ``AdamTensors`` has what they write."""

    functions = ("adam_means", "adam_weights")
    words = 6
    lying = (0, 2, 3, 4)

    def __init__(self, some: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(some)
        self._look()

    def and_others(self, others: Sequence[AbstractWeightsStep]) -> Self:
        found = super().and_others(others)
        if others:
            found._look()
        return found

    def _look(self) -> None:
        """Which weights go together."""
        lie = [w.data_ptr() for w in self.weights if w.numel()]
        if len({*lie}) < len(lie):
            self._run = None  # of tensors that share memory the second is to see the first's step
        self._lots = [*_lots(self.entries)]

    def take(
        self,
        gradients: Sequence[Tensor],
        *,
        rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        maximize: bool,
        factors: Sequence[float],
    ) -> None:
        """A step.

        Args:
            gradients: One for every weight, which have been found to suit.
            rate, betas, eps, weight_decay, maximize: Adam's.
            decoupled: Whether weights decay by themselves.
            factors: By which gradients are multiplied first, where they lie.
        """
        assert self._run is not None
        means, weights = self._run
        shrink = 1 - rate * weight_decay if decoupled and weight_decay != 0 else 1.0
        added = 0.0 if decoupled else weight_decay
        jobs, by = self._jobs(gradients), self._doubles(factors)
        assert by is not None
        dtype, known = self._all[0].dtype, dict[float, tuple[float, float]]()
        for at, end, entries in self._lots:
            n = end - at
            mine = jobs[at * self.words * _BYTES : end * self.words * _BYTES]
            squares = torch.empty(entries, dtype=dtype)
            counts = (ctypes.c_double * n)()
            means(
                *(mine, n, by[at * _BYTES : end * _BYTES], *betas, added, shrink, maximize),
                *(squares.data_ptr(), ctypes.addressof(counts)),
            )
            squares.sqrt_()
            for t in set(counts) - known.keys():
                known[t] = _paces(t, rate, betas)
            paces = [*chain.from_iterable(known[t] for t in counts)]
            weights(mine, n, squares.data_ptr(), self._doubles(paces), eps)


def _lots(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where weights begin and end that go together, and how many entries they have."""
    at = entries = 0
    for k, n in enumerate(sizes):
        if entries and entries + n > _MOST:
            yield at, k, entries
            at, entries = k, 0
        entries += n
    yield at, len(sizes), entries


def _paces(t: float, rate: float, betas: tuple[float, float]) -> tuple[float, float]:
    """What means are multiplied by, and roots divided by, at step t: reckoned as torch does."""
    first, second = betas
    return -(rate / (1 - first**t)), (1 - second**t) ** 0.5


@final
class SgdOfTorch(AbstractWeightsStep):
    """Steps of ``torch.optim.SGD``: weights, and momenta where there are any."""

    functions = ("sgd",)
    words = 4
    lying = (0, 2)
    counted = False

    def take(
        self,
        gradients: Sequence[Tensor],
        *,
        rate: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        maximize: bool,
        factors: Sequence[float],
    ) -> None:
        """A step.

        Args:
            gradients: One for every weight, which have been found to suit.
            rate, momentum, dampening, weight_decay, nesterov, maximize: Those of SGD.
            factors: By which gradients are multiplied first, where they lie.
        """
        assert self._run is not None
        (sgd,) = self._run
        sgd(
            *(self._jobs(gradients), self._count, self._doubles(factors)),
            *(rate, momentum, 1 - dampening, weight_decay, nesterov, maximize),
        )


_BYTES: Final = 8
"""Of a word."""

"""Steps of optimisers, and what is done to gradients before: one pass, one call for all tensors.

Functions that say so answer None, or False, for what they are not for, and torch is to do it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from copy import copy
from itertools import chain, islice
from operator import is_
from struct import pack
from typing import ClassVar, Final, NamedTuple, Self, final

import numpy as np
import torch
from torch import Tensor

from geartrain.native import library
from geartrain.native.library import Function
from geartrain.native.rows import pointer


def norm_of(tensors: Sequence[Tensor]) -> float | None:
    """The 2-norm of all entries of dense tensors; None: torch is to find it."""
    run = _function("square_sum", tensors)
    if run is None:
        return None
    total = ctypes.c_double()
    run(_entries(tensors), len(tensors), ctypes.addressof(total))
    # What overflows its type has no norm in torch either.
    return math.sqrt(total.value) if total.value >= 0 else math.nan


def scaled_(tensors: Sequence[Tensor], factor: float) -> bool:
    """Multiply dense tensors in place; False: torch is to do it."""
    run = _function("scale_all", tensors)
    if run is None:
        return False
    run(_entries(tensors), len(tensors), factor)
    return True


class AdamTensors(NamedTuple):
    """What steps of Adam write, one of each for every weight.

    Args:
        weights: They.
        means, squares: Of the gradients, decaying, of the weights' shapes.
        steps: float32 scalars, steps taken before.
    """

    weights: Sequence[Tensor]
    means: Sequence[Tensor]
    squares: Sequence[Tensor]
    steps: Sequence[Tensor]


class AbstractWeightsStep:
    """Steps of some weights; what C is told of them is found once, as long as they stay.

    Args:
        some: What is written, kind by kind, one of each for every weight; first the weights, and
            last the counts, where there are any.
    """

    functions: ClassVar[tuple[str, ...]]
    """Of C."""
    words: ClassVar[int]
    """Of an entry, the last of which is the weight's entries, and that after the weight ..."""
    lying: ClassVar[tuple[int, ...]]
    """... the gradient; where the others lie, kind by kind."""
    counted: ClassVar[bool] = True
    """Whether the last kind is counts."""

    def __init__(self, some: Sequence[Sequence[Tensor]]) -> None:
        self._all = [*chain.from_iterable(some)]
        self._lie = [x.data_ptr() for x in self._all]
        weights, *others = some
        self._count, self._shapes = len(weights), [w.shape for w in weights]
        self._written = [*weights]
        self.entries = [w.numel() for w in weights]
        counts = others.pop() if self.counted else ()
        self._run = _functions(self.functions, [*chain(weights, *others)])
        if not _are_counts(counts):
            self._run = None
        if any(x.shape != w.shape for w, *its in zip(weights, *others, strict=True) for x in its):
            self._run = None
        self._told = [0] * (self.words * self._count)
        lie = iter(self._lie)
        for place, kind in zip(self.lying, some, strict=False):
            self._told[place :: self.words] = islice(lie, len(kind))
        self._told[self.words - 1 :: self.words] = self.entries
        self._joint: tuple[Sequence[AbstractWeightsStep], Self | None] = (), None

    def and_others(self, others: Sequence[AbstractWeightsStep]) -> Self:
        """Steps of these weights and of those of others of its class and dtype, in one call; it is
        remembered for as long as the same ones are asked for."""
        if not others:
            return self
        known, joint = self._joint
        if joint is not None and len(known) == len(others) and all(map(is_, known, others)):
            return joint
        several: Sequence[AbstractWeightsStep] = (self, *others)
        found = copy(self)
        self._joint, found._joint = (others, found), ((), None)
        for name in ("_all", "_lie", "_shapes", "_written", "_told", "entries"):
            setattr(found, name, [*chain.from_iterable(getattr(one, name) for one in several)])
        found._count = len(found._shapes)
        found._run = None
        if all(one._run is not None for one in several):
            found._run = _typed(self.functions, self._all[0].dtype, sum(found.entries))
        return found

    def fits(self, some: Sequence[Sequence[Tensor]]) -> bool:
        """Whether it is for these, and they lie where they lay."""
        given = [*chain.from_iterable(some)]
        same = len(given) == len(self._all) and all(map(is_, given, self._all))
        return same and [x.data_ptr() for x in given] == self._lie

    def suits(self, gradients: Sequence[Tensor]) -> bool:
        """Whether a step with these is for C; else torch is to take it."""
        if self._run is None or len(gradients) != self._count:
            return False
        dtype = self._all[0].dtype
        for g, shape in zip(gradients, self._shapes, strict=True):
            if g.dtype is not dtype or g.is_sparse or g.shape != shape:
                return False
            if not g.is_contiguous() or not g.is_cpu:
                return False
        return True

    @property
    def weights(self) -> Sequence[Tensor]:
        """They."""
        return self._written

    def _jobs(self, gradients: Sequence[Tensor]) -> bytes:
        """As C reads them, entry by entry."""
        words = self._told
        words[_GRADIENT :: self.words] = [g.data_ptr() for g in gradients]
        return pack(f"{len(words)}q", *words)

    def _doubles(self, some: Sequence[float] | None) -> bytes | None:
        return None if some is None else pack(f"{len(some)}d", *some)


@final
class AdamStep(AbstractWeightsStep):
    """Steps of Adam, as ``AdamTensors`` has what they write."""

    functions = ("adam",)
    words = 6
    lying = (0, 2, 3, 4)

    def take(
        self,
        gradients: Sequence[Tensor],
        *,
        rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool,
        factors: Sequence[float] | None = None,
    ) -> None:
        """A step.

        Args:
            gradients: One for every weight, which have been found to suit.
            rate, betas, eps, weight_decay, maximize: Adam's.
            factors: By which gradients are multiplied first, where they lie; None: by none.
        """
        assert self._run is not None
        (adam,) = self._run
        jobs, by = self._jobs(gradients), self._doubles(factors)
        adam(jobs, self._count, by, rate, *betas, eps, weight_decay, maximize)


_GRADIENT: Final = 1
"""The word of an entry that is the gradient."""


@final
class AdagradStep(AbstractWeightsStep):
    """Steps of Adagrad; what they write: weights, sums of the gradients' squares, of the weights'
    shapes, and float32 scalars, steps taken before."""

    functions = ("adagrad",)
    words = 9
    lying = (0, 2, 3)

    def __init__(self, some: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(some)
        ones = [1] * self._count  # a dense gradient is one row of its entries
        self._told[6 :: self.words] = self._told[7 :: self.words] = ones

    def suits(self, gradients: Sequence[Tensor]) -> bool:
        """As for others; but one may be sparse in the first dimension, and name a row often."""
        if not any(g.is_sparse for g in gradients):
            return super().suits(gradients)
        if self._run is None or len(gradients) != self._count:
            return False
        dtype = self._all[0].dtype
        for g, shape in zip(gradients, self._shapes, strict=True):
            if g.dtype is not dtype or g.shape != shape or not g.is_cpu:
                return False
            if not (_are_rows(g) if g.is_sparse else g.is_contiguous()):
                return False
        return True

    def take(
        self,
        gradients: Sequence[Tensor],
        *,
        rate: float,
        rate_decay: float,
        eps: float,
        weight_decay: float,
        maximize: bool,
    ) -> None:
        """A step.

        Args:
            gradients: One for every weight, which have been found to suit.
            rate, rate_decay, eps, weight_decay, maximize: Adagrad's.

        Raises:
            IndexError: A gradient is for a row that its weight does not have.
        """
        assert self._run is not None
        (adagrad,) = self._run
        words, rooms = [*self._told], []
        for at, g in zip(range(0, len(words), self.words), gradients, strict=True):
            if not g.is_sparse:
                words[at + _GRADIENT] = g.data_ptr()
                continue
            rows, values, limit = g._indices(), g._values(), g.shape[0]
            n, width = rows.shape[1], g.numel() // limit if limit else 0
            rooms.append(room := np.empty((2 << (2 * n).bit_length()) + width, np.int64))
            words[at + _GRADIENT] = values.data_ptr()
            words[at + 4 : at + 9] = rows.data_ptr(), pointer(room), n, limit, width
        jobs = pack(f"{len(words)}q", *words)
        bad = adagrad(jobs, self._count, rate, rate_decay, eps, weight_decay, maximize)
        if bad:
            raise IndexError(
                f"a gradient is for rows {gradients[bad - 1]._indices()[0].tolist()[:8]}..., its "
                f"weight has {gradients[bad - 1].shape[0]}"
            )


_FREE: Final = 1 << 16
"""Entries from which on the interpreter lock is freed."""


def _function(name: str, tensors: Sequence[Tensor]) -> Function | None:
    """The kernel for these, or None if it is not for them."""
    native = library.current()
    if native is None or not tensors:
        return None
    dtype = tensors[0].dtype
    typed = native.typed.get(dtype)
    if typed is None or name not in typed:
        return None
    entries = 0
    for x in tensors:
        if x.dtype is not dtype or not x.is_cpu or x.is_sparse or not x.is_contiguous():
            return None
        entries += x.numel()
    return typed[name][entries > _FREE]


def _functions(names: Sequence[str], tensors: Sequence[Tensor]) -> list[Function] | None:
    """Several kernels for these, or None if one is not for them."""
    found = [_function(name, tensors) for name in names]
    return None if None in found else [run for run in found if run is not None]


def _typed(names: Sequence[str], dtype: torch.dtype, entries: int) -> list[Function] | None:
    """Several kernels for so many entries of a type, or None if there is none."""
    native = library.current()
    typed = {} if native is None else native.typed.get(dtype, {})
    return [typed[name][entries > _FREE] for name in names] if typed.keys() >= {*names} else None


def _are_rows(g: Tensor) -> bool:
    """Whether a sparse gradient is rows, as C reads them."""
    rows, values = g._indices(), g._values()
    there = rows.is_contiguous() and values.is_contiguous()
    return there and rows.shape[0] == 1 and values.shape == (rows.shape[1], *g.shape[1:])


def _are_counts(steps: Sequence[Tensor]) -> bool:
    """Whether each is one float32 on the host, where C reads and writes it."""
    return all(s.dtype is torch.float32 and s.is_cpu and s.numel() == 1 for s in steps)


def _entries(tensors: Sequence[Tensor]) -> bytes:
    words: list[int] = []
    for x in tensors:
        words += (x.data_ptr(), x.numel())
    return pack(f"{len(words)}q", *words)

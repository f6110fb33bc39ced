"""Kernels of a node, one after the other, and the rows that wait for each.

    rows 0..99   era 0, running again   buffers of its inputs    ─► dropped when none waits
    rows 100..   era 1, derived         buffers of its residuals

A row is answered by the kernel that it left by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
from torch import Tensor

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.frames.rows import RowStore
from geartrain.nodes.kernel import AbstractKernel

APART: Final = 1 << 10
"""Residuals of a kernel, at most: so far apart are the buffers of two eras."""


@final
@dataclass(slots=True, eq=False)
class Era:
    """A kernel and where its residuals are.

    Args:
        number: In the column of a row's era.
        kernel: Computes.
        kept_input: Residual j is input i itself, by i: it is joined in place.
        waiting: Rows, once the era is over.
    """

    number: int
    kernel: AbstractKernel
    kept_input: dict[int, int] = field(default_factory=dict)
    waiting: int = 0

    def existing(self, store: RowStore, j: int) -> Tensor | None:
        return store.existing(self.number * APART + j)

    def buffer(self, store: RowStore, j: int, like: Tensor) -> Tensor:
        return store.buffer(self.number * APART + j, like)

    def kept(self, store: RowStore) -> Payload:
        """All its residuals, rows of other eras between them."""
        return store.buffers(self.number * APART)


@final
class Eras:
    """Those of one node, the present one and those before it that rows still wait for.

    Args:
        kernel: The first.
        store: Keeps the rows, and the number of each one's era in its column ``era``.
    """

    def __init__(self, kernel: AbstractKernel, store: RowStore) -> None:
        self.now = Era(0, kernel)
        self._rows = store
        self._before: list[Era] = []
        self._newest = 0

    @property
    def mixed(self) -> bool:
        """Whether rows of more than one wait."""
        return bool(self._before)

    def begin(self, kernel: AbstractKernel, new: int, buffers: RowStore) -> None:
        """From now on another kernel.

        Args:
            kernel: The other.
            new: Rows that wait already, and will leave by it.
            buffers: Where residuals are.
        """
        old = self.now
        old.waiting = self._rows.waiting - new - sum(era.waiting for era in self._before)
        self._newest += 1
        self.now = Era(self._newest, kernel)
        if old.waiting:
            self._before.append(old)
        else:
            buffers.drop_buffers(old.number * APART, APART)

    def groups(self, rows: IntArray) -> list[tuple[Era, IntArray]]:
        """Which of the rows are of which era, as positions among them."""
        numbers = self._rows["era"][rows]
        found = [(era, np.flatnonzero(numbers == era.number)) for era in [*self._before, self.now]]
        return [(era, at) for era, at in found if at.size]

    def release(self, rows: IntArray, buffers: RowStore) -> None:
        """Rows have been answered."""
        for era, at in self.groups(rows):
            if era is not self.now:
                era.waiting -= at.size
                if not era.waiting:
                    self._before.remove(era)
                    buffers.drop_buffers(era.number * APART, APART)


def spread(parts: list[tuple[IntArray, Gradient]], n: int) -> Gradient:
    """Gradients of n rows out of those of some of them each, by position; None is zero."""
    found: list[Tensor | None] = []
    for each in zip(*(gradient for _, gradient in parts), strict=True):
        like = next((d for d in each if d is not None), None)
        if like is None:
            found.append(None)
            continue
        whole = like.new_zeros((n, *like.shape[1:]))
        for (at, _), d in zip(parts, each, strict=True):
            if d is not None:
                whole[at] = d
        found.append(whole)
    return tuple(found)

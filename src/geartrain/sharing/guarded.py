"""Shares of a part whose firings and steps wait for each other.

    firing   holds its worker's guard            step   holds all guards

For modules that run again, which may hold what must not be copied, and for rules that must know
every row in flight before a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import numpy as np
from torch import Tensor, nn

from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.weights import WeightVersion
from geartrain.parts.part import PartState
from geartrain.sharing.locks import AbstractLock, MakeLock
from geartrain.sharing.share import AbstractShare, SharedPart


@final
class GuardedPart(SharedPart):
    """Steps wait for firings, and firings for steps."""

    def __init__(self, lock: MakeLock) -> None:
        super().__init__(lock)
        self.shares: Sequence[GuardedShare] = ()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        with ExitStack() as stack:
            for share in self.shares:
                stack.enter_context(share.lock)
            yield


@final
class GuardedShare(AbstractShare):
    """A share whose firings and steps wait for each other."""

    _shared: GuardedPart

    def __init__(self, part: PartState, shared: GuardedPart, lock: AbstractLock) -> None:
        super().__init__(part, shared)
        self.lock = lock
        self.gradient = GradientSum(part.module.parameters())
        self._settled = GradientSum(part.module.parameters())

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self.lock.release()
        if kind is None:
            self._end_firing()

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._part.version

    def _hand_in(self) -> None:
        self._settled.absorb(self.gradient)

    def hand_over(self, into: GradientSum) -> None:
        into.absorb(self._settled)

    # A step must know of every row that has seen the weights and is not settled, so that is told at
    # once.

    def sent(self, rows: int, version: int | None = None) -> None:
        with self._shared.counts:
            self._part.sent(rows, version)

    def answered(self, rows: int, messages: int) -> None:
        self.sent(messages)
        versions = np.full(messages, self.version)
        super().answered(rows, messages)
        self._counts.append(lambda: self._part.counting.returned(versions))

    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        with self._shared.counts:
            return self._part.aliases()

    def compensated(
        self,
        seen: WeightVersion,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        rows: int,
    ) -> Sequence[Tensor | None]:
        with self._shared.counts:
            return self._part.compensated(seen, parameters, gradients, rows)

    def note_holding(self) -> bool | None:
        with self._shared.counts:
            return self._part.note_holding()

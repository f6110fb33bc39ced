"""One part in many hands: every lane computes with the same weights and adds to a sum of its own.

    lane 0   firing ─► sum 0 ┐
    lane 1   firing ─► sum 1 ┼─► due? ─► one step, by whoever noticed, while nobody computes

A lane is a worker that runs the whole graph for its own instances. Nothing travels between lanes;
they meet in the weights alone. A step waits for the firings of that part that are under way, and
they for it, so that no firing sees half a step; staleness is counted exactly as without lanes.

Source: asynchronous data parallelism in shared memory, as in Niu et al. 2011, arXiv:1106.5730, but
with the steps of a part one after the other and never in the middle of somebody's firing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from geartrain.ir.gradient import GradientSum
from geartrain.ir.message import IntArray
from geartrain.ir.weights import AbstractWeights, Sight
from geartrain.optim.part import PartState, StepTaken
from geartrain.optim.rules import Rules
from geartrain.optim.views import Stashed


class AbstractLock(Protocol):
    """What a runtime gives, ``threading.Lock`` or ``NoLock``: floors below it know no threads."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...


@final
class NoLock:
    """For a runtime of one thread."""

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        pass


@final
class Share(AbstractWeights):
    """A part as one lane sees it.

    Args:
        part: The part, whose ``shares`` this becomes one of.
        counts: Of all its shares: held while the part counts rows.
        stepping: Of all its shares: held by the one that steps.
        guard: Its own: held while its lane computes with the part.
        first: Whether it is the lane that counts finished instances for the part.
    """

    def __init__(
        self,
        part: PartState,
        counts: AbstractLock,
        stepping: AbstractLock,
        guard: AbstractLock,
        *,
        first: bool,
    ) -> None:
        self.name, self._part, self._first = part.name, part, first
        self._counts, self._stepping, self.guard = counts, stepping, guard
        self.gradient = GradientSum(part.module.parameters())
        self.wants_graph = part.wants_graph
        self.size = part.size

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._part.version

    @property
    def open(self) -> bool:
        return self._part.open

    @property
    def device(self) -> torch.device:
        return self._part.device

    @property
    def rules(self) -> Rules:
        return self._part.rules

    @property
    def rows(self) -> int:
        return self._part.rows

    @property
    def instances(self) -> int:
        return self._part.instances

    def sent(self, rows: int, version: int | None = None) -> None:
        with self._counts:
            self._part.sent(rows, version)

    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        with self._counts:
            self._part.received(rows, versions, lengths)

    def answered(self, rows: int, messages: int) -> None:
        with self._counts:
            self._part.answered(rows, messages)

    def dropped(self, versions: IntArray) -> None:
        with self._counts:
            self._part.dropped(versions)

    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        with self._counts:
            return self._part.aliases()

    def compensated(
        self,
        sight: Sight,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        rows: int,
    ) -> Sequence[Tensor | None]:
        with self._counts:
            return self._part.compensated(sight, parameters, gradients, rows)

    def finished(self, instances: int) -> None:
        if self._first:
            # Outside of any firing, so a step of another lane would not wait for it by itself.
            with self.guard, self._counts:
                self._part.finished(instances)

    def note_holding(self) -> bool | None:
        with self._counts:
            return self._part.note_holding()

    def step_if_due(self, progress: int) -> StepTaken | None:
        part = self._part
        # Another lane that steps just now will do; what is left over comes due with the next rows.
        if not part.due() or not self._stepping.acquire(blocking=False):
            return None
        try:
            return part.step_if_due(progress)
        finally:
            self._stepping.release()

    def step(self, progress: int) -> StepTaken | None:
        with self._stepping:
            return self._part.step(progress)


def share(part: PartState, lanes: int, lock: Callable[[], AbstractLock]) -> list[Share]:
    """So many views of a part, in place of those that it had; what those had added stays.

    Raises:
        ValueError: The part's view writes leaves that lanes would read at the same time.
    """
    if not isinstance(part.view, Stashed):
        raise ValueError(
            f"part '{part.name}': lanes=True and view={part.view} do not go together: lanes see "
            "the weights of a part at the same time; use view=Stashed(), or no lanes"
        )
    part.absorb_shares()
    counts, stepping = lock(), lock()
    shares = [Share(part, counts, stepping, lock(), first=k == 0) for k in range(lanes)]
    part.shares = shares
    return shares

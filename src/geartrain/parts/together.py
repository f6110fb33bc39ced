"""Parts whose steps fall due together: what each wants by itself, and one call of C for all.

    update ends, its sums ─► part a ┐                        ┌─► part a: weights of the next version
                             part b ├─► divided, stepped, C ─┼─► part b
                             part c ┘                        └─► part c

Weights, what optimisers remember, versions and what is told are those of steps that parts take one
after the other: they have nothing in common. A part that somebody else has the weights of, that
limits entries, or by the norm of all parts, whose optimiser is none that ``told`` knows or is
watched steps by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from geartrain.native import operations
from geartrain.native.steps import norm_of
from geartrain.nodes.gradient import take_together
from geartrain.nodes.unrecorded import Unrecorded
from geartrain.parts.part import PartState
from geartrain.parts.told import StepJob
from geartrain.parts.trained import AbstractPart, StepTaken
from geartrain.parts.ways import WeightsStep


class _Ended(NamedTuple):
    """An update that has ended.

    Args:
        part: Whose.
        rows: Of it.
        divisor: Of the sums.
        sums: Of the gradients of each parameter.
        squares: Of all their entries, if these are known.
    """

    part: PartState
    rows: int
    divisor: float
    sums: Sequence[Tensor | None]
    squares: float | None


class _ToldUpdate(NamedTuple):
    """A step that may be taken with others.

    Args:
        update: That it is the end of.
        job: What it is.
        factor: By which its gradients are multiplied.
    """

    update: _Ended
    job: StepJob
    factor: float


class _Call(NamedTuple):
    """Steps that are one call; their parts know that they are about to move.

    Args:
        step: They.
        updates: Whose gradients they are of.
        gradients: One for each weight.
        factors: By which these are multiplied.
        settings: Of the optimisers.
    """

    step: WeightsStep
    updates: Sequence[_Ended]
    gradients: Sequence[Tensor]
    factors: Sequence[float]
    settings: Mapping[str, Any]

    def take(self) -> None:
        """Take them."""
        with Unrecorded():
            self.step.take(self.gradients, factors=self.factors, **self.settings)
        torch.autograd.graph.increment_version(self.step.weights)


@final
class StepsTogether:
    """Steps of some parts of a worker.

    Args:
        parts: They, in the order in which they step; others may be added.
    """

    def __init__(self, parts: Iterable[AbstractPart] = ()) -> None:
        self.parts = [*parts]

    def step_if_due(self, progress: int) -> list[StepTaken]:
        """Take the steps that are due.

        Args:
            progress: Instances finished in training.
        """
        return self._all(progress, lambda part: part.step_if_due(progress), flush=False)

    def step(self, progress: int) -> list[StepTaken]:
        """Step with whatever gradients are left."""
        return self._all(progress, lambda part: part.step(progress), flush=True)

    def _all(
        self, progress: int, alone: Callable[[AbstractPart], StepTaken | None], *, flush: bool
    ) -> list[StepTaken]:
        mine: list[PartState] = []
        found: dict[str, StepTaken | None] = {}
        for part in self.parts:
            if isinstance(part, PartState) and part.steps_plainly:
                if flush or part.due():
                    mine.append(part)
                else:
                    found[part.name] = None
        if mine and not operations.listening:
            found |= self._together(mine, progress, flush=flush)
        steps = [found[p.name] if p.name in found else alone(p) for p in self.parts]
        return [step for step in steps if step is not None]

    def _together(
        self, parts: Sequence[PartState], progress: int, *, flush: bool
    ) -> dict[str, StepTaken | None]:
        """By name of the part, the steps of those that take one."""
        ended = [(part, *part.end_update(flush=flush)) for part in parts]
        some = [(part, rows, divisor) for part, rows, divisor in ended if rows]
        sums = take_together([(part.gradient, part.parameters) for part, *_ in some])
        updates = [_Ended(*each, *its) for each, its in zip(some, sums, strict=True)]
        calls = self._calls(updates, progress)
        for call in calls:
            call.take()
        called = {each.part.name for call in calls for each in call.updates}
        found: dict[str, StepTaken | None] = {part.name: None for part in parts}
        for part, rows, divisor, its, squares in updates:
            if part.name in called:
                found[part.name] = part.moved(rows, progress)
            else:
                found[part.name] = part.step_by(its, squares, rows, divisor, progress)
        for part in parts if flush else ():
            part.flushed()
        return found

    def _calls(self, updates: Sequence[_Ended], progress: int) -> list[_Call]:
        """Those of the updates that are for C; none where a gradient is not finite: its part is to
        tell it, when those before it have stepped."""
        jobs: dict[Hashable, list[_ToldUpdate]] = {}
        for each in updates:
            job = each.part.stepping.told(each.sums, progress)
            norm = _norm(each, job)
            if not norm - norm == 0.0:
                return []
            if job is not None:
                weights, *_ = job.tensors
                alike = (job.kind, *job.settings.values(), weights[0].dtype)
                factor = each.part.stepping.factor(norm, each.divisor)
                jobs.setdefault(alike, []).append(_ToldUpdate(each, job, factor))
        for told in chain.from_iterable(jobs.values()):
            told.update.part.about_to_move()  # weights may lie elsewhere then
        calls = [_call(its) for its in jobs.values()]
        return [call for call in calls if call is not None]


def _call(jobs: Sequence[_ToldUpdate]) -> _Call | None:
    """That of steps with the same settings; None: it is not for C."""
    first, *others = [job.step() for _, job, _ in jobs]
    step = first.and_others(others)
    gradients = [*chain.from_iterable(job.gradients for _, job, _ in jobs)]
    if not step.suits(gradients):
        return None
    factors = [factor for _, job, factor in jobs for _ in job.gradients]
    updates = [each for each, *_ in jobs]
    return _Call(step, updates, gradients, factors, jobs[0].job.settings)


def _norm(update: _Ended, job: StepJob | None) -> float:
    """Of the gradients of an update, found as its part would by itself; that of one which is not
    for C is not asked for."""
    if update.squares is not None:
        return math.sqrt(update.squares) if update.squares >= 0 else math.nan
    norm = 0.0 if job is None else norm_of(job.gradients)
    return math.nan if norm is None else norm

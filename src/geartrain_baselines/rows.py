"""Plain minibatch training of a network, for the baselines of recipes whose instances are those.

order of the seed ─► minibatch (x, y) ─► loss ─► step, until an evaluation is due
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.frames.instance import Instance
from geartrain_baselines.baseline import Epoch, Terms, segments


class Dealt(Protocol):
    """Minibatches that are dealt out anew for every epoch."""

    def set_epoch(self, number: int) -> None: ...

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, at: int) -> Instance: ...
    @overload
    def __getitem__(self, at: slice) -> list[Instance]: ...


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A network and how it learns.

    Args:
        net: Scores ``(n, ..., k)`` of rows ``(n, ...)``.
        optimizer: Of all its weights.
        schedule: Factor on the rate, from the number of minibatches finished.
        metrics: Of scores ``(m, k)`` and targets ``(m,)``, a mean.
        clip: Largest norm of the gradient, or None.
    """

    net: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    clip: float | None = None

    def scored(self, instance: Instance) -> tuple[Tensor, Tensor]:
        """Scores ``(m, k)`` and targets ``(m,)`` of a minibatch, all positions in a row."""
        x, y = (_tensor(instance, name) for name in "xy")
        return self.net(x).flatten(0, y.ndim - 1), y.flatten()

    def step(self, instance: Instance, finished: int) -> float:
        """Learn from a minibatch; return its loss."""
        loss = F.cross_entropy(*self.scored(instance))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * self.schedule(finished)
        self.optimizer.step()
        return loss.item()

    def evaluate(self, held: Sequence[Instance]) -> dict[str, float]:
        """Metrics, means over all rows."""
        sums, rows = dict.fromkeys(self.metrics, 0.0), 0
        self.net.eval()
        with torch.no_grad():
            for instance in held:
                scores, target = self.scored(instance)
                for name, metric in self.metrics.items():
                    sums[name] += float(metric(scores, target)) * len(target)
                rows += len(target)
        self.net.train()
        return {name: each / rows for name, each in sums.items()}


def train_rows(terms: Terms, plan: Plan, data: Dealt, held: Sequence[Instance]) -> Iterator[Epoch]:
    """Train, and yield after every evaluation.

    Instances are counted as the recipe counts them: minibatches of its option ``batch``.

    Args:
        terms: Of the comparison.
        plan: Network and rules.
        data: Minibatches of ``terms.batch`` rows.
        held: To evaluate on.
    """
    seconds, finished = 0.0, 0
    share = terms.batch / int(terms.options["batch"])
    order = segments(
        len(data), 1, seed=terms.seed, epochs=terms.epochs, evaluate_every=terms.evaluate_every
    )
    for segment in order:
        begin, loss_sum = time.perf_counter(), 0.0
        data.set_epoch(math.ceil(segment.epoch))
        for number in segment.batches:
            loss_sum += plan.step(data[int(number[0])], finished)
            finished += 1
        seconds += time.perf_counter() - begin
        yield Epoch(
            epoch=segment.epoch,
            seconds=seconds,
            instances=len(segment) * share,
            loss=loss_sum / len(segment),
            updates=len(segment.batches),
            valid=plan.evaluate(held),
        )


def _tensor(instance: Instance, name: str) -> Tensor:
    rows = instance.inputs[name]
    assert isinstance(rows, Tensor)
    return rows

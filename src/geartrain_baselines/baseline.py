"""What a baseline is: a name, and a function that trains a fresh network and tells of every epoch.

    Terms(seed, epochs, batch, data, options) ─► train ─► Epoch, Epoch, ...

The terms are those of the other systems of a comparison: the same data, the same size of the model,
the same order of the instances. How a baseline learns, its optimiser and its rate, is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from geartrain.data.points import evaluation_points

Rows = TypeVar("Rows", bound=Sized)
"""Numbers of examples."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all systems of a comparison have in common.

    Args:
        seed: Of the initial weights, of generated data and of the order.
        epochs: Planned; a schedule ends with the last.
        batch: Examples per update.
        data: The data folder; None takes ``$GEARTRAIN_DATA``.
        options: Values of all options of the recipe, by name.
        evaluate_every: Share of an epoch between two evaluations; None: the end alone.
    """

    seed: int
    epochs: int
    batch: int
    data: Path | None
    options: Mapping[str, int | float | str]
    evaluate_every: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What an epoch came to, or the segment since the last validation where it has several.

    Args:
        epoch: Counted from 1; a fraction within an epoch.
        seconds: Training so far, collation included, without validation.
        instances: Trained meanwhile, as the recipe counts them.
        loss: Mean training loss meanwhile.
        updates: Optimiser steps meanwhile.
        valid: Metrics of the validation, those of the recipe among them.
    """

    epoch: float
    seconds: float
    instances: float
    loss: float
    updates: int
    valid: Mapping[str, float]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A system to compare with.

    Args:
        name: On the command line, unique within the recipe.
        what: A line.
        batch: Examples per update that suit it best.
        epochs: That it needs for its best; None takes the recipe's.
        train: Trains a fresh network under the terms, and yields after every epoch; leaves
            torch's number of threads alone.
        slow: Left out unless it is asked for by name, as another form is always faster.
        needs: A package to be installed first, of the extra ``peers``.
    """

    name: str
    what: str
    batch: int
    train: Callable[[Terms], Iterator[Epoch]]
    epochs: int | None = None
    slow: bool = False
    needs: str | None = None


def shuffler(seed: int, epoch: int) -> np.random.Generator:
    """The generator whose first permutation is the order of an epoch.

    It is the order in which a ``Session`` of this seed takes its instances.
    """
    return np.random.default_rng((seed, epoch))


@final
@dataclass(frozen=True, slots=True)
class Segment(Generic[Rows]):
    """Updates up to an evaluation.

    Args:
        epoch: What has been trained when it ends; a fraction within an epoch.
        batches: Numbers of the examples of each update.
    """

    epoch: float
    batches: Sequence[Rows]

    def __len__(self) -> int:
        """Number of examples."""
        return sum(map(len, self.batches))


def segments(
    examples: int, batch: int, *, seed: int, epochs: int, evaluate_every: float | None = None
) -> Iterator[Segment[NDArray[np.int64]]]:
    """All updates of a training, in the order of the seed.

    Args:
        examples: How many there are.
        batch: Examples per update; an epoch's last may have fewer.
        seed: Of the order.
        epochs: Passes over the examples.
        evaluate_every: See ``cut``.
    """
    for epoch in range(1, epochs + 1):
        order = shuffler(seed, epoch).permutation(examples)
        batches = [order[first : first + batch] for first in range(0, examples, batch)]
        yield from cut(batches, epoch, evaluate_every)


def cut(
    batches: Sequence[Rows], epoch: int, evaluate_every: float | None
) -> Iterator[Segment[Rows]]:
    """The updates of an epoch, up to each evaluation.

    Evaluations come after the first update that is at or past one of the points at which a
    ``Session`` evaluates, and at the end of the epoch.

    Args:
        batches: Of the epoch.
        epoch: Counted from 1.
        evaluate_every: Share of an epoch between two evaluations; None: the end alone.
    """
    done = np.cumsum([len(batch) for batch in batches])
    total = int(done[-1])
    points = evaluation_points(total, evaluate_every)
    begin = 0
    for end in dict.fromkeys((np.searchsorted(done, points) + 1).tolist()):
        at = epoch if end == len(batches) else epoch - 1 + int(done[end - 1]) / total
        yield Segment(at, batches[begin:end])
        begin = end


def rate_at(batch: int, tuned: Mapping[int, float]) -> float:
    """The rate that was tuned at the batch nearest to this one, by the ratio of the two.

    Args:
        batch: Examples per update.
        tuned: Batch to rate.
    """
    return tuned[min(tuned, key=lambda b: abs(math.log(b / batch)))]

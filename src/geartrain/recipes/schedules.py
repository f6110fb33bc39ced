"""Factors on the learning rate of recipes, by the number of instances finished."""

from __future__ import annotations

from collections.abc import Callable


def up_and_down(instances: int, warm_up: float) -> Callable[[int], float]:
    """A factor on the rate: up in a line from 0 to 1 over the warm-up, then down to 0.

    Instances after the last have what the last had.

    Args:
        instances: In all epochs.
        warm_up: Share of them, more than 0 and less than 1.
    """

    def factor(finished: int) -> float:
        done = (min(finished, instances - 1) + 1) / (instances + 1)
        return min(done / warm_up, (1 - done) / (1 - warm_up))

    return factor

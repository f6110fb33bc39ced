"""Where in an epoch to evaluate.

every=0.25   ───┬───┬───┬───┤      a quarter, a half, three quarters, the end
every=0.4    ──────┬─────┬──┤      the end is always one of them
"""

from __future__ import annotations

import math

from geartrain.bounds import require_number

_SLACK = 1e-6  # of an instance: 3 * 0.1 * 10 is 3, not a little more


def require_evaluate_every(every: float | None) -> None:
    """Refuse what is no share of an epoch.

    Raises:
        ValueError: Not above 0, or more than 1.
    """
    if every is not None:
        shown = f"{every:g}" if isinstance(every, float) else repr(every)
        require_number(
            f"evaluate_every={shown}",
            every,
            "a share of an epoch, above 0 and at most 1, such as 0.25 for four times an epoch",
            above=0,
            most=1,
        )


def evaluation_points(length: int, every: float | None, whole: int = 1) -> list[int]:
    """Instances of an epoch that are done at each evaluation, ascending; the last is the length.

    Args:
        length: Instances of an epoch.
        every: Share of an epoch between two evaluations; None: the end alone.
        whole: Points are rounded up to multiples of it, such as a minibatch.

    Raises:
        ValueError: ``every`` is no share of an epoch.
    """
    require_evaluate_every(every)
    if every is None or not length:
        return [length]
    step = max(every * length, 1.0)
    count = math.ceil(length / step)
    rounded = (math.ceil((k * step - _SLACK) / whole) * whole for k in range(1, count + 1))
    return sorted({min(point, length) for point in rounded} | {length})

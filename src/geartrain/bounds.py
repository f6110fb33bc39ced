"""What numbers may be that a user gives: of which kind, and how large.

Of each that says how much is made there is a largest, far above what one machine does, and small
enough that what is made of it comes to an end: what is beyond is a slip of the hand.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Final

MOST_WORKERS: Final = 1024
MOST_COPIES: Final = 1024
MOST_ACTIVE: Final = 1 << 20
MOST_ROWS: Final = 1 << 31
MOST_EPOCHS: Final = 10**9
MOST_COUNT: Final = 2**53
MOST_SEED: Final = 2**63 - 1

WORKERS: Final = "each has a thread, with kernel threads of its own, or stands for a machine"
COPIES: Final = "each is a whole copy with its optimiser, in the memory of one machine"
ACTIVE: Final = "each instance in flight has its rows in memory"
ROWS: Final = "no firing has as many"
EPOCHS: Final = "none would end"
COUNT: Final = "no run counts so far"
SEED: Final = "generators are seeded with 63 bits"


def require_whole(
    what: str, value: Any, least: int | None = None, wanted: str = "", *, most: int | None = None
) -> None:
    """Refuse what is no whole number, or out of range.

    Args:
        what: Such as ``Threads(workers=2.5)``.
        value: What was given; NumPy's whole numbers are some, truth values are none.
        least, most: May still be; None: any.
        wanted: In words; "" stands for ``least`` or more.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is smaller or larger.
    """
    if not wanted and least is not None:
        wanted = f"{least} or more"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{what}: give a whole number{wanted and ', '}{wanted}")
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{what}: give {wanted}")


def require_number(
    what: str,
    value: Any,
    wanted: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Refuse what is no number, none that is finite, or out of range.

    Args:
        what: Such as ``Clip(norm='5')``.
        value: What was given; truth values are no numbers.
        wanted: The range in words.
        least, above, most, below: The range; without the second and the fourth.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range, infinite or NaN.
    """
    number: float = value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{what}: give a number, {wanted}")
    if not (least <= number <= most and above < number < below):
        endless = min(most, below) == math.inf and not -math.inf < number < math.inf
        finite = "a finite number, " if endless else ""
        raise ValueError(f"{what}: give {finite}{wanted}")


def require_at_most(what: str, value: float, most: float, why: str) -> None:
    """Refuse a number that is too large.

    Args:
        what: Such as ``Threads(workers=2147483648)``.
        value: The number.
        most: May still be.
        why: Half a sentence.

    Raises:
        ValueError: It is larger, or NaN.
    """
    if not value <= most:
        raise ValueError(f"{what}: give {most:,} at most, as {why}")

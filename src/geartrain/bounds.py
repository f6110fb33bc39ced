"""How large numbers may be that say how much is made: what is beyond them is a slip of the hand.

Each is far above what one machine does, and small enough that what is made of it comes to an end.
"""

from __future__ import annotations

from typing import Final

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

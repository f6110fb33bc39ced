"""Row numbers that follow upon one another: they are found at once, and read without a copy."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from geartrain.native.rows import Rows


class _Counted:
    """0, 1, ...: rows that are a view of it follow upon one another, which is seen at once."""

    numbers: ClassVar[Rows] = np.arange(1 << 12)


def counted(first: int, n: int) -> Rows:
    """first, first + 1, ...; nobody may write to it."""
    numbers = _Counted.numbers  # another worker may replace them
    if first + n > numbers.size:
        numbers = _Counted.numbers = np.arange(2 * (first + n))
    return numbers[first : first + n]


def consecutive(rows: Rows) -> int:
    """The first of rows that follow upon one another; -1: they do not."""
    first, n, numbers = int(rows[0]), rows.size, _Counted.numbers
    if rows.base is numbers and rows.strides == (8,):
        return first
    if int(rows[-1]) - first != n - 1:
        return -1
    if n < 3:
        return first
    if n <= numbers.size:  # of few rows bytes are compared in a fraction of the time
        same = (rows - first).tobytes() == numbers[:n].tobytes()
    else:
        same = bool((rows[1:] - rows[:-1] == 1).all())
    return first if same else -1


def sliced(rows: Rows) -> Rows | slice:
    """The same rows, as a slice if they follow upon one another: what it gives is no copy."""
    first = consecutive(rows) if rows.size else -1
    return rows if first < 0 else slice(first, first + rows.size)

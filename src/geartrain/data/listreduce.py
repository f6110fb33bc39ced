"""List reduction: a generated task, one operation and then up to nine digits.

    tokens   [ op,  d1, d2, ..., dn,  -, - ]     length n + 1, the rest is padding
    label    op(d1..dn), rounded, modulo 10      0..9

    token 10   mean(L)
    token 11   mean(L[0::2]) - mean(L[1::2])
    token 12   max(L) - min(L)
    token 13   len(L)

The operations and the label are those of the list reduction task in Gaunt et al. 2017,
arXiv:1705.09786. What is left open there is our choice:

- the mean of an empty half is 0, so operation 11 of one digit is that digit;
- halves round to the even neighbour, as Python and numpy do: 2.5 to 2, 3.5 to 4, -0.5 to 0;
- the remainder is never negative: -3 becomes 7;
- the operation, the number of digits (1..9) and each digit are uniform and independent. Uniform
  lengths keep short lists as common as long ones, so that a loop ends at every step equally often.

Train and validation come from streams of random numbers that never meet, whatever their seeds.
Short lists are few (4 * 10^n of n digits) and occur in both: of 10,000 lists to validate on, about
36 % are among 100,000 to train on, nearly all of them of up to three digits. ``without`` removes
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import DataError

DIGITS = 10
OPERATIONS = ("mean", "alternating difference", "range", "length")
SYMBOLS = DIGITS + len(OPERATIONS)
PADDING = SYMBOLS  # an embedding of 14 rows refuses it; one of 15 has a row for it
MOST_DIGITS = 9
CLASSES = 10

_MEAN, _DIFFERENCE, _RANGE, _LENGTH = range(DIGITS, SYMBOLS)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ListReduction:
    """N lists in columns.

    Args:
        tokens: int64 ``(N, 10)``: an operation 10..13, then digits 0..9, then padding 14.
        length: int64 ``(N,)``, tokens that are not padding, 2..10.
        label: int64 ``(N,)``, 0..9.
    """

    tokens: NDArray[np.int64]
    length: NDArray[np.int64]
    label: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.length)

    def codes(self) -> NDArray[np.int64]:
        """Return int64 ``(N,)``, one number for each distinct list: equal lists, equal codes."""
        weights = (SYMBOLS + 1) ** np.arange(self.tokens.shape[1], dtype=np.int64)
        return self.tokens @ weights

    def without(self, other: ListReduction) -> ListReduction:
        """Return the lists that do not occur in the other set: a validation of unseen lists."""
        new = ~np.isin(self.codes(), other.codes())
        return ListReduction(self.tokens[new], self.length[new], self.label[new])


def generate(n: int, seed: int, split: Literal["train", "validation"] = "train") -> ListReduction:
    """Draw n lists; equal arguments give equal lists, and the splits are independent.

    Args:
        n: Number of lists; 100,000 take about 50 ms.
        seed: Not negative.
        split: Which of two streams of random numbers of this seed to draw from.

    Raises:
        ValueError: A negative n or seed, or another split.
    """
    if n < 0 or seed < 0:
        raise ValueError(f"n is {n} and seed is {seed}; neither may be negative")
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}; expected 'train' or 'validation'")
    random = np.random.default_rng([seed, int(split == "validation")])
    length = random.integers(2, MOST_DIGITS + 2, n)
    tokens = random.integers(0, DIGITS, (n, MOST_DIGITS + 1))
    tokens[:, 0] = random.integers(DIGITS, SYMBOLS, n)
    tokens[np.arange(MOST_DIGITS + 1) >= length[:, None]] = PADDING
    return ListReduction(tokens, length, _reduce(tokens, length))


def reduce_lists(tokens: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the labels, int64 ``(N,)``, of lists of one's own.

    Args:
        tokens: int64 ``(N, W)``, W at least 2; what stands past the length is not looked at.
        length: int64 ``(N,)``, 2..W.

    Raises:
        DataError: Shapes that do not fit, a length out of range, a first token that is no
            operation, or a later one that is no digit; names the first such list.
    """
    _check_shapes(tokens, length)
    width = tokens.shape[1]
    _check(length, ~_within(length, 2, width + 1), "length", f"2..{width}")
    _check(tokens[:, 0], ~_within(tokens[:, 0], DIGITS, SYMBOLS), "operation", "10..13")
    inside = np.arange(1, width) < length[:, None]
    wrong = inside & ~_within(tokens[:, 1:], 0, DIGITS)
    worst = np.where(wrong.sum(1) > 0, tokens[np.arange(len(tokens)), 1 + wrong.argmax(1)], 0)
    _check(worst, wrong.sum(1) > 0, "digit", "0..9")
    return _reduce(tokens, length)


def _reduce(tokens: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
    count = length - 1
    inside = np.arange(tokens.shape[1] - 1) < count[:, None]
    digits = np.where(inside, tokens[:, 1:], 0)
    highest = digits.max(1)
    lowest = np.where(inside, digits, DIGITS).min(1)
    first, second = digits[:, 0::2].sum(1), digits[:, 1::2].sum(1)
    firsts, seconds = (count + 1) // 2, np.maximum(count // 2, 1)  # an empty half: 0 / 1
    # Integers and one division: a quotient of small integers is an exact half only if it is one,
    # while a difference of two rounded means may miss it.
    operation = tokens[:, 0]
    cases = [operation == _MEAN, operation == _DIFFERENCE, operation == _RANGE]
    numerator = np.select(
        cases, [first + second, first * seconds - second * firsts, highest - lowest], count
    )
    denominator = np.select(cases[:2], [count, firsts * seconds], 1)
    label: NDArray[np.int64] = np.rint(numerator / denominator).astype(np.int64) % CLASSES
    return label


def _within(values: NDArray[np.int64], low: int, end: int) -> NDArray[np.bool_]:
    return (values >= low) & (values < end)


def _check_shapes(tokens: NDArray[np.int64], length: NDArray[np.int64]) -> None:
    if tokens.ndim != 2 or tokens.shape[1] < 2 or length.shape != tokens.shape[:1]:
        raise DataError(
            f"lists: tokens have shape {tokens.shape} and lengths {length.shape}; expected (N, W) "
            "with W >= 2, and (N,). Pad the lists to one width, and give one length a list"
        )


def _check(values: NDArray[np.int64], wrong: NDArray[np.bool_], what: str, expected: str) -> None:
    if wrong.any():
        record = int(wrong.argmax())
        raise DataError(
            f"lists: {what} {values[record]} in list {record} (from 0); expected {expected}. "
            f"{int(wrong.sum())} of {len(wrong)} lists are like it: remove or re-encode them"
        )

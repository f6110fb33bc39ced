"""What letters bring to a copy or a share of a part, looked at before anything is done with it.

Copies that talk: a tensor or None for each parameter; some exchanges send that twice, or nothing.
Shared weights:

    gradient   what has been gathered, the versions that its messages saw, their rows
    weights    of the owner's next version: whole, or the rows of a table that have changed
    floor      the oldest version that rows of the sender saw, or may yet see
    ages       of rows that the sender has settled, so many of each age

A letter that does not fit is refused by name: added up as it is, it would end the owner with an
error of numpy's, or step the part with what nobody has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from geartrain.bounds import MOST_COUNT, MOST_ROWS
from geartrain.frames.message import IntArray
from geartrain.sharing.letters import Letter, Tensors
from geartrain.transport.batches import refuse, shape_of

GRADIENT: Final = "gradient"
WEIGHTS: Final = "weights"
FLOOR: Final = "floor"
AGES: Final = "ages"
_WORKER: Final = "worker"
_COPY: Final = "copy"


def handed_in(
    letter: Letter, like: Sequence[Tensor], newest: int
) -> tuple[Tensors, IntArray, IntArray]:
    """The gradient, the versions and the rows of a letter of kind ``GRADIENT``.

    Args:
        letter: As it came.
        like: The parameters of the part.
        newest: The version of the part: nobody can have seen a later one.

    Raises:
        TransportError: Its tensors are not those of the part, or its messages saw versions that
            there are not.
    """
    if len(letter.tensors) != len(like) + 2:
        told, wanted = f"{len(letter.tensors)} tensors", f"{len(like)}, versions and rows"
        _refuse(letter, "content", told, wanted)
    *gradient, saw, rows = letter.tensors
    _require_shapes(letter, gradient, like)
    versions, lengths = _counts(letter, "versions", saw), _counts(letter, "rows", rows)
    if lengths.size != versions.size:
        _refuse(letter, "rows", f"{lengths.size} numbers", f"{versions.size}, one for each version")
    _require_within(letter, "versions that its messages saw", versions, newest)
    _require_within(letter, "rows of its messages", lengths, MOST_ROWS)
    return gradient, versions, lengths


def published(letter: Letter, like: Sequence[Tensor]) -> Tensors:
    """The weights of a letter of kind ``WEIGHTS``; None where nothing has changed.

    Raises:
        TransportError: They are not those of the part.
    """
    if len(letter.tensors) != len(like):
        _refuse(letter, "content", f"{len(letter.tensors)} tensors", f"{len(like)}")
    _require_shapes(letter, letter.tensors, like)
    return letter.tensors


def require_like(letter: Letter, like: Sequence[Tensor]) -> None:
    """Look whether the tensors of a letter between copies are like the parameters of their part.

    Args:
        letter: As it came.
        like: The parameters; each tensor has the shape of one of them, in their order, as often as
            the exchange sends something of all of them.

    Raises:
        TransportError: Their number is no multiple of that of the parameters, or one has another
            shape, or no floating point.
    """
    number = len(letter.tensors)
    if not like or number % len(like):
        wanted = f"{len(like)}, or a multiple, one for each parameter"
        _refuse(letter, "content", f"{number} tensors", wanted, _COPY)
    _require_shapes(letter, letter.tensors, [*like] * (number // len(like)), _COPY)


def told_floor(letter: Letter, newest: int) -> int:
    """The version of a letter of kind ``FLOOR``.

    Raises:
        TransportError: The part has no such version yet.
    """
    _require_within(letter, "floor", np.array([letter.version]), newest)
    return letter.version


def told_ages(letter: Letter) -> IntArray:
    """The counts of a letter of kind ``AGES``, int64: rows of age 0, of age 1 and so on.

    Raises:
        TransportError: They are no counts.
    """
    if len(letter.tensors) != 1:
        _refuse(letter, "content", f"{len(letter.tensors)} tensors", "1")
    counts = _counts(letter, "rows by age", letter.tensors[0])
    _require_within(letter, "rows by age", counts, MOST_COUNT)
    return counts


def require_kind(letter: Letter, kinds: Sequence[str]) -> None:
    """Raises:
    TransportError: It is of another kind than is wanted here.
    """
    if letter.kind not in kinds:
        _refuse(letter, "kind", repr(letter.kind)[:80], " or ".join(map(repr, kinds)))


def _require_shapes(
    letter: Letter, tensors: Tensors, like: Sequence[Tensor], who: str = _WORKER
) -> None:
    for j, (x, parameter) in enumerate(zip(tensors, like, strict=True)):
        if x is not None and (x.shape != parameter.shape or not x.is_floating_point()):
            wanted = f"None, or floating point of shape {tuple(parameter.shape)}"
            _refuse(letter, f"tensor {j}", shape_of(x), wanted, who)


def _counts(letter: Letter, what: str, x: Tensor | None) -> IntArray:
    if x is None or x.dtype is not torch.int64 or x.dim() != 1:
        _refuse(letter, what, shape_of(x), "int64 of one dimension")
    found: IntArray = x.numpy()
    return found


def _require_within(letter: Letter, what: str, numbers: IntArray, most: int) -> None:
    if numbers.size and not 0 <= numbers.min() <= numbers.max() <= most:
        _refuse(letter, what, f"{numbers.min()}..{numbers.max()}", f"0..{most}")


def _refuse(
    letter: Letter, what: str, value: object, expected: str, who: str = _WORKER
) -> NoReturn:
    refuse(f"letter of {who} {letter.sender} about part '{letter.part}'", what, value, expected)

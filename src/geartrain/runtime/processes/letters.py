"""Letters between copies of a part as records, and back.

    ints     sender, receiver, version, round, seen, bytes, hops, collective, count, progress or -1
    floats   weight
    arrays   JSON (part, kind, forms), and the tensors; of a sparse one its rows and their numbers

``Expected`` is what a receiver knows of its copies; a letter that does not fit is refused before
any exchange sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from geartrain.runtime.processes.messages import Kind, read_text, text
from geartrain.sharing.letters import Letter
from geartrain.transport.batches import refuse, shape_of
from geartrain.transport.record import Array, Record

_INTS: Final = 10
_MOST_TEXT: Final = 1 << 20  # bytes: names, and an entry a tensor


@final
@dataclass(frozen=True, slots=True)
class Expected:
    """The letters that a receiver accepts.

    Args:
        shapes: Part, without the number of a copy, to the shapes of its parameters.
        copies: How many there are of each.
        here: Those that live here.
    """

    shapes: Mapping[str, Collection[tuple[int, ...]]]
    copies: int
    here: Collection[int]


def letter_to_record(letter: Letter) -> Record:
    """The record of a letter."""
    arrays: list[Array | None] = []
    forms: list[list[int] | None] = []
    for x in letter.tensors:
        if x is not None and x.is_sparse:
            forms.append(list(x.shape))
            arrays += [x._indices()[0], x._values()]
        else:
            forms.append(None)
            arrays.append(x)
    ints = (
        *(letter.sender, letter.receiver, letter.version, letter.round, letter.seen),
        *(letter.nbytes, letter.hops, letter.collective, letter.count),
        -1 if letter.progress is None else letter.progress,
    )
    said = text([letter.part, letter.kind, forms])
    return Record(Kind.LETTER, ints, (letter.weight,), (said, *arrays))


def record_to_letter(record: Record, expected: Expected) -> Letter:
    """The reverse.

    Args:
        record: As it came.
        expected: What it has to agree with.

    Raises:
        TransportError: It is no letter, is of no part or copy that is known, or its tensors do not
            agree.
    """
    if len(record.ints) != _INTS or len(record.floats) != 1 or not record.arrays:
        told = f"{len(record.ints)} ints, {len(record.floats)} floats, {len(record.arrays)} arrays"
        _refuse("content", told, f"{_INTS} ints, 1 float, text and tensors")
    sender, receiver, version, turn, seen, nbytes, hops, collective, count, progress = record.ints
    if not 0 <= sender < expected.copies:
        _refuse("sender", sender, f"0..{expected.copies - 1}")
    if receiver not in expected.here:
        _refuse("receiver", receiver, "a copy that lives here")
    if min(version, turn, seen, nbytes, hops, count) < 0 or collective not in (0, 1):
        _refuse("numbers", record.ints[2:9], "0 or more, collective 0 or 1")
    if progress < -1:
        _refuse("progress", progress, "0 or more, or -1")
    part, kind, forms = _said(record.arrays[0], expected)
    tensors = _tensors(record.arrays[1:], forms, expected.shapes[part])
    return Letter(
        *(part, sender, receiver, kind, tensors),
        version=version,
        round=turn,
        weight=record.floats[0],
        seen=seen,
        nbytes=nbytes,
        hops=hops,
        collective=bool(collective),
        count=count,
        progress=None if progress < 0 else progress,
    )


def _said(array: Array | None, expected: Expected) -> tuple[str, str, list[Any]]:
    """Part, kind, and forms of the tensors."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        _refuse("text", shape_of(array), "bytes")
    if array.size > _MOST_TEXT:
        _refuse("text", f"{array.size} bytes long", f"{_MOST_TEXT} at most")
    try:
        said = read_text(array)
    except (ValueError, RecursionError) as error:
        _refuse("text", error, "JSON")
    if not isinstance(said, list) or len(said) != 3:
        _refuse("text", repr(said)[:80], "part, kind and forms")
    part, kind, forms = said
    if not isinstance(part, str) or part not in expected.shapes:
        _refuse("part", repr(part)[:80], "one that has copies here")
    if not isinstance(kind, str) or not isinstance(forms, list):
        _refuse("kind and forms", repr(said[1:])[:80], "a word and a list")
    return part, kind, forms


def _tensors(
    arrays: tuple[Array | None, ...], forms: list[Any], shapes: Collection[tuple[int, ...]]
) -> tuple[Tensor | None, ...]:
    wanted = sum(1 if form is None else 2 for form in forms)
    if len(arrays) != wanted:
        _refuse("tensors", f"{len(arrays)} arrays", f"{wanted} for {len(forms)} tensors")
    left = iter(arrays)
    found: list[Tensor | None] = []
    for form in forms:
        x = next(left)
        if form is not None:
            found.append(_sparse(x, next(left), form, shapes))
            continue
        if x is not None and not isinstance(x, Tensor):
            _refuse("tensor", shape_of(x), "a tensor, or None")
        found.append(x)
    return tuple(found)


def _sparse(
    rows: Array | None, values: Array | None, form: Any, shapes: Collection[tuple[int, ...]]
) -> Tensor:
    """Some rows of a tensor that has the shape of a parameter."""
    shape = tuple(form) if isinstance(form, list) else ()
    if not all(type(n) is int for n in shape) or shape not in shapes or not shape:
        _refuse("shape of a sparse tensor", repr(form)[:80], "that of a parameter")
    if not isinstance(rows, Tensor) or rows.dtype is not torch.int64 or rows.dim() != 1:
        _refuse("rows of a sparse tensor", shape_of(rows), "int64 of one dimension")
    if rows.numel() and not (0 <= int(rows.min()) and int(rows.max()) < shape[0]):
        told = f"{int(rows.min())}..{int(rows.max())}"
        _refuse("rows of a sparse tensor", told, f"0..{shape[0] - 1}")
    if not isinstance(values, Tensor) or tuple(values.shape) != (rows.numel(), *shape[1:]):
        _refuse("values of a sparse tensor", shape_of(values), f"{(rows.numel(), *shape[1:])}")
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)


_refuse = partial(refuse, "letter")

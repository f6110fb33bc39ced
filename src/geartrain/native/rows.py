"""Moving and adding rows of tensors: any number of tensors in one call.

    moves = Moves()
    moves.add(out, None, x, rows)       out[i] = x[rows[i]]
    moves.add(store, rows, x, None)     store[rows[i]] = x[i]
    moves.run()                         all of them in one call of C

Rows are moved as bytes, so any dtype will do. What C cannot do (no kernels, another device, memory
that is not contiguous, a cast) torch does at ``add``; a caller sees no difference. The source may
lie on another device than the target, where the result is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from math import prod
from struct import Struct, pack
from typing import Any, Final, TypeAlias, final, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.device import moved, upload
from geartrain.errors import ProtocolError
from geartrain.native import library, pool

Rows: TypeAlias = NDArray[np.int64]
"""Row numbers."""
Part: TypeAlias = tuple[Tensor, "Rows | None"]
"""Rows of a tensor; None: all of them."""

SMALL_BYTES: Final = 1 << 17
_WORDS: Final = 8  # of a job in kernels.c
_PACKS: Final = [Struct(f"{_WORDS * count}q").pack for count in range(17)]


@final
class Moves:
    """Copies of rows from tensor to tensor, collected and then done at once."""

    __slots__ = ("_address", "_bytes", "_copies", "_held", "_jobs", "_library", "_rows", "_sent")

    def __init__(self) -> None:
        self._library = library.current()
        self._jobs: list[int] = []
        self._bytes = 0
        self._rows: Rows | None = None  # the rows of the last job, and where they lie
        self._address = 0
        self._copies: list[Rows] = []
        self._sent: dict[tuple[int, torch.device], tuple[Rows, Tensor]] = {}
        # Alive until the run, whatever becomes of the caller's names for them.
        self._held: list[tuple[Tensor, Rows | None, Tensor, Rows | None]] = []

    def add(
        self,
        target: Tensor,
        target_rows: Rows | None,
        source: Tensor,
        source_rows: Rows | None,
        first: int = 0,
    ) -> None:
        """target[target_rows] = source[source_rows]; equally many of both.

        Target and source share no memory; no row of the target is named twice.

        Args:
            target: ``(a, ...)``.
            target_rows: None: as many as there are of the source, beginning with ``first``.
            source: ``(b, ...)``, of the target's inner shape.
            source_rows: None: all.
            first: See ``target_rows``.
        """
        there, here = target.shape, source.shape
        n = here[0] if source_rows is None else source_rows.size
        fits = first + n <= there[0] if target_rows is None else n == target_rows.size
        if not n and fits:
            return
        if (
            self._library is None
            or not fits
            or (dtype := source.dtype) is not target.dtype
            or there[1:] != here[1:]
            or not (target.is_cpu and source.is_cpu)
            or not (target.is_contiguous() and source.is_contiguous())
            or source.requires_grad
            or dtype.is_complex
            or not here[0]
        ):
            self._copy(target, target_rows, source, source_rows, first, n)
            return
        width = source.nbytes // here[0]
        self._bytes += n * width
        self._held.append((target, target_rows, source, source_rows))
        self._jobs += (
            source.data_ptr(),
            0 if source_rows is None else self._find(source_rows),
            here[0],
            target.data_ptr() + first * width,
            0 if target_rows is None else self._find(target_rows),
            there[0],
            n,
            width,
        )

    def run(self) -> None:
        """All that C does; it may be run again, and moves what lies there then.

        Raises:
            ProtocolError: A row number is out of range; nothing has been written then.
        """
        jobs, native = self._jobs, self._library
        if not jobs or native is None:
            return
        count = len(jobs) // _WORDS
        packed = _PACKS[count](*jobs) if count < len(_PACKS) else pack(f"{len(jobs)}q", *jobs)
        if bad := native.move[self._bytes > SMALL_BYTES](packed, count):
            self._refuse(bad - 1)

    def _find(self, rows: Rows) -> int:
        """Where row numbers lie; those of the last job are found already."""
        if rows is not self._rows:
            self._rows = rows
            if not rows.flags.c_contiguous:
                rows = np.ascontiguousarray(rows)
                self._copies.append(rows)
            self._address = torch.from_numpy(rows).data_ptr()
        return self._address

    def _copy(
        self,
        target: Tensor,
        target_rows: Rows | None,
        source: Tensor,
        source_rows: Rows | None,
        first: int,
        n: int,
    ) -> None:
        """``add`` by torch, at once."""
        device = target.device
        if source.device != device:
            if source_rows is not None:
                source = source.index_select(0, self._numbers(source_rows, source.device))
                source_rows = None
            source = moved(source, device)
        if target_rows is not None:
            if source_rows is not None:
                source = source.index_select(0, self._numbers(source_rows, device))
            target.index_copy_(0, self._numbers(target_rows, device), source.to(target.dtype))
            return
        if n != target.shape[0]:
            target = target.narrow(0, first, n)
        if source_rows is None:
            target.copy_(source)
        elif target.dtype == source.dtype:
            torch.index_select(source, 0, self._numbers(source_rows, device), out=target)
        else:
            target.copy_(source.index_select(0, self._numbers(source_rows, device)))

    def _numbers(self, rows: Rows, device: torch.device) -> Tensor:
        """Row numbers on a device; several tensors that share them have them sent once."""
        if device.type == "cpu":
            return torch.from_numpy(rows)
        found = self._sent.get((id(rows), device))
        if found is None:  # the array is held, or another could come by its id
            found = self._sent[id(rows), device] = (rows, upload(rows, device))
        return found[1]

    def _refuse(self, job: int) -> None:
        target, target_rows, source, source_rows = self._held[job]
        for x, rows, what in ((source, source_rows, "read"), (target, target_rows, "written")):
            if rows is not None and (rows.min() < 0 or rows.max() >= x.shape[0]):
                raise out_of_range(rows, x.shape[0], what)
        raise AssertionError("the kernel refuses row numbers that are in range")


def out_of_range(rows: Rows, limit: int, what: str) -> ProtocolError:
    """The error for row numbers outside of 0..limit-1."""
    bad = rows[(rows < 0) | (rows >= limit)]
    return ProtocolError(
        f"rows {bad[:8].tolist()} are to be {what}, but the tensor has rows 0..{limit - 1}; an "
        "index of a message names rows of its own payload"
    )


def take(sources: Sequence[Tensor], rows: Rows) -> tuple[Tensor, ...]:
    """The same rows of several tensors: new tensors ``(rows.size, ...)``.

    torch makes the room and fills it in one call, which is half of what a ``Moves`` takes.

    Raises:
        ProtocolError: A row number is out of range.
    """
    if not sources:
        return ()
    device = sources[0].device
    numbers = _numbers(rows, device)
    found = []
    for x in sources:
        if x.device != device:
            device = x.device
            numbers = _numbers(rows, device)
        try:
            found.append(_selected(x, numbers))
        except (IndexError, RuntimeError):
            limit = x.shape[0]
            if rows.size and (rows.min() < 0 or rows.max() >= limit):
                raise out_of_range(rows, limit, "read") from None
            raise
    return tuple(found)


def _selected(x: Tensor, numbers: Tensor) -> Tensor:
    """These rows of a tensor; memory of many is lent."""
    if x.is_cpu and not x.requires_grad:
        shape = numbers.shape[0], *x.shape[1:]
        if prod(shape) * x.itemsize >= pool.LEAST:
            return torch.index_select(x, 0, numbers, out=pool.shared.empty(shape, x.dtype))
    return x.index_select(0, numbers)


def _numbers(rows: Rows, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return upload(rows, device)
    return torch.from_numpy(rows if rows.flags.c_contiguous else np.ascontiguousarray(rows))


def take_whole(source: Tensor, rows: Rows, whole: int) -> Tensor:
    """Rows of a tensor, and rows of zeros after them: ``(whole, ...)``."""
    out = source.new_empty((whole, *source.shape[1:]))
    n = rows.size
    if n < whole:
        out[n:].zero_()
    moves = Moves()
    moves.add(out, None, source, rows)
    moves.run()
    return out


def transposed(x: Tensor) -> Tensor:
    """x ``(n, d)`` with rows and columns exchanged; contiguous, a new tensor unless x is one."""
    native = library.current()
    if native is None or x.dtype != torch.float32 or not (x.is_cpu and x.is_contiguous()):
        return x.t().contiguous()
    n, width = x.shape
    y = x.new_empty((width, n))
    native.transpose[x.numel() > library.SMALL](n, width, x.data_ptr(), y.data_ptr())
    return y


def put(target: Tensor, rows: Rows, source: Tensor, source_rows: Rows | None = None) -> None:
    """target[rows[i]] = source[i], or source[source_rows[i]]; every row of the target once."""
    moves = Moves()
    moves.add(target, rows, source, source_rows)
    moves.run()


def add(
    target: Tensor, target_rows: Rows | None, source: Tensor, source_rows: Rows | None
) -> Tensor:
    """target[target_rows[i]] += source[source_rows[i]], in the order of i; returns the target.

    Args:
        target: ``(a, ...)``, changed.
        target_rows: May name a row several times; None: 0, 1, ...
        source: ``(b, ...)`` of the target's inner shape and dtype, on any device; not the target's
            memory.
        source_rows: None: 0, 1, ...

    Raises:
        ProtocolError: A row number is out of range.
    """
    n = source.shape[0] if source_rows is None else source_rows.size
    if n != (target.shape[0] if target_rows is None else target_rows.size):
        return _add(target, target_rows, source, source_rows)
    typed = _typed(target, source)
    if typed is None:
        return _add(target, target_rows, source, source_rows)
    to, at = contiguous(target_rows), contiguous(source_rows)
    width = target.numel() // target.shape[0]
    bad = typed["add_rows"][n * width > library.SMALL](
        target.data_ptr(),
        pointer(to),
        target.shape[0],
        source.data_ptr(),
        pointer(at),
        source.shape[0],
        n,
        width,
    )
    if bad == 1 and to is not None:
        raise out_of_range(to, target.shape[0], "added to")
    if bad and at is not None:
        raise out_of_range(at, source.shape[0], "read")
    return target


def total(a: Tensor, a_rows: Rows | None, b: Tensor, b_rows: Rows | None) -> Tensor:
    """a[a_rows] + b[b_rows], None being all rows; a new tensor on the device of a.

    Raises:
        ProtocolError: A row number is out of range.
    """
    n = a.shape[0] if a_rows is None else a_rows.size
    typed = _typed(a, b) if n == (b.shape[0] if b_rows is None else b_rows.size) else None
    if typed is None:
        return _chosen(a, a_rows) + moved(_chosen(b, b_rows), a.device)
    of_a, of_b = contiguous(a_rows), contiguous(b_rows)
    width = a.numel() // a.shape[0]
    out = a.new_empty((n, *a.shape[1:]))
    bad = typed["sum_rows"][n * width > library.SMALL](
        out.data_ptr(),
        a.data_ptr(),
        pointer(of_a),
        a.shape[0],
        b.data_ptr(),
        pointer(of_b),
        b.shape[0],
        n,
        width,
    )
    if bad == 1 and of_a is not None:
        raise out_of_range(of_a, a.shape[0], "read")
    if bad and of_b is not None:
        raise out_of_range(of_b, b.shape[0], "read")
    return out


def _typed(a: Tensor, b: Tensor) -> dict[str, tuple[library.Function, ...]] | None:
    """The kernels for adding rows of two tensors, or None if they are for torch."""
    native = library.current()
    if (
        native is None
        or not a.numel()
        or not b.numel()
        or a.dtype != b.dtype
        or a.shape[1:] != b.shape[1:]
        or not (a.is_cpu and b.is_cpu and a.is_contiguous() and b.is_contiguous())
        or a.requires_grad
        or b.requires_grad
    ):
        return None
    return native.typed.get(a.dtype)


@overload
def pointer(array: NDArray[Any]) -> int: ...
@overload
def pointer(array: None) -> None: ...
def pointer(array: NDArray[Any] | None) -> int | None:
    """Where a contiguous array lies; 0 if it is empty, and None stays."""
    if array is None:
        return None
    try:
        return addressof(_first_byte(array))
    except (BufferError, TypeError, ValueError):  # nobody may write to it, or it is empty
        return torch.from_numpy(array).data_ptr()


_first_byte: Final[Callable[[Any], c_char]] = c_char.from_buffer
"""Takes half as long as to ask torch."""


def contiguous(rows: Rows | None) -> Rows | None:
    """The same numbers side by side; hold on to them while C reads them."""
    return rows if rows is None or rows.flags.c_contiguous else np.ascontiguousarray(rows)


def address(x: Tensor | None) -> int | None:
    """Where a tensor lies; None stays."""
    return None if x is None else x.data_ptr()


def alike(like: Tensor, *others: Tensor) -> bool:
    """Whether C can read others beside one: of its dtype, contiguous, on the host."""
    return all(x.dtype is like.dtype and x.is_cpu and x.is_contiguous() for x in others)


def _add(
    target: Tensor, target_rows: Rows | None, source: Tensor, source_rows: Rows | None
) -> Tensor:
    source = moved(_chosen(source, source_rows), target.device)
    if target_rows is None:
        return target.add_(source)
    if source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
        source = source.clone()  # other rows of it: torch asks for no more than this
    return target.index_add_(0, upload(target_rows, target.device), source)


def _chosen(x: Tensor, rows: Rows | None) -> Tensor:
    return x if rows is None else x.index_select(0, upload(rows, x.device))

"""Tensors of a loop that runs whole, where calls have made them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from geartrain.device import upload
from geartrain.frames.counted import consecutive, counted
from geartrain.frames.message import Gradient, IntArray, Payload, distinct
from geartrain.native.rows import Moves, add, take
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.tensors import AbstractTensors, require_alike


@final
class _Pieces:
    """Rows of one value as they were put, piece by piece, and their gradients.

    A gradient that covers a piece is kept as it came, and not written to, as others may hold it.
    """

    __slots__ = ("_dropped", "columns", "floating", "given", "owned", "scattered", "starts")

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self.starts = [0]  # and the end
        self.columns: list[list[Tensor]] = []
        self.given: list[list[Tensor | None]] = []
        self.owned: set[tuple[int, int]] = set()
        self.scattered: list[Tensor | None] = [None] * len(columns)
        self.floating = [x.is_floating_point() for x in columns]
        self._dropped = [x.new_empty((0, *x.shape[1:])) for x in columns]

    def at(self, row: int) -> int:
        """The piece that has a row."""
        if row >= self.starts[-2]:
            return len(self.columns) - 1
        return bisect_right(self.starts, row) - 1

    def give(self, k: int, j: int, g: Tensor) -> None:
        """A gradient for all rows of a piece."""
        before = self.given[k][j]
        if before is None:
            dtype = self.columns[k][j].dtype
            self.given[k][j] = g if g.dtype is dtype else g.to(dtype)
        elif (k, j) in self.owned:
            before.add_(g)
        else:
            self.given[k][j] = before + g
            self.owned.add((k, j))

    def some(self, k: int, which: Sequence[int] | None) -> list[Tensor]:
        """Columns of a piece, or these of them."""
        columns = self.columns[k]
        return columns if which is None else [columns[j] for j in which]

    def span(self, k: int) -> slice:
        """Where a piece lies among all."""
        return slice(self.starts[k], self.starts[k + 1])

    def total(self, k: int, j: int) -> Tensor | None:
        """All gradients of a piece; None: none came."""
        given, scattered = self.given[k][j], self.scattered[j]
        if scattered is None:
            return given
        more = scattered[self.span(k)]
        return more if given is None else more + given

    def drop(self, k: int) -> None:
        """Nobody asks any more for rows of a piece; what it looked like is known."""
        self.columns[k] = self._dropped
        self.given[k] = [None] * len(self._dropped)

    def own(self, k: int, j: int) -> Tensor:
        """The gradient of a piece, to be added to."""
        before = self.given[k][j]
        if before is not None and (k, j) in self.owned:
            return before
        like = self.columns[k][j]
        found = torch.zeros_like(like) if before is None else torch.empty_like(like).copy_(before)
        self.given[k][j] = found
        self.owned.add((k, j))
        return found


_FEW: Final = 8
"""Pieces that a gradient is cut for; of more, it is added to rows of one buffer."""


_JOINED: Final = 1 << 17
"""Bytes of a piece up to which pieces are put together to be read, rather than read one by one."""


@final
class TapeTensors(AbstractTensors):
    """Those of a firing that finds its way as it goes: rows stay where a call has made them.

    Nothing is copied where a call reads just the rows that the one before it has written, and
    gives its gradient to just those.
    """

    __slots__ = ("_pieces",)

    def __init__(self, numbers: Numbers) -> None:
        super().__init__(numbers)
        self._pieces: dict[int, _Pieces] = {}

    def put(
        self,
        number: int,
        name: str,
        first: int,
        columns: Sequence[Tensor],
        rows: IntArray | None = None,
    ) -> None:
        pieces = self._pieces.get(number)
        if pieces is None:
            pieces = self._pieces[number] = _Pieces(columns)
        else:
            require_alike(name, columns, pieces.columns[0])
        if rows is None:
            mine = [x if x.is_contiguous() else x.contiguous() for x in columns]
        else:
            mine = list(take(columns, rows))
        assert self.numbers.begin(number, first) == pieces.starts[-1]
        pieces.starts.append(pieces.starts[-1] + mine[0].shape[0])
        pieces.columns.append(mine)
        pieces.given.append([None] * len(mine))

    def width(self, number: int) -> int:
        return len(self._pieces[number].floating)

    def gather_places(
        self, number: int, places: IntArray, which: Sequence[int] | None = None
    ) -> Payload:
        pieces, rows, n = self._pieces[number], places, places.size
        if not n:
            return tuple(x[:0] for x in pieces.some(0, which))
        starts, first = pieces.starts, consecutive(rows)
        low = first if first >= 0 else int(rows.min())
        high = first + n - 1 if first >= 0 else int(rows.max())
        k = pieces.at(low)
        begin, end = starts[k], starts[k + 1]
        if high < end:
            columns = pieces.some(k, which)
            if first < 0 and torch.is_grad_enabled():
                return _selected(columns, rows - begin)
            if first < 0:
                return take(columns, rows - begin)
            if n == end - begin:
                return tuple(columns)
            return tuple(x[first - begin : first - begin + n] for x in columns)
        last = pieces.at(high)
        some = [pieces.some(each, which) for each in range(k, last + 1)]
        if first >= 0 and starts[last + 1] == first + n and first == begin:
            return tuple(torch.cat(each) for each in zip(*some, strict=True))
        grad = torch.is_grad_enabled()
        if grad or sum([x.nbytes for columns in some for x in columns]) < len(some) * _JOINED:
            whole = [torch.cat(each) for each in zip(*some, strict=True)]
            return _selected(whole, rows - begin) if grad else take(whole, rows - begin)
        return _from_pieces(some, np.asarray(starts[k : last + 1]), rows)

    def _accumulate(
        self, number: int, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> bool:
        pieces = self._pieces[number]
        some = [(j, g) for j, g in enumerate(gradient) if g is not None and pieces.floating[j]]
        if some and places.size:
            self._share_out(pieces, places, some, at)
        return bool(some)

    def _share_out(
        self,
        pieces: _Pieces,
        rows: IntArray,
        some: Sequence[tuple[int, Tensor]],
        at: IntArray | None,
    ) -> None:
        """Give rows their gradients, wherever they lie."""
        first = consecutive(rows) if at is None else -1
        if first >= 0 and self._share(pieces, first, rows.size, some):
            return
        starts = pieces.starts
        k = pieces.at(int(rows.min()))
        if int(rows.max()) < starts[k + 1]:
            self._add(pieces, k, rows - starts[k], some, at)
            return
        for j, g in some:
            buffer = pieces.scattered[j]
            if buffer is None:
                like = pieces.columns[0][j]
                buffer = pieces.scattered[j] = like.new_zeros((starts[-1], *like.shape[1:]))
            add(buffer, rows, g.contiguous(), at)

    def _add(
        self,
        pieces: _Pieces,
        k: int,
        rows: IntArray,
        some: Sequence[tuple[int, Tensor]],
        at: IntArray | None,
    ) -> None:
        """Give rows of one piece their gradients."""
        whole = at is None and rows.size == pieces.columns[k][0].shape[0]
        order = _inverse(rows) if whole else None
        if order is None:
            for j, g in some:
                add(pieces.own(k, j), rows, g.contiguous(), at)
            return
        given = take([g.contiguous() for _, g in some], order)
        for (j, _), g in zip(some, given, strict=True):
            pieces.give(k, j, g)

    def _share(
        self, pieces: _Pieces, first: int, n: int, some: Sequence[tuple[int, Tensor]]
    ) -> bool:
        """Give consecutive rows their gradients if they are whole pieces, and few of them."""
        starts = pieces.starts
        k, end = pieces.at(first), first + n
        if starts[k] != first:
            return False
        last = pieces.at(end - 1)
        if starts[last + 1] != end or last - k >= _FEW:
            return False
        if last == k:
            for j, g in some:
                pieces.give(k, j, g)
            return True
        for each in range(k, last + 1):
            a, b = starts[each] - first, starts[each + 1] - first
            for j, g in some:
                pieces.give(each, j, g[a:b])
        return True

    def gradient(self, number: int, first: int, n: int, which: IntArray | None) -> Gradient:
        pieces, numbers = self._pieces[number], self.numbers
        begin, end = numbers.begin(number, first), numbers.begin(number, first + n)
        if begin == end:
            columns = pieces.columns[0]
            return tuple(
                [x[:0] if f else None for x, f in zip(columns, pieces.floating, strict=True)]
            )
        k = pieces.at(begin)
        if which is not None:
            which = numbers.at(number, which + first) - begin
        found: list[Tensor | None] = []
        start, stop = pieces.starts[k], pieces.starts[k + 1]
        part = None if end - begin == stop - start else slice(begin - start, end - start)
        for given, scattered in zip(pieces.given[k], pieces.scattered, strict=True):
            g = given if given is None or part is None else given[part]
            if scattered is not None:
                more = scattered[begin:end]
                g = more if g is None else more + g
            found.append(g if g is None or which is None else take([g.contiguous()], which)[0])
        return tuple(found)

    def piece(self, number: int, row: int) -> list[Tensor]:
        """What has been put with a row of a stored value, as it lies."""
        pieces = self._pieces[number]
        return pieces.columns[pieces.at(self.numbers.begin(number, row))]

    def rooted(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors with a graph that have got gradients, and these."""
        roots, gradients = [], []
        for number, pieces in self._pieces.items():
            touched = self.touched.get(number)
            if touched is None:
                continue
            for k, columns in enumerate(pieces.columns):
                if touched.size == pieces.starts[-1] and not touched[pieces.span(k)].any():
                    continue
                for j, x in enumerate(columns):
                    g = pieces.total(k, j) if x.requires_grad else None
                    if g is not None:
                        roots.append(x)
                        gradients.append(g)
        return roots, gradients

    def answer(self, number: int, row: int, gradients: Gradient) -> None:
        """These are the gradients of what has been put with a row, in place of those so far."""
        pieces = self._pieces[number]
        k = pieces.at(self.numbers.begin(number, row))
        if all(g is None for g in gradients):
            self.touch(number)[row : row + pieces.starts[k + 1] - pieces.starts[k]] = False
        for j, (g, buffer) in enumerate(zip(gradients, pieces.scattered, strict=True)):
            pieces.given[k][j] = g
            pieces.owned.discard((k, j))
            if buffer is not None:
                buffer[pieces.span(k)].zero_()

    def let_go(self, but: Collection[int]) -> None:
        """Nobody asks any more for what is here but for gradients of some values."""
        self._pieces = {number: self._pieces[number] for number in but}

    def forget(self) -> None:
        """Nobody asks autograd for gradients of what is here."""
        for pieces in self._pieces.values():
            pieces.columns = [[x.detach() for x in columns] for columns in pieces.columns]

    def answered(self, number: int, first: int, n: int) -> None:
        pieces, numbers = self._pieces[number], self.numbers
        begin, end = numbers.begin(number, first), numbers.begin(number, first + n)
        k = pieces.at(begin)
        if begin < end and (begin, end) == (pieces.starts[k], pieces.starts[k + 1]):
            pieces.drop(k)

    def whole(self, number: int) -> Sequence[Tensor] | None:
        pieces = self._pieces.get(number)
        return pieces.columns[0] if pieces is not None and len(pieces.columns) == 1 else None

    def tensors(self) -> list[Tensor]:
        return [x for p in self._pieces.values() for columns in p.columns for x in columns]

    def gradients(self) -> list[Tensor]:
        found = [x for p in self._pieces.values() for gs in p.given for x in gs if x is not None]
        return found + [x for p in self._pieces.values() for x in p.scattered if x is not None]


def _selected(columns: Sequence[Tensor], rows: IntArray) -> Payload:
    """Rows of tensors, in a way that autograd follows."""
    where = upload(rows, columns[0].device)
    return tuple([x.index_select(0, where) for x in columns])


def _inverse(rows: IntArray) -> IntArray | None:
    """Where each of 0, 1, ... is among these; None: not all of them are."""
    found = np.full(rows.size, -1)
    found[rows] = counted(0, rows.size)
    return None if (found < 0).any() else found


def _from_pieces(pieces: Sequence[Sequence[Tensor]], starts: IntArray, rows: IntArray) -> Payload:
    """Rows of large pieces, which begin at these."""
    which = np.searchsorted(starts, rows, "right") - 1
    out = [x.new_empty((rows.size, *x.shape[1:])) for x in pieces[0]]
    moves = Moves()
    for k in distinct(which).tolist():
        here = np.flatnonzero(which == k)
        source_rows = rows[here] - starts[k]
        for target, source in zip(out, pieces[k], strict=True):
            moves.add(target, here, source, source_rows)
    moves.run()
    return tuple(out)

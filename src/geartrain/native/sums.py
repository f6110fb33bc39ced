"""Gradients of weights from what waits for a step, in one call for all of a part.

    products and sums of rows, by weight ─► sums.inc ─► the gradients, and their 2-norm

Torch would join the rows of each weight, multiply or add them, and look for what is not finite:
five calls a weight, each longer than the product of a few rows.

Rows for a table are added up by id first, as the same few come again and again (``SumsById``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from typing import Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import ProtocolError
from geartrain.native import library, pool
from geartrain.native.rows import address

MOST_WORK: Final = 1 << 22
"""Multiplications for one weight from which on torch, or oneDNN, is faster, on several threads."""
MOST_ALONE: Final = 1 << 27
"""The same on one thread. oneDNN keeps most of a megabyte for each number of rows that it meets."""


@final
@dataclass(slots=True)
class Unsummed:
    """What waits for one weight.

    Args:
        out: Its gradient, contiguous; it is written.
        add: Whether something is there already.
        lefts: ``(n, out.shape[0])`` each.
        rights: ``(n, out.shape[1])`` each, to be multiplied with those; empty: rows are added up.
    """

    out: Tensor
    add: bool
    lefts: Sequence[Tensor]
    rights: Sequence[Tensor]


def may_sum(dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype on the host are summed here."""
    native = library.current()
    return native is not None and "sum_gradients" in native.typed.get(dtype, {})


def suits(one: Unsummed, dtype: torch.dtype) -> bool:
    """Whether its rows are such as C reads, of this dtype, and few enough."""
    if not one.out.numel():  # a width of nothing says that there are no products
        return False
    for x in (one.out, *one.lefts, *one.rights):
        if x.dtype is not dtype or not x.is_contiguous() or not x.is_cpu:
            return False
    if not one.rights:
        return True
    n = sum([x.shape[0] for x in one.lefts])
    return n * one.out.numel() <= most_work()


def most_work() -> int:
    """Multiplications for one weight from which on they are left to torch."""
    return MOST_ALONE if torch.get_num_threads() == 1 else MOST_WORK


@final
class GradientPlace:
    """Where a gradient lies that C adds to.

    Args:
        out: It, of one or two dimensions where rows are added.

    Attributes:
        at: Its address.
        height, width: Its dimensions; of one that has no second one, 0.
        size: Its entries.
        plain: Whether it is such as C reads, of whatever dtype.
    """

    __slots__ = ("at", "dtype", "height", "out", "plain", "size", "width")

    def __init__(self, out: Tensor) -> None:
        self.out, self.dtype = out, out.dtype
        self.at, self.size = out.data_ptr(), out.numel()
        self.height = out.shape[0] if out.ndim else 1
        self.width = out.shape[1] if out.ndim == 2 else 0
        self.plain = self.size > 0 and out.is_contiguous() and out.is_cpu


class AbstractGradientCall(Protocol):
    """What adds to gradients from rows where they lie, when it is run."""

    def may_add(self, place: GradientPlace, n: int) -> bool:
        """Whether it is for this gradient and n rows."""

    def add(self, place: GradientPlace, pieces: Sequence[tuple[int, ...]], *, add: bool) -> None:
        """Rows, as it has them, for one weight; ``may_add`` has let it pass."""


def sum_gradients(some: Sequence[Unsummed | GradientPlace]) -> list[float]:
    """Write the gradients of all of them.

    Args:
        some: At least one; ``suits`` has let them pass. Or where gradients lie that nothing waits
            for, and that are plain.

    Returns:
        Of each the sum of the squares of its entries; not finite where one of them is not.

    Raises:
        MemoryError: There is none.
    """
    words: list[int] = []
    work = 0
    for one in some:
        if isinstance(one, GradientPlace):  # it is looked at as a row
            words += (one.at, one.size, 0, 1, 0)
            continue
        out, lefts, rights = one.out, one.lefts, one.rights
        width, height = out.shape[1] if rights else 0, out.shape[0]
        words += (out.data_ptr(), height, width, one.add, len(lefts))
        for k, left in enumerate(lefts):
            n = left.shape[0]
            words += (left.data_ptr(), rights[k].data_ptr() if rights else 0, n)
            work += n * height * max(width, 1)
    squares = (ctypes.c_double * len(some))()
    _sum(some[0].out.dtype, words, len(some), work, ctypes.addressof(squares))
    return [*squares]


def _sum(
    dtype: torch.dtype, words: Sequence[int], count: int, work: int, squares: int | None
) -> None:
    native = library.current()
    assert native is not None
    run = native.typed[dtype]["sum_gradients"][work > library.SMALL_WORK]
    if run(pack(f"{len(words)}q", *words), count, squares):
        raise MemoryError("no memory for the rows whose products are a gradient")


@final
class GradientCall:
    """Gradients of several weights from rows where they lie, in one call.

    Args:
        dtype: Of all of them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._most = dtype, most_work() if may_sum(dtype) else -1
        self._words: list[int] = []
        self._count = self._work = 0

    def may_add(self, place: GradientPlace, n: int) -> bool:
        """Whether it is for this gradient and n rows."""
        return place.plain and n * place.size <= self._most and place.dtype is self._dtype

    def add(
        self,
        place: GradientPlace,
        pieces: Sequence[tuple[int, ...]],
        *,
        add: bool,
        whole: bool = False,
    ) -> None:
        """Products of rows, or their sums, for one weight; ``may_add`` has let it pass.

        Args:
            place: Of the gradient; it is written by ``run``.
            pieces: Where rows of its height lie and, where it has a width, those of that width
                that they are multiplied with; and how many.
            add: Whether something is there already.
            whole: Each row is as the gradient, of whatever dimensions.
        """
        height, width = (place.size, 0) if whole else (place.height, place.width)
        self._words += (place.at, height, width, add, len(pieces))
        for piece in pieces:
            self._words += piece
            self._work += place.size * piece[2]
        self._count += 1

    def run(self) -> None:
        """Write them.

        Raises:
            MemoryError: There is none.
        """
        if self._count:
            _sum(self._dtype, self._words, self._count, self._work, None)


@final
class SumsById:
    """Rows ``(n, width)`` added up by an id each; ids that have not come take no room.

    Args:
        width: Of rows.
        limit: Ids are below it.
        dtype: Of rows on the host.
    """

    def __init__(self, width: int, limit: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._where = np.full(limit, -1, np.int64)
        self._of_place = np.empty(0, np.int64)
        self._sums = torch.empty((0, width), dtype=dtype)
        self._count = np.zeros(1, np.int64)
        self._places: tuple[int, int, int, int] | None = None  # where these four lie, once asked

    def __getstate__(self) -> dict[str, object]:
        """A copy lies elsewhere."""
        return self.__dict__ | {"_places": None}

    def __len__(self) -> int:
        return int(self._count[0])

    @property
    def limit(self) -> int:
        return self._where.size

    def extend(self, limit: int) -> None:
        """Ids may be as large as below this."""
        more = np.full(limit - self._where.size, -1, np.int64)
        self._where, self._places = np.concatenate([self._where, more]), None

    def add(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add rows.

        Args:
            pieces: Rows ``(n, width)`` and their ids, int64 ``(n,)``, contiguous.

        Raises:
            IndexError: An id is beyond the limit; nothing has been added.
            ProtocolError: Rows are others than their ids, or of another width or dtype.
        """
        n = 0
        for rows, ids in pieces:
            alike = rows.dtype is self._dtype and ids.dtype is torch.int64
            if not alike or rows.shape != (*ids.shape, self._width):
                raise ProtocolError(
                    f"rows of {rows.dtype} {tuple(rows.shape)} came with ids of {ids.dtype} "
                    f"{tuple(ids.shape)}; expected {self._dtype}, {self._width} wide, and int64, "
                    "one for each row"
                )
            n += ids.shape[0]
        if not n:
            return
        self._make_room(len(self) + n)
        native = library.current()
        typed = {} if native is None else native.typed.get(self._dtype, {})
        if "sum_by_id" not in typed:
            self._add_by_torch(pieces)
            return
        words: list[int] = []
        for rows, ids in pieces:
            words += (rows.data_ptr(), ids.data_ptr(), ids.shape[0])
        run = typed["sum_by_id"][n * self._width > library.SMALL]
        if self._places is None:
            where, places = self._where.ctypes.data, self._of_place.ctypes.data
            self._places = where, places, self._sums.data_ptr(), self._count.ctypes.data
        packed = pack(f"{len(words)}q", *words)
        if run(packed, len(pieces), self._width, self.limit, *self._places):
            raise IndexError(f"index out of range: an id is not below {self.limit}")

    def take(self) -> tuple[NDArray[np.int64], Tensor]:
        """The ids that came, in the order in which they did, and their sums; then there are none.

        They lie where the next ones will.
        """
        n = len(self)
        ids, sums = self._of_place[:n], self._sums[:n]
        self._where[ids] = -1
        self._count[0] = 0
        return ids, sums

    def _make_room(self, n: int) -> None:
        """For so many ids, or for all there are."""
        n, room, had = min(n, self.limit), self._sums.shape[0], len(self)
        if n <= room:
            return
        room = min(self.limit, max(n, 2 * room, _ROOM))
        places, sums = np.empty(room, np.int64), pool.made((room, self._width), self._dtype)
        places[:had], sums[:had] = self._of_place[:had], self._sums[:had]
        self._of_place, self._sums, self._places = places, sums, None

    def _add_by_torch(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        ids = np.concatenate([ids.numpy() for _, ids in pieces])
        if ids.size and not 0 <= ids.min() <= ids.max() < self.limit:
            raise IndexError(f"index out of range: an id is not below {self.limit}")
        some, first = np.unique(ids, return_index=True)
        new = some[np.argsort(first)]
        new, had = new[self._where[new] < 0], len(self)
        self._where[new] = np.arange(had, had + new.size)
        self._of_place[had : had + new.size] = new
        self._sums[had : had + new.size] = 0
        self._count[0] += new.size
        for rows, which in pieces:
            self._sums.index_add_(0, torch.from_numpy(self._where[which.numpy()]), rows)


_ROOM: Final = 64
"""So many sums at least are made room for."""


def may_multiply(sums: Tensor, table: Tensor, weight: Tensor | None) -> bool:
    """Whether ``multiply_sums`` is for these."""
    native = library.current()
    if native is None or "multiply_sums" not in native.typed.get(sums.dtype, {}):
        return False
    some = (sums, table) if weight is None else (sums, table, weight)
    return all(x.dtype is sums.dtype and x.is_contiguous() and x.is_cpu for x in some)


def multiply_sums(
    ids: Tensor,
    sums: Tensor,
    table: Tensor,
    weight: Tensor | None,
    first: int,
    padding: int,
    *,
    to_weight: Tensor | None,
    to_table: Tensor | None,
) -> None:
    """Add the gradients of a table and of a weight, from sums by row of the table.

    Args:
        ids: Which rows, int64 ``(u,)``, no two of them the same.
        sums: ``(u, out)``; with no weight ``(u, w)``, the gradients of the rows.
        table: ``(v, w)``.
        weight: ``(out, in)``, of which w columns meet the table, or None.
        first: The first of these.
        padding: The row that gets nothing, or -1.
        to_weight, to_table: What is added to, contiguous; None: nothing.

    Raises:
        IndexError: A row is beyond the table; nothing has been added.
        ProtocolError: Shapes do not fit one another.
        MemoryError: There is none.
    """
    native = library.current()
    assert native is not None
    (u, out), (v, width) = sums.shape, table.shape
    meets, into = (width, width) if weight is None else weight.shape
    fits = ids.shape == (u,) and out == meets and 0 <= first <= into - width
    if not fits or not (_is_like(to_weight, weight) and _is_like(to_table, table)):
        raise ProtocolError(
            f"{tuple(ids.shape)} ids came with sums {(u, out)} for a table {(v, width)} and "
            f"columns from {first} on of a weight {(meets, into)}; the shapes do not fit"
        )
    run = native.typed[sums.dtype]["multiply_sums"][u * out * width > library.SMALL_WORK]
    places = (address(x) for x in (ids, sums, table, weight, to_weight, to_table))
    bad = run(u, out, into, first, width, v, padding, *places)
    if bad > 0:
        raise IndexError(f"index out of range: a row is not below {v}")
    if bad:
        raise MemoryError(f"no memory for the gradients of {u} rows of a table")


def _is_like(x: Tensor | None, other: Tensor | None) -> bool:
    return x is None or (other is not None and x.shape == other.shape)

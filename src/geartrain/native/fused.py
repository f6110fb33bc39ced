"""Programs of element-wise steps and products in C: one call for all of them.

    steps, made once ─┐
    addresses ────────┴─► fused.inc ─► results, where they belong

Python and torch take a microsecond or two for each operation, and as long again to hand a tensor
over; of a firing of 30 rows, a module's operations take less than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from struct import Struct, pack
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import ProtocolError
from geartrain.native import library, pool


class Op(IntEnum):
    """What a step does; in the order of fused.inc, which says how."""

    PRODUCT = 0
    EMBED = auto()
    COPY = auto()
    ZERO = auto()
    EXPAND = auto()
    REDUCE = auto()
    SUM_OF_ROWS = auto()
    SOFTMAX = auto()
    SOFTMAX_BACK = auto()
    NORM = auto()
    NORM_BACK = auto()
    NORM_WEIGHT = auto()
    NEG = auto()
    EXP = auto()
    SIGMOID = auto()
    TANH = auto()
    RELU = auto()
    GELU = auto()
    SILU = auto()
    SQUARE = auto()
    ADD_NUMBER = auto()
    TIMES_NUMBER = auto()
    NUMBER_LESS = auto()
    ADD = auto()
    SUB = auto()
    MUL = auto()
    DIV = auto()
    TANH_BACK = auto()
    SIGMOID_BACK = auto()
    THRESHOLD_BACK = auto()
    GELU_BACK = auto()
    SILU_BACK = auto()
    MINIMUM = auto()
    MAXIMUM = auto()
    EQUAL = auto()
    LESS = auto()
    GREATER = auto()
    WHERE = auto()
    FILL = auto()
    MOST = auto()
    MOST_BACK = auto()
    LOG_SOFTMAX = auto()
    LOG_SOFTMAX_BACK = auto()
    ABS = auto()
    SIGN = auto()
    SQRT = auto()
    LOG = auto()
    POWER = auto()
    AT_LEAST = auto()
    AT_MOST = auto()
    ABOVE = auto()
    FROM = auto()
    LEAKY = auto()
    LEAKY_BACK = auto()
    ELU = auto()
    ELU_BACK = auto()
    SOFTPLUS = auto()
    SOFTPLUS_BACK = auto()
    BELOW = auto()
    UP_TO = auto()
    SAME_AS = auto()
    SINE = auto()
    COSINE = auto()
    MATRICES = auto()
    TURN = auto()
    DRAW = auto()
    WHOLE = auto()
    COMPARE = auto()
    RECKON = auto()
    PICK = auto()
    SET_INTEGERS = auto()
    MOST_AT = auto()
    GATHER = auto()
    SCATTER = auto()
    CUMULATE = auto()
    FLIP = auto()
    PIECES = auto()
    ERF = auto()
    ONE_HOT = auto()
    INTEGERS = auto()
    UNEQUAL = auto()
    NOT_ABOVE = auto()
    NOT_BELOW = auto()
    OTHER_THAN = auto()
    TRUNCATE = auto()
    TRUTHS = auto()
    OF_TRUTHS = auto()
    ENTRIES = auto()
    ENTRIES_BACK = auto()
    RANK = auto()
    RANK_UP = auto()
    DISTANCES = auto()
    FUNCTION = auto()
    FUNCTION_OF_TWO = auto()
    MOST_SO_FAR = auto()
    GELU_BOTH = auto()
    SILU_BOTH = auto()
    GATHER_INTEGERS = auto()


class Reckoning(IntEnum):
    """What ``RECKON`` does with two integers; in the order of fused.inc."""

    PLUS = 0
    MINUS = auto()
    LESS_FROM = auto()
    TIMES = auto()
    DIVIDED = auto()
    LEFT = auto()
    LOWER = auto()
    UPPER = auto()
    AND = auto()
    OR = auto()
    XOR = auto()
    WITHIN = auto()


class Elementary(IntEnum):
    """What ``FUNCTION`` and ``FUNCTION_OF_TWO`` compute; in the order of fused.inc."""

    ARC_SINE = 0
    ARC_COSINE = auto()
    ARC_TANGENT = auto()
    SINH = auto()
    COSH = auto()
    TANGENT = auto()
    AREA_SINH = auto()
    AREA_COSH = auto()
    AREA_TANH = auto()
    NEAREST = auto()
    DOWNWARDS = auto()
    UPWARDS = auto()
    LOG_OF_MORE = auto()
    LESS_ONE = auto()
    BASE_TWO = auto()
    BASE_TEN = auto()
    TWO_TO = auto()
    ERF_REST = auto()
    ANGLE = auto()
    DIAGONAL = auto()
    LEFT_OVER = auto()
    MODULO = auto()
    WHOLE_TIMES = auto()
    RAISED = auto()
    SIGNED = auto()


AT_A_TIME: Final = frozenset(
    {*(Op.SOFTMAX, Op.SOFTMAX_BACK, Op.LOG_SOFTMAX, Op.LOG_SOFTMAX_BACK), Op.NORM, Op.NORM_BACK}
)
"""Steps that take ``many`` entries of a row at a time, until there are no more."""

ADDING: Final = frozenset({Op.SUM_OF_ROWS, Op.NORM_WEIGHT})
"""Steps that add all rows to what is there: one thread takes them."""

PLACES: Final = 6
"""A step writes one and reads the others: out, a, b, c, d, e."""

LACKING: Final = (
    "index out of range: a row of a table is asked for that it lacks; where the number is below 0, "
    'as indexing counts from the end, keep="inputs" has the module called as it is'
)

ENDLESS: Final = 3
"""What C says of a step that takes no entries at a time."""
NEVER_ENDS: Final = "a step of a program takes no entries at a time, and would never end"

IN_BETWEEN: Final = 1 << 19
"""So many bytes of what is computed in between, of a thread, stay in a cache: rows are taken in
pieces of as many as have no more, as fused.inc says."""
LEAST_ROWS: Final = 16
"""Rows of a piece at least, where there are so many."""

_ENTRIES: Final = 4096
"""So many numbers of a row's width are worked at together: they stay in the nearest cache."""


@final
@dataclass(frozen=True, slots=True)
class At:
    """Where a tensor lies: row i begins at the address of ``slot``, and ``at + i * row`` entries.

    Args:
        slot: Among the addresses that a call gets; -1: nowhere.
        at, row: Entries.
        one: Whether it has one entry a row, which is read for each column.
    """

    slot: int = -1
    at: int = 0
    row: int = 0
    one: bool = False


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One step; ``many``, ``inner`` and ``number`` as fused.inc says.

    Args:
        op: What it does.
        width: Entries of a row that it writes.
        places: Where it writes, and what it reads.

    Raises:
        ProtocolError: It would take no entries at a time, for ever.
    """

    op: Op
    width: int
    places: tuple[At, ...]
    many: int = 0
    inner: int = 0
    number: float = 0.0

    def __post_init__(self) -> None:
        if self.op in AT_A_TIME and self.many < 1 <= self.width:
            raise ProtocolError(
                f"{self.op.name} of {self.width} entries takes {self.many} at a time; expected at "
                "least one: say how many, as for other steps of axes"
            )

    def packed(self) -> bytes:
        """As C has it."""
        words = [w for p in self.places for w in (p.slot, p.at, p.row, int(p.one))]
        words += [-1, 0, 0, 0] * (PLACES - len(self.places))
        head = pack("4qd", self.op, self.width, self.many, self.inner, self.number)
        return head + pack(f"{len(words)}q", *words)


@final
class Steps:
    """A program.

    Args:
        steps: In order.
        room: By slot the entries a row that it has in between, in memory of the call; 0: the call
            says where it lies. Integers take as much as two floats. What steps write to it has
            rows of so many: pieces of the rows begin where these do.
        dtype: Of all but row numbers.
    """

    def __init__(self, steps: Sequence[Step], room: Sequence[int], dtype: torch.dtype) -> None:
        self._steps, self._count = b"".join(s.packed() for s in steps), len(steps)
        self._room, self._slots = pack(f"{len(room)}q", *room), len(room)
        self._bases = Struct(f"{len(room)}q").pack
        self._dtype = dtype
        widest = max((s.width for s in steps if s.op is not Op.PRODUCT), default=1)
        self._block = max(1, _ENTRIES // max(widest, 1))
        self._products = sum(s.width * s.many for s in steps if s.op is Op.PRODUCT)
        self._work = self._products + 4 * sum(s.width for s in steps if s.op is not Op.PRODUCT)
        self._alone = any(s.op in ADDING for s in steps)
        self.words = [
            *(self._count, self._block, self._slots, int(self._alone), self._products),
            *(np.frombuffer(x or b"\0", np.uint8).ctypes.data for x in (self._steps, self._room)),
        ]
        """As calls.inc has it: sizes, then where steps and room lie."""
        self.between = sum(room)
        """Numbers a row that are computed in between."""
        self._rounded = sum(wide % 2 for wide in room)
        self._piece = max(LEAST_ROWS * self.between, IN_BETWEEN // dtype.itemsize)

    def work(self, n: int) -> int:
        """Multiplications, or what takes as long, of n rows."""
        return n * self._work

    def extent(self, n: int) -> tuple[int, int]:
        """Numbers that C writes in between, of n rows, on whatever threads it has; and ``work``."""
        asked = n * self.between
        if asked > self._piece or self._rounded:
            threads = torch.get_num_threads()
            asked = min(asked, self._piece * threads) + self._rounded * threads
        return asked, n * self._work

    def run(self, n: int, addresses: Sequence[int]) -> None:
        """Take n rows through it.

        Args:
            n: Rows; with none nothing happens.
            addresses: By slot; 0 where there is room.

        Raises:
            IndexError: A row number is beyond its table.
            ProtocolError: A step would take no entries at a time, for ever.
            MemoryError: There is none.
        """
        native = library.current()
        if native is None or not n or not self._count:
            return
        threads = 1
        if not self._alone and n * self._products >= 2 * library.MUCH_WORK:
            threads = library.threads_for(n * self._products)
        run = native.typed[self._dtype]["fused_run"][n * self._work > library.SMALL_WORK]
        bases = self._bases(*addresses)
        bad = run(n, self._count, self._steps, self._block, self._slots, bases, self._room, threads)
        if bad == ENDLESS:
            raise ProtocolError(NEVER_ENDS)
        if bad > 0:
            raise IndexError(LACKING)
        if bad:
            raise MemoryError(f"no memory for what a kernel of {n} rows computes in between")


@cache
def _drawing(width: int, p: float, number: int, dtype: torch.dtype) -> Steps:
    return Steps(
        [Step(Op.DRAW, width, (At(1, 0, width), At(0, 0, 1)), many=number, number=p)], [0, 0], dtype
    )


def drawn(seeds: Tensor, like: Tensor, p: float) -> Tensor | None:
    """Ones with probability p, else zeros, as the first draw of rows with these seeds.

    Args:
        seeds: int64 ``(n,)``.
        like: ``(n, ...)``, of which the result has shape and dtype.
        p: Within 0 and 1.

    Returns:
        None: there is no kernel for it.
    """
    if not like.is_cpu or not available(like.dtype):
        return None
    found = torch.empty(like.shape, dtype=like.dtype)
    width = found[:1].numel()
    if width:
        steps = _drawing(width, p, 0, like.dtype)
        steps.run(like.shape[0], [seeds.data_ptr(), found.data_ptr()])
    return found


def available(dtype: torch.dtype) -> bool:
    """Whether there are such programs for it."""
    native = library.current()
    return native is not None and "fused_run" in native.typed.get(dtype, {})


@final
class Packing:
    """Weights as products read them, packed in one call, and again where they lie then.

    Args:
        dtype: Of the weights.
    """

    __slots__ = ("_count", "_dtype", "_held", "_packed", "_words", "nbytes")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._count = dtype, 0
        self.nbytes = 0
        self._held: list[Tensor] = []
        self._words: list[int] = []
        self._packed = b""

    def add(self, weight: Tensor, *, turned: bool, parts: int = 1) -> int:
        """A weight more; where it will be packed.

        Args:
            weight: ``(out, in)``, contiguous, on the CPU.
            turned: Rows of ``out`` meet it, not rows of ``in``.
            parts: So many of its rows' shares are packed, one after the other.
        """
        out, into = weight.shape[0] // parts, weight.shape[1]
        depth, width = (out, into) if turned else (into, out)
        each = depth * (width + -width % _LANES)
        found = pool.made((parts * each,), weight.dtype, pool.lasting)
        at, size = found.data_ptr(), weight.itemsize
        self.nbytes += found.nbytes
        self._held += (weight, found)
        for k in range(parts):
            lies = weight.data_ptr() + k * out * into * size
            self._words += (out, into, int(turned), lies, at + k * each * size)
        self._count += parts
        self._packed = b""
        return at

    def packed(self, number: int) -> Tensor:
        """The weight that was added so, packed."""
        return self._held[2 * number + 1]

    def run(self) -> None:
        """Pack all of them, as they are now."""
        if not self._count:
            return
        if not self._packed:
            self._packed = pack(f"{len(self._words)}q", *self._words)
        native = library.current()
        assert native is not None
        native.typed[self._dtype]["fused_pack"][0](self._packed, self._count)


def packed(weight: Tensor, *, turned: bool, parts: int = 1) -> Tensor:
    """A weight as ``Packing`` packs it."""
    one = Packing(weight.dtype)
    one.add(weight, turned=turned, parts=parts)
    one.run()
    return one.packed(0)


_LANES: Final = 16
"""Of the widest vectors of any processor: what is packed takes no more room."""

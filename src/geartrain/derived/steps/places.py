"""Where the numbers of a trace lie, and the steps that read and write them.

A value is a place: so many entries of each row of some tensor. Steps entry by entry are written in
`broadcast`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast, final

import torch
from torch import Tensor, fx

from geartrain.derived.fused import MadeTable, MadeTensor
from geartrain.derived.packs import Runs
from geartrain.derived.traces.constants import MOST_CONSTANT, Constants
from geartrain.native.fused import At, Op, Reckoning, Step

aten = torch.ops.aten

RESHAPES: Final = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    torch.flatten,
)
"""Operators that leave numbers in their order: what they make lies where its source does."""


LARGEST: Final = 1 << 24
"""Integers up to it are numbers of every dtype."""
_VIEWS: Final = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class Refused(Exception):
    """There are no steps for it; the message says for what, where that is known."""


def called(x: fx.Node) -> str:
    """What an operator of a trace is called: ``convolution`` for ``aten.convolution.default``."""
    packet: Any = getattr(x.target, "overloadpacket", x.target)
    return str(packet.__name__)


@final
@dataclass(frozen=True, slots=True)
class Like:
    """What is known of a tensor in a trace.

    Args:
        tail: Its shape, without the rows if it has any.
        rows: Whether it has one row for each row, first axis.
        dtype: Of it.
        merged: Whether its first axis counts the first of the tail too: several rows for each row.
    """

    tail: tuple[int, ...]
    rows: bool
    dtype: torch.dtype
    merged: bool = False

    @property
    def width(self) -> int:
        return math.prod(self.tail)

    def beside(self, other: Like) -> tuple[int, ...]:
        """Its shape as one of the other's rank: that of what is the same for all rows is padded."""
        if self.rows:
            return self.tail
        tail = self.tail
        while len(tail) > len(other.tail) and tail[0] == 1:
            tail = tail[1:]
        return (*[1] * (len(other.tail) - len(tail)), *tail)


@final
@dataclass(frozen=True, slots=True)
class Value:
    """Entries of each row of a slot.

    Args:
        at: Where they lie.
        like: What they are read as.
        whole: Whether they are int64, as arguments are, and what is reckoned of integers. All else
            is numbers of the program's dtype (a truth is 1 or 0, a count itself).
        turned: Whether its last two axes lie the other way round there.
        which: Row numbers, if rows of a table are still to be looked up.
        of: How many rows that table has.
        ordinal: Whether they are the numbers of the rows themselves, which lie nowhere.
    """

    at: At
    like: Like
    whole: bool = False
    turned: bool = False
    which: At | None = None
    of: int = 0
    ordinal: bool = False

    def part(self, first: int, tail: tuple[int, ...]) -> Value:
        at = replace(self.at, at=self.at.at + first)
        return replace(self, at=at, like=replace(self.like, tail=tail))


@final
class Places:
    """Where the numbers of one graph lie, and the steps that have been written.

    Args:
        graph: Of the number of rows, operands, and whatever comes after these.
        operands: How many.
        dtype: Of all numbers.
        constants: What is the same in every call.

    Attributes:
        argument: Which argument a placeholder is.
        homes: Nodes with a place of their own: results, but integers, and what is kept.
        made: Tensors that a call makes.
        given, weights: What steps read of arguments, and of operands in products: which, whether
            turned, and which columns.
        tables: Slots of tables after a weight.
        outs, rows_of: Their columns and rows.
        weighed: Entries of the latter.
        fixed: Slots of constants, and these.
        values: Where numbers of nodes lie; of a node with several results, a list.
        steps, room: What has been written, and how wide each slot between steps is.
    """

    def __init__(
        self,
        graph: fx.Graph,
        operands: int,
        dtype: torch.dtype,
        constants: Constants,
    ) -> None:
        self.operands, self.dtype = operands, dtype
        self._constants = constants
        self.fixed: list[tuple[int, Tensor]] = []
        self._of_constants: dict[tuple[fx.Node, torch.dtype], At] = {}
        self._placeholders = placeholders(graph)[1:]
        self._order: list[fx.Node | None] = list(self._placeholders[operands:])
        self._columns: Mapping[fx.Node, int] = {}
        self._width = 0
        self.values: dict[fx.Node, Any] = {}
        self.room: list[int] = []
        self.steps: list[Step] = []
        self.given: list[tuple[int, int, int, torch.dtype | None]] = []
        self.weights: dict[tuple[int, bool, Runs | None], int] = {}
        self.tables: dict[MadeTable, int] = {}
        self.outs: dict[MadeTable, int] = {}
        self.rows_of: dict[MadeTable, int] = {}
        self.weighed = 0
        self.made: list[MadeTensor] = []
        self.homes: dict[fx.Node, Value] = {}
        self._other_homes: dict[fx.Node, Value] = {}
        self.argument: dict[fx.Node, int] = {}
        self._slots: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        self._owned: dict[fx.Node, int] = {}
        self._begun: dict[fx.Node, Value] = {}
        self._within: dict[fx.Node, tuple[fx.Node, int]] = {}
        self._converted: dict[tuple[At, int], At] = {}
        self._integers: dict[fx.Node, Value] = {}

    def given_as(
        self, order: Sequence[fx.Node | None], columns: Mapping[fx.Node, int], width: int
    ) -> None:
        """Which placeholders arguments are, and where in the one that is None the others lie."""
        self._order, self._columns, self._width = list(order), columns, width

    def take_arguments(self) -> None:
        """Placeholders, as they are given, have numbers."""
        self.argument = {x: k for k, x in enumerate(self._placeholders[: self.operands])}
        for k, x in enumerate(self._order):
            if x is not None:
                self.argument[x] = self.operands + k

    def slot(self, room: int) -> int:
        self.room.append(room)
        return len(self.room) - 1

    def home(self, x: fx.Node, like: Like) -> None:
        """A tensor of its own."""
        slot, other = self.slot(0), None if like.dtype.is_floating_point else like.dtype
        self.made.append(MadeTensor(slot, like.tail, like.rows, other))
        found = Value(At(slot, 0, like.width if like.rows else 0), like, other is torch.int64)
        (self.homes if other is None else self._other_homes)[x] = found

    def settle(self, x: fx.Node) -> None:
        """What has been made is where it belongs."""
        value, home = self.values.get(x), self.homes.get(x)
        if home is not None and value is not home:
            self.copy(value, home)
        home = self._other_homes.get(x)
        if home is not None and value is not home:
            if not isinstance(value, Value) or not value.like.rows:
                raise Refused
            if home.like.dtype is torch.bool:
                self.add(Op.TRUTHS, home, value.at)
            elif value.whole:
                self.copy_integers(value.at, home)
            else:
                self.add(Op.INTEGERS, home, value.at)

    def of_argument(self, k: int, width: int, dtype: torch.dtype | None = None) -> int:
        slot = self._slots.get(k)
        if slot is None:
            slot = self._slots[k] = self.slot(0)
            self.given.append((k, slot, width, dtype))
        return slot

    def is_constant(self, x: fx.Node) -> bool:
        """Whether a node is the same in every call, whatever rows come."""
        return self._constants.has(x)

    def constant(self, x: fx.Node, dtype: torch.dtype | None = None) -> tuple[At, Tensor]:
        """Where a constant lies, with numbers of that dtype; None: its own."""
        if not self.is_constant(x) or like_of(x).width > MOST_CONSTANT:
            raise Refused
        found = self._constants.of(x)
        dtype = dtype or found.dtype
        if not found.is_cpu or not found.numel():
            raise Refused
        if found.dtype is torch.int64 and dtype is not torch.int64:
            if int(found.abs().max()) > LARGEST:
                raise Refused
        elif found.dtype is not dtype and found.dtype is not torch.bool:
            raise Refused
        own = found.to(dtype).contiguous()
        if self._constants.alien and own.data_ptr() != found.data_ptr():
            raise Refused
        key = x, dtype
        if key not in self._of_constants:
            self._of_constants[key] = self.held_for(own)
        return self._of_constants[key], own

    @property
    def alien(self) -> bool:
        """Whether constants may be somebody's, who may write into them."""
        return self._constants.alien

    def held_for(self, own: Tensor) -> At:
        """Where a tensor lies that steps keep."""
        self.fixed.append((self.slot(0), own))
        return At(self.fixed[-1][0])

    def seeds(self) -> At:
        """One for each row, which come behind all arguments."""
        return At(self.of_argument(self.operands + len(self._order), 1, torch.int64), 0, 1)

    def value(self, x: Any) -> Value:
        """Where the numbers of a node lie, in order; integers of an argument become numbers."""
        found = self.held(x)
        if not found.whole:
            return found
        if self.is_constant(x):
            return Value(self.constant(x, self.dtype)[0], found.like)
        key = found.at, found.like.width
        if key not in self._converted:
            out = self.spare(found.like)
            self.add(Op.WHOLE, out, found.at)
            self._converted[key] = out.at
        return Value(self._converted[key], found.like)

    def integers(self, x: Any) -> Value:
        """Where the integers of a node lie as such; a truth or a count becomes one."""
        found = self.held(x)
        if found.whole:
            return found
        if not found.like.rows or like_of(x).dtype not in (torch.int64, torch.bool):
            raise Refused
        if x not in self._integers:
            self._integers[x] = self.spare_integers(found.like)
            self.add(Op.INTEGERS, self._integers[x], found.at)
        return replace(self._integers[x], like=found.like)

    def held(self, x: Any) -> Value:
        """Where what a node holds lies, in order, which may be integers of an argument."""
        found = self.raw(x)
        if found.ordinal:
            raise Refused
        if found.turned or found.which is not None:
            found = self.values[x] = self._in_order(found)
        return found

    def _in_order(self, value: Value, home: Value | None = None) -> Value:
        """What is still to be looked up or turned, done."""
        like = value.like
        if value.which is not None:
            out = home if home is not None and not value.turned else self.spare(like)
            self.add(Op.EMBED, out, value.which, value.at, many=value.of)
            value = replace(value, at=out.at, which=None)
        if value.turned:
            out, (inner, many) = home or self.spare(like), like.tail[-2:]
            self.add(Op.TURN, out, value.at, number=1, many=many, inner=inner)
            value = replace(value, at=out.at, turned=False)
        return value

    def raw(self, x: Any) -> Value:
        """Where the numbers of a node lie, as they lie there."""
        if not isinstance(x, fx.Node):
            raise Refused
        found = self.values.get(x)
        if found is not None:
            if not isinstance(found, Value):
                raise Refused
            return found
        like = like_of(x)
        if x in self._columns:
            k = self.operands + self._order.index(None)
            at = At(self.of_argument(k, self._width), self._columns[x], self._width)
            found = Value(at, like)
        elif x in self.argument:
            found = self._argument(self.argument[x], like)
        elif self.is_constant(x):
            whole = like.dtype is torch.int64
            found = Value(self.constant(x, None if whole else self.dtype)[0], like, whole)
        else:
            raise Refused
        self.values[x] = found
        return found

    def _argument(self, k: int, like: Like) -> Value:
        """One as it is given; truths become numbers."""
        own = like.dtype is self.dtype
        of_rows = like.rows and k >= self.operands
        if not own and not (of_rows and like.dtype in (torch.int64, torch.bool)):
            raise Refused
        width = like.width if like.rows else 0
        at = At(self.of_argument(k, width, None if own else like.dtype), 0, width)
        if like.dtype is not torch.bool:
            return Value(at, like, not own)
        found = self.spare(like)
        self.add(Op.OF_TRUTHS, found, at)
        return found

    def weight(self, x: Any, *, turned: bool, columns: Runs | None = None) -> tuple[At, int, int]:
        """What a product reads of an operand, or of these columns of it, its depth and width."""
        own = weight_of(x)
        if own is None or own not in self._placeholders[: self.operands]:
            raise Refused
        like, k = like_of(x), self.argument[own]
        if len(like.tail) != 2 or like.dtype is not self.dtype:
            raise Refused
        out, into = like.tail
        if columns == ((0, into),):
            columns = None
        if columns is not None:
            into = sum(end - first for first, end in columns)
        slot = self.weights.get((k, turned, columns))
        if slot is None:
            slot = self.weights[k, turned, columns] = self.slot(0)
            self.weighed += out * into
        return At(slot), (out if turned else into), (into if turned else out)

    def table(self, weight: Any, table: Any, columns: tuple[int, int], biases: Sequence[Any]) -> At:
        """Where rows of a table lie after these columns of a weight."""
        likes = [like_of(x) for x in (weight, table, *biases)]
        if any(like.rows or like.dtype is not self.dtype for like in likes):
            raise Refused
        (out, _), (_, width) = likes[0].tail, likes[1].tail
        if columns[1] - columns[0] != width or any(like.tail != (out,) for like in likes[2:]):
            raise Refused
        numbers = [self.argument[x] for x in (weight, table, *biases)]
        made = MadeTable(numbers[0], numbers[1], columns, tuple(numbers[2:]))
        if made not in self.tables:
            self.tables[made] = self.slot(0)
            self.outs[made], self.rows_of[made] = out, likes[1].tail[0]
        return At(self.tables[made])

    def out(self, x: fx.Node, like: Like | None = None) -> Value:
        """Where a node's numbers are to be written."""
        within = self._within.get(x)
        if within is not None:
            whole, at = within
            if whole not in self._begun:
                self._begun[whole] = self.out(whole)
            return self._begun[whole].part(at, like_of(x).tail)
        home = self._begun.get(x) or self.homes.get(x)
        if home is None:
            like = like or like_of(x)
            if not like.rows or not like.width:
                raise Refused
            free = self._free.get(like.width)
            slot = free.pop() if free else self.slot(like.width)
            self._owned[x] = slot
            home = Value(At(slot, 0, like.width), like)
        return home

    def out_of_integers(self, x: fx.Node) -> Value:
        """Where a node's integers are to be written."""
        return self._other_homes.get(x) or self.spare_integers(like_of(x))

    def lay_within(self, x: fx.Node, whole: fx.Node, at: int) -> None:
        """What is written to x goes where it lies in another, from there on."""
        self._within[x] = whole, at

    def release(self, x: fx.Node) -> None:
        """Nobody reads this node any more."""
        slot = self._owned.pop(x, None)
        if slot is not None:
            self._free.setdefault(self.room[slot], []).append(slot)

    def add(
        self,
        op: Op,
        out: Value,
        *read: At,
        number: float = 0.0,
        width: int = 0,
        many: int = 0,
        inner: int = 0,
    ) -> None:
        step = Step(op, width or out.like.width, (out.at, *read), many, inner, number)
        self.steps.append(step)

    def copy(self, value: Any, home: Value) -> None:
        if not isinstance(value, Value) or not (value.like.rows or not home.like.rows):
            raise Refused
        if value.whole:
            raise Refused
        if value.turned or value.which is not None:
            self._in_order(value, home)
        elif value.at != home.at:
            self.add(Op.COPY, home, value.at)

    def copy_integers(self, at: At, home: Value) -> None:
        self.add(Op.RECKON, home, at, inner=Reckoning.PLUS)

    def spare_integers(self, like: Like) -> Value:
        """Room for integers, which nobody else gets: what has been made of them stays theirs."""
        if not like.rows or not like.width:
            raise Refused
        slot = self.slot(like.width * torch.int64.itemsize // self.dtype.itemsize)
        return Value(At(slot, 0, like.width), replace(like, dtype=torch.int64), whole=True)

    def spare(self, like: Like) -> Value:
        return Value(At(self.slot(like.width), 0, like.width), like)

    def items(self, x: fx.Node) -> dict[int, fx.Node]:
        """The readers of a tuple's items."""
        return {k: y for y in x.users if isinstance(k := y.args[1], int)}


def like_of(x: fx.Node) -> Like:
    found = x.meta.get("like")
    if not isinstance(found, Like):
        aside = x.meta.get("aside")
        raise Refused(f"rows of {called(x)} are not along its first axis" if aside else "")
    return found


def weight_of(x: Any) -> fx.Node | None:
    """What x is: itself, or a weight ``(out, ...)`` that it sees as a matrix ``(out, in)``."""
    while isinstance(x, fx.Node) and x.target in _VIEWS:
        source = cast("fx.Node", x.args[0])
        if like_of(source).rows or like_of(source).tail[:1] != like_of(x).tail[:1]:
            return None
        x = source
    return x if isinstance(x, fx.Node) else None


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [x for x in graph.nodes if x.op == "placeholder"]

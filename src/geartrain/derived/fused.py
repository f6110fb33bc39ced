"""The two programs of a trace in C: what a call hands over, and what it makes.

    operands ─► packed, once a firing ─┐
    inputs, residuals, tangents ───────┴─► addresses ─► steps ─► results: own tensors, and one block
                                                                 of all that is kept beside them

``steps`` says how a program becomes steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from geartrain.derived.packs import OperandPlaces, Runs, Seen, columns_of
from geartrain.derived.terms import Term
from geartrain.errors import ProtocolError
from geartrain.native import pool
from geartrain.native.calls import RoutineForm
from geartrain.native.fused import At, Op, Step, Steps, packed
from geartrain.native.steady import firing
from geartrain.nodes.products import matrix


@final
@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that a call makes.

    Args:
        slot: Its address.
        tail: Its shape, after the rows.
        rows: Whether it has rows; else rows are added up in it.
        dtype: Of it; None: what the program computes with.
    """

    slot: int
    tail: tuple[int, ...]
    rows: bool
    dtype: torch.dtype | None = None


@final
@dataclass(frozen=True, slots=True)
class MadeTable:
    """A table after a weight: ``table @ weight[:, columns].T``, and biases added to each row.

    Args:
        weight, table, biases: Which operands.
        columns: First and end.
    """

    weight: int
    table: int
    columns: tuple[int, int]
    biases: tuple[int, ...]

    def of(self, operands: Sequence[Tensor], lone: Steps) -> Tensor:
        """Rows ``(v, out)``.

        Args:
            operands: As they are now.
            lone: The product alone.
        """
        weight, table = operands[self.weight], operands[self.table].contiguous()
        met = packed(columns_of(weight, (self.columns,)), turned=False)
        found = pool.made((table.shape[0], weight.shape[0]), table.dtype)
        bias = None
        if self.biases:
            bias = operands[self.biases[0]].contiguous()
            for k in self.biases[1:]:
                bias = bias + operands[k]
        at = (table.data_ptr(), met.data_ptr(), 0 if bias is None else bias.data_ptr())
        lone.run(table.shape[0], [*at, found.data_ptr()])
        return found

    def steps(self, out: int, dtype: torch.dtype) -> Steps:
        """The product for ``of``."""
        depth = self.columns[1] - self.columns[0]
        bias = At(2) if self.biases else At()
        places = At(3, 0, out), At(0, 0, depth), At(1), bias
        return Steps([Step(Op.PRODUCT, out, places, many=depth)], [0] * 4, dtype)


_FEW_BYTES: Final = 1 << 22
"""So much that is packed, at most, is kept where no firing is told of: of larger weights it is as
much memory again, and their products take longer than to pack them."""


@final
class PackedWeights:
    """Where the weights of one function are, packed for products, for the length of a firing; where
    none is told of, until torch counts a write to them.

    Tables that have met a weight are made for it too, where so many rows come that it is worth it:
    as many as came in the firing before, or have come in this one.
    """

    __slots__ = ("_before", "_firing", "_held", "_looked", "_looks", "_rows")

    def __init__(self) -> None:
        self._firing = 0
        self._held: dict[Routine, OperandPlaces] = {}
        self._looked, self._looks = 0, Seen()  # in which firing, at what
        self._rows = self._before = 0

    def begin(self) -> None:
        """A fit begins: no rows have come yet."""
        self._firing = self._rows = self._before = 0

    def of(self, routine: Routine, operands: Sequence[Tensor]) -> OperandPlaces:
        """Of all operands; it must live as long as anybody reads there."""
        number, found = firing.number, self._held.get(routine)
        if found is not None and number and found.firing == number:
            return found
        if found is not None and not number and found.stands(operands):
            return found
        if not number or number != self._looked:
            self._looked, self._looks = number, {}
        if found is not None and found.renew(operands, self._looks):
            found.firing = number
            return found
        found = routine.places(operands)
        if number or found.nbytes <= _FEW_BYTES:
            found.firing, self._held[routine] = number, found
        return found

    def expects(self, n: int) -> int:
        """How many rows meet tables that are made now, if n more come."""
        number = firing.number
        if not number:
            return n
        if number != self._firing:
            self._firing, self._before, self._rows = number, self._rows, 0
        self._rows += n
        return max(self._rows, self._before)


@final
class Routine:
    """One program as steps, and where a call finds and puts its tensors.

    Args:
        steps: Of it.
        slots: How many addresses it has.
        dtype: Of what it computes with.
        operands: Those that are read as they are, and their slots.
        weights: Operand, whether turned, which columns, slot: what products read packed.
        given: Argument, slot, entries a row, and their dtype; None: ``dtype``.
        made: What a call makes.
        results: By result an argument (from 0), or the number of what is made (from -1, downwards).
        tables: Tables after a weight, how wide, and their slots.
        fixed: Slots of tensors that are the same in every call, and these.
        block: The number of what is made for residuals that lie side by side; None: there is none.

    Attributes:
        form: As many calls in one want it.
        block: Likewise.
    """

    def __init__(
        self,
        steps: Steps,
        slots: int,
        dtype: torch.dtype,
        operands: Sequence[tuple[int, int]],
        weights: Sequence[tuple[int, bool, Runs | None, int]],
        given: Sequence[tuple[int, int, int, torch.dtype | None]],
        made: Sequence[MadeTensor],
        results: Sequence[int],
        tables: Sequence[tuple[MadeTable, int, int]] = (),
        fixed: Sequence[tuple[int, Tensor]] = (),
        block: int | None = None,
    ) -> None:
        self.block = block
        self._steps, self._slots, self._dtype = steps, slots, dtype
        self._operands, self._weights, self._fixed = operands, weights, fixed
        self._given = [(k, slot, width, its or dtype) for k, slot, width, its in given]
        self._made, self._results = made, results
        self._tables = [(one, slot, one.steps(out, dtype)) for one, out, slot in tables]
        met = [k for one, *_ in tables for k in (one.weight, one.table, *one.biases)]
        self._read = [*(k for k, _ in operands), *(k for k, *_ in weights), *met]
        self._like = torch.empty(0, dtype=dtype, device="cpu")
        self._sizes = [(one.rows, one.slot, one.tail, one.dtype or dtype) for one in made]
        self._looks = slots, dtype, tuple(self._given), tuple(made), tuple(results)
        whats = [(one.slot, one.tail, one.rows, one.dtype or dtype) for one in made]
        self.form = RoutineForm(steps, slots, self._given, whats, results)

    def alike(self, other: Routine) -> bool:
        """Whether both are given, and make, the same."""
        return self is other or self._looks == other._looks

    def beside_others(self, operands: int) -> bool:
        """Whether no result is an operand: those of rows may lie beside those of other routines."""
        return all(k < 0 or k >= operands for k in self._results)

    @property
    def in_rows(self) -> tuple[bool, ...]:
        """Of each result, whether it has a row for each row; else rows are added up in it."""
        return tuple([k >= 0 or self._made[~k].rows for k in self._results])

    def places(self, operands: Sequence[Tensor]) -> OperandPlaces:
        """Those of operands.

        Raises:
            ProtocolError: A weight has another dtype than when it was traced.
        """
        found, whole = OperandPlaces(self._slots, self._dtype), not self._tables
        for k in self._read:
            if operands[k].dtype is not self._dtype:
                raise ProtocolError(f"a weight is {operands[k].dtype}, and was {self._dtype}")
        for k, slot in self._operands:
            found.add(slot, operands[k].contiguous())
        for k, turned, runs, slot in self._weights:
            found.add_packed(slot, k, matrix(operands[k]), runs, turned=turned)
        for slot, x in self._fixed:
            found.add(slot, x)
        found.pack()
        for table, slot, steps in self._tables:
            found.add(slot, table.of(operands, steps))
        if whole and all(operands[k].is_contiguous() for k in self._read):
            found.last(operands, self._read)
        found.note(operands, self._read)
        return found

    @staticmethod
    def _refusal(x: Tensor, n: int, width: int, dtype: torch.dtype) -> ProtocolError:
        return ProtocolError(
            f"{x.dtype} {tuple(x.shape)} came where {dtype} with {n} rows of {width} was expected"
        )

    def residuals(self, outputs: int) -> int:
        """How many results there are beside so many outputs."""
        return len(self._results) - outputs

    def hands_over(self, argument: int) -> bool:
        """Whether an argument is a result too."""
        return argument in self._results

    def __call__(
        self,
        n: int,
        arguments: Sequence[Tensor],
        weights: PackedWeights,
        room: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Results, given operands and then what has n rows.

        Args:
            n: Rows.
            arguments: All of them.
            weights: Where they are.
            room: Where the block is to be written; None: somewhere new.

        Raises:
            ProtocolError: An argument has another dtype, or another width, than those of the trace.
        """
        places = weights.of(self, arguments)
        addresses = places.addresses.copy()
        copies = []
        for k, slot, width, dtype in self._given:
            x = arguments[k]
            if x.dtype is not dtype or x.numel() != n * width:
                raise self._refusal(x, n, width, dtype)
            if not x.is_contiguous():
                x = x.contiguous()
                copies.append(x)
            addresses[slot] = x.data_ptr()
        made = []
        zeros = self._like.new_zeros
        for k, (rows, slot, tail, dtype) in enumerate(self._sizes):
            if room is not None and k == self.block and room.shape == (n, *tail):
                x = room
            else:
                x = pool.made((n, *tail), dtype) if rows else zeros(tail)
            addresses[slot] = x.data_ptr()
            made.append(x)
        self._steps.run(n, addresses)
        return tuple([arguments[k] if k >= 0 else made[~k] for k in self._results])


def run_together(
    routines: Sequence[Routine],
    sizes: Sequence[int],
    operands: Sequence[Sequence[Tensor]],
    rows: Sequence[Tensor],
    weights: Sequence[PackedWeights],
) -> list[Sequence[Tensor]]:
    """Results of routines that are alike.

    Args:
        routines: What they do.
        sizes: Rows of each.
        operands: Of each.
        rows: The other arguments, of all rows.
        weights: Of each.

    Returns:
        Of each result: a tensor of all rows, side by side; or those of each routine, where rows are
        added up.

    Raises:
        ProtocolError: As of a call.
    """
    first, n, before = routines[0], sum(sizes), len(operands[0])
    places, copies = [], []
    for k, slot, width, dtype in first._given:
        x = rows[k - before]
        if x.dtype is not dtype or x.numel() != n * width:
            raise first._refusal(x, n, width, dtype)
        if not x.is_contiguous():
            x = x.contiguous()
            copies.append(x)
        places.append((slot, x.data_ptr(), width * x.itemsize))
    made: list[Sequence[Tensor]] = []
    for has_rows, slot, tail, dtype in first._sizes:
        if has_rows:
            x = pool.made((n, *tail), dtype)
            places.append((slot, x.data_ptr(), x.stride(0) * x.itemsize))
            made.append([x])
        else:
            whole = first._like.new_zeros((len(routines), *tail))
            made.append(whole.unbind())
    start = 0
    for number, (routine, size, own, packs) in enumerate(
        zip(routines, sizes, operands, weights, strict=True)
    ):
        own_places = packs.of(routine, own)  # live as long as the routine runs
        addresses = own_places.addresses.copy()
        for slot, at, width in places:
            addresses[slot] = at + start * width
        for one, theirs in zip(first._made, made, strict=True):
            if not one.rows:
                addresses[one.slot] = theirs[number].data_ptr()
        routine._steps.run(size, addresses)
        start += size
    return [[rows[k - before]] if k >= 0 else made[~k] for k in first._results]


@final
@dataclass(frozen=True, slots=True)
class Pair:
    """Both programs of a trace: as ``TraceSplit``, but that residuals lie side by side.

    Args:
        forward: Outputs, then residuals.
        backward: Of those residuals and tangents.
        dtype: Of what they compute with.
        terms: What the operands get of the latter.
        folded: ``forward`` with tables that have met weights; None: there are none.
        worth: Rows from which on that takes less.
        draws: Whether either forward takes seeds, one for each row, behind its other arguments.
    """

    forward: Routine
    backward: Routine
    dtype: torch.dtype
    terms: tuple[Term, ...]
    folded: Routine | None = None
    worth: int = 0
    draws: bool = False

    def forward_of(self, rows: int) -> Routine:
        """The one that takes less.

        Args:
            rows: That are expected while weights are the same.
        """
        return self.forward if self.folded is None or rows < self.worth else self.folded

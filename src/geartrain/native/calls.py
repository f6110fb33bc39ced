"""Derived programs as a loop calls them: many calls in one, from and to buffers of rows.

    CallForm    a program as calls.inc wants it: where a call finds and puts its tensors

``nodes/loop/native.py`` makes the tables that C reads; their words are named here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.native import library
from geartrain.native.fused import Steps
from geartrain.native.ragged import RaggedSteps

IntArray: TypeAlias = NDArray[np.int64]

Home: TypeAlias = tuple[Literal["operand", "input", "seeds", "own", "output"], int]
"""Where a tensor of a program lies; own: it makes it for itself."""
SEEDS: Final[Home] = "seeds", 0

ROUTINE_WORDS: Final = 11
MODULE_WORDS: Final = 2 * ROUTINE_WORDS + 7
READ_WORDS: Final = 17
CALL_WORDS: Final = 5
VALUE_WORDS: Final = 3
SEVERAL_WORDS: Final = 8
READ_LIMIT, READ_FROM, READ_INTO, READ_BACK = 8, 9, 13, 16
"""Words of a read that are written anew."""


class RowsOf(IntEnum):
    """Whose rows an address is of; in the order of calls.inc."""

    FIXED = 0
    OF_MODULE = 1
    OF_VALUE = 2
    OF_UPDATE = 3
    OF_CALL = 4


@final
@dataclass(frozen=True, slots=True, eq=False)
class RoutineForm:
    """One program of a module.

    Args:
        steps: In C.
        slots: Addresses that a call has.
        given: Arguments that it reads: their number, slot, entries a row, and dtype.
        made: What it makes: slot, shape after the rows, whether it has rows, and dtype.
        results: By result an argument (from 0), or what is made (from -1, downwards).
    """

    steps: Steps
    slots: int
    given: Sequence[tuple[int, int, int, torch.dtype]]
    made: Sequence[tuple[int, tuple[int, ...], bool, torch.dtype]]
    results: Sequence[int]


@final
@dataclass(frozen=True, slots=True)
class RowsLearnt:
    """A weight whose gradient is a product of rows, or their sum.

    Args:
        into: The sum of gradients that has it.
        slot: What is added to there, of the weight, or of what stands for it.
        columns: Those of it that the product has; None: all.
        left: Which result of the backward the rows are.
        right: That which they are multiplied with; None: they are added up.
        whole: Whether the backward has added them up: the left is one row, the gradient.
    """

    into: Any
    slot: Any
    columns: tuple[tuple[int, int], ...] | None
    left: int
    right: int | None
    whole: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Entries of a row on the left, and on the right; 0: the weight has another shape."""
        height, *rest = self.slot.parameter.shape or (0,)
        if self.right is None:
            return (0 if rest else height), 0
        if not rest:
            return 0, 0
        columns = self.columns
        return height, prod(rest) if columns is None else sum([end - k for k, end in columns])


@final
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CallForm:
    """Both programs of a module.

    Args:
        forward: Of operands and inputs to outputs and residuals.
        backward: Of operands, residuals and tangents to gradients of inputs, and what weights get.
        operands, inputs: How many.
        outputs: Each with no row.
        tangents: The output of each.
        gradients: For each input that has one, the tangents that it comes from; in the order of
            the results of the backward.
        dtype: Of what they compute with.
        addresses: Gives those of the operands, by slot: of forward if it is told so, or backward.
        learn: Adds what the backward has found for the weights: its results, the outputs that have
            got a gradient as bits, how many rows, the sum, and whether what ``rows_learnt`` gives
            is left out.
        rows_learnt: Gives what of that is but products and sums of rows, or has been added up, and
            the results of the backward that the rest is made of: of these bits, and the sum.
        split: Whether it is to be told of each update by itself, where rows are of several.
        draws: Whether the forward takes seeds, an int64 for each row, behind the inputs.

    Attributes:
        copies: Outputs that are inputs as they came: output, input.
        lies: By input that an output is as it came, that output: it is read there.
        homes: Of each result of the forward where it lies.
        possible: Whether C can call it so.
    """

    forward: RoutineForm
    backward: RoutineForm
    operands: int
    inputs: int
    outputs: tuple[Tensor, ...]
    tangents: tuple[int, ...]
    gradients: Mapping[int, frozenset[int]]
    dtype: torch.dtype
    addresses: Callable[[bool], list[int]]
    learn: Callable[[Sequence[Any], int, int, Any, bool], None]
    rows_learnt: Callable[[int, Any], tuple[Sequence[RowsLearnt], Collection[int]]]
    split: bool
    draws: bool
    copies: list[tuple[int, int]] = field(init=False)
    lies: Mapping[int, int] = field(init=False)
    homes: list[Home] = field(init=False)
    possible: bool = field(init=False)

    def __post_init__(self) -> None:
        whose: dict[int, int] = {}
        for j, k in enumerate(self.forward.results[: len(self.outputs)]):
            whose.setdefault(~k, j)
        object.__setattr__(self, "homes", [self._home(k, whose) for k in self.forward.results])
        copies = [(j, number) for j, (how, number) in enumerate(self._of_outputs) if how == "input"]
        object.__setattr__(self, "copies", copies)
        object.__setattr__(self, "lies", {i: j for j, i in reversed(copies)})
        n = len(self.outputs)
        self.homes[n:] = [
            self.of_input(k) if how == "input" else (how, k) for how, k in self.residuals
        ]
        object.__setattr__(self, "possible", self._is_possible())

    def _home(self, k: int, whose: Mapping[int, int]) -> Home:
        if k >= 0:
            return ("operand", k) if k < self.operands else ("input", k - self.operands)
        return ("output", whose[~k]) if ~k in whose else ("own", ~k)

    def of_input(self, i: int) -> Home:
        """Where an input lies."""
        return ("output", self.lies[i]) if i in self.lies else ("input", i)

    @property
    def _of_outputs(self) -> Sequence[Home]:
        return self.homes[: len(self.outputs)]

    @property
    def residuals(self) -> Sequence[Home]:
        """Where each lies."""
        return self.homes[len(self.outputs) :]

    def alike(self, other: CallForm) -> bool:
        """Whether C calls both in the same way, of whatever weights they are."""
        return self is other or (
            self.forward is other.forward
            and self.backward is other.backward
            and (self.operands, self.inputs, self.tangents, self.dtype, self.split)
            == (other.operands, other.inputs, other.tangents, other.dtype, other.split)
            and self.gradients == other.gradients
        )

    def _is_possible(self) -> bool:
        made = all(rows for _, _, rows, _ in self.forward.made)
        mine = all(
            home == ("output", j) or home[0] == "input" for j, home in enumerate(self._of_outputs)
        )
        return made and mine and all(how != "operand" for how, _ in self.residuals)


Where: TypeAlias = Literal[
    "input",
    "own",
    "output",
    "tangent",
    "made",
    "ints",
    "float",
    "held",
    "sums",
    "ends",
    "cells",
]
Lies: TypeAlias = tuple[Where, int]
"""Where a tensor of a program over rows of several kinds lies, and its number there."""
ROWS: Final = 0
MEMBERS: Final = 1
"""Kinds of what has rows: those of the module, and the members of what each of them reads."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class SeveralRoutine:
    """One program over rows of several kinds.

    Args:
        steps: In C.
        slots: Where the tensor of each slot lies, but those in between and operands.
    """

    steps: RaggedSteps
    slots: Mapping[int, Lies]


class AbstractSeveralFound(ABC):
    """What the way back of some calls of such a program has found."""

    @abstractmethod
    def rows_of(self, lies: Lies) -> Tensor:
        """Those rows of a tensor that have got a gradient."""

    @abstractmethod
    def count(self, kind: int) -> int:
        """How many rows of a kind there are."""

    @abstractmethod
    def owners(self, kind: int) -> IntArray:
        """Of each row of a kind, one of the rows that updates are told for."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class SeveralForm:
    """The programs of a module that looks inside bundles, or reads a memory.

    Args:
        forward: Of inputs to outputs and what is kept.
        backward: Of that and tangents to gradients of inputs, of a memory, and what weights get.
        without: The same but for the gradients of a memory.
        inside: Whether its inputs are members of bundles; else they are rows that read one each.
        answers: Whether its outputs are members of the same bundles; else they are rows.
        inputs: How many.
        outputs: Each with no row, or the number of the input that it is, as that came.
        tangents: The output of each.
        gradients: For each input that has one, the tangents that it comes from, and where it lies.
        own, made: Kind, and entries a row, of what the forward and the way back make.
        ints: The same of row numbers that are counted.
        numbering: Inputs that they are counted of.
        floats: Those that are read as floats.
        dtype: Of all but these.
        addresses: Gives those of the operands, by slot of a routine.
        counted: Row numbers, of inputs, and of the lengths of what they read.
        learn: Adds what has been found for the weights: that, the outputs that have got a gradient
            as bits, and the sum.
        touched: By tensor of the memory, whether it gets a gradient, given these bits.
    """

    forward: SeveralRoutine
    backward: SeveralRoutine
    without: SeveralRoutine
    inside: bool
    answers: bool
    inputs: int
    outputs: tuple[Tensor | int, ...]
    tangents: tuple[int, ...]
    gradients: Mapping[int, tuple[frozenset[int], Lies]]
    own: Sequence[tuple[int, int]]
    made: Sequence[tuple[int, int]]
    ints: Sequence[tuple[int, int]]
    numbering: frozenset[int]
    floats: Sequence[int]
    dtype: torch.dtype
    addresses: Callable[[SeveralRoutine], list[int]]
    counted: Callable[[Sequence[Tensor], Tensor], Sequence[Tensor]]
    learn: Callable[[AbstractSeveralFound, int, Any], None]
    touched: Callable[[int], Sequence[bool]]


def copying(likes: Sequence[Tensor], dtype: torch.dtype) -> CallForm:
    """Rows as they are, from buffers to others.

    Args:
        likes: Tensors like those of the payload.
        dtype: Of those that get gradients.
    """
    n = len(likes)
    floating = [j for j, x in enumerate(likes) if x.is_floating_point()]
    nothing, nowhere = Steps([], [], dtype), list[int]()
    return CallForm(
        RoutineForm(nothing, 0, [], [], range(n)),
        RoutineForm(nothing, 0, [], [], range(len(floating))),
        0,
        n,
        tuple([x[:0] for x in likes]),
        tuple(floating),
        {j: frozenset((k,)) for k, j in enumerate(floating)},
        dtype,
        lambda _: nowhere,
        lambda *_: None,
        lambda *_: ((), ()),
        False,
        False,
    )


def available(dtype: torch.dtype) -> bool:
    """Whether C makes many calls in one, of programs of this dtype."""
    native = library.current()
    return native is not None and "calls_forward" in native.typed.get(dtype, {})


def forward(
    dtype: torch.dtype, count: int, calls: int, modules: int, room: int = 0, *, much: bool
) -> int:
    """Make calls, in order: see calls.inc.

    Args:
        dtype: Of the programs.
        count: Calls.
        calls, modules: Where the tables lie.
        room: Where memory lies for what any of them computes in between; 0: each asks for its own.
        much: Whether it is so much work that the interpreter lock is given back.

    Returns:
        0; else four times the number of the call that failed, and why.
    """
    native = library.current()
    assert native is not None
    run = native.typed[dtype]["calls_forward"][much]
    return run(count, calls, modules, torch.get_num_threads(), library.MUCH_WORK, room)


def backward(
    dtype: torch.dtype,
    count: int,
    calls: int,
    modules: int,
    values: int,
    room: int = 0,
    *,
    much: bool,
) -> int:
    """Their way back, the last one first; arguments and result as for ``forward``.

    Args:
        dtype, count, calls, modules, room, much: As for ``forward``.
        values: Where the table of values lies.
    """
    native = library.current()
    assert native is not None
    run = native.typed[dtype]["calls_backward"][much]
    return run(count, calls, modules, values, torch.get_num_threads(), library.MUCH_WORK, room)

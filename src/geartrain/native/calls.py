"""Derived programs as a loop calls them: many calls in one, from and to buffers of rows.

    CallForm    a program as calls.inc wants it: where a call finds and puts its tensors
    pointer     where a numpy array lies

``nodes/loop/native.py`` makes the tables that C reads; their words are named here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, Literal, TypeAlias, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.native import library
from geartrain.native.fused import Steps

Home: TypeAlias = tuple[Literal["operand", "input", "own", "output"], int]
"""Where a tensor of a program lies; own: it makes it for itself."""

ROUTINE_WORDS: Final = 10
MODULE_WORDS: Final = 2 * ROUTINE_WORDS + 7
READ_WORDS: Final = 17
CALL_WORDS: Final = 5
VALUE_WORDS: Final = 3


class RowsOf(IntEnum):
    """Whose rows an address is of; in the order of calls.inc."""

    FIXED = 0
    OF_MODULE = 1
    OF_VALUE = 2
    OF_UPDATE = 3
    OF_CALL = 4


@final
@dataclass(frozen=True, slots=True)
class RoutineForm:
    """One program of a module.

    Args:
        steps: In C.
        slots: Addresses that a call has.
        given: Arguments that it reads: their number, slot, entries a row, and dtype.
        made: What it makes: slot, shape after the rows, and whether it has rows.
        results: By result an argument (from 0), or what is made (from -1, downwards).
    """

    steps: Steps
    slots: int
    given: Sequence[tuple[int, int, int, torch.dtype]]
    made: Sequence[tuple[int, tuple[int, ...], bool]]
    results: Sequence[int]


@final
@dataclass(frozen=True, slots=True, eq=False)
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
            got a gradient as bits, how many rows, and the sum.
        split: Whether it is to be told of each update by itself, where rows are of several.

    Attributes:
        copies: Outputs that are inputs as they came: output, input.
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
    learn: Callable[[Sequence[Any], int, int, Any], None]
    split: bool
    copies: list[tuple[int, int]] = field(init=False)
    homes: list[Home] = field(init=False)

    def __post_init__(self) -> None:
        whose: dict[int, int] = {}
        for j, k in enumerate(self.forward.results[: len(self.outputs)]):
            whose.setdefault(~k, j)
        object.__setattr__(self, "homes", [self._home(k, whose) for k in self.forward.results])
        copies = [(j, number) for j, (how, number) in enumerate(self._of_outputs) if how == "input"]
        object.__setattr__(self, "copies", copies)

    def _home(self, k: int, whose: Mapping[int, int]) -> Home:
        if k >= 0:
            return ("operand", k) if k < self.operands else ("input", k - self.operands)
        return ("output", whose[~k]) if ~k in whose else ("own", ~k)

    @property
    def _of_outputs(self) -> Sequence[Home]:
        return self.homes[: len(self.outputs)]

    @property
    def residuals(self) -> Sequence[Home]:
        """Where each lies."""
        return self.homes[len(self.outputs) :]

    @property
    def possible(self) -> bool:
        made = all(rows for _, _, rows in self.forward.made)
        mine = all(
            home == ("output", j) or home[0] == "input" for j, home in enumerate(self._of_outputs)
        )
        return made and mine and all(how != "operand" for how, _ in self.residuals)


def copying(likes: Sequence[Tensor], dtype: torch.dtype) -> CallForm:
    """Rows as they are, from buffers to others.

    Args:
        likes: Tensors like those of the payload.
        dtype: Of those that get gradients.
    """
    n = len(likes)
    floating = [j for j, x in enumerate(likes) if x.is_floating_point()]
    nothing = Steps([], [], dtype)
    return CallForm(
        RoutineForm(nothing, 0, [], [], range(n)),
        RoutineForm(nothing, 0, [], [], range(len(floating))),
        0,
        n,
        tuple([x[:0] for x in likes]),
        tuple(floating),
        {j: frozenset((k,)) for k, j in enumerate(floating)},
        dtype,
        lambda _: [],
        lambda *_: None,
        False,
    )


def available(dtype: torch.dtype) -> bool:
    """Whether C makes many calls in one, of programs of this dtype."""
    native = library.current()
    return native is not None and "calls_forward" in native.typed.get(dtype, {})


def pointer(array: NDArray[Any]) -> int:
    """Where an array lies."""
    found: int = array.__array_interface__["data"][0]
    return found


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

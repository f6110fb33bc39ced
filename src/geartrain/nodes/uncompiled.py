"""torch's compiler is left out where nobody compiles: 1.1 s of CPU and 70 MiB of every process; and
its library for symbols where shapes are numbers: 0.3 s and 31 MiB.

torch keeps its compiler away from what makes, saves and loads an optimiser, from modes that see
operators, and from how these are carried out on tensors without data. For that it imports the
compiler, at the first of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Final

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

_INSTEAD: Final = "__dynamo_disable"
"""Of a function that the compiler is kept away from: what is called in its place."""
_FITS: Final = "check_inplace_broadcast"
"""What torch calls the question whether something fits in place."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """What torch keeps its compiler away from is called as it is, if the compiler is not there yet.

    It decorates functions, too. Entered in turn it is done once; if the thread that has done it is
    the first to leave, the other one may import the compiler.
    """
    functions = _kept_away_from()
    there = "torch._dynamo" in sys.modules
    if there or not functions or _INSTEAD in vars(functions[0]):
        yield
        return
    for function in functions:
        setattr(function, _INSTEAD, function)
    try:
        yield
    finally:
        for function in functions:
            vars(function).pop(_INSTEAD, None)


@contextmanager
def without_symbols() -> Iterator[None]:
    """Whether what is written in place fits there is asked of shapes as numbers, if the library is
    not there yet: where torch carries out operators in Python it imports it to do so.

    Entered in turn it is done once, as above.
    """
    asked = sys.modules.get("torch._meta_registrations")
    check = getattr(asked, _FITS, None)
    if "sympy" in sys.modules or not isinstance(check, FunctionType) or check is _check_as_numbers:
        yield
        return
    setattr(asked, _FITS, _check_as_numbers)
    try:
        yield
    finally:
        setattr(asked, _FITS, check)


def _check_as_numbers(shape: Sequence[int], *others: Sequence[int]) -> None:
    if np.broadcast_shapes(tuple(shape), *map(tuple, others)) != tuple(shape):
        raise RuntimeError(f"{[*map(tuple, others)]} do not fit in place of {tuple(shape)}")


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator while it is entered."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@cache
def _kept_away_from() -> tuple[FunctionType, ...]:
    """The functions, out of what torch wraps around them; none where it calls that otherwise: then
    it imports its compiler."""
    disabled = getattr(getattr(torch, "_compile", None), "_disable_dynamo", None)
    tables = getattr(getattr(torch, "_decomp", None), "global_decomposition_table", None)
    if disabled is None or tables is None:
        return ()
    wrapper = disabled(uncompiled)
    left: list[object] = [*vars(Optimizer).values()]
    for table in tables.values():
        left += table.values()
    seen, found = set(), []
    while left:
        each = left.pop()
        if isinstance(each, FunctionType) and each not in seen:
            seen.add(each)
            inside = [cell.cell_contents for cell in each.__closure__ or ()]
            left += inside
            if each.__code__ is wrapper.__code__:
                found += [x for x in inside if isinstance(x, FunctionType)]
    return tuple(found)

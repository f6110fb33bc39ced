"""Gradients of weights from what waits for a step, in one call for all of a part.

    products and sums of rows, by weight ─► sums.inc ─► the gradients, and their 2-norm

Torch would join the rows of each weight, multiply or add them, and look for what is not finite:
five calls a weight, each longer than the product of a few rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from typing import Final, final

import torch
from torch import Tensor

from geartrain.native import library

MOST_WORK: Final = 1 << 22
"""Multiplications for one weight from which on torch, or oneDNN, is faster."""


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
    for x in (one.out, *one.lefts, *one.rights):
        if x.dtype is not dtype or not x.is_contiguous() or not x.is_cpu:
            return False
    if not one.rights:
        return True
    n = sum([x.shape[0] for x in one.lefts])
    return n * one.out.numel() <= MOST_WORK


def sum_gradients(some: Sequence[Unsummed]) -> float:
    """Write the gradients of all of them.

    Args:
        some: At least one; ``suits`` has let them pass.

    Returns:
        The sum of the squares of all entries; not finite where one of them is not.

    Raises:
        MemoryError: There is none.
    """
    native = library.current()
    assert native is not None
    words: list[int] = []
    work = 0
    for one in some:
        out, lefts, rights = one.out, one.lefts, one.rights
        width = out.shape[1] if rights else 0
        # A gradient that nothing waits for is looked at as a row.
        height = out.shape[0] if lefts else out.numel()
        words += (out.data_ptr(), height, width, one.add, len(lefts))
        for k, left in enumerate(lefts):
            n = left.shape[0]
            words += (left.data_ptr(), rights[k].data_ptr() if rights else 0, n)
            work += n * height * max(width, 1)
    squares = ctypes.c_double()
    run = native.typed[some[0].out.dtype]["sum_gradients"][work > library.SMALL_WORK]
    if run(pack(f"{len(words)}q", *words), len(some), ctypes.addressof(squares)):
        raise MemoryError("no memory for the rows whose products are a gradient")
    return float(squares.value)

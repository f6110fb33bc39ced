"""Random numbers that a row has of its own: of its seed, the number of the draw, and their column.

    seed of the row ─┐
    number of draw  ─┼─► 32 bits ─► 1 with probability p, else 0; or a number from 0 to 1
    column          ─┘

A module that draws gets a seed for each row (``row_seeds`` of ``nodes/chance.py``). C has the same
numbers (``native/fused.inc``); a trace with an operator that has no step there draws by torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, final

import torch
from torch import Tensor

_LOW: Final = 0xFFFFFFFF  # numbers are 32 bits wide, in int64 so that nothing overflows unseen
_APART: Final = 0x9E3779B9
_FIRST: Final = 0x85EBCA6B
_SECOND: Final = 0xC2B2AE35


def drawn(n: int, tail: Sequence[int], p: float, number: int, dtype: torch.dtype) -> Tensor:
    """Ones with probability p, else zeros, ``(n, *tail)``.

    Args:
        n, tail: Its shape.
        p: Within 0 and 1.
        number: Of the draw among those of a trace.
        dtype: Of the result.
    """
    seeds = _seeded.seeds
    if seeds is None:
        return torch.empty((n, *tail), dtype=dtype, device="cpu").bernoulli_(p)
    return ones_of(seeds, tail, p, number).to(dtype)


def evenly_drawn(n: int, tail: Sequence[int], number: int, dtype: torch.dtype) -> Tensor:
    """Numbers from 0 to 1, without that, ``(n, *tail)``; arguments as of ``drawn``."""
    seeds = _seeded.seeds
    if seeds is None:
        return torch.rand((n, *tail), dtype=dtype, device="cpu")
    return shares_of(seeds, tail, number, dtype)


def ones_of(seeds: Tensor, tail: Sequence[int], p: float, number: int) -> Tensor:
    """Where rows with these seeds have ones, bool ``(n, *tail)``; arguments as of ``drawn``."""
    return _bits_of(seeds, tail, number) >> 1 < int(p * 2**31 + 0.5)


def shares_of(seeds: Tensor, tail: Sequence[int], number: int, dtype: torch.dtype) -> Tensor:
    """Numbers from 0 to 1 of rows with these seeds: of as many bits as C has of that dtype."""
    less = 8 if dtype is torch.float32 else 0
    return (_bits_of(seeds, tail, number) >> less).to(dtype) * 2.0 ** (less - 32)


def _bits_of(seeds: Tensor, tail: Sequence[int], number: int) -> Tensor:
    """32 of each entry, ``(n, *tail)``."""
    low = mixed(seeds & _LOW ^ (number + 1) * _APART & _LOW)
    high = mixed((seeds >> 32) & _LOW ^ low)
    width = torch.Size(tail).numel()
    bits = low[:, None] + torch.arange(1, width + 1) * _APART & _LOW
    bits = bits ^ bits >> 16
    bits = bits * _FIRST & _LOW
    bits = (bits ^ bits >> 13) + high[:, None] & _LOW
    bits = bits * _SECOND & _LOW
    return (bits ^ bits >> 16).view(-1, *tail)


def mixed(bits: Tensor) -> Tensor:
    """Murmur3's finaliser on the low 32 bits of int64; the products keep their low 32 bits."""
    bits = bits ^ bits >> 16
    bits = bits * _FIRST & _LOW
    bits = bits ^ bits >> 13
    bits = bits * _SECOND & _LOW
    return bits ^ bits >> 16


@final
class _Seeded(threading.local):
    seeds: Tensor | None = None


_seeded: Final = _Seeded()


@contextmanager
def seeded_by(seeds: Tensor) -> Iterator[None]:
    """What this thread draws meanwhile follows from these, one for each row."""
    before, _seeded.seeds = _seeded.seeds, seeds
    try:
        yield
    finally:
        _seeded.seeds = before

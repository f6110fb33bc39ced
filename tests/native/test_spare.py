"""Memory that C has for a call: large pieces lie outside of malloc's, and few are kept."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from geartrain.native import library

KIB = 1 << 10
MOST = 480
"""KiB of a piece that is kept with no other."""


class Spare:
    """That of a library.

    Args:
        path: The library.

    Attributes:
        all: A piece as large as may be kept: nothing else is kept once it is given back.
    """

    def __init__(self, path: Path) -> None:
        dll = ctypes.CDLL(str(path))
        self._lend, self._give_back = dll.geartrain_lend, dll.geartrain_give_back
        self._lend.restype, self._lend.argtypes = ctypes.c_void_p, [ctypes.c_int64]
        self._give_back.restype, self._give_back.argtypes = None, [ctypes.c_void_p]
        self.all = self.lend(MOST)

    def lend(self, kib: int) -> int:
        """A piece; 0: there is no memory."""
        return int(self._lend(kib * KIB) or 0)

    def give_back(self, *pieces: int) -> None:
        for piece in pieces:
            self._give_back(piece or None)


@pytest.fixture
def spare(native: library.Library) -> Spare:
    """Whose largest piece has been given back, so that it has no other."""
    found = Spare(native.path)
    found.give_back(found.all)
    return found


def are_mapped(*pieces: int) -> list[bool]:
    """Whether there is memory at some addresses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [[int(x, 16) for x in line.split(maxsplit=1)[0].split("-")] for line in lines]
    return [any(first <= piece < end for first, end in ends) for piece in pieces]


def test_pieces_lie_apart(spare: Spare) -> None:
    sizes = (1, 80, 200, 80, 63)
    pieces = [spare.lend(kib) for kib in sizes]
    for k, (piece, kib) in enumerate(zip(pieces, sizes, strict=True)):
        ctypes.memset(piece, k, kib * KIB)
    for k, (piece, kib) in enumerate(zip(pieces, sizes, strict=True)):
        assert ctypes.string_at(piece, kib * KIB) == bytes([k]) * (kib * KIB)
        assert piece % 16 == 0
    spare.give_back(*pieces, 0)


def test_a_large_piece_is_lent_again_but_to_one_at_a_time(spare: Spare) -> None:
    piece = spare.lend(300)
    assert piece == spare.all
    other = spare.lend(200)
    assert other != piece
    spare.give_back(piece)
    assert spare.lend(100) == piece
    spare.give_back(piece, other)


def test_the_least_is_lent_that_has_room(spare: Spare) -> None:
    pieces = [spare.lend(kib) for kib in (400, 250, 100)]
    spare.give_back(*pieces[1:])
    assert [spare.lend(kib) for kib in (90, 200)] == pieces[:0:-1]
    spare.give_back(*pieces)


def test_little_is_kept_and_the_larger_pieces_of_it(spare: Spare) -> None:
    assert spare.lend(MOST) == spare.all
    pieces = [spare.lend(200) for _ in range(4)]
    large = spare.lend(4 * MOST)
    spare.give_back(*pieces, large)
    assert are_mapped(*pieces, large) == [True, True, False, False, False]
    spare.give_back(spare.all)
    assert are_mapped(*pieces[:2], spare.all) == [False, False, True]


def test_what_there_is_no_memory_for_is_not_lent(spare: Spare) -> None:
    assert not spare.lend(1 << 50)

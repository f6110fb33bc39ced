"""Large tensors lie in memory that processes have in common, until whoever has them lets go."""

from __future__ import annotations

import gc
import mmap
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from geartrain.errors import TransportError
from geartrain.transport.common import KEPT_BYTES, LENT, Common
from geartrain.transport.link import Transport
from geartrain.transport.record import Record

LARGE = 10_000  # elements; 40 kB of float32
AREA = 1 << 20


def commons(n: int = 2, borrowers: int = 2, area: int = AREA) -> list[Common]:
    memory = np.zeros(n * area, np.uint8)
    return [Common(memory, k, n, range(borrowers)) for k in range(n)]


def carried(a: Common, b: Common, record: Record) -> Record:
    """What process 1 has of what process 0 sends."""
    sent, _ = a.put(1, record)
    return b.take(0, sent)[0] if sent.kind == LENT else sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_large_tensor_comes_back_and_does_not_travel(dtype: torch.dtype) -> None:
    a, b = commons()
    large, small = torch.arange(60_000).view(300, 200).to(dtype), torch.ones(3)
    sent, nbytes = a.put(1, Record(9, (7, -1), (0.5,), (small, None, large)))
    assert nbytes == a.lent_bytes == large.nbytes
    assert [x is None for x in sent.arrays] == [False, True, True]
    found, again = b.take(0, sent)
    assert again == nbytes
    assert (found.kind, found.ints, found.floats) == (9, (7, -1), (0.5,))
    assert found.arrays[0] is small and found.arrays[1] is None
    assert isinstance(found.arrays[2], Tensor) and torch.equal(found.arrays[2], large)


def test_what_is_small_or_of_numpy_or_for_the_program_goes_in_the_message() -> None:
    a, _, _ = commons(3, 2)
    for to, x in ((1, torch.ones(10)), (1, np.ones(LARGE)), (2, torch.ones(LARGE))):
        record = Record(9, (), (), (x,))
        assert a.put(to, record) == (record, 0)


def test_memory_is_used_anew_when_its_receiver_has_let_go_and_said_so() -> None:
    a, b = commons()
    for k in range(200):  # eight times as much as there is room for
        sent, nbytes = a.put(1, Record(9, (), (), (torch.full((LARGE,), float(k)),)))
        assert nbytes, k
        found = b.take(0, sent)[0]
        view = found.arrays[0][5:]  # type: ignore[index]
        del found, sent
        assert float(view.sum()) == k * (LARGE - 5)  # type: ignore[union-attr]
        del view
        back, _ = b.put(0, Record(3))
        if back.kind == LENT:
            a.take(1, back)
    assert a.lent_bytes < AREA / 2


def test_without_room_tensors_go_in_the_message_and_what_is_kept_stays_as_it_was() -> None:
    a, b = commons()
    kept = []
    for k in range(100):
        kept.append(carried(a, b, Record(9, (), (), (torch.full((LARGE,), float(k)),))).arrays[0])
    assert a.lent_bytes <= AREA < sum(x.nbytes for x in kept if x is not None)
    assert all(float(x[0]) == float(x[-1]) == k for k, x in enumerate(kept) if x is not None)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_is_kept_is_ever_written_to(seed: int) -> None:
    """Sizes, and how long each is kept, at random; in the end all of the area is one piece."""
    dice, (a, b) = random.Random(seed), commons()
    kept: list[tuple[float, Tensor]] = []
    for k in range(400):
        x = torch.full((dice.randrange(8_192, 60_000),), float(k))
        found = carried(a, b, Record(9, (), (), (x,))).arrays[0]
        assert isinstance(found, Tensor)
        kept.append((float(k), found))
        while len(kept) > dice.randrange(1, 12):
            value, gone = kept.pop(dice.randrange(len(kept)))
            assert bool((gone == value).all())
        back, _ = b.put(0, Record(3))
        if back.kind == LENT:
            a.take(1, back)
    kept.clear()
    del found, gone
    gc.collect()
    b._let_go_bytes[0] = 1 << 30  # whatever it is, it is told
    a.take(1, b.put(0, Record(3))[0])
    assert a.lent_bytes == 0 and a._holes == [(0, AREA)]


def test_what_a_process_that_is_gone_had_is_free() -> None:
    a, b = commons()
    kept = carried(a, b, Record(9, (), (), (torch.ones(LARGE),)))
    a.forget(1)
    assert a.lent_bytes == 0 and kept.arrays[0] is not None


CODE = 11  # of float32


@pytest.mark.parametrize(
    ("ints", "said"),
    [
        ((), "numbers is 0"),
        ((9, 2, 0), "number of tensors is 2"),
        ((9, -1, 0), "number of tensors is -1"),
        ((9, 1, 0, 1, 0, CODE, 1, LARGE), "place is"),
        ((9, 1, 0, 0, 0, CODE, 9, LARGE), "place is"),
        ((9, 1, 0, 0), "place is"),
        ((9, 1, 0, 0, 0, 99, 1, LARGE), "tensor is of code 99"),
        ((9, 1, 0, 0, 0, 64, 1, LARGE), "tensor is of code 64"),
        ((9, 1, 0, 0, 0, CODE, 2, LARGE), "tensor is of code"),
        ((9, 1, 0, 0, 0, CODE, 1, -4), "tensor is of code"),
        ((9, 1, 0, 0, 0, CODE, 0), "tensor is of code"),
        ((9, 1, 0, 0, 8, CODE, 1, LARGE), "a multiple of 64 in the area at 0"),
        ((9, 1, 0, 0, -64, CODE, 1, LARGE), "a multiple of 64 in the area at 0"),
        ((9, 1, 0, 0, AREA, CODE, 1, LARGE), "a multiple of 64 in the area at 0"),
        ((9, 1, 0, 0, 0, CODE, 1, AREA), "a multiple of 64 in the area at 0"),
        ((9, 0, 1), "number let go of is 1"),
        ((9, 0, -1), "number let go of is -1"),
        ((9, 0, 1, 64), "place let go of is 64, expected one that process 0 was lent"),
    ],
)
def test_a_message_that_tells_of_what_cannot_be_is_refused(
    ints: tuple[int, ...], said: str
) -> None:
    _, b = commons()
    with pytest.raises(TransportError, match=said):
        b.take(0, Record(LENT, ints, (), (None,)))


def test_what_is_lent_is_not_lent_again() -> None:
    a, b = commons()
    sent, _ = a.put(1, Record(9, (), (), (torch.ones(LARGE),)))
    kept = b.take(0, sent)
    with pytest.raises(TransportError, match="one that was not lent already"):
        b.take(0, sent)
    assert kept


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_transports_carry_words_alone_and_count_all_bytes(tmp_path: Path, stack: ExitStack) -> None:
    a, b = (
        stack.enter_context(Transport(k, 2, tmp_path, common=common))
        for k, common in enumerate(commons(area=2 << 20))
    )
    wire = 0
    for k in range(60):  # more than fits at once; nobody writes back, but for what was heard
        x = torch.full((LARGE,), float(k))
        a.send(1, Record(9, (k,), (), (x,)))
        found = []
        while not found:
            found = b.poll(10.0)
        ((_, record),) = found
        assert record.kind == 9 and record.ints == (k,)
        assert isinstance(record.arrays[0], Tensor) and torch.equal(record.arrays[0], x)
        wire = max(wire, a.in_flight_bytes(1))
        del found, record
        a.poll()
    assert wire < 64 * 1024  # of messages that have 40 kB of tensors each
    sent, came = a.monitor().sent_bytes[1], b.monitor().received_bytes[0]
    assert sent == came > 60 * 4 * LARGE


def test_who_has_no_common_memory_is_told(tmp_path: Path, stack: ExitStack) -> None:
    a = stack.enter_context(Transport(0, 2, tmp_path, common=commons()[0]))
    b = stack.enter_context(Transport(1, 2, tmp_path))
    a.send(1, Record(9, (), (), (torch.ones(LARGE),)))
    with pytest.raises(TransportError, match="both are to be given the same"):
        b.poll(10.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are given back to Linux")
def test_pages_that_were_wanted_while_a_receiver_was_behind_go_back_to_the_system() -> None:
    area = 8 * KEPT_BYTES
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * area)
    memory = np.frombuffer(mmap.mmap(fd, 2 * area), np.uint8)
    a, b = (Common(memory, k, 2, (0, 1)) for k in range(2))

    def resident() -> int:
        return os.fstat(fd).st_blocks * 512

    piece = torch.ones(KEPT_BYTES // 4)  # a float has four bytes
    last = carried(a, b, Record(9, (), (), (piece,)))
    behind = [carried(a, b, Record(9, (), (), (piece,))) for _ in range(6)]
    assert resident() >= 7 * KEPT_BYTES
    behind.clear()
    gc.collect()
    a.take(1, b.put(0, Record(9))[0])  # what it has let go of
    assert a.lent_bytes == piece.nbytes
    assert resident() <= 3 * KEPT_BYTES
    assert torch.equal(last.arrays[0], piece)  # what is still there is whole
    again = carried(a, b, Record(9, (), (), (3 * piece,)))
    assert torch.equal(again.arrays[0], 3 * piece)
    del last, again
    # Whatever a pass before has left is given back as the next one begins.
    memory[:area] = 1
    Common(memory, 0, 2, (0, 1))
    assert resident() <= 3 * KEPT_BYTES
    os.close(fd)

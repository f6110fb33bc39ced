"""The pool of memory that loops lend from, and what malloc gives back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from geartrain.native.heap import LATER_S, SOON_S, Heap
from geartrain.native.pool import LEAST, MemoryPool, is_alone, made, shared
from tests.rigs.programs import Nursery, Program

ROWS = LEAST // 256
"""Of 64 float32 each, so that a tensor is lent."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("more", [torch.int32, torch.bool])
def test_a_tensor_is_as_asked_for(dtype: torch.dtype, more: torch.dtype) -> None:
    pool = MemoryPool()
    for one in (dtype, more):
        x = pool.empty((4 * ROWS, 64), one)
        assert x.shape == (4 * ROWS, 64) and x.dtype is one and x.is_contiguous()
        assert x.data_ptr() % 64 == 0 and pool.nbytes() >= x.nbytes
        x.fill_(1)
        assert int(x.sum()) == x.numel()


def test_tensors_that_live_do_not_overlap() -> None:
    pool = MemoryPool()
    tensors = [pool.empty((ROWS + k, 64), torch.float32).fill_(k) for k in range(9)]
    assert all((x == k).all() for k, x in enumerate(tensors))
    assert pool.nbytes() == sum(x.nbytes for x in tensors)


def test_what_nobody_has_is_lent_again() -> None:
    pool = MemoryPool()
    first, second = (pool.empty((ROWS, 64), torch.float32) for _ in range(2))
    at, part = first.data_ptr(), first[3:5]
    del first
    assert pool.empty((ROWS, 64), torch.float32).data_ptr() != at  # a view of it lives
    del part
    assert pool.empty((ROWS, 64), torch.float32).data_ptr() == at
    assert pool.nbytes() == second.nbytes


def test_it_is_given_back_once_by_whichever_thread_had_it_last() -> None:
    pool = MemoryPool()
    kept = [pool.empty((ROWS, 64), torch.float32)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert pool.nbytes() == 0
    two = [pool.empty((ROWS, 64), torch.float32).fill_(k) for k in range(2)]
    assert [int(x.max()) for x in two] == [0, 1]


def test_a_tensor_larger_than_a_block_has_one_of_its_own() -> None:
    pool = MemoryPool()
    small = pool.empty((ROWS, 64), torch.float32).fill_(1)
    large = pool.empty(((80 << 20) + 64,), torch.uint8)  # no whole number of pages
    large[-1] = 7
    assert (small == 1).all() and pool.nbytes() == small.nbytes + large.nbytes


def test_few_bytes_are_malloc_s() -> None:
    pool = MemoryPool()
    x = pool.empty((2, 64), torch.float32)
    assert x.shape == (2, 64) and pool.nbytes() == 0


def test_of_what_calls_make_large_tensors_are_lent() -> None:
    before = shared.nbytes()
    few = made((LEAST // 256 - 1, 64), torch.float32)
    assert few.shape == (LEAST // 256 - 1, 64) and shared.nbytes() == before
    many = made((LEAST // 512, 64), torch.float64)
    assert many.dtype is torch.float64 and shared.nbytes() == before + many.nbytes
    with torch.device("meta"):
        assert made((2, 64), torch.float32).is_cpu and shared.empty((2, 64), torch.float32).is_cpu


def test_small_tensors_leave_room_for_large_ones_that_come_again() -> None:
    """So a block reaches no further than all of them at once."""
    pool = MemoryPool()
    large, between, small, last = [pool.empty((n * ROWS, 64), torch.float32) for n in (8, 1, 1, 1)]
    begins = large.data_ptr(), small.data_ptr()
    del large, small
    again = pool.empty((ROWS, 64), torch.float32)
    large = pool.empty((8 * ROWS, 64), torch.float32)
    assert (large.data_ptr(), again.data_ptr()) == begins
    assert between.data_ptr() < again.data_ptr() < last.data_ptr()


def test_pages_that_none_has_reached_of_late_go_back_and_those_below_stay() -> None:
    pool = MemoryPool()
    below = pool.empty((ROWS, 64), torch.float32)
    low = pool.empty((ROWS + 1, 64), torch.float32).fill_(5)  # to within a page
    high = pool.empty((1 << 20,), torch.float32).fill_(5)
    begin = high.data_ptr()
    del high, below
    for _ in range(3):
        pool.empty((ROWS, 64), torch.float32)
    again = pool.empty((1 << 20,), torch.float32)
    assert again.data_ptr() == begin and (again == 5).all()  # they are not looked at all the time
    del again
    for _ in range(200):
        pool.empty((ROWS, 64), torch.float32)
    assert (low == 5).all()
    again = pool.empty((1 << 20,), torch.float32)
    assert again.data_ptr() == begin
    assert not again[4096:].any()  # pages that have gone are zeros


def test_blocks_that_nobody_wants_go_back_but_the_first_and_those_in_use_stay() -> None:
    pool, whole = MemoryPool(), 1 << 26
    first, second, third = (pool.empty((whole,), torch.uint8) for _ in range(3))
    at = second.data_ptr()
    del first, third
    for _ in range(200):
        pool.empty((ROWS, 64), torch.float32)
    assert len(pool._blocks) == 2
    del second
    two = [pool.empty((whole,), torch.uint8) for _ in range(2)]
    assert two[1].data_ptr() == at and len(pool._blocks) == 2


def test_a_tensor_is_alone_as_long_as_no_other_has_its_memory_but_those_that_are_known() -> None:
    x = torch.empty(8)
    part = x[2:]
    assert not is_alone(x) and not is_alone(part)
    assert is_alone(x, known=1) and not is_alone(x, known=2)
    del part
    assert is_alone(x) and not is_alone(x, known=1)


FORKED = """
import os, signal, torch
from geartrain.native.pool import LEAST, shared

with shared._lock:  # some thread is in there
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(shared.empty((LEAST,), torch.uint8).numel() == LEAST)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_process_that_is_forked_while_a_thread_lends_may_lend(
    nursery: Nursery, tmp_path: Path
) -> None:
    assert Program(nursery, tmp_path / "run", FORKED).line() == "1"


def test_what_no_tensor_of_a_run_has_reached_goes_back_when_it_is_over() -> None:
    pool = MemoryPool()
    low = pool.empty((ROWS, 64), torch.float32).fill_(5)
    for run in range(3):
        high = pool.empty(((4 if run else 8) * ROWS, 64), torch.float32).fill_(5)
        begin = high.data_ptr()
        del high
        pool.rest()
        high = pool.empty((8 * ROWS, 64), torch.float32)
        assert high.data_ptr() == begin and (low == 5).all()
        # As far as the run has reached: pages that have gone are zeros.
        assert (high[: 4 * ROWS - 64] == 5).all()
        assert (high[4 * ROWS + 64 :] == (0 if run else 5)).all()
        del high
        pool.rest()


def test_where_what_a_run_had_lay_apart_pages_stay_for_as_much_as_it_had() -> None:
    """A hole before the last tensor is the next run's, and what lies as far behind goes back."""
    pool = MemoryPool()
    low = pool.empty((4 * ROWS, 64), torch.float32)
    middle = pool.empty((ROWS, 64), torch.float32)
    del low
    high = pool.empty((5 * ROWS, 64), torch.float32).fill_(5)
    begin = high.data_ptr()
    del high
    pool.rest()  # one lives yet, and all before it stays
    del middle
    pool.rest()
    again = pool.empty((10 * ROWS, 64), torch.float32)
    assert again.data_ptr() + 5 * LEAST == begin
    assert not again[6 * ROWS :].any()


def test_what_still_lives_when_a_run_is_over_keeps_its_pages() -> None:
    pool = MemoryPool()
    low = pool.empty((8 * ROWS, 64), torch.float32)
    high = pool.empty((ROWS, 64), torch.float32).fill_(5)
    del low
    pool.rest()
    pool.rest()  # in which nothing was lent
    assert (high == 5).all()
    for _ in range(200):
        pool.empty((ROWS, 64), torch.float32)
    assert (high == 5).all()


def test_what_moves_is_not_there_twice() -> None:
    pool, n = MemoryPool(), 1 << 20
    beside = pool.empty((LEAST,), torch.uint8).fill_(7)
    old = pool.empty((n + 100,), torch.uint8)
    end, new = pool.empty((LEAST,), torch.uint8).fill_(7), pool.empty((2 * n,), torch.uint8)
    old[:] = torch.arange(n + 100) % 251 + 1
    was = old.clone()
    pool.move(old.data_ptr(), new.data_ptr(), old.nbytes)
    assert torch.equal(new[: n + 100], was)
    assert (old == 0).sum() > 0.9 * n  # pages that have gone are zeros
    assert (beside == 7).all() and (end == 7).all()


@pytest.mark.parametrize("n", [1 << 10, 1 << 20])
def test_what_is_not_lent_is_copied(n: int) -> None:
    pool = MemoryPool()
    pool.empty((LEAST,), torch.uint8)
    old, new = torch.arange(n) % 251, torch.zeros(n, dtype=torch.int64)
    pool.move(old.data_ptr(), new.data_ptr(), old.nbytes)
    assert torch.equal(new, old) and torch.equal(old, torch.arange(n) % 251)


def test_malloc_is_asked_once_and_not_again_a_moment_later() -> None:
    asked: list[int] = []
    clock = [10.0]
    heap = Heap(asked.append, lambda: clock[0])
    heap.give_back(LATER_S)
    heap.give_back(SOON_S)
    assert asked == [0]
    clock[0] += 2 * SOON_S
    heap.give_back(LATER_S)
    assert asked == [0]
    heap.give_back(SOON_S)
    assert asked == [0, 0]


def test_what_a_thread_has_tried_goes_back_once_and_only_when_that_thread_asks() -> None:
    asked: list[object] = []
    heap = Heap(asked.append, lambda: 10.0, lambda: asked.append("end"))
    heap.give_back_tried()
    thread = threading.Thread(target=heap.tried)
    thread.start()
    thread.join()
    heap.give_back_tried()
    assert not asked
    heap.give_back(LATER_S)
    heap.tried()
    heap.give_back_tried()  # however short a while ago that was
    heap.give_back_tried()
    assert asked == [0, 0, "end"]


BEHIND = """
import ctypes, threading
from mmap import PAGESIZE
from geartrain.native.heap import Heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
NBYTES, heap = 100 << 10, Heap()

def resident(pieces):
    there, n = 0, NBYTES // PAGESIZE - 1
    for at in pieces:
        found = ctypes.create_string_buffer(n)
        if not libc.mincore(at + -at % PAGESIZE, n * PAGESIZE, found):
            there += sum(byte & 1 for byte in found.raw)
    return there / n / len(pieces)

def work():
    libc.free(libc.malloc(6 << 20))  # from now on malloc keeps as much as that, and twice
    first = libc.malloc(NBYTES)
    resident([first])  # what Python wants for that lies before the others
    pieces = [libc.malloc(NBYTES) for _ in range(20)]
    for at in pieces:
        ctypes.memset(at, 1, NBYTES)
    for at in pieces:
        libc.free(at)
    libc.malloc_trim(0)
    before = resident(pieces)
    heap.tried()
    heap.give_back_tried()
    print(before, resident(pieces))

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
"""A process of its own, as malloc keeps more for as long as one lives."""


def test_what_is_free_behind_all_pieces_of_a_thread_goes_back() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("malloc is not glibc's")
    done = subprocess.run([sys.executable, "-c", BEHIND], capture_output=True, text=True)
    before, after = map(float, done.stdout.split())
    assert before > 0.9 and after < 0.1  # malloc_trim gave nothing back

"""Row stores and their ranges against simple models."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.errors import LeakError, ProtocolError
from geartrain.frames.message import ranges, write_ranges
from geartrain.frames.rows import RowStore
from geartrain.native import pool
from geartrain.native.pool import LEAST
from geartrain.native.ranges import Ranges


@given(data=st.data())
def test_ranges_are_first_fit_and_never_overlap(data):
    ranges, taken, free = Ranges(16), [], set(range(16))
    for _ in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(("take", "give", "grow")))
        if act == "grow" and ranges.capacity < 100:
            free |= set(range(ranges.capacity, ranges.capacity + 8))
            ranges.grow(ranges.capacity + 8)
        elif act == "give" and taken:
            start, n = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            ranges.give(start, n)
            free |= set(range(start, start + n))
        else:
            n = data.draw(st.integers(1, 6))
            fits = [s for s in sorted(free) if set(range(s, s + n)) <= free]
            start = ranges.take(n)
            assert start == (fits[0] if fits else None)
            if start is not None:
                free -= set(range(start, start + n))
                taken.append((start, n))
        assert ranges.free() == len(free)
    for start, n in taken:
        ranges.give(start, n)
    assert ranges.take(ranges.capacity) == 0  # all merged to one


@settings(max_examples=60)
@given(data=st.data())
def test_a_store_keeps_columns_and_buffers_of_waiting_rows_whatever_comes_and_goes(data):
    store = RowStore("store", ("origin",), capacity=4)
    model: dict[int, tuple[int, float]] = {}
    number = 0
    for _ in range(data.draw(st.integers(1, 25))):
        if model and data.draw(st.booleans()):
            rows = data.draw(st.lists(st.sampled_from(sorted(model)), min_size=1, unique=True))
            at = np.array(rows)
            assert store["origin"][at].tolist() == [model[r][0] for r in rows]
            assert store.existing(0)[torch.from_numpy(at), 0].tolist() == [
                model[r][1] for r in rows
            ]
            store.release(at)
            for r in rows:
                del model[r]
        else:
            n = data.draw(st.integers(1, 9))
            start = store.allocate(n)
            assert not model.keys() & set(range(start, start + n))
            like = torch.arange(number, number + n, dtype=torch.float64)[:, None]
            store["origin"][start : start + n] = np.arange(number, number + n)
            store.buffer(0, like)[start : start + n] = like
            for i in range(n):
                model[start + i] = (number + i, float(number + i))
            number += n
        assert store.waiting == len(model) <= store.peak
        assert store.live_rows().tolist() == sorted(model)
    if model:
        with pytest.raises(LeakError, match=f"'store': {len(model)} rows were never answered"):
            store.check_empty()
        store.release(np.array(sorted(model)))
    store.check_empty()


def test_a_row_is_answered_once():
    store = RowStore("affine")
    start = store.allocate(4)
    store.release(np.array([start + 1]))
    for rows, named in (([1], "[1]"), ([0, 0], "[0]"), ([2, 9, 1, 2], "[1, 2, 9]")):
        with pytest.raises(ProtocolError) as caught:
            store.release(np.array(rows))
        assert f"'affine': rows {named} came back but do not wait here" in str(caught.value)
        assert "3 rows wait" in str(caught.value)
    assert store.waiting == 3


def test_space_is_used_again_and_grows_only_when_needed():
    store = RowStore("affine", capacity=8)
    for _ in range(50):
        start = store.allocate(8)
        store.release(np.arange(start, start + 8)[::-1].copy())
    assert store.capacity == 8
    for _ in range(100):  # more chunks than the table of chunks begins with
        store.allocate(1)
    assert store.capacity == 128 and store.peak == 100
    store.buffer(0, torch.zeros(1, 3))
    assert store.nbytes() == 128 * 3 * 4


def test_rows_of_another_shape_or_dtype_come_only_when_nobody_waits():
    store = RowStore("affine", capacity=8)
    first = store.allocate(2)
    store.buffer(0, torch.zeros(2, 3))
    store.allocate(1)
    with pytest.raises(ProtocolError, match=r"'affine': payload 0 came as torch.float64 \(3,\)"):
        store.buffer(0, torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(ProtocolError, match=r"torch.float32 \(4,\), but rows of torch.float32"):
        store.buffer(0, torch.zeros(1, 4))
    store.release(np.arange(first, first + 3))
    store.allocate(1)
    assert store.buffer(0, torch.zeros(1, 4)).shape == (8, 4)


def test_rows_of_a_long_range_that_came_back_make_room_before_the_last_of_it_has():
    store = RowStore("branch", capacity=1024)
    first = store.allocate(1024)
    store.release(np.arange(first + 256, first + 1000))
    assert store.allocate(512) == first + 256
    assert store.capacity == 1024


def test_large_buffers_are_lent_by_the_pool_which_has_them_back_with_the_store() -> None:
    before = pool.shared.nbytes()
    store = RowStore("n", capacity=256)
    width = LEAST // 256
    store.buffer(0, torch.ones(1, width))
    store.buffer(1, torch.ones(1, 2))  # malloc's
    assert pool.shared.nbytes() - before == 256 * width * 4
    store.buffer(0, torch.ones(1, width))[:256] = 3
    store.allocate(256)
    store.allocate(64)  # grows, and what there was goes back
    grown = store.buffer(0, torch.ones(1, width))
    assert (grown[:256] == 3).all() and grown.shape[0] == store.capacity > 256
    assert pool.shared.nbytes() - before == store.capacity * width * 4
    del store, grown
    assert pool.shared.nbytes() == before


@pytest.mark.parametrize("bundles", [0, 1, 40, 3000])
def test_ranges_are_written_as_they_are_made(bundles: int) -> None:
    draw = np.random.default_rng(bundles)
    lengths, starts = draw.integers(0, 9, bundles), draw.integers(0, 10**6, bundles)
    lengths[: min(bundles, 3)] = 0
    found = np.full(int(lengths.sum()) + 2, -1)
    write_ranges(found[1:-1], starts, lengths)
    want = [at for s, n in zip(starts, lengths, strict=True) for at in range(s, s + n)]
    assert found.tolist() == [-1, *want, -1]
    assert ranges(starts, lengths).tolist() == want


def test_where_ranges_are_many_nothing_as_large_is_made_besides() -> None:
    lengths, out = np.full(100, 2000), np.empty(200_000, np.int64)
    starts = np.arange(100) * 5000
    tracemalloc.start()
    try:
        write_ranges(out, starts, lengths)
        assert tracemalloc.get_traced_memory()[1] < out.nbytes // 8
    finally:
        tracemalloc.stop()

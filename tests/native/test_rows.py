"""Rows arrive where they are sent, whatever moves them; a row that is not there is named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from geartrain.errors import ProtocolError
from geartrain.native import library
from geartrain.native.ledger import WaitingRows
from geartrain.native.rows import Moves, Rows, add, put, take, take_whole, total, transposed

Use = Callable[[library.Library | None], None]
SHAPES = [(), (1,), (7,), (3, 5), (2, 0)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
both = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def numbers(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(n, *shape) * 100).to(dtype)


def rows_of(limit: int, n: int, seed: int) -> Rows:
    return np.random.default_rng(seed).integers(0, limit, n if limit else 0)


@both
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    n=st.integers(0, 9),
    m=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_rows_are_taken_and_put(
    native: library.Library,
    use: Use,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    n: int,
    m: int,
    seed: int,
) -> None:
    x, also = numbers(n, shape, dtype), torch.arange(n)
    rows = rows_of(n, m, seed)
    at = torch.from_numpy(rows)
    places = np.random.default_rng(seed).permutation(rows.size + 3)[: rows.size]
    for kernels in (native, None):
        use(kernels)
        taken, numbered = take((x, also), rows)
        assert torch.equal(taken, x[at]) and numbered.tolist() == rows.tolist()
        whole = take_whole(x, rows, rows.size + 2)
        assert torch.equal(whole[: rows.size], x[at]) and not whole[rows.size :].any()
        for source, of in ((x, rows), (x[at], None)):
            target = torch.full((rows.size + 3, *shape), 1, dtype=dtype)
            expected = target.clone()
            expected[torch.from_numpy(places)] = x[at]
            put(target, places, source, of)
            assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 33, 64])
@pytest.mark.parametrize("width", [1, 16, 47, 320])
def test_rows_and_columns_are_exchanged(
    native: library.Library, use: Use, n: int, width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(n, width, dtype=dtype)
    for kernels in (native, None):
        use(kernels)
        y = transposed(x)
        assert torch.equal(y, x.t()) and y.is_contiguous()
        assert torch.equal(transposed(y.t()), y)


def test_rows_are_written_from_a_row_on(native: library.Library, use: Use) -> None:
    x = torch.arange(6.0).view(3, 2)
    for kernels in (native, None):
        use(kernels)
        for source, rows in ((x, None), (x.double(), None), (x, np.arange(3))):
            out, moves = torch.zeros(5, 2), Moves()
            moves.add(out, None, source, rows, 1)
            moves.run()
            assert torch.equal(out[1:4], x) and not out[[0, 4]].any()
        with pytest.raises((RuntimeError, IndexError)):
            Moves().add(torch.zeros(5, 2), None, x, None, 3)


def test_large_rows_arrive_too(native: library.Library, use: Use) -> None:
    x = torch.randn(300, 500)
    rows = np.arange(299, -1, -1)
    for kernels in (native, None):
        use(kernels)
        assert torch.equal(take((x,), rows)[0], x.flip(0))


def test_what_the_kernel_cannot_read_torch_moves(native: library.Library, use: Use) -> None:
    use(native)
    x, rows = torch.arange(12.0).view(3, 4), np.array([2, 0])
    for source in (x.t().contiguous().t(), x.clone().requires_grad_(), x.double()):
        out = torch.zeros(2, 4)
        moves = Moves()
        with torch.no_grad():
            moves.add(out, None, source, rows)
            moves.run()
        assert torch.equal(out, x[[2, 0]])
    wide = torch.zeros(4, 2)
    moves = Moves()
    moves.add(wide.t(), None, x, rows)
    moves.run()
    assert torch.equal(wide.t(), x[[2, 0]])
    assert torch.equal(take((x,), np.array([2, 9, 0, 9])[::2])[0], x[[2, 0]])


def test_what_has_been_moved_may_be_moved_again(native: library.Library, use: Use) -> None:
    use(native)
    source, target = torch.zeros(1, 6), torch.zeros(1, 6)
    moves = Moves()
    moves.add(target, None, source, None)
    for k in range(1, 4):
        source.fill_(k)
        moves.run()
        assert target.tolist() == [[k] * 6]


def test_tensors_live_until_their_rows_have_moved(native: library.Library, use: Use) -> None:
    use(native)
    out, moves = torch.empty(64, 256), Moves()
    moves.add(out, None, torch.full((64, 256), 3.0), np.arange(0, 128, 2)[:64] // 2)
    others = [torch.zeros(64, 256) for _ in range(20)]
    moves.run()
    assert (out == 3).all() and len(others) == 20


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
def test_a_row_out_of_range_is_named_and_nothing_written(
    native: library.Library, use: Use, bad: int
) -> None:
    use(native)
    x, out, wrong = torch.ones(4, 2), torch.zeros(2, 2), np.array([0, bad])
    moves = Moves()
    moves.add(out, None, x, np.array([0, 1]))
    moves.add(torch.zeros(2, 2), None, x, wrong)
    with pytest.raises(ProtocolError, match=rf"rows \[{bad}\] are to be read, .* rows 0\.\.3"):
        moves.run()
    assert not out.any()
    target = torch.zeros(4, 2)
    with pytest.raises(ProtocolError, match=rf"rows \[{bad}\] are to be written"):
        put(target, wrong, torch.ones(2, 2))
    with pytest.raises(ProtocolError, match=rf"rows \[{bad}\] are to be added to"):
        add(target, wrong, torch.ones(2, 2), None)
    with pytest.raises(ProtocolError, match=rf"rows \[{bad}\] are to be read"):
        add(torch.zeros(2, 2), None, x, wrong)
    with pytest.raises(ProtocolError, match=rf"rows \[{bad}\] are to be read"):
        total(x, wrong, out, None)
    with pytest.raises(ProtocolError, match=rf"rows \[{bad}\] are to be read"):
        total(out, None, x, wrong)
    assert not target.any()


def test_numbers_of_rows_that_do_not_fit_are_refused(native: library.Library, use: Use) -> None:
    for kernels in (native, None):
        use(kernels)
        with pytest.raises((RuntimeError, IndexError)):
            put(torch.zeros(4, 2), np.array([0, 1, 2]), torch.ones(2, 2))
        with pytest.raises(RuntimeError):
            add(torch.zeros(4, 2), None, torch.ones(3, 2), None)
        with pytest.raises(RuntimeError):
            total(torch.zeros(4, 2), None, torch.ones(3, 2), None)


@both
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    n=st.integers(0, 9),
    m=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_rows_are_added_as_torch_adds_them(
    native: library.Library,
    use: Use,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    n: int,
    m: int,
    seed: int,
) -> None:
    x, base = numbers(n, shape, dtype), numbers(n, shape, dtype)
    to, at = rows_of(n, m, seed), rows_of(n, m, seed + 1)
    found = []
    for kernels in (native, None):
        use(kernels)
        taken = x[torch.from_numpy(at)]
        found.append(
            (
                add(base.clone(), to, x, at),
                add(base.clone(), to, taken, None),
                add(base.clone(), None, x, None),
                total(base, to, x, at),
                total(taken, None, x, at),
            )
        )
    for ours, torchs in zip(*found, strict=True):
        close = {"rtol": 1e-14, "atol": 1e-12} if dtype == torch.float64 else {}
        if dtype == torch.bfloat16:  # torch may round only the last of several additions to a row
            close = {"rtol": 0.02, "atol": 2.0**-8 * 100 * m}
        assert_close(ours, torchs, **close)


def test_nan_and_infinity_are_added(native: library.Library, use: Use) -> None:
    use(native)
    x = torch.tensor([[float("nan"), float("inf"), 1.0]])
    got = add(torch.zeros(2, 3), np.array([1, 1]), x, np.array([0, 0]))
    assert_close(got, torch.tensor([[0.0] * 3, [float("nan"), float("inf"), 2.0]]), equal_nan=True)


@both
@given(order=st.permutations(range(9)), cuts=st.sets(st.integers(1, 8)))
def test_chunks_are_free_when_their_last_row_is_back(
    native: library.Library, use: Use, order: list[int], cuts: set[int]
) -> None:
    edges = [0, *sorted(cuts), 9]
    for kernels in (native, None):
        use(kernels)
        ledger = WaitingRows(4, 1)
        ledger.grow(16, 8)
        chunk_of = {}
        for chunk, (start, n) in {5: (1, 3), 0: (4, 1), 7: (5, 5)}.items():
            ledger.lend(chunk, start, n)
            chunk_of |= dict.fromkeys(range(start, start + n), chunk)
        rows = np.array(order) + 1
        out = set(range(1, 10))
        for a, b in pairwise(edges):
            for wrong in ([*rows[a:b], rows[a]], [*rows[a:b], 0]):
                assert ledger.release(np.array(wrong)) is None
            here = set(rows[a:b].tolist())
            free = {chunk_of[r] for r in here} - {chunk_of[r] for r in out - here}
            assert sorted(ledger.release(rows[a:b]) or []) == sorted(free)
            out -= here
            assert np.flatnonzero(ledger.live).tolist() == sorted(out)


def test_a_row_beyond_the_store_is_not_released(native: library.Library, use: Use) -> None:
    use(native)
    ledger = WaitingRows(4, 1)
    ledger.lend(0, 0, 4)
    for row in (4, -1, 1 << 50):
        assert ledger.release(np.array([1, row])) is None
    assert ledger.live.all() and ledger.release(np.arange(8)[:8:2] // 2) == [0]


def test_bfloat16_rows_are_added_and_rounded_as_torch_does(
    native: library.Library, use: Use
) -> None:
    use(native)
    torch.manual_seed(0)
    a, b = (torch.randn(50, 33).mul_(s).bfloat16() for s in (1.0, 0.01))
    a[0, 0], a[1, 1], a[2, 2] = float("nan"), float("inf"), 3.3e38
    b[47, 2] = 3.3e38  # together more than there is
    rows = np.arange(49, -1, -1)
    got, want = total(a, rows, b, None), a.flip(0) + b
    assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    added = add(b.clone(), rows, a, None)
    assert_close(added, want, rtol=0, atol=0, equal_nan=True)

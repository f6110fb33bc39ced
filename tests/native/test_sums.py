"""Rows that are added up by id: C and torch, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from geartrain.errors import ProtocolError
from geartrain.native import library
from geartrain.native.sums import SumsById, may_multiply, multiply_sums

LIMIT, WIDTH = 12, 3


def _pieces(seed: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (5, 0, 17, 1)
    return [
        (
            torch.randn(n, WIDTH, generator=generator, dtype=dtype),
            torch.randint(LIMIT // 2, (n,), generator=generator) * 2,
        )
        for n in sizes
    ]


def _by_hand(pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    total = torch.zeros(LIMIT, WIDTH, dtype=pieces[0][0].dtype)
    for rows, ids in pieces:
        total.index_add_(0, ids, rows)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("in_c", [True, False])
def test_rows_are_added_up_by_id_and_then_there_are_none(
    in_c: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_c:
        monkeypatch.setattr(library, "current", lambda: None)
    sums = SumsById(WIDTH, LIMIT, dtype)
    for turn in range(2):
        first, then = _pieces(2 * turn, dtype), _pieces(2 * turn + 1, dtype)
        sums.add(first)
        sums.add(then)
        ids, rows = sums.take()
        wanted = _by_hand(first + then)
        # Each that came once, in the order in which they did.
        came = torch.cat([which for _, which in first + then]).tolist()
        assert ids.tolist() == list(dict.fromkeys(came))
        assert_close(rows, wanted[torch.from_numpy(ids)], rtol=1e-5, atol=1e-6)
        assert len(sums) == 0


@pytest.mark.parametrize("id_", [-1, LIMIT, 1 << 40])
@pytest.mark.parametrize("in_c", [True, False])
def test_an_id_beyond_the_limit_is_refused_and_nothing_is_added(
    in_c: bool, id_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_c:
        monkeypatch.setattr(library, "current", lambda: None)
    sums = SumsById(WIDTH, LIMIT, torch.float64)
    rows = torch.ones(2, WIDTH, dtype=torch.float64)
    sums.add([(rows, torch.tensor([4, 4]))])
    with pytest.raises(IndexError, match=f"not below {LIMIT}"):
        sums.add([(rows, torch.tensor([4, 5])), (rows, torch.tensor([3, id_]))])
    ids, found = sums.take()
    assert ids.tolist() == [4] and found.tolist() == [[2.0] * WIDTH]


@pytest.mark.parametrize("in_c", [True, False])
def test_rows_that_are_others_than_their_ids_are_refused_and_nothing_is_added(
    in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_c:
        monkeypatch.setattr(library, "current", lambda: None)
    sums = SumsById(WIDTH, LIMIT, torch.float64)
    rows, ids = torch.ones(2, WIDTH, dtype=torch.float64), torch.tensor([4, 4])
    for wrong in (
        (rows[1:], ids),
        (rows, ids[1:]),
        (rows[:, 1:], ids),
        (rows.float(), ids),
        (rows, ids.int()),
        (rows, ids[None]),
        (rows[:1], ids[None, :1]),
    ):
        with pytest.raises(ProtocolError, match="one for each row"):
            sums.add([(rows, ids), wrong])
    sums.add([])
    ids, found = sums.take()
    assert not len(ids) and not len(found)


@pytest.mark.usefixtures("needs_kernels")
def test_shapes_that_do_not_fit_are_refused() -> None:
    ids, table, weight = torch.tensor([3, 0]), torch.ones(LIMIT, WIDTH), torch.ones(4, 5)
    sums, to = torch.ones(2, 4), {"to_weight": torch.zeros(4, 5), "to_table": None}
    multiply_sums(ids, sums, table, weight, 2, -1, **to)
    with pytest.raises(ProtocolError, match="do not fit"):
        multiply_sums(ids, sums, table, weight, 3, -1, **to)
    with pytest.raises(ProtocolError, match="do not fit"):
        multiply_sums(ids, sums, table, weight, -1, -1, **to)
    with pytest.raises(ProtocolError, match="do not fit"):
        multiply_sums(ids[1:], sums, table, weight, 2, -1, **to)
    with pytest.raises(ProtocolError, match="do not fit"):
        multiply_sums(ids, sums[:, 1:], table, weight, 2, -1, **to)
    with pytest.raises(ProtocolError, match="do not fit"):
        multiply_sums(ids, sums, table, weight, 2, -1, to_weight=None, to_table=weight)
    assert to["to_weight"].sum() == 2 * 4 * WIDTH


def test_ids_may_become_larger() -> None:
    sums = SumsById(WIDTH, LIMIT, torch.float64)
    rows = torch.ones(1, WIDTH, dtype=torch.float64)
    sums.add([(rows, torch.tensor([1]))])
    sums.extend(200)
    sums.add(
        [(rows.expand(150, WIDTH).contiguous(), torch.arange(50, 200)), (rows, torch.tensor([1]))]
    )
    ids, found = sums.take()
    assert np.array_equal(ids, [1, *range(50, 200)])
    assert found[:, 0].tolist() == [2.0] + [1.0] * 150


def test_a_copy_of_sums_by_id_has_its_own() -> None:
    sums = SumsById(WIDTH, LIMIT, torch.float64)
    rows = torch.ones(2, WIDTH, dtype=torch.float64)
    sums.add([(rows, torch.tensor([1, 2]))])
    other = copy.deepcopy(sums)
    other.add([(5 * rows, torch.tensor([3, 1]))])
    sums.add([(rows, torch.tensor([2, 0]))])
    for some, ids, found in ((sums, [1, 2, 0], [1, 2, 1]), (other, [1, 2, 3], [6, 1, 5])):
        its_ids, its = some.take()
        assert its_ids.tolist() == ids
        assert its[:, 0].tolist() == found


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighs", [True, False])
@pytest.mark.parametrize("u", [0, 1, 9, 300])
def test_sums_by_row_of_a_table_meet_it_and_the_columns_of_a_weight(
    u: int, weighs: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(u)
    out, into, first, width, rows, padding = 5, 9, 2, 4, 320, 7
    weight, table = torch.randn(out, into, dtype=dtype), torch.randn(rows, width, dtype=dtype)
    ids, sums = torch.randperm(rows)[:u], torch.randn(u, out, dtype=dtype)
    to_weight, to_table = torch.randn_like(weight), torch.randn_like(table)
    wanted_weight, wanted_table = to_weight.clone(), to_table.clone()
    met = weight[:, first : first + width]
    wanted_weight[:, first : first + width] += sums.T @ table[ids]
    learns = ids != padding
    wanted_table[ids[learns]] += (sums @ met)[learns]
    assert may_multiply(sums, table, weight)
    multiply_sums(
        *(ids, sums, table, weight, first, padding),
        to_weight=to_weight if weighs else None,
        to_table=to_table,
    )
    close = 1e-12 if dtype is torch.float64 else 1e-4
    assert_close(to_table, wanted_table, rtol=close, atol=close)
    if weighs:
        assert_close(to_weight, wanted_weight, rtol=close, atol=close)


@pytest.mark.usefixtures("needs_kernels")
def test_sums_of_rows_themselves_go_where_they_belong() -> None:
    ids, sums = torch.tensor([3, 0]), torch.ones(2, WIDTH)
    table, found = torch.ones(LIMIT, WIDTH), torch.zeros(LIMIT, WIDTH)
    multiply_sums(ids, sums, table, None, 0, 3, to_weight=None, to_table=found)
    assert found.sum(1).tolist() == [WIDTH, *[0] * (LIMIT - 1)]
    with pytest.raises(IndexError, match="not below"):
        multiply_sums(ids + LIMIT - 3, sums, table, None, 0, -1, to_weight=None, to_table=found)
    assert not may_multiply(sums, table.t(), None)
    assert not may_multiply(sums, table.double(), None)

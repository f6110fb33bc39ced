"""Steps over rows of a few numbers, as heads of attention have them, in both dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from geartrain.derived.ragged.values import BUNDLES, EDGES, MEMBERS
from geartrain.native.fused import At, Op, Step
from geartrain.native.ragged import RaggedStep, RaggedSteps, Way

LENGTHS = [3, 0, 1, 20, 5]
COLUMNS = pytest.mark.parametrize("columns", [1, 2, 4, 6, 8, 12, 20])


@pytest.fixture(autouse=True, params=[torch.float32, torch.float64], ids=str)
def dtype(needs_kernels: None, request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    torch.manual_seed(0)
    yield request.param
    torch.set_default_dtype(before)


def _over_members(way: Way, columns: int, out: Tensor, *rows: Tensor) -> Tensor:
    """What a step makes of the members of bundles, in columns; rows lie apart, with more beside."""
    beside = torch.nn.functional.pad
    apart = [beside(x, (1, 2)) for x in rows]
    places = [At(0, 0, columns)]
    places += [At(1 + k, 1, columns + 3) for k in range(len(apart))]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    step = Step(Op.PRODUCT, columns, tuple(places), many=1, number=1.0)
    one = RaggedStep(way, step, BUNDLES, ends=3)
    steps = RaggedSteps([one], [0] * 4, [0] * 4, out.dtype, -1)
    at = [x.data_ptr() for x in (out, *apart)]
    sizes = [len(LENGTHS), sum(LENGTHS), 0, 0, 0]
    steps.run(sizes, at + [0] * (3 - len(at)) + [ends.data_ptr()])
    return out


@COLUMNS
def test_softmax_over_members_of_each_column(columns: int) -> None:
    a, dy = torch.randn(2, sum(LENGTHS), columns)
    a = (30 * a).requires_grad_()
    wanted = torch.cat([x.softmax(0) for x in a.split(LENGTHS)])
    y = _over_members(Way.SOFT, columns, torch.zeros_like(dy), a.detach())
    assert_close(y, wanted.detach())
    (da,) = torch.autograd.grad(wanted, a, dy)
    assert_close(_over_members(Way.SOFT_BACK, columns, torch.zeros_like(dy), dy, y), da)


def _by_number(way: Way, out: Tensor, a: Tensor, index: Tensor, cells: Tensor | None) -> Tensor:
    given = [index] if cells is None else [index, cells]
    places = At(0, 0, out.shape[1]), At(1, 0, a.shape[1])
    step = Step(Op.COPY, a.shape[1], places)
    slots = 2, -1, -1 if cells is None else 3
    one = RaggedStep(way, step, EDGES, 1, MEMBERS, 1, *slots, MEMBERS)
    steps = RaggedSteps([one], [0] * 4, [0] * 4, out.dtype, -1)
    at = [x.data_ptr() for x in (out, a, *given)]
    steps.run([1, len(out), len(index), 0, 0], at + [0] * (4 - len(at)))
    return out


@COLUMNS
def test_rows_are_added_and_raised_by_number(columns: int) -> None:
    out, rows = torch.randn(5, columns), torch.randn(30, columns)
    index, cells = torch.randint(5, (2, 30))
    assert_close(
        _by_number(Way.ADD_AT, out.clone(), rows, index, None), out.index_add(0, index, rows)
    )
    few = torch.randn(5, columns)
    moved = out.index_add(0, cells, few[index])
    assert_close(_by_number(Way.MOVE, out.clone(), few, index, cells), moved)
    names = index[:, None].expand_as(rows)
    wanted = out.scatter_reduce(0, names, rows, "amax")
    assert torch.equal(_by_number(Way.RAISE_AT, out.clone(), rows, index, None), wanted)


@COLUMNS
def test_what_is_no_number_stays(columns: int) -> None:
    out, rows = torch.zeros(2, columns), torch.full((2, columns), -1.0)
    out[0, -1], rows[1, 0] = torch.nan, torch.nan
    found = _by_number(Way.RAISE_AT, out.clone(), rows, torch.arange(2), None)
    assert_close(found, torch.maximum(out, rows), equal_nan=True)

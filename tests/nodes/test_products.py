"""Products by either library are the products."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from geartrain.nodes import products
from geartrain.nodes.gradient import GradientSum


@pytest.mark.parametrize("n", [1, 31, 32, 64, 101, 4096, 4128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_rows_are_those_of_float64(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    # Wide enough that 101 rows are filled up to 104.
    x, d = torch.randn(n, 320, dtype=dtype), torch.randn(n, 288, dtype=dtype)
    weight, bias = torch.randn(288, 320, dtype=dtype), torch.randn(288, dtype=dtype)
    wide_x, wide_d, wide_w = x.double(), d.double(), weight.double()
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    )
    with torch.no_grad():
        assert_close(
            products.affine(x, weight, bias).double(),
            wide_x @ wide_w.T + bias.double(),
            **tolerance,
        )
        assert_close(products.affine(x, weight, None).double(), wide_x @ wide_w.T, **tolerance)
        assert_close(products.times(d, weight).double(), wide_d @ wide_w, **tolerance)
        parameter = torch.nn.Parameter(weight.clone())
        into = GradientSum([parameter])
        into.add_product(parameter, d, x)
        into.add_product(parameter, d, x)
        found = into.take(parameter)
        assert found is not None
        assert_close(found.double(), 2 * wide_d.T @ wide_x, rtol=1e-4, atol=2e-3)


def test_rows_are_filled_up_by_a_sixteenth_at_most_and_to_few_numbers() -> None:
    if products._KERNEL is None:
        pytest.skip("torch's own product is at its best here, and nothing is filled up")
    many = range(2 * products.GRAIN + 1, 4097)
    found = [products.whole_rows(n) for n in many]
    assert all(n <= whole < n * 17 / 16 for n, whole in zip(many, found, strict=True))
    assert found == [products.whole_rows(whole) for whole in found]
    assert len(set(found)) == 16 * 3 + (4096 - 512) // 32
    assert products.whole_rows(100) == 100


@pytest.mark.parametrize("n", [1, 3, 8, 9, 63, 64, 65, 100])
def test_short_products_have_the_rows_that_came(n: int) -> None:
    torch.manual_seed(n)
    x, d = torch.randn(n, 40).bfloat16(), torch.randn(n, 48).bfloat16()
    weight, bias = torch.randn(48, 40), torch.randn(48)
    short = weight.bfloat16().float()
    close = {"rtol": 2e-2, "atol": 2e-1}
    with torch.no_grad():
        wide = x.float() @ short.T + bias.bfloat16().float()
        assert_close(products.affine(x, weight, bias).float(), wide, **close)
        assert_close(products.times(d, weight).float(), d.float() @ short, **close)
        assert_close(products.outer(d, x).float(), d.float().T @ x.float(), **close)


def test_a_strided_view_of_rows_is_multiplied_as_it_lies() -> None:
    torch.manual_seed(0)
    wide = torch.randn(64, 100)
    weight = torch.randn(40, 64)
    with torch.no_grad():
        x = wide[:, 3:67]
        assert_close(products.affine(x, weight, None), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_product_that_autograd_must_see_is_left_to_torch() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    y = products.affine(torch.randn(32, 64), weight, None)
    y.sum().backward()
    assert weight.grad is not None


class Source:
    """Finds a product and a sum for a weight and a bias."""

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> None:
        self.weight, self.bias = weight, bias

    def add_all(self, found, into):
        into.add_products(self.weight, list(found))
        into.add_sums(self.bias, [left for left, _ in found])


def _later(calls: int, rows: int):
    torch.manual_seed(0)
    weight, bias = (
        torch.nn.Parameter(torch.zeros(*n, dtype=torch.float64)) for n in ((3, 4), (3,))
    )
    sums, source = GradientSum([weight, bias]), Source(weight, bias)
    pairs = [tuple(torch.randn(rows, n, dtype=torch.float64) for n in (3, 4)) for _ in range(calls)]
    assert all(sums.add_later(source, pair, rows) for pair in pairs)
    return weight, bias, sums, pairs


@pytest.mark.parametrize(("calls", "rows"), [(1, 1), (5, 7), (40, 100)])
def test_what_is_sorted_later_is_in_the_sum_when_it_is_taken(calls, rows):
    weight, bias, sums, pairs = _later(calls, rows)
    torch.testing.assert_close(sums.take(weight), sum(a.t() @ b for a, b in pairs))
    torch.testing.assert_close(sums.take(bias), sum(a.sum(0) for a, _ in pairs))
    assert sums.take(weight) is None


def test_what_is_sorted_later_goes_where_a_sum_is_absorbed_and_away_where_it_is_forgotten():
    weight, bias, sums, pairs = _later(3, 2)
    other = GradientSum([weight, bias])
    other.absorb(sums)
    assert sums.take(weight) is None
    torch.testing.assert_close(other.take(weight), sum(a.t() @ b for a, b in pairs))
    torch.testing.assert_close(other.take(bias), sum(a.sum(0) for a, _ in pairs))
    weight, bias, sums, pairs = _later(3, 2)
    sums.forget()
    assert sums.take(weight) is None and sums.take(bias) is None


def test_many_rows_are_not_kept_for_later():
    weight, bias, sums, _ = _later(1, 1)
    assert not sums.add_later(Source(weight, bias), (torch.zeros(128, 3), torch.zeros(128, 4)), 128)

"""A mask belongs to its row until the row's gradient has come."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.derived.draws import ones_of
from geartrain.errors import GraphError
from geartrain.nn import RowDropout
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel, kernel_of

NOTHING = GradientSum(())


def _kernel(module: nn.Module) -> AbstractKernel:
    kernel = kernel_of(module)
    assert kernel is not None
    return kernel


@pytest.mark.parametrize("module", [RowDropout(0.4), nn.Dropout(0.4)])
def test_the_gradient_meets_the_mask_of_its_row(module: nn.Module) -> None:
    torch.manual_seed(0)
    kernel = _kernel(module)
    x = torch.randn(6, 5, dtype=torch.float64)
    (first,), kept_first = kernel.forward((x[:4],))
    (second,), kept_second = kernel.forward((x[4:],))
    y = torch.cat((first, second))
    factors = y / x
    order = [5, 0, 3, 1, 4, 2]
    kept = torch.cat((kept_first[0], kept_second[0]))[order]
    dy = torch.randn(6, 5, dtype=torch.float64)
    (dx,) = kernel.backward((dy[order],), (kept,), None, NOTHING)
    assert dx is not None
    assert_close(dx, (dy * factors)[order])
    assert 0 < (y == 0).sum() < y.numel()


@pytest.mark.parametrize("with_key", [False, True])
def test_a_share_of_p_is_dropped_and_the_mean_is_kept(with_key: bool) -> None:
    torch.manual_seed(0)
    n, d, p = 400, 100, 0.3
    inputs = (torch.ones(n, d), torch.arange(n))[: 1 + with_key]
    (y,), _ = _kernel(RowDropout(p)).forward(inputs)
    dropped = (y == 0).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 4 * sigma / (n * d) ** 0.5
    assert (dropped.mean(0) - p).abs().max() < 5 * sigma / n**0.5
    assert (dropped.mean(1) - p).abs().max() < 5 * sigma / d**0.5
    assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_masks_of_neighbouring_keys_and_seeds_do_not_resemble_each_other() -> None:
    n, d = 64, 256
    x, key = torch.ones(n, d, dtype=torch.float64), torch.arange(n)
    masks = [
        RowDropout(0.5, seed=s)(x, k) - 1 for s, k in ((0, key), (1, key), (0, key + (1 << 32)))
    ]
    for k, one in enumerate(masks):
        rows = one @ one.t() / d - torch.eye(n)
        assert rows.abs().max() < 6 / d**0.5
        for other in masks[:k]:
            assert (one * other).mean().abs() < 5 / (n * d) ** 0.5


def test_with_a_key_a_row_keeps_its_mask_in_any_batch_mode_and_dtype() -> None:
    module = RowDropout(0.5, seed=7)
    x, key = torch.randn(6, 2, 3), torch.tensor([5, 1 << 40, 0, -3, 2, 77])
    y = module(x, key)
    order = [3, 0, 5]
    assert torch.equal(module(x[order], key[order]), y[order])
    assert torch.equal(module(x.double(), key) == 0, y == 0)
    (from_kernel,), residuals = _kernel(module).forward((x, key))
    assert torch.equal(from_kernel, y)
    leaf = x.clone().requires_grad_()
    dy = torch.randn_like(y)
    (want,) = torch.autograd.grad(module(leaf, key), leaf, dy)
    dx, dkey = _kernel(module).backward((dy,), residuals, None, NOTHING)
    assert dx is not None and dkey is None
    assert_close(dx, want)


def test_the_masks_of_keys_are_the_same_for_ever() -> None:
    kept = RowDropout(0.5, seed=3)(torch.ones(3, 8), torch.tensor([0, 1, 2])) != 0
    assert kept.int().tolist() == [
        [1, 1, 1, 1, 0, 1, 1, 1],
        [1, 0, 1, 0, 0, 0, 0, 1],
        [0, 0, 1, 0, 1, 1, 0, 1],
    ]


def test_in_eval_mode_it_is_the_identity_both_ways() -> None:
    module = RowDropout(0.5).eval()
    x = torch.randn(3, 4)
    assert module(x) is x
    (y,), (factors,) = _kernel(module).forward((x,))
    assert torch.equal(y, x) and factors.shape == x.shape
    dy = torch.randn(3, 4)
    (dx,) = _kernel(module.train()).backward((dy,), (factors,), None, NOTHING)
    assert dx is not None and torch.equal(dx, dy)


def test_dropping_all_answers_zero() -> None:
    kernel = _kernel(nn.Dropout(1.0))
    (y,), kept = kernel.forward((torch.randn(3, 4),))
    (dx,) = kernel.backward((torch.ones(3, 4),), kept, None, NOTHING)
    assert dx is not None and not y.any() and not dx.any()


def test_training_without_kernel_or_key_is_refused_with_the_remedy() -> None:
    with pytest.raises(GraphError, match=r'RowDropout\(p=0.5\).*keep="activations".*pass a key'):
        RowDropout(0.5)(torch.ones(2, 2))


def test_without_probability_there_is_nothing_to_refuse() -> None:
    x = torch.ones(2, 2)
    assert RowDropout(0.0)(x) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_its_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="expected 0 <= p < 1"):
        RowDropout(p)


@pytest.mark.parametrize("key", [torch.zeros(2), torch.zeros(3, dtype=torch.int64)])
def test_a_key_that_is_not_one_integer_a_row_is_refused(key: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected torch.int64 of shape \(2,\)"):
        RowDropout(0.5)(torch.ones(2, 3), key)


def test_torchs_dropout_takes_no_key() -> None:
    with pytest.raises(ValueError, match=r"nn\.Dropout: 2 inputs came; expected x alone"):
        _kernel(nn.Dropout(0.5)).forward((torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)))


def test_no_rows_have_no_masks() -> None:
    y = RowDropout(0.5)(torch.ones(0, 3), torch.zeros(0, dtype=torch.int64))
    assert y.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_keys_masks_follow_from_seeds_that_torch_gives(dtype: torch.dtype) -> None:
    x = torch.rand(20, 3, 7).to(dtype) + 1
    torch.manual_seed(2)
    (y,), _ = _kernel(nn.Dropout(0.25)).forward((x,))
    after = torch.get_rng_state()
    torch.manual_seed(2)
    kept = ones_of(row_seeds(20), (3, 7), 0.75, 0)
    assert torch.equal(after, torch.get_rng_state())
    assert torch.equal(y != 0, kept)
    assert_close(y, x * kept.to(dtype) / 0.75, atol=0.02, rtol=0.02)

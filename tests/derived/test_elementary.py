"""Functions of entries in C: what torch says, of numbers, of infinities, of what is no number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from geartrain.native.fused import Elementary
from tests.rigs.products import halved
from tests.rigs.rowwise import Rowwise, assert_as_autograd, both, in_c

N, D = 7, 6
One = Callable[[Tensor], Tensor]
Two = Callable[[Tensor, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("needs_kernels")

ONE: Mapping[str, One] = {
    "asin": lambda x: (x * 0.3).asin(),
    "acos": lambda x: (x * 0.3).acos(),
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tan": torch.tan,
    "asinh": torch.asinh,
    "acosh": lambda x: (1.5 + x * x).acosh(),
    "atanh": lambda x: (x * 0.3).atanh(),
    "round": lambda x: x.round() * x,
    "round to two places": lambda x: x.round(decimals=2) * x,
    "round to tens": lambda x: x.round(decimals=-1) * x,
    "floor": lambda x: x - x.floor(),
    "ceil": lambda x: x * x.ceil(),
    "log1p": lambda x: (x * x).log1p(),
    "expm1": torch.expm1,
    "log2": lambda x: (x * x + 1).log2(),
    "log10": lambda x: (x * x + 1).log10(),
    "exp2": torch.exp2,
    "erfc": torch.erfc,
    "fmod": lambda x: x.fmod(0.7),
    "remainder": lambda x: x % 0.7 + x % -0.4,
    "whole times": lambda x: x * torch.div(x, 0.3, rounding_mode="floor"),
    "whole part": lambda x: x * torch.div(x, 0.3, rounding_mode="trunc"),
    "isnan": lambda x: torch.where(x.isnan(), 0.5, x),
    "isinf": lambda x: torch.where(x.isinf(), 0.5, x),
    "isfinite": lambda x: torch.where(x.isfinite(), x, 0.5),
    "nan_to_num": lambda x: x.nan_to_num(0.3, 2, -4),
    "nan_to_num of any": lambda x: x.nan_to_num(),
    "nansum": lambda x: x.nansum(1, keepdim=True) * x.nan_to_num(posinf=1, neginf=1),
    "nanmean": lambda x: x.nanmean(1),
    "sinc": torch.sinc,
    "entropy": lambda x: torch.special.entr(x),
    "logit": lambda x: (x + 0.5).logit(),
    "logit, at least": lambda x: (x + 0.5).logit(1e-3),
    "degrees": lambda x: x.deg2rad() + x.rad2deg(),
    "softplus, steep": lambda x: functional.softplus(x, 2.0),
    "softplus, in part": lambda x: functional.softplus(x, 1.0, 1.0),
    "softshrink": functional.softshrink,
    "hardshrink": functional.hardshrink,
    "threshold": lambda x: functional.threshold(x, 0.1, 0.2),
    "tanhshrink": functional.tanhshrink,
    "softsign": functional.softsign,
    "between numbers that are tensors": lambda x: x.clamp(*torch.tensor([-0.5, 0.5]).to(x)),
    "at least a tensor": lambda x: x.clamp(min=torch.tensor(0.5).to(x)),
    "at most a tensor": lambda x: x.clamp(max=torch.tensor(0.5).to(x)),
}
TWO: Mapping[str, Two] = {
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "copysign": lambda x, y: torch.copysign(x, y.detach()),
    "whole times": lambda x, y: x * torch.div(x, y, rounding_mode="floor"),
    "pow": lambda x, y: x.abs() ** y,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
    "logaddexp": torch.logaddexp,
    "between": lambda x, y: x.clamp(-y, y),
    "at least": lambda x, y: x.clamp(min=y),
    "at most": lambda x, y: x.clamp(max=y),
    "squares": lambda x, y: functional.mse_loss(x, y, reduction="none"),
    "lines": lambda x, y: functional.l1_loss(x, y, reduction="none"),
    "huber": lambda x, y: functional.huber_loss(x, y, reduction="none", delta=0.6),
    "smooth": lambda x, y: functional.smooth_l1_loss(x, y, reduction="none", beta=0.6),
    "smooth, all along": lambda x, y: functional.smooth_l1_loss(x, y, reduction="none", beta=0),
    "divergence": lambda x, y: functional.kl_div(x, y.abs(), reduction="none"),
}
SHARES: Mapping[str, Two] = {
    "shares": lambda x, y: functional.binary_cross_entropy(x, y, reduction="none"),
    "shares that weigh": lambda x, y: functional.binary_cross_entropy(
        x, y, torch.linspace(1, 2, x.shape[1]).to(x), reduction="none"
    ),
    "shares of a row": lambda x, y: functional.binary_cross_entropy(x, y, reduction="none").mean(1),
}
TORN = {"logit, at least", "softshrink", "hardshrink"}
"""Of what is no number torch's gradient is one thing or another, as many as there are."""
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 0.1, 0.6, 1e-30, 25.0, -25.0]
ENDS = [math.inf, -math.inf, math.nan]


def of_ends(dtype: torch.dtype, name: str = "") -> Tensor:
    ends = ENDS[:2] if name in TORN else ENDS
    return torch.tensor(EDGES + ends, dtype=dtype).unsqueeze(1)


@halved(name=[*ONE], dtype=[torch.float32, torch.float64])
def test_functions_of_one_are_torchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    close = 1e-11 if dtype is torch.float64 else 2e-5
    for x in (torch.randn(N, D, dtype=dtype), of_ends(dtype, name)):
        mine, torchs = both(ONE[name], [x])
        torch.testing.assert_close(mine, torchs, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("name", ["softplus", "logsigmoid", "elu"])
def test_what_c_reckons_of_many_at_a_time_is_exact_to_a_few_epsilons_of_itself(name: str) -> None:
    """Of numbers near one another, where logarithms and what is left of them lose the most."""
    function = getattr(functional, name)
    x = torch.cat([torch.linspace(-80, -20, 500), torch.linspace(-20, 25, 3001)])
    x = torch.cat([x, torch.linspace(-1e-3, 1e-3, 500)]).unsqueeze(1)
    (found, _), _ = both(function, [x])
    torch.testing.assert_close(found.double(), function(x.double()), rtol=5e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_waves_are_exact_where_they_pass_zero_and_far_out(name: str, dtype: torch.dtype) -> None:
    """Near quarters of the circle nothing is left of a number but its last digits; beyond a million
    C asks the library, also for a row in which only one number is so far."""
    function = getattr(torch, name)
    quarters = torch.arange(-300, 300, dtype=torch.float64) * (math.pi / 2)
    one_far = torch.cat([quarters[1:], quarters[-1:] * 1e20])
    x = torch.stack([*(quarters * by for by in (0.25, 1, 900, 1e6)), one_far]).to(dtype)
    (found, _), _ = both(function, [x])
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), function(x.double()), rtol=close, atol=0)
    ends = torch.tensor([[math.inf, -math.inf, math.nan, -0.0, 1.0]], dtype=dtype)
    (found, _), _ = both(function, [ends])
    torch.testing.assert_close(found, function(ends), rtol=close, atol=0, equal_nan=True)
    assert not found[0, :3].isfinite().any()
    assert math.copysign(1, found[0, 3].item()) == (-1 if name == "sin" else 1)


@halved(name=[*TWO], dtype=[torch.float32, torch.float64])
def test_functions_of_two_are_torchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    close = 1e-11 if dtype is torch.float64 else 2e-5
    ends = of_ends(dtype)
    every = ends.repeat_interleave(len(ends), 0), ends.repeat(len(ends), 1)
    for given in ([torch.randn(N, D, dtype=dtype) for _ in range(2)], every):
        mine, torchs = both(TWO[name], given)
        torch.testing.assert_close(mine, torchs, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHARES)
def test_losses_of_shares_are_torchs(name: str, dtype: torch.dtype) -> None:
    shares = torch.tensor([0.0, 1.0, 0.5, 0.2, 1e-30, 1 - 1e-7], dtype=dtype)
    given = [shares.expand(6, 6).contiguous(), shares.unsqueeze(1).expand(6, 6).contiguous()]
    mine, torchs = both(SHARES[name], given)
    torch.testing.assert_close(mine, torchs, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_one_number_a_row_meets_many() -> None:
    """Of either side."""

    def function(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y, one = f(x), f(x)[:, :1]
        return torch.atan2(y, one) + torch.hypot(one, y) + torch.fmod(y, one * one + 1)

    assert_as_autograd(Rowwise(function, D, D).double(), (torch.randn(N, D, dtype=torch.float64),))


def test_every_function_that_c_knows_is_tried() -> None:
    """Here, by name: there are as many as this file has."""
    assert len(Elementary) == 25


def test_what_mixes_rows_is_refused() -> None:
    for reduction in ("mean", "sum"):

        def function(f: Callable[[Tensor], Tensor], x: Tensor, how: str = reduction) -> Tensor:
            return f(x) * functional.mse_loss(f(x), x, reduction=how)

        with pytest.raises(Exception, match=r"rows|gradient"):
            in_c(Rowwise(function, D, D), (torch.randn(N, D),))

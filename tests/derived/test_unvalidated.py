"""Distributions of torch within modules: their checks look at values, and no trace has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence
from torch.nn.functional import softplus

from geartrain.derived.derivation import derive
from geartrain.derived.traces.unvalidated import unvalidated
from geartrain.errors import GraphError
from tests.rigs.rowwise import Rowwise, assert_as_autograd

N, D = 6, 4


def _normal(f: nn.Module, x: Tensor, **how: Any) -> Normal:
    return Normal(f(x), softplus(f(-x)) + 0.1, **how)


CASES: Mapping[str, Callable[[nn.Module, Tensor], Any]] = {
    "density": lambda f, x: _normal(f, x).log_prob(x),
    "densities of one": lambda f, x: Independent(_normal(f, x), 1).log_prob(x)[:, None] * x,
    "divergence": lambda f, x: kl_divergence(_normal(f, x), Normal(x * 0, 1 + x * x)),
    "entropy": lambda f, x: Categorical(logits=f(x)).entropy()[:, None] * x,
    "choice": lambda f, x: Categorical(logits=f(x)).log_prob(x.argmax(1))[:, None] * x,
}


def _inputs() -> list[Tensor]:
    return [torch.randn(N, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)]


def _module(of: Callable[[nn.Module, Tensor], Any]) -> nn.Module:
    torch.manual_seed(7)
    return Rowwise(of, D, D).double()


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("name", [*CASES])
def test_distributions_are_in_c(name: str) -> None:
    assert_as_autograd(_module(CASES[name]), _inputs())


def test_checks_are_made_again_behind_the_trace() -> None:
    derive(_module(CASES["density"]), _inputs())
    assert Distribution._validate_args
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(1), -torch.ones(1))


@pytest.mark.parametrize("usual", [True, False])
def test_the_last_of_several_traces_restores_what_there_was(usual: bool) -> None:
    before = Distribution._validate_args
    Distribution.set_default_validate_args(usual)
    try:
        first, second = unvalidated(), unvalidated()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not Distribution._validate_args
        second.__exit__(None, None, None)
        assert Distribution._validate_args is usual
    finally:
        Distribution.set_default_validate_args(before)


def test_checks_that_are_asked_for_look_at_values() -> None:
    module = _module(lambda f, x: _normal(f, x, validate_args=True).log_prob(x))
    with pytest.raises(GraphError, match="validate_args=True"):
        derive(module, _inputs())

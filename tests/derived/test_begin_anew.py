"""Kernels that serve in a later fit are as those that would be made for it, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.derivation import derive
from geartrain.derived.fused import PackedWeights
from geartrain.derived.kernel import DerivedKernel
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.native import library
from geartrain.native.steady import steady
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.payload import Recompute

WIDTH = 3


class Scaled(nn.Module):
    """A number, a buffer, a table and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(4, WIDTH)
        self.worth = 2.0
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(self.inner(x + self.table(ids)) * self.worth + self.shift)


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(4, WIDTH), torch.arange(4)


def program(module: Scaled) -> Program:
    return Program(derive(module, rows()), Operands(module))


def derived(module: Scaled) -> DerivedKernel:
    kernel = DerivedKernel("scaled", module)
    kernel.forward(rows())
    return kernel


def written(module: Scaled) -> None:
    with torch.no_grad():
        module.inner.weight.mul_(2)


def other_weight(module: Scaled) -> None:
    module.inner.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def other_buffer(module: Scaled) -> None:
    module.shift = torch.zeros(WIDTH)


def one_more(module: Scaled) -> None:
    module.register_buffer("more", torch.zeros(WIDTH))


def one_fewer(module: Scaled) -> None:
    module.inner.bias = None


def renamed(module: Scaled) -> None:
    its = module.inner._parameters
    its["heaviness"] = its.pop("weight")


def other_number(module: Scaled) -> None:
    module.worth = 1.0


@pytest.mark.parametrize("make", [program, derived], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "happens",
    [other_weight, other_buffer, one_more, one_fewer, renamed],
    ids=lambda f: f.__name__,
)
def test_a_kernel_of_other_weights_or_buffers_is_to_be_made(
    make: Callable[[Scaled], AbstractKernel], happens: Callable[[Scaled], None]
) -> None:
    module = Scaled()
    kernel = make(module)
    assert kernel.begin_anew()
    written(module)
    assert kernel.begin_anew()
    happens(module)
    assert not kernel.begin_anew()


@pytest.mark.usefixtures("needs_kernels")
def test_a_program_is_to_be_made_where_there_is_another_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = program(Scaled())
    monkeypatch.setattr(library, "current", lambda: None)
    assert not kernel.begin_anew()


def test_a_derived_kernel_of_other_settings_is_to_be_made() -> None:
    module = Scaled()
    kernel = derived(module)
    other_number(module)
    assert not kernel.begin_anew()
    kernel.forward(rows())  # it knows both now, and a new one would know one
    assert not kernel.begin_anew()


def test_kernels_of_other_kinds_are_to_be_made() -> None:
    module = Scaled()
    assert not Recompute(module, [*module.parameters()]).begin_anew()


def test_rows_of_a_fit_before_are_not_expected() -> None:
    packed = PackedWeights()
    for begins, expected in ((False, 10), (True, 3)):
        with steady():
            assert packed.expects(10) == 10
        if begins:
            packed.begin()
        with steady():
            assert packed.expects(3) == expected


def test_a_program_that_begins_anew_learns_as_one_that_is_made_now() -> None:
    """Of what learns no more since, too."""
    torch.manual_seed(0)
    module, given = Scaled(), rows()
    kernel = program(module)
    found: list[list[Tensor | None]] = []
    into = GradientSum(module.parameters())
    for kernels in ((kernel,), (kernel, None)):
        for each in kernels:
            one = program(module) if each is None else each
            with torch.no_grad(), steady():
                outputs, kept = one.forward(given)
                one.backward(tuple(map(torch.ones_like, outputs)), kept, None, into)
            gradients, _ = into.take_each([*module.parameters()])
            found.append([None if x is None else x.clone() for x in gradients])
        module.table.weight.requires_grad_(False)
        module.inner.bias.requires_grad_(False)
        assert kernel.begin_anew()
    then, anew, fresh = found
    assert None not in then and [x is None for x in fresh] == [False, True, True]
    for mine, its in zip(anew, fresh, strict=True):
        assert mine is its is None or torch.equal(mine, its)

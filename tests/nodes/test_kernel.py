"""Which modules have a kernel, and which are better run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.nn import RowDropout, TokenRNN, TreeLSTMLeaf
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import (
    AbstractKernel,
    kernel_of,
    may_have_kernel,
    modules_in,
    parameters_of,
    register_kernel,
)


class _Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def row_kernel(self) -> AbstractKernel:
        return _DoublingKernel()


class _DoublingKernel(AbstractKernel):
    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        return (2 * inputs[0],), ()

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        return (None if gradients[0] is None else 2 * gradients[0],)


class _Tripling(_Doubling):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class _TriplingWithKernel(_Tripling):
    def row_kernel(self) -> AbstractKernel:
        return _DoublingKernel()


class _Named(_Doubling):
    """Changes neither the forward nor the kernel."""


class _WrongAnswer(_Doubling):
    def row_kernel(self) -> AbstractKernel:
        return 3  # type: ignore[return-value]


class _MyLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2),
        nn.Embedding(3, 2),
        nn.Embedding(3, 2, sparse=True),
        nn.ReLU(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.Identity(),
        nn.Dropout(),
        nn.LSTMCell(2, 2),
        nn.GRUCell(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), RowDropout())),
        RowDropout(),
        _Doubling(),
        _Named(),
        _TriplingWithKernel(),
        nn.Sequential(_Doubling(), nn.Linear(2, 2)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_module_with_a_kernel_gets_it(module: nn.Module) -> None:
    assert isinstance(kernel_of(module), AbstractKernel)


def _parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))


def _patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(2),
        lambda: _MyLinear(2, 2),
        _Tripling,
        lambda: nn.Embedding(3, 2, max_norm=1.0),
        lambda: nn.Embedding(3, 2, scale_grad_by_freq=True),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.GRUCell(2, 2)),
        lambda: nn.Sequential(nn.Linear(2, 2), _MyLinear(2, 2)),
        lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0), nn.Tanh()),
        lambda: TreeLSTMLeaf(2, 2),
        lambda: TokenRNN(3, 2),
        _parametrized,
        _patched,
    ],
)
def test_a_module_that_computes_something_else_runs_again(make: Callable[[], nn.Module]) -> None:
    assert kernel_of(make()) is None


@pytest.mark.parametrize(
    "add_hook",
    [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: next(m.parameters()).register_hook(lambda g: g),
    ],
    ids=["forward", "forward pre", "backward", "backward pre", "parameter"],
)
@pytest.mark.parametrize(
    "build",
    [
        lambda: (m := nn.Linear(2, 2), m),
        lambda: (m := nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Sequential(m))),
        lambda: ((m := nn.Embedding(3, 2)), nn.Sequential(m, nn.Linear(2, 2))),
    ],
    ids=["itself", "in a sequence", "a table in a sequence"],
)
def test_a_hook_would_be_passed_over_so_the_module_runs_again(
    build: Callable[[], tuple[nn.Module, nn.Module]], add_hook: Callable[[nn.Module], object]
) -> None:
    hooked, whole = build()
    assert kernel_of(whole) is not None
    add_hook(hooked)
    assert kernel_of(whole) is None


def test_a_kernel_follows_when_weights_are_replaced() -> None:
    module = nn.Linear(2, 3)
    kernel = kernel_of(module)
    assert kernel is not None
    module.weight, module.bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.zeros(3))
    with torch.no_grad():
        (y,), _ = kernel.forward((torch.ones(1, 2),))
    assert y.tolist() == [[2.0, 2.0, 2.0]]


def test_something_else_than_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(GraphError, match=r"_WrongAnswer.row_kernel\(\) returned int; expected an"):
        kernel_of(_WrongAnswer())


@pytest.fixture
def foreign() -> Iterator[type[nn.Module]]:
    class Foreign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    yield Foreign


def test_a_registered_type_has_a_kernel_and_its_subclasses_have_none(
    foreign: type[nn.Module],
) -> None:
    assert kernel_of(foreign()) is None
    register_kernel(foreign, lambda _: _DoublingKernel())
    assert isinstance(kernel_of(foreign()), _DoublingKernel)
    assert kernel_of(type("Below", (foreign,), {})()) is None
    register_kernel(foreign, lambda _: None)
    assert kernel_of(foreign()) is None


class _Hides(nn.Linear):
    """Has a parameter that it does not tell of."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter([self.bias])


def test_parameters_are_found_as_torch_finds_them():
    shared, tied = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    tied.weight = shared.weight
    module = nn.Sequential(nn.Sequential(nn.PReLU(), shared), tied, nn.BatchNorm1d(2), shared)
    module.register_parameter("own", nn.Parameter(torch.zeros(1)))
    module.register_parameter("nothing", None)
    found = parameters_of(module)
    assert [*map(id, found)] == [*map(id, module.parameters())] and len(found) == 6
    hides = _Hides(2, 2)
    assert [*map(id, parameters_of(hides))] == [id(hides.bias)]
    assert parameters_of(nn.Tanh()) == []


def test_modules_are_walked_once_each_as_torch_walks_them():
    shared, inner = nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2))
    module = nn.Sequential(shared, inner, nn.Sequential(shared, nn.Identity()))
    module.register_module("nothing", None)
    found = modules_in(module)
    assert [*map(id, found)] == [*map(id, module.modules())]
    assert may_have_kernel(module)
    inner[1].weight.register_hook(lambda g: g)
    assert not may_have_kernel(module)

"""Modules as users write them have programs in C, whose gradients are those of autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.nodes.gradient import GradientSum

N, D = 23, 8
Body = Callable[[nn.Module, tuple[Tensor, ...]], Tensor | tuple[Tensor, ...]]


pytestmark = pytest.mark.usefixtures("needs_kernels")


class Written(nn.Module):
    """A linear map of the first argument, and something with what it gives and with the others."""

    def __init__(self, body: Callable[..., Tensor | tuple[Tensor, ...]], out: int = D) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(D, out), body
        self.scale, self.first = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(1, D))

    def forward(self, *rows: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.body(self, self.linear(rows[0]), *rows[1:])


class Within(nn.Module):
    """torch's recurrent cells, with state as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(D, D)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.cell(x, (h, c))
        return found


def _after(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(D, D), *layers)


def _gives(
    body: Callable[..., Tensor | tuple[Tensor, ...]], out: int = D
) -> Callable[[], nn.Module]:
    return lambda: Written(body, out)


_ONE: Mapping[str, Callable[[], nn.Module]] = {
    "rms norm": _after(nn.RMSNorm(D)),
    "softplus": _after(nn.Softplus()),
    "elu": _after(nn.ELU()),
    "leaky relu": _after(nn.LeakyReLU()),
    "hardtanh": _after(nn.Hardtanh(-0.3, 0.4)),
    "relu6": _after(nn.ReLU6()),
    "mish": _after(nn.Mish()),
    "gelu by tanh": _after(nn.GELU("tanh")),
    "selu": _after(nn.SELU()),
    "celu": _after(nn.CELU(0.7)),
    "hardsigmoid": _gives(lambda m, x: functional.hardsigmoid(4 * x)),
    "hardswish": _gives(lambda m, x: functional.hardswish(4 * x)),
    "power": _gives(lambda m, x: 3.0**x),
    "prelu of one": _after(nn.PReLU()),
    "prelu": _after(nn.PReLU(D)),
    "log sigmoid": _after(nn.LogSigmoid()),
    "log softmax": _after(nn.LogSoftmax(1)),
    "glu": _gives(lambda m, x: functional.glu(x), 2 * D),
    "clamp": _gives(lambda m, x: x.clamp(-0.2, 0.3)),
    "normalize": _gives(lambda m, x: functional.normalize(x, dim=-1)),
    "powers": _gives(lambda m, x: x.pow(2) + x**3 + x.abs().add(1).rsqrt()),
    "roots": _gives(lambda m, x: (x.abs() + 1).sqrt().log() + 1 / (2 + x.abs())),
    "waves": _gives(lambda m, x: torch.sin(x) * torch.cos(2 * x)),
    "standard": _gives(lambda m, x: (x - x.mean(1, True)) / (x.std(1, keepdim=True) + 1)),
    "log sum exp": _gives(lambda m, x: torch.logsumexp(x, -1, keepdim=True) * x),
    "scaled": _gives(lambda m, x: m.scale * x),
    "first state": _gives(lambda m, x: x * m.first.expand(x.shape[0], -1)),
    "new zeros": _gives(lambda m, x: (x, x.new_zeros(x.shape[0], 3) + x[:, :3])),
    "most": _gives(lambda m, x: x.view(-1, 2, D // 2).amax(1)),
}
_TWO: Mapping[str, Callable[[], nn.Module]] = {
    "gru": lambda: nn.GRUCell(D, D),
    "rnn": lambda: nn.RNNCell(D, D),
    "where": _gives(lambda m, x, y: torch.where(x > 0, x, y)),
    "where a number": _gives(lambda m, x, y: torch.where(x > y, 2.0, x) + torch.where(y < 0, y, 1)),
    "masks": _gives(lambda m, x, y: x.masked_fill((x > 0) & (y < 0.5) | (x <= -1), 0.5) + y),
    "cosine": _gives(lambda m, x, y: functional.cosine_similarity(x, y)[:, None] * x),
    "between": _gives(lambda m, x, y: torch.lerp(x, y, torch.sigmoid(x))),
    "added products": _gives(lambda m, x, y: torch.addcmul(y, x, x) + torch.addcdiv(x, y, x.exp())),
    "stacked": _gives(lambda m, x, y: torch.stack([x, y], 1).mean(1)),
    "the larger": _gives(lambda m, x, y: torch.stack([x, y], 1).amax(1)),
    "heads": _gives(
        lambda m, x, y: (x.view(-1, 2, 4) @ y.view(-1, 2, 4).transpose(1, 2)).flatten(1)
    ),
    "outer": _gives(lambda m, x, y: (x[:, :, None] * y[:, None, :]).flatten(1)),
    "weighed": _gives(
        lambda m, x, y: (
            torch.softmax((x.view(-1, 2, 4) * y.view(-1, 2, 4)).sum(-1), -1)[..., None]
            * y.view(-1, 2, 4)
        ).flatten(1)
    ),
}
_THREE: Mapping[str, Callable[[], nn.Module]] = {"lstm": Within}
_ALL = [*((1, n) for n in _ONE), *((2, n) for n in _TWO), *((3, n) for n in _THREE)]


def _program(count: int, name: str) -> tuple[nn.Module, list[Tensor], Program]:
    torch.manual_seed(0)
    make = {1: _ONE, 2: _TWO, 3: _THREE}[count][name]
    module, given = make().double(), [torch.randn(N, D, dtype=torch.float64) for _ in range(count)]
    return module, given, Program(derive(module, given), Operands(module))


@pytest.mark.parametrize(("count", "name"), _ALL, ids=lambda x: str(x).replace(" ", "-"))
def test_common_modules_have_programs_in_c_that_are_right(count: int, name: str) -> None:
    module, given, program = _program(count, name)
    assert program.listed(512) is not None
    leaves = [x.clone().requires_grad_() for x in given]
    found = module(*leaves)
    expected = found if isinstance(found, tuple) else (found,)
    dys = tuple(torch.randn_like(y) for y in expected)
    wanted = torch.autograd.grad(
        expected, [*leaves, *module.parameters()], dys, allow_unused=True, materialize_grads=True
    )
    into = GradientSum(module.parameters())
    with torch.no_grad():
        outputs, kept = program.forward(tuple(given))
        answers = program.backward(dys, kept, None, into)
    for y, z in zip(expected, outputs, strict=True):
        torch.testing.assert_close(z, y.detach())
    took = [into.take(p) for p in module.parameters()]
    for x, y in zip(wanted, [*answers, *took], strict=True):
        torch.testing.assert_close(torch.zeros_like(x) if y is None else y, x)


def test_what_is_not_a_number_is_not_above_and_not_below() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Hardtanh(), nn.LeakyReLU()).double()
    given = [torch.randn(N, D, dtype=torch.float64)]
    program = Program(derive(module, given), Operands(module))
    given[0][3] = torch.nan
    with torch.no_grad():
        ((found,), _) = program.forward(tuple(given))
        assert found.isnan().any(1).nonzero().flatten().tolist() == [3]
        torch.testing.assert_close(found, module(given[0]), equal_nan=True)


def test_rows_that_are_minus_infinity_all_over_have_no_weight() -> None:
    module = Written(lambda m, x, y: torch.logsumexp(x + y, 1, keepdim=True).exp() * x).double()
    given = [torch.randn(N, D, dtype=torch.float64) for _ in range(2)]
    program = Program(derive(module, given), Operands(module))
    assert program.listed(512) is not None
    given[1][3] = -torch.inf
    with torch.no_grad():
        ((found,), _) = program.forward(tuple(given))
        torch.testing.assert_close(found, module(*given))

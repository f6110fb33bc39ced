"""What lies side by side with others in what is kept is not kept once more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.nodes.gradient import GradientSum

N, D = 7, 4


class Gated(nn.Module):
    """A state that meets a weight beside what comes, and is multiplied by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * D, D)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear(torch.cat([x, h], 1)))
        return gate * h + torch.relu(h) * x


class Stacked(nn.Module):
    """Two entries of a stack, in rows that are in other rows themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * D, D), nn.Linear(3 * D, D)

    def forward(self, stack: Tensor, h: Tensor) -> Tensor:
        upper, lower = stack[:, 0], stack[:, 1]
        both = torch.cat([upper, lower], -1)
        gate = torch.tanh(self.inner(both))
        return self.outer(torch.cat([both, h], 1)) * gate * upper * lower * h


class Turned(nn.Module):
    """Rows side by side that no weight meets: they are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.cat([x * h, self.linear(x)], 1)


CASES = {
    # Rows side by side, and the gate.
    "gated": (Gated, lambda: (torch.randn(N, D).double(), torch.randn(N, D).double()), 3 * D),
    # Of a stack of five nothing; all rows, the gate, and the other factor.
    "stacked": (
        Stacked,
        lambda: (torch.randn(N, 5, D).double(), torch.randn(N, D).double()),
        5 * D,
    ),
    "turned": (Turned, lambda: (torch.randn(N, D).double(), torch.randn(N, D).double()), 2 * D),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_lies_in_what_is_kept_is_read_there(name: str, fused: bool) -> None:
    torch.manual_seed(0)
    make, given, entries = CASES[name]
    module, inputs = make().double(), given()
    program = Program(derive(module, inputs), Operands(module), fused=fused)
    with torch.no_grad():
        (y,), kept = program.forward(inputs)
    mine = [x.requires_grad_() for x in inputs]
    wanted = module(*mine)
    torch.testing.assert_close(y, wanted)
    assert sum(x[0].numel() for x in kept) == entries
    dy = torch.randn(y.shape).double()
    answers = torch.autograd.grad(wanted, [*mine, *module.parameters()], dy)
    rows = torch.randperm(N)[: N - 2]
    for which in (None, rows.numpy()):
        some = dy if which is None else dy[rows]
        into = GradientSum(list(module.parameters()))
        with torch.no_grad():
            found = program.backward((some,), kept, which, into)
        for d, answer in zip(found, answers, strict=False):
            torch.testing.assert_close(d, answer if which is None else answer[rows])
        if which is None:
            for p, answer in zip(module.parameters(), answers[len(mine) :], strict=True):
                torch.testing.assert_close(into.take(p), answer)

"""Row-wise modules whose programs are in C, beside what autograd says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.nodes.gradient import GradientSum


class Rowwise(nn.Module):
    """A function of a map and of what it is given."""

    def __init__(self, function: Callable[..., Any], into: int, out: int) -> None:
        super().__init__()
        self.function, self.map = function, nn.Linear(into, out)

    def forward(self, *given: Tensor) -> Any:
        return self.function(self.map, *given)


def in_c(module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether its programs are in C."""
    return derive(module, inputs).parts.fused is not None


def assert_as_autograd(
    module: nn.Module, inputs: Sequence[Tensor], samples: Sequence[Tensor] | None = None
) -> None:
    """Its programs are in C, and give the outputs and gradients of autograd.

    Args:
        module: Of rows.
        inputs: Rows that are tried.
        samples: Those that it is traced with; None: the same.
    """
    cut = derive(module, samples or inputs)
    assert cut.parts.fused is not None
    program, into = Program(cut, Operands(module)), GradientSum(list(module.parameters()))
    with torch.no_grad():
        outputs, kept = program.forward(tuple(inputs))
        dys = tuple(torch.randn_like(y) if y.is_floating_point() else None for y in outputs)
        back = program.backward(dys, kept, None, into)
        sums = [into.take(p) for p in module.parameters()]
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    made = module(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    torch.testing.assert_close([*outputs], [y.detach() for y in made])
    pairs = [(y, d) for y, d in zip(made, dys, strict=True) if d is not None]
    wanted = [x for x in (*leaves, *module.parameters()) if x.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True
    )
    mine = [d for x, d in zip(leaves, back, strict=True) if x.requires_grad]
    for d, w in zip([*mine, *sums], found, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if d is None else d.to_dense(), torch.zeros(()) if w is None else w
        )


def both(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    samples: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], ...]:
    """Output and gradients of inputs: of a program in C, and of autograd.

    Args:
        function: Of rows of numbers.
        inputs: Those.
        samples: What it is traced with; None: numbers between zero and one.
    """

    def rowwise(f: object, *given: Tensor) -> Tensor:
        return function(*given)

    module = Rowwise(rowwise, 1, 1)
    if samples is None:
        samples = [torch.rand(5, *x.shape[1:], dtype=x.dtype) * 0.8 + 0.1 for x in inputs]
    cut = derive(module, samples)
    assert cut.parts.fused is not None, cut.parts.unfused
    program, into = Program(cut, Operands(module)), GradientSum(list(module.parameters()))
    with torch.no_grad():
        (y,), kept = program.forward(tuple(inputs))
        dy = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)
        back = program.backward((dy,), kept, None, into)
    leaves = [x.clone().requires_grad_() for x in inputs]
    made = function(*leaves)
    wanted = torch.autograd.grad(made, leaves, dy, materialize_grads=True)
    found = [torch.zeros_like(x) if d is None else d for x, d in zip(inputs, back, strict=True)]
    return [y, *found], [made.detach(), *wanted]

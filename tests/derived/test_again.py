"""What a way back computes again beside its gradient is one step with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.steps.again import with_gradients
from geartrain.native.fused import At, Op, Step
from geartrain.nodes.gradient import GradientSum
from tests.rigs.programs_in_c import ops_of

N, D = 21, 6
_AGAIN = Step(Op.GELU, D, (At(2, 0, D), At(0, 0, D)))
_BACK = Step(Op.GELU_BACK, D, (At(3, 0, D), At(1, 0, D), At(0, 0, D)))
_ELSE = Step(Op.NEG, D, (At(4, 0, D), At(1, 0, D)))


def _found(program: Program, module: nn.Module, x: Tensor) -> list[Tensor]:
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        outputs, kept = program.forward((x,))
        (back,) = program.backward((torch.cos(outputs[0]),), kept, None, into)
        sums = [into.take(p) for p in module.parameters()]
    assert back is not None
    return [*outputs, back, *[s.clone() for s in sums if s is not None]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("act", "both", "apart"),
    [
        (nn.GELU, Op.GELU_BOTH, {Op.GELU, Op.GELU_BACK}),
        (nn.SiLU, Op.SILU_BOTH, {Op.SILU, Op.SILU_BACK}),
    ],
)
def test_both_are_one_step_and_what_torch_computes(
    act: type[nn.Module], both: Op, apart: set[Op], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(D, 2 * D), act(), nn.Linear(2 * D, D)).to(dtype)
    x = 4 * torch.randn(N, D, dtype=dtype)
    cut = derive(module, (x,))
    assert cut.parts.fused is not None
    ops = ops_of(cut.parts.fused.backward._steps)
    assert ops.count(both) == 1
    assert not apart & set(ops)
    operands = Operands(module)
    found = _found(Program(cut, operands), module, x)
    wanted = _found(Program(cut, operands, fused=False), module, x)
    close = 1e-12 if dtype is torch.float64 else 2e-5
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)


def test_they_are_one_where_nobody_has_read_or_written_in_between() -> None:
    both = Step(Op.GELU_BOTH, D, (*_BACK.places, At(), _AGAIN.places[0]))
    assert with_gradients([_AGAIN, _ELSE, _BACK]) == [_ELSE, both]


@pytest.mark.parametrize(
    "between",
    [
        Step(Op.NEG, D, (At(4, 0, D), At(2, 0, D))),  # reads what is computed again
        Step(Op.NEG, D, (At(2, 0, D), At(1, 0, D))),  # writes where that lies
        Step(Op.NEG, D, (At(0, 0, D), At(1, 0, D))),  # writes what it is made of
        Step(Op.NORM, D, (At(4, 0, D), At(1, 0, D), At(), At(), At(0, 0, 1), At(5, 0, 1)), D),
    ],
)
def test_they_are_two_where_somebody_has(between: Step) -> None:
    steps = [_AGAIN, between, _BACK]
    assert with_gradients(steps) == steps


@pytest.mark.parametrize(
    "back",
    [
        Step(Op.GELU_BACK, D, (At(2, 0, D), At(1, 0, D), At(0, 0, D))),  # to the same place
        Step(Op.GELU_BACK, D, (At(3, 0, D), At(2, 0, D), At(0, 0, D))),  # of what is computed
        Step(Op.GELU_BACK, D, (At(3, 0, D), At(1, 0, 1, one=True), At(0, 0, D))),
        Step(Op.GELU_BACK, D, (At(3, 0, D), At(1, 0, D), At(0, D, D))),  # of other entries
        Step(Op.SILU_BACK, D, (At(3, 0, D), At(1, 0, D), At(0, 0, D))),
    ],
)
def test_other_gradients_are_left_as_they_are(back: Step) -> None:
    steps = [_AGAIN, back]
    assert with_gradients(steps) == steps

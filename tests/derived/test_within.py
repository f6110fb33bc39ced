"""What derived programs compute within a row that is a stack of rows: attention, and its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.native.steady import steady
from geartrain.nodes.gradient import GradientSum

N, K, D, HEADS = 9, 3, 8, 2
Rule = Callable[["Within", Tensor, Tensor], Tensor]


pytestmark = pytest.mark.usefixtures("needs_kernels")


class Within(nn.Module):
    """A rule of rows ``(n, d)`` and stacks ``(n, k, d)``."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.inner, self.wide, self.norm = nn.Linear(D, D), nn.Linear(D, 3 * D), nn.LayerNorm(D)
        self.heads = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(D, HEADS, 12, batch_first=True, dropout=0.0)
        self.each = nn.Parameter(torch.randn(D))
        self.tall = nn.Parameter(torch.randn(K, 1))

    def forward(self, x: Tensor, stack: Tensor) -> Tensor:
        return self.rule(self, x, stack)


def _einsum(m: Within, x: Tensor, stack: Tensor) -> Tensor:
    share = torch.einsum("nd,nkd->nk", m.inner(x), stack).softmax(1)
    return torch.einsum("nk,nkd->nd", share, stack)


def _by_hand(m: Within, x: Tensor, stack: Tensor) -> Tensor:
    """Several heads, as everybody writes them."""
    q, k, v = (y.view(-1, K, HEADS, D // HEADS).transpose(1, 2) for y in m.wide(stack).chunk(3, -1))
    share = (q @ k.transpose(-2, -1) / math.sqrt(D // HEADS)).softmax(-1)
    return m.inner((share @ v).transpose(1, 2).reshape(-1, K, D)) + x.unsqueeze(1)


_RULES: dict[str, Rule] = {
    "einsum": _einsum,
    "function": lambda m, x, s: functional.scaled_dot_product_attention(
        m.inner(x).unsqueeze(1), s, s
    ).squeeze(1),
    "scaled": lambda m, x, s: functional.scaled_dot_product_attention(m.inner(s), s, s, scale=0.3),
    "heads": lambda m, x, s: m.heads(x.unsqueeze(1), s, s, need_weights=False)[0].squeeze(1),
    "heads of themselves": lambda m, x, s: m.heads(s, s, s)[0].sum(1) + x,
    "shares": lambda m, x, s: m.heads(s, s, s)[1] @ s,
    "layer": lambda m, x, s: m.layer(s)[:, 0] * x,
    "heads by hand": _by_hand,
    "weight": lambda m, x, s: torch.relu(m.inner(s)) * x.unsqueeze(1),
    "norm": lambda m, x, s: m.norm(torch.tanh(s) + x.unsqueeze(1)),
    "logarithms": lambda m, x, s: m.inner(s).log_softmax(-1),
    "columns": lambda m, x, s: m.wide(s)[:, :, D : 2 * D] * m.wide(s)[..., -D:],
    "turned": lambda m, x, s: (s.transpose(1, 2) @ m.inner(s)).flatten(1),
    "turned rows": lambda m, x, s: m.inner(s).permute(0, 2, 1).reshape(-1, D * K),
    "a weight for each": lambda m, x, s: torch.tanh(s * m.each + m.each),
    "a weight for each of squares": lambda m, x, s: (
        (s.unsqueeze(1) * x[:, :2, None, None] - m.each) / (m.tall.exp() + 1)
    ),
    "a weight or a row": lambda m, x, s: torch.where(s > 0, s, m.each),
    "a weight beside": lambda m, x, s: torch.cat([m.each.expand(len(s), 1, D), m.inner(s)], 1),
    "part of a stack": lambda m, x, s: m.inner(s[:, 1:]) * x.unsqueeze(1),
    "a vector": lambda m, x, s: (s @ m.each).softmax(1).unsqueeze(1) @ s,
    "numbers of its own": lambda m, x, s: (
        s * torch.tensor([0.5, 2, 1] * 2 + [3, 4.0]).to(s) + x[:, None]
    ),
    "all before it": lambda m, x, s: (
        (s @ m.inner(s).mT).masked_fill(torch.ones(K, K).triu(1) > 0, -1e9).softmax(2) @ s
    ),
    "some of them": lambda m, x, s: torch.where(
        (torch.arange(K) <= (x[:, :1] > 0).long() + 1)[..., None], m.inner(s), x[:, None]
    ),
    "added": lambda m, x, s: torch.baddbmm(
        x.unsqueeze(1), m.inner(x).unsqueeze(1), s.mT @ s, beta=0.5, alpha=2
    ).squeeze(1),
}


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, D, dtype=torch.float64), torch.randn(N, K, D, dtype=torch.float64)


def _made(rule: Rule) -> Within:
    torch.manual_seed(1)
    module = Within(rule).double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.rand_like(p))  # biases of zero would hide what they miss
    return module


def _plainly(module: Within, inputs: tuple[Tensor, Tensor], rows: list[int]) -> list[Tensor]:
    """Output, gradients of inputs and of parameters, which some have not."""
    leaves = [x[rows].clone().requires_grad_() for x in inputs]
    y = module(*leaves)
    wanted = [*leaves, *module.parameters()]
    found = torch.autograd.grad(y, wanted, torch.cos(y.detach()), materialize_grads=True)
    return [y.detach(), *found]


def _by_program(
    module: Within, program: Program, inputs: tuple[Tensor, Tensor], rows: list[int]
) -> list[Tensor]:
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        (y,), kept = program.forward(inputs)
        back = program.backward((torch.cos(y[rows]),), kept, np.array(rows), into)
        sums = [into.take(p) for p in module.parameters()]
    dx = [torch.zeros_like(x[rows]) if d is None else d for x, d in zip(inputs, back, strict=True)]
    sums = [
        torch.zeros_like(p) if d is None else d.clone()
        for p, d in zip(module.parameters(), sums, strict=True)
    ]
    return [y[rows], *dx, *(d for d in sums if d is not None)]


@pytest.mark.parametrize("name", _RULES)
def test_steps_give_what_autograd_does(name: str) -> None:
    module, inputs = _made(_RULES[name]), _inputs()
    cut = derive(module, inputs)
    assert cut.parts.fused is not None
    for rows in (list(range(N)), [4, 0, 7]):
        wanted = _plainly(module, inputs, rows)
        for fused in (True, False):
            program = Program(cut, Operands(module), fused=fused)
            found = _by_program(module, program, inputs, rows)
            assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["weight", "heads by hand", "layer"])
def test_rows_of_several_updates_go_each_to_their_own(name: str) -> None:
    module, inputs = _made(_RULES[name]), _inputs()
    program = Program(derive(module, inputs), Operands(module))
    updates = np.array([0, 1, 1, 0, 2, 0, 1, 2, 0])
    into = GradientSum(list(module.parameters()))
    with torch.no_grad(), steady():
        (y,), kept = program.forward(inputs)
        with into.of_updates(updates):
            program.backward((torch.cos(y),), kept, None, into)
    for update in range(3):
        rows = np.flatnonzero(updates == update).tolist()
        for p, wanted in zip(module.parameters(), _plainly(module, inputs, rows)[3:], strict=True):
            found = into.take(p)
            assert_close(torch.zeros_like(p) if found is None else found, wanted)
        into.next_update()


_SHARED = torch.arange(1.0, D + 1, dtype=torch.float64)


def test_numbers_that_somebody_else_has_are_read_when_it_runs() -> None:
    module, inputs = _made(lambda m, x, s: m.inner(x) * _SHARED), _inputs()
    cut, rows = derive(module, inputs), [*range(N)]
    assert cut.private
    program = Program(cut, Operands(module))
    before = _SHARED.clone()
    try:
        _SHARED.mul_(3)
        found = _by_program(module, program, inputs, rows)
        assert_close(found, _plainly(module, inputs, rows), rtol=1e-9, atol=1e-10)
    finally:
        _SHARED.copy_(before)


def _later() -> Tensor:
    return torch.ones(K, K).triu(1).bool()


def _attend(m: Within, stack: Tensor, *given: Any, **how: Any) -> Tensor:
    return functional.scaled_dot_product_attention(stack, stack, m.inner(stack), *given, **how)


_MASKED: dict[str, Rule] = {
    "causal": lambda m, x, s: _attend(m, s, is_causal=True),
    "a mask": lambda m, x, s: _attend(m, s, ~_later()),
    "a mask of rows": lambda m, x, s: _attend(m, s, (s[:, :, 0] > x[:, :1])[:, None]),
    "nothing at all": lambda m, x, s: _attend(m, s, torch.zeros(K, K, dtype=torch.bool)),
    "numbers": lambda m, x, s: _attend(m, s, x[:, None, :K].expand(-1, K, -1)),
    "no scores at all": lambda m, x, s: _attend(
        m, s, (s.new_zeros(len(s), 1, K)).masked_fill((s[:, :, 0] > x[:, :1])[:, None], -math.inf)
    ),
    "heads": lambda m, x, s: m.heads(s, s, s, attn_mask=_later(), need_weights=False)[0],
    "heads of some": lambda m, x, s: m.heads(
        s, s, s, key_padding_mask=s[:, :, 0] > x[:, :1], need_weights=False
    )[0],
    "shares of some": lambda m, x, s: (
        m.heads(s, s, s, key_padding_mask=torch.arange(K) > x[:, :1], attn_mask=_later())[1] @ s
    ),
    "layer": lambda m, x, s: m.layer(s, src_key_padding_mask=s[:, :, 0] > x[:, :1]),
    "causal layer": lambda m, x, s: m.layer(s, _later(), is_causal=True),
}


@pytest.mark.parametrize("name", _MASKED)
def test_masks_have_steps(name: str) -> None:
    module, inputs = _made(_MASKED[name]), _inputs()
    if name == "shares of some":
        inputs = inputs[0].abs(), inputs[1]  # of nothing there are no shares
    cut, rows = derive(module, inputs), [4, 0, 7]
    assert cut.parts.fused is not None
    found = _by_program(module, Program(cut, Operands(module)), inputs, rows)
    assert_close(found, _plainly(module, inputs, rows), rtol=1e-9, atol=1e-10)


def test_what_has_nothing_to_attend_to_gets_nothing() -> None:
    """And its gradient is nothing, not no number."""
    for name in ("nothing at all", "no scores at all", "heads of some"):
        module, (x, stack) = _made(_MASKED[name]), _inputs()
        x = torch.full_like(x, -9) if name != "nothing at all" else x
        inputs = x, stack
        program = Program(derive(module, inputs), Operands(module))
        assert program.in_c
        found = _by_program(module, program, inputs, [1, 0])
        assert_close(found, _plainly(module, inputs, [1, 0]), rtol=1e-9, atol=1e-10)


def test_long_attention_is_left_to_torch_which_keeps_no_scores() -> None:
    x, _ = _inputs()
    module = _made(_RULES["scaled"])
    for length, in_c in ((60, True), (70, False)):
        stack = torch.randn(N, length, D, dtype=torch.float64)
        assert (derive(module, (x, stack)).parts.fused is not None) == in_c

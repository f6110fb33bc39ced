"""The cells are the equations of their docstrings, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.nn import TokenRNN, TreeLSTMBranch, TreeLSTMLeaf
from geartrain.nodes.kernel import kernel_of

H = 3


def _squash(z: list[float], sigmoids: int) -> list[float]:
    return [1 / (1 + math.exp(-v)) if k < sigmoids else math.tanh(v) for k, v in enumerate(z)]


def test_a_leaf_is_its_equations() -> None:
    torch.manual_seed(0)
    leaf = TreeLSTMLeaf(2, H, vocabulary=4, dtype=torch.float64)
    nn.init.normal_(leaf.bias)
    word = 2
    h, c = leaf(torch.tensor([word]))
    assert leaf.embedding is not None
    z = leaf.weight @ leaf.embedding.weight[word] + leaf.bias
    for k in range(H):
        i, o, u = _squash([z[k].item(), z[H + k].item(), z[2 * H + k].item()], 2)
        assert c[0, k].item() == pytest.approx(i * u, rel=1e-12)
        assert h[0, k].item() == pytest.approx(o * math.tanh(i * u), rel=1e-12)


def test_a_branch_is_its_equations_and_tells_left_from_right() -> None:
    torch.manual_seed(0)
    branch = TreeLSTMBranch(H, dtype=torch.float64)
    h, c = torch.randn(2, 1, 2, H, dtype=torch.float64)
    h_new, c_new = branch(h, c)
    z = branch.weight @ torch.cat((h[0, 0], h[0, 1])) + branch.bias
    for k in range(H):
        i, left, right, o, u = _squash([z[g * H + k].item() for g in range(5)], 4)
        value = i * u + left * c[0, 0, k].item() + right * c[0, 1, k].item()
        assert c_new[0, k].item() == pytest.approx(value, rel=1e-12)
        assert h_new[0, k].item() == pytest.approx(o * math.tanh(value), rel=1e-12)
    swapped, _ = branch(h.flip(1), c.flip(1))
    assert not torch.allclose(swapped, h_new)


@pytest.mark.parametrize("embedding_dim", [None, 2])
@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
def test_a_token_rnn_is_its_equation(nonlinearity: str, embedding_dim: int | None) -> None:
    torch.manual_seed(0)
    cell = TokenRNN(4, H, nonlinearity, embedding_dim=embedding_dim, dtype=torch.float64)  # type: ignore[arg-type]
    nn.init.normal_(cell.bias)
    h, token = torch.randn(1, H, dtype=torch.float64), 3
    read = cell.embedding.weight[token]
    if cell.input_weight is not None:
        read = cell.input_weight @ read
    z = (read + cell.weight @ h[0] + cell.bias).tolist()
    want = [max(v, 0.0) if nonlinearity == "relu" else math.tanh(v) for v in z]
    assert cell(h, torch.tensor([token]))[0].tolist() == pytest.approx(want, rel=1e-12)


def test_forget_gates_start_open_and_the_other_biases_at_zero() -> None:
    branch = TreeLSTMBranch(H, forget_bias=2.0)
    assert branch.bias.tolist() == [0.0] * H + [2.0] * 2 * H + [0.0] * 2 * H
    assert TreeLSTMBranch(H).bias[H : 3 * H].tolist() == [1.0] * 2 * H


def test_a_folded_token_rnn_can_be_what_one_with_an_input_matrix_is() -> None:
    torch.manual_seed(0)
    wide = TokenRNN(4, H, embedding_dim=2, dtype=torch.float64)
    folded = TokenRNN(4, H, dtype=torch.float64)
    assert wide.input_weight is not None
    with torch.no_grad():
        folded.embedding.weight.copy_(wide.embedding.weight @ wide.input_weight.t())
        folded.weight.copy_(wide.weight)
        folded.bias.copy_(wide.bias)
    h, token = torch.randn(5, H, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    assert_close(folded(h, token), wide(h, token))


def test_a_nonlinearity_that_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="nonlinearity is 'gelu'; expected 'relu' or 'tanh'"):
        TokenRNN(4, H, "gelu")  # type: ignore[arg-type]


CELLS = {
    "lstm": (lambda: nn.LSTMCell(2, H), (torch.randn(6, 2), torch.randn(6, H), torch.randn(6, H))),
    "gru": (lambda: nn.GRUCell(2, H), (torch.randn(6, 2), torch.randn(6, H))),
}
every_cell = pytest.mark.parametrize(("make", "inputs"), CELLS.values(), ids=CELLS.keys())


def _forward(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    kernel = kernel_of(module)
    assert kernel is not None
    with torch.no_grad():
        outputs, residuals = kernel.forward(inputs)
    return (*outputs, *residuals)


@every_cell
def test_a_dry_run_on_meta_tensors_tells_shapes_and_dtypes(make, inputs) -> None:  # type: ignore[no-untyped-def]
    true = _forward(make(), inputs)
    dry = _forward(make().to("meta"), tuple(x.to("meta") for x in inputs))
    assert [(x.shape, x.dtype) for x in dry] == [(x.shape, x.dtype) for x in true]


@every_cell
def test_in_bfloat16_the_kernel_is_the_module_to_its_rounding(make, inputs) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    module = make().bfloat16()
    short = tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
    got = _forward(module, short)
    with torch.no_grad():
        whole = module.float()
        floats = tuple(x.float() if x.is_floating_point() else x for x in short)
        want = whole(floats[0], floats[1:]) if isinstance(whole, nn.LSTMCell) else whole(*floats)
    want = want if isinstance(want, tuple) else (want,)
    for y, true in zip(got, want, strict=False):
        assert y.dtype == torch.bfloat16
        assert_close(y.float(), true, rtol=0.03, atol=0.01)

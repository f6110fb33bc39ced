"""Recurrent layers of torch within a row, told as cells: what torch computes, step after step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.structure import Structure
from geartrain.derived.told import unrolled
from geartrain.errors import GraphError
from tests.rigs.products import halved
from tests.rigs.rowwise import assert_as_autograd, in_c

N, T, D, E = 6, 4, 3, 5
Read = Callable[[Any, Tensor, Tensor], Any]

pytestmark = pytest.mark.usefixtures("needs_kernels")


class Sequenced(nn.Module):
    """A layer over the sequence of a row, read in some way."""

    def __init__(self, layer: nn.Module, read: Read) -> None:
        super().__init__()
        self.layer, self.read = layer, read

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return self.read(self.layer, x, h)


def _gru(**how: Any) -> nn.Module:
    return nn.GRU(D, E, batch_first=True, **how)


def _lstm(**how: Any) -> nn.Module:
    return nn.LSTM(D, E, batch_first=True, **how)


CASES: Mapping[str, tuple[Callable[[], nn.Module], Read]] = {
    "gru": (_gru, lambda f, x, h: f(x)[0]),
    "gru, last": (_gru, lambda f, x, h: f(x)[1][0] + h),
    "gru, squeezed": (_gru, lambda f, x, h: f(x)[1].squeeze(0)),
    "gru from a state": (_gru, lambda f, x, h: f(x, h.unsqueeze(0))[1][-1]),
    "gru from a state in front": (_gru, lambda f, x, h: f(x, torch.unsqueeze(h, 0))[0].sum(1)),
    "gru both ways": (lambda: _gru(bidirectional=True), lambda f, x, h: f(x)[0]),
    "gru both ways, at the end": (
        lambda: _gru(bidirectional=True),
        lambda f, x, h: f(x)[0][:, -1],
    ),
    "gru both ways, last": (
        lambda: _gru(bidirectional=True),
        lambda f, x, h: torch.cat([f(x)[1][-2], f(x)[1][-1]], 1),
    ),
    "gru both ways, all last": (
        lambda: _gru(bidirectional=True),
        lambda f, x, h: f(x)[1].transpose(0, 1).flatten(1),
    ),
    "gru of two": (lambda: _gru(num_layers=2), lambda f, x, h: f(x)[0][:, -1]),
    "gru of two, permuted": (
        lambda: _gru(num_layers=2),
        lambda f, x, h: f(x)[1].permute(1, 0, 2).reshape(-1, 2 * E),
    ),
    "gru of two from states": (
        lambda: _gru(num_layers=2),
        lambda f, x, h: f(x, torch.stack([h, -h]))[1].unbind(0)[1],
    ),
    "gru without biases": (lambda: _gru(bias=False), lambda f, x, h: f(x)[0].mean(1)),
    "gru, time first": (
        lambda: nn.GRU(D, E),
        lambda f, x, h: f(x.transpose(0, 1))[0].transpose(0, 1),
    ),
    "gru of one step": (_gru, lambda f, x, h: f(x[:, :1])[0]),
    "gru, twice": (_gru, lambda f, x, h: f(x, f(x)[1])[0]),
    "lstm": (_lstm, lambda f, x, h: f(x)[0]),
    "lstm, last": (_lstm, lambda f, x, h: f(x)[1][0][0] * f(x)[1][1][-1]),
    "lstm from states": (_lstm, lambda f, x, h: f(x, (h.unsqueeze(0), torch.stack([h * h])))[0]),
    "lstm both ways of two": (
        lambda: _lstm(num_layers=2, bidirectional=True),
        lambda f, x, h: f(x)[0],
    ),
    "lstm of less": (lambda: _lstm(proj_size=2), lambda f, x, h: f(x)[0]),
    "lstm of less, both ways": (
        lambda: _lstm(proj_size=2, bidirectional=True, bias=False),
        lambda f, x, h: f(x)[1][0].transpose(0, 1).flatten(1),
    ),
    "lstm of one step": (_lstm, lambda f, x, h: f(x[:, :1])[1][1][0]),
    "rnn": (lambda: nn.RNN(D, E, batch_first=True), lambda f, x, h: f(x)[0]),
    "rnn of lines": (
        lambda: nn.RNN(D, E, 2, nonlinearity="relu", batch_first=True),
        lambda f, x, h: f(x)[1][1],
    ),
    "gru cell of nothing": (lambda: nn.GRUCell(D, E), lambda f, x, h: f(x[:, 0])),
    "lstm cell of nothing": (lambda: nn.LSTMCell(D, E), lambda f, x, h: f(x[:, 0])),
    "rnn cell of nothing": (lambda: nn.RNNCell(D, E), lambda f, x, h: f(x[:, 0])),
    "gru cells": (
        lambda: nn.GRUCell(D, E),
        lambda f, x, h: f(x[:, 2], f(x[:, 1], f(x[:, 0]))),
    ),
}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, T, D, dtype=dtype), torch.randn(N, E, dtype=dtype)


def _module(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    make, read = CASES[name]
    return Sequenced(make(), read).to(dtype)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@halved(name=[*CASES], dtype=[torch.float32, torch.float64])
def test_layers_are_torchs(name: str, dtype: torch.dtype) -> None:
    assert_as_autograd(_module(name, dtype), _inputs(dtype))


def test_what_is_left_out_between_layers_is_left_out() -> None:
    module = _module("lstm both ways of two", torch.float32)
    layer = module.layer
    assert isinstance(layer, nn.LSTM)
    layer.dropout = 0.5
    x, h = _inputs(torch.float32)
    program = Program(derive(module, (x, h)), Operands(module))
    assert program.in_c
    with torch.no_grad():
        one, other = (program.forward((x, h))[0][0] for _ in range(2))
        assert not torch.equal(one, other)
        module.eval()
        settled = Program(derive(module, (x, h)), Operands(module))
        assert_close(settled.forward((x, h))[0][0], module(x, h))


@pytest.mark.parametrize("written", ["in place", "by name", "into a part", "into a view"])
def test_what_is_written_into_a_state_is_not_forgotten(written: str) -> None:
    """Of zeros that are none any more nothing is known, or the trial of the programs tells."""

    def read(f: nn.Module, x: Tensor, h: Tensor) -> Any:
        state = torch.zeros(1, x.shape[0], E, dtype=x.dtype)
        if written == "in place":
            state += 1
        elif written == "by name":
            state.add_(0.5)
        elif written == "into a part":
            state[0] = 0.5
        else:
            state[0].fill_(0.5)
        return f(x, state)[0]

    module, inputs = Sequenced(_gru(), read).double(), _inputs(torch.float64)
    if written == "into a view":
        with pytest.raises(GraphError, match="other outputs"):
            derive(module, inputs)
        return
    with torch.no_grad():
        found = Program(derive(module, inputs), Operands(module)).forward(inputs)[0][0]
    assert_close(found, module(*inputs))


def test_long_sequences_are_left_to_torch() -> None:
    """Every step is one of the program's."""
    module = Sequenced(_gru(), lambda f, x, h: f(x)[0])
    for steps, few in ((unrolled.MOST_STEPS, True), (unrolled.MOST_STEPS + 1, False)):
        x = torch.randn(N, steps, D)
        assert _is_in_c(module, (x, torch.randn(N, E))) is few


def _is_in_c(module: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    try:
        return in_c(module, inputs)
    except GraphError:  # torch's kernels have no rows of their own to keep
        return False


def test_equal_layers_have_one_structure() -> None:
    """Whoever stands in place of their weights meanwhile: they have these twice."""
    one, other = (_module("gru", torch.float32) for _ in range(2))
    before = Structure(one)
    assert before.key is not None
    assert before.key == Structure(other).key
    derive(one, _inputs(torch.float32))
    one(*_inputs(torch.float32))
    assert before.now() == before.settings
    assert before.key != Structure(_module("gru without biases", torch.float32)).key

"""Attention by dot products in loops that run whole: C calls a program derived beside the kernel
that was written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain import Graph, Instance
from geartrain.nn.attention import DotKernel
from geartrain.nodes.loop import native
from geartrain.nodes.loop.several import SeveralModule
from tests.rigs.passes import Order, accumulate, assert_same_gradients

F64 = torch.float64
H = 3
SIZES = (3, 1, 2, 1, 5, 4, 2) * 3


def squared(y: Tensor) -> Tensor:
    return y.square().sum(1)


class Encode(nn.Module):
    """Keys and values, of their own widths."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(2, H, dtype=F64), nn.Linear(2, 2, dtype=F64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(self.keys(x)), self.values(x)


class Step(nn.Module):
    """A new state, of what was read and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 + H, H, dtype=F64)

    def forward(self, read: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([read, h], 1)))


class Begin(nn.Module):
    """A row of each bundle, of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, H, dtype=F64)

    def forward(self, keys: Tensor, values: Tensor, inside: gt.Inside) -> Tensor:
        return torch.sin(self.linear(inside.lengths[:, None].to(F64)))


def reading(keep: Any = "auto") -> Graph:
    torch.manual_seed(3)
    graph = Graph(value=("turns",))
    held = graph.input("x", bundle=True).through(Encode(), name="encode").hold(name="set")
    steps = graph.loop(name="steps", run="whole")
    begin = held.through(Begin(), name="begin", inside=True, pool=True, keep="inputs")
    steps.join(begin.move(turn=0))
    read = steps.attend(held, gt.nn.DotAttention(), name="attention", keep=keep)
    new = read.through(Step(), name="step", keep="activations")
    new.loss(squared)
    more, done = new.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
    steps.join(more)
    done.stop()
    return graph


def instances() -> list[Instance]:
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 2, generator=rng, dtype=F64) for n in SIZES]
    return [Instance({"x": x}, value={"turns": 1 + k % 3}) for k, x in enumerate(rows)]


@pytest.fixture
def in_c(needs_kernels: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of attention that C has made, and those of the kernel written by hand."""
    found = {"by C": 0, "by hand": 0}
    make, by_hand = native.NativeCalls._make, DotKernel.forward

    def made(self: native.NativeCalls, first: int, records: Any) -> int:
        modules = [
            self._modules[k] for k in self._records[first : first + len(records), 0].tolist()
        ]
        found["by C"] += sum(isinstance(m, SeveralModule) for m in modules)
        return make(self, first, records)

    def forward(self: DotKernel, *args: Any) -> Any:
        found["by hand"] += 1
        return by_hand(self, *args)

    monkeypatch.setattr(native.NativeCalls, "_make", made)
    monkeypatch.setattr(DotKernel, "forward", forward)
    return found


@pytest.mark.parametrize("order", [Order(max_active=3), Order("threads", 2, max_active=3)], ids=str)
def test_c_calls_a_program_in_place_of_the_kernel_that_was_written(
    order: Order, in_c: dict[str, int]
) -> None:
    wanted = accumulate(reading("inputs"), instances(), order)
    assert in_c == {"by C": 0, "by hand": 0}
    found = accumulate(reading(), instances(), order)
    assert_same_gradients(found.gradients, wanted.gradients)
    assert in_c["by C"] > 0
    assert in_c["by hand"] <= 3  # of the first firing, in which modules are tried


def test_bundles_of_nothing_are_read_by_the_kernel_that_was_written(
    in_c: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    accepts = SeveralModule.accepts
    monkeypatch.setattr(SeveralModule, "accepts", lambda *args: accepts(*args) and False)
    found = accumulate(reading(), instances(), Order(max_active=3))
    assert in_c["by C"] == 0 < in_c["by hand"]
    wanted = accumulate(reading("inputs"), instances(), Order(max_active=3))
    assert_same_gradients(found.gradients, wanted.gradients)

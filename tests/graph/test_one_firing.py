"""What goes back in the firing that it came in sees the weights that it came by, found once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from geartrain.derived.packs import OperandPlaces
from geartrain.native import steady
from geartrain.native.steady import firing
from geartrain.nodes.loop.node import LoopNode
from tests.rigs.called import CASES
from tests.rigs.passes import Order, accumulate

pytestmark = pytest.mark.usefixtures("needs_kernels")


def test_a_firing_in_another_is_the_same() -> None:
    with steady.steady():
        number = firing.number
        with steady.steady():
            assert firing.number == number
        assert firing.number == number
    assert firing.number == 0
    with steady.steady():
        assert firing.number > number


def test_a_turn_that_is_answered_at_once_is_one_firing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    turns: list[int] = []

    def numbers() -> Iterator[int]:
        for number in count(10**9):
            begun.append(number)
            yield number

    def forward(self: LoopNode, *rest: Any, before: Any = LoopNode.forward) -> Any:
        turns.append(self.id)
        return before(self, *rest)

    looked: dict[int, int] = {}

    def look(
        self: OperandPlaces, operands: Any, looks: Any, before: Any = OperandPlaces._look
    ) -> None:
        had = len(looks)
        before(self, operands, looks)
        looked[firing.number] = looked.get(firing.number, 0) + len(looks) - had

    monkeypatch.setattr(steady, "_numbers", numbers())
    monkeypatch.setattr(LoopNode, "forward", forward)
    monkeypatch.setattr(OperandPlaces, "_look", look)
    make, data = CASES["an input that goes on twice"]
    torch.manual_seed(1)
    accumulate(make("whole"), data(), Order(max_active=2))
    assert len(turns) == len(begun) > 2
    last = looked[begun[-1]]
    assert last == 6  # of three maps weight and bias, for there and back

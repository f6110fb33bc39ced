"""Calls that are found while payloads decide wait for a look, and C makes them in one go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from geartrain.graph.graph import Graph, Stream
from geartrain.nodes.loop.native import NativeCalls
from geartrain.nodes.loop.rooms import CallInputs
from tests.rigs.called import WIDTH, Gated, linear, sets, squared, turning, unsure
from tests.rigs.passes import Order, Outcome, accumulate, assert_same_gradients

FEW = Order(max_active=2)

pytestmark = pytest.mark.usefixtures("needs_kernels")


def judged(run: str, *, drops: bool = False) -> Graph:
    """A state that goes on as long as it says so, and what is said of it in each round."""

    def make(state: Stream, graph: Graph) -> Stream:
        own = {"keep": "activations"}
        state = state.through(Gated().double(), name="cell", read="token", **own)
        said: nn.Module = linear()
        if drops:
            said = nn.Sequential(nn.Dropout(0.5), said, nn.Dropout(0.5))
        said_now = state.through(said, name="said", take=0, **own)
        said_now.through(linear(WIDTH, 2), name="sure", **own).loss(squared, name="each")
        return state

    return turning(make, run, again=unsure)


def gradients(run: str, *, drops: bool = False) -> Outcome:
    torch.manual_seed(1)
    graph = judged(run, drops=drops)
    torch.manual_seed(2)
    return accumulate(graph, sets(20), FEW)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the modules that each call of C makes."""
    made: list[list[str]] = []
    before = NativeCalls._make

    def make(self: NativeCalls, first: int, records: Any) -> int:
        made.append([self._modules[k].name for k, *_ in records])
        return before(self, first, records)

    monkeypatch.setattr(NativeCalls, "_make", make)
    return made


def test_what_no_function_reads_yet_is_made_with_what_is_read_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = noted(monkeypatch)
    whole = gradients("whole")
    assert_same_gradients(whole.gradients, gradients("steps").gradients)
    rounds = [names for names in made if "cell" in names]
    assert max(map(len, rounds)) > 1, made
    assert all(names.count("cell") == 1 for names in rounds), made  # there is a look behind each


def test_calls_behind_one_that_c_cannot_make_are_found_anew_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, gone = NativeCalls._make, list[int]()

    def make(self: NativeCalls, first: int, records: Any) -> int:
        if len(records) > 1 and not gone:
            gone.append(records[0][0])
            self._modules.given_up.add(records[0][0])
            return first
        return before(self, first, records)

    monkeypatch.setattr(NativeCalls, "_make", make)
    whole = gradients("whole")
    assert gone
    assert_same_gradients(whole.gradients, gradients("steps").gradients)


def test_seeds_are_drawn_in_the_order_in_which_calls_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = gradients("whole", drops=True).gradients
    before = NativeCalls.found

    def at_once(self: NativeCalls, number: int, called: Any) -> int:
        made = before(self, number, called)
        assert self.make() == 0
        return made

    monkeypatch.setattr(NativeCalls, "found", at_once)
    alone = gradients("whole", drops=True).gradients
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[key], alone[key]) for key in found)


def test_where_a_module_reads_and_writes_is_written_when_it_moves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, placed = noted(monkeypatch), list[str]()
    before = CallInputs.place

    def place(self: CallInputs, module: Any, held: Any) -> None:
        placed.append(module.name)
        before(self, module, held)

    monkeypatch.setattr(CallInputs, "place", place)
    gradients("whole")
    assert 0 < len(placed) < sum(map(len, made)), (placed, made)

"""Parts live on one worker: the costliest first, or where one wants them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from geartrain.engine.engine import Engine, Settings, make_parts
from geartrain.graph.graph import Graph
from geartrain.parts.rules import Part, Rules
from geartrain.sharing.part_copies import PartCopies


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def test_parts_live_on_one_worker_and_by_hand_where_one_wants():
    made = Graph()
    one, two = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
    x = made.input("x").through(Part(one, name="big"), name="a")
    x.through(two, name="b").through(torch.tanh, name="c").loss(squares)
    parts = make_parts(made, Rules())
    home = Engine(made, parts, Settings(), 2, {"big": 1}).nodes_by_worker()
    assert home == {"a": 1, "b": 0, "c": 0, "loss": 0}
    assert Engine(made, parts, Settings(), 2, {"b": 1, "loss": 0}).nodes_by_worker()["loss"] == 0
    with pytest.raises(ValueError, match=r"puts 'b' on worker 2; there are 0..1"):
        Engine(made, parts, Settings(), 2, {"b": 2})


def test_copies_of_a_part_live_on_different_workers_whatever_else_these_have_to_do():
    made = Graph()
    x = made.input("x").through(torch.nn.Linear(2, 500), name="large")
    x.through(torch.nn.Linear(500, 2), name="small").loss(squares)
    parts = make_parts(made, Rules())
    state = PartCopies({"small": 3}).make(made, parts)
    costs = {"large": 9.0, "small": 1.0}
    home = Engine(made, state.parts, Settings(), 3, costs=costs, sharing=state).nodes_by_worker()
    assert home["large"] == 0
    assert {home["small"], home["small#1"], home["small#2"]} == {0, 1, 2}
    assert home["small#2"] == 0  # the last, as the others have room without


def test_two_parts_of_one_name_are_refused():
    made = Graph()
    x = made.input("x").through(Part(torch.nn.Linear(2, 2), name="same"))
    x.through(Part(torch.nn.Linear(2, 2), name="same"), name="other").loss(squares)
    with pytest.raises(ValueError, match="two parts are called 'same'"):
        make_parts(made, Rules())


def test_measured_costs_decide_before_numbers_of_parameters():
    made = Graph()
    x = made.input("x").through(torch.nn.Linear(2, 9), name="wide")
    x.through(torch.nn.Linear(9, 1), name="slow").through(torch.nn.Linear(1, 1), name="quick").loss(
        squares
    )
    parts = make_parts(made, Rules())
    costs = {"wide": 0.1, "slow": 5.0, "quick": 0.2}
    home = Engine(made, parts, Settings(), 2, costs=costs).nodes_by_worker()
    assert home["slow"] != home["wide"] == home["quick"]
    assert Engine(made, parts, Settings(), 2).nodes_by_worker()["wide"] == 0


def test_nodes_of_one_part_live_together_and_are_not_torn_apart():
    made, tied = Graph(), torch.nn.Linear(2, 2)
    x = made.input("x").through(tied, name="once").through(torch.nn.Linear(2, 2), name="between")
    x.through(tied, name="again").loss(squares)
    parts = make_parts(made, Rules())
    assert set(parts) == {"once", "between"}
    home = Engine(made, parts, Settings(), 2).nodes_by_worker()
    assert home["once"] == home["again"] != home["between"]
    with pytest.raises(ValueError, match=r"part 'once' is placed on workers \[0, 1\]"):
        Engine(made, parts, Settings(), 2, {"once": 0, "again": 1})

"""Parts live on one worker: the costliest first, or where one wants them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from geartrain.engine.costs import BYTE_S, MESSAGE_S, NodeCost
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.placement import fed_s, loads
from geartrain.engine.settings import Settings
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
    costs = {"large": NodeCost(9.0), "small": NodeCost(1.0)}
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
    costs = {"wide": NodeCost(0.1), "slow": NodeCost(5.0), "quick": NodeCost(0.2)}
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


def row_of_parts(n: int) -> Graph:
    made = Graph()
    stream = made.input("x")
    for k in range(n):
        stream = stream.through(torch.nn.Linear(2, 2), name=f"part {k}")
    stream.through(torch.tanh, name="map").loss(squares)
    return made


def homes(
    made: Graph, workers: int, costs: dict[str, NodeCost], placed: dict[str, int] | None = None
):
    home = Engine(made, make_parts(made, Rules()), Settings(), workers, placed, costs)
    return home.nodes_by_worker()


def test_level_parts_are_shared_out_evenly_and_in_their_order():
    costs = {f"part {k}": NodeCost(1.0 + 0.01 * (k % 3), 100, 100) for k in range(4)}
    home = homes(row_of_parts(4), 2, costs)
    workers = [home[f"part {k}"] for k in range(4)]
    assert workers in ([0, 0, 1, 1], [1, 1, 0, 0])  # one wire is cut, not three
    far = {name: NodeCost(cost.seconds, 10**5, 10**5) for name, cost in costs.items()}
    home = homes(row_of_parts(4), 2, far)
    assert len({home[name] for name in costs}) == 1  # 12 s of batches would save 2


def test_no_worker_has_much_more_where_the_longest_first_rule_leaves_one_behind():
    # Longest first gives 3 + 3 + 2 and 2 + 2; both may have 6.
    costs = dict(
        zip([f"part {k}" for k in range(5)], map(NodeCost, [3.0, 3.0, 2.0, 2.0, 2.0]), strict=True)
    )
    home = homes(row_of_parts(5), 2, costs)
    busy = [sum(costs[n].seconds for n in costs if home[n] == w) for w in range(2)]
    assert busy == [6.0, 6.0]


def test_nodes_without_weights_count_where_they_live():
    made = row_of_parts(3)
    costs = {
        "part 0": NodeCost(2.0),
        "part 1": NodeCost(1.0),
        "part 2": NodeCost(1.0),
        "map": NodeCost(2.0),
    }
    home = homes(made, 2, costs)
    assert home["map"] == home["part 2"] != home["part 0"] == home["part 1"]


def test_what_is_placed_by_hand_stays_whatever_it_costs():
    costs = {f"part {k}": NodeCost(1.0) for k in range(4)}
    home = homes(row_of_parts(4), 2, costs, {"part 0": 1, "part 1": 1, "map": 0})
    assert [home[f"part {k}"] for k in range(4)] == [1, 1, 0, 0]
    assert home["map"] == 0


def test_loads_are_seconds_of_nodes_and_of_the_batches_between_workers():
    made = row_of_parts(2)
    costs = {"part 0": NodeCost(2.0, 10, 10), "part 1": NodeCost(1.0, 20, 30)}
    engine = Engine(made, make_parts(made, Rules()), Settings(), 2, None, costs)
    carried = (10 + 30) * MESSAGE_S  # part 0 sends on its way forward, part 1 on its way back
    found = loads(engine.wiring, engine.homes.of_node, 2, costs)
    assert sorted(found) == pytest.approx([1.0 + carried / 2, 2.0 + carried / 2])


def test_bytes_count_with_the_batches_that_carry_them_and_with_what_is_fed():
    made = row_of_parts(2)
    costs = {
        "part 0": NodeCost(2.0, 10, 10, 10**9, 3 * 10**9),
        "part 1": NodeCost(1.0, 10, 10, 2 * 10**9, 7 * 10**9),
    }
    by_hand = {"part 0": 0, "part 1": 1}
    engine = Engine(made, make_parts(made, Rules()), Settings(), 2, by_hand, costs)
    fed = 10**9 * BYTE_S  # to part 0; part 1 takes its rows, and part 0 the gradients of these
    carried = 20 * MESSAGE_S + (2 + 3) * 10**9 * BYTE_S
    found = loads(engine.wiring, engine.homes.of_node, 2, costs)
    assert found == pytest.approx([2.0 + (carried + fed) / 2, 1.0 + carried / 2])
    assert fed_s(engine.wiring, costs) == pytest.approx(fed / 2)
    together = loads(engine.wiring, dict.fromkeys(engine.wiring.nodes, 0), 2, costs)
    assert together == pytest.approx([3.0 + fed / 2, 0.0])


def test_a_wire_with_many_bytes_is_not_cut_where_level_loads_would_cut_it():
    costs = {f"part {k}": NodeCost(1.0, 10, 10) for k in range(4)}
    costs["part 2"] = NodeCost(1.0, 10, 10, 10**9)
    home = homes(row_of_parts(4), 2, costs)
    assert home["part 1"] == home["part 2"]


def test_a_copy_has_its_share_of_seconds_and_bytes_and_as_many_batches():
    assert NodeCost(3.0, 4, 5, 60, 90).share(3) == NodeCost(1.0, 4, 5, 20, 30)

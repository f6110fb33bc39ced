"""What is known of a graph before nodes are made: found once, and never of another graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.graph.loops import find_regions
from geartrain.graph.owners import Owner
from geartrain.graph.wiring import wire


def looped() -> tuple[gt.Graph, gt.Stream]:
    """A loop of three turns that can run whole, with a loss behind."""
    graph = gt.Graph()
    turns = graph.loop(name="turns")
    turns.join(graph.input("x", turn=0))
    again, done = turns.through(nn.Linear(2, 2), name="cell").where(lambda m: m.turn < 2)
    turns.join(again.move(turn=lambda m: m.turn + 1))
    return graph, done


def whole() -> gt.Graph:
    graph, done = looped()
    done.loss(lambda y: y.sum(1))
    return graph


def owners(through: object) -> list[Owner]:
    return [Owner(through.function, None)]  # type: ignore[attr-defined]


def test_it_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = whole()
    found: list[object] = []
    monkeypatch.setattr(
        "geartrain.graph.layout.find_regions", lambda *a: found.append(a) or find_regions(*a)
    )
    first, second = wire(graph, owners), wire(graph, owners)
    assert len(found) == 1
    assert first.operators[1] is second.operators[1] is graph.layout().operators[0]
    assert first.nodes.keys() == second.nodes.keys()
    assert all(first.nodes[k] is not second.nodes[k] for k in first.nodes)


def test_a_reason_of_one_engine_is_no_reason_for_the_next() -> None:
    graph = whole()
    steps = wire(graph, owners, by_steps=lambda region: "somebody says so")
    again = wire(graph, owners)
    assert not steps.loops and len(again.loops) == 1
    near = graph.layout().regions()
    further = graph.layout().reaching(near)
    assert further and all(region.reason is None for region in [*near, *further])
    assert all(any(each is own for own in near) for r in further for each in r.made_of)


def test_a_loop_that_shall_not_run_whole_does_not_keep_another_from_reaching() -> None:
    graph = whole()
    more = graph.loop(name="more")
    more.join(graph.input("y", turn=0))
    again, end = more.through(nn.Linear(2, 2), name="other").where(lambda m: m.turn < 2)
    more.join(again.move(turn=lambda m: m.turn + 1))
    end.loss(lambda y: y.sum(1), name="end")
    told = {"turns": "somebody says so", "more": None}
    for refused in (False, True, False):
        wiring = wire(graph, owners, by_steps=lambda r, on=refused: told[r.name] if on else None)
        names = [{wiring.operators[number].name for number, _ in o} for o in wiring.loops.values()]
        assert [("cell" in inside, "other" in inside) for inside in names] == (
            [(False, True)] if refused else [(True, False), (False, True)]
        )
        (loss,) = (o for o in wiring.operators.values() if o.name == "end")
        assert wiring.copies[loss.id] == ()  # it is in the loop


def test_what_is_added_is_seen() -> None:
    graph, done = looped()
    before = graph.layout
    with pytest.raises(gt.GraphError, match="read by nobody"):
        before()
    done.loss(lambda y: y.sum(1))
    small = graph.layout()
    assert graph.layout() is small
    graph.input("y").stop()
    assert len(graph.layout().operators) == len(small.operators) + 2


def test_a_source_that_is_joined_is_seen() -> None:
    graph = whole()
    small = graph.layout()
    (merge,) = (o for o in graph.operators if o.name == "turns")
    other = graph.input("z", turn=0)
    merge.sources[0].append((other.operator, other.port))
    assert graph.layout() is not small and len(graph.layout().readers) > len(small.readers)


def test_what_a_check_finds_is_in_it() -> None:
    graph = gt.Graph(value=("label",))
    scores = graph.input("x").through(nn.Linear(2, 3))
    scores.loss(nn.functional.cross_entropy, target="label")
    early = graph.layout()
    graph.check({"x": ((2,), torch.float32)})
    assert graph.layout() is not early
    assert [getattr(o, "classes", None) for o in graph.layout().operators][-1] == 3


def test_another_way_of_running_is_another_layout() -> None:
    graph = whole()
    assert wire(graph, owners).loops
    graph.run = "steps"
    assert not wire(graph, owners).loops


def test_it_does_not_travel() -> None:
    graph = whole()
    graph.layout()
    other = copy.copy(graph)
    assert vars(other)["_laid"] is None and vars(graph)["_laid"] is not None

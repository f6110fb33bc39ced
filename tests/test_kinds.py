"""Every argument of a public name that is no number is of its kind, or refused by name.

A row of ``ROWS`` is an argument; another test finds the arguments without a row. Numbers are in
``test_numbers``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from tests.test_numbers import OURS, TORCHES, loader, pipeline, session


@dataclass(frozen=True)
class Taking:
    """An argument: what takes it, values that it may be, and values of another kind."""

    make: Callable[[Any], Any]
    good: Sequence[Any]
    other: Sequence[Any]


THINGS: Sequence[Any] = (3, 1.5, [3], object(), nn.Linear)


def truth(make: Callable[[Any], Any]) -> Taking:
    return Taking(make, [True, False, np.True_], [1, None, "yes", [True], torch.ones(2)])


def word(make: Callable[[Any], Any], *words: Any) -> Taking:
    return Taking(make, words, [3, ["it"], {"it": 1}, torch.ones(2), nn.Linear, "it"])


def text(make: Callable[[Any], Any], *good: Any) -> Taking:
    return Taking(make, good, [3, b"it", ["it"], {"it": 1}, nn.Linear, len])


def call(make: Callable[[Any], Any], *good: Any) -> Taking:
    return Taking(make, good, [3, "it", ["it"], {"it": 1}, torch.ones(2)])


def thing(make: Callable[[Any], Any], *good: Any) -> Taking:
    return Taking(make, good, ["it", {"it": 1}, *THINGS, len])


def row(make: Callable[[Any], Any], *good: Any) -> Taking:
    return Taking(make, good, [*THINGS, b"it", {3: 4}, torch.ones(2)])


def numbers(make: Callable[[Any], Any], *good: Any) -> Taking:
    """A row of them, or a number."""
    return Taking(make, good, [1.5, nn.Linear, object(), b"it", ["it"], {3: "4"}, {"it": None}])


def table(make: Callable[[Any], Any], *good: Any) -> Taking:
    return Taking(make, good, ["it", ["it"], {3: 4}, torch.ones(2), *THINGS])


def columns(**given: Any) -> gt.Columns:
    return gt.Columns(**{"lengths": [1, 1], "inputs": {"x": torch.ones(2, 2)}} | given)


def minibatches(**given: Any) -> gt.Minibatches:
    return gt.Minibatches(**{"x": torch.ones(4, 2), "batch": 2} | given)


def of_part(name: str) -> Callable[[Any], Any]:
    return lambda x: gt.Part(**{"module": nn.Linear(2, 2)} | {name: x})


def of_rules(name: str) -> Callable[[Any], Any]:
    return lambda x: gt.Rules(**{name: x})


def both(name: str, make: Callable[..., Taking], *good: Any) -> dict[str, Taking]:
    """The same of rules and of a part."""
    return {
        f"Rules.{name}": make(of_rules(name), *good),
        f"Part.{name}": make(of_part(name), *good),
    }


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def nothing(*given: Any) -> None:
    return None


SGD, CPU = torch.optim.SGD, torch.device("cpu")
HEADS = [nn.Linear(2, 2)]
ROWS: dict[str, Taking] = {
    "Average.optimizer_state": truth(lambda x: gt.Average(optimizer_state=x)),
    "Clip.over": word(lambda x: gt.Clip(norm=1.0, over=x), "part", "all"),
    "Columns.lengths": Taking(
        lambda x: columns(lengths=x), [[2], np.array([1, 1])], ["it", None, [1.5, 0.5], {"it": 2}]
    ),
    "Columns.inputs": table(lambda x: columns(inputs=x), {"y": torch.ones(2)}),
    "Columns.vertex": table(lambda x: columns(vertex=x), None, {"v": [1, 2]}),
    "Columns.value": table(lambda x: columns(value=x), None, {"v": [1, 2]}),
    "Columns.edge": table(lambda x: columns(edge=x), None, {}),
    "Columns.edge_lengths": Taking(
        lambda x: columns(edge_lengths=x), [None, [0, 0]], ["it", ["it"], [0.5, 0.5], {"it": 2}]
    ),
    "Columns.called": Taking(lambda x: columns(called=x), ["it", str], [3, None, ["it"]]),
    "CompensatedNeighbours.adaptive": truth(lambda x: gt.CompensatedNeighbours(adaptive=x)),
    "Compute.precision": word(lambda x: gt.Compute(precision=x), "full", "bf16"),
    "Compute.device": Taking(
        lambda x: gt.Compute(device=x), [None, "cpu", CPU], [3, ["cpu"], len, nn.Linear]
    ),
    "Compute.meter": thing(lambda x: gt.Compute(meter=x), None, gt.FlopMeter()),
    "Costs.nodes": table(lambda x: gt.Costs(nodes=x), {}, {"it": (0.1, 0.2)}),
    "Costs.shared": truth(lambda x: gt.Costs(shared=x)),
    "Costs.collective": word(lambda x: gt.Costs(collective=x), "ring", "star"),
    "Critics.optimizer": call(gt.Critics, None, SGD),
    "DecentralizedSGD.weights": Taking(
        gt.DecentralizedSGD,
        ["metropolis", "uniform", [[1.0]], np.eye(2)],
        [3, "it", None, ["it"], [1], {"it": 1}, nn.Linear],
    ),
    "DecoupledGreedy.draw": word(lambda x: gt.DecoupledGreedy(draw=x), "newest", "uniform"),
    "DelayedNesterov.speeds": numbers(lambda x: gt.DelayedNesterov(speeds=x), None, [1.0, 2.0]),
    "DiLoCo.nesterov": truth(lambda x: gt.DiLoCo(nesterov=x)),
    "Gear.period": Taking(
        gt.Gear, ["never", {0: 2, 9: "never"}], ["it", None, [1], {"it": 1}, {0: None}, len]
    ),
    "Gear.skip": word(lambda x: gt.Gear(skip=x), "backward", "weights"),
    "Gear.draw": word(lambda x: gt.Gear(draw=x), "newest", "least_used"),
    "Graph.vertex": row(lambda x: gt.Graph(vertex=x), ("v",), ["v"], iter(["v"])),
    "Graph.edge": row(lambda x: gt.Graph(edge=x), None, (), ("v",)),
    "Graph.value": row(lambda x: gt.Graph(value=x), ("v",), {"v"}),
    "Graph.run": word(lambda x: gt.Graph(run=x), "auto", "steps"),
    "Host.address": text(gt.Host, "127.0.0.1"),
    "Host.command": row(lambda x: gt.Host("127.0.0.1", command=x), ("ssh",), ["ssh", "b"]),
    "Host.python": text(lambda x: gt.Host("127.0.0.1", python=x), None, "python"),
    "Hosts.hosts": numbers(gt.Hosts, [gt.Host("127.0.0.1")]),
    "Hosts.address": text(lambda x: gt.Hosts(address=x), None, "127.0.0.1"),
    "Hosts.socket_files": truth(lambda x: gt.Hosts(socket_files=x)),
    "Hosts.plain": truth(lambda x: gt.Hosts(plain=x)),
    "Hosts.on_worker_death": word(lambda x: gt.Hosts(on_worker_death=x), "raise", "go_on"),
    "Inbox.full": word(lambda x: gt.Inbox(full=x), "drop", "merge"),
    "Keep.folder": text(lambda x: gt.Keep(every=1, folder=x), None, "it"),
    "LoadedMinibatches.loader": thing(gt.LoadedMinibatches, loader()),
    "Metric.function": call(gt.Metric, gt.accuracy),
    "Metric.where": call(lambda x: gt.Metric(gt.accuracy, x), None, nothing),
    "Minibatches.x": thing(lambda x: minibatches(x=x), torch.ones(4)),
    "Minibatches.y": thing(lambda x: minibatches(y=x), None, torch.ones(4)),
    "Minibatches.augment": call(lambda x: minibatches(augment=x), None, lambda x, generator: x),
    "Minibatches.drop_last": truth(lambda x: minibatches(drop_last=x)),
    "NearestNeighbours.lockstep": truth(lambda x: gt.NearestNeighbours(lockstep=x)),
    "Neighbours.topology": Taking(
        lambda x: gt.Neighbours(topology=x),
        ["torus", [(0, 1)], gt.Exponential()],
        [3, "it", None, nn.Linear],
    ),
    "Neighbours.exchange": word(
        lambda x: gt.Neighbours(exchange=x), "weights", gt.NearestNeighbours()
    ),
    "Neighbours.consensus": word(lambda x: gt.Neighbours(consensus=x), "mean", "best"),
    "Neighbours.shards": word(lambda x: gt.Neighbours(shards=x), "static", "pull"),
    "Neighbours.start": call(lambda x: gt.Neighbours(start=x), None, nothing),
    "Overlapping.rule": word(gt.Overlapping, "sum", "later"),
    "Part.module": Taking(gt.Part, [nn.Linear(2, 2)], [3, "it", None, nn.Linear, len, [3]]),
    "Part.name": text(of_part("name"), None, "it"),
    "Part.keep": word(of_part("keep"), "auto", "inputs", "activations", "graph"),
    "Part.full_precision": truth(of_part("full_precision")),
    "Part.gear": thing(of_part("gear"), None, gt.Gear(4)),
    "Part.device": Taking(of_part("device"), [None, "cpu", CPU], [3, ["cpu"], len, nn.Linear]),
    **both("optimizer", call, SGD),
    **both("schedule", call, None, float),
    **both("scheduler", call, None, nothing),
    **both("average", word, "rows", "instances", "none"),
    **both("clip", thing, None, gt.Clip(norm=1.0)),
    **both("view", thing, None, gt.Stashed()),
    **both("delay", thing, None, gt.GapAware()),
    **both("update_every", numbers, gt.Flush(), gt.Messages(2)),
    "PartCopies.copies": numbers(gt.PartCopies, {"it": 2}),
    "PartCopies.mixer": thing(lambda x: gt.PartCopies(2, x), gt.Average()),
    "Pipeline.module": Taking(
        lambda x: gt.Pipeline(x, parts=2),
        [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))],
        [3, "it", None, nn.Linear, len],
    ),
    "Pipeline.cuts": numbers(lambda x: pipeline(cuts=x), [2], (1, 2)),
    "Pipeline.by": word(lambda x: pipeline(parts=2, by=x), "parameters"),
    "Pipeline.sample": thing(lambda x: pipeline(parts=2, sample=x), None, torch.ones(4, 2)),
    "Pipeline.criterion": call(lambda x: pipeline(parts=2, criterion=x), gt.cross_entropy),
    "Pipeline.view": thing(lambda x: pipeline(parts=2, view=x), None, [None, gt.Stashed()]),
    "Pipeline.delay": thing(lambda x: pipeline(parts=2, delay=x), None, gt.GapAware()),
    "Pipeline.gears": thing(lambda x: pipeline(parts=2, gears=x), None, [None, gt.Gear()]),
    "Pipeline.credit": word(lambda x: pipeline(parts=2, credit=x), "backprop", gt.Backprop()),
    "Pipeline.heads": Taking(
        lambda x: pipeline(parts=2, credit=gt.Greedy(), sample=torch.ones(4, 2), heads=x),
        [None, HEADS, nn.ModuleList(HEADS), lambda k, h: nn.Linear(2, 2)],
        [3, "it", [3], {"it": 1}],
    ),
    "Pipeline.metrics": table(lambda x: pipeline(parts=2, metrics=x), None, {"it": gt.accuracy}),
    "Pipeline.judge_heads": truth(lambda x: pipeline(parts=2, judge_heads=x)),
    "Pipeline.blocks": row(lambda x: pipeline(parts=2, blocks=x), None),
    "Pipeline.stem": row(lambda x: gt.Pipeline(Tower(), parts=2, stem=x, head=[]), [], ()),
    "Pipeline.head": row(lambda x: gt.Pipeline(Tower(), parts=2, stem=[], head=x), [], ()),
    "Predicted.by": word(lambda x: gt.Predicted(by=x), "momentum"),
    "Processes.on_worker_death": word(lambda x: gt.Processes(on_worker_death=x), "raise"),
    "PushSum.rotate": truth(lambda x: gt.PushSum(rotate=x)),
    "PushSum.matrix": row(lambda x: gt.PushSum(matrix=x), None, [[1.0]], np.eye(2)),
    "Ray.address": text(lambda x: gt.Ray(address=x), None, "auto"),
    "Ray.resources": row(lambda x: gt.Ray(resources=x), None, {"CPU": 1}, [{"CPU": 1}] * 2),
    "Ray.parts": table(lambda x: gt.Ray(parts=x), None, {"it": {"CPU": 1}}),
    "Ray.strategy": word(lambda x: gt.Ray(strategy=x), "PACK", "SPREAD"),
    "Ray.socket_files": truth(lambda x: gt.Ray(socket_files=x)),
    "Ray.plain": truth(lambda x: gt.Ray(plain=x)),
    "Ray.token": truth(lambda x: gt.Ray(token=x)),
    "Ray.on_worker_death": word(lambda x: gt.Ray(on_worker_death=x), "raise", "restore"),
    "Reading.convert": call(lambda x: gt.Reading(convert=x), None, nothing),
    "Reading.shuffle": truth(lambda x: gt.Reading(shuffle=x)),
    "Reading.on_bad": word(lambda x: gt.Reading(on_bad=x), "raise", "skip"),
    "Schedule.ramp": thing(lambda x: gt.Schedule(ramp=x), gt.Ramp()),
    "Schedule.drain": truth(lambda x: gt.Schedule(drain=x)),
    "Schedule.policy": call(lambda x: gt.Schedule(policy=x), None, lambda w: gt.BackwardFirst()),
    "Schedule.placement": Taking(
        lambda x: gt.Schedule(placement=x),
        [None, {}, {"it": 0}],
        [3, "it", ["it"], {3: 0}, {"it": "0"}],
    ),
    "Session.graph": thing(lambda x: gt.Session(x), session().graph),
    "Session.rules": thing(lambda x: session(rules=x), None, gt.Rules()),
    "Session.runtime": thing(lambda x: session(runtime=x), None, "auto", gt.Threads(1)),
    "Session.sharing": thing(lambda x: session(sharing=x), None, gt.Alone()),
    "Session.max_active": Taking(lambda x: session(max_active=x), ["auto", gt.InFlight()], []),
    "Session.schedule": thing(lambda x: session(schedule=x), None, gt.Schedule()),
    "Session.compute": thing(lambda x: session(compute=x), None, gt.Compute()),
    "Session.reading": thing(lambda x: session(reading=x), None, gt.Reading()),
    "Session.instruments": row(lambda x: session(instruments=x), [], [gt.AbstractInstrument()]),
    "SharedWeights.in_flight": word(gt.SharedWeights, "all", "each"),
    "Simulated.costs": thing(lambda x: gt.Simulated(costs=x), None, gt.Costs()),
    "Simulated.speeds": numbers(lambda x: gt.Simulated(speeds=x), None, [2.0]),
    "Simulated.events": row(lambda x: gt.Simulated(2, events=x), (), [gt.Pause(1, 0.0, 1.0)]),
    "Synchronous.then": thing(lambda x: gt.Synchronous(3, x), gt.Ramp()),
    "Synthetic.targets": truth(gt.Synthetic),
    "Target.metric": text(lambda x: gt.Target(x, 1.0), "loss"),
    "Target.at_least": truth(lambda x: gt.Target("loss", 1.0, x)),
    "check_gears.gears": table(gt.check_gears, {"it": gt.Gear()}),
    "check_gears.cut": row(lambda x: gt.check_gears({"it": gt.Gear()}, x), ["it"]),
    "minibatch.x": thing(lambda x: gt.minibatch(x, torch.ones(2)), torch.ones(2)),
    "minibatch.y": thing(lambda x: gt.minibatch(torch.ones(2), x), torch.ones(2)),
    "register_check.kind": Taking(
        lambda x: gt.register_check(x, nothing), [nn.CELU], [3, "it", nn.CELU(), int, len]
    ),
    "register_check.check": call(lambda x: gt.register_check(nn.CELU, x), nothing),
    "register_kernel.kind": Taking(
        lambda x: gt.register_kernel(x, nothing), [nn.CELU], [3, "it", nn.CELU(), int, len]
    ),
    "register_kernel.factory": call(lambda x: gt.register_kernel(nn.CELU, x), nothing),
    "require_range.found": Taking(
        lambda x: gt.require_range("it", x, 3), [torch.arange(3), np.arange(3)], [3, "it", None]
    ),
}
INBOXES = {
    "CompensatedNeighbours": gt.CompensatedNeighbours,
    "NearestNeighbours": gt.NearestNeighbours,
    "Neighbours": gt.Neighbours,
    "PushSum": gt.PushSum,
    "StalenessAware": gt.StalenessAware,
}
for name, sends in INBOXES.items():
    full = "merge" if sends is gt.PushSum else "drop"
    ROWS[f"{name}.inbox"] = thing(
        lambda x, sends=sends: sends(inbox=x),  # type: ignore[misc]
        None,
        gt.Inbox(full=full),  # type: ignore[arg-type]
    )


def stream() -> gt.Stream:
    return gt.Graph(vertex=("v",), edge=(), value=("label",)).input("x")


def verb(name: str, argument: str, **given: Any) -> Callable[[Any], Any]:
    return lambda x: getattr(stream(), name)(**given | {argument: x})


def two(argument: str, value: Any) -> gt.Stream:
    graph = gt.Graph()
    return graph.concat(graph.input("x"), graph.input("y"), **{argument: value})


LINEAR = {"module": nn.Linear(2, 2)}
VERBS: dict[str, Taking] = {
    "through.name": text(verb("through", "name", **LINEAR), None, "it"),
    "through.part": thing(verb("through", "part", **LINEAR), None, gt.Part(LINEAR["module"])),
    "through.keep": word(verb("through", "keep", **LINEAR), None, "inputs"),
    "through.read": row(verb("through", "read", **LINEAR), "v", ("v",), ()),
    "through.inside": truth(verb("through", "inside", **LINEAR)),
    "through.pool": truth(verb("through", "pool", **LINEAR)),
    "through.alone": truth(verb("through", "alone", **LINEAR)),
    "through.take": Taking(
        verb("through", "take", **LINEAR), [None, 0, (0, 1)], ["it", 1.5, ["it"], nn.Linear]
    ),
    "through.gear": thing(verb("through", "gear", **LINEAR), None, gt.Gear(2)),
    "where.predicate": call(verb("where", "predicate"), nothing),
    "route.choose": call(verb("route", "choose", ways=2), nothing),
    "group.by": row(verb("group", "by", size=2), "vertex", ("vertex",), {"vertex": nothing}),
    "group.order": Taking(
        verb("group", "order", by="vertex", size=2), [None, "v", nothing], [3, ["v"], nn.Linear]
    ),
    "group.how": word(verb("group", "how", by="vertex", size=2), "sum", "bundle"),
    "ungroup.index": text(verb("ungroup", "index"), None, "vertex"),
    "flatmap.over": text(verb("flatmap", "over", count=nothing), "copy"),
    "loss.criterion": Taking(
        verb("loss", "criterion"),
        [gt.cross_entropy, nn.CrossEntropyLoss()],
        [3, "it", nn.CrossEntropyLoss],
    ),
    "loss.target": Taking(
        verb("loss", "target", criterion=nothing), [None, "label", nothing], [3, ["label"], int]
    ),
    "loss.weight": Taking(
        verb("loss", "weight", criterion=nothing), [None, "label", nothing], [3, ["label"], int]
    ),
    "loss.metrics": table(verb("loss", "metrics", criterion=nothing), None, {"it": gt.accuracy}),
    "loss.label": text(verb("loss", "label", criterion=nothing), None, "it"),
    "loss.alone": truth(verb("loss", "alone", criterion=nothing)),
    "output.take": Taking(verb("output", "take"), [None, 0], ["it", 1.5, [0], nn.Linear]),
    "output.alone": truth(verb("output", "alone")),
    "replay.fresh": truth(verb("replay", "fresh")),
    "replay.draw": word(verb("replay", "draw"), "newest", "uniform"),
    "input.name": text(lambda x: gt.Graph().input(x), "x"),
    "input.shape": numbers(lambda x: gt.Graph().input("x", shape=x), None, (2,), []),
    "input.dtype": thing(lambda x: gt.Graph().input("x", dtype=x), None, torch.float64),
    "input.bundle": truth(lambda x: gt.Graph().input("x", bundle=x)),
    "input.alone": truth(lambda x: gt.Graph().input("x", alone=x)),
    "input.fields": Taking(
        lambda x: gt.Graph().input("x", step=x), [0, np.int64(3)], ["it", 1.5, None, len]
    ),
    "move.fields": Taking(verb("move", "step"), [0, nothing], ["it", 1.5, None, [3]]),
    "merge.streams": thing(lambda x: gt.Graph().merge(x)),
    "concat.streams": thing(lambda x: gt.Graph().concat(x, x)),
    "concat.on": row(lambda x: two("on", x), None, "instance", ["instance"]),
    "concat.how": word(lambda x: two("how", x), "tuple", "features"),
    "join.streams": thing(lambda x: gt.Graph().loop().join(x)),
    "attend.to": thing(lambda x: stream().attend(x, nn.Linear(2, 2))),
    "loop.name": text(lambda x: gt.Graph().loop(name=x), None, "it"),
    "loop.run": word(lambda x: gt.Graph().loop(run=x), None, "auto", "whole"),
}

LATER = {"Instance"}
"""Looked at when they enter: millions of them are made."""


def having(words: str) -> list[str]:
    """Rows that have such values."""
    return [name for name, taking in (ROWS | VERBS).items() if getattr(taking, words)]


@pytest.mark.parametrize("name", having("good"))
def test_what_is_of_its_kind_is_taken(name: str) -> None:
    taking = (ROWS | VERBS)[name]
    for value in taking.good:
        taking.make(value)


@pytest.mark.parametrize("name", having("other"))
def test_what_is_of_another_kind_is_refused_by_name(name: str) -> None:
    errors, taking = (TypeError, ValueError, gt.DataError, gt.GraphError), (ROWS | VERBS)[name]
    for value in taking.other:
        with pytest.raises(errors, match=r"^\S.*[:;,] give ") as refused:
            taking.make(value)
            pytest.fail(f"takes {value!r}")
        shown = value.__name__ if isinstance(value, type) else repr(value)[:60]
        assert shown in str(refused.value)


def test_an_instance_of_other_kinds_is_refused_when_it_enters() -> None:
    graph = gt.Graph(vertex=("v",), value=("label",))
    graph.input("x").through(nn.Linear(2, 2)).loss(gt.cross_entropy, target="label")
    for given in ({"inputs": 3}, {"vertex": [3]}, {"edge": 3}, {"value": "it"}, {"inputs": None}):
        whole = {"inputs": {"x": torch.ones(1, 2)}, "vertex": {"v": [1]}, "value": {"label": 1}}
        with pytest.raises(gt.DataError, match="instance the first"):
            gt.Session(graph).fit([gt.Instance(**whole | given, key="the first")], epochs=1)  # type: ignore[arg-type]


def parameters() -> set[str]:
    """Of all that is public and that a user makes or calls, but numbers alone."""
    found = set()
    for name, public in vars(gt).items():
        makes = inspect.isclass(public) and not inspect.isabstract(public)
        if not makes and not inspect.isfunction(public):
            continue
        if name in OURS | TORCHES | LATER or name.startswith(("_", "Abstract")):
            continue
        if makes and issubclass(public, Exception):
            continue
        for parameter in inspect.signature(public).parameters.values():
            words = set(str(parameter.annotation).replace("'", "").split(" | "))
            if not words <= {"int", "float", "None", "object", "Any"}:
                found.add(f"{name}.{parameter.name}")
    return found


def test_every_argument_of_a_public_name_has_a_row() -> None:
    """A new one is to be added to ``ROWS``, and to be checked."""
    without = parameters() - ROWS.keys() - CHECKED_ELSEWHERE
    assert len(parameters()) > 100
    assert sorted(without) == []


CHECKED_ELSEWHERE = {
    "LookAheadSGD.params",
    "SpikeCompensatedSGD.params",
    "require_range.what",
    "accuracy.prediction",
    "accuracy.target",
}
"""By torch, or words for an error alone."""

"""What the function of a ``where`` and of a ``route`` may give, and what it is told else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt

ONE = gt.Threads(1, kernel_threads=1)
KINDS = [0, 1, 2, 0]


def instances() -> list[gt.Instance]:
    return [gt.Instance({"x": torch.full((1, 1), float(k))}, value={"kind": k}) for k in KINDS]


@pytest.mark.filterwarnings("ignore:__array_wrap__")
@pytest.mark.parametrize("run", ["auto", "steps"])
@pytest.mark.parametrize(
    "predicate",
    [
        lambda m: m.kind > 0,
        lambda m: m.kind,
        lambda m: m.payload[0][:, 0] > 0,
        lambda m: (m.payload[0][:, 0] > 0) & (m.kind >= 0),  # of both, numpy makes uint8
    ],
)
def test_where_holds_for_what_is_true_or_is_not_zero(predicate: Any, run: Any) -> None:
    graph = gt.Graph(value=("kind",), run=run)
    rounds = graph.loop()
    rounds.join(graph.input("x", step=0))
    yes, no = rounds.move(step=lambda m: m.step + 1).where(predicate)
    more, done = yes.where(lambda m: m.step < 2)
    rounds.join(more)
    done.output("yes")
    no.output("no")
    for found, kind in zip(gt.Session(graph, runtime=ONE).predict(instances()), KINDS, strict=True):
        assert (len(found["yes"]), len(found["no"])) == ((1, 0) if kind else (0, 1))


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (lambda s: s.route(lambda m: m.kind > 0, 2, name="n"), "'n': .* bool; route.. takes numb"),
        (lambda s: s.route(lambda m: m.kind / 2, 2, name="n"), "'n': .* float64; route.. takes n"),
        (lambda s: s.where(lambda m: m.payload[0][:, 0], name="n"), "'n': .* float32; where.. tak"),
    ],
)
def test_booleans_are_no_ways_and_floats_are_neither(by: Any, words: str) -> None:
    graph = gt.Graph(value=("kind",))
    for way in by(graph.input("x")):
        way.stop()
    with pytest.raises(gt.GraphError, match=words):
        gt.Session(graph, runtime=ONE).predict(instances())


@pytest.mark.parametrize("run", ["auto", "steps"])
@pytest.mark.parametrize(
    "mixed",
    [
        lambda m: (m.step < 3) & (m.payload[0][:, 0] < 1),
        lambda m: m.payload[0][:, 0] < m.step,
        lambda m: m.step + m.payload[0][:, 0] < 1,
    ],
)
def test_who_mixes_tensors_and_columns_is_told_of_both(mixed: Any, run: Any) -> None:
    graph = gt.Graph(value=("kind",), run=run)
    rounds = graph.loop()
    rounds.join(graph.input("x", step=np.int64(0)).through(nn.Linear(1, 1), name="linear"))
    more, done = rounds.where(mixed)
    rounds.join(more.move(step=lambda m: m.step + 1))
    done.output("out")
    with pytest.raises(gt.GeartrainError, match="columns are numpy arrays and m"):
        gt.Session(graph, runtime=ONE).predict(instances())

"""bAbI on graphs: marks, the cut, gradients of all three kinds of answer, and learning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from geartrain.data.babi import TASKS, BabiTask, GraphQuestion, generate_deduction
from geartrain.engine.schedule import Schedule
from geartrain.errors import DataError
from geartrain.frames.instance import Instance
from geartrain.nn import GatedGraphCell, GatedSum, VertexChoice
from geartrain.recipes import Setting, find_recipe
from geartrain.recipes.babi import (
    Size,
    columns_of,
    cut,
    make_graph,
    path_accuracy,
    path_loss,
)
from geartrain.recipes.recipe import Task
from geartrain.runtime.simulated import Simulated
from geartrain.train.results import Target
from geartrain.train.session import Session
from tests.rigs.passes import (
    Order,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
)

RECIPE = find_recipe("babi")
SIZE = Size(hidden=6, steps=2)
KINDS = ("cat", "wolf", "mouse", "sheep")
NAMES = ("Emily", "Jessica", "Gertrude", "Winona")


def build(data: Path | None = None, seed: int = 0, **options: float) -> Task:
    return RECIPE.build(Setting(seed=seed, epochs=5, update_every=10, data=data, options=options))


def questions_of(kind: BabiTask, n: int) -> list[GraphQuestion]:
    """Random questions of a task, sensible or not."""
    rng = np.random.default_rng(kind.number)
    questions = []
    for _ in range(n):
        v, e = int(rng.integers(2, 6)), int(rng.integers(0, 7))
        most = {"vertex": v, "class": 2, "classes": 4}[kind.answer]
        questions.append(
            GraphQuestion(  # type: ignore[call-arg]
                tuple(map(str, range(v))),
                *rng.integers(0, v, (2, e)),
                rng.integers(0, 2 * len(kind.relations), e),
                int(rng.integers(len(kind.questions))),
                rng.permutation(v)[: kind.query],
                rng.integers(0, most, 2 if kind.answer == "classes" else 1),
            )
        )
    return questions


def write_deduction(folder: Path, stories: int) -> Path:
    """A training file of task 15; each story asks about all four individuals."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(stories):
        feared = {kind: KINDS[(k + rng.integers(1, 4)) % 4] for k, kind in enumerate(KINDS)}
        of = {name: KINDS[rng.integers(4)] for name in NAMES}
        plural = {"cat": "cats", "wolf": "wolves", "mouse": "mice", "sheep": "sheep"}
        facts = [f"{plural[a].title()} are afraid of {plural[b]}." for a, b in feared.items()]
        facts += [f"{name} is a {kind}." for name, kind in of.items()]
        asked = [f"What is {n.lower()} afraid of?\t{feared[of[n]]}\t1 2" for n in NAMES]
        lines += [f"{i} {text}" for i, text in enumerate([*facts, *asked], 1)]
    (folder / "babi" / "en").mkdir(parents=True)
    path = folder / "babi" / "en" / "qa15_basic-deduction_train.txt"
    path.write_text("\n".join(lines) + "\n")
    return folder


# --- instances and splits


def test_a_question_marks_its_vertices_in_a_column_of_its_kind_and_place() -> None:
    no = np.zeros(0, np.int64)
    question = GraphQuestion(
        ("a", "b", "c"), no, no, no, 1, np.array([2, 0]), np.array([1], np.int64)
    )
    (instance,) = columns_of([question], TASKS[18], 5, "test")
    marks = torch.zeros(3, 5)
    marks[2, 2] = marks[0, 3] = 1
    assert torch.equal(instance.inputs["start"], marks)
    assert instance.value["answer"] == 1
    assert instance.key == "test question 1"


def test_the_cut_leaves_equal_graphs_on_one_side_and_loses_no_question() -> None:
    graphs = generate_deduction(30, 0, kinds=3, individuals=2)
    questions = [q for q in graphs for _ in range(4)]
    train, valid = cut(questions)
    assert len(valid) == 4 * round(0.2 * len({q.target.tobytes() for q in graphs}))
    assert len(train) + len(valid) == len(questions)
    sides = [{(q.source.tobytes(), q.target.tobytes()) for q in side} for side in (train, valid)]
    assert not sides[0] & sides[1]
    again = cut(questions)[1]
    assert [id(q) for q in again] == [id(q) for q in valid]
    assert [id(q) for q in cut(questions, seed=1)[1]] != [id(q) for q in valid]


def test_a_split_without_questions_is_refused_by_its_name() -> None:
    """Where all graphs of a file are equal, none is left to validate on."""
    with pytest.raises(DataError, match=r"the valid split has no questions.*too few different"):
        columns_of([], TASKS[15], 5, "valid")


def test_the_training_file_is_cut_the_same_way_for_every_seed(tmp_path: Path) -> None:
    data = write_deduction(tmp_path, 20)
    first, other = build(data), build(data, seed=1)
    assert [len(first.load(split)) for split in ("train", "valid")] == [64, 16]
    for split in ("train", "valid"):
        for a, b in zip(first.load(split), other.load(split), strict=True):
            assert torch.equal(a.inputs["start"], b.inputs["start"])
            assert np.array_equal(a.edge["target"], b.edge["target"])
    with pytest.raises(DataError, match="deduction_test"):
        first.load("test")


def test_enlarged_graphs_have_54_vertices_and_the_splits_differ() -> None:
    task = build(enlarged=1)
    splits = [task.load(name) for name in ("train", "valid", "test")]
    assert [len(split) for split in splits] == [1000, 200, 200]
    assert {len(instance.inputs["start"]) for split in splits for instance in split} == {54}
    targets = [split[0].edge["target"].tobytes() for split in splits]
    assert len(set(targets)) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": 3}, "option task=3: there is 4, 15, 16, 18, 19"),
        ({"thousands": 2}, "option thousands=2: the text has 1 or 10 thousand"),
        ({"task": 18, "hidden": 3}, "hidden=3: task 18 marks vertices in 4 columns; give 4"),
        ({"task": 16, "enlarged": 1}, "enlarged=1 with task=16: it is for task 15 alone"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(**options)


# --- the network


def plain_loss(kind: BabiTask, modules: list[torch.nn.Module], given: Instance) -> Tensor:
    """The loss of one question, without messages."""
    (cell,) = (m for m in modules if isinstance(m, GatedGraphCell))
    others = [m for m in modules if m is not cell]
    v = len(given.inputs["start"])
    inside = SimpleNamespace(
        lengths=torch.tensor([v]),
        segment=torch.zeros(v, dtype=torch.int64),
        edges={name: torch.from_numpy(column) for name, column in given.edge.items()},
    )

    source, target, types = (inside.edges[name] for name in ("source", "target", "type"))

    def passed(h: Tensor) -> Tensor:
        for _ in range(SIZE.steps):
            made = cell.message(h).view(v, cell.types, -1)
            heard = torch.zeros_like(h).index_add(0, target, made[source, types])
            h = cell.update(heard, h)
        return h

    h, answer = passed(given.inputs["start"]), torch.as_tensor(given.value["answer"])
    readout = others[0]
    if kind.answer == "vertex":
        return F.cross_entropy(readout.score(h)[:, 0], answer)
    if kind.answer == "class":
        return F.cross_entropy(readout(h, inside)[0], answer)
    first = F.cross_entropy(readout(h, inside)[0], answer[0])
    return first + F.cross_entropy(readout(passed(others[1](h)), inside)[0], answer[1])


@pytest.mark.parametrize(
    "order", [Order(), Order("threads", 2, "random", 4), Order(workers=3, jitter=0.9, max_rows=4)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("number", TASKS)
def test_the_gradients_are_those_of_autograd(number: int, order: Order) -> None:
    torch.manual_seed(number)
    kind = TASKS[number]
    graph = make_graph(kind, SIZE)
    graph.check()
    modules = [module.double() for module in graph.modules()]
    data = [
        Instance({"start": i.inputs["start"].double()}, edge=i.edge, value=i.value)
        for i in columns_of(questions_of(kind, 11), kind, SIZE.hidden, "test")
    ]
    losses = torch.stack([plain_loss(kind, modules, instance) for instance in data])
    parts = [m for m in modules if list(m.parameters())]
    names = {GatedGraphCell: "cell", GatedSum: "readout", VertexChoice: "readout"}
    named = {names.get(type(m), "marks"): m for m in parts}
    got = accumulate(graph, data, order)
    assert_same_loss(got, losses.sum())
    assert_same_gradients(got.gradients, autograd(losses.sum(), named))


def test_a_path_is_right_when_both_moves_are() -> None:
    scores = torch.zeros(3, 2, 4)
    scores[:, 0, 1] = scores[:, 1, 2] = 5.0
    moves = torch.tensor([[1, 2], [1, 3], [0, 2]])
    assert path_accuracy(scores, moves).tolist() == [True, False, False]
    each = F.cross_entropy(scores.view(6, 4), moves.view(6), reduction="none").view(3, 2)
    assert torch.equal(path_loss(scores, moves), each.sum(1))


# --- learning


def test_deduction_is_learnt_from_a_hundred_questions(tmp_path: Path) -> None:
    task = build(write_deduction(tmp_path, 40), learning_rate=2e-2)
    session = Session(
        task.graph, rules=task.rules, runtime=Simulated(2), schedule=Schedule(ramp=task.ramp)
    )
    fit = session.fit(task.load("train"), epochs=12, valid=task.load("valid"))
    assert fit.history[0].valid["accuracy"] < fit.valid["accuracy"]
    assert fit.valid["accuracy"] > 0.9


@pytest.mark.parametrize(("number", "epochs", "least"), [(4, 1, 0.99), (15, 6, 1.0), (18, 2, 0.9)])
def test_real_questions_are_learnt(number: int, epochs: int, least: float, data_dir: Path) -> None:
    task = build(data_dir, task=number)
    session = Session(
        task.graph,
        rules=task.rules,
        runtime=Simulated(1),
        schedule=Schedule(ramp=task.ramp),
        max_active=20,
    )
    until = Target("accuracy", least)
    fit = session.fit(task.load("train"), epochs=epochs, valid=task.load("valid"), until=until)
    assert fit.valid["accuracy"] >= least


def test_an_evaluation_counts_every_question_once() -> None:
    kind = TASKS[19]
    data = columns_of(questions_of(kind, 9), kind, SIZE.hidden, "test")
    sums = one_pass(make_graph(kind, SIZE), data, train=False).sums
    assert sums["accuracy"][1] == sums["loss"][1] == 9

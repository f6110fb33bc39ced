"""Questions on graphs: a gated graph network on bAbI tasks 4, 15, 16, 18 and 19.

    marks ─► pass messages along the facts, some steps ─┬─► choice of a vertex      4, 15, 16
      ▲                                                 ├─► gated sum ─► no or yes         18
      │                                                 └─► gated sum ─► a move ─┐         19
      └───────────── marks of the second move (19) ◄────┘                        └► both ─► loss

A graph travels as one bundle, which takes all its steps in one firing. The vertices that a question
asks about start with a mark, one column for each kind of question and place in it; all other
columns start at 0.
Tasks 4, 15 and 16 choose a vertex, by a softmax over those of the graph; task 19 goes round twice
and gets both moves right or neither.

The training file is cut in two by the graphs of its questions, so that no graph is on both sides.
``enlarged`` draws task 15 on graphs of 54 vertices instead. Every number of the recipe stands at
the top.

Source: network, marks and node selection of Li et al. 2016, arXiv:1511.05493; the enlarged task is
that of Gaunt et al. 2017, arXiv:1705.09786; text: Weston et al. 2015, arXiv:1502.05698.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.data.babi import TASKS, BabiTask, GraphQuestion, generate_deduction, load_babi
from geartrain.engine.controller import Ramp
from geartrain.errors import DataError
from geartrain.frames.columns import Columns
from geartrain.graph.graph import Graph, Stream
from geartrain.nn import (
    GatedGraphCell,
    GatedSum,
    VertexChoice,
    choice_accuracy,
    choice_loss,
)
from geartrain.nodes.loss import accuracy, cross_entropy
from geartrain.parts.optimizers import FusedAdam
from geartrain.parts.rules import Clip, Instances, Part, Rules
from geartrain.recipes.recipe import (
    AVERAGE_EVERY,
    LoadSplit,
    Option,
    Recipe,
    Setting,
    Task,
)

CLIP_NORM: Final = 1.0  # per part
RAMP: Final = Ramp(start=4, over=200)
VALID_SHARE: Final = 0.2  # of the graphs of the training file
_CUT_SEED: Final = 15  # the cut is the same in every run
_OTHER_SEED: Final = 1_000_003  # added to the seed of each further set of generated graphs
_MOVES: Final = 2  # of task 19


@final
@dataclass(frozen=True, slots=True)
class Size:
    """What a task wants where the options leave it open."""

    hidden: int
    steps: int


SIZES: Final = {
    4: Size(hidden=10, steps=2),
    15: Size(hidden=5, steps=2),
    16: Size(hidden=10, steps=4),
    18: Size(hidden=30, steps=3),
    19: Size(hidden=20, steps=4),
}
RATES: Final = {4: 5e-3, 15: 4e-2, 16: 5e-3, 18: 5e-3, 19: 5e-3}  # Adam's, by task


def build(setting: Setting) -> Task:
    """The task; see ``Recipe.build``.

    Raises:
        ValueError: There is no such task or size, or ``hidden`` has no room for the marks.
    """
    options = setting.options
    kind = _kind(int(options["task"]))
    size = _size(kind, int(options["hidden"]), int(options["steps"]))
    rate = float(options["learning_rate"]) or RATES[kind.number]
    return Task(
        graph=make_graph(kind, size),
        rules=Rules(
            optimizer=partial(FusedAdam, lr=rate),
            update_every=Instances(setting.update_every),
            average="instances",
            clip=Clip(norm=CLIP_NORM),
        ),
        splits=_splits(setting, kind, size.hidden),
        validation="valid",
        ramp=RAMP,
        sharing=setting.copies_of("cell"),
    )


def make_graph(kind: BabiTask, size: Size) -> Graph:
    """Message passing, and the answer that the task wants.

    Args:
        kind: The task.
        size: Width of a vertex's state, at least its marks, and steps of message passing.
    """
    graph = Graph(edge=("type",), value=("answer",))
    types = 2 * len(kind.relations)
    cell = GatedGraphCell(size.hidden, types, steps=size.steps)
    if kind.answer == "classes":
        _path(graph, cell, kind, size.hidden)
        return graph
    states = graph.input("start", bundle=True).through(cell, name="cell", inside=True)
    if kind.answer == "vertex":
        choice = VertexChoice(size.hidden)
        chosen = states.through(choice, name="readout", read="answer", inside=True, pool=True)
        chosen.loss(choice_loss, "answer", metrics={"accuracy": choice_accuracy})
    else:
        scores = _sum_up(states, size.hidden, len(kind.classes))
        scores.loss(cross_entropy, "answer", metrics={"accuracy": accuracy})
    return graph


def _sum_up(states: Stream, hidden: int, classes: int) -> Stream:
    return states.through(GatedSum(hidden, out=classes), name="readout", inside=True, pool=True)


def _path(graph: Graph, cell: nn.Module | Part, kind: BabiTask, hidden: int) -> None:
    """Move after move, each from the marks that the one before left."""
    turns = graph.loop(name="moves")
    turns.join(graph.input("start", bundle=True, move=0))
    states = turns.through(cell, name="cell", inside=True)
    moves = _sum_up(states, hidden, len(kind.classes))
    path = moves.group(by="instance", size=_MOVES, order="move", name="path")
    path.loss(path_loss, "answer", metrics={"accuracy": path_accuracy})
    going, there = states.where(lambda m: m.move + 1 < _MOVES, name="goes on")
    there.stop()
    marks = going.through(nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh()), name="marks")
    turns.join(marks.move(move=lambda m: m.move + 1, name="next move"))


def path_loss(scores: Tensor, moves: Tensor) -> Tensor:
    """Cross entropy of each path: scores ``(n, moves, classes)``, moves int64 ``(n, moves)``."""
    return (
        F.cross_entropy(scores.flatten(0, 1), moves.flatten(), reduction="none")
        .view_as(moves)
        .sum(1)
    )


def path_accuracy(scores: Tensor, moves: Tensor) -> Tensor:
    """Whether all moves of a path are right."""
    return (scores.argmax(-1) == moves).all(1)


def columns_of(
    questions: Sequence[GraphQuestion], kind: BabiTask, hidden: int, called: str
) -> Columns:
    """Questions as instances: a row of marks for every vertex, the facts as typed edges.

    Args:
        questions: Of one task, one or more.
        kind: That task.
        hidden: Width of a row; column ``question * queries + place`` marks a vertex asked about.
        called: What errors call the questions: a file or a split.

    Raises:
        DataError: There is none.
    """
    if not questions:
        raise DataError(
            f"the {called} split has no questions: those on equal graphs stay on one side of the "
            "cut, and the file has too few different graphs; give it a larger file, or enlarged=1"
        )
    sizes = np.array([len(question.names) for question in questions])
    starts = sizes.cumsum() - sizes
    marks = torch.zeros(int(sizes.sum()), hidden)
    for start, question in zip(starts.tolist(), questions, strict=True):
        vertices = torch.from_numpy(question.query)
        columns = question.kind * kind.query + torch.arange(len(vertices))
        marks[start + vertices, columns] = 1
    answers = [q.answer if kind.answer == "classes" else q.answer[0] for q in questions]
    return Columns(
        sizes,
        {"start": marks},
        value={"answer": np.array(answers)},
        edge={
            name: np.concatenate([getattr(question, name) for question in questions])
            for name in ("source", "target", "type")
        },
        edge_lengths=[len(question.source) for question in questions],
        called=lambda i: f"{called} question {i + 1}",
    )


def cut(
    questions: Sequence[GraphQuestion], share: float = VALID_SHARE, seed: int = _CUT_SEED
) -> tuple[list[GraphQuestion], list[GraphQuestion]]:
    """Questions to train on and to validate on; those on equal graphs stay on one side.

    Args:
        questions: All of a file.
        share: Of the graphs that goes to validation.
        seed: Of the choice; equal arguments give equal parts.
    """
    graphs: dict[object, list[GraphQuestion]] = {}
    for q in questions:
        columns = (q.source.tobytes(), q.target.tobytes(), q.type.tobytes())
        graphs.setdefault((q.names, *columns), []).append(q)
    groups = list(graphs.values())
    chosen = set(np.random.default_rng(seed).permutation(len(groups))[: round(share * len(groups))])
    train = [q for i, group in enumerate(groups) if i not in chosen for q in group]
    return train, [q for i in sorted(chosen) for q in groups[i]]


def _splits(setting: Setting, kind: BabiTask, hidden: int) -> dict[str, LoadSplit]:
    thousands = int(setting.options["thousands"])
    if setting.options["enlarged"]:
        if kind.number != 15:
            raise ValueError(f"option enlarged=1 with task={kind.number}: it is for task 15 alone")
        most = 1000 * thousands
        sizes = {"train": most, "valid": most // 5, "test": most // 5}
        return {
            name: partial(_draw, n, setting.seed + place * _OTHER_SEED, kind, hidden, name)
            for place, (name, n) in enumerate(sizes.items())
        }
    if thousands not in (1, 10):
        raise ValueError(
            f"option thousands={thousands}: the text has 1 or 10 thousand questions a task; "
            "enlarged=1 draws any number"
        )
    size: Literal["en", "en-10k"] = "en" if thousands == 1 else "en-10k"
    parts: list[list[GraphQuestion]] = []

    def read(split: Literal["train", "valid", "test"]) -> Columns:
        if split == "test":
            found = load_babi(setting.data, kind.number, size=size, split="test")
            return columns_of(found.questions, kind, hidden, "test")
        if not parts:
            parts.extend(cut(load_babi(setting.data, kind.number, size=size).questions))
        return columns_of(parts[split == "valid"], kind, hidden, split)

    return {"train": lambda: read("train"), "valid": lambda: read("valid"),
            "test": lambda: read("test")}  # fmt: skip


def _draw(n: int, seed: int, kind: BabiTask, hidden: int, called: str) -> Columns:
    return columns_of(generate_deduction(n, seed), kind, hidden, called)


def _kind(number: int) -> BabiTask:
    if number not in TASKS:
        raise ValueError(f"option task={number}: there is {', '.join(map(str, TASKS))}")
    return TASKS[number]


def _size(kind: BabiTask, hidden: int, steps: int) -> Size:
    wanted, marks = SIZES[kind.number], len(kind.questions) * kind.query
    size = Size(hidden or wanted.hidden, steps or wanted.steps)
    if size.hidden < marks:
        raise ValueError(
            f"option hidden={size.hidden}: task {kind.number} marks vertices in {marks} columns; "
            f"give {marks} or more"
        )
    return size


BABI: Final = Recipe(
    name="babi",
    summary="answer questions on graphs of facts: bAbI tasks 4, 15, 16, 18 and 19",
    paper="Weston et al. 2015, arXiv:1502.05698; Li et al. 2016, arXiv:1511.05493",
    metrics=("accuracy",),
    target="accuracy>=1.0",
    max_active=16,
    update_every=8,
    unit="instances",
    epochs=10,
    make=build,
    draw=lambda: make_graph(TASKS[15], SIZES[15]),
    needs=("babi/en/qa15_basic-deduction_train.txt",),
    options=(
        Option("task", 15, 1, "4, 15, 16, 18 or 19"),
        Option("thousands", 1, 1, "questions of the file: 1 (en) or 10 (en-10k)"),
        Option("enlarged", 0, 0, "1: draw task 15 on graphs of 54 vertices"),
        Option("hidden", 0, 0, "width of a vertex's state; 0: what the task wants"),
        Option("steps", 0, 0, "of message passing; 0: what the task wants"),
        Option("learning_rate", 0.0, 0.0, "Adam's rate; 0: what the task wants"),
        Option(AVERAGE_EVERY, 200, 0, "instances between meetings of copies; 0: once an epoch"),
    ),
    bottleneck="cell",
    workers=1,
    why="one worker: a thousand questions take seconds, less than worker processes take to begin; "
    "its kernels have all cores",
)

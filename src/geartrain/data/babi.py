"""Questions on graphs: bAbI tasks 4, 15, 16, 18 and 19, read from their text.

    1 Wolves are afraid of mice.            wolf --fears--> mouse
    2 Gertrude is a wolf.                   gertrude --is--> wolf
    3 What is gertrude afraid of?  mouse    question "fears", query [gertrude], answer [mouse]

As in Li et al. 2016, arXiv:1511.05493: entities and attributes are vertices, relation words are
edge types, the entities of a question are marked vertices, and the order of the facts is dropped.
The graph of a question holds the facts before it, one edge a fact; vertices are numbered by first
mention, words are lower case and animals singular.

| task              | edge types               | query      | answer                             |
|-------------------|--------------------------|------------|------------------------------------|
| 4 relations       | north south east west    | 1 vertex   | a vertex; the question is a        |
|                   |                          |            | direction: what lies there         |
| 15 deduction      | is fears                 | 1 vertex   | a vertex, what the query fears     |
| 16 induction      | is has_color             | 1 vertex   | a vertex, the colour of the query  |
| 18 size reasoning | fits_inside bigger_than  | 2 vertices | a class, no or yes                 |
| 19 path finding   | north south east west    | 2 vertices | two classes, the moves in turn     |

``a --north--> b`` says that a is north of b. "What is a north of?" asks what lies south of a, so
that task 4 has four kinds of question, one a direction. The end-of-sequence class that Li et al.
add for task 19 is left to the model: class 4 is free.

With ``reverse`` every edge t also runs backward, as type t + number of edge types: inverse
relations and induction need it. Either half stands in the order of the facts.

Every answer of the training files is one that its graph allows, and the only one, but for task 16:
of its questions 8 % ask about a kind with animals of two colours, where the text mostly means the
colour told last and a graph without order cannot tell. Text: Weston et al. 2015, arXiv:1502.05698.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from geartrain.data import limits
from geartrain.data.babi_sentences import asked, stated
from geartrain.data.folder import find_data
from geartrain.data.policy import Policy, Refusals
from geartrain.errors import DataError
from geartrain.files import read_bytes

LONGEST = 1000  # characters of a line; sentences have some 50
_MOVES = {"n": "north", "s": "south", "e": "east", "w": "west"}
DIRECTIONS = ("north", "south", "east", "west")


@final
@dataclass(frozen=True, slots=True)
class BabiTask:
    """What all questions of a task have in common.

    Args:
        number: The task's number in bAbI.
        file: Name of its text file, without ``_train.txt``.
        relations: The edge types; reversed ones follow in the same order.
        questions: The kinds of question.
        classes: What the classes of an answer mean; empty where the answer is a vertex.
        answer: What ``GraphQuestion.answer`` holds.
        query: Number of marked vertices.
    """

    number: int
    file: str
    relations: tuple[str, ...]
    questions: tuple[str, ...]
    classes: tuple[str, ...]
    answer: Literal["vertex", "class", "classes"]
    query: int


_SIZES = ("fits_inside", "bigger_than")
TASKS = {
    task.number: task
    for task in (
        BabiTask(4, "qa4_two-arg-relations", DIRECTIONS, DIRECTIONS, (), "vertex", 1),
        BabiTask(15, "qa15_basic-deduction", ("is", "fears"), ("fears",), (), "vertex", 1),
        BabiTask(16, "qa16_basic-induction", ("is", "has_color"), ("has_color",), (), "vertex", 1),
        BabiTask(18, "qa18_size-reasoning", _SIZES, _SIZES, ("no", "yes"), "class", 2),
        BabiTask(19, "qa19_path-finding", DIRECTIONS, ("path",), DIRECTIONS, "classes", 2),
    )
}


@final
@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence of a story: ``subject --relation--> object``; relation is an edge type."""

    subject: str
    relation: int
    object: str


@final
@dataclass(frozen=True, slots=True)
class Question:
    """One question of a story, with the number of facts that stand before it.

    Args:
        kind: Index into the task's ``questions``.
        query: The names asked about, in the order of the text (source before target).
        answer: Names of vertices or of classes.
        facts: Only the first so many facts of the story are known.
        line: Where it stands in the file, counted from 1.
    """

    kind: int
    query: tuple[str, ...]
    answer: tuple[str, ...]
    facts: int
    line: int


@final
@dataclass(frozen=True, slots=True)
class Story:
    """The facts and questions from one line number 1 to the next."""

    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class GraphQuestion:
    """A graph of V vertices and E edges, with one question on it.

    Args:
        names: V names, for people.
        source: int64 ``(E,)``, vertex an edge leaves.
        target: int64 ``(E,)``, vertex it enters.
        type: int64 ``(E,)``, index into the task's ``relations``, plus their number if reversed.
        kind: Index into the task's ``questions``.
        query: int64 ``(1,)`` or ``(2,)``, marked vertices in the order of the question.
        answer: int64 ``(1,)``, a vertex or a class; ``(2,)`` classes for task 19.
    """

    names: tuple[str, ...]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    type: NDArray[np.int64]
    kind: int
    query: NDArray[np.int64]
    answer: NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Babi:
    """All questions of one file, in its order, and how many stories were skipped."""

    task: BabiTask
    questions: tuple[GraphQuestion, ...]
    skipped: int


def load_babi(
    folder: Path | None = None,
    task: int = 15,
    *,
    size: Literal["en", "en-10k"] = "en",
    split: Literal["train", "test"] = "train",
    reverse: bool = True,
    policy: Policy = "raise",
) -> Babi:
    """Read ``babi/<size>/qa<task>_..._<split>.txt`` of the data folder as graphs.

    Args:
        folder: The data folder, which holds ``babi/``; None takes ``$GEARTRAIN_DATA``.
        task: 4, 15, 16, 18 or 19.
        size: ``"en"`` (1,000 questions) or ``"en-10k"``.
        split: ``"train"`` or ``"test"``.
        reverse: Add a reversed edge for every edge.
        policy: ``"raise"`` on the first bad story, or ``"skip"`` it whole, and count.

    Raises:
        DataError: The file is missing or empty, or a line is refused; with path and line.
        ValueError: Another task, size or split.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task}; expected one of {', '.join(map(str, TASKS))}")
    if size not in ("en", "en-10k") or split not in ("train", "test"):
        raise ValueError(
            f"size is {size!r} and split is {split!r}; expected 'en' or 'en-10k', and 'train' or "
            "'test'"
        )
    name = f"babi/{size}/{TASKS[task].file}_{split}.txt"
    path = find_data(folder, name) / name
    refusals = Refusals(policy, path)
    questions: list[GraphQuestion] = []
    for lines in _stories(path):
        try:
            story = parse_story(lines, TASKS[task])
            questions += graph_questions(story, TASKS[task], reverse=reverse)
        except DataError as error:
            refusals.refuse(DataError(error.reason, path=path, line=error.line))
    skipped = refusals.close(len(questions))
    if not questions:
        raise DataError(
            f"the file has no question; expected numbered facts and questions of task {task}. "
            "Fetch it anew",
            path=path,
        )
    return Babi(TASKS[task], tuple(questions), skipped)


def parse_story(lines: list[tuple[int, str]], task: BabiTask) -> Story:
    """Read the sentences of one story.

    Args:
        lines: Line in the file, counted from 1, and its text with its number in the story.
        task: Whose sentences are expected.

    Raises:
        DataError: A line out of number, a sentence that the task does not have, or no question at
            all. ``line`` is set, ``path`` is not.
    """
    facts: list[Fact] = []
    questions: list[Question] = []
    for place, (number, line) in enumerate(lines, 1):
        if len(line) > LONGEST:
            raise DataError(
                f"the line has {len(line)} characters; expected {LONGEST} at most. See whether "
                "line ends were lost",
                line=number,
            )
        sentence, *rest = _numbered(line, place, number).split("\t")
        if not rest:
            subject, relation, object_ = stated(sentence.strip(), task.number, number)
            facts.append(Fact(subject, task.relations.index(relation), object_))
            continue
        asks, query = asked(sentence.strip(), task.number, number)
        answer = _answer(rest[0], task)
        questions.append(Question(task.questions.index(asks), query, answer, len(facts), number))
    if not questions:
        raise DataError(
            f"the story of {len(facts)} facts has no question; expected one, of the form "
            "'question TAB answer TAB lines'. See whether the file was cut",
            line=lines[-1][0] if lines else None,
        )
    return Story(tuple(facts), tuple(questions))


def graph_questions(story: Story, task: BabiTask, *, reverse: bool = True) -> list[GraphQuestion]:
    """Turn every question of a story into a graph, by the table in the module docstring.

    Raises:
        DataError: A question asks about, or is answered by, what no fact before it mentions; or
            an answer that is no class, or of another length, than the task has.
    """
    return [_graph(story, question, task, reverse) for question in story.questions]


def generate_deduction(
    n: int, seed: int, *, kinds: int = 27, individuals: int = 27, reverse: bool = True
) -> list[GraphQuestion]:
    """Draw larger graphs of task 15: each individual is of a kind, each kind fears another one.

    Kinds, whom they fear and the individual asked about are uniform; vertices are numbered at
    random, so that a number tells nothing. The default has 54 vertices, the size to which Gaunt et
    al. 2017, arXiv:1705.09786, enlarge the task; that one half of them are kinds is our choice.

    Args:
        n: Number of graphs, each with one question.
        seed: Not negative; equal arguments give equal graphs.
        kinds: At least 2.
        individuals: At least 1.
        reverse: Add a reversed edge for every edge.

    Raises:
        ValueError: A number out of range.
    """
    if n < 0 or seed < 0 or kinds < 2 or individuals < 1:
        raise ValueError(
            f"n, seed, kinds, individuals are {n}, {seed}, {kinds}, {individuals}; expected at "
            "least 0, 0, 2 and 1"
        )
    random = np.random.default_rng(seed)
    names = tuple(f"vertex {v}" for v in range(kinds + individuals))
    is_a, fears = TASKS[15].relations.index("is"), TASKS[15].relations.index("fears")
    kind_type = np.repeat(np.array([fears, is_a], np.int64), [kinds, individuals])
    graphs = []
    for _ in range(n):
        vertex = random.permutation(kinds + individuals)
        feared = (np.arange(kinds) + random.integers(1, kinds, kinds)) % kinds
        target = np.concatenate((feared, random.integers(0, kinds, individuals)))
        asked = int(random.integers(kinds, kinds + individuals))
        answer = vertex[feared[target[asked]]]
        edges = _edges(vertex, vertex[target], kind_type, 2, reverse)
        query = np.array([vertex[asked]], np.int64)
        graphs.append(GraphQuestion(names, *edges, 0, query, np.array([answer], np.int64)))
    return graphs


def _answer(text: str, task: BabiTask) -> tuple[str, ...]:
    answer = text.strip().lower()
    if task.answer != "classes":
        return (answer,)
    return tuple(_MOVES.get(move, move) for move in answer.split(","))


def _graph(story: Story, question: Question, task: BabiTask, reverse: bool) -> GraphQuestion:
    facts = story.facts[: question.facts]
    mentioned = (name for fact in facts for name in (fact.subject, fact.object))
    vertex = {name: v for v, name in enumerate(dict.fromkeys(mentioned))}
    query = _look_up(question.query, vertex, "question asks about", question.line)
    if task.answer == "vertex":
        answer = _look_up(question.answer, vertex, "answer is", question.line)
    else:
        answer = _classes(question, task)
    if len(answer) != (2 if task.answer == "classes" else 1):
        raise DataError(
            f"the answer has {len(answer)} parts: {', '.join(question.answer)}; task {task.number} "
            f"expects {2 if task.answer == 'classes' else 1}. Remove the story",
            line=question.line,
        )
    edges = _edges(
        np.array([vertex[fact.subject] for fact in facts], np.int64),
        np.array([vertex[fact.object] for fact in facts], np.int64),
        np.array([fact.relation for fact in facts], np.int64),
        len(task.relations),
        reverse,
    )
    return GraphQuestion(tuple(vertex), *edges, question.kind, query, answer)


def _edges(
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    kind: NDArray[np.int64],
    relations: int,
    reverse: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    if not reverse:
        return source, target, kind
    return (
        np.concatenate((source, target)),
        np.concatenate((target, source)),
        np.concatenate((kind, kind + relations)),
    )


def _look_up(
    names: tuple[str, ...], vertex: dict[str, int], what: str, line: int
) -> NDArray[np.int64]:
    if unknown := [name for name in names if name not in vertex]:
        raise DataError(
            f"the {what} {unknown[0]!r}, which no fact before it mentions; expected one of "
            f"{', '.join(vertex) or 'no vertex, as there is no fact'}. Remove the story",
            line=line,
        )
    return np.array([vertex[name] for name in names], np.int64)


def _classes(question: Question, task: BabiTask) -> NDArray[np.int64]:
    if unknown := [name for name in question.answer if name not in task.classes]:
        raise DataError(
            f"the answer is {unknown[0]!r}; task {task.number} expects one of "
            f"{', '.join(task.classes)}. Remove the story",
            line=question.line,
        )
    return np.array([task.classes.index(name) for name in question.answer], np.int64)


def _stories(path: Path) -> list[list[tuple[int, str]]]:
    stories: list[list[tuple[int, str]]] = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        if not stories or line.startswith("1 "):
            stories.append([])
        stories[-1].append((number, line.rstrip("\r")))
    return stories


def _read(path: Path) -> str:
    try:
        content = read_bytes(path, limits.most(limits.LINES), limits.REMEDY)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}; expected a text file of stories. Check name and "
            "permissions",
            path=path,
        ) from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte 0x{content[error.start]:02x} is not UTF-8 ({error.reason}); expected UTF-8. "
            "Convert the file",
            path=path,
            line=content.count(b"\n", 0, error.start) + 1,
        ) from error


def _numbered(line: str, place: int, number: int) -> str:
    first, _, text = line.partition(" ")
    if first != str(place):
        raise DataError(
            f"the line begins with {first[:20]!r}; expected {place}, its number in the story. See "
            "whether a line is missing, or number the lines of each story from 1",
            line=number,
        )
    return text

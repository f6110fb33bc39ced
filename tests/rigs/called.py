"""Loops whose modules have programs, for calls that C makes many at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph, Stream

WIDTH = 4


def squared(x: Tensor) -> Tensor:
    return x.square().flatten(1).sum(1)


def linear(into: int = WIDTH, out: int = WIDTH) -> nn.Module:
    return nn.Linear(into, out).double()


class Gated(nn.Module):
    """Two states in, two out, the second by way of the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.words = nn.Linear(WIDTH, 2 * WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.gates(h + self.words(word)).chunk(2, 1)
        c = torch.sigmoid(a) * c + torch.tanh(b)
        return torch.tanh(c), c


class Dropping(Gated):
    """Drops of what it reads, and of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        h, c = super().forward(self.drop(h), c, word)
        return functional.dropout(h, 0.2, self.training), c


class Tagged(nn.Module):
    """A word's row of a table meets a weight, beside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.map = nn.Embedding(5, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.map(torch.cat([h, self.words(word)], 1)))
        return y, y + c


class Computed(Gated):
    """Its weight is a product of weights, and so is what the state is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(s)) for s in ((WIDTH, 2), (2, WIDTH)))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(functional.linear(h, self.a @ self.b) * self.scale.exp(), c, word)


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(x)), x


class Alike(Start):
    """What it makes is one of two numbers, so that rows are equal in some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, c = super().forward(x)
        return (1 + (h > 0).to(h.dtype)) * self.scale, c


class Rooted(Start):
    """Of what is negative it makes what is no number."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.sqrt())


class Beside(nn.Module):
    """What it was given goes on beside what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(h)) + x, x


class Stacked(nn.Module):
    """Of two rows that lie side by side, one."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.map(h.flatten(1)))


class Windowed(nn.Module):
    """Windows of a state, met by a weight, pooled, and normed in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.GroupNorm(1, 2)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.inner(h.unsqueeze(1)))
        return torch.tanh(functional.max_pool1d(y, 2)).flatten(1), c + y[:, 1]


class Choosing(nn.Module):
    """A word as a number, compared, as one of several, and as the place of an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.map(h)) * (1 + word.unsqueeze(1).to(h.dtype) / 5)
        chosen = torch.where((word % 2 == 1).unsqueeze(1), y, h)
        one = chosen.gather(1, (word % WIDTH).unsqueeze(1))
        return chosen, c * (word > 1).unsqueeze(1) + one


class Naming(nn.Module):
    """Beside two states, which entry of the first is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.start = Start()

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        h, c = self.start(x)
        if others:
            before, was = others
            c = before + (was == h.argmax(1)).unsqueeze(1) * h
        return h, c, h.argmax(1)


class Sampling(nn.Module):
    """Reads the teacher's word or the one that it has made, whose row meets a weight.

    And makes a truth by which it leaves most of the state as it is next time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tagged, self.scores = Tagged(), nn.Linear(WIDTH, 5)

    def forward(self, h: Tensor, drawn: Tensor, still: Tensor, token: Tensor) -> tuple[Tensor, ...]:
        word = torch.where(drawn % 3 > 0, token, drawn)
        made, c = self.tagged(h, h, word)
        next_ = (self.scores(made).argmax(1) * 7 + 3 * word - token).clamp(min=-3) % 5
        state = torch.tanh(c) * (1 + word.unsqueeze(1))
        return torch.where(still.unsqueeze(1), h / 2, state), next_, next_ > word


def random_trees(arity: int | None) -> list[Instance]:
    """Of at most so many children each; or of just two or none."""
    rng = np.random.default_rng(5)
    found = []
    for size in (1, 5, 9, 15, 3):
        if arity is None:
            parent = (
                rng.integers(0, np.maximum(np.arange(size), 1)) if size > 1 else np.zeros(1, int)
            )
        else:
            parent = (np.arange(size) - 1) // 2
        parent[0] = -1
        children = np.bincount(parent[1:], minlength=size) if size > 1 else np.zeros(1, int)
        leaves = np.flatnonzero(children == 0)
        columns = {
            "parent": parent,
            "siblings": np.where(parent < 0, 1, children[parent]),
            "slot": np.array([int((parent[:v] == parent[v]).sum()) for v in range(size)]),
            "token": rng.integers(0, 5, size),
        }
        rows = torch.from_numpy(rng.standard_normal((leaves.size, WIDTH)))
        found.append(Instance({"x": (rows, leaves)}, columns))
    return found


def tree(how: str, run: str, *, looks: bool = False) -> Graph:
    """Children meet in a parent, as a sum, a mean, the most or a stack.

    Args:
        looks: Whether the payload is looked at, though it decides nothing.
    """
    graph = Graph(vertex=("parent", "siblings", "slot", "token"))
    nodes = graph.loop(name="nodes", run=run)  # type: ignore[arg-type]
    own = {"keep": "activations"}
    leaf = Alike() if how == "max" else Start()
    nodes.join(graph.input("x").through(leaf.double(), name="leaf", **own))
    inner, root = nodes.where(
        (lambda m: (m.parent >= 0) & m.payload[0].isfinite().all(1).numpy())
        if looks
        else lambda m: m.parent >= 0
    )
    above = {"vertex": lambda m: m.parent}
    met = inner.group(by=above, size="siblings", order="slot", how=how, name="met")  # type: ignore[arg-type]
    if how == "stack":
        met = met.through(Stacked().double(), take=0, name="cell", **own)
        nodes.join(met.through(Start().double(), name="two", **own))
    else:
        nodes.join(met.through(Gated().double(), name="cell", read="token", **own))
    nodes.through(linear(), name="readout", take=0).loss(squared, name="each")
    root.through(linear(), name="last", take=1).loss(squared)
    return graph


def turning(make: Callable[[Stream, Graph], Stream], run: str, **where: Any) -> Graph:
    """A state of two tensors goes round as often as its instance says, or it decides."""
    graph = Graph(vertex=("token",), value=("turns",))
    state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
    own = {"keep": "activations"}
    state.join(graph.input("x", turn=0).through(Start().double(), name="first", **own))
    step = make(state, graph).move(turn=lambda m: m.turn + 1)
    again = where.get("again", lambda m: m.turn < m.turns)
    more, done = step.where(again, name="again")
    state.join(more)
    if where.get("apart", False):  # so that several turns are in flight
        done.through(Last().double(), name="last", keep="graph").loss(squared)
        return graph
    done.loss(lambda h, c: squared(h) + squared(c) if where.get("both", True) else squared(h))
    return graph


class Last(nn.Module):
    """What autograd computes: it is in no loop."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        return self.map(h) + c


def cell(state: Stream, graph: Graph) -> Stream:
    return state.through(Gated().double(), name="cell", read="token", keep="activations")


def tagged(state: Stream, graph: Graph) -> Stream:
    return state.through(Tagged().double(), name="tagged", read="token", keep="activations")


def passed(state: Stream, graph: Graph) -> Stream:
    return state.through(Beside().double(), name="cell", keep="activations")


class Twice(nn.Module):
    """What it computes with goes on as it came, two times."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return h, torch.tanh(self.map(h)) * c, h


class Three(nn.Module):
    """Of three states two."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(h) + also), c - also


def passed_twice(state: Stream, graph: Graph) -> Stream:
    twice = state.through(Twice().double(), name="twice", keep="activations")
    return twice.through(Three().double(), name="three", keep="activations")


def joined(state: Stream, graph: Graph) -> Stream:
    """Both tensors go different ways, are put side by side, and taken apart."""
    one = state.through(linear(), take=0, name="one")
    other = state.through(linear(), take=1, name="other")
    mixed = graph.concat(one, other, on=("vertex", "turn"), name="both").through(
        linear(2 * WIDTH, 2 * WIDTH), name="mixed"
    )
    a, b = mixed.split(WIDTH, WIDTH)
    return graph.concat(a, b.detach(), on=("vertex", "turn"), how="tuple", name="again with")


def computed(state: Stream, graph: Graph) -> Stream:
    return state.through(Computed().double(), name="cell", read="token", keep="activations")


def dropping(state: Stream, graph: Graph, name: str = "cell") -> Stream:
    return state.through(Dropping().double(), name=name, read="token", keep="activations")


def dropping_twice(state: Stream, graph: Graph) -> Stream:
    return dropping(dropping(state, graph), graph, "next")


def routed(state: Stream, graph: Graph, kind: Callable[[], nn.Module] = Gated) -> Stream:
    """One of two experts, as the payload says."""
    some, others = state.where(lambda m: m.payload[0][:, 0] > 0, name="sign")
    ways = [
        way.through(kind().double(), name=f"expert {k}", read="token", keep="activations")
        for k, way in enumerate((some, others))
    ]
    return graph.merge(*ways)


def choosing(state: Stream, graph: Graph) -> Stream:
    return state.through(Choosing().double(), name="cell", read="token", keep="activations")


def windowed(state: Stream, graph: Graph) -> Stream:
    return state.through(Windowed().double(), name="cell", read="token", keep="activations")


def naming(run: str) -> Graph:
    """Integers that a module makes go round beside what it makes them of."""
    graph = Graph(vertex=("token",), value=("turns",))
    state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
    own = {"keep": "activations"}
    state.join(graph.input("x", turn=0).through(Naming().double(), name="first", **own))
    step = state.through(Naming().double(), name="cell", **own).move(turn=lambda m: m.turn + 1)
    more, done = step.where(lambda m: m.turn < m.turns, name="again")
    state.join(more)
    done.loss(lambda h, c, which: squared(h) + squared(c) * (1 + which))
    return graph


def sampling(run: str) -> Graph:
    """Integers that a module makes are the rows that it reads of a table next."""
    graph = Graph(vertex=("token",), value=("turns",))
    state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
    own = {"keep": "activations"}
    first = graph.input("x", turn=0).through(linear(), name="first", **own)
    state.join(first.through(_with_words, name="words", **own))
    step = state.through(Sampling().double(), name="cell", read="token", **own)
    more, done = step.where(lambda m: m.turn < m.turns, name="again")
    state.join(more.move(turn=lambda m: m.turn + 1))
    done.loss(lambda h, word, still: squared(h) * (1 + word + 3 * still))
    return graph


def _with_words(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return h.tanh(), torch.full((len(h),), 4), h[:, 0] > 0


def widest(run: str) -> Graph:
    """The most of rows of more numbers than C looks at at once."""
    graph = Graph(value=("n",), run="auto" if run == "whole" else "steps")
    wide, narrow = (
        nn.Sequential(linear(*sizes), nn.Tanh()) for sizes in ((WIDTH, 70), (70, WIDTH))
    )
    rows = graph.input("x").through(wide, name="wide", keep="activations")
    met = rows.group(by="instance", size=lambda m: m.n, how="max", name="most")
    met.through(narrow, name="narrow", keep="activations").through(linear(), name="last").loss(
        squared
    )
    return graph


class Wanted(nn.Module):
    """The state, how much it wants what comes next, and half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, 1)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return h / 2, torch.sigmoid(self.map(h)), h


class Block(nn.Module):
    """Two states, the first by what was wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, wanted: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.map(a))
        return b + wanted * made, made * a


def past(
    run: str, *, looks: bool, experts: int = 1, all_read: bool = True, block: type[Block] = Block
) -> Graph:
    """Rows go through one of some blocks, or past all, twice; then all of an instance meet."""
    graph = Graph(vertex=("token",), value=("n",), run="auto" if run == "whole" else "steps")
    own = {"keep": "activations"}
    state = graph.input("x").through(linear(), name="first", **own)
    for k in range(2):
        wanting = state.through(Wanted().double(), name=f"wanted {k}", **own)
        ways = wanting.route(
            (lambda m: (m.payload[1][:, 0] > 0.5).numpy() * (1 + m.token % experts))
            if looks
            else lambda m: m.token % (experts + 1),
            experts + 1,
        )
        made = [
            way.through(block().double(), name=f"block {k} {j}", **own)
            for j, way in enumerate(ways[1:])
        ]
        both = graph.merge(*made, ways[0].through(lambda a, b, c: (c, a), name=f"past {k}"))
        state = both.through(_one if all_read else _first, name=f"one {k}", **own)
    met = state.group(by="instance", size=lambda m: m.n, how="mean", name="mean")
    met.through(linear(), name="last", **own).loss(squared)
    return graph


def _one(a: Tensor, b: Tensor) -> Tensor:
    return a - b.square()


def _first(a: Tensor, b: Tensor) -> Tensor:
    return a.tanh()


def tokens_in_bags() -> list[Instance]:
    rng = np.random.default_rng(4)
    return [
        Instance(
            {"x": torch.from_numpy(rng.standard_normal((n, WIDTH)))},
            {"token": rng.integers(0, 5, n)},
            value={"n": n},
        )
        for n in (3, 6, 4, 1, 5, 2)
    ]


def bags() -> list[Instance]:
    rng = np.random.default_rng(3)
    return [
        Instance({"x": torch.from_numpy(rng.standard_normal((n, WIDTH)))}, value={"n": n})
        for n in (3, 1, 4, 1, 5, 2)
    ]


def unsure(m: Any) -> Any:
    """Goes on as long as the payload says so, at most nine times."""
    more = (m.payload[0][:, 0].abs() > 0.05).numpy()
    return more & (m.turn < 9)


def sets(rows: int = 3) -> list[Instance]:
    rng = np.random.default_rng(2)
    return [
        Instance(
            {"x": torch.from_numpy(rng.standard_normal((rows, WIDTH)))},
            {"token": rng.integers(0, 5, rows)},
            value={"turns": n},
        )
        for n in (3, 1, 4, 1, 5, 2)
    ]


def few_and_many() -> list[Instance]:
    """Sets of so many rows that a table of five words is multiplied once for them, and of fewer."""
    few, many = sets(1), sets(12)
    return [(many if k % 4 < 2 else few)[k % 6] for k in range(24)]


CASES: dict[str, tuple[Callable[[str], Graph], Callable[[], list[Instance]]]] = {
    "sums of children": (lambda run: tree("sum", run), lambda: random_trees(None)),
    "means of children": (lambda run: tree("mean", run), lambda: random_trees(None)),
    "maxima of children": (lambda run: tree("max", run), lambda: random_trees(None)),
    "children side by side": (lambda run: tree("stack", run), lambda: random_trees(2)),
    "a cell that reads words": (lambda run: turning(cell, run), sets),
    "words that meet a weight": (lambda run: turning(tagged, run), few_and_many),
    "many words and few, in flight": (lambda run: turning(tagged, run, apart=True), few_and_many),
    "weights of weights": (lambda run: turning(computed, run), sets),
    "weights of weights, in flight": (
        lambda run: turning(computed, run, apart=True),
        few_and_many,
    ),
    "an input that goes on": (lambda run: turning(passed, run), sets),
    "an input that goes on twice": (lambda run: turning(passed_twice, run), sets),
    "an input that goes on twice, as it decides": (
        lambda run: turning(passed_twice, run, again=unsure),
        sets,
    ),
    "tensors put side by side": (lambda run: turning(joined, run), sets),
    "an output that nobody reads": (lambda run: turning(cell, run, both=False), sets),
    "words as numbers": (lambda run: turning(choosing, run), sets),
    "integers that are made": (naming, sets),
    "words that are made": (sampling, few_and_many),
    "windows": (lambda run: turning(windowed, run), sets),
    "windows, in flight": (lambda run: turning(windowed, run, apart=True), few_and_many),
    "experts by payload": (lambda run: turning(routed, run), sets),
    "a loop that decides": (lambda run: turning(cell, run, again=unsure), sets),
    "experts in a loop that decides": (lambda run: turning(routed, run, again=unsure), sets),
    "joins in a loop that decides": (lambda run: turning(joined, run, again=unsure), sets),
    "sums in a loop that looks": (
        lambda run: tree("sum", run, looks=True),
        lambda: random_trees(None),
    ),
    "maxima in a loop that looks": (
        lambda run: tree("max", run, looks=True),
        lambda: random_trees(None),
    ),
    "children side by side in a loop that looks": (
        lambda run: tree("stack", run, looks=True),
        lambda: random_trees(2),
    ),
}


DRAWING: dict[str, Callable[[str], Graph]] = {
    "one module drops": lambda run: turning(dropping, run),
    "two modules drop": lambda run: turning(dropping_twice, run),
    "experts drop": lambda run: turning(partial(routed, kind=Dropping), run),
    "a loop that decides drops": lambda run: turning(dropping, run, again=unsure),
    "turns in flight drop": lambda run: turning(dropping, run, apart=True),
}
"""What they draw is of the order of calls, so they are as themselves alone."""

"""Modules that read memories, pool bundles, or answer them with bundles, called in C with the
others of their loop, beside the same loops by autograd, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.derived.ragged import choice
from geartrain.errors import WorkerError
from geartrain.frames.instance import Instance
from geartrain.frames.message import Payload
from geartrain.graph.graph import Graph, Stream
from geartrain.nodes.loop import listing, native, several
from geartrain.nodes.loop.listing import Listing
from geartrain.nodes.loop.module import NativeKept
from geartrain.nodes.loop.several import SeveralModule
from geartrain.nodes.remembering import RememberingRead
from tests.rigs.bundling import WIDTH, Apart, Asks, Follows, Meets, Mixes, Shifts, Sum, Weighs
from tests.rigs.counted import count_made
from tests.rigs.passes import Order, accumulate, assert_same_gradients
from tests.rigs.passing import noted_asking
from tests.rigs.products import halved

NAMES, LARGE = 5, 1 << 53
FEW = Order(max_active=3)
ORDERS = [FEW, Order(policy="random", seed=3, max_active=2), Order("threads", 2, max_active=3)]


@pytest.fixture(autouse=True, scope="module")
def _found_once() -> Iterator[None]:
    """What one test has found the others need not look for."""
    choice.RAGGED_REGISTRY.forget()
    yield
    choice.RAGGED_REGISTRY.forget()


@pytest.fixture(autouse=True)
def _soon(needs_kernels: None, in_float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are found at once, and win."""
    monkeypatch.setattr(choice, "FIRINGS", 1)
    monkeypatch.setattr(choice, "ROWS", 1)
    monkeypatch.setattr(choice, "_ratio", lambda *_: 0.5)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of such modules that C has made, forward and back."""
    return count_made(monkeypatch, lambda module: isinstance(module, SeveralModule))


def squared(x: Tensor) -> Tensor:
    return x.square().flatten(1).sum(1)


class Halves(nn.Module):
    """Keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.map(x).chunk(2, 1)
        return keys, values


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, keys: Tensor, values: Tensor, inside: gt.Inside) -> Tensor:
        total = values.new_zeros(len(inside.lengths), WIDTH)
        return torch.tanh(self.map(total.index_add(0, inside.segment, values)))


class Point(nn.Module):
    """Reads all, and one by number; says what it thinks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.words = nn.Linear(WIDTH, WIDTH), nn.Embedding(8, WIDTH)
        self.new = nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        score = (keys * (self.query(h) + self.words(right))[:, None]).sum(2)
        share = score.masked_fill(~mask, -1e9).log_softmax(1)
        where = right[:, None, None].expand(-1, 1, WIDTH)
        read = values.gather(1, where)[:, 0] + (share.exp()[..., None] * values).sum(1)
        return torch.tanh(self.new(torch.cat([h, read], 1))), -share.gather(1, right[:, None])


class Hands(Point):
    """Hands two states on as they came, of which it looks at one; and says what it has read."""

    def forward(self, *given: Tensor) -> Any:
        h, c, *rest = given
        new, said = super().forward(h, *rest)
        return h, said, c, new


class Both(nn.Module):
    """Two states."""

    def forward(self, h: Tensor, c: Tensor | None = None, new: Tensor | None = None) -> Payload:
        if c is None or new is None:
            return h, h.sin()
        return torch.tanh(h / 2 + new), torch.sin(c + h * new)


class Passes(Mixes):
    """Answers bundles with what it makes of them, and with themselves."""

    def forward(self, h: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
        return super().forward(h, inside)[0], h


class Marks(Point):
    """And marks those of which the number is even, by integers that no number tells apart."""

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        new, said = super().forward(*given)
        even = given[-1] + LARGE == given[-1] // 2 * 2 + LARGE
        return torch.where(even[:, None], new, new.sin()), said


class Copies(nn.Module):
    """Says names of its own, and those of members; the second number is what it thinks of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NAMES)

    def forward(
        self, h: Tensor, keys: Tensor, values: Tensor, names: Tensor, mask: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = self.own(h)
        score = (keys * self.query(h)[:, None]).sum(2) + torch.sin(own).gather(1, names)
        share = score.masked_fill(~mask, -1e9).softmax(1)
        said = (own.softmax(1) / 2).scatter_add(1, names, share / 2)
        read = torch.tanh(h + (share[..., None] * values).sum(1))
        return read, -torch.log(said).sum(1, keepdim=True)


def mixing(ends: str = "all", kind: Callable[[], nn.Module] = Mixes) -> Graph:
    """Bundles go round, a few times each, and are added up."""
    graph = Graph(vertex=("right",), value=("turns",))
    steps = graph.loop(name="steps", run="whole")
    steps.join(graph.input("x", bundle=True, turn=0))
    both = steps.through(kind(), name="mixes", inside=True)
    new = both.through(Apart(), name="apart", read="turn", keep="activations")
    more, done = new.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
    steps.join(more)
    if ends == "some":
        done, even = done.where(lambda m: m.turns % 2 > 0)
        even.stop()
    if ends == "members":
        odd, even = done.ungroup(index="turn").where(lambda m: m.turn % 2 > 0)
        odd.loss(squared)
        even.stop()
    else:
        done.through(Sum(), name="sum", inside=True, pool=True).loss(squared)
    return graph


def shifting() -> Graph:
    graph = Graph(vertex=("right",), value=("turns",))
    steps = graph.loop(name="steps", run="whole")
    steps.join(graph.input("x", bundle=True, turn=0).through(nn.Linear(2, 2), name="first"))
    new = steps.through(nn.Tanh(), name="tanh", keep="activations")
    new = new.through(Shifts(), name="shifts", inside=True).move(turn=lambda m: m.turn + 1)
    more, done = new.where(lambda m: m.turn < m.turns)
    steps.join(more)
    done.through(Sum(), name="sum", inside=True, pool=True).loss(squared)
    return graph


def bundles(n: int = 9) -> list[Instance]:
    rng = torch.Generator().manual_seed(0)
    found = []
    for k in range(n):
        size = 1 + k % 4
        x, right = torch.randn(size, 2, generator=rng), np.zeros(size, np.int64)
        found.append(Instance({"x": x}, {"right": right}, value={"turns": 1 + k % 3}))
    return found


def naming(keys: Tensor, values: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    """With what members are called, some of them alike."""
    return keys, values, right // 2


def pointing(
    *,
    decides: bool = False,
    detached: bool = False,
    half: bool = False,
    names: bool = False,
    marks: bool = False,
    hands: bool = False,
) -> Graph:
    """A set that is held, and read at each step of a loop."""
    reads = Copies() if names else Marks() if marks else Hands() if hands else Point()
    graph = Graph(vertex=("right",))
    held = graph.input("x", bundle=True).through(Halves(), name="encode")
    held = held.detach() if detached else held
    held = (held.through(naming, name="naming", read="right") if names else held).hold(name="set")
    steps = graph.loop(name="steps", run="whole")
    first = held.through(First(), name="first", inside=True, pool=True, take=(0, 1))
    steps.join(first.through(Both(), name="both", keep="activations") if hands else first)
    new = steps.attend(held, reads, name="point", read="right")
    if not half:
        new.through(nn.Identity(), take=1, name="missed").loss(lambda y: y[:, 0])
    if hands:
        state = new.through(Both(), take=(0, 2, 3), name="state", keep="activations")
    else:
        state = new.through(nn.Identity(), take=0, name="state")

    def goes_on(m: Any) -> Any:
        more = m.vertex + 1 < m.size
        return more & (m.payload[0][:, 0].abs() > 0.02).numpy() if decides else more

    more, done = state.where(goes_on)
    steps.join(more.move(vertex=lambda m: m.vertex + 1))
    if half:
        odd, even = done.where(lambda m: m.right % 2 > 0)
        odd.loss(squared)
        even.stop()
    else:
        done.stop()
    return graph


def sets(n: int = 9) -> list[Instance]:
    rng = torch.Generator().manual_seed(0)
    sizes = [2 + k % 4 for k in range(n)]
    return [
        Instance(
            {"x": torch.randn(k, 2, generator=rng)},
            {"right": torch.randperm(k, generator=rng).numpy()},
        )
        for k in sizes
    ]


def bundling(kind: Callable[[], nn.Module] = Weighs) -> Graph:
    """Children meet in a parent as a bundle."""
    graph = Graph(vertex=("parent", "siblings"))
    nodes = graph.loop(name="nodes", run="whole")
    nodes.join(graph.input("x").through(nn.Linear(2, WIDTH), name="leaf"))
    inner, root = nodes.where(lambda m: m.parent >= 0)
    met = inner.group(by={"vertex": lambda m: m.parent}, size="siblings", how="bundle")
    below: Stream = met.through(kind(), name="weighs", inside=True, pool=True)
    nodes.join(below.through(nn.Linear(WIDTH, WIDTH), name="cell", keep="activations"))
    root.loss(squared)
    return graph


def trees() -> list[Instance]:
    rng, found = np.random.default_rng(5), []
    for size in (1, 5, 9, 15, 3, 7, 7):
        parent = rng.integers(0, np.maximum(np.arange(size), 1)) if size > 1 else np.zeros(1, int)
        parent[0] = -1
        children = np.bincount(parent[1:], minlength=size) if size > 1 else np.zeros(1, int)
        leaves = np.flatnonzero(children == 0)
        siblings = np.where(parent < 0, 1, children[parent])
        rows = torch.from_numpy(rng.standard_normal((leaves.size, 2)))
        found.append(Instance({"x": (rows, leaves)}, {"parent": parent, "siblings": siblings}))
    return found


CASES: dict[str, tuple[Callable[[], Graph], Callable[[], list[Instance]]]] = {
    "a memory": (pointing, sets),
    "a memory in a loop that decides": (partial(pointing, decides=True), sets),
    "a memory whose gradient nobody wants": (partial(pointing, detached=True), sets),
    "rows without a gradient": (partial(pointing, half=True), sets),
    "a memory with names": (partial(pointing, names=True), sets),
    "names, and a gradient that nobody wants": (partial(pointing, names=True, detached=True), sets),
    "names, and rows without a gradient": (partial(pointing, names=True, half=True), sets),
    "states that are handed on": (partial(pointing, hands=True), sets),
    "states handed on as long as a payload says": (
        partial(pointing, hands=True, decides=True),
        sets,
    ),
    "integers that are compared": (partial(pointing, marks=True), sets),
    "bundles": (bundling, trees),
    "one of a bundle asks the others": (partial(bundling, Asks), trees),
    "bundles answered with bundles": (mixing, bundles),
    "bundles answered with themselves": (partial(mixing, kind=Passes), bundles),
    "some members of such": (partial(mixing, "members", Passes), bundles),
    "members that attend to one another": (partial(mixing, kind=Meets), bundles),
    "some of them without a gradient": (partial(mixing, "members", Meets), bundles),
    "some bundles without a gradient": (partial(mixing, "some"), bundles),
    "some members without a gradient": (partial(mixing, "members"), bundles),
    "a gradient handed through": (shifting, bundles),
}


def gradients(name: str, order: Order) -> Any:
    make, data = CASES[name]
    torch.manual_seed(1)
    return accumulate(make(), data(), order)


@cache
def by_autograd(name: str) -> Any:
    """Call by call. Gradients do not depend on the order; nobody changes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "worth", lambda experience: 0.0)
        return gradients(name, FEW)


@halved(
    name=[*CASES],
    order=dict(zip(("three at a time", "two at a time", "on threads"), ORDERS, strict=True)),
)
def test_gradients_are_those_of_autograd_and_c_has_made_calls(
    name: str, order: Order, made: dict[str, int]
) -> None:
    wanted = by_autograd(name)
    assert made == {"forward": 0, "backward": 0}
    found = gradients(name, order)
    assert_same_gradients(found.gradients, wanted.gradients)
    assert 0 < made["backward"] <= made["forward"]
    for part, state in found.parts.items():
        assert state.counting.rows == wanted.parts[part].counting.rows, part


@pytest.mark.parametrize("name", CASES)
def test_some_members_go_back_at_a_time(
    name: str, made: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = by_autograd(name)
    monkeypatch.setattr(native, "BYTES_BACK", 3)
    assert_same_gradients(gradients(name, FEW).gradients, wanted.gradients)
    assert made["backward"]


@pytest.mark.parametrize("name", CASES)
def test_what_passes_on_the_way_back_is_asked_for_once_and_no_more_than_that(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = noted_asking(monkeypatch)
    gradients(name, FEW)
    assert asked and not any(asked)


@pytest.mark.parametrize("name", CASES)
def test_what_c_has_made_goes_back_call_by_call_where_instances_come_back_apart(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    before = NativeKept.of

    def of(self: NativeKept, number: int) -> Any:
        kept.append(self)
        return before(self, number)

    wanted = by_autograd(name)
    monkeypatch.setattr(NativeKept, "of", of)
    monkeypatch.setattr(native.NativeCalls, "made", lambda self, number: False)
    found = gradients(name, FEW)
    assert kept
    assert_same_gradients(found.gradients, wanted.gradients)


def test_a_row_that_is_not_there_brings_the_module_back(
    made: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the module that says what is wrong, if anything."""
    given_up: list[str] = []
    monkeypatch.setattr(RememberingRead, "give_up", lambda self, why: given_up.append(why))
    data = sets(8)
    data[7] = Instance({"x": torch.randn(3, 2)}, {"right": np.array([0, 7, 1])})
    torch.manual_seed(1)
    with pytest.raises(WorkerError, match=r"'point'.*forward, call"):
        accumulate(pointing(), data, Order(max_active=2))
    assert given_up
    assert made["forward"] > 0


@pytest.mark.parametrize("name", [k for k in CASES if "handed on" in k or "themselves" in k])
def test_modules_that_hand_on_what_came_are_called_in_c_as_others_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_itself: list[int | None] = []
    before = Listing.tidy

    def tidy(self: Listing, turn: Any) -> None:
        before(self, turn)
        by_itself.append(self._by_itself)

    monkeypatch.setattr(Listing, "tidy", tidy)
    gradients(name, FEW)
    assert by_itself[-1] == 0


def test_modules_that_see_no_bundles_are_called_in_c_beside_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[list[str]] = []
    before = native.NativeCalls._make

    def make(self: native.NativeCalls, first: int, records: Any) -> int:
        modules = [self._modules[record[0]] for record in records]
        called.append([module.name for module in modules if module is not None])
        return before(self, first, records)

    monkeypatch.setattr(native.NativeCalls, "_make", make)
    gradients("bundles answered with bundles", Order())
    gradients("bundles answered with bundles", Order(max_active=3))
    whole = ["mixes", "apart"] * 3 + ["sum"]
    assert whole in called, called


def test_rows_stay_where_they_are_made_where_c_makes_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = Graph(vertex=("right",))
    steps = graph.loop(name="steps", run="whole")
    steps.join(graph.input("x", bundle=True, turn=0))
    new = steps.through(Follows(), name="follows", inside=True).move(turn=lambda m: m.turn + 1)
    more, done = new.where(lambda m: m.turn < 3)
    steps.join(more)
    done.loss(squared)
    begun: list[int] = []
    before = Listing.begin

    def begin(self: Listing, turn: Any, held: Any) -> Any:
        begun.append(turn.slots.size)
        return before(self, turn, held)

    monkeypatch.setattr(Listing, "begin", begin)
    monkeypatch.setattr(listing, "AGAIN", 4)
    accumulate(graph, sets(80), FEW)
    assert 2 <= len(begun) <= 1 + 80 // 3 // 4


def test_tables_of_such_modules_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[several.SeveralLayout] = []
    before = several.SeveralLayout.write

    def write(self: several.SeveralLayout, words: Any) -> None:
        written.append(self)
        before(self, words)

    monkeypatch.setattr(several.SeveralLayout, "write", write)
    gradients("a memory", Order(max_active=2))
    assert len(written) == len({id(each.form) for each in written}) == 2  # of first, and point


class Looks(nn.Module):
    """Reads all, by a word that its row has brought."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.new = nn.Embedding(8, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self, h: Tensor, word: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        score = (keys * (h + self.words(word))[:, None]).sum(2).masked_fill(~mask, -1e9)
        read = (score.softmax(1)[..., None] * values).sum(1)
        return torch.tanh(self.new(torch.cat([h, read], 1)))


class Says(nn.Module):
    """The word that comes next, by what is known."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.out(h)
        return h, scores.argmax(1), scores


def saying() -> Graph:
    """Each step looks a word up that the one before has said."""
    graph = Graph(vertex=("right",))
    held = graph.input("x", bundle=True).through(Halves(), name="encode").hold(name="set")
    steps = graph.loop(name="steps", run="whole")
    first = held.through(First(), name="first", inside=True, pool=True)
    steps.join(first.through(lambda h: (h, h.argmax(1)), name="begin"))
    said = steps.attend(held, Looks(), name="looks").through(Says(), name="says")
    said.through(nn.Identity(), take=2, name="scores").loss(gt.cross_entropy, target="right")
    more, done = said.where(lambda m: (m.payload[1] != 7).numpy() & (m.vertex + 1 < m.size))
    done.stop()
    kept = more.through(lambda h, word, scores: (h, word), name="goes on")
    steps.join(kept.move(vertex=lambda m: m.vertex + 1))
    return graph


@pytest.mark.parametrize("order", ORDERS, ids=("three at a time", "two at a time", "on threads"))
def test_integers_that_rows_bring_are_looked_up_when_they_are_there(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not when C is told of a call."""
    given_up: list[str] = []
    monkeypatch.setattr(RememberingRead, "give_up", lambda self, why: given_up.append(why))
    monkeypatch.setitem(CASES, "words", (saying, sets))
    wanted = by_autograd("words")
    found = gradients("words", order)
    assert_same_gradients(found.gradients, wanted.gradients)
    assert not given_up

"""Memories that are held anew in each round of a loop: gradients are those of plain PyTorch."""

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
from geartrain.graph.graph import Graph
from geartrain.nodes.loop import native
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loop.several import SeveralModule
from tests.rigs.beside_plain import Model
from tests.rigs.counted import count_made
from tests.rigs.passes import (
    ORDERS,
    Order,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
)
from tests.rigs.products import halved

H = 3
F64 = torch.float64


@pytest.fixture(autouse=True, scope="module")
def _soon() -> Iterator[None]:
    """Programs are found at once, and are those of all tests here: what is looked at is who calls
    them, and when."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "FIRINGS", 1)
        patch.setattr(choice, "ROWS", 1)
        yield
    choice.RAGGED_REGISTRY.forget()


class Encode(nn.Module):
    """Keys and values of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, 2 * H, dtype=F64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = torch.tanh(self.map(x)).chunk(2, -1)
        return keys, values


class First(nn.Module):
    """A row for each bundle: the sum of its values, through weights."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H, dtype=F64)

    def forward(self, *given: Any) -> Tensor:
        values, inside = given[-2:]
        total = values.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, values)
        return torch.tanh(self.map(total))


class Cell(nn.Module):
    """Reads with weights of its own; what is behind the end has no share."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.new = nn.Linear(H, H, dtype=F64), nn.Linear(2 * H, H, dtype=F64)

    def forward(self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        share = (keys * self.query(h)[:, None]).sum(2).exp() * mask
        read = (share[..., None] * values).sum(1) / (1 + share.sum(1, keepdim=True))
        return torch.tanh(self.new(torch.cat([h, read], 1)))


class Blank(nn.Module):
    """A row for each bundle, of nothing that it holds."""

    def forward(self, *given: Any) -> Tensor:
        return given[0].new_zeros(len(given[-1].lengths), H)


class Same(Cell):
    """The same of one tensor, which is keys and values."""

    def forward(self, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(h, x, x, mask)


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H, dtype=F64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + torch.tanh(self.map(y))


def loss(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def reading(module: nn.Module, h: Tensor, memory: tuple[Tensor, ...]) -> Tensor:
    """All of these rows read one memory."""
    n, members = h.shape[0], memory[0].shape[0]
    mask = torch.ones(n, members, dtype=torch.bool)
    found: Tensor = module(h, *(x.expand(n, *x.shape) for x in memory), mask)
    return found


def pooling(module: nn.Module, memory: tuple[Tensor, ...]) -> Tensor:
    n = memory[0].shape[0]
    inside = gt.Inside(torch.tensor([n]), torch.zeros(n, dtype=torch.int64), {})
    found: Tensor = module(*memory, inside)
    return found


def instances(n: int) -> list[gt.Instance]:
    rng = torch.Generator().manual_seed(7)
    sizes = [1 + (5 * k) % 4 for k in range(n)]
    return [
        gt.Instance(
            {"x": torch.randn(size, H, generator=rng, dtype=F64)},
            value={"rows": size, "turns": k % 4},
        )
        for k, size in enumerate(sizes)
    ]


def made(**modules: nn.Module) -> dict[str, nn.Module]:
    return modules


def joined(graph: Graph, modules: Any, plain: Callable[[gt.Instance], Tensor], n: int) -> Model:
    return Model(graph, modules, plain, instances(n), {"x": ((H,), F64)})


def hears(n: int, run: Any, keep: Any = "auto", attention: Any = Cell) -> Model:
    """All vertices of an instance hear one another, in as many rounds as it says."""
    torch.manual_seed(0)
    encode, read, again, out = Encode(), attention(), Cell(), nn.Linear(H, 2, dtype=F64)
    graph = Graph(value=("rows", "turns"))
    rounds = graph.loop(name="rounds", run=run)
    rounds.join(graph.input("x", t=0))
    going, done = rounds.where(lambda m: m.t < m.turns)
    together = going.group(by="t", size="rows", order="vertex", how="bundle", name="together")
    held = together.through(encode, name="encode", keep="activations").hold(name="held")
    rows = held.ungroup(index="vertex").through(lambda k, v: v * k, name="rows")
    heard = rows.attend(held, read, name="read", keep=keep)
    if attention is not Cell:
        heard = heard.through(lambda c, h: c + h, name="added")
    heard = heard.attend(held, again, name="again", keep=keep)
    rounds.join(heard.move(t=lambda m: m.t + 1))
    done.through(out, name="out").loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        h = given.inputs["x"]
        for _ in range(given.value["turns"]):
            keys, values = encode(h)
            found = reading(read, values * keys, (keys, values))
            h = found if attention is Cell else sum(found)
            h = reading(again, h, (keys, values))
        return loss(out(h)).sum()

    modules = made(encode=encode, again=again, out=out)
    if list(read.parameters()):
        modules["read"] = read
    return joined(graph, modules, plain, n)


def goes_round(n: int, run: Any, detached: bool = False) -> Model:
    """Bundles go round, each held as it comes and read by its own rows."""
    torch.manual_seed(1)
    encode, cell, first = Encode(), Cell(), First()
    graph = Graph(value=("rows", "turns"))
    rounds = graph.loop(name="rounds", run=run)
    rounds.join(graph.input("x", bundle=True, t=0))
    coded = rounds.through(encode, name="encode", keep="activations")
    kept = (coded.detach() if detached else coded).hold(name="held")
    new = kept.through(lambda k, v: v * k, name="rows").attend(kept, cell, name="cell")
    going, done = new.move(t=lambda m: m.t + 1).where(lambda m: m.t < m.turns)
    rounds.join(going)
    done.through(first, name="first", inside=True, pool=True).loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        h = given.inputs["x"]
        for _ in range(max(given.value["turns"], 1)):
            keys, values = encode(h)
            memory = (keys.detach(), values.detach()) if detached else (keys, values)
            h = reading(cell, memory[0] * memory[1], memory)
        return loss(pooling(first, (h,))).sum()

    return joined(graph, made(encode=encode, cell=cell, first=first), plain, n)


def put_together(n: int, run: Any) -> Model:
    """Bundles enter, are held, taken apart by rows that read them, and put together again."""
    torch.manual_seed(5)
    encode, cell, first = Encode(), Cell(), First()
    graph = Graph(value=("rows", "turns"))
    rounds = graph.loop(name="rounds", run=run)
    rounds.join(graph.input("x", bundle=True, t=0))
    held = rounds.through(encode, name="encode", keep="activations").hold(name="held")
    rows = held.ungroup(index="vertex").through(lambda k, v: v * k, name="rows")
    new = rows.attend(held, cell, name="cell").move(t=lambda m: m.t + 1)
    met = new.group(by="t", size="rows", order="vertex", how="bundle", name="met")
    going, done = met.where(lambda m: m.t < m.turns)
    rounds.join(going)
    done.through(first, name="first", inside=True, pool=True).loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        h = given.inputs["x"]
        for _ in range(max(given.value["turns"], 1)):
            keys, values = encode(h)
            h = reading(cell, values * keys, (keys, values))
        return loss(pooling(first, (h,))).sum()

    return joined(graph, made(encode=encode, cell=cell, first=first), plain, n)


def two_memories(n: int, run: Any) -> Model:
    """One is held before the loop and one in it; some rounds read the one, some both, some none."""
    torch.manual_seed(2)
    source, encode, first = Encode(), Encode(), First()
    near, far, add = Cell(), Cell(), Add()
    graph = Graph(value=("rows", "turns"))
    before = graph.input("x", bundle=True).through(source, name="source").hold(name="before")
    rounds = graph.loop(name="rounds", run=run)
    rounds.join(before.ungroup(index="vertex").through(lambda k, v: k, name="rows").move(t=0))
    going, done = rounds.where(lambda m: m.t < m.turns)
    asks, silent = going.where(lambda m: m.t % 3 < 2)
    together = asks.group(by="t", size="rows", order="vertex", how="bundle", name="together")
    held = together.through(encode, name="encode", keep="activations").hold(name="held")
    row = held.through(first, name="first", inside=True, pool=True).attend(held, near, name="near")
    both, one = row.where(lambda m: m.t % 2 == 0)
    met = graph.merge(both.attend(before, far, name="far"), one)
    back = graph.concat(
        asks,
        met.flatmap("vertex", count=lambda m: m.rows),
        on=("vertex", "t"),
        how="tuple",
        name="back",
    )
    heard = graph.merge(back.through(add, name="add"), silent)
    rounds.join(heard.move(t=lambda m: m.t + 1))
    done.loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        outer = source(given.inputs["x"])
        h = outer[0]
        for t in range(given.value["turns"]):
            if t % 3 == 2:
                continue
            memory = encode(h)
            row = reading(near, pooling(first, memory), memory)
            if t % 2 == 0:
                row = reading(far, row, outer)
            h = add(h, row.expand_as(h))
        return loss(h).sum()

    modules = made(source=source, encode=encode, first=first, near=near, far=far, add=add)
    return joined(graph, modules, plain, n)


def as_it_is(n: int, run: Any, keep: Any = "auto") -> Model:
    """What a group puts together is held as it is, read, and met again behind what has read it."""
    torch.manual_seed(6)
    cell, add, out = Same(), Add(), nn.Linear(H, H, dtype=F64)
    graph = Graph(value=("rows", "turns"))
    rounds = graph.loop(name="rounds", run=run)
    rounds.join(graph.input("x", t=0).through(out, name="out", keep="activations"))
    going, done = rounds.where(lambda m: m.t < m.turns)
    together = going.group(by="t", size="rows", order="vertex", how="bundle", name="together")
    held = together.hold(name="held")
    rows = held.ungroup(index="vertex")
    asked = graph.concat(rows, going, on=("vertex", "t"), how="tuple", name="asked")
    heard = asked.attend(held, cell, name="cell", take=1, keep=keep)
    met = graph.concat(rows, heard, on=("vertex", "t"), how="tuple", name="met")
    rounds.join(met.through(add, name="add", keep="activations").move(t=lambda m: m.t + 1))
    done.loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        h = out(given.inputs["x"])
        for _ in range(given.value["turns"]):
            h = add(h, reading(cell, h, (h,)))
        return loss(h).sum()

    return joined(graph, made(cell=cell, add=add, out=out), plain, n)


def nested(n: int, run: Any, pool: type[nn.Module] = First) -> Model:
    """What is held in a round is read several times by a loop in it."""
    torch.manual_seed(3)
    encode, first, cell, add = Encode(), pool(), Cell(), Add()
    graph = Graph(value=("rows", "turns"))
    rounds = graph.loop(name="rounds", run=run)
    rounds.join(graph.input("x", t=0))
    going, done = rounds.where(lambda m: m.t < m.turns)
    together = going.group(by="t", size="rows", order="vertex", how="bundle", name="together")
    held = together.through(encode, name="encode", keep="activations").hold(name="held")
    inner = graph.loop(name="inner", run=run)
    inner.join(held.through(first, name="first", inside=True, pool=True).move(k=0))
    read = inner.attend(held, cell, name="cell").move(k=lambda m: m.k + 1)
    more, enough = read.where(lambda m: m.k <= m.t)
    inner.join(more)
    copies = enough.flatmap("vertex", count=lambda m: m.rows)
    back = graph.concat(going, copies, on=("vertex", "t"), how="tuple", name="back")
    rounds.join(back.through(add, name="add").move(t=lambda m: m.t + 1))
    done.loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        h = given.inputs["x"]
        for t in range(given.value["turns"]):
            memory = encode(h)
            row = pooling(first, memory)
            for _ in range(t + 1):
                row = reading(cell, row, memory)
            h = add(h, row.expand_as(h))
        return loss(h).sum()

    modules = made(encode=encode, cell=cell, add=add)
    if pool is First:
        modules["first"] = first
    return joined(graph, modules, plain, n)


def read_behind(n: int, run: Any, decides: bool = False) -> Model:
    """The memory of each round is read behind the loop, too, by rows that have left it."""
    torch.manual_seed(4)
    encode, first, cell, last = Encode(), First(), Cell(), Cell()
    graph = Graph(value=("rows", "turns"))
    rounds = graph.loop(name="rounds", run=run)
    rounds.join(graph.input("x", bundle=True, t=0))
    held = rounds.through(encode, name="encode", keep="activations").hold(name="held")
    row = held.through(first, name="first", inside=True, pool=True)
    some, others = row.where(
        (lambda m: (m.payload[0][:, 0] > 0).numpy()) if decides else (lambda m: m.t % 2 == 0)
    )
    others.stop()
    read = some.attend(held, cell, name="cell")
    read.attend(held, last, name="last").loss(loss)
    new = held.through(lambda k, v: k + v, name="new").move(t=lambda m: m.t + 1)
    going, done = new.where(lambda m: m.t < m.turns)
    rounds.join(going)
    done.stop()

    def plain(given: gt.Instance) -> Tensor:
        h, total = given.inputs["x"], torch.zeros((), dtype=F64)
        for t in range(max(given.value["turns"], 1)):
            memory = encode(h)
            row = pooling(first, memory)
            if row[0, 0] > 0 if decides else t % 2 == 0:
                total = total + loss(reading(last, reading(cell, row, memory), memory)).sum()
            h = memory[0] + memory[1]
        return total

    return joined(graph, made(encode=encode, first=first, cell=cell, last=last), plain, n)


MODELS: dict[str, Callable[[int, Any], Model]] = {
    "vertices hear one another": hears,
    "and run again": partial(hears, keep="inputs"),
    "by dot products": partial(hears, attention=gt.nn.DotAttention),
    "bundles go round": goes_round,
    "a memory without a gradient": partial(goes_round, detached=True),
    "bundles are put together again": put_together,
    "two memories": two_memories,
    "as it is": as_it_is,
    "as it is, and run again": partial(as_it_is, keep="inputs"),
    "nested": nested,
    "nothing but read": partial(nested, pool=Blank),
    "read behind the loop": read_behind,
    "payload decides": partial(read_behind, decides=True),
}


def loops_of(outcome: Any) -> list[LoopNode]:
    nodes = outcome.engine.wiring.nodes.values()
    return [node for node in nodes if isinstance(node, LoopNode)]


@cache
def by_torch(name: str, n: int) -> tuple[Tensor, dict[tuple[str, str], Tensor]]:
    """Loss and gradients. Weights are the same whenever it is made; nobody changes these."""
    model = MODELS[name](n, "auto")
    total = model.total()
    return total.detach(), autograd(total, model.modules)


def check(name: str, model: Model, order: Order) -> Any:
    model.graph.check(model.shapes, model.data[0])
    total, wanted = by_torch(name, len(model.data))
    got = accumulate(model.graph, model.data, order)
    assert_same_loss(got, total)
    assert_same_gradients(got.gradients, wanted)
    return got


each_model = halved(name=[*MODELS], programs={"programs": True, "autograd": False})
"""With programs of modules that read memories, or by autograd, whichever wins."""


@pytest.fixture
def ratio(programs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs win, or autograd does."""
    monkeypatch.setattr(choice, "_ratio", lambda *_: 0.5 if programs else 2.0)


@pytest.mark.both_ways
@pytest.mark.usefixtures("ratio")
@each_model
def test_gradients_are_those_of_autograd(name: str) -> None:
    for order in (Order(max_active=3), Order("threads", 2, max_active=4), Order(reach=False)):
        model = MODELS[name](9, "whole")
        assert "loop 'rounds' runs whole" in str(model.graph)
        assert len(loops_of(check(name, model, order))) == 1
    model = MODELS[name](9, "steps")
    assert "loop 'rounds' runs by steps" in str(model.graph)
    check(name, model, Order(max_active=3))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_in_every_order_the_gradients_are_those_of_autograd(order: Order) -> None:
    k = ORDERS.index(order)
    names = sorted(MODELS)
    for name in (names[k % len(names)], names[(k + 4) % len(names)]):
        check(name, MODELS[name](9, "auto"), order)


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_computes_the_same(name: str) -> None:
    model = MODELS[name](9, "whole")
    model.graph.check(model.shapes, model.data[0])
    assert_same_loss(one_pass(model.graph, model.data, train=False), model.total())


@pytest.fixture
def read_in_c(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of modules that read what is held in the loop which C has made, forward and back.

    Whether programs win is asked anew.
    """
    choice.RAGGED_REGISTRY.forget()

    def reads(module: Any) -> bool:
        if not isinstance(module, SeveralModule):
            return False
        return module.inner.reads is not None and module.inner.reads.value >= 0

    return count_made(monkeypatch, reads)


IN_C = ["vertices hear one another", "two memories", "nested", "read behind the loop"]
IN_C += ["payload decides", "bundles are put together again", "as it is", "nothing but read"]
IN_C += ["by dot products"]


@pytest.mark.parametrize("name", IN_C)
def test_c_calls_who_reads(
    name: str, needs_kernels: None, read_in_c: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_ratio", lambda *_: 0.5)
    check(name, MODELS[name](9, "whole"), Order(max_active=3))
    assert 0 < read_in_c["backward"] == read_in_c["forward"]


@pytest.mark.parametrize("name", IN_C)
def test_some_rows_go_back_at_a_time(
    name: str, needs_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_ratio", lambda *_: 0.5)
    monkeypatch.setattr(native, "BYTES_BACK", 3)
    check(name, MODELS[name](9, "whole"), Order(max_active=3))


@pytest.mark.usefixtures("ratio")
@each_model
def test_what_c_has_made_goes_back_call_by_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.NativeCalls, "made", lambda self, number: False)
    check(name, MODELS[name](9, "whole"), Order(max_active=3))


def test_what_is_held_and_let_go_in_a_loop_may_be_read() -> None:
    """A detach before the hold answers for nothing that is held behind it."""
    graph = goes_round(1, "steps", detached=True).graph
    assert "hold read by cell" in str(graph)


def test_parts_that_count_rows_keep_such_a_loop_by_steps() -> None:
    model = hears(6, None)
    rules = gt.Rules(update_every=7)
    session = gt.Session(model.graph, rules=rules, runtime=gt.Threads(1, kernel_threads=1))
    session.fit(list(model.data), epochs=1)
    assert np.isfinite(session.evaluate(list(model.data)).metrics["loss"])

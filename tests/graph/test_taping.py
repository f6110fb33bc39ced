"""Loops that run whole with one graph of autograd's for a turn: used once, or thrown away."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.derived.auto import MeasuredChoice
from geartrain.errors import WorkerError
from geartrain.nodes.held import Recalled
from geartrain.nodes.loop import pieces, tape
from geartrain.nodes.loop.node import LoopNode
from tests.rigs.passes import (
    Order,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
)

H, MOST = 3, 4
F64 = torch.float64
ALL = Order(max_active=100)
ROW_BY_ROW = Order(policy="backward", max_rows=1, max_active=7)


class Read(nn.Module):
    """Each row reads what is held, and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(H, H, dtype=F64)

    def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("nld,nd->nl", keys, self.query(h)).exp() * mask
        context = torch.einsum("nl,nld->nd", scores, keys)
        return torch.tanh(context / (1 + scores.sum(1, keepdim=True)) + h)


class First(nn.Module):
    """A row of each bundle."""

    def forward(self, keys: Tensor, inside: gt.Inside) -> Tensor:
        total = keys.new_zeros(len(inside.lengths), H)
        return total.index_add(0, inside.segment, keys)


class Word(nn.Module):
    """A step that adds a word's row: no gradient but that of its weights where it reads alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.map = nn.Embedding(MOST, H, dtype=F64), nn.Linear(H, H, dtype=F64)

    def forward(self, h: Tensor, word: Tensor) -> Tensor:
        return torch.tanh(self.map(h)) + self.words(word)


class Own(nn.Module):
    """A step that nobody has written a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H, dtype=F64)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.map(h))


def squared(x: Tensor) -> Tensor:
    return x.square().sum(1)


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"encode": nn.Linear(2, H, dtype=F64), "read": Read(), "word": Word()}


def reading(made: dict[str, nn.Module], keep: str, loss=squared, looks: bool = False) -> gt.Graph:
    """Each turn reads a memory by autograd and adds a word by a kernel; a loss at every turn."""
    graph = gt.Graph(value=("turns", "word"))
    held = graph.input("x", bundle=True).through(made["encode"], name="encode").hold(name="held")
    rounds = graph.loop(name="rounds", run="whole")
    rounds.join(held.through(First(), name="first", inside=True, pool=True).move(turn=0))
    passed = rounds.attend(held, made["read"], name="read")
    passed = passed.through(made["word"], name="word", read="word", keep=keep)
    passed = passed.move(turn=lambda m: m.turn + 1)
    passed.loss(loss)
    more, done = passed.where(
        (lambda m: torch.from_numpy(m.turn < m.turns) & (m.payload[0][:, 0] < 9))
        if looks
        else (lambda m: m.turn < m.turns)
    )
    rounds.join(more)
    done.stop()
    return graph


def sets(n: int) -> list[gt.Instance]:
    torch.manual_seed(1)
    return [
        gt.Instance(
            {"x": torch.randn(1 + (3 * k) % 4, 2, dtype=F64)},
            value={"turns": 1 + k % MOST, "word": k % MOST},
        )
        for k in range(n)
    ]


def plain(made: dict[str, nn.Module], data: list[gt.Instance]) -> Tensor:
    total = torch.zeros((), dtype=F64)
    for instance in data:
        keys = made["encode"](instance.inputs["x"])
        h, mask = keys.sum(0, keepdim=True), torch.ones(1, len(keys), dtype=torch.bool)
        for _ in range(instance.value["turns"]):
            h = made["word"](
                made["read"](h, keys[None], mask), torch.tensor([instance.value["word"]])
            )
            total = total + squared(h).sum()
    return total


def loops_of(outcome) -> list[LoopNode]:
    return [n for n in outcome.engine.wiring.nodes.values() if isinstance(n, LoopNode)]


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("keep", ["auto", "inputs", "activations"])
def test_a_turn_goes_back_by_one_graph_with_the_gradients_of_autograd(keep, looks):
    made, data = modules(), sets(9)
    want = autograd(plain(made, data), made)
    got = accumulate(reading(made, keep, looks=looks), data, ALL)
    assert_same_gradients(got.gradients, want)
    (loop,) = loops_of(got)
    assert loop.taping.used == 1


def test_a_memory_is_padded_once_a_turn(monkeypatch):
    made, data, times = modules(), sets(9), []
    padded = Recalled.padded
    monkeypatch.setattr(Recalled, "padded", lambda self: times.append(1) or padded(self))
    accumulate(reading(made, "auto"), data, ALL)
    assert len(times) == 1


@pytest.mark.parametrize("keep", ["auto", "activations"])
def test_where_rows_come_back_apart_each_call_goes_back_by_itself(keep):
    made, data = modules(), sets(9)
    want = autograd(plain(made, data), made)
    got = accumulate(reading(made, keep), data, ROW_BY_ROW)
    assert_same_gradients(got.gradients, want)


def test_a_graph_of_weights_that_have_moved_is_thrown_away():
    made, data = modules(), sets(9)
    want = autograd(plain(made, data), made)

    def moving(x: Tensor) -> Tensor:
        torch.autograd.graph.increment_version([*made["read"].parameters()])
        return squared(x)

    got = accumulate(reading(made, "auto", moving), data, ALL)
    assert_same_gradients(got.gradients, want)
    (loop,) = loops_of(got)
    assert loop.taping.used == 0


def test_a_loop_whose_graphs_are_of_no_use_stops_taping(monkeypatch):
    monkeypatch.setattr(tape, "PATIENCE", 2)
    made, data, begun = modules(), sets(9), []
    begin = tape.Taping.begin

    def noting(self, turn):
        found = begin(self, turn)
        begun.append(found is not None)
        return found

    monkeypatch.setattr(tape.Taping, "begin", noting)

    def moving(x: Tensor) -> Tensor:
        torch.autograd.graph.increment_version([*made["read"].parameters()])
        return squared(x)

    accumulate(reading(made, "auto", moving), data, Order(max_active=1))
    assert begun == [True, True] + [False] * 7


def test_what_goes_on_in_a_planned_loop_is_the_first_rows_of_what_was_made(monkeypatch):
    """Those that go round most often come first, so nothing is picked from everywhere."""
    made, data, picked = modules(), sets(9), []
    selected = pieces._selected
    monkeypatch.setattr(pieces, "_selected", lambda *given: picked.append(1) or selected(*given))
    want = autograd(plain(made, data), made)
    for looks in (False, True):
        picked.clear()
        got = accumulate(reading(made, "auto", looks=looks), data, ALL)
        assert_same_gradients(got.gradients, want)
        assert bool(picked) == looks


def test_an_evaluation_is_not_taped():
    made, data = modules(), sets(9)
    got = one_pass(reading(made, "auto"), data, train=False)
    assert_same_loss(got, plain(made, data))
    (loop,) = loops_of(got)
    assert loop.taping.used == 0


def test_a_loop_of_kernels_alone_is_not_taped():
    made, data = modules(), sets(9)
    graph = gt.Graph(value=("turns", "word"))
    rounds = graph.loop(name="rounds", run="whole")
    rounds.join(graph.input("h", turn=0))
    passed = rounds.through(made["word"], name="word", read="word", keep="activations")
    passed = passed.move(turn=lambda m: m.turn + 1)
    more, done = passed.where(lambda m: m.turn < m.turns)
    rounds.join(more)
    done.loss(squared)
    some = [gt.Instance({"h": torch.randn(1, H, dtype=F64)}, value=i.value) for i in data]
    got = accumulate(graph, some, ALL)
    (loop,) = loops_of(got)
    assert loop.taping.used == 0


@pytest.fixture
def decided(monkeypatch):
    """Modules run again for good."""
    monkeypatch.setattr(MeasuredChoice, "decided", property(lambda self: True))


def test_a_loop_whose_modules_are_undecided_keeps_inputs_alone():
    data, step = sets(9), Own()
    graph = gt.Graph(value=("turns", "word"))
    rounds = graph.loop(name="rounds", run="whole")
    rounds.join(graph.input("h", turn=0))
    passed = rounds.through(step, name="step").move(turn=lambda m: m.turn + 1)
    more, done = passed.where(lambda m: m.turn < m.turns)
    rounds.join(more)
    done.loss(squared)
    given = [gt.Instance({"h": torch.randn(1, H, dtype=F64)}, value=i.value) for i in data]
    (loop,) = loops_of(accumulate(graph, given, ALL))
    assert loop.taping.used == 0


@pytest.mark.usefixtures("decided")
def test_rows_that_leave_as_they_came_and_rows_of_several_calls_get_their_gradients():
    torch.manual_seed(2)
    step = Own()
    before = nn.Linear(2, H, dtype=F64)
    rows = [
        gt.Instance(
            {"x": torch.randn(1, 2, dtype=F64)},
            value={"turns": 1 + k // 2 % MOST, "word": k % MOST},
        )
        for k in range(11)
    ]
    total = torch.zeros((), dtype=F64)
    for instance in rows:
        h = before(instance.inputs["x"])
        for turn in range(instance.value["turns"]):
            h = step(h) if (instance.value["word"] + turn) % 2 == 0 else h
        total = total + squared(h).sum()
    want = autograd(total, {"before": before, "step": step})
    graph = gt.Graph(value=("turns", "word"))
    rounds = graph.loop(name="rounds", run="whole")
    rounds.join(graph.input("x", turn=0).through(before, name="before"))
    now, past = rounds.where(lambda m: (m.word + m.turn) % 2 == 0)
    passed = graph.merge(now.through(step, name="step"), past).move(turn=lambda m: m.turn + 1)
    more, done = passed.where(lambda m: m.turn < m.turns)
    rounds.join(more)
    done.loss(squared)
    got = accumulate(graph, rows, ALL)
    assert_same_gradients(got.gradients, want)
    (loop,) = loops_of(got)
    assert loop.taping.used == 1


@pytest.mark.usefixtures("decided")
def test_a_kernel_behind_which_no_gradient_goes_on_learns_too():
    torch.manual_seed(3)
    word, step, data = Word(), Own(), sets(9)
    graph = gt.Graph(value=("turns", "word"))
    rounds = graph.loop(name="rounds", run="whole")
    rounds.join(graph.input("h", turn=0))
    passed = rounds.detach().through(word, name="word", read="word", keep="activations")
    passed = passed.through(step, name="step").move(turn=lambda m: m.turn + 1)
    more, done = passed.where(lambda m: m.turn < m.turns)
    rounds.join(more)
    done.loss(squared)
    given = [gt.Instance({"h": torch.randn(1, H, dtype=F64)}, value=i.value) for i in data]
    total = torch.zeros((), dtype=F64)
    for i in given:
        h = i.inputs["h"]
        for _ in range(i.value["turns"]):
            h = step(word(h.detach(), torch.tensor([i.value["word"]])))
        total = total + squared(h).sum()
    want = autograd(total, {"word": word, "step": step})
    got = accumulate(graph, given, ALL)
    assert_same_gradients(got.gradients, want)
    (loop,) = loops_of(got)
    assert loop.taping.used == 1


def test_a_module_that_writes_over_its_input_is_refused_by_name():
    made, data = modules(), sets(5)

    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(H, H, dtype=F64)

        def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
            return self.map(h.add_(keys.sum(1)))

    made["read"] = Over()
    with pytest.raises(Exception, match=r"'read'.*(in place|in-place)") as caught:
        accumulate(reading(made, "auto"), data, ALL)
    assert isinstance(caught.value, WorkerError | gt.GeartrainError)


def test_what_autograd_cannot_take_back_is_told_with_the_loop():
    made, data = modules(), sets(5)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("no way back")

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(H, H, dtype=F64)

        def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
            return Broken.apply(self.map(h))

    made["read"] = Fails()
    with pytest.raises(
        WorkerError, match=r"ValueError in the loop 'rounds', backward.*no way back"
    ):
        accumulate(reading(made, "auto"), data, ALL)


class Hearing(nn.Module):
    """Members hear of one another, and of what has no steps in C."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H, dtype=F64)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        total = x.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, x)
        mixed = torch.tanh(self.map(x) + total[inside.segment])
        return mixed + torch.linalg.matrix_exp(0.1 * torch.diag_embed(x)).sum(2)


@pytest.mark.usefixtures("decided")
@pytest.mark.parametrize("order", [ALL, ROW_BY_ROW])
def test_what_bundles_hold_goes_back_with_them_as_rows(order):
    torch.manual_seed(4)
    around, readout = Hearing(), nn.Linear(H, H, dtype=F64)
    data = [
        gt.Instance({"x": torch.randn(1 + (3 * k) % 4, H, dtype=F64)}, value={"turns": 1 + k % 3})
        for k in range(9)
    ]
    graph = gt.Graph(value=("turns",))
    rounds = graph.loop(name="rounds")
    rounds.join(graph.input("x", bundle=True, turn=0))
    passed = rounds.through(around, name="around", inside=True).move(turn=lambda m: m.turn + 1)
    more, done = passed.where(lambda m: m.turn < m.turns)
    rounds.join(more)
    rows = done.ungroup(index="vertex").where(lambda m: m.vertex > 0)
    kept = rows[0].through(readout, name="readout")
    graph.merge(kept, rows[1]).loss(squared)
    got = accumulate(graph, data, order)
    total = torch.zeros((), dtype=F64)
    for instance in data:
        h = instance.inputs["x"]
        n = torch.tensor([len(h)])
        inside = gt.Inside(n, torch.zeros(len(h), dtype=torch.int64), {})
        for _ in range(instance.value["turns"]):
            h = around(h, inside)
        total = total + squared(readout(h[1:])).sum() + squared(h[:1]).sum()
    assert_same_gradients(got.gradients, autograd(total, {"around": around, "readout": readout}))
    (loop,) = loops_of(got)
    assert loop.taping.used == (1 if order is ALL else len(data))
    rows = {"around": sum(len(i.inputs["x"]) * int(i.value["turns"]) for i in data)}
    rows["readout"] = sum(len(i.inputs["x"]) - 1 for i in data)
    assert {name: sum(got.parts[name].histogram()) for name in rows} == rows

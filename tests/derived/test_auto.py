"""keep="auto": running again first, derived kernels once they win, rows in flight by their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain import Graph, Instance, Part, Rules, Session, Simulated, Threads
from geartrain.derived import auto
from geartrain.derived.auto import MeasuredChoice, compare
from geartrain.derived.kernel import running_again
from geartrain.derived.program import Program
from geartrain.derived.registry import REGISTRY
from geartrain.errors import GraphError
from geartrain.nodes.choice import Experience
from geartrain.nodes.eras import APART, Eras
from geartrain.nodes.payload import Recompute
from geartrain.parts.rules import Flush
from geartrain.train.checkpoint import read_checkpoint
from geartrain.train.options import Compute

D = 3


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(D, D), nn.Linear(D, D), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.gain * self.a(x)))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(D, D), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.a(x)).sin()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (1.0 if float(x.detach()[0, 0]) > 1e9 else 2.0)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little work is enough, and derived kernels win."""
    REGISTRY.forget()
    monkeypatch.setattr(auto, "FIRINGS", 3)
    monkeypatch.setattr(auto, "ROWS", 8)
    monkeypatch.setattr(auto, "compare", lambda *_: 0.5)
    yield
    REGISTRY.forget()


def _data(count: int = 24) -> list[Instance]:
    generator = torch.Generator().manual_seed(0)
    return [
        Instance(
            {"x": torch.randn(1 + k % 3, D, generator=generator, dtype=torch.float64)},
            value={"y": k % 2, "n": 1 + k % 4},
        )
        for k in range(count)
    ]


def _graph(cell: nn.Module, keep: str = "auto") -> Graph:
    """The cell in a loop of one to four rounds, then a readout."""
    graph = Graph(value=("y", "n"))
    loop = graph.loop(run="steps")
    loop.join(graph.input("x", t=0))
    body = loop.through(Part(cell, keep=keep), name="cell").move(t=lambda m: m.t + 1)
    going, done = body.where(lambda m: m.t < m.n)
    loop.join(going)
    done.through(nn.Linear(D, 2).double(), name="readout").loss(F.cross_entropy, target="y")
    return graph


def _fit(graph: Graph, epochs: int = 2, workers: int = 1, runtime: Any = None) -> Session:
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Flush())
    session = Session(
        graph, rules=rules, runtime=runtime or Simulated(workers, seed=3), max_active=8
    )
    session.fit(_data(), epochs=epochs)
    return session


def _learned(keep: str, workers: int = 1, runtime: Any = None) -> list[Tensor]:
    torch.manual_seed(1)
    cell = Cell().double()
    torch.manual_seed(2)
    _fit(_graph(cell, keep), workers=workers, runtime=runtime)
    return [p.detach() for p in cell.parameters()]


@pytest.fixture
def mixtures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many eras the rows of one backward were of, where it was more than one that waited."""
    found: list[int] = []
    true = Eras.groups

    def groups(self: Eras, rows: Any) -> Any:
        answer = true(self, rows)
        found.append(len(answer))
        return answer

    monkeypatch.setattr(Eras, "groups", groups)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_are_the_same_over_the_change(workers: int, mixtures: list[int]) -> None:
    found, expected = _learned("auto", workers), _learned("inputs", workers)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert (2 if workers == 1 else 1) in mixtures  # of one worker, rows of both come back at once


def test_threads_change_as_well() -> None:
    found, expected = _learned("auto", 2, Threads(2)), _learned("inputs")
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_printed_graph_says_of_functions_that_pick_that_they_do() -> None:
    graph = Graph()
    both = graph.input("x").through(lambda x: (x, x + 1), name="two")
    both.through(lambda x, y: y, name="picked").output()
    both.through(lambda *some: some, take=(1, 0), name="turned").output()
    both.through(lambda *some: some, name="any").output()
    lines = {
        line.split()[1]: line for line in str(graph).splitlines()[:0:-1]
    }  # the first of a name
    assert "[auto: picks]" in lines["picked"] and "[auto: undecided]" in lines["two"]
    assert "[auto: picks]" in lines["turned"] and "[auto: undecided]" in lines["any"]


def test_the_printed_graph_says_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _graph(Cell().double())
    assert "[auto: undecided]" in str(graph)
    _fit(graph)
    assert "[auto: derived, 0.50 of running again]" in str(graph)
    monkeypatch.setattr(auto, "compare", lambda *_: 0.97)
    REGISTRY.forget()
    other = _graph(Cell().double())
    _fit(other)
    assert "[auto: runs again (derived would take 0.97 of it)]" in str(other)
    odd = _graph(Odd().double())
    _fit(odd)
    assert "[auto: runs again (cannot be cut: its way depends on values" in str(odd)
    assert "Linear [auto]" in str(graph) or "Linear [auto, fused" in str(graph)


class Frequent(nn.Module):
    """Its ``mode`` has no step in C."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x * (self.a * x).mode(1, True).values
        return found


class Wide(nn.Module):
    """Its weights are too many to be packed for each firing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 300), nn.Linear(300, 300)
        self.c, self.d = nn.Linear(300, 600), nn.Linear(600, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Frequent, "mode has no step in C"),
        (Wide, "its weights are large"),
    ],
)
def test_what_torch_computes_and_why_is_printed_and_in_the_log(
    kind: type[nn.Module],
    why: str,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("geartrain.derived.steps.lower.MOST_WEIGHTS", 300 * 600)
    graph = _graph(kind().double())
    with caplog.at_level("INFO", "geartrain.nn"):
        session = _fit(graph)
    assert f"[auto: derived, 0.50 of running again; by torch: {why}]" in str(graph)
    assert any(f"ms; by torch: {why}" in record.getMessage() for record in caplog.records)
    kept = _graph(kind().double(), "activations")
    assert "[activations, derived]" in str(kept)
    _fit(kept)
    assert f"[activations, derived; by torch: {why}]" in str(kept)
    session.save(tmp_path / "kept.safetensors")
    again = _graph(kind().double())
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Flush())
    other = Session(again, rules=rules, runtime=Simulated(1, seed=3), max_active=8)
    other.load(tmp_path / "kept.safetensors")
    other.fit(_data(), epochs=4)
    assert f"[auto: derived, as chosen before; by torch: {why}]" in str(again)


def test_short_runs_trace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = REGISTRY.traced
    monkeypatch.setattr(auto, "ROWS", 10_000)
    graph = _graph(Cell().double())
    _fit(graph)
    assert REGISTRY.traced == before and "[auto: undecided]" in str(graph)


def test_a_later_fit_begins_where_the_earlier_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _fit(_graph(Cell().double()))
    before, again = REGISTRY.traced, []
    true = Recompute.backward
    monkeypatch.setattr(Recompute, "backward", lambda *a, **k: again.append(1) or true(*a, **k))
    session.fit(_data(), epochs=1)
    assert REGISTRY.traced == before and not again


def test_a_graph_that_has_chosen_goes_to_other_processes() -> None:
    graph = _graph(Cell().double())
    _fit(graph)
    other = cloudpickle.loads(cloudpickle.dumps(graph))
    (mine,), (its,) = (
        [t for t in g.throughs() if t.experience.chosen == "derived"] for g in (graph, other)
    )
    assert mine.experience.known and not its.experience.known
    assert its.experience.story == mine.experience.story
    assert its.experience.done.firings == mine.experience.done.firings
    _fit(other)


@pytest.mark.parametrize(("ratio", "chosen"), [(0.5, "derived"), (0.97, "again")])
def test_a_checkpoint_brings_the_choice_into_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: float, chosen: str
) -> None:
    monkeypatch.setattr(auto, "compare", lambda *_: ratio)
    session = _fit(_graph(Cell().double()))
    session.save(tmp_path / "at")
    there = read_checkpoint(tmp_path / "at").document["auto"]
    done = next(o for o in session.graph.throughs() if o.name == "cell").experience.done
    assert there == {"cell": {"firings": done.firings, "rows": done.rows, "chosen": chosen}}

    REGISTRY.forget()  # as in a process that begins
    monkeypatch.setattr(auto, "compare", lambda *_: pytest.fail("it is measured again"))
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Flush())
    other = Session(
        _graph(Cell().double()), rules=rules, runtime=Simulated(1, seed=3), max_active=8
    )
    other.load(tmp_path / "at")
    other.fit(_data(), epochs=3)
    (cell, _) = other.graph.throughs()
    said = {"derived": "derived, as chosen before", "again": "runs again, as chosen before"}
    assert cell.experience.story == said[chosen]
    assert cell.experience.done.firings >= done.firings


def test_what_one_of_several_experts_has_done_counts_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of four rows go to the first; the other one alone would be undecided for long."""
    monkeypatch.setattr(auto, "FIRINGS", 8)
    monkeypatch.setattr(auto, "ROWS", 60)
    graph = Graph(value=("y", "n"))
    ways = graph.input("x", t=0).route(lambda m: (m.n < 2).astype(int), 2)
    cells = [Cell().double() for _ in ways]
    said = [
        w.through(cell, name=f"expert {k}")
        for k, (w, cell) in enumerate(zip(ways, cells, strict=True))
    ]
    other = graph.merge(*said).through(Odd().double(), name="other")
    other.through(nn.Linear(D, 2).double(), name="readout").loss(F.cross_entropy, target="y")
    _fit(graph, epochs=5)
    one, two, odd = (
        next(o for o in graph.throughs() if o.name == n).experience
        for n in ("expert 0", "expert 1", "other")
    )
    assert one.done is two.done and odd.done is not one.done
    assert one.story == two.story == "derived, 0.50 of running again"


def test_a_size_that_nobody_measured_is_judged_by_its_neighbour_where_that_is_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []

    def compare(one: object, other: object, inputs: tuple[Tensor, ...], *_: object) -> float:
        measured.append(inputs[0].shape[0])
        return 0.9 if len(measured) == 3 else 0.7

    monkeypatch.setattr(auto, "compare", compare)
    for rows in (4, 16, 64, 100, 100):
        choice, x = _choice(Cell().double()), torch.rand(rows, D, dtype=torch.float64)
        for _ in range(3):
            kernel = choice.kernel((x,))
        assert isinstance(kernel, Program)
    assert measured == [4, 64]


def test_modules_of_a_class_that_differ_in_a_number_are_traced_each_and_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []

    def compare(*_: object) -> float:
        measured.append(1)
        return 0.6

    monkeypatch.setattr(auto, "compare", compare)
    shared, before, wide = Experience(), REGISTRY.traced, nn.Sequential(nn.Linear(D, 9), nn.Tanh())
    for gain in (1.25, 2.25, 3.25):
        module = Cell().double()
        module.gain = gain
        choice = MeasuredChoice("cell", module, running_again(module), Experience(shared.done))
        kernel = [choice.kernel((torch.rand(8, D, dtype=torch.float64),)) for _ in range(3)][-1]
        assert isinstance(kernel, Program)
    assert REGISTRY.traced == before + 3 and len(measured) == 1
    other = MeasuredChoice("wide", wide, running_again(wide), Experience(shared.done))
    other.kernel((torch.rand(8, D),))
    assert len(measured) == 2  # of other weights


def test_functions_of_one_code_count_their_work_together() -> None:
    graph = Graph()
    x = graph.input("x")

    def times(x: Tensor, by: float = 1.0) -> Tensor:
        return x * by

    for k in range(2):
        x = x.through(lambda x, k=k: times(x) + k, name=f"more {k}")
    x = x.through(times, name="times").through(partial(times, by=2.0), name="twice")
    x.through(torch.tanh, name="tanh").through(torch.tanh, name="again").loss(lambda x: x.sum(1))
    done = {each.name: each.experience.done for each in graph.throughs()}
    assert done["more 0"] is done["more 1"]
    assert done["times"] is done["twice"]
    assert done["tanh"] is done["again"]
    assert len({id(each) for each in done.values()}) == 3


@pytest.mark.parametrize(("taken", "turns"), [(0.1, 3), (0.9, 6), (5.0, 3)])
def test_what_is_clear_after_a_few_turns_is_measured_no_longer(
    monkeypatch: pytest.MonkeyPatch, taken: float, turns: int
) -> None:
    module, x, calls = nn.Linear(D, D), torch.rand(9, D), []
    one, other = running_again(module), running_again(module)

    def seconds(kernel: object, *_: object) -> float:
        calls.append(kernel)
        return taken if kernel is one else 1.0

    monkeypatch.setattr(auto, "_seconds", seconds)
    assert compare(one, other, (x,), list(module.parameters())) == pytest.approx(taken)
    assert len(calls) == 2 * turns


def test_runs_that_begin_alike_go_on_alike() -> None:
    first, second = _learned("auto"), _learned("auto")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_in_flight_keep_the_settings_that_they_left_under() -> None:
    """A number of the module changes while rows wait: each is answered as it was computed."""
    module = Cell().double()
    choice, x = _choice(module), torch.rand(4, D, dtype=torch.float64)
    for _ in range(3):
        before = choice.kernel((x,))
    assert isinstance(before, Program)
    (y,), kept = before.forward((x,))
    module.gain = 3.0
    after = choice.kernel((x,))
    assert after is choice._first
    into = _sums(module)
    (dx,) = before.backward((torch.ones_like(y),), kept, None, into)
    module.gain = 1.0
    leaf = x.clone().requires_grad_()
    assert_close(dx, torch.autograd.grad(module(leaf).sum(), leaf)[0])


def test_settings_that_never_rest_end_the_search() -> None:
    module = Cell().double()
    choice, x = _choice(module), torch.rand(4, D, dtype=torch.float64)
    for k in range(auto.MOST_CHANGES):
        for _ in range(3):
            kernel = choice.kernel((x,))
        assert isinstance(kernel, Program)
        module.gain = 2.0 + k
        kernel = choice.kernel((x,))
        assert kernel is choice._first
    for _ in range(9):
        assert choice.kernel((x,)) is choice._first
    assert "settings change" in choice._experience.story


def test_rows_of_another_kind_run_again() -> None:
    choice = _choice(nn.Sequential(nn.Tanh()))
    x = torch.rand(4, D)
    for _ in range(3):
        kernel = choice.kernel((x,))
    assert isinstance(kernel, Program)
    assert choice.kernel((x.double(),)) is choice._first


def _choice(module: nn.Module) -> MeasuredChoice:
    return MeasuredChoice("cell", module, running_again(module), Experience())


def _sums(module: nn.Module) -> Any:
    from geartrain.nodes.gradient import GradientSum

    return GradientSum(module.parameters())


def test_a_measurement_leaves_nothing_behind() -> None:
    module, x = Cell(), torch.rand(9, D)
    choice = _choice(module)
    for _ in range(3):
        program = choice.kernel((x,))
    state, weights = torch.get_rng_state(), [p.clone() for p in module.parameters()]
    ratio = compare(program, running_again(module), (x,), list(module.parameters()))
    assert ratio > 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(p, q) for p, q in zip(weights, module.parameters(), strict=True))


def test_buffers_of_an_era_go_with_its_last_row() -> None:
    from geartrain.frames.rows import RowStore

    store = RowStore("rows", ("era",))
    module = nn.Linear(D, D)
    eras = Eras(running_again(module), store)
    first = store.allocate(5)
    store["era"][first : first + 5] = 0
    eras.now.buffer(store, 0, torch.rand(5, D))
    second = store.allocate(3)
    eras.begin(running_again(module), 3, store)
    store["era"][second : second + 3] = 1
    eras.now.buffer(store, 0, torch.rand(3, D))
    assert eras.mixed and len(eras.now.kept(store)) == 1
    rows = np.array([first, second, first + 1])
    assert [at.tolist() for _, at in eras.groups(rows)] == [[0, 2], [1]]
    eras.release(rows, store)
    assert eras.mixed and store.existing(0) is not None
    eras.release(np.arange(first + 2, first + 5), store)
    assert not eras.mixed and store.existing(0) is None and store.existing(APART) is not None


def test_dropout_keeps_its_mask_under_auto() -> None:
    graph = _graph(Masked().double())
    assert "[auto: derived, for the mask]" in str(graph)
    _fit(graph)
    other = _graph(nn.Sequential(Odd(), Masked()).double())
    with pytest.raises(GraphError, match="another mask"):
        _fit(other)


def test_in_bfloat16_it_changes_too() -> None:
    cell = Cell()
    graph = Graph(value=("y",))
    stream = graph.input("x").through(Part(cell), name="cell")
    stream.loss(F.cross_entropy, target="y")
    data = [Instance({"x": torch.randn(1, D)}, value={"y": k % 2}) for k in range(40)]
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.5), update_every=5)
    compute = Compute(precision="bf16")
    session = Session(graph, rules=rules, runtime=Simulated(1), compute=compute, max_active=4)
    session.fit(data, epochs=2)
    assert "[auto: derived" in str(graph)
    assert all(p.isfinite().all() for p in cell.parameters())


def test_a_module_that_is_asked_for_few_rows_goes_by_what_is_clear_of_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rare expert has no typical firing: it would run again for good, and alone."""
    monkeypatch.setattr(auto, "compare", lambda *_: 0.6)
    shared = Experience()

    def choice() -> MeasuredChoice:
        module = Cell().double()
        return MeasuredChoice("cell", module, running_again(module), Experience(shared.done))

    rare, often = choice(), choice()
    few, many = (torch.rand(n, D, dtype=torch.float64) for n in (4, 64))
    often.kernel((many,))
    assert not any(isinstance(rare.kernel((few,)), Program) for _ in range(3))
    assert isinstance(often.kernel((many,)), Program)
    assert isinstance(rare.kernel((few,)), Program)

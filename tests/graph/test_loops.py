"""Which loops may run over whole instances, and what is said of those that may not."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.engine import rounds
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.errors import EndlessLoopError, GraphError, StuckError, WorkerError
from geartrain.frames.instance import Instance
from geartrain.frames.message import IntArray
from geartrain.graph.deciding import reads_payload
from geartrain.graph.graph import Graph
from geartrain.nodes.inside import Inside
from geartrain.nodes.loop import planner
from geartrain.nodes.loop.members import Members
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loop.pieces import TapeTensors
from geartrain.nodes.loop.sides import Sides
from geartrain.nodes.loop.turn import KeptCall
from geartrain.parts.rules import Rules
from geartrain.parts.triggers import Flush, Instances, Rows
from tests.rigs.passes import Order, accumulate, assert_same_gradients, one_pass


def squared(x: Tensor) -> Tensor:
    return x.square().sum(1)


def first(m: object) -> object:
    return m.payload[0][:, 0] > 0  # type: ignore[attr-defined]


def chain(run: str | None, again=lambda m: m.turn < m.turns, **more: object) -> Graph:
    """A cell that is run some times; its last state has a loss."""
    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
    state.join(graph.input("x", turn=0))
    step = state.through(nn.Linear(2, 2).double(), name="cell", **more)  # type: ignore[arg-type]
    more_of, done = step.move(turn=lambda m: m.turn + 1).where(again, name="again")
    state.join(more_of)
    done.loss(squared)
    return graph


def instances(*turns: int, rows: int = 1) -> list[Instance]:
    torch.manual_seed(7)
    return [
        Instance({"x": torch.randn(rows, 2, dtype=torch.float64)}, value={"turns": n})
        for n in turns
    ]


def loops_of(outcome) -> list[LoopNode]:
    return [n for n in outcome.engine.wiring.nodes.values() if isinstance(n, LoopNode)]


@pytest.mark.parametrize(("run", "whole"), [(None, 1), ("steps", 0), ("auto", 1), ("whole", 1)])
def test_a_loop_runs_as_it_is_told(run, whole):
    outcome = accumulate(chain(run), instances(1, 2, 3))
    assert len(loops_of(outcome)) == whole


@pytest.mark.parametrize(
    ("rules", "whole"),
    [
        ({"update_every": Instances(2)}, 1),
        ({"update_every": Flush()}, 1),
        ({"update_every": Rows(2)}, 0),
        ({"update_every": Instances(2), "window": 64}, 0),
    ],
)
def test_a_loop_of_which_nothing_is_said_runs_whole_where_updates_stay_what_was_asked_for(
    rules, whole
):
    for run, want in ((None, whole), ("auto", 1), ("steps", 0)):
        graph = chain(run)
        parts = make_parts(graph, Rules(optimizer=partial(torch.optim.SGD, lr=0.0), **rules))
        engine = Engine(graph, parts, Settings())
        found = [n for n in engine.wiring.nodes.values() if isinstance(n, LoopNode)]
        assert len(found) == want


def test_a_loop_that_runs_whole_calls_its_module_once_a_turn():
    outcome = accumulate(chain("whole"), instances(1, 4, 2, 4))
    assert loops_of(outcome)[0].calls == 4


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(chain, keep="graph"), "'cell' keeps autograd's graph of whole messages"),
        (partial(chain, alone=True), "'cell' takes one message at a time"),
    ],
)
def test_what_cannot_run_whole_runs_by_steps_or_is_refused_with_the_reason(make, reason):
    assert reason in str(make("auto"))
    data = instances(1)
    assert not loops_of(accumulate(make("auto"), data))
    with pytest.raises(GraphError, match=f"'state' is to run whole, but .*{reason}"):
        one_pass(make("whole"), data)


def test_the_printed_graph_says_how_a_loop_runs():
    assert "loop 'state' runs whole, unless its parts count rows or have windows" in str(
        chain(None)
    )
    assert "loop 'state' runs by steps, as it is to run by steps" in str(chain("steps"))
    assert "loop 'state' runs whole: cell, move, again" in str(chain("auto"))


def test_a_payload_is_seen_to_be_read_wherever_a_function_does_it():
    def inner(m: object) -> object:
        return [first(each) for each in (m,)]

    class Rule:
        def __call__(self, m: object) -> object:
            return m.payload  # type: ignore[attr-defined]

    for function in (first, partial(first), inner, Rule(), lambda m: (lambda: m.payload)()):
        assert reads_payload(function)
    assert not reads_payload(lambda m: m.turn > 3)
    assert not reads_payload(lambda m: {}[m.turn])


def test_rows_enter_by_several_inputs_and_routes_and_each_is_waited_for():
    def build(run: str) -> Graph:
        torch.manual_seed(3)
        graph = Graph(vertex=("kind",), value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        odd, even = graph.input("x", turn=0).where(lambda m: m.kind > 0)
        state.join(odd.through(nn.Linear(2, 2).double(), name="odd"), even)
        state.join(graph.input("y", turn=0).through(nn.Linear(1, 2).double(), name="other"))
        step = state.through(nn.Linear(2, 2).double(), name="cell")
        more, done = step.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
        state.join(more)
        done.loss(squared)
        return graph

    rng = np.random.default_rng(0)
    data = [
        Instance(
            {
                "x": torch.from_numpy(rng.standard_normal((3, 2))),
                "y": torch.from_numpy(rng.standard_normal((k, 1))),
            },
            {"kind": rng.integers(0, 2, 3)},
            value={"turns": 1 + k},
        )
        for k in (0, 1, 2, 3)
    ]
    steps, whole = (accumulate(build(run), data, Order(max_rows=2)) for run in ("steps", "whole"))
    assert len(loops_of(whole)) == 1
    assert_same_gradients(whole.gradients, steps.gradients)


def test_where_it_is_not_known_how_many_rows_enter_a_loop_runs_by_steps():
    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run="auto")
    state.join(graph.input("x", turn=0).replay(name="some"))
    step = state.through(nn.Linear(2, 2), name="cell").move(turn=lambda m: m.turn + 1)
    both = step.group(by="turn", size=2, how="sum")
    more, done = both.where(lambda m: m.turn < m.turns)
    state.join(more)
    done.loss(squared)
    assert "as how many rows enter it is known to 'some' alone" in str(graph)


def test_where_nothing_brings_rows_together_an_instance_goes_in_with_those_that_have_come():
    def build(run: str) -> Graph:
        torch.manual_seed(5)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", turn=0).ungroup(index="turn", name="some"))
        step = state.through(nn.Linear(2, 2).double(), name="cell")
        more, done = step.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
        state.join(more)
        done.loss(squared)
        return graph

    rng = np.random.default_rng(0)
    data = [
        Instance({"x": torch.from_numpy(rng.standard_normal((k, 3, 2)))}, value={"turns": 1 + k})
        for k in (1, 3, 2, 1)
    ]
    steps, whole = (accumulate(build(run), data, Order(max_rows=2)) for run in ("steps", "whole"))
    assert len(loops_of(whole)) == 1
    assert_same_gradients(whole.gradients, steps.gradients)


class Pair(nn.Module):
    """Two rows of one, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(self.one(x)), torch.sin(self.other(x))], 1)


@pytest.mark.parametrize("apart", [False, True])
def test_a_row_that_becomes_several_goes_round_a_loop_that_runs_whole(apart):
    """All parts go round together; or one goes round, and the other leaves."""

    def build(run: str) -> Graph:
        torch.manual_seed(5)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", turn=0, part=0))
        parts = state.through(Pair(), name="pair").ungroup(index="part", name="parts")
        if apart:
            other, parts = parts.where(lambda m: m.part == 1)
            other.through(nn.Linear(2, 2).double(), name="other").loss(squared, name="of others")
            parts = parts.through(nn.Linear(2, 2).double(), name="cell")
        more, done = parts.move(turn=lambda m: m.turn + 1).where(
            lambda m: (m.turn < m.turns) & (m.payload[0][:, 0] > -0.8).numpy()
        )
        state.join(more)
        done.loss(squared)
        return graph

    data = instances(1, 3, 2, 4, rows=2)
    assert "runs whole" in str(build("auto"))
    steps, whole = (accumulate(build(run), data, Order(max_rows=2)) for run in ("steps", "whole"))
    assert len(loops_of(whole)) == 1
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])


@pytest.mark.parametrize("made", [False, True])
def test_a_loop_is_planned_where_just_rows_that_enter_become_several(made):
    """How many parts a row has is known of rows that enter, and not of those that modules make."""

    def build(run: str) -> Graph:
        torch.manual_seed(5)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", turn=0, part=0).ungroup(index="part", name="parts"))
        step = state.through(nn.Linear(2, 2).double(), name="cell").move(turn=lambda m: m.turn + 1)
        more, done = step.where(lambda m: m.turn < m.turns)
        state.join(more.through(Pair(), name="pair").ungroup(name="again") if made else more)
        both = done.group(
            by=("vertex", "turn"), size=lambda m: 2**m.turn if made else 2 + 0 * m.turn, how="sum"
        )
        both.through(nn.Linear(2, 2).double(), name="last").loss(squared)
        return graph

    rng = np.random.default_rng(0)
    data = [
        Instance(
            {"x": torch.from_numpy(rng.standard_normal((k, 2, 2)))},
            value={"turns": 1 + k},
        )
        for k in (1, 3, 2, 1)
    ]
    told = str(build("auto"))
    assert "payload decides (again)" in told if made else "payload decides" not in told
    steps, whole = (accumulate(build(run), data, Order(max_rows=2)) for run in ("steps", "whole"))
    assert len(loops_of(whole)) == 1
    assert_same_gradients(whole.gradients, steps.gradients)


def test_rows_that_become_several_before_a_loop_that_groups_them_run_with_it():
    def build(run: str) -> Graph:
        torch.manual_seed(5)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", turn=0).through(Pair(), name="pair").ungroup(index="part"))
        step = state.through(nn.Linear(2, 2).double(), name="cell").move(turn=lambda m: m.turn + 1)
        both = step.group(by=("vertex", "turn"), size=2, order="part", how="sum")
        more, done = both.where(lambda m: m.turn < m.turns)
        state.join(more.through(Pair(), name="again").ungroup(index="part"))
        done.loss(squared)
        return graph

    data = instances(1, 3, 2, rows=2)
    assert "runs whole" in str(build("auto"))
    steps, whole = (accumulate(build(run), data, Order(max_rows=2)) for run in ("steps", "whole"))
    assert len(loops_of(whole)) == 1
    assert_same_gradients(whole.gradients, steps.gradients)


class Total(nn.Module):
    """A row for each bundle."""

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        return x.new_zeros(len(inside.lengths), x.shape[1]).index_add(0, inside.segment, x)


class Look(nn.Module):
    """What is held, beside what was known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).double()

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(h + self.linear((memory * mask[..., None]).sum(1)))


@pytest.mark.parametrize("order", [Order(), Order(max_rows=2), Order(reach=False)])
def test_a_loop_that_groups_what_looks_at_a_memory_waits_for_a_row_of_each_bundle(order):
    """A row of each bundle that is there becomes several, which look, meet and look again."""

    def build(run: str) -> Graph:
        torch.manual_seed(5)
        graph = Graph(value=("turns",))
        encoded = graph.input("x", bundle=True, turn=0).through(
            nn.Linear(2, 2).double(), name="encode"
        )
        held = encoded.hold(name="memory")
        start = held.through(Total(), name="start", inside=True, pool=True)
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(start.flatmap("part", count=2))
        seen = state.attend(held, Look(), name="look").move(turn=lambda m: m.turn + 1)
        both = seen.group(by="turn", size=2, order="part", how="mean", name="both")
        more, done = both.where(lambda m: m.turn < m.turns)
        state.join(more.flatmap("part", count=lambda m: np.full(len(m), 2)))
        done.through(nn.Linear(2, 1).double(), name="end").loss(squared)
        graph.input("beside").stop()
        return graph

    told = str(build("auto"))
    assert "loop 'state' runs whole" in told
    assert "'state' runs with encode, memory, start, end, loss" in told
    torch.manual_seed(7)
    data = [
        Instance(
            {"x": torch.randn(rows, 2, dtype=torch.float64), "beside": torch.zeros(1, 1)},
            value={"turns": turns},
        )
        for rows, turns in ((2, 1), (0, 2), (1, 3), (4, 2))
    ]
    steps, whole = (accumulate(build(run), data, order) for run in ("steps", "auto"))
    assert len(loops_of(whole)) == 1
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])
    assert whole.sums["loss"][1] == 3


def rebundled(run: str, *, routed: bool = False) -> Graph:
    """Bundles enter a loop, are taken apart and put together again; some of them by another way."""
    torch.manual_seed(5)
    graph = Graph(value=("turns", "many"))
    state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
    came = graph.input("x", turn=0, bundle=True)
    if routed:
        odd, even = came.where(lambda m: m.turns % 2 > 0)
        state.join(odd.through(nn.Linear(2, 2).double(), name="odd"))
        state.join(even)
    else:
        state.join(came)
    state.join(graph.input("more", turn=1, bundle=True))
    cell = state.through(nn.Linear(2, 2).double(), name="cell")
    more, done = cell.where(lambda m: m.turn < m.turns)
    rows = more.ungroup(index="part", name="parts").move(turn=lambda m: m.turn + 2)
    state.join(rows.group(by="turn", size="many", order="part", how="bundle", name="bundle"))
    done.through(Total(), name="total", inside=True, pool=True).loss(squared)
    return graph


@pytest.mark.parametrize("most", [4096, 2])
@pytest.mark.parametrize("routed", [False, True])
def test_bundles_may_enter_a_loop_with_a_group(routed: bool, most: int) -> None:
    torch.manual_seed(7)
    data = [
        Instance(
            {
                "x": torch.randn(size, 2, dtype=torch.float64),
                "more": torch.randn(size if size % 2 else 0, 2, dtype=torch.float64),
            },
            value={"turns": turns, "many": size},
        )
        for size, turns in ((2, 1), (1, 4), (3, 3), (4, 0), (1, 2), (3, 5))
    ]
    build = partial(rebundled, routed=routed)
    assert "loop 'state' runs whole" in str(build("auto"))
    steps, whole = (accumulate(build(run), data, Order(max_rows=most)) for run in ("steps", "auto"))
    assert len(loops_of(whole)) == 1
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])


def test_a_route_that_says_how_many_rows_enter_runs_with_the_loop():
    def build(run: str) -> Graph:
        graph = Graph(vertex=("kind",), value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        some, none = graph.input("x", turn=0).where(lambda m: m.kind > 0, name="some")
        none.loss(squared, name="at once")
        state.join(some)
        torch.manual_seed(0)
        step = state.through(nn.Linear(2, 2).double(), name="cell")
        more, done = step.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
        state.join(more)
        done.loss(squared)
        return graph

    data = [
        Instance({"x": torch.randn(2, 2).double()}, {"kind": kind}, value={"turns": 2})
        for kind in ([0, 0], [0, 1], [1, 1])
    ]
    assert "runs whole: some, cell" in str(build("auto"))
    steps, whole = (accumulate(build(run), data) for run in ("steps", "whole"))
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])


@pytest.fixture
def few_rounds(monkeypatch):
    """A loop that goes round for ever is told early."""
    monkeypatch.setattr(rounds, "ROUNDS", 1000)
    monkeypatch.setattr(rounds, "ROUNDS_EACH", 0)


def test_an_endless_loop_is_refused_before_anything_is_computed(few_rounds):
    graph = chain("whole", again=lambda m: m.turn >= 0)
    with pytest.raises(EndlessLoopError, match="rows of instance 0 have gone round the loop of"):
        accumulate(graph, instances(1))


def late(m: object) -> object:
    """Stops where the payload says so, and after six turns."""
    large = m.payload[0].square().sum(1) > 0.4  # type: ignore[attr-defined]
    return large.numpy() & (m.turn < 6)  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", [Order(max_active=1), Order(max_active=8), Order(max_rows=2)])
def test_a_loop_that_decides_by_payloads_runs_whole_and_learns_the_same(order):
    def build(run: str) -> Graph:
        torch.manual_seed(1)
        return chain(run, again=late)

    data = instances(*[1] * 9, rows=3)
    assert "loop 'state' runs whole, payload decides (again): cell, move, again" in str(
        build("auto")
    )
    steps, whole = (accumulate(build(run), data, order) for run in ("steps", "whole"))
    (loop,) = loops_of(whole)
    assert loop.calls > 1
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])
    by_steps, all_rows = (sum(o.parts["cell"].histogram()) for o in (steps, whole))
    assert by_steps == all_rows


def test_rows_that_enter_by_what_their_payload_says_run_with_the_loop():
    def build(run: str) -> Graph:
        torch.manual_seed(6)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        some, none = graph.input("x", turn=0).where(first, name="some")
        none.loss(squared, name="at once")
        state.join(some)
        step = state.through(nn.Linear(2, 2).double(), name="cell")
        more, done = step.move(turn=lambda m: m.turn + 1).where(late)
        state.join(more)
        done.loss(squared)
        return graph

    data = instances(*[1] * 6, rows=3)
    assert "runs whole, payload decides (some, where)" in str(build("auto"))
    steps, whole = (accumulate(build(run), data) for run in ("steps", "whole"))
    assert loops_of(whole)
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])


def test_modules_that_lead_to_another_are_called_before_it():
    torch.manual_seed(0)
    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run="whole")
    state.join(graph.input("x", turn=0))
    ways = state.through(nn.Linear(2, 2).double(), name="router").where(first)
    said = [way.through(nn.Linear(2, 2).double(), name=f"expert {k}") for k, way in enumerate(ways)]
    step = graph.merge(*said).through(nn.Linear(2, 2).double(), name="step")
    more, done = step.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
    state.join(more)
    done.loss(squared)
    outcome = accumulate(graph, instances(*[3] * 20), Order(max_active=20))
    assert loops_of(outcome)[0].calls <= 3 * 4


def test_an_endless_loop_that_decides_by_payloads_ends_during_the_firing(few_rounds):
    graph = chain("whole", again=lambda m: m.payload[0][:, 0] > -1e9)
    with pytest.raises(EndlessLoopError, match="rows of instance 0 have gone round the loop of"):
        accumulate(graph, instances(1))


def test_a_function_that_fails_on_a_payload_is_told_by_name():
    def fails(m: object) -> object:
        if (m.turn > 2).any():  # type: ignore[attr-defined]
            raise RuntimeError("no more")
        return m.payload[0][:, 0] > -1e9  # type: ignore[attr-defined]

    with pytest.raises(WorkerError, match=r"RuntimeError in 'again', 1 rows of .*instance 0"):
        accumulate(chain("whole", again=fails), instances(1))


def test_members_that_never_come_are_told():
    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run="whole")
    state.join(graph.input("x", turn=0))
    step = state.through(nn.Linear(2, 2).double(), name="cell").move(turn=lambda m: m.turn + 1)
    more, done = step.where(lambda m: m.turn < m.turns)
    state.join(more.group(("instance", "turn"), 3, how="sum", name="three"))
    done.loss(squared)
    with pytest.raises(StuckError, match=r"a loop that runs whole .*\n  'three' waits for"):
        accumulate(graph, instances(2))


def has_failed(m: object) -> object:
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("count", "size", "name"),
    [(has_failed, 2, "copies"), (lambda m: 2 + 0 * m.turn, has_failed, "heard")],
)
def test_a_function_that_fails_while_rows_are_counted_is_told_by_name(count, size, name):
    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run="whole")
    state.join(graph.input("x", turn=0))
    copies = state.flatmap("number", count=count, name="copies")
    heard = copies.group(by=("instance", "turn"), size=size, how="sum", name="heard")
    step = heard.through(nn.Linear(2, 2).double()).move(turn=lambda m: m.turn + 1)
    more, done = step.where(lambda m: m.turn < m.turns)
    state.join(more)
    done.loss(squared)
    with pytest.raises(WorkerError, match=rf"RuntimeError in '{name}', \d rows of .*instance 0"):
        accumulate(graph, instances(2))


class Bad(nn.Module):
    """Fails forward where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.left = nn.Linear(2, 2).double(), 3

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            raise RuntimeError("no more")
        return self.map(x)


def test_an_error_inside_names_the_module_the_call_and_the_instance():
    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run="whole")
    state.join(graph.input("x", turn=0))
    step = state.through(Bad(), name="cell").move(turn=lambda m: m.turn + 1)
    more, done = step.where(lambda m: m.turn < m.turns)
    state.join(more)
    done.loss(squared)
    with pytest.raises(
        WorkerError, match=r"in node 'cell' of part 'cell', forward, call \d of 5 .*instance 0"
    ):
        accumulate(graph, instances(5))


def test_no_gradient_and_no_row_is_left_where_instances_leave_no_rows():
    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run="whole")
    state.join(graph.input("x", turn=0).through(nn.Linear(2, 2).double(), name="before"))
    step = state.through(nn.Linear(2, 2).double(), name="cell").move(turn=lambda m: m.turn + 1)
    more, done = step.where(lambda m: m.turn < m.turns)
    state.join(more)
    fine, gone = done.where(lambda m: m.turns > 1)
    gone.stop()
    fine.loss(squared)
    outcome = accumulate(graph, instances(1, 1, 2))
    assert outcome.sums["loss"][1] == 1
    assert sum(outcome.parts["before"].histogram()) == 1
    assert sum(outcome.parts["cell"].histogram()) == 2
    assert not any(part.outstanding for part in outcome.parts.values())


def test_parts_of_a_loop_that_is_to_run_whole_live_together():
    def build() -> Graph:
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run="whole")
        state.join(graph.input("x", turn=0))
        step = state.through(nn.Linear(2, 3).double(), name="up")
        step = step.through(nn.Linear(3, 2).double(), name="down")
        more, done = step.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
        state.join(more)
        done.loss(squared)
        return graph

    data = instances(1, 2, 3, 4)
    outcome = one_pass(build(), data, Order(workers=3), placement={"down": 2})
    assert outcome.engine.nodes_by_worker()["state"] == 2
    with pytest.raises(GraphError, match="its parts may live on several workers"):
        one_pass(build(), data, Order(workers=3), placement={"down": 2, "up": 1})


def test_rows_of_another_shape_are_refused():
    class Longer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x], -1)

    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run="whole")
    state.join(graph.input("x", turn=0))
    step = state.through(Longer(), name="longer").move(turn=lambda m: m.turn + 1)
    more, done = step.where(lambda m: m.turn < m.turns)
    state.join(more)
    done.loss(squared)
    with pytest.raises(GraphError, match="come where rows of"):
        one_pass(graph, instances(3))


RULES = Rules(optimizer=partial(torch.optim.SGD, lr=0.05), update_every=Instances(1))


def test_one_instance_at_a_time_it_learns_what_a_loop_by_steps_learns():
    found = []
    for run in ("steps", "whole"):
        torch.manual_seed(5)
        graph, data = chain(run), instances(3, 1, 2, 4, 2, rows=2)
        outcome = one_pass(graph, data, Order(max_active=1), rules=RULES)
        (part,) = outcome.parts.values()
        assert part.version == len(data) and part.histogram() == (24,)
        found.append([p.detach().clone() for p in part.module.parameters()])
    for by_steps, whole in zip(*found, strict=True):
        torch.testing.assert_close(whole, by_steps, rtol=1e-12, atol=1e-14)


def test_gradients_are_as_old_as_the_weights_that_the_whole_loop_saw():
    outcome = one_pass(chain("whole"), instances(*[2] * 6), Order(max_active=6), rules=RULES)
    (part,) = outcome.parts.values()
    assert part.version == 6
    assert sum(part.histogram()) == 12
    assert part.histogram()[1:] != ()


def test_one_firing_computes_for_instances_that_are_answered_apart():
    """Two answers of each instance, from losses on other workers, in any order and number."""

    def build(run: str) -> Graph:
        torch.manual_seed(2)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", turn=0).through(nn.Linear(2, 2).double(), name="before"))
        step = state.through(nn.Linear(2, 2).double(), name="cell")
        step.through(nn.Linear(2, 2).double(), name="every", keep="inputs").loss(squared)
        more, done = step.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
        state.join(more)
        done.through(nn.Linear(2, 2).double(), name="last", keep="inputs").loss(squared, name="end")
        return graph

    data = instances(*[1, 2, 3, 4] * 3, rows=2)
    want = accumulate(build("steps"), data).gradients
    for seed in range(4):
        order = Order(workers=3, jitter=0.9, policy="random", seed=seed, max_active=12)
        got = accumulate(build("whole"), data, order)
        assert loops_of(got)
        assert_same_gradients(got.gradients, want)


@pytest.mark.parametrize("joined", ["features", "tuple"])
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_messages_along_edges_join_split_and_detach_as_by_steps(how, joined):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(5, 3).double()

        def forward(self, *x: Tensor) -> Tensor:
            return torch.tanh(self.map(torch.cat(x, -1)))

    def build(run: str) -> Graph:
        torch.manual_seed(4)
        graph = Graph(edge=("kind",), value=("turns",))
        rounds = graph.loop(name="rounds", run=run)  # type: ignore[arg-type]
        rounds.join(graph.input("x", turn=0).through(nn.Linear(2, 3).double(), name="embed"))
        going, done = rounds.where(lambda m: m.turn < m.turns)
        sent = going.through(nn.Linear(3, 5).double(), name="send").flatmap("edge")
        left, right = sent.split(2, 3)
        right.detach().move(vertex=lambda m: m.target).loss(squared, name="beside")
        arrived = left.through(lambda x, kind: x * (1 + kind[:, None]), name="scaled", read="kind")
        arrived = arrived.move(vertex=lambda m: m.target)
        key = ("vertex", "turn")
        sums = arrived.group(by=key, size="in_degree", how=how)  # type: ignore[arg-type]
        kept = going if joined == "features" else going.detach()
        both = graph.concat(sums, kept, on=key, how=joined)  # type: ignore[arg-type]
        rounds.join(both.through(Both(), name="update").move(turn=lambda m: m.turn + 1))
        done.loss(squared)
        return graph

    rng = np.random.default_rng(0)
    data = []
    for n in (2, 3, 5):
        source = np.r_[np.arange(n), np.arange(n)]
        target = np.r_[(np.arange(n) + 1) % n, rng.integers(0, n, n)]
        edge = {"source": source, "target": target, "kind": rng.integers(0, 3, 2 * n)}
        x = torch.from_numpy(rng.standard_normal((n, 2)))
        data.append(Instance({"x": x}, edge=edge, value={"turns": 1 + n % 3}))
    steps, whole = (accumulate(build(run), data, Order(max_active=2)) for run in ("steps", "whole"))
    assert loops_of(whole)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])
    assert_same_gradients(whole.gradients, steps.gradients)


def test_on_the_way_back_what_a_call_has_made_is_free_when_it_is_answered(monkeypatch):
    """All instances are answered together: of 12 calls ever fewer hold what they have computed.

    Of derived kernels inputs stay, as operands of products that wait for the step.
    """
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    put, backward = TapeTensors.put, KeptCall.backward

    def putting(self, number, name, first, columns, rows=None):
        made.extend(weakref.ref(x) for x in columns)
        put(self, number, name, first, columns, rows)

    def going_back(self, *given):
        alive.append(sum(ref() is not None for ref in made))
        return backward(self, *given)

    monkeypatch.setattr(TapeTensors, "put", putting)
    monkeypatch.setattr(KeptCall, "backward", going_back)
    accumulate(chain("whole", keep="inputs"), instances(*[12] * 4), Order(max_active=4))
    assert len(alive) == 12 and alive[0] >= 12
    assert all(n <= alive[0] + 1 - k for k, n in enumerate(alive))


def beside(run: str | None, *, counts: bool = False) -> Graph:
    """Each round of a loop sends its rows into two others.

    Args:
        run: How these two run.
        counts: Whether rows that are sent again come to the first as well, so that nobody knows how
            many are to come, and the second groups rows, which waits for all.
    """
    graph = Graph(value=("turns",))
    state = graph.loop(name="state")
    state.join(graph.input("x", turn=0, row=0))
    step = state.through(nn.Linear(2, 2).double(), name="cell")
    for name in ("left", "right"):
        inner = graph.loop(name=name, run=run)  # type: ignore[arg-type]
        inner.join(step.move(round=0))
        if counts and name == "left":
            inner.join(graph.input("y", turn=0).replay().move(round=0))
        passed = inner.through(nn.Linear(2, 2).double(), name=f"{name} cell")
        if counts and name == "right":
            passed = passed.group(("turn", "round"), size=1, how="sum")
        again, done = passed.move(round=lambda m: m.round + 1).where(lambda m: m.round <= m.turn)
        inner.join(again)
        done.loss(squared, name=f"{name} loss")
    again, done = step.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
    state.join(again)
    done.stop()
    return graph


def test_loops_that_share_a_third_one_run_whole_as_one():
    data = instances(1, 3, 2)
    torch.manual_seed(5)
    whole = accumulate(beside("whole"), data)
    [loop] = loops_of(whole)
    assert set(loop.part_names) == {"cell", "left cell", "right cell"}
    torch.manual_seed(5)
    steps = accumulate(beside("steps"), data)
    [loop] = loops_of(steps)
    assert set(loop.part_names) == {"cell"}
    for name, (total, rows) in steps.sums.items():
        assert whole.sums[name] == (pytest.approx(total), rows)
    for key, gradient in steps.gradients.items():
        torch.testing.assert_close(whole.gradients[key], gradient)


def test_loops_that_share_a_third_one_are_refused_where_they_cannot_run_as_one():
    with pytest.raises(
        GraphError, match="'left' is to run whole, but the loop 'right' has 'cell' too"
    ):
        accumulate(beside("whole", counts=True), instances(1, 2))


def test_a_join_looks_when_no_module_that_sends_it_rows_is_to_be_called(monkeypatch):
    """Two loops of several turns meet at each turn: once all rows are there, and not at each."""

    def build(run: str) -> Graph:
        torch.manual_seed(4)
        graph = Graph(value=("turns",))
        said = []
        for name in ("one", "other"):
            state = graph.loop(name=f"{name} state", run=run)  # type: ignore[arg-type]
            state.join(graph.input(name, turn=0))
            step = state.through(nn.Linear(2, 2).double(), name=f"{name} cell")
            said.append(step)
            more, done = step.move(turn=lambda m: m.turn + 1).where(lambda m: m.turn < m.turns)
            state.join(more)
            done.stop()
        both = graph.concat(*said, on=("instance", "turn"), name="both")
        both.through(nn.Linear(4, 2).double(), name="last").loss(squared)
        return graph

    torch.manual_seed(7)
    data = [
        Instance(
            {name: torch.randn(1, 2, dtype=torch.float64) for name in ("one", "other")},
            value={"turns": n},
        )
        for n in (3, 5, 2)
    ]
    looked = []
    before = Sides.complete

    def complete(self: Sides, *args: object) -> object:
        looked.append(args)
        return before(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Sides, "complete", complete)
    outcome = accumulate(build("whole"), data)
    (loop,) = loops_of(outcome)
    assert len(looked) == 2  # once a port
    assert loop.calls == 5 + 5 + 1
    assert_same_gradients(outcome.gradients, accumulate(build("steps"), data).gradients)


@pytest.mark.parametrize("enough", [1, 1024])
def test_what_no_round_waits_for_is_called_when_the_rounds_are_over_or_many_rows_wait(
    monkeypatch, enough
):
    monkeypatch.setattr(planner, "ENOUGH", enough)

    def build(run: str) -> Graph:
        torch.manual_seed(5)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", turn=0).through(nn.Linear(2, 2).double(), name="first"))
        step = state.through(nn.Linear(2, 2).double(), name="cell").move(turn=lambda m: m.turn + 1)
        state.through(nn.Linear(2, 2).double(), name="said").loss(squared, name="of all")
        more, done = step.where(lambda m: m.turn < m.turns)
        state.join(more)
        done.stop()
        return graph

    data = instances(1, 3, 4, rows=2)
    whole = accumulate(build("whole"), data, Order(max_active=3))
    # Rounds, a call of what begins, and of what each round says.
    assert loops_of(whole)[0].calls == 4 + 1 + (4 if enough == 1 else 1)
    assert_same_gradients(whole.gradients, accumulate(build("steps"), data).gradients)


def test_a_group_of_no_loop_looks_when_the_rounds_are_over(monkeypatch):
    looked: list[int] = []
    before = Members.complete

    def complete(self: Members, numbers: IntArray, state: IntArray) -> object:
        looked.append(numbers.size)
        return before(self, numbers, state)

    monkeypatch.setattr(Members, "complete", complete)

    def build(run: str) -> Graph:
        torch.manual_seed(5)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", turn=0))
        more, done = state.where(lambda m: m.turn < m.turns)
        step = more.through(nn.Linear(2, 2).double(), name="cell").move(turn=lambda m: m.turn + 1)
        state.join(step)
        both = done.group(by="instance", size=2, how="sum")
        both.through(nn.Linear(2, 2).double(), name="last").loss(squared)
        return graph

    data = instances(1, 3, 4, rows=2)
    whole = accumulate(build("whole"), data, Order(max_active=3))
    assert looked == [6]
    assert_same_gradients(whole.gradients, accumulate(build("steps"), data).gradients)

"""What is told to whoever writes a first program and forgets something."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import geartrain as gt
from geartrain.errors import GraphError
from geartrain.graph.graph import Graph

FLOATS = {"x": ((4,), torch.float32)}


@pytest.mark.parametrize("holder", [nn.ModuleList([nn.Linear(4, 2)]), nn.ModuleDict(), nn.Module()])
def test_a_module_without_a_forward_is_refused_where_it_is_given(holder: nn.Module) -> None:
    with pytest.raises(TypeError, match=f"{type(holder).__name__}, which has no forward"):
        Graph().input("x").through(holder)


def test_a_forward_of_its_own_is_one() -> None:
    module = nn.Module()
    module.forward = lambda x: x * 2  # type: ignore[method-assign]
    Graph().input("x").through(module)


@pytest.mark.parametrize(
    "criterion",
    [gt.cross_entropy, functional.mse_loss, nn.L1Loss(reduction="none"), lambda p, y: p - y],
)
def test_a_criterion_without_its_target_is_refused(criterion: Callable[..., Tensor]) -> None:
    graph = Graph(value=("y",))
    graph.input("x").through(nn.Linear(4, 2)).loss(criterion)
    with pytest.raises(GraphError, match="gets 1 payload tensor alone; target= gives it a column"):
        graph.check(FLOATS)


@pytest.mark.parametrize("criterion", [lambda p: p[:, 0], torch.sum, lambda p, scale=2.0: p[:, 0]])
def test_a_criterion_that_needs_none_wants_none(criterion: Callable[..., Tensor]) -> None:
    graph = Graph(value=("y",))
    graph.input("x").through(nn.Linear(4, 2)).loss(partial(criterion))
    try:
        graph.check(FLOATS)
    except GraphError as error:
        assert "target=" not in str(error)


def _fit(graph: Graph, **rules: Any) -> None:
    points = [gt.Instance({"x": torch.randn(1, 4)}, value={"y": k % 2}) for k in range(4)]
    asked = gt.Rules(update_every=gt.Instances(4), **rules)
    gt.Session(graph, rules=asked, runtime=gt.Threads(1)).fit(points, epochs=1)


@pytest.mark.parametrize(
    ("choose", "told"),
    [
        (lambda m: (m.payload[0] > 0).long(), r"a column: f\(m\)\[:, 0\] of what it returned"),
        (lambda m: 1 if m.payload[0].sum() > 0 else 0, r"a column: np.where\(m.x > 0, 1, 2\)"),
    ],
)
def test_a_route_by_no_column_is_told_how_to_make_one(choose: Any, told: str) -> None:
    graph = Graph(value=("y",))
    one, other = graph.input("x").through(nn.Linear(4, 1)).route(choose, 2)
    one.loss(lambda p: p[:, 0])
    other.stop()
    with pytest.raises(GraphError, match=told):
        _fit(graph)


def test_an_optimiser_of_a_module_is_told_what_it_gets() -> None:
    graph = Graph(value=("y",))
    graph.input("x").through(nn.Linear(4, 2)).loss(gt.cross_entropy, target="y")
    with pytest.raises(TypeError, match="it gets a list of the part's parameters"):
        _fit(graph, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "criterion",
    [gt.cross_entropy, functional.cross_entropy, nn.L1Loss(reduction="none"), lambda p, y: p - y],
)
def test_a_criterion_that_gets_more_than_it_takes_is_refused(criterion: Any) -> None:
    """Before anything moves, and not by the first evaluation."""
    graph = Graph(value=("y",))
    both = graph.input("x").through(lambda x: (x[:, :2], x), name="both")
    both.loss(criterion, target="y")
    with pytest.raises(GraphError, match="gets 2 payload tensors and the target; put a function"):
        graph.check(FLOATS)


@pytest.mark.parametrize("criterion", [lambda *all_: all_[0][:, 0], lambda p, x, y=None: p[:, 0]])
def test_a_criterion_that_takes_what_comes_is_not(criterion: Any) -> None:
    graph = Graph(value=("y",))
    both = graph.input("x").through(lambda x: (x[:, :2], x), name="both")
    both.loss(criterion, target="y")
    graph.check(FLOATS)


@pytest.mark.parametrize(
    ("use", "who"),
    [
        (torch.tanh, r"tanh\(\)"),
        (nn.Linear(4, 2), r"linear\(\)"),
        (lambda s: torch.cat([s, s], 1), r"cat\(\)"),
        *((use, "an operator") for use in (lambda s: s + s, lambda s: 2 * s, lambda s: -s)),
        *((use, "an operator") for use in (lambda s: torch.ones(4) * s, lambda s: s @ s)),
        *((use, "an index") for use in (lambda s: s[0], lambda s: [*s])),
    ],
)
def test_a_stream_that_is_taken_for_a_tensor_says_what_to_do(use: Any, who: str) -> None:
    with pytest.raises(TypeError, match=rf"{who}.* got a stream, which is no tensor"):
        use(Graph().input("x"))


def test_what_it_says_of_two_streams_adds_them() -> None:
    graph = Graph(value=("y",))
    x = graph.input("x")
    both = graph.concat(x, x.through(lambda x: 2 * x, name="more"), how="tuple")
    both.through(torch.add).output("sum")
    session = gt.Session(graph, runtime=gt.Threads(1, kernel_threads=1))
    (found,) = session.predict([gt.Instance({"x": torch.ones(1, 4)}, value={"y": 0})])
    assert found.tolist() == [[3.0] * 4]


@pytest.mark.parametrize("given", [(4,), 4, ("4", torch.float32), ((4,), "float32")])
def test_rows_are_told_to_a_check_by_shape_and_dtype(given: Any) -> None:
    graph = gt.Graph()
    graph.input("x").through(nn.Linear(4, 4)).loss(lambda y: y.sum(1))
    with pytest.raises(TypeError, match=r"give shape and dtype of one row, as {'x': \(\(4,\)"):
        graph.check({"x": given})
    graph.check({"x": ((4,), torch.float32)})

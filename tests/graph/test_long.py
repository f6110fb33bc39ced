"""Graphs of thousands of operators: nothing that follows them calls itself, or looks at all of them
for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.frames.instance import Instance
from geartrain.graph.cycles import components, furthest_first
from geartrain.graph.graph import Graph, Stream
from tests.rigs.passes import accumulate, assert_same_gradients, autograd

LONG = 2000


def squares(y: Tensor) -> Tensor:
    return y.square().sum(1)


def residual(x: Stream, graph: Graph, k: int) -> Stream:
    """A stream that is used twice, and its two ways that meet again."""
    both = graph.concat(x, x.through(torch.tanh, name=f"f{k}"), how="tuple", name=f"c{k}")
    return both.through(torch.add, name=f"a{k}")


def test_long_graphs_are_checked_laid_out_printed_and_drawn():
    graph = Graph()
    x = graph.input("x", shape=(2,))
    for k in range(LONG // 3):
        x = x.through(torch.tanh, name=f"m{k}")
    for k in range(LONG // 40):
        x = residual(x, graph, k)
    x.loss(squares)
    graph.check()
    lines = str(graph).splitlines()
    assert lines[0].startswith(f"graph of {2 + LONG // 3 + 4 * (LONG // 40)} operators")
    assert (
        graph.mermaid().count("-->") == graph.dot().count("->") == LONG // 3 + 5 * (LONG // 40) + 1
    )


def test_what_comes_after_what_is_found_without_calling_oneself():
    ahead = {k: {k + 1} for k in range(LONG)} | {LONG: {LONG - 1}}
    assert furthest_first([0], lambda k: ahead[k]) == [*range(LONG, -1, -1)]
    found = components(ahead)
    assert found == [*(frozenset([k]) for k in range(LONG - 1)), frozenset([LONG - 1, LONG])]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["auto", "steps"])
def test_two_thousand_modules_in_a_row_learn_what_plain_torch_says(run: Any) -> None:
    torch.manual_seed(1)
    graph = Graph(run=run)
    modules = [nn.Linear(2, 2).double() for _ in range(LONG)]
    for module in modules:
        nn.init.orthogonal_(module.weight)  # so that gradients neither vanish nor grow
    stream = graph.input("x")
    for k, module in enumerate(modules):
        stream = stream.through(module, name=f"m{k}")
    stream.loss(squares)
    x = torch.randn(3, 2, dtype=torch.float64)
    got = accumulate(graph, [Instance({"x": row[None]}) for row in x])
    y = x
    for module in modules:
        y = module(y)
    want = autograd(squares(y).sum(), {f"m{k}": module for k, module in enumerate(modules)})
    assert_same_gradients(got.gradients, want)
    assert not torch.allclose(want["m0", "weight"], torch.zeros(2, 2, dtype=torch.float64))

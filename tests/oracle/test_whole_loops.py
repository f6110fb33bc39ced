"""Loops over whole instances against the same programs row by row, and against loops by steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from geartrain.nodes.loop.node import LoopNode
from tests.rigs.passes import (
    ORDERS,
    Order,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
    orders,
)
from tests.rigs.random_programs import Program
from tests.rigs.twins import Lists, Streams, instance, new_graph


def looped(seed: int, length: int, looks: bool = False) -> Program:
    """A program that has a loop, which looks at columns alone, or decides by payloads."""
    while True:
        program = Program(seed, length, columns=True, looks=looks)
        graph = new_graph()
        program.run(Streams(graph, "auto"))
        if "loop" in program.told and (
            not looks or ({"early", "route"} & {*program.told} and "payload decides" in str(graph))
        ):
            return program
        seed += 100_003


def graph_of(program: Program, run: str):
    graph = new_graph()
    program.run(Streams(graph, run))
    graph.check({"x": ((3,), torch.float64)})
    return graph


def check(seed, length, size, order, tell=note, looks=False):
    program = looped(seed, length, looks)
    data = [instance(1000 * seed + i) for i in range(size)]
    plain = Lists(data)
    program.run(plain)
    tell(f"motifs: {program.told}")
    want = autograd(plain.total, program.modules)
    graph = graph_of(program, "whole")
    tell(str(graph))
    got = accumulate(graph, data, order)
    assert any(isinstance(node, LoopNode) for node in got.engine.wiring.nodes.values())
    assert_same_loss(got, plain.total)
    assert got.sums.get("loss", (0, 0))[1] == plain.losses
    names = {id(state.module): name for name, state in got.parts.items()}
    by_part = {(names[id(program.modules[m])], p): g for (m, p), g in want.items()}
    assert_same_gradients(got.gradients, by_part)
    return program, data, got


@pytest.mark.both_ways
@settings(max_examples=5)
@given(
    seed=st.integers(0, 10_000), length=st.integers(1, 3), size=st.integers(1, 4), order=orders()
)
def test_gradients_of_a_loop_that_runs_whole_are_those_of_autograd(seed, length, size, order):
    check(seed, length, size, order)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=1000)
@given(
    seed=st.integers(0, 10**6), length=st.integers(1, 9), size=st.integers(1, 12), order=orders()
)
def test_gradients_of_many_loops_that_run_whole_are_those_of_autograd(seed, length, size, order):
    check(seed, length, size, order)


@settings(max_examples=4)
@given(
    seed=st.integers(0, 10_000), length=st.integers(1, 3), size=st.integers(1, 4), order=orders()
)
def test_gradients_of_a_loop_that_decides_by_payloads_are_those_of_autograd(
    seed, length, size, order
):
    check(seed, length, size, order, looks=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=1000)
@given(
    seed=st.integers(0, 10**6), length=st.integers(1, 9), size=st.integers(1, 12), order=orders()
)
def test_gradients_of_many_loops_that_decide_by_payloads_are_those_of_autograd(
    seed, length, size, order
):
    check(seed, length, size, order, looks=True)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("order", [ORDERS[k] for k in (3, 9)], ids=str)
def test_whole_and_by_steps_rows_learn_as_often(order, looks):
    order = replace(order, workers=1)
    program = looped(0, 3, looks)
    data = [instance(i) for i in range(5)]
    got = [accumulate(graph_of(program, run), data, order) for run in ("steps", "whole")]
    by_steps, whole = (
        {name: sum(state.histogram()) for name, state in each.parts.items()} for each in got
    )
    assert by_steps == whole


@pytest.mark.parametrize("looks", [False, True])
def test_an_evaluation_of_a_loop_that_runs_whole_keeps_nothing_and_finds_the_same_loss(looks):
    for seed in range(2):
        program = looped(seed, 3, looks)
        data = [instance(1000 * seed + i) for i in range(5)]
        plain = Lists(data)
        program.run(plain)
        got = one_pass(graph_of(program, "whole"), data, Order(max_active=4), train=False)
        assert_same_loss(got, plain.total)
        assert not any(part.outstanding for part in got.parts.values())

"""Random programs of random nodes against the same programs row by row in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.rigs.passes import (
    ORDERS,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    orders,
)
from tests.rigs.random_programs import Program
from tests.rigs.twins import Lists, Streams, instance, new_graph


def check(seed, length, size, *orders, tell=note):
    data = [instance(1000 * seed + i) for i in range(size)]
    program, plain = Program(seed, length), Lists(data)
    graph = new_graph("steps" if seed % 2 else "auto")  # sections and loops by steps, or whole
    program.run(plain)
    tell(f"motifs: {program.told}")
    want = autograd(plain.total, program.modules)
    program.run(Streams(graph))
    tell(str(graph))
    graph.check({"x": ((3,), torch.float64)})
    for order in orders:
        got = accumulate(graph, data, order)
        assert_same_loss(got, plain.total)
        assert got.sums.get("loss", (0, 0))[1] == plain.losses
        assert_same_gradients(got.gradients, by_part(want, got.parts, program))


def by_part(want, parts, program):
    """Autograd's gradients under the names of the graph's parts."""
    names = {id(state.module): name for name, state in parts.items()}
    return {
        (names[id(program.modules[module])], parameter): gradient
        for (module, parameter), gradient in want.items()
    }


@pytest.mark.both_ways
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10_000), length=st.integers(1, 6), size=st.integers(1, 6), order=orders()
)
def test_gradients_of_a_random_program_are_those_of_autograd(seed, length, size, order):
    check(seed, length, size, order)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=1500)
@given(
    seed=st.integers(0, 10**6), length=st.integers(1, 12), size=st.integers(1, 12), order=orders()
)
def test_gradients_of_many_random_programs_are_those_of_autograd(seed, length, size, order):
    check(seed, length, size, order)


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])
def test_every_order_of_deliveries_gives_the_same_gradients(seed):
    check(seed, 5, 3, *ORDERS, tell=lambda told: None)

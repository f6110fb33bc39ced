"""Mixing matrices: which keep the mean, and which are refused."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.sharing.mixing import (
    censored,
    check_column_stochastic,
    check_doubly_stochastic,
    least_pull,
    metropolis,
    shares,
    slowest,
    uniform,
)
from geartrain.sharing.topology import Exponential, Full, Ring, Torus, among, topology_of

STAR = [[1, 2, 3], [0], [0], [0]]


def test_metropolis_weights_on_a_ring_are_a_third():
    matrix = torch.tensor(metropolis(Ring().neighbours(4)))
    torch.testing.assert_close(matrix[0], torch.tensor([1 / 3, 1 / 3, 0, 1 / 3]))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(2, 9), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_metropolis_weights_are_doubly_stochastic_on_any_undirected_graph(n, extra):
    edges = [(k, k + 1) for k in range(n - 1)]
    edges += [(a % n, b % n) for a, b in extra if a % n != b % n]
    neighbours = topology_of(edges).neighbours(n)
    matrix = metropolis(neighbours)
    check_doubly_stochastic(matrix, neighbours)
    values = torch.linalg.eigvalsh(torch.tensor(matrix, dtype=torch.float64))
    assert values[:-1].abs().max() < 1 - 1e-6  # so its powers tend to the mean


@pytest.mark.parametrize("topology", [Ring(), Torus(), Full(), Exponential()])
def test_uniform_weights_are_doubly_stochastic_on_regular_graphs(topology):
    neighbours = topology.neighbours(9)
    check_doubly_stochastic(uniform(neighbours), neighbours)


def test_shares_are_column_stochastic_on_any_graph():
    check_column_stochastic(shares(STAR), STAR)
    with pytest.raises(ValueError, match=r"row 0 sums to 1\.75"):
        check_doubly_stochastic(shares(STAR), STAR)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(
    "graph",
    [nx.cycle_graph(4), nx.cycle_graph(5), nx.grid_2d_graph(4, 4, periodic=True), nx.path_graph(3),
     nx.complete_graph(5), nx.DiGraph([(0, 1), (1, 2), (2, 0)])],
)  # fmt: skip
def test_the_least_pull_is_the_least_eigenvalue_of_i_plus_a(graph, share):
    graph = nx.convert_node_labels_to_integers(graph)
    adjacency = torch.tensor(nx.to_numpy_array(graph))
    found = least_pull([sorted(graph[k]) for k in range(len(graph))], share)
    assert found == pytest.approx(1 + share * float(torch.linalg.eigvals(adjacency).real.min()))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(2, 9), st.floats(0, 1), st.integers(0, 1000))
def test_the_least_pull_of_raw_gradients_is_below_zero_unless_the_graph_is_full(n, share, seed):
    graph = nx.gnp_random_graph(n, share, seed)
    nx.add_path(graph, range(n))
    neighbours = [sorted(graph[k]) for k in range(n)]
    found = least_pull(neighbours)
    if graph.number_of_edges() == n * (n - 1) // 2:
        assert found == pytest.approx(0, abs=1e-9)
    else:
        assert found < 1 - 2**0.5 + 1e-9
    assert least_pull(neighbours, 1 / (1 + max(map(len, neighbours)))) > 0


def test_the_slowest_of_a_matrix_is_what_a_round_leaves():
    assert slowest(metropolis(Ring().neighbours(3))) == pytest.approx(0, abs=1e-9)
    assert slowest([[0.75, 0.25], [0.25, 0.75]]) == pytest.approx(0.5)
    assert slowest([[0.0, 1.0], [1.0, 0.0]]) == pytest.approx(1)
    assert slowest([[1.0]]) == 0


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        ([[1.0]], r"1 rows of \[1\] entries, where 2 rows of 2 were expected"),
        ([[0.5, 0.5], [0.4, 0.6]], "column 0 sums to 0.9, where 1 was expected"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"entry \[0\]\[1\] is -0.5; give 0 or more"),
        ([[float("nan"), 1.0], [1.0, 0.0]], r"entry \[0\]\[0\] is nan"),
        ([[0.9, 0.2], [0.1, 0.8]], "row 0 sums to 1.1, where 1 was expected"),
    ],
)
def test_matrices_that_are_not_doubly_stochastic_are_refused(matrix, reason):
    with pytest.raises(ValueError, match=reason):
        check_doubly_stochastic(matrix, [[1], [0]])


def test_a_matrix_that_is_not_column_stochastic_is_refused():
    with pytest.raises(ValueError, match=r"column 0 sums to 0\.8.*divide the column by its sum"):
        check_column_stochastic([[0.5, 0.5], [0.3, 0.5]], [[1], [0]])


def test_an_entry_without_an_edge_is_refused():
    with pytest.raises(ValueError, match=r"copy 2 does not send to copy 0.*edge \(2, 0\)"):
        check_doubly_stochastic([[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]], [[1], [0, 2], [1]])


def test_metropolis_weights_of_a_directed_graph_are_refused():
    with pytest.raises(ValueError, match="copy 0 sends to copy 1, which does not send back"):
        metropolis([[1], [2], [0]])


@given(seed=st.integers(0, 99), n=st.integers(2, 7), gone=st.sets(st.integers(0, 6), max_size=5))
def test_a_matrix_among_those_who_are_there_is_stochastic_as_the_whole_is(seed, n, gone):
    """Of any doubly stochastic matrix, symmetric or not: a mean of permutations."""
    drawn = torch.Generator().manual_seed(seed)
    eye = torch.eye(n, dtype=torch.float64)
    cycle = eye[[*range(1, n), 0]]
    mixed = 0.3 * eye + 0.4 * cycle + 0.3 * eye[torch.randperm(n, generator=drawn)]
    there = [k for k in range(n) if k not in gone]
    found = torch.tensor(censored(mixed.tolist(), there), dtype=torch.float64)
    ones = torch.ones(n, dtype=torch.float64)
    assert float(found.min()) >= 0
    torch.testing.assert_close(found.sum(0), ones)
    torch.testing.assert_close(found.sum(1), ones)
    if there:
        assert all(found[k, k] == 1 for k in range(n) if k not in there)
        inner = found[there][:, there]
        assert slowest(inner.tolist()) < 1 - 1e-9  # they still come together
        links = among([[i for i in range(n) if i != j and mixed[i, j]] for j in range(n)], there)
        check_doubly_stochastic(found.tolist(), links)

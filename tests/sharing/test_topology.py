"""Who is whose neighbour, and which graphs are refused."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.sharing.topology import (
    NAMED,
    Edges,
    Torus,
    among,
    check_connected,
    checked,
    levels_of,
    senders_of,
    topology_of,
)


def test_a_ring_joins_each_to_the_two_beside_it():
    assert topology_of("ring").neighbours(5) == [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]
    assert topology_of("ring").neighbours(2) == [[1], [0]]
    assert topology_of("ring").neighbours(1) == [[]]


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 4), (2, 5), (1, 6), (2, 2)])
def test_a_torus_is_that_of_networkx(rows, columns):
    grid = nx.grid_2d_graph(rows, columns, periodic=True)
    want = [
        sorted({r * columns + c for r, c in grid.neighbors(divmod(k, columns))} - {k})
        for k in range(rows * columns)
    ]
    assert Torus(rows, columns).neighbours(rows * columns) == want


@pytest.mark.parametrize(
    ("copies", "grid"), [(2, (1, 2)), (4, (2, 2)), (6, (2, 3)), (16, (4, 4)), (64, (8, 8))]
)
def test_a_torus_finds_the_grid_closest_to_a_square(copies, grid):
    assert Torus().grid(copies) == grid


def test_one_side_of_a_torus_follows_from_the_other():
    assert Torus(rows=2).grid(10) == (2, 5)
    assert Torus(columns=2).grid(10) == (5, 2)
    assert Torus(rows=3).grid(3) == (3, 1)
    assert Torus(columns=3).grid(3) == (1, 3)


def test_the_exponential_graph_doubles_its_hops():
    assert topology_of("exponential").neighbours(6)[3] == [4, 5, 1]
    assert topology_of("exponential").neighbours(8)[0] == [1, 2, 4]
    assert topology_of("exponential").neighbours(1) == [[]]


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(sorted(NAMED)), st.integers(1, 40))
def test_named_topologies_are_connected_and_no_copy_is_its_own_neighbour(name, copies):
    if name == "torus" and copies > 3 and all(copies % d for d in range(2, copies)):
        return  # refused; see below
    found = checked(NAMED[name].neighbours(copies))
    check_connected(found)
    assert len(found) == copies


@pytest.mark.parametrize("copies", [4, 16, 64])
def test_neighbours_on_a_torus_do_not_grow_with_the_copies(copies):
    assert max(len(mine) for mine in Torus().neighbours(copies)) <= 4


def test_edges_and_graphs_are_taken_as_they_are():
    path = [(0, 1), (1, 2), (2, 1)]
    assert topology_of(path).neighbours(3) == [[1], [0, 2], [1]]
    assert topology_of(nx.path_graph(3)).neighbours(3) == [[1], [0, 2], [1]]
    circle = nx.DiGraph([(0, 1), (1, 2), (2, 0)])
    assert topology_of(circle).neighbours(3) == [[1], [2], [0]]
    assert senders_of(topology_of(circle).neighbours(3)) == [[2], [0], [1]]


def test_levels_are_two_sides_where_no_cycle_is_odd():
    assert levels_of(topology_of("ring").neighbours(4)) == [0, 1, 0, 1]
    assert set(levels_of(topology_of("torus").neighbours(16))) == {0, 1}
    assert levels_of(topology_of([(0, 1), (0, 2), (0, 3)]).neighbours(4)) == [1, 0, 0, 0]
    assert levels_of([[]]) == [0]


@pytest.mark.parametrize(
    ("topology", "n", "most"), [("ring", 5, 3), (Torus(3, 3), 9, 3), ("full", 6, 6)]
)
def test_odd_cycles_take_few_more_levels(topology, n, most):
    assert len(set(levels_of(topology_of(topology).neighbours(n)))) == most


@settings(deadline=None, derandomize=True)
@given(st.integers(2, 12), st.floats(0, 1), st.integers(0, 100))
def test_no_two_neighbours_have_the_same_level_and_most_have_the_lowest(n, share, seed):
    graph = nx.gnp_random_graph(n, share, seed)
    found = levels_of([sorted(graph[k]) for k in range(n)])
    assert all(found[a] != found[b] for a, b in graph.edges)
    counts = [found.count(level) for level in range(max(found) + 1)]
    assert counts == sorted(counts, reverse=True) and counts[-1] > 0
    if nx.is_bipartite(graph):
        assert len(counts) <= 2
    assert len(counts) <= 1 + max(dict(graph.degree).values())


class Wrong:
    """A topology of a user's own."""

    def __init__(self, *rows):
        self.rows = rows

    def neighbours(self, copies):
        return self.rows


@pytest.mark.parametrize(
    ("given", "copies", "reason"),
    [
        ([(0, 1), (2, 3)], 4, "disconnected; copy 2 is not reached from copy 0"),
        (nx.DiGraph([(0, 1), (1, 2)]), 3, "disconnected; copy 1 does not reach copy 0"),
        (nx.path_graph(3), 4, "disconnected; copy 3"),
        ([(0, 5)], 3, r"edge \(0, 5\): there are 3 copies"),
        ([(0, 3)], 3, r"edge \(0, 3\): there are 3 copies, numbered 0 to 2"),
        ([(3, 0)], 3, r"edge \(3, 0\): there are 3 copies"),
        ([(0, -1)], 3, r"edge \(0, -1\): there are 3 copies"),
        ([(-1, 0)], 3, r"edge \(-1, 0\): there are 3 copies"),
        ([(0, 0), (0, 1)], 2, r"neighbours of copy 0: \[0, 1\] has \[0\]"),
        ("torus", 7, "7 copies do not fit; 7 is prime"),
        (Torus(3, 3), 8, "8 copies do not fit; 3 rows and 3 columns take 9"),
        (Torus(rows=3), 8, "8 copies do not fit"),
        (Wrong([1], [0], [0]), 2, "has 3 entries: give one a copy"),
        (Wrong([1], [2]), 2, r"neighbours of copy 1: \[2\] has \[2\]"),
        *(
            (kind, 0, "0 copies were asked for")
            for kind in ("ring", "torus", "full", "exponential")
        ),
    ],
)
def test_graphs_that_cannot_serve_are_refused_with_the_reason(given, copies, reason):
    with pytest.raises(ValueError, match=reason):
        topology_of(given).neighbours(copies)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("star", "give one of exponential, full, ring, torus"),
        (3, "topology=3: give one of"),
        ([(0, 1, 2)], r"edge \(0, 1, 2\): give pairs"),
        (nx.Graph([("a", "b")]), "convert_node_labels_to_integers"),
    ],
)
def test_what_is_no_topology_is_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        topology_of(given)


def test_a_torus_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"Torus\(rows=0\): give 1 or more"):
        Torus(rows=0)


def test_edges_may_have_one_direction():
    assert Edges(((0, 1), (1, 0)), directed=True).neighbours(2) == [[1], [0]]


@given(
    n=st.integers(2, 9),
    kind=st.sampled_from(["ring", "full", "exponential"]),
    gone=st.sets(st.integers(0, 8)),
)
def test_those_who_are_left_reach_each_other_and_whoever_they_reached_by_way_of_absent_ones(
    n, kind, gone
):
    neighbours = topology_of(kind).neighbours(n)
    there = [k for k in range(n) if k not in gone]
    found = among(neighbours, there)
    assert all(not found[k] for k in range(n) if k in gone)
    place = {k: i for i, k in enumerate(there)}
    links = [[place[j] for j in found[k]] for k in there]
    if there:
        check_connected(checked(links))
    if kind == "ring" and len(there) > 2:
        assert all(len(mine) == 2 for mine in links)
    if not gone & set(range(n)):
        assert [set(x) for x in found] == [set(x) for x in neighbours]

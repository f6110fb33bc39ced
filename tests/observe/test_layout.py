import itertools
import random

import pytest

from geartrain.observe.layout import layered

BOX = (60.0, 30.0)


def overlap(a, b, size):
    return abs(a[0] - b[0]) < size[0] - 1e-6 and abs(a[1] - b[1]) < size[1] - 1e-6


def test_a_chain_leads_straight_down():
    found = layered([BOX] * 4, [(0, 1), (1, 2), (2, 3)])
    xs, ys = zip(*found.centres, strict=True)
    assert len(set(xs)) == 1 and list(ys) == sorted(set(ys))
    assert not any(route.back for route in found.routes)
    for (a, b), route in zip([(0, 1), (1, 2), (2, 3)], found.routes, strict=True):
        assert route.points[0] == (xs[a], ys[a] + 15) and route.points[-1] == (xs[b], ys[b] - 15)


def test_the_edge_that_closes_a_loop_leads_back_up_and_past_what_is_between():
    edges = [(0, 1), (1, 2), (2, 3), (3, 1)]
    found = layered([BOX] * 4, edges)
    assert [route.back for route in found.routes] == [False, False, False, True]
    points = found.routes[3].points
    assert points[0][1] > points[-1][1]  # up
    (low, high) = points[1:-1]  # straight past box 2
    x, y = found.centres[2]
    assert (low[1], high[1]) == (y + 15, y - 15)
    assert low[0] == high[0] and abs(low[0] - x) > BOX[0] / 2


def test_an_edge_over_several_layers_touches_no_box_that_it_passes():
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    found = layered([BOX] * 4, edges)
    long = found.routes[3].points
    assert len(long) == 6
    for x, y in long[1:-1]:
        assert all(abs(x - a) > BOX[0] / 2 for a, b in found.centres if abs(b - y) <= 15)


def test_two_edges_between_the_same_boxes_have_places_of_their_own():
    found = layered([BOX] * 2, [(0, 1), (0, 1)])
    assert found.routes[0].points != found.routes[1].points


def test_a_box_that_leads_to_itself_has_a_loop_beside_it():
    (route,) = layered([BOX], [(0, 0)]).routes
    assert route.loop and route.back
    assert route.points[0][0] == route.points[2][0] == 60.0 < route.points[1][0]


def test_a_source_stands_just_above_its_first_reader():
    found = layered([BOX] * 5, [(0, 1), (1, 2), (2, 3), (4, 3)])
    assert found.centres[4][1] == found.centres[2][1]


def test_crossings_that_need_not_be_are_avoided():
    # 0 and 1 lead to 3 and 2: as they are numbered, both edges would cross.
    found = layered([BOX] * 4, [(0, 3), (1, 2)])
    left = found.centres[0][0] < found.centres[1][0]
    assert (found.centres[3][0] < found.centres[2][0]) is left


@pytest.mark.parametrize("seed", range(12))
def test_boxes_of_a_random_graph_do_not_overlap_and_lie_inside(seed):
    draw = random.Random(seed)
    n = 60
    sizes = [(draw.uniform(50, 200), 30.0) for _ in range(n)]
    edges = [(draw.randrange(n), draw.randrange(n)) for _ in range(90)]
    found = layered(sizes, edges)
    by_layer = itertools.groupby(sorted(range(n), key=lambda v: found.centres[v][::-1]),
                                 key=lambda v: found.centres[v][1])  # fmt: skip
    for _, row in by_layer:
        for a, b in itertools.pairwise(row):
            apart = found.centres[b][0] - found.centres[a][0]
            assert apart >= (sizes[a][0] + sizes[b][0]) / 2
    for (x, y), (width, height) in zip(found.centres, sizes, strict=True):
        assert width / 2 - 1e-6 <= x <= found.width - width / 2 + 1e-6
        assert height / 2 - 1e-6 <= y <= found.height - height / 2 + 1e-6
    up = [e for e, route in zip(edges, found.routes, strict=True) if not route.back]
    for source, target in up:
        assert found.centres[source][1] < found.centres[target][1]


def test_the_same_graph_is_laid_out_the_same_way_again():
    edges = [(k, (k * 7 + 3) % 40) for k in range(40)]
    assert layered([BOX] * 40, edges) == layered([BOX] * 40, edges)


def test_nothing_has_no_size():
    found = layered([], [])
    assert (found.width, found.height, list(found.centres)) == (0.0, 0.0, [])


def test_a_long_chain_is_no_depth_of_calls():
    n = 2000
    assert len(layered([BOX] * n, [(k, k + 1) for k in range(n - 1)]).centres) == n

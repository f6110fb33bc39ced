import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.observe.charts import (
    Bars,
    ChartLine,
    Span,
    _ticks,
    bar_chart,
    lane_chart,
    line_chart,
)


def parse(figure):
    return ET.fromstring(figure)


def test_a_curve_goes_through_its_points_in_proportion():
    root = parse(
        line_chart("loss", "epochs", [ChartLine("train", [(1, 4.0), (2, 2.0), (3, 0.0)], 0)])
    )
    (line,) = root.iter("polyline")
    (x1, y1), (x2, y2), (x3, y3) = (
        tuple(map(float, p.split(","))) for p in line.get("points").split()
    )
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and x2 > x1
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.2) and y2 > y1  # down the page is less


def test_points_that_are_not_finite_are_left_out_and_none_means_no_chart():
    figure = line_chart("a", "b", [ChartLine("c", [(1, math.nan), (2, 1.0), (3, math.inf)], 0)])
    assert len(parse(figure).findall(".//circle")) == 1
    assert line_chart("a", "b", [ChartLine("c", [(1, math.nan)], 0)]) == ""


def test_names_are_escaped_everywhere():
    nasty = '<b>&"'
    figures = [
        line_chart(nasty, nasty, [ChartLine(nasty, [(0, 1), (1, 2)], 0)]),
        bar_chart(nasty, nasty, [nasty], [Bars(nasty, [1], 0), Bars(nasty, [2], 1)]),
        lane_chart(nasty, [nasty], [Span(0, 0, 1, 0, nasty)], (0, 1), nasty, [nasty]),
    ]
    for figure in figures:
        root = parse(figure)
        assert not list(root.iter("b"))
        assert any(node.text == nasty for node in root.iter("text"))


def test_bars_stack_and_keep_their_proportions():
    root = parse(bar_chart("t", "x", ["1", "2"], [Bars("a", [1, 3], 0), Bars("b", [1, 0], 1)]))
    bars = [node for node in root.iter("rect") if node.find("title") is not None]
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.3)
    assert heights[3] == 0
    below, above = bars[0], bars[2]
    top_of_above = float(above.get("y")) + float(above.get("height"))
    assert top_of_above == pytest.approx(float(below.get("y")), abs=0.2)


def test_bars_of_nothing_draw_no_chart():
    assert bar_chart("t", "x", ["1"], [Bars("a", [0], 0)]) == ""


def test_spans_lie_on_their_lane_and_stay_inside():
    spans = [Span(0, -1, 0.5, 0, "early"), Span(1, 0.5, 9, 1, "late", is_pale=True)]
    root = parse(lane_chart("t", ["w0", "w1"], spans, (0, 1), " s"))
    first, second = root.iter("rect")
    left, right = float(first.get("x")), float(second.get("x")) + float(second.get("width"))
    assert float(second.get("x")) == pytest.approx((left + right) / 2, abs=0.1)
    assert float(second.get("y")) > float(first.get("y"))
    assert second.get("class") == "c1 pale" and first.get("class") == "c0"


def test_beyond_the_last_colour_all_share_one():
    spans = [Span(0, i, i + 1, i, "") for i in range(12)]
    classes = re.findall(r'class="(c\w)"', lane_chart("t", ["w"], spans, (0, 12), ""))
    assert classes == [*(f"c{i}" for i in range(10)), "cx", "cx"]


@settings(deadline=None, derandomize=True)
@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6))
def test_ticks_are_few_and_reach_the_top(low, span):
    ticks = _ticks(low, low + span)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] >= low - 1e-6 * span and ticks[-1] >= low + span - 1e-6 * span

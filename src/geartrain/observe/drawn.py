"""A graph drawn as SVG: operators in layers, a colour for each worker, loops as dashed ways back.

Outline, who fired what ─► boxes ─► layout.py ─► SVG in a page
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Final

from geartrain.graph.drawing import Outline, OutlineNode
from geartrain.observe.charts import colour_class
from geartrain.observe.layout import DrawnEdge, Point, layered

MOST_DRAWN: Final = 300
"""Operators; more of them are no picture."""
_LETTER: Final = 7.0  # width, of names; other lines are smaller
_SMALL: Final = 6.0
_LINE: Final = 15.0
_MOST_LETTERS: Final = 34
_MARGIN: Final = 8.0
_PAGE: Final = 1000.0  # what is wider is scrolled


def drawn_graph(outline: Outline, workers: Mapping[str, Collection[int]]) -> str:
    """HTML; nothing for an outline without operators, or with too many.

    Args:
        outline: Edges that name no operator of it are left out.
        workers: Node name to the workers that it is on.
    """
    operators = outline.operators
    n = len(operators)
    if not 0 < n <= MOST_DRAWN:
        return ""
    homes = [sorted({w for name in o.nodes for w in workers.get(name, ())}) for o in operators]
    lines = [_lines(o, home) for o, home in zip(operators, homes, strict=True)]
    sizes = [_size(some) for some in lines]
    edges = [e for e in outline.edges if 0 <= e.source < n and 0 <= e.target < n]
    layout = layered(sizes, [(e.source, e.target) for e in edges])
    body = [_edge(route) for route in layout.routes]
    for k, centre in enumerate(layout.centres):
        body.append(_box(operators[k], homes[k], lines[k], centre, sizes[k]))
    body += [_label(route, e.label) for route, e in zip(layout.routes, edges, strict=True)]
    loops = sum(route.back for route in layout.routes)
    told = f"{n} operators, {len(edges)} edges, {loops} of them back (dashed)"
    width, height = layout.width + 2 * _MARGIN, layout.height + 2 * _MARGIN
    frame = f"{-_MARGIN:.0f} {-_MARGIN:.0f} {width:.0f} {height:.0f}"
    style = f"width:{width:.0f}px;max-width:{'none' if width > _PAGE else '100%'}"
    return (
        f"<figure class=wide><figcaption>The graph: {told}</figcaption>"
        f"{_key(homes)}<div class=scroll>"
        f'<svg class="graph" role="img" aria-label="{escape(_told(operators, homes, told))}" '
        f'viewBox="{frame}" style="{style}">{"".join(body)}</svg></div></figure>'
    )


def _told(operators: Sequence[OutlineNode], homes: Sequence[Sequence[int]], counts: str) -> str:
    """The picture in words; the printed graph beside it has the edges."""
    placed = ", ".join(
        f"{o.name} on {_named(home)}" for o, home in zip(operators, homes, strict=True) if home
    )
    return f"The graph: {counts}. {placed or 'Nobody has fired.'}"


def _named(home: Sequence[int]) -> str:
    return f"worker{'s' * (len(home) > 1)} {', '.join(map(str, home))}"


def _key(homes: Sequence[Sequence[int]]) -> str:
    workers = sorted({w for home in homes for w in home})
    if not workers:
        return ""
    keys = "".join(
        f'<span><svg class=key viewBox="0 0 10 10"><rect class="{colour_class(w)}" width="10" '
        f'height="10"/></svg>worker {w}</span>'
        for w in workers
    )
    return f"<p class=legend>{keys}</p>"


def _lines(operator: OutlineNode, home: Sequence[int]) -> list[str]:
    """What stands in a box: name, what it does, whose weights and where."""
    does = operator.kind if operator.kind != "through" else ""
    if operator.detail:
        does = f"{does} {operator.detail}".strip()
    found = [operator.name]
    if does and does != operator.name:
        found.append(does)
    where = [f"part {operator.part}"] if operator.part not in ("", operator.name) else []
    if operator.part == operator.name:
        where.append("a part")
    if home:
        where.append(_named(home))
    if where:
        found.append(", ".join(where))
    return [_short(line) for line in found]


def _short(line: str) -> str:
    return line if len(line) <= _MOST_LETTERS else line[: _MOST_LETTERS - 1] + "…"


def _size(lines: Sequence[str]) -> Point:
    letters = [_LETTER * len(lines[0]), *(_SMALL * len(line) for line in lines[1:])]
    return max(56.0, max(letters) + 24.0), 12.0 + _LINE * len(lines)


def _box(
    operator: OutlineNode,
    home: Sequence[int],
    lines: Sequence[str],
    centre: Point,
    size: Point,
) -> str:
    (x, y), (width, height) = centre, size
    left, top = x - width / 2, y - height / 2
    look = f"box {colour_class(home[0])}" if len(home) == 1 else "box"
    radius = 5 if operator.nodes or operator.part else height / 2
    frame = (
        f'<rect class="{look}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="{radius:.1f}"/>'
    )
    strips = [
        f'<rect class="{colour_class(w)}" x="{left:.1f}" '
        f'y="{top + k * height / len(home):.1f}" width="6" height="{height / len(home):.1f}"/>'
        for k, w in enumerate(home)
    ]
    texts = [
        f'<text class="{"name" if i == 0 else "does"}" x="{x:.1f}" '
        f'y="{top + 6 + _LINE * (i + 0.74):.1f}" text-anchor="middle">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    tip = f"{operator.name}, {operator.kind} {operator.detail}".strip()
    tip += f", part {operator.part}" if operator.part else ""
    tip += f", {_named(home)}" if home else ""
    return f"<g><title>{escape(tip)}</title>{frame}{''.join(strips)}{''.join(texts)}</g>"


def _edge(route: DrawnEdge) -> str:
    points = route.points
    x, y = points[-1]
    if route.loop:
        (_, low), (far, _), _ = points
        way = f"M{x:.1f},{low:.1f} C{far:.1f},{low:.1f} {far:.1f},{y:.1f} {x:.1f},{y:.1f}"
        tip = f"M{x:.1f},{y:.1f} l7,-3.5 v7 z"
    else:
        way = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
        for (x0, y0), (x1, y1) in pairwise(points):
            middle = (y0 + y1) / 2
            way += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
        tip = f"M{x:.1f},{y:.1f} l-3.5,{7 if route.back else -7} h7 z"
    back = " back" if route.back else ""
    return f'<path class="edge{back}" d="{way}"/><path class="tip{back}" d="{tip}"/>'


def _label(route: DrawnEdge, label: str) -> str:
    if not label:
        return ""
    (x0, y0), (x1, y1) = route.points[:2]
    x, y = 0.65 * x0 + 0.35 * x1, 0.65 * y0 + 0.35 * y1
    text = escape(_short(label))
    return f'<text class="port" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{text}</text>'

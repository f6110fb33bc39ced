"""A figure of a topology: copies as dots, edges between them, arrows where letters go one way.

    ring, exponential, edges: on a circle        torus: rows and columns, its closing edges bent

Needs matplotlib, the extra ``plot``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from geartrain.observe.curves import require_matplotlib
from geartrain.sharing.topology import Torus, topology_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Place: TypeAlias = tuple[float, float]


def places_of(topology: Any, copies: int) -> list[Place]:
    """Where each copy is drawn.

    Args:
        topology: As for ``Neighbours``.
        copies: How many.

    Raises:
        ValueError: There is no such topology of so many copies.
    """
    made = topology_of(topology)
    if isinstance(made, Torus) and (grid := made.grid(copies))[0] > 1:
        return [(float(k % grid[1]), -float(k // grid[1])) for k in range(copies)]
    turns = [math.tau * k / copies for k in range(copies)]
    return [(math.sin(turn), math.cos(turn)) for turn in turns]


def draw_topology(path: Path, topology: Any, copies: int, title: str | None = None) -> None:
    """Write the figure.

    Args:
        path: Where; the suffix says in which format.
        topology: As for ``Neighbours``.
        copies: How many.
        title: Above it; None: how many copies.

    Raises:
        GeartrainError: matplotlib is not installed.
        ValueError: There is no such topology of so many copies.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    neighbours = topology_of(topology).neighbours(copies)
    places = places_of(topology, copies)
    figure = Figure(figsize=(5, 5), dpi=100, layout="constrained")
    axes = figure.subplots()
    for k, mine in enumerate(neighbours):
        for j in mine:
            mutual = k in neighbours[j]
            if k < j or not mutual:
                _edge(axes, places[k], places[j], mutual)
    x, y = zip(*places, strict=True)
    axes.scatter(x, y, s=320, color="#0072B2", zorder=3)
    for k, place in enumerate(places):
        axes.annotate(str(k), place, color="white", ha="center", va="center", fontsize=9, zorder=4)
    axes.set_title(title or f"{copies} copies", fontsize=12)
    axes.set_aspect("equal")
    axes.margins(0.15)
    axes.set_axis_off()
    figure.savefig(path)


def _edge(axes: Axes, start: Place, end: Place, mutual: bool) -> None:
    """Straight to a dot near by; bent on a grid, where it would run through others."""
    bent = 0.25 if _on_one_line(start, end) else 0.0
    axes.annotate(
        "", end, start, zorder=1,
        arrowprops={
            "arrowstyle": "-" if mutual else "-|>", "color": "0.55", "shrinkA": 9, "shrinkB": 9,
            "connectionstyle": f"arc3,rad={bent}",
        },
    )  # fmt: skip


def _on_one_line(start: Sequence[float], end: Sequence[float]) -> bool:
    """Whether both are dots of a grid, further apart than one step."""
    whole = all(v == round(v) for v in (*start, *end))
    return whole and math.dist(start, end) > 1 and (start[0] == end[0] or start[1] == end[1])

"""Places for the boxes of a directed graph, in layers from top to bottom; loops go back up.

    boxes, edges ─► back edges turned round ─► layers ─► places along long edges ─► order ─► x, y

An edge that closes a loop is laid out as its reverse and drawn the right way, so that it runs
beside the boxes that it passes as every long edge does.

Source: Sugiyama, Tagawa, Toda 1981, "Methods for visual understanding of hierarchical system
structures", IEEE Transactions SMC 11(2); positions by isotonic regression, as layers keep their
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias, final

Point: TypeAlias = tuple[float, float]

_SWEEPS: Final = 12
_GAP: Final = 26.0  # between neighbours of a layer
_THREAD: Final = 8.0  # room of a long edge in a layer that it passes
_BETWEEN: Final = 46.0  # layers


@final
@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """How an edge runs: from the border of its source to that of its target.

    Args:
        points: At least two; the line is vertical in each of them, but in a loop.
        back: Whether it closes a loop.
        loop: Whether it leads from a box to itself: out to the right, and back above.
    """

    points: tuple[Point, ...]
    back: bool
    loop: bool = False


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is.

    Args:
        centres: Of the boxes, in their order.
        routes: Of the edges, in theirs.
        width, height: Of all.
    """

    centres: Sequence[Point]
    routes: Sequence[DrawnEdge]
    width: float
    height: float


def layered(sizes: Sequence[Point], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay a graph out.

    Args:
        sizes: Width and height of the boxes.
        edges: From box to box; there may be several between two, and from a box to itself.
    """
    if not sizes:
        return Layout((), (), 0.0, 0.0)
    back = _closing(len(sizes), edges)
    down = [(t, s) if k in back else (s, t) for k, (s, t) in enumerate(edges)]
    layer = _layers(len(sizes), [edge for edge in down if edge[0] != edge[1]])
    net = _Net(sizes, layer)
    chains = [net.chain(s, t) for s, t in down]
    net.order()
    net.place()
    return net.finish(edges, chains, back)


def _closing(n: int, edges: Sequence[tuple[int, int]]) -> set[int]:
    """Edges that lead back to where a walk along the others is coming from."""
    leaving: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    entered = [False] * n
    for k, (source, target) in enumerate(edges):
        if source != target:
            leaving[source].append((k, target))
            entered[target] = True
    found: set[int] = set()
    state = [0] * n  # 1: on the way, 2: done
    for start in sorted(range(n), key=lambda v: (entered[v], v)):
        if state[start]:
            continue
        state[start] = 1
        way = [(start, iter(leaving[start]))]
        while way:
            here, left = way[-1]
            for k, target in left:
                if state[target] == 1:
                    found.add(k)
                elif state[target] == 0:
                    state[target] = 1
                    way.append((target, iter(leaving[target])))
                    break
            else:
                state[here] = 2
                way.pop()
    return found


def _layers(n: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Each box below all that lead to it; one that nothing leads to just above its first reader."""
    after: list[list[int]] = [[] for _ in range(n)]
    missing = [0] * n
    for source, target in edges:
        after[source].append(target)
        missing[target] += 1
    layer = [0] * n
    first = [v for v in range(n) if not missing[v]]
    ready = list(first)
    while ready:
        v = ready.pop()
        for target in after[v]:
            layer[target] = max(layer[target], layer[v] + 1)
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    for v in first:
        if after[v]:
            layer[v] = min(layer[target] for target in after[v]) - 1
    return layer


@final
@dataclass(slots=True)
class _Net:
    """Boxes, and a thread in each layer that an edge passes, by number.

    Args:
        sizes: Of the boxes, which come first.
        layer: Of each.
    """

    sizes: Sequence[Point]
    layer: list[int]
    widths: list[float] = field(default_factory=list)
    above: list[list[int]] = field(default_factory=list)
    below: list[list[int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    x: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layer = list(self.layer)
        self.widths = [w for w, _ in self.sizes]
        self.above = [[] for _ in self.sizes]
        self.below = [[] for _ in self.sizes]

    def chain(self, source: int, target: int) -> list[int]:
        """The numbers along an edge that leads down."""
        found = [source]
        for between in range(self.layer[source] + 1, self.layer[target]):
            found.append(len(self.layer))
            self.layer.append(between)
            self.widths.append(_THREAD)
            self.above.append([])
            self.below.append([])
        if source != target:
            found.append(target)
        for a, b in pairwise(found):
            self.below[a].append(b)
            self.above[b].append(a)
        return found

    def order(self) -> None:
        """Put each layer in an order that crosses few edges."""
        self.rows = [[] for _ in range(max(self.layer) + 1)]
        for v in self._walk():
            self.rows[self.layer[v]].append(v)
        best, fewest = [list(row) for row in self.rows], self._crossings()
        for sweep in range(_SWEEPS):
            if not fewest:
                break
            downwards = sweep % 2 == 0
            near = self.above if downwards else self.below
            for row in self.rows if downwards else self.rows[::-1]:
                place = self._places()
                row.sort(key=lambda v: _mean([place[u] for u in near[v]], place[v]))
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(row) for row in self.rows], crossings
        self.rows = best

    def _walk(self) -> list[int]:
        """All numbers, neighbours close to one another."""
        found: dict[int, None] = {}
        for start in sorted(range(len(self.layer)), key=lambda v: (self.layer[v], v)):
            left = [start]
            while left:
                v = left.pop()
                if v not in found:
                    found[v] = None
                    left += reversed(self.below[v])
        return list(found)

    def _places(self) -> dict[int, float]:
        """Where each stands in its layer, from 0 to 1."""
        return {v: (k + 0.5) / len(row) for row in self.rows for k, v in enumerate(row)}

    def _crossings(self) -> int:
        count = 0
        for row in self.rows[:-1]:
            at = {v: k for k, v in enumerate(self.rows[self.layer[row[0]] + 1])} if row else {}
            ends = [sorted(at[u] for u in self.below[v]) for v in row]
            seen: list[int] = []
            for some in ends:
                count += sum(1 for a in some for b in seen if b > a)
                seen += some
        return count

    def place(self) -> None:
        """Give each its x: near the mean of its neighbours, and apart from those beside it."""
        self.x = [0.0] * len(self.layer)
        for row in self.rows:
            for v, at in zip(row, self._apart(row), strict=True):
                self.x[v] = at
        for sweep in range(_SWEEPS):
            near = self.above if sweep % 2 == 0 else self.below
            for row in self.rows if sweep % 2 == 0 else self.rows[::-1]:
                wanted = [_mean([self.x[u] for u in near[v]], self.x[v]) for v in row]
                for v, at in zip(row, self._nearest(row, wanted), strict=True):
                    self.x[v] = at

    def _apart(self, row: Sequence[int]) -> list[float]:
        """Centres of a layer, as close as they may be."""
        found, at = [], 0.0
        for v in row:
            found.append(at + self.widths[v] / 2)
            at += self.widths[v] + _GAP
        return found

    def _nearest(self, row: Sequence[int], wanted: Sequence[float]) -> list[float]:
        """The closest to what is wanted, in least squares, that keeps order and distance."""
        least = self._apart(row)
        blocks: list[tuple[float, int]] = []  # mean, how many
        for want, offset in zip(wanted, least, strict=True):
            mean, n = want - offset, 1
            while blocks and blocks[-1][0] > mean:
                before, m = blocks.pop()
                mean, n = (mean * n + before * m) / (n + m), n + m
            blocks.append((mean, n))
        shifts = [mean for mean, n in blocks for _ in range(n)]
        return [offset + shift for offset, shift in zip(least, shifts, strict=True)]

    def finish(
        self, edges: Sequence[tuple[int, int]], chains: Sequence[Sequence[int]], back: set[int]
    ) -> Layout:
        """Points of everything, from the left upper corner."""
        n = len(self.sizes)
        heights = [max((self.sizes[v][1] for v in row if v < n), default=0.0) for row in self.rows]
        middle, at = [], 0.0
        for height in heights:
            middle.append(at + height / 2)
            at += height + _BETWEEN
        left = min(self.x[v] - self.widths[v] / 2 for v in range(len(self.x)))
        self.x = [x - left for x in self.x]
        ports = self._ports(chains)
        routes = []
        for k, chain in enumerate(chains):
            if edges[k][0] == edges[k][1]:
                routes.append(DrawnEdge(self._around(chain[0], middle), back=True, loop=True))
                continue
            points = []
            for i, v in enumerate(chain):
                y = middle[self.layer[v]]
                if v >= n:  # straight past all of the layer, so that it bends between layers
                    past = heights[self.layer[v]] / 2
                    points += [(self.x[v], y - past), (self.x[v], y + past)]
                    continue
                down = i == 0
                half = self.sizes[v][1] / 2
                points.append((self.x[v] + ports[k, down], y + half if down else y - half))
            routes.append(DrawnEdge(tuple(points[::-1] if k in back else points), k in back))
        width = max(self.x[v] + self.widths[v] / 2 for v in range(len(self.x)))
        if any(s == t for s, t in edges):
            width += _GAP
        centres = [(self.x[v], middle[self.layer[v]]) for v in range(n)]
        return Layout(centres, routes, width, at - _BETWEEN)

    def _around(self, v: int, middle: Sequence[float]) -> tuple[Point, ...]:
        """From the right border of a box back to it."""
        x, y, up = self.x[v] + self.widths[v] / 2, middle[self.layer[v]], self.sizes[v][1] / 4
        return (x, y + up), (x + _GAP, y), (x, y - up)

    def _ports(self, chains: Sequence[Sequence[int]]) -> dict[tuple[int, bool], float]:
        """How far from a box's middle an edge leaves it below (True) or enters it from above."""
        ends: dict[tuple[int, bool], list[tuple[float, int]]] = {}
        for k, chain in enumerate(chains):
            if len(chain) > 1:
                ends.setdefault((chain[0], True), []).append((self.x[chain[1]], k))
                ends.setdefault((chain[-1], False), []).append((self.x[chain[-2]], k))
        found: dict[tuple[int, bool], float] = {}
        for (v, down), some in ends.items():
            step = min(22.0, 0.7 * self.widths[v] / len(some))
            for i, (_, k) in enumerate(sorted(some)):
                found[k, down] = step * (i - (len(some) - 1) / 2)
        return found


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default

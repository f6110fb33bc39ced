"""Who is whose neighbour.

    ring        0 ─ 1 ─ 2 ─ 3 ─ 0          torus   rows and columns of rings
    full        everybody with everybody    edges   as given, or of a networkx graph
    exponential k ─► k + 1, k + 2, k + 4, ...: each in turn reaches everybody in log2 n rounds

A topology is asked for the neighbours of so many copies. They are distinct, none is its own, and
everybody can be reached from everybody; what is not so is refused.

Sources: ring and torus, Viviani et al. 2019, "Deep Learning at Scale"; exponential graph, Assran et
al. 2019, arXiv:1811.10792.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from geartrain.bounds import require_whole


class AbstractTopology(Protocol):
    """Who is whose neighbour."""

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        """For each copy the copies that it sends to.

        Raises:
            ValueError: It cannot be made of so many copies; says why.
        """


@final
@dataclass(frozen=True, slots=True)
class Ring:
    """Each copy with the one before it and the one behind it."""

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        _positive(self, copies)
        return [sorted({(k - 1) % copies, (k + 1) % copies} - {k}) for k in range(copies)]


@final
@dataclass(frozen=True, slots=True)
class Torus:
    """Rows and columns that close to rings; copy k is in row k // columns.

    Args:
        rows, columns: Their numbers. One that is None follows from the other; without both, the
            grid that is closest to a square. Up to three copies then lie in one row.

    Raises:
        ValueError: A number is not positive.
    """

    rows: int | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        for name, n in (("rows", self.rows), ("columns", self.columns)):
            if n is not None:
                what = f"Torus({name}={n!r})"
                require_whole(what, n, 1, "1 or more, or None to have it found")

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        """Raises:
        ValueError: The copies do not fill the grid, or make none.
        """
        rows, columns = self.grid(copies)
        return [self._around(k, rows, columns) for k in range(copies)]

    def grid(self, copies: int) -> tuple[int, int]:
        """Rows and columns of so many copies.

        Raises:
            ValueError: They do not fill the grid, or make none.
        """
        _positive(self, copies)
        if self.rows is None and self.columns is None:
            return self._found(copies)
        rows = self.rows or max(1, copies // (self.columns or 1))
        columns = self.columns or max(1, copies // rows)
        if rows * columns != copies:
            raise ValueError(
                f"{self}: {copies} copies do not fit; {rows} rows and {columns} columns take "
                f"{rows * columns}: give numbers whose product is {copies}, or another number of "
                "copies"
            )
        return rows, columns

    def _found(self, copies: int) -> tuple[int, int]:
        rows = next(r for r in range(math.isqrt(copies), 0, -1) if copies % r == 0)
        if rows == 1 and copies > 3:
            raise ValueError(
                f"Torus(): {copies} copies do not fit; {copies} is prime, and two or more rows "
                f"were expected: give {copies - 1} or {copies + 1} copies, or topology='ring'"
            )
        return rows, copies // rows

    @staticmethod
    def _around(k: int, rows: int, columns: int) -> list[int]:
        r, c = divmod(k, columns)
        around = {
            (r - 1) % rows * columns + c,
            (r + 1) % rows * columns + c,
            r * columns + (c - 1) % columns,
            r * columns + (c + 1) % columns,
        }
        return sorted(around - {k})


@final
@dataclass(frozen=True, slots=True)
class Full:
    """Everybody with everybody."""

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        _positive(self, copies)
        return [[j for j in range(copies) if j != k] for k in range(copies)]


@final
@dataclass(frozen=True, slots=True)
class Exponential:
    """Copy k sends to k + 1, k + 2, k + 4, ... (mod n), in this order.

    An exchange that takes one neighbour a round in turn, as ``PushSum`` does, makes it the rotating
    exponential graph: after ceil(log2 n) rounds everybody has heard of everybody.
    """

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        _positive(self, copies)
        hops = [1 << j for j in range((copies - 1).bit_length())]
        return [[(k + hop) % copies for hop in hops] for k in range(copies)]


@final
@dataclass(frozen=True, slots=True)
class Edges:
    """Neighbours as given.

    Args:
        pairs: Of numbers of copies; a pair named twice counts once.
        directed: Whether a pair means "the first sends to the second" alone.
    """

    pairs: tuple[tuple[int, int], ...]
    directed: bool = False

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        """Raises:
        ValueError: A number is none of a copy, a copy is its own neighbour, or not everybody can be
            reached.
        """
        _positive("Edges", copies)
        found: list[dict[int, None]] = [{} for _ in range(copies)]
        for a, b in self.pairs:
            if not (0 <= a < copies and 0 <= b < copies):
                raise ValueError(
                    f"edge ({a}, {b}): there are {copies} copies, numbered 0 to {copies - 1}; "
                    "leave it out, or have more copies"
                )
            found[a][b] = None
            if not self.directed:
                found[b][a] = None
        made = checked([list(f) if self.directed else sorted(f) for f in found])
        check_connected(made)
        return made


@final
@dataclass(frozen=True, slots=True)
class _Custom:
    """A topology of the user's own: its numbers are checked, its reach is its own affair."""

    given: AbstractTopology

    def neighbours(self, copies: int) -> Sequence[Sequence[int]]:
        found = self.given.neighbours(copies)
        if len(found) != copies:
            raise ValueError(
                f"{self.given!r}.neighbours({copies}) has {len(found)} entries: give one a copy"
            )
        return checked(found)


NAMED: Final[dict[str, AbstractTopology]] = {
    "ring": Ring(),
    "torus": Torus(),
    "full": Full(),
    "exponential": Exponential(),
}
"""Topologies that have a name."""


def topology_of(given: Any) -> AbstractTopology:
    """What the user wrote, as a topology.

    Args:
        given: A name of ``NAMED``, an object with ``neighbours(copies)``, a networkx graph whose
            nodes are 0 to n - 1, or pairs of numbers (undirected).

    Raises:
        ValueError: It is none.
    """
    if isinstance(given, str) and given in NAMED:
        return NAMED[given]
    if isinstance(given, Ring | Torus | Full | Exponential | Edges):
        return given
    if hasattr(given, "is_directed"):
        return _of_graph(given)
    if hasattr(given, "neighbours"):
        return _Custom(given)
    if isinstance(given, Iterable) and not isinstance(given, str):
        return Edges(_pairs(given))
    raise ValueError(
        f"topology={given!r}: give one of {', '.join(sorted(NAMED))}, pairs of numbers of copies, "
        "a networkx graph, or an object with neighbours(copies)"
    )


def checked(neighbours: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """The same, if it can serve.

    Args:
        neighbours: For each copy those that it sends to.

    Raises:
        ValueError: A copy is its own neighbour, or has one twice, or a number is none of a copy.
    """
    n = len(neighbours)
    for k, mine in enumerate(neighbours):
        wrong = sorted({j for j in mine if j == k or not 0 <= j < n or list(mine).count(j) > 1})
        if wrong:
            raise ValueError(
                f"neighbours of copy {k}: {list(mine)} has {wrong}, where distinct other copies "
                f"out of 0 to {n - 1} were expected; leave them out"
            )
    return neighbours


def check_connected(neighbours: Sequence[Sequence[int]]) -> None:
    """Raises:
    ValueError: Somebody cannot be reached from somebody.
    """
    n = len(neighbours)
    back: list[list[int]] = [[] for _ in range(n)]
    for k, mine in enumerate(neighbours):
        for j in mine:
            back[j].append(k)
    for graph, what in ((neighbours, "is not reached from"), (back, "does not reach")):
        missing = sorted(set(range(n)) - _reached(graph))
        if missing:
            raise ValueError(
                f"topology: disconnected; copy {missing[0]} {what} copy 0 ({len(missing)} of {n} "
                "are so), and what one learns must come to all: add edges that join them"
            )


def among(neighbours: Sequence[Sequence[int]], present: Collection[int]) -> list[list[int]]:
    """The neighbours while some copies are absent: who was joined by way of these is joined.

    A letter that would have gone on through absent copies goes at once to whoever is behind them,
    so everybody can still be reached from everybody: a ring without some copies is a ring. Absent
    copies have no neighbours.

    Args:
        neighbours: For each copy those that it sends to, when all are there.
        present: Those that are there now.
    """
    found: list[list[int]] = [[] for _ in neighbours]
    for k in present:
        seen, ahead = {k}, deque(neighbours[k])
        while ahead:
            j = ahead.popleft()
            if j in seen:
                continue
            seen.add(j)
            if j in present:
                found[k].append(j)
            else:
                ahead.extend(neighbours[j])
    return found


def senders_of(neighbours: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each copy those that send to it."""
    return [[j for j, to in enumerate(neighbours) if k in to] for k in range(len(neighbours))]


def levels_of(neighbours: Sequence[Sequence[int]]) -> list[int]:
    """A number from 0 up for each copy so that no two neighbours have the same: few, most have 0.

    0 and 1 are enough where no cycle is odd. Whoever sees most levels around it chooses next, the
    lowest that is left (Brélaz 1979, "New methods to color the vertices of a graph"); levels are
    then numbered by how many have them. Neighbours are mutual.
    """
    n = len(neighbours)
    around: list[set[int]] = [set() for _ in range(n)]
    level: dict[int, int] = {}
    heap = [(0, -len(mine), k) for k, mine in enumerate(neighbours)]
    heapq.heapify(heap)
    while heap:
        _, _, k = heapq.heappop(heap)
        if k in level:
            continue  # an entry from before it saw more
        level[k] = next(free for free in range(n) if free not in around[k])
        for j in neighbours[k]:
            around[j].add(level[k])
            heapq.heappush(heap, (-len(around[j]), -len(neighbours[j]), j))
    count = Counter(level.values())
    ranks = {each: rank for rank, each in enumerate(sorted(count, key=lambda x: (-count[x], x)))}
    return [ranks[level[k]] for k in range(n)]


def _reached(graph: Sequence[Sequence[int]]) -> set[int]:
    """From copy 0."""
    seen, open_ = {0}, [0]
    while open_:
        for j in graph[open_.pop()]:
            if j not in seen:
                seen.add(j)
                open_.append(j)
    return seen


def _of_graph(graph: Any) -> Edges:
    nodes = list(graph.nodes)
    if set(nodes) != set(range(len(nodes))):
        raise ValueError(
            f"topology: the graph's nodes are {nodes[:5]!r}..., where 0 to {len(nodes) - 1} were "
            "expected; use networkx.convert_node_labels_to_integers"
        )
    return Edges(_pairs(graph.edges()), bool(graph.is_directed()))


def _pairs(given: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    pairs = []
    for pair in given:
        try:
            a, b = pair
            pairs.append((int(a), int(b)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"edge {pair!r}: give pairs of numbers of copies, such as [(0, 1), (1, 2)]"
            ) from error
    return tuple(pairs)


def _positive(what: object, copies: int) -> None:
    if copies < 1:
        raise ValueError(f"{what}: {copies} copies were asked for; give 1 or more")

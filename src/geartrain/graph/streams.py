"""Which streams of a loop that runs whole have rows of one value, and who makes these.

    in and out ports of the operators ─► united where rows pass as they are ─► streams, their makers

All of it follows from the operators, and from who of them only picks: it is found once, for every
engine that is made of a graph (``GraphLayout.streams``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, final

from geartrain.graph.cycles import back_ports
from geartrain.graph.ends import Stopping
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Port
from geartrain.graph.operators import (
    Copying,
    Detaching,
    Flatmapping,
    Grouping,
    Joining,
    Moving,
    Routing,
    Splitting,
    Ungrouping,
)
from geartrain.graph.region import Region
from geartrain.nodes.loop.planner import StageOrder

Stream: TypeAlias = tuple[str, int, int]
"""Rows that come to a port of an operator, ``in``, or leave by one, ``out``; both by number."""

Picks: TypeAlias = Mapping[int, Sequence[int]]
"""Number of a function that only picks tensors of its rows to these."""


@final
class LoopStreams:
    """Those of a loop.

    Args:
        region: The loop.
        operators: Of the graph.
        readers: Output port to the input port that it leads to, merges resolved.
        picks: Its functions that only pick.

    Attributes:
        members: The operators in it, by number.
        picks: As given.
        gathers: Whether groups or joins bring rows together in it.
        holds: Whether bundles are held in it.
        tapes: Whether autograd can follow all that is between its modules.
        back: Output ports behind which it begins anew.
        order: Of the stages that are made of it; None: nobody has made any yet.
    """

    def __init__(
        self,
        region: Region,
        operators: Sequence[AbstractOperator],
        readers: Mapping[Port, Port],
        picks: Picks,
    ) -> None:
        self.members = {o.id: o for o in operators if o.id in region.operators}
        self._region, self._readers, self.picks = region, readers, picks
        inside = [*self.members.values()]
        self.gathers = any(isinstance(o, Grouping | Joining) for o in inside)
        self.holds = any(isinstance(o, Holding) for o in inside)
        self.tapes = not any(isinstance(o, Grouping | Holding) for o in inside)
        self.order: StageOrder | None = None
        inner = {p: r for p, r in readers.items() if p[0] in self.members and r[0] in self.members}
        self.back = back_ports(inner, [number for number, _ in region.entries])
        self._shared: dict[Stream, Stream] = {}
        self._makers: dict[Stream, tuple[AbstractOperator, int]] | None = None
        self._share()
        self._shared = {key: self.root(key) for key in self._shared}
        self._entered = {self.root(("in", *port)) for port in region.entries}
        self._made_by: dict[Stream, list[AbstractOperator]] = {}
        self._ends: dict[Stream, list[AbstractOperator]] = {}
        for o in self.members.values():
            self._ends.setdefault(self.root(("in", o.id, 0)), []).append(o)
            ports = () if isinstance(o, _PASSING | Stopping) else range(o.ways)
            for root in {self.root(("out", o.id, k)) for k in ports}:
                self._made_by.setdefault(root, []).append(o)

    def root(self, key: Stream) -> Stream:
        """The same of all streams that have rows of one value."""
        root = key
        while root in self._shared:
            root = self._shared[root]
        while key != root:  # a row of operators that let rows pass is walked once
            self._shared[key], key = root, self._shared[key]
        return root

    def maker(self, key: Stream) -> tuple[AbstractOperator, int] | None:
        """What alone makes a stream's rows, if it computes nothing, and its port."""
        root = self.root(key)
        if root not in self._alone:
            return None
        if self._makers is None:
            self._makers = self._found_makers()
        return self._makers.get(root)

    def makers(self, root: Stream) -> Sequence[AbstractOperator]:
        """Those that make rows of a stream; none that lets rows pass."""
        return self._made_by.get(root, ())

    def ends(self, root: Stream) -> Sequence[AbstractOperator]:
        """Those that a stream comes to at their first port."""
        return self._ends.get(root, ())

    def enters(self, root: Stream) -> bool:
        """Whether rows of it come from outside."""
        return root in self._entered

    def _share(self) -> None:
        """Streams that lead into one another share a value; so do those before one reader."""
        for operator in self.members.values():
            for port in range(operator.ways):
                here = "out", operator.id, port
                if isinstance(operator, _PASSING):
                    self._unite(here, ("in", operator.id, 0))
                if (operator.id, port) not in self._region.exits:
                    self._unite(here, ("in", *self._readers[operator.id, port]))
        self._alone = self._made_alone()
        for operator in self.members.values():
            if isinstance(operator, Holding) and self.maker(("in", operator.id, 0)) is None:
                self._unite(("out", operator.id, 0), ("in", operator.id, 0))
                self._alone, self._makers = self._made_alone(), None

    def _made_alone(self) -> set[Stream]:
        """Streams whose rows are all made by one operator, or enter at one place."""
        times: Counter[Stream] = Counter()
        for operator in self.members.values():
            copies = not isinstance(operator, Holding) or self._is_copied(operator)
            if copies and not isinstance(operator, _PASSING | Stopping):
                times.update(self.root(("out", operator.id, k)) for k in range(operator.ways))
        times.update(self.root(("in", *port)) for port in self._region.entries)
        return {root for root, n in times.items() if n == 1}

    def _is_copied(self, holding: Holding) -> bool:
        """Whether bundles are copied to where they are held: they lie nowhere side by side."""
        return self.root(("in", holding.id, 0)) != self.root(("out", holding.id, 0))

    def _unite(self, a: Stream, b: Stream) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self._shared[a] = b

    def _found_makers(self) -> dict[Stream, tuple[AbstractOperator, int]]:
        """By stream, the first operator that computes nothing of those that make its rows."""
        found: dict[Stream, tuple[AbstractOperator, int]] = {}
        for operator in self.members.values():
            if isinstance(operator, _VIRTUAL) or operator.id in self.picks:
                for port in range(operator.ways):
                    found.setdefault(self.root(("out", operator.id, port)), (operator, port))
        return found


_PASSING: Final = Routing | Moving | Copying | Flatmapping
"""Their rows leave as they came."""
_VIRTUAL: Final = Grouping | Joining | Splitting | Detaching | Ungrouping
"""What their rows hold is read where others lie."""

"""What is between the modules of a loop that runs whole, and where rows leave it.

They are the nodes and steps of a loop by steps, given the columns of rows; what a function reads of
a payload it is given too.
"""

from __future__ import annotations

from typing import final

import numpy as np

from geartrain.errors import GeartrainError, WorkerError
from geartrain.frames.counted import counted
from geartrain.frames.message import INSTANCE
from geartrain.nodes.control import AbstractStep, Move, Route, by_columns
from geartrain.nodes.group import Group
from geartrain.nodes.join import JoinNode
from geartrain.nodes.loop.columns import SideBySide
from geartrain.nodes.loop.members import Members
from geartrain.nodes.loop.plan import AbstractStage, LoopPlan, RowNumbers, Sent
from geartrain.nodes.loop.sides import Sides
from geartrain.nodes.loop.values import AbstractValue, Grouped, Parted, Unbundled
from geartrain.nodes.structure import Flatmap, Ungroup


@final
class StepStage(AbstractStage):
    """A route, a move, or an end.

    Args:
        step: What it does.
        source: The value of which its functions read rows; None: they look at columns alone.
    """

    def __init__(self, step: AbstractStep, source: AbstractValue | None) -> None:
        super().__init__()
        self.step, self.source = step, source

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        batch, step = plan.batch(rows, self.source), self.step
        try:
            if isinstance(step, Route):
                view = step.place.view(batch)
                return [(way, rows.some(which)) for way, which in step.split(batch, view)]
            if isinstance(step, Move):
                view = step.place.view(batch)
                return ((0, RowNumbers(rows.numbers, step.move(batch, view))),)
            passage = step.apply(batch)
        except Exception as error:
            _blame(step, rows, error)
            raise
        return [(way, RowNumbers(sent.origin, sent.state)) for way, sent in passage.forward]


@final
class PassStage(AbstractStage):
    """All rows leave by every port, as they came: a broadcast, a split, a detach."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        self._ways = ways

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        return [(way, rows) for way in range(self._ways)]


@final
class SideStage(AbstractStage):
    """Joined rows become the rows of one port that they are made of.

    Args:
        value: Number of the joined value.
        port: Which.
    """

    def __init__(self, value: int, port: int) -> None:
        super().__init__()
        self._value, self._port = value, port

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        sides = plan.numbers.sides(self._value, rows.numbers)
        return ((0, RowNumbers(sides[self._port], rows.state)),)


@final
class HoldStage(AbstractStage):
    """Bundles are held where they lie: rows leave with their numbers in a column.

    Args:
        column: State column of the handle.
    """

    def __init__(self, column: int) -> None:
        super().__init__()
        self._column = column

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        state = rows.state.copy()
        state[self._column] = rows.numbers
        return ((0, RowNumbers(rows.numbers, state)),)


@final
class FlatmapStage(AbstractStage):
    """A row becomes the rows of its edges, or so many as a function says.

    Args:
        node: Counts them.
        source: The value of which its function reads rows; None: it looks at columns alone.
    """

    def __init__(self, node: Flatmap, source: AbstractValue | None) -> None:
        super().__init__()
        self._node, self._source = node, source

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        batch = plan.batch(rows, self._source)
        try:
            starts, counts = self._node.copies(batch)
        except Exception as error:
            _blame(self._node, rows, error)
            raise
        which = counted(0, len(rows)).repeat(counts)
        if not which.size:
            return ()
        state = rows.state.take(which, 1)
        state[self._node.column] = self._node.numbers(starts, counts)
        return ((0, RowNumbers(rows.numbers.take(which), state)),)


@final
class UngroupStage(AbstractStage):
    """A row of k parts becomes k rows; k is that of the rows that have been made.

    Args:
        node: Says what columns they have.
        value: The parts.
    """

    def __init__(self, node: Ungroup, value: Parted) -> None:
        super().__init__()
        self._node, self._value = node, value

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        if plan.look is not None:
            self._value.parts = plan.look(self._value.source, rows.numbers[:1])[0].shape[1]
        k = self._value.parts
        numbers = (rows.numbers[:, None] * k + np.arange(k)).ravel()
        if not numbers.size:
            return ()
        state = self._node.parts(rows.state, np.full(len(rows), k, np.int64))
        return ((0, RowNumbers(numbers, state)),)


@final
class UnbundleStage(AbstractStage):
    """What a bundle holds becomes rows.

    Args:
        node: Says what columns they have.
        value: They.
    """

    def __init__(self, node: Ungroup, value: Unbundled) -> None:
        super().__init__()
        self._node, self._value = node, value

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        source = self._value.source
        lengths = source.lengths(plan.numbers, rows.numbers)
        assert lengths is not None
        places = source.places(plan.numbers, rows.numbers)
        if not places.size:
            return ()
        return ((0, RowNumbers(places, self._node.parts(rows.state, lengths))),)


@final
class GroupStage(AbstractStage):
    """Members become rows of a grouped value."""

    collects = True

    def __init__(self, node: Group, value: Grouped) -> None:
        super().__init__()
        self.node, self.value = node, value
        self._members = Members(node)

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        try:
            members, sizes, state = self._members.complete(rows.numbers, rows.state)
        except Exception as error:
            _blame(self.node, rows, error)
            raise
        if not sizes.size:
            return ()
        numbers = plan.numbers.group(self.value.number, members, sizes)
        return ((0, RowNumbers(numbers, state)),)

    def story(self) -> list[str]:
        return self._members.story()


@final
class JoinStage(AbstractStage):
    """Rows of several ports become rows of a joined value."""

    collects = True

    def __init__(self, node: JoinNode, value: SideBySide, ports: int) -> None:
        super().__init__(ports)
        self._node, self._value = node, value
        self._sides = Sides(node, ports)

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        sides, state = self._sides.complete(port, rows.numbers, rows.state)
        if not sides[0].size:
            return ()
        return ((0, RowNumbers(plan.numbers.join(self._value.number, sides), state)),)

    def story(self) -> list[str]:
        return self._sides.story()


@final
class ExitStage(AbstractStage):
    """Rows leave the loop, or come to a loss in it.

    Args:
        number: Among the exits, or the losses.
        judged: Whether it is a loss.
    """

    def __init__(self, number: int, *, judged: bool = False) -> None:
        super().__init__()
        self.number, self.judged = number, judged

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        (plan.judged if self.judged else plan.exits)[self.number].append(rows)
        return ()


def _blame(node: AbstractStep | Flatmap | Group, rows: RowNumbers, error: Exception) -> None:
    """Tell what a user's function raised with the name of its operator."""
    if not isinstance(error, GeartrainError):
        whose = node.place.arena.describe_several(rows.state[INSTANCE])
        raise WorkerError(
            f"{type(error).__name__} in '{node.name}', {len(rows)} rows of "
            f"{whose}: {error}{by_columns(error)}"
        ) from error

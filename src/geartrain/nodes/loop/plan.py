"""What a loop does with some instances, found from their columns alone.

    columns of the rows that enter ─► stages ─► calls: rows read, rows written
                                                exits: rows that leave

Nothing here touches a payload, unless a function that decides reads it: then each call is told of
as it is found, all of them are made before the function looks, and it gets its rows. A module is
called with all rows that have come for it, when none before it in the same round is to be called,
and those that have most go first: a loop over trees calls its cell once a height, and one of five
kinds of cells leaves those that have few rows waiting for more. What no round waits for is called
when the rounds are over, or where many rows wait. What is between modules (routes, moves, groups,
joins) are the nodes and steps of a loop by steps, given rows without payload where none reads it.

A plan has to know how many parts a row has that becomes several: it is taken to be as many as
before, and where a module then makes others, that turn is found call by call (``parting.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, final
from weakref import ref

import numpy as np

from geartrain.frames.message import Forward, IntArray, Payload
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.values import AbstractValue, Stored, Unbundled

Look: TypeAlias = Callable[[AbstractValue, IntArray], Payload]


@final
@dataclass(slots=True)
class RowNumbers:
    """Rows of a value on their way: their numbers and their columns."""

    numbers: IntArray
    state: IntArray

    def __len__(self) -> int:
        return self.numbers.size

    def some(self, which: IntArray | None) -> RowNumbers:
        """These of them, in this order; None: all."""
        if which is None:
            return self
        return RowNumbers(self.numbers.take(which), self.state.take(which, 1))


Sent: TypeAlias = Sequence[tuple[int, RowNumbers]]
"""Rows that leave a stage, with the output ports that they leave by."""


def joined(came: Sequence[RowNumbers]) -> RowNumbers:
    """Rows one after the other, of at least one."""
    if len(came) == 1:
        return came[0]
    numbers = np.concatenate([r.numbers for r in came])
    return RowNumbers(numbers, np.concatenate([r.state for r in came], axis=1))


@final
@dataclass(slots=True, eq=False)
class Called:
    """One call of a module, or one copy of rows to where a module reads them; ``order`` alone
    changes it, before it runs.

    Args:
        stage: Which.
        rows: Of the value that it reads.
        first: Of the rows that it writes.
        lengths: int64 ``(n,)``, of the bundles that are read; None: single rows.
        together: The calls that it may be taken together with, or None.
    """

    stage: CallStage | StoreStage
    rows: RowNumbers
    first: int
    lengths: IntArray | None = None
    together: JointCall | None = None

    def by_members(self, numbers: Numbers) -> Called:
        """The same copy, if it is one of bundles: of the rows that these hold."""
        stage, rows, lengths = self.stage, self.rows, self.lengths
        if lengths is None or not isinstance(stage, StoreStage) or not lengths.any():
            return self
        places = stage.source.places(numbers, rows.numbers)
        members = RowNumbers(places, rows.state.repeat(lengths, axis=1))
        return Called(stage.of_members, members, numbers.begin(stage.into.number, self.first))


@final
@dataclass(slots=True, eq=False)
class JointCall:
    """Calls of several modules, one after the other, that read rows of one value and write another.

    It is known to its calls, and does not know them: what each holds of the other, and their rows,
    would stay until Python collects garbage.

    Args:
        number: Of the first of them.
        stages: The modules.
        sizes: Rows of each call.
        came: The rows of all of them, those of the first call first, in one piece or several.
        first: Of the rows that they write.
    """

    number: int
    stages: Sequence[CallStage]
    sizes: list[int]
    came: Sequence[RowNumbers]
    first: int

    @property
    def rows(self) -> RowNumbers:
        """Of all of them."""
        return joined(self.came)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of their modules."""
        return tuple([stage.number for stage in self.stages])

    @property
    def end(self) -> int:
        """Of the call after them."""
        return self.number + len(self.sizes)


@final
@dataclass(slots=True)
class LoopPlan:
    """What a loop does with some instances.

    Args:
        numbers: Of the rows of all values.
        calls: In the order in which they run.
        exits: By exit, the rows that leave there, in the order of the calls.
        judged: By loss, the rows that come to it, as for ``exits``.
        entered: By entry, the first row that has entered there.
        parts: By value whose rows become several, how many; None: calls are made to find the plan.
        look: Gives rows of a value, for functions that read them; None: there are none yet.
        run: Is told of a call as it is found, and runs it before anybody looks; None: they run when
            the plan is ready.
    """

    numbers: Numbers
    entered: list[int] = field(default_factory=list)
    parts: Mapping[int, int] | None = None
    calls: list[Called] = field(default_factory=list)
    exits: list[list[RowNumbers]] = field(default_factory=list)
    judged: list[list[RowNumbers]] = field(default_factory=list)
    look: Look | None = None
    run: Callable[[int, Called], None] | None = None

    def batch(self, rows: RowNumbers, source: AbstractValue | None) -> Forward:
        """Rows as a step gets them: with what they hold of a value, or with columns alone."""
        if source is None or self.look is None:
            return Forward((), rows.state, rows.numbers)
        lengths = source.lengths(self.numbers, rows.numbers)
        return Forward(self.look(source, rows.numbers), rows.state, rows.numbers, lengths)


class AbstractStage(ABC):
    """One operator of a loop.

    Attributes:
        targets: By output port the stage that reads it, and its input port. The planner holds
            stages: in a loop they would hold one another, until Python collects garbage.
        back: Output ports behind which a loop begins anew, and how ``Watch`` calls them.
        waiting: By input port, what has come.
        sent: Whether anything has come since somebody looked.
    """

    collects = False
    """Whether it brings rows together that come at different times."""

    def __init__(self, ports: int = 1) -> None:
        self.targets: dict[int, tuple[ref[AbstractStage], int]] = {}
        self.back: dict[int, tuple[int, int]] = {}
        self.waiting: list[list[RowNumbers]] = [[] for _ in range(ports)]
        self.sent = False

    def leads(self, way: int, reader: AbstractStage, port: int) -> None:
        """What leaves by an output port comes to a stage by this port of it."""
        self.targets[way] = ref(reader), port

    def send(self, port: int, rows: RowNumbers) -> None:
        """Rows come by a port."""
        self.waiting[port].append(rows)
        self.sent = True

    @abstractmethod
    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        """Rows have come by a port; gives what leaves, by output port."""

    def take(self, port: int) -> RowNumbers:
        """All that waits at a port."""
        came, self.waiting[port] = self.waiting[port], []
        return came[0] if len(came) == 1 else joined(came)

    def rows_waiting(self) -> int:
        """How many have come by all ports."""
        return sum([r.numbers.size for came in self.waiting for r in came])

    def story(self) -> list[str]:
        """Who waits for what, a line each."""
        return []


@final
class CallStage(AbstractStage):
    """A module; its rows wait until it is called.

    Args:
        number: Among the modules of the loop.
        source: The value that it reads.
        into: The value that it makes rows of.
        pools: Whether it makes one row of each bundle.
        kin: Calls that are equal in this may be taken together; None: it is called alone.
        which: For each tensor that it gives, the one of ``into`` that it is; None: they are all.
    """

    def __init__(
        self,
        number: int,
        source: AbstractValue,
        into: Stored,
        *,
        pools: bool,
        kin: Hashable | None = None,
        which: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.number, self.source, self.into, self.pools = number, source, into, pools
        self.kin, self.which = kin, which

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        return _record(self, rows, plan)


@final
class StoreStage(AbstractStage):
    """Rows that meet others of another value are copied to those.

    Args:
        number: Among the places of the loop at which rows are copied.
        source: The value that they are rows of.
        into: The value that they become rows of.
    """

    pools = False

    def __init__(self, number: int, source: AbstractValue, into: Stored) -> None:
        super().__init__()
        self.number, self.source, self.into = number, source, into

    @cached_property
    def of_members(self) -> StoreStage:
        """What copies the rows that bundles hold, where it copies bundles."""
        return StoreStage(self.number, Unbundled(self.source.number, self.source), self.into)

    def apply(self, port: int, rows: RowNumbers, plan: LoopPlan) -> Sent:
        return _record(self, rows, plan)


def _record(stage: CallStage | StoreStage, rows: RowNumbers, plan: LoopPlan) -> Sent:
    lengths = stage.source.lengths(plan.numbers, rows.numbers)
    into = stage.into.number
    numbers = plan.numbers.more(into, len(rows), None if stage.pools else lengths)
    called = Called(stage, rows, int(numbers[0]), lengths)
    plan.calls.append(called)
    if plan.run is not None:
        plan.run(len(plan.calls) - 1, called)
    return ((0, RowNumbers(numbers, rows.state)),)

"""What a loop does with some instances, found from their columns alone.

    columns of the rows that enter ─► stages ─► calls: rows read, rows written
                                                exits: rows that leave

Nothing here touches a payload, unless a function that decides reads it: then a call runs as soon as
it is found, and the function gets its rows. A module is called with all rows that have come for it,
when none before it in the same round is to be called, and those that have most go first: a loop
over trees calls its cell once a height, and one of five kinds of cells leaves those that have few
rows waiting for more. What is between modules (routes, moves, groups,
joins) are the nodes and steps of a loop by steps, given rows without payload where none reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, TypeAlias, final

import numpy as np

from geartrain.errors import GeartrainError, StuckError, WorkerError
from geartrain.frames.message import (
    INSTANCE,
    Forward,
    IntArray,
    Payload,
    ranges,
)
from geartrain.nodes.control import AbstractStep
from geartrain.nodes.group import Group
from geartrain.nodes.join import JoinNode
from geartrain.nodes.loop.members import Members, Sides
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.values import AbstractValue, Grouped, Parted, SideBySide, Stored
from geartrain.nodes.structure import Flatmap, Ungroup

Passed: TypeAlias = list[tuple[tuple[int, int], IntArray]]
"""Where rows have gone round, and the slots of their instances, one entry a row."""
SHARE: Final = 0.5
"""Modules with at least this share of the rows of the fullest are called before what lies between
modules is looked at again: that takes longer than a call of few rows."""

Look: TypeAlias = Callable[[AbstractValue, IntArray], Payload]
Watch: TypeAlias = Callable[[Passed], None]
"""Raises if rows of an instance have gone round too often."""


@final
@dataclass(slots=True)
class RowNumbers:
    """Rows of a value on their way: their numbers and their columns."""

    numbers: IntArray
    state: IntArray

    def __len__(self) -> int:
        return self.numbers.size


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


@final
@dataclass(slots=True, eq=False)
class JointCall:
    """Calls of several modules, one after the other, that read rows of one value and write another.

    Args:
        number: Of the first of them.
        calls: They.
        rows: Of all of them, those of the first call first.
        first: Of the rows that they write.
    """

    number: int
    calls: list[Called]
    rows: RowNumbers
    first: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of their modules."""
        return tuple([c.stage.number for c in self.calls if isinstance(c.stage, CallStage)])

    @property
    def sizes(self) -> list[int]:
        """Rows of each call."""
        return [len(called.rows) for called in self.calls]


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
        look: Gives rows of a value, for functions that read them; None: there are none yet.
        run: Runs a call as soon as it is found; None: they run when the plan is ready.
    """

    numbers: Numbers
    entered: list[int] = field(default_factory=list)
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
        targets: By output port the stage that reads it, and its input port.
        back: Output ports behind which a loop begins anew, and how ``Watch`` calls them.
        waiting: By input port, what has come.
        sent: Whether anything has come since somebody looked.
    """

    def __init__(self, ports: int = 1) -> None:
        self.targets: dict[int, tuple[AbstractStage, int]] = {}
        self.back: dict[int, tuple[int, int]] = {}
        self.waiting: list[list[RowNumbers]] = [[] for _ in range(ports)]
        self.sent = False

    def send(self, port: int, rows: RowNumbers) -> None:
        """Rows come by a port."""
        self.waiting[port].append(rows)
        self.sent = True

    @abstractmethod
    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        """Rows have come by a port; gives what leaves, by output port."""

    def take(self, port: int) -> RowNumbers:
        """All that waits at a port."""
        came, self.waiting[port] = self.waiting[port], []
        return joined(came)

    def rows_waiting(self) -> int:
        """How many have come by all ports."""
        return sum([r.numbers.size for came in self.waiting for r in came])

    def story(self) -> list[str]:
        """Who waits for what, a line each."""
        return []


@final
class StepStage(AbstractStage):
    """A route, a move, or an end.

    Args:
        step: What it does.
        source: The value of which its functions read rows; None: they look at columns alone.
    """

    def __init__(self, step: AbstractStep, source: AbstractValue | None) -> None:
        super().__init__()
        self._step, self._source = step, source

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        batch = plan.batch(rows, self._source)
        with _Blamed(self._step, rows):
            passage = self._step.apply(batch)
        for way, sent in passage.forward:
            yield way, RowNumbers(sent.origin, sent.state)


@final
class PassStage(AbstractStage):
    """All rows leave by every port, as they came: a broadcast, a split, a detach."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        self._ways = ways

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        return ((way, rows) for way in range(self._ways))


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

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        batch = plan.batch(rows, self._source)
        with _Blamed(self._node, rows):
            starts, counts = self._node.copies(batch)
        which = np.repeat(np.arange(len(rows)), counts)
        if which.size:
            state = rows.state.take(which, 1)
            state[self._node.column] = ranges(starts, counts)
            yield 0, RowNumbers(rows.numbers[which], state)


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

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        assert plan.look is not None
        k = plan.look(self._value.source, rows.numbers[:1])[0].shape[1]
        self._value.parts = k
        numbers = (rows.numbers[:, None] * k + np.arange(k)).ravel()
        if numbers.size:
            state = self._node.parts(rows.state, np.full(len(rows), k, np.int64))
            yield 0, RowNumbers(numbers, state)


@final
class GroupStage(AbstractStage):
    """Members become rows of a grouped value."""

    def __init__(self, node: Group, value: Grouped) -> None:
        super().__init__()
        self._node, self._value = node, value
        self._members = Members(node)

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        with _Blamed(self._node, rows):
            members, sizes, state = self._members.complete(rows.numbers, rows.state)
        if sizes.size:
            yield 0, RowNumbers(plan.numbers.group(self._value.number, members, sizes), state)

    def story(self) -> list[str]:
        return self._members.story()


@final
class JoinStage(AbstractStage):
    """Rows of several ports become rows of a joined value."""

    def __init__(self, node: JoinNode, value: SideBySide, ports: int) -> None:
        super().__init__(ports)
        self._node, self._value = node, value
        self._sides = Sides(node, ports)

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        with _Blamed(self._node, rows):
            sides, state = self._sides.complete(port, rows.numbers, rows.state)
        if sides[0].size:
            yield 0, RowNumbers(plan.numbers.join(self._value.number, sides), state)

    def story(self) -> list[str]:
        return self._sides.story()


@final
class CallStage(AbstractStage):
    """A module; its rows wait until it is called.

    Args:
        number: Among the modules of the loop.
        source: The value that it reads.
        into: The value that it makes rows of.
        pools: Whether it makes one row of each bundle.
        kin: Calls that are equal in this may be taken together; None: it is called alone.
    """

    def __init__(
        self,
        number: int,
        source: AbstractValue,
        into: Stored,
        *,
        pools: bool,
        kin: Hashable | None = None,
    ) -> None:
        super().__init__()
        self.number, self.source, self.into, self.pools = number, source, into, pools
        self.kin = kin

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        return _record(self, rows, plan)


@final
class StoreStage(AbstractStage):
    """Rows that meet others of another value are copied to those.

    Args:
        source: The value that they are rows of.
        into: The value that they become rows of.
    """

    pools = False

    def __init__(self, source: AbstractValue, into: Stored) -> None:
        super().__init__()
        self.source, self.into = source, into

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        return _record(self, rows, plan)


@final
class ExitStage(AbstractStage):
    """Rows leave the loop, or come to a loss in it.

    Args:
        number: Among the exits, or the losses.
        judged: Whether it is a loss.
    """

    def __init__(self, number: int, *, judged: bool = False) -> None:
        super().__init__()
        self.number, self._judged = number, judged

    def apply(
        self, port: int, rows: RowNumbers, plan: LoopPlan
    ) -> Iterator[tuple[int, RowNumbers]]:
        (plan.judged if self._judged else plan.exits)[self.number].append(rows)
        return iter(())


def _record(
    stage: CallStage | StoreStage, rows: RowNumbers, plan: LoopPlan
) -> Iterator[tuple[int, RowNumbers]]:
    lengths = stage.source.lengths(plan.numbers, rows.numbers)
    into = stage.into.number
    numbers = plan.numbers.more(into, len(rows), None if stage.pools else lengths)
    called = Called(stage, rows, int(numbers[0]), lengths)
    plan.calls.append(called)
    if plan.run is not None:
        plan.run(len(plan.calls) - 1, called)
    yield 0, RowNumbers(numbers, rows.state)


@final
@dataclass(frozen=True, slots=True)
class LoopEntry:
    """Where rows enter a loop.

    Args:
        into: The value that they become rows of.
        stage, port: Who reads them.
    """

    into: Stored
    stage: AbstractStage
    port: int


@final
class Planner:
    """Makes plans.

    Args:
        entries: Where rows enter.
        stages: All; those of an order in which rows that do not go round pass.
        exits, losses, values: How many.

    Attributes:
        watch: Refuses endless loops.
        window: Rows that go round until it looks again.
    """

    def __init__(
        self,
        entries: Sequence[LoopEntry],
        stages: Sequence[AbstractStage],
        exits: int,
        losses: int,
        values: int,
    ) -> None:
        self._entries, self._exits, self._losses, self._values = entries, exits, losses, values
        self._calls = [s for s in stages if isinstance(s, CallStage)]
        self._others = [s for s in stages if not isinstance(s, CallStage)]
        places = {id(call): 1 << k for k, call in enumerate(self._calls)}
        self._masks = [
            (places[id(call)], sum(places.get(at, 0) for at in _reached_from(call) - {id(call)}))
            for call in self._calls
        ]
        self.watch: Watch | None = None
        self.window = 4096
        self._passed: Passed = []
        self._unseen = 0

    def begin(self, entering: Sequence[tuple[IntArray, IntArray | None]]) -> LoopPlan:
        """A plan that knows of the rows that enter alone.

        Args:
            entering: By entry, the columns of the rows that come in there, maybe none, and the
                lengths of the bundles that they are.
        """
        plan = LoopPlan(Numbers(self._values))
        plan.exits = [[] for _ in range(self._exits)]
        plan.judged = [[] for _ in range(self._losses)]
        for entry, (state, lengths) in zip(self._entries, entering, strict=True):
            plan.entered.append(plan.numbers.counts[entry.into.number])
            numbers = plan.numbers.more(entry.into.number, state.shape[1], lengths)
            if numbers.size:
                entry.stage.send(entry.port, RowNumbers(numbers, state))
        return plan

    def finish(self, plan: LoopPlan) -> None:
        """Find what the loop does.

        Raises:
            StuckError: Groups or joins wait for rows that do not come.
            EndlessLoopError: Rows go round too often.
            GraphError: A function cannot do with the columns that it gets.
        """
        self._passed, self._unseen = [], 0
        while True:
            self._settle(plan)
            ready = self._ready()
            if not ready:
                break
            if len(ready) == 1:
                self._run(ready[0], 0, ready[0].take(0), plan)
                continue
            several = _by_kin(ready)
            rows = [sum([call.rows_waiting() for call in calls]) for calls in several]
            few = SHARE * max(rows)
            for calls, n in zip(several, rows, strict=True):
                if n >= few and len(calls) == 1:
                    self._run(calls[0], 0, calls[0].take(0), plan)
                elif n >= few:
                    self._run_together(calls, plan)
        if self.watch is not None and self._passed:
            self.watch(self._passed)
        self._check_empty()

    def _ready(self) -> list[CallStage]:
        """Modules to be called now; others for which rows wait may be sent more by these."""
        ready = [
            (call, masks)
            for call, masks in zip(self._calls, self._masks, strict=True)
            if call.waiting[0]
        ]
        if len(ready) > 1:
            later = 0
            for _, (_, reached) in ready:
                later |= reached
            first = [call for call, (place, _) in ready if not place & later]
            if first:
                return first
        return [call for call, _ in ready]

    def _settle(self, plan: LoopPlan) -> None:
        """Let everything but modules do what it can."""
        moved = True
        while moved:
            moved = False
            for stage in self._others:
                if stage.sent:
                    stage.sent = False
                    for port, came in enumerate(stage.waiting):
                        if came:
                            self._run(stage, port, stage.take(port), plan)
                            moved = True

    def _run(self, stage: AbstractStage, port: int, rows: RowNumbers, plan: LoopPlan) -> None:
        for way, sent in stage.apply(port, rows, plan):
            self._send(stage, way, sent)

    def _send(self, stage: AbstractStage, way: int, rows: RowNumbers) -> None:
        """Rows leave a stage."""
        if way in stage.back:
            self._count(stage.back[way], rows)
        target = stage.targets.get(way)
        if target is not None:
            target[0].send(target[1], rows)

    def _run_together(self, calls: Sequence[CallStage], plan: LoopPlan) -> None:
        """Call several modules with what waits for them."""
        came = [call.take(0) for call in calls]
        numbers = np.concatenate([r.numbers for r in came])
        if calls[0].source.lengths(plan.numbers, numbers) is not None:
            for call, rows in zip(calls, came, strict=True):
                self._run(call, 0, rows, plan)
            return
        state = np.concatenate([r.state for r in came], axis=1)
        made = plan.numbers.more(calls[0].into.number, numbers.size)
        together = JointCall(len(plan.calls), [], RowNumbers(numbers, state), int(made[0]))
        ends = list(accumulate(map(len, came)))
        for call, rows, end in zip(calls, came, ends, strict=True):
            first = together.first + end - len(rows)
            together.calls.append(Called(call, rows, first, None, together))
        plan.calls += together.calls
        if plan.run is not None:
            for number, called in enumerate(together.calls, together.number):
                plan.run(number, called)
        target, port = calls[0].targets[0]
        if all(call.targets[0] == (target, port) and not call.back for call in calls):
            target.send(port, RowNumbers(made, state))
            return
        for call, rows, end in zip(calls, came, ends, strict=True):
            self._send(call, 0, RowNumbers(made[end - len(rows) : end], rows.state))

    def _count(self, port: tuple[int, int], rows: RowNumbers) -> None:
        """Rows go round."""
        self._passed.append((port, rows.state[INSTANCE]))
        self._unseen += len(rows)
        if self.watch is not None and self._unseen >= self.window:
            self._unseen = 0
            self.watch(self._passed)

    def _check_empty(self) -> None:
        story = [line for stage in self._others for line in stage.story()]
        if story:
            raise StuckError(
                "a loop that runs whole has come to its end, and rows wait in it for others that "
                "do not come:\n  " + "\n  ".join(story)
            )


def _by_kin(calls: Sequence[CallStage]) -> list[list[CallStage]]:
    """Those that may be taken together, in the order of the first of them."""
    if len(calls) == 1:
        return [[calls[0]]]
    found: dict[Hashable, list[CallStage]] = {}
    for call in calls:
        found.setdefault(id(call) if call.kin is None else call.kin, []).append(call)
    return list(found.values())


def _reached_from(start: AbstractStage) -> set[int]:
    """Stages that rows come to from this one in the same round, by identity."""
    found: set[int] = set()
    stack: list[AbstractStage] = [start]
    while stack:
        stage = stack.pop()
        for way, (target, _) in stage.targets.items():
            if way not in stage.back and id(target) not in found:
                found.add(id(target))
                stack.append(target)
    return found


class _Blamed:
    """What a user's function raises is told with the name of its operator."""

    def __init__(self, node: AbstractStep | Flatmap | Group | JoinNode, rows: RowNumbers) -> None:
        self._node, self._rows = node, rows

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, GeartrainError):
            whose = self._node.place.arena.describe_several(self._rows.state[INSTANCE])
            raise WorkerError(
                f"{type(error).__name__} in '{self._node.name}', {len(self._rows)} rows of "
                f"{whose}: {error}"
            ) from error

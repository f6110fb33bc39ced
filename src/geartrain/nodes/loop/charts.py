"""Plans of loops whose functions look at nothing but where a row is: made in C, of tables.

    functions of routes, moves and groups ─► asked once of all vertices of some instances ─► tables
    tables, rows that enter ─► plans.inc ─► the calls that ``Planner`` finds, with the same rows

A function gets columns of rows, and most read those of a row's vertex or instance alone, as over
trees and lists. What it says is the same whenever a row comes there, so it is asked once, and not
once a call. Whatever else a loop has, or a function says or asks for, is for the planner: a chart
refuses, and nothing has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, cast, final

import numpy as np

from geartrain.frames.frame import Schema, View
from geartrain.frames.message import INSTANCE, VERTEX, Forward, IntArray, distinct, ranges
from geartrain.native import library
from geartrain.native.groups import AHEAD, record_words
from geartrain.native.plans import (
    MOST_MODULES,
    EnteringRows,
    EventKind,
    PlannedRows,
    SourceHow,
    StageKind,
)
from geartrain.native.pool import made_words
from geartrain.nodes.control import Move, Route, Stop
from geartrain.nodes.group import Column, column_of
from geartrain.nodes.loop.members import member_words
from geartrain.nodes.loop.plan import (
    AbstractStage,
    Called,
    CallStage,
    JointCall,
    LoopPlan,
    RowNumbers,
)
from geartrain.nodes.loop.stages import ExitStage, GroupStage, PassStage, StepStage
from geartrain.nodes.loop.values import AbstractValue, Grouped
from geartrain.nodes.node import Place

ROUNDS: Final = 1 << 17
"""Rows that go round in a plan, of which more are for the planner, which says who goes round."""
_IN_VAIN: Final = 4
"""So many refusals in a row, and a chart is not asked again."""
_ASKED_TWICE: Final = 1024
"""Vertices of which functions have said the same twice until they are believed."""

Passed: TypeAlias = list[tuple[tuple[int, int], IntArray]]
"""Where rows have gone round, and the slots of their instances, one entry a row."""

Watch: TypeAlias = Callable[[Passed], None]
"""Raises if rows of an instance have gone round too often."""

Asked = Callable[[Forward, View], Sequence[IntArray]]
"""What functions say of rows: one table or several."""


@final
class _Noting:
    """A view that knows what it was asked for."""

    __slots__ = ("_asked", "_view")

    def __init__(self, view: View, asked: set[str]) -> None:
        self._view, self._asked = view, asked

    def __len__(self) -> int:
        return len(self._view)

    def __getattr__(self, name: str) -> Any:
        self._asked.add(name)
        return getattr(self._view, name)


@final
class _Tables:
    """Functions that are asked of all vertices.

    Attributes:
        count: Of tables.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Place, Asked]] = []
        self.count = self._same = 0

    def add(self, place: Place, tables: int, asked: Asked) -> int:
        """So many more; the first of them."""
        self._asked.append((place, asked))
        self.count += tables
        return self.count - tables

    def source(self, place: Place, what: int | Column | None) -> list[int]:
        """Where the number comes from that a group is told of its members."""
        if what is None or isinstance(what, int):
            return [SourceHow.GIVEN, what or 0]
        if isinstance(what, str):
            at = place.schema.state.get(what)
            if at is not None and what not in _by_vertex(place.schema) and what != "edge":
                return [SourceHow.OF_COLUMN, at]
        column = what  # of a type that is known
        told = self.add(place, 1, lambda batch, view: [column_of(column, view)])
        return [SourceHow.OF_TABLE, told]

    def ask(self, state: IntArray) -> IntArray | None:
        """``(tables, n)``, of n rows with these columns; None: they read others than their vertex's
        and their instance's, or say something else each time, as those that draw numbers do."""
        found = self._said(state)
        if found is not None and self._same < _ASKED_TWICE:
            if not np.array_equal(found, cast(IntArray, self._said(state))):
                return None
            self._same += state.shape[1]
        return found

    def _said(self, state: IntArray) -> IntArray | None:
        batch, asked = Forward((), state, state[INSTANCE]), set[str]()
        found: list[IntArray] = []
        for place, function in self._asked:
            view = cast(View, _Noting(place.view(batch), asked))
            found += function(batch, view)
            if not asked <= _by_vertex(place.schema):
                return None
        return np.stack(found, out=made_words((len(found), state.shape[1])))


def _by_vertex(schema: Schema) -> frozenset[str]:
    """Names of what is the same of all rows at a vertex."""
    at = {name for name, k in schema.state.items() if k in (INSTANCE, VERTEX)}
    return schema.vertex | schema.value | at | {"size"}


@final
class Chart:
    """That of a loop.

    Args:
        told: The loop, as C reads it.
        stages: By number.
        backs: Output ports behind which a loop begins anew, as ``Watch`` calls them.
        tables: What functions say.
        place: Of one of its operators.
    """

    def __init__(
        self,
        told: Sequence[int],
        stages: Sequence[AbstractStage],
        backs: Sequence[tuple[int, int]],
        tables: _Tables,
        place: Place,
    ) -> None:
        self._stages, self._backs, self._tables, self._place = stages, backs, tables, place
        self._rows = PlannedRows(told, ROUNDS)
        self._where = np.empty(0, np.int64)
        self._refused = 0

    def plan(self, plan: LoopPlan, endless: Watch | None = None) -> Passed | None:
        """Make a plan of the rows that wait at its stages.

        Args:
            plan: Gets to know it.
            endless: Refuses rows that go round without end.

        Returns:
            Where rows have gone round, and the slots of their instances; None: it refuses.
        """
        if self._refused >= _IN_VAIN or plan.numbers.places or library.current() is None:
            return None
        passed = self._made(plan, endless)
        self._refused = 0 if passed is not None else self._refused + 1
        return passed

    def _made(self, plan: LoopPlan, endless: Watch | None) -> Passed | None:
        entering = [
            EnteringRows(k, np.ascontiguousarray(rows.numbers), np.ascontiguousarray(rows.state))
            for k, stage in enumerate(self._stages)
            for rows in stage.waiting[0]
        ]
        if not entering:
            return []
        slots = distinct(np.concatenate([one.state[INSTANCE] for one in entering]))
        arena = self._place.arena
        sizes = arena.size[slots]
        state = np.zeros((len(entering[0].state), int(sizes.sum())), np.int64)
        state[INSTANCE], state[VERTEX] = slots.repeat(sizes), ranges(arena.base[slots], sizes)
        tables: IntArray | None = None
        # The planner asks of the rows that come alone, and says whose error it is.
        with suppress(Exception), np.errstate(all="raise"):
            tables = self._tables.ask(state)
        if tables is None:
            return None
        capacity = arena.vertices.ranges.capacity
        if self._where.size < capacity:
            self._where = np.full(capacity, -1, np.int64)
        self._where[state[VERTEX]] = np.arange(state.shape[1])
        found = self._rows.make(self._where, tables, entering, plan.numbers.counts)
        self._where[state[VERTEX]] = -1
        if found is None:
            return None
        told = _PlanTold(self._stages, self._backs, len(state), found.events, found.words)
        if found.endless:
            if endless is not None:
                endless(told.passed())
            return None
        for stage in self._stages:
            if stage.waiting[0]:
                stage.take(0)
                stage.sent = False
        told.fill(plan, found.counts)
        return told.passed()


@final
class _PlanTold:
    """What C tells of a plan.

    Args:
        stages, backs: As of a ``Chart``.
        columns: Of rows.
        events: What has happened.
        words: Theirs.
    """

    def __init__(
        self,
        stages: Sequence[AbstractStage],
        backs: Sequence[tuple[int, int]],
        columns: int,
        events: list[list[int]],
        words: IntArray,
    ) -> None:
        self._stages, self._backs, self._columns = stages, backs, columns
        self._events, self._words = events, words

    def passed(self) -> Passed:
        """Where rows have gone round, and the slots of their instances."""
        words = self._words
        return [
            (self._backs[who], words[at : at + n])
            for kind, who, n, _, at in self._events
            if kind == EventKind.A_ROUND
        ]

    def fill(self, plan: LoopPlan, counts: list[int]) -> None:
        """Have a plan know it."""
        words, columns, stages = self._words, self._columns, self._stages
        groups: dict[int, tuple[list[IntArray], list[IntArray]]] = {}
        calls: list[tuple[int, RowNumbers, int]] = []
        for kind, who, n, more, at in self._events:
            end = at + n
            if kind == EventKind.A_CALL:
                state = words[end : end + columns * n].reshape(columns, n)
                calls.append((who, RowNumbers(words[at:end], state), more))
            elif kind == EventKind.AN_EXIT:
                stage = cast(ExitStage, stages[who])
                state = words[end : end + columns * n].reshape(columns, n)
                exits = (plan.judged if stage.judged else plan.exits)[stage.number]
                exits.append(RowNumbers(words[at:end], state))
            elif kind == EventKind.SOME_GROUPS:
                members, sizes = groups.setdefault(who, ([], []))
                members.append(words[at : at + more])
                sizes.append(words[at + more : at + more + n])
        self._group(plan, groups)
        self._call(plan, calls)
        plan.numbers.counts[:] = counts

    def _group(
        self, plan: LoopPlan, groups: Mapping[int, tuple[list[IntArray], list[IntArray]]]
    ) -> None:
        for who, (members, sizes) in groups.items():
            stage = cast(GroupStage, self._stages[who])
            all_sizes = np.concatenate(sizes)
            stage.node.check(all_sizes)
            plan.numbers.group(stage.value.number, np.concatenate(members), all_sizes)

    def _call(self, plan: LoopPlan, calls: Sequence[tuple[int, RowNumbers, int]]) -> None:
        counts, numbers, found = plan.numbers.counts, plan.numbers, plan.calls
        joint: dict[int, list[tuple[CallStage, RowNumbers]]] = {}
        stages = cast("Sequence[CallStage]", self._stages)  # those that are called
        for who, rows, which in calls:
            if which >= 0:
                joint.setdefault(which, []).append((stages[who], rows))
        together: dict[int, JointCall] = {}
        for who, rows, which in calls:
            stage = stages[who]
            into, source = stage.into.number, stage.source
            first = counts[into]
            if which >= 0 and which not in together:
                together[which] = _joint(len(found), joint[which], first)
            lengths = source.lengths(numbers, rows.numbers)
            found.append(Called(stage, rows, first, lengths, together.get(which)))
            counts[into] = first + rows.numbers.size


def _joint(number: int, several: Sequence[tuple[CallStage, RowNumbers]], first: int) -> JointCall:
    """Calls that may be taken together."""
    stages, came = zip(*several, strict=True)
    return JointCall(number, stages, [rows.numbers.size for rows in came], came, first)


# How C is told of a loop.


@final
class Charting:
    """Tells C of a loop.

    Args:
        stages: All of it.
        passing, collecting, calls: Those of them that let rows pass, bring rows together, and are
            modules.
        round: Stages that lie on a loop, or before one.
        masks: By module, as bits, itself, those that it sends rows in the same round, and those
            behind it in any.
        senders: By what brings rows together, by identity, the modules that send it some.
        enough: Rows that wait at a module of no loop until it is called.
    """

    def __init__(
        self,
        stages: Sequence[AbstractStage],
        passing: Sequence[AbstractStage],
        collecting: Sequence[AbstractStage],
        calls: Sequence[CallStage],
        round: Sequence[AbstractStage],
        masks: Sequence[tuple[int, int, int]],
        senders: Mapping[int, Sequence[CallStage]],
        enough: int,
    ) -> None:
        self._stages, self._calls = stages, calls
        self._lists, self._senders, self._enough = (
            (passing, collecting, calls, round),
            senders,
            enough,
        )
        self._tables, self._backs = _Tables(), list[tuple[int, int]]()
        self._number = {id(stage): k for k, stage in enumerate(stages)}
        self._masks = {id(call): bits for call, bits in zip(calls, masks, strict=True)}
        self._kin = {call.kin: k for k, call in enumerate(calls)}
        self._place: Place | None = None

    def chart(self) -> Chart | None:
        """How it is planned in C; None: it is not."""
        if len(self._calls) > MOST_MODULES:
            return None
        told: list[list[int]] = []
        for stage in self._stages:
            own = self._own(stage)
            if own is None:
                return None
            kind, *rest = own
            senders = [self._bits(stage)] if kind == StageKind.GROUPS else []
            told.append([kind, *self._links(stage), *senders, *rest])
        if self._place is None:
            return None
        head, body = 8 + len(told), list[int]()
        lists: list[int] = []
        for some in self._lists:
            lists.append(head + len(body))
            body += [len(some), *[self._number[id(stage)] for stage in some]]
        begins: list[int] = []
        for words in told:
            begins.append(head + len(body))
            body += words
        columns = len(self._place.schema.state)
        counts = [len(told), len(self._calls), columns]
        every = [*counts, *lists, self._enough, *begins, *body]
        return Chart(every, self._stages, self._backs, self._tables, self._place)

    def _links(self, stage: AbstractStage) -> list[int]:
        """How many ways rows leave by, and whither."""
        ways = 1 + max([*stage.targets, *stage.back], default=-1)
        found = [ways]
        for way in range(ways):
            target = stage.targets.get(way)
            reader = None if target is None else target[0]()
            found.append(-1 if reader is None else self._number[id(reader)])
            found.append(len(self._backs) if way in stage.back else -1)
            if way in stage.back:
                self._backs.append(stage.back[way])
        return found

    def _bits(self, stage: AbstractStage) -> int:
        """The modules that send rows to what brings them together."""
        return sum([self._masks[id(call)][0] for call in self._senders[id(stage)]])

    def _own(self, stage: AbstractStage) -> list[int] | None:
        """The kind of a stage, and what is its own; None: C does not know it."""
        if isinstance(stage, CallStage):
            return self._of_call(stage)
        if isinstance(stage, StepStage):
            return None if stage.source is not None else self._of_step(stage)
        if isinstance(stage, GroupStage):
            return self._of_group(stage)
        if isinstance(stage, PassStage):
            return [StageKind.PASSES]
        if isinstance(stage, ExitStage):
            return [StageKind.LEAVES]
        return None

    def _of_call(self, stage: CallStage) -> list[int] | None:
        if not stage.pools and _has_bundles(stage.source):
            return None
        own = -1 if stage.kin is None else self._kin[stage.kin]
        return [StageKind.CALLS, stage.into.number, own, *self._masks[id(stage)][1:]]

    def _of_step(self, stage: StepStage) -> list[int] | None:
        step = stage.step
        self._place = step.place
        if isinstance(step, Stop):
            return [StageKind.SWALLOWS]
        if isinstance(step, Route):
            ports = step.ports
            table = self._tables.add(step.place, 1, lambda b, v: [ports(b, v)])
            return [StageKind.ROUTES, table]
        return [StageKind.MOVES, *self._fields(step)] if isinstance(step, Move) else None

    def _fields(self, move: Move | None) -> list[int]:
        if move is None:
            return [0]
        found, columns = [len(move.moves)], move.columns
        inside = VERTEX, move.place.schema.state.get("edge")
        first = self._tables.add(
            move.place, len(move.moves), lambda b, v: [x for _, x in columns(b, v)]
        )
        for k, column in enumerate(move.moves):
            how = SourceHow.INSIDE if column in inside else SourceHow.OF_TABLE
            found += [column, how, first + k]
        return found

    def _of_group(self, stage: GroupStage) -> list[int]:
        node = stage.node
        self._place = node.place
        moved = node.moving is not None
        columns = len(node.place.schema.state)
        width, keys, more, alike = member_words(node, columns, moved=moved)
        rest = {"keys": keys, "more": more, "alike": alike}
        sources = self._tables.source(node.place, node.size)
        sources += self._tables.source(node.place, node.order)
        came = int(width > AHEAD + columns)
        own = [stage.value.number, *sources, came, *self._fields(node.moving)]
        return [StageKind.GROUPS, *own, *record_words(width, ordered=node.ordered, **rest)]


def _has_bundles(value: AbstractValue) -> bool:
    """Whether its rows may be bundles of others."""
    if isinstance(value, Grouped) and value.how == "bundle":
        return True
    return any(map(_has_bundles, value.made_of))

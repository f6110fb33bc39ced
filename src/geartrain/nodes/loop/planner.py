"""Makes the plans of a loop that runs whole: which module is called when, with which rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, final

import numpy as np

from geartrain.errors import StuckError
from geartrain.frames.message import INSTANCE, IntArray
from geartrain.nodes.loop.charts import Chart, Charting, Passed, Watch
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.plan import (
    AbstractStage,
    Called,
    CallStage,
    JointCall,
    LoopPlan,
    RowNumbers,
    Sent,
)
from geartrain.nodes.loop.repeats import LONG_AFTER, Repeats
from geartrain.nodes.loop.values import Stored

SHARE: Final = 0.5
"""Modules with at least this share of the rows of the fullest are called before what lies between
modules is looked at again: that takes longer than a call of few rows."""
ENOUGH: Final = 1024
"""Rows that wait at a module of no loop, which may be sent more, until it is called."""


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
@dataclass(frozen=True, slots=True)
class StageOrder:
    """Which stages of a loop rows come to from which: the same whenever it is made.

    Args:
        round: Places of the stages that lie on a cycle, or before one.
        masks: By module, as bits, itself, those that it sends rows in the same round, and those
            behind it in any.
        senders: By place of what brings rows together, the modules that send it some in the same
            round, or in any.
    """

    round: Sequence[int]
    masks: Sequence[tuple[int, int, int]]
    senders: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, stages: Sequence[AbstractStage]) -> StageOrder:
        """That of these."""
        calls = [s for s in stages if isinstance(s, CallStage)]
        others = [s for s in stages if not isinstance(s, CallStage)]
        number = {id(stage): k for k, stage in enumerate([*calls, *others])}
        places = [number[id(stage)] for stage in stages]
        same, ever = _edges(stages, number, round_again=False), _edges(stages, number)
        reached, ahead = _reached(places, same), _reached(places, ever)
        before = _reached(places[::-1], [(b, a) for a, b in ever])
        is_call = (1 << len(calls)) - 1
        gathering = is_call | sum(1 << number[id(s)] for s in others if s.collects)
        on = sum(1 << k for k, found in enumerate(ahead) if found >> k & 1)
        round = [k for k, place in enumerate(places) if ahead[place] & on]
        # Those that it sends rows in the same round; and in any, and that send it none themselves.
        found = [reached[c] & ~(1 << c) for c in range(len(calls))]
        later = [ahead[c] & gathering & ~before[c] for c in range(len(calls))]
        masks = [(1 << c, found[c] & is_call, later[c] & is_call) for c in range(len(calls))]
        senders = {
            k: [c for c in range(len(calls)) if (found[c] | later[c]) >> place & 1]
            for k, (stage, place) in enumerate(zip(stages, places, strict=True))
            if stage.collects and not isinstance(stage, CallStage)
        }
        return cls(round, masks, senders)


@final
class Planner:
    """Makes plans.

    Args:
        entries: Where rows enter.
        stages: All; those of an order in which rows that do not go round pass.
        exits, losses, values: How many.
        order: Of the stages; None: it is found.

    Attributes:
        order: As given, or found.
        watch: Refuses rows that go round too often.
        endless: Refuses rows that come to where they were, and would without end.
        patient: Whether ``watch`` alone decides where functions may draw numbers.
        window: Rows that go round until it looks again.
    """

    def __init__(
        self,
        entries: Sequence[LoopEntry],
        stages: Sequence[AbstractStage],
        exits: int,
        losses: int,
        values: int,
        order: StageOrder | None = None,
    ) -> None:
        self._entries, self._exits, self._losses, self._values = entries, exits, losses, values
        self.order = order = order or StageOrder.of(stages)
        self._calls = [s for s in stages if isinstance(s, CallStage)]
        self._others = [s for s in stages if not isinstance(s, CallStage)]
        self._passing = [s for s in self._others if not s.collects]
        self._collecting = [s for s in self._others if s.collects]
        self._round = [stages[k] for k in order.round]
        self._masks = order.masks
        self._senders = {
            id(stages[k]): [self._calls[c] for c in calls] for k, calls in order.senders.items()
        }
        self._stages, self._looked = stages, False
        self._chart: Chart | None = None
        self.watch: Watch | None = None
        self.endless: Watch | None = None
        self.patient, self.window = False, 4096
        self._passed: Passed = []
        self._unseen = 0

    def begin(
        self,
        entering: Sequence[tuple[IntArray, IntArray | None]],
        parts: Mapping[int, int] | None = None,
    ) -> LoopPlan:
        """A plan that knows of the rows that enter alone.

        Args:
            entering: By entry, the columns of the rows that come in there, maybe none, and the
                lengths of the bundles that they are.
            parts: As the plan has them.
        """
        plan = LoopPlan(Numbers(self._values), parts=parts)
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
        if plan.run is None and (passed := self._charted(plan)) is not None:
            if self.watch is not None and passed:
                self.watch(passed)
            return
        self._passed, self._unseen = [], 0
        repeats = Repeats()
        while True:
            self._settle(plan)
            ready = self._ready()
            if not ready:
                break
            self._look_for_an_end(repeats, plan)
            if len(ready) == 1:
                self._send(ready[0], ready[0].apply(0, ready[0].take(0), plan))
                continue
            several = _by_kin(ready)
            rows = [sum([call.rows_waiting() for call in calls]) for calls in several]
            few = SHARE * max(rows)
            for calls, n in zip(several, rows, strict=True):
                if n >= few and len(calls) == 1:
                    self._send(calls[0], calls[0].apply(0, calls[0].take(0), plan))
                elif n >= few:
                    self._run_together(calls, plan)
        if self.watch is not None and self._passed:
            self.watch(self._passed)
        self._check_empty()

    def _look_for_an_end(self, repeats: Repeats, plan: LoopPlan) -> None:
        """A turn begins: refuse a loop that has none, if columns alone decide."""
        repeats.turns += 1
        if repeats.turns < LONG_AFTER or plan.run is not None or self.patient:
            return
        if self.endless is not None:
            waiting = [[rows.state for rows in call.waiting[0]] for call in self._round]
            if repeats.look(waiting, len(self._passed)):
                self.endless(self._passed)

    def _charted(self, plan: LoopPlan) -> Passed | None:
        """Have C make a plan, and where rows have gone round; None: it does not."""
        if not self._looked:
            self._looked = True
            kinds = self._passing, self._collecting, self._calls, self._round
            parts = *kinds, self._masks, self._senders
            self._chart = Charting(self._stages, *parts, ENOUGH).chart()
        return None if self._chart is None else self._chart.plan(plan, self.endless)

    def _ready(self) -> list[CallStage]:
        """Modules to be called now; others for which rows wait may be sent more by these."""
        ready = [
            (call, masks)
            for call, masks in zip(self._calls, self._masks, strict=True)
            if call.waiting[0]
        ]
        if len(ready) > 1:
            later = behind = 0
            for _, (_, reached, ever) in ready:
                later |= reached
                behind |= ever
            first = [
                call
                for call, (place, *_) in ready
                if not place & later and not (place & behind and call.rows_waiting() < ENOUGH)
            ]
            if first:
                return first
        return [call for call, _ in ready]

    def _settle(self, plan: LoopPlan) -> None:
        """Let everything but modules do what it can.

        What brings rows together waits for modules that are to be called and send it more, now or
        in another round: it looks through all that it has whenever some come.
        """
        moved = True
        while moved:
            while self._pass_on(self._passing, plan):
                pass
            moved = self._pass_on(self._collecting, plan)

    def _pass_on(self, stages: Sequence[AbstractStage], plan: LoopPlan) -> bool:
        """Let these do what they can, once; whether any has."""
        moved = False
        for stage in stages:
            if stage.sent and not (stage.collects and self._is_to_come(stage)):
                stage.sent = False
                for port, came in enumerate(stage.waiting):
                    if came:
                        self._send(stage, stage.apply(port, stage.take(port), plan))
                        moved = True
        return moved

    def _is_to_come(self, stage: AbstractStage) -> bool:
        """Whether rows wait at a module that sends more to what brings rows together."""
        for call in self._senders[id(stage)]:
            if call.waiting[0]:
                return True
        return False

    def _send(self, stage: AbstractStage, sent: Sent) -> None:
        """Rows leave a stage."""
        for way, rows in sent:
            if way in stage.back:
                self._count(stage.back[way], rows)
            target = stage.targets.get(way)
            if target is not None:
                reader = target[0]()
                assert reader is not None
                reader.send(target[1], rows)

    def _run_together(self, calls: Sequence[CallStage], plan: LoopPlan) -> None:
        """Call several modules with what waits for them."""
        came = [call.take(0) for call in calls]
        numbers = np.concatenate([r.numbers for r in came])
        if calls[0].source.lengths(plan.numbers, numbers) is not None:
            for call, rows in zip(calls, came, strict=True):
                self._send(call, call.apply(0, rows, plan))
            return
        state = np.concatenate([r.state for r in came], axis=1)
        made = plan.numbers.more(calls[0].into.number, numbers.size)
        sizes = [len(rows) for rows in came]
        both = RowNumbers(numbers, state)
        together = JointCall(len(plan.calls), calls, sizes, [both], int(made[0]))
        ends = list(accumulate(sizes))
        for call, rows, end in zip(calls, came, ends, strict=True):
            first = together.first + end - len(rows)
            plan.calls.append(Called(call, rows, first, None, together))
        if plan.run is not None:
            for number in range(together.number, together.end):
                plan.run(number, plan.calls[number])
        target = calls[0].targets[0]
        if all(call.targets[0] == target and not call.back for call in calls):
            self._send(calls[0], ((0, RowNumbers(made, state)),))
            return
        for call, rows, end in zip(calls, came, ends, strict=True):
            self._send(call, ((0, RowNumbers(made[end - len(rows) : end], rows.state)),))

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
            kind = "loop" if self._round else "section"
            raise StuckError(
                f"a {kind} that runs whole has come to its end, and rows wait in it for others "
                "that do not come; look at size= of a group, on= of a concat, and at rows that "
                "end, or go elsewhere, before they are there:\n  " + "\n  ".join(story)
            )


def _by_kin(calls: Sequence[CallStage]) -> list[list[CallStage]]:
    """Those that may be taken together, in the order of the first of them."""
    if len(calls) == 1:
        return [[calls[0]]]
    found: dict[Hashable, list[CallStage]] = {}
    for call in calls:
        found.setdefault(id(call) if call.kin is None else call.kin, []).append(call)
    return list(found.values())


def _edges(
    stages: Sequence[AbstractStage], number: Mapping[int, int], *, round_again: bool = True
) -> list[tuple[int, int]]:
    """Numbers of the stages that send rows, and of those that get them, in the same round or any.

    Args:
        stages: All, in the order in which rows pass.
        number: Of each, by identity.
        round_again: Whether in any.
    """
    return [
        (number[id(stage)], number[id(reader)])
        for stage in stages
        for way, (target, _) in stage.targets.items()
        if (round_again or way not in stage.back) and (reader := target()) is not None
    ]


def _reached(places: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """What is reached from each number, as bits: a few hundred bytes where there are thousands.

    Args:
        places: The numbers, each before most of those that it leads to.
        edges: Which leads to which.
    """
    ahead: list[list[int]] = [[] for _ in places]
    for a, b in edges:
        ahead[a].append(b)
    found, settled = [0] * len(places), False
    while not settled:
        settled = True
        for place in reversed(places):
            bits = found[place]
            for other in ahead[place]:
                bits |= found[other] | 1 << other
            if bits != found[place]:
                found[place], settled = bits, False
    return found

"""What a worker tells the parent of its firings is what the parent counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from geartrain.engine.firing import Firing
from geartrain.parts.trained import StepTaken
from geartrain.runtime.processes.child import _Work
from geartrain.runtime.processes.messages import (
    Kind,
    Names,
    Report,
    named_to_record,
    record_to_named,
)
from geartrain.runtime.processes.pace import Pace
from geartrain.transport.record import Record


def test_a_report_comes_as_it_was_sent() -> None:
    names = Names(["map", "loss"], ["p"])
    report = Report(busy_s=1.25)
    report.firings = [
        (Firing("map", "p", True, 7, False, 21, 84), 0.5, 0.75),
        (Firing("loss", None, True, 7, True, 7, 2**40), 0.75, 1.0),
        (Firing("map", "p", False, 7, False, 7, 0), 1.0, 1.5),
    ]
    report.steps = [(StepTaken("p", 3, 12), 1.5)]
    report.held = {"p": True}
    report.out.answered = [np.array([4, 2])]
    report.out.spawned = [np.array([1])]
    report.out.rounds = [((5, 0), np.array([3, 3]))]
    found = Report.of_record(report.to_record(names), names)
    for (firing, *times), (told, *said) in zip(found.firings, report.firings, strict=True):
        assert times == said and _plain(firing) == _plain(told)
    assert (found.steps, found.held) == (report.steps, report.held)
    assert found.busy_s == 1.25
    assert [x.tolist() for x in found.out.answered] == [[4, 2]]
    assert [x.tolist() for x in found.out.spawned] == [[1]]
    assert [(port, x.tolist()) for port, x in found.out.rounds] == [((5, 0), [3, 3])]


class Line:
    """Of a worker: what it sends, by message."""

    def __init__(self) -> None:
        self.messages: list[list[str]] = []
        self._together = False

    @contextmanager
    def together(self) -> Iterator[None]:
        self.messages.append([])
        self._together = True
        yield
        self._together = False

    def send(self, to: int, record: Record) -> None:
        what = "report" if record.kind == Kind.REPORT else record_to_named(record)[0]
        if not self._together:
            self.messages.append([])
        self.messages[-1].append(what)


def test_progress_goes_in_one_message_with_a_report_and_no_more_often_than_it_is_told_of() -> None:
    line, pace = Line(), Pace(None)
    worker: Any = SimpleNamespace(
        transport=line,
        _pace=pace,
        _names=Names([], ["p"]),
        _pulse=partial(named_to_record, "pulse", {}, {}),
        _report=Report(),
        _pulsed_s=0,
    )
    worker._sent, worker._parent = [0], 0
    worker._send = partial(_Work._send, worker)
    _Work._send_report(worker)
    assert not line.messages  # there is nothing to tell
    for _ in range(2):
        worker._report.steps = [(StepTaken("p", 1, 1), 0.5)]
        _Work._send_report(worker)
        assert not worker._report
    assert line.messages == [["report", "pulse"], ["report"]] and worker._sent == [3]


def _plain(firing: Firing) -> tuple[object, ...]:
    told = firing.node, firing.part, firing.forward, firing.rows, firing.both
    return (*told, firing.cells, firing.nbytes)

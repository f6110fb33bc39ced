"""What a worker tells the parent of its firings is what the parent counts."""

from __future__ import annotations

import numpy as np

from geartrain.engine.worker import Firing
from geartrain.parts.trained import StepTaken
from geartrain.runtime.processes.messages import Names, Report


def test_a_report_comes_as_it_was_sent() -> None:
    names = Names(["map", "loss"], ["p"])
    report = Report()
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
    assert [x.tolist() for x in found.out.answered] == [[4, 2]]
    assert [x.tolist() for x in found.out.spawned] == [[1]]
    assert [(port, x.tolist()) for port, x in found.out.rounds] == [((5, 0), [3, 3])]


def _plain(firing: Firing) -> tuple[object, ...]:
    told = firing.node, firing.part, firing.forward, firing.rows, firing.both
    return (*told, firing.cells, firing.nbytes)

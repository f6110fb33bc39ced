"""What instruments are told of a pass."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import geartrain as gt
from geartrain.engine.costs import NodeCost
from geartrain.engine.firing import Firing
from geartrain.engine.instrument import Fired, Progress, Updated
from geartrain.nodes.sums import add_sums
from geartrain.parts.part import PartState
from geartrain.parts.trained import StepTaken
from geartrain.train.observer import Observer, means_of, tell
from geartrain.train.work import PassWork


def engine_at(finished, active=3, sums=None):
    controller = SimpleNamespace(finished=finished, active=active, in_flight=active)
    return SimpleNamespace(controller=controller, peek_sums=lambda: sums or {})


def observer(recorder, **options):
    given = {
        "instruments": [recorder],
        "mode": "train",
        "epoch": 2,
        "epochs": 5,
        "total": 100,
        "parts": {},
        "began_s": 10.0,
        **options,
    }
    return Observer(**given)


def test_progress_adds_what_was_done_before_and_means_over_all_rows(recorder):
    part = PartState("p", torch.nn.Linear(1, 1), gt.Rules())
    part.counting.staleness.load([2, 0, 1])
    watch = observer(
        recorder, done=40, sums=lambda: {"loss": (6.0, 3), "top": (1.0, 2)}, parts={"p": part}
    )
    watch.finished(engine_at(10, sums={"loss": (2.0, 1)}), 2.0)
    (event,) = recorder.events
    assert event == Progress(
        mode="train",
        epoch=2,
        epochs=5,
        finished=50,
        total=100,
        active=3,
        loss=2.0,
        metrics={"top": 0.5},
        instances_per_second=5.0,
        staleness=pytest.approx(2 / 3),
        time_s=12.0,
    )


def test_progress_comes_a_few_times_a_second_and_at_the_end(recorder):
    times = iter([0.0, 0.05, 0.09, 0.11, 0.12])
    watch = observer(recorder, clock=lambda: next(times))
    for n in range(1, 6):
        watch.finished(engine_at(n), float(n))
    watch.progress(engine_at(5, active=0), 6.0)
    watch.progress(engine_at(5, active=0), 6.0)
    assert [e.finished for e in recorder.events] == [1, 4, 5]
    assert all(math.isnan(e.loss) for e in recorder.events)


def test_firings_and_steps_carry_the_time_of_the_run(recorder):
    watch = observer(recorder)
    watch.fired(1, Firing("a", "p", True, 7, nbytes=56), 0.5, 0.75)
    watch.fired(0, Firing("a", "p", False, 5, nbytes=20), 1.0, 1.5)
    watch.stepped(1, StepTaken("p", 3, 12), 2.0)
    assert recorder.events == [
        Fired(1, "a", "p", "forward", 7, 10.5, 10.75),
        Fired(0, "a", "p", "backward", 5, 11.0, 11.5),
        Updated(1, "p", 3, 12, 12.0),
    ]
    assert watch.work.costs() == {"a": NodeCost(0.75, 1, 1, 56, 20)}
    assert watch.updates == {"p": 1} and watch.now_s == 1.5


def test_an_error_says_which_instrument_raised_it(recorder):
    class Broken(gt.AbstractInstrument):
        def on_progress(self, event):
            raise OSError("disk")

    with pytest.raises(OSError, match="disk") as raised:
        tell([recorder, Broken()], "on_progress", "event")
    assert recorder.events == ["event"]
    assert "instrument Broken in on_progress" in raised.value.__notes__[0]


def test_sums_add_name_by_name_and_no_rows_have_no_mean():
    total = add_sums({"a": (1.0, 2)}, {"a": (3.0, 2), "b": (5.0, 0)})
    assert total == {"a": (4.0, 4), "b": (5.0, 0)}
    means = means_of(total)
    assert means["a"] == 1.0 and math.isnan(means["b"])


def test_one_firing_that_took_long_is_not_what_a_node_costs():
    work = PassWork()
    for seconds in (9.0, 0.5, 0.5, 0.5, 0.5):
        work.fired(0, Firing("a", "p", True, 10), seconds)
    work.fired(0, Firing("few", "p", True, 10), 9.0)
    assert work.costs() == {"a": NodeCost(2.5, 5, 0), "few": NodeCost(9.0, 1, 0)}


def test_work_that_was_added_to_others_stays_as_it_was() -> None:
    total, one, other = PassWork(), PassWork(), PassWork()
    for work, rows in ((one, 3), (other, 5)):
        work.fired(0, Firing("a", "a", forward=True, rows=rows), 0.5)
    for work in (one, other):
        total.add(work)
    for work, rows in ((total, 8), (one, 3), (other, 5)):
        (use,) = work.uses.values()
        assert (use.rows, sum(use.sizes)) == (rows, 2 if work is total else 1)

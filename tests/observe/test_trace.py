import json
import logging
import math

import pytest

from geartrain.engine.instrument import Chosen, Fired, Restored, RunEnded, RunStarted
from geartrain.errors import DataError
from geartrain.observe.trace import TRACE_FULL, PerfettoTrace, read_trace

START = RunStarted("threads", 2, 8, 1)


def firing(i: int, worker: int = 0) -> Fired:
    return Fired(worker, "leaf", "leaf", "forward", 1, i / 1000, i / 1000 + 0.0005)


def of(events, kind):
    return [event for event in events if event["ph"] == kind]


def test_a_normal_end_leaves_valid_json_with_every_event(tmp_path, told):
    path = tmp_path / "new" / "trace.json"
    told.tell(PerfettoTrace(path), *told.run_events())
    events = json.loads(path.read_text())
    counts = {kind: len(of(events, kind)) for kind in "MXiC"}
    assert counts == {"M": 5, "X": 75, "i": 33, "C": 12}
    assert list(read_trace(path)) == events
    names = {e["tid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}
    assert names == {1: "worker 0", 2: "worker 1"}
    assert events[0]["args"]["name"] == "geartrain: threads"


def test_a_firing_is_a_complete_event_in_microseconds(tmp_path):
    path = tmp_path / "trace.json"
    fired = Fired(1, 'a "quoted" node', None, "backward", 17, 1.25, 1.2505)
    trace = PerfettoTrace(path)
    trace.on_run_started(START)
    trace.on_fired(fired)
    trace.on_run_ended(RunEnded("done", 1, 1.0))
    (event,) = of(json.loads(path.read_text()), "X")
    assert event == {
        "ph": "X",
        "pid": 1,
        "tid": 2,
        "ts": 1_250_000.0,
        "dur": 500.0,
        "name": 'a "quoted" node backward',
        "cat": "backward",
        "args": {"node": 'a "quoted" node', "part": None, "direction": "backward", "rows": 17},
    }


def test_updates_are_instants_and_progress_counts(tmp_path, told):
    path = tmp_path / "trace.json"
    told.tell(PerfettoTrace(path), *told.run_events())
    events = json.loads(path.read_text())
    update = next(e for e in of(events, "i") if e["name"] == "update branch")
    assert (update["tid"], update["s"]) == (2, "t")
    assert update["args"] == {"part": "branch", "version": 10, "rows": 16}
    counters = {(e["name"], *e["args"].items()) for e in of(events, "C")}
    assert ("in flight", ("instances", 8)) in counters
    assert ("instances/s", ("instances/s", 1712.3)) in counters
    assert [e["name"] for e in of(events, "i") if e["s"] == "g"] == [
        f"epoch {k} ended" for k in (1, 2, 3)
    ]


def test_a_killed_run_leaves_a_trace_that_only_lacks_its_bracket(tmp_path, told):
    path = tmp_path / "trace.json"
    trace = PerfettoTrace(path)
    told.tell(trace, *list(told.run_events())[:-1])
    events = json.loads(path.read_text() + "]")
    assert len(of(events, "X")) == 75
    torn = tmp_path / "torn.json"
    torn.write_text(path.read_text()[:-20])
    assert list(read_trace(torn)) == events[:-1]
    trace.close()


def test_beyond_the_limit_it_stops_and_says_so_once(tmp_path, caplog):
    path = tmp_path / "trace.json"
    trace = PerfettoTrace(path, limit=5)
    trace.on_run_started(START)
    with caplog.at_level(logging.WARNING, logger="geartrain"):
        for i in range(9):
            trace.on_fired(firing(i))
    trace.on_run_ended(RunEnded("done", 1, 1.0))
    events = json.loads(path.read_text())
    assert len(of(events, "X")) == 5
    (note,) = of(events, "i")
    assert note["name"] == TRACE_FULL and "5 events" in note["args"]["note"]
    assert len(caplog.records) == 1 and str(path) in caplog.text


def test_many_firings_are_written_in_batches_without_any_progress(tmp_path):
    path = tmp_path / "trace.json"
    trace = PerfettoTrace(path)
    trace.on_run_started(START)
    for i in range(4095):
        trace.on_fired(firing(i))
    assert len(of(json.loads(path.read_text() + "]"), "X")) == 0
    trace.on_fired(firing(4095))
    assert len(of(json.loads(path.read_text() + "]"), "X")) == 4096
    trace.close()


def test_a_worker_that_was_not_announced_gets_its_name_once(tmp_path):
    path = tmp_path / "trace.json"
    trace = PerfettoTrace(path)
    trace.on_run_started(START)
    trace.on_fired(firing(0, worker=7))
    trace.on_fired(firing(1, worker=7))
    trace.close()
    names = [e for e in of(json.loads(path.read_text()), "M") if e["name"] == "thread_name"]
    assert [e["args"]["name"] for e in names] == ["worker 0", "worker 1", "worker 7"]


def test_rates_that_are_not_finite_keep_the_file_valid(tmp_path, told):
    path = tmp_path / "trace.json"
    trace = PerfettoTrace(path)
    trace.on_run_started(START)
    trace.on_progress(told.progress(instances_per_second=math.nan))
    trace.on_progress(told.progress(instances_per_second=math.inf))
    trace.close()
    rates = [e for e in of(json.loads(path.read_text()), "C") if e["name"] == "instances/s"]
    assert [e["args"]["instances/s"] for e in rates] == [0, 0]


def test_firings_outside_of_a_run_leave_the_trace_alone(tmp_path, told):
    path = tmp_path / "trace.json"
    trace = PerfettoTrace(path)
    trace.on_fired(firing(0))
    assert not path.exists()
    told.tell(trace, *told.run_events())
    before = path.read_bytes()
    trace.on_fired(firing(1))
    trace.close()
    assert path.read_bytes() == before


def test_it_asks_for_firings_and_refuses_a_limit_of_nothing(tmp_path):
    assert PerfettoTrace(tmp_path / "t.json").wants_firings
    with pytest.raises(ValueError, match="limit is 0"):
        PerfettoTrace(tmp_path / "t.json", limit=0)


def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('[{"ph":"M"},\nnonsense,\n{"ph":"M"}\n]\n')
    with pytest.raises(DataError, match="nonsense") as caught:
        list(read_trace(path))
    assert caught.value.line == 2


def test_what_was_chosen_and_who_died_are_marked(tmp_path):
    path = tmp_path / "trace.json"
    trace = PerfettoTrace(path)
    trace.on_run_started(RunStarted("processes", 2, 8, 1))
    trace.on_chosen(Chosen("processes", 2, {"a": 0}, "", "two worker processes: for a reason", 1.5))
    restored = Restored("train", 1, "worker 1 was killed", 1, 10, 1, 400, 600, time_s=2.5)
    trace.on_restored(restored)
    trace.on_restored(Restored("evaluate", 1, "worker 1 was killed", 2, 10, 0))
    trace.on_run_ended(RunEnded("done", 1, 3.0))
    chosen, death = (e for e in json.loads(path.read_text()) if e["ph"] == "i")
    assert (chosen["ts"], chosen["args"]) == (1.5e6, {"why": "two worker processes: for a reason"})
    assert (death["name"], death["ts"], death["tid"]) == ("death 1", 2.5e6, 2)
    assert death["args"] == {"how": "worker 1 was killed", "repeated": 600, "from": ""}

import json
import math

import numpy as np
import pytest

from geartrain.engine.instrument import RunEnded, RunStarted
from geartrain.errors import DataError
from geartrain.observe.jsonlog import JsonLog, read_json_log


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_a_run_reads_back_as_it_was_told(tmp_path, told, clock):
    path = tmp_path / "new" / "metrics.jsonl"
    told.tell(JsonLog(path, clock=clock), *told.run_events())
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse_constant)
    events = read_json_log(path)
    kinds = [event["event"] for event in events]
    assert kinds == ["RunStarted", "Progress", *["EpochEnded"] * 3, "RunEnded"]
    assert events[0]["nodes"] == {"leaf": 0, "branch": 1}
    assert events[1]["loss"] is None
    assert events[3]["staleness"]["branch"] == {"mean": 2.5, "max": 4, "histogram": [8, 4, 2, 1, 5]}
    assert events[3]["valid"] == {"accuracy": 0.82, "loss": 0.7}
    assert events[-1] == {
        "event": "RunEnded",
        "outcome": "done",
        "instances": 300,
        "train_seconds": 1.5,
        "message": "",
        "time_s": 3.0,
        "deaths": 0,
        "repeated": 0,
        "unsaved": 0,
    }


def test_progress_is_written_once_a_second_at_most(tmp_path, told, clock):
    log = JsonLog(tmp_path / "m.jsonl", clock=clock)
    log.on_run_started(RunStarted("threads", 1, 1, 1))
    for clock.now, finished in ((5.0, 1), (5.5, 2), (5.99, 3), (6.0, 4), (8.0, 5)):
        log.on_progress(told.progress(finished))
    log.close()
    events = read_json_log(tmp_path / "m.jsonl")
    assert [event["finished"] for event in events[1:]] == [1, 4, 5]


def test_every_line_is_on_disk_before_the_run_ends(tmp_path, told):
    path = tmp_path / "m.jsonl"
    log = JsonLog(path)
    log.on_run_started(RunStarted("threads", 1, 1, 3))
    log.on_epoch_ended(told.epoch_ended(1))
    assert [event["event"] for event in read_json_log(path)] == ["RunStarted", "EpochEnded"]
    assert path.read_bytes().endswith(b"}\n")
    log.close()


def test_numbers_that_json_cannot_say_become_null_and_numpy_is_welcome(tmp_path, told):
    path = tmp_path / "m.jsonl"
    log = JsonLog(path)
    log.on_run_started(RunStarted("threads", 1, 1, 3))
    strange = {"a": np.float32(0.5), "b": math.inf, "c": np.int64(3), "d": np.float64("nan")}
    log.on_epoch_ended(told.epoch_ended(1, metrics=strange, loss=-math.inf))
    log.close()
    event = read_json_log(path)[1]
    assert event["metrics"] == {"a": 0.5, "b": None, "c": 3, "d": None}
    assert event["loss"] is None


@pytest.mark.parametrize("torn", [b'{"event": "Epo', b'{"event": "Progress", "name": "\xc3', b"{"])
def test_a_torn_last_line_is_left_out_and_a_resumed_run_replaces_it(tmp_path, told, torn):
    path = tmp_path / "m.jsonl"
    told.tell(JsonLog(path), *told.run_events())
    whole = read_json_log(path)
    with path.open("ab") as file:
        file.write(torn)
    assert read_json_log(path) == whole
    log = JsonLog(path)
    log.on_run_started(RunStarted("threads", 1, 1, 1))
    log.on_run_ended(RunEnded("done", 0, 0.0))
    assert [e["event"] for e in read_json_log(path)[len(whole) :]] == ["RunStarted", "RunEnded"]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"event": "RunEnded", "outcome": "done"}')
    log = JsonLog(path)
    log.on_run_started(RunStarted("threads", 1, 1, 1))
    log.close()
    assert [event["event"] for event in read_json_log(path)] == ["RunEnded", "RunStarted"]


@pytest.mark.parametrize("bad", ["not json", "[1]", '{"epoch": 1}', '{"event": "Epo'])
def test_a_bad_line_in_the_middle_is_refused_with_its_number(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_text('{"event": "RunStarted"}\n' + bad + '\n{"event": "RunEnded"}\n')
    with pytest.raises(DataError, match="key 'event'") as caught:
        read_json_log(path)
    assert (caught.value.path, caught.value.line) == (path, 2)


def test_nothing_is_written_outside_of_a_run(tmp_path, told):
    path = tmp_path / "m.jsonl"
    log = JsonLog(path)
    log.on_progress(told.progress())
    assert not path.exists()
    told.tell(log, *told.run_events())
    size = path.stat().st_size
    log.on_progress(told.progress(mode="evaluate", epoch=0))
    log.close()
    assert path.stat().st_size == size

import pytest

from geartrain.engine.instrument import Fired, RunEnded, RunStarted
from geartrain.errors import DataError
from geartrain.observe.timeline import batch_size_label, read_timeline
from geartrain.observe.trace import PerfettoTrace


def record(path, firings, limit=1000):
    trace = PerfettoTrace(path, limit)
    trace.on_run_started(RunStarted("threads", 3, 8, 1))
    for fired in firings:
        trace.on_fired(fired)
    trace.on_run_ended(RunEnded("done", 1, 1.0))
    return read_timeline(path)


def test_busy_time_rows_and_batch_sizes_are_summed(tmp_path):
    timeline = record(
        tmp_path / "t.json",
        [
            Fired(0, "leaf", "leaf", "forward", 1, 1.0, 1.5),
            Fired(0, "branch", "branch", "forward", 4, 1.5, 2.0),
            Fired(1, "leaf", "leaf", "backward", 5, 2.0, 3.0),
            Fired(1, "leaf", "leaf", "backward", 8, 3.0, 3.25),
        ],
    )
    assert timeline.workers == {0, 1, 2}  # the third never fired
    assert timeline.span_s == pytest.approx(2.25)
    busy_s = {(0, "leaf"): 0.5, (0, "branch"): 0.5, (1, "leaf"): 1.25}
    assert timeline.busy_s == pytest.approx(busy_s)
    assert timeline.nodes_by_use() == ["leaf", "branch"]
    leaf = timeline.nodes["leaf"]
    assert (leaf.firings, leaf.rows, leaf.busy_s) == (3, 14, pytest.approx(1.75))
    assert timeline.batch_sizes == {"forward": {0: 1, 2: 1}, "backward": {3: 2}}
    assert not timeline.is_cut


def test_batch_size_labels_name_the_rows_they_hold():
    assert [batch_size_label(k) for k in (-1, 0, 1, 2, 3, 4)] == [
        "0",
        "1",
        "2",
        "3–4",
        "5–8",
        "9–16",
    ]


def test_the_last_two_seconds_end_with_the_last_backward_not_with_validation(tmp_path):
    firings = [
        Fired(0, "leaf", "leaf", "backward" if i % 2 else "forward", 1, i * 0.02, i * 0.02 + 0.01)
        for i in range(300)
    ]
    firings += [Fired(0, "leaf", "leaf", "forward", 9, 6 + i, 7 + i) for i in range(3)]
    recent = record(tmp_path / "t.json", firings).recent
    assert recent[-1].end_s == pytest.approx(299 * 0.02 + 0.01)
    assert recent[0].end_s == pytest.approx(recent[-1].end_s - 2.0, abs=0.021)


def test_slow_firings_show_at_least_sixty(tmp_path):
    firings = [Fired(0, "leaf", "leaf", "backward", 1, 5.0 * i, 5.0 * i + 4) for i in range(100)]
    recent = record(tmp_path / "t.json", firings).recent
    assert [f.start_s for f in recent] == [5.0 * i for i in range(40, 100)]


def test_a_trace_that_reached_its_limit_is_known_as_cut(tmp_path):
    firings = [Fired(0, "leaf", "leaf", "forward", 1, i, i + 1) for i in range(10)]
    timeline = record(tmp_path / "t.json", firings, limit=4)
    assert timeline.is_cut and timeline.nodes["leaf"].firings == 4


def test_an_event_of_another_program_is_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('[{"ph":"X","tid":1,"ts":0,"dur":1,"name":"other"}]\n'.replace("]", "\n]"))
    with pytest.raises(DataError, match="lacks what PerfettoTrace writes"):
        read_timeline(path)

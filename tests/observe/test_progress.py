import io
import math
import os
import re
import select
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from geartrain.engine.instrument import (
    CopyExchanged,
    Exchanged,
    PartStaleness,
    Restored,
    RunEnded,
    RunStarted,
)
from geartrain.observe.progress import ProgressLine
from geartrain.observe.screen import ESSENTIAL, Piece, _fit


class Terminal(io.StringIO):
    """Keeps what a terminal would show: the lines, and how wide any line ever was."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        shown, line, at = [], "", 0
        for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", self.getvalue()):
            if piece == "\r":
                at = 0
            elif piece == "\n":
                shown.append(line.rstrip())
                line, at = "", 0
            elif piece == "\x1b[K":
                line = line[:at]
            elif piece.startswith("\x1b"):
                assert piece.endswith("m"), f"moves or hides the cursor: {piece!r}"
            else:
                line = line[:at] + piece + line[at + 1 :]
                at += 1
        return [*shown, line.rstrip()]

    def painted(self) -> list[str]:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())
        return [line for line in re.split(r"[\r\n]|\x1b\[K", plain) if line]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def test_a_terminal_keeps_a_line_per_epoch_and_the_summary(terminal, told, clock):
    told.tell(ProgressLine(terminal, clock=clock), *told.run_events())
    assert terminal.lines() == [
        "threads: 2 workers, at most 8 in flight, 3 epochs",
        "epoch 1/3 loss 1.0000 accuracy 70.0% valid 70.0% 500 ms 200/s stale branch: 1.5",
        "epoch 2/3 loss 0.5000 accuracy 80.0% valid 82.0% 500 ms 200/s stale branch: 2.5",
        "epoch 3/3 loss 0.3333 accuracy 90.0% valid 79.0% 500 ms 200/s stale branch: 1.5",
        "done: 3 epochs, 300 instances in 1.5 s of training, 200/s",
        "  best valid accuracy 82.0% (epoch 2), loss 0.6000 (epoch 1)",
        "  updates    leaf: 120, branch: 3,600",
        "  most stale branch: mean 2.50, at most 4 (epoch 2)",
        "",
    ]


def test_evaluations_within_an_epoch_leave_lines_of_their_own(terminal, told, clock):
    start, *_, end = told.run_events()
    quarters = [replace(told.epoch_ended(1), epoch=e, instances=25) for e in (0.25, 0.5)]
    told.tell(ProgressLine(terminal, clock=clock), start, *quarters, end)
    lines = [line.split(" loss")[0] for line in terminal.lines()]
    assert lines[1:3] == ["epoch 0.25/3", "epoch 0.50/3"]
    assert lines[3].startswith("done: 0.50 epochs")
    assert "(epoch 0.25)" in lines[4]


def test_the_live_line_fills_eighty_columns_with_everything(terminal, told, clock):
    line = ProgressLine(terminal, clock=clock)
    line.on_progress(told.progress(5120, total=8544, active=64))
    assert terminal.lines() == [
        "epoch 1/3 ━━━─── 5120/8544 1,712/s loss 0.8123 accuracy 80.7% 64 live stale 1.2"
    ]
    assert len(terminal.lines()[0]) < 80


def test_no_line_is_ever_wider_than_the_terminal(terminal, told, clock, monkeypatch):
    for columns in (20, 33, 47, 60, 80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        metrics = {"accuracy": 0.9, "a_metric_with_a_very_long_name": 0.5, "mae": 123456.0}
        line = ProgressLine(terminal, clock=clock, minimum_interval_s=0)
        told.tell(line, *told.run_events())
        line.on_progress(told.progress(5, total=123_456_789, metrics=metrics))
        line.on_epoch_ended(told.epoch_ended(1, metrics=metrics, valid=metrics))
        line.on_run_ended(RunEnded("failed", 1, 1.0, "a long reason\twith a tab " * 20))
        assert max(map(len, terminal.painted())) < columns
        terminal.truncate(0)
        terminal.seek(0)


def test_a_wide_terminal_loses_nothing(terminal, told, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    line = ProgressLine(terminal, clock=clock)
    line.on_epoch_ended(told.epoch_ended(2))
    assert terminal.lines()[0] == (
        "epoch 2/3  loss 0.5000  accuracy 80.0%  valid accuracy 82.0%  valid loss 0.7000  "
        "500 ms  200/s  stale branch: 2.5 (max 4)"
    )


def test_repaints_keep_their_distance_but_a_new_pass_shows_at_once(terminal, told, clock):
    line = ProgressLine(terminal, minimum_interval_s=0.2, clock=clock)
    for clock.now, finished in ((1.0, 10), (1.1, 11), (1.19, 12), (1.21, 13)):
        line.on_progress(told.progress(finished))
    clock.now = 1.25
    line.on_progress(told.progress(7, mode="evaluate", staleness=math.nan))
    shown = [
        re.search(r"^(epoch|valid) .* (\d+)/100", each).group(1, 2) for each in terminal.painted()
    ]
    assert shown == [("epoch", "10"), ("epoch", "13"), ("valid", "7")]
    assert "stale" not in terminal.lines()[-1]


def test_each_repaint_is_one_write(terminal, told, clock, monkeypatch):
    line, writes = ProgressLine(terminal, clock=clock), []
    monkeypatch.setattr(terminal, "write", writes.append)
    line.on_progress(told.progress())
    assert len([each for each in writes if each]) == 1


def test_without_a_terminal_there_are_plain_lines_every_ten_seconds(told, clock):
    stream = io.StringIO()
    line = ProgressLine(stream, clock=clock)
    for clock.now in range(25):
        line.on_progress(told.progress(clock.now))
    line.on_epoch_ended(told.epoch_ended(1))
    lines = stream.getvalue().splitlines()
    assert [each.split("  ")[1].strip() for each in lines[:-1]] == ["10/100", "20/100"]
    assert lines[-1].startswith("epoch 1/3  loss 1.0000")
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_is_not_repainted(terminal, told, clock, monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    told.tell(ProgressLine(terminal, clock=clock), *told.run_events())
    assert "\x1b" not in terminal.getvalue() and "\r" not in terminal.getvalue()
    assert "epoch 3/3 loss 0.3333" in terminal.getvalue()


def test_plain_can_be_asked_for(terminal, told, clock):
    told.tell(ProgressLine(terminal, plain=True, clock=clock), *told.run_events())
    assert "\x1b" not in terminal.getvalue()


def test_data_without_length_and_a_loss_not_yet_known_are_shown_as_such(terminal, told, clock):
    line = ProgressLine(terminal, clock=clock)
    line.on_progress(told.progress(5120, total=None, loss=math.nan, metrics={}))
    shown = terminal.lines()[0]
    assert "5,120" in shown and "loss      -" in shown
    assert "━" not in shown and "nan" not in shown


def test_an_empty_pass_shows_no_bar_and_does_not_fail(terminal, told, clock):
    ProgressLine(terminal, clock=clock).on_progress(told.progress(0, total=0))
    assert "0/0" in terminal.lines()[0]


def test_simulated_runs_say_that_seconds_are_virtual(terminal, told, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    line = ProgressLine(terminal, clock=clock)
    line.on_run_started(RunStarted("simulated", 1, 1, 1))
    line.on_epoch_ended(told.epoch_ended(1))
    line.on_run_ended(RunEnded("done", 100, 0.5))
    lines = terminal.lines()
    assert lines[0] == "simulated: 1 worker, at most 1 in flight, 1 epoch; virtual seconds"
    assert "500 ms (virtual)" in lines[1]
    assert lines[2].endswith("in 500 ms of virtual training, 200/s")


def test_evaluation_outside_of_a_run_leaves_its_last_line_once(terminal, told, clock):
    line = ProgressLine(terminal, clock=clock)
    for finished in (50, 100, 100):
        line.on_progress(told.progress(finished, mode="evaluate", epoch=0))
    kept, rest = terminal.lines()
    assert kept.startswith("evaluate  100/100") and rest == ""


def test_a_failure_says_why_in_one_line_and_needs_no_epoch(terminal, clock):
    line = ProgressLine(terminal, clock=clock)
    line.on_run_ended(RunEnded("failed", 0, 0.0, "node 'leaf' raised\nTraceback ..."))
    assert terminal.lines() == [
        "failed: 0 epochs, 0 instances",
        "  because    node 'leaf' raised",
        "",
    ]


def test_many_parts_are_counted_rather_than_wrapped(terminal, told, clock):
    line = ProgressLine(terminal, clock=clock)
    line.on_epoch_ended(told.epoch_ended(1, updates={f"stage{i}": 7 for i in range(30)}))
    line.on_run_ended(RunEnded("interrupted", 1, 1.0))
    (updates,) = (each for each in terminal.lines() if "updates" in each)
    shown = len(re.findall(r"stage\d+: 7", updates))
    assert 0 < shown < 30 and updates.endswith(f", {30 - shown} more")


def test_a_stream_that_knows_only_ascii_gets_ascii(told, clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    class Ascii(Terminal):
        encoding = "ascii"

    stream = Ascii()
    line = ProgressLine(stream, clock=clock)
    line.on_progress(told.progress(metrics={"précision": 0.5}))
    assert stream.getvalue().isascii() and "####" in stream.getvalue()


def test_events_may_come_from_several_threads(terminal, told, clock):
    line = ProgressLine(terminal, clock=clock, minimum_interval_s=0)
    for event in told.run_events():
        thread = threading.Thread(target=told.tell, args=(line, event))
        thread.start()
        thread.join()
    assert [each[:9] for each in terminal.lines()[1:4]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


@pytest.mark.parametrize("interval", [-1.0, math.nan])
def test_a_negative_interval_is_refused(interval):
    with pytest.raises(ValueError, match="minimum_interval_s is"):
        ProgressLine(io.StringIO(), minimum_interval_s=interval)


@settings(deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=9),
    width=st.integers(1, 120),
)
def test_pieces_give_way_until_the_line_fits(lengths, width):
    pieces = [
        Piece(
            tuple(Text("x" * n) for n in sorted(each, reverse=True)),
            tuple(range(k, k + 5 * len(each), 5)),
        )
        for k, each in enumerate(lengths)
    ]
    texts, _, gap = _fit(pieces, width)
    assert sum(len(t) for t in texts) + gap * (len(texts) - 1) <= width or not texts
    full = sum(max(each) for each in lengths) + 2 * (len(lengths) - 1)
    assert full > width or len(texts) == len(pieces)


def test_an_essential_piece_stays_though_it_does_not_fit():
    head = Piece((Text("epoch 1/3"),), (ESSENTIAL,))
    texts, _, _ = _fit([head, Piece((Text("loss"),), (10,))], 5)
    assert [t.plain for t in texts] == ["epoch 1/3"]


def test_a_shorter_repaint_leaves_nothing_of_a_longer_one(terminal, told, clock):
    line = ProgressLine(terminal, clock=clock, minimum_interval_s=0)
    line.on_progress(told.progress(total=None, metrics={"accuracy": 0.8}))
    line.on_progress(told.progress(total=None, metrics={}))
    assert terminal.lines() == [
        "epoch 1/3  50  1,712/s  loss 0.8123  8 in flight  stale 1.2",
    ]


def test_a_real_terminal_is_recognised_and_ends_with_an_empty_line(told, clock, monkeypatch):
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        line = ProgressLine(stream, clock=clock)
        line.on_progress(told.progress())
        line.on_run_ended(RunEnded("done", 1, 1.0))
        shown = ""
        while "done" not in shown or (select.select([ours], [], [], 0)[0]):
            shown += os.read(ours, 65536).decode()
    os.close(ours)
    assert shown.startswith("\r\x1b[") and "epoch" in shown
    assert shown.endswith("\r\n")


def test_the_first_line_says_how_workers_share_weights(terminal, clock):
    started = RunStarted("threads", 2, 8, 3, sharing="shared weights")
    ProgressLine(terminal, clock=clock).on_run_started(started)
    assert (
        terminal.lines()[0] == "threads: 2 workers, shared weights, at most 8 in flight, 3 epochs"
    )


def test_deaths_of_workers_are_counted_on_the_line_and_in_the_summary(terminal, told, clock):
    def restored(deaths: int) -> Restored:
        return Restored("train", 1, "it was killed", deaths, 10, 1, 400, 600, seconds=1.25)

    line = ProgressLine(terminal, clock=clock)
    *_, end = told.run_events()
    told.tell(line, told.progress(5120, total=8544), restored(1))
    told.tell(line, told.progress(400, total=8544, epoch=1))
    assert "1 death" in terminal.painted()[-1]
    told.tell(line, restored(2), end)
    assert terminal.lines()[-2] == (
        "  died       2 worker processes, 1,200 instances trained again, 2.5 s lost"
    )


def test_the_summary_says_how_often_copies_have_met_and_what_was_declined(told, clock):
    def said(meetings: float, declined: int) -> CopyExchanged:
        return CopyExchanged(
            instances=50, rounds=20, instances_per_second=9.0, sent=1200, applied=1200, merged=0,
            dropped=0, lost=0, bytes=10, bytes_per_round=0.5, present=True, declined=declined,
            staleness=PartStaleness(0.0, 0, (1200,)), meetings=20, meetings_per_round=meetings,
        )  # fmt: skip

    *events, end = told.run_events()
    both = Exchanged(1.0, 1.0, "ElasticAverage", 0.25, (said(0.5, 3), said(0.75, 0)))
    plain = io.StringIO()
    told.tell(ProgressLine(plain, clock=clock), *events, both, both, end)
    assert plain.getvalue().splitlines()[-1] == (
        "  copies     2 by ElasticAverage, 6 of 4,800 letters declined, 0.2500 apart, "
        "0.62 meetings a gradient"
    )

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from geartrain.engine.instrument import Chosen, Restored, RunStarted
from geartrain.errors import DataError
from geartrain.observe.jsonlog import JsonLog
from geartrain.observe.report import write_report
from geartrain.observe.trace import PerfettoTrace

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps texts, tags and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


@pytest.fixture
def run(tmp_path, told):
    folder = tmp_path / "trees & <co>"
    ticks = iter(range(10_000))
    told.tell(JsonLog(folder / "metrics.jsonl", clock=lambda: next(ticks)), *told.run_events())
    told.tell(PerfettoTrace(folder / "trace.json"), *told.run_events())
    config = {"recipe": "sentiment", "optimiser": {"lr": 0.05, "name": "<script>"}, "sizes": [1, 2]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "graph.mmd").write_text("graph LR\n  leaf --> branch\n")
    return folder


def page_of(run, **other):
    return Page(write_report(run, **other).read_text(encoding="utf-8"))


def test_evaluations_within_an_epoch_have_rows_of_their_own(tmp_path, told):
    start, *_, end = told.run_events()
    entries = [replace(told.epoch_ended(1), epoch=e) for e in (0.5, 1, 1.5)]
    told.tell(JsonLog(tmp_path / "metrics.jsonl"), start, *entries, end)
    texts = page_of(tmp_path).texts
    assert "1.50 of 3" in texts
    assert {"0.50", "1", "1.50"} <= set(texts)


def test_the_page_holds_every_section(run):
    page = page_of(run)
    headings = ["Curves", "Epochs", "Staleness", "Who did what, when", "Graph", "Configuration"]
    assert [text for text in page.texts if text in headings] == headings
    for wanted in (
        "trees & <co>",
        "done",
        "82.0% (epoch 2)",
        "0.6000 (epoch 1)",
        "leaf: mean 0.50, 60 rows",
        "branch: mean 1.55, 60 rows",
        "Batch sizes",
        "graph LR\n  leaf --> branch",
        "leaf <b>",
        "optimiser.name",
        "<script>",
        "[1, 2]",
    ):
        assert wanted in page.texts, wanted


def test_the_page_loads_nothing_and_runs_nothing(run):
    page = page_of(run)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for tag, key, value in page.attributes:
        assert key not in ("src", "href", "srcset") and not key.startswith("on"), (tag, key, value)
    text = write_report(run).read_text()
    assert not re.search(r"https?://|@import|url\(", text)
    assert "default-src 'none'" in text


def test_the_gantt_chart_ends_with_training_not_with_the_last_validation(run):
    page = page_of(run)
    tips = [text for text in page.texts if re.match(r".+ (forward|backward), \d+ rows", text)]
    assert len(tips) == 60
    assert sum("100 rows" in tip for tip in tips) == 10  # of epochs 1 and 2, not of 3
    assert tips[-1] == 'branch "b" backward, 16 rows, 20 ms'


def test_busy_shares_are_those_of_the_trace(run):
    # Worker 0: 30 firings of 20 ms and 15 of 80 ms; worker 1: 30 of 20 ms; from 0 s to 2.98 s.
    page = page_of(run)
    assert f"{100 * 1.8 / 2.98:.1f}%" in page.texts
    assert f"{100 * 0.6 / 2.98:.1f}%" in page.texts


def test_trace_config_and_graph_may_be_missing(run):
    for name in ("trace.json", "config.json", "graph.mmd"):
        (run / name).unlink()
    page = page_of(run)
    assert "Who did what, when" not in page.texts and "Configuration" not in page.texts
    assert "graph LR; a-->b" in page.texts  # as the run told it at its start


def test_the_page_goes_where_it_is_asked_to(run, tmp_path):
    assert write_report(run) == run / "report.html"
    out = tmp_path / "elsewhere" / "page.html"
    assert write_report(run, out) == out and out.exists()


def test_a_killed_run_has_a_report_too(run):
    metrics, trace = run / "metrics.jsonl", run / "trace.json"
    metrics.write_bytes(metrics.read_bytes()[:-30])
    trace.write_bytes(trace.read_bytes()[:-30])
    page = page_of(run)
    assert "not ended: killed, or still running" in page.texts
    assert "3 of 3" in page.texts


def test_a_run_killed_in_its_first_epoch_shows_how_the_pass_went(tmp_path, told):
    ticks = iter(range(100))
    log = JsonLog(tmp_path / "metrics.jsonl", clock=lambda: next(ticks))
    log.on_run_started(RunStarted("threads", 1, 1, 1))
    for finished in (10, 20, 30):
        log.on_progress(told.progress(finished))
    log.close()
    page = page_of(tmp_path)
    assert "within the pass" in page.texts and "polyline" in page.tags


def test_epochs_that_a_resumed_run_repeats_count_once(tmp_path, told):
    log = JsonLog(tmp_path / "metrics.jsonl")
    log.on_run_started(RunStarted("threads", 1, 1, 3))
    for epoch in (1, 2):
        log.on_epoch_ended(told.epoch_ended(epoch))
    log.on_run_started(RunStarted("threads", 1, 1, 3))
    log.on_epoch_ended(told.epoch_ended(2, loss=0.1234, instances=50))
    log.close()
    page = page_of(tmp_path)
    assert "0.1234" in page.texts and "0.5000" not in page.texts[page.texts.index("Epochs") :]
    assert "150" in page.texts  # instances


def test_losses_that_are_not_finite_do_not_break_the_page(tmp_path, told):
    log = JsonLog(tmp_path / "metrics.jsonl")
    log.on_run_started(RunStarted("simulated", 1, 1, 3))
    nothing = {"loss": math.nan, "metrics": {}, "valid": {"f1": math.nan}, "staleness": {}}
    log.on_epoch_ended(told.epoch_ended(1, **nothing, updates={}, seconds=0.0))
    log.close()
    page = page_of(tmp_path)
    assert "nan" not in " ".join(page.texts).lower()


def test_a_folder_without_metrics_is_refused_with_advice(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl.*runs/<name>"):
        write_report(tmp_path / "nowhere")


def test_settings_that_are_not_json_are_refused(run):
    (run / "config.json").write_text("{lr: 1}")
    with pytest.raises(DataError, match=r"config\.json: not JSON"):
        write_report(run)


def test_an_event_without_its_fields_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "EpochEnded", "epoch": 1}\n')
    with pytest.raises(DataError, match="expected the fields that JsonLog"):
        write_report(tmp_path)


def test_what_was_chosen_and_who_died_are_on_the_page(run, told):
    assert "Deaths of workers" not in page_of(run).texts
    log = JsonLog(run / "metrics.jsonl")
    log.on_run_started(RunStarted("threads", 1, 8, 3))
    ways = {"two worker processes": 1.72, "one worker": 1.0}
    log.on_chosen(Chosen("processes", 2, {"a": 0}, "", "two worker processes: <reason>", 1.5, ways))
    killed = "worker 1 was killed by SIGKILL (9)"
    log.on_restored(Restored("train", 1, killed, 1, 10, 1, 400, 612, 8, 1.25, "memory", 2.5))
    log.close()
    texts = page_of(run).texts
    assert "two worker processes: <reason>" in " ".join(texts)
    assert "two worker processes 1.72, one worker 1.00" in " ".join(texts)
    assert "processes, 2 workers" in texts  # what has become of it, not what it began with
    assert texts[texts.index("deaths of workers") + 1] == "1"
    assert {killed, "memory", "612", "training"} <= set(texts)

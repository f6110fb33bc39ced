"""What the page of a run says of its workers is what they said."""

import itertools
import json
import re
from functools import partial

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.instrument import EpochEnded, Fired, Link, NodeWork, RunStarted, Worked
from geartrain.graph.drawing import Outline, OutlineEdge, OutlineNode
from geartrain.observe.drawn import MOST_DRAWN, drawn_graph
from geartrain.observe.jsonlog import JsonLog, read_json_log
from geartrain.observe.report import write_report
from geartrain.observe.workers import WorkSums, portions_section, traffic_section, workers_section
from geartrain.runtime.threads import _Run
from tests.observe.test_report import Page

EVENT = {
    "epoch": 1,
    "seconds": 10.0,
    "nodes": [
        {"worker": 0, "node": "leaf", "direction": "forward", "firings": 4, "rows": 10,
         "seconds": 2.0, "sizes": [0, 1, 0, 3]},
        {"worker": 0, "node": "leaf", "direction": "backward", "firings": 2, "rows": 10,
         "seconds": 3.0, "sizes": [0, 0, 0, 0, 2]},
        {"worker": 1, "node": "cell", "direction": "forward", "firings": 1, "rows": 0,
         "seconds": 1.0, "sizes": [1]},
    ],
    "waiting": [4.0, 8.0],
    "links": [
        {"sender": 0, "receiver": 1, "messages": 3, "bytes": 3072},
        {"sender": 1, "receiver": 2, "messages": 2, "bytes": 500},
    ],
}  # fmt: skip


def page_of(html):
    return Page(f"<main>{html}</main>")


def cells(html):
    """Texts by row of the tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.S)
    return [[plain(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", r, re.S)] for r in rows]


def workers_of(html):
    """The section on workers."""
    return re.search(r"<section><h2>Who worked.*?</section>", html, re.S)[0]


def plain(cell):
    return re.sub(r"<title>.*?</title>|<[^>]*>", "", cell).strip()


def test_shares_of_the_time_are_those_of_the_events_together():
    work = WorkSums([EVENT, EVENT | {"epoch": 2, "seconds": 30.0}])
    assert work.seconds == 40.0
    assert work.spent[0] == {"waiting": 8.0, "forward": 4.0, "backward": 6.0, "other": 22.0}
    assert work.busy(0) == 0.25 and work.busy(1) == 0.05
    html = workers_section(work, "processes")
    assert cells(html) == [
        ["worker", "busy", "forward", "backward", "waiting", "other", "firings"],
        ["worker 0", "25.0%", "10.0%", "15.0%", "20.0%", "55.0%", "12"],
        ["worker 1", "5.0%", "5.0%", "0.0%", "40.0%", "55.0%", "2"],
    ]
    texts = page_of(html).texts
    assert "worker 0, backward: 15.0%, 6.0 s" in texts
    assert "virtual" not in html and "virtual" in workers_section(work, "simulated")


def test_rows_per_firing_are_means_with_a_bar_for_each_size():
    html = portions_section(WorkSums([EVENT]))
    rows = cells(html)[1:]
    assert [row[:6] for row in rows] == [
        ["leaf", "backward", "0", "2", "10", "5.0"],
        ["leaf", "forward", "0", "4", "10", "2.5"],
        ["cell", "forward", "1", "1", "0", "0.0"],
    ]
    texts = page_of(html).texts
    assert {"1 rows: 1 firings", "2 rows: 0 firings", "3–4 rows: 3 firings"} <= set(texts)
    assert "5–8 rows: 2 firings" in texts and "0 rows: 1 firings" in texts
    assert 'aria-label="leaf forward: 1 rows: 1 firings;' in html


def test_bytes_between_processes_are_a_table_from_and_to():
    html = traffic_section(WorkSums([EVENT]), 2, "processes")
    assert cells(html) == [
        ["from \\ to", "worker 0", "worker 1", "program", "sent"],
        ["worker 0", "-", "3.00 KiB 3 messages", "-", "3.00 KiB"],
        ["worker 1", "-", "-", "500 B 2 messages", "500 B"],
        ["program", "-", "-", "-", "0 B"],
        ["all", "0 B", "3.00 KiB", "500 B", "3.49 KiB"],
    ]


def test_workers_of_one_memory_send_nothing_and_the_page_says_so():
    assert "one memory" in traffic_section(WorkSums([EVENT | {"links": []}]), 2, "threads")


def test_a_run_without_a_firing_has_none_of_the_sections():
    nothing = {"epoch": 1, "seconds": 0.0, "nodes": [], "waiting": [0.0, 0.0], "links": []}
    for events in ([], [nothing]):
        work = WorkSums(events)
        assert workers_section(work, "threads") == portions_section(work) == ""
        assert traffic_section(work, 2, "threads") == ""


def test_a_resumed_epoch_counts_once(tmp_path, told):
    log = JsonLog(tmp_path / "metrics.jsonl")
    work = NodeWork(0, "leaf", "forward", 5, 10, 0.25, (0, 0, 5))
    for epochs in ((1, 2), (2, 3)):
        log.on_run_started(RunStarted("threads", 1, 1, 3))
        for epoch in epochs:
            log.on_worked(Worked(epoch, float(epoch), 0.5, [work], [0.1], []))
            log.on_epoch_ended(told.epoch_ended(epoch))
    log.close()
    html = write_report(tmp_path).read_text()
    assert ["worker 0", "50.0%", "50.0%", "20.0%", "30.0%", "15"] in cells(html)


def test_names_are_escaped_wherever_they_stand(tmp_path, told):
    bad = "<b>&\"'"
    outline = Outline([OutlineNode(bad, bad, bad, bad, [bad])], [OutlineEdge(0, 0, bad)])
    log = JsonLog(tmp_path / "metrics.jsonl")
    log.on_run_started(RunStarted("threads", 1, 1, 1, {bad: 0}, bad, bad, outline=outline))
    work = [NodeWork(0, bad, "forward", 5, 10, 0.25, (0, 0, 5))]
    log.on_worked(Worked(1, 1.0, 0.5, work, [0.1], [Link(0, 1, 1, 1)]))
    log.on_epoch_ended(told.epoch_ended(1))
    log.close()
    html = write_report(tmp_path).read_text()
    page = Page(html)  # tags nest
    assert "b" not in page.tags and "<b>" not in html
    assert {"<b>&\"'", "a part, worker 0"} <= set(page.texts)


@pytest.mark.parametrize("spoiled", [
    {"worker": -1}, {"seconds": -1.0}, {"seconds": None}, {"rows": 1.5}, {"direction": "aside"},
    {"sizes": [-1]}, {"firings": 2**60},
])  # fmt: skip
def test_work_that_cannot_be_is_refused_with_its_place(tmp_path, spoiled):
    event = json.loads(json.dumps(EVENT)) | {"event": "Worked", "time_s": 1.0}
    event["nodes"][1] |= spoiled
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    with pytest.raises(gt.DataError, match=r"Worked\.nodes\[1\]\." + next(iter(spoiled))):
        write_report(tmp_path)


def tree_graph():
    graph = gt.Graph(vertex=("token",), value=("label",))
    torch.manual_seed(0)
    cell = gt.nn.TokenRNN(5, 6, embedding_dim=4)
    stream = gt.nn.Recurrent(cell, read="token", name="cell", run="steps")(graph.input("start"))
    stream.through(nn.Linear(6, 2), name="readout").loss(gt.cross_entropy, "label")
    return graph


def lists(n):
    draw = torch.Generator().manual_seed(1)
    for k in range(n):
        length = 2 + k % 4
        tokens = torch.randint(5, (length,), generator=draw).numpy()
        yield gt.Instance(
            {"start": (torch.zeros(1, 6), [0])}, vertex={"token": tokens}, value={"label": k % 2}
        )


class Seen(gt.AbstractInstrument):
    wants_firings = True

    def __init__(self):
        self.fired, self.worked, self.ended = [], [], []

    def on_fired(self, event: Fired):
        self.fired.append(event)

    def on_worked(self, event: Worked):
        assert len(self.worked) == len(self.ended)  # before the epoch's end
        self.worked.append(event)

    def on_epoch_ended(self, event: EpochEnded):
        self.ended.append(event)


RUNTIMES = {
    "simulated": lambda: gt.Simulated(2, seed=0),
    "threads": lambda: gt.Threads(2, kernel_threads=1),
    "processes": lambda: gt.Processes(2, kernel_threads=1),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_a_run_says_of_its_workers_is_what_they_fired(runtime, tmp_path):
    seen, made = Seen(), RUNTIMES[runtime]()
    data = list(lists(40))
    session = gt.Session(
        tree_graph(),
        rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=10),
        runtime=made,
        max_active=8,
        schedule=gt.Schedule(placement={"cell": 0, "readout": 1}),
        instruments=[seen, JsonLog(tmp_path / "metrics.jsonl")],
    )
    session.fit(data, epochs=2)  # without validation, whose firings are not counted
    if isinstance(made, gt.Processes):
        made.close()
    assert len(seen.worked) == 2
    together: dict[tuple[int, str, str], list[float]] = {}
    for event in seen.worked:
        for node in event.nodes:
            sums = together.setdefault((node.worker, node.node, node.direction), [0, 0, 0.0])
            for i, value in enumerate((node.firings, node.rows, node.seconds)):
                sums[i] += value
            assert sum(node.sizes) == node.firings
    expected: dict[tuple[int, str, str], list[float]] = {}
    for fired in seen.fired:
        sums = expected.setdefault((fired.worker, fired.node, fired.direction), [0, 0, 0.0])
        for i, value in enumerate((1, fired.rows, fired.end_s - fired.start_s)):
            sums[i] += value
    assert together.keys() == expected.keys()
    for key, sums in together.items():
        assert sums == pytest.approx(expected[key])
    tokens = sum(len(x.vertex["token"]) for x in data)
    assert together[0, "cell", "forward"][1] == 2 * tokens
    for event in seen.worked:
        busy = [sum(n.seconds for n in event.nodes if n.worker == w) for w in (0, 1)]
        assert all(
            0 <= b + w <= event.seconds * 1.001 for b, w in zip(busy, event.waiting, strict=True)
        )
        ends = {(link.sender, link.receiver) for link in event.links}
        every = set(itertools.permutations(range(3), 2))
        assert ends == (every if runtime == "processes" else set())
    if runtime == "processes":
        # Each list goes over once, 6 numbers; its gradient comes back.
        over = [x for e in seen.worked for x in e.links if (x.sender, x.receiver) == (0, 1)]
        assert sum(link.bytes for link in over) > 2 * 40 * 6 * 4
        assert all(link.messages <= link.bytes for link in over)
    html = write_report(tmp_path).read_text()
    firings = [f"{sum(e.worker == w for e in seen.fired):,}" for w in (0, 1)]
    assert [row[-1] for row in cells(workers_of(html))[1:]] == firings
    drawing = html[html.index('<svg class="graph"') :]
    assert "cell on worker 0" in drawing and "readout on worker 1" in drawing
    assert drawing.count('class="edge back"') == 1  # the loop


def test_a_simulated_worker_waits_whenever_it_does_not_fire(tmp_path):
    seen = Seen()
    session = gt.Session(
        tree_graph(),
        rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=10),
        runtime=gt.Simulated(2, seed=0, costs=gt.Costs(latency_s=1e-3)),
        max_active=8,
        instruments=[seen],
    )
    session.fit(list(lists(20)), epochs=1)
    (event,) = seen.worked
    for w, waited in enumerate(event.waiting):
        busy = sum(node.seconds for node in event.nodes if node.worker == w)
        assert busy + waited == pytest.approx(event.seconds)


def test_a_whole_loop_is_drawn_with_the_worker_of_its_node(tmp_path):
    graph = gt.Graph(vertex=("token",), value=("label",))
    cell = gt.nn.TokenRNN(5, 6, embedding_dim=4)
    stream = gt.nn.Recurrent(cell, read="token", name="cell", run="whole")(graph.input("start"))
    stream.through(nn.Linear(6, 2), name="readout").loss(gt.cross_entropy, "label")
    session = gt.Session(
        graph,
        rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=gt.Instances(10)),
        instruments=[JsonLog(tmp_path / "metrics.jsonl")],
    )
    session.fit(list(lists(20)), epochs=1)
    (started, *_) = read_json_log(tmp_path / "metrics.jsonl")
    doing = {o["name"]: o["nodes"] for o in started["outline"]["operators"]}
    assert doing["cell"] == doing["cell: again"] == ["cell: loop"]
    assert doing["loss"] == doing["readout"] == ["cell: loop"]  # it reaches to the loss
    assert "cell on worker 0" in write_report(tmp_path).read_text()


def test_a_node_on_several_workers_has_a_stripe_of_each():
    outline = Outline([OutlineNode("cell", "through", "", "cell", ["cell", "cell#1"])])
    html = drawn_graph(outline, {"cell": {0}, "cell#1": {2}})
    assert "workers 0, 2" in html
    page = page_of(html)
    looks = [value for tag, key, value in page.attributes if tag == "rect" and key == "class"]
    assert looks == ["c0", "c2", "box", "c0", "c2"]  # the key; frame and stripes


def test_edges_to_nowhere_are_left_out_and_too_large_a_graph_is_not_drawn(tmp_path):
    few = [OutlineNode("a", "input"), OutlineNode("b", "loss")]
    html = drawn_graph(Outline(few, [OutlineEdge(0, 1), OutlineEdge(0, 7), OutlineEdge(-1, 0)]), {})
    assert html.count('class="edge"') == 1
    assert drawn_graph(Outline(few * MOST_DRAWN), {}) == "" == drawn_graph(Outline(), {})
    log = JsonLog(tmp_path / "metrics.jsonl")
    log.on_run_started(RunStarted("threads", 1, 1, 1, outline=Outline(few * MOST_DRAWN)))
    log.close()
    assert (
        f"It has {2 * MOST_DRAWN} operators and is not drawn." in write_report(tmp_path).read_text()
    )


def test_the_outline_has_every_operator_and_edge_of_the_drawing():
    seen = []

    class Started(gt.AbstractInstrument):
        def on_run_started(self, event):
            seen.append(event)

    session = gt.Session(
        tree_graph(),
        rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01)),
        instruments=[Started()],
    )
    session.fit(list(lists(4)), epochs=1)
    ((outline, source),) = [(event.outline, event.graph_mermaid) for event in seen]
    names = [operator.name for operator in outline.operators]
    assert len(re.findall(r"^    n\d+\W", source, re.M)) == len(names) + len(outline.edges)
    told = {(names[e.source], names[e.target], e.label) for e in outline.edges}
    assert ("cell: again", "readout", "no") in told and (
        "cell: next vertex",
        "cell: loop",
        "",
    ) in told
    assert {o.name: o.part for o in outline.operators if o.part} == {
        "cell": "cell", "readout": "readout",
    }  # fmt: skip


def test_what_comes_after_the_end_of_a_pass_is_not_waiting(monkeypatch):
    """Whoever is woken by the end goes on when it may, as on a machine that is busy."""
    now = _Run._now
    monkeypatch.setattr(_Run, "_now", lambda run: now(run) + (100 if run.seconds else 0))
    seen = Seen()
    session = gt.Session(
        tree_graph(),
        runtime=gt.Threads(2, kernel_threads=1),
        max_active=8,
        schedule=gt.Schedule(placement={"cell": 0, "readout": 1}),
        instruments=[seen],
    )
    session.fit(list(lists(4)), epochs=1)
    [event] = seen.worked
    for w, waited in enumerate(event.waiting):
        assert (
            waited + sum(n.seconds for n in event.nodes if n.worker == w) <= event.seconds * 1.001
        )

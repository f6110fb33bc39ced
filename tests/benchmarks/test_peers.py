"""The benchmark of peers: turns, ratios within rounds, families at their best, tables, requests."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import main as peers
from benchmarks.peers import protocol
from benchmarks.peers.child import stepped
from benchmarks.peers.figures import (
    Document,
    Spread,
    best_of,
    draw,
    machine,
    markdown,
    rates_of,
    ratios,
)
from benchmarks.peers.systems import SIZES, System, systems_of
from geartrain_baselines.listreduce import ListRnn


def system(family: str, kind: str, detail: str, *seconds: float | None) -> dict[str, Any]:
    """100 instances a pass, in rounds of so many seconds; None: a round without a figure."""
    runs = [
        {"round": number, "instances": 100, "seconds": [s], "peak_mib": 10.0 * number}
        for number, s in enumerate(seconds, 1)
        if s is not None
    ]
    return {"family": family, "kind": kind, "detail": detail, "runs": runs}


@pytest.fixture
def document() -> Document:
    return {
        "benchmark": "peers",
        "task": "sentiment",
        "settings": {"threads": 2, "unit": "trees"},
        "machine": {"cpu": "a processor", "cores": 2, "versions": {"python": "3.11", "torch": "2"}},
        "systems": [
            system("geartrain, 256 in flight", "ours", "1 worker", 1.0, 1.0, 2.0),
            system("geartrain, 256 in flight", "ours", "2 workers", 0.5, 0.4, 1.0),
            system("levels", "baseline", "25", 2.0, 2.0, 2.0),
            system("levels", "baseline", "100", 1.0, 2.0, 4.0),
        ],
    }


def test_every_other_round_goes_backwards() -> None:
    assert list(peers.in_turn(2, 3)) == [(1, 0), (1, 1), (2, 1), (2, 0), (3, 0), (3, 1)]


def test_ratios_are_taken_within_rounds_and_leave_out_rounds_that_one_has_not() -> None:
    assert ratios([30.0, None, 40.0, 9.0], [10.0, 5.0, None, 3.0]) == [3.0, 3.0]


def test_a_spread_is_the_middle_and_both_ends() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert Spread.of([]) is None


def test_a_rate_is_of_the_median_pass_of_its_round() -> None:
    runs = [{"round": 2, "instances": 100, "seconds": [1.0, 2.0, 50.0]}, {"round": 1, "error": "x"}]
    assert rates_of({"runs": runs}, 3) == [None, 50.0, None]


def test_a_family_at_its_best_is_its_fastest_member_by_the_median(document: Document) -> None:
    # 25 has 50 in every round; 100 has 100, 50, 25: of equal medians the first one stays
    assert best_of(document) == {"geartrain, 256 in flight": 1, "levels": 2}


def test_the_table_tells_rates_memory_and_ratios_of_the_best(document: Document) -> None:
    lines = list(markdown(document))
    assert "| **geartrain, 256 in flight, 2 workers** | 200 | 100 to 250 | 30 |" in lines
    assert "| levels, 100 | 50 | 25 to 100 | 30 |" in lines
    assert lines[-1] == "| levels, 25 | 4.00 (2.00 to 5.00) |"
    assert "a processor, 2 cores, Python 3.11, torch 2; 3 rounds" in lines


def test_updates_stand_beside_the_rates_where_they_were_counted(document: Document) -> None:
    for part in document["systems"][:2]:
        for run in part["runs"]:
            run["updates"] = {"cell": 20.0, "readout": 21.0}
    for run in document["systems"][2]["runs"]:
        run["updates"] = {"level": 4.0}
    broken = {**system("DGL", "dgl", "25"), "runs": [{"round": 1, "error": "no dgl"}]}
    document["systems"].append(broken)
    lines = list(markdown(document))
    assert "| system | trees/s, median | min to max | updates a pass | peak MiB |" in lines
    assert "| **geartrain, 256 in flight, 2 workers** | 200 | 100 to 250 | 20 to 21 | 30 |" in lines
    assert "| **levels, 25** | 50 | 50 to 50 | 4 | 30 |" in lines
    assert "| levels, 100 | 50 | 25 to 100 | - | 30 |" in lines
    assert "| DGL, 25 | failed: no dgl | | | |" in lines


def test_a_system_that_failed_is_in_the_table_with_its_reason(document: Document) -> None:
    broken = system("DGL", "dgl", "25")
    broken["runs"] = [{"round": 1, "error": "ImportError: no dgl"}]
    document["systems"].append(broken)
    lines = list(markdown(document))
    assert "| DGL, 25 | failed: ImportError: no dgl | | |" in lines
    assert not any(line.startswith("| DGL, 25 | 1") for line in lines)


def test_the_command_is_kept_whole_but_for_paths_and_what_is_written() -> None:
    given = (
        "sentiment --data /home/me/data --rounds 3 --json=out.json --chart out.png --only".split()
    )
    told = peers.command_of([*given, "batching, 25", "--dgl-python=/home/me/DGL/bin/python"])
    assert told == (
        "PYTHONPATH=src python -m benchmarks.peers.main sentiment --data ../shared/data --rounds 3 "
        "--only 'batching, 25' --dgl-python DGL/bin/python"
    )


def test_the_table_begins_with_the_command_that_made_it(document: Document) -> None:
    options = [f"--only 'text {k}'" for k in range(12)]
    document["command"] = " ".join(["python -m benchmarks.peers.main sentiment", *options])
    lines = list(markdown(document))
    shown = [line.removesuffix(" \\").strip() for line in lines[: lines.index("")]]
    assert len(shown) > 1
    assert " ".join(shown) == document["command"]


@pytest.mark.parametrize(
    "task",
    [
        *("sentiment", "sentiment-100", "babi", "qm9", "qm9-20"),
        *("listreduce", "listreduce-100"),
    ],
)
def test_the_page_shows_the_tables_of_the_results(task: str) -> None:
    folder = Path(peers.__file__).parent
    results = json.loads((folder / "results" / f"{task}.json").read_text())
    assert "\n".join(markdown(results)) in (folder / "README.md").read_text()


def test_the_table_says_where_the_last_round_was_cut_short(document: Document) -> None:
    assert any(line.endswith("; 3 rounds") for line in markdown(document))
    del document["systems"][3]["runs"][2]
    text = "3 rounds, not all complete: 2 to 3 runs a system"
    assert any(line.endswith(text) for line in markdown(document))


def test_the_chart_is_a_picture(document: Document, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "chart.png", document)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_what_failed_once_is_not_tried_again_and_all_is_saved() -> None:
    good, bad = (System(family=f, detail="", kind="baseline") for f in ("good", "bad"))
    document: Document = {"systems": [{"runs": []}, {"runs": []}]}
    asked: list[str] = []
    saved: list[int] = []

    def measure(each: System) -> Mapping[str, Any]:
        asked.append(each.family)
        if each is bad:
            return {"error": "no"}
        return {"instances": 2, "seconds": [1.0], "versions": {"torch": "2"}}

    peers.run_rounds([good, bad], 2, measure, document, lambda: saved.append(len(asked)))
    assert asked == ["good", "bad", "good"]
    assert saved == [1, 2, 3]
    assert document["systems"][0] == {
        "versions": {"torch": "2"},
        "runs": [{"round": n, "instances": 2, "seconds": [1.0]} for n in (1, 2)],
    }


@pytest.mark.parametrize("task", sorted(SIZES))
def test_all_systems_of_a_task_have_names_of_their_own(task: str) -> None:
    systems = systems_of(task, sessions=[{"precision": "bf16"}], foreign=["dgl", "dynet"])
    assert len({s.name for s in systems}) == len(systems)
    bf16 = [s for s in systems if s.settings.get("session", {}).get("precision") == "bf16"]
    assert {s.settings["in_flight"] for s in bf16} == {64, 256}
    json.dumps([s.to_json() for s in systems])


def test_foreign_systems_are_there_only_with_their_interpreter() -> None:
    assert not {"dgl", "dynet"} & {s.kind for s in systems_of("sentiment")}
    assert "dgl" in {s.kind for s in systems_of("sentiment", foreign=["dgl"])}


def test_peers_may_run_on_one_thread_as_well() -> None:
    systems = systems_of("sentiment", foreign=["dynet"], one_thread_too=True)
    alone = [s for s in systems if s.settings.get("threads") == 1]
    assert {s.kind for s in alone} == {"baseline"}
    assert len({s.name for s in systems}) == len(systems)


def test_the_table_says_where_other_programs_disturbed_it(document: Document) -> None:
    assert not any("idle" in line for line in markdown(document))
    document["systems"][0]["runs"][0]["others_cores"] = 0.8
    assert any("in 1 of 12 runs" in line and "0.8 at most" in line for line in markdown(document))


def test_neighbours_are_what_the_machine_did_less_what_this_process_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy, own, wall = iter([10.0, 14.0]), iter([1.0, 2.0]), iter([0.0, 2.0])
    monkeypatch.setattr(protocol, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(time, "monotonic", lambda: next(wall))
    assert protocol.Neighbours().cores() == 1.5


def test_one_thread_leaves_one_worker() -> None:
    ours = [s for s in systems_of("sentiment", threads=1) if s.kind == "ours"]
    assert {s.settings["workers"] for s in ours} == {1}


def test_a_share_of_a_pass_is_a_size_that_the_recipe_takes() -> None:
    assert SIZES["sentiment"].of(0.05)["trees"] == 200
    assert SIZES["sentiment"].of(0.5, 10)["trees"] == 5
    assert SIZES["babi"].of(0.25)["thousands"] == 1
    assert SIZES["babi"].of(1.0)["thousands"] == 10


def test_arguments_of_a_session_are_json_or_words() -> None:
    assert peers.session_of("precision=bf16,max_rows=512,sharing=SharedWeights") == {
        "precision": "bf16",
        "max_rows": 512,
        "sharing": "SharedWeights",
    }
    assert peers.option_of("hidden=64") == ("hidden", 64)


@pytest.mark.parametrize(
    ("command", "said", "limit_s"),
    [
        ("import sys; sys.exit('a line\\nit broke')", "it broke", 60.0),
        ("import time; time.sleep(60)", "not done after", 0.2),
    ],
)
def test_a_process_that_fails_gives_its_last_words(
    command: str, said: str, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(command)
    monkeypatch.setitem(peers.MODULES, "baseline", "broken")  # type: ignore[attr-defined]
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    each = System(family="f", detail="d", kind="baseline")
    reply = peers.run(each, {"threads": 1}, {"baseline": Path(sys.executable)}, limit_s)
    assert said in reply["error"]


def test_the_first_pass_warms_up_and_does_not_count() -> None:
    training = protocol.Training(7, iter([9.0, 1.0, 2.0]), {"torch": "2"})
    reply = protocol._reply(training, {"repeats": 2})
    assert (reply["instances"], reply["seconds"]) == (7, [1.0, 2.0])
    assert reply["peak_mib"] > 10


def test_the_loop_over_packed_steps_computes_what_packed_does() -> None:
    torch.manual_seed(0)
    net = ListRnn(8).double()
    length = torch.tensor([5, 3, 3, 2])
    tokens = torch.randint(0, 14, (5, 4))
    both = [run(tokens, length) for run in (net.packed, lambda t, n: stepped(net, t, n))]
    torch.testing.assert_close(both[1], both[0])
    grads = [torch.autograd.grad(y.square().sum(), list(net.parameters())) for y in both]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_the_machine_is_named_without_its_paths() -> None:
    found = machine()
    assert found["cores"] >= 1
    assert found["versions"]["torch"] != "absent"
    assert "/" not in json.dumps(found["versions"])

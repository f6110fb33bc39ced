"""Ways to train parts: what is counted, kept of trials, and told of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.local import claims
from benchmarks.local import main as local
from benchmarks.local.figures import gap, pareto, recovered, standings
from benchmarks.local.methods import DEEP, PARTS, WAYS
from benchmarks.local.page import page_of
from benchmarks.local.probe import Bill, Saved, Storage, probe, session_of, storage_of
from benchmarks.local.trials import TERMS, Terms, Trial, asked
from geartrain.recipes.methods import METHODS

WHOLE = 1000


class Stub:
    """Stands in for the training: a way's loss falls in a line to its own end."""

    def __init__(self, ends: dict[str, float], broken: tuple[str, ...] = ()) -> None:
        self.ends, self.broken = ends, broken
        self.calls: list[Trial] = []

    def __call__(self, trial: Trial, terms: Terms) -> dict[str, Any]:
        self.calls.append(trial)
        if trial.way in self.broken:
            return {**asked(trial, terms), "outcome": "failed", "reason": "part 0: ['w'] is NaN"}
        parallel = 1.0 if trial.way == "backprop" else 3.5
        points = [
            {
                "minibatches": 10 * k,
                "virtual_s": 20.0 * k / parallel,
                "wall_s": 2.0 * k,
                "cpu_s": 1.0 * k,
                "loss": 3.0 - (3.0 - self.ends[trial.way]) * k / 2,
                "accuracy": 0.1 * k,
            }
            for k in (1, 2)
        ]
        return {
            **asked(trial, terms),
            "outcome": "done",
            "minibatches": 20,
            "curve": points,
            "staleness": {f"part {k}": 0.0 for k in range(PARTS)},
            "forward": 1e9,
            "backward": 2e9,
            "spared": 0.0,
            "memory": [300, 300, 300, 300],
            "whole": WHOLE,
            "sent": [10.0, 10.0],
        }


ENDS = {"backprop": 1.0, "greedy": 1.1, "deep stash": 2.0, claims.DEEP: 1.25, claims.PAIR: 1.02}


def lines_of(tmp_path: Path, ends: dict[str, float], *broken: str) -> list[dict[str, Any]]:
    words = ["charlm", "--ways", ",".join([*ends, *broken]), "--out", str(tmp_path)]
    local.main(words, attempt=Stub(ends, broken))
    return local.read(tmp_path / "charlm.jsonl")


def test_a_trial_that_has_a_line_is_not_run_again_unless_asked(tmp_path: Path) -> None:
    words = ["charlm", "--ways", "backprop,greedy", "--seeds", "0,1", "--out", str(tmp_path)]
    first, second, third = Stub(ENDS), Stub(ENDS), Stub(ENDS)
    local.main(words, attempt=first)
    local.main(words, attempt=second)
    local.main([*words, "--again"], attempt=third)
    assert [(t.way, t.seed) for t in first.calls] == [
        ("backprop", 0), ("greedy", 0), ("backprop", 1), ("greedy", 1)
    ]  # fmt: skip
    assert second.calls == []
    assert third.calls == first.calls
    assert len(local.read(tmp_path / "charlm.jsonl")) == 4
    assert len((tmp_path / "charlm.jsonl").read_text().splitlines()) == 8


def test_an_unknown_way_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        local.main(["cifar", "--ways", "backprop,telepathy"])
    assert "telepathy" in capsys.readouterr().err


def test_a_target_is_found_between_two_evaluations_and_missed_where_a_seed_failed(
    tmp_path: Path,
) -> None:
    ways = standings(lines_of(tmp_path, ENDS, "deep mixed"))
    reached = ways["backprop"].reached(1.5)  # halfway from 2.0 to 1.0
    assert reached is not None
    assert reached.minibatches == pytest.approx(15)
    assert reached.virtual_s == pytest.approx(30)
    assert reached.operations == pytest.approx(15 * 3e9)
    assert ways["deep stash"].reached(1.5) is None
    assert ways["deep mixed"].lines == []
    assert ways["deep mixed"].failures == {0: "part 0: ['w'] is NaN"}


def test_what_a_correction_recovers_is_a_share_of_what_was_lost(tmp_path: Path) -> None:
    ways = standings(lines_of(tmp_path, ENDS))
    assert recovered(ways[claims.DEEP], ways["deep stash"], ways["backprop"]) == pytest.approx(0.75)
    assert recovered(ways["deep stash"], ways["deep stash"], ways["backprop"]) == 0
    assert gap(ways["greedy"], ways["backprop"]) == pytest.approx(0.1)


def test_the_front_holds_those_that_none_beats_in_both(tmp_path: Path) -> None:
    ways = standings(lines_of(tmp_path, ENDS))
    found = {way: r for way in ("backprop", "greedy", claims.DEEP) if (r := ways[way].reached(1.5))}
    assert pareto(found) == {"backprop", "greedy"}  # fewest operations; least time
    assert pareto({**found, "dgl": found["greedy"]}) == {"backprop", "greedy", "dgl"}  # a tie


def test_claims_are_judged_by_the_numbers(tmp_path: Path) -> None:
    good = "\n".join(claims.told({"charlm": standings(lines_of(tmp_path / "a", ENDS))}))
    assert "| charlm | 1 | 3.50 | met | 30 % | met |" in good
    assert "75 %, met." in good
    assert "+2.0 % | met |" in good
    worse = {**ENDS, claims.DEEP: 1.75, claims.PAIR: 1.2}
    bad = "\n".join(claims.told({"charlm": standings(lines_of(tmp_path / "b", worse))}))
    assert "25 %, not half here." in bad
    assert "+20.0 % | **missed** |" in bad


def test_promises_are_told_in_short_as_in_their_tables(tmp_path: Path) -> None:
    good, bad = tmp_path / "a", tmp_path / "b"
    both = {
        "cifar": standings(lines_of(good, {**ENDS, claims.DEEP: 1.75})),
        "charlm": standings(lines_of(bad, ENDS)),
    }
    short = "\n".join(claims.summary(both))
    assert "| cifar not half here, charlm met |" in short
    assert "| two parts: within 3 % of synchronous training | charlm +2.0 % | met |" in short
    alone = "\n".join(
        claims.summary({"charlm": standings(lines_of(tmp_path / "c", {"backprop": 1.0}))})
    )
    assert "greedy" not in alone and "by no ratio" in alone


def test_a_gear_pays_only_if_it_beats_shorter_training(tmp_path: Path) -> None:
    ends = {"backprop": 1.0, "gear 2": 1.2, "short 2": 1.1}
    none = "\n".join(claims.gears({"charlm": standings(lines_of(tmp_path / "a", ends))}))
    assert "No ratio pays" in none
    pays = {**ends, "gear 2": 1.05}
    one = "\n".join(claims.gears({"charlm": standings(lines_of(tmp_path / "b", pays))}))
    assert "No ratio pays" not in one
    assert "charlm 1:2" in one


def test_the_page_names_failures_and_the_commands(tmp_path: Path) -> None:
    ways = standings(lines_of(tmp_path, ENDS, "deep mixed"))
    page = "\n".join(page_of({"charlm": ways}))
    assert "- deep mixed, seed 0: part 0: its weights is NaN" in page
    assert "benchmarks.local.main charlm --seeds 0" in page
    assert "| deep mixed |" in page


def test_a_probe_counts_what_each_part_computes_keeps_and_sends(
    small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEARTRAIN_DATA", str(small_data))
    options = {"dim": 8, "blocks": 4, "length": 8, "batch": 2, "train_size": 8, "heads": 2}
    plain = probe(WAYS["backprop"], "charlm", options, 3)
    greedy = probe(WAYS["greedy"], "charlm", options, 3)
    piped = probe(WAYS["stash"], "charlm", options, 3)
    assert plain.backward == pytest.approx(2 * plain.forward, rel=0.1)
    assert greedy.forward > plain.forward  # heads
    assert greedy.sent_backward == 0 < plain.sent_backward == piped.sent_backward
    assert len(plain.memory) == PARTS
    assert max(plain.memory) < plain.whole < sum(piped.memory)
    assert max(plain.memory) < max(greedy.memory) < max(piped.memory)
    bill = Bill(plain.firings)
    session, task = session_of(WAYS["backprop"], "charlm", options, bill)
    fit = session.fit(list(task.load("train"))[:3], epochs=1)
    assert fit.train_seconds == pytest.approx(3e-9 * (plain.forward + plain.backward))


def test_storages_count_once_and_until_they_are_let_go() -> None:
    live: Counter[Storage] = Counter()
    tensor = torch.zeros(8)
    one, two = Saved(tensor, live), Saved(tensor[2:], live)
    assert dict(live) == {storage_of(tensor): 2}
    assert storage_of(tensor)[1] == 32
    del one
    assert live.total() == 1
    del two
    assert not live


def test_lines_that_are_kept_are_of_ways_that_there_are() -> None:
    for recipe, terms in TERMS.items():
        wanted = json.loads(json.dumps(asked(Trial("", 0), terms)))["terms"]
        for line in local.read(local.RESULTS / f"{recipe}.jsonl"):
            assert line["way"] in WAYS
            assert line["terms"] == wanted


def test_ways_are_methods_of_the_recipes() -> None:
    assert {way.method for way in WAYS.values()} <= set(METHODS)
    assert WAYS["backprop"].max_active == 1
    assert WAYS["deep stash"].max_active == PARTS + DEEP

"""The race to a loss: what is tuned, what is imagined, and how the winner is told."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import geartrain as gt
from benchmarks.cluster import race
from benchmarks.cluster.hosts import Link
from benchmarks.cluster.lines import Line, read
from benchmarks.cluster.race import ASYNCHRONOUS, OPTIONS, Setting
from benchmarks.cluster.stages import ours

LINK = Link(latency_s=0.05)
SYNCHRONOUS = Setting(batch=100, rows=1_000, rate=0.1, momentum=0.5, rising=0.2)
LATE = replace(SYNCHRONOUS, fill=0.5, method="stashed")


def trial(setting: Setting, seconds: float | None, last: float | None = 0.1) -> Line:
    return {"setting": asdict(setting), "seconds": seconds, "last": last, "target": 0.35}


@pytest.mark.parametrize("late", [False, True])
def test_settings_are_drawn_and_then_those_beside_the_best_are_tried_none_twice(late: bool) -> None:
    lines: list[Line] = []
    for k in range(12):
        setting = race.next_setting(lines, 12, late=late)
        assert setting == race.next_setting(lines, 12, late=late)
        told = asdict(setting)
        assert all((told[name] is None) is (not late and name in ASYNCHRONOUS) for name in OPTIONS)
        assert told not in [line["setting"] for line in lines]
        if k >= 8:
            best = min(lines, key=race.worth)["setting"]
            changed = [name for name in OPTIONS if told[name] != best[name]]
            assert len(changed) in (1, 2)
            for name in set(changed) - {"method"}:
                ways = OPTIONS[name]
                assert abs(ways.index(told[name]) - ways.index(best[name])) == 1
        lines.append(trial(setting, None if k == 3 else 100.0 - k))


def test_while_nobody_is_there_trainings_become_longer() -> None:
    short = replace(LATE, rows=OPTIONS["rows"][1])
    lines = [trial(short, None, 0.2), *(trial(LATE, None, 0.3) for _ in range(7))]
    assert race.next_setting(lines, 9, late=True).rows == OPTIONS["rows"][2]
    lines[0] = trial(replace(short, rows=OPTIONS["rows"][-1]), None, 0.2)
    race.next_setting(lines, 9, late=True)  # there is no longer one


def test_who_reaches_the_target_is_better_than_who_does_not_and_no_number_is_worst() -> None:
    reached, slower = trial(LATE, 9.0, 0.3), trial(LATE, 10.0, 0.1)
    lower, never = trial(LATE, None, 0.2), trial(LATE, None, 0.3)
    left_again, nothing = trial(LATE, 8.0, 0.4), trial(LATE, None, None)
    order = [reached, slower, lower, never, left_again, nothing]
    assert sorted([*order[3:], *order[:3]], key=race.worth) == order


def test_enough_is_in_flight_for_the_slowest_device_and_as_many_as_parts() -> None:
    # 12 ms a part and minibatch, 300 ms on links, so 29 keep it busy.
    assert replace(LATE, fill=1.0).in_flight(4, LINK) == 29
    assert LATE.in_flight(4, LINK) == 15
    assert LATE.in_flight(4, Link(latency_s=0.0)) == 4


@pytest.mark.parametrize("parts", [2, 4])
def test_a_drained_pipeline_takes_what_is_said_on_a_virtual_clock(parts: int) -> None:
    """Of one, two and four microbatches the quickest; no part waits for gradients to go on."""
    setting = replace(SYNCHRONOUS, batch=400)
    seconds = []
    for m in race.MICROBATCHES:
        work = replace(setting.work(None, parts), hidden=4, warm_up=1, steps=3, device_ms=0.0)
        runtime = race.imagined(replace(setting, batch=400 // m), parts, LINK)
        seconds.append(ours(work, f"drained:{m}", runtime, "stashed")["seconds"] / 4)
    assert race.drained_s(setting, parts, LINK) == pytest.approx(min(seconds))
    assert min(seconds) == seconds[-1] < seconds[0]


def test_a_trial_is_judged_by_rows_whatever_a_minibatch_has(monkeypatch) -> None:
    monkeypatch.setattr(race, "SMOOTH_ROWS", 200)
    assert race.reached([3.0, 1.0, 1.0], 100, 1.0) == 3
    assert race.reached([3.0, 1.0, 1.0], 200, 1.0) == 2
    found = race.tried(SYNCHRONOUS, None, 2, LINK, target=10.0)
    assert found["minibatches"] == 2
    assert found["seconds"] == pytest.approx(2 * race.drained_s(SYNCHRONOUS, 2, LINK))
    late = race.tried(LATE, None, 2, LINK, target=10.0)
    assert late["seconds"] < 0.6 * found["seconds"]
    assert race.tried(LATE, None, 2, LINK, target=0.0)["seconds"] is None


def test_an_exploding_training_is_a_trial_that_has_not_reached_anything() -> None:
    wild = replace(LATE, rate=1e12, rising=0.01)
    assert race.tried(wild, None, 2, LINK, target=0.1)["seconds"] is None


def test_tuning_goes_on_where_it_has_stopped(tmp_path: Path, monkeypatch) -> None:
    asked: list[Setting] = []

    def tried(setting: Setting, *_: object) -> Line:
        asked.append(setting)
        return {"seconds": 1.0, "minibatches": 1, "last": 0.1}

    monkeypatch.setattr(race, "tried", tried)
    words = ["tune", "--parts", "2", "--latency-ms", "10", "--trials", "3"]
    words += ["--tuned", str(tmp_path / "tuned.jsonl")]
    race.main([*words, "--most", "2"])
    assert len(asked) == 2
    race.main(words)
    assert [setting.method is None for setting in asked] == [True] * 3 + [False] * 3
    assert len({str(setting) for setting in asked}) == 6
    race.main(words)
    assert len(asked) == 6


def line(system: str, setting: Setting, seed: int, rate: float, many: int | None) -> Line:
    seconds = None if many is None else many * setting.batch / rate
    cell = {"parts": 4, "latency_s": 0.05, "bits_per_s": 1e9, "target": 0.07, "seed": seed}
    return cell | {
        "system": system,
        "setting": asdict(setting),
        "rows_per_second": rate,
        "minibatches": many,
        "seconds": seconds,
        "test_loss": 0.1,
    }


def test_the_table_has_the_best_synchronous_system_of_each_seed_and_pairs_of_one_seed() -> None:
    lines = [
        *(line("gpipe:1", SYNCHRONOUS, seed, 100.0, 10) for seed in (1, 2)),
        line("drained:4", SYNCHRONOUS, 1, 200.0, 10),
        line("drained:4", SYNCHRONOUS, 2, 90.0, 10),
        line("gpipe:2", SYNCHRONOUS, 2, 200.0, 10),
        line("async:14", LATE, 1, 500.0, 10),
        line("async:14", LATE, 2, 500.0, 20),
    ]
    *_, row = race.table(lines)
    assert (
        "| drained:4 or gpipe:2: 100 rows, rate 0.1, momentum 0.5, rising 20% of 1,000 | 200 |"
        in row
    )
    assert "| async:14, stashed: 100 rows," in row
    assert "**1.88** (2.50, 1.25)" in row
    *_, row = race.table([*lines, line("async:14", LATE, 1, 500.0, None)])
    assert "inf" in row, "one that never comes is not left out"


def test_the_race_may_be_imagined_with_other_seeds_than_were_tuned_with(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(race, "SMOOTH_ROWS", 500)
    words = ["--parts", "2", "--latency-ms", "50", "--target", "2.31"]
    words += ["--tuned", str(tmp_path / "tuned.jsonl")]
    small = {"batch": 100, "rows": 2_400, "rate": 0.05, "momentum": 0.5, "rising": 0.2}
    about = {"parts": 2, "latency_s": 0.05, "bits_per_s": 1e9, "target": 2.31, "seconds": 1.0}
    with (tmp_path / "tuned.jsonl").open("w") as file:
        for more in ({}, {"fill": 0.75, "method": "stashed"}):
            setting = asdict(Setting(**small, **more))
            tuned = about | {"late": bool(more), "setting": setting, "last": 2.0}
            file.write(json.dumps(tuned) + "\n")
    race.main(["imagine", *words, "--seeds", "1", "2"])
    *_, one, two = capsys.readouterr().out.splitlines()
    assert one.startswith("| 2 | 50 ms | 1 |") and two.startswith("| 2 | 50 ms | 2 |")
    lines = read(tmp_path / "imagined.jsonl")
    assert len({line["last"] for line in lines}) == 4, "each has its own weights"


def test_what_was_tuned_holds_for_links_of_all_rates_and_of_no_other_latency() -> None:
    about = {"parts": 2, "latency_s": 0.05, "bits_per_s": 1e9, "target": 0.1}
    lines = [trial(LATE, 9.0, 0.1) | about | {"late": True}]
    assert race.best(lines, about | {"bits_per_s": 1e8}, late=True) == (LATE, 1)
    with pytest.raises(LookupError, match="tune first"):
        race.best(lines, about | {"latency_s": 0.01}, late=True)


def test_before_tuning_nothing_is_raced() -> None:
    with pytest.raises(LookupError, match="tune first"):
        race.best([], {"parts": 2}, late=True)
    assert math.isinf(race.worth(trial(LATE, None, None))[0])
    assert isinstance(race.imagined(LATE, 2, LINK), gt.Simulated)

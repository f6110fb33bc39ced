"""Programs of one's own: three ways that find the same gradients, and tables of what they took."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.own import main as own
from benchmarks.own.check import require_equal_gradients
from benchmarks.own.programs import PROGRAMS
from benchmarks.own.systems import System, Trained


@pytest.mark.parametrize("name", PROGRAMS)
def test_geartrain_batching_by_hand_and_one_at_a_time_find_the_same_gradients(name: str) -> None:
    torch.manual_seed(1)
    program = PROGRAMS[name](6)
    assert require_equal_gradients(program, program.generate(3, seed=5)) < 1e-8


def test_another_gradient_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS["exits"](4)
    plain = program.plain
    monkeypatch.setattr(program, "plain", lambda item: 1.001 * plain(item))
    with pytest.raises(SystemExit, match="exits: batching by hand differs in loss"):
        require_equal_gradients(program, program.generate(2, seed=0))


@pytest.mark.parametrize(
    "system", [System("ours", 4, 8), System("hand", 4), System("plain", 4)], ids=lambda s: s.name
)
def test_every_system_makes_the_updates_that_it_was_asked_for(system: System) -> None:
    one = Trained("exits", system, width=4)
    ready = one.prepare(one.program.generate(10, seed=0))
    one.rows_with_loss = 10
    ran = one(ready)
    assert ran.updates == (3, 3)  # of 4, 4 and 2
    assert ran.instances == 10
    assert ran.loss == pytest.approx(1.79, abs=0.2)  # about log 6


def test_rounds_may_begin_with_equal_weights_after_passes_that_do_not_count(capsys) -> None:
    given = ["--only", "exits", "--width", "4", "--instances", "8", "--plain", "8", "--rounds", "1"]
    own.main([*given, "--in-flight", "4", "--update", "4", "--warm", "2", "--alike"])
    assert "exits" in capsys.readouterr().out
    ours, hand = (Trained("exits", System(way, 4, 4), width=4) for way in ("ours", "hand"))
    with torch.no_grad():
        next(hand.program.parameters()).add_(1)
    own._level([ours, hand])
    for mine, its in zip(ours.program.parameters(), hand.program.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_with_as_many_in_flight_as_an_update_wants_there_is_one_system_of_it() -> None:
    names = [system.name for system in own.systems_of([64, 256], 64)]
    assert names == ["ours 64/64", "ours 256/64", "ours 256/256", "hand 64", "hand 256", "plain 64"]


def test_ours_is_compared_with_hand_at_as_many_updates_within_rounds() -> None:
    rates = {
        "ours 64/64": [30.0, 20.0, 40.0],
        "ours 256/64": [60.0, 60.0, 60.0],
        "ours 256/256": [90.0, 80.0, 100.0],
        "hand 64": [30.0, 40.0, 20.0],
        "hand 256": [100.0, 100.0, 100.0],
        "plain 64": [3.0, 2.0, 4.0],
    }
    program = {
        "program": "exits",
        "told": "refinement",
        "looks": True,
        "gradients_within": 2e-16,
        "systems": [
            {
                "name": name,
                "runs": [
                    {"rate": r, "loss": 1.0 / (k + 1), "asked": 8, "updates": [8, 8]}
                    for k, r in enumerate(found)
                ],
                **({"firings": {"a forward": [2, 100]}} if name.startswith("ours") else {}),
            }
            for name, found in rates.items()
        ],
    }
    document = json.loads(json.dumps({"programs": [program]}))
    lines = list(own.markdown(document))
    ratios = "1.00 (0.50 to 2.00) | 2.00 (1.50 to 3.00) | 0.90 (0.80 to 1.00) | 10.0 (10.0 to 10.0)"
    assert lines[2] == f"| exits: refinement | yes | {ratios} | 50, 50, 50 |"
    assert "| ours 64/64 | 30 | 20 to 40 | 8 | 8 | 1.000 to 0.333 | 2 | 50.0 |" in lines


def test_memory_is_told_beside_that_of_batching_by_hand_where_it_was_measured() -> None:
    run = {"rate": 1.0, "loss": 1.0, "asked": 1, "updates": [1, 1]}
    grown = {"ours 64/64": 30.2, "hand 64": 20.0, "plain 64": 1.0}
    systems: list[dict[str, Any]] = [
        {"name": name, "first_mib": mib, "later_mib": mib - 1, "runs": [run]}
        for name, mib in grown.items()
    ]
    program = {"program": "exits", "told": "refinement", "looks": True, "systems": systems}
    told = "1.00 (1.00 to 1.00); grows by 30 to 20 MiB, later 29 to 19 MiB"
    assert list(own.lines(program))[1].endswith(told)
    del systems[1]["first_mib"]
    assert list(own.lines(program))[1].endswith("1.00 (1.00 to 1.00)")


def test_memory_alone_is_a_table_of_both_passes() -> None:
    systems = [
        {"name": "ours 64/64", "first_mib": 30.2, "later_mib": 12.0, "runs": []},
        {"name": "hand 64", "first_mib": 20.0, "later_mib": 21.0, "runs": []},
        {"name": "plain 64", "runs": []},
    ]
    program = {"program": "exits", "told": "refinement", "looks": True, "systems": systems}
    lines = list(own.markdown({"programs": [program]}))
    assert lines[0].startswith("| program | first pass, ours 64/64 to hand 64 | pass 5, ours")
    assert lines[2:] == ["| exits | 30 to 20 MiB | 12 to 21 MiB |"]

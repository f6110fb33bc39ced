"""The benchmark of devices, on the CPU: every system learns, and tables say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.devices import main as devices
from benchmarks.devices.systems import Setup, systems_of


def arguments(*words: str) -> list[str]:
    return ["--device", "cpu", "--widths", "16", "--rounds", "2", "--warm", "1", *words]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["childsum", "moe"])
def test_by_hand_and_ours_have_the_same_loss_of_the_same_weights(task: str) -> None:
    setup = Setup(task, 16, "cpu", Path(), 64)
    losses = {name: make(setup)() for name, make in systems_of(task).items()}
    # One update at most before the last of them: orders differ.
    assert max(losses.values()) == pytest.approx(min(losses.values()), rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", ["trees", "molecules", "decoder"])
def test_all_systems_learn_and_begin_alike(task: str, data_dir: Path) -> None:
    setup = Setup(task, 16, "cpu", data_dir, 96)
    for name, make in systems_of(task).items():
        if name.startswith("pyg"):
            pytest.importorskip("torch_geometric")
        train = make(setup)
        losses = [train() for _ in range(4)]
        assert losses[-1] < losses[0], name


@pytest.mark.slow
def test_ratios_are_of_as_many_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    devices.main(arguments("--only", "childsum", "--instances", "64", "--json", str(file)))
    found = json.loads(file.read_text())["found"][0]
    pairs = list(devices.pairs_of(found["systems"]))
    assert ("ours 256/64", "hand 64") in pairs and ("ours 256/64", "hand 256") not in pairs
    assert all(len(system["seconds"]) == 2 for system in found["systems"])
    capsys.readouterr()
    devices.main(["--read", str(file), "--markdown"])
    assert "| ours 256/256 : hand 256 |" in capsys.readouterr().out

"""Molecules as bundles: views of columns, units that are kept, and a network that learns them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from geartrain.cli.main import app
from geartrain.data.qm9 import load_qm9
from geartrain.engine.schedule import Schedule
from geartrain.errors import DataError
from geartrain.recipes import Setting, find_recipe
from geartrain.recipes.qm9 import HalfSquaredError, Units, columns_of, make_graph, one_hot
from geartrain.recipes.recipe import Task
from geartrain.runtime.simulated import Simulated
from geartrain.train.session import Session

# Water, ethyne, formaldehyde, hydrogen cyanide: elements, places in Angstrom, Debye.
KINDS = (
    ([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]], 1.8),
    ([6, 6, 1, 1], [[0, 0, 0], [1.2, 0, 0], [-1.06, 0, 0], [2.26, 0, 0]], 0.0),
    ([6, 8, 1, 1], [[0, 0, 0], [1.21, 0, 0], [-0.59, 0.94, 0], [-0.59, -0.94, 0]], 2.3),
    ([1, 6, 7], [[-1.07, 0, 0], [0, 0, 0], [1.16, 0, 0]], 2.9),
)


def write(folder: Path, molecules: int = 40, **changed: np.ndarray) -> Path:
    chosen = [KINDS[i % 4] for i in range(molecules)]
    arrays = {
        "id": np.arange(11, 11 + molecules),
        "n_atoms": np.array([len(Z) for Z, _, _ in chosen], np.uint8),
        "Z": np.concatenate([np.array(Z, np.uint8) for Z, _, _ in chosen]),
        "R": np.concatenate([np.array(R, np.float32) for _, R, _ in chosen]),
        "mu": np.array([mu for _, _, mu in chosen], np.float32),
    }
    (folder / "qm9").mkdir(exist_ok=True)
    np.savez(folder / "qm9" / "qm9_3d_dipole.npz", **(arrays | changed))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path)


def task_of(data: Path | None, epochs: int = 1, **options: float) -> Task:
    given = {"hidden": 16, "steps": 2} | options
    return find_recipe("qm9").build(
        Setting(seed=0, epochs=epochs, update_every=4, data=data, options=given)
    )


def test_a_molecule_brings_its_atoms_bonds_and_moment(data: Path) -> None:
    bundles = columns_of(load_qm9(data), distances=True)
    assert len(bundles) == 40
    water, ethyne = bundles[0], bundles[1]
    assert water.inputs["elements"].tolist() == [3, 0, 0]
    assert water.vertex["element"].tolist() == [3, 0, 0]
    assert water.edge["source"].tolist() == [0, 0, 1, 2]
    assert water.edge["target"].tolist() == [1, 2, 0, 0]
    assert water.edge["type"].tolist() == [0, 0, 0, 0]
    assert water.edge["distance"] == pytest.approx([0.96, 0.96, 0.96, 0.96], abs=0.01)
    assert water.value["mu"] == np.float32(1.8)
    assert water.key == "molecule with id 11"
    assert sorted(ethyne.edge["type"].tolist()) == [0, 0, 0, 0, 3, 3]
    assert [b.key for b in bundles[-2:]] == ["molecule with id 49", "molecule with id 50"]
    assert "distance" not in columns_of(load_qm9(data), distances=False)[0].edge


def test_the_rows_of_a_molecule_are_views(data: Path) -> None:
    bundles = columns_of(load_qm9(data), distances=False)
    first, again = bundles[5], bundles[5]
    assert first.inputs["elements"].data_ptr() == again.inputs["elements"].data_ptr()
    assert np.shares_memory(first.edge["type"], again.edge["type"])


def test_states_begin_with_a_one_at_the_element() -> None:
    states = one_hot(torch.tensor([0, 4, 2]), 7)
    assert states.shape == (3, 7)
    assert torch.equal(states[:, :5], torch.eye(5)[[0, 4, 2]])
    assert not states[:, 5:].any()


def test_the_split_is_complete_and_the_same_for_every_seed(data: Path) -> None:
    keys = []
    for seed in (0, 1):
        setting = Setting(seed=seed, epochs=1, update_every=1, data=data, options={"hidden": 8})
        task = find_recipe("qm9").build(setting)
        keys.append([[i.key for i in task.load(split)] for split in ("train", "valid")])
    assert keys[0] == keys[1]
    train, valid = keys[0]
    assert (len(train), len(valid)) == (36, 4)
    assert len({*train, *valid}) == 40
    assert task.load("dev") is task.load("valid")


def test_errors_are_in_debye_whatever_the_units() -> None:
    units = Units(mean=2.5, std=1.5)
    prediction, mu = torch.tensor([[0.0], [1.0]]), torch.tensor([2.8, 2.0])
    assert units.error(prediction, mu).tolist() == pytest.approx([0.3, 2.0])
    assert units.error_ratio(prediction, mu).tolist() == pytest.approx([3.0, 20.0])
    loss = HalfSquaredError(units)
    assert loss(prediction, mu).tolist() == pytest.approx([0.5 * 0.2**2, 0.5 * (4 / 3) ** 2])


def test_the_criterion_knows_its_gradient() -> None:
    loss = HalfSquaredError(Units(mean=2.5, std=1.5))
    prediction = torch.randn(6, 1, dtype=torch.float64, requires_grad=True)
    mu = torch.randn(6, dtype=torch.float64)
    losses, gradient = loss.with_gradient(prediction.detach(), mu)
    assert torch.equal(losses, loss(prediction, mu))
    (want,) = torch.autograd.grad(loss(prediction, mu).sum(), prediction)
    assert torch.allclose(gradient, want)


def test_units_are_those_of_training_and_come_back_from_the_run(data: Path, tmp_path: Path) -> None:
    first = task_of(data)
    moments = np.array([i.value["mu"] for i in first.load("train")], np.float64)
    units = Units.from_json(first.files["units.json"])
    assert (units.mean, units.std) == pytest.approx((moments.mean(), moments.std()))
    other = write(tmp_path, mu=np.full(40, 9.0, np.float32))
    setting = Setting(
        seed=0, epochs=1, update_every=1, data=other, options={"hidden": 8}, files=first.files
    )
    assert find_recipe("qm9").build(setting).files == first.files


def test_equal_moments_have_a_spread_all_the_same() -> None:
    assert Units.of(np.full(3, 2.0, np.float32)) == Units(2.0, 1.0)


@pytest.mark.parametrize("text", ["{}", "[1]", "no json", '{"mean": 1, "std": 0}'])
def test_units_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"units\.json.*take the run's folder"):
        Units.from_json(text)


@pytest.mark.parametrize("distances", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_dipole_moments_are_learnt(data: Path, distances: int) -> None:
    task = task_of(data, learning_rate=1e-2, distances=distances)
    session = Session(
        task.graph,
        rules=task.rules,
        runtime=Simulated(2, seed=0),
        max_active=8,
        schedule=Schedule(ramp=task.ramp),
    )
    before = session.evaluate(task.load("valid")).metrics
    fit = session.fit(task.load("train"), epochs=25, valid=task.load("valid"))
    assert fit.valid["mae"] < 0.3 < before["mae"]
    assert fit.valid["error_ratio"] == pytest.approx(10 * fit.valid["mae"])


def test_a_width_without_room_for_the_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden=4: give 5 or more"):
        make_graph(4, 1, Units(), distances=False)


def test_distances_are_a_choice_of_two(data: Path) -> None:
    with pytest.raises(ValueError, match="distances=2: expected 0 or 1"):
        task_of(data, distances=2)


def test_a_limit_reads_the_first_molecules(data: Path) -> None:
    task = task_of(data, limit=20)
    ids = [i.key for split in ("train", "valid") for i in task.load(split)]
    assert sorted(ids) == sorted(f"molecule with id {n}" for n in range(11, 31))


def refused(data: Path, out: Path) -> str:
    ended = CliRunner().invoke(app, ["train", "qm9", "--data", str(data), "--out", str(out)])
    assert ended.exit_code == 2
    assert not out.exists()
    return " ".join(ended.stderr.split())


def test_a_molecule_without_atoms_is_wrong_use_with_file_place_and_remedy(tmp_path: Path) -> None:
    sizes = np.array([3, 4, 4, 3, 0], np.uint8)
    arrays = {
        "Z": np.concatenate([np.array(Z, np.uint8) for Z, _, _ in KINDS]),
        "R": np.concatenate([np.array(R, np.float32) for _, R, _ in KINDS]),
    }
    said = refused(write(tmp_path, 5, n_atoms=sizes, **arrays), tmp_path / "run")
    assert "qm9_3d_dipole.npz:5: molecule with id 15: has 0 atoms" in said
    assert 'Mend the record, or read the file with policy="skip"' in said


def test_a_cut_file_is_wrong_use_with_file_and_remedy(data: Path, tmp_path: Path) -> None:
    path = data / "qm9" / "qm9_3d_dipole.npz"
    path.write_bytes(path.read_bytes()[:-100])
    said = refused(data, tmp_path / "run")
    assert "qm9_3d_dipole.npz" in said
    assert "fetch it anew" in said


def test_the_command_trains_and_evaluates_without_the_training_statistics(
    data: Path, tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    words = ["train", "qm9", "--data", str(data), "--out", run, "--epochs", "2"]
    words += ["--option", "hidden=8", "--runtime", "simulated"]
    assert CliRunner().invoke(app, words).exit_code == 0
    ended = CliRunner().invoke(app, ["evaluate", run, "--split", "valid", "--json"])
    assert ended.exit_code == 0
    assert '"error_ratio"' in ended.stdout

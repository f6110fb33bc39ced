"""Digits as minibatches: dealt anew each epoch, learnt by heart, refused when files are broken."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from geartrain.cli.main import app
from geartrain.data.mnist import Digits
from geartrain.engine.schedule import Schedule
from geartrain.recipes import Setting, find_recipe
from geartrain.recipes.mnist import MEAN, SPREAD, DigitMinibatches, make_graph
from geartrain.runtime.simulated import Simulated
from geartrain.train.session import Session
from geartrain.train.source import Source


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(head + array.tobytes())


def digits(n: int) -> Digits:
    """Digit k is k bright rows of pixels, and some noise."""
    draw = np.random.default_rng(0)
    labels = np.arange(n) % 10
    images = draw.integers(0, 60, (n, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 180
    return Digits(images, labels.astype(np.int64), 0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "mnist").mkdir()
    for split, n in (("train", 90), ("t10k", 25)):
        made = digits(n)
        images, labels = made.images, made.labels.astype(np.uint8)
        (tmp_path / "mnist" / f"{split}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (tmp_path / "mnist" / f"{split}-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    return tmp_path


def seen(batches: list) -> list[bytes]:
    return [row.numpy().tobytes() for b in batches for row in b.inputs["images"]]


def test_minibatches_hold_all_images_once_with_their_own_labels() -> None:
    made = digits(25)
    batches = list(DigitMinibatches(made, 10))
    assert [b.inputs["images"].shape for b in batches] == [(10, 784), (10, 784), (5, 784)]
    assert len(DigitMinibatches(made, 10)) == 3
    labels = np.concatenate([b.vertex["label"] for b in batches])
    assert labels.tolist() == made.labels.tolist()
    pixels = torch.cat([b.inputs["images"] for b in batches])
    expected = (made.images.reshape(25, 784) - np.float32(MEAN)) / np.float32(SPREAD)
    torch.testing.assert_close(pixels, torch.from_numpy(expected))


def test_images_share_a_minibatch_with_others_in_every_epoch() -> None:
    made = digits(40)
    batches = DigitMinibatches(made, 10, seed=7)
    deals = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        deals.append([frozenset(seen([b])) for b in batches])
        for b in batches:  # rows of bright pixels say which digit it is
            rows = b.inputs["images"].view(-1, 28, 28)[:, :20].mean(2).view(-1, 10, 2).mean(2)
            assert rows.argmax(1).tolist() == b.vertex["label"].tolist()
    assert deals[0] == deals[2]
    assert set(deals[0]).isdisjoint(deals[1])
    assert sorted(x for b in deals[0] for x in b) == sorted(x for b in deals[1] for x in b)


def test_another_seed_deals_otherwise_and_no_seed_leaves_the_order() -> None:
    made = digits(40)
    assert seen(DigitMinibatches(made, 10, seed=1)[:]) != seen(
        DigitMinibatches(made, 10, seed=2)[:]
    )
    still = DigitMinibatches(made, 10)
    still.set_epoch(3)
    assert np.concatenate([b.vertex["label"] for b in still]).tolist() == made.labels.tolist()


def test_an_epoch_goes_on_where_it_was_left() -> None:
    whole = seen(
        list(Source(DigitMinibatches(digits(40), 10, seed=7), shuffle=True, seed=5).epoch(2))
    )
    other = DigitMinibatches(digits(40), 10, seed=7)
    other.set_epoch(9)
    rest = seen(list(Source(other, shuffle=True, seed=5).epoch(2, start=1)))
    assert rest == whole[10:]


def test_a_part_of_the_images_is_the_first_ones() -> None:
    made = digits(40)
    batches = DigitMinibatches(made, 10, most=12)
    assert len(batches) == 2
    assert len(batches[-1].vertex["label"]) == 2
    with pytest.raises(IndexError):
        batches[2]


def test_every_linear_map_is_a_part_of_its_own() -> None:
    task = find_recipe("mnist").build(Setting(seed=0, epochs=1, update_every=1, options={}))
    session = Session(make_graph(16, 16), rules=task.rules, runtime=Simulated(3))
    assert set(session.parts) == {"linear 1", "linear 2", "linear 3"}


def test_digits_are_learnt_with_several_minibatches_in_flight(data: Path) -> None:
    options = {"batch": 10, "hidden": 20}
    task = find_recipe("mnist").build(
        Setting(seed=0, epochs=10, update_every=1, data=data, options=options)
    )
    runtime = Simulated(3, seed=0)
    session = Session(
        task.graph,
        rules=task.rules,
        runtime=runtime,
        max_active=4,
        schedule=Schedule(ramp=task.ramp),
    )
    fit = session.fit(task.load("train"), epochs=10, valid=task.load("valid"))
    assert fit.valid["accuracy"] == 1.0
    assert fit.staleness["linear 1"].max > 0


@pytest.mark.parametrize("method", ["backprop", "greedy"])
def test_digits_are_learnt_by_other_methods_too(data: Path, method: str) -> None:
    options = {"batch": 10, "hidden": 20, "method": method}
    recipe = find_recipe("mnist")
    assert recipe.in_flight(options) == (1 if method == "backprop" else 3)
    assert recipe.in_flight({}) == 4
    task = recipe.build(Setting(seed=0, epochs=8, update_every=1, data=data, options=options))
    session = Session(
        task.graph, rules=task.rules, runtime=Simulated(3, seed=0),
        max_active=recipe.in_flight(options), **task.settings(3),
    )  # fmt: skip
    fit = session.fit(task.load("train"), epochs=8, valid=task.load("valid"))
    assert fit.valid["accuracy"] > 0.9
    assert [name for name in session.parts if name.startswith("part")] == [
        "part 0", "part 1", "part 2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "place"),
    [("train-images-idx3", "train-images"), ("t10k-labels-idx1", "t10k-labels")],
)
def test_a_cut_file_is_wrong_use_with_file_place_and_remedy(
    data: Path, tmp_path: Path, name: str, place: str
) -> None:
    path = data / "mnist" / f"{name}-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    ended = CliRunner().invoke(
        app, ["train", "mnist", "--data", str(data), "--out", str(tmp_path / "run")]
    )
    assert ended.exit_code == 2
    said = " ".join(ended.stderr.split())
    assert f"{place}-" in said
    assert "bytes of content" in said
    assert "Fetch it anew" in said
    assert not (tmp_path / "run").exists()


def test_the_command_trains_and_evaluates(data: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    words = ["train", "mnist", "--data", str(data), "--out", run, "--epochs", "2"]
    words += ["--option", "batch=30", "--option", "hidden=8", "--runtime", "simulated"]
    assert CliRunner().invoke(app, words).exit_code == 0
    ended = CliRunner().invoke(app, ["evaluate", run, "--split", "test", "--json"])
    assert ended.exit_code == 0
    assert '"accuracy"' in ended.stdout

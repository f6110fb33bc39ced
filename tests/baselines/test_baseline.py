"""Baselines train on the data, in the order and at the size of the recipes."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from geartrain.data.mnist import load_mnist
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.recipes import find_recipe, listreduce, sentiment
from geartrain.recipes.mnist import DigitMinibatches
from geartrain.train.session import Session
from geartrain.train.source import Source
from geartrain_baselines import Terms
from geartrain_baselines.baseline import rate_at, segments, shuffler
from geartrain_baselines.listreduce import ListRnn, bucketed_batches, mixed_batches
from geartrain_baselines.mnist import columns as mnist_columns
from geartrain_baselines.mnist import train
from geartrain_baselines.sentiment import TreeLstm


def instance(i: int) -> Instance:
    return Instance({}, key=str(i))


def test_an_epoch_has_the_order_in_which_a_session_takes_its_instances() -> None:
    source = Source([instance(i) for i in range(20)], None, shuffle=True, seed=5)
    taken = [int(each.key) for each in source.epoch(3)]
    assert taken == shuffler(5, 3).permutation(20).tolist()
    assert taken != shuffler(5, 4).permutation(20).tolist()


def test_stretches_cut_an_epoch_into_updates_in_its_order() -> None:
    found = list(segments(10, 3, seed=5, epochs=2))
    assert [s.epoch for s in found] == [1, 2]
    assert [len(rows) for rows in found[0].batches] == [3, 3, 3, 1]
    for epoch, segment in enumerate(found, 1):
        order = np.concatenate(segment.batches).tolist()
        assert order == shuffler(5, epoch).permutation(10).tolist()


def test_several_validations_in_an_epoch_change_no_update() -> None:
    whole, cut = (list(segments(10, 3, seed=5, epochs=2, evaluate_every=e)) for e in (1, 0.5))
    assert [s.epoch for s in cut] == [0.6, 1, 1.6, 2]  # the second update is past the half
    assert [len(s) for s in cut] == [6, 4, 6, 4]
    together = [[*a.batches, *b.batches] for a, b in zip(cut[::2], cut[1::2], strict=True)]
    for expected, found in zip(whole, together, strict=True):
        assert [r.tolist() for r in found] == [r.tolist() for r in expected.batches]
    many = list(segments(10, 3, seed=5, epochs=1, evaluate_every=0.1))  # four updates
    assert [s.epoch for s in many] == [0.3, 0.6, 0.9, 1]


def test_the_rate_is_that_of_the_nearest_size_of_an_update() -> None:
    tuned = {4: 0.1, 20: 0.2, 100: 0.3}
    assert [rate_at(b, tuned) for b in (1, 4, 8, 10, 40, 50, 1000)] == [
        0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3
    ]  # fmt: skip


def test_minibatches_hold_every_list_once_and_those_of_mixed_length_in_order() -> None:
    length = torch.tensor([3, 2, 3, 5, 2, 2, 3])
    for deal in (bucketed_batches, mixed_batches):
        batches = deal(length, 2, shuffler(0, 1))
        assert sorted(torch.cat(batches).tolist()) == list(range(7))
    assert all(len(set(length[rows].tolist())) == 1 for rows in bucketed_batches(
        length, 2, shuffler(0, 1)
    ))  # fmt: skip
    order = shuffler(0, 1).permutation(7).tolist()
    mixed = mixed_batches(length, 2, shuffler(0, 1))
    assert [sorted(rows.tolist()) for rows in mixed] == [
        sorted(order[i : i + 2]) for i in range(0, 7, 2)
    ]


def parameters(graph: Graph) -> int:
    return sum(p.numel() for part in Session(graph).parts.values() for p in part.parameters)


def images(folder: Path, n: int) -> None:
    """Digits that are told apart by one bright row, in the files of MNIST."""
    (folder / "mnist").mkdir()
    labels = np.arange(n, dtype=np.uint8) % 10
    pixels = np.zeros((n, 28, 28), np.uint8)
    pixels[np.arange(n), labels * 2] = 255
    for name in ("train", "t10k"):
        for what, array in (("images", pixels), ("labels", labels)):
            head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(
                f">{array.ndim}I", *array.shape
            )
            path = folder / "mnist" / f"{name}-{what}-idx{array.ndim}-ubyte.gz"
            path.write_bytes(gzip.compress(head + array.tobytes()))


def test_minibatches_of_digits_learn_and_are_counted_as_the_recipe_does(tmp_path: Path) -> None:
    images(tmp_path, 250)
    options = {"train_size": 0, "hidden": 16, "batch": 10}
    terms = Terms(seed=0, epochs=8, batch=10, data=tmp_path, options=options)
    epochs = list(train(terms))
    assert [e.instances for e in epochs] == [25] * 8
    assert epochs[-1].loss < epochs[0].loss / 2
    assert epochs[-1].valid["accuracy"] > 0.9


def test_pixels_are_those_of_the_recipe(tmp_path: Path) -> None:
    images(tmp_path, 30)
    digits = load_mnist(tmp_path, "train")
    pixels, labels = mnist_columns(digits, 20)
    (instance,) = DigitMinibatches(digits, 20, most=20)
    assert torch.equal(pixels, instance.inputs["images"])
    assert labels.tolist() == list(instance.vertex["label"])


def test_a_smaller_training_set_is_the_first_images(tmp_path: Path) -> None:
    images(tmp_path, 50)
    options = {"train_size": 25, "hidden": 4, "batch": 10}
    (epoch,) = train(Terms(seed=0, epochs=1, batch=10, data=tmp_path, options=options))
    assert epoch.instances == 3


@pytest.mark.parametrize("hidden", [8, 16])
def test_networks_are_as_large_as_those_of_the_recipes(hidden: int) -> None:
    def size(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    lists, trees = listreduce.make_graph(hidden), sentiment.make_graph(hidden, words=7)
    # Ours has one bias in the cell where nn.RNN has two that are added up.
    assert size(ListRnn(hidden)) - parameters(lists) == hidden
    assert size(TreeLstm(7, hidden)) == parameters(trees)
    assert find_recipe("sentiment").options[0].default == TreeLstm(1).hidden

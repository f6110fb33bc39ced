"""Minibatches: every row once an epoch, in an order that follows from seed and epoch."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain.errors import DataError
from geartrain.train.source import Source

X, Y = torch.arange(10).float()[:, None], torch.arange(10)


def rows(source: Source, epoch: int, start: int = 0) -> list[list[float]]:
    return [i.inputs["x"][:, 0].tolist() for i in source.epoch(epoch, start)]  # type: ignore[index]


def test_rows_are_dealt_anew_for_every_epoch_and_can_be_found_again() -> None:
    source = Source(gt.Minibatches(X, Y, batch=4, seed=3))
    first, second = rows(source, 1), rows(source, 2)
    assert (
        sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second)) == list(range(10))
    )
    assert [len(b) for b in first] == [4, 4, 2]
    assert first != second
    assert rows(Source(gt.Minibatches(X, Y, batch=4, seed=3)), 1, start=1) == first[1:]
    assert rows(Source(gt.Minibatches(X, Y, batch=4)), 1) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_targets_stay_with_their_rows_and_are_zeros_where_there_are_none() -> None:
    batches = gt.Minibatches(X, Y, batch=3, seed=1, drop_last=True)
    assert len(batches) == 3
    for instance in batches[:2]:
        assert torch.equal(instance.inputs["x"][:, 0].long(), instance.inputs["y"])  # type: ignore[index,union-attr]
    assert gt.Minibatches(X, batch=4)[0].inputs["y"].tolist() == [0] * 4  # type: ignore[union-attr]


def test_augmentation_follows_from_seed_epoch_and_minibatch() -> None:
    def noise(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=generator)

    def drawn(epoch: int) -> list[list[float]]:
        return rows(Source(gt.Minibatches(X, Y, batch=4, augment=noise)), epoch)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1)[0] != rows(Source(gt.Minibatches(X, Y, batch=4)), 1)[0]


def test_a_data_loader_is_shuffled_by_seed_and_epoch_and_disturbs_no_generator() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    source = Source(gt.LoadedMinibatches(loader, seed=2))
    state = torch.get_rng_state()
    first, second = rows(source, 1), rows(source, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(source) == 3
    assert sorted(chain.from_iterable(first)) == list(range(10))
    assert first != second
    assert rows(source, 1, start=2) == first[2:]


def test_wrong_data_are_refused_with_what_came() -> None:
    with pytest.raises(DataError, match="10 inputs and 3 targets"):
        gt.Minibatches(X, Y[:3], batch=2)
    with pytest.raises(ValueError, match="batch=0 of 10 rows"):
        gt.Minibatches(X, Y, batch=0)
    with pytest.raises(DataError, match="4 inputs and 3 targets"):
        gt.minibatch(X[:4], Y[:3])
    with pytest.raises(DataError, match=r"x is \[1\]: give rows"):
        gt.minibatch([1], Y[:1])  # type: ignore[arg-type]
    loader = DataLoader(TensorDataset(X), batch_size=4)
    with pytest.raises(DataError, match="gives pairs"):
        list(gt.LoadedMinibatches(loader))

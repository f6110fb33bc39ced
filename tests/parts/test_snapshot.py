"""Parts as tensors and JSON, and back."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.errors import CheckpointError
from geartrain.parts.part import PartState
from geartrain.parts.snapshot import (
    check_parts,
    check_weights,
    parts_to_tensors,
    put_parts,
    put_weights,
    take_over,
)


class Body(nn.Module):
    """An embedding, a layer and a buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 2, sparse=True)
        self.register_buffer("seen", torch.tensor(float(seed)))


def parts(seed=0, width=3):
    torch.manual_seed(seed)
    dense = gt.Rules(
        optimizer=partial(torch.optim.Adam, lr=0.1),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    )
    sparse = gt.Rules(optimizer=partial(torch.optim.Adagrad, lr=0.1))
    return {
        "dense": PartState("dense", nn.Linear(2, width), dense),
        "sparse": PartState("sparse", Body(seed), sparse),
        "still": PartState("still", nn.Linear(2, 2).requires_grad_(False), dense),
    }


def train(parts, steps=2, seed=5):
    """Some steps, and then a gradient that waits."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps + 1):
        linear = parts["dense"].module
        for parameter in linear.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            parts["dense"].gradient.add(parameter, draw)
        table = parts["sparse"].module.embedding.weight
        rows = torch.randn(3, 2, generator=generator)
        parts["sparse"].gradient.add_rows(table, torch.tensor([1, 4, 1]), rows)
        for name in ("dense", "sparse"):
            parts[name].sent(3)
            parts[name].received(3, np.full(3, parts[name].version))
            parts[name].finished(2)
            if step < steps:
                parts[name].step(0)


def saved(parts):
    tensors, document = parts_to_tensors(parts)
    return {k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(document))


def assert_same(one, other):
    (tensors, document), (theirs, others) = saved(one), saved(other)
    assert tensors.keys() == theirs.keys() and document == others
    assert all(torch.equal(tensors[k], theirs[k]) for k in tensors)


def test_parts_come_back_and_go_on_to_the_last_bit():
    whole, loaded = parts(), parts(seed=1)
    train(whole)
    train(loaded, steps=1, seed=9)  # whatever was there before is gone
    tensors, document = saved(whole)
    assert {"dense/gradient/weight", "sparse/gradient/embedding.weight/values"} <= set(tensors)
    assert "sparse/weights/seen" in tensors
    put_parts(loaded, check_parts(loaded, tensors, document, "file"))
    assert_same(whole, loaded)
    assert float(loaded["sparse"].module.seen) == 0.0
    for each in (whole, loaded):
        train(each, steps=3, seed=77)
    assert_same(whole, loaded)
    assert whole["dense"].version == 5
    assert whole["dense"].optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 2**5)


def test_what_lies_in_memory_that_both_have_is_neither_copied_nor_moved_as_a_part_comes_back():
    """A table's sums of squares are as large as it is, and go with each pass."""
    whole = parts()
    train(whole)
    part = whole["dense"]
    tensors, document = saved({"dense": part})
    states = [x for x in tensors if x.startswith("dense/optimizer/state")]
    first, sent = states[0], set(tensors) - set(states[1:])
    tensors[first] += 1.0
    before = {p: dict(state) for p, state in part.optimizer.state.items()}
    take_over(part, {k: tensors[k] for k in sent}, document["dense"], states[1:])
    own = [
        x.data_ptr() == before[p][key].data_ptr()
        for p, state in part.optimizer.state.items()
        for key, x in state.items()
    ]
    assert own == [False] + [True] * (len(states) - 1)
    now, _ = saved({"dense": part})
    assert torch.equal(now[first], tensors[first])


def test_weights_alone_leave_the_rest_alone():
    whole, loaded = parts(), parts(seed=1)
    train(whole)
    train(loaded, steps=1, seed=9)
    _, before = saved(loaded)
    tensors, document = saved(whole)
    put_weights(loaded, check_weights(loaded, tensors, document, "file"))
    assert torch.equal(loaded["dense"].module.weight, whole["dense"].module.weight)
    assert saved(loaded)[1] == before
    assert loaded["sparse"].pending_gradients()


def break_parts(tensors, document):
    del document["still"]


def break_names(tensors, document):
    tensors["dense/weights/wieght"] = tensors.pop("dense/weights/weight")


def break_shape(tensors, document):
    tensors["sparse/weights/embedding.weight"] = torch.zeros(7, 2)


def break_entry(tensors, document):
    del document["sparse"]["version"]


def break_optimizer(tensors, document):
    document["sparse"]["optimizer"]["class"] = "Rprop"


def break_histogram(tensors, document):
    document["sparse"]["staleness"] = "many"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_parts, r"holds parts \['dense', 'sparse'\], the graph has .*'still'"),
        (break_names, r"'dense' differs: the file lacks \['weight'\] and has \['wieght'\]"),
        (break_shape, r"'sparse': 'embedding.weight' has shape \(7, 2\), the module has \(5, 2\)"),
        (break_entry, r"part 'sparse': its entry is damaged \(it has no 'version'\)"),
        (break_optimizer, r"part 'sparse': optimizer Adagrad.*'Rprop'"),
        (break_histogram, r"part 'sparse': its entry is damaged"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(spoil, message):
    whole, loaded, twin = parts(), parts(seed=1), parts(seed=1)
    train(whole)
    for each in (loaded, twin):
        train(each, steps=1, seed=9)
    tensors, document = saved(whole)
    spoil(tensors, document)
    with pytest.raises(CheckpointError, match=message):
        put_parts(loaded, check_parts(loaded, tensors, document, "file"))
    assert_same(loaded, twin)

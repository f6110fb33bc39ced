"""The network on PyTorch Geometric is that of the recipes and of the other baselines."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from geartrain.data.qm9 import BONDS, ELEMENTS
from geartrain.frames.instance import Instance
from geartrain.recipes.qm9 import Units, make_graph
from geartrain.train.session import Session
from geartrain_baselines.graphs import (
    Block,
    GatedGraphNet,
    GatedSum,
    Graphs,
    Method,
)
from geartrain_baselines.pyg_forms import pyg_form

if importlib.util.find_spec("torch_geometric") is None:
    pytest.skip("needs torch_geometric: pip install 'geartrain[peers]'", allow_module_level=True)

HIDDEN, TYPES, STEPS = 6, 3, 3


def graphs(*, lengths: bool = False) -> Graphs:
    """Five graphs of one to five vertices; the first has no edges."""
    random = np.random.default_rng(7)
    vertices, edges = np.array([1, 2, 3, 4, 5]), np.array([0, 2, 5, 4, 9])
    sizes = np.repeat(vertices, edges)
    return Graphs(
        start=torch.from_numpy(random.normal(size=(15, HIDDEN)).astype(np.float32)),
        offsets=np.concatenate([[0], np.cumsum(vertices)]),
        edge_offsets=np.concatenate([[0], np.cumsum(edges)]),
        source=random.integers(sizes),
        target=random.integers(sizes),
        type=random.integers(TYPES, size=20),
        length=random.uniform(0.9, 1.9, size=20).astype(np.float32) if lengths else None,
    )


def of_equal_weights(method: Method, *, lengths: bool = False) -> tuple[GatedGraphNet, nn.Module]:
    torch.manual_seed(0)
    plain = GatedGraphNet(HIDDEN, TYPES, STEPS, lengths=lengths)
    peer = pyg_form(method).build(HIDDEN, TYPES, STEPS, lengths=lengths)
    for theirs, ours in zip(peer.parameters(), plain.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    return plain, peer


def answer_and_gradients(net: nn.Module, block: Block) -> list[Tensor]:
    h = net(block)
    (h * torch.linspace(-1, 1, h.numel()).view_as(h)).sum().backward()
    return [h.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("method", ["dense", "sparse"])
@pytest.mark.parametrize("lengths", [False, True])
def test_states_and_gradients_are_those_of_the_plain_network(method: Method, lengths: bool) -> None:
    plain, peer = of_equal_weights(method, lengths=lengths)
    block = graphs(lengths=lengths).block(np.array([3, 0, 4, 1, 2]))
    expected, found = answer_and_gradients(plain, block), answer_and_gradients(peer, block)
    assert len(found) == 1 + len(list(plain.parameters()))
    for theirs, ours in zip(found, expected, strict=True):
        assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["dense", "sparse"])
@pytest.mark.parametrize("distances", [False, True])
def test_moments_are_those_of_the_recipe_with_equal_weights(
    method: Method, distances: bool
) -> None:
    torch.manual_seed(1)
    session = Session(make_graph(HIDDEN, STEPS, Units(), distances=distances))
    net = pyg_form(method).build(HIDDEN, len(BONDS), STEPS, lengths=distances)
    readout = GatedSum(HIDDEN, len(ELEMENTS))
    for part, module in (("cell", net), ("readout", readout)):
        copied = zip(module.parameters(), session.parts[part].parameters, strict=True)
        for theirs, ours in copied:
            theirs.data.copy_(ours)
    molecules = graphs(lengths=distances)
    element = molecules.start.argmax(1) % len(ELEMENTS)
    molecules = replace(molecules, start=F.one_hot(element, len(ELEMENTS)).float())
    block = molecules.block(np.arange(len(molecules)))
    with torch.no_grad():
        found = readout(net(block), block)
    expected = session.predict([_instance(molecules, number) for number in range(len(molecules))])
    assert_close(found, torch.cat(expected), rtol=0, atol=1e-6)


def _instance(molecules: Graphs, number: int) -> Instance:
    alone = molecules.block(np.array([number]))
    element = alone.start.argmax(1)
    columns = {"source": alone.source, "target": alone.target, "type": alone.type}
    if alone.length is not None:
        columns["distance"] = alone.length
    return Instance(
        {"elements": element},
        vertex={"element": element.numpy()},
        edge={name: column.numpy() for name, column in columns.items()},
        value={"mu": 0.0},
    )


@pytest.mark.parametrize("lengths", [False, True])
def test_its_own_collation_gives_the_same_blocks(lengths: bool) -> None:
    columns = graphs(lengths=lengths)
    theirs = pyg_form("sparse", batches=True).collating(columns, TYPES)
    assert len(theirs) == len(columns)
    chosen = np.array([2, 0, 4])
    expected, found = columns.block(chosen), theirs.block(chosen)
    for name in ("start", "source", "target", "type", "segment", "first", "length"):
        if getattr(expected, name) is None:
            assert getattr(found, name) is None
        else:
            assert torch.equal(getattr(found, name), getattr(expected, name)), name

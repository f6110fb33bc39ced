"""Graph baselines: blocks keep graphs apart, both forms agree, and training learns."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import geartrain_baselines as baselines
from geartrain.data.babi import TASKS
from geartrain.nn import GatedGraphCell
from geartrain.recipes.babi import BABI, SIZES, make_graph
from geartrain.recipes.qm9 import QM9
from geartrain.train.session import Session
from geartrain_baselines import PEERS, Terms, babi, qm9
from geartrain_baselines.babi import Answerer, choose
from geartrain_baselines.graphs import (
    SINGLE,
    Form,
    GatedGraphNet,
    GatedReadout,
    GraphBatch,
    Graphs,
    Method,
    Singles,
)

HIDDEN, TYPES = 6, 3


def graphs(*, lengths: bool = False) -> Graphs:
    """Three graphs: of three vertices, of one without edges, of two; vertices begin unlike."""
    random = np.random.default_rng(0)
    return Graphs(
        start=torch.from_numpy(random.normal(size=(6, 4))),
        offsets=np.array([0, 3, 4, 6]),
        edge_offsets=np.array([0, 4, 4, 6]),
        source=np.array([0, 0, 1, 2, 1, 0]),
        target=np.array([1, 2, 2, 1, 0, 1]),
        type=np.array([0, 2, 2, 0, 1, 1]),
        length=random.uniform(0.9, 1.9, size=6) if lengths else None,
    )


def network(method: Method = "sparse", *, lengths: bool = False) -> GatedGraphNet:
    torch.manual_seed(0)
    return GatedGraphNet(HIDDEN, TYPES, steps=3, lengths=lengths, method=method).double()


def needing_pyg(name: str) -> object:
    """A parameter that is skipped without PyTorch Geometric."""
    is_absent = importlib.util.find_spec("torch_geometric") is None
    reason = "needs torch_geometric: pip install 'geartrain[peers]'"
    return pytest.param(name, marks=pytest.mark.skipif(is_absent, reason=reason))


def edge_by_edge(net: GatedGraphNet, block: GraphBatch) -> Tensor:
    h = F.pad(block.start, (0, HIDDEN - block.start.shape[1]))
    weights = net.message.weight.view(TYPES, HIDDEN, HIDDEN)
    biases = net.message.bias.view(TYPES, HIDDEN)
    for _ in range(net.steps):
        heard = [torch.zeros(HIDDEN, dtype=h.dtype) for _ in h]
        edges = zip(block.source, block.target, block.type, strict=True)
        for source, target, kind in edges:
            heard[target] = heard[target] + weights[kind] @ h[source] + biases[kind]
        h = net.update(torch.stack(heard), h)
    return h


@pytest.mark.parametrize("method", ["dense", "sparse"])
def test_states_and_gradients_are_those_of_edge_by_edge(method: Method) -> None:
    block = graphs().block(np.array([2, 1, 0]))
    found = {}
    for name, states in (("oracle", edge_by_edge), (method, None)):
        net = network(method)
        h = net(block) if states is None else states(net, block)
        (h * torch.arange(h.numel()).view_as(h)).sum().backward()
        found[name] = [h.detach(), *(p.grad for p in net.parameters())]
    for ours, expected in zip(found[method], found["oracle"], strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize("lengths", [False, True])
def test_graphs_of_a_block_do_not_see_each_other(lengths: bool) -> None:
    columns, net = graphs(lengths=lengths), network(lengths=lengths)
    readout = GatedReadout(HIDDEN, features=4, out=2).double()
    together = columns.block(np.array([0, 2, 1]))
    both = readout(net(together), together)
    dense = network("dense", lengths=lengths)
    assert_close(readout(dense(together), together), both)
    singles, matrix = Singles(columns, TYPES), network("matrix", lengths=lengths)
    assert len(singles) == 3
    for place, number in enumerate([0, 2, 1]):
        for made, states in ((columns, net), (singles, matrix)):
            alone = made.block(np.array([number]))
            assert_close(readout(states(alone), alone)[0], both[place])


def test_lengths_of_edges_matter_where_there_are_any() -> None:
    net = network(lengths=True)
    block = graphs(lengths=True).block(np.array([0]))
    other = graphs(lengths=True)
    other.length[:] += 0.2  # type: ignore[index]
    assert not torch.allclose(net(block), net(other.block(np.array([0]))))


def test_a_choice_is_a_softmax_over_the_vertices_of_one_graph() -> None:
    block = graphs().block(np.array([0, 1, 2]))
    scores = torch.tensor([0.5, 2.0, -1.0, 3.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    answer = torch.tensor([1, 0, 1])
    losses, right = choose(scores, block, answer)
    expected = [F.cross_entropy(s, a) for s, a in zip(scores.split([3, 1, 2]), answer, strict=True)]
    assert_close(losses, torch.stack(expected))
    assert right.tolist() == [True, True, False]  # of equal scores the first vertex is chosen
    (ours,) = torch.autograd.grad(losses.sum(), scores, retain_graph=True)
    assert_close(ours, torch.autograd.grad(torch.stack(expected).sum(), scores)[0])


def test_a_cell_is_as_large_as_that_of_the_recipes() -> None:
    ours = sum(p.numel() for p in GatedGraphCell(HIDDEN, TYPES).parameters())
    assert sum(p.numel() for p in network().parameters()) == ours


@pytest.mark.parametrize("number", sorted(TASKS))
def test_networks_for_questions_are_as_large_as_the_recipe(number: int) -> None:
    kind, size = TASKS[number], SIZES[number]
    parts = Session(make_graph(kind, size)).parts.values()
    ours = sum(p.numel() for part in parts for p in part.parameters)
    net = Answerer(kind, size.hidden, size.steps, GatedGraphNet)
    assert sum(p.numel() for p in net.parameters()) == ours


def molecules(folder: Path, n: int) -> None:
    """Waters and ammonias, whose moments differ."""
    water = [(8, 0.0, 0.0, 0.0), (1, 0.96, 0.0, 0.0), (1, -0.24, 0.93, 0.0)]
    ammonia = [(7, 0.0, 0.0, 0.0), (1, 1.01, 0.0, 0.0), (1, -0.34, 0.95, 0.0)]
    ammonia += [(1, -0.34, -0.48, 0.82)]
    chosen = [water if i % 3 else ammonia for i in range(n)]
    atoms = np.array([atom for each in chosen for atom in each], np.float32)
    (folder / "qm9").mkdir()
    np.savez(
        folder / "qm9" / "qm9_3d_dipole.npz",
        id=np.arange(1, n + 1, dtype=np.int32),
        n_atoms=np.array([len(each) for each in chosen], np.uint8),
        Z=atoms[:, 0].astype(np.uint8),
        R=atoms[:, 1:],
        mu=np.array([1.85 if i % 3 else 1.47 for i in range(n)], np.float32),
    )


@pytest.mark.parametrize(
    "name", ["block", "dense", "single", needing_pyg("pyg"), needing_pyg("pyg-batch")]
)
@pytest.mark.parametrize("distances", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_molecules_of_two_kinds_are_told_apart(tmp_path: Path, name: str, distances: int) -> None:
    molecules(tmp_path, 40)
    options = {"hidden": 8, "steps": 2, "limit": 0, "distances": distances}
    terms = Terms(seed=0, epochs=12, batch=5, data=tmp_path, options=options)
    epochs = list(qm9.train(terms, qm9.FORMS[name], rate=5e-3))
    assert epochs[0].instances == 36
    assert epochs[-1].valid["mae"] < 0.05 < epochs[0].valid["mae"]
    assert epochs[-1].valid["error_ratio"] == pytest.approx(10 * epochs[-1].valid["mae"])


@pytest.mark.parametrize("name", ["dense", "single", needing_pyg("pyg"), needing_pyg("pyg-batch")])
def test_all_forms_of_a_network_learn_the_same(tmp_path: Path, name: str) -> None:
    molecules(tmp_path, 40)
    options = {"hidden": 8, "steps": 2, "limit": 0, "distances": 0}
    terms = Terms(seed=3, epochs=2, batch=6, data=tmp_path, options=options)
    expected, found = (list(qm9.train(terms, qm9.FORMS[form])) for form in ("block", name))
    assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], rel=1e-4)


def test_deductions_are_learnt() -> None:
    options = {o.name: o.default for o in BABI.options} | {"enlarged": 1, "thousands": 1}
    terms = Terms(seed=0, epochs=1, batch=10, data=None, options=options)
    first = next(babi.train(terms, babi.FORMS["block"], rate=5e-3))
    assert first.instances == 1000
    assert first.valid["accuracy"] > 0.2  # a guess among 54 vertices is right once in 54


@pytest.mark.parametrize("name", ["single", needing_pyg("pyg"), needing_pyg("pyg-batch")])
def test_deductions_are_learnt_alike_in_all_forms(name: str) -> None:
    options = {o.name: o.default for o in BABI.options} | {"enlarged": 1, "thousands": 1}
    terms = Terms(seed=0, epochs=1, batch=50, data=None, options=options)
    expected, found = (next(babi.train(terms, babi.FORMS[form], 5e-3)) for form in ("block", name))
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)


def test_single_graphs_are_added_up_to_the_updates_of_the_recipe() -> None:
    for recipe in (BABI, QM9):
        (single,) = (b for b in PEERS[recipe.name].baselines if b.name == "single")
        assert single.batch == recipe.update_size({})


def test_sizes_are_compared_after_an_epoch_of_the_real_text(data_dir: Path) -> None:
    options = {o.name: o.default for o in BABI.options} | {"task": 18}
    terms = Terms(seed=0, epochs=1, batch=10, data=data_dir, options=options)
    (epoch,) = babi.train(terms, babi.FORMS["block"], rate=5e-3)
    assert epoch.valid["accuracy"] > 0.8


def test_rows_of_an_update_run_together_or_one_by_one() -> None:
    rows = np.array([4, 1, 3])
    assert [part.tolist() for part in Form(GatedGraphNet).parts(rows)] == [[4, 1, 3]]
    assert [part.tolist() for part in SINGLE.parts(rows)] == [[4], [1], [3]]


def test_pytorch_geometric_is_imported_in_one_file_that_is_asked_for_late() -> None:
    extra = "torch_geometric", "geartrain_baselines.pyg"
    found = set()
    for file in Path(baselines.__path__[0]).glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(f"{name}.".startswith(f"{each}.") for name in names for each in extra):
                found.add(file.name)
    assert found == {"pyg.py"}

"""The forms of one network agree: in float64, in scores and in every parameter's gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from geartrain.data.listreduce import generate
from geartrain.data.sst import Tree, parse_tree
from geartrain_baselines.listreduce import ListRnn, Lists, mixed_batches
from geartrain_baselines.sentiment import Forest, Method, TreeLstm, summed_loss

TREES = (
    "(3 (2 a) (4 (1 b) (3 (0 c) (2 (3 d) (1 e)))))",
    "(1 (0 (2 (4 d) (3 c)) (1 (2 b) (0 a))) (2 e))",
    "(2 b)",
    "(4 (2 (3 (1 e) (2 e)) (4 c)) (0 (1 (2 a) (3 b)) (4 (0 d) (1 (2 c) (3 a)))))",
)


def forest() -> Forest:
    table = {word: i for i, word in enumerate("abcde")}
    trees = []
    for text in TREES:
        words, leaf, parent, slot, label = parse_tree(text)
        trees.append(Tree(np.array([table[w] for w in words]), leaf, parent, slot, label))
    return Forest(trees)


@pytest.mark.parametrize("method", ["level", "fused"])
def test_tree_gradients_are_those_of_vertex_by_vertex(method: Method) -> None:
    found = {}
    for form in ("node", method):
        torch.manual_seed(0)
        net = TreeLstm(5, hidden=6).double()
        loss = summed_loss(net, form, forest(), np.array([3, 0, 2, 1]))
        if form != "node":
            loss.backward()
        found[form] = {name: p.grad.to_dense() for name, p in net.named_parameters()}
        assert all(gradient.abs().max() > 0 for gradient in found[form].values())
    for name, gradient in found["node"].items():
        assert_close(found[method][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_scores_and_labels_of_a_minibatch_stand_in_the_same_order() -> None:
    torch.manual_seed(0)
    net, trees = TreeLstm(5, hidden=6).double(), forest()
    batch = trees.minibatch(np.array([3, 0, 2, 1]))
    with torch.no_grad():
        level = net.level(batch)
        roots = [net.node(trees.trees[number])[-1] for number in (3, 0, 2, 1)]
        assert_close(net.fused(batch), level)
    assert_close(level[batch.root], torch.stack(roots))
    assert batch.label[batch.root].tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("form", ["loop", "folded", "mixed"])
def test_list_gradients_are_those_of_the_library_network(form: str) -> None:
    lists = Lists.of(generate(60, 0))
    if form == "mixed":
        oracle, (rows,) = "packed", mixed_batches(lists.length, 60, np.random.default_rng(0))
    else:
        oracle, rows = "bucketed", (lists.length == 7).nonzero()[:, 0]
    length = lists.length[rows]
    found = {}
    for name in (oracle, form):
        torch.manual_seed(0)
        net = ListRnn(hidden=6).double()
        scores = getattr(net, name)(lists.tokens[: int(length[0]), rows], length)
        F.cross_entropy(scores, lists.label[rows]).backward()
        found[name] = [scores.detach(), *(p.grad for p in net.parameters())]
    for ours, expected in zip(found[form], found[oracle], strict=True):
        assert_close(ours, expected)

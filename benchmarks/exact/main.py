"""How far geartrain's gradients and weights are from plain PyTorch's.

    PYTHONPATH=src python -m benchmarks.exact.main

Random binary trees, a Tree-LSTM. Gradients: many trees in flight, updates off, every policy and
runtime; the largest difference of any entry, relative to the largest entry of its parameter.
Weights: 50 trees, one in flight, an update after each, against the same loop in plain PyTorch.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.nn import Tree, TreeLSTMBranch, TreeLSTMLeaf

WORDS, HIDDEN, CLASSES = 50, 16, 5


def modules(dtype: torch.dtype) -> tuple[TreeLSTMLeaf, TreeLSTMBranch, nn.Linear]:
    torch.manual_seed(0)
    return (
        TreeLSTMLeaf(HIDDEN, HIDDEN, vocabulary=WORDS, dtype=dtype),
        TreeLSTMBranch(HIDDEN, dtype=dtype),
        nn.Linear(HIDDEN, CLASSES, dtype=dtype),
    )


def graph_of(leaf: TreeLSTMLeaf, branch: TreeLSTMBranch, readout: nn.Linear, keep: str) -> gt.Graph:
    graph = gt.Graph(vertex=("parent", "slot", "label"))
    leaves = graph.input("word").through(leaf, name="leaf", keep=keep)
    nodes = Tree(branch, name="branch", keep=keep)(leaves)
    scores = nodes.through(lambda h, c: h, name="h").through(readout, name="readout", keep=keep)
    scores.loss(gt.cross_entropy, "label")
    return graph


def trees(n: int) -> list[gt.Instance]:
    random = np.random.default_rng(0)
    made = []
    for _ in range(n):
        leaves = int(random.integers(1, 15))
        parent, slot = [-1] * (2 * leaves - 1), [0] * (2 * leaves - 1)
        roots, fresh = list(range(leaves)), leaves
        while len(roots) > 1:
            i = int(random.integers(len(roots) - 1))
            for side in (0, 1):
                parent[roots[i + side]], slot[roots[i + side]] = fresh, side
            roots[i : i + 2] = [fresh]
            fresh += 1
        made.append(
            gt.Instance(
                {"word": torch.from_numpy(random.integers(WORDS, size=leaves))},
                {"parent": parent, "slot": slot, "label": random.integers(CLASSES, size=fresh)},
            )
        )
    return made


def plain_loss(leaf, branch, readout, tree: gt.Instance) -> torch.Tensor:
    h, c = leaf(tree.inputs["word"])
    hs, cs = list(h), list(c)
    children: dict[int, list[int]] = {}
    for v, (p, s) in enumerate(zip(tree.vertex["parent"], tree.vertex["slot"], strict=True)):
        if p >= 0:
            children.setdefault(p, [0, 0])[s] = v
    for v in range(len(hs), len(tree.vertex["parent"])):
        a, b = children[v]
        hv, cv = branch(torch.stack([hs[a], hs[b]])[None], torch.stack([cs[a], cs[b]])[None])
        hs.append(hv[0])
        cs.append(cv[0])
    target = torch.from_numpy(np.asarray(tree.vertex["label"]))
    return F.cross_entropy(readout(torch.stack(hs)), target, reduction="sum")


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def gradients(dtype: torch.dtype, keep: str) -> float:
    data = trees(100)
    reference = modules(dtype)
    for tree in data:
        plain_loss(*reference, tree).backward()
    worst = 0.0
    runtimes = [gt.Simulated(3, seed=1, jitter=0.5), gt.Threads(1), gt.Threads(2), gt.Threads(4)]
    for runtime in runtimes:
        for policy in (gt.Sweeps, gt.FullestFirst, gt.BackwardFirst, gt.OldestFirst):
            mine = modules(dtype)
            still = partial(torch.optim.SGD, lr=0.0)
            session = gt.Session(
                graph_of(*mine, keep),
                rules=gt.Rules(optimizer=still, update_every=gt.Flush(), average="none"),
                runtime=runtime,
                schedule=gt.Schedule(
                    ramp=gt.Ramp(over=0), policy=lambda w, policy=policy: policy()
                ),
            )
            found = _spy_on_gradients(session)
            session.fit(data, epochs=1)
            for name, module in zip(("leaf", "branch", "readout"), reference, strict=True):
                for n, p in module.named_parameters():
                    worst = max(worst, difference(found[f"{name}/{n}"], p.grad.to_dense()))
    return worst


def _spy_on_gradients(session: gt.Session) -> dict[str, torch.Tensor]:
    """What the optimisers of the parts are given, by part and parameter."""
    found: dict[str, torch.Tensor] = {}

    def spy(part) -> None:
        def remember(*_: object) -> None:
            for name, parameter in part.module.named_parameters():
                found[f"{part.name}/{name}"] = parameter.grad.to_dense().clone()

        part.optimizer.register_step_pre_hook(remember)

    for part in session.parts.values():
        spy(part)
    return found


def weights(dtype: torch.dtype, keep: str) -> float:
    data = trees(50)
    reference, mine = modules(dtype), modules(dtype)
    sgd = torch.optim.SGD([p for m in reference for p in m.parameters()], lr=0.05)
    for tree in data:
        sgd.zero_grad()
        plain_loss(*reference, tree).backward()
        sgd.step()
    session = gt.Session(
        graph_of(*mine, keep),
        rules=gt.Rules(
            optimizer=partial(torch.optim.SGD, lr=0.05),
            update_every=gt.Instances(1),
            average="none",
        ),
        runtime=gt.Threads(2),
        max_active=1,
        reading=gt.Reading(shuffle=False),
    )
    session.fit(data, epochs=1)
    pairs = zip(reference, mine, strict=True)
    return max(
        difference(q.detach(), p.detach())
        for a, b in pairs
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def main() -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()
    print(f"{'keep':<14}{'dtype':<10}{'gradients':>12}{'weights':>12}")
    for keep in ("inputs", "activations"):
        for dtype in (torch.float64, torch.float32):
            name = str(dtype).removeprefix("torch.")
            print(
                f"{keep:<14}{name:<10}{gradients(dtype, keep):>12.1e}{weights(dtype, keep):>12.1e}"
            )


if __name__ == "__main__":
    main()

"""Dipole moments of molecules with a gated graph network in plain PyTorch.

    elements ─► one-hot ─► gated graph network over the bonds ─► gated sum ─► |dipole|

    block     a minibatch of molecules as one block-diagonal graph; messages of bonded atoms only
    dense     the same; messages of all types from every atom, one matrix product

Adam 1e-3, the gradient clipped at norm 1, half the squared error of the standardised norm. Network
and sizes follow Gaunt et al. 2017, arXiv:1705.09786, and Li et al. 2016, arXiv:1511.05493.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.baselines.baseline import Baseline, Epoch, Terms, shuffler
from geartrain.baselines.graphs import GatedGraphNet, GatedSum, Graphs, Method
from geartrain.baselines.lap import Lap
from geartrain.data.qm9 import BONDS, ELEMENTS, Molecules, load_qm9, split_indices

RATE: Final = 1e-3
CLIP_NORM: Final = 1.0
CLOSE: Final = 0.1  # Debye; the error ratio is to this
_AT_ONCE: Final = 200  # molecules of a block in validation


def train(terms: Terms, method: Method) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation.

    The metrics are ``mae``, the mean absolute error in Debye, and ``error_ratio``, the same in
    tenths of a Debye.

    Args:
        terms: With the options ``hidden``, ``steps``, ``limit`` and ``distances``.
        method: How messages are made.
    """
    lengths = bool(terms.options["distances"])
    molecules = load_qm9(terms.data, limit=int(terms.options["limit"]) or None)
    chosen, held = split_indices(len(molecules))
    (graphs, mu), (valid, truth) = (
        _columns(molecules.select(each), lengths=lengths) for each in (chosen, held)
    )
    mean, std = mu.double().mean().item(), mu.double().std(correction=0).item() or 1.0
    goal = (mu - mean) / std
    torch.manual_seed(terms.seed)
    hidden = int(terms.options["hidden"])
    net = GatedGraphNet(hidden, len(BONDS), int(terms.options["steps"]), lengths=lengths)
    readout = GatedSum(hidden, len(ELEMENTS))
    parameters = [*net.parameters(), *readout.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=RATE, fused=True)
    lap = Lap(len(graphs), terms.evaluate_every)
    for epoch in range(1, terms.epochs + 1):
        order = shuffler(terms.seed, epoch).permutation(len(graphs))
        for first in range(0, len(order), terms.batch):
            rows = order[first : first + terms.batch]
            block = graphs.block(rows)
            out = readout(net(block, method), block)[:, 0]
            loss = F.mse_loss(out, goal[torch.from_numpy(rows)]) / 2
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            lap.add(loss.item() * len(rows), len(rows))
            if lap.ends():
                moments = predict(net, readout, valid) * std + mean
                error = (moments - truth).abs().double().mean().item()
                yield lap.entry({"mae": error, "error_ratio": error / CLOSE})
                lap.resume()


def predict(net: GatedGraphNet, readout: GatedSum, graphs: Graphs) -> Tensor:
    """Return the standardised norms, ``(G,)``."""
    out = []
    with torch.no_grad():
        for first in range(0, len(graphs), _AT_ONCE):
            block = graphs.block(np.arange(first, min(first + _AT_ONCE, len(graphs))))
            out.append(readout(net(block), block)[:, 0])
    return torch.cat(out)


def _columns(molecules: Molecules, *, lengths: bool) -> tuple[Graphs, Tensor]:
    """Molecules, and their dipole norms float32 ``(G,)`` in Debye."""
    elements = torch.from_numpy(molecules.element())
    graphs = Graphs(
        start=F.one_hot(elements, len(ELEMENTS)).float(),
        offsets=molecules.offsets,
        edge_offsets=molecules.edge_offsets,
        source=molecules.source,
        target=molecules.target,
        type=molecules.type,
        length=molecules.distance if lengths else None,
    )
    return graphs, torch.from_numpy(molecules.mu)


def _baseline(name: str, what: str, method: Method, *, slow: bool = False) -> Baseline:
    return Baseline(name=name, what=what, batch=20, train=partial(train, method=method), slow=slow)


BASELINES: Final = (
    _baseline("block", "block-diagonal minibatches, messages of bonded atoms", "sparse"),
    _baseline("dense", "block, messages of all types from every atom", "dense", slow=True),
)

"""Dipole moments of molecules with a gated graph network in plain PyTorch.

    elements ─► one-hot ─► gated graph network over the bonds ─► gated sum ─► |dipole|

    block     a minibatch of molecules as one block-diagonal graph; messages of bonded atoms only
    dense     the same; messages of all types from every atom, one matrix product
    pyg       block, messages passed by PyTorch Geometric
    pyg-batch the same, minibatches collated by PyTorch Geometric as well
    single    one molecule after another, added up to an update; an adjacency matrix for each

Adam, the gradient clipped at norm 1, half the squared error of the standardised norm; rates are
those of ``benchmarks/tuning``. Network and sizes follow Gaunt et al. 2017, arXiv:1705.09786, and Li
et al. 2016, arXiv:1511.05493.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.data.qm9 import BONDS, ELEMENTS, Molecules, load_qm9, split_indices
from geartrain.recipes.qm9 import QM9
from geartrain_baselines.baseline import Baseline, Epoch, Terms, rate_at, segments
from geartrain_baselines.graphs import (
    DENSE,
    PYG,
    SINGLE,
    SPARSE,
    Form,
    GatedReadout,
    Graphs,
)
from geartrain_baselines.pyg_forms import pyg_form

RATES: Final = {4: 5e-4, 10: 5e-4, 20: 1e-3, 50: 2e-3, 100: 2e-3}  # Adam's, by batch
CLIP_NORM: Final = 1.0
CLOSE: Final = 0.1  # Debye; the error ratio is to this
_AT_ONCE: Final = 200  # molecules of a block in validation


def train(terms: Terms, form: Form, rate: float | None = None) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation.

    The metrics are ``mae``, the mean absolute error in Debye, and ``error_ratio``, the same in
    tenths of a Debye.

    Args:
        terms: With the options ``hidden``, ``steps``, ``limit`` and ``distances``.
        form: How the network is run.
        rate: Adam's; None takes the tuned one.
    """
    lengths = bool(terms.options["distances"])
    molecules = load_qm9(terms.data, limit=int(terms.options["limit"]) or None)
    chosen, held = split_indices(len(molecules))
    (columns, mu), (valid, truth) = (
        _columns(molecules.select(each), lengths=lengths) for each in (chosen, held)
    )
    mean, std = mu.double().mean().item(), mu.double().std(correction=0).item() or 1.0
    goal = (mu - mean) / std
    torch.manual_seed(terms.seed)
    hidden = int(terms.options["hidden"])
    net = form.build(hidden, len(BONDS), int(terms.options["steps"]), lengths=lengths)
    readout = GatedReadout(hidden, len(ELEMENTS))
    parameters = [*net.parameters(), *readout.parameters()]
    lr = rate_at(terms.batch, RATES) if rate is None else rate
    optimizer = torch.optim.Adam(parameters, lr=lr, fused=True)
    begin = time.perf_counter()
    graphs = form.collating(columns, len(BONDS))
    seconds = time.perf_counter() - begin
    order = segments(
        len(graphs),
        terms.batch,
        seed=terms.seed,
        epochs=terms.epochs,
        evaluate_every=terms.evaluate_every,
    )
    for segment in order:
        begin, loss_sum = time.perf_counter(), 0.0
        for rows in segment.batches:
            optimizer.zero_grad()
            for part in form.parts(rows):
                block = graphs.block(part)
                out = readout(net(block), block)[:, 0]
                total = F.mse_loss(out, goal[torch.from_numpy(part)], reduction="sum") / 2
                (total / len(rows)).backward()  # type: ignore[no-untyped-call]
                loss_sum += total.item()
            nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
        seconds += time.perf_counter() - begin
        error = (predict(net, readout, valid) * std + mean - truth).abs().double().mean().item()
        yield Epoch(
            epoch=segment.epoch,
            seconds=seconds,
            instances=len(segment),
            loss=loss_sum / len(segment),
            updates=len(segment.batches),
            valid={"mae": error, "error_ratio": error / CLOSE},
        )


def predict(net: nn.Module, readout: GatedReadout, graphs: Graphs) -> Tensor:
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


def _baseline(
    name: str, what: str, batch: int = 50, *, slow: bool = False, needs: str | None = None
) -> Baseline:
    run = partial(train, form=FORMS[name])
    return Baseline(name=name, what=what, batch=batch, train=run, slow=slow, needs=needs)


FORMS: Final[Mapping[str, Form]] = {
    "block": SPARSE,
    "dense": DENSE,
    "pyg": pyg_form("sparse"),
    "pyg-batch": pyg_form("sparse", batches=True),
    "single": SINGLE,
}

BASELINES: Final = (
    _baseline("block", "block-diagonal minibatches, messages of bonded atoms"),
    _baseline("dense", "block, messages of all types from every atom", slow=True),
    _baseline("pyg", "block, messages passed by PyTorch Geometric", needs=PYG),
    _baseline("pyg-batch", "pyg, collated by its Batch", slow=True, needs=PYG),
    _baseline("single", "one molecule after another", QM9.update_size({}), slow=True),
)

"""What trains on a device: geartrain, and the same network by hand or by PyTorch Geometric.

    trees       a Tree-LSTM on sentiment trees       levels by hand; backward by hand too
    molecules   a gated graph network on molecules   block-diagonal; PyTorch Geometric
    childsum    a program of ``benchmarks.own``      batching by hand
    decoder     a Transformer on characters          a plain loop, one minibatch after the other

A system trains a fresh network; a call trains one pass, and comes back when the device is done. By
hand nothing waits for the device within a pass: what a minibatch needs is put together on the host
and sent, and losses are added up on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from benchmarks.own.systems import System as OwnSystem
from benchmarks.own.systems import Trained
from benchmarks.pipeline.systems import Work, mean_loss, minibatches, network
from geartrain.data.qm9 import BONDS, ELEMENTS, load_qm9
from geartrain.data.sst import load_sst
from geartrain.recipes import find_recipe
from geartrain.recipes.recipe import Setting
from geartrain_baselines.graphs import (
    GatedGraphNet,
    GatedReadout,
    GraphBatch,
    Graphs,
    SenderMessages,
    plan_sparse,
)
from geartrain_baselines.pyg_forms import pyg_form
from geartrain_baselines.sentiment import TreeColumns, TreeLstm

Pass: TypeAlias = Callable[[], float]
"""Trains once on everything, and gives the mean loss."""
T = TypeVar("T")

BLOCKS: Final = 8
STEPS: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained.

    Args:
        task: ``trees``, ``molecules``, ``decoder`` or a program of ``benchmarks.own``.
        width: Of the rows.
        device: Of the modules.
        data: The data folder.
        instances: Of a pass: trees, molecules, examples, or rows of minibatches.
    """

    task: str
    width: int
    device: str
    data: Path
    instances: int


def systems_of(task: str) -> dict[str, Callable[[Setup], Pass]]:
    """All systems of a task by name, with what makes them.

    ``ours 256/64`` has 256 in flight and an update for every 64.
    """
    pairs = ((64, 64), (256, 64), (256, 256))
    if task == "trees":
        return {
            **{f"ours {n}/{u}": partial(our_trees, in_flight=n, update=u) for n, u in pairs},
            "ours by vertex 256/64": partial(our_trees, in_flight=256, update=64, whole=False),
            **{f"{m} {u}": partial(trees_by_hand, method=m, update=u)
               for m in ("level", "fused") for u in (64, 256)},
        }  # fmt: skip
    if task == "molecules":
        return {
            **{f"ours {n}/{u}": partial(our_molecules, in_flight=n, update=u) for n, u in pairs},
            **{f"{m} {u}": partial(molecules_by_hand, form=m, update=u)
               for m in ("block", "pyg") for u in (64, 256)},
        }  # fmt: skip
    if task == "decoder":
        return {
            **{f"ours {w} workers, {n}": partial(our_decoder, workers=w, in_flight=n)
               for w, n in ((1, 1), (2, 2), (2, 3))},
            "plain": plain_decoder,
        }  # fmt: skip
    return {
        **{f"ours {n}/{u}": partial(own, system=OwnSystem("ours", u, n)) for n, u in pairs},
        **{f"hand {u}": partial(own, system=OwnSystem("hand", u)) for u in (64, 256)},
    }


def own(setup: Setup, *, system: OwnSystem) -> Pass:
    """A program of ``benchmarks.own``, by geartrain or by hand."""
    trained = Trained(setup.task, system, setup.width, device=setup.device)
    items = trained.program.generate(setup.instances, seed=1)
    trained.rows_with_loss = trained.program.losses(items)
    prepared = trained.prepare(items)
    return lambda: trained(prepared).loss


def our_trees(setup: Setup, *, in_flight: int, update: int, whole: bool = True) -> Pass:
    """The recipe ``sentiment``."""
    options = {"hidden": setup.width, "whole": int(whole), "trees": setup.instances}
    return _recipe("sentiment", setup, options, in_flight, update)


def our_molecules(setup: Setup, *, in_flight: int, update: int) -> Pass:
    """The recipe ``qm9``."""
    # A tenth is left for validation.
    options = {"hidden": setup.width, "steps": STEPS, "limit": -(-setup.instances * 10 // 9)}
    return _recipe("qm9", setup, options, in_flight, update)


def _recipe(name: str, setup: Setup, options: dict[str, Any], in_flight: int, update: int) -> Pass:
    recipe = find_recipe(name)
    options = {o.name: o.default for o in recipe.options} | options
    torch.manual_seed(0)
    made = Setting(seed=0, epochs=1, update_every=update, data=setup.data, options=options)
    task = recipe.build(made)
    instances = task.load("train")[: setup.instances]
    rules = replace(task.rules, update_every=gt.Instances(update))
    session = gt.Session(
        task.graph,
        rules=rules,
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=in_flight,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        compute=gt.Compute(device=setup.device),
    )
    numbers = itertools.count(1)
    return lambda: session.fit(instances, epochs=next(numbers)).history[-1].loss


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On its way to the device, from memory that the copy reads by itself."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def _all_sent(found: T, device: torch.device) -> T:
    """A record with its tensors, and those in its sequences, on a device."""
    changes: dict[str, Any] = {}
    for field in fields(found):  # type: ignore[arg-type]
        value = getattr(found, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = _sent(value, device)
        elif isinstance(value, tuple | list) and value and isinstance(value[0], Tensor):
            whole = _sent(torch.cat(list(value)), device)  # one copy for all
            changes[field.name] = whole.split([len(x) for x in value])
    return replace(found, **changes)  # type: ignore[type-var]


def _passes(
    count: int, update: int, step: Callable[[np.ndarray], Tensor], optimizers: Sequence[Any]
) -> Pass:
    """Passes over so many examples in random order; ``step`` makes the gradient of some."""
    random = np.random.default_rng(0)

    def train() -> float:
        order = random.permutation(count)
        total: Tensor | float = 0.0
        for begin in range(0, count, update):
            for optimizer in optimizers:
                optimizer.zero_grad()
            total = total + step(order[begin : begin + update])
            for optimizer in optimizers:
                optimizer.step()
        return float(total) / count

    return train


def trees_by_hand(setup: Setup, *, method: str, update: int) -> Pass:
    """``geartrain_baselines.sentiment`` on a device."""
    device = torch.device(setup.device)
    torch.sparse.check_sparse_tensor_invariants.disable()
    sst = load_sst(setup.data, ("train",))
    forest = TreeColumns(sst.train[: setup.instances])
    torch.manual_seed(0)
    net = TreeLstm(len(sst.vocabulary), setup.width).to(device)
    dense = [p for name, p in net.named_parameters() if not name.startswith("embedding")]
    optimizers = [torch.optim.Adagrad(dense, lr=0.05, fused=device.type == "cpu", foreach=None),
                  torch.optim.Adagrad(net.embedding.parameters(), lr=0.05)]  # fmt: skip
    run = net.level if method == "level" else net.fused

    def step(rows: np.ndarray) -> Tensor:
        trees = _all_sent(forest.minibatch(rows), device)
        loss = F.cross_entropy(run(trees), trees.label, reduction="sum")
        (loss / len(trees.label)).backward()
        return loss.detach() / len(trees.label) * len(rows)

    return _passes(len(forest), update, step, optimizers)


def molecules_by_hand(setup: Setup, *, form: str, update: int) -> Pass:
    """Block-diagonal minibatches, messages of bonded atoms only; or passed by PyTorch Geometric.

    Who sends is found on the host, once a minibatch.
    """
    device, width = torch.device(setup.device), setup.width
    molecules = load_qm9(setup.data, limit=setup.instances)
    start = F.one_hot(torch.from_numpy(molecules.element()), len(ELEMENTS)).float()
    graphs = Graphs(start, molecules.offsets, molecules.edge_offsets, molecules.source,
                    molecules.target, molecules.type)  # fmt: skip
    goal = torch.from_numpy(molecules.mu).to(device)
    goal = (goal - goal.mean()) / goal.std()
    torch.manual_seed(0)
    if form == "pyg":
        net = pyg_form("sparse").build(width, len(BONDS), STEPS).to(device)
    else:
        net = GatedGraphNet(width, len(BONDS), STEPS).to(device)
    linear = net.message if form == "block" else net.linear  # type: ignore[union-attr]
    readout = GatedReadout(width, len(ELEMENTS)).to(device)
    parameters = [*net.parameters(), *readout.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=5e-4, fused=True)
    planned: list[SenderMessages] = []
    if form == "pyg":
        net._plan = lambda linear, block: planned[0]  # type: ignore[union-attr,assignment]
    else:
        net._plan = lambda block: _hearing(planned[0], block)  # type: ignore[union-attr,assignment]

    def step(rows: np.ndarray) -> Tensor:
        block = graphs.block(rows)
        found = plan_sparse(linear, block)
        make = found.make
        assert isinstance(make, partial)
        planned[:] = [SenderMessages(partial(make.func, linear, _sent(make.args[1], device),
                                             make.args[2]), _sent(found.at, device))]  # fmt: skip
        there: GraphBatch = _all_sent(block, device)
        out = readout(net(there), there)[:, 0]
        chosen = _sent(torch.from_numpy(rows), device)
        loss = F.mse_loss(out, goal[chosen], reduction="sum") / 2
        (loss / len(rows)).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return loss.detach()

    return _passes(len(graphs), update, step, [optimizer])


def _hearing(messages: SenderMessages, block: GraphBatch) -> Callable[[Tensor], Tensor]:
    def hear(h: Tensor) -> Tensor:
        sent = messages.make(h).index_select(0, messages.at)
        return torch.zeros_like(h).index_add(0, block.target, sent)

    return hear


def _decoder(setup: Setup) -> tuple[Work, nn.Sequential, list[tuple[Tensor, Tensor]]]:
    work = Work(
        data=str(setup.data),
        dim=setup.width,
        blocks=BLOCKS,
        heads=4,
        batch=16,
        warm_up=0,
        steps=setup.instances // 16,
    )
    batches, tokens = minibatches(work)
    return work, network(work, tokens), batches


def our_decoder(setup: Setup, *, workers: int, in_flight: int) -> Pass:
    """A pipeline of two parts."""
    _, model, batches = _decoder(setup)
    pipe = gt.Pipeline(model, parts=2, slack=max(in_flight - workers, 0))
    session = gt.Session(
        pipe.graph,
        rules=pipe.rules(partial(torch.optim.Adam, lr=1e-3, fused=True)),
        runtime=gt.Threads(workers, kernel_threads=1),
        reading=gt.Reading(shuffle=False),
        compute=gt.Compute(device=setup.device),
        **pipe.settings(workers) | {"max_active": in_flight},
    )
    instances = [gt.minibatch(x, y) for x, y in batches]
    numbers = itertools.count(1)
    return lambda: session.fit(instances, epochs=next(numbers)).history[-1].loss


def plain_decoder(setup: Setup) -> Pass:
    """One minibatch after the other."""
    device = torch.device(setup.device)
    _, model, batches = _decoder(setup)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def train() -> float:
        total: Tensor | float = 0.0
        for x, y in batches:
            optimizer.zero_grad()
            loss = mean_loss(model(_sent(x, device)), _sent(y, device))
            loss.backward()
            optimizer.step()
            total = total + loss.detach()
        return float(total) / len(batches)

    return train

"""Trees a second in training: geartrain against plain PyTorch, in one run, one after the other.

    PYTHONPATH=src python -m benchmarks.sentiment.main --data ../shared/data

Every system trains one and the same binary Tree-LSTM (hidden 128, word vectors 128, a loss at
every vertex, Adagrad) on the same trees: forward, backward and optimiser steps included, reading
excluded. Each round runs every system once, in turn; ratios are taken within a round. The first
round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
import torch

import geartrain as gt
from geartrain.baselines.sentiment import Forest, Method, TreeLstm, summed_loss
from geartrain.data.sst import load_sst
from geartrain.recipes.recipe import Setting
from geartrain.recipes.sentiment import SENTIMENT

BASE: Final = "node by node"


@final
@dataclass(frozen=True, slots=True)
class System:
    """Something that trains.

    Args:
        name: In the table.
        trees: How many it trains on in a round; fewer where it is slow.
        run: Trains on them once; returns seconds.
    """

    name: str
    trees: int
    run: Callable[[], float]


def ours(
    name: str, data: Path | None, trees: int, workers: int, kernel_threads: int, max_active: int
) -> System:
    """The recipe ``sentiment`` at its own settings."""
    setting = Setting(
        seed=0, epochs=1, update_every=SENTIMENT.update_every, data=data, options={"trees": trees}
    )
    task = SENTIMENT.build(setting)
    instances = task.load("train")
    session = gt.Session(
        task.graph,
        rules=task.rules,
        runtime=gt.Threads(workers, kernel_threads=kernel_threads),
        max_active=max_active,
        ramp=gt.Ramp(over=0),
    )
    epochs = iter(range(1, 1000))
    return System(name, trees, lambda: session.fit(instances, epochs=next(epochs)).train_seconds)


def plain(
    name: str, data: Path | None, trees: int, method: Method, batch: int, threads: int
) -> System:
    """Plain PyTorch, from ``geartrain.baselines.sentiment``."""
    sst = load_sst(data, ("train",))
    forest = Forest(sst.train[:trees])
    torch.manual_seed(0)
    net = TreeLstm(len(sst.vocabulary))
    dense = [p for n, p in net.named_parameters() if not n.startswith("embedding")]
    optimizers = (
        torch.optim.Adagrad(dense, lr=0.05, fused=True),
        torch.optim.Adagrad(net.embedding.parameters(), lr=0.05),
    )
    order = np.random.default_rng(0).permutation(trees)

    def run() -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        for first in range(0, trees, batch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = summed_loss(net, method, forest, order[first : first + batch])
            if method != "node":
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return time.perf_counter() - began

    return System(name, trees, run)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder that holds sst/")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trees", type=int, default=4000)
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON too")
    given = parser.parse_args()
    torch.sparse.check_sparse_tensor_invariants.disable()
    n, data = given.trees, given.data
    systems = [
        plain(BASE, data, max(n // 20, 50), "node", 25, 1),
        plain("levels by hand, batch 25", data, n, "level", 25, 2),
        plain("levels by hand, batch 100", data, n, "level", 100, 2),
        plain("levels, backward by hand, batch 100", data, n, "fused", 100, 2),
        ours("geartrain, 1 worker, 256 in flight", data, n, 1, 2, 256),
        ours("geartrain, 2 workers, 256 in flight", data, n, 2, 1, 256),
        ours("geartrain, 2 workers, 64 in flight", data, n, 2, 1, 64),
    ]
    rates: dict[str, list[float]] = {s.name: [] for s in systems}
    for number in range(given.rounds + 1):
        for system in systems:
            rate = system.trees / system.run()
            if number:
                rates[system.name].append(rate)
    print(f"{platform.machine()}, torch {torch.__version__}, {n} trees, {given.rounds} rounds")
    print(f"{'system':<40}{'trees/s':>9}{'min':>8}{'max':>8}{'× ' + BASE:>22}")
    for system in systems:
        mine = rates[system.name]
        ratios = [a / b for a, b in zip(mine, rates[BASE], strict=True)]
        middle = statistics.median(ratios)
        print(
            f"{system.name:<40}{statistics.median(mine):>9.0f}{min(mine):>8.0f}{max(mine):>8.0f}"
            f"{middle:>10.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        )
    if given.json:
        print(json.dumps(rates))


if __name__ == "__main__":
    main()

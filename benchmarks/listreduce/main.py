"""Seconds of training until list reduction is at 97 %: geartrain beside plain PyTorch, in one run.

    PYTHONPATH=src python -m benchmarks.listreduce.main --seeds 3

The same recurrent network (ReLU, 128 wide), 100,000 lists to train on, 10,000 to validate on, Adam
with the same warm-up and decay. Plain PyTorch trains minibatches of 100 lists: packed sequences
through ``nn.RNN``, and the strongest form we could write, lists of mixed lengths that leave the
batch as they end (``geartrain.baselines``). Systems take turns, seed by seed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

import geartrain as gt
from geartrain.baselines import listreduce as plain
from geartrain.recipes.listreduce import LISTREDUCE
from geartrain.recipes.recipe import Setting

TARGET = 0.97
Outcome = tuple[float, int, float, bool]
"""Seconds, epochs, lists a second, reached."""


def ours(seed: int, workers: int) -> Outcome:
    setting = Setting(seed=seed, epochs=LISTREDUCE.epochs, update_every=LISTREDUCE.update_every)
    task = LISTREDUCE.build(setting)
    train, valid = task.load("train"), task.load("valid")
    session = gt.Session(
        task.graph,
        rules=task.rules,
        runtime=gt.Threads(workers, kernel_threads=max(1, 2 // workers)),
        max_active=LISTREDUCE.max_active,
        ramp=task.ramp,
        seed=seed,
    )
    until = gt.Target("accuracy", TARGET)
    fit = session.fit(train, epochs=LISTREDUCE.epochs, valid=valid, until=until)
    rate = fit.instances / fit.train_seconds
    return fit.train_seconds, len(fit.history), rate, fit.reached is not None


def baseline(method: plain.Method, epochs: int, seed: int) -> Outcome:
    torch.set_num_threads(1)  # two threads are no faster at a minibatch of 100
    last = None
    for epoch in plain.train(method, plain.Plan(epochs=epochs), seed=seed):
        last = epoch
        if epoch.valid["accuracy"] >= TARGET:
            break
    assert last is not None
    return (
        last.seconds,
        last.epoch,
        last.epoch * 100_000 / last.seconds,
        last.valid["accuracy"] >= TARGET,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds until list reduction is at 97 %")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    systems: dict[str, Callable[[int], Outcome]] = {
        "geartrain, 2 workers": lambda seed: ours(seed, 2),
        "geartrain, 1 worker": lambda seed: ours(seed, 1),
        "PyTorch, packed nn.RNN, 6 epochs planned": lambda seed: baseline("packed", 6, seed),
        "PyTorch, mixed lengths, 4 epochs planned": lambda seed: baseline("mixed", 4, seed),
    }
    found: dict[str, list[Outcome]] = {name: [] for name in systems}
    for seed in range(given.seeds):
        for name, run in systems.items():
            found[name].append(run(seed))
    print(f"torch {torch.__version__}, {given.seeds} seeds; medians, seconds from min to max")
    print(
        f"{'system':<44}{'seconds':>9}{'min':>7}{'max':>7}{'epochs':>8}{'lists/s':>9}{'reached':>9}"
    )
    for name, outcomes in found.items():
        seconds, epochs, rates, reached = (list(column) for column in zip(*outcomes, strict=True))
        print(
            f"{name:<44}{statistics.median(seconds):>9.1f}{min(seconds):>7.1f}{max(seconds):>7.1f}"
            f"{statistics.median(epochs):>8.0f}{statistics.median(rates):>9.0f}"
            f"{sum(reached):>6}/{len(reached)}"
        )


if __name__ == "__main__":
    main()

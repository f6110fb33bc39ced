"""Sentiment trees in plain PyTorch, one form of ``geartrain_baselines.sentiment`` alone.

PYTHONPATH=src python -m benchmarks.baselines.sentiment --method fused --batch 25 --seed 0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import get_args

import torch

from geartrain_baselines.baseline import rate_at
from geartrain_baselines.sentiment import BATCH, RATES, Method, train


def main() -> None:
    """Print one JSON line an epoch."""
    parser = argparse.ArgumentParser(description="sentiment trees in plain PyTorch")
    parser.add_argument("--method", choices=get_args(Method), default="fused")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, help="else the one tuned at this batch")
    parser.add_argument("--spread", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trees", type=int, help="train on the first so many trees")
    parser.add_argument("--data", type=Path, help="folder that holds sst/")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.lr is None:
        given.lr = rate_at(given.batch, RATES)
    keys = "method", "batch", "lr", "spread", "seed", "threads"
    settings = {key: getattr(given, key) for key in keys}
    before = 0.0
    for epoch in train(
        given.method,
        batch=given.batch,
        epochs=given.epochs,
        lr=given.lr,
        spread=given.spread,
        seed=given.seed,
        data=given.data,
        trees=given.trees,
    ):
        line = {**settings, "epoch": epoch.epoch, "loss": epoch.loss, **epoch.valid}
        line |= {"trees_per_second": epoch.instances / (epoch.seconds - before)}
        before = epoch.seconds
        print(json.dumps({**line, "seconds": epoch.seconds}), flush=True)


if __name__ == "__main__":
    main()

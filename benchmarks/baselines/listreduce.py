"""List reduction in plain PyTorch, one form of ``geartrain_baselines.listreduce`` alone.

PYTHONPATH=src python -m benchmarks.baselines.listreduce --method mixed --seed 0
"""

from __future__ import annotations

import argparse
import json
from typing import get_args

import torch

from geartrain_baselines.listreduce import Method, Plan, train


def main() -> None:
    """Print one JSON line an epoch."""
    default = Plan()
    parser = argparse.ArgumentParser(description="list reduction in plain PyTorch")
    parser.add_argument("--method", choices=get_args(Method), default="mixed")
    parser.add_argument("--batch", type=int, default=default.batch)
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--beta2", type=float, default=default.betas[1])
    parser.add_argument("--clip", type=float, default=default.clip)
    parser.add_argument("--warmup", type=float, default=default.warmup)
    parser.add_argument("--constant", action="store_true", help="keep the rate")
    parser.add_argument("--lists", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plan = Plan(
        batch=given.batch,
        epochs=given.epochs,
        lr=given.lr,
        betas=(default.betas[0], given.beta2),
        clip=given.clip,
        warmup=given.warmup,
        constant=given.constant,
    )
    before = 0.0
    for epoch in train(given.method, plan, seed=given.seed, lists=given.lists):
        line = {"method": given.method, "batch": given.batch, "seed": given.seed}
        line |= {"epoch": epoch.epoch, "loss": epoch.loss, **epoch.valid}
        line |= {"lists_per_second": given.lists / (epoch.seconds - before)}
        before = epoch.seconds
        print(json.dumps({**line, "seconds": epoch.seconds}), flush=True)


if __name__ == "__main__":
    main()

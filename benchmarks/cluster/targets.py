"""Recipes reach their own targets over three hosts in namespaces: by the command, as a user would.

    sudo PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.cluster.targets --data DIR

``geartrain train`` runs on the first of three hosts, a worker is on each. A line of JSON a run goes
to results/targets.jsonl: the target, whether it was reached, metrics and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster.hosts import Hosts, Link
from benchmarks.cluster.pipelines import SYSCTL
from geartrain.recipes import find_recipe

RESULTS: Final = Path(__file__).parent / "results" / "targets.jsonl"
COPIES: Final = ("--replicas", "3", "--mixer", "weights", "--topology", "ring")
WAYS: Final = {
    "mnist pipeline": ("mnist",),
    "mnist neighbours": ("mnist", *COPIES),
    "sentiment": ("sentiment",),
    "sentiment by vertex": ("sentiment", "--option", "whole=0"),
}
MOST_EPOCHS: Final = "10"


def command(way: Sequence[str], hosts: Hosts, data: str, out: str, seed: int) -> list[str]:
    """What trains until the recipe's target, with a worker on each host."""
    there = [word for host in hosts for word in ("--host", " ".join((host.address, *host.prefix)))]
    target = find_recipe(way[0]).target
    words = [sys.executable, "-m", "geartrain", "train", *way, "--data", data, "--out", out]
    words += ["--runtime", "hosts", "--workers", str(len(hosts)), "--address", hosts[0].address]
    words += [*there, "--until", target, "--epochs", MOST_EPOCHS, "--seed", str(seed), "--json"]
    return [*hosts[0].prefix, *words]


def run(name: str, link: Link, data: str, seed: int) -> dict[str, Any]:
    """One training; what the command says of it is in the line."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder, Hosts(3, link, sysctl=SYSCTL) as hosts:
        words = command(WAYS[name], hosts, data, f"{folder}/run", seed)
        began = time.perf_counter()
        told = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=os.environ | paths)
        seconds = time.perf_counter() - began
    said = told.stdout.splitlines()
    return {
        "way": name,
        "seed": seed,
        "target": find_recipe(WAYS[name][0]).target,
        "reached": told.returncode == 0,
        "latency_s": link.latency_s,
        "bits_per_s": link.bits_per_s,
        "seconds": seconds,
        "told": json.loads(said[-1]) if said else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="data folder")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--latency-ms", type=float, default=1.0, help="one way")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    link = Link(latency_s=given.latency_ms * 1e-3, bits_per_s=given.mbit * 1e6)
    for name in given.ways:
        for seed in given.seeds:
            line = json.dumps(run(name, link, given.data, seed))
            print(line, flush=True)
            with given.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()

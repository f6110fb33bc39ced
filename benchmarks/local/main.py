"""Ways to train parts: operations, ideal parallel time, memory and bytes against loss.

    PYTHONPATH=src python -m benchmarks.local.main cifar --ways backprop,greedy --seeds 0,1
    PYTHONPATH=src python -m benchmarks.local.main --markdown docs/results/local.md

Trials run one after the other in this process. Their lines go to results/RECIPE.jsonl at once, and
a trial whose line is there is not run again; ``--again`` runs it anew, and the last line counts.
``--markdown`` runs nothing: it writes the page and the figure beside it from the lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.local.methods import WAYS
from benchmarks.local.trials import TERMS, Line, Terms, Trial, asked, key_of, try_once

RESULTS: Final = Path(__file__).parent / "results"

Try = Callable[[Trial, Terms], Line]


def main(words: Sequence[str] | None = None, attempt: Try = try_once) -> None:
    """Run trials, or write what came of them.

    Args:
        words: Of the command line.
        attempt: Runs a trial.
    """
    given = _arguments(words)
    if given.markdown is not None:
        from benchmarks.local.page import write

        write(given.markdown, {name: read(given.out / f"{name}.jsonl") for name in TERMS})
        return
    torch.set_num_threads(1)
    trials = [Trial(way, seed) for seed in given.seeds for way in given.ways]
    run(trials, TERMS[given.recipe], given.out, again=given.again, attempt=attempt)


def run(trials: Sequence[Trial], terms: Terms, out: Path, *, again: bool, attempt: Try) -> None:
    """Run what has no line yet, and add its line."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / f"{terms.recipe}.jsonl"
    there = set() if again else {key_of(line) for line in read(results)}
    todo = [trial for trial in trials if key_of(asked(trial, terms)) not in there]
    for number, trial in enumerate(todo, 1):
        line = attempt(trial, terms)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        print(f"{number}/{len(todo)} {_told(line)}", file=sys.stderr, flush=True)


def read(results: Path) -> list[dict[str, Any]]:
    """The lines so far, of equal trials the last; none where there is no file."""
    if not results.exists():
        return []
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return list({key_of(line): line for line in lines}.values())


def _told(line: Line) -> str:
    named = f"{line['way']}, seed {line['seed']}: {line['outcome']}"
    if line["outcome"] != "done":
        return f"{named}, {line['reason']}"
    return f"{named}, loss {line['curve'][-1]['loss']:.4f}"


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", choices=sorted(TERMS), default="cifar")
    parser.add_argument("--ways", default=",".join(WAYS), help="names, by commas; default: all")
    parser.add_argument("--seeds", default="0", help="numbers, by commas (0)")
    parser.add_argument("--again", action="store_true", help="also what has a line already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--markdown", type=Path, help="write the page there; run nothing")
    given = parser.parse_args(words)
    given.ways = given.ways.split(",")
    given.seeds = [int(seed) for seed in given.seeds.split(",")]
    if unknown := [way for way in given.ways if way not in WAYS]:
        parser.error(f"--ways {','.join(unknown)}: there is {', '.join(WAYS)}")
    return given


if __name__ == "__main__":
    main()

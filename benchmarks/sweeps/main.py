"""Speed and staleness against max_active, update_every and replicas, one at a time.

    PYTHONPATH=src python -m benchmarks.sweeps.main listreduce --seeds 3 --cap 300

Every trial is ``geartrain train TASK --json`` in a process of its own, one after the other. Its
line goes to results/TASK.jsonl at once, and a trial whose line is there is not run again, so a
sweep that was stopped goes on where it stood; ``--again`` runs all of them anew, and the last line
counts. Tables go to standard output and results/TASK.md, a figure to results/TASK.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.sweeps.tables import Axes, draw, of_terms, page_of
from benchmarks.sweeps.trials import Line, Point, Terms, asked, key_of, try_once
from geartrain.observe.figures import duration, epochs, rate
from geartrain.recipes import RECIPES, Recipe, find_recipe

RESULTS: Final = Path(__file__).parent / "results"
MAX_ACTIVE: Final = (1, 4, 16, 64, 256)
UPDATE_EVERY: Final = {
    "babi": (5, 10, 20, 40),
    "charlm": (1, 2, 4),
    "cifar": (1, 2, 4),
    "listreduce": (25, 50, 100, 200, 400),
    "mnist": (1, 2, 4),
    "qm9": (10, 20, 40, 80),
    "sentiment": (125, 250, 500, 1000, 2000),
}
"""Of recipes that are swept further than over half and twice their own."""
REPLICAS: Final = (1, 2)
LONGEST_S: Final = 7200  # that a cap may be

Try = Callable[[Point, Terms, int, Path | None, float], Line]


def main(words: Sequence[str] | None = None, attempt: Try = try_once) -> None:
    """Sweep, or print the tables of what was swept.

    Args:
        words: Of the command line.
        attempt: Runs a trial.
    """
    given = _arguments(words)
    recipe = find_recipe(given.task)
    terms = _terms(recipe, given)
    axes = axes_of(recipe, given.axes.split(","))
    results = given.out / f"{recipe.name}.jsonl"
    if not given.table:
        given.out.mkdir(parents=True, exist_ok=True)
        sweep(terms, axes, given, results, attempt)
    lines = of_terms(terms, axes, read(results))
    if not lines:
        sys.exit(f"{results}: holds no trial of this sweep; run it without --table first")
    page = "\n".join(page_of(terms, axes, lines))
    print(page)
    (given.out / f"{recipe.name}.md").write_text(page + "\n", encoding="utf-8")
    if "max_active" in axes and not given.no_figure:
        draw(given.out / f"{recipe.name}.png", terms, axes, lines)


def axes_of(recipe: Recipe, names: Sequence[str]) -> Axes:
    """The points of each axis, all else as the recipe has it; a recipe's own value is among them.

    Raises:
        SystemExit: There is no such axis.
    """
    base = Point(recipe.in_flight({}), recipe.update_size({}), 1)
    own = base.update_every
    around = UPDATE_EVERY.get(recipe.name, (max(own // 2, 1), 2 * own))
    values = {
        "max_active": sorted({*MAX_ACTIVE, base.max_active}),
        "update_every": sorted({*around, own}),
        "replicas": REPLICAS if recipe.bottleneck is not None else (),
    }
    if unknown := [name for name in names if name not in values]:
        sys.exit(f"--axes {','.join(unknown)}: there is {', '.join(values)}")
    return {
        name: [replace(base, **{name: value}) for value in values[name]]
        for name in names
        if values[name]
    }


def sweep(terms: Terms, axes: Axes, given: argparse.Namespace, results: Path, attempt: Try) -> None:
    """Run what has no line yet, seed after seed, and add its line."""
    there = set() if given.again else {key_of(line) for line in read(results)}
    points = dict.fromkeys(point for points in axes.values() for point in points)
    todo = [
        (point, seed)
        for seed in range(given.seeds)
        for point in points
        if key_of(asked(point, terms, seed)) not in there
    ]
    for number, (point, seed) in enumerate(todo, 1):
        line = attempt(point, terms, seed, given.data, given.cap)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        print(f"{number}/{len(todo)} {_told(line)}", file=sys.stderr, flush=True)


def read(results: Path) -> list[dict[str, Any]]:
    """The lines so far; none where there is no file."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def _terms(recipe: Recipe, given: argparse.Namespace) -> Terms:
    return Terms(
        task=recipe.name,
        workers=given.workers,
        epochs=given.epochs or recipe.epochs,
        target=given.until or recipe.target,
        stops=not given.full,
        evaluate_every=given.evaluate_every,
        options=tuple(given.option),
    )


def _told(line: Line) -> str:
    named = f"{line['max_active']} in flight, update {line['update_every']}, "
    named += f"{line['replicas']} copies, seed {line['seed']}: {line['outcome']}"
    if not line.get("history"):
        return f"{named} {line.get('reason', '')}".rstrip()
    end = line["history"][-1]
    speed = line["instances"] / end["seconds"] if end["seconds"] else float("nan")
    return f"{named}, epoch {epochs(end['epoch'])}, {duration(end['seconds'])}, {rate(speed)}"


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=[recipe.name for recipe in RECIPES])
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ... (1)")
    parser.add_argument("--axes", default="max_active,update_every,replicas", help="what to sweep")
    parser.add_argument("--cap", type=float, default=600.0, help="seconds of a trial (600)")
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    parser.add_argument("--epochs", type=int, help="at most; default: the recipe's")
    parser.add_argument("--until", help="the target; default: the recipe's")
    parser.add_argument("--full", action="store_true", help="train on past the target")
    parser.add_argument("--evaluate-every", type=float, default=0.25, help="of an epoch (0.25)")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the recipe")
    parser.add_argument("--data", type=Path, help="the data folder; default $GEARTRAIN_DATA")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--again", action="store_true", help="also what has a line already")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--no-figure", action="store_true", help="do without matplotlib")
    given = parser.parse_args(words)
    if not 1 <= given.cap <= LONGEST_S:
        parser.error(f"--cap {given.cap:g}: give 1 to {LONGEST_S} seconds")
    return given


if __name__ == "__main__":
    main()

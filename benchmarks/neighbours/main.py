"""Copies that talk to their neighbours: scale, accuracy, stragglers, and the virtual clock.

    PYTHONPATH=src python -m benchmarks.neighbours.main costs clock scale rates accuracy stragglers

Every trial's line goes to results/TABLE.jsonl at once, and a trial whose line is there is not run
again. ``--markdown`` prints the tables and draws the figures, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import MISSING, asdict, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from benchmarks.neighbours.tables import draw, page_of
from benchmarks.neighbours.trials import Nodes, Trial, costs_key, measure, run
from geartrain.errors import GeartrainError

RESULTS: Final = Path(__file__).parent / "results"
TABLES: Final = (
    "costs", "clock", "scale", "rates", "accuracy", "stragglers", "cifar-rates", "cifar",
)  # fmt: skip
WHOLE: Final = {"hidden": 784, "batch": 100}  # the recipe's
SMALL: Final = {"hidden": 256, "batch": 25, "train_size": 30_000}
IMAGES: Final = {"width": 16, "blocks": 1, "parts": 1, "batch": 25, "train_size": 4000}
SIZES: Final = (4, 9, 16)
COPIES: Final = (1, 2, 4, 8, 16, 32, 64)
METHODS: Final = (
    "all-reduce", "d-psgd", "weights", "average:16", "diloco:16", "gradients",
    "gradients*0.2",
)  # fmt: skip
RATES: Final = (0.03, 0.09, 0.27)
FOREIGN_RATES: Final = (0.01, 0.03, 0.09)  # of methods with more steps than minibatches
ADAM_RATES: Final = (0.0003, 0.001, 0.003)
ANSWERS: Final = 2  # of 9 copies on a torus, one that makes no offers to others with ``weights``
STEPS: Final = 20  # minibatches a copy where throughput is measured


def rates_of(method: str) -> Sequence[float]:
    """The grid of a method."""
    if method.startswith("diloco"):
        return ADAM_RATES
    return FOREIGN_RATES if method.startswith("gradients") else RATES


def clock() -> Iterator[Trial]:
    """One and two workers, by both clocks."""
    for repeat in range(3):
        for copies, method in ((1, "alone"), (2, "gradients"), (2, "weights"), (2, "all-reduce")):
            for runtime in ("threads", "simulated") if repeat == 0 else ("threads",):
                yield Trial(
                    table="clock", method=method, copies=copies, options=WHOLE, minibatches=100,
                    runtime=runtime, repeat=repeat,
                )  # fmt: skip


def scale() -> Iterator[Trial]:
    """The same minibatches a copy, ever more copies."""
    for options in (WHOLE,):
        for n in COPIES:
            methods = ["alone"] if n == 1 else ["gradients", "gradients:4", "all-reduce"]
            for method in methods:
                for topology in ("ring", "torus"):
                    plain = method in ("alone", "all-reduce")
                    if topology == "torus" and (plain or n < 4):
                        continue
                    yield Trial(
                        table="scale", method=method, copies=n, options=options,
                        topology=topology, minibatches=STEPS * n,
                    )  # fmt: skip


def rates() -> Iterator[Trial]:
    """Every method at every rate of its grid, one seed."""
    for n in SIZES:
        for method in METHODS:
            for rate in rates_of(method):
                yield _judged("rates", method, n, rate, 0)


def accuracy(best: Mapping[tuple[str, int], float]) -> Iterator[Trial]:
    """Every method at its best rate, other seeds."""
    for seed in (1, 2, 3):
        for n in SIZES:
            for method in METHODS:
                if (method, n) in best:
                    yield _judged("accuracy", method, n, best[method, n], seed)


def stragglers(best: Mapping[tuple[str, int], float]) -> Iterator[Trial]:
    """One copy at full and at a quarter of the speed; of pairs, also one that makes no offers."""
    for seed in (1, 2, 3):
        for slow in (1.0, 0.25):
            for method in ("all-reduce", "d-psgd", "weights", "gradients*0.2"):
                if (method, 9) in best:
                    yield _judged("stragglers", method, 9, best[method, 9], seed, slow)
        if ("weights", 9) in best:
            trial = _judged("stragglers", "weights", 9, best["weights", 9], seed, 0.25)
            yield replace(trial, slow_copy=ANSWERS)


def cifar_rates() -> Iterator[Trial]:
    """Photographs: what was best on digits beside all-reduce, at two rates, one seed."""
    for n in SIZES:
        for method in ("all-reduce", "d-psgd"):
            for rate in (0.05, 0.15):
                yield _photographs("cifar-rates", method, n, rate, 0)


def cifar(best: Mapping[tuple[str, int], float]) -> Iterator[Trial]:
    """The same at the better rate, other seeds."""
    for seed in (1, 2, 3):
        for (method, n), rate in best.items():
            yield _photographs("cifar", method, n, rate, seed)


def _photographs(table: str, method: str, n: int, rate: float, seed: int) -> Trial:
    return Trial(
        table=table, method=method, copies=n, recipe="cifar", options=IMAGES, topology="torus",
        rate=rate, seed=seed, epochs=6, evaluate_every=1.0,
    )  # fmt: skip


def _judged(table: str, method: str, n: int, rate: float, seed: int, slow: float = 1.0) -> Trial:
    every = 0.125 if table == "stragglers" else 0.25 if table == "accuracy" else 1.0
    return Trial(
        table=table, method=method, copies=n, options=SMALL, topology="torus", rate=rate,
        seed=seed, evaluate_every=every, slow=slow,
    )  # fmt: skip


def best_rates(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """By method and copies, the rate of the best accuracy in the end."""
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for line in lines:
        if line["history"] and (score := line["history"][-1].get("accuracy")) is not None:
            key = line["method"], line["copies"]
            found[key] = max(found.get(key, (-1.0, 0.0)), (score, line["rate"]))
    return {key: rate for key, (_, rate) in found.items()}


def read(results: Path, table: str) -> list[dict[str, Any]]:
    """The lines so far; none where there is no file."""
    path = results / f"{table}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(words: Sequence[str] | None = None) -> None:
    """Run tables, or print them."""
    given = _arguments(words)
    given.out.mkdir(parents=True, exist_ok=True)
    for table in () if given.markdown else given.tables:
        if table == "costs":
            _measure(given.out)
            continue
        best = best_rates(read(given.out, "cifar-rates" if table == "cifar" else "rates"))
        plans = {"clock": clock, "scale": scale, "rates": rates, "cifar-rates": cifar_rates}
        later = {"accuracy": accuracy, "stragglers": stragglers, "cifar": cifar}
        trials = list(plans[table]() if table in plans else later[table](best))
        _run_all(given.out, table, trials, 1 if table == "clock" else given.processes)
    lines = {table: read(given.out, table) for table in TABLES}
    page = "\n".join(page_of(lines))
    print(page)
    (given.out / "tables.md").write_text(page + "\n", encoding="utf-8")
    if not given.no_figure:
        draw(given.out, lines)


def _measure(results: Path) -> None:
    """Costs of every kind of trial, in this process, with nothing beside it."""
    trials = [*clock(), *scale(), *cifar_rates()]
    trials += [_judged("rates", method, 4, 0.001, 0) for method in METHODS]
    there = {line["key"] for line in read(results, "costs")}
    for key, trial in {costs_key(trial): trial for trial in trials}.items():
        if key not in there:
            _add(results, "costs", {"key": key, "nodes": measure(trial)})


def _run_all(results: Path, table: str, trials: Sequence[Trial], processes: int) -> None:
    there = {_key(line) for line in read(results, table)}
    costs: dict[str, Nodes] = {line["key"]: line["nodes"] for line in read(results, "costs")}
    todo = [trial for trial in trials if _key(asdict(trial)) not in there]
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, max_tasks_per_child=None) as pool:
        coming = {pool.submit(_attempt, t, costs.get(costs_key(t))): t for t in todo}
        for number, done in enumerate(as_completed(coming), 1):
            line = done.result()
            _add(results, table, line)
            told = f"{line['method']}, {line['copies']} copies, rate {line['rate']:g}"
            end = line["history"][-1] if line["history"] else line.get("failed")
            print(f"{number}/{len(todo)} {table}: {told}: {end}", file=sys.stderr, flush=True)


def _attempt(trial: Trial, nodes: Nodes | None) -> dict[str, Any]:
    """A line also of a training that diverged."""
    try:
        return run(trial, nodes)
    except GeartrainError as error:
        return {**asdict(trial), "history": [], "failed": f"{type(error).__name__}: {error}"[:200]}


def _add(results: Path, table: str, line: Mapping[str, Any]) -> None:
    with (results / f"{table}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def _key(line: Mapping[str, Any]) -> str:
    """What was asked for; older lines lack later settings, which had their defaults."""
    given = [
        line[f.name] if f.default is MISSING else line.get(f.name, f.default) for f in fields(Trial)
    ]
    return json.dumps(given, sort_keys=True)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", default=[], help=f"of {', '.join(TABLES)}")
    parser.add_argument("--processes", type=int, default=2, help="trials at a time (2)")
    parser.add_argument("--markdown", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--no-figure", action="store_true", help="do without matplotlib")
    given = parser.parse_args(words)
    if unknown := [table for table in given.tables if table not in TABLES]:
        parser.error(f"{', '.join(unknown)}: there is {', '.join(TABLES)}")
    return given


if __name__ == "__main__":
    main()

"""Sweeps of the baselines' update size and rate, each trial until the target or a last epoch.

    leader    every update size × every way to learn ─► the best way at each size
    followers the same network, run differently: every update size with the leader's best way

    PYTHONPATH=src python -m benchmarks.tuning.main sentiment --seeds 3

Each trial is a line of ``results/TASK.jsonl``; the table at the end has the best way at each size,
and of those the size that takes the least time. Forms of one network have equal gradients, so a
way to learn is looked for with the fastest of them alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from geartrain.recipes import find_recipe
from geartrain.train.results import Target
from geartrain_baselines import Epoch, Terms, babi, charlm, cifar, listreduce, mnist, qm9, sentiment
from geartrain_baselines.graphs import PYG, Form

RESULTS: Final = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Way:
    """How to learn.

    Args:
        rate: Of the optimiser.
        optimizer: Its name, for the record.
        momentum: Where the optimiser takes one.
    """

    rate: float
    optimizer: str
    momentum: float = 0.0

    def __str__(self) -> str:
        momentum = f" momentum {self.momentum:g}" if self.momentum else ""
        return f"{self.optimizer} {self.rate:g}{momentum}"


Train = Callable[[Terms, Way], Iterator[Epoch]]
Systems = Mapping[str, Train]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Forms of one network, and what is tried.

    Args:
        task: Name of the recipe.
        systems: The leader and its followers, by name.
        batches: Sizes of an update.
        ways: To learn.
        epochs: Planned numbers, from few to many: where a schedule ends with the last epoch, fewer
            are tried first.
        evaluate_every: Share of an epoch between two validations; None: the end alone.
        target: What to reach.
        options: Of the recipe, where not its defaults.
    """

    task: str
    systems: Systems
    batches: Sequence[int]
    ways: Sequence[Way]
    epochs: Sequence[int]
    target: Target
    evaluate_every: float | None = None
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A line of the results.

    Args:
        task: Name of the recipe.
        options: Of the recipe, where not its defaults.
        system: Name of the baseline.
        seed: Of weights, order and generated data.
        batch: Examples per update.
        way: How it learnt.
        threads: Kernel threads.
        planned: Epochs.
        epochs_to_target: Fractions as finely as validations come; None: missed.
        seconds_to_target: Of training; None: missed.
        epochs: Trained in all.
        seconds: Of training in all.
        metric: The last value.
    """

    task: str
    options: Mapping[str, float]
    system: str
    seed: int
    batch: int
    way: Way
    threads: int
    planned: int
    epochs_to_target: float | None
    seconds_to_target: float | None
    epochs: float
    seconds: float
    metric: float | None


def _of_questions(terms: Terms, way: Way, form: Form) -> Iterator[Epoch]:
    return babi.train(terms, form, way.rate)


def _of_molecules(terms: Terms, way: Way, form: Form) -> Iterator[Epoch]:
    return qm9.train(terms, form, way.rate)


def _of_lists(terms: Terms, way: Way, method: listreduce.Method) -> Iterator[Epoch]:
    return listreduce.train_under(terms, method, way.rate)


def _of_trees(terms: Terms, way: Way, method: sentiment.Method) -> Iterator[Epoch]:
    return sentiment.train_under(terms, method, way.rate)


def _of_digits(terms: Terms, way: Way) -> Iterator[Epoch]:
    plan = mnist.Plan("adam" if way.optimizer == "adam" else "sgd", way.rate, way.momentum)
    return mnist.train(terms, plan)


def _of_photographs(terms: Terms, way: Way) -> Iterator[Epoch]:
    learning = {"learning_rate": way.rate, "momentum": way.momentum}
    return cifar.train(replace(terms, options={**terms.options, **learning}))


def _of_text(terms: Terms, way: Way) -> Iterator[Epoch]:
    return charlm.train(replace(terms, options={**terms.options, "learning_rate": way.rate}))


def _graph_systems(train: Callable[..., Iterator[Epoch]], forms: Mapping[str, Form]) -> Systems:
    names = ["block", "pyg"] if importlib.util.find_spec(PYG) else ["block"]
    return {name: partial(train, form=forms[name]) for name in names}


def _adam(*rates: float) -> list[Way]:
    return [Way(rate, "adam") for rate in rates]


def _target(task: str) -> Target:
    return Target.parse(find_recipe(task).target)


def _sentiment() -> list[Sweep]:
    return [
        Sweep(
            task="sentiment",
            systems={m: partial(_of_trees, method=m) for m in ("fused", "level")},
            batches=(10, 25, 50, 100),
            ways=[Way(rate, "adagrad") for rate in (0.02, 0.03, 0.05, 0.1)],
            epochs=(2,),
            evaluate_every=0.25,
            target=_target("sentiment"),
        )
    ]


def _listreduce() -> list[Sweep]:
    """Of minibatches of any lengths, and of one length, which do not learn alike."""
    return [
        Sweep(
            task="listreduce",
            systems={m: partial(_of_lists, method=m) for m in methods},
            batches=(50, 100, 200, 400, 800),
            ways=_adam(4e-3, 8e-3, 1.6e-2),
            epochs=(3, 4, 5),
            target=_target("listreduce"),
        )
        for methods in (("mixed", "packed"), ("folded", "bucketed"))
    ]


def _mnist() -> list[Sweep]:
    """An instance of the recipe is a minibatch of 100, so that is the size of an update."""
    plain = [Way(rate, "sgd") for rate in (0.05, 0.1, 0.2, 0.4)]
    heavy = [Way(rate, "sgd", momentum=0.9) for rate in (0.01, 0.02, 0.05, 0.1)]
    return [
        Sweep(
            task="mnist",
            systems={"minibatch": _of_digits},
            batches=(100,),
            ways=[*plain, *heavy, *_adam(5e-4, 1e-3, 2e-3)],
            epochs=(4,),
            evaluate_every=0.25,
            target=_target("mnist"),
        )
    ]


def _cifar() -> list[Sweep]:
    return [
        Sweep(
            task="cifar",
            systems={"minibatch": _of_photographs},
            batches=(25, 50, 100),
            ways=[Way(rate, "sgd", momentum=0.9) for rate in (0.025, 0.05, 0.1, 0.2)],
            epochs=(10,),
            evaluate_every=0.25,
            target=_target("cifar"),
        )
    ]


def _charlm() -> list[Sweep]:
    return [
        Sweep(
            task="charlm",
            systems={"minibatch": _of_text},
            batches=(8, 16, 32),
            ways=[Way(rate, "adamw") for rate in (1e-3, 2e-3, 4e-3, 8e-3)],
            epochs=(4,),
            evaluate_every=0.25,
            target=_target("charlm"),
        )
    ]


def _babi() -> list[Sweep]:
    return [
        Sweep(
            task="babi",
            systems=_graph_systems(_of_questions, babi.FORMS),
            batches=(1, 4, 10, 20, 50),
            ways=_adam(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
            epochs=(10,),
            evaluate_every=0.25,
            target=_target("babi"),
        )
    ]


def _qm9() -> list[Sweep]:
    """Of the first molecules, to an error that they suffice for; the recipe's takes more."""
    return [
        Sweep(
            task="qm9",
            systems=_graph_systems(_of_molecules, qm9.FORMS),
            batches=(4, 10, 20, 50, 100),
            ways=_adam(5e-4, 1e-3, 2e-3, 4e-3),
            epochs=(2,),
            evaluate_every=0.25,
            target=Target.parse("mae<=0.8"),
            options={"limit": 10_000},
        )
    ]


SWEEPS: Final[Mapping[str, Callable[[], list[Sweep]]]] = {
    "babi": _babi,
    "charlm": _charlm,
    "cifar": _cifar,
    "listreduce": _listreduce,
    "mnist": _mnist,
    "qm9": _qm9,
    "sentiment": _sentiment,
}


def run(
    sweep: Sweep, system: str, batch: int, way: Way, seed: int, data: Path | None
) -> Iterator[Trial]:
    """Train with each planned number of epochs, until one reaches the target."""
    recipe = find_recipe(sweep.task)
    for planned in sweep.epochs:
        terms = Terms(
            seed=seed,
            epochs=planned,
            batch=batch,
            data=data,
            options={o.name: o.default for o in recipe.options} | dict(sweep.options),
            evaluate_every=sweep.evaluate_every,
        )
        trial = _trained(sweep, system, terms, way)
        yield trial
        if trial.epochs_to_target is not None:
            return


def _trained(sweep: Sweep, system: str, terms: Terms, way: Way) -> Trial:
    reached = False
    for last in sweep.systems[system](terms, way):
        reached = sweep.target.reached(last.valid)
        if reached or not math.isfinite(last.loss):
            break
    value = last.valid[sweep.target.metric]
    return Trial(
        task=sweep.task,
        options=sweep.options,
        system=system,
        seed=terms.seed,
        batch=terms.batch,
        way=way,
        threads=torch.get_num_threads(),
        planned=terms.epochs,
        epochs_to_target=last.epoch if reached else None,
        seconds_to_target=last.seconds if reached else None,
        epochs=last.epoch,
        seconds=last.seconds,
        metric=value if math.isfinite(value) else None,
    )


@dataclass(frozen=True, slots=True)
class Score:
    """What the trials of one way came to, over the seeds; smaller is better.

    Args:
        missed: Seeds that never reached the target.
        epochs: Median to the target, or planned where it was missed.
        distance: Mean of the last metrics, its sign such that less is better.
    """

    missed: int
    epochs: float
    distance: float

    def key(self) -> tuple[float, ...]:
        """Sorts the better one first."""
        return self.missed, self.distance if self.missed else self.epochs, self.distance


def score(sweep: Sweep, trials: Sequence[Trial]) -> Score:
    """Of the trials of one system, size and way."""
    last = _last(trials)
    sign = -1 if sweep.target.at_least else 1
    values = [math.inf if t.metric is None else sign * t.metric for t in last]
    return Score(
        missed=sum(t.epochs_to_target is None for t in last),
        epochs=statistics.median(t.epochs_to_target or t.planned for t in last),
        distance=statistics.mean(values),
    )


def _last(trials: Sequence[Trial]) -> list[Trial]:
    """For each seed the trial that it ended with."""
    return list({trial.seed: trial for trial in trials}.values())


def tune(task: str, options: Mapping[str, float], seeds: int, data: Path | None, out: Path) -> None:
    """Run all trials of a task, write them as they end, and print the best.

    Args:
        task: Name of the recipe.
        options: Of the recipe, where neither its defaults nor the sweep's.
        seeds: How many.
        data: The data folder; None takes ``$GEARTRAIN_DATA``.
        out: File for the trials.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("", encoding="utf-8")
    for each in SWEEPS[task]():
        sweep = replace(each, options={**each.options, **options})
        best: dict[int, Way] = {}
        for place, system in enumerate(sweep.systems):
            table: dict[tuple[int, Way], list[Trial]] = {}
            for batch in sweep.batches:
                for way in [best[batch]] if place else sweep.ways:
                    table[batch, way] = _run_seeds(sweep, system, batch, way, seeds, data, out)
                tried = [way for at, way in table if at == batch]
                scores = {way: score(sweep, table[batch, way]).key() for way in tried}
                best[batch] = min(scores, key=scores.__getitem__)
            _show(sweep, system, {batch: (best[batch], table[batch, best[batch]])
                                  for batch in sweep.batches})  # fmt: skip


def _run_seeds(
    sweep: Sweep, system: str, batch: int, way: Way, seeds: int, data: Path | None, out: Path
) -> list[Trial]:
    trials = []
    for seed in range(seeds):
        for trial in run(sweep, system, batch, way, seed, data):
            trials.append(trial)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(trial), allow_nan=False) + "\n")
    return trials


def _show(sweep: Sweep, system: str, best: Mapping[int, tuple[Way, Sequence[Trial]]]) -> None:
    print(f"{sweep.task}, {system}, {sweep.target}, {torch.get_num_threads()} thread(s)")
    rows = []
    for batch, (way, trials) in best.items():
        last = _last(trials)
        hits = [t for t in last if t.seconds_to_target is not None]
        seconds = statistics.median(t.seconds for t in last)
        epochs = statistics.median(t.epochs for t in last)
        metric = statistics.mean(math.nan if t.metric is None else t.metric for t in last)
        line = f"  batch {batch:>4}  {way!s:<24} {len(hits)}/{len(last)}  {epochs:6.2f} epochs"
        line += f"  {seconds:8.3f} s  {sweep.target.metric} {metric:.4f}"
        rows.append((len(hits) < len(last), seconds, line))
    for row in rows:
        print(row[2] + ("  best" if row is min(rows) else ""), flush=True)


def main() -> None:
    """Sweep one task."""
    parser = argparse.ArgumentParser(description="update size and rate of the baselines")
    parser.add_argument("task", choices=sorted(SWEEPS))
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the recipe")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="kernel threads")
    parser.add_argument("--data", type=Path, help="data folder, else $GEARTRAIN_DATA")
    parser.add_argument("--out", type=Path, help="file, else results/TASK.jsonl")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    options = find_recipe(given.task).parse_options(given.option)
    tune(given.task, options, given.seeds, given.data, given.out or RESULTS / f"{given.task}.jsonl")


if __name__ == "__main__":
    main()

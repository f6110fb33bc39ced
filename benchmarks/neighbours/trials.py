"""One training with copies of a recipe's model, and the line that is kept of it.

    Trial ─► recipe's graph, rules, data ─► Session(sharing=Neighbours(...)) ─► line of JSON

Costs of firings and letters are measured once in one thread (``measure``) and kept; every simulated
trial reads them, so its virtual seconds do not depend on what else the machine does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, final

import torch

import geartrain as gt
from geartrain.cli.copies import CopiesSeen
from geartrain.frames.instance import Instance
from geartrain.observe.stopwatch import Stopwatch
from geartrain.recipes import find_recipe
from geartrain.recipes.recipe import Setting, Task
from geartrain.runtime.base import AbstractRuntime
from geartrain.sharing.neighbours import EXCHANGES

Nodes = Mapping[str, Sequence[float]]
"""Node, ``NODE backward`` or ``PART exchange`` to seconds a firing and a row."""

LATENCY_S: Final = 50e-6
BYTES_PER_S: Final = 1.25e9  # 10 Gbit/s
ADAM: Final = ("diloco", "async-local-sgd")  # published with AdamW as the inner optimiser
_DATA: Final = "train_size"  # an option that changes no firing
_ALONE: Final = "alone"  # no exchange: what one copy does by itself
_MEASURED: Final = 100  # minibatches
_TIMES: Final = 3  # the fastest of so many: what else runs on the machine only adds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was asked for.

    Args:
        table: Which measurement it belongs to.
        method: ``NAME``, ``NAME:EVERY`` or ``gradients*SCALE``, of ``EXCHANGES``; ``alone`` for
            one copy without any.
        recipe: Name.
        options: Of the recipe; ``learning_rate`` is not among them.
        copies: Of the model, each on a worker of its own.
        topology: Name.
        rate: The learning rate.
        seed: Of weights and order.
        epochs: How many.
        minibatches: The first so many of the data; None: all.
        evaluate_every: Share of an epoch; None: no validation.
        slow: Speed of one copy; the others have 1.
        runtime: ``simulated`` or ``threads``.
        repeat: Number of an equal trial, where time is measured.
        slow_copy: Which copy that is.
    """

    table: str
    method: str
    copies: int
    recipe: str = "mnist"
    options: Mapping[str, int]
    topology: str = "ring"
    rate: float = 0.03
    seed: int = 0
    epochs: int = 1
    minibatches: int | None = None
    evaluate_every: float | None = None
    slow: float = 1.0
    runtime: str = "simulated"
    repeat: int = 0
    slow_copy: int = 0


def exchange_of(method: str) -> gt.AbstractExchange:
    """``d-psgd``, ``average:16`` or ``gradients*0.2`` as an object.

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"([a-z-]+)(?::(\d+))?(?:\*([\d.]+))?", method)
    if found is None or found[1] not in EXCHANGES:
        raise ValueError(f"method {method}: write NAME, NAME:EVERY or NAME*SCALE with a name of "
                         f"{', '.join(EXCHANGES)}")  # fmt: skip
    given: dict[str, Any] = {}
    if found[2] is not None:
        given["every"] = int(found[2])
    if found[3] is not None:
        given["scale"] = float(found[3])
    return EXCHANGES[found[1]](**given)


def costs_key(trial: Trial) -> str:
    """Trials of one key have the same costs: the work of a firing and of a letter."""
    name = re.split(r"[:*]", trial.method)[0]
    options = ",".join(f"{k}={v}" for k, v in sorted(trial.options.items()) if k != _DATA)
    return f"{trial.recipe} {options} {'gradients' if name == _ALONE else name}"


def run(trial: Trial, nodes: Nodes | None) -> dict[str, Any]:
    """Train, and return the line.

    Args:
        trial: What is asked for.
        nodes: Costs for ``simulated``.
    """
    torch.set_num_threads(1)
    task, seen = _task(trial), CopiesSeen()
    session = _session(trial, task, _runtime(trial, nodes), [seen])
    began = time.process_time()
    fit = session.fit(
        _instances(task, trial.minibatches),
        epochs=trial.epochs,
        valid=task.load(task.validation) if trial.evaluate_every is not None else None,
        evaluate_every=trial.evaluate_every,
    )
    seconds, history = 0.0, []
    for event in fit.history:
        seconds += event.seconds
        entry = {"epoch": event.epoch, "seconds": seconds}
        history.append({k: _short(v) for k, v in {**entry, **_judged(event.valid)}.items()})
    return {
        **asdict(trial),
        "instances": fit.instances,
        "seconds": _short(fit.train_seconds),
        "cpu_s": _short(time.process_time() - began),
        "history": history,
        "exchanged": _rounded(seen.summary()),
    }


def measure(trial: Trial) -> dict[str, tuple[float, float]]:
    """Seconds a firing and a row by node, of two copies in one thread; letters included."""
    found = [_measured(trial) for _ in range(_TIMES)]
    return min(found, key=lambda nodes: sum(fixed + row for fixed, row in nodes.values()))


def _measured(trial: Trial) -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    task, stopwatch = _task(trial), Stopwatch()
    asked = replace(trial, copies=2, topology="ring")
    session = _session(asked, task, gt.Threads(1, kernel_threads=1), [stopwatch])
    session.fit(list(task.load("train")[:_MEASURED]), epochs=2)
    return {
        name: (_short(a), _short(b)) for name, (a, b) in sorted(stopwatch.costs().nodes.items())
    }


def _instances(task: Task, number: int | None) -> Sequence[Instance]:
    """So many, the data over and over if they are fewer; or what there is."""
    data = task.load("train")
    return data if number is None else [data[i % len(data)] for i in range(number)]


def _task(trial: Trial) -> Task:
    return find_recipe(trial.recipe).build(
        Setting(
            seed=trial.seed,
            epochs=trial.epochs,
            update_every=1,
            options={**trial.options, "learning_rate": trial.rate},
        )
    )


def _session(
    trial: Trial, task: Task, runtime: AbstractRuntime, instruments: Sequence[Any]
) -> gt.Session:
    alone = trial.method == _ALONE
    name = re.split(r"[:*]", trial.method)[0]
    rules = task.rules
    if name in ADAM:
        rules = replace(rules, optimizer=partial(torch.optim.AdamW, lr=trial.rate))
    return gt.Session(
        task.graph,
        rules=rules,
        runtime=runtime,
        max_active=1,
        seed=trial.seed,
        instruments=instruments,
        **task.settings(
            1,
            gt.Neighbours(
                copies=trial.copies,
                topology=trial.topology,
                exchange="gradients" if alone else exchange_of(trial.method),
            ),
        ),
    )


def _runtime(trial: Trial, nodes: Nodes | None) -> AbstractRuntime:
    if trial.runtime == "threads":
        return gt.Threads(trial.copies, kernel_threads=1)
    if nodes is None:
        raise ValueError("simulated trials need costs; run the table 'costs' first")
    costs = gt.Costs(
        nodes={name: (a, b) for name, (a, b) in nodes.items()},
        backward=0.0,
        latency_s=0.0 if trial.table == "clock" else LATENCY_S,
        bytes_per_s=None if trial.table == "clock" else BYTES_PER_S,  # threads have no links
    )
    speeds = [trial.slow if k == trial.slow_copy else 1.0 for k in range(trial.copies)]
    return gt.Simulated(trial.copies, seed=trial.seed, costs=costs, speeds=speeds)


def _judged(valid: Mapping[str, float]) -> dict[str, float]:
    return {name: valid[name] for name in ("accuracy", "loss") if name in valid}


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if value == value and abs(value) != float("inf") else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return value

"""A system trained once, in a process of its own, so that its peak memory is its own.

    python -m geartrain_baselines.trial JSON

    standard output   {"epoch": 0.5, "seconds": 1.6, "instances": 4272, "valid": {...}}  evaluated
                      {"epoch": 1, "seconds": 3.2, "instances": 4272, "valid": {...}}    again
                      {"peak_rss_mib": 512.0, "staleness": {...}, "updates": {...}}      at the end
    standard error    the reason, where the exit status is not 0

``geartrain compare`` starts it, and reads its lines as they come. The number of kernel threads is
set before anything is computed: workers times the threads of each, the same for every system.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import torch
import typer

from geartrain.cli.exits import FAILED, WRONG_USE, fail, preparing, stopped, unforeseen
from geartrain.cli.settings import RunSettings
from geartrain.cli.train import finite, peak_rss_mib, staleness_over, updates_over
from geartrain.engine.controller import Ramp
from geartrain.engine.instrument import AbstractInstrument, EpochEnded
from geartrain.errors import DataError, GeartrainError
from geartrain.parts.rules import Instances
from geartrain.recipes import find_recipe
from geartrain.train.options import Compute
from geartrain.train.session import Session
from geartrain_baselines import PEERS, Baseline, Terms

OURS: Final = "ours"
SYNCHRONOUS: Final = "ours-sync"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What to train, and how.

    Args:
        system: ``ours``, ``ours-sync`` or a baseline of the recipe.
        batch: Examples per update of a baseline, instances between two drains of ``ours-sync``;
            ``ours`` has its own settings.
        threads: Kernel threads of the whole process.
        settings: Of ours; a baseline takes seed, epochs, evaluations, target and options from it.
        data: The data folder, or None.
    """

    system: str
    batch: int
    threads: int
    settings: RunSettings
    data: str | None

    def to_json(self) -> str:
        """Text for ``from_json``."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Trial:
        """What ``to_json`` made."""
        found = json.loads(text)
        return Trial(**{**found, "settings": RunSettings(**found["settings"])})


def run(trial: Trial) -> None:
    """Train, and print a line of JSON an evaluation and one at the end."""
    torch.set_num_threads(trial.threads)
    ours = trial.system in (OURS, SYNCHRONOUS)
    staleness, updates, peak = run_ours(trial) if ours else (*run_baseline(trial), peak_rss_mib(()))
    _say({"peak_rss_mib": peak, "staleness": staleness, "updates": updates})


Ages: TypeAlias = Mapping[str, Mapping[str, float]]
"""Part to the mean and the maximum of its staleness."""
Rates: TypeAlias = Mapping[str, float]
"""Part to its optimiser steps an epoch; a baseline is one part."""


def run_ours(trial: Trial) -> tuple[Ages, Rates, float | None]:
    """Train the recipe; the last is the peak of memory, in MiB, of this process and its workers,
    who end with the session."""
    settings, data = trial.settings, None if trial.data is None else Path(trial.data)
    with preparing():
        task = find_recipe(settings.recipe).build(settings.setting(data, {}))
        train, valid = task.load("train"), task.load("valid")
    drain = trial.system == SYNCHRONOUS
    rules, max_active, told = (
        task.rules,
        settings.max_active,
        task.settings(settings.workers, chosen=settings.runtime == "auto"),
    )
    if drain:
        rules = replace(rules, update_every=Instances(trial.batch))
        told["schedule"] = replace(told["schedule"], ramp=Ramp(over=0), drain=True)
        max_active = trial.batch
    session = Session(
        task.graph,
        rules=rules,
        runtime=settings.make_runtime(),
        max_active=max_active,
        compute=Compute(precision=settings.precision, device=settings.device),
        seed=settings.seed,
        instruments=[_Epochs()],
        **told,
    )
    if drain:
        with preparing():
            _require_drained(session, trial.batch)
    fit = session.fit(
        train,
        epochs=settings.epochs,
        valid=valid,
        until=settings.target(),
        evaluate_every=settings.evaluate_every,
    )
    epochs = fit.history[-1].epoch
    updates = {part: n / epochs for part, n in updates_over(fit.history).items()}
    peak = peak_rss_mib(getattr(session.runtime, "pids", ()))
    return staleness_over(fit.history), updates, peak


def _require_drained(session: Session, batch: int) -> None:
    for name, part in session.parts.items():
        if part.rules.trigger() != Instances(batch):
            raise ValueError(
                f"system '{SYNCHRONOUS}': part '{name}' has update_every="
                f"{part.rules.update_every!r} of its own, so it would not step at the drain; leave "
                f"'{SYNCHRONOUS}' out with --against"
            )


def run_baseline(trial: Trial) -> tuple[Ages, Rates]:
    """Train a baseline until its last epoch or its target; it has no staleness."""
    settings = trial.settings
    baseline = find_baseline(settings.recipe, trial.system)
    target = settings.target()
    terms = Terms(
        seed=settings.seed,
        epochs=settings.epochs,
        batch=trial.batch,
        data=None if trial.data is None else Path(trial.data),
        options=settings.options,
        evaluate_every=settings.evaluate_every,
    )
    updates, epochs = 0, 1.0
    for epoch in baseline.train(terms):
        updates, epochs = updates + epoch.updates, epoch.epoch
        _tell(epoch.epoch, epoch.seconds, epoch.instances, epoch.valid)
        if target is not None and target.reached(epoch.valid):
            break
    return {}, {baseline.name: updates / epochs}


def find_baseline(recipe: str, name: str) -> Baseline:
    """The baseline of a recipe by name, which is one that there is."""
    return next(b for b in PEERS[recipe].baselines if b.name == name)


@final
class _Epochs(AbstractInstrument):
    """Tells of epochs as they end."""

    def on_epoch_ended(self, event: EpochEnded) -> None:
        _tell(event.epoch, event.time_s, event.instances, event.valid)


def _tell(epoch: float, seconds: float, instances: float, valid: Mapping[str, float]) -> None:
    _say({"epoch": epoch, "seconds": seconds, "instances": instances, "valid": finite(valid)})


def _say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line, allow_nan=False), flush=True)


def main() -> None:
    """Run the trial that the one argument holds."""
    try:
        run(Trial.from_json(sys.argv[1]))
    except DataError as error:
        sys.exit(fail(str(error), WRONG_USE).exit_code)
    except GeartrainError as error:
        sys.exit(fail(str(error), FAILED).exit_code)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except KeyboardInterrupt as interrupt:
        sys.exit(stopped(interrupt).exit_code)
    except Exception as error:
        raise SystemExit(unforeseen(error).exit_code) from error


if __name__ == "__main__":
    main()

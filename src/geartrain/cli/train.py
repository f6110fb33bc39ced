"""``geartrain train``: a recipe, from the data to a run folder and one line of JSON."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, final

import typer

from geartrain.cli.copies import CopiesSeen
from geartrain.cli.exits import FAILED, command, fail, preparing, running, stopped
from geartrain.cli.logs import logging_to
from geartrain.cli.settings import RunSettings, config_of, new_settings, resumed_settings
from geartrain.cli.version import version
from geartrain.engine.instrument import AbstractInstrument, EpochEnded
from geartrain.frames.instance import Instance
from geartrain.observe.jsonlog import JsonLog
from geartrain.observe.progress import ProgressLine
from geartrain.observe.tensorboard import TensorBoard
from geartrain.observe.trace import PerfettoTrace
from geartrain.recipes import Recipe, Task, find_recipe
from geartrain.runtime.base import AbstractRuntime
from geartrain.train.auto import Auto
from geartrain.train.checkpoint import read_checkpoint
from geartrain.train.options import Compute
from geartrain.train.results import epoch_from_json, staleness_of
from geartrain.train.run import RunFolder
from geartrain.train.session import Session


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What else a run writes; it changes nothing about the training."""

    tensorboard: bool
    trace: bool
    as_json: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    settings: RunSettings
    session: Session
    train: Sequence[Instance]
    valid: Sequence[Instance]
    history: Sequence[EpochEnded]  # before a resumed checkpoint
    seen: CopiesSeen


def train(
    name: str,
    given: Mapping[str, Any],
    option_texts: Sequence[str],
    data: Path | None,
    out: Path | None,
    resume: bool,
    watching: Watching,
) -> None:
    """Train, and exit as ``geartrain.cli.exits`` says.

    Args:
        name: Of the recipe.
        given: Settings by field name, None for those that were not given.
        option_texts: ``NAME=VALUE`` each.
        data: The data folder.
        out: The run's folder.
        resume: Continue the run in ``out``.
        watching: What else to write.
    """
    with ExitStack() as held:
        with preparing():
            recipe = find_recipe(name)
            asked = {**given, "options": recipe.parse_options(option_texts)}
            if resume:
                folder = _folder_to_resume(out)
                settings = resumed_settings(recipe, asked, folder.read_config())
            else:
                settings = new_settings(recipe, asked)
                folder = RunFolder(out or _fresh_folder(settings))
                folder.check_free()
            if resume and folder.read_result() is None:  # a finished one is only read
                held.enter_context(folder.locked())
            if (result := folder.read_result()) is not None:
                print(f"{folder.path} is finished; nothing is left to do", file=sys.stderr)
                _end(settings, result, folder, watching)
            prepared = _prepare(recipe, settings, folder, data, resume, watching, held)
        with logging_to(folder.log), running(folder.log):
            result = _run(prepared, folder)
            folder.finish(result)
    _end(settings, result, folder, watching)


def _folder_to_resume(out: Path | None) -> RunFolder:
    if out is None:
        raise ValueError("--resume continues the run in a folder; name it with --out")
    folder = RunFolder(out)
    folder.read_config()
    if not folder.latest.exists():
        raise ValueError(
            f"{out}: the run has no checkpoint yet; start it again without --resume, and perhaps "
            "with a small --checkpoint-every"
        )
    return folder


def _fresh_folder(settings: RunSettings) -> Path:
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{settings.recipe}-{settings.seed}-{now}"
    path, n = Path("runs") / name, 2
    while path.exists():
        path, n = Path("runs") / f"{name}-{n}", n + 1
    return path


def _prepare(
    recipe: Recipe,
    settings: RunSettings,
    folder: RunFolder,
    data: Path | None,
    resume: bool,
    watching: Watching,
    held: ExitStack,
) -> _Prepared:
    """Build, read the data, make or open the folder: all that can be refused.

    A new folder is locked, until ``held`` ends, when there is something to write into it.
    """
    files: Mapping[str, str] = {}
    if resume:
        files = folder.read_files()
        kept = folder.read_config().get("data")
        data = data or (Path(kept) if isinstance(kept, str) else None)
    task = recipe.build(settings.setting(data, files))
    seen = CopiesSeen()
    train, valid = task.load("train"), task.load("valid")
    session = make_session(
        settings, task, [*_instruments(folder, watching), seen], settings.make_runtime()
    )
    history: Sequence[EpochEnded] = ()
    if resume:
        session.load(folder.latest)
        position: Any = read_checkpoint(folder.latest).document["position"]
        history = [epoch_from_json(each) for each in position["history"]]
    else:
        held.enter_context(folder.locked())
        folder.check_free()  # again: somebody may have had it in the meantime
        config = config_of(settings, data, version())
        folder.create(config, task.graph.mermaid(), task.files)
    print(f"run folder {folder.path}", file=sys.stderr)
    return _Prepared(
        settings=settings, session=session, train=train, valid=valid, history=history, seen=seen
    )


def make_session(
    settings: RunSettings,
    task: Task,
    instruments: Sequence[AbstractInstrument],
    runtime: AbstractRuntime | Auto,
) -> Session:
    """A session that trains a task as the settings say."""
    return Session(
        task.graph,
        rules=task.rules,
        runtime=runtime,
        max_active=settings.max_active,
        compute=Compute(precision=settings.precision, device=settings.device),
        seed=settings.seed,
        instruments=instruments,
        **task.settings(settings.workers, settings.neighbours(), chosen=settings.runtime == "auto"),
    )


def _instruments(folder: RunFolder, watching: Watching) -> list[AbstractInstrument]:
    instruments: list[AbstractInstrument] = [ProgressLine(), JsonLog(folder.metrics)]
    if watching.trace:
        instruments.append(PerfettoTrace(folder.trace))
    if watching.tensorboard:
        instruments.append(TensorBoard(folder.path / "tensorboard"))
    return instruments


def _run(prepared: _Prepared, folder: RunFolder) -> dict[str, Any]:
    settings, history = prepared.settings, prepared.history
    deaths = {"deaths": 0, "repeated": 0}
    target = settings.target()
    is_there = target is not None and history and target.reached(history[-1].valid)
    if not is_there:
        try:
            fit = prepared.session.fit(
                prepared.train,
                epochs=settings.epochs,
                valid=prepared.valid,
                until=target,
                folder=folder.path,
                checkpoint_every=settings.checkpoint_every,
                evaluate_every=settings.evaluate_every,
            )
        except KeyboardInterrupt as interrupt:
            said = _how_to_resume(settings, folder, str(interrupt))
            raise stopped(interrupt, said) from interrupt
        history, deaths = fit.history, {"deaths": fit.deaths, "repeated": fit.repeated}
        if not fit.is_saved:
            why = (
                f"all is trained, and {folder.path} has no checkpoint of its end, as there was no "
                f"room for it (see {folder.log}): make room"
            )
            raise fail(_how_to_resume(settings, folder, why), FAILED)
    result = result_of(settings, history)
    if settings.runtime == "auto":  # what has become of it
        runtime = prepared.session.runtime
        result |= {"runtime": runtime.name, "workers": runtime.workers}
    if settings.on_worker_death in ("restore", "go_on"):
        result |= deaths
    result["max_active"] = prepared.session.settings.max_active
    if (copies := prepared.seen.summary()) is not None:
        result["copies"] = copies
    return result


def result_of(settings: RunSettings, history: Sequence[EpochEnded]) -> dict[str, Any]:
    """The JSON of a run: settings, and what its epochs came to.

    Seconds are training alone, without validation, since the run began; staleness is over all
    epochs. Epochs are fractions where the run was evaluated within them.
    """
    target = settings.target()
    last = history[-1]
    instances = sum(epoch.instances for epoch in history)
    reached = None
    if target is not None and target.reached(last.valid):
        value = last.valid[target.metric]
        reached = {"metric": target.metric, "value": value}
        reached |= {"seconds": last.time_s, "epochs": last.epoch}
    return {
        "recipe": settings.recipe,
        "runtime": settings.runtime,
        "workers": settings.workers,
        "max_active": settings.max_active,
        "update_every": settings.update_every,
        "replicas": settings.replicas,
        "topology": settings.topology,
        "mixer": settings.mixer,
        "precision": settings.precision,
        "device": settings.device or "cpu",
        "seed": settings.seed,
        "epochs": last.epoch,
        "instances": instances,
        "train_seconds": last.time_s,
        "instances_per_second": instances / last.time_s if last.time_s > 0 else None,
        "valid": finite(last.valid),
        "history": [
            {"epoch": e.epoch, "seconds": e.time_s, "valid": finite(e.valid)} for e in history
        ],
        "reached": reached,
        "updates": updates_over(history),
        "staleness": staleness_over(history),
        "peak_rss_mib": peak_rss_mib(),
    }


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """With None for what JSON cannot say."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def updates_over(history: Sequence[EpochEnded]) -> dict[str, int]:
    """Optimiser steps of each part, over all epochs."""
    found: dict[str, int] = {}
    for epoch in history:
        for part, steps in epoch.updates.items():
            found[part] = found.get(part, 0) + steps
    return found


def staleness_over(history: Sequence[EpochEnded]) -> dict[str, dict[str, float]]:
    """Mean and maximum of each part, over the rows of all epochs."""
    found: dict[str, dict[str, float]] = {}
    for part in history[-1].staleness:
        histograms = [e.staleness[part].histogram for e in history if part in e.staleness]
        total = [0] * max(len(h) for h in histograms)
        for histogram in histograms:
            for age, rows in enumerate(histogram):
                total[age] += rows
        whole = staleness_of(total)
        found[part] = {"mean": whole.mean, "max": whole.max}
    return found


def peak_rss_mib(pids: Sequence[int] = ()) -> float | None:
    """The most memory that this program has held, in MiB; None where the system does not tell.

    On Linux not from ``getrusage``: that peak is inherited, through fork and exec, from the process
    that started this one.

    Args:
        pids: Of its worker processes, whose peaks are added; pages that processes have in common
            count in each.
    """
    statuses = [Path(f"/proc/{who}/status") for who in ("self", *pids)]
    if statuses[0].exists():
        texts = [status.read_text(encoding="ascii") for status in statuses if status.exists()]
        found = [re.search(r"^VmHWM:\s*(\d+) kB$", text, re.M) for text in texts]
        peaks = [int(each[1]) for each in found if each is not None]
        if peaks:
            return sum(peaks) / 1024
    try:
        import resource
    except ImportError:  # not on every system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def _how_to_resume(settings: RunSettings, folder: RunFolder, reason: str) -> str:
    said = reason or "interrupted"
    if not folder.latest.exists():
        return f"{said}; there is no checkpoint yet"
    where = shlex.quote(str(folder.path))
    return f"{said}; go on with: {command()} train {settings.recipe} --out {where} --resume"


def _end(
    settings: RunSettings, result: Mapping[str, Any], folder: RunFolder, watching: Watching
) -> NoReturn:
    """Print what came of the run, and exit."""
    if watching.as_json:
        print(json.dumps(result, allow_nan=False), flush=True)
    else:
        where = shlex.quote(str(folder.path))
        print(f"kept in {where}; look back with: {command()} report {where}")
    target = settings.target()
    if target is not None and result["reached"] is None:
        name = target.metric
        value = result["valid"].get(name)
        raise fail(f"target {target} was missed: {name} is {value} at the end", FAILED)
    raise typer.Exit(0)

"""``geartrain compare``: ours and the baselines in one run, a table, JSON and a figure.

    seed 0   ours ─► ours-sync ─► level ─► fused          each a process of its own, one at a time
    seed 1   fused ─► level ─► ours-sync ─► ours          back again, so that a machine that slows
    seed 2   ours ─► ...                                  down does so for everybody

    --out    runs.jsonl, a trial a line; compare.json; compare.md, to be pasted; compare.png

All systems get the same data, size of the model, order of the instances and number of kernel
threads: those of our workers together.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn, final

import torch
import typer
from rich.console import Console

from geartrain.cli.exits import (
    FAILED,
    INTERRUPTED,
    TERMINATED,
    WRONG_USE,
    fail,
    preparing,
    stopped,
    terminable,
)
from geartrain.cli.settings import RunSettings, new_settings, told
from geartrain.device import cores
from geartrain.native import kind as kernels_kind
from geartrain.observe.curves import Curve, draw_curves, require_matplotlib
from geartrain.observe.figures import duration, epochs, measure
from geartrain.recipes import Recipe, find_recipe
from geartrain.runtime.interrupt import Terminated
from geartrain.train.lock import held
from geartrain.train.results import Target
from geartrain_baselines.standings import (
    EpochOf,
    Outcome,
    System,
    markdown_of,
    row_of,
    staleness_lines,
    table_of,
)
from geartrain_baselines.systems import systems_of
from geartrain_baselines.trial import Trial

_ROOT: Final = Path(__file__).parents[2]  # where this geartrain is imported from

RUNS: Final = "runs.jsonl"
TABLE: Final = "compare.md"
_BUSY: Final = 0.4  # load per core from which figures are doubtful
_WIDE: Final = 120  # columns of a table that goes to a file


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    recipe: Recipe
    settings: RunSettings
    systems: Sequence[System]
    target: Target
    seeds: int
    threads: int
    data: Path | None
    out: Path | None


def compare(
    name: str,
    given: Mapping[str, Any],
    option_texts: Sequence[str],
    against: str | None,
    seeds: int,
    data: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare, and exit as ``geartrain.cli.exits`` says; 1 if ours misses a target that was given.

    Args:
        name: Of the recipe.
        given: Settings by field name, None for those that were not given.
        option_texts: ``NAME=VALUE`` each.
        against: Systems besides ours, with commas between them; None takes the default.
        seeds: How many.
        data: The data folder.
        out: Gets the JSON and the figure, unless None.
        as_json: Print one JSON object.
    """
    with preparing():
        plan = _prepare(name, given, option_texts, against, seeds, data, out)
    load = _load()
    if load is not None and load > _BUSY * cores():
        print(
            f"other programs use this machine (load {load:.1f} on {cores()} cores): kernels of "
            "several threads wait for each other, which slows baselines most; compare when it is "
            "idle",
            file=sys.stderr,
        )
    with ExitStack() as locks:
        if out is not None:
            with preparing():
                locks.enter_context(held(out / ".lock"))
        kernels_kind()  # compiled here, if need be: trials show nothing of it, and each would wait
        try:
            with terminable():
                outcomes = list(_trials(plan))
        except KeyboardInterrupt as interrupt:
            kept = "" if out is None else f"; trials that had ended are in {out / RUNS}"
            raise stopped(interrupt, (str(interrupt) or "interrupted") + kept) from interrupt
        rows = [
            row_of(s, [o for o in outcomes if o.system == s.key], plan.target) for s in plan.systems
        ]
        result = {**_header(plan, load), "rows": rows}
        if plan.out is not None:
            result["figure"] = str(_keep(plan, plan.out, result, outcomes))
    if as_json:
        print(json.dumps(result, allow_nan=False), flush=True)
    else:
        _show(plan, rows)
    _end(plan, rows)


def _prepare(
    name: str,
    given: Mapping[str, Any],
    option_texts: Sequence[str],
    against: str | None,
    seeds: int,
    data: Path | None,
    out: Path | None,
) -> _Plan:
    recipe = find_recipe(name)
    settings = new_settings(recipe, {**given, "options": recipe.parse_options(option_texts)})
    target = settings.target() or Target.parse(recipe.target)
    if target.metric not in recipe.metrics:
        raise ValueError(
            f"--until {settings.until}: all systems report {', '.join(recipe.metrics)}; the loss "
            "is not the same in all of them"
        )
    if out is not None:
        require_matplotlib()
        out.mkdir(parents=True, exist_ok=True)
    return _Plan(
        recipe=recipe,
        settings=settings,
        systems=systems_of(recipe, settings, against, given["epochs"]),
        target=target,
        seeds=seeds,
        threads=settings.workers * max(1, cores() // settings.workers),
        data=data,
        out=out,
    )


def _trials(plan: _Plan) -> Iterator[Outcome]:
    log = None if plan.out is None else plan.out / RUNS
    if log is not None:
        log.write_text("", encoding="utf-8")
    for seed in range(plan.seeds):
        for system in plan.systems if seed % 2 == 0 else reversed(plan.systems):
            outcome = _try(plan, system, seed)
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(_jsonable(asdict(outcome)), allow_nan=False) + "\n")
            yield outcome


def _try(plan: _Plan, system: System, seed: int) -> Outcome:
    trial = Trial(
        system=system.name,
        batch=system.batch or 0,
        threads=plan.threads,
        settings=replace(plan.settings, seed=seed, epochs=system.epochs, **system.changes),
        data=None if plan.data is None else str(plan.data),
    )
    evaluations: list[EpochOf] = []
    end: Mapping[str, Any] = {}
    for line in _lines(plan, trial, f"{system.key}, seed {seed}"):
        if "epoch" not in line:
            end = line
            continue
        valid = {m: math.nan if value is None else value for m, value in line["valid"].items()}
        evaluations.append(EpochOf(line["epoch"], line["seconds"], line["instances"], valid))
        value = valid[plan.target.metric]
        print(
            f"{system.key}, seed {seed}: epoch {epochs(line['epoch'])}/{system.epochs}, "
            f"{duration(line['seconds'])}, {plan.target.metric} "
            f"{measure(plan.target.metric, value)}",
            file=sys.stderr,
            flush=True,
        )
    found = (end[name] for name in ("peak_rss_mib", "staleness", "updates"))
    return Outcome(system.key, seed, evaluations, *found)


def _lines(plan: _Plan, trial: Trial, called: str) -> Iterator[dict[str, Any]]:
    """What a trial's process prints, as it comes.

    Raises:
        typer.Exit: It failed; the reason has been said.
    """
    command = [sys.executable, "-m", "geartrain_baselines.trial", trial.to_json()]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment(plan)
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        if status:
            errors.seek(0)
            raise _failed(called, status, errors.read())


def _environment(plan: _Plan) -> dict[str, str]:
    threads = str(plan.threads)
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return {**os.environ, **own}


def _failed(called: str, status: int, errors: str) -> typer.Exit:
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status in (TERMINATED, -signal.SIGTERM):
        raise Terminated("terminated")
    last = next((s for s in reversed(errors.splitlines()) if s.strip()), f"it ended with {status}")
    said = last.removeprefix("geartrain: ")
    if status == WRONG_USE:
        return fail(said, WRONG_USE)
    if said == last:  # not a failure that was foreseen: there is a traceback
        print(errors, file=sys.stderr)
    return fail(f"{called}: {said}", FAILED)


def _header(plan: _Plan, load: float | None) -> dict[str, Any]:
    settings = plan.settings
    return {
        "recipe": plan.recipe.name,
        "target": str(plan.target),
        "seeds": plan.seeds,
        "runtime": settings.runtime,
        "workers": settings.workers,
        "threads": plan.threads,
        "max_active": settings.max_active,
        "update_every": settings.update_every,
        "precision": settings.precision,
        "device": settings.device or "cpu",
        "evaluate_every": settings.evaluate_every,
        "options": dict(settings.options),
        "machine": {
            "platform": platform.platform(),
            "cores": cores(),
            "load_before": load,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "figure": None,
    }


def _load() -> float | None:
    """Programs that wanted to run at a time over the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _keep(plan: _Plan, out: Path, result: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Path:
    """Write ``compare.json``, ``compare.md`` and the figure; return where the figure is."""
    figure = out / "compare.png"
    metric = plan.target.metric
    curves = [
        Curve(
            system.key,
            [[(e.epoch, e.seconds, e.valid[metric]) for e in o.epochs]
             for o in outcomes if o.system == system.key],
        )
        for system in plan.systems
    ]  # fmt: skip
    title = f"{plan.recipe.name}, {_seeds(plan)}"
    draw_curves(figure, title, metric, plan.target.value, curves)
    (out / TABLE).write_text("\n".join(_page(plan, result, figure)) + "\n", encoding="utf-8")
    text = json.dumps({**result, "figure": figure.name}, indent=2, allow_nan=False)
    (out / "compare.json").write_text(text + "\n", encoding="utf-8")
    return figure


def _seeds(plan: _Plan) -> str:
    return "1 seed" if plan.seeds == 1 else f"{plan.seeds} seeds: median, least and most"


def _page(plan: _Plan, result: Mapping[str, Any], figure: Path) -> Iterator[str]:
    """The comparison as Markdown, to be pasted into a document."""
    settings, machine = plan.settings, result["machine"]
    every = settings.evaluate_every
    yield f"**{plan.recipe.name}**, {_seeds(plan)}; target {plan.target}; evaluated " + (
        "after every epoch." if every is None else f"every {every:g} epochs."
    )
    yield ""
    yield from markdown_of(result["rows"], plan.target)
    yield ""
    yield from (f"- {line}" for line in _described(result["rows"]))
    options = {o.name: o.default for o in plan.recipe.options}
    changed = [told(k, v) for k, v in settings.options.items() if v != options[k]]
    yield (
        f"- {plan.threads} kernel threads for every system, {settings.workers} workers for ours"
        + (f"; options {', '.join(changed)}" if changed else "")
    )
    load = machine["load_before"]
    yield (
        f"- {machine['cores']} cores, {machine['platform']}, Python {machine['python']}, torch "
        f"{machine['torch']}" + ("" if load is None else f", load before {load:.1f}")
    )
    yield ""
    yield f"![{plan.target.metric} against seconds and epochs]({figure.name})"


def _described(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        batch = "" if row["batch"] is None else f", batch {row['batch']}"
        yield f"{row['system']}: {row['what']}{batch}"


def _show(plan: _Plan, rows: Sequence[Mapping[str, Any]]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    console.print(table_of(rows, plan.target))
    for line in (*_described(rows), *staleness_lines(rows)):
        console.print(line, highlight=False)
    if plan.out is not None:
        console.print(f"kept in {plan.out}", highlight=False)


def _end(plan: _Plan, rows: Sequence[Mapping[str, Any]]) -> NoReturn:
    ours = rows[0]
    if plan.settings.until is not None and ours["reached"] < ours["seeds"]:
        reached, metric = f"{ours['reached']} of {ours['seeds']} seeds", plan.target.metric
        raise fail(
            f"ours reached {plan.target} from {reached}; {metric} at the end: "
            f"{ours['spread']['valid'][metric]}",
            FAILED,
        )
    raise typer.Exit(0)


def _jsonable(value: Any) -> Any:
    """With None for what JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(each) for each in value]
    return value

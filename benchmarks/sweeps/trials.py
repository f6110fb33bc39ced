"""One training of a sweep: a process of its own, and the line that is kept of it.

    Point, Terms, seed ─► geartrain train TASK --json ... ─► line of results/TASK.jsonl

A trial that reaches its cap is killed; what its log says until then is kept.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from geartrain.cli.train import finite, staleness_over, updates_over
from geartrain.engine.instrument import EpochEnded
from geartrain.observe.jsonlog import read_json_log
from geartrain.train.results import epoch_from_json
from geartrain.train.run import RunFolder
from geartrain_baselines.standings import EpochOf, Outcome

Line = Mapping[str, Any]

SOURCE: Final = Path(__file__).parents[2] / "src"
_DIGITS: Final = 5
_KEPT: Final = ("history", "instances", "updates", "staleness", "peak_rss_mib")
_TARGET_MISSED: Final = 1  # exit status of geartrain train, its JSON printed


@final
@dataclass(frozen=True, slots=True)
class Point:
    """What is swept over."""

    max_active: int
    update_every: int
    replicas: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all trials of a sweep have in common.

    Args:
        task: The recipe.
        workers: How many.
        epochs: At most.
        target: Where the time is taken, as ``Target.parse`` reads it.
        stops: Whether training ends at the target.
        evaluate_every: Share of an epoch.
        options: ``NAME=VALUE`` each.
    """

    task: str
    workers: int
    epochs: int
    target: str
    stops: bool
    evaluate_every: float
    options: tuple[str, ...]


def key_of(line: Line) -> str:
    """Equal for trials that were asked for the same."""
    names = "task", "workers", "epochs", "target", "stops", "evaluate_every", "options"
    return json.dumps([line[n] for n in (*names, *Point.__dataclass_fields__, "seed")])


def asked(point: Point, terms: Terms, seed: int) -> dict[str, Any]:
    """The first half of a line."""
    return {**asdict(terms), "options": list(terms.options), **asdict(point), "seed": seed}


def command_of(point: Point, terms: Terms, seed: int, data: Path | None) -> list[str]:
    """Words for ``geartrain``, without the run's folder."""
    words = ["train", terms.task, "--json", "--seed", seed, "--workers", terms.workers]
    words += ["--max-active", point.max_active, "--update-every", point.update_every]
    words += ["--replicas", point.replicas, "--epochs", terms.epochs]
    words += ["--evaluate-every", terms.evaluate_every]
    words += ["--until", terms.target] if terms.stops else []
    words += ["--data", data] if data is not None else []
    words += [word for option in terms.options for word in ("--option", option)]
    return [str(word) for word in words]


def try_once(point: Point, terms: Terms, seed: int, data: Path | None, cap_s: float) -> Line:
    """Train in a process of its own, at most so many seconds, and return its line."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [*command_of(point, terms, seed, data), "--out", str(run)]
        status, output, errors = _run([sys.executable, "-m", "geartrain", *words], cap_s)
        line = asked(point, terms, seed)
        if status is None:
            return {**line, "outcome": "capped", "cap_s": cap_s, **_what_there_was(run)}
        printed = output.strip().splitlines()
        if not printed or status not in (0, _TARGET_MISSED):
            said = [each for each in errors.splitlines() if each.strip()]
            return {**line, "outcome": "failed", "reason": said[-1] if said else f"exit {status}"}
        return {**line, "outcome": "done", **_shortened(json.loads(printed[-1]))}


def outcome_of(line: Line, label: str) -> Outcome | None:
    """A line for ``geartrain_baselines.standings``; None where nothing was evaluated."""
    history = line.get("history")
    if not history:
        return None
    ends = [0.0, *(entry["epoch"] for entry in history)]
    share = line["instances"] / ends[-1]
    evaluations = [
        EpochOf(
            entry["epoch"],
            entry["seconds"],
            share * (entry["epoch"] - before),  # epochs are equally long
            _numbers(entry["valid"]),
        )
        for entry, before in zip(history, ends, strict=False)
    ]
    updates = {part: n / ends[-1] for part, n in line.get("updates", {}).items()}
    found = line["peak_rss_mib"], line["staleness"], updates  # older lines have no updates
    return Outcome(label, line["seed"], evaluations, *found)


def _run(command: Sequence[str], cap_s: float) -> tuple[int | None, str, str]:
    """Exit status, output and errors; the status is None where the cap ended it."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            output, errors = process.communicate(timeout=cap_s)
        except subprocess.TimeoutExpired:
            process.kill()  # its log is written line by line
            process.communicate()
            return None, "", ""
        except BaseException:
            process.kill()
            raise
        return process.returncode, output, errors


def _what_there_was(run: Path) -> dict[str, Any]:
    """Of a run without a result: what its log says; nothing before its first evaluation."""
    log = RunFolder(run).metrics
    history = [_ended(each) for each in read_json_log(log)] if log.is_file() else []
    ends = [each for each in history if each is not None]
    if not ends:
        return {}
    return _shortened(
        {
            "history": [
                {"epoch": e.epoch, "seconds": e.time_s, "valid": finite(e.valid)} for e in ends
            ],
            "instances": sum(e.instances for e in ends),
            "updates": updates_over(ends),
            "staleness": staleness_over(ends),
            "peak_rss_mib": None,
        }
    )


def _ended(event: Line) -> EpochEnded | None:
    if event["event"] != "EpochEnded":
        return None
    ages = {part: each["histogram"] for part, each in event["staleness"].items()}
    fields = {name: value for name, value in event.items() if name != "event"}
    means = {name: _numbers(event[name]) for name in ("metrics", "valid")}
    loss = math.nan if event["loss"] is None else event["loss"]
    return epoch_from_json({**fields, **means, "loss": loss, "staleness": ages})


def _numbers(valid: Line) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in valid.items()}


def _shortened(result: Line) -> dict[str, Any]:
    """What a line keeps of a run's JSON."""
    return {name: _rounded(result[name]) for name in _KEPT}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value

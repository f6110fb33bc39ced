"""``geartrain demo``: two worker processes beside one worker, on drawn images, within a minute.

    one worker            minibatch after minibatch: plain training           an epoch each, in
    two worker processes  as many minibatches in flight as there are parts    turns, then the sum

Both have the same network, data, order of the data, updates and kernel threads; what differs is who
computes and how old weights are. What was measured is printed, whatever it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, final

from rich.console import Console
from rich.table import Table

from geartrain.bounds import require_at_most
from geartrain.cli.exits import preparing, running, stopped
from geartrain.cli.logs import logging_to
from geartrain.cli.settings import RunSettings, config_of, new_settings
from geartrain.cli.train import make_session, result_of, staleness_over, updates_over
from geartrain.cli.version import version
from geartrain.device import cores
from geartrain.engine.instrument import AbstractInstrument, EpochEnded, Worked
from geartrain.frames.instance import Instance
from geartrain.native import kind
from geartrain.observe.figures import duration, measure, number
from geartrain.observe.jsonlog import JsonLog
from geartrain.observe.report import write_report
from geartrain.observe.trace import PerfettoTrace
from geartrain.recipes import Recipe, Value, find_recipe
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.threads import Threads
from geartrain.train.run import RunFolder
from geartrain.train.session import Session

RECIPE: Final = "shapes"
EPOCHS: Final = 3
MOST_EPOCHS: Final = 100
WORKERS: Final = 2
_FASTER: Final = 1.05
"""Ratios nearer to 1 than this are called equal."""


@final
class WorkSeen(AbstractInstrument):
    """Sums up how busy workers were."""

    def __init__(self) -> None:
        self._events: list[Worked] = []

    def on_worked(self, event: Worked) -> None:
        """Keep it."""
        self._events.append(event)

    def busy(self) -> list[float]:
        """Share of the time of training in which each worker was in firings."""
        seconds = math.fsum(event.seconds for event in self._events)
        workers = max((len(event.waiting) for event in self._events), default=0)
        spent = [0.0] * workers
        for event in self._events:
            for node in event.nodes:
                spent[node.worker] += node.seconds
        return [each / seconds if seconds > 0 else 0.0 for each in spent]


@final
@dataclass(slots=True, kw_only=True)
class _Side:
    """One of the two."""

    name: str
    settings: RunSettings
    folder: RunFolder
    session: Session
    train: Sequence[Instance]
    valid: Sequence[Instance]
    seen: WorkSeen
    history: list[EpochEnded] = field(default_factory=list)

    def train_epoch(self, epoch: int) -> EpochEnded:
        """Train up to the end of an epoch."""
        fit = self.session.fit(self.train, epochs=epoch, valid=self.valid, folder=self.folder.path)
        self.history = list(fit.history)
        return self.history[-1]

    def result(self) -> dict[str, Any]:
        """What came of it, for JSON."""
        return result_of(self.settings, self.history) | {
            "busy": self.seen.busy(),
            "losses": [epoch.loss for epoch in self.history],
        }


def demo(
    option_texts: Sequence[str],
    epochs: int | None,
    seed: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train both, say what was measured, and write a report of each.

    Args:
        option_texts: ``NAME=VALUE`` each, of the recipe.
        epochs: Of each; None: ``EPOCHS``.
        seed: Of weights, order and images; None: 0.
        out: A folder for both runs; None: one below ``runs``.
        as_json: Print one JSON object instead of the table.
    """
    console = Console(stderr=as_json, highlight=False)
    with ExitStack() as held:
        with preparing():
            recipe = find_recipe(RECIPE)
            options = recipe.parse_options(option_texts)
            epochs = EPOCHS if epochs is None else epochs
            require_at_most(f"--epochs {epochs}", epochs, MOST_EPOCHS, "a demo is to end soon")
            folder = out or _free(Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}")
            for _, path, _, _ in _sides(folder):
                RunFolder(path).check_free()
            _say_kernels(console)
            sides = [
                _side(recipe, name, path, options | more, given, epochs, seed or 0, held)
                for name, path, more, given in _sides(folder)
            ]
        console.print(_introduction(sides, epochs))
        with logging_to(sides[0].folder.log), running(sides[0].folder.log):
            try:
                _alternate(sides, epochs, console)
            except KeyboardInterrupt as interrupt:
                raise stopped(interrupt, "interrupted; nothing is compared") from interrupt
        for side in sides:
            side.folder.finish(side.result())
        pages = [write_report(side.folder.path) for side in sides]
    ratios = _ratios(sides)
    if as_json:
        print(json.dumps(_document(sides, ratios, pages), allow_nan=False), flush=True)
    else:
        console.print(_table(sides))
        console.print(verdict(ratios, epochs), soft_wrap=True)
        console.print(f"\nreport of the two: {pages[1]}", soft_wrap=True)
        console.print(f"of the one:        {pages[0]}", soft_wrap=True)


def _sides(folder: Path) -> Sequence[tuple[str, Path, dict[str, Value], dict[str, Any]]]:
    """Name, folder, options and settings of each."""
    return (
        (
            "one worker",
            folder / "one-worker",
            {"method": "backprop"},
            {"runtime": "threads", "workers": 1},
        ),
        (
            "two worker processes",
            folder / "two-processes",
            {"method": "spectrain"},
            {"runtime": "processes", "workers": WORKERS},
        ),
    )


def _side(
    recipe: Recipe,
    name: str,
    path: Path,
    options: Mapping[str, Value],
    given: Mapping[str, Any],
    epochs: int,
    seed: int,
    held: ExitStack,
) -> _Side:
    asked = {"options": options, "epochs": epochs, "seed": seed, "replicas": None}
    settings = new_settings(recipe, {**asked, **given})
    folder = RunFolder(path)
    held.enter_context(folder.locked())
    task = recipe.build(settings.setting(None, {}))
    folder.create(config_of(settings, None, version()), task.graph.mermaid(), task.files)
    seen = WorkSeen()
    made = Threads if settings.runtime == "threads" else Processes
    session = make_session(
        settings,
        task,
        [JsonLog(folder.metrics), PerfettoTrace(folder.trace), seen],
        made(settings.workers, kernel_threads=1),
    )
    return _Side(
        name=name,
        settings=settings,
        folder=folder,
        session=session,
        train=task.load("train"),
        valid=task.load("valid"),
        seen=seen,
    )


def _free(folder: Path) -> Path:
    """The folder, or with a number behind its name where there is one of this second."""
    path, n = folder, 2
    while path.exists():
        path, n = folder.with_name(f"{folder.name}-{n}"), n + 1
    return path


def _say_kernels(console: Console) -> None:
    """Have the kernels in C compiled before anything is timed, and say so."""
    console.print("kernels in C (compiled once, some 20 s): ", end="")
    found = kind()
    console.print("ready" if found != "torch" else "none here, torch does their work")


def _introduction(sides: Sequence[_Side], epochs: int) -> str:
    one, two = (side.settings for side in sides)
    images = int(two.options["train_size"])
    found = cores()
    few = "; with one core nothing can be gained" if found < WORKERS else ""
    return (
        f"{images:,} drawn images, minibatches of {two.options['batch']}, {epochs} epochs; a "
        f"residual network in {two.options['parts']} parts\n"
        f"  one worker            {one.max_active} minibatch in flight: plain training\n"
        f"  two worker processes  {two.max_active} minibatches in flight: nobody waits for a step\n"
        f"one kernel thread a worker, {found} core{'s' * (found != 1)}{few}; they train in turns\n"
    )


def _alternate(sides: Sequence[_Side], epochs: int, console: Console) -> None:
    """An epoch of each in turns; who begins changes, as machines get slower and faster."""
    wide = max(len(side.name) for side in sides)
    for epoch in range(1, epochs + 1):
        for side in sides if epoch % 2 else reversed(sides):
            ended = side.train_epoch(epoch)
            console.print(
                f"epoch {epoch}/{epochs}  {side.name:<{wide}}  loss {number(ended.loss)}  "
                f"valid accuracy {measure('accuracy', ended.valid['accuracy'])}  "
                f"{duration(ended.seconds)}",
                soft_wrap=True,
            )


def _ratios(sides: Sequence[_Side]) -> list[float]:
    """How many times as fast the second was, of each epoch, and at last of all together."""
    one, two = ([epoch.seconds for epoch in side.history] for side in sides)
    pairs = [*zip(one, two, strict=True), (math.fsum(one), math.fsum(two))]
    return [a / b if b > 0 else math.nan for a, b in pairs]


def verdict(ratios: Sequence[float], epochs: int) -> str:
    """What was measured, in a sentence.

    Args:
        ratios: Of the epochs, and at last of all together.
        epochs: How many.
    """
    *each, whole = ratios
    spread = f"{min(each):.2f} to {max(each):.2f} over {epochs} epochs"
    if whole >= _FASTER:
        how = f"trained {whole:.2f} times as fast as"
    elif whole > 1 / _FASTER:
        how = f"trained no faster ({whole:.2f} times) than"
    else:
        how = f"were slower ({whole:.2f} times as fast) than"
    busy = "" if whole >= _FASTER else "; is the machine busy with something else?"
    return f"\nTwo worker processes {how} one worker here: {spread}{busy}"


def _table(sides: Sequence[_Side]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), title_justify="left")
    table.add_column("")
    for side in sides:
        table.add_column(side.name, justify="left")
    lasts = [side.history[-1] for side in sides]
    images = [int(s.settings.options["train_size"]) * len(s.history) for s in sides]
    spent = [math.fsum(epoch.seconds for epoch in side.history) for side in sides]
    table.add_row()
    table.add_row("loss, last epoch", *(number(last.loss) for last in lasts))
    table.add_row("valid loss", *(number(last.valid["loss"]) for last in lasts))
    accuracy = [measure("accuracy", last.valid["accuracy"]) for last in lasts]
    table.add_row("valid accuracy", *accuracy)
    table.add_row("updates of each part", *(_updates(side) for side in sides))
    table.add_row("staleness by part, mean (max)", *(_staleness(side) for side in sides))
    table.add_row("busy", *(", ".join(f"{100 * b:.0f}%" for b in s.seen.busy()) for s in sides))
    table.add_row("training", *(duration(seconds) for seconds in spent))
    rates = [f"{n / s:,.0f} images/s" for n, s in zip(images, spent, strict=True)]
    table.add_row("throughput", *rates)
    return table


def _updates(side: _Side) -> str:
    counts = sorted({*updates_over(side.history).values()})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "0"


def _staleness(side: _Side) -> str:
    """Of each part, the first part first."""
    ages = staleness_over(side.history)
    if len({*(age["max"] for age in ages.values())}) == 1:
        return " ".join(dict.fromkeys(f"{a['mean']:.1f} ({a['max']})" for a in ages.values()))
    return ", ".join(f"{ages[part]['mean']:.1f} ({ages[part]['max']})" for part in sorted(ages))


def _document(
    sides: Sequence[_Side], ratios: Sequence[float], pages: Sequence[Path]
) -> dict[str, Any]:
    *each, whole = (ratio if math.isfinite(ratio) else None for ratio in ratios)
    one, two = (side.result() for side in sides)
    return {
        "one": one,
        "two": two,
        "ratio": whole,
        "ratios": each,
        "cores": cores(),
        "reports": [str(page) for page in pages],
    }

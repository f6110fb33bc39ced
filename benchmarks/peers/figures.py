"""What rounds come to: rates, ratios within rounds, tables, a chart; and on what machine.

rounds      1     2     3            a system's rate in each; None where it failed
ours       30    33    31
peer       10    10    11     ─►     ratios 3.0, 3.3, 2.8: median 3.0 (2.8 to 3.3)
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from geartrain_baselines.standings import updates_told

DISTURBED_CORES: Final = 0.1
"""Runs beside which other programs use more than so many cores say little."""

COMMAND_WIDTH: Final = 110
"""Letters of a line of the command."""

Document: TypeAlias = dict[str, Any]
"""What a benchmark writes as JSON."""
Rates: TypeAlias = Sequence[float | None]
"""A system's rate in each round."""


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some numbers, the least and the greatest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """Of some numbers; None: there are none."""
        if not values:
            return None
        return Spread(statistics.median(values), min(values), max(values))


def known(rates: Rates) -> list[float]:
    """Those of the rounds that did not fail."""
    return [rate for rate in rates if rate is not None]


def ratios(ours: Rates, theirs: Rates) -> list[float]:
    """Ours over theirs in every round that both have."""
    pairs = zip(ours, theirs, strict=True)
    return [a / b for a, b in pairs if a is not None and b is not None]


def rates_of(system: Mapping[str, Any], rounds: int) -> list[float | None]:
    """Instances a second in rounds 1, 2, ...; the median where a round has several passes."""
    found = {
        run["round"]: run["instances"] / statistics.median(run["seconds"])
        for run in system["runs"]
        if "seconds" in run
    }
    return [found.get(number) for number in range(1, rounds + 1)]


def rounds_of(document: Document) -> int:
    """How many rounds have been run."""
    return max((run["round"] for s in document["systems"] for run in s["runs"]), default=0)


def best_of(document: Document) -> dict[str, int]:
    """The fastest member of each family, by its median: family to place among the systems."""
    rounds = rounds_of(document)
    best: dict[str, tuple[float, int]] = {}
    for place, system in enumerate(document["systems"]):
        spread = Spread.of(known(rates_of(system, rounds)))
        if spread and spread.median > best.get(system["family"], (0.0, 0))[0]:
            best[system["family"]] = spread.median, place
    return {family: place for family, (_, place) in best.items()}


def markdown(document: Document) -> Iterator[str]:
    """The command, the table of all systems, and that of ratios of families at their best."""
    if "command" in document:
        yield from (*_wrapped(document["command"]), "")
    yield from headline(document)
    rounds = rounds_of(document)
    best = set(best_of(document).values())
    unit = document["settings"]["unit"]
    counted = any(run.get("updates") for s in document["systems"] for run in s["runs"])
    heads = ["system", f"{unit}/s, median", "min to max", "peak MiB"]
    heads[3:3] = ["updates a pass"] * counted  # older results have none
    yield from ("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for place, system in enumerate(document["systems"]):
        spread = Spread.of(known(rates_of(system, rounds)))
        name = f"{system['family']}, {system['detail']}"
        if place in best:
            name = f"**{name}**"
        if spread is None:
            yield f"| {name} | failed: {_failure(system)} | | |" + " |" * counted
            continue
        peak = max(run["peak_mib"] for run in system["runs"] if "peak_mib" in run)
        updates = f"| {_updates(system)} " if counted else ""
        yield (
            f"| {name} | {spread.median:,.0f} | {spread.low:,.0f} to {spread.high:,.0f} "
            f"{updates}| {peak:,.0f} |"
        )
    yield from ratio_table(document)


def _updates(system: Mapping[str, Any]) -> str:
    """Of a pass, by the last run that has counted them."""
    counted = [found for run in system["runs"] if (found := run.get("updates"))]
    return updates_told(counted[-1] if counted else {})


def _wrapped(command: str) -> Iterator[str]:
    """A command as a block of code, broken before its options."""
    first, *options = command.split(" --")
    line = f"    {first}"
    for option in options:
        if len(line) + len(option) > COMMAND_WIDTH:
            yield f"{line} \\"
            line = "       "
        line += f" --{option}"
    yield line


def ratio_table(document: Document) -> Iterator[str]:
    """How many times as fast ours are as every peer, each family at its best."""
    rounds, systems = rounds_of(document), document["systems"]
    best = best_of(document)
    ours = [family for family in best if systems[best[family]]["kind"] == "ours"]
    peers = [family for family in best if family not in ours]
    if not ours or not peers:
        return
    yield from (
        "",
        f"| each at its best, times as fast as | {' | '.join(ours)} |",
        "|---" * (len(ours) + 1) + "|",
    )
    for peer in peers:
        theirs = rates_of(systems[best[peer]], rounds)
        cells = []
        for family in ours:
            spread = Spread.of(ratios(rates_of(systems[best[family]], rounds), theirs))
            cells.append("" if spread is None else times(spread))
        yield f"| {peer}, {systems[best[peer]]['detail']} | {' | '.join(cells)} |"


def times(spread: Spread) -> str:
    """``3.00 (2.80 to 3.30)``."""
    return f"{_short(spread.median)} ({_short(spread.low)} to {_short(spread.high)})"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def headline(document: Document) -> Iterator[str]:
    """Where, with what and how it was measured."""
    machine, settings = document["machine"], document["settings"]
    versions = {name: v for s in document["systems"] for name, v in s.get("versions", {}).items()}
    yield f"{document['benchmark']}, {document['task']}: " + ", ".join(
        f"{name} {value}" for name, value in settings.items() if name not in ("task", "unit")
    )
    versions = machine["versions"] | versions
    named = ", ".join(f"{name} {value}" for name, value in versions.items() if name != "python")
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['versions']['python']}, "
        f"{named}; {_told_rounds(document)}"
    )
    others = [run.get("others_cores") or 0.0 for s in document["systems"] for run in s["runs"]]
    if max(others, default=0.0) > DISTURBED_CORES:
        disturbed = sum(cores > DISTURBED_CORES for cores in others)
        yield (
            f"**Not an idle machine**: in {disturbed} of {len(others)} runs other programs used "
            f"more than {DISTURBED_CORES} cores, {max(others):.1f} at most."
        )


def _told_rounds(document: Document) -> str:
    """``3 rounds``, and how many runs there are where the last round was cut short."""
    rounds = rounds_of(document)
    runs = [len(s["runs"]) for s in document["systems"] if not any("error" in r for r in s["runs"])]
    if min(runs, default=rounds) == rounds:
        return f"{rounds} rounds"
    return f"{rounds} rounds, not all complete: {min(runs)} to {max(runs)} runs a system"


def machine() -> dict[str, Any]:
    """The processor and the versions of what is measured with."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "versions": versions}


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in found.items()}
    family = f", family {named['cpu family']}" if "cpu family" in named else ""
    return named.get("model name", platform.machine()) + family


def _failure(system: Mapping[str, Any]) -> str:
    return next((run["error"] for run in system["runs"] if "error" in run), "did not run")


def draw(path: Path, document: Document) -> None:
    """Bars of the rates, the spread of the rounds as whiskers; ours stand out.

    Raises:
        GeartrainError: matplotlib is not installed.
    """
    from geartrain.observe.curves import require_matplotlib

    require_matplotlib()
    from matplotlib.figure import Figure

    rounds, best = rounds_of(document), set(best_of(document).values())
    bars = []
    for place, system in enumerate(document["systems"]):
        spread = Spread.of(known(rates_of(system, rounds)))
        if spread is not None:
            bars.append((f"{system['family']}, {system['detail']}", spread, system, place in best))
    figure = Figure(figsize=(10, 1.2 + 0.27 * len(bars)), dpi=100, layout="constrained")
    axes = figure.subplots()
    for row, (_, spread, system, is_best) in enumerate(bars):
        colour = "C0" if system["kind"] == "ours" else "0.45"
        axes.barh(row, spread.median, color=colour, alpha=1.0 if is_best else 0.45)
        axes.hlines(row, spread.low, spread.high, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{document['settings']['unit']} a second in training; strong: at its best")
    axes.set_title(f"{document['task']}, {document['settings']['threads']} threads")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)

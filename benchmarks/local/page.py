"""The page: tables of what ways cost and reach, what was promised and what is met.

lines of both recipes ─► docs/results/local.md, and local.png beside it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.local import claims
from benchmarks.local.chart import draw
from benchmarks.local.figures import BASE, Line, Standing, gap, pareto, standings
from benchmarks.local.methods import DEEP, DEEP_WAYS, GEARS, LOCAL, PAIRS, PARTS, PIPED, SHORT, WAYS
from benchmarks.local.probe import MINIBATCHES
from benchmarks.local.trials import TERMS

MEASURED: Final = "2026-11-21"  # the lines of ``results``
TARGETS: Final = {"cifar": (1.9, 1.8, 1.7), "charlm": (2.6, 2.5, 2.4)}
SECTIONS: Final[Mapping[str, Sequence[str]]] = {
    "Local losses": (BASE, *LOCAL),
    f"Pipelines of {PARTS} parts, {PARTS} minibatches in flight": (BASE, *PIPED),
    f"{PARTS} parts, {PARTS + DEEP} minibatches in flight": (BASE, *DEEP_WAYS),
    "Two parts": (BASE, *PAIRS),
    "Gears, one minibatch in flight": (BASE, *GEARS, *SHORT),
}

_INTRO: Final = f"""\
# Parts at many speeds: operations, time, memory and bytes against loss

`cifar` (residual network) and `charlm` (Transformer), cut into {PARTS} parts and trained by each
method, and the [Pareto table and figure](#pareto) of Laskin et al. 2020 (arXiv:2012.03837) for
vision and language. All rows of a recipe have the same network, seeds, data and order, number of
minibatches, rate and schedule (the recipe's, tuned for none of the methods). Trainings are short:
they compare methods, and are far from what the networks can reach. Measured {MEASURED}; the
commands are [at the end](#again), and [what is counted](#what-is-counted) is told before the tables
of all ways.
"""

_COUNTED: Final = f"""\
## What is counted

![Loss against ideal parallel time, and operations against ideal parallel time](local.png)

- **operations**: matrix products and convolutions, counted by `gt.FlopMeter` on {MINIBATCHES}
  minibatches, two for a multiplication and an addition.
- **ideal time**: the virtual clock of `gt.Simulated` while the real mathematics runs: as many
  devices as parts, 1e9 operations a second each, every firing at the operations that its node and
  direction were counted at, links without latency and with any bandwidth. Nothing else takes time,
  so a real machine gains less. Evaluation is not in it, but the pipeline runs empty before each.
- **memory**: the most bytes at once on the device that has most: what autograd has saved (each
  storage once), what left a part whose gradient is awaited, weights, their gradients, optimiser,
  views and replay buffers. Temporary tensors inside a firing are not in it. "% whole" is of
  backpropagation's whole network on one device. On charlm the minibatches that are looked at lie in
  the synchronous part of ways with T3 or `warm`: what stands there is too low, and the same way
  without it says what they keep later.
- **sent**: bytes of payload, targets and gradients across the cuts for a minibatch, forward and
  back.
- **delay**: mean staleness of each part in the last segment, in updates.
- **here**: processor seconds and wall-clock of training in one thread, on a machine with two cores
  that other work used as well; trials were halted now and then, which wall-clock has in it. Both
  include the simulator, and say little of speed.
"""

_AGAIN: Final = """\
## Again

```sh
export PYTHONPATH=src GEARTRAIN_DATA=DIR OMP_NUM_THREADS=1
{commands}
python -m benchmarks.local.main --markdown docs/results/local.md
```

The lines are in `benchmarks/local/results`. Weights, losses, operations, bytes and ideal times are
the same again; seconds are not.
"""

_HOW: Final = (
    "What it took to a validation loss with seed 0, interpolated between evaluations; a dash where "
    "it was not reached. **Bold** ways are beaten by no other in both operations "
    "and ideal time. Ways of two parts and shorter trainings are left out; *here* is processor "
    "time."
)


def write(path: Path, lines: Mapping[str, Sequence[Line]]) -> None:
    """Write the page, and the figure ``local.png`` beside it.

    Args:
        path: Of the page.
        lines: Recipe to the lines of its trials.

    Raises:
        ValueError: A recipe has no finished backpropagation, with which all are compared.
    """
    found = {recipe: standings(those) for recipe, those in lines.items()}
    for recipe, ways in found.items():
        if BASE not in ways or not ways[BASE].lines:
            raise ValueError(f"{recipe}: no line of '{BASE}'; run --ways {BASE} first")
    path.write_text("\n".join(page_of(found)) + "\n", encoding="utf-8")
    alike = {recipe: of_seed(ways) for recipe, ways in found.items()}
    draw(path.with_suffix(".png"), alike, {r: t[1] for r, t in TARGETS.items()})


def of_seed(ways: Mapping[str, Standing], seed: int = 0) -> dict[str, Standing]:
    """The ways of four parts and whole training, with one seed, which all of them have."""
    return {way: s.only([seed]) for way, s in ways.items() if not way.startswith(("pair", "short"))}


def page_of(found: Mapping[str, Mapping[str, Standing]]) -> Iterator[str]:
    """The page as lines of Markdown.

    Args:
        found: Recipe to way to standing.
    """
    yield _INTRO
    yield from claims.told(found)
    yield _COUNTED
    yield from ("## Pareto", "")
    yield _HOW
    for recipe, ways in found.items():
        yield from ("", f"### {recipe}", "")
        yield from _pareto(of_seed(ways), TARGETS[recipe])
    for recipe, ways in found.items():
        yield from ("", f"## {recipe}: all ways", "", _terms(recipe, ways))
        for title, names in SECTIONS.items():
            rows = [ways[name] for name in names if name in ways]
            if len(rows) > 1:
                yield from ("", f"**{title}**", "")
                yield from _costs(rows, ways[BASE])
        yield from _failures(ways)
    yield from ("", _AGAIN.format(commands="\n".join(_commands(found))))


def _terms(recipe: str, ways: Mapping[str, Standing]) -> str:
    terms, any_line = TERMS[recipe], ways[BASE].lines[0]
    options = ", ".join(f"{name} {value}" for name, value in terms.options.items())
    return (
        f"{options}; {any_line['minibatches']} minibatches, {len(any_line['curve'])} evaluations "
        f"on {terms.valid} minibatches."
    )


def _pareto(ways: Mapping[str, Standing], targets: Sequence[float]) -> Iterator[str]:
    named = [f"loss {t:g}: Gop | ideal s | here s" for t in targets]
    yield f"| way | {' | '.join(named)} |"
    yield "|---|" + "--:|--:|--:|" * len(targets)
    reached = [
        {way: r for way, s in ways.items() if s.lines and (r := s.reached(target)) is not None}
        for target in targets
    ]
    fronts = [pareto(each) for each in reached]
    for way in ways:
        if not any(way in each for each in reached):
            continue
        cells = []
        for each, front in zip(reached, fronts, strict=True):
            if way not in each:
                cells.append("— | — | —")
                continue
            r, mark = each[way], "**" if way in front else ""
            cells.append(
                f"{mark}{r.operations / 1e9:.0f}{mark} | {mark}{r.virtual_s:.0f}{mark} "
                f"| {r.cpu_s:.1f}"
            )
        yield f"| {way} | {' | '.join(cells)} |"
    never = [way for way in ways if not any(way in each for each in reached)]
    if never:
        yield from ("", f"Reached none: {', '.join(never)}.")


def _costs(rows: Sequence[Standing], base: Standing) -> Iterator[str]:
    yield (
        "| way | what | seeds | loss | against backprop | accuracy | Mop a minibatch "
        "| ideal speed-up | memory MB | % whole | sent kB | delay | here ms, wall ms |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|"
    for s in rows:
        if not s.lines:
            yield f"| {s.way} | {WAYS[s.way].what} | 0 | diverged" + " | " * 10 + "|"
            continue
        against = "" if s is base else f"{100 * gap(s, base):+.1f} %"
        forward, back = s.sent
        cells = [
            s.way,
            WAYS[s.way].what,
            str(len(s.lines)) + (f" (+ {len(s.failures)} diverged)" if s.failures else ""),
            _spread(s.losses),
            against,
            f"{s.accuracy:.3f}",
            f"{s.operations / 1e6:.0f}",
            f"{base.virtual_s / s.virtual_s:.2f}",
            f"{s.memory / 1e6:.1f}",
            f"{100 * s.memory / base.whole:.0f}",
            f"{forward / 1e3:.0f} + {back / 1e3:.0f}",
            " ".join(f"{d:.1f}" for d in s.staleness),
            f"{1e3 * s.cpu_s:.0f}, {1e3 * s.wall_s:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _spread(losses: Sequence[float]) -> str:
    middle = sum(losses) / len(losses)
    if len(losses) == 1:
        return f"{middle:.3f}"
    return f"{middle:.3f} ({min(losses):.3f} to {max(losses):.3f})"


def _failures(ways: Mapping[str, Standing]) -> Iterator[str]:
    for s in ways.values():
        if s.failures:
            seeds = ", ".join(map(str, sorted(s.failures)))
            reason = _shortened(next(iter(s.failures.values())))
            yield from ("", f"- {s.way}, seed {seeds}: {reason}")


def _shortened(reason: str) -> str:
    """A reason without the list of weights in it."""
    before, bracket, rest = reason.partition("[")
    return before + "its weights" + rest.partition("]")[2] if bracket else reason


def _commands(found: Mapping[str, Mapping[str, Standing]]) -> Iterator[str]:
    """What runs the trials that there are: ways with the same seeds together."""
    for recipe, ways in found.items():
        groups: dict[str, list[str]] = {}
        for s in ways.values():
            seeds = sorted({line["seed"] for line in s.lines} | set(s.failures))
            groups.setdefault(",".join(map(str, seeds)), []).append(s.way)
        for seeds, names in groups.items():
            joined = ",".join(names)
            start = f"python -m benchmarks.local.main {recipe} --seeds {seeds}"
            yield start + " \\\n    --ways " + f"'{joined}'"

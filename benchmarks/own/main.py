"""Programs of one's own: geartrain against batching by hand, and against one instance at a time.

    PYTHONPATH=src python -m benchmarks.own.main [--only childsum,typed] [--in-flight 64,256] \\
        [--rounds 5] [--memory] [--json FILE.json] [--markdown]
    PYTHONPATH=src python -m benchmarks.own.main --read FILE.json --markdown

First the gradients of all three are compared, in float64. Then systems take turns, one worker and
one kernel thread; every other round goes backwards. Ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import geartrain as gt
from benchmarks.own.check import require_equal_gradients
from benchmarks.own.programs import PROGRAMS
from benchmarks.own.programs.program import Item
from benchmarks.own.systems import System, Trained
from benchmarks.peers.figures import Document, Spread, machine

CHECKED: Final = 6
"""Instances on which gradients are compared."""
MIB: Final = 1 << 20
PASSES: Final = 5
"""Of a process whose memory is read."""
WHENS: Final = {"first_mib": "first pass", "later_mib": f"pass {PASSES}"}


def systems_of(in_flight: Sequence[int], update: int) -> list[System]:
    """Every number in flight with that update, and with one of as many; hand and plain likewise."""
    pairs = sorted({(n, u) for n in in_flight for u in (update, max(n, update))})
    updates = sorted({u for _, u in pairs})
    return [
        *(System("ours", u, n) for n, u in pairs),
        *(System("hand", u) for u in updates),
        System("plain", update),
    ]


def measure(name: str, given: argparse.Namespace) -> Document:
    """A program: its rounds, its firings, and its memory where it is asked for."""
    torch.manual_seed(0)
    program = PROGRAMS[name](16)
    worst = require_equal_gradients(program, program.generate(CHECKED, seed=99))
    print(f"{name}: gradients agree within {worst:.0e}", file=sys.stderr)
    systems = systems_of(given.in_flight, given.update)
    document: Document = {
        "program": name,
        "told": program.told,
        "looks": program.looks,
        "gradients_within": worst,
        "systems": [{"name": s.name, "runs": []} for s in systems],
    }
    if given.rounds:
        _run_rounds(document, name, systems, given)
    if given.memory:
        for place, system in enumerate(systems):
            if system.way != "plain":  # which is compared by nobody
                document["systems"][place] |= grown_by(name, place, given)
    return document


def _run_rounds(
    document: Document, name: str, systems: Sequence[System], given: argparse.Namespace
) -> None:
    """Have the systems take turns, and write down how they did, and the firings."""
    program = PROGRAMS[name](16)
    trained = [_trained(name, system, given) for system in systems]
    items = program.generate(given.instances, seed=1)
    given_to = _warmed(trained, items, given)
    for number in range(1, given.rounds + 1):
        places = range(len(trained))
        if given.alike:
            _level(trained)
        for place in places if number % 2 else reversed(places):
            one = trained[place]
            ran = one(given_to[place])
            asked = -(-ran.instances // one.system.update)
            document["systems"][place]["runs"].append(
                {
                    "round": number,
                    "rate": ran.instances / (ran.cpu_seconds if given.cpu else ran.seconds),
                    "loss": ran.loss,
                    "asked": asked,
                    "updates": ran.updates,
                }
            )
    for place, one in enumerate(trained):
        if one.system.way == "ours":
            document["systems"][place]["firings"] = one.firings(given_to[place])


def _warmed(
    trained: Sequence[Trained], items: Sequence[Item], given: argparse.Namespace
) -> list[Sequence[Item] | list[gt.Instance]]:
    """What each system is given in a round, after the passes that do not count."""
    given_to: list[Sequence[Item] | list[gt.Instance]] = []
    for one in trained:
        share = items[: given.plain] if one.system.way == "plain" else items
        one.rows_with_loss = one.program.losses(share)
        given_to.append(one.prepare(share))
        warm = one.prepare(items[: max(one.system.update, 1)])
        if one.system.way != "plain":
            rows, one.rows_with_loss = one.rows_with_loss, one.program.losses(items[: len(warm)])
            one(warm)
            one.rows_with_loss = rows
    for _ in range(given.warm):
        for one, share in zip(trained, given_to, strict=True):
            one(share)
    return given_to


def _level(trained: Sequence[Trained]) -> None:
    """All systems have the weights of the last one that batches by hand."""
    weights = [one for one in trained if one.system.way == "hand"][-1].program.state_dict()
    for one in trained:
        one.program.load_state_dict(weights)


def _trained(name: str, system: System, given: argparse.Namespace) -> Trained:
    return Trained(name, system, given.width, given.keep, by_rows=given.rows)


def grown_by(name: str, place: int, given: argparse.Namespace) -> Document:
    """MiB that one system's process has grown by, at its peak, in its first pass and in a later."""
    command = [
        *(sys.executable, "-m", "benchmarks.own.main", "--only", name, "--child", str(place)),
        *("--in-flight", ",".join(map(str, given.in_flight)), "--update", str(given.update)),
        *("--instances", str(given.instances), "--plain", str(given.plain)),
        *(() if given.width is None else ("--width", str(given.width))),
        *(() if given.keep is None else ("--keep", given.keep)),
        *(("--rows",) if given.rows else ()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    found: Document = json.loads(done.stdout)
    return found


def child(name: str, place: int, given: argparse.Namespace) -> None:
    """Train some passes in this process and tell by how much it has grown.

    The first pass has in it what comes once: modules are traced, and ways to compute them tried. In
    a later one there is all that the process has kept since it began, and what a pass takes.
    """
    one = _trained(name, systems_of(given.in_flight, given.update)[place], given)
    items = one.program.generate(given.plain if one.system.way == "plain" else given.instances, 1)
    prepared, warm = one.prepare(items), one.prepare(items[:2])
    one(warm)
    before, peaks = _resident(), []
    for _ in range(PASSES):
        # The peak that getrusage tells begins with that of the process this one was begun by.
        Path("/proc/self/clear_refs").write_text("5")
        one(prepared)
        peaks.append(max(_peak() - before, 0) / MIB)
    whole = _peak() / MIB  # the interpreter, and what it has imported, too
    print(json.dumps({"first_mib": peaks[0], "later_mib": peaks[-1], "whole_mib": whole}))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    """The most bytes that were resident since the peak was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def pairs_of(program: Document) -> list[tuple[str, str]]:
    """Which of ours is compared with which batching by hand: that of as many updates."""
    names = [s["name"] for s in program["systems"]]
    ours = [name for name in names if name.startswith("ours")]
    return [(name, f"hand {name.rpartition('/')[2]}") for name in ours]


def ratios(program: Document, one: str, other: str) -> Spread:
    """Of two systems, round by round."""
    runs = {s["name"]: s["runs"] for s in program["systems"]}
    spread = Spread.of([a["rate"] / b["rate"] for a, b in zip(runs[one], runs[other], strict=True)])
    assert spread is not None
    return spread


def memory_of(program: Document, one: str, other: str, when: str) -> str:
    """What two systems' processes grew by, ``first_mib`` or ``later_mib``; nothing where that was
    not measured."""
    grown = {s["name"]: s[when] for s in program["systems"] if when in s}
    if one not in grown or other not in grown:
        return ""
    return f"{grown[one]:.0f} to {grown[other]:.0f} MiB"


def markdown(document: Document) -> Iterator[str]:
    """Ratios of all programs, and a table of each."""
    first = document["programs"][0]
    pairs = pairs_of(first)
    if not first["systems"][0]["runs"]:
        yield from _memory_alone(document, pairs)
        return
    plain = next(s["name"] for s in first["systems"] if s["name"].startswith("plain"))
    heads = ["program", "looks", *(f"{a} : {b}" for a, b in pairs)]
    heads += [f"{a} : {plain}" for a, _ in pairs[:1]] + ["rows a firing"]
    memory = any("first_mib" in s for p in document["programs"] for s in p["systems"])
    whens = WHENS if memory else {}
    heads += [f"memory, {told}, {a} to {b}" for told in whens.values() for a, b in pairs]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for program in document["programs"]:
        cells = [f"{program['program']}: {program['told']}", "yes" if program["looks"] else "no"]
        cells += [_told(ratios(program, a, b)) for a, b in pairs]
        cells += [_told(ratios(program, pairs[0][0], plain), 1)]
        cells.append(
            ", ".join(f"{_rows(s['firings']):.0f}" for s in program["systems"] if "firings" in s)
        )
        cells += [memory_of(program, a, b, when) for when in whens for a, b in pairs]
        yield f"| {' | '.join(cells)} |"
    for program in document["programs"]:
        yield from _program(program)


def _memory_alone(document: Document, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The memory of all programs, where nothing else was measured."""
    heads = [f"{told}, {a} to {b}" for told in WHENS.values() for a, b in pairs]
    yield f"| {' | '.join(['program', *heads])} |"
    yield "|---" * (len(heads) + 1) + "|"
    for program in document["programs"]:
        cells = [memory_of(program, a, b, when) for when in WHENS for a, b in pairs]
        yield f"| {' | '.join([program['program'], *cells])} |"


def _program(program: Document) -> Iterator[str]:
    yield from ("", f"**{program['program']}**, {program['told']}; gradients agree within "
                f"{program['gradients_within']:.0e}", "")  # fmt: skip
    memory = any("first_mib" in s for s in program["systems"])
    heads = ["system", "instances/s, median", "min to max", "updates asked", "made"]
    heads += ["loss, first to last round", "firings", "rows a firing"] + [
        "MiB more, first pass",
        "later",
    ] * memory
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for system in program["systems"]:
        runs = system["runs"]
        spread = Spread.of([run["rate"] for run in runs])
        assert spread is not None
        most, least = runs[-1]["updates"]
        fired = system.get("firings")
        cells = [
            system["name"],
            f"{spread.median:,.0f}",
            f"{spread.low:,.0f} to {spread.high:,.0f}",
            str(runs[-1]["asked"]),
            str(most) if most == least else f"{least} to {most}",
            f"{runs[0]['loss']:.3f} to {runs[-1]['loss']:.3f}",
            "" if fired is None else f"{sum(n for n, _ in fired.values()):,}",
            "" if fired is None else f"{_rows(fired):.1f}",
        ]
        grown = [system.get(when) for when in WHENS] if memory else []
        cells += ["" if mib is None else f"{mib:.0f}" for mib in grown]
        yield f"| {' | '.join(cells)} |"


def _rows(fired: dict[str, list[int]]) -> float:
    return sum(rows for _, rows in fired.values()) / sum(n for n, _ in fired.values())


def _told(spread: Spread, digits: int = 2) -> str:
    low, high = f"{spread.low:.{digits}f}", f"{spread.high:.{digits}f}"
    return f"{spread.median:.{digits}f} ({low} to {high})"


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PROGRAMS))
    parser.add_argument("--in-flight", type=_numbers, default=[64, 256])
    parser.add_argument("--update", type=int, default=64, help="instances of an update")
    parser.add_argument("--rounds", type=int, default=5, help="0: of --memory alone")
    parser.add_argument("--instances", type=int, default=1024, help="of a round")
    parser.add_argument(
        "--warm", type=int, default=0, help="passes of each system before the rounds that count"
    )
    parser.add_argument("--alike", action="store_true", help="equal weights before each round")
    parser.add_argument("--plain", type=int, default=64, help="instances of a round one at a time")
    parser.add_argument("--width", type=int, help="of the rows; default: the program's")
    parser.add_argument("--keep", choices=["inputs", "activations", "auto"], help="of all nodes")
    parser.add_argument("--rows", action="store_true", help="count updates of ours in rows")
    parser.add_argument("--cpu", action="store_true", help="the processor's seconds")
    parser.add_argument("--memory", action="store_true", help="also memory, a process each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="a file of --json, instead of a run")
    parser.add_argument("--markdown", action="store_true", help="tables instead of lines")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    for name in given.only:
        if name not in PROGRAMS:
            parser.error(f"--only {name}: there are {', '.join(PROGRAMS)}")
    return given


def lines(program: dict[str, Any]) -> Iterator[str]:
    """A program in a few lines."""
    yield f"{program['program']} ({program['told']})"
    for a, b in pairs_of(program):
        grown = [memory_of(program, a, b, when) for when in WHENS]
        told = f"; grows by {grown[0]}, later {grown[1]}" if all(grown) else ""
        ratio = _told(ratios(program, a, b)) if program["systems"][0]["runs"] else "not measured"
        yield f"  {a:14} : {b:10} {ratio}{told}"


def main(words: Sequence[str] | None = None) -> None:
    """Run, or read what was run, and tell."""
    given = _arguments(words)
    torch.set_num_threads(1)
    if given.child is not None:
        child(given.only[0], given.child, given)
        return
    if given.read is not None:
        document = json.loads(given.read.read_text())
    else:
        told = "instances", "plain", "update", "rounds", "warm", "alike", "cpu", "rows"
        settings = {k: getattr(given, k) for k in told}
        document = {"benchmark": "own", "machine": machine(), "settings": settings, "programs": []}
        for name in given.only:
            document["programs"].append(measure(name, given))
            if given.json is not None:
                given.json.write_text(json.dumps(document, indent=1) + "\n")
            if not given.markdown:
                print("\n".join(lines(document["programs"][-1])), flush=True)
    if given.markdown:
        print("\n".join(markdown(document)))


if __name__ == "__main__":
    main()

"""What ``runtime="auto"`` expects of each way to share the work, beside what comes of it.

    python -m benchmarks.processes.expected --rounds 2

A process of its own lets the library choose, in a session that has long to go, and says what was
chosen and what was expected of each way. Then each of these ways is measured as `main` does, and
so is one worker; ratios are within rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import geartrain as gt
from benchmarks.processes.main import CASES, COPIES, elsewhere, session_of, spread

LONG = 1000
"""Epochs that the session believes it is to train, so that nothing is too short to begin with."""


@final
class Told(gt.AbstractInstrument):
    """Hears what was chosen, and asks for no more."""

    event: Any = None

    def on_chosen(self, event: Any) -> None:
        self.event = event
        raise Enough


class Enough(Exception):
    """It is known what was chosen."""


def choose(name: str, scale: float) -> Mapping[str, Any]:
    """What the library chooses for a case, in this process."""
    told = Told()
    session, train = session_of(name, "auto", None, scale, passes=LONG, instruments=[told])
    try:
        session.fit(train, epochs=LONG)
    except Enough:
        pass
    event = told.event
    return {"why": event.why, "expected": dict(event.expected)}


def system_of(way: str, name: str) -> tuple[str, str] | None:
    """The system of `main` that does what is called so with a case, and how the work is shared.

    None: a case whose parts are spread has none that shares all weights.
    """
    in_flight = "all" if way.endswith("and the instances in flight") else "each"
    shares = "share all weights" in way
    if shares and not CASES[name].shares:
        return None
    if COPIES in way:
        in_flight = way[way.index(COPIES) :]
    elif way.startswith("two ") and not shares:
        in_flight = "spread"
    if way.startswith("two worker processes"):
        return "two", in_flight
    if way.startswith("two workers as threads"):
        return "threads", in_flight
    return ("kernels" if "kernel threads" in way else "one"), in_flight


def lines(name: str, rounds: int, scale: float) -> Iterator[str]:
    """Rows of a table: case, way, whether it was chosen, expected, measured."""
    words = [sys.executable, "-m", "benchmarks.processes.expected", "--choose", name]
    done = subprocess.run(
        [*words, "--scale", str(scale)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    chosen = found["why"].removeprefix("runtime='auto': ")
    ways = {way: system_of(way, name) for way in found["expected"]}
    seen: dict[str, list[float]] = {way: [] for way in ways}
    for k in range(rounds):
        order = [*ways][k % len(ways) :] + [*ways][: k % len(ways)]
        rates = {
            way: elsewhere(name, of[0], None, scale, of[1])["instances_per_second"]
            for way in order
            if (of := ways[way]) is not None
        }
        for way, rate in rates.items():
            seen[way].append(rate / rates["one worker"])
    best = max(ways, key=lambda way: statistics.median(seen[way] or [0.0]))
    for way, expected in found["expected"].items():
        marks = "chosen" * (chosen.split(":")[0].split(",")[0] == way)
        marks += " fastest" * (way == best)
        came = spread(seen[way]) if seen[way] else "not measured"
        yield f"| `{name}` | {way} | {expected:.2f} | {came} | {marks.strip()} |"
    yield f"<!-- {chosen} -->"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="all, if none is named")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of the instances")
    parser.add_argument("--choose", choices=[*CASES], help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    if told.choose:
        print(json.dumps(choose(told.choose, told.scale)))
        return
    print("| case | way | expected | measured | |\n|---|---|---|---|---|")
    for name in told.cases or CASES:
        print("\n".join(lines(name, told.rounds, told.scale)), flush=True)


if __name__ == "__main__":
    main()

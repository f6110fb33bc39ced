"""Systems of `main` in turns of one pass each, by CPU seconds: what two cores could give at most.

    python -m benchmarks.processes.turns "lists by step" --systems one,two --turns 6

For a machine that others use, too: throughput is then what they leave, but what a process computes
it computes all the same. All systems stay alive, and train a pass each by turns, so that what makes
the machine slow for a while makes it slow for all. Of each pass: CPU seconds of the program and of
each worker, and how much of them is threads that move bytes; firings, messages, steps, staleness.

*At most* is what so many cores give if no worker ever waits: seconds of ``one`` by those of the
process with most to do, or by all of them on ``--cores``, whichever is more. Without ``one``, the
clock is compared with that of the system that is named first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import geartrain as gt
from benchmarks.processes.main import CASES, SYSTEMS, cpu_s, session_of, spread
from geartrain.engine.instrument import Worked

_READY = "ready"


@final
class Seen(gt.AbstractInstrument):
    """The last ``Worked``."""

    worked: Worked | None = None

    def on_worked(self, event: Worked) -> None:
        self.worked = event


@final
@dataclass(slots=True)
class Turn:
    """One pass of one system.

    Args:
        cpu_s: Of the program, and of each worker process.
        threads_s: Of them, in threads besides the one that computes.
        seconds: By the clock.
        waited_s: Of each worker, for something to do.
        firings, rows: Of all nodes, forward and backward.
        exchanges: Firings that took letters.
        updates: Of all parts.
        messages, nbytes: Between processes.
        staleness: Mean, of the part with most.
    """

    cpu_s: list[float]
    threads_s: list[float]
    seconds: float
    waited_s: list[float] = field(default_factory=list)
    firings: int = 0
    rows: int = 0
    exchanges: int = 0
    updates: int = 0
    messages: int = 0
    nbytes: int = 0
    staleness: float = 0.0


def others_s(pid: int) -> float:
    """CPU seconds of a process in threads other than its first."""
    first = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return cpu_s(pid) - (int(first[11]) + int(first[12])) / os.sysconf("SC_CLK_TCK")


def serve(name: str, system: str, scale: float, in_flight: str, passes: int) -> None:
    """Train a pass to get warm, and one more for each line that comes."""
    seen = Seen()
    session, train = session_of(
        name, system, None, scale, in_flight, passes=passes, instruments=[seen]
    )
    for epoch in range(1, passes + 1):
        pids = [os.getpid(), *getattr(session.runtime, "pids", ())]
        before = [(cpu_s(pid), others_s(pid)) for pid in pids]
        fit = session.fit(train, epochs=epoch)
        if epoch == 1:
            print(_READY, flush=True)
        else:
            after = [(cpu_s(pid), others_s(pid)) for pid in pids]
            print(json.dumps(_turn(before, after, fit, seen)), flush=True)
        if not sys.stdin.readline():
            break
    if close := getattr(session.runtime, "close", None):
        close()


def _turn(before: Sequence[Any], after: Sequence[Any], fit: gt.Fit, seen: Seen) -> dict[str, Any]:
    last, worked = fit.history[-1], seen.worked
    assert worked is not None
    fired = [n for n in worked.nodes if n.direction != "exchange"]
    return {
        "cpu_s": [b[0] - a[0] for a, b in zip(before, after, strict=True)],
        "threads_s": [b[1] - a[1] for a, b in zip(before, after, strict=True)],
        "seconds": last.seconds,
        "waited_s": list(worked.waiting),
        "firings": sum(n.firings for n in fired),
        "rows": sum(n.rows for n in fired),
        "exchanges": sum(n.firings for n in worked.nodes if n.direction == "exchange"),
        "updates": sum(last.updates.values()),
        "messages": sum(link.messages for link in worked.links),
        "nbytes": sum(link.bytes for link in worked.links),
        "staleness": max((age.mean for age in last.staleness.values()), default=0.0),
    }


def at_most(one: Turn, other: Turn, cores: int) -> float:
    """Times as fast as one worker that another system can be on so many cores."""
    return one.cpu_s[0] / max(*other.cpu_s, sum(other.cpu_s) / cores)


def in_turns(
    name: str, systems: Sequence[str], turns: int, scale: float, in_flight: str
) -> Mapping[str, list[Turn]]:
    """All systems on one case, pass by pass."""
    children: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, list[Turn]] = {system: [] for system in systems}
    try:
        for system in systems:
            asked = json.dumps([name, system, scale, in_flight, turns + 1])
            children[system] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.processes.turns", "--one", asked],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "2" if system == "kernels" else "1"},
            )
            _hear(children[system])  # one gets warm after the other
        for k in range(turns):
            for system in [*systems[k % len(systems) :], *systems[: k % len(systems)]]:
                child = children[system]
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
                found[system].append(Turn(**json.loads(_hear(child))))
    finally:
        for child in children.values():
            if child.stdin is not None:
                child.stdin.close()
            child.wait()
    return found


def _hear(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"{child.args!r} has ended; what it said is above")
    return line


def table(name: str, found: Mapping[str, Sequence[Turn]], cores: int) -> list[str]:
    """Lines of text: medians over turns."""
    lines = [name]
    name_of_base = "one" if "one" in found else next(iter(found))
    ones = found[name_of_base]
    for system, turns in found.items():
        mid = {
            key: statistics.median(getattr(t, key) for t in turns)
            for key in ("firings", "rows", "exchanges", "updates", "messages", "nbytes")
        }
        cpu = [statistics.median(x) for x in zip(*(t.cpu_s for t in turns), strict=True)]
        moves = [statistics.median(x) for x in zip(*(t.threads_s for t in turns), strict=True)]
        idle = [sum(t.waited_s) / (len(t.waited_s) or 1) / t.seconds for t in turns]
        line = f"  {system:8} CPU s {_told(cpu)} (threads {_told(moves)})"
        if system != name_of_base:
            if name_of_base == "one":
                bounds = [at_most(a, b, cores) for a, b in zip(ones, turns, strict=True)]
                line += f"  at most x {spread(bounds)}"
            clock = [a.seconds / b.seconds for a, b in zip(ones, turns, strict=True)]
            line += f"  by the clock x {spread(clock)}"
        lines.append(line)
        lines.append(
            f"           firings {mid['firings']:.0f} of {mid['rows'] / max(1, mid['firings']):.1f}"
            f" rows, {mid['exchanges']:.0f} of letters; {mid['updates']:.0f} updates; messages "
            f"{mid['messages']:.0f}, {mid['nbytes'] / 1e6:.1f} MB; waiting "
            f"{100 * statistics.median(idle):.0f} %; staleness "
            f"{statistics.median(t.staleness for t in turns):.1f}"
        )
    return lines


def _told(values: Sequence[float]) -> str:
    return ", ".join(f"{x:.2f}" for x in values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="all, if none is named")
    parser.add_argument("--systems", default="one,two", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the instances")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--in-flight", default="each", help="as of `main`")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    if told.one:
        serve(*json.loads(told.one))
        return
    for name in told.cases or CASES:
        found = in_turns(name, told.systems.split(","), told.turns, told.scale, told.in_flight)
        print("\n".join(table(name, found, told.cores)), flush=True)


if __name__ == "__main__":
    main()

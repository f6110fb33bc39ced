"""What the benchmarks that write a line of JSON for each thing measured have in common.

lines ─► stderr, as they come, without what is long
      └► appended to a file, from which the table is made: of all runs so far
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

from benchmarks.cluster.hosts import Link

Line = dict[str, Any]
LONG: Final = ("losses", "work")
"""What of a line people are not shown."""


def parser(about: str, name: str) -> argparse.ArgumentParser:
    """A command's arguments, those that all have; results go to ``results/NAME.jsonl``."""
    made = argparse.ArgumentParser(description=about.splitlines()[0])
    made.add_argument("--data", help="data folder; without it digits are drawn at random")
    path = Path(__file__).parent / "results" / f"{name}.jsonl"
    made.add_argument("--out", type=Path, default=path)
    made.add_argument("--table", action="store_true", help="print what is there, run nothing")
    return made


def add_links(
    parser: argparse.ArgumentParser, latency_ms: Sequence[float], mbit: Sequence[float]
) -> None:
    """Arguments for links; their defaults."""
    parser.add_argument(
        "--latency-ms", type=float, nargs="+", default=[*latency_ms], help="one way"
    )
    parser.add_argument("--mbit", type=float, nargs="+", default=[*mbit])


def links(given: argparse.Namespace) -> list[Link]:
    """All links that ``add_links`` was given, by latency and then by rate."""
    return [
        Link(latency_s=ms * 1e-3, bits_per_s=mbit * 1e6)
        for ms in given.latency_ms
        for mbit in given.mbit
    ]


def run(
    given: argparse.Namespace,
    lines: Callable[[argparse.Namespace], Iterable[Line]],
    table: Callable[[Sequence[Line]], Iterator[str]],
) -> None:
    """What a command does: measure, unless it is asked for the table alone; and the table."""
    if not given.table:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        for line in lines(given):
            told = {key: value for key, value in line.items() if key not in LONG}
            print(json.dumps(told), file=sys.stderr, flush=True)
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print("\n".join(table(read(given.out))))


@final
class Busy:
    """How much of this machine's cores everybody on it used inside a ``with``.

    Attributes:
        share: From 0 to 1, when it is over. Hosts of a bench share the cores: near 1 they wait for
            those, as hosts of their own would not.
    """

    share = 0.0

    def __enter__(self) -> Busy:
        self._began = _ticks()
        return self

    def __exit__(self, *_: object) -> None:
        idle, total = (b - a for a, b in zip(self._began, _ticks(), strict=True))
        self.share = 1.0 - idle / max(1, total)


def _ticks() -> tuple[int, int]:
    """Of the kernel's clock since it runs: in which cores had nothing to do, and all."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    ticks = [int(word) for word in words[1:9]]  # guests are in those of users
    return ticks[3] + ticks[4], sum(ticks)


def read(path: Path) -> list[Line]:
    """The lines so far; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

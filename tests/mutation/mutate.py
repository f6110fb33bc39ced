"""Put small faults into the source, one at a time, and see whether a test fails.

    python tests/mutation/mutate.py                        all faults of all folders: hours
    python tests/mutation/mutate.py --sample 40 --seed 1   some of them
    python tests/mutation/mutate.py src/geartrain/optim/delay.py

The tests run once with a source that tells which statements each of them runs (``--lines FILE``
keeps that for the next time, as long as neither source nor tests change). Each fault then has a process
of its own, forked from one that has imported torch, in a copy of the tree: it runs the tests that
run the line, the quickest first, until one fails. One that takes far too long has failed too.

A fault that no test sees is printed in the form of ``explained.txt``, the list of those that none
can see; if there is one that it does not hold, the exit status is 1. On systems that can fork.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from changes import RAN, Change, changes_of, explained, telling

ROOT = Path(__file__).parents[2]
FOLDERS = ("src/geartrain/optim", "src/geartrain/engine")
TESTS = ("tests/optim", "tests/engine", "tests/ir", "tests/train", "tests/runtime", "tests/oracle")
EXPLAINED = Path(__file__).with_name("explained.txt")
LONGEST = 5.0  # seconds; slower tests are left out, as each fault would wait for them
ENOUGH = 60.0  # seconds of tests for one fault
AT_IMPORT = ""  # instead of a test
OPTIONS = ["-q", "-p", "no:cacheprovider", "--no-header", "-x"]


class Lines:
    """A plugin: who runs which statements of the folders, and how long each test takes."""

    def __init__(self) -> None:
        self.tests: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._now = self.tests[AT_IMPORT]
        setattr(builtins, RAN, self._ran)

    def _ran(self, path: str, line: int) -> None:
        self._now.add((path, line))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = self.tests[item.nodeid]
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def write(self, path: Path) -> None:
        ours = ("torch.", "numpy.", "hypothesis.", "networkx.", "safetensors.", "rich.")
        found: dict[str, Any] = {"seconds": self.seconds, "lines": {}}
        found["modules"] = sorted(m for m in sys.modules if m.startswith(ours))
        for test, lines in self.tests.items():
            if test not in self.failed and self.seconds[test] <= LONGEST:
                for name, line in lines:
                    found["lines"].setdefault(name, {}).setdefault(line, []).append(test)
        found["failed"] = sorted(self.failed)
        path.write_text(json.dumps(found))


class Chosen:
    """A plugin: these tests alone, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._rank = {test: k for k, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._rank]
        items.sort(key=lambda item: self._rank[item.nodeid])


def forked(folder: Path, work: Callable[[], int], said: Path) -> int:
    """Run it in a process of its own, in a folder; the process."""
    if child := os.fork():
        return child
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = work()
    finally:
        os._exit(code)


def copied(into: Path) -> Path:
    """A copy of the tree."""
    away = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build")
    for name in ("src", "tests", "examples", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, into / name, ignore=away)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, into / name)
    return into


def traced(folder: Path, tests: Sequence[str], path: Path) -> dict[str, Any]:
    """Who runs which lines."""

    for name in every_file():
        (folder / name).write_text(telling((ROOT / name).read_text(), name))

    def work() -> int:
        plugin = Lines()
        options = [option for option in OPTIONS if option != "-x"]
        code = pytest.main([*options, "--timeout=600", *tests], plugins=[plugin])
        plugin.write(path)
        return int(code)

    said = folder / "said.txt"
    _, status = os.waitpid(forked(folder, work, said), 0)
    for name in every_file():
        shutil.copy(ROOT / name, folder / name)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"the tests do not run:\n{said.read_text()[-4000:]}")
    return json.loads(path.read_text())


def every_file() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for f in FOLDERS for p in (ROOT / f).glob("*.py"))


def fitting(change: Change, who: Mapping[str, Any]) -> list[str]:
    """Tests that run its statement: first those of its own module, then the quickest."""
    lines: dict[str, list[str]] = who["lines"].get(change.path, {})
    found = set(lines.get(str(change.first), ()))
    if change.at_import:
        found = {test for tests in lines.values() for test in tests}
    own, seconds, chosen, total = f"test_{Path(change.path).stem}", who["seconds"], [], 0.0
    for test in sorted(found, key=lambda test: (own not in test, seconds[test], test)):
        total += seconds[test]
        if chosen and total > ENOUGH:
            break
        chosen.append(test)
    return chosen


def begin(folder: Path, change: Change, tests: Sequence[str]) -> int:
    """Run the tests with the fault in the source of this copy; the process."""

    def work() -> int:
        sys.dont_write_bytecode = True
        path = folder / change.path
        path.write_text(change.applied((ROOT / change.path).read_text()))
        files = sorted({test.split("::")[0] for test in tests})
        try:
            return int(pytest.main([*OPTIONS, "--timeout=20", *files], plugins=[Chosen(tests)]))
        finally:
            shutil.copy(ROOT / change.path, path)

    return forked(folder, work, folder / "said.txt")


def verdicts(
    changes: Sequence[Change], who: Mapping[str, Any], folders: Sequence[Path]
) -> Iterator[tuple[Change, str]]:
    """Each with ``killed``, ``too long`` or ``survived``, as they come; one at a time a folder."""
    waiting, free = list(reversed(changes)), list(folders)
    running: dict[int, tuple[Change, Path, float]] = {}
    while waiting or running:
        while waiting and free:
            change, tests = waiting[-1], fitting(waiting.pop(), who)
            if not tests:
                yield change, "survived"
                continue
            folder = free.pop()
            limit = time.monotonic() + 30 + 5 * sum(who["seconds"][test] for test in tests)
            running[begin(folder, change, tests)] = (change, folder, limit)
        time.sleep(0.02)
        for child, (change, folder, limit) in list(running.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            late = not found and time.monotonic() > limit
            if not found and not late:
                continue
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if late:
                os.waitpid(child, 0)
            shutil.copy(ROOT / change.path, folder / change.path)
            del running[child]
            free.append(folder)
            code = -1 if late else os.waitstatus_to_exitcode(status)
            timed_out = late or "++ Timeout ++" in (folder / "said.txt").read_text()
            yield change, "too long" if timed_out else "killed" if code else "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", help="of the folders; all of them if none is given")
    parser.add_argument("--sample", type=int, help="try so many, drawn by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of tests")
    parser.add_argument("--lines", type=Path, help="keep, or find, who runs which lines here")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    files = [str(Path(file).resolve().relative_to(ROOT)) for file in given.files] or every_file()
    changes = [change for file in files for change in changes_of(ROOT, file)]
    made = len(changes)
    if given.sample is not None and given.sample < made:
        chosen = random.Random(given.seed).sample(range(made), given.sample)
        changes = [changes[k] for k in chosen]
    known = dict(explained(EXPLAINED.read_text()))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch, suppress(KeyboardInterrupt):
        folders = [copied(Path(scratch) / str(k)) for k in range(given.processes)]
        path = (given.lines or Path(scratch) / "lines.json").resolve()
        who = json.loads(path.read_text()) if path.exists() else traced(folders[0], given.tests, path)
        for name in who["modules"]:
            with suppress(ImportError):
                importlib.import_module(name)
        for change, verdict in verdicts(changes, who, folders):
            if verdict == "survived" and change.key in known:
                verdict = "explained"
            counts[change.path][verdict] += 1
            if verdict in ("survived", "too long"):
                n = len(fitting(change, who))
                print(f"\n# {verdict}: {change.path}:{change.span[0]}, {n} tests")
                print(f"{change.place}\n  - {change.before}\n  + {change.after}", flush=True)
    print()
    for file in sorted(counts):
        print(f"# {file}: {worded(counts[file])}")
    total = sum(counts.values(), Counter())
    seconds = time.monotonic() - begun
    print(f"# of {made} faults, {total.total()} tried in {seconds:.0f} s: {worded(total)}")
    return int(total["survived"] > 0)


def worded(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Put small faults into the source, one at a time, and see whether a test fails.

    python tests/mutation/mutate.py                        all faults of all folders: hours
    python tests/mutation/mutate.py --sample 40 --seed 1   some of them
    python tests/mutation/mutate.py src/geartrain/parts/late/delay.py
    python tests/mutation/mutate.py src/geartrain/native/heap.py --tests tests/native/test_pool.py

The tests run once with a source that tells which statements of the files each of them runs
(``--lines FILE`` keeps that for the next time, as long as neither source nor tests change). Each
fault then has a process of its own, forked from one that has imported torch, in a copy of the
tree: it runs tests that run the statement until one fails. One that takes far too long has failed
too.

A fault that no test sees is printed in the form of ``explained.txt``, the list of those that none
can see; if there is one that it does not hold, the exit status is 1. On systems that can fork.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from faults import TOLD, Fault, explained, faults_of, telling
from marks import FILE, Marks

ROOT = Path(__file__).parents[2]
FOLDERS = ("src/geartrain/parts", "src/geartrain/sharing", "src/geartrain/engine")
TESTS = (
    "tests/parts",
    "tests/sharing",
    "tests/engine",
    "tests/oracle",
    "tests/train",
    "tests/runtime",
)
EXPLAINED = Path(__file__).with_name("explained.txt")
LONGEST = 5.0  # seconds; slower tests are left out, as each fault would wait for them
ENOUGH = 60.0  # seconds of tests for one fault
OPTIONS = ["-q", "-p", "no:cacheprovider", "--no-header"]


class Lines:
    """A plugin: who runs which statements, and how long each test takes.

    Args:
        marks: Of the statements.
    """

    def __init__(self, marks: Marks) -> None:
        self.tests: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._marks = marks

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._marks.take()
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] |= self._marks.take()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def write(self, path: Path) -> None:
        theirs = ("torch.", "numpy.", "networkx.")  # not what pytest wants to rewrite
        lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for test, ran in self.tests.items():
            if test not in self.failed and self.seconds[test] <= LONGEST:
                for name, line in ran:
                    lines[name][line].append(test)
        modules = sorted(m for m in sys.modules if m.startswith(theirs))
        path.write_text(json.dumps({"seconds": self.seconds, "lines": lines, "modules": modules}))


class Chosen:
    """A plugin: these tests alone, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._rank = {test: k for k, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._rank]
        items.sort(key=lambda item: self._rank[item.nodeid])


def every_file() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for f in FOLDERS for p in (ROOT / f).rglob("*.py"))


def copied(into: Path) -> Path:
    """A copy of the tree."""
    away = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
    for name in ("src", "tests", "examples", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, into / name, ignore=away)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, into / name)
    return into


def forked(folder: Path, work: Callable[[], int]) -> int:
    """Do it in a process of its own, in a copy of the tree; the process."""
    if child := os.fork():
        return child
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        with (folder / "said.txt").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = work()
    except BaseException:
        (folder / "said.txt").write_text(traceback.format_exc())
        raise
    finally:
        os._exit(code)


def traced(folder: Path, files: Sequence[str], tests: Sequence[str], path: Path) -> None:
    """Find out who runs which statements of the files, in whatever process."""
    os.environ[FILE] = str(folder / "marks")
    Marks.make(folder / "marks", files)
    shutil.copy(Path(__file__).with_name(f"{TOLD}.py"), folder / "src")

    def work() -> int:
        plugin = Lines(Marks(folder / "marks"))
        code = pytest.main([*OPTIONS, "--timeout=600", *tests], plugins=[plugin])
        plugin.write(path)
        return int(code)

    for name in files:
        (folder / name).write_text(telling((ROOT / name).read_text(), name))
    _, status = os.waitpid(forked(folder, work), 0)
    for name in files:
        shutil.copy(ROOT / name, folder / name)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"the tests do not run:\n{(folder / 'said.txt').read_text()[-4000:]}")


def fitting(fault: Fault, who: Mapping[str, Any]) -> list[str]:
    """Tests that run its statement: first those of its own module, then the quickest."""
    lines: dict[str, list[str]] = who["lines"].get(fault.path, {})
    if fault.first is None:  # a class or the module
        found = {test for tests in lines.values() for test in tests}
    else:
        found = set(lines.get(str(fault.first), ()))
    own, seconds, chosen, total = f"test_{Path(fault.path).stem}", who["seconds"], [], 0.0
    for test in sorted(found, key=lambda test: (own not in test, seconds[test], test)):
        total += seconds[test]
        if chosen and total > ENOUGH:
            break
        chosen.append(test)
    return chosen


def begin(folder: Path, fault: Fault, tests: Sequence[str]) -> int:
    """Run the tests with the fault in the source of this copy; the process."""

    def work() -> int:
        sys.dont_write_bytecode = True
        files = sorted({test.split("::")[0] for test in tests})
        options = [*OPTIONS, "-x", "--timeout=30", *files]
        return int(pytest.main(options, plugins=[Chosen(tests)]))

    (folder / fault.path).write_text(fault.put_into((ROOT / fault.path).read_text()))
    return forked(folder, work)


def verdicts(
    faults: Sequence[Fault], who: Mapping[str, Any], folders: Sequence[Path]
) -> Iterator[tuple[Fault, str]]:
    """Each with what became of it, as they come; one at a time in each copy of the tree."""
    waiting, free = list(reversed(faults)), list(folders)
    running: dict[int, tuple[Fault, Path, float]] = {}
    while waiting or running:
        while waiting and free:
            fault, tests = waiting[-1], fitting(waiting.pop(), who)
            if not tests:
                yield fault, "never run"
                continue
            folder = free.pop()
            limit = time.monotonic() + 60 + 5 * sum(who["seconds"][test] for test in tests)
            running[begin(folder, fault, tests)] = (fault, folder, limit)
        time.sleep(0.02)
        for child, (fault, folder, limit) in list(running.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            late = not found and time.monotonic() > limit
            if not found and not late:
                continue
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if late:
                os.waitpid(child, 0)
            shutil.copy(ROOT / fault.path, folder / fault.path)
            del running[child]
            free.append(folder)
            if late or "+ Timeout +" in (folder / "said.txt").read_text():
                yield fault, "killed by the clock"
            else:
                yield fault, "killed" if os.waitstatus_to_exitcode(status) else "survived"


def require_sound(folder: Path, fault: Fault, who: Mapping[str, Any]) -> None:
    """A source without a fault must survive, or all verdicts are worth nothing."""
    line, column, _, _ = fault.span
    none = replace(fault, span=(line, column, line, column), text="")
    [(_, verdict)] = verdicts([none], who, [folder])
    if verdict != "survived":
        said = (folder / "said.txt").read_text()
        raise SystemExit(f"without any fault, tests fail ({verdict}):\n{said[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", help="of the source; all of some folders if none")
    parser.add_argument("--sample", type=int, help="try so many, drawn by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of tests")
    parser.add_argument("--lines", type=Path, help="keep, or find, who runs which statements here")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    files = [str(Path(file).resolve().relative_to(ROOT)) for file in given.files] or every_file()
    faults = [fault for file in files for fault in faults_of(ROOT, file)]
    made, known = len(faults), explained(EXPLAINED.read_text())
    if given.sample is not None:
        faults = random.Random(given.seed).sample(faults, min(given.sample, made))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch, suppress(KeyboardInterrupt):
        folders = [copied(Path(scratch) / str(k)) for k in range(given.processes)]
        path = (given.lines or Path(scratch) / "lines.json").resolve()
        if not path.exists():
            drawn = files if given.lines else sorted({fault.path for fault in faults})
            traced(folders[0], drawn, given.tests, path)
        who = json.loads(path.read_text())
        for name in who["modules"]:
            with suppress(ImportError):
                importlib.import_module(name)
        tried = next((fault for fault in faults if fitting(fault, who)), None)
        if tried is not None:
            require_sound(folders[0], tried, who)
        for fault, verdict in verdicts(faults, who, folders):
            place, before, after = fault.name
            if verdict in ("survived", "never run"):
                if fault.name in known:
                    verdict = "explained"
                else:
                    print(f"\n# {verdict}: {fault.path}:{fault.span[0]}")
                    print(f"{place}\n  - {before}\n  + {after}", flush=True)
            counts[fault.path][verdict] += 1
    print()
    for file in sorted(counts):
        print(f"# {file}: {_worded(counts[file])}")
    total, seconds = sum(counts.values(), Counter[str]()), time.monotonic() - begun
    print(f"# {made} faults, {total.total()} tried in {seconds:.0f} s: {_worded(total)}")
    return int(total["survived"] + total["never run"] > 0)


def _worded(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main())

"""Faults that are put into the mechanisms are noticed by the tests; and the faults themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from faults import explained, faults_of, telling  # noqa: E402
from marks import FILE, Marks  # noqa: E402

ROOT = HERE.parents[1]
SOURCE = '''\
LEAST = 3


class Counter:
    """Words."""

    def __init__(self, n: int = 7) -> None:
        self.n = n

    def count(self, found):
        """Words."""
        if not found:
            raise ValueError(f"{1 + 1} is too few")
        self.n += len(found) - LEAST
        found.clear()
        self.told(found)
        self.last = [x for x in found if 0 <= x < self.n]
        return None if self.last is None else self.last
'''


def test_faults_are_one_at_a_time_and_every_one_is_a_program(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SOURCE)
    found = faults_of(tmp_path, "small.py")
    for fault in found:
        compile(fault.put_into(SOURCE), "small.py", "exec")
    assert [(f.name[0].removeprefix("small"), *f.name[1:]) for f in found] == [
        ("", "LEAST = 3", "LEAST = 4"),
        (".Counter.count", "if not found:", "if (found):"),
        (".Counter.count", "self.n += len(found) - LEAST", "pass"),
        (
            ".Counter.count",
            "self.n += len(found) - LEAST",
            "self.n += len(found) - LEAST; self.n += len(found) - LEAST",
        ),
        (".Counter.count", "self.n += len(found) - LEAST", "self.n -= len(found) - LEAST"),
        (".Counter.count", "self.n += len(found) - LEAST", "self.n += len(found) + LEAST"),
        (".Counter.count", "found.clear()", "pass"),
        (".Counter.count", "self.told(found)", "pass"),
        (".Counter.count", "self.told(found)", "self.told(found); self.told(found)"),
        (".Counter.count", "self.last = [x for x in found if 0 <= x < self.n]", "pass"),
        *(
            (
                ".Counter.count",
                "self.last = [x for x in found if 0 <= x < self.n]",
                f"self.last = [x for x in found if {changed}]",
            )
            for changed in ("(not (0 <= x < self.n))", "0 < x < self.n", "0 <= x <= self.n")
        ),
        (
            ".Counter.count",
            "self.last = [x for x in found if 0 <= x < self.n]",
            "self.last = [x for x in found if 1 <= x < self.n]",
        ),
        (
            ".Counter.count",
            "return None if self.last is None else self.last",
            "return None if self.last is not None else self.last",
        ),
    ]


def test_a_source_that_tells_what_runs_does_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f'"""Words."""\n\nfrom __future__ import annotations\n\n{SOURCE}'
    Marks.make(tmp_path / "marks", ["other.py", "small.py"])
    monkeypatch.setenv(FILE, str(tmp_path / "marks"))
    marks, space = Marks(tmp_path / "marks"), dict[str, Any]()
    exec(telling(source.replace("self.told(found)", "found += [1, 9]"), "small.py"), space)
    assert marks.take() == set()
    counter, found = space["Counter"](2), [5, 5]
    assert counter.count(found) == [] and counter.n == 1
    ran = marks.take()
    assert ran >= {("small.py", 4 + line) for line in (8, 12, 14, 15, 16, 17, 18)}
    assert ("small.py", 4 + 13) not in ran and not marks.take()


def test_who_has_run_a_statement_is_known_whatever_process_it_was(tmp_path: Path) -> None:
    Marks.make(tmp_path / "marks", ["a.py", "b.py"])
    marks = Marks(tmp_path / "marks")
    script = "from marks import a_statement_runs as tell; tell('b.py', 3); tell('a.py', 7)"
    environment = {**os.environ, FILE: str(tmp_path / "marks"), "PYTHONPATH": str(HERE)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert marks.take() == {("b.py", 3), ("a.py", 7)}


def test_what_no_test_can_see_is_explained_and_there() -> None:
    known = explained((HERE / "explained.txt").read_text())
    stems = {place.partition(".")[0] for place, _, _ in known}
    files = [p for p in (ROOT / "src").rglob("*.py") if p.stem in stems]
    there = {fault.name for p in files for fault in faults_of(ROOT, str(p.relative_to(ROOT)))}
    assert not known.keys() - there, "the source has changed: look at these anew"


def test_an_explanation_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="and why"):
        explained("a.b\n  - x = 1\n  + pass\n")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_drawn_by_chance_are_noticed() -> None:
    command = [sys.executable, "tests/mutation/mutate.py", "--sample", "10", "--seed", "1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"

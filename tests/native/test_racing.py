"""Threads on kernels that watch for races: none in training, and one that is made is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from geartrain.native import build

PROGRAM = Path(__file__).with_name("racing.py")
ROOT = PROGRAM.parents[2]
COMPILE = """
import os
import geartrain
from geartrain.native import build, library
print(os.pathsep.join(map(str, build.shared_objects(library._linked(), 1500, again=True))))
"""
# The interpreter and torch do not tell the sanitizer of all that they order; our kernels do.
OPTIONS = "ignore_noninstrumented_modules=1 exitcode=66"
FOUND = 66


def ended(command: list[str], **more: str) -> tuple[int, str]:
    """Exit status and what it said."""
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path, "GEARTRAIN_NATIVE": "1"} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip()


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """gcc's thread sanitizer, to be loaded before all else."""
    _, found = ended(["gcc", "-print-file-name=libtsan.so"])
    if not Path(found).is_file():
        pytest.skip("needs gcc with its thread sanitizer (libtsan)")
    return found


@pytest.fixture(scope="module")
def watching() -> str:
    """Kernels with the sanitizer, compiled into a cache of their own; kept for the next time."""
    cache = build.cache_directory() / "watched"
    status, made = ended(
        [sys.executable, "-c", COMPILE], CC="gcc -g1 -fsanitize=thread", GEARTRAIN_CACHE=str(cache)
    )
    assert status == 0, made[-3000:]
    return made.splitlines()[-1]


def run(what: str, sanitizer: str, watching: str) -> tuple[int, str]:
    command = [sys.executable, str(PROGRAM), watching, what]
    return ended(command, LD_PRELOAD=sanitizer, TSAN_OPTIONS=OPTIONS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_as_threads_race_nowhere_in_kernels(sanitizer: str, watching: str) -> None:
    status, said = run("train", sanitizer, watching)
    assert status == 0, said[-3000:]
    assert said.count("trained, loss") == 16
    for asked in ("backwards", "forwards", "ragged", "sums by id"):
        assert re.search(rf"in C: .*\d+ {asked}", said), said[-300:]
    assert "data race" not in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_race_that_is_made_is_found(sanitizer: str, watching: str) -> None:
    status, said = run("race", sanitizer, watching)
    assert status == FOUND
    assert "data race" in said and "add_to_float" in said, said[-3000:]

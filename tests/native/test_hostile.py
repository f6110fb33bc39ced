"""Kernels that watch themselves: on what is sound, and on what ``hostile.py`` means harm with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from geartrain.native import build, library
from tests.rigs.programs import Nursery, Program

PROGRAM = Path(__file__).with_name("hostile.py")
WATCHING = "gcc -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
CASES = 540
FORKED = """
import runpy, sys
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# A process without the sanitizer cannot load such kernels, one with it had better not compile them.
COMPILE = """
import os
import geartrain
from geartrain.native import build, library
build.FLAGS = tuple(flag.replace("-O3", "-O1") for flag in build.FLAGS)  # in a fourth of the time
print(os.pathsep.join(map(str, build.shared_objects(library._linked(), 1500, again=True))))
"""


def output_of(command: list[str], **more: str) -> str:
    """What a command says, whatever becomes of it."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path, "GEARTRAIN_NATIVE": "1"} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout.strip()


def run(*arguments: object, **more: str) -> None:
    """All cases are right or refused, and nothing has ended the program."""
    said = output_of([sys.executable, str(PROGRAM), *map(str, arguments)], **more).splitlines()
    wrong = [line for line in said if line.startswith("WRONG")]
    assert said[-1].endswith(", 0 wrong"), "\n".join([*wrong, *said[-60:]])
    for asked in ("forwards", "backwards", "ragged", "products of sums"):
        assert re.search(rf"\d+ {asked}", said[-2]), said[-2]


def test_a_few_cases_are_right_or_refused(
    native: library.Library, nursery: Nursery, tmp_path: Path
) -> None:
    files = os.pathsep.join(map(str, native.paths))
    program = Program(nursery, tmp_path / "cases", FORKED, PROGRAM, 0, 0, 36, files)
    try:
        status, errors = program.end()
    finally:
        program.close()
    assert status == 0, errors
    assert program.lines[-1].endswith(", 0 wrong"), "\n".join(program.lines[-60:])


@pytest.fixture(scope="module")
def preloaded() -> str:
    """What is to be loaded before all else: gcc's address sanitizer, and whose calls it watches."""
    names = ("libasan.so", "libstdc++.so")
    found = [output_of(["gcc", f"-print-file-name={name}"]) for name in names]
    if not all(Path(path).is_file() for path in found):
        pytest.skip("needs gcc with its address sanitizer (libasan)")
    return " ".join(found)


@pytest.fixture(scope="module")
def watching() -> str:
    """Kernels with sanitizers, compiled into a cache of their own; it is kept for the next time."""
    cache = build.cache_directory() / "sanitized"
    made = output_of([sys.executable, "-c", COMPILE], CC=WATCHING, GEARTRAIN_CACHE=str(cache))
    return made.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_read_or_written_out_of_bounds(seed: int, preloaded: str, watching: str) -> None:
    run(seed, 0, CASES, watching, LD_PRELOAD=preloaded, ASAN_OPTIONS="detect_leaks=0")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [
        *(f"native/test_{name}" for name in ("cells", "losses", "maps", "rows", "steps")),
        *("native/test_transfer", "native/test_twins", "whole/test_operations"),
        *("native/test_attention", "native/test_sums", "whole/test_native_graph"),
        *("graph/test_drawing_calls", "derived/test_draws"),
        *("derived/test_integers", "derived/test_pieces", "derived/test_reckoning"),
        *("graph/test_native_calls", "derived/test_fold", "derived/test_fused"),
        "derived/test_ragged",
        *("graph/test_charts", "native/test_as_torch", "derived/test_ragged_along"),
        "derived/test_ragged_looked_up",
    ],
)
def test_nothing_is_wrong_in_what_is_sound(name: str, preloaded: str, watching: str) -> None:
    program, tests = PROGRAM.with_name("watched.py"), PROGRAM.parents[1] / f"{name}.py"
    said = output_of(
        [sys.executable, str(program), watching, "-q", "-p", "no:cacheprovider", str(tests)],
        LD_PRELOAD=preloaded,
        ASAN_OPTIONS="detect_leaks=0",
    )
    assert re.search(r"^\d+ passed", said.splitlines()[-1]), said[-3000:]

"""What the package imports from elsewhere is what it says that it needs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.rigs.sources import source

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

IMPORTED_AS = {"pyzmq": "zmq"}  # where the two differ


def names(requirements: list[str]) -> set[str]:
    found = (re.split(r"[<>=~!\[; ]", each)[0].replace("-", "_").lower() for each in requirements)
    return {IMPORTED_AS.get(name, name) for name in found}


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Names of packages, and whether they are imported with the file, not later or for types."""
    for node, at_once in source(path).imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], at_once
        elif node.module and not node.level:
            yield node.module.partition(".")[0], at_once


def outside(folder: Path) -> set[tuple[str, bool]]:
    own = {path.name for path in (ROOT / "src").iterdir()} | set(sys.stdlib_module_names)
    return {
        (name, at_once)
        for path in folder.rglob("*.py")
        for name, at_once in imported(path)
        if name not in own
    }


def test_what_is_imported_is_declared() -> None:
    needed = names(PROJECT["dependencies"])
    extras = {name for each in PROJECT["optional-dependencies"].values() for name in names(each)}
    at_once = {name for name, at_once in outside(ROOT / "src" / "geartrain") if at_once}
    assert {"torch", "numpy", "typer"} <= at_once <= needed
    assert {name for name, _ in outside(ROOT / "src")} <= needed | extras

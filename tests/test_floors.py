"""Imports point down, and the three floors that decide neither wait nor touch the outside.

    cli > recipes, baselines, train, data > observe | nn > runtime > engine > optim > ir > native,
    files > errors, schema, bounds

A floor may import floors below it and itself. On the sixth, recipes may use train and data,
baselines may use recipes and data, and train may use data; observe and nn do not know each other.
``geartrain/__init__.py`` stands on top, so nothing inside the package imports ``geartrain`` itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "geartrain"
FLOORS = {
    "errors": 0,
    "schema": 0,
    "bounds": 0,
    "files": 1,
    "native": 1,
    "ir": 2,
    "optim": 3,
    "engine": 4,
    "runtime": 5,
}
FLOORS |= {"observe": 6, "nn": 6}
FLOORS |= {"data": 7, "train": 7, "recipes": 7, "baselines": 7}
FLOORS |= {"cli": 8, "__main__": 9, "__init__": 9}
SIDEWAYS = {("recipes", "train"), ("recipes", "data"), ("train", "data")}
SIDEWAYS |= {("baselines", "recipes"), ("baselines", "data")}
PURE = {"ir", "optim", "engine"}
OUTSIDE = {"threading", "_thread", "concurrent", "asyncio", "multiprocessing", "subprocess"}
OUTSIDE |= {"time", "datetime", "socket"}
OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}


def violations(root: Path) -> list[str]:
    """Every broken rule below ``root`` (a ``geartrain`` folder) as ``file:line: what``."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        floor = inside.parts[0].removesuffix(".py")
        if floor not in FLOORS:
            found.append(f"{inside.as_posix()}:1: {floor} has no floor: add it to FLOORS")
            continue
        home = ["geartrain", *inside.parent.parts]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for problem in broken_rules(node, floor, home):
                found.append(f"{inside.as_posix()}:{node.lineno}: {problem}")
    return found


def broken_rules(node: ast.AST, floor: str, home: list[str]) -> Iterator[str]:
    for name in imported(node, home):
        package, *rest = name.split(".")
        if package == "geartrain":
            if not may_import(floor, rest[0] if rest else "__init__"):
                yield f"{floor} imports {name}, which is not below it"
        elif floor in PURE and OUTSIDE & {package, *rest}:
            yield f"{floor} imports {name}: leave waiting, clocks and wires to runtime"
    if floor in PURE and isinstance(node, ast.Call):
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if called in OPENERS:
            yield f"{floor} calls {called}(): leave files to the floors above"


def imported(node: ast.AST, home: list[str]) -> list[str]:
    """The dotted names that an import statement in package ``home`` asks for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = home[: len(home) - node.level + 1] if node.level else []
        base = base + node.module.split(".") if node.module else base
        return [".".join([*base, alias.name]) for alias in node.names]
    return []


def may_import(floor: str, target: str) -> bool:
    if target.startswith("__"):
        return False
    below = FLOORS.get(target, len(FLOORS)) < FLOORS[floor]
    return below or floor == target or (floor, target) in SIDEWAYS


def test_imports_point_down_and_the_floors_that_decide_touch_nothing_outside() -> None:
    assert len(list(ROOT.rglob("*.py"))) > 5, f"{ROOT} is not the package"
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "culprit"),
    [
        ("ir/a.py", "from geartrain.engine.mailbox import Mailbox", "geartrain.engine.mailbox"),
        ("ir/a.py", "from geartrain import optim", "geartrain.optim"),
        ("ir/a.py", "from ..runtime import threads", "geartrain.runtime.threads"),
        ("ir/deep/a.py", "def f():\n    from ...cli import main", "geartrain.cli.main"),
        ("errors.py", "import geartrain.ir", "geartrain.ir"),
        ("native/a.py", "from geartrain.ir import rows", "geartrain.ir.rows"),
        ("nn/a.py", "import geartrain.observe.trace", "geartrain.observe.trace"),
        ("observe/a.py", "from geartrain.nn import Tree", "geartrain.nn.Tree"),
        ("data/a.py", "import geartrain.recipes", "geartrain.recipes"),
        ("cli/a.py", "import geartrain as gt", "geartrain"),
        ("cli/a.py", "from geartrain import Graph", "geartrain.Graph"),
        ("cli/a.py", "from geartrain import __version__", "geartrain.__version__"),
        ("engine/a.py", "from time import perf_counter", "time.perf_counter"),
        ("optim/a.py", "import threading", "threading"),
        ("ir/a.py", "import torch.multiprocessing as mp", "torch.multiprocessing"),
        ("ir/a.py", "import socket", "socket"),
        ("ir/a.py", "text = open('x')", "open()"),
        ("engine/a.py", "from pathlib import Path\nPath('x').write_text('y')", "write_text()"),
        ("attic/a.py", "x = 1", "attic"),
    ],
)
def test_a_broken_rule_is_found_and_named(
    tmp_path: Path, file: str, line: str, culprit: str
) -> None:
    write(tmp_path, file, line)
    (problem,) = violations(tmp_path)
    assert problem.startswith(f"{file}:")
    assert f" {culprit}" in problem


def test_what_the_rules_allow_is_not_reported(tmp_path: Path) -> None:
    write(tmp_path, "__init__.py", "from geartrain.cli.main import app\nfrom .ir import node")
    write(tmp_path, "__main__.py", "from geartrain.cli.main import app")
    write(tmp_path, "ir/a.py", "import torch\nfrom . import node\nfrom ..errors import GraphError")
    write(tmp_path, "runtime/a.py", "import threading, time\nlog = open('x')")
    write(tmp_path, "recipes/a.py", "from geartrain.data import sst\nimport geartrain.train.config")
    write(tmp_path, "cli/main.py", "from geartrain import recipes\nimport geartrain.errors")
    assert violations(tmp_path) == []


def write(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")

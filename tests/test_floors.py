"""Imports point down from room to room, and files do not import one another in circles.

    __main__, __init__, the exports of nn
    cli > recipes, train, data > observe > pipeline > whole > nn > runtime > engine >
    sharing > parts > graph > derived > nodes > transport > frames > native >
    codec, device, files, kinds > errors, schema, bounds

A room may import rooms below it and itself; recipes may use train and data, train may use
data. What is imported for its types alone counts as well. The rooms
that decide neither wait nor touch the outside. ``geartrain/__init__.py`` stands on top, so nothing
inside the package imports ``geartrain`` itself, and what serves one family of models (``whole``) is
known to recipes and exports alone. What ours is compared with, ``geartrain_baselines``, is
a package on top: the command ``compare`` fetches it when it is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.sources import Source, source

ROOT = Path(__file__).parents[1] / "src" / "geartrain"
ORDER = (
    ("errors", "schema", "bounds"),
    ("codec", "device", "files", "garbage", "generators", "kinds"),
    ("native",),
    ("frames",),
    ("transport",),
    ("nodes",),
    ("derived",),
    ("graph",),
    ("parts",),
    ("sharing",),
    ("engine",),
    ("runtime",),
    ("nn",),
    ("whole",),
    ("pipeline",),
    ("observe",),
    ("data", "train", "recipes"),
    ("cli",),
    ("__main__", "__init__"),
)
FLOORS = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
SIDEWAYS = {("recipes", "train"), ("recipes", "data"), ("train", "data")}
EXPORTS = {"nn/__init__.py"}  # nobody inside imports what they export
ABOVE = {"geartrain_baselines": {"cli/main.py"}}  # packages on top, and who asks for them
HIDDEN = {"whole": {"recipes", "whole"}}
PURE = {"frames", "nodes", "graph", "parts", "sharing", "engine"}
OUTSIDE = {"threading", "_thread", "concurrent", "asyncio", "multiprocessing", "subprocess"}
OUTSIDE |= {"time", "datetime", "socket"}
OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}


def violations(root: Path) -> list[str]:
    """Every broken rule below ``root`` (a ``geartrain`` folder) as ``file:line: what``."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        room = inside.parts[0].removesuffix(".py")
        if room not in FLOORS:
            found.append(f"{inside.as_posix()}:1: {room} has no floor: add it to ORDER")
            continue
        home = ["geartrain", *inside.parent.parts]
        floor = "__init__" if inside.as_posix() in EXPORTS else room
        above = {package for package, asking in ABOVE.items() if inside.as_posix() not in asking}
        for line, problem in sorted(broken_rules(source(path), floor, home, above)):
            found.append(f"{inside.as_posix()}:{line}: {problem}")
    return found


def broken_rules(
    file: Source, floor: str, home: list[str], above: set[str]
) -> Iterator[tuple[int, str]]:
    """Lines, and what is wrong in them."""
    for node, _ in file.imports:
        for name in imported(node, home):
            package, *rest = name.split(".")
            if package == "geartrain":
                if not may_import(floor, rest[0] if rest else "__init__"):
                    yield node.lineno, f"{floor} imports {name}, which is not below it"
            elif package in above:
                yield node.lineno, f"{floor} imports {name}, a package that stands above it"
            elif floor in PURE and OUTSIDE & {package, *rest}:
                told = f"{floor} imports {name}: leave waiting, clocks and wires to runtime"
                yield node.lineno, told
    for called, line in file.calls if floor in PURE else ():
        if called in OPENERS:
            yield line, f"{floor} calls {called}(): leave files to the floors above"


def imported(node: ast.Import | ast.ImportFrom, home: list[str]) -> list[str]:
    """The dotted names that an import statement in package ``home`` asks for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = home[: len(home) - node.level + 1] if node.level else []
    base = base + node.module.split(".") if node.module else base
    return [".".join([*base, alias.name]) for alias in node.names]


def may_import(floor: str, target: str) -> bool:
    if target.startswith("__") or floor not in HIDDEN.get(target, {floor, "__init__"}) | {
        "__init__"
    }:
        return False
    below = FLOORS.get(target, len(FLOORS)) < FLOORS[floor]
    return below or floor == target or (floor, target) in SIDEWAYS


def circles(root: Path) -> list[list[str]]:
    """Files that import one another, the exports aside, as sorted lists of their names."""
    files = {
        ".".join([root.name, *path.relative_to(root).with_suffix("").parts]): path
        for path in root.rglob("*.py")
        if path.name != "__init__.py"
    }
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        home = name.split(".")[:-1]
        asked = [each for node, _ in source(path).imports for each in imported(node, home)]
        edges[name] = {each for each in asked if each in files}
        edges[name] |= {each.rpartition(".")[0] for each in asked} & files.keys()
    reached = {name: _reached(name, edges) for name in edges}
    rings = {
        frozenset({name} | {other for other in reached[name] if name in reached[other]})
        for name in edges
        if name in reached[name]
    }
    return sorted(sorted(ring) for ring in rings)


def _reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    open_ = [start]
    while open_:
        for other in edges[open_.pop()] - found:
            found.add(other)
            open_.append(other)
    return found


def test_imports_point_down_and_the_rooms_that_decide_touch_nothing_outside() -> None:
    assert len(list(ROOT.rglob("*.py"))) > 5, f"{ROOT} is not the package"
    found = violations(ROOT)
    assert not found, "\n".join([*found, "rooms: Where does my line go? in CONTRIBUTING.md"])


def test_files_do_not_import_one_another_in_circles() -> None:
    assert circles(ROOT) == []
    assert circles(ROOT.with_name("geartrain_baselines")) == []


def test_a_circle_is_found_and_named(tmp_path: Path) -> None:
    root = tmp_path / "geartrain"
    write(root, "nodes/a.py", "from geartrain.nodes.b import B")
    write(root, "nodes/b.py", "def f():\n    from geartrain.nodes import c")
    write(root, "nodes/c.py", "if TYPE_CHECKING:\n    from .a import A")
    write(root, "nodes/d.py", "from geartrain.nodes.a import A")
    assert circles(root) == [[f"geartrain.nodes.{name}" for name in "abc"]]


@pytest.mark.parametrize(
    ("file", "line", "culprit"),
    [
        ("nodes/a.py", "from geartrain.engine.mailbox import Mailbox", "geartrain.engine.mailbox"),
        ("nodes/a.py", "from geartrain import parts", "geartrain.parts"),
        ("graph/a.py", "from ..runtime import threads", "geartrain.runtime.threads"),
        ("parts/late/a.py", "def f():\n    from ...cli import main", "geartrain.cli.main"),
        ("errors.py", "import geartrain.frames", "geartrain.frames"),
        ("native/a.py", "from geartrain.frames import rows", "geartrain.frames.rows"),
        ("nn/a.py", "import geartrain.observe.trace", "geartrain.observe.trace"),
        ("nn/a.py", "from geartrain.whole.tree.module import X", "geartrain.whole.tree.module"),
        ("train/a.py", "from geartrain.whole.tree.module import X", "geartrain.whole.tree.module"),
        ("engine/a.py", "from geartrain.nn import Tree", "geartrain.nn.Tree"),
        ("data/a.py", "import geartrain.recipes", "geartrain.recipes"),
        ("cli/a.py", "from geartrain_baselines import PEERS", "geartrain_baselines.PEERS"),
        ("recipes/a.py", "import geartrain_baselines.babi", "geartrain_baselines.babi"),
        ("cli/a.py", "import geartrain as gt", "geartrain"),
        ("cli/a.py", "from geartrain import Graph", "geartrain.Graph"),
        ("cli/a.py", "from geartrain import __version__", "geartrain.__version__"),
        ("engine/a.py", "from time import perf_counter", "time.perf_counter"),
        ("parts/a.py", "import threading", "threading"),
        ("sharing/a.py", "import torch.multiprocessing as mp", "torch.multiprocessing"),
        ("frames/a.py", "import socket", "socket"),
        ("nodes/a.py", "text = open('x')", "open()"),
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
    write(tmp_path, "__init__.py", "from geartrain.cli.main import app\nfrom .nodes import node")
    write(tmp_path, "__main__.py", "from geartrain.cli.main import app")
    write(tmp_path, "nn/__init__.py", "from geartrain.whole.tree.module import WholeTree")
    write(
        tmp_path, "nodes/a.py", "import torch\nfrom . import node\nfrom ..errors import GraphError"
    )
    write(tmp_path, "runtime/a.py", "import threading, time\nlog = open('x')")
    write(tmp_path, "recipes/a.py", "from geartrain.data import sst\nimport geartrain.whole.tree")
    write(tmp_path, "cli/main.py", "import geartrain_baselines\nimport geartrain.errors")
    assert violations(tmp_path) == []


def write(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")

"""What files of Python import, call and define, for tests of the sources; a file is read once.

Syntax trees of the whole package are millions of objects, so what is asked for is taken out of
them, and they go.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass
class Source:
    """Of one file.

    Args:
        imports: Import statements, wherever they stand, and whether one is on the outermost level,
            so that it is run with the file.
        calls: Last names of what is called, with the line.
        classes: Names of the classes.
    """

    imports: list[tuple[ast.Import | ast.ImportFrom, bool]] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)


@cache
def source(path: Path) -> Source:
    """What a file has."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    outermost, found = {id(node) for node in tree.body}, Source()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append((node, id(node) in outermost))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            found.calls.append((name, node.lineno))
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
    return found

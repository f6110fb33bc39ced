"""A class has a name of its own: whoever looks for a word finds one class."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.rigs.sources import source

SOURCE = Path(__file__).parents[1] / "src"


def classes(root: Path) -> dict[str, list[str]]:
    """Every class below ``root`` and the files that define one of its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for name in source(path).classes:
            found[name].append(path.relative_to(root).as_posix())
    return found


def test_no_two_classes_have_one_name() -> None:
    found = classes(SOURCE)
    assert len(found) > 100, f"{SOURCE} has no classes"
    for name, files in found.items():
        assert len(files) == 1, f"{name} is in {' and in '.join(files)}: give one another name"


def test_a_name_that_is_used_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A: ...\nclass B: ...", encoding="utf-8")
    (tmp_path / "b.py").write_text("def f():\n    class A: ...", encoding="utf-8")
    assert classes(tmp_path) == {"A": ["a.py", "b.py"], "B": ["a.py"]}

"""Every ``python`` block of the README and of docs/ runs, in order, file by file.

Blocks of one file share their names, as a reader pastes them into one session. Shell, output and
drawings stand in fences of another language.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text("utf-8")
    return [
        Block(found[1], text.count("\n", 0, found.start(2)) + 1, found[2])
        for found in FENCE.finditer(text)
    ]


def named(path: Path) -> str:
    return path.name


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [b for b in blocks_of(path) if b.language == "python"]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": path.name}
    for block in blocks:
        # Blank lines in front, so that a traceback shows the line of the document.
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, str(path), "exec"), names)  # our own documents


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_block_says_what_it_is(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(blocks_of(path))
    assert [b.line for b in blocks_of(path) if not b.language] == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_links_into_the_tree_lead_somewhere(path: Path) -> None:
    links = [link for link in LINK.findall(path.read_text("utf-8")) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_readme_names_the_commands_of_the_makefile() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in ("setup", "demo", "test", "lint"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_documents_hold_code_to_run() -> None:
    held = {path.name for path in FILES if any(b.language == "python" for b in blocks_of(path))}
    assert {"README.md", "guide.md"} <= held

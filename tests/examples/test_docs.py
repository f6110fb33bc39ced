"""Every ``python`` block of the README and of docs/ runs, in order, page by page.

Blocks of one page share their names, as a reader pastes them into one session; no page needs what
another has made. Shell, output and drawings stand in fences of another language.
"""

from __future__ import annotations

import re
from inspect import getmembers, isfunction
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from typer.main import get_command

import geartrain
from geartrain.cli.main import app
from geartrain.graph.verbs import AbstractStream
from geartrain.recipes import RECIPES

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
SOURCES = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "Makefile"]


class Block(NamedTuple):
    language: str
    line: int
    text: str


def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def blocks_of(path: Path) -> list[Block]:
    text = text_of(path)
    return [
        Block(found[1], text.count("\n", 0, found.start(2)) + 1, found[2])
        for found in FENCE.finditer(text)
    ]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors_of(path: Path) -> set[str]:
    """What MkDocs and code hosts make of the headings: words in lower case, joined by hyphens."""
    headings = HEADING.findall(FENCE.sub("", text_of(path)))
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


WITH_CODE = [path for path in FILES if any(b.language == "python" for b in blocks_of(path))]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("path", WITH_CODE, ids=named)
def test_the_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [b for b in blocks_of(path) if b.language == "python"]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": path.name}
    for block in blocks:
        # Blank lines in front, so that a traceback shows the line of the document.
        source = "\n" * (block.line - 1) + block.text
        # What this file imports from __future__ is not what a reader has.
        code = compile(source, str(path), "exec", dont_inherit=True)
        exec(code, names)  # our own documents


def test_pages_that_teach_hold_code_to_run() -> None:
    without_code = {"index", "devices", "command-line"}
    for folder in ("tutorial", "how-to"):
        pages = set((ROOT / "docs" / folder).glob("*.md"))
        assert {p.stem for p in pages - set(WITH_CODE)} <= without_code
        assert pages & set(WITH_CODE)
    assert {ROOT / "README.md", ROOT / "docs" / "index.md"} <= set(WITH_CODE)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_block_says_what_it_is(path: Path) -> None:
    assert len(re.findall(r"^```", text_of(path), re.MULTILINE)) == 2 * len(blocks_of(path))
    assert [b.line for b in blocks_of(path) if not b.language] == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_links_into_the_tree_lead_somewhere(path: Path) -> None:
    lost = []
    for target, anchor in LINK.findall(FENCE.sub("", text_of(path))):
        if "://" in target or (not target and not anchor):
            continue
        there = path.parent / target if target else path
        known = anchors_of(there) if anchor and there.suffix == ".md" and there.exists() else None
        if not there.exists() or (known is not None and anchor not in known):
            lost.append((target, anchor))
    assert lost == []


MADE = re.compile(r"benchmarks/(peers/README|\w+/results/.*)\.md")
"""What programs have written, in part or whole."""


@pytest.mark.parametrize("path", [p for p in FILES if not MADE.fullmatch(named(p))], ids=named)
def test_lines_have_120_characters_at_most(path: Path) -> None:
    """But for rows of tables, pictures, and blocks of code."""
    lines = FENCE.sub("", text_of(path)).splitlines()
    assert [x for x in lines if len(x) > 120 and not x.startswith(("|", "![", "    "))] == []


def test_a_benchmark_says_on_a_page_what_it_asks() -> None:
    rooms = {path.parent for path in (ROOT / "benchmarks").glob("*/main.py")}
    assert rooms and [room.name for room in rooms if not (room / "README.md").exists()] == []


def test_documents_that_the_source_names_are_there() -> None:
    for path in SOURCES:
        for name in re.findall(r"\bdocs/[\w/.-]+\.md\b", text_of(path)):
            assert (ROOT / name).exists(), f"{named(path)} names {name}"


@pytest.mark.parametrize("folder", ["concepts", "how-to", "decisions"])
def test_files_that_pages_name_are_there(folder: str) -> None:
    there = {
        path.name for room in ("src", "tests", "benchmarks") for path in (ROOT / room).rglob("*.py")
    }
    for path in (ROOT / "docs" / folder).glob("*.md"):
        for name in re.findall(r"`(?:[\w-]+/)*([\w-]+\.py)`", text_of(path)):
            assert name in there, f"{named(path)} names {name}"


def test_the_readme_names_the_commands_of_the_makefile() -> None:
    readme, makefile = text_of(ROOT / "README.md"), text_of(ROOT / "Makefile")
    for target in ("setup", "demo", "test", "lint", "docs"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_readme_can_be_read_in_a_few_minutes() -> None:
    readme = text_of(ROOT / "README.md")
    assert len(readme.split()) < 900
    assert [line for line in readme.splitlines() if len(line) > 120] == []


def test_the_speed_that_the_readme_quotes_is_that_of_the_results() -> None:
    readme, page = text_of(ROOT / "README.md"), text_of(ROOT / "docs" / "results" / "ampnet.md")
    ours = re.search(r"\| ours:runtime=processes \| ([\d,]+) \(([\d,]+)\.\.([\d,]+)\)", page)
    levels = re.search(r"\| level:25 \| ([\d,]+) ", page)
    assert ours is not None and levels is not None
    assert f"{ours[1]} trees a second ({ours[2]} to {ours[3]})" in " ".join(readme.split())
    assert f"({levels[1]})" in readme
    command = next(b.text for b in blocks_of(ROOT / "README.md") if "compare" in b.text)
    assert " ".join(command.replace("\\", " ").split()) in page


def test_the_reference_has_every_public_name_once() -> None:
    told = [
        name
        for path in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", text_of(path), re.MULTILINE)
    ]
    assert len(told) == len(set(told))
    for module in (geartrain, geartrain.nn):
        stated = re.findall(r" as (\w+)$", text_of(Path(str(module.__file__))), re.MULTILINE)
        public = set(getattr(module, "__all__", stated)) - {"nn"}
        prefix = f"{module.__name__}."
        here = {n.removeprefix(prefix) for n in told if n.rpartition(".")[0] + "." == prefix}
        missing, gone = sorted(public - here), sorted(here - public)
        assert not missing, f"put '::: {prefix}{missing[0]}' onto its page of docs/reference"
        assert not gone, f"docs/reference has {gone}, which {module.__name__} does not export"


def test_the_table_of_verbs_has_every_verb() -> None:
    page = text_of(ROOT / "docs" / "concepts" / "index.md")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)\(", row)}
    verbs = {name for name, _ in getmembers(AbstractStream, isfunction) if name[0] != "_"}
    assert len(verbs) > 15
    assert verbs <= told


def test_pages_by_task_name_every_option_of_the_command_line() -> None:
    pages = "".join(text_of(path) for path in (ROOT / "docs" / "how-to").glob("*.md"))
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for option in (option for each in command.params for option in each.opts):
            if option.startswith("--"):
                assert re.search(rf"{option}\b", pages), f"no page names {name} {option}"


def test_the_table_of_recipes_has_every_recipe_once() -> None:
    page = text_of(ROOT / "docs" / "how-to" / "command-line.md")
    for recipe in RECIPES:
        rows = len(re.findall(rf"^\| `{recipe.name}` \|", page, re.MULTILINE))
        assert rows == 1, f"docs/how-to/command-line.md has {rows} rows of `{recipe.name}`"

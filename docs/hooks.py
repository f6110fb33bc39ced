"""Files of the tree that the documents link to become pages of the site.

    docs/results/speed.md     [peers](../../benchmarks/peers/README.md)
    the site                  results/speed.html ─► tree/benchmarks/peers/README.html

So a link is right both where the sources are read and on the site, and one that leads nowhere is
left as it stands: MkDocs then warns, and ``make docs`` fails. Programs become a page with their
text, pictures are copied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)]*)?(?=[)\s])")
SHOWN = {".py": "python", ".sh": "sh", ".c": "c", ".toml": "toml", "": "text", ".cff": "yaml"}


def place_of(path: Path) -> str | None:
    """Where a file of the tree stands on the site; None for one that is not in the tree."""
    if path.is_dir():
        path = path / "README.md"
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    inside = path.relative_to(ROOT).as_posix()
    return f"tree/{inside}.md" if path.suffix in SHOWN else f"tree/{inside}"


def source_of(place: str) -> Path:
    """The file of the tree that stands at a place of the site."""
    if not place.startswith("tree/"):
        return DOCS / place
    path = ROOT / place.removeprefix("tree/")
    return path if path.is_file() else path.with_suffix("")


def relinked(markdown: str, place: str, seen: Callable[[Path], object]) -> str:
    """A page's text with its links to files of the tree as they are on the site."""
    folder = source_of(place).parent

    def replaced(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        path = (folder / link[2]).resolve()
        there = place_of(path)
        if there is None:
            return link[0]
        seen(path)
        return link[1] + os.path.relpath(there, Path(place).parent) + (link[3] or "")

    return LINK.sub(replaced, markdown)


def text_of(path: Path) -> str:
    """What a file shows as a page."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    return f"# {name}\n\n``````{SHOWN[path.suffix]}\n{text}``````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to, and what that links to in turn."""
    waiting = [(f.src_uri, f.content_string) for f in files.documentation_pages()]
    while waiting:
        place, markdown = waiting.pop()
        linked: list[Path] = []
        relinked(markdown, place, linked.append)
        for path in linked:
            there = place_of(path)
            assert there is not None
            if not there.startswith("tree/") or files.get_file_from_path(there):
                continue
            if there.endswith(".md"):
                source = path / "README.md" if path.is_dir() else path
                files.append(File.generated(config, there, content=text_of(source)))
                if source.suffix == ".md":
                    waiting.append((there, text_of(source)))
            else:
                files.append(File.generated(config, there, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of one page."""
    return relinked(markdown, page.file.src_uri, lambda path: None)

"""Which statements have run, in whatever process: all of them map one file, a byte each.

A copy of this module lies beside the package that tells, where workers find it too.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FILE = "MUTATION_MARKS"
"""The variable of the environment that says where the file is."""
_MOST = 1 << 13
"""Lines that a source may have."""
_RAN = b"\1"


class Marks:
    """Those of some files.

    Args:
        path: Of the file that ``make`` has made; the names are in one beside it.
    """

    def __init__(self, path: Path) -> None:
        self._files: list[str] = json.loads(path.with_suffix(".json").read_text())
        self._first = {name: k * _MOST for k, name in enumerate(self._files)}
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def make(path: Path, files: Sequence[str]) -> None:
        """Nothing has run."""
        path.write_bytes(bytes(_MOST * len(files)))
        path.with_suffix(".json").write_text(json.dumps([*files]))

    def mark(self, name: str, line: int) -> None:
        """A statement runs."""
        self._bytes[self._first[name] + line] = _RAN[0]

    def take(self) -> set[tuple[str, int]]:
        """What has run since the last time, by file and line."""
        found, at = set(), self._bytes.find(_RAN)
        while at >= 0:
            self._bytes[at] = 0
            found.add((self._files[at // _MOST], at % _MOST))
            at = self._bytes.find(_RAN, at + 1)
        return found


@cache
def _here() -> Marks:
    return Marks(Path(os.environ[FILE]))


def a_statement_runs(name: str, line: int) -> None:
    """What a source that tells calls."""
    _here().mark(name, line)

"""What the tests of the command line share: a tiny data folder, and a way to call the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer import testing
from typer.main import get_command
from typer.testing import CliRunner

from geartrain.cli.main import app

TREES = (
    "(3 (2 It) (4 (2 's) (3 good)))",
    "(1 (2 so) (0 bad))",
    "(2 (2 (2 a) (2 film)) (2 (2 of) (2 sorts)))",
    "(4 (3 great) (3 (2 acting) (2 too)))",
)


class Outcome:
    """How a command ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> dict[str, Any]:
        """The last line of standard output."""
        found = json.loads(self.out.strip().splitlines()[-1])
        assert isinstance(found, dict)
        return found


Geartrain = Callable[..., Outcome]


@pytest.fixture(scope="session", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """A runner makes all commands with all their options again for each that it calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", cache(get_command))
        yield


@pytest.fixture
def geartrain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Geartrain:
    """Call the command in this process, in an empty folder and without a data folder."""
    monkeypatch.delenv("GEARTRAIN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*words: str | Path) -> Outcome:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """A data folder with four trees to train on, two to validate on, one to test on."""
    folder = tmp_path / "data"
    (folder / "sst").mkdir(parents=True)
    for name, n in (("train", 4), ("dev", 2), ("test", 1)):
        (folder / "sst" / f"{name}.txt").write_text("\n".join(TREES[:n]) + "\n")
    return folder

"""Who listens may go away, and disks may be full: the run goes on, and its checkpoint is there."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import geartrain as gt
from geartrain.cli.exits import ending
from geartrain.cli.logs import logging_to
from geartrain.cli.streams import Tolerant, tolerant
from tests.rigs.programs import Nursery, Program

TINY = ("listreduce", "--option", "train_size=200", "--option", "valid_size=20", "--option")
TINY += ("hidden=4", "--runtime", "simulated", "--epochs", "3")


RUN = """
from geartrain.cli.main import app
app(prog_name="geartrain")
"""


def assert_done(folder: Path) -> None:
    """The run has gone to its end."""
    result = json.loads((folder / "result.json").read_text())
    assert result["epochs"] == 3 and (folder / "latest.safetensors").exists()
    # Nothing that was written by number got into a file of the run.
    assert "epoch" not in (folder / "config.json").read_text().replace('"epochs"', "")


@pytest.mark.parametrize(
    ("words", "out", "err", "status"),
    [
        (["--json"], None, "out", 1),  # as: 2>&1 | head -1
        (["--json"], "/dev/full", None, 1),
        ([], None, "/dev/full", 0),
    ],
)
def test_a_run_outlives_those_who_listen(
    words: list[str],
    out: str | None,
    err: str | None,
    status: int,
    nursery: Nursery,
    tmp_path: Path,
) -> None:
    all_words = ("train", *TINY, "--out", tmp_path / "run", *words)
    program = Program(nursery, tmp_path / "p", RUN, *all_words, out=out, err=err, whole=True)
    try:
        if err == "out":
            program.line()
            program.turn_away()
        ended, errors = program.end()
    finally:
        program.close()
    said = "\n".join(program.lines) + errors
    assert ended == status, said
    assert "Traceback" not in said
    if out is not None:
        assert "standard output could not be written: No space left on device" in errors
    assert_done(tmp_path / "run")


WITHOUT = """
import os, sys
os.close(1), os.close(2)
sys.stdout = sys.stderr = None  # as Python does that finds them closed
from geartrain.cli.main import app
app(prog_name="geartrain")
"""


def test_a_run_that_finds_no_streams_goes_to_its_end(nursery: Nursery, tmp_path: Path) -> None:
    program = Program(
        nursery, tmp_path / "p", WITHOUT, "train", *TINY, "--out", tmp_path / "run", whole=True
    )
    try:
        ended, _ = program.end()
    finally:
        program.close()
    assert ended == 0
    assert_done(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_is_started_without_streams_goes_to_its_end(tmp_path: Path) -> None:
    source = Path(gt.__file__).parents[1]
    words = f"{sys.executable} -m geartrain train {' '.join(TINY)} --out run"
    done = subprocess.run(
        ["bash", "-c", f"{words} >&- 2>&-"],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0
    assert_done(tmp_path / "run")


class Failing(io.StringIO):
    """A stream that takes some characters, and then no more."""

    def __init__(self, room: int, code: int) -> None:
        super().__init__()
        self.room, self.code = room, code

    def write(self, text: str, /) -> int:
        self.room -= len(text)
        if self.room < 0:
            raise OSError(self.code, os.strerror(self.code))
        return super().write(text)


def test_a_stream_that_fails_is_dropped_and_remembered() -> None:
    inner = Failing(5, errno.EPIPE)
    stream = Tolerant(inner)
    assert (stream.write("four"), stream.lost) == (4, None)
    assert stream.write("more than that") == 14
    assert isinstance(stream.lost, BrokenPipeError)
    inner.room = 100
    assert stream.write("x") == 1 and inner.getvalue() == "four"
    stream.flush()
    assert not stream.isatty()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EPIPE, ""),  # as: recipes | head
        (errno.ENOSPC, "geartrain: standard output could not be written: No space left on device"),
    ],
)
def test_what_is_lost_ends_with_1_and_is_told_unless_somebody_has_heard_enough(
    code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(5, code))
    with pytest.raises(typer.Exit) as ended, ending():
        sys.stdout.write("more than five")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.strip() == said


def test_without_streams_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        with tolerant() as out:
            sys.stderr.write("nowhere")
            assert not sys.stderr.isatty()
            with pytest.raises(OSError, match="fileno"):
                sys.stderr.fileno()
        assert out.lost is None
    assert sys.stdout is before


def test_a_character_that_a_terminal_lacks_is_spelled() -> None:
    inner = io.TextIOWrapper(io.BytesIO(), "ascii")
    stream = Tolerant(inner)
    stream.write("é\n")
    stream.flush()
    assert inner.buffer.getvalue() == b"\\xe9\n"  # type: ignore[attr-defined]


class Full(io.StringIO):
    """A file on a full disk, that says so when it is closed too."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        if not self.closed:
            super().close()
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_on_a_full_disk_is_given_up_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.FileHandler, "_open", lambda self: Full())
    log = logging.getLogger("geartrain.train")
    with logging_to(tmp_path / "run.log"):
        for number in range(3):
            log.info("message %d", number)
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert "run.log: cannot be written: No space left on device" in told


def test_a_log_that_cannot_be_opened_is_given_up_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(self: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(logging.FileHandler, "_open", refused)
    with logging_to(tmp_path / "run.log"):
        for number in range(3):
            logging.getLogger("geartrain.train").error("message %d", number)
    told = capsys.readouterr().err.replace("message 0\nmessage 1\nmessage 2\n", "")
    assert "Traceback" not in told and told.count("Read-only file system") == 1, told


def test_a_log_on_a_full_disk_does_not_end_a_run(
    geartrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.FileHandler, "_open", lambda self: Full())
    done = geartrain("train", *TINY, "--out", tmp_path / "run")
    assert (done.status, "Traceback" in done.err) == (0, False), done.err


def test_what_nobody_foresaw_is_a_line_and_its_traceback_is_asked_for(
    geartrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("the wheel came off")

    monkeypatch.setattr("geartrain.cli.recipes.described", broken)
    monkeypatch.delenv("GEARTRAIN_TRACEBACK", raising=False)
    failed = geartrain("recipes", "--json")
    assert failed.status == 1
    assert failed.err == (
        "geartrain: KeyError: 'the wheel came off' (GEARTRAIN_TRACEBACK=1 shows where)\n"
    )
    monkeypatch.setenv("GEARTRAIN_TRACEBACK", "1")
    assert "Traceback" in geartrain("recipes", "--json").err


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("no room\nat all"), RecursionError()]
)
def test_what_asks_for_too_much_is_wrong_use(
    error: Exception, geartrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("geartrain.recipes.recipe.Recipe.build", refuse)
    failed = geartrain("train", *TINY, "--out", tmp_path / "run")
    assert (failed.status, failed.err.count("\n")) == (2, 1)

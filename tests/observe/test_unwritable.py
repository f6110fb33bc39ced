"""Files beside a run that can no longer be written: one warning, and the run goes on."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from geartrain.observe.jsonlog import JsonLog, read_json_log
from geartrain.observe.tensorboard import TensorBoard
from geartrain.observe.trace import PerfettoTrace, read_trace


def forbid_writing(path: Path, instead: str | Path | None = None) -> int:
    """Whatever this process has opened under a name leads elsewhere from now on; how many.

    Args:
        path: The file.
        instead: None: to the file, to be read alone.
    """
    found, there = 0, path.stat()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            same = os.path.samestat(os.fstat(fd), there)
        except OSError:
            continue  # the listing's own
        if same:
            other = os.open(instead or path, os.O_RDONLY if instead is None else os.O_WRONLY)
            os.dup2(other, fd)
            os.close(other)
            found += 1
    return found


@pytest.mark.parametrize(
    ("instead", "reason"), [(None, "Bad file descriptor"), ("/dev/full", "No space left")]
)
@pytest.mark.parametrize("kind", [JsonLog, PerfettoTrace])
def test_one_warning_with_path_and_reason_and_no_exception(
    kind, instead, reason, tmp_path, told, caplog
):
    path = tmp_path / "folder" / "file"
    observer = kind(path)
    started, *events = told.run_events()
    told.tell(observer, started, *events[:3])
    assert forbid_writing(path, instead) == 1
    with caplog.at_level(logging.WARNING):
        told.tell(observer, *events)
    (warning,) = caplog.records
    assert str(path) in warning.message and reason in warning.message
    assert "the run goes on" in warning.message and warning.exc_info is None
    left = read_json_log(path) if kind is JsonLog else list(read_trace(path))
    assert left  # what was written before


@pytest.mark.parametrize("kind", [JsonLog, PerfettoTrace])
def test_the_next_run_begins_anew(kind, tmp_path, told, caplog):
    path = tmp_path / "file"
    observer = kind(path)
    started, *events = told.run_events()
    told.tell(observer, started)
    forbid_writing(path)
    told.tell(observer, *events)
    assert len(caplog.records) == 1
    told.tell(observer, started, *events)
    assert len(caplog.records) == 1
    left = read_json_log(path) if kind is JsonLog else list(read_trace(path))
    assert len(left) > 3


def test_tensorboard_gives_up_once(tmp_path, told, caplog, monkeypatch):
    class Failing:
        calls = 0

        def add_scalar(self, tag, value, at):
            Failing.calls += 1
            raise OSError(30, "Read-only file system")

        def flush(self):
            raise OSError(30, "Read-only file system")

        close = flush

    monkeypatch.setattr(
        "geartrain.observe.tensorboard._writer_class", lambda _: lambda _: Failing()
    )
    told.tell(TensorBoard(tmp_path), *told.run_events())
    (warning,) = caplog.records
    assert str(tmp_path) in warning.message and "Read-only file system" in warning.message
    assert Failing.calls == 1

"""A lock on a folder: for one process, and gone with it."""

from __future__ import annotations

import os

import pytest

from geartrain.errors import BusyError
from geartrain.train import lock
from geartrain.train.lock import held
from tests.rigs.programs import Program

HOLDING = """
import os, sys
from pathlib import Path
from geartrain.train.lock import held

with held(Path(sys.argv[1])):
    if os.fork() == 0:
        open(sys.argv[2]).read()  # a worker that outlives the one who made it
        os._exit(0)
    print("held", flush=True)
    open(sys.argv[2]).read()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_another_process_is_named_and_a_killed_one_leaves_nothing_behind(tmp_path, nursery):
    path, kept = tmp_path / ".lock", tmp_path / "kept"
    os.mkfifo(kept)
    with open(os.open(kept, os.O_RDWR)):  # nobody gets to its end before this is left
        other = Program(nursery, tmp_path / "other", HOLDING, path, kept)
        other.until("held")
        with pytest.raises(BusyError, match=rf"{tmp_path} is in use by process {other.pid} on"):
            held(path).__enter__()
        other.close()
        with held(path):  # though its child still lives, and has the file open
            assert f"process {os.getpid()} on" in path.read_text()


def test_this_process_does_not_get_it_twice_and_keeps_it_when_it_has_tried(tmp_path):
    path = tmp_path / ".lock"
    with held(path):
        for _ in range(2):
            with pytest.raises(BusyError, match=rf"by this very process, {os.getpid()}"):
                held(path).__enter__()
        with held(tmp_path / "another"):
            pass
    with held(path):
        pass


def test_a_failure_inside_gives_it_back(tmp_path):
    with pytest.raises(KeyError), held(tmp_path / ".lock"):
        raise KeyError
    with held(tmp_path / ".lock"):
        pass


@pytest.mark.parametrize("kind", ["no module", "no locks"])
def test_where_there_are_no_locks_nobody_is_refused(tmp_path, monkeypatch, kind):
    class Without:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def lockf(file, how):
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock, "fcntl", None if kind == "no module" else Without)
    with held(tmp_path / ".lock"):
        pass

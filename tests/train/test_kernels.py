"""A session settles who does the work of kernels before it trains, and writes it down."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

import geartrain as gt
from geartrain.native import library
from geartrain.native.compilers import Unavailable
from geartrain.train.checkpoint import read_checkpoint, write_checkpoint

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each look for kernels is noted, in a process that has not looked yet and finds none."""
    found: list[float] = []

    def load(seconds: float = 0.0) -> library.Library:
        found.append(seconds)
        raise Unavailable("this is a test")

    monkeypatch.setenv("GEARTRAIN_NATIVE", "1")
    for name, value in (("_settled", False), ("_library", None), ("_status", ""), ("load", load)):
        monkeypatch.setattr(library, name, value)
    return found


def session(make_line) -> gt.Session:
    rules = gt.Rules(optimizer=SGD, update_every=8)
    return gt.Session(make_line().graph, runtime=gt.Simulated(), rules=rules)


def test_kernels_are_looked_for_when_a_session_is_made(
    make_line, make_rows, loads, caplog: pytest.LogCaptureFixture
) -> None:
    made = session(make_line)
    assert len(loads) == 1, "they would be compiled here, where nothing is timed"
    assert "so torch does their work, with the same results but slower" in caplog.text
    with caplog.at_level(logging.INFO, "geartrain"):
        made.fit(make_rows(8), epochs=1)
    assert len(loads) == 1
    assert "none, torch does their work: this is a test" in caplog.text, "the log of a run says it"


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("was", ["native", "torch", None])
def test_a_checkpoint_says_what_computed_it(
    make_line,
    make_rows,
    tmp_path: Path,
    was: str | None,
    weights_only: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, first = tmp_path / "a.safetensors", session(make_line)
    first.fit(make_rows(8), epochs=1)
    first.save(path)
    kept = read_checkpoint(path)
    assert kept.document["kernels"] == ("torch" if library.current() is None else "native")
    monkeypatch.setattr(library, "_settled", True)
    monkeypatch.setattr(library, "_library", None)
    document = {k: v for k, v in kept.document.items() if k != "kernels"}
    write_checkpoint(path, kept.tensors, document | ({} if was is None else {"kernels": was}))
    session(make_line).load(path, weights_only=weights_only)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    if was == "native" and not weights_only:
        assert len(said) == 1 and "was made with native kernels, and goes on with torch" in said[0]
    else:
        assert said == []

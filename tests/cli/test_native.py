"""``geartrain native``: kernels before they are wanted, and the reason where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from geartrain.cli.native import SECONDS
from geartrain.native import build, library


def test_it_says_where_kernels_are(
    geartrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def shared_objects(more: object, seconds: float, *, again: bool) -> list[Path]:
        asked.append((seconds, again))
        return [tmp_path / "kernels.so", tmp_path / "tree.so"]

    monkeypatch.setenv("GEARTRAIN_NATIVE", "1")
    monkeypatch.setattr(library, "shared_objects", shared_objects)
    monkeypatch.setattr(
        library.Library, "__init__", lambda self, paths: setattr(self, "paths", paths)
    )
    monkeypatch.setattr(library.Library, "check", lambda self: None)
    made = geartrain("native")
    said = "".join(f"native kernels: {tmp_path / name}.so\n" for name in ("kernels", "tree"))
    assert (made.status, made.out) == (0, said)
    assert asked == [(SECONDS, True)], "it has time, and tries again what has failed"


def test_it_fails_with_the_reason(
    geartrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GEARTRAIN_NATIVE", "1")
    monkeypatch.setenv("GEARTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "nosuchcc")
    made = geartrain("native")
    assert (made.status, made.out) == (1, "")
    assert "no native kernels, torch does their work: CC=nosuchcc is not there" in made.err


def test_its_time_is_more_than_first_use_has() -> None:
    assert SECONDS > build.COMPILE_SECONDS

"""Kernels are compiled once, kept privately, and done without where anything is amiss."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from geartrain import native as package
from geartrain.native import library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for a test."""
    monkeypatch.setenv("GEARTRAIN_NATIVE", "1")
    monkeypatch.setenv("GEARTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache"


def pretend(folder: Path, script: str) -> str:
    """A C compiler made of a shell script."""
    path = folder / "pretended-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def copying(folder: Path, kernels: library.Library) -> str:
    """A compiler that needs no time: it counts its runs and copies what was compiled before."""
    return pretend(
        folder,
        'if [ "$1" = --version ]; then echo pretended 1.0; exit; fi\n'
        f"echo run >> {folder}/runs\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {kernels.path} "$2"',
    )


def test_it_is_compiled_once_into_a_private_directory(
    native: library.Library, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", copying(tmp_path, native))
    first, second = library.load(), library.load()
    assert first.path == second.path and first.path.parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [p.name for p in cache.iterdir()] == [first.path.name], "nothing else is left there"
    assert (tmp_path / "runs").read_text() == "run\n"


def test_many_may_compile_at_the_same_time(
    native: library.Library, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", copying(tmp_path, native))
    with ThreadPoolExecutor(4) as pool:
        paths = {found.path for found in pool.map(lambda _: library.load(), range(4))}
    assert len(paths) == 1 and [p.name for p in cache.iterdir()] == [paths.pop().name]


def test_another_compiler_or_source_makes_another_file(
    native: library.Library, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = copying(tmp_path, native)
    monkeypatch.setenv("CC", compiler)
    names = {library.load().path.name}
    Path(compiler).write_text(Path(compiler).read_text().replace("1.0", "2.0"))
    names.add(library.load().path.name)
    other = tmp_path / "kernels.c"
    other.write_text(library.SOURCES[0].read_text() + "\n")
    monkeypatch.setattr(library, "SOURCES", (other, library.SOURCES[1]))
    names.add(library.load().path.name)
    assert len(names) == 3


def test_it_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARTRAIN_NATIVE", "0")
    with pytest.raises(library.Unavailable, match="GEARTRAIN_NATIVE=0"):
        library.load()
    assert not cache.exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'no such flag' >&2; exit 3", "ended with 3: no such flag"),
        ('[ "$1" = --version ] && exit; exit 1', "ended with 1: no message"),
        ('[ "$1" = --version ] && exit; while [ "$1" != -o ]; do shift; done; echo > "$2"', "load"),
    ],
)
def test_a_compiler_that_fails_is_done_without(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setenv("CC", pretend(tmp_path, script))
    with pytest.raises(library.Unavailable, match=why):
        library.load()


def test_a_compiler_that_hangs_is_given_up(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", pretend(tmp_path, "exec tail -f /dev/null"))
    monkeypatch.setattr(library, "COMPILE_SECONDS", 0.05)
    with pytest.raises(library.Unavailable, match="TimeoutExpired"):
        library.load()


def test_a_compiler_that_is_not_there_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "nosuchcc -m64")
    with pytest.raises(library.Unavailable, match="CC=nosuchcc -m64 is not there"):
        library.load()


def test_a_directory_that_others_may_write_to_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(library.Unavailable, match=f"others may write to {cache}; chmod go-w it"):
        library.cache_directory()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs user numbers")
def test_a_directory_of_another_user_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(library.Unavailable, match=f"belongs to user {mine}; set GEARTRAIN_CACHE"):
        library.cache_directory()


def test_the_cache_lies_where_the_desktop_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEARTRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert library.cache_directory() == tmp_path / "xdg" / "geartrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert library.cache_directory() == tmp_path / "home" / ".cache" / "geartrain"


def test_kernels_with_wrong_numbers_are_not_used(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = native.typed[torch.float32]["tanh"]

    def wrong(n: int, x: int, y: int) -> int:
        return right[0](n - 1, x + 4, y)  # of the next number

    with monkeypatch.context() as patch:
        patch.setitem(native.typed[torch.float32], "tanh", (wrong, wrong))
        with pytest.raises(library.Unavailable, match=r"tanh of torch\.float32 is wrong"):
            native.check()
    native.check()


@pytest.mark.parametrize(("value", "said"), [("0", "none, torch does"), ("1", "kernels-")])
def test_the_status_says_what_is_used(
    native: library.Library, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEARTRAIN_NATIVE", value)
    monkeypatch.setattr(library, "_settled", False)
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_status", "")
    assert said in package.status()
    assert (library.current() is not None) == (value == "1")

"""Kernels are compiled once, kept privately, and done without where anything is amiss."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from geartrain.native import build, compilers, library
from geartrain.native.compilers import Unavailable


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for a test."""
    monkeypatch.setenv("GEARTRAIN_NATIVE", "1")
    monkeypatch.setenv("GEARTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(library, "_extensions", [])
    return tmp_path / "cache"


def made() -> Path:
    """The file of the kernels, found or compiled."""
    (path,) = build.shared_objects()
    return path


def in_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "KERNELS", replace(build.KERNELS, units=(1,)))


def pretend(folder: Path, script: str) -> str:
    """A C compiler made of a shell script."""
    path = folder / "pretended-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def copying(folder: Path, kernels: library.Library) -> str:
    """A compiler that needs no time: it copies what was compiled before, and counts how often."""
    return pretend(
        folder,
        "# compiler 1.0\n"
        f'case " $* " in *" -c "*) ;; *) echo run >> {folder}/runs; esac\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {kernels.path} "$2"',
    )


@pytest.fixture
def runs(
    native: library.Library, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    """How often a compiler has run that takes no time; it is the one that is used."""
    monkeypatch.setenv("CC", copying(tmp_path, native))
    log = tmp_path / "runs"
    return lambda: len(log.read_text().split()) if log.exists() else 0


def folder_of_work() -> Path:
    """Where the kernels are compiled, by one process at a time."""
    return build._Making(build.compiler(), build.cache_directory(), [build.KERNELS]).folder


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """A folder that another process holds."""
    folder.mkdir(exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(held)


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_it_is_compiled_once_into_a_private_directory(cache: Path, runs: Callable[[], int]) -> None:
    first, second = library.load(), library.load()
    assert first.path == second.path and first.path.parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert files(cache) == [first.path.name], "nothing else is left there"
    assert runs() == 1


def test_of_many_who_want_it_at_the_same_time_one_compiles(
    cache: Path, runs: Callable[[], int]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = {found.path for found in pool.map(lambda _: library.load(), range(4))}
    assert len(paths) == 1 and files(cache) == [paths.pop().name]
    assert runs() == 1


def test_another_compiler_or_source_makes_another_file(
    native: library.Library, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = copying(tmp_path, native)
    monkeypatch.setenv("CC", compiler)
    names = {library.load().path.name}
    Path(compiler).write_text(Path(compiler).read_text().replace("1.0", "2.0.1"))
    names.add(library.load().path.name)
    other = tmp_path / "kernels.c"
    other.write_text(build.KERNELS.main.read_text() + "\n")
    monkeypatch.setattr(build, "KERNELS", replace(build.KERNELS, main=other))
    names.add(library.load().path.name)
    (tmp_path / "included.inc").write_text("/* beside it */\n")
    names.add(library.load().path.name)
    assert len(names) == 4


def test_it_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARTRAIN_NATIVE", "0")
    with pytest.raises(Unavailable, match="GEARTRAIN_NATIVE=0"):
        library.load()
    assert not cache.exists()


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)


def decayed(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere.so"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def open_to_others(path: Path) -> None:
    path.chmod(0o775)


@pytest.mark.parametrize("spoil", [cut_short, decayed, a_pipe, a_link, open_to_others])
def test_what_is_not_as_it_was_made_is_made_again(
    spoil: Callable[[Path], None], cache: Path, runs: Callable[[], int]
) -> None:
    path = made()
    before = path.read_bytes()
    spoil(path)
    assert made() == path
    assert path.read_bytes() == before and build._is_ours(path.lstat())
    assert files(cache) == [path.name] and runs() == 2


def test_a_file_of_somebody_else_is_made_again(
    cache: Path, runs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = made(), os.fstat
    os.link(path, cache.parent / "held")  # or the next file might get its number
    theirs = path.stat().st_ino

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        owner = found.st_uid + (found.st_ino == theirs)
        return os.stat_result([*found[:4], owner, *found[5:]])

    monkeypatch.setattr(os, "fstat", fstat)
    assert made() == path
    assert path.stat().st_ino != theirs and runs() == 2


def test_what_killed_compiles_have_left_is_removed(cache: Path, runs: Callable[[], int]) -> None:
    build.cache_directory()
    (cache / "making-abcdefgh").mkdir()
    (cache / "making-abcdefgh" / "1.o").write_text("half")
    (cache / "mine").write_text("not of these")
    with locked(cache / "making-other") as others:
        path = made()
        assert sorted(files(cache)) == sorted([path.name, "mine", others.name])


def test_where_the_file_system_has_no_locks_each_works_in_a_folder_of_its_own(
    cache: Path, runs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    (cache := build.cache_directory()).joinpath("making-old").mkdir()
    (cache / "making-new").mkdir()
    before = time.time() - build.FORGET_SECONDS - 1
    os.utime(cache / "making-old", (before, before))
    path, where = made(), folder_of_work()
    assert where.name in files(cache), "that of who may have locks"
    assert sorted(files(cache)) == sorted([path.name, "making-new", where.name]) and runs() == 1


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'no such flag' >&2; exit 3", "ended with 3: no such flag"),
        (
            "echo 'a.c:1: error: no x' >&2; echo 'compilation terminated.' >&2; exit 1",
            "error: no x",
        ),
        ("exit 1", "ended with 1: no message"),
        ('while [ "$1" != -o ]; do shift; done; echo > "$2"', "load"),
        ("exit 0", "FileNotFoundError"),
    ],
)
def test_a_compiler_that_fails_is_done_without(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setenv("CC", pretend(tmp_path, script))
    with pytest.raises(Unavailable, match=why):
        library.load()


def test_what_has_failed_is_not_tried_again_for_an_hour(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "runs"
    monkeypatch.setenv("CC", pretend(tmp_path, f"echo run >> {log}; echo 'no room' >&2; exit 1"))
    in_one_unit(monkeypatch)
    with pytest.raises(Unavailable, match=r"ended with 1: no room$"):
        library.load()
    with pytest.raises(Unavailable, match=r"no room \(that was 0 min ago: .*geartrain nat"):
        library.load()
    assert log.read_text() == "run\n"
    with pytest.raises(Unavailable, match=r"no room$"):
        library.load(again=True)
    (note,) = cache.glob("*.failed")
    before = time.time() - build.FORGET_SECONDS - 1
    os.utime(note, (before, before))
    with pytest.raises(Unavailable, match=r"no room$"):
        library.load()
    assert log.read_text() == "run\n" * 3


def test_a_failure_is_forgotten_once_it_works(cache: Path, runs: Callable[[], int]) -> None:
    identity = build._identity(build.compiler(), build.KERNELS)
    note = build.cache_directory() / f"kernels-{identity}.failed"
    note.write_text("the disk was full")
    with pytest.raises(Unavailable, match="the disk was full"):
        library.load()
    path = library.load(again=True).path
    assert files(cache) == [path.name]


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("name", "why"), [("seconds", r"took more than 0 s"), ("IDLE_SECONDS", r"did nothing for 0 s")]
)
def test_a_compiler_that_hangs_is_killed_with_what_it_has_started(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    child = tmp_path / "child"
    hanging = f"tail -f /dev/null & echo $! > {child}.new; mv {child}.new {child}; wait"
    monkeypatch.setenv("CC", pretend(tmp_path, hanging))
    in_one_unit(monkeypatch)
    real = compilers.CompilersPatience.look

    def look(patience: compilers.CompilersPatience, groups: list[int]) -> None:
        if child.exists():
            real(patience, groups)

    monkeypatch.setattr(compilers.CompilersPatience, "look", look)
    if name == "IDLE_SECONDS":
        monkeypatch.setattr(compilers, name, 0.05)
    with pytest.raises(Unavailable, match=rf"given up: it {why}; 'geartrain native'"):
        library.load(0.05 if name == "seconds" else 60)
    until = time.monotonic() + 20
    while not gone(int(child.read_text())):
        assert time.monotonic() < until
    with pytest.raises(Unavailable, match=r"that was 0 min ago"):
        library.load()


def test_a_compiler_may_use_the_processor_for_no_longer_than_it_may_take(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", pretend(tmp_path, "ulimit -t >&2; exit 1"))
    with pytest.raises(Unavailable, match=r"ended with 1: 77$"):
        library.load(77)


def test_who_waits_for_another_process_takes_what_it_has_compiled(
    native: library.Library, cache: Path, runs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(folder_of_work()) as folder:
        identity = build._identity(build.compiler(), build.KERNELS)
        theirs = cache / f"kernels-{identity}-{build._content_of(native.path)}.so"

        def sleep(seconds: float) -> None:
            theirs.write_bytes(native.path.read_bytes())
            theirs.chmod(0o700)
            folder.rmdir()

        monkeypatch.setattr(time, "sleep", sleep)
        assert made() == theirs
    assert runs() == 0


@pytest.mark.parametrize(("held", "who"), [(None, "another process"), ("77", "process 77")])
def test_who_waits_for_another_process_does_not_wait_for_ever(
    cache: Path, runs: Callable[[], int], held: str | None, who: str
) -> None:
    with locked(folder_of_work()) as folder:
        if held is not None:
            (folder / "holder").write_text(held)
        told = rf"^{who} has been compiling into {cache} for more than -5 s: end it if it hangs, or"
        with pytest.raises(Unavailable, match=told):
            build.shared_objects(seconds=-5)
        assert files(cache) == [folder.name], "it is no failure of the compiler, to be remembered"


@pytest.fixture
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is about to wait for another process fails."""

    def look(told: compilers.ToldOnce) -> None:
        assert not str(told._line).startswith("geartrain: waiting for another process")

    monkeypatch.setattr(compilers.ToldOnce, "look", look)


def test_nobody_waits_for_who_compiles_other_kernels(
    cache: Path, runs: Callable[[], int], nobody_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder_of_work()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    with locked(other), locked(build.cache_directory()):
        made()
    assert runs() == 1


def test_who_holds_a_lock_tells_which_process_it_is(
    cache: Path, runs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    sweep = build._sweep

    def looked(directory: Path, *, locks: bool) -> None:
        seen.append(build._holder(folder_of_work()))
        sweep(directory, locks=locks)

    monkeypatch.setattr(build, "_sweep", looked)
    made()
    assert seen == [f"process {os.getpid()}"]


def test_a_lock_that_a_forked_process_has_too_keeps_nobody_waiting(
    cache: Path, runs: Callable[[], int], nobody_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, kept = build._locked, ExitStack()

    def and_kept(folder: Path) -> int:
        descriptor = lock(folder)
        kept.callback(os.close, os.dup(descriptor))  # what a fork does
        return descriptor

    monkeypatch.setattr(build, "_locked", and_kept)
    with kept:
        cut_short(made())
        assert made() and runs() == 2


def test_a_folder_that_another_has_just_removed_is_not_worked_in(
    cache: Path, runs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock, locks = folder_of_work(), fcntl.flock, 0

    def flock(descriptor: int, how: int) -> None:
        nonlocal locks
        locks += 1
        if locks == 1:
            folder.rename(cache / "held")  # or the next one might get its number
            folder.mkdir()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = made()
    assert locks > 2 and runs() == 1
    assert sorted(files(cache)) == sorted(["held", path.name]) and not files(cache / "held")


@pytest.mark.parametrize(("after", "lines"), [(0.0, 1), (60.0, 0)])
def test_it_says_what_takes_a_while(
    cache: Path,
    runs: Callable[[], int],
    after: float,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compilers, "SILENT_SECONDS", after)
    made()
    made()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    for line in said:
        assert line.startswith(f"geartrain: compiling native kernels into {cache}, once for this")
        assert "'geartrain native' does it beforehand" in line


def test_a_compiler_that_is_not_there_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "nosuchcc -m64")
    with pytest.raises(Unavailable, match="CC=nosuchcc -m64 is not there"):
        library.load()


def test_a_compiler_that_is_no_command_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(Unavailable, match=r'CC=gcc " is no command \(No closing quotation'):
        library.load()


def test_a_directory_that_others_may_write_to_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(Unavailable, match=f"others may write to {cache}; chmod go-w it"):
        build.cache_directory()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs user numbers")
def test_a_directory_of_another_user_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(Unavailable, match=f"belongs to user {mine}; set GEARTRAIN_CACHE"):
        build.cache_directory()


def test_the_cache_lies_where_the_desktop_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEARTRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_directory() == tmp_path / "xdg" / "geartrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_directory() == tmp_path / "home" / ".cache" / "geartrain"

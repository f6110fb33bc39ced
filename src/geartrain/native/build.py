"""The compiled kernels as files: found in a cache, or made there, once for all of a user.

    source, flags, compiler, processor ─► identity
    kernels-IDENTITY-CONTENT.so there, and its content is that ─► it
    else wait until nobody compiles it, look again, and compile ─► flushed, renamed ─► it
    that fails ─► kernels-IDENTITY.failed, and nobody tries again for an hour

Kernels of a model are sources of their own, which lie beside it, and a library of their own, which
is linked with that of kernels.c: NAME-IDENTITY-CONTENT.so, the other's content being part of what
decides. What is missing of all of them is compiled side by side.

The name says what is in the file, so that one which was cut short or has decayed is known, removed
and made again. A file is no use either if it is somebody else's, or others may write to it. Who
compiles holds a lock on the folder that it works in, which is called as what comes of it: who wants
the same waits, for so long as it may take, and who wants other kernels does not. Where the file
system has no locks, several may do so at once, each in a folder of its own. A compiler that takes
too long, or does nothing, is killed with all that it has started.

    GEARTRAIN_CACHE=DIR    where compiled kernels lie; else XDG_CACHE_HOME/geartrain, else
                           ~/.cache/geartrain
    CC                     the compiler; else the first of cc, gcc, clang
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch

from geartrain.native.compilers import (
    STEP_SECONDS,
    CompilersPatience,
    ToldOnce,
    Unavailable,
    run_all,
)

if sys.platform != "win32":
    import fcntl


@final
@dataclass(frozen=True, slots=True)
class Sources:
    """What one library is compiled from.

    Args:
        name: What its files are called.
        main: What is compiled; it may include what lies beside it, and what kernels.c includes.
        units: Each is compiled by a process of its own with ``UNIT`` defined as its number, one
            process for each core at a time; one: it has no parts.
    """

    name: str
    main: Path
    units: tuple[int, ...] = (1,)

    @property
    def files(self) -> tuple[Path, ...]:
        """All that decides what comes of it."""
        return (self.main, *sorted(self.main.parent.glob("*.inc")))


KERNELS: Final = Sources("kernels", Path(__file__).with_name("kernels.c"), (1, 2, 3, 4, 5))
"""What others are linked with."""
FLAGS: Final = (
    *("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
COMPILE_SECONDS: Final = 300.0
"""For all units: some 20 s of a core are needed, but others may be at work on the machine."""
FORGET_SECONDS: Final = 3600.0
"""So long nobody tries again what has failed."""

_MOST_BYTES: Final = 1 << 26
_MAKING: Final = "making-"
_HOLDER: Final = "holder"


def shared_objects(
    more: Sequence[Sources] = (), seconds: float = COMPILE_SECONDS, *, again: bool = False
) -> list[Path]:
    """The files of the compiled kernels, whole and our own: of ``KERNELS``, then of the others.

    Args:
        more: Others, which call functions of ``KERNELS``; all that is missing is compiled at once.
        seconds: For compiling; who waits for another process waits a little longer.
        again: Whether to try also what has failed within the hour.

    Raises:
        Unavailable: No compiler, no private directory, or it failed, now or within the hour.
        OSError: The directory cannot be made, read or written to.
    """
    command, directory = compiler(), cache_directory()
    making = _Making(command, directory, (KERNELS, *more))
    if None not in (found := making.found()):
        return _all(found)
    if not again:
        making.refuse_what_failed(found)
    with _alone(making.folder, seconds) as folder:
        if None not in (found := making.found()):  # another has been faster
            return _all(found)
        if not again:
            making.refuse_what_failed(found)
        try:
            made = making.make(found, folder, seconds)
        except Unavailable as reason:
            for failure in making.failures(found):
                with suppress(OSError):
                    failure.write_text(str(reason), encoding="utf-8", errors="replace")
            raise
        for failure in making.failures(found):
            failure.unlink(missing_ok=True)
        return made


def compiler() -> list[str]:
    """The command of the C compiler.

    Raises:
        Unavailable: There is none.
    """
    asked = os.environ.get("CC")
    try:
        commands = [shlex.split(asked)] if asked else [["cc"], ["gcc"], ["clang"]]
    except ValueError as error:
        raise Unavailable(
            f"CC={asked} is no command ({error}); give a compiler and perhaps its options"
        ) from error
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    raise Unavailable(
        f"CC={asked} is not there" if asked else "no C compiler (cc, gcc or clang); install one"
    )


def cache_directory() -> Path:
    """The directory of compiled kernels, made if need be, readable by its owner alone.

    Raises:
        Unavailable: It is somebody else's, or others may write to it.
        OSError: It cannot be made.
    """
    own, shared = os.environ.get("GEARTRAIN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        path = Path(own)
    else:
        path = (Path(shared) if shared else Path.home() / ".cache") / "geartrain"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise Unavailable(f"{path} belongs to user {found.st_uid}; set GEARTRAIN_CACHE")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise Unavailable(f"others may write to {path}; chmod go-w it, or set GEARTRAIN_CACHE")
    return path


def _identity(command: Sequence[str], sources: Sources, base: str = "") -> str:
    """A name for all that decides what the compiler makes; base: the file it is linked with."""
    known = hashlib.sha256(base.encode())
    for part in _decisive(command, sources):
        known.update(part + b"\0")
    return known.hexdigest()[:24]


def _decisive(command: Sequence[str], sources: Sources) -> Iterator[bytes]:
    yield from (each.read_bytes() for each in (*sources.files, *KERNELS.files))
    yield shlex.join([*command, *FLAGS]).encode(errors="surrogateescape")
    # The programs by their files: asking them for their version would take longer, or for ever.
    for word in command:
        if program := shutil.which(word):
            path = Path(program).resolve()
            at = path.stat()
            yield f"{path} {at.st_size} {at.st_mtime_ns}".encode(errors="surrogateescape")
    yield "|".join((platform.machine(), platform.system(), *platform.libc_ver())).encode()
    yield _processor()


def _processor() -> bytes:
    cpus = Path("/proc/cpuinfo")
    if not cpus.exists():
        return f"{platform.processor()} {torch.backends.cpu.get_cpu_capability()}".encode()
    wanted = (b"model name", b"flags", b"Features", b"CPU part")
    first = cpus.read_bytes().split(b"\n\n")[0]
    return b"\n".join(line for line in first.splitlines() if line.startswith(wanted))


def _found(directory: Path, name: str) -> Path | None:
    """What was compiled before; what is not as it was made is removed."""
    for path in sorted(directory.glob(f"{name}-*.so")):
        if _content_of(path) == path.stem.rpartition("-")[2]:
            return path
        with suppress(OSError):
            path.unlink()
    return None


def _content_of(path: Path) -> str | None:
    """A name for what is in a file of our own; None for any other."""
    # Not to wait for who may write to a pipe, nor to follow a link.
    how = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        with open(os.open(path, how), "rb") as file:
            if not _is_ours(os.fstat(file.fileno())):
                return None
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError:
        return None


def _is_ours(found: os.stat_result) -> bool:
    """Whether it is a file that we alone may have written."""
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    private = not stat.S_IMODE(found.st_mode) & 0o022
    return stat.S_ISREG(found.st_mode) and mine and private and found.st_size <= _MOST_BYTES


def _refuse_what_failed(failure: Path) -> None:
    try:
        found = failure.lstat()
        age = time.time() - found.st_mtime
        if not _is_ours(found) or not 0 <= age < FORGET_SECONDS:
            return
        reason = failure.read_text(encoding="utf-8", errors="replace")[:2000]
    except OSError:
        return
    raise Unavailable(
        f"{reason} (that was {age / 60:.0f} min ago: it is tried again after an hour, or by "
        "'geartrain native')"
    )


@contextmanager
def _alone(folder: Path, seconds: float) -> Iterator[Path]:
    """A folder to compile in, locked until it is removed; what others have left is removed, too.

    Raises:
        Unavailable: Another process holds it for longer than it may compile.
    """
    if (descriptor := _waited_for(folder, seconds)) is None:
        _sweep(folder.parent, locks=False)
        with tempfile.TemporaryDirectory(prefix=_MAKING, dir=folder.parent) as name:
            yield Path(name)
        return
    try:
        (folder / _HOLDER).write_text(str(os.getpid()))
        _sweep(folder.parent, locks=True)
        yield folder
    finally:
        # Gone with the folder, though a process that was forked meanwhile has the lock for life.
        _removed(folder, descriptor)


def _waited_for(folder: Path, seconds: float) -> int | None:
    """The lock of a folder, which is made; None: the file system has no locks."""
    until, directory = time.monotonic() + seconds + 5, folder.parent
    told = ToldOnce(f"waiting for another process, which compiles native kernels into {directory}")
    while sys.platform != "win32":
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return _locked(folder)
        except (BlockingIOError, FileNotFoundError):
            if time.monotonic() > until:
                raise Unavailable(
                    f"{_holder(folder)} has been compiling into {directory} for more than "
                    f"{seconds:.0f} s: end it if it hangs, or set GEARTRAIN_CACHE to another "
                    "directory"
                ) from None
            told.look()
            time.sleep(STEP_SECONDS)
        except OSError:
            break
    return None


def _locked(folder: Path) -> int:
    """Lock a folder.

    Raises:
        BlockingIOError: Another has.
        FileNotFoundError: Another had, and has removed it.
        OSError: The file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise FileNotFoundError(folder)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _holder(folder: Path) -> str:
    try:
        return f"process {int((folder / _HOLDER).read_text())}"
    except (OSError, ValueError):
        return "another process"


def _removed(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


def _sweep(directory: Path, *, locks: bool) -> None:
    """Remove what processes that were killed have left behind; without locks, what is old."""
    for leftover in directory.glob(f"{_MAKING}*"):
        with suppress(OSError):
            if locks:
                _removed(leftover, _locked(leftover))
            elif time.time() - leftover.stat().st_mtime > FORGET_SECONDS:
                shutil.rmtree(leftover)


def _all(found: Sequence[Path | None]) -> list[Path]:
    return [path for path in found if path is not None]


@final
class _Making:
    """The libraries of some sources, the first of which the others are linked with.

    Args:
        command: The compiler.
        directory: Where they lie.
        wanted: The sources.
    """

    def __init__(self, command: Sequence[str], directory: Path, wanted: Sequence[Sources]) -> None:
        self._command, self._directory, self._wanted = command, directory, wanted

    @property
    def folder(self) -> Path:
        """Where it is compiled by those who want the same ``KERNELS``."""
        return self._directory / f"{_MAKING}{self._name(KERNELS)}"

    def found(self) -> list[Path | None]:
        """The libraries that are there."""
        base = _found(self._directory, self._name(KERNELS))
        return [base] + [
            None if base is None else _found(self._directory, self._name(each, base))
            for each in self._wanted[1:]
        ]

    def failures(self, found: Sequence[Path | None]) -> list[Path]:
        """Where it is written why what is missing could not be made."""
        missing = [s for s, path in zip(self._wanted, found, strict=True) if path is None]
        return [self._directory / f"{self._name(each)}.failed" for each in missing]

    def refuse_what_failed(self, found: Sequence[Path | None]) -> None:
        """Raises:
        Unavailable: What is missing has failed within the hour.
        """
        for failure in self.failures(found):
            _refuse_what_failed(failure)

    def make(self, found: Sequence[Path | None], folder: Path, seconds: float) -> list[Path]:
        """Compile what is missing in a folder, all units side by side, and link it.

        Raises:
            Unavailable: The compiler complains, or takes too long.
        """
        command, directory = self._command, self._directory
        told = ToldOnce(
            f"compiling native kernels into {directory}, once for this machine: some 20 s of a "
            f"core, given up after {seconds:.0f} s ('geartrain native' does it beforehand)"
        )
        try:
            made = self._compiled(found, folder, CompilersPatience(seconds, told))
        except TimeoutError as late:
            raise Unavailable(
                f"{shlex.join(command)} was given up: {late}; 'geartrain native' tries again "
                "and gives it more time, CC names another compiler"
            ) from None
        with suppress(OSError):  # not every file system does; a name that is lost is made again
            _flush(directory)
        return made

    def _compiled(
        self, found: Sequence[Path | None], folder: Path, patience: CompilersPatience
    ) -> list[Path]:
        both = list(zip(self._wanted, found, strict=True))
        objects = {
            each.name: [str(folder / f"{each.name}-{unit}.o") for unit in each.units]
            for each, path in both
            if path is None
        }
        include = f"-I{KERNELS.main.parent}"
        units = [
            [*self._command, *FLAGS, include, f"-DUNIT={unit}", "-c", str(each.main), "-o", made]
            for each, path in both
            if path is None
            for unit, made in zip(each.units, objects[each.name], strict=True)
        ]
        run_all(units, folder, patience)
        made: list[Path] = []
        for each, path in both:
            if path is None:
                whole = folder / f"{each.name}.so"
                linked = [*objects[each.name], *(self._against(made[0]) if made else ())]
                linking = [*self._command, *FLAGS, *linked, "-o", str(whole), "-lm"]
                run_all([linking], folder, patience)
                path = self._placed(whole, self._name(each, *made[:1]))
            made.append(path)
        return made

    def _against(self, base: Path) -> tuple[str, ...]:
        # By its name alone, and it is looked for beside what wants it: the directory may be moved.
        return f"-L{self._directory}", f"-l:{base.name}", "-Wl,-rpath,$ORIGIN"

    def _placed(self, whole: Path, name: str) -> Path:
        whole.chmod(0o700)
        _flush(whole)
        if (content := _content_of(whole)) is None:
            raise Unavailable(
                f"{shlex.join(self._command)} made no file of our own in {self._directory}"
            )
        path = self._directory / f"{name}-{content}.so"
        whole.replace(path)
        return path

    def _name(self, sources: Sources, base: Path | None = None) -> str:
        linked = "" if base is None else base.name
        return f"{sources.name}-{_identity(self._command, sources, linked)}"


def _flush(path: Path) -> None:
    """Have the system write a file, or the names in a directory, to the disk."""
    if os.name == "nt":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A folder for one process at a time.

    with held(folder / ".lock"):      another process: BusyError, with number and time of who has it

The lock is the operating system's, which takes it back when the process ends, however it ends; the
file stays and means nothing. Processes that are forked meanwhile do not have it.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final, TypeAlias

from geartrain.errors import BusyError

try:
    import fcntl
except ImportError:  # not on every system; there nobody is refused
    fcntl = None  # type: ignore[assignment]

Place: TypeAlias = tuple[int, int]

_IN_USE: Final = (errno.EACCES, errno.EAGAIN)
_GUARD: Final = threading.Lock()
_OURS: Final[set[Place]] = set()
"""Files that this process has: the system would let it have them again, and take the lock back when
either is closed."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock; where the file system has none, do without.

    Args:
        path: Its file, which is made if need be; its folder is there.

    Raises:
        BusyError: Somebody else holds it; says who.
        OSError: The file cannot be made.
    """
    with _GUARD:
        if path.exists() and _place(os.stat(path)) in _OURS:
            raise _busy(path, f"this very process, {os.getpid()}")
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file, path)
        except BaseException:
            os.close(file)
            raise
        place = _place(os.fstat(file))
        _OURS.add(place)
    try:
        _write_name(file)
        yield
    finally:
        with _GUARD:
            _OURS.discard(place)
            os.close(file)


def _lock(file: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        # Of the process, not of the open file: workers that it forks, and that outlive it for some
        # seconds when it is killed, do not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _IN_USE:
            told = os.read(file, 1000).decode(errors="replace").strip()
            raise _busy(path, told or "another process") from error


def _write_name(file: int) -> None:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    name = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
    os.ftruncate(file, 0)
    os.write(file, name.encode())


def _busy(path: Path, who: str) -> BusyError:
    return BusyError(
        f"{path.parent} is in use by {who}; wait until that has ended, or use another folder"
    )


def _place(stat: os.stat_result) -> Place:
    return stat.st_dev, stat.st_ino

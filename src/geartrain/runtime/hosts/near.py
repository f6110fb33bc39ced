"""Whether a worker is on the parent's host, so that both may talk by socket files.

    parent ── a folder of its own, and which host this is ──► worker
           ◄── it is this host, this user, and the folder is nobody else's ──

One host is one kernel and one network namespace: what a namespace cuts off is another host, also
if it has the same disk. In a folder of mode 0700 there is nobody but its user, who is trusted, so
that nothing needs to be encrypted there; with keys a batch of 8 KiB costs twice the CPU.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from geartrain.runtime.processes.server import hold, new_folder

_KERNEL: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/thread-self/ns/net")
_MOST_PATH: Final = 80  # bytes; that of a socket file may have 107


def this_host() -> str:
    """The same for processes of one host and one user, and for no others; empty: nobody knows."""
    try:
        return f"{_KERNEL.read_text().strip()} {os.readlink(_NETWORK)} {os.getuid()}"
    except OSError:
        return ""


@final
@dataclass(frozen=True, slots=True)
class Near:
    """Where whoever is near may meet.

    Args:
        folder: Of the parent.
        host: The parent's, as ``this_host`` has it.
    """

    folder: str
    host: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """Whether this process is on that host, and sees the folder as what it should be."""
        try:
            found = os.stat(self.folder, follow_symlinks=False)
        except OSError:
            return False
        private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
        ours = (
            private and len(os.fsencode(self.folder)) <= _MOST_PATH and found.st_uid == os.getuid()
        )
        return ours and self.host != "" and self.host == this_host()

    def remove(self) -> None:
        """Have the folder gone, as the parent is: it could not do so itself if it was killed."""
        if self.is_here:
            shutil.rmtree(self.folder, ignore_errors=True)


@final
class Meeting:
    """The parent's folder, until it is closed."""

    def __init__(self) -> None:
        self.folder = new_folder()
        self._held = hold(self.folder)
        self._owner = os.getpid()
        self.near = Near(str(self.folder), this_host())

    def close(self) -> None:
        """Remove it; may be called again."""
        if self._held < 0 or os.getpid() != self._owner:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            os.close(self._held)
        self._held = -1

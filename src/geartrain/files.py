"""Files that may be from anybody: regular ones alone, and no more of them than was agreed on.

path ─► open_regular ─► a pipe, device or folder: OSError, at once
     └► read_bytes(path, most) ─► larger than that: DataError with both sizes, and nothing read
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from geartrain.errors import DataError

_PLAIN: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_AT_ONCE: Final = getattr(
    os, "O_NONBLOCK", 0
)  # a pipe that nobody writes to must not be waited for
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file to read bytes from it.

    Raises:
        OSError: It cannot be opened, or is no regular file; ``strerror`` says which.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _PLAIN | _AT_ONCE)
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((what for is_it, what in _KINDS if is_it(mode)), "no file")
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, f"it is {kind}, and a regular file was expected", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str, most: int, remedy: str) -> bytes:
    """The content of a file.

    Args:
        path: The file.
        most: Bytes that it may have.
        remedy: What to do about a larger one: a sentence's end after a semicolon.

    Raises:
        DataError: It is larger.
        OSError: It cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        require_size(os.fstat(file.fileno()).st_size, most, path, remedy)
        content = file.read(most + 1)  # it may have grown
    require_size(len(content), most, path, remedy)
    return content


def require_size(found: int, most: int, path: Path | str, remedy: str) -> None:
    """Refuse a file that is larger than was agreed on.

    Raises:
        DataError: It is.
    """
    if found > most:
        raise DataError(
            f"the file has {found:,} bytes, and {most:,} are read at most; {remedy}", path=path
        )

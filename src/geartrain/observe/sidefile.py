"""A file that is written beside a run, as long as that goes well.

    write ─► the file          the disk is full, or can only be read:  one warning, then nothing

What it would have held is of less worth than the run.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO, final

from geartrain.files import open_regular

_log = logging.getLogger(__name__)


@final
class SideFile:
    """A text file, in UTF-8, that gives up instead of raising.

    Args:
        path: The file; its folder is made if need be.
        mode: ``w`` to begin anew, ``a`` to go on.
        lines: Whether each line is handed to the operating system as it is written; else with
            ``flush``.

    Raises:
        OSError: It cannot be opened, or what is there is no regular file.
    """

    def __init__(self, path: Path, mode: Literal["w", "a"], *, lines: bool = False) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            open_regular(path).close()  # a pipe would be waited for
        self._file: TextIO | None = path.open(mode, encoding="utf-8", buffering=1 if lines else -1)

    def write(self, text: str) -> None:
        """Write, unless that has failed before."""
        if self._file is not None:
            try:
                self._file.write(text)
            except OSError as error:
                self._give_up(self._file, error)

    def flush(self) -> None:
        """Hand what has been written to the operating system."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(self._file, error)

    def close(self) -> None:
        """Close the file; again is harmless."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(self._file, error)
            self._file = None

    def _give_up(self, file: TextIO, error: OSError) -> None:
        self._file = None
        with suppress(OSError):  # it would write what has failed once more
            file.close()
        give_up(self._path, error)


def give_up(path: Path | str, error: OSError) -> None:
    """Say that something beside the run is not written any further."""
    _log.warning(
        "%s: cannot be written: %s; the run goes on without it", path, error.strerror or error
    )

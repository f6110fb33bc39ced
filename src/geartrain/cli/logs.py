"""Where messages go during a run: all to the run's log, warnings also to the screen.

A log that cannot be written any more (a full disk, one that is read-only now) is given up, which is
said once: messages are not what a run is for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from geartrain.files import open_regular


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append what geartrain logs to a file; show warnings, and what is marked, on standard error.

    Args:
        path: The log; its folder is there.

    Raises:
        OSError: What is there is no regular file.
    """
    if path.exists():
        open_regular(path).close()
    log = logging.getLogger("geartrain")
    file = _LogFile(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = logging.StreamHandler(sys.stderr)
    # A live line may stand on the terminal: clear it first.
    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
    screen.setFormatter(logging.Formatter(f"{clear}%(message)s"))
    screen.addFilter(_is_for_the_screen)
    before = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(file)
    log.addHandler(screen)
    try:
        yield
    finally:
        log.removeHandler(file)
        log.removeHandler(screen)
        log.setLevel(before[0])
        log.propagate = before[1]
        file.close()


def _is_for_the_screen(record: logging.LogRecord) -> bool:
    """Warnings without their tracebacks, which are for the file, and what says so of itself."""
    loud = record.levelno >= logging.WARNING or getattr(record, "screen", False)
    return loud and record.exc_info is None


@final
class _LogFile(logging.FileHandler):
    """A log that gives itself up when it cannot be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._given_up = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._given_up:
            return
        try:
            super().emit(record)
        except OSError as error:  # it opens the file with the first message
            self._give_up(error)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            self._give_up(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._given_up:
            self._given_up = True
            print(
                f"geartrain: {self.baseFilename}: cannot be written: "
                f"{error.strerror or error}; messages go to the screen alone",
                file=sys.stderr,
            )

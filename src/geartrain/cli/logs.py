"""Where messages go during a run: all to the run's log, warnings also to the screen.

A log that can no longer be written is said once on the screen, and is no reason to end a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append what geartrain logs to a file, and show warnings on standard error.

    Args:
        path: The log; its folder is there.
    """
    log = logging.getLogger("geartrain")
    file = _LogFile(path, encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = logging.StreamHandler(sys.stderr)
    screen.setLevel(logging.WARNING)
    # A live line may stand on the terminal: clear it first.
    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
    screen.setFormatter(logging.Formatter(f"{clear}%(message)s"))
    screen.addFilter(lambda record: record.exc_info is None)  # tracebacks are for the file
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


@final
class _LogFile(logging.FileHandler):
    """A log that says once, on standard error, that it cannot be written."""

    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._failed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
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
        if not self._failed:
            self._failed = True
            reason = error.strerror or error
            print(
                f"geartrain: {self.baseFilename}: cannot be written: {reason}; messages go to the "
                "screen alone",
                file=sys.stderr,
            )

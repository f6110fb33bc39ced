"""Where messages go during a run: all to the run's log, warnings also to the screen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append what geartrain logs to a file, and show warnings on standard error.

    Args:
        path: The log; its folder is there.
    """
    log = logging.getLogger("geartrain")
    file = logging.FileHandler(path, encoding="utf-8", delay=True)
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

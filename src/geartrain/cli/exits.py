"""How a command ends: 0 done, 1 the run failed or its target was missed, 2 wrong use, 130 Ctrl-C.

    with preparing():      what is refused here was asked for wrongly: 2
        ...
    with running(log):     the run itself: 1, and the traceback goes to the log

What a user can mend is told in a line on standard error, without a traceback.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import typer

from geartrain.errors import DataError, GeartrainError

FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130

_log = logging.getLogger("geartrain.cli")


def fail(message: str, status: int) -> typer.Exit:
    """Say it on standard error; raise what comes back."""
    print(f"geartrain: {message}", file=sys.stderr, flush=True)
    return typer.Exit(status)


def command() -> str:
    """What to type to call this program again: its name, or its path where the name finds none."""
    called = Path(sys.argv[0])
    if called.stem != "geartrain" or shutil.which("geartrain") is not None:
        return "geartrain"
    return shlex.quote(sys.argv[0])


@contextmanager
def preparing() -> Iterator[None]:
    """Refusals are wrong use; anything else is a bug of ours and passes, traceback and all."""
    try:
        yield
    except (GeartrainError, ValueError) as error:
        raise fail(str(error), WRONG_USE) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise fail(f"{place}{error.strerror or error}", WRONG_USE) from error


@contextmanager
def running(log: Path) -> Iterator[None]:
    """Whatever goes wrong is a failure of the run, but for data that are refused.

    Args:
        log: Where logging sends the traceback, to be named.
    """
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        raise
    except DataError as error:
        _log.error("refused", exc_info=True)
        raise fail(str(error), WRONG_USE) from error
    except Exception as error:
        _log.error("failed", exc_info=True)
        known = isinstance(error, GeartrainError)
        first = str(error) if known else f"{type(error).__name__}: {_first_line(error)}"
        raise fail(f"{first} (traceback in {log})", FAILED) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"

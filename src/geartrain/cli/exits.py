"""How a command ends: 0 done, 1 the run failed or its target was missed, 2 wrong use, 130 Ctrl-C,
143 SIGTERM (as a program ends that does not treat it).

    with preparing():      what is refused here was asked for wrongly: 2
        ...
    with running(log):     the run itself: 1, and the traceback goes to the log

What a user can mend is told in a line on standard error, without a traceback.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import typer

from geartrain.errors import DataError, GeartrainError
from geartrain.runtime.interrupt import Terminated

FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130
TERMINATED: Final = 143

_log = logging.getLogger("geartrain.cli")


def fail(message: str, status: int) -> typer.Exit:
    """Say it on standard error; raise what comes back."""
    print(f"geartrain: {message}", file=sys.stderr, flush=True)
    return typer.Exit(status)


def stopped(interrupt: KeyboardInterrupt, message: str = "") -> typer.Exit:
    """Say how it was stopped; raise what comes back.

    Args:
        interrupt: What a signal became.
        message: None: its own.
    """
    status = TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED
    return fail(message or str(interrupt) or "interrupted", status)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises ``Terminated``, so that what was begun meanwhile is ended.

    For commands that hold no handler while they wait; in the main thread alone.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated("terminated")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    except KeyboardInterrupt as interrupt:
        raise stopped(interrupt) from interrupt
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
    except typer.Exit:
        raise
    except KeyboardInterrupt as interrupt:
        raise stopped(interrupt) from interrupt
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

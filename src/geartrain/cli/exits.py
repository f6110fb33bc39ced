"""How a command ends: 0 done, 1 the run failed or its target was missed, 2 wrong use, 130 Ctrl-C,
143 SIGTERM (as a program ends that does not treat it).

    with preparing():      what is refused here was asked for wrongly: 2
        ...
    with running(log):     the run itself: 1, and the traceback goes to the log

    with ending():         around every command: whatever else there is, 1

What has gone wrong is told in a line on standard error. A traceback is for the log; where there is
none, ``GEARTRAIN_TRACEBACK=1`` shows it. Who closes standard output does not end a run; if what it
was to say there was lost, a command that is done ends with 1 all the same, and says so unless it
was a pipe.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import typer

from geartrain.cli.streams import Tolerant, tolerant
from geartrain.errors import DataError, GeartrainError
from geartrain.runtime.interrupt import Terminated

FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130
TRACEBACK: Final = "GEARTRAIN_TRACEBACK"
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
    """Refusals are wrong use, and so is what asks for more than there is; the rest passes."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise  # they are RuntimeErrors
    except (GeartrainError, ValueError) as error:
        raise fail(str(error), WRONG_USE) from error
    except KeyboardInterrupt as interrupt:
        raise stopped(interrupt) from interrupt
    except OSError as error:
        raise fail(_of_system(error), WRONG_USE) from error
    except MemoryError as error:
        raise fail(f"not enough memory for this: {_first_line(error)}", WRONG_USE) from error
    except (RuntimeError, OverflowError) as error:  # torch's way to say so, of too deep nesting too
        _show(error)
        raise fail(f"{type(error).__name__}: {_first_line(error)}", WRONG_USE) from error


@contextmanager
def ending() -> Iterator[None]:
    """What comes through to here is told in a line, and standard output may go away."""
    with tolerant() as out:
        try:
            yield
            _require_said(out)
        except OSError as error:
            _show(error)
            raise fail(_of_system(error), FAILED) from error
        except Exception as error:
            if isinstance(error, typer.Exit) and error.exit_code == 0:
                _require_said(out)
            if isinstance(error, typer.Abort) or hasattr(error, "exit_code"):
                raise  # typer's own, which it tells of by itself
            raise unforeseen(error) from error


def unforeseen(error: Exception) -> typer.Exit:
    """Say in a line what nobody has foreseen; raise what comes back."""
    _show(error)
    first = f"{type(error).__name__}: {_first_line(error)}"
    return fail(f"{first} ({TRACEBACK}=1 shows where)", FAILED)


def _require_said(out: Tolerant) -> None:
    """Raises:
    typer.Exit: Something of standard output was lost.
    """
    out.flush()
    if isinstance(out.lost, BrokenPipeError):  # as by head: who has closed it knows
        raise typer.Exit(FAILED) from out.lost
    if out.lost is not None:
        why = out.lost.strerror or out.lost
        raise fail(f"standard output could not be written: {why}", FAILED) from out.lost


def _of_system(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"


def _show(error: Exception) -> None:
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        traceback.print_exception(error)


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
    return lines[0][:400] if lines else "no message"

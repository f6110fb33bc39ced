"""Errors of one process in another: class, message, notes, chain, and the traceback as text."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Final

from geartrain import errors
from geartrain.errors import GeartrainError, WorkerError, said

_MOST_TOLD: Final = 16
"""Errors that led to one; a chain may end in itself, and branches where one had two reasons."""


def error_to_json(error: BaseException) -> dict[str, Any]:
    """What an error says, for another process, with the traceback as text."""
    told = _told(error, iter(range(_MOST_TOLD)))
    return told | {"traceback": "".join(traceback.format_exception(error))}


def _told(error: BaseException, left: Iterator[int]) -> dict[str, Any]:
    """Class, message and notes of an error, and of those that it came of while some are left."""

    def led(other: BaseException | None) -> dict[str, Any] | None:
        return None if other is None or next(left, None) is None else _told(other, left)

    cause, context = error.__cause__, error.__context__
    return {
        "class": type(error).__name__,
        "ours": isinstance(error, GeartrainError),
        "message": said(error),
        "notes": list(getattr(error, "__notes__", ())),
        "cause": led(cause),
        "context": led(None if context is cause else context),
        "suppressed": error.__suppress_context__,
    }


def error_of_json(told: Mapping[str, Any], worker: int) -> BaseException:
    """An error of another process: of the same class, if it is one of ours or Python's own.

    So are those that it came of; of any other class they are a ``WorkerError`` that names it.
    """
    notes = list(told["notes"])
    place = ""
    if _kind(told) is None and notes and notes[-1].startswith("in node "):
        place = f", {notes.pop()}"
    error = _made(told, f" in worker {worker}{place}")
    for note in notes:
        error.add_note(note)
    error.add_note(f"in worker process {worker}:\n{told['traceback']}")
    return error


def _kind(told: Mapping[str, Any]) -> type[Exception] | None:
    kind = getattr(errors if told["ours"] else builtins, told["class"], None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def _made(told: Mapping[str, Any], where: str = "") -> Exception:
    """An exception with its chain; some of Python's own want more than a message."""
    kind, message = _kind(told), told["message"]
    error: Exception = WorkerError(f"{told['class']}{where}{message and ': '}{message}")
    if kind is not None:
        try:
            error = kind(message)
        except TypeError:
            error = WorkerError(f"{kind.__name__}: {message}")
    if told["cause"] is not None:
        error.__cause__ = _led(told["cause"])
    if told["context"] is not None:
        error.__context__ = _led(told["context"])
    error.__suppress_context__ = told["suppressed"]
    return error


def _led(told: Mapping[str, Any]) -> Exception:
    """One that led to another: its notes are its own."""
    error = _made(told)
    for note in told["notes"]:
        error.add_note(note)
    return error

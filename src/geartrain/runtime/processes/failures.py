"""Errors of one process in another: class, message, notes, cause, and the traceback as text."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Mapping
from typing import Any

from geartrain import errors
from geartrain.errors import GeartrainError, WorkerError


def error_to_json(error: BaseException) -> dict[str, Any]:
    """What an error says, for another process: class, message, notes, cause, traceback as text."""
    cause = error.__cause__
    told: dict[str, Any] = {
        "class": type(error).__name__,
        "ours": isinstance(error, GeartrainError),
        "message": str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "traceback": "".join(traceback.format_exception(error)),
        "cause": None if cause is None else [type(cause).__name__, str(cause)],
    }
    return told


def error_of_json(told: Mapping[str, Any], worker: int) -> BaseException:
    """An error of another process: of the same class, if it is one of ours or Python's own."""
    name, message = told["class"], told["message"]
    kind = getattr(errors, name, None) if told["ours"] else getattr(builtins, name, None)
    error: BaseException
    notes = list(told["notes"])
    if isinstance(kind, type) and issubclass(kind, Exception):
        error = _made(kind, message)
    else:
        place = f", {notes.pop()}" if notes and notes[-1].startswith("in node ") else ""
        error = WorkerError(f"{name} in worker {worker}{place}{message and ': '}{message}")
    if told["cause"] is not None:
        cause = getattr(builtins, told["cause"][0], None)
        if isinstance(cause, type) and issubclass(cause, Exception):
            error.__cause__ = _made(cause, told["cause"][1])
    for note in notes:
        error.add_note(note)
    error.add_note(f"in worker process {worker}:\n{told['traceback']}")
    return error


def _made(kind: type[Exception], message: str) -> Exception:
    """An exception of Python's own, some of which want more than a message."""
    try:
        return kind(message)
    except TypeError:
        return WorkerError(f"{kind.__name__}: {message}")

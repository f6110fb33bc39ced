"""A run's metrics as JSON lines: one object a line, the key ``event`` names its kind.

    {"event": "RunStarted", "runtime": "threads", "workers": 4, ...}
    {"event": "Chosen", "runtime": "processes", "workers": 2, "why": "two worker ...", ...}
    {"event": "Progress", "mode": "train", "epoch": 1, "finished": 512, "loss": 1.31, ...}
    {"event": "Exchanged", "distance": 0.31, "copies": [{"instances": 64, "bytes": 9216, ...}]}
    {"event": "Restored", "mode": "train", "worker": 1, "deaths": 1, "repeated": 340, ...}
    {"event": "Worked", "seconds": 3.1, "nodes": [{"worker": 0, "node": "cell", ...}], ...}
    {"event": "EpochEnded", "epoch": 1, "loss": 1.03, "valid": {"accuracy": 0.789}, ...}
    {"event": "RunEnded", "outcome": "done", ...}

The other keys are the fields of the event of that name in ``geartrain.engine.instrument``. A
number that JSON cannot say (NaN, infinite) is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

from geartrain.engine.instrument import (
    AbstractInstrument,
    Chosen,
    EpochEnded,
    Exchanged,
    Joined,
    Progress,
    Restored,
    RunEnded,
    RunStarted,
    Worked,
)
from geartrain.errors import DataError
from geartrain.files import open_regular, read_bytes
from geartrain.observe.sidefile import SideFile
from geartrain.schema import Mismatch, parsed

_PROGRESS_INTERVAL_S: Final = 1.0
_MOST_BYTES: Final = 1 << 30


@final
class JsonLog(AbstractInstrument):
    """Append a run's events to a file, a line each, from ``RunStarted`` to ``RunEnded``.

    Each line is handed to the operating system as it is written, so a killed run leaves whole
    lines. A run that is resumed goes on in the same file; half a line that a crash of the machine
    may have left at its end is cut off first. ``Progress`` is written at most once a second (of
    the wall clock), and not outside of a run. Where the file can no longer be written, that is said
    once, and the run goes on without it.

    Args:
        path: The file; its folder is made if need be.
        clock: Wall-clock seconds from any origin; it paces ``Progress``.
    """

    def __init__(self, path: Path | str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._last_progress_s = -math.inf
        self._file: SideFile | None = None

    def on_run_started(self, event: RunStarted) -> None:
        """Open the file and write the line."""
        self.close()
        _cut_torn_line(self._path)
        self._file = SideFile(self._path, "a", lines=True)
        self._last_progress_s = -math.inf
        self._write(event)

    def on_progress(self, event: Progress) -> None:
        """Write the line, unless one was written within the last second."""
        now = self._clock()
        if now - self._last_progress_s >= _PROGRESS_INTERVAL_S:
            self._last_progress_s = now
            self._write(event)

    def on_exchanged(self, event: Exchanged) -> None:
        """Write the line."""
        self._write(event)

    def on_chosen(self, event: Chosen) -> None:
        """Write the line."""
        self._write(event)

    def on_restored(self, event: Restored) -> None:
        """Write the line."""
        self._write(event)

    def on_joined(self, event: Joined) -> None:
        """Write the line."""
        self._write(event)

    def on_worked(self, event: Worked) -> None:
        """Write the line."""
        self._write(event)

    def on_epoch_ended(self, event: EpochEnded) -> None:
        """Write the line."""
        self._write(event)

    def on_run_ended(self, event: RunEnded) -> None:
        """Write the line and close the file."""
        self._write(event)
        self.close()

    def close(self) -> None:
        """Close the file; again is harmless."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(
        self,
        event: RunStarted
        | Chosen
        | Progress
        | Exchanged
        | Restored
        | Joined
        | Worked
        | EpochEnded
        | RunEnded,
    ) -> None:
        if self._file is not None:
            line = {"event": type(event).__name__} | _fields(event)
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def read_json_log(path: Path | str) -> list[dict[str, Any]]:
    """Read what ``JsonLog`` wrote; a last line that was cut off is left out.

    Raises:
        DataError: Any other line is not a JSON object with a key ``event``, or the file is too
            large for a log of this kind.
        OSError: The file cannot be read, or is no regular file.
    """
    content = read_bytes(path, _MOST_BYTES, "a run writes some megabytes: see what wrote this")
    lines = content.split(b"\n")
    events: list[dict[str, Any]] = []
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = _parsed(line)
        if event is not None:
            events.append(event)
        elif at < len(lines):
            raise DataError(
                f"got {line[:60]!r}; expected a JSON object with a key 'event'. "
                "Remove the line, if you know how it came there",
                path=path,
                line=at,
            )
    return events


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = parsed(line, "the line")
    except Mismatch:  # the caller knows whether that is an error here
        return None
    return value if isinstance(value, dict) and "event" in value else None


def _cut_torn_line(path: Path) -> None:
    """Make the file end with a whole line, or be empty."""
    if not path.exists():
        return
    open_regular(path).close()
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole == len(content):
            return
        if _parsed(content[whole:]) is not None:
            file.write(b"\n")
        else:
            file.truncate(whole)


def _fields(event: object) -> dict[str, Any]:
    # Not ``dataclasses.asdict``: it deep-copies, and a read-only mapping cannot be copied.
    assert dataclasses.is_dataclass(event)
    return {f.name: _plain(getattr(event, f.name)) for f in dataclasses.fields(event)}


def _plain(value: Any) -> Any:
    """The value in types that JSON knows."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    raise TypeError(f"{value!r} of type {type(value).__name__}; expected what JSON can hold")

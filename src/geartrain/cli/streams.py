"""Standard output and error that may go away: a run is worth more than what it says.

    train ... 2>&1 | head -1        head ends after a line: what is said later is dropped
    train ... > /dev/full           the same of a full disk
    train ... 2>&-                  nobody listens from the beginning

Nothing raises where it is written. Whether standard output got all of it is known at the end.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast, final


@final
class Tolerant(io.TextIOBase):
    """A text stream that drops what it cannot write, and all that comes after.

    Args:
        stream: Where to write; None: nowhere.

    Attributes:
        lost: Why something was dropped, or None.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str, /) -> int:
        """Write, or drop it; returns its length in either case."""
        if self.lost is None and self._stream is not None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._drop(error)
            except UnicodeEncodeError:  # a terminal that lacks a character
                self._stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        return len(text)

    def flush(self) -> None:
        """Hand on what waits, or drop it."""
        if self.lost is None and self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._drop(error)

    def isatty(self) -> bool:
        """Whether somebody looks on."""
        return self._stream is not None and self.lost is None and self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream.

        Raises:
            OSError: There is none.
        """
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """Of the stream."""
        return getattr(self._stream, "errors", None)

    def _drop(self, error: OSError) -> None:
        self.lost = error
        with suppress(OSError, ValueError):
            # What waits in its buffer is written once more when the interpreter ends.
            assert self._stream is not None
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, self._stream.fileno())
            os.close(sink)


@contextmanager
def tolerant() -> Iterator[Tolerant]:
    """Make standard output and error tolerant meanwhile; gives standard output."""
    _open_three()
    before = sys.stdout, sys.stderr
    # Python has None where a stream was closed from the beginning.
    out, error = Tolerant(cast(Any, before[0])), Tolerant(cast(Any, before[1]))
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, error)
    try:
        yield out
    finally:
        out.flush()
        error.flush()
        sys.stdout, sys.stderr = before


def _open_three() -> None:
    """Take the first three descriptors, where they are free: a file of the run must not have them.

    Libraries write to them by number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest that is free

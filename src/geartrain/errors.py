"""Every exception that geartrain raises on purpose.

    GeartrainError
    ├── GraphError         a graph that cannot run: found before anything moves
    ├── DataError          an instance or a file that is refused: file, line, reason
    ├── ProtocolError      a row answered twice, or never sent: a bug, ours or of a custom node
    ├── LeakError          rows are left in a store after a drain
    ├── StuckError         nothing can move and instances are unfinished: carries the story
    ├── EndlessLoopError   an instance's rows go round a loop and never leave it
    ├── WorkerError        something raised inside a worker: node, part, shapes, instances
    │   └── WorkerDiedError    a worker process was killed, stopped, or has exited
    ├── NonFiniteError     a loss, gradient or payload is NaN or infinite
    ├── BusyError          a session or a run's folder is used by somebody else
    ├── TransportError     a message between processes is lost, damaged, or cannot be sent
    └── CheckpointError    a checkpoint cannot be written, read or does not fit
        └── NoRoomError        there is no room for it; a fit goes on without it

What is wrong with a graph, with data, with a file or with a run is one of these. Misuse of an
argument, a number out of range or a thing of the wrong type, stays ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

from pathlib import Path


class GeartrainError(Exception):
    """Root of the tree."""


def said(error: BaseException) -> str:
    """What an error says; a user's own may raise when it is asked."""
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 - the first is what is of interest
        return f"(its __str__ raised {type(another).__name__})"


class GraphError(GeartrainError):
    """The graph cannot run as it was written; the message names node, port and remedy."""


class DataError(GeartrainError):
    """Data was refused before anything of it entered the graph.

    Args:
        reason: What is wrong, what was expected, and the remedy.
        path: The file, if the data came from one.
        line: One-based line (or record) number in it.
    """

    def __init__(self, reason: str, *, path: Path | str | None = None, line: int | None = None):
        self.reason, self.path, self.line = reason, path, line
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(f"{place}{reason}")


class ProtocolError(GeartrainError):
    """The invariant was broken: one backward row for every forward row."""


class LeakError(ProtocolError):
    """Rows wait in a store although everything has been answered."""


class StuckError(GeartrainError):
    """No node can fire and instances are unfinished; the message tells who waits for what."""


class EndlessLoopError(GeartrainError):
    """Rows go round a loop more often than they may, or grow in it; names instance and loop."""


class WorkerError(GeartrainError):
    """Something raised as a node fired or a part stepped; ``__cause__`` is the original."""


class WorkerDiedError(WorkerError):
    """A worker process was killed, stopped or has exited; the message says which and how.

    Args:
        message: Who, how, and what to do.
        worker: Its number; None: it is not known, or all.
        how: Who and how alone; None: the message.
        at_s: When, in seconds of the pass; None: just now.
    """

    def __init__(
        self,
        message: str,
        worker: int | None = None,
        how: str | None = None,
        at_s: float | None = None,
    ):
        self.worker, self.how, self.at_s = worker, message if how is None else how, at_s
        super().__init__(message)


class NonFiniteError(GeartrainError):
    """A loss, a gradient or a payload is NaN or infinite; the message names node and instance."""


class BusyError(GeartrainError):
    """A session, or the folder of a run, is in use; the message says by whom."""


class TransportError(GeartrainError):
    """A message between processes came damaged, twice or not at all, or cannot be sent."""


class CheckpointError(GeartrainError):
    """A checkpoint cannot be written, cannot be read, or does not fit the model."""


class NoRoomError(CheckpointError):
    """A checkpoint cannot be written, as the disk or the quota is full, or files may not be so
    large; the one before it is whole."""

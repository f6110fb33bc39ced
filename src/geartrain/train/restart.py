"""States of a session to go back to after the death of a worker process.

One is made wherever a call of ``fit`` writes a checkpoint, or would if it had a folder, and at its
beginning. With a folder it is the file, once there is one; else it is in memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from geartrain.train.checkpoint import Checkpoint, read_checkpoint
from geartrain.train.loading import load_checkpoint
from geartrain.train.state import State


@final
@dataclass(slots=True)
class CallCounts:
    """Instances of a call of ``fit``: trained, and left out as bad."""

    trained: int = 0
    skipped: int = 0


@final
class Restart:
    """A state of a session at rest, to go back to.

    Args:
        state: Of now.
        counts: Of the call, as they are now.
        path: A checkpoint that has it; None: it is copied into memory.

    Attributes:
        trained, train_seconds: Instances trained, by all calls, and seconds of it, when it was
            made.
        counts: Of the call, as they were then.
    """

    def __init__(self, state: State, counts: CallCounts, path: Path | None) -> None:
        self.trained = state.position.trained
        self.train_seconds = state.position.train_seconds
        self.counts = replace(counts)
        self._path = path
        if path is None:
            tensors, document = state.snapshot()
            self._tensors = {name: x.detach().clone() for name, x in tensors.items()}
            self._text = json.dumps(document)  # as a file has it, and of no object of now

    def __str__(self) -> str:
        return "memory" if self._path is None else str(self._path)

    def load(self, state: State) -> None:
        """Bring the session back to it; it may be done again.

        Raises:
            CheckpointError: Somebody has damaged or removed the file.
        """
        if self._path is not None:
            checkpoint = read_checkpoint(self._path)
        else:
            tensors = {name: x.clone() for name, x in self._tensors.items()}
            checkpoint = Checkpoint(tensors, json.loads(self._text))
        found = state.position.in_flight
        load_checkpoint(state, checkpoint, str(self))
        if state.position.in_flight is None:
            state.position.in_flight = found  # it need not be found again

"""What one call of ``fit`` writes down: checkpoints, and states to go back to after a death.

A full disk ends no run: the state of before stays, and training goes on without the one of now.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from geartrain.errors import NoRoomError
from geartrain.runtime.base import AbstractFeeder
from geartrain.train.checkpoint import Retention, write_checkpoint
from geartrain.train.options import Keep
from geartrain.train.restart import CallCounts, Restart
from geartrain.train.state import State

log = logging.getLogger("geartrain.train")

_UNSAVED_S = 60.0  # between two warnings that there is no room


@final
class Saving:
    """Writes a session down, whole, whenever it is due.

    Args:
        state: The session's.
        counts: Of the call.
        retention: Where checkpoints stay; None: nowhere.
        every: Instances between two within an epoch; None: there are none.
        keep: How often a state to go back to is kept besides, and where; None: never.

    Attributes:
        restart: To go back to; None: a death ends the call.
        unsaved: States for which there was no room.
        is_saved: Whether the last checkpoint was written.
    """

    def __init__(
        self,
        state: State,
        counts: CallCounts,
        retention: Retention | None,
        every: int | None,
        keep: Keep | None,
    ) -> None:
        self._state, self._counts, self._retention = state, counts, retention
        self._every, self._keep = every, keep
        self._unsaved_told = (0, -math.inf)  # how many were, and when
        self.restart: Restart | None = None
        self.unsaved = 0
        self.is_saved = True

    def close(self) -> None:
        """Nobody goes back to what was kept."""
        if (path := self._path) is not None:
            path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path | None:
        """The file of the state that is kept; None: it is in memory."""
        if self._keep is None or self._keep.folder is None:
            return None
        return Path(self._keep.folder) / "kept.safetensors"

    def is_due(self, before: int, after: int) -> bool:
        """Whether a checkpoint within the epoch is; minibatches that are whole go past it.

        Args:
            before, after: Instances of the epoch that have been taken, a while ago and by now.
        """
        return self._every is not None and after // self._every > before // self._every

    def is_kept_now(self) -> bool:
        """Whether it is time to keep a state to go back to."""
        keep, restart, at = self._keep, self.restart, self._state.position
        if keep is None or restart is None:
            return False
        if keep.every is not None and at.trained - restart.trained >= keep.every:
            return True
        return keep.seconds is not None and at.train_seconds - restart.train_seconds >= keep.seconds

    def limits(self) -> Iterator[int]:
        """Instances until something is due that goes by their number."""
        at = self._state.position
        if self._every is not None:
            yield self._every - at.taken % self._every
        if self._keep is not None and self._keep.every is not None and self.restart is not None:
            yield max(1, self._keep.every - (at.trained - self.restart.trained))

    def pausing(self, feeder: AbstractFeeder) -> Callable[[float], None] | None:
        """Ends a segment when it is time to keep a state; None: that goes by no clock."""
        keep, restart = self._keep, self.restart
        if keep is None or keep.seconds is None or restart is None:
            return None
        left = restart.train_seconds + keep.seconds - self._state.position.train_seconds

        def look(now_s: float) -> None:
            if now_s >= left:
                feeder.pause()

        return look

    def save(self, *, is_best: bool) -> None:
        """Write a checkpoint, if there is a folder, and go back to this state after a death."""
        saved = None
        if self._retention is not None:
            tensors, document = self._state.snapshot()
            number = self._state.position.trained
            try:
                self._retention.save(number, tensors, document, is_best=is_best)
                saved = self._retention.latest
            except NoRoomError as error:
                self._go_on_unsaved(error)
            self.is_saved = saved is not None
        self.set_restart(saved)

    def keep(self) -> None:
        """Keep a state to go back to; where there is no room for it, the one before stays."""
        path = self._path
        if path is None:
            self.set_restart(None)
            return
        try:
            tensors, document = self._state.snapshot()
            write_checkpoint(path, tensors, document)
        except NoRoomError as error:
            self._go_on_unsaved(error)
        else:
            self.set_restart(path)

    def set_restart(self, path: Path | None) -> None:
        """Have this state be gone back to; it is in a file, or there is no such file."""
        if self._state.deaths.most:
            self.restart = Restart(self._state, self._counts, path)

    def _go_on_unsaved(self, error: NoRoomError) -> None:
        """Say so, at most once in a while."""
        self.unsaved += 1
        told, when = self._unsaved_told
        now = time.monotonic()
        if now - when >= _UNSAVED_S:
            more = self.unsaved - told - 1
            others = f" ({more} more since this was last said)" if more else ""
            log.warning("training goes on without this checkpoint%s: %s", others, error)
            self._unsaved_told = self.unsaved, now

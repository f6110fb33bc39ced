"""Ctrl-C: the first ends admission and lets what is in flight finish, the second abandons it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self, final

from geartrain.runtime.base import AbstractFeeder, log


@final
class Interruptible:
    """While this is entered, SIGINT closes the feeder; a second one asks the runtime to leave.

    Nothing is raised from the signal itself: it may come while a thread is being started or ended.
    On the way out ``KeyboardInterrupt`` is raised, unless something else already is.

    Only the main thread gets signals; elsewhere this does nothing.

    Args:
        feeder: Closed by the first SIGINT.
    """

    def __init__(self, feeder: AbstractFeeder) -> None:
        self._feeder = feeder
        self._before: Any = None
        self.asked = False
        self.abandoned = False
        """Whether what is in flight shall be left as it is; runtimes look at it between firings."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self.asked and kind is None:
            raise KeyboardInterrupt(
                "interrupted twice; what was in flight is abandoned"
                if self.abandoned
                else "interrupted; everything that was in flight has finished"
            )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.abandoned = True
            log.warning("interrupted again: leaving as soon as the firings of this moment end")
            return
        self.asked = True
        self._feeder.close()
        log.warning("interrupted: finishing what is in flight; once more abandons it")

"""Who uses a session: one call at a time.

fit() in one thread, evaluate() in another   ─► BusyError: fit() runs in thread 'MainThread'
evaluate() out of an instrument, in a pass   ─► BusyError
the same between two passes of a fit         may be: nothing is in flight
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from geartrain.errors import BusyError


@final
class Occupancy:
    """Who uses a session now.

    A call inside another one is possible in the thread of that one alone, between two passes, and
    if it leaves training as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[str] = []  # the first, and those inside of it
        self._thread = threading.current_thread()
        self._passing = False

    @contextmanager
    def by(self, call: str, *, inside: bool = False) -> Iterator[None]:
        """Use the session.

        Args:
            call: The method, for others.
            inside: Whether it may be called between two passes of another one.

        Raises:
            BusyError: Somebody else uses it.
        """
        self._enter(call, inside)
        try:
            # What is made in a call outlives it, and is to be written to and differentiated.
            with torch.inference_mode(False):
                yield
        finally:
            self._calls.pop()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A pass over data runs: nobody may begin anything."""
        before, self._passing = self._passing, True
        try:
            yield
        finally:
            self._passing = before

    def _enter(self, call: str, inside: bool) -> None:
        here = threading.current_thread()
        with self._lock:
            if self._calls and not (inside and here is self._thread and not self._passing):
                raise BusyError(self._refusal(call, here))
            if not self._calls:
                self._thread = here
            self._calls.append(call)

    def _refusal(self, call: str, here: threading.Thread) -> str:
        first = self._calls[0]
        if here is self._thread:
            return (
                f"{call}(): the session is in the middle of {first}(), in this very thread (called "
                f"by an instrument, or by the data?); call it when {first}() has returned. Between "
                "two passes, as in on_epoch_ended, an instrument may evaluate, predict and save"
            )
        return (
            f"{call}(): the session is busy: {first}() runs in thread '{self._thread.name}'. A "
            "session does one thing at a time: wait until that has returned, or give each thread "
            "a session with modules of its own"
        )

"""The bound of a test, kept by one thread that looks on instead of two threads a test.

A thread of Python's and one of C's, made and ended for each test, take a millisecond: as long as
many a test.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
import pytest_timeout  # type: ignore[import-untyped]
from _pytest.faulthandler import fault_handler_stderr_fd_key

EVERY_S: Final = 1.0
"""So often is looked: so much later than it should may a test be ended."""
BEFORE: Final = 0.04
"""Of its bound: so long before it threads are printed in C, in case none of Python's can run."""


class Running(NamedTuple):
    """A test that runs: its end at the latest, its bound (s), and how it is ended."""

    until: float
    bound: float
    end: Callable[[], None]


class Watch:
    """Takes the place of the timers of pytest-timeout's method "thread", and of pytest's own.

    Args:
        config: Whose errors C prints the stacks of threads to.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._running: Running | None = None
        self._printed: Running | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        if settings.method != "thread":
            return None
        until, bound = time.monotonic() + settings.timeout, settings.timeout
        self.begin(Running(until, bound, lambda: pytest_timeout.timeout_timer(item, settings)))
        item.cancel_timeout = self.cancel  # type: ignore[attr-defined]
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_on, daemon=True)
            self._thread.start()
        return True

    def pytest_unconfigure(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()

    def begin(self, test: Running) -> None:
        """A test begins: it is ended once its time is up."""
        self._running = test

    def cancel(self) -> None:
        """It has ended by itself."""
        self._running = None

    def look(self, now: float) -> None:
        """End the test that has run for too long; C prints threads if this is not called again."""
        running = self._running
        if running is not None and now >= running.until:
            running.end()
        elif running is not None and running is not self._printed:
            left = running.until - now - BEFORE * running.bound
            errors = self._config.stash[fault_handler_stderr_fd_key]
            faulthandler.dump_traceback_later(max(left, EVERY_S), file=errors)
        elif running is None and self._printed is not None:
            faulthandler.cancel_dump_traceback_later()
        self._printed = running

    def _look_on(self) -> None:
        while not self._over.wait(EVERY_S):
            self.look(time.monotonic())
        self.cancel()
        self.look(time.monotonic())

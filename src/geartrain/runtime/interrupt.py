"""Ctrl-C and SIGTERM: the first ends admission and lets what is in flight finish.

    first Ctrl-C, or SIGTERM     nothing more is asked of the data; what is in flight finishes
    second Ctrl-C                what is in flight is abandoned

Signals set flags, and whoever runs looks at them between two things that belong together. Nothing
is raised out of a signal, as that may come while a thread is started, a lock is held or half of the
weights are stepped; but where the main thread is in code of the user, which may block for ever: at
the first signal in what ``asks_data``, at the second Ctrl-C in what is ``interruptible`` too.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar, final

from geartrain.engine import router
from geartrain.engine.worker import WorkerState
from geartrain.runtime.base import AbstractFeeder, Feeder, log

F = TypeVar("F", bound=Callable[..., Any])

_SAID_S: Final = 1.0  # so long the end waits for a stream that takes no message


@final
class Terminated(KeyboardInterrupt):
    """SIGTERM has come, and was treated as a first Ctrl-C."""


@final
class Interruptible:
    """While this is entered, SIGINT and SIGTERM ask for the end of what runs inside.

    On the way out ``KeyboardInterrupt`` is raised (after SIGTERM: ``Terminated``), unless something
    else already is. Of one inside of another, the inner one hears the signals; what has been asked
    of the other before is asked of it.

    Only the main thread gets signals; elsewhere this does nothing. A handler of SIGTERM that the
    program has of its own stays in charge.

    Args:
        feeder: Closed by the first signal. None: nothing is fed, as between two passes; then a
            second Ctrl-C is raised wherever it comes.

    Attributes:
        asked_s: When the first signal came, by ``time.monotonic``; None: none has.
        abandoned: Whether what is in flight shall be left as it is; runtimes look at it between
            firings.
        left: What the message says of things that were left behind.
    """

    _innermost: ClassVar[Interruptible | None] = None

    def __init__(self, feeder: AbstractFeeder | None = None) -> None:
        self._feeder = feeder
        self._before: dict[int, Any] = {}
        self._outer: Interruptible | None = None
        self._process = os.getpid()
        self._number: int = signal.SIGINT
        self.asked_s: float | None = None
        self.abandoned = False
        self.left = ""
        self._unsaid: list[_thread.LockType] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            outer = self._outer = Interruptible._innermost
            if outer is not None and outer._process != self._process:
                outer = None  # of the process that has forked this one
            Interruptible._innermost = self
            if outer is not None and outer.asked:
                self._ask(outer._number)
            for number in (signal.SIGINT, signal.SIGTERM):
                ours = outer is not None and number in outer._before
                before = signal.getsignal(number)
                if before is not None and (
                    number == signal.SIGINT or ours or before == signal.SIG_DFL
                ):
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if Interruptible._innermost is self:
            Interruptible._innermost = self._outer
        for unsaid in self._unsaid:  # last, as a signal may end the wait
            unsaid.acquire(timeout=_SAID_S)
        if kind is None:
            self.check()

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.asked_s is not None

    def check(self) -> None:
        """Raise what was asked for, at a time that suits.

        Raises:
            KeyboardInterrupt: A signal has come.
        """
        if self.asked:
            raise self._error()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._hand_on(number, frame)
        elif not self.asked:
            self._ask(number)
            once_more = "; once more abandons it" if number == signal.SIGINT else ""
            self._say(f"{_word(number)}: finishing what is in flight{once_more}")
            if _runs(_ASKING, frame):
                raise self._error()
        elif number == signal.SIGINT:
            self.abandoned = True
            self._say("interrupted again: leaving as soon as the firings of this moment end")
            if self._feeder is None or _runs(_ASKING | _INTERRUPTIBLE, frame):
                raise self._error()

    def _say(self, words: str) -> None:
        """Log it from a thread: streams are not reentrant, and the main thread may hold one.

        ``threading`` takes locks to start one, which the main thread may hold as well; and it would
        take a thread for its own that asks for its name, as a record of the log does.
        """
        if not log.isEnabledFor(logging.WARNING):
            return
        record = log.makeRecord(log.name, logging.WARNING, __file__, 0, words, (), None)
        unsaid = _thread.allocate_lock()
        unsaid.acquire()

        def say() -> None:
            try:
                log.handle(record)
            finally:
                unsaid.release()

        with suppress(RuntimeError):  # no more threads: what was asked for is done all the same
            _thread.start_new_thread(say, ())
            self._unsaid.append(unsaid)

    def _ask(self, number: int) -> None:
        self._number, self.asked_s = number, time.monotonic()
        if self._feeder is not None:
            self._feeder.close()

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        """In a process that was forked meanwhile nobody looks at flags: do as if we were not."""
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _error(self) -> KeyboardInterrupt:
        kind = Terminated if self._number == signal.SIGTERM else KeyboardInterrupt
        if self.abandoned:
            return kind("interrupted twice; what was in flight is abandoned")
        return kind(f"{_word(self._number)}; everything that was in flight has finished{self.left}")


def asks_data(function: F) -> F:
    """Mark a function that asks the user's code for data: a signal is raised inside of it."""
    _ASKING.add(function.__code__)
    return function


def interruptible(function: F) -> F:
    """Mark a function that calls the user's code: the second Ctrl-C is raised inside of it."""
    _INTERRUPTIBLE.add(function.__code__)
    return function


_ASKING: Final[set[CodeType]] = {Feeder._pull.__code__}
_INTERRUPTIBLE: Final[set[CodeType]] = {
    WorkerState._compute.__code__,  # modules, criteria; an optimiser's steps are taken outside
    router._apply.__code__,  # predicates, movers
}


def _runs(some: Collection[CodeType], frame: FrameType | None) -> bool:
    """Whether the main thread is inside of any of these functions."""
    while frame is not None:
        if frame.f_code in some:
            return True
        frame = frame.f_back
    return False


def _word(number: int) -> str:
    return "terminated" if number == signal.SIGTERM else "interrupted"

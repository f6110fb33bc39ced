"""Modules that do harm to the process that they run in; light, as worker processes import them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Struck(nn.Module):
    """Does something to its process when so many rows have come by, if it is a worker's.

    Args:
        how: What it does.
        rows: After how many.
        backward: In the backward of that firing.
    """

    def __init__(self, how: Callable[[], None], rows: int = 100, *, backward: bool = False) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.how, self.rows, self.backward, self.home = how, rows, backward, os.getpid()
        self.register_buffer("seen", torch.zeros(()))  # shared, as all buffers
        self.register_buffer("struck_s", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        if os.getpid() != self.home:
            self.seen += x.shape[0]
            if 0 < self.rows <= self.seen:
                if not self.backward:
                    self.strike()
                elif y.requires_grad:
                    y.register_hook(self.strike)
        return y

    def strike(self, gradient: Tensor | None = None) -> None:
        self.struck_s.fill_(time.monotonic())
        self.how()

    def harmless(self) -> None:
        """From now on it does nothing."""
        self.rows = 0


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(3)


def leave_politely() -> None:
    sys.exit(4)


def interrupt() -> None:
    raise KeyboardInterrupt


def run_out_of_memory() -> None:
    raise MemoryError("no room for 3 rows")


def raise_with_notes() -> None:
    try:
        raise OSError("the disk is gone")
    except OSError as error:
        wrapped = RuntimeError("the table cannot be read")
        wrapped.add_note("it was table 7")
        raise wrapped from error


class Locked(nn.Module):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.lock = nn.Linear(3, 3), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.map(x)


class Homesick(nn.Module):
    """Cannot be made again in another process, as one whose package is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)

    def __reduce__(self):
        return _import, ("a_package_that_is_nowhere",)


def _import(name: str) -> object:
    return __import__(name)


class Waiting(nn.Linear):
    """Made again, it waits for what does not come, so many seconds."""

    def __init__(self, seconds: float = 100.0) -> None:
        super().__init__(3, 3)
        self.home, self.seconds = os.getpid(), seconds

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if os.getpid() != self.home:
            threading.Event().wait(self.seconds)

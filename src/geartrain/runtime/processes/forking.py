"""What a process that forks workers does for them: it has at hand what each would have to get by
itself, has them live, and hears of their ends."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

import torch

from geartrain.native import library
from geartrain.runtime.kernel_threads import give_back_team

_PR_SET_PDEATHSIG: Final = 1


def get_ready() -> None:
    """Load what every worker wants, once: it costs a fork 40 ms of CPU to do so in its first pass.

    What is loaded is not written to any more: its pages stay in common. Of what has been computed
    since the interpreter began, a team of OpenMP may be left, which forks would wait for.
    """
    library.current()
    torch.manual_seed(0)  # each worker is given a seed of its own with a pass
    give_back_team()
    gc.collect()
    gc.freeze()


def be_a_worker(parent: int, live: Callable[[], None]) -> NoReturn:
    """In a fork: live, and end, in whatever way; the kernel ends it when the parent is gone.

    Args:
        parent: The process that has forked this one.
        live: Until the worker is over with.
    """
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it has died before we asked
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            live()
            status = 0
    except BaseException:  # noqa: BLE001 - nothing of the parent's may run on here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(workers: set[int]) -> Iterator[tuple[int, int]]:
    """Workers that have ended, which are taken out, and how: a signal is below 0."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        workers.discard(pid)
        yield pid, os.waitstatus_to_exitcode(status)

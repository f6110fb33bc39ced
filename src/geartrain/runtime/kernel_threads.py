"""The thread that waits for a pass leaves the cores to those who compute; who forks has no team.

    calling thread   its team of kernel threads ── given back ──┐           ┌── its number as before
    workers                                         teams of their own, one thread for each core

OpenMP keeps a team for every thread that has ever computed with several. While there are more
threads in all teams together than cores, none of them spins for a moment between two kernels: each
sleeps and is woken by the system, which takes longer than many kernels do. One worker with two
kernel threads on two cores then trained digits as fast as with one, and 1.5 times as fast without
the team of the thread that had made the weights.

A fork has the calling thread's team by name, and none of its threads: it would wait for them for
ever at the first kernel that is shared out.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch

_SOFT: Final = 1  # omp_pause_soft: whoever computes with several threads later has a team again


@contextmanager
def cores_left_to_workers() -> Iterator[None]:
    """Meanwhile the calling thread computes with one kernel thread, and has no others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    give_back_team()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def with_kernel_threads(number: int | None) -> Iterator[None]:
    """Compute with as many as a worker has: waking a pool of others for one step takes longer.

    Args:
        number: Of them; None: what is set stays.
    """
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def give_back_team() -> None:
    """End the calling thread's kernel threads; it has others when it next computes with several."""
    give_back = _pause()
    if give_back is not None:
        give_back(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of OpenMP 5 in torch's own runtime; None: it has none."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(torch._C.__file__)  # and whatever that was linked with
    found: Callable[[int], int] | None = getattr(library, "omp_pause_resource_all", None)
    return found

"""The firing that a thread is in, for which what is made of weights may be kept.

A loop that runs whole calls its modules many times in one firing, and all turns of it see one
version of the weights. What a kernel makes of them for its first call will do for the others. No
counter of torch's tells the same: weights may be written by another process, which none counts.

From one firing of a worker to the next, in one pass, torch does tell, of parameters: steps have it
count what they write, and so does whoever brings newer weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, final


@final
class _Firing(threading.local):
    number = 0
    of_pass = 0


firing: Final = _Firing()
"""In this thread: its number; 0: there is none, or weights may change while it lasts. And the
number of the pass of whose worker it is; 0: of none."""

_numbers = count(1)


@final
class _Pass:
    number = 0


this_pass: Final = _Pass()
"""Its number, in this process, from 1: between passes weights may be written to in ways that torch
does not count."""


@contextmanager
def steady() -> Iterator[None]:
    """Weights are taken to be what they are now until this is left, or what this is in."""
    before = firing.number
    firing.number = before or next(_numbers)
    try:
        yield
    finally:
        firing.number = before

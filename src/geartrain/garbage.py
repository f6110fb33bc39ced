"""What the collector of cycles looks at while a model is trained."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ONE: Final = threading.Lock()


@contextmanager
def old_objects_spared() -> Iterator[None]:
    """Objects that are there already are not looked at meanwhile.

    torch and what it brings are some 300,000 objects, which a full collection goes through in a
    sixth of a second and finds nothing: training makes enough that lives for a while to ask for one
    every few seconds. What is made meanwhile is collected as ever; cycles of before that become
    garbage meanwhile are collected afterwards. Where somebody has frozen objects, nothing is done.
    """
    with _ONE:
        mine = not gc.get_freeze_count()
        if mine:
            gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()

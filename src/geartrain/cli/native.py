"""``geartrain native``: compile the kernels now, with all the time they need."""

from __future__ import annotations

from typing import Final

from geartrain.cli.exits import FAILED, fail
from geartrain.native.compilers import Unavailable
from geartrain.native.library import load

SECONDS: Final = 1800.0
"""For compiling: nobody waits who has not asked for it."""


def native() -> None:
    """Find or compile the kernels, also where that has just failed, and say where they are."""
    try:
        found = load(SECONDS, again=True)
    except Unavailable as reason:
        raise fail(f"no native kernels, torch does their work: {reason}", FAILED) from reason
    for path in found.paths:
        print(f"native kernels: {path}")

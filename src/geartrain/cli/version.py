"""The version of the package, of what is installed or of the tree that runs."""

from __future__ import annotations

import sys


def version() -> str:
    """Such as ``0.1.0``."""
    return str(sys.modules["geartrain"].__dict__["__version__"])

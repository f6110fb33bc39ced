"""Lets the tests of this folder import ``rig``, which runs one pass over data."""

from __future__ import annotations

import sys
from pathlib import Path

if (folder := str(Path(__file__).parents[1] / "oracle")) not in sys.path:
    sys.path.insert(0, folder)

"""Lets the tests of this folder import ``rig_pairs``, and ``rig``, which runs a pass over data."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

for folder in (str(HERE.parent / "oracle"), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

"""Lets the tests of this folder import ``rig`` and ``twins``, which lie beside them."""

from __future__ import annotations

import sys
from pathlib import Path

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)

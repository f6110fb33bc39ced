"""Run by ``test_hostile``: tests on kernels from a file, those that watch themselves.

Its arguments are the files, as of a path of the system, and what pytest is to be given.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import geartrain.nn  # noqa: F401 (models add their kernels)
from geartrain.native import library

if __name__ == "__main__":
    kernels = library.Library([*map(Path, sys.argv[1].split(os.pathsep))])
    library._settled, library._library = True, kernels
    library.load = lambda *_, **__: kernels
    sys.exit(pytest.main(sys.argv[2:]))

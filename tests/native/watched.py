"""Run by ``test_hostile``: tests on kernels from a file, those that watch themselves.

Its arguments are the file and what pytest is to be given.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from geartrain.native import library

if __name__ == "__main__":
    kernels = library.Library(Path(sys.argv[1]))
    library._settled, library._library = True, kernels
    library.load = lambda *_, **__: kernels
    sys.exit(pytest.main(sys.argv[2:]))

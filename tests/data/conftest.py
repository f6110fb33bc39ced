"""What the tests of the loaders share: the real data, where there is any."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def real_data() -> Path:
    """The data folder, or a skip: these tests need files that are not part of the repository."""
    if not (value := os.environ.get("GEARTRAIN_DATA")):
        pytest.skip("set GEARTRAIN_DATA to a folder with the data sets to run this test")
    return Path(value)

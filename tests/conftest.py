"""What every test may rely on: reproducible examples, one kernel thread, a place for real data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Same examples on every run and machine; a shared, busy core must not fail a test by its clock.
settings.register_profile("geartrain", deadline=None, derandomize=True)
settings.load_profile("geartrain")


@pytest.fixture(autouse=True)
def one_kernel_thread() -> Iterator[None]:
    """Sums come out in the same order every time, also after a test that asked for more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the real data sets (``sst/``, ``mnist/``, ...); skips when there is none."""
    value = os.environ.get("GEARTRAIN_DATA")
    if not value:
        pytest.skip(
            "needs real data: set GEARTRAIN_DATA to the folder that holds sst/, mnist/, ..."
        )
    folder = Path(value)
    if not folder.is_dir():
        pytest.fail(
            f"GEARTRAIN_DATA={value!r} is not a folder: set it to the one that holds sst/, mnist/, "
            "... or unset it to skip the tests that need real data"
        )
    return folder

"""Workers that Ray starts, for tests: one Ray for all of them, on this host."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest

from geartrain.runtime.hosts.on_ray import Ray

RAY = (
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make setup-ray"),
)
"""Marks of tests that want Ray."""


@cache
def on_ray(workers: int) -> Ray:
    """One for all tests of a process; it leaves room for those of single tests."""
    return Ray(workers, kernel_threads=1, resources={"CPU": 0.1})

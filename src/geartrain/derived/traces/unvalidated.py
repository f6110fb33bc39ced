"""Distributions of torch that do not look at what they are given, while functions are traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from torch.distributions import Distribution

_lock = Lock()
_traces: list[bool] = []
"""For each trace that is under way, what had been asked for before the first of them."""


@contextmanager
def unvalidated() -> Iterator[None]:
    """Distributions that are asked for no checks by themselves make none meanwhile.

    ``Normal(mean, deviation)`` would look whether all deviations are positive: at values, which a
    trace cannot follow. Of traces at the same time the last one restores what there was.
    """
    with _lock:
        _traces.append(_traces[0] if _traces else bool(Distribution._validate_args))
        Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        with _lock:
            before = _traces.pop()
            if not _traces:
                Distribution.set_default_validate_args(before)

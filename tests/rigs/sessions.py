"""A session told in one flat list of words, as tests pass them through."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import geartrain as gt

GROUPS = {"schedule": gt.Schedule, "compute": gt.Compute, "reading": gt.Reading}


def session_of(graph: gt.Graph, **told: Any) -> gt.Session:
    """``Session`` with what belongs into its groups put there."""
    for name, group in GROUPS.items():
        words = {f.name for f in fields(group)} & told.keys()
        if words:
            assert name not in told, f"{name}= beside {sorted(words)}"
            told[name] = group(**{word: told.pop(word) for word in words})
    return gt.Session(graph, **told)

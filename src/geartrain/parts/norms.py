"""The norm of a whole model's gradient, of which each part knows its own piece.

    part a ─ step ─► |g_a| ┐
    part b ─ step ─► |g_b| ├─► √(|g_a|² + |g_b|² + |g_c|²)   what Clip(over="all") limits
    part c ─ step ─► |g_c| ┘

Parts step by themselves, so at a step there is no gradient of the others that would go with it:
their norms are those of their last steps, and 0 before the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor

from geartrain.parts.rules import Rules

Norm: TypeAlias = float | Tensor
"""A 2-norm; of a part on another device than the host a tensor without dimensions, there."""


@final
class Norms:
    """Norms of the parts of one model at their last steps; copies of a part count as one.

    Workers write entries of their own parts and read all; nothing is locked, as no entry comes or
    goes.

    Args:
        names: Of the parts.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._last: dict[str, Norm] = {_original(name): 0.0 for name in names}

    def note(self, name: str, norm: Norm) -> None:
        """A part steps with a gradient of this norm, before any limit."""
        self._last[_original(name)] = norm

    def last(self, name: str) -> float:
        """Of the last step of a part; waits for its device."""
        return float(self._last[_original(name)])

    def of_all(self) -> float:
        """The norm of all parts together, at their last steps; waits for their devices."""
        return math.hypot(*map(float, self._last.values()))

    def of_all_on(self, device: torch.device) -> Tensor:
        """The same as a tensor on a device that a part lives on; the host waits for nothing."""
        known = [x for x in self._last.values() if not isinstance(x, Tensor)]
        total = torch.full((), math.hypot(*known), dtype=torch.float64, device=device)
        for norm in self._last.values():
            if isinstance(norm, Tensor):
                total = torch.hypot(total, norm.to(device, torch.float64))
        return total


class Limited(Protocol):
    """What a limit must know of a part; ``parts.part.PartState`` is one."""

    rules: Rules
    norms: Norms | None


def share_norms(parts: Mapping[str, Limited]) -> None:
    """Let the parts of one model know each other's norms, if one of them is limited by all."""
    limits = (part.rules.clip for part in parts.values())
    if any(clip is not None and clip.over == "all" for clip in limits):
        norms = Norms(parts)
        for part in parts.values():
            part.norms = norms


def _original(name: str) -> str:
    """Copies of a part are called ``name#1`` and so on."""
    return name.partition("#")[0]

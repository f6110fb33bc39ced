"""Instances of several updates that go back through a loop in one firing.

Where all kernels tell the gradients of rows apart, they go back together; else those of each update
by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from geartrain.frames.message import IntArray
from geartrain.nodes.loop.turn import Inner, KeptJointCall, Turn
from geartrain.nodes.weights import AbstractWeights

Updates: TypeAlias = Mapping[str, IntArray]
"""By part, of which update the gradient of each place in a turn is; without those parts of which
all are of the present one."""


def updates_of(turn: Turn, which: IntArray, weights: Mapping[str, AbstractWeights]) -> Updates:
    """Of which updates instances are.

    Args:
        turn: The turn.
        which: Their places in it.
        weights: The parts, by name.
    """
    found: dict[str, IntArray] = {}
    slots = turn.slots[which]
    for name, each in weights.items():
        updates = each.updates_of(slots)
        if updates is not None:
            found[name] = np.zeros(turn.slots.size, np.int64)
            found[name][which] = updates
    return found


def is_apart(inner: Inner) -> bool:
    """Whether a module's gradients of several updates may come in one call."""
    if inner.weights is None:
        return True
    return _kernel_is_apart(inner.kernel) if inner.choice is None else inner.choice.apart


def are_apart(turn: Turn, inner: Sequence[Inner]) -> bool:
    """Whether that is so of all calls of a turn, as they have been computed."""
    if turn.tape is not None:
        return False
    for kept in turn.kept:
        if kept is None:
            continue
        kernels = kept.each if isinstance(kept, KeptJointCall) else (kept.kernel,)
        if not all(map(_kernel_is_apart, filter(None, kernels))):
            return False
    return True


def of_one_update(which: IntArray, updates: Updates) -> Iterator[IntArray]:
    """The instances of each update by themselves, where parts count theirs differently too.

    Args:
        which: Places in the turn.
        updates: By part.
    """
    each = np.stack([of[which] for of in updates.values()])
    _, groups = np.unique(each, axis=1, return_inverse=True)
    groups = groups.ravel()
    for group in range(int(groups.max()) + 1):
        yield which[groups == group]


def _kernel_is_apart(kernel: object) -> bool:
    return bool(getattr(kernel, "apart", False))

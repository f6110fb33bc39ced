"""What has been traced in this process, for all functions of equal structure.

function ─► structure ─┐
inputs   ─► kind      ─┴─► Known: programs, or why there are none; and who was faster
                        │ new: traced once, whoever asks waits
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from geartrain.derived.cut import Cut, by_whom
from geartrain.derived.derivation import RestlessError
from geartrain.derived.derivation import derive as derive
from geartrain.derived.structure import Same, Structure
from geartrain.errors import GraphError
from geartrain.native.heap import heap
from geartrain.nodes.kernel import may_have_kernel

log = logging.getLogger("geartrain.nn")

MOST_KNOWN: Final = 256
"""Structures that are remembered, each for one kind of inputs; the oldest is forgotten."""


@final
class Known:
    """What became of tracing one structure.

    Args:
        cut: Its programs; None: there are none.
        refused: Why not; None: there are.
        restless: Whether the function changes its own settings, so that none is known by them.

    Attributes:
        ratios: What the programs take of what running again takes, as measured, by the size of a
            firing.
        by_torch: By the size of a firing, whether torch takes less than C, where that was measured.
        told: Whether somebody was told that it is refused.
    """

    def __init__(
        self, cut: Cut | None = None, refused: str | None = None, restless: bool = False
    ) -> None:
        self.cut, self.refused, self.restless = cut, refused, restless
        self.ratios: dict[int, float] = {}
        self.by_torch: dict[int, bool] = {}
        self.told = False


@final
class Registry:
    """Traces by structure and kind, the oldest forgotten; any thread may ask.

    Args:
        most: How many are remembered.

    Attributes:
        traced: How many were made.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most, self.traced = most, 0
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
        self._lock = threading.RLock()

    def ask(
        self,
        name: str,
        function: Callable[..., Any],
        structure: Structure,
        inputs: Sequence[Tensor],
    ) -> Known:
        """What is known of a function, which is traced if need be.

        Args:
            name: Of the node, for the log.
            function, structure: The function and what it looks like now.
            inputs: What it will be called with.
        """
        if isinstance(function, nn.Module) and not may_have_kernel(function):
            return Known(refused="a hook hangs on it, or a forward of its own")
        with self._lock:
            found = self.seen(function, structure, inputs)
            if found is None:
                found = self._made(name, function, inputs)
                shared, own = _keys(function, structure, inputs)
                key = own if found.cut is not None and found.cut.private else shared
                if key is not None:
                    self._known[key] = found
                    while len(self._known) > self._most:
                        self._known.popitem(last=False)
            return found

    def seen(
        self, function: Callable[..., Any], structure: Structure, inputs: Sequence[Tensor]
    ) -> Known | None:
        """What is known of a function already; None: nothing."""
        with self._lock:
            for key in _keys(function, structure, inputs):
                if key in self._known:
                    self._known.move_to_end(key)
                    return self._known[key]
        return None

    def forget(self) -> None:
        """Start anew."""
        with self._lock:
            self._known.clear()

    def _made(self, name: str, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Known:
        began = time.perf_counter()
        self.traced += 1
        heap.tried()
        try:
            cut = derive(function, inputs)
        except GraphError as error:
            return Known(None, str(error), isinstance(error, RestlessError))
        told = by_whom(cut)
        log.info("'%s' was traced in %.0f ms%s", name, 1e3 * (time.perf_counter() - began), told)
        return Known(cut)


def kind_of(inputs: Sequence[Tensor]) -> Hashable:
    """What a trace takes as constant of its inputs."""
    return tuple([(x.dtype, x.shape[1:], x.device) for x in inputs])


def _keys(
    function: Callable[..., Any], structure: Structure, inputs: Sequence[Tensor]
) -> tuple[Hashable, ...]:
    """That of the structure, and that of this one function among those of its structure."""
    if structure.key is None:
        return None, None
    shared = (structure.key, kind_of(inputs), torch.get_default_dtype())
    return shared, (shared, Same(function))


REGISTRY: Final = Registry()
"""The one of this process."""

"""Tensors of a trace that are the same in every call: what is made of nothing that is given.

constant of the code, arange(3), ones(3, 3).triu(1)  ─►  a tensor, found once
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, fx

from geartrain.nn.draws import drawn

aten = torch.ops.aten

_UNKNOWN: Final = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}
"""What has no meaning yet."""


@final
class StaticTensors:
    """Those of one graph.

    Args:
        constants: Tensors that its nodes name, of which nobody else has any.
    """

    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        self._constants = constants
        self._found: dict[fx.Node, Tensor | None] = {}

    def of(self, x: fx.Node) -> Tensor | None:
        """What it is in every call; None: that depends on the call."""
        if x not in self._found:
            self._found[x] = self._made(x)
        return self._found[x]

    def _made(self, x: fx.Node) -> Tensor | None:
        if x.op == "get_attr":
            return self._constants.get(str(x.target))
        target: Any = x.target
        plain = isinstance(target, torch._ops.OpOverload) and target not in _UNKNOWN
        if x.op != "call_function" or not plain or target is drawn:
            return None
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
        if any(self.of(y) is None for y in x.all_input_nodes):
            return None
        args, kwargs = fx.node.map_arg((x.args, x.kwargs), self.of)
        with torch.no_grad():
            found = target(*args, **kwargs)
        return found if isinstance(found, Tensor) and found.is_cpu else None

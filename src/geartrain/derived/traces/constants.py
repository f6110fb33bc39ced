"""Tensors that are the same in every call: those that code has, and what it makes of them alone.

torch.ones(3, 3).triu(1).bool()  ─►  computed once, when steps are written
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, fx

from geartrain.derived.traces.record import draws

MOST_CONSTANT: Final = 1 << 16
"""Entries of a tensor that are computed when steps are written, and kept with them."""


@final
class Constants:
    """Those of one graph.

    Args:
        tensors: That its nodes name.
        alien: Whether some may be somebody's, who may write into them: what is computed of those is
            another thing then.

    Attributes:
        alien: Likewise.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, alien: bool = False) -> None:
        self._tensors, self.alien = tensors, alien
        self._known: dict[fx.Node, bool] = {}
        self._found: dict[fx.Node, Any] = {}

    def has(self, x: fx.Node) -> bool:
        """Whether a node is one."""
        if x not in self._known:
            self._known[x] = self._is_one(x)
        return self._known[x]

    def _is_one(self, x: fx.Node) -> bool:
        if x.op == "get_attr":
            return True
        sources = x.all_input_nodes
        if x.op != "call_function" or draws(x) or (sources and self.alien):
            return False
        return all(self.has(y) for y in sources)

    def of(self, x: fx.Node) -> Any:
        """What it is: a tensor, or several."""
        if x.op == "get_attr":
            return self._tensors[str(x.target)].detach()
        if x not in self._found:
            args, kwargs = fx.node.map_arg((x.args, x.kwargs), self.of)
            function: Any = x.target
            with torch.no_grad():
                self._found[x] = function(*args, **kwargs)
        return self._found[x]

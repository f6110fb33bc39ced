"""What workers send of their state: as it is meanwhile, and all of it at the end of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from geartrain.codec import decode
from geartrain.engine.engine import Engine
from geartrain.nodes.loss import Objective
from geartrain.parts.snapshot import take_over
from geartrain.runtime.processes.lived import take_lived


@final
class Returned:
    """Puts it where the engine of the parent has it.

    Args:
        engine: Of the pass.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ends = engine.ends(engine.wiring.nodes.values())
        self.nodes = {node.name: node for node in engine.wiring.nodes.values()}

    def pulse(self, document: Any) -> None:
        """Sums of losses and ages of gradients up to now, as instruments see them."""
        for number, sums in document["sums"].items():
            end = self._ends[int(number)]
            assert isinstance(end, Objective)
            end.sums.put(sums)
        for name, counts in document["staleness"].items():
            self._engine.parts[name].counting.staleness.load(counts)

    def take(self, what: str, document: Any, tensors: Mapping[str, Tensor]) -> None:
        """State of what lives in a worker, at the end of the pass."""
        if what == "output":
            end = self._ends[document]
            if end.collected is not None:
                serials, vertices = tensors["serials"].numpy(), tensors["vertices"].numpy()
                lengths = tensors["lengths"].numpy() if "lengths" in tensors else None
                payload = tuple(x for name, x in tensors.items() if name.startswith("payload "))
                end.collected.append((serials, vertices, lengths, payload))
        elif what == "part":
            part = self._engine.parts[document["part"]]
            take_over(part, tensors, document["document"], document["shared"])
            part.frozen = document["frozen"]
        elif what == "memory":
            memory = dict(tensors), decode(document["document"], document["node"])
            self.nodes[document["node"]].recall(memory)  # type: ignore[arg-type]
        elif what == "lived":
            take_lived(self._engine.made_of.graph, document)
        elif what == "member":
            self._engine.sharing.take_back(tensors, document)

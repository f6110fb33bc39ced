"""Streams of bundles that are held, and who may read them.

    held = states.hold()              rows behind it have a handle, in a state column of its own
    rows.attend(held, module)         reads by that handle

A column of a handle has a name that no user's function can ask for. A row has it wherever it is
behind the ``hold``: behind a merge if all sources have it, behind a join if one of them has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.frames.frame import Schema
from geartrain.graph.operator import ROWS, AbstractOperator, Made, Spec, handle_of
from geartrain.nodes.memory import HoldNode
from geartrain.nodes.node import Place
from geartrain.nodes.weights import AbstractWeights

LENGTH: Final = 4
"""Rows of a memory that a dry run imagines."""


@final
class Holding(AbstractOperator):
    """Bundles are held, to be read by reference."""

    kind = "hold"

    def __init__(self, name: str, source: tuple[AbstractOperator, int]) -> None:
        super().__init__(name, [[source]])
        self.payload: tuple[Tensor, ...] | None = None
        """Meta tensors of the rows that are held, once they are known."""
        self.readers: list[str] = []
        """Who reads it, for drawings."""

    @property
    def column(self) -> str:
        return handle_of(self.name)

    def detail(self) -> str:
        readers = ", ".join(self.readers)
        return f"read by {readers}, on one worker" if readers else "read by nobody"

    def remedy(self) -> str:
        return (
            f"it holds memory '{self.name}': rows that attend to it begin with it: pooled "
            "(held.through(...)), ungrouped (held.ungroup()) or in a concat(), and read it with "
            "rows.attend(held, module); or leave hold() out"
        )

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        if not spec.bundled:
            raise GraphError(
                f"'{self.name}': hold() is for bundles, but single rows come in; declare the input "
                "with bundle=True, or group(..., how='bundle') first"
            )
        self.payload = spec.payload
        return [Spec(spec.columns | {self.column}, spec.payload, True)]

    def read(self, name: str, given: Spec) -> tuple[Tensor, ...] | None:
        """What a row reads, for each row: meta tensors ``(ROWS, LENGTH, ...)``, and the mask.

        Args:
            name: Of the operator that reads.
            given: What comes to it.

        Returns:
            None: the memory's shape is not known.

        Raises:
            GraphError: Rows that come have no handle.
        """
        if self.column not in given.columns:
            raise GraphError(
                f"'{name}' reads memory '{self.name}', but not all rows that come to it have come "
                f"from there; let what enters be made of what '{self.name}' sends on (pooled, or "
                "ungrouped), or concat() it with such a row"
            )
        if self.payload is None:
            return None
        mask = torch.empty((ROWS, LENGTH), dtype=torch.bool, device="meta")
        return (*(x.new_empty((ROWS, LENGTH, *x.shape[1:])) for x in self.payload), mask)

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return HoldNode(place, place.schema.state[self.column])


def sample_mask() -> Tensor:
    """Masks to try a function on: each row has something to read."""
    host = torch.device("cpu")
    lengths = torch.tensor([LENGTH, 1, LENGTH - 1], device=host)
    return torch.arange(LENGTH, device=host) < lengths[:, None]

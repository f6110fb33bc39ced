"""The gated graph network of ``geartrain_baselines.graphs`` on PyTorch Geometric.

    states h (v, hidden) ─► messages (senders, hidden) ─► propagate ─► added at the target ─► GRU
                            a sender is (vertex, type)       ▲
                                        edge_index: sender ─► target

PyTorch Geometric's own ``GatedGraphConv`` knows no edge types, has no bias in its messages and has
weights of their own for every step. To call it once for each type would take a propagation for
each; here the types are on the sender's side, so that a step is one propagation, and all steps
share their weights, as in the recipes. Parameters have the shapes and the order of
those of ``GatedGraphNet``.

``DataList`` collates with ``Batch.from_data_list``, as PyTorch Geometric's ``DataLoader`` does;
blocks cut from columns come several times as fast.

Needs ``torch_geometric``; nothing else of this package imports this file before it is asked for.

Sources: Li et al. 2016, arXiv:1511.05493; Fey and Lenssen 2019, arXiv:1903.02428.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor

from geartrain_baselines.graphs import (
    BUMPS,
    Block,
    Graphs,
    Method,
    edge_scales,
    first_states,
    plan_dense,
    plan_sparse,
)


@final
class TypedGatedGraphConv(MessagePassing):  # type: ignore[misc]
    """Vertex states after some steps, with PyTorch's own initial values.

    Args:
        hidden: Width of a state; what vertices begin with is filled up with zeros.
        types: Number of edge types.
        steps: How often messages pass.
        method: ``sparse`` makes the messages of the (vertex, type) that occur, all others those of
            all.
        lengths: Whether edges have lengths.
    """

    def __init__(
        self, hidden: int, types: int, steps: int, *, method: Method, lengths: bool = False
    ) -> None:
        super().__init__(aggr="add")
        self.hidden, self.steps = hidden, steps
        self.linear = nn.Linear(hidden, types * hidden)  # "message" is a method here
        self.gru = nn.GRUCell(hidden, hidden)
        self.scale = nn.Linear(BUMPS, hidden) if lengths else None
        self._plan = plan_sparse if method == "sparse" else plan_dense

    def forward(self, block: Block) -> Tensor:
        """Return states ``(v, hidden)``."""
        h = first_states(block, self.hidden)
        messages = self._plan(self.linear, block)
        edge_index = torch.stack((messages.at, block.target))
        scale = None if self.scale is None else edge_scales(self.scale, block.length)
        for _ in range(self.steps):
            made = messages.make(h)
            # propagate_type: (x: OptPairTensor, scale: OptTensor)
            heard = self.propagate(edge_index, x=(made, h), scale=scale, size=(len(made), len(h)))
            h = self.gru(heard, h)
        return h

    def message(self, x_j: Tensor, scale: OptTensor) -> Tensor:
        """What edges carry, ``(e, hidden)``."""
        return x_j if scale is None else x_j * scale


@final
class DataList:
    """Graphs as a list of ``Data``, collated by ``Batch.from_data_list``.

    Args:
        graphs: All of them.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._data = [_data(graphs.block(np.array([number]))) for number in range(len(graphs))]

    def __len__(self) -> int:
        return len(self._data)

    def block(self, chosen: NDArray[np.int64]) -> Block:
        """The graphs of these numbers, in this order."""
        batch = Batch.from_data_list([self._data[number] for number in chosen.tolist()])
        source, target = batch.edge_index
        return Block(
            start=batch.x,
            source=source,
            target=target,
            type=batch.edge_type,
            length=batch.edge_length if "edge_length" in batch else None,
            segment=batch.batch,
            first=batch.ptr[:-1],
        )


def _data(alone: Block) -> Data:
    lengths = {} if alone.length is None else {"edge_length": alone.length}
    edge_index = torch.stack((alone.source, alone.target))
    return Data(x=alone.start, edge_index=edge_index, edge_type=alone.type, **lengths)

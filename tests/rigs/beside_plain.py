"""A graph beside the loss of its instances in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

import geartrain as gt

F64: Final = torch.float64


@dataclass
class Model:
    """A graph, its modules, and the loss of one instance without it."""

    graph: gt.Graph
    modules: Mapping[str, nn.Module]
    plain: Callable[[gt.Instance], Tensor]
    data: Sequence[gt.Instance]
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    def total(self) -> Tensor:
        return sum((self.plain(each) for each in self.data), torch.zeros((), dtype=F64))

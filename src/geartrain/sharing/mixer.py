"""How copies of a part meet.

    copy 0   copy 1   ...          each on its own worker, each with its own optimiser
       └──── mix ─────┘            every so many instances, and at the end of an epoch

Source: replicas averaged once an epoch, Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geartrain.bounds import require_whole
from geartrain.kinds import require_truth


class Mixable(Protocol):
    """What mixing must know of a copy of a part; ``parts.part.PartState`` is one."""

    module: nn.Module

    @property
    def parameters(self) -> list[nn.Parameter]: ...

    @property
    def optimizer(self) -> Optimizer | None: ...


class AbstractMixer(ABC):
    """Says when copies meet and what becomes of them. It is called when nothing is in flight.

    Args:
        every: Instances between two meetings; None: the end of an epoch alone, where they always
            meet.
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None:
            what = f"{type(self).__name__}(every={every!r})"
            require_whole(what, every, 1, "1 or more instances, or None")
        self.every = every

    @abstractmethod
    def mix(self, copies: Sequence[Mixable]) -> None:
        """Let the copies of one part meet."""


@final
class Average(AbstractMixer):
    """All copies become their mean: weights, floating-point buffers, and optimiser state.

    Moments and sums of squares are averaged entry by entry; counters of steps become the largest.

    Args:
        every: See ``AbstractMixer``.
        optimizer_state: Whether the state of the optimisers is averaged; else each keeps its own.
    """

    def __init__(self, every: int | None = None, *, optimizer_state: bool = True) -> None:
        super().__init__(every)
        require_truth("Average", optimizer_state=optimizer_state)
        self.optimizer_state = optimizer_state

    @torch.no_grad()
    def mix(self, copies: Sequence[Mixable]) -> None:
        for tensors in zip(*(c.module.state_dict().values() for c in copies), strict=True):
            if isinstance(tensors[0], Tensor):  # what else a module remembers stays its own
                _mean(tensors)
        if not self.optimizer_state or copies[0].optimizer is None:
            return
        states = [[c.optimizer.state[p] for p in c.parameters] for c in copies if c.optimizer]
        for entries in zip(*states, strict=True):
            for key in set.intersection(*(set(e) for e in entries)):
                values = [e[key] for e in entries]
                if not isinstance(values[0], Tensor):
                    continue
                if values[0].ndim == 0:
                    top = torch.stack([v.double() for v in values]).max()
                    for value in values:
                        value.copy_(top)
                else:
                    _mean(values)


def _mean(tensors: Iterable[Tensor]) -> None:
    first, *rest = tensors
    if not first.is_floating_point():
        return
    total = first.clone()
    for other in rest:
        total.add_(other)
    total.div_(1 + len(rest))
    for tensor in (first, *rest):
        tensor.copy_(total)

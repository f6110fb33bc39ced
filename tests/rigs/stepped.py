"""Parts that step alone or together, with gradients that are the same for both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.parts.snapshot import parts_to_tensors
from geartrain.parts.together import StepsTogether
from geartrain.parts.trained import StepTaken


class Parts:
    """Four parts that get the same gradients however they step.

    Args:
        rules: Those of each.
        together: Whether they step together.
    """

    def __init__(self, rules: Callable[[int], Rules], *, together: bool) -> None:
        torch.manual_seed(0)
        modules: list[nn.Module]
        modules = [nn.Linear(3, 2), nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(40, 40)]
        modules[2].double()
        self.all = [PartState(f"part {k}", m, rules(k)) for k, m in enumerate(modules)]
        self._steps = StepsTogether(self.all) if together else None
        self._draw = torch.Generator().manual_seed(1)
        self.told: list[StepTaken] = []
        self.finished = 0

    def add(self, part: PartState, scale: float = 1.0, *, bias: bool = True) -> None:
        """Gradients as they come: products and sums that wait, and what is there already.

        Args:
            part: Whose.
            scale: Of its inputs.
            bias: Whether it has a gradient too.
        """
        weight, other = cast(nn.Linear, part.module).parameters()
        rows = 3 + int(torch.randint(3, (1,), generator=self._draw))
        like = {"dtype": weight.dtype, "generator": self._draw}
        left = torch.randn(rows, weight.shape[0], **like)
        right = scale * torch.randn(rows, weight.shape[1], **like)
        part.gradient.add_product(weight, left, right)
        if bias:
            part.gradient.add_sum(other, left)
            if self.finished % 3 == 0:
                part.gradient.add(other, torch.randn(other.shape, **like))
        part.counting.received(part.version, rows, np.full(rows, part.version))

    def step(
        self, scales: Mapping[int, float] | None = None, without: Collection[int] = ()
    ) -> None:
        """Four instances more finish.

        Args:
            scales: Of inputs, by number of the part.
            without: Numbers of parts whose bias gets no gradient.
        """
        for k, part in enumerate(self.all):
            self.add(part, (scales or {}).get(k, 1.0), bias=k not in without)
            part.finished(4)
        self.finished += 4
        if self._steps is None:
            taken = [part.step_if_due(self.finished) for part in self.all]
            self.told += [step for step in taken if step is not None]
        else:
            self.told += self._steps.step_if_due(self.finished)

    def draw_as(self, other: Parts) -> None:
        """The gradients that come are those that come to others."""
        self._draw.set_state(other._draw.get_state())

    def flush(self) -> None:
        """Step with what there is."""
        if self._steps is None:
            taken = [part.step(self.finished) for part in self.all]
            self.told += [step for step in taken if step is not None]
        else:
            self.told += self._steps.step(self.finished)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that a checkpoint has of them."""
        return parts_to_tensors({part.name: part for part in self.all})


def require_equal(alone: Parts, together: Parts) -> None:
    tensors, document = alone.state()
    its, other = together.state()
    assert document == other and tensors.keys() == its.keys()
    assert all(torch.equal(x, its[key]) for key, x in tensors.items())
    assert alone.told == together.told
    assert all(p.grad is None for part in together.all for p in part.parameters)


def require_equal_at_the_end(alone: Parts, together: Parts) -> None:
    """Also after two parts have got more than is due, and all step with what there is."""
    for each in (alone, together):
        each.add(each.all[0])
        each.add(each.all[3])
        each.flush()
    require_equal(alone, together)


def noting(take: Callable[..., None], found: list[int]) -> Callable[..., None]:
    """The same call of C, which notes how many weights it steps."""

    def noted(step: Any, gradients: Any, **how: Any) -> None:
        found.append(len(gradients))
        take(step, gradients, **how)

    return noted

"""Copies that train alone for a number of steps, and then all meet.

    own steps ─► own steps ─► ... ─► the mean of all ─► own steps ...
                               PeriodicAverage: they become it
                               DiLoCo:          it is a gradient, for an optimiser of its own

Both are synchronous: who has come waits for the others. At the end of a segment nobody waits for
steps that do not come: if somebody does, all meet as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from geartrain.bounds import require_number
from geartrain.kinds import require_truth
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.exchanges.allreduce import Collective
from geartrain.sharing.letters import Letter, Tensors
from geartrain.sharing.member import Member


class AbstractPeriodic(AbstractExchange):
    """All copies meet after ``every`` own steps, as by an all-reduce.

    Args:
        every: Own steps between two meetings.
    """

    needs_neighbours = False
    in_rounds = True

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self._meeting: Collective | None = None

    @abstractmethod
    def brought(self, me: Member) -> Sequence[Tensor]:
        """What the copy brings to the mean; it is copied."""

    @abstractmethod
    def met(self, me: Member, mean: Sequence[Tensor]) -> None:
        """What it makes of the mean."""

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        self._meeting = Collective("mean", members, self.lock)
        for me in members:
            me.numbers["steps"] = 0

    @property
    def _collective(self) -> Collective:
        assert self._meeting is not None, "prepare comes first"
        return self._meeting

    def stepped(self, me: Member, gradients: Tensors) -> None:
        me.numbers["steps"] += 1
        if me.numbers["steps"] >= self.every and me.present and not self.waiting(me):
            self._collective.contribute(me, self.brought(me))

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._collective.taken(me)
            me.numbers["steps"] = 0
            self.met(me, [t for t in letter.tensors if t is not None])

    def waiting(self, me: Member) -> bool:
        return self._collective.waits(me)

    def finish(self, members: Sequence[Member]) -> bool:
        if self._collective.give_again():
            return True
        if not any(self.waiting(m) for m in self.members if m.present):
            return False
        for me in members:
            if me.present and not self.waiting(me):
                self._collective.contribute(me, self.brought(me))
        return True

    def resting(self, me: Member) -> dict[str, float]:
        return {"waits": self.waiting(me)}

    def heard(self, other: Member, told: Mapping[str, float]) -> None:
        self._collective.note(other, waits=bool(told["waits"]))

    def contributed(self, letter: Letter) -> None:
        self._collective.take(letter)

    def left(self, me: Member) -> None:
        self._collective.left(me)

    def joined(self, me: Member) -> None:
        me.numbers["steps"] = 0

    def abandoned(self, members: Sequence[Member]) -> None:
        self._meeting = Collective("mean", members, self.lock)
        for me in members:
            me.numbers["steps"] = 0


@final
class PeriodicAverage(AbstractPeriodic):
    """Local SGD: all copies become their mean after so many own steps.

    Optimisers keep their state. Equal copies stay equal; the mean is what it was.

    Source: Stich 2019, arXiv:1805.09767; with parts of the data per copy, McMahan et al. 2017,
    arXiv:1602.05629.

    Args:
        every: Own steps between two meetings.

    Raises:
        ValueError: It is not positive.
    """

    def __init__(self, every: int = 16) -> None:
        super().__init__(every)

    def stepped(self, me: Member, gradients: Tensors) -> None:
        if len(self.members) > 1:
            super().stepped(me, gradients)

    def brought(self, me: Member) -> Sequence[Tensor]:
        return me.weights()

    def met(self, me: Member, mean: Sequence[Tensor]) -> None:
        me.meet(mean)


@final
class DiLoCo(AbstractPeriodic):
    """The mean of what copies have moved in so many steps is the gradient of an outer optimiser.

    Inner steps are those of the part's optimiser (published: AdamW), which keeps its state. Outer:
    g = mean(θ - θ_i); m = momentum · m + g; θ -= rate · (g + momentum · m) (without ``nesterov``,
    rate · m); all copies go on from θ. With ``every=1``, plain SGD inside, rate 1 and no momentum
    it is synchronous averaging. Each copy holds θ and m, two models of memory.

    Source: Douillard et al. 2023, arXiv:2311.08105.

    Args:
        every: Inner steps between two outer ones.
        rate, momentum, nesterov: Of the outer optimiser.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self, every: int = 500, *, rate: float = 0.7, momentum: float = 0.9, nesterov: bool = True
    ) -> None:
        super().__init__(every)
        check_outer("DiLoCo", rate, momentum)
        require_truth("DiLoCo", nesterov=nesterov)
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        start = _mean([m.weights() for m in members])
        for me in members:
            me.tensors["outer"] = [t.clone() for t in start]
            me.tensors["momentum"] = [torch.zeros_like(t) for t in start]

    @torch.no_grad()
    def brought(self, me: Member) -> Sequence[Tensor]:
        return [a - b for a, b in zip(me.tensors["outer"], me.weights(), strict=True)]

    @torch.no_grad()
    def met(self, me: Member, mean: Sequence[Tensor]) -> None:
        outer = me.tensors["outer"]
        for theta, m, g in zip(outer, me.tensors["momentum"], mean, strict=True):
            m.mul_(self.momentum).add_(g)
            theta.sub_(self.rate * (g + self.momentum * m if self.nesterov else m))
        me.meet(outer)

    def joined(self, me: Member) -> None:
        super().joined(me)
        others = [m for m in self.members if m.present and m is not me]
        if others:
            for key in ("outer", "momentum"):
                me.tensors[key] = [t.clone() for t in others[0].tensors[key]]

    def restarted(self, members: Sequence[Member]) -> None:
        for me in members:
            me.tensors["outer"] = [t.clone() for t in me.weights()]
            for m in me.tensors["momentum"]:
                m.zero_()


def check_outer(name: str, rate: float, momentum: float) -> None:
    """Raises:
    ValueError: The rate is not positive, or the momentum not from 0 to below 1.
    TypeError: One is no number.
    """
    wanted = "an outer rate of more than 0; published is 0.7"
    require_number(f"{name}(rate={rate!r})", rate, wanted, above=0)
    what = f"{name}(momentum={momentum!r})"
    require_number(what, momentum, "0 or more and less than 1", least=0, below=1)


@torch.no_grad()
def _mean(given: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """By parameter; of one, a copy."""
    if len(given) == 1:
        return [t.clone() for t in given[0]]
    return [torch.stack(list(column)).mean(0) for column in zip(*given, strict=True)]

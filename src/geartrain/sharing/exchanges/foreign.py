"""Foreign gradients that are taken with care: they were computed some steps ago, somewhere else.

    own gradient ─► neighbours ─► StalenessAware:   a step with g / τ
                                  CompensatedNeighbours: a step with g + λ · g ⊙ g ⊙ (w - w')

Like ``NearestNeighbours`` otherwise: each gradient that comes is a step of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from geartrain.bounds import require_number
from geartrain.kinds import require_truth
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.exchanges.nearest import advice_on_gradients
from geartrain.sharing.letters import Inbox, Letter, Tensors, copies
from geartrain.sharing.member import Member


@final
class StalenessAware(AbstractExchange):
    """A foreign gradient counts the less, the more versions the receiver has passed meanwhile.

    τ, at least 1, is the number of versions (own and foreign steps) that passed while the letter
    was under way and waiting.

    Source: Zhang et al. 2016, arXiv:1511.05950, there for a parameter server.

    Args:
        every: The gradient of every so many minibatches is sent.
        power: Steps are scaled by 1 / τ ** power; 1 is the published form, 0 makes it
            ``NearestNeighbours``.
        inbox: How many letters may wait.

    Raises:
        ValueError: A number is out of range.
    """

    bounded = frozenset({"gradient"})

    def __init__(self, every: int = 1, *, power: float = 1.0, inbox: Inbox | None = None) -> None:
        super().__init__(every, inbox)
        what = f"StalenessAware(power={power!r})"
        require_number(what, power, "0 or more; 1 was published", least=0)
        self.power = power

    def advice(self) -> str | None:
        """None: what comes from several neighbours is some versions old, and steps so much less."""
        if self.power > 0:
            return None
        return advice_on_gradients(self, 1.0, "NearestNeighbours(scale={scale})")

    def stepped(self, me: Member, gradients: Tensors) -> None:
        if self.due(me):
            me.send_all("gradient", gradients)

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        for letter in letters:
            tau = max(1, me.part.version - letter.seen)
            me.apply(letter.tensors, tau**-self.power)


@final
class CompensatedNeighbours(AbstractExchange):
    """A foreign gradient is corrected for the distance from where it was computed.

    DC-ASGD: g + λ · g ⊙ g ⊙ (w - w'), w the receiver's weights and w' the sender's just before its
    step, which travel along: letters are twice as large. ``adaptive``: λ / √(v + eps) in place of
    λ, entry by entry, where v is a running mean of squares of the foreign gradients.

    Source: Zheng et al. 2017, arXiv:1609.08326, there for a parameter server.

    Args:
        strength: λ; 0 makes it ``NearestNeighbours``. Published: 0.04, with ``adaptive`` 2.
        every: The gradient of every so many minibatches is sent.
        adaptive: See above.
        decay, eps: Of the running mean.
        inbox: How many letters may wait.

    Raises:
        ValueError: A number is out of range.
    """

    bounded = frozenset({"gradient"})

    def __init__(
        self,
        strength: float = 0.04,
        *,
        every: int = 1,
        adaptive: bool = False,
        decay: float = 0.95,
        eps: float = 1e-7,
        inbox: Inbox | None = None,
    ) -> None:
        super().__init__(every, inbox)
        what = f"CompensatedNeighbours(strength={strength!r})"
        require_number(what, strength, "0 or more", least=0)
        what = f"CompensatedNeighbours(decay={decay!r}, eps={eps!r})"
        wanted = "a decay from 0 to below 1 and a positive eps"
        require_number(what, decay, wanted, least=0, below=1)
        require_number(what, eps, wanted, above=0)
        require_truth("CompensatedNeighbours", adaptive=adaptive)
        self.strength, self.adaptive, self.decay, self.eps = strength, adaptive, decay, eps
        self._before: list[Tensors] = []

    def advice(self) -> str | None:
        """As of raw gradients: what is corrected is small beside them."""
        return advice_on_gradients(self, 1.0, "NearestNeighbours(scale={scale})")

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        self._before = [() for _ in members]
        for me in members:
            if self.adaptive:
                me.tensors["squares"] = [torch.zeros_like(w) for w in me.weights()]

    def stepping(self, me: Member, gradients: Tensors) -> Tensors | None:
        if self.due(me) and me.neighbours:
            self._before[me.index] = copies(me.weights())
        return gradients

    def stepped(self, me: Member, gradients: Tensors) -> None:
        before, self._before[me.index] = self._before[me.index], ()
        if before:
            me.send_all("gradient", (*gradients, *before))

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        for letter in letters:
            n = len(letter.tensors) // 2
            there = [w for w in letter.tensors[n:] if w is not None]
            if letter.count > 1:  # merged: sums
                there = [w / letter.count for w in there]
            me.apply(self._corrected(me, letter.tensors[:n], there))

    @torch.no_grad()
    def _corrected(self, me: Member, gradients: Tensors, there: Sequence[Tensor]) -> Tensors:
        if self.strength == 0:
            return gradients
        corrected: list[Tensor | None] = []
        for i, (g, w, back) in enumerate(zip(gradients, me.weights(), there, strict=True)):
            if g is None:
                corrected.append(None)
                continue
            dense = g.to_dense() if g.is_sparse else g
            square = dense * dense
            correction = square * (w - back) * self.strength
            if self.adaptive:
                v = me.tensors["squares"][i].lerp_(square, 1 - self.decay)
                correction = correction / (v + self.eps).sqrt()
            corrected.append(dense + correction)
        return corrected

    def abandoned(self, members: Sequence[Member]) -> None:
        self._before = [() for _ in members]

    def restarted(self, members: Sequence[Member]) -> None:
        for me in members:
            for v in me.tensors.get("squares", ()):
                v.zero_()

"""Stochastic gradient push: shares of the weights go one way, and a number says how much they are.

    x, ω ─► keep p·x, p·ω ─► send the rest          z = x / ω is what computes
    x += what comes, ω += what comes with it        Σ x moves by the steps alone, Σ ω = n

Nothing has to come back, so graphs may be directed and everybody may go at its own pace.

Source: Assran et al. 2019, arXiv:1811.10792 (there with overlap: letters are not waited for).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from geartrain.bounds import require_number
from geartrain.kinds import require_each, require_truth
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.letters import Inbox, Letter, Tensors
from geartrain.sharing.member import Member
from geartrain.sharing.mixing import (
    Matrix,
    advice_on_matrix,
    censored,
    check_column_stochastic,
    shares,
)


@final
class PushSum(AbstractExchange):
    """SGP. The part's weights are z = x / ω; a step that moves z by d moves x by d, so z by d / ω.

    Sending takes as much from ω as from x, so z stays; what comes moves it.

    Args:
        every: Own steps between two pushes.
        rotate: Push half to one neighbour at a time, in turn: with ``Exponential``, the rotating
            exponential graph, at the bytes of one model a push. Else equal shares to all.
        matrix: Shares instead of either, n x n: column j says what becomes of x_j. Checked to be
            column-stochastic.
        least: A push that would leave less than this of ω is left out, so that a copy that is
            faster than those who send to it does not give itself away: its steps grow by 1 / ω.
        inbox: How many letters may wait; more are merged by adding, which changes nothing.

    Raises:
        ValueError: A number is out of range, or the inbox drops; when training begins, the matrix
            does not fit the topology.
    """

    bounded = frozenset({"push"})

    def __init__(
        self,
        every: int = 1,
        *,
        rotate: bool = True,
        matrix: Matrix | None = None,
        least: float = 0.1,
        inbox: Inbox | None = None,
    ) -> None:
        super().__init__(every, Inbox(full="merge") if inbox is None else inbox)
        require_truth("PushSum", rotate=rotate)
        if matrix is not None:
            wanted = "a matrix, a row of numbers for each copy, or None"
            require_each("PushSum", list | tuple | np.ndarray, wanted, matrix=matrix)
        if self.inbox.full != "merge":
            raise ValueError(
                "PushSum(inbox=Inbox(full='drop')): what is dropped would be lost from the sums; "
                "give full='merge'"
            )
        what = f"PushSum(least={least!r})"
        require_number(what, least, "more than 0 and at most 0.5", above=0, most=0.5)
        self.rotate, self.matrix, self.least = rotate, matrix, least
        self._shares: Matrix | None = None
        self._before: list[list[Tensor]] = []

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        self._share_by(self.matrix)
        self._before = [[] for _ in members]
        for me in members:
            me.numbers |= {"omega": 1.0, "pushes": 0}

    def regrouped(self) -> None:
        present = [m.index for m in self.members if m.present]
        self._share_by(None if self.matrix is None else censored(self.matrix, present))

    def _share_by(self, matrix: Matrix | None) -> None:
        """What goes to whom, among the neighbours of now."""
        graph = [m.neighbours for m in self.members]
        self._shares = matrix if matrix is not None or self.rotate else shares(graph)
        if self._shares is not None:
            check_column_stochastic(self._shares, graph)

    def advice(self) -> str | None:
        if self.matrix is None or self._shares is None:
            return None
        return advice_on_matrix("PushSum(matrix=...)", self._shares)

    def stepping(self, me: Member, gradients: Tensors) -> Tensors | None:
        if me.numbers["omega"] != 1.0:
            self._before[me.index] = [z.clone() for z in me.weights()]
        return gradients

    def stepped(self, me: Member, gradients: Tensors) -> None:
        self._segment(me)
        if me.present and self.due(me):
            self._push(me)

    @torch.no_grad()
    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        omega = me.numbers["omega"]
        x = [z * omega for z in me.weights()]
        for letter in letters:
            omega += letter.weight
            for total, share in zip(x, letter.tensors, strict=True):
                assert share is not None, "weights have no gaps"
                total.add_(share)
        me.meet([total.div_(omega) for total in x])
        me.numbers["omega"] = omega

    @torch.no_grad()
    def consensus(self, members: Sequence[Member]) -> Sequence[Tensor] | None:
        """Σ x / Σ ω: what all would agree on."""
        omegas = [m.numbers["omega"] for m in members]
        columns = zip(*(m.weights() for m in members), strict=True)
        if len(members) == 1:
            return None
        return [_weighted_mean(column, omegas) for column in columns]

    def check(self, members: Sequence[Member]) -> None:
        super().check(members)
        for me in members:
            if not 0 < me.numbers["omega"] <= 2 * len(members):
                raise ValueError(
                    f"copy {me.index} has a share of {me.numbers['omega']:g}, expected more than 0 "
                    f"and about {len(members)} at most"
                )

    def joined(self, me: Member) -> None:
        me.numbers["omega"] = 1.0

    def abandoned(self, members: Sequence[Member]) -> None:
        self._before = [[] for _ in members]

    def restarted(self, members: Sequence[Member]) -> None:
        for me in members:
            me.numbers["omega"] = 1.0

    @torch.no_grad()
    def _segment(self, me: Member) -> None:
        """Make a step of z one of x."""
        before, self._before[me.index] = self._before[me.index], []
        omega = me.numbers["omega"]
        if not before or omega == 1.0:
            return
        me.write([b + (z - b) / omega for z, b in zip(me.weights(), before, strict=True)])

    def _push(self, me: Member) -> None:
        targets = self._targets(me)
        keep = 1.0 - sum(targets.values())
        if not targets or me.numbers["omega"] * keep < self.least:
            return
        omega = me.numbers["omega"]
        for to, share in targets.items():
            me.send(to, "push", [z * (share * omega) for z in me.weights()], share * omega)
        me.numbers["omega"] = omega * keep
        me.numbers["pushes"] += 1

    def _targets(self, me: Member) -> dict[int, float]:
        """To whom which share goes now; nothing to those who are absent."""
        if self._shares is not None:
            column = {k: float(self._shares[k][me.index]) for k in me.neighbours}
        elif me.neighbours:
            column = {me.neighbours[int(me.numbers["pushes"]) % len(me.neighbours)]: 0.5}
        else:
            column = {}
        found = {k: share for k, share in column.items() if share and self.members[k].present}
        if column and not found:
            me.numbers["pushes"] += 1  # the next in turn
        return found


def _weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor, alpha=weight)
    return total.div_(sum(weights))

"""Copies that average their weights with their neighbours'.

    DecentralizedSGD   x_i ─► all neighbours; x_i' = Σ_j W[i][j] x_j, then the own step; in rounds
    PairAverage        i ──x_i──► j: x_j += d, d = (x_i - x_j) / 2;  i ◄──d── j: x_i -= d; no rounds

Both keep the sum of all copies: what one side takes, the other gives.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from geartrain.bounds import require_whole
from geartrain.kinds import require_each
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.letters import Letter, Tensors, copies
from geartrain.sharing.member import Member
from geartrain.sharing.mixing import (
    Matrix,
    advice_on_matrix,
    censored,
    check_doubly_stochastic,
    metropolis,
    uniform,
)
from geartrain.sharing.topology import levels_of

MixingWeights: TypeAlias = Literal["metropolis", "uniform"] | Matrix


@final
class DecentralizedSGD(AbstractExchange):
    """D-PSGD: ``x_i' = Σ_j W[i][j] x_j - own step``, with the gradient at x_i.

    The step is held until the weights of the same round have come from all neighbours, so copies go
    in rounds; a slow copy holds up its neighbours, and theirs a round later. At the end of a
    segment copies that have no gradient for the last round mix without one, so that all have mixed
    equally often. The mean of all copies moves by the steps alone.

    Source: Lian et al. 2017, arXiv:1705.09056.

    Args:
        weights: W: ``metropolis``, ``uniform`` (1 / (1 + neighbours), for regular graphs), or a
            matrix, n x n. It is checked to be doubly stochastic. When a copy leaves, its share
            falls to the one who would have taken it; from the next pass on the matrix is
            Metropolis' for the links among those who are there, or the stochastic complement.
        every: Own gradients between two rounds.

    Raises:
        ValueError: ``every`` is not positive, or ``weights`` is a name of nothing; when training
            begins, the matrix does not fit the topology.
    """

    in_rounds = True

    def __init__(self, weights: MixingWeights = "metropolis", *, every: int = 1) -> None:
        super().__init__(every)
        wanted = "'metropolis', 'uniform', or a matrix: a row of numbers for each copy"
        if isinstance(weights, str) and weights not in ("metropolis", "uniform"):
            raise ValueError(f"DecentralizedSGD(weights={weights!r}): give {wanted}")
        if not isinstance(weights, str):
            require_each("DecentralizedSGD", list | tuple | np.ndarray, wanted, weights=weights)
        self.weights = weights
        self._matrix: Matrix = ()
        self._whole: Matrix = ()  # when all are there
        self._early: list[list[Letter]] = []
        self._held: list[Tensors | None] = []

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        graph = [m.neighbours for m in members]
        if isinstance(self.weights, str):
            self._matrix = (metropolis if self.weights == "metropolis" else uniform)(graph)
        else:
            self._matrix = [[float(x) for x in row] for row in self.weights]
        check_doubly_stochastic(self._matrix, graph)
        self._whole = self._matrix
        self._early = [[] for _ in members]
        self._held = [None for _ in members]
        for me in members:
            me.numbers |= {"round": 0, "mixed": 0, "first": 1}

    def regrouped(self) -> None:
        graph = [m.neighbours for m in self.members]
        if self.weights == "metropolis":
            self._matrix = metropolis(graph)
        else:  # uniform weights want as many neighbours for all
            self._matrix = censored(self._whole, [m.index for m in self.members if m.present])
        check_doubly_stochastic(self._matrix, graph)

    def advice(self) -> str | None:
        return advice_on_matrix("DecentralizedSGD(weights=...)", self._matrix)

    def stepping(self, me: Member, gradients: Tensors) -> Tensors | None:
        if not me.senders or not me.present or not self.due(me):
            return gradients
        self._begin(me, copies(gradients))
        return None

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        self._early[me.index] += letters
        self._catch_up(me)

    def waiting(self, me: Member) -> bool:
        return me.numbers["round"] > me.numbers["mixed"]

    def finish(self, members: Sequence[Member]) -> bool:
        last = max((m.numbers["round"] for m in self.members if m.present), default=0.0)
        there = [m for m in members if m.present]
        behind = [m for m in there if m.numbers["round"] < last and not self.waiting(m)]
        for me in behind:
            self._begin(me, None)
        return bool(behind)

    def left(self, me: Member) -> None:
        me.numbers["mixed"] = me.numbers["round"]
        self._early[me.index].clear()
        self._held[me.index] = None
        for other in self.members:
            if other.present and other.here:
                self._catch_up(other)

    def loaded(self, members: Sequence[Member]) -> None:
        """One that was absent when the checkpoint was made goes on with the round of the others."""
        last = max(m.numbers["round"] for m in members)
        for me in members:
            if me.numbers["round"] < last:
                self.joined(me)

    def joined(self, me: Member) -> None:
        last = max(m.numbers["round"] for m in self.members)
        me.numbers |= {"round": last, "mixed": last, "first": last + 1}

    def abandoned(self, members: Sequence[Member]) -> None:
        self._early = [[] for _ in members]
        self._held = [None for _ in members]
        last = max(m.numbers["round"] for m in members)
        for me in members:
            me.numbers |= {"round": last, "mixed": last}

    def _begin(self, me: Member, gradients: Tensors | None) -> None:
        me.numbers["round"] += 1
        self._held[me.index] = gradients
        me.send_all("weights", me.weights(), me.numbers["round"])
        self._catch_up(me)

    def _expected(self, me: Member) -> set[int]:
        """Who sends in this round."""
        now = me.numbers["round"]
        return {
            s
            for s in me.senders
            if self.members[s].present and self.members[s].numbers["first"] <= now
        }

    def _catch_up(self, me: Member) -> None:
        """Mix if all are there; weights of later rounds go on waiting."""
        if not self.waiting(me):
            return
        now, early = me.numbers["round"], self._early[me.index]
        here = {x.sender: x.tensors for x in early if x.weight == now}
        if not here.keys() >= self._expected(me):
            return
        self._early[me.index] = [x for x in early if x.weight > now]
        me.numbers["mixed"] = now
        me.meet(mixed(me.weights(), self._matrix[me.index], me.index, here))
        gradients, self._held[me.index] = self._held[me.index], None
        if gradients is not None:
            me.apply(gradients, own=True)


@final
class PairAverage(AbstractExchange):
    """AD-PSGD: a copy and one neighbour become their mean, while both go on training.

    A copy offers its weights; the other moves half of the way and answers with how far, and the
    first goes as far towards it. Steps that either takes meanwhile stay in it, as if they had come
    after the meeting. Training waits for nobody.

    *A meeting is atomic*: with an offer open, a copy takes in nothing but its answer, so the two
    move from what they were to one point, and all meetings are as if one came after the other. What
    is offered to it meanwhile it keeps, and answers next. *No circle of offers can form*: copies
    have levels that differ between neighbours, and offer to neighbours of higher levels alone; one
    of the highest level answers at once, then those that wait for it, and so on down. With two
    sides these are the active and the passive copies as published; odd cycles take a third level.
    So every offer is answered, none is declined, and copies mix on every connected graph. Where
    meeting (i, j) comes with probability p_ij, the sum of squared distances from the mean falls by
    a factor of 1 - λ / 2 a meeting, in expectation and without gradients, or faster; λ is the
    second least eigenvalue of the Laplacian with weights p_ij (Boyd et al. 2006, "Randomized gossip
    algorithms").

    A meeting is two models on the links. Offers that fall due while as many are open as may be, are
    made when answers are there, ``at_once`` of them at most. The other one takes letters between
    firings, so an answer is there after one to two steps of one's own: with ``every=1`` and one
    offer at a time a copy meets 0.5 to 0.8 times a step; those of the highest level offer nothing.

    *Two offers at once*, to two neighbours (``at_once=2``), hide that wait: copies meet once a step
    also where an answer takes two steps. Meetings are atomic no more: both answers go by what the
    copy was before either. With ``at_once=2`` a pair still becomes its mean, and copies still come
    together; with more each goes 1 / ``at_once`` of the way, as else one that is asked by all at
    once would be thrown to the other side.

    Source: Lian et al. 2018, arXiv:1710.06952, where copies of one side are active.

    Args:
        every: Own steps between two offers.
        at_once: Offers that may be open at a time, each to another neighbour.
        seed: For the choice of the neighbour, which is random.

    Raises:
        ValueError: ``every`` or ``at_once`` is not positive; when training begins, neighbours are
            not mutual.
    """

    def __init__(self, every: int = 1, *, at_once: int = 1, seed: int = 0) -> None:
        super().__init__(every)
        require_whole(f"PairAverage(at_once={at_once!r})", at_once, 1, "1 or more open offers")
        require_whole(f"PairAverage(seed={seed!r})", seed, 0)
        self.at_once, self.seed = at_once, seed
        self._above: list[list[int]] = []  # neighbours of higher levels: to whom a copy offers
        self._kept: list[list[Letter]] = []  # offers that came while an own one was open
        self._open: list[dict[int, float]] = []  # whose answers are awaited, and to which offer

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        for me in members:
            one_way = sorted(set(me.neighbours) ^ set(me.senders))
            if one_way:
                raise ValueError(
                    f"PairAverage: between copies {me.index} and {one_way[0]} letters go one way, "
                    "where an answer was expected; give an undirected topology, or use PushSum"
                )
            me.numbers |= {"owed": 0}
        self.regrouped()
        self._forget_offers()

    def regrouped(self) -> None:
        members = self.members
        level = levels_of([m.neighbours for m in members])
        self._above = [[j for j in m.neighbours if level[j] > level[m.index]] for m in members]

    def stepped(self, me: Member, gradients: Tensors) -> None:
        if self.due(me):
            me.numbers["owed"] = min(self.at_once, me.numbers["owed"] + 1)
        self._go_on(me)

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        for letter in letters:
            if letter.kind == "offer":
                self._kept[me.index].append(letter)
            else:
                me.meet(_less(me.weights(), _dense(letter.tensors)))
                if self._open[me.index].get(letter.sender) == letter.weight:
                    del self._open[me.index][letter.sender]
        self._go_on(me)

    def awaited(self, me: Member) -> Collection[int]:
        """Neighbours whose answers to offers have not come."""
        return tuple(self._open[me.index])

    def finish(self, members: Sequence[Member]) -> bool:
        """Offers that were kept for an answer which was lost are answered."""
        found = [m for m in members if self._kept[m.index] and not self._open[m.index]]
        for me in found:
            self._go_on(me)
        return bool(found)

    def left(self, me: Member) -> None:
        me.numbers["owed"] = 0
        self._kept[me.index].clear()
        self._open[me.index].clear()
        for other in self.members:
            kept = self._kept[other.index]
            kept[:] = [x for x in kept if x.sender != me.index]
            self._open[other.index].pop(me.index, None)

    def abandoned(self, members: Sequence[Member]) -> None:
        self._forget_offers()
        for me in members:
            me.numbers["owed"] = 0

    def _forget_offers(self) -> None:
        self._kept = [[] for _ in self.members]
        self._open = [{} for _ in self.members]

    def _go_on(self, me: Member) -> None:
        """With no offer open: meet those whose offers wait; if none does, make those that are due.

        Nobody who waits for an answer is put off by offers that are made one after the other.
        """
        opened = self._open[me.index]
        if not opened:
            self._answer(me)
        if self._kept[me.index]:
            return
        above = self._above[me.index]
        free = [k for k in above if self.members[k].present and k not in opened]
        draw = random.Random(f"{self.seed}/{me.index}/{me.rounds}")
        while free and me.numbers["owed"] and len(opened) < self.at_once:
            partner = draw.choice(free)
            free.remove(partner)
            opened[partner] = me.rounds
            me.numbers["owed"] -= 1
            me.send(partner, "offer", me.weights(), me.rounds)

    @torch.no_grad()
    def _answer(self, me: Member) -> None:
        offers, self._kept[me.index] = self._kept[me.index], []
        share = 1 / max(2, self.at_once)
        for letter in offers:
            if not self.members[letter.sender].present:
                continue  # it has left, and would never hear the answer
            mine = me.weights()
            theirs = _dense(letter.tensors)
            way = [(x - y) * share for x, y in zip(theirs, mine, strict=True)]
            me.meet([y + d for y, d in zip(mine, way, strict=True)])
            me.send(letter.sender, "answer", way, letter.weight)


@torch.no_grad()
def mixed(
    mine: Sequence[Tensor],
    row: Sequence[float],
    index: int,
    others: dict[int, tuple[Tensor | None, ...]],
) -> list[Tensor]:
    """One row of W x, in the order of the copies; shares of those that are not there stay here.

    Args:
        mine: Own weights.
        row: Of the mixing matrix.
        index: Which copy this is.
        others: Weights that have come, by sender.
    """
    own = 1.0 - sum(row[k] for k in sorted(others))
    given = {**{k: _dense(v) for k, v in others.items()}, index: list(mine)}
    total: list[Tensor] | None = None
    for k in sorted(given):
        scaled = [x * (own if k == index else row[k]) for x in given[k]]
        total = scaled if total is None else [a + b for a, b in zip(total, scaled, strict=True)]
    assert total is not None
    return total


@torch.no_grad()
def _less(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _dense(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Weights: none is missing."""
    return [t for t in tensors if t is not None]

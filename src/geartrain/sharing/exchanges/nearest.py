"""Raw gradients to the neighbours, each of which is a step of its own.

    own step ─► gradient ─► neighbours: a step with it, between their minibatches

Source: Viviani et al. 2019, "Deep Learning at Scale", and the code released with it (FAST).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

from geartrain.bounds import require_number
from geartrain.kinds import require_truth
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.letters import Inbox, Letter, Tensors
from geartrain.sharing.member import Member
from geartrain.sharing.mixing import least_pull

_NOTHING: Final = 1e-6  # of an eigenvalue: rounding


@final
class NearestNeighbours(AbstractExchange):
    """Raw gradients of all parameters to the neighbours; each that comes is a step of its own.

    A copy steps with its own gradient and sends it; between its minibatches it takes one optimiser
    step for each gradient that has come, through its own optimiser. Nothing is averaged and nobody
    waits. Balanced, a copy with k neighbours takes 1 + k steps for each minibatch.

    That need not hold copies together: a round moves them by I + scale / every · A, A the graph,
    and where it has an eigenvalue below 0 they drive each other apart, at any rate
    (``geartrain.sharing.mixing.least_pull``). As published it has one on every undirected graph
    that is not full; with a scale of 1 / (1 + k), on none. ``advice`` says so when training begins.

    Source: Viviani et al. 2019, "Deep Learning at Scale", and the code released with it (FAST).

    Args:
        every: The gradient of every so many minibatches is sent.
        lockstep: Wait after each own step for the gradients that neighbours sent in the same round,
            and apply them by number of the sender. For tests, and for a comparison.
        scale: Foreign gradients are multiplied by it; 1 is the published form.
        inbox: How many letters may wait.

    Raises:
        ValueError: A number is out of range.
    """

    bounded = frozenset({"gradient"})

    def __init__(
        self,
        every: int = 1,
        *,
        lockstep: bool = False,
        scale: float = 1.0,
        inbox: Inbox | None = None,
    ) -> None:
        super().__init__(every, inbox)
        what = f"NearestNeighbours(scale={scale!r})"
        require_number(what, scale, "0 or more; 1 was published", least=0)
        require_truth("NearestNeighbours", lockstep=lockstep)
        if lockstep:
            self.bounded = frozenset()  # none may be lost
        self.lockstep, self.scale = lockstep, scale
        self.in_rounds = lockstep
        self._early: list[list[Letter]] = []
        self._early_elsewhere: dict[int, bool] = {}

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        self._early = [[] for _ in members]
        if self.lockstep:
            for me in members:
                me.numbers |= {"round": 0, "applied": 0, "first": 1}

    def advice(self) -> str | None:
        return advice_on_gradients(self, self.scale, f"{type(self).__name__}(scale={{scale}})")

    def stepped(self, me: Member, gradients: Tensors) -> None:
        if not self.due(me):
            return
        if not self.lockstep:
            me.send_all("gradient", gradients)
            return
        me.numbers["round"] += 1
        me.send_all("gradient", gradients, me.numbers["round"])
        self._catch_up(me)

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        if self.lockstep:
            self._early[me.index] += letters
            self._catch_up(me)
        else:
            for letter in letters:
                me.apply(letter.tensors, self.scale)

    def waiting(self, me: Member) -> bool:
        return (
            self.lockstep
            and me.present
            and me.numbers["round"] > me.numbers["applied"]
            and bool(self._expected(me))
        )

    def _expected(self, me: Member) -> set[int]:
        """Who sends to it in this round."""
        peers = [self.members[s] for s in me.senders]
        now = me.numbers["round"]
        return {p.index for p in peers if p.present and p.numbers["first"] <= now}

    def finish(self, members: Sequence[Member]) -> bool:
        """Rounds that some copies had no data for end without their gradients, for all."""
        if not any(self.waiting(m) or self._has_early(m) for m in self.members):
            return False
        for me in members:
            early = self._early[me.index]
            if self.waiting(me) or early:
                self._apply_rounds(me, max([me.numbers["round"], *(x.weight for x in early)]))
        last = max((m.numbers["round"] for m in self.members if m.present), default=0.0)
        for me in members:
            if me.present and self.lockstep:
                me.numbers["round"] = me.numbers["applied"] = last
        return True

    def resting(self, me: Member) -> dict[str, float]:
        return {"early": len(self._early[me.index])}

    def heard(self, other: Member, told: Mapping[str, float]) -> None:
        self._early_elsewhere[other.index] = bool(told["early"])

    def _has_early(self, me: Member) -> bool:
        """Whether letters of rounds that are not applied yet wait at a copy."""
        return (
            bool(self._early[me.index]) if me.here else self._early_elsewhere.get(me.index, False)
        )

    def left(self, me: Member) -> None:
        """Those that wait for it alone go on."""
        if self.lockstep:
            self._align([me])
        for other in self.members:
            if other.here:
                self._catch_up(other)

    def joined(self, me: Member) -> None:
        """It goes on with the round of the others."""
        me.rounds = max(m.rounds for m in self.members if m.present)
        self._early[me.index].clear()
        if self.lockstep:
            last = max(m.numbers["round"] for m in self.members)
            me.numbers |= {"round": last, "applied": last, "first": last + 1}

    def loaded(self, members: Sequence[Member]) -> None:
        """One that was absent when the checkpoint was made goes on with the round of the others."""
        if self.lockstep:
            self._align(members)

    def abandoned(self, members: Sequence[Member]) -> None:
        self._early = [[] for _ in members]
        if self.lockstep:
            self._align(members)

    def _align(self, members: Sequence[Member]) -> None:
        """The last round is over for all: the next one is the same for all."""
        last = max((m.numbers["round"] for m in members), default=0)
        for me in members:
            me.numbers["round"] = me.numbers["applied"] = last

    def _catch_up(self, me: Member) -> None:
        """Apply this round's gradients if all are there; those of later rounds go on waiting."""
        if not self.waiting(me):
            return
        now = me.numbers["round"]
        if {x.sender for x in self._early[me.index] if x.weight == now} >= self._expected(me):
            self._apply_rounds(me, now)

    def _apply_rounds(self, me: Member, last: float) -> None:
        due = [x for x in self._early[me.index] if x.weight <= last]
        self._early[me.index] = [x for x in self._early[me.index] if x.weight > last]
        for letter in sorted(due, key=lambda x: (x.weight, x.sender)):
            me.apply(letter.tensors, self.scale)
        me.numbers["applied"] = me.numbers["round"]


def advice_on_gradients(exchange: AbstractExchange, scale: float, scaled: str) -> str | None:
    """Why gradients that are sent so drive copies apart, and what to do; None: they do not.

    Args:
        exchange: As it was prepared.
        scale: What foreign gradients are multiplied by.
        scaled: The exchange with a scale that brings copies together, which fills ``{scale}``.
    """
    graph = [m.neighbours for m in exchange.members]
    share = scale / exchange.every
    least = least_pull(graph, share)
    if least > -_NOTHING:
        return None
    most = max(len(m.senders) for m in exchange.members)
    factor = "" if share == 1 else f"{share:.3g} "
    return (
        f"the least eigenvalue of I + {factor}A, A being this graph, is {least:.2f}: below 0, the "
        "gradients of neighbours drive copies apart, whatever the learning rate. Use "
        "exchange='weights' (--mixer weights), which averages, or "
        f"{scaled.format(scale=f'{exchange.every / (1 + most):.2g}')}, or topology='full'"
    )

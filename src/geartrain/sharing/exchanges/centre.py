"""Copies that meet a centre, each when it likes.

    copy 2 ──question──► centre, kept by copy 0 ──answer──► copy 2
                         served between copy 0's own firings; nobody else is concerned

The centre is kept by the first copy. If that leaves, the next one that is present has it. Questions
that are lost so are not asked again: the copy goes on, and asks anew after its next steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from geartrain.bounds import require_number, require_whole
from geartrain.kinds import require_each
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.exchanges.periodic import check_outer
from geartrain.sharing.letters import Letter, Tensors
from geartrain.sharing.member import Member


class AbstractCentre(AbstractExchange):
    """One copy keeps the centre; the others ask, and are answered.

    Args:
        every: Own steps between two questions; none is asked while one is open.
    """

    needs_neighbours = False

    @abstractmethod
    def question(self, me: Member) -> Sequence[Tensor]:
        """What a copy sends."""

    @abstractmethod
    def serve(self, keeper: Member, question: Sequence[Tensor]) -> Sequence[Tensor]:
        """Change the centre, and say what to answer."""

    @abstractmethod
    def answered(self, me: Member, answer: Sequence[Tensor]) -> None:
        """What a copy makes of the answer."""

    def steps(self, me: Member) -> int:
        """Own steps of this copy between two questions."""
        return self.every

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        for me in members:
            me.numbers |= {"asking": 0, "steps": 0}
        self._found(members[0], [m.weights() for m in members])

    def stepped(self, me: Member, gradients: Tensors) -> None:
        me.numbers["steps"] += 1
        if me.numbers["steps"] < self.steps(me) or me.numbers["asking"] or not me.present:
            return
        me.numbers["steps"] = 0
        keeper = self.keeper
        if keeper is me:
            self.answered(me, self.serve(me, self.question(me)))
        elif keeper.present:
            me.numbers["asking"] = 1
            me.send(keeper.index, "question", self.question(me))

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        for letter in letters:
            tensors = [t for t in letter.tensors if t is not None]
            if letter.kind == "question" and "centre" in me.tensors:
                me.send(letter.sender, "answer", self.serve(me, tensors))
            elif letter.kind == "question":
                me.send(letter.sender, "elsewhere", ())
            else:
                me.numbers["asking"] = 0
                if letter.kind == "answer":
                    self.answered(me, tensors)
                else:
                    me.ledger.declined += 1

    def consensus(self, members: Sequence[Member]) -> Sequence[Tensor] | None:
        """The centre."""
        return self.keeper.tensors["centre"]

    def left(self, me: Member) -> None:
        me.numbers["asking"] = 0
        heir = next((m for m in self.members if m.present), None)
        if "centre" not in me.tensors or heir is None:
            return
        found = "centre" not in heir.tensors  # else it has had it since, in another process
        for key in [k for k in me.tensors if k in _KEPT]:
            heir.tensors.setdefault(key, me.tensors.pop(key))
        if found:
            heir.numbers["served"] = me.numbers.get("served", 0)
        if found and heir.here and not me.here:  # what is known of it is of the pass's beginning
            heir.tensors["centre"] = [t.clone() for t in heir.weights()]
        for other in self.members:
            other.numbers["asking"] = 0

    def abandoned(self, members: Sequence[Member]) -> None:
        for me in members:
            me.numbers["asking"] = 0

    def restarted(self, members: Sequence[Member]) -> None:
        for me in members:
            me.numbers["steps"] = 0
        self._found(self.keeper, [m.weights() for m in members])

    @property
    def keeper(self) -> Member:
        """Who has the centre."""
        return next(m for m in self.members if "centre" in m.tensors)

    def _found(self, keeper: Member, weights: Sequence[Sequence[Tensor]]) -> None:
        if len(weights) == 1:
            keeper.tensors["centre"] = [t.clone() for t in weights[0]]
            return
        columns = zip(*weights, strict=True)
        keeper.tensors["centre"] = [torch.stack(list(c)).mean(0) for c in columns]


@final
class ElasticAverage(AbstractCentre):
    """EASGD: a spring between each copy and the centre.

    After so many own steps e = alpha · (x_i - centre); the centre moves by e towards the copy, and
    the copy by e towards the centre. So centre and copies together keep their sum. Nobody waits:
    steps taken meanwhile stay in the copy. One copy alone trains plainly.

    Source: Zhang, Choromanska and LeCun 2015, arXiv:1412.6651, the asynchronous form.

    Args:
        alpha: Stiffness; 0: copies are independent. None: 0.9 / copies.
        every: Own steps between two pulls; published 4 to 64.

    Raises:
        ValueError: ``alpha`` is not from 0 to below 1, or ``every`` not positive.
    """

    def __init__(self, alpha: float | None = None, *, every: int = 4) -> None:
        super().__init__(every)
        if alpha is not None:
            wanted = "0 or more and less than 1; copies · alpha of about 0.9 was published"
            require_number(f"ElasticAverage(alpha={alpha!r})", alpha, wanted, least=0, below=1)
        self.alpha = alpha

    def stepped(self, me: Member, gradients: Tensors) -> None:
        if len(self.members) > 1:
            super().stepped(me, gradients)

    def question(self, me: Member) -> Sequence[Tensor]:
        return me.weights()

    @torch.no_grad()
    def serve(self, keeper: Member, question: Sequence[Tensor]) -> Sequence[Tensor]:
        alpha = 0.9 / len(self.members) if self.alpha is None else self.alpha
        centre = keeper.tensors["centre"]
        pulls = [(x - c) * alpha for x, c in zip(question, centre, strict=True)]
        for c, e in zip(centre, pulls, strict=True):
            c.add_(e)
        return pulls

    @torch.no_grad()
    def answered(self, me: Member, answer: Sequence[Tensor]) -> None:
        me.meet([x - e for x, e in zip(me.weights(), answer, strict=True)])

    def consensus(self, members: Sequence[Member]) -> Sequence[Tensor] | None:
        """The centre; of one copy alone, its weights."""
        return super().consensus(members) if len(self.members) > 1 else None


@final
class DelayedNesterov(AbstractCentre):
    """Asynchronous local SGD: DiLoCo without the meeting.

    A copy takes so many inner steps from the weights it was given, pushes what it has moved, g, and
    is given the centre as it is then; it computes nothing in between. The centre moves at once,
    θ -= rate · g / N, and every N-th push brings the momentum: m = momentum · m + mean of the last
    N; θ -= rate · momentum · m. With N = 1 and one copy that is SGD with Nesterov momentum.

    Source: Liu et al. 2024, arXiv:2401.09135 (delayed Nesterov, dynamic local updates).

    Args:
        every: Inner steps between two pushes.
        rate, momentum: Of the centre.
        buffer: N; None: the number of copies.
        speeds: Of the copies, measured; a copy takes ``every`` steps times its speed over that of
            the fastest, so that pushes come about equally often. None: all take as many.

    Raises:
        ValueError: A number is out of range; when training begins, there are not as many speeds as
            copies.
    """

    def __init__(
        self,
        every: int = 50,
        *,
        rate: float = 0.7,
        momentum: float = 0.9,
        buffer: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        super().__init__(every)
        check_outer("DelayedNesterov", rate, momentum)
        if buffer is not None:
            what = f"DelayedNesterov(buffer={buffer!r})"
            require_whole(what, buffer, 1, "1 or more pushes, or None")
        if speeds is not None:
            wanted = "positive numbers, or None"
            require_each("DelayedNesterov", object, wanted, speeds=speeds)
            for speed in speeds:
                require_number(f"DelayedNesterov(speeds={speeds!r:.80})", speed, wanted, above=0)
        self.rate, self.momentum, self.buffer, self.speeds = rate, momentum, buffer, speeds

    def prepare(self, members: Sequence[Member]) -> None:
        if self.speeds is not None and len(self.speeds) != len(members):
            raise ValueError(
                f"DelayedNesterov(speeds={list(self.speeds)}): {len(self.speeds)} speeds for "
                f"{len(members)} copies; give one a copy"
            )
        super().prepare(members)
        centre = self.keeper.tensors["centre"]
        self._clear(self.keeper)
        for me in members:
            me.tensors["given"] = [t.clone() for t in centre]

    def steps(self, me: Member) -> int:
        if self.speeds is None:
            return self.every
        return max(1, int(self.every * self.speeds[me.index] / max(self.speeds)))

    def waiting(self, me: Member) -> bool:
        return bool(me.numbers["asking"])

    @torch.no_grad()
    def question(self, me: Member) -> Sequence[Tensor]:
        return [a - b for a, b in zip(me.tensors["given"], me.weights(), strict=True)]

    @torch.no_grad()
    def serve(self, keeper: Member, question: Sequence[Tensor]) -> Sequence[Tensor]:
        n = self.buffer or len(self.members)
        keeper.numbers["served"] += 1
        centre, pushed = keeper.tensors["centre"], keeper.tensors["pushed"]
        for theta, total, g in zip(centre, pushed, question, strict=True):
            theta.sub_(g, alpha=self.rate / n)
            total.add_(g)
        if keeper.numbers["served"] >= n:
            keeper.numbers["served"] = 0
            for theta, total, m in zip(centre, pushed, keeper.tensors["momentum"], strict=True):
                m.mul_(self.momentum).add_(total, alpha=1 / n)
                theta.sub_(m, alpha=self.rate * self.momentum)
                total.zero_()
        return centre

    def answered(self, me: Member, answer: Sequence[Tensor]) -> None:
        me.tensors["given"] = [t.clone() for t in answer]
        me.meet(answer)

    def check(self, members: Sequence[Member]) -> None:
        super().check(members)
        if "served" not in self.keeper.numbers:
            raise ValueError("the copy that keeps the centre has not counted what it has served")

    def joined(self, me: Member) -> None:
        me.numbers["steps"] = 0
        me.tensors["given"] = [t.clone() for t in me.weights()]

    def restarted(self, members: Sequence[Member]) -> None:
        super().restarted(members)
        self._clear(self.keeper)
        for me in members:
            me.tensors["given"] = [t.clone() for t in me.weights()]

    def _clear(self, keeper: Member) -> None:
        keeper.numbers["served"] = 0
        for key in ("momentum", "pushed"):
            keeper.tensors[key] = [torch.zeros_like(t) for t in keeper.tensors["centre"]]


_KEPT: Final = ("centre", "momentum", "pushed")

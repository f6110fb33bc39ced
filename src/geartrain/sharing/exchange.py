"""What copies of a part say to one another while they train.

    own gradient ─► stepping ─► optimiser step ─► stepped ─► letters ─► links ─► inbox
                       └ or held, until letters come                               │
                         (synchronous)                 a step, a mix, letters ◄ received

A copy is a ``Member``. An exchange is called with the member whose turn it is, on that member's
worker; it changes that member alone, and reaches the others by letters. Nothing here waits: a
synchronous method holds its step and says ``waiting``.

Source: raw gradients to the nearest neighbours, Viviani et al. 2019, "Deep Learning at Scale".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from geartrain.sharing.mixing import least_pull

if TYPE_CHECKING:
    from geartrain.parts.part import PartState
    from geartrain.parts.trained import StepTaken
    from geartrain.sharing.locks import AbstractLock

Tensors: TypeAlias = Sequence[Tensor | None]
"""One entry a parameter of the part (``Member.parameters``), dense or sparse COO; None: none."""

Full: TypeAlias = Literal["drop", "merge"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    """What one copy of a part sends to another.

    Args:
        part: The part, without the number of a copy.
        sender, receiver: Numbers of the copies.
        kind: What the exchange calls it: ``gradient``, ``weights``, ...
        tensors: Copies, which nobody writes to.
        version: The sender's version when it was sent.
        round: Own gradients of the sender until then.
        weight: A number that goes with the tensors.
        seen: The receiver's version when it was sent.
        nbytes: Bytes on the link.
        hops: Latencies that it takes: 1, or those of a collective, which its receiver is charged.
        collective: Whether it is the result of one.
        count: Letters that were merged into this one, itself included.
        progress: Of a collective: instances trained, which schedules go by, equal for all.
    """

    part: str
    sender: int
    receiver: int
    kind: str
    tensors: tuple[Tensor | None, ...]
    version: int = 0
    round: int = 0
    weight: float = 1.0
    seen: int = 0
    nbytes: int = 0
    hops: int = 1
    collective: bool = False
    count: int = 1
    progress: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Inbox:
    """How many letters of one sender may wait at a copy, and what becomes of more.

    Args:
        limit: Letters of one sender.
        full: ``drop`` the oldest of that sender, or ``merge`` the new one into the newest by adding
            tensors and weights. Both are counted. Letters whose kind is not among the exchange's
            ``bounded`` are always kept: its own rules bound them.

    Raises:
        ValueError: Other values.
    """

    limit: int = 4
    full: Full = "drop"

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"Inbox(limit={self.limit}): give 1 or more")
        if self.full not in ("drop", "merge"):
            raise ValueError(f"Inbox(full={self.full!r}): give 'drop' or 'merge'")


@final
@dataclass(slots=True)
class Ledger:
    """What a copy of a part has sent and what became of what came; letters that were merged count.

    Between stretches ``came == applied + dropped`` for every copy, and over all copies
    ``sent == came + lost``; ``merged`` of those applied came in company.

    ``meetings`` says how often the copy's weights were mixed with others': a pair that meets counts
    it twice, once each. Exchanges of gradients have none.
    """

    rounds: int = 0  # own gradients
    sent: int = 0
    bytes: int = 0
    came: int = 0
    applied: int = 0
    merged: int = 0
    dropped: int = 0
    lost: int = 0  # of those sent: the receiver was absent
    meetings: int = 0
    declined: int = 0  # of those sent: what the receiver did not take up
    staleness: dict[int, int] = field(default_factory=dict)  # versions passed under way -> letters

    def add(self, other: Ledger) -> None:
        """Count what another has counted as well."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for age, letters in other.staleness.items():
            self.staleness[age] = self.staleness.get(age, 0) + letters


_NOTHING: Final = 1e-6  # of an eigenvalue: rounding
_COUNTS: Final = tuple(f.name for f in fields(Ledger) if f.name != "staleness")


@final
class Member:
    """One copy of a part, as its exchange sees it.

    Args:
        name: The part, without the number of the copy.
        index: Number of the copy.
        part: Its weights and optimiser.
        neighbours: Copies that it sends to.
        senders: Copies that send to it.
        inbox: How many letters may wait.
        bounded: Kinds of letters that the inbox bounds.

    Attributes:
        rounds: Own gradients so far; the current one counts when ``stepping`` is called.
        tensors, numbers: What the exchange keeps for this copy; they are saved in checkpoints.
        peers: All members, by index. Only what never changes may be read of another one.
        present: Whether the copy takes part now.
    """

    def __init__(
        self,
        name: str,
        index: int,
        part: PartState,
        neighbours: Sequence[int] = (),
        senders: Sequence[int] = (),
        inbox: Inbox | None = None,
        bounded: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.index, self.part = name, index, part
        self.neighbours, self.senders = tuple(neighbours), tuple(senders)
        self.rounds = 0
        self.tensors: dict[str, list[Tensor]] = {}
        self.numbers: dict[str, float] = {}
        self.peers: Sequence[Member] = ()
        self.present = True
        self.ledger = Ledger()
        self.outbox: list[Letter] = []
        self.steps: list[StepTaken] = []
        self._inbox, self._bounded = inbox or Inbox(), bounded
        self._waiting: deque[Letter] = deque()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that learn."""
        return self.part.parameters

    def weights(self) -> list[Tensor]:
        """The weights themselves, without a graph; ``copies`` of them are safe to keep."""
        return [p.detach() for p in self.parameters]

    def apply(
        self,
        gradients: Tensors,
        scale: float = 1.0,
        *,
        own: bool = False,
        progress: int | None = None,
    ) -> None:
        """Take an optimiser step of its own with these gradients, which stay as they are.

        Args:
            gradients: As they would be in ``.grad``.
            scale: They are multiplied by it.
            own: Whether it is the own step that was held; torch schedulers then step too.
            progress: Instances trained, for the schedule; None: as at its last own gradient.
        """
        if progress is not None:
            self.part.progress = progress
        step = self.part.step_with([_scaled(g, scale) for g in gradients], own=own)
        if step is not None:
            self.steps.append(step)

    def write(self, weights: Sequence[Tensor]) -> None:
        """Overwrite the weights; the version grows by one, the optimiser's state stays."""
        self.part.overwrite(weights)

    def meet(self, weights: Sequence[Tensor]) -> None:
        """Overwrite the weights with what they have become by those of others; it is counted."""
        self.ledger.meetings += 1
        self.write(weights)

    def send(self, to: int, kind: str, tensors: Tensors, weight: float = 1.0) -> None:
        """Send a letter with copies of the tensors."""
        self._post(to, kind, copies(tensors), weight)

    def send_all(self, kind: str, tensors: Tensors, weight: float = 1.0) -> None:
        """Send to all neighbours; copied once."""
        if self.neighbours:
            copied = copies(tensors)
            for to in self.neighbours:
                self._post(to, kind, copied, weight)

    def _post(self, to: int, kind: str, tensors: tuple[Tensor | None, ...], weight: float) -> None:
        letter = Letter(
            self.name,
            self.index,
            to,
            kind,
            tensors,
            self.part.version,
            self.rounds,
            weight,
            self.peers[to].part.version,
            tensor_bytes(tensors),
        )
        self.ledger.sent += 1
        self.ledger.bytes += letter.nbytes
        self.outbox.append(letter)

    def put(self, letter: Letter) -> None:
        """A letter has come; it waits, is merged, or drives the oldest of its sender out."""
        self.ledger.came += letter.count
        if letter.collective:
            self.count_collective(letter)
        if letter.kind in self._bounded:
            same = [x for x in self._waiting if (x.sender, x.kind) == (letter.sender, letter.kind)]
            if len(same) >= self._inbox.limit:
                if self._inbox.full == "merge":
                    self._waiting[self._waiting.index(same[-1])] = _merged(same[-1], letter)
                    self.ledger.merged += letter.count
                    return
                self._waiting.remove(same[0])
                self.ledger.dropped += same[0].count
        self._waiting.append(letter)

    def count_collective(self, letter: Letter) -> None:
        """On a ring each sends as much as it gets."""
        self.ledger.sent += 1
        self.ledger.bytes += letter.nbytes

    def take(self) -> list[Letter]:
        """All that wait, in the order in which they came; they count as applied."""
        letters = list(self._waiting)
        self._waiting.clear()
        for letter in letters:
            self.ledger.applied += letter.count
            age = max(0, self.part.version - letter.seen)
            self.ledger.staleness[age] = self.ledger.staleness.get(age, 0) + letter.count
        return letters

    @property
    def mail(self) -> int:
        """Letters that wait."""
        return len(self._waiting)

    def forget_mail(self) -> None:
        """What waits is dropped, and what was to be sent is not."""
        self.ledger.dropped += sum(x.count for x in self._waiting)
        self._waiting.clear()
        self.ledger.sent -= len(self.outbox)
        self.ledger.bytes -= sum(x.nbytes for x in self.outbox)
        self.outbox.clear()
        self.steps.clear()


class AbstractExchange(ABC):
    """How copies of one part exchange. Each part has an object of its own, copied from the user's.

    Hooks are called on the worker of the member that they are given, and change it alone. State of
    a member is kept in ``me.tensors`` and ``me.numbers``; state of all in ``self`` is to be guarded
    with ``self.lock``, and empty between stretches.

    Args:
        every: Own gradients between two exchanges.
        inbox: How many letters may wait.

    Raises:
        ValueError: ``every`` is not positive.
    """

    bounded: frozenset[str] = frozenset()
    """Kinds of letters that inboxes bound: those that may be dropped or merged without harm."""

    needs_neighbours: ClassVar[bool] = True
    """Whether it follows a topology."""

    lock: AbstractLock
    """Between the workers; given by the engine before ``prepare``."""

    def __init__(self, every: int = 1, inbox: Inbox | None = None) -> None:
        if every < 1:
            raise ValueError(f"{type(self).__name__}(every={every}): give 1 or more own gradients")
        self.every, self.inbox = every, inbox or Inbox()
        self.members: Sequence[Member] = ()

    def prepare(self, members: Sequence[Member]) -> None:
        """Before training, and before every resumed run: look at the members, make their state.

        State that a checkpoint holds is put back after it.

        Raises:
            ValueError: This cannot work with these members; says why.
        """
        self.members = members

    def advice(self) -> str | None:
        """What speaks against training so, as it was prepared, and what to do; None: nothing.

        It is said once, when training begins.
        """
        return None

    def due(self, me: Member) -> bool:
        """Whether this own gradient is one to exchange at."""
        return me.rounds % self.every == 0

    def stepping(self, me: Member, gradients: Tensors) -> Tensors | None:
        """Before an own step.

        Args:
            me: Whose; ``me.rounds`` counts this gradient.
            gradients: Averaged and clipped; copy what is kept.

        Returns:
            What to step with, or None: the step is held, and ``received`` takes it by ``me.apply``.
        """
        return gradients

    def stepped(self, me: Member, gradients: Tensors) -> None:  # noqa: B027 - may do nothing
        """After an own step that was not held; the place to send from."""

    @abstractmethod
    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        """Letters have come. It may step, mix and send.

        It is called between firings, when no row of this part is in flight; where rows always are,
        after a step of the part's own; and at once while it is ``waiting``.
        """

    def waiting(self, me: Member) -> bool:
        """Whether the copy computes nothing until letters come, as synchronous methods do."""
        return False

    def finish(self, members: Sequence[Member]) -> bool:
        """Nothing moves any more and no letter is under way: release what is held.

        It may step and send; it is called again when that has come to rest.

        Returns:
            Whether there was anything.
        """
        return False

    def left(self, me: Member) -> None:  # noqa: B027 - may do nothing
        """A copy takes part no more (``me.present`` is False): nobody may wait for it.

        Copies come and go in the simulator alone, between firings: others may be changed here.
        """

    def joined(self, me: Member) -> None:  # noqa: B027 - may do nothing
        """A copy takes part (again); it has been given the mean weights of those present."""

    def abandoned(self, members: Sequence[Member]) -> None:  # noqa: B027 - may do nothing
        """The run has failed, letters under way are lost: forget what was held or awaited."""

    def check(self, members: Sequence[Member]) -> None:
        """What a checkpoint keeps of these members has been put back, for a look.

        Raises:
            ValueError: It cannot be what members keep between two stretches.
        """
        if held := [m.index for m in members if self.waiting(m)]:
            raise ValueError(f"copies {held[:8]} wait for letters that nobody has sent")

    def loaded(self, members: Sequence[Member]) -> None:  # noqa: B027 - may do nothing
        """What a checkpoint keeps of these members has been put back, for good."""

    def consensus(self, members: Sequence[Member]) -> Sequence[Tensor] | None:
        """The weights that stand for all, by parameter; None: as the user's setting says."""
        return None

    def restarted(self, members: Sequence[Member]) -> None:  # noqa: B027 - may do nothing
        """All copies have been given equal weights: whatever is kept of the old ones is void."""


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
        if lockstep:
            self.bounded = frozenset()  # none may be lost
        self.lockstep, self.scale = lockstep, scale
        self._early: list[list[Letter]] = []

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
        found = False
        for me in members:
            early = self._early[me.index]
            if self.waiting(me) or early:
                found = True
                self._apply_rounds(me, max([me.numbers["round"], *(x.weight for x in early)]))
        if found:
            self._align([m for m in members if m.present])
        return found

    def left(self, me: Member) -> None:
        """Those that wait for it alone go on. In the simulator, where nobody else is at work."""
        if self.lockstep:
            self._align([me])
        for other in self.members:
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


@final
class Collective:
    """The mean of what all present members contribute, as of a ring all-reduce.

    The last to contribute sends the mean to everybody (to itself too), as a letter that takes
    2 (n - 1) latencies and carries 2 (n - 1) / n of the bytes, charged to the receiver: on a ring
    each sends as much as it gets. Sums are in the order of the members.

    Args:
        kind: Of those letters.
        members: All of them.
        lock: Held while contributions are counted.
    """

    def __init__(self, kind: str, members: Sequence[Member], lock: AbstractLock) -> None:
        self.kind, self._members, self._lock = kind, members, lock
        self._given: dict[int, tuple[Tensor | None, ...]] = {}
        self._waiting = [False] * len(members)

    def contribute(self, me: Member, tensors: Tensors) -> None:
        """Add copies of one's own; the mean comes as a letter, and ``waits`` until it is taken."""
        with self._lock:
            self._given[me.index] = copies(tensors)
            self._waiting[me.index] = True
            if all(m.index in self._given for m in self._members if m.present):
                self._send(me)

    def waits(self, me: Member) -> bool:
        """Whether a member has contributed and has not had the mean."""
        return self._waiting[me.index]

    def taken(self, me: Member) -> None:
        """A member has the mean."""
        self._waiting[me.index] = False

    def release(self) -> bool:
        """Give those that wait the mean of what is there; the others get it too. True if any."""
        with self._lock:
            if not self._given:
                return False
            self._send(self._members[min(self._given)])
            return True

    def left(self, me: Member) -> None:
        """A member is absent now; if the others have all contributed, they go on."""
        with self._lock:
            self._waiting[me.index] = False
            there = [m for m in self._members if m.present]
            if self._given and all(m.index in self._given for m in there):
                self._send(there[0] if there else me)

    def _send(self, me: Member) -> None:
        given = [self._given[k] for k in sorted(self._given)]
        there = [m for m in self._members if m.present]
        n = max(1, len(there))
        mean = tuple(_mean(column) for column in zip(*given, strict=True))
        nbytes = 2 * (n - 1) * tensor_bytes(mean) // n
        for m in there:
            me.outbox.append(
                Letter(
                    me.name,
                    m.index,
                    m.index,
                    self.kind,
                    mean,
                    m.part.version,
                    m.rounds,
                    1.0,
                    m.part.version,
                    nbytes,
                    2 * (n - 1),
                    collective=True,
                    progress=max(self._members[k].part.progress for k in self._given),
                )
            )
        self._given.clear()


@final
class AllReduce(AbstractExchange):
    """The synchronous baseline: every step is taken with the mean gradient of all copies.

    Copies that are equal stay equal; one that joins has their weights of then, and not what is just
    under way to them. At the end of a stretch, those that have no partner for their
    last gradients step, with all others, with the mean of what there is.
    """

    needs_neighbours = False

    def __init__(self) -> None:
        super().__init__()
        self._sum: Collective | None = None

    def prepare(self, members: Sequence[Member]) -> None:
        super().prepare(members)
        self._sum = Collective("mean", members, self.lock)

    @property
    def _collective(self) -> Collective:
        assert self._sum is not None, "prepare comes first"
        return self._sum

    def stepping(self, me: Member, gradients: Tensors) -> Tensors | None:
        if len(self.members) == 1:
            return gradients
        self._collective.contribute(me, gradients)
        return None

    def received(self, me: Member, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._collective.taken(me)
            me.apply(letter.tensors, own=True, progress=letter.progress)

    def waiting(self, me: Member) -> bool:
        return self._collective.waits(me)

    def finish(self, members: Sequence[Member]) -> bool:
        return self._collective.release()

    def left(self, me: Member) -> None:
        self._collective.left(me)

    def abandoned(self, members: Sequence[Member]) -> None:
        self.prepare(members)


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


def copies(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """Copies without a graph."""
    return tuple(None if t is None else t.detach().clone() for t in tensors)


def tensor_bytes(tensors: Tensors) -> int:
    """Bytes of tensors; of sparse ones, indices and values."""
    total = 0
    for t in tensors:
        if t is not None:
            total += t._indices().nbytes + t._values().nbytes if t.is_sparse else t.nbytes
    return total


def _scaled(gradient: Tensor | None, scale: float) -> Tensor | None:
    """A copy, as optimisers may write to what they are given."""
    if gradient is None:
        return None
    return gradient.clone() if scale == 1.0 else gradient * scale


def _merged(a: Letter, b: Letter) -> Letter:
    tensors = tuple(_sum([x, y]) for x, y in zip(a.tensors, b.tensors, strict=True))
    return replace(b, tensors=tensors, weight=a.weight + b.weight, count=a.count + b.count)


def _sum(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [t for t in tensors if t is not None]
    if not there:
        return None
    total = there[0].clone()
    for t in there[1:]:
        total = total + t
    return total


@torch.no_grad()
def _mean(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """A missing gradient counts as zero."""
    total = _sum(tensors)
    return None if total is None else total / len(tensors)

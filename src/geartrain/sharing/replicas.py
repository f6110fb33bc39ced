"""Copies of a whole model that talk while they train, and the model that stands for them all.

    user's modules ◄── consensus ── copy 0 ◄─letters─► copy 1 ◄─letters─► copy 2 ...
    evaluated, saved                own weights, own optimiser, own versions, own shard

``Neighbours`` is what a user writes, ``Replicas`` what runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, Final, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from geartrain.bounds import COPIES, MOST_COPIES, require_at_most
from geartrain.errors import LeakError
from geartrain.parts.norms import share_norms
from geartrain.parts.part import PartState, StepTaken
from geartrain.schema import Count, Range, read
from geartrain.sharing.exchange import (
    AbstractExchange,
    AllReduce,
    Inbox,
    Ledger,
    Letter,
    Member,
    NearestNeighbours,
    Tensors,
)
from geartrain.sharing.exchanges.centre import DelayedNesterov, ElasticAverage
from geartrain.sharing.exchanges.foreign import CompensatedNeighbours, StalenessAware
from geartrain.sharing.exchanges.gossip import DecentralizedSGD, PairAverage
from geartrain.sharing.exchanges.periodic import DiLoCo, PeriodicAverage
from geartrain.sharing.exchanges.pushsum import PushSum
from geartrain.sharing.share import AbstractLock, NoLock
from geartrain.sharing.topology import topology_of

Consensus: TypeAlias = Literal["mean", "best"]
Sharing: TypeAlias = Literal["static", "pull"]


EXCHANGES: Final[dict[str, Callable[..., AbstractExchange]]] = {
    "gradients": NearestNeighbours,
    "weights": PairAverage,
    "all-reduce": AllReduce,
    "average": PeriodicAverage,
    "d-psgd": DecentralizedSGD,
    "ad-psgd": PairAverage,
    "push-sum": PushSum,
    "elastic": ElasticAverage,
    "diloco": DiLoCo,
    "async-local-sgd": DelayedNesterov,
    "staleness-aware": StalenessAware,
    "delay-compensated": CompensatedNeighbours,
}
"""Exchanges that may be asked for by name, with their defaults."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Copies of the whole model that train on their shards and exchange with their neighbours.

    Args:
        copies: How many; copy k lives on worker k mod the number of workers.
        topology: Who is whose neighbour: ``ring``, ``torus``, ``full``, edges, a graph of networkx,
            or an object with ``neighbours(copies)``. Exchanges without neighbours ignore it.
        exchange: A name of ``EXCHANGES``, such as ``gradients`` (``NearestNeighbours``),
            ``weights`` (``PairAverage``) or ``all-reduce``, or an exchange.
        when: For an exchange by name: every so many own gradients. None: its default.
        inbox: For one by name: how many letters may wait, and what becomes of more.
        consensus: Which model is evaluated, saved and left in the user's modules: the ``mean`` of
            the copies, or the ``best`` by validation, which evaluates every one of them (without
            validation data: the mean). An exchange may have one of its own.
        restart_every: After every so many epochs all copies go on from the consensus, with new
            optimisers: the staged consensus of FAST. None: never.
        shards: ``static``: copy k has every n-th instance of the epoch's order, from the k-th on,
            and begins them anew when it is through. ``pull``: whoever has room takes the next. An
            epoch ends when as many instances as the data have were taken by all together.
        start: Called as ``start(module, k)`` with every part's module of copy k, to begin with
            weights of its own. None: all begin with equal weights.

    Raises:
        ValueError: A value is none of these.
    """

    copies: int = 2
    topology: Any = "ring"
    exchange: str | AbstractExchange = "gradients"
    when: int | None = None
    inbox: Inbox | None = None
    consensus: Consensus = "mean"
    restart_every: int | None = None
    shards: Sharing = "static"
    start: Callable[[nn.Module, int], None] | None = None

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise ValueError(f"Neighbours(copies={self.copies}): give 1 or more")
        require_at_most(f"Neighbours(copies={self.copies})", self.copies, MOST_COPIES, COPIES)
        if self.consensus not in ("mean", "best"):
            raise ValueError(f"Neighbours(consensus={self.consensus!r}): give 'mean' or 'best'")
        if self.shards not in ("static", "pull"):
            raise ValueError(f"Neighbours(shards={self.shards!r}): give 'static' or 'pull'")
        if self.restart_every is not None and self.restart_every < 1:
            raise ValueError(
                f"Neighbours(restart_every={self.restart_every}): give 1 or more epochs, or None"
            )
        self.made_exchange()

    def made_exchange(self) -> AbstractExchange:
        """A fresh object for one part."""
        given = {"every": self.when, "inbox": self.inbox}
        given = {key: value for key, value in given.items() if value is not None}
        if isinstance(self.exchange, AbstractExchange):
            if given:
                raise ValueError(
                    f"Neighbours: {self._worded(given)} beside an exchange that is an object; give "
                    f"it to {type(self.exchange).__name__}"
                )
            return copy.deepcopy(self.exchange)
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"Neighbours(exchange={self.exchange!r}): give one of {', '.join(EXCHANGES)}, or "
                "an exchange such as geartrain.NearestNeighbours()"
            )
        make = EXCHANGES[self.exchange]
        given_in_vain = {k: v for k, v in given.items() if k not in signature(make).parameters}
        if given_in_vain:
            raise ValueError(
                f"Neighbours: exchange {self.exchange!r} knows no {self._worded(given_in_vain)}; "
                "leave it out"
            )
        return make(**given)

    @staticmethod
    def _worded(given: Mapping[str, object]) -> str:
        names = {"every": "when"}
        return ", ".join(f"{names.get(key, key)}={value}" for key, value in given.items())


@final
class Desk:
    """Between a copy of a part, its exchange and its worker."""

    def __init__(self, exchange: AbstractExchange, member: Member) -> None:
        self.exchange, self.member = exchange, member
        self._fresh = False  # has stepped while rows are in flight: no better time will come
        self.keeps, self.counts = frozenset(member.tensors), frozenset(member.numbers)
        member.part.desk = self

    def stepping(self, gradients: Tensors) -> Tensors | None:
        self.member.rounds += 1
        self.member.ledger.rounds += 1
        self._fresh = not self.member.part.at_rest
        if not self.member.present:  # what was in flight when it left: steps of its own
            return gradients
        return self.exchange.stepping(self.member, gradients)

    def stepped(self, gradients: Tensors) -> None:
        if self.member.present:
            self.exchange.stepped(self.member, gradients)

    @property
    def waiting(self) -> bool:
        """Whether the copy may not compute with this part now."""
        return self.member.present and self.exchange.waiting(self.member)

    @property
    def ready(self) -> bool:
        """Whether letters wait that may be taken now."""
        me = self.member
        return bool(me.mail) and (me.part.at_rest or self._fresh or self.waiting)

    def receive(self) -> list[Letter]:
        """Take the letters that wait; returns them."""
        self._fresh = False
        letters = self.member.take()
        self.exchange.received(self.member, letters)
        return letters

    def take_letters(self) -> list[Letter]:
        letters, self.member.outbox = self.member.outbox, []
        return letters

    def take_steps(self) -> list[StepTaken]:
        steps, self.member.steps = self.member.steps, []
        return steps


@final
class Replicas:
    """The copies of all parts.

    Args:
        parts: The consensus: never trained, written to by ``agree``.
        setting: The user's.
        lock: The runtime's.

    Raises:
        ValueError: The topology or the exchange cannot be made of so many copies.
    """

    def __init__(
        self,
        parts: Mapping[str, PartState],
        setting: Neighbours,
        lock: Callable[[], AbstractLock] = NoLock,
    ) -> None:
        self.setting, self.copies = setting, setting.copies
        self._advised = False
        self._base = parts
        self.positions = [0] * self.copies  # instances of this epoch that each copy has taken
        self.desks: dict[str, list[Desk]] = {
            name: self._desks(name, part, lock) for name, part in parts.items()
        }
        self.parts = {d.member.part.name: d.member.part for d in self.all_desks()}
        for k in range(self.copies):
            share_norms({d.member.part.name: d.member.part for d in self.of_copy(k)})
        self.trained = [0] * self.copies  # instances that each copy has finished in training

    def _desks(self, name: str, base: PartState, lock: Callable[[], AbstractLock]) -> list[Desk]:
        n, exchange = self.copies, self.setting.made_exchange()
        targets: Sequence[Sequence[int]] = [()] * n
        if exchange.needs_neighbours and n > 1:
            targets = topology_of(self.setting.topology).neighbours(n)
        members = []
        for k in range(n):
            module = copy.deepcopy(base.module)
            if self.setting.start is not None:
                self.setting.start(module, k)
            part = PartState(f"{name}#{k}", module, base.rules, base.mixer)
            senders = [j for j in range(n) if k in targets[j]]
            members.append(
                Member(name, k, part, targets[k], senders, exchange.inbox, exchange.bounded)
            )
        for member in members:
            member.peers = members
        exchange.lock = lock()
        exchange.prepare(members)
        return [Desk(exchange, m) for m in members]

    def advice(self) -> str | None:
        """What speaks against training so; None: nothing, or it has been said."""
        if self._advised:
            return None
        self._advised = True
        exchange = next((d.exchange for d in self.all_desks()), None)
        said = None if exchange is None else exchange.advice()
        if said is None:
            return None
        topology = self.setting.topology
        named = f"topology={topology!r}" if isinstance(topology, str) else "this topology"
        return f"{self.copies} copies, {self.exchange_name}, {named}: {said}"

    def all_desks(self) -> Iterator[Desk]:
        for desks in self.desks.values():
            yield from desks

    def of_copy(self, k: int) -> list[Desk]:
        """The desks of one copy."""
        return [desks[k] for desks in self.desks.values()]

    def present(self) -> list[bool]:
        """Which copies take part."""
        first = next(iter(self.desks.values()), ())
        return [d.member.present for d in first] or [True] * self.copies

    def leave(self, k: int) -> None:
        """A copy takes part no more; what it has in flight finishes."""
        for desk in self.of_copy(k):
            desk.member.present = False
            desk.exchange.left(desk.member)

    def join(self, k: int) -> None:
        """A copy takes part, with the mean weights of those that do."""
        for desks in self.desks.values():
            me = desks[k].member
            there = [d.member for d in desks if d.member.present]
            me.present = True
            if there:
                me.write(_mean_weights(there))
                _average_buffers([m.part for m in there], me.part)
            desks[k].exchange.joined(me)

    def put(self, letter: Letter) -> bool:
        """A letter has arrived; False: its receiver is absent, and it is lost."""
        member = self.desks[letter.part][letter.receiver].member
        if member.present:
            member.put(letter)
            return True
        if letter.collective:
            member.count_collective(letter)
        member.peers[letter.sender].ledger.lost += letter.count
        return False

    def release(self) -> bool:
        """Let synchronous exchanges go on without what does not come; whether there was any."""
        found = False
        for desks in self.desks.values():
            found |= desks[0].exchange.finish([d.member for d in desks])
        return found

    def settle(self) -> list[StepTaken]:
        """Deliver what the steps of a flush have sent, until nothing is left; outside of time."""
        steps: list[StepTaken] = []
        moved = True
        while moved:
            moved = False
            for desk in self.all_desks():
                for letter in desk.take_letters():
                    moved = True
                    self.put(letter)
            for desk in self.all_desks():
                if desk.member.mail:
                    moved = True
                    desk.receive()
                steps += desk.take_steps()
            moved = moved or self.release()
        return steps

    def check_settled(self) -> None:
        """Raises:
        LeakError: Letters were neither applied nor counted as dropped or lost.
        """
        for name, desks in self.desks.items():
            total = Ledger()
            for desk in desks:
                ledger = desk.member.ledger
                total.add(ledger)
                if ledger.came != ledger.applied + ledger.dropped or desk.member.outbox:
                    raise LeakError(
                        f"copy {desk.member.index} of part '{name}' got {ledger.came} letters, "
                        f"applied {ledger.applied} and dropped {ledger.dropped}; "
                        f"{len(desk.member.outbox)} were never sent on"
                    )
            if total.sent != total.came + total.lost:
                raise LeakError(
                    f"copies of part '{name}' sent {total.sent} letters; {total.came} came and "
                    f"{total.lost} were lost"
                )

    def finished(self, k: int, instances: int) -> None:
        """A copy has finished instances."""
        self.trained[k] += instances

    @torch.no_grad()
    def agree(self, best: int | None = None) -> None:
        """Write the consensus into the user's modules.

        Args:
            best: The copy that stands for all; None: the exchange's own consensus, or the mean.
        """
        for name, desks in self.desks.items():
            there = [d.member for d in desks if d.member.present] or [d.member for d in desks]
            base = self._base[name]
            if best is not None:
                there = [desks[best].member]
            weights = None if best is not None else desks[0].exchange.consensus(there)
            base.overwrite(_mean_weights(there) if weights is None else weights)
            base.version = max(m.part.version for m in there)
            _average_buffers([m.part for m in there], base)

    @torch.no_grad()
    def restart(self) -> None:
        """All copies go on from the user's modules, with new optimisers."""
        for name, desks in self.desks.items():
            base = self._base[name]
            for desk in desks:
                part = desk.member.part
                part.module.load_state_dict(base.module.state_dict())
                part.overwrite([p.detach() for p in base.parameters])
                part.forget_optimizer()
            desks[0].exchange.restarted([d.member for d in desks])

    def abandon(self) -> None:
        """Forget what is in flight; letters that were under way count as lost by the first copy."""
        for desks in self.desks.values():
            total = Ledger()
            for desk in desks:
                desk.member.part.abandon()
                desk.member.forget_mail()
                total.add(desk.member.ledger)
            desks[0].member.ledger.lost += total.sent - total.came - total.lost
            desks[0].exchange.abandoned([d.member for d in desks])

    @torch.no_grad()
    def distance(self) -> float:
        """Root mean square distance of the copies from their mean, all parts together."""
        total, n = 0.0, 1
        for desks in self.desks.values():
            there = [d.member for d in desks if d.member.present]
            n = max(n, len(there))
            if len(there) > 1:
                for column in zip(*(m.weights() for m in there), strict=True):
                    mean = torch.stack(list(column)).double().mean(0)
                    total += sum(float((x.double() - mean).square().sum()) for x in column)
        return math.sqrt(total / n)

    def totals(self) -> Totals:
        """Of each copy, all parts together, since the beginning."""
        ledgers = []
        for k in range(self.copies):
            ledger = Ledger()
            for desk in self.of_copy(k):
                ledger.add(desk.member.ledger)
            ledgers.append(ledger)
        rounds = [
            max((d.member.rounds for d in self.of_copy(k)), default=0) for k in range(self.copies)
        ]
        return Totals(tuple(ledgers), tuple(rounds), tuple(self.trained))

    @property
    def exchange_name(self) -> str:
        """The class of the exchange."""
        return type(self.setting.made_exchange()).__name__

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What exchanges keep, and where each copy stands in its shard; not the parts."""
        tensors: dict[str, Tensor] = {}
        entries: dict[str, Any] = {}
        for desk in self.all_desks():
            me = desk.member
            for key, values in me.tensors.items():
                for i, value in enumerate(values):
                    tensors[f"{me.part.name}/exchange/{key}/{i}"] = value
            entries[me.part.name] = {
                "rounds": me.rounds,
                "numbers": dict(me.numbers),
                "tensors": {key: len(values) for key, values in me.tensors.items()},
            }
        return tensors, {
            "copies": self.copies,
            "exchange": self.exchange_name,
            "positions": list(self.positions),
            "trained": list(self.trained),
            "members": entries,
        }

    def check(self, tensors: Mapping[str, Tensor], document: Any) -> ReplicasEntry:
        """What ``load`` takes; nothing is changed.

        Raises:
            ValueError, CheckpointError: It is damaged, or of other copies.
        """
        entry = read(ReplicasEntry, document, "replicas")
        was, now = (entry.copies, entry.exchange), (self.copies, self.exchange_name)
        if was != now:
            raise ValueError(
                f"it has {was[0]} copies with exchange {was[1]}, the session {now[0]} with "
                f"{now[1]}; use the same, or weights_only=True"
            )
        names = {desk.member.part.name for desk in self.all_desks()}
        for known in (entry.members, entry.parts):
            if known.keys() != names:
                raise ValueError(f"it has {sorted(known)[:8]}, the session {sorted(names)[:8]}")
        for many in (entry.positions, entry.trained):
            if len(many) != self.copies:
                raise ValueError(f"it has {len(many)} counts for {self.copies} copies")
        for desks in self.desks.values():
            found = [entry.members[d.member.part.name] for d in desks]
            _require_kept(desks, found)
            members = [d.member for d in desks]
            before = [(m.rounds, m.numbers, m.tensors) for m in members]
            kept = [_kept_of(d, e, tensors) for d, e in zip(desks, found, strict=True)]
            try:
                _put(desks, kept)
                desks[0].exchange.check(members)
            finally:
                _put(desks, before)
        return entry

    def loading(self, tensors: Mapping[str, Tensor], entry: ReplicasEntry) -> Callable[[], None]:
        """Copy what ``to_tensors`` gave and ``check`` let pass; to be called to put it back."""
        found = [
            (desks, [_kept_of(d, entry.members[d.member.part.name], tensors) for d in desks])
            for desks in self.desks.values()
        ]

        def put() -> None:
            for desks, kept in found:
                _put(desks, kept)
                desks[0].exchange.loaded([d.member for d in desks])
            self.positions, self.trained = list(entry.positions), list(entry.trained)

        return put


@final
@dataclass(frozen=True, slots=True)
class MemberEntry:
    """What an exchange keeps for a copy of a part, as JSON has it; ``tensors`` says how many."""

    rounds: Count
    numbers: Mapping[str, Annotated[int | float, Range(-1)]]
    tensors: Mapping[str, Count]


@final
@dataclass(frozen=True, slots=True)
class ReplicasEntry:
    """Copies of a model, as JSON has them; ``parts`` are read elsewhere."""

    copies: Count
    exchange: str
    positions: Sequence[Count]
    trained: Sequence[Count]
    members: Mapping[str, MemberEntry]
    parts: Mapping[str, Any]


def _require_kept(desks: Sequence[Desk], found: Sequence[MemberEntry]) -> None:
    """Copies keep what theirs keep; what one of them keeps for all, another may have kept.

    Raises:
        ValueError: Something else is kept.
    """
    was, now = (
        sorted(sorted(keys) for keys in many)
        for many in ([e.tensors for e in found], [d.keeps for d in desks])
    )
    if was != now:
        raise ValueError(f"its copies keep {was}, those of the session {now}")
    for desk, entry in zip(desks, found, strict=True):
        place, n = desk.member.part.name, len(desk.member.parameters)
        for key, count in entry.tensors.items():
            if count != n:
                raise ValueError(f"'{place}' keeps {count} tensors of {key}, expected {n}")
        if missing := sorted(desk.counts - entry.numbers.keys()):
            raise ValueError(f"'{place}' has no number {', '.join(missing)}")


_Kept: TypeAlias = tuple[int, dict[str, float], dict[str, list[Tensor]]]


def _kept_of(desk: Desk, entry: MemberEntry, tensors: Mapping[str, Tensor]) -> _Kept:
    kept = {key: _kept(desk.member, key, tensors) for key in entry.tensors}
    return entry.rounds, desk.member.numbers | dict(entry.numbers), kept


def _put(desks: Sequence[Desk], found: Sequence[_Kept]) -> None:
    for desk, (rounds, numbers, kept) in zip(desks, found, strict=True):
        me = desk.member
        me.rounds, me.numbers, me.tensors = rounds, numbers, kept


def _kept(me: Member, key: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []
    for i, parameter in enumerate(me.parameters):
        name = f"{me.part.name}/exchange/{key}/{i}"
        found = tensors.get(name)
        if found is None or (found.shape, found.dtype) != (parameter.shape, parameter.dtype):
            what = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise ValueError(
                f"'{name}' is {what}, expected {parameter.dtype} {tuple(parameter.shape)}"
            )
        kept.append(found.to(parameter.device, copy=True))
    return kept


@final
@dataclass(frozen=True, slots=True)
class Totals:
    """What copies have sent, applied and trained: an entry a copy."""

    ledgers: tuple[Ledger, ...]
    rounds: tuple[int, ...]
    finished: tuple[int, ...]


_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def _mean_weights(members: Sequence[Member]) -> list[Tensor]:
    """Of one, its weights to the bit."""
    return [_mean(column) for column in zip(*(m.weights() for m in members), strict=True)]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Of equal ones, that one to the bit."""
    first, *others = tensors
    if all(torch.equal(first, other) for other in others):
        return first.clone()
    total = first.clone()
    for other in others:
        total.add_(other)
    return total.div_(len(tensors))


@torch.no_grad()
def _average_buffers(parts: Sequence[PartState], into: PartState) -> None:
    """Buffers of numbers become the mean, counters the first one's."""
    for target, *given in zip(
        into.module.buffers(), *(p.module.buffers() for p in parts), strict=True
    ):
        target.copy_(_mean(given) if target.dtype in _FLOATS else given[0])

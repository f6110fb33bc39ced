"""Copies of a whole model that talk while they train, and the model that stands for them all.

    user's modules ◄── consensus ── copy 0 ◄─letters─► copy 1 ◄─letters─► copy 2 ...
    evaluated, saved                own weights, own optimiser, own versions, own shard

``Neighbours`` is what a user writes (``neighbours.py``), ``Replicas`` what runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from geartrain.errors import LeakError
from geartrain.graph.through import Through
from geartrain.nodes.hooks import copied_with_hooks
from geartrain.parts.extra import copied
from geartrain.parts.norms import share_norms
from geartrain.parts.part import PartState
from geartrain.parts.trained import StepTaken
from geartrain.schema import read
from geartrain.sharing.alone import AloneState
from geartrain.sharing.assignment import AbstractAssignment, PerCopy
from geartrain.sharing.communicator import AbstractCommunicator
from geartrain.sharing.consensus import average_buffers, distance_from_mean, mean_weights
from geartrain.sharing.endpoint import Communicator, Endpoint
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.kept import (
    ReplicasEntry,
    check_members,
    kept_of,
    members_to_tensors,
    put_members,
)
from geartrain.sharing.letters import Ledger, Letter
from geartrain.sharing.locks import AbstractLock, MakeLock, NoLock, NothingInCommon
from geartrain.sharing.member import Member
from geartrain.sharing.sharing import AbstractSharingState, Kept, Shards
from geartrain.sharing.topology import among, topology_of
from geartrain.sharing.totals import Totals


class AbstractCopiesSetting(Protocol):
    """What is asked of a setting; ``neighbours.Neighbours`` is one, and says what it means."""

    @property
    def copies(self) -> int: ...

    @property
    def topology(self) -> Any: ...

    @property
    def shards(self) -> Shards: ...

    @property
    def consensus(self) -> str: ...

    @property
    def restart_every(self) -> int | None: ...

    @property
    def least(self) -> int: ...

    @property
    def start(self) -> Callable[[nn.Module, int], None] | None: ...

    def made_exchange(self) -> AbstractExchange: ...


@final
class Replicas(AbstractSharingState):
    """The copies of all parts.

    Args:
        parts: The consensus: never trained, written to by ``agree``.
        setting: The user's.
        lock: The runtime's.

    Raises:
        ValueError: The topology or the exchange cannot be made of so many copies.
    """

    apart = True
    talks = releases = True

    def __init__(
        self,
        parts: Mapping[str, PartState],
        setting: AbstractCopiesSetting,
        lock: MakeLock = NoLock,
    ) -> None:
        super().__init__()
        self.setting, self.copies, self.shards = setting, setting.copies, setting.shards
        self._advised = False
        self._base, self._consensus = parts, AloneState(parts)
        self.positions = [0] * self.copies
        self.endpoints: dict[str, list[Endpoint]] = {
            name: self._endpoints(name, part, lock) for name, part in parts.items()
        }
        self._links = {
            name: [e.member.neighbours for e in endpoints]
            for name, endpoints in self.endpoints.items()
        }
        self._grouped = {name: [*range(self.copies)] for name in parts}
        self.least = setting.least
        self.parts = {e.member.part.name: e.member.part for e in self.all_endpoints()}
        for k in range(self.copies):
            share_norms({e.member.part.name: e.member.part for e in self.of_copy(k)})
        self._versions = torch.zeros(len(parts), self.copies, dtype=torch.int64)
        self.trained = [0] * self.copies  # instances that each copy has finished in training

    def _endpoints(self, name: str, base: PartState, lock: MakeLock) -> list[Endpoint]:
        n, exchange = self.copies, self.setting.made_exchange()
        targets: Sequence[Sequence[int]] = [()] * n
        if exchange.needs_neighbours and n > 1:
            targets = topology_of(self.setting.topology).neighbours(n)
        members = []
        for k in range(n):
            module = copied_with_hooks(base.module)
            if self.setting.start is not None:
                self.setting.start(module, k)
            part = PartState(f"{name}#{k}", module, base.rules)
            senders = [j for j in range(n) if k in targets[j]]
            members.append(
                Member(name, k, part, targets[k], senders, exchange.inbox, exchange.bounded)
            )
        for member in members:
            member.peers = members
        exchange.lock = lock()
        exchange.prepare(members)
        return [Endpoint(exchange, m) for m in members]

    def weights(self, name: str, nodes: Sequence[Through]) -> Sequence[PartState]:
        return [e.member.part for e in self.endpoints[name]]

    def assignment(self) -> AbstractAssignment:
        return PerCopy(self.trained)

    def communicator(self, parts: Collection[str]) -> AbstractCommunicator:
        return Communicator(
            {e.member.part.name: e for e in self.all_endpoints() if e.member.part.name in parts}
        )

    def advice(self) -> str | None:
        if self._advised:
            return None
        self._advised = True
        exchange = next((e.exchange for e in self.all_endpoints()), None)
        said = None if exchange is None else exchange.advice()
        if said is None:
            return None
        topology = self.setting.topology
        named = f"topology={topology!r}" if isinstance(topology, str) else "this topology"
        return f"{self.copies} copies, {self.exchange_name}, {named}: {said}"

    def all_endpoints(self) -> Iterator[Endpoint]:
        for endpoints in self.endpoints.values():
            yield from endpoints

    def of_copy(self, k: int) -> list[Endpoint]:
        """Those of the parts of one copy."""
        return [endpoints[k] for endpoints in self.endpoints.values()]

    def present(self) -> list[bool]:
        """Which copies take part."""
        first = next(iter(self.endpoints.values()), ())
        return [e.member.present for e in first] or [True] * self.copies

    def set_present(self, copy: int, present: bool) -> None:
        if self.present()[copy] != present:
            (self.join if present else self.leave)(copy)

    def lose(self, copy: int) -> None:
        for endpoint in self.of_copy(copy):
            endpoint.member.part.abandon()
            endpoint.member.forget_mail()
        self.set_present(copy, False)

    def lost(self, letter: Letter) -> None:
        self.put(letter)

    def mislay(self, letter: Letter) -> None:
        if not letter.collective:  # these are counted as they come
            self.endpoints[letter.part][letter.sender].member.ledger.lost += letter.count

    def regroup(self) -> None:
        present = self.present()
        there = [k for k, is_there in enumerate(present) if is_there]
        for name, endpoints in self.endpoints.items():
            if self._grouped[name] == there:
                continue
            self._grouped[name] = there
            links = among(self._links[name], there)
            for endpoint in endpoints:
                me = endpoint.member
                me.neighbours = tuple(links[me.index])
                me.senders = tuple(k for k in there if me.index in links[k])
            endpoints[0].exchange.regrouped()

    def balance(self, copy: int) -> None:
        for endpoints in self.endpoints.values():
            total = Ledger()
            for endpoint in endpoints:
                total.add(endpoint.member.ledger)
            missing = total.sent - total.came - total.lost
            ledger = endpoints[copy].member.ledger
            ledger.lost += max(0, missing)
            ledger.sent += max(0, -missing)

    def leave(self, k: int) -> None:
        """A copy takes part no more; what it has in flight finishes."""
        for endpoint in self.of_copy(k):
            endpoint.member.present = False
            endpoint.exchange.left(endpoint.member)

    def join(self, k: int) -> None:
        """A copy takes part, with weights, buffers and optimisers of one of those that do."""
        for name, endpoints in self.endpoints.items():
            me = endpoints[k].member
            there = [e.member.index for e in endpoints if e.member.present]
            me.present = True
            if there:
                # One that it will hear of, and the same for all parts.
                near = among(self._links[name], [*there, k])[k] or there
                me.part.adopt(endpoints[near[0]].member.part)
            endpoints[k].exchange.joined(me)

    def put(self, letter: Letter) -> bool:
        """A letter has arrived; False: its receiver is absent, and it is lost."""
        return self.endpoints[letter.part][letter.receiver].put(letter)

    def release(self) -> bool:
        found = False
        for endpoints in self.endpoints.values():
            here = [e.member for e in endpoints if e.member.here]
            found |= endpoints[0].exchange.finish(here)
        return found

    def in_common(self) -> Sequence[Tensor]:
        for row, endpoints in zip(self._versions, self.endpoints.values(), strict=True):
            row.copy_(torch.tensor([e.member.part.version for e in endpoints]))
        return [self._versions]

    def live_on(
        self,
        worker: int,
        workers: int,
        *,
        in_common: bool,
        lock: Callable[[int], AbstractLock] | None = None,
    ) -> None:
        boards = self._versions.numpy()
        for board, endpoints in zip(boards, self.endpoints.values(), strict=True):
            exchange = endpoints[0].exchange
            exchange.lock = NothingInCommon(type(exchange).__name__)
            for endpoint in endpoints:
                endpoint.member.board = board if in_common else None
                endpoint.member.began = endpoint.member.part.version

    def live_apart(self, apart: bool) -> None:
        for endpoint in self.all_endpoints():
            endpoint.member.apart = apart

    def hold(self, parts: Collection[str]) -> None:
        for endpoint in self.all_endpoints():
            endpoint.member.here = endpoint.member.part.name in parts

    def resting(self) -> Any:
        return [
            [name, e.member.index, dict(e.member.numbers), e.exchange.resting(e.member)]
            for name, endpoints in self.endpoints.items()
            for e in endpoints
            if e.member.here
        ]

    def heard(self, told: Sequence[Any]) -> None:
        for name, index, numbers, more in itertools.chain.from_iterable(told):
            endpoint = self.endpoints[name][index]
            if not endpoint.member.here:
                endpoint.member.numbers = numbers
                endpoint.exchange.heard(endpoint.member, more)

    def give_back(self, *, abandoned: bool) -> Iterator[tuple[dict[str, Tensor], Any]]:
        for endpoint in self.all_endpoints():
            me = endpoint.member
            if not me.here:
                continue
            if abandoned:
                me.forget_mail()
            tensors, entries = members_to_tensors([endpoint])
            ledger = asdict(me.ledger)
            ledger["staleness"] = list(me.ledger.staleness.items())
            yield (
                tensors,
                {"part": me.name, "copy": me.index, "ledger": ledger, **entries[me.part.name]},
            )

    def take_back(self, tensors: Mapping[str, Tensor], document: Any) -> None:
        me = self.endpoints[document["part"]][document["copy"]].member
        ledger = document["ledger"]
        me.ledger = Ledger(**ledger | {"staleness": dict(ledger["staleness"])})
        me.rounds, me.numbers = document["rounds"], document["numbers"]
        me.tensors = {
            key: [tensors[f"{me.part.name}/exchange/{key}/{i}"].clone() for i in range(n)]
            for key, n in document["tensors"].items()
        }

    def going_together(self) -> Collection[int]:
        if not any(e.exchange.in_rounds for e in self.all_endpoints()):
            return ()
        return [k for k, present in enumerate(self.present()) if present]

    def settle(self) -> list[StepTaken]:
        """Deliver what the steps of a flush have sent, until nothing is left; outside of time."""
        steps: list[StepTaken] = []
        moved = True
        while moved:
            moved = False
            for endpoint in self.all_endpoints():
                for letter in endpoint.take_letters():
                    moved = True
                    self.put(letter)
            for endpoint in self.all_endpoints():
                if endpoint.member.mail:
                    moved = True
                    endpoint.receive()
                steps += endpoint.take_steps()
            moved = moved or self.release()
        return steps

    def check_settled(self) -> None:
        for name, endpoints in self.endpoints.items():
            total = Ledger()
            for endpoint in endpoints:
                ledger = endpoint.member.ledger
                total.add(ledger)
                if ledger.came != ledger.applied + ledger.dropped or endpoint.member.outbox:
                    raise LeakError(
                        f"copy {endpoint.member.index} of part '{name}' got {ledger.came} letters, "
                        f"applied {ledger.applied} and dropped {ledger.dropped}; "
                        f"{len(endpoint.member.outbox)} were never sent on"
                    )
            if total.sent != total.came + total.lost:
                raise LeakError(
                    f"copies of part '{name}' sent {total.sent} letters; {total.came} came and "
                    f"{total.lost} were lost"
                )

    @property
    def consensus(self) -> AbstractSharingState:
        return self._consensus

    @torch.no_grad()
    def agree(self, best: int | None = None) -> None:
        """Write the consensus into the user's modules.

        Args:
            best: The copy that stands for all; None: the exchange's own consensus, or the mean.
        """
        for name, endpoints in self.endpoints.items():
            members = [e.member for e in endpoints]
            there = [m for m in members if m.present] or members
            base = self._base[name]
            if best is not None:
                there = [members[best]]
            weights = None if best is not None else endpoints[0].exchange.consensus(there)
            base.overwrite(mean_weights(there) if weights is None else weights)
            base.version = max(m.part.version for m in there)
            average_buffers([m.part for m in there], base)

    def candidates(self) -> Sequence[int]:
        if self.setting.consensus != "best":
            return ()
        return [k for k, present in enumerate(self.present()) if present]

    @torch.no_grad()
    def restart(self) -> None:
        """All copies go on from the user's modules, with new optimisers."""
        for name, endpoints in self.endpoints.items():
            base = self._base[name]
            for endpoint in endpoints:
                part = endpoint.member.part
                part.module.load_state_dict(copied(base.module.state_dict()))
                part.overwrite([p.detach() for p in base.parameters])
                part.stepping.forget()
            endpoints[0].exchange.restarted([e.member for e in endpoints])

    def epoch_begins(self) -> None:
        self.positions[:] = [0] * self.copies

    def epoch_ended(self, epoch: int) -> None:
        every = self.setting.restart_every
        if every is not None and epoch % every == 0:
            self.restart()

    def abandon(self) -> None:
        """Forget what is in flight; letters that were under way count as lost by the first copy."""
        for base in self._base.values():
            base.abandon()
        for endpoints in self.endpoints.values():
            total = Ledger()
            for endpoint in endpoints:
                endpoint.member.part.abandon()
                endpoint.member.forget_mail()
                total.add(endpoint.member.ledger)
            endpoints[0].member.ledger.lost += total.sent - total.came - total.lost
            endpoints[0].exchange.abandoned([e.member for e in endpoints])

    def distance(self) -> float:
        """Root mean square distance of the copies from their mean, all parts together."""
        return distance_from_mean(
            [e.member for e in endpoints if e.member.present]
            for endpoints in self.endpoints.values()
        )

    def totals(self) -> Totals:
        """Of each copy, all parts together, since the beginning."""
        ledgers, rounds = [], []
        for k in range(self.copies):
            ledger = Ledger()
            for endpoint in self.of_copy(k):
                ledger.add(endpoint.member.ledger)
            ledgers.append(ledger)
            rounds.append(max((e.member.rounds for e in self.of_copy(k)), default=0))
        return Totals(
            tuple(ledgers),
            tuple(rounds),
            tuple(self.trained),
            tuple(self.present()),
            self.exchange_name,
            self.distance(),
        )

    @property
    def exchange_name(self) -> str:
        """The class of the exchange."""
        return type(self.setting.made_exchange()).__name__

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What exchanges keep, and where each copy stands in its shard; not the parts."""
        tensors, entries = members_to_tensors(self.all_endpoints())
        return tensors, {
            "copies": self.copies,
            "exchange": self.exchange_name,
            "positions": list(self.positions),
            "trained": list(self.trained),
            "members": entries,
        }

    def check(self, tensors: Mapping[str, Tensor], document: Any) -> Kept:
        entry = read(ReplicasEntry, document, "replicas")
        was, now = (entry.copies, entry.exchange), (self.copies, self.exchange_name)
        if was != now:
            raise ValueError(
                f"it has {was[0]} copies with exchange {was[1]}, the session {now[0]} with "
                f"{now[1]}; use the same, or weights_only=True"
            )
        for known in (entry.members, entry.parts):
            if known.keys() != self.parts.keys():
                raise ValueError(
                    f"it has {sorted(known)[:8]}, the session {sorted(self.parts)[:8]}"
                )
        for many in (entry.positions, entry.trained):
            if len(many) != self.copies:
                raise ValueError(f"it has {len(many)} counts for {self.copies} copies")
        for endpoints in self.endpoints.values():
            check_members(endpoints, entry.members, tensors)
        numbers = {
            e.member.part.name: n for k, n in enumerate(entry.trained) for e in self.of_copy(k)
        }
        return Kept(numbers, entry.parts, lambda: self._copied(tensors, entry))

    def _copied(self, tensors: Mapping[str, Tensor], entry: ReplicasEntry) -> Callable[[], None]:
        """Copy what ``check`` let pass; to be called to put it back."""
        found = [
            (endpoints, kept_of(endpoints, entry.members, tensors))
            for endpoints in self.endpoints.values()
        ]

        def put() -> None:
            for endpoints, kept in found:
                put_members(endpoints, kept)
                endpoints[0].exchange.loaded([e.member for e in endpoints])
            self.positions, self.trained = list(entry.positions), list(entry.trained)

        return put

"""Where a copy of a part, its exchange and its worker meet.

part ── stepping, stepped ─► Endpoint ─► exchange ─► letters ─► other workers
worker ── receive, take ───►     │  Communicator: those of one worker
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from geartrain.errors import GeartrainError, WorkerError
from geartrain.parts.ownership import Gradients, Ownership
from geartrain.parts.trained import StepTaken
from geartrain.sharing.arrivals import require_like
from geartrain.sharing.communicator import AbstractCommunicator, Taken
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.letters import SHARE, Letter
from geartrain.sharing.member import Member


@final
class Endpoint(Ownership):
    """Of one copy of a part; the part tells it of its steps."""

    def __init__(self, exchange: AbstractExchange, member: Member) -> None:
        self.exchange, self.member = exchange, member
        self._fresh = False  # has stepped while rows are in flight: no better time will come
        self.keeps, self.counts = frozenset(member.tensors), frozenset(member.numbers)
        member.part.ownership = self

    def stepping(self, gradients: Gradients) -> Gradients | None:
        self.member.rounds += 1
        self.member.ledger.rounds += 1
        self._fresh = not self.member.part.at_rest
        if not self.member.present:  # what was in flight when it left: steps of its own
            return gradients
        return self.exchange.stepping(self.member, gradients)

    def stepped(self, gradients: Gradients) -> None:
        if self.member.present:
            self.exchange.stepped(self.member, gradients)
        self.member.show_version()

    @property
    def waiting(self) -> bool:
        """Whether the copy may not compute with this part now."""
        return self.member.present and self.exchange.waiting(self.member)

    @property
    def ready(self) -> bool:
        """Whether letters wait that may be taken now."""
        me = self.member
        return bool(me.mail) and (me.part.at_rest or self._fresh or self.waiting)

    def put(self, letter: Letter) -> bool:
        """A letter has arrived; False: its receiver is absent, and it is lost."""
        member = self.member
        if member.present:
            member.put(letter)
            return True
        if letter.collective:
            member.count_collective(letter)
        member.peers[letter.sender].ledger.lost += letter.count
        return False

    def receive(self) -> list[Letter]:
        """Take the letters that wait; returns them."""
        self._fresh = False
        letters = self.member.take()
        self.exchange.received(self.member, letters)
        self.member.show_version()
        return letters

    def take_letters(self) -> list[Letter]:
        letters, self.member.outbox = self.member.outbox, []
        return letters

    def take_steps(self) -> list[StepTaken]:
        steps, self.member.steps = self.member.steps, []
        return steps


@final
class Communicator(AbstractCommunicator):
    """Of the copies that live on one worker.

    Args:
        endpoints: By name of the copy of a part.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = endpoints
        self._of = {(e.member.name, e.member.index): e for e in endpoints.values()}
        self._mail: dict[Endpoint, None] = {}

    @property
    def ready(self) -> bool:
        return self._next() is not None

    def waits(self, part: str | None) -> bool:
        return part is not None and part in self._endpoints and self._endpoints[part].waiting

    def receive(self, letter: Letter) -> None:
        endpoint = self._of[letter.part, letter.receiver]
        require_like(letter, endpoint.member.parameters)
        if letter.kind == SHARE:
            endpoint.exchange.contributed(letter)
        elif endpoint.put(letter):
            self._mail[endpoint] = None

    def take(self) -> Taken | None:
        endpoint = self._next() if self._mail else None
        if endpoint is None:
            return None
        name = endpoint.member.part.name
        try:
            letters = endpoint.receive()
        except GeartrainError:
            raise
        except Exception as error:
            raise WorkerError(
                f"{type(error).__name__} in {type(endpoint.exchange).__name__} of part '{name}', "
                f"as it received letters: {error}"
            ) from error
        del self._mail[endpoint]
        return Taken(name, letters)

    def take_letters(self, part: str | None = None) -> list[Letter]:
        return [x for endpoint in self._some(part) for x in endpoint.take_letters()]

    def take_steps(self, part: str | None = None) -> list[StepTaken]:
        return [x for endpoint in self._some(part) for x in endpoint.take_steps()]

    def _some(self, part: str | None) -> Sequence[Endpoint]:
        return [*self._endpoints.values()] if part is None else [self._endpoints[part]]

    def _next(self) -> Endpoint | None:
        return next((endpoint for endpoint in self._mail if endpoint.ready), None)

"""Copies whose letters are delivered by hand: in lock-step, or in an order drawn from a seed."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.sharing.endpoint import Endpoint
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.letters import Letter
from geartrain.sharing.member import Member
from geartrain.sharing.neighbours import Neighbours
from geartrain.sharing.replicas import Replicas

SIZE = 3
SGD = partial(torch.optim.SGD, lr=0.1)


class Copies:
    """Copies of one part with the weight vector ``x``, and the links between them.

    Args:
        exchange: Theirs.
        n: How many.
        topology: As for ``Neighbours``.
        equal: Whether all begin with equal weights.
        optimizer: Of each.
    """

    def __init__(
        self,
        exchange: AbstractExchange,
        n: int = 4,
        topology: Any = "ring",
        *,
        equal: bool = False,
        optimizer: Callable[..., Any] = SGD,
    ) -> None:
        def begin(module: nn.Module, k: int) -> None:
            torch.manual_seed(0 if equal else k)
            with torch.no_grad():
                module.weight.copy_(torch.randn(1, SIZE))

        part = PartState(
            "p",
            nn.Linear(SIZE, 1, bias=False).double(),
            Rules(optimizer=optimizer, update_every=1, average="none"),
        )
        setting = Neighbours(copies=n, topology=topology, exchange=exchange, start=begin)
        self.replicas = Replicas({"p": part}, setting)
        self.endpoints: Sequence[Endpoint] = self.replicas.endpoints["p"]
        self.members: Sequence[Member] = [e.member for e in self.endpoints]
        self.exchange = self.endpoints[0].exchange
        self.links: dict[tuple[int, int], deque[Letter]] = {}

    @property
    def x(self) -> Tensor:
        """The weights, (n, SIZE)."""
        return torch.stack([m.weights()[0].clone().flatten() for m in self.members])

    def step(self, k: int, gradient: Tensor) -> None:
        """An own gradient of copy k."""
        part = self.members[k].part
        (weight,) = part.parameters
        part.gradient.add(weight, gradient.clone().view_as(weight))
        part.answered(1, 1)
        part.step(0)
        self._post(k)

    def deliver(self, link: tuple[int, int]) -> None:
        """The next letter of a link comes and is taken."""
        letter = self.links[link].popleft()
        if not self.links[link]:
            del self.links[link]
        if self.replicas.put(letter):
            self.endpoints[letter.receiver].receive()
            self._post(letter.receiver)

    def deliver_all(self) -> None:
        """Until none is under way."""
        while self.links:
            self.deliver(min(self.links))

    def settle(self) -> None:
        """The agreed end of a segment; every letter must be accounted for."""
        self.deliver_all()
        while self.replicas.release():
            for k in range(len(self.members)):
                self._post(k)
            self.deliver_all()
        assert not any(e.waiting for e in self.endpoints)
        self.replicas.check_settled()

    def rounds(self, gradients: Tensor) -> None:
        """Lock-step: each copy one gradient a round, (rounds, n, SIZE), then all letters."""
        for row in gradients:
            for k, gradient in enumerate(row):
                self.step(k, gradient)
            self.deliver_all()

    def shuffle(
        self, seed: int, moves: int, gradient: Callable[[int], Tensor], after: Any = None
    ) -> Tensor:
        """Steps and deliveries in random order; the sum of the gradients that were given."""
        draw, total = random.Random(seed), torch.zeros(SIZE, dtype=torch.float64)
        for _ in range(moves):
            free = [k for k, e in enumerate(self.endpoints) if not e.waiting and e.member.present]
            links = sorted(self.links)
            chosen = draw.choice([*free, *links])
            if isinstance(chosen, tuple):
                self.deliver(chosen)
            else:
                given = gradient(chosen)
                total += given
                self.step(chosen, given)
            if after is not None:
                after()
        return total

    def clocked(
        self,
        seconds: float,
        gradient: Callable[[int], Tensor],
        speeds: Sequence[float] | None = None,
        latency: float = 0.0,
        after: Any = None,
    ) -> int:
        """On a clock: copy k takes 1 / speed seconds for an own gradient, a letter ``latency``.

        Letters that come during a firing are taken behind it, but after the next has begun if they
        come at the very moment: as in the simulator.

        Returns:
            Own gradients of all copies.
        """
        speeds = speeds or [1.0] * len(self.endpoints)
        heap: list[tuple[float, int, int, Letter | None]] = []
        busy, made, moves = [False] * len(self.endpoints), 0, 0

        def at(time: float, k: int, letter: Letter | None = None) -> None:
            nonlocal moves
            moves += 1
            heapq.heappush(heap, (time, moves, k, letter))

        def turn(k: int) -> None:
            if busy[k]:
                return
            if self.members[k].mail:
                self.endpoints[k].receive()
                send(k)
            if not self.endpoints[k].waiting:
                busy[k] = True
                at(now + 1 / speeds[k], k)

        def send(k: int) -> None:
            self._post(k)
            for link in self.links.values():
                for letter in link:
                    at(now + latency, letter.receiver, letter)
            self.links.clear()

        now = 0.0
        for k in range(len(self.endpoints)):
            turn(k)
        while heap and heap[0][0] <= seconds:
            now, _, k, letter = heapq.heappop(heap)
            if letter is None:
                busy[k], made = False, made + 1
                self.step(k, gradient(k))
                send(k)
            else:
                assert self.replicas.put(letter)
            turn(k)
            if after is not None:
                after()
        for _, _, k, letter in sorted(heap):
            if letter is not None:
                self.links.setdefault((letter.sender, k), deque()).append(letter)
        for endpoint in self.endpoints:
            if endpoint.member.mail:
                endpoint.receive()
                self._post(endpoint.member.index)
        return made

    def leave(self, k: int) -> None:
        """A copy takes part no more."""
        self.replicas.leave(k)
        for other in range(len(self.endpoints)):
            self._post(other)

    def _post(self, k: int) -> None:
        for letter in self.endpoints[k].take_letters():
            self.links.setdefault((letter.sender, letter.receiver), deque()).append(letter)
        self.endpoints[k].take_steps()


@pytest.fixture(scope="session")
def copies() -> type[Copies]:
    """Makes copies whose letters are delivered by hand."""
    return Copies


@pytest.fixture
def noise() -> Callable[[int], Tensor]:
    """A fresh random gradient at each call."""
    generator = torch.Generator().manual_seed(1)
    return lambda _: torch.randn(SIZE, dtype=torch.float64, generator=generator)


@pytest.fixture
def still() -> Callable[[int], Tensor]:
    """A gradient of zeros."""
    return lambda _: torch.zeros(SIZE, dtype=torch.float64)

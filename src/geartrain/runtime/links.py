"""Imagined links between workers: when what is sent arrives.

    apart      each pair of workers has a link of its own; they do not disturb one another
    shared     each worker is a host with one way out and one way in, which all that it sends and
               all that is sent to it share

Either way what leaves first arrives first, and what is large is on its link for its bytes / the
bandwidth. With shared ways a batch is on both at once where nothing waits, as packets are, so alone
it takes that time once, and a latency.

    ══►  [ buffer ] ─► line ─► [ buffer ] ─►      what finds no room is dropped, and sent again

Before the way out and the way in there may be a buffer, as a router has: what is on its way to one
host finds no room there if too much of others is before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, final

from geartrain.sharing.letters import Letter, tensor_bytes


class Quality(Protocol):
    """What links are like; ``Costs`` says what each number means."""

    @property
    def latency_s(self) -> float: ...
    @property
    def bytes_per_s(self) -> float | None: ...
    @property
    def message_s(self) -> float: ...
    @property
    def shared(self) -> bool: ...
    @property
    def buffer_bytes(self) -> float | None: ...
    @property
    def again_s(self) -> float: ...
    @property
    def collective(self) -> str: ...


@final
class Links:
    """What is on the way.

    Args:
        costs: Latency, bandwidth, time of a message.
        vary: Multiplies by a factor drawn around 1.
        elsewhere: Senders and receivers that live on the host of another, such as the program that
            controls the workers; its number to that one's.
    """

    def __init__(
        self,
        costs: Quality,
        vary: Callable[[float], float],
        elsewhere: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._costs, self._vary, self._elsewhere = costs, vary, elsewhere
        self._left: dict[tuple[int, int], float] = {}  # when its last batch has left
        self._came: dict[tuple[int, int], float] = {}  # when it arrives
        self._letters: dict[tuple[int, int], float] = {}
        self._letters_came: dict[tuple[int, int], float] = {}
        self._out: dict[int, float] = {}  # when the way out of a host is free, and the way into it
        self._into: dict[int, float] = {}
        self._again: dict[int, float] = {}  # when what a host sends, or gets, again is all there
        self.carried: dict[tuple[int, int], tuple[int, int]] = {}
        """Messages and bytes by sender and receiver."""

    def batch(self, sender: int, receiver: int, nbytes: int, now: float) -> float:
        """When a batch arrives that is sent now."""
        link, costs, factor = (sender, receiver), self._costs, self._vary(1.0)
        wire = 0.0 if costs.bytes_per_s is None else factor * nbytes / costs.bytes_per_s
        latency = factor * (costs.latency_s + costs.message_s)
        a, b = (self._elsewhere.get(k, k) for k in link)
        if a == b:
            arrives = now + factor * costs.message_s
        elif costs.shared:
            arrives = self._shared(a, b, wire, latency, now)
        else:
            self._left[link] = left = max(now, self._left.get(link, 0.0)) + wire
            arrives = left + latency
        self._came[link] = arrives = max(arrives, self._came.get(link, 0.0))
        if a != b:
            self.carry(link, nbytes)
        return arrives

    def letter(self, sender: int, receiver: int, letter: Letter, now: float) -> float:
        """When a letter is there: those of a link leave one after the other."""
        costs, round_ring = self._costs, self._goes_round(letter)
        if sender == receiver and not round_ring:
            return now
        link = (receiver, receiver) if round_ring else (sender, receiver)
        wire = 0.0
        if costs.bytes_per_s is not None:
            wire = self._vary(self.nbytes(letter) / costs.bytes_per_s)
        hops = letter.hops if round_ring else 1
        latency = self._vary(hops * (costs.latency_s + costs.message_s))
        if costs.shared and not round_ring:
            arrives = self._shared(sender, receiver, wire, latency, now)
        else:
            left = max(now, self._letters.get(link, 0.0)) + wire
            self._letters[link] = left
            arrives = left + latency
        # Jitter overtakes nobody.
        self._letters_came[link] = arrives = max(arrives, self._letters_came.get(link, 0.0))
        return arrives

    def nbytes(self, letter: Letter) -> int:
        """Of a letter, on its link."""
        if letter.collective and not self._goes_round(letter):
            return tensor_bytes(letter.tensors)
        return letter.nbytes

    def _goes_round(self, letter: Letter) -> bool:
        """Whether it is the result of what goes round a ring of all copies."""
        return letter.collective and self._costs.collective == "ring"

    def _shared(self, sender: int, receiver: int, wire: float, latency: float, now: float) -> float:
        """By the one way out of a host and the one way into another."""
        costs = self._costs
        room = math.inf  # of a buffer, in seconds of the line
        if costs.buffer_bytes is not None and costs.bytes_per_s is not None:
            room = costs.buffer_bytes / costs.bytes_per_s
        begins = max(now, self._out.get(sender, 0.0))
        dropped = min(wire, max(0.0, begins - now - room))
        self._out[sender] = left = begins + wire - dropped
        comes = left + latency
        into = max(comes, self._into.get(receiver, 0.0) + wire - dropped)
        late = min(wire - dropped, max(0.0, into - comes - room))
        self._into[receiver] = into - late
        if not (dropped or late):
            return into
        # Then all of it is there when what is sent again is; that waits for its like alone.
        link = sender if dropped else receiver
        again = max(comes + costs.again_s, self._again.get(link, 0.0))
        self._again[link] = again = again + dropped + late
        return again

    def carry(self, link: tuple[int, int], nbytes: int) -> None:
        """Count what went by a link."""
        if self._costs.bytes_per_s is None and not self._costs.latency_s:  # one memory for all
            return
        messages, before = self.carried.get(link, (0, 0))
        self.carried[link] = messages + 1, before + nbytes

"""What a user writes who wants copies of a whole model that talk while they train.

``Neighbours`` ── make ──► ``Replicas``, which are what runs (``replicas.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, Literal, TypeAlias, final

from torch import nn

from geartrain.bounds import COPIES, MOST_COPIES, require_at_most, require_whole
from geartrain.graph.graph import Graph
from geartrain.kinds import require_kind
from geartrain.parts.part import PartState
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.exchanges.allreduce import AllReduce
from geartrain.sharing.exchanges.centre import DelayedNesterov, ElasticAverage
from geartrain.sharing.exchanges.foreign import CompensatedNeighbours, StalenessAware
from geartrain.sharing.exchanges.gossip import DecentralizedSGD, PairAverage
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.exchanges.periodic import DiLoCo, PeriodicAverage
from geartrain.sharing.exchanges.pushsum import PushSum
from geartrain.sharing.letters import Inbox
from geartrain.sharing.locks import MakeLock, NoLock
from geartrain.sharing.replicas import Replicas
from geartrain.sharing.sharing import AbstractSharing, AbstractSharingState, Shards
from geartrain.sharing.topology import topology_of

Consensus: TypeAlias = Literal["mean", "best"]

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
class Neighbours(AbstractSharing):
    """Copies of the whole model that train on their shards and exchange with their neighbours.

    Args:
        copies: How many; copy k lives on worker k mod the number of workers. With twice as many
            workers, or more, each copy is a pipeline over several: copy k has workers k · n to
            k · n + n - 1, n = workers // copies, on which its parts are placed alike (by size, or
            by ``Schedule(placement=)`` with numbers below n), and each part exchanges with the
            same part of other copies.
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
            and begins them anew when it is through; where copies wait for one another (all-reduce,
            d-psgd, average, diloco, lockstep), not before all are through. ``pull``: whoever has
            room takes the next, but of the last ones none that others will be through with sooner,
            where the data know their length. An epoch ends when as many instances as the data have
            were taken by all together.
        least: Of the copies, that train at least: while a worker is gone, as after a death, the
            others go on without its copies, linked anew; one that comes takes weights and
            optimiser of one of them. ``copies`` is the most.
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
    shards: Shards = "static"
    start: Callable[[nn.Module, int], None] | None = None
    least: int = 1

    def __post_init__(self) -> None:
        require_whole(f"Neighbours(copies={self.copies!r})", self.copies, 1)
        require_at_most(f"Neighbours(copies={self.copies})", self.copies, MOST_COPIES, COPIES)
        what = f"Neighbours(copies={self.copies}, least={self.least!r})"
        wanted = f"1 to {self.copies}, as copies is the most that train and least the fewest"
        require_whole(what, self.least, 1, wanted, most=self.copies)
        if self.consensus not in ("mean", "best"):
            raise ValueError(f"Neighbours(consensus={self.consensus!r}): give 'mean' or 'best'")
        if self.shards not in ("static", "pull"):
            raise ValueError(f"Neighbours(shards={self.shards!r}): give 'static' or 'pull'")
        if self.restart_every is not None:
            what = f"Neighbours(restart_every={self.restart_every!r})"
            require_whole(what, self.restart_every, 1, "1 or more epochs, or None")
        wanted = "a function of a copy's module and its number, or None"
        require_kind("Neighbours", Callable | None, wanted, start=self.start)
        topology_of(self.topology)
        self.made_exchange()

    def workers_at_once(self, most: int) -> int | None:
        return min(self.copies, most)

    def splits(self, workers: int) -> bool:
        return workers // self.copies > 1

    def make(
        self,
        graph: Graph,
        parts: Mapping[str, PartState],
        workers: int = 1,
        lock: MakeLock | None = NoLock,
    ) -> AbstractSharingState:
        return Replicas(parts, self, lock or NoLock)

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
        if not isinstance(self.exchange, str) or self.exchange not in EXCHANGES:
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

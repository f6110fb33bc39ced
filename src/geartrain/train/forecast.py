"""What more hosts would do, over links that one names: from the costs of a run, by a virtual clock.

    costs, links ─► Simulated(hosts) ─► one epoch of the real model ─► Forecast

``forecast`` trains any session for an epoch on imagined hosts, a worker each. ``pipeline`` does it
for a chain of equal parts that does no mathematics, only takes as long, and sends as much, as one
says: for what is not there to be run. Links are as in ``Costs``: they lose nothing but what a
buffer has no room for, if one is named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from geartrain.engine.controller import Ramp
from geartrain.engine.instrument import AbstractInstrument, EpochEnded, Worked
from geartrain.engine.mailbox import AbstractPolicy, Queue
from geartrain.engine.schedule import Schedule
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.parts.rules import Rules
from geartrain.runtime.costs import Costs
from geartrain.runtime.simulated import Simulated
from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.neighbours import Neighbours
from geartrain.train.session import Session

MakeSession = Callable[[Simulated, Sequence[AbstractInstrument]], Session]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What an epoch on imagined hosts came to.

    Args:
        hosts: How many.
        instances, seconds: Of the epoch; seconds are virtual.
        busy: Share of the time in which hosts were in firings, the mean over them.
        staleness: Updates between a gradient's weights and its step, the mean over the gradient
            rows of all parts.
        bytes: That went between hosts.
    """

    hosts: int
    instances: int
    seconds: float
    busy: float
    staleness: float
    bytes: int

    @property
    def throughput(self) -> float:
        """Instances a second."""
        return self.instances / self.seconds if self.seconds else float("inf")

    def to_json(self) -> dict[str, Any]:
        """As the command writes it."""
        return {
            "hosts": self.hosts,
            "instances_per_second": self.throughput,
            "busy": self.busy,
            "staleness": self.staleness,
            "bytes_per_instance": self.bytes / self.instances if self.instances else 0.0,
            "instances": self.instances,
            "seconds": self.seconds,
        }


@final
class _Seen(AbstractInstrument):
    """The last epoch of a fit."""

    def __init__(self) -> None:
        self.worked: Worked | None = None
        self.ended: EpochEnded | None = None

    def on_worked(self, event: Worked) -> None:
        self.worked = event

    def on_epoch_ended(self, event: EpochEnded) -> None:
        self.ended = event


def forecast(
    make: MakeSession,
    data: Sequence[Any],
    hosts: int,
    costs: Costs,
    *,
    epochs: int = 1,
    parent: int | None = None,
) -> Forecast:
    """Train on so many imagined hosts.

    Args:
        make: Called with the runtime and with instruments, makes a session that has both.
        data: The instances; of some hundreds the beginning and the end of the epoch, when hosts
            wait, weigh little.
        hosts: How many workers, each on a host of its own.
        costs: Of firings, such as ``Recorded.costs``, and of links.
        epochs: The last one counts. Take two where instances in flight ramp up in the first.
        parent: Where the program is that admits instances, as in ``Simulated``.
    """
    seen = _Seen()
    if costs.bytes_per_s is None:  # a link all the same, whose bytes are counted
        costs = replace(costs, bytes_per_s=sys.float_info.max)
    session = make(Simulated(hosts, costs=costs, parent=parent), [seen])
    session.fit(data, epochs=epochs)
    worked, ended = seen.worked, seen.ended
    assert worked is not None and ended is not None
    histograms = [each.histogram for each in ended.staleness.values()]
    rows = sum(map(sum, histograms))
    ages = sum(age * n for histogram in histograms for age, n in enumerate(histogram))
    fired = sum(node.seconds for node in worked.nodes)
    return Forecast(
        hosts=hosts,
        instances=ended.instances,
        seconds=worked.seconds,
        busy=fired / (worked.seconds * hosts) if worked.seconds else 1.0,
        staleness=ages / rows if rows else 0.0,
        bytes=sum(link.bytes for link in worked.links if link.sender != link.receiver),
    )


@final
class _Scale(nn.Module):
    """A part of one number, for rows of any width."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@final
class _Furthest(AbstractPolicy):
    """Answers before rows, and of these what is nearest to its loss."""

    def choose(self, queues: Sequence[Queue]) -> Queue:
        return max(queues, key=lambda q: (q.port < 0, q.rank))


@final
class _Weights(nn.Module):
    """A part of so many weights, of which nothing is computed."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(count))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weights[:1]


def pipeline(
    parts: int,
    *,
    forward_s: float,
    backward_s: float,
    nbytes: int,
    links: Costs,
    in_flight: int,
    synchronous: bool = False,
    minibatches: int = 200,
) -> Forecast:
    """A chain of equal parts, each on a host of its own.

    Args:
        parts: How many.
        forward_s, backward_s: Of a part, for a minibatch (of a synchronous schedule: a microbatch).
        nbytes: Of it between two parts, each way.
        links: Latency, bandwidth, ``message_s``, ``shared``, ``collective`` and buffers; the rest
            is not looked at.
        in_flight: Minibatches at a time; of a synchronous schedule the microbatches of a step,
            after which all wait until it is through.
        synchronous: Whether they wait.
        minibatches: To go by; of 200 the beginning and the end weigh little, unless there are more
            than some ten parts.
    """
    graph = Graph()
    stream = graph.input("x")
    for k in range(parts):
        stream = stream.through(_Scale(), name=f"part{k}")
    stream.loss(lambda y: y[:, 0], name="loss")
    nodes = {"loss": (0.0, 0.0), "loss backward": (0.0, 0.0)}
    for k in range(parts):
        nodes |= {f"part{k}": (0.0, forward_s), f"part{k} backward": (0.0, backward_s)}
    costs = replace(Costs(nodes=nodes, backward=0.0), **_links(links))
    placed = {f"part{k}": k for k in range(parts)} | {"loss": parts - 1}
    row = torch.ones(1, max(1, nbytes // 4))
    data = [Instance({"x": row}) for _ in range(minibatches)]

    def make(runtime: Simulated, instruments: Sequence[AbstractInstrument]) -> Session:
        return Session(
            graph,
            rules=Rules(optimizer=_idle, update_every=in_flight if synchronous else 1),
            runtime=runtime,
            max_active=in_flight,
            schedule=Schedule(
                drain=synchronous,
                ramp=Ramp(start=1, over=0),
                policy=lambda _: _Furthest(),
                max_rows=1,
                placement=placed,
            ),
            instruments=instruments,
        )

    return forecast(make, data, parts, costs)


def copies(
    count: int,
    *,
    step_s: float,
    nbytes: int,
    links: Costs,
    exchange: str | AbstractExchange = "weights",
    topology: str = "ring",
    speeds: Sequence[float] | None = None,
    steps: int = 50,
) -> Forecast:
    """Copies of a model, each on a host of its own, that exchange after every step.

    Args:
        count: How many.
        step_s: Of a step, from minibatch to new weights, without the exchange.
        nbytes: Of the model's weights.
        links: As for ``pipeline``; of the rest ``letter_s`` and ``letter_byte_s`` are looked at.
        exchange, topology: As in ``Neighbours``.
        speeds: Of the hosts; None: all 1.
        steps: Of each copy, to go by.
    """
    graph = Graph()
    stream = graph.input("x").through(_Weights(max(1, nbytes // 4)), name="model")
    stream.loss(lambda y: y[:, 0], name="loss")
    nodes = {"loss": (0.0, 0.0), "model": (0.0, step_s), "model backward": (0.0, 0.0)}
    costs = Costs(nodes=nodes, backward=0.0, letter_s=links.letter_s)
    costs = replace(costs, letter_byte_s=links.letter_byte_s, **_links(links))
    data = [Instance({"x": torch.zeros(1, 1)}) for _ in range(count * steps)]

    def make(runtime: Simulated, instruments: Sequence[AbstractInstrument]) -> Session:
        return Session(
            graph,
            rules=Rules(optimizer=_idle, update_every=1),
            runtime=Simulated(count, costs=runtime.costs, speeds=speeds),
            max_active=1,
            sharing=Neighbours(copies=count, exchange=exchange, topology=topology, shards="pull"),
            instruments=instruments,
        )

    return forecast(make, data, count, costs)


def _idle(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def _links(links: Costs) -> dict[str, Any]:
    times = ("latency_s", "bytes_per_s", "message_s", "again_s")
    names = (*times, "shared", "buffer_bytes", "collective")
    return {name: getattr(links, name) for name in names}

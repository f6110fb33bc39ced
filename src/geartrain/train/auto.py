"""``runtime="auto"``: one worker trains the first instances, and what they cost decides.

    warm-up ─► one kernel thread ─► one for each core ─► one again ─► Advice ─► runtime and sharing

What is measured is training: nothing is lost by it. How it is decided stands in ``engine.advice``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from torch import nn

from geartrain.bounds import MOST_WORKERS, WORKERS, require_at_most, require_number, require_whole
from geartrain.device import cores
from geartrain.engine.advice import MAX_STALENESS, Advice, Machine, Sampled, Ways, advise
from geartrain.engine.costs import NOTHING, NodeCost
from geartrain.engine.engine import Engine
from geartrain.engine.placement import fed_s, loads, shares
from geartrain.graph.graph import Graph
from geartrain.parts.part import PartState
from geartrain.parts.trained import AbstractPart
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.processes.memory import why_not_carried
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.threads import Threads
from geartrain.sharing.locks import MakeLock
from geartrain.sharing.mixer import Average
from geartrain.sharing.part_copies import PartCopies
from geartrain.sharing.shared_weights import SharedWeights
from geartrain.sharing.sharing import AbstractSharing, AbstractSharingState
from geartrain.train.work import PassWork

log = logging.getLogger("geartrain.train")

MOST_MEASURED: Final = 256
LEAST_MEASURED: Final = 16
_TURNS: Final = 4  # times that as many as may be in flight are measured
_MOST_SEEN: Final = 512  # instances by one runtime
_MEET: Final = 100  # instances between meetings of copies, which drain the graph, or so many halves
_WARM: Final = 4  # one in so many is to get warm


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Choose the runtime by what the first instances cost: ``runtime="auto"``.

    Between one worker, worker processes and threads; with parts spread over them, all weights
    shared, or copies of a bottleneck. What is given by hand stays: a ``sharing`` or a ``placement``
    of the session. It is decided after at most 1,664 instances, which are training like any others,
    is said in one line, and goes into checkpoints.

    Args:
        workers: At most so many; None: as many as there are cores.
        max_staleness: Updates that may pass, on the mean, while a row is on its way, where workers
            share the weights, and half as many where each has ``max_active`` instances; a
            ``sharing`` by hand is not asked.
        cores: That may be used; None: those this program may run on.

    Raises:
        ValueError: A number is out of range.
    """

    workers: int | None = None
    max_staleness: float = MAX_STALENESS
    cores: int | None = None

    def __post_init__(self) -> None:
        what = f"Auto(max_staleness={self.max_staleness!r})"
        require_number(what, self.max_staleness, "0 or more", least=0)
        for name, value in (("workers", self.workers), ("cores", self.cores)):
            if value is not None:
                require_whole(f"Auto({name}={value!r})", value, 1, "1 or more, or None")
                require_at_most(f"Auto({name}={value})", value, MOST_WORKERS, WORKERS)


def measured_instances(max_active: int) -> int:
    """How many instances tell what nodes cost, where so many are in flight."""
    return min(MOST_MEASURED, max(LEAST_MEASURED, _TURNS * max_active))


def meet_every(max_active: int) -> int:
    """Instances between meetings of a bottleneck's copies, where so many are in flight."""
    return max(_MEET, _MEET * max_active // 2)


@final
class RuntimeChoice:
    """What a session measures before it chooses.

    Args:
        auto: What may be chosen.
        way: How weights are shared, as it was given; None: it was not.
        placement: By hand; it names as many workers as there are to be at least.
        refused: Why there can be no worker processes whatever the graph; None: there can.
        alone: Why there can be one worker only; None: there can be more.

    Attributes:
        plan: What was chosen; None: it has not been.
        most: Workers, at most.
    """

    def __init__(
        self,
        auto: Auto,
        way: AbstractSharing | None,
        placement: Mapping[str, int],
        refused: str | None = None,
        alone: str | None = None,
    ) -> None:
        self._placement = placement
        self.plan: Advice | None = None
        self._stale = math.inf if isinstance(way, SharedWeights) else auto.max_staleness
        self._way, self._refused, self._alone = way, refused, alone
        self._cores = auto.cores or cores()
        self.most = min(self._cores, auto.workers or self._cores)
        # Kernel threads, and whether it counts.
        # What is in flight grows meanwhile, so those in the middle are compared with both others.
        self._probes = [(1, False), (1, True), (self._cores, True), (1, True)]
        self._seen: list[_Probe] = []
        self._now = _Probe()
        if alone is not None or (self.most < 2 and not any(placement.values())):
            self._probes = []

    @property
    def measures(self) -> bool:
        """Whether it wants to see more instances."""
        return self.plan is None and bool(self._probes)

    @property
    def runtime(self) -> AbstractRuntime:
        """To train those with."""
        kernel_threads = self._probes[0][0] if self._probes else self._cores
        return Threads(1, kernel_threads=kernel_threads)

    def wanted(self, max_active: int) -> int:
        """How many more it wants to see by the runtime of now."""
        return max(1, self._enough(max_active) - self._now.instances)

    def _enough(self, max_active: int) -> int:
        n = min(_MOST_SEEN, max(LEAST_MEASURED, 2 * max_active))
        return n if self._probes[0][1] else n // _WARM

    def saw(
        self, work: PassWork, seconds: float, instances: int, updates: Mapping[str, int]
    ) -> None:
        """So many instances have been trained by the runtime of now."""
        self._now.add(work, seconds, instances, updates)

    def go_on(self, max_active: int) -> None:
        """To the next runtime, when enough has been seen."""
        counts = self._probes[0][1]
        if self._now.instances >= self._enough(max_active):
            del self._probes[0]
            self._seen += [self._now] * counts
            self._now = _Probe()

    def costs(self) -> dict[str, NodeCost]:
        """Of nodes, by what one worker with one kernel thread has done."""
        return self._seen[-1].work.costs() if self._seen else {}

    def decide(self, engine: Engine, left: int | None) -> Advice:
        """Choose.

        Args:
            engine: Of the last pass.
            left: Instances that are still to be trained; None: nobody knows.
        """
        if not self._seen:
            machine = Machine(cores=1 if self._alone else self._cores)
            nothing = _Probe().measured(engine, 1.0, left)
            plan = advise(nothing, machine, Ways(spread="", shared=None), self.most)
            if self._alone:
                why = f"one worker, as {self._alone}"
                plan = Advice(runtime="threads", workers=1, kernel_threads=self._cores, why=why)
            self.plan = plan
            return plan
        first, many, last = (probe.seconds / probe.instances for probe in self._seen)
        kernels = min(self._cores, (first + last) / 2 / many)
        seen = self._seen[-1].measured(engine, kernels, left)
        refused = self._refused or why_not_carried(engine.made_of)
        machine = Machine(cores=self._cores, processes=refused)
        ways = self._ways(engine, seen, self.most, refused)
        self.plan = plan = advise(seen, machine, ways, self.most, self._stale)
        if self._placement and plan.workers <= (named := max(self._placement.values())):
            runtime: Literal["threads", "processes"] = "threads" if refused else "processes"
            why = f"{named + 1} workers, as the placement names them; else {plan.why}"
            kernel_threads = max(1, self._cores // (named + 1))
            self.plan = Advice(
                runtime=runtime, workers=named + 1, kernel_threads=kernel_threads, why=why
            )
        return self.plan

    def at_once(self, workers: int) -> AbstractRuntime:
        """A runtime for so many workers that each do as much as the others."""
        kernel_threads = max(1, self._cores // workers)
        if self._refused is None and self._alone is None and workers > 1:
            return Processes(workers, kernel_threads=kernel_threads)
        return Threads(workers, kernel_threads=kernel_threads)

    def make_runtime(self, plan: Advice) -> AbstractRuntime:
        """The runtime of a plan."""
        if plan.runtime == "processes":
            return Processes(plan.workers, kernel_threads=plan.kernel_threads)
        return Threads(plan.workers, kernel_threads=plan.kernel_threads)

    def make_sharing(
        self,
        plan: Advice,
        graph: Graph,
        parts: Mapping[str, PartState],
        lock: MakeLock | None,
        most: int,
    ) -> AbstractSharingState | None:
        """How workers share weights by a plan; None: as they do already.

        Args:
            plan: What was chosen.
            graph, parts: Of the session.
            lock: Of the plan's runtime.
            most: Instances in flight.
        """
        if plan.way in ("each", "all"):
            return SharedWeights(plan.way).make(graph, parts, plan.workers, lock)
        if plan.way == "copies":
            meeting = Average(meet_every(most))
            return PartCopies({plan.part: plan.workers}, meeting).make(graph, parts)
        return None

    def _ways(self, engine: Engine, seen: Sampled, most: int, refused: str | None) -> Ways:
        made = engine.made_of
        way, drains = self._way, made.settings.drain
        given = None if way is None else f"sharing={type(way).__name__}(...) is given"
        if drains and way is None:
            given = "with drain=True a minibatch is one update, which workers would share in parts"
        if self._placement:
            given = "a placement is given"
        shares_by_hand = isinstance(self._way, SharedWeights)
        shared = None if shares_by_hand or given is None else given
        if shared is None:
            lock = threading.Lock if refused is not None else None
            if refused is None:
                shared = _bounds(made.parts)
            try:
                SharedWeights().make(made.graph, made.parts, 2, lock)
            except ValueError as error:
                shared = f"workers cannot share weights: {error}"
        spread = given if shares_by_hand and given else self._spread(engine, most)
        copied: tuple[str, ...] | str = "no part has most of the work"
        if given is None and not isinstance(spread, str):
            copied = _bottleneck(seen, most, made.parts) or copied
        by_hand = way.in_flight if isinstance(way, SharedWeights) else None
        return Ways(
            spread=spread,
            shared=shared,
            each=by_hand in ("each", None),
            in_all=by_hand != "each",
            copied=copied,
        )

    def _spread(self, engine: Engine, most: int) -> Mapping[int, Sequence[float]] | str:
        """Number of workers to seconds of each, where parts are placed by what they cost."""
        made, costs = engine.made_of, self.costs()
        names = {node.name for node in engine.wiring.nodes.values()}
        found: dict[int, Sequence[float]] = {}
        for workers in range(
            max(1, *self._placement.values()) + 1 if self._placement else 2, most + 1
        ):
            other = Engine(
                *(made.graph, made.parts, made.settings, workers, self._placement, costs),
                sharing=made.sharing,
            )
            if {node.name for node in other.wiring.nodes.values()} != names:
                return "a loop runs whole in one worker, and would go by its steps in several"
            found[workers] = loads(other.wiring, other.homes.of_node, workers, costs)
        return found or f"the placement names more workers than {most}"


def _bounds(parts: Mapping[str, PartState]) -> str | None:
    """Rules with which processes may share weights, at a cost that no advice knows."""
    for part in parts.values():
        for name in ("max_staleness", "window"):
            if (bound := getattr(part.rules, name)) is not None:
                return f"part '{part.name}' has {name}={bound}, which workers would wait for"
    return None


@final
class _Probe:
    """What some instances have cost."""

    def __init__(self) -> None:
        self.work = PassWork()
        self.seconds, self.instances = 0.0, 0
        self._updates: dict[str, int] = {}

    def add(
        self, work: PassWork, seconds: float, instances: int, updates: Mapping[str, int]
    ) -> None:
        self.work.add(work)
        self.seconds += seconds
        self.instances += instances
        for part, n in updates.items():
            self._updates[part] = self._updates.get(part, 0) + n

    def measured(self, engine: Engine, kernels: float, left: int | None) -> Sampled:
        """All that is to be known of it."""
        costs, parts = self.work.costs(), engine.parts
        firing_s = sum(cost.seconds for cost in costs.values())
        long_s = sum(c.seconds**2 / max(1, c.forward + c.backward) for c in costs.values())
        # What is beyond the usual (a first firing, another program) is no cost of the program.
        beyond = sum(use.seconds for use in self.work.uses.values()) - firing_s
        dearest = max(costs.values(), key=lambda cost: cost.seconds, default=NOTHING)
        return Sampled(
            instances=max(1, self.instances),
            seconds=max(self.seconds - beyond, firing_s),
            firing_s=firing_s,
            long_s=long_s / firing_s if firing_s else 0.0,
            kernels=kernels,
            gathered=self.instances / max(1, dearest.forward),
            fed_s=fed_s(engine.wiring, costs),
            shares=shares(engine.wiring, engine.made_of.placement, costs),
            updates=sum(self._updates.values()),
            updates_each=max(self._updates.values(), default=0) / max(1, self.instances),
            update_bytes=sum(n * _dense_bytes(parts[name]) for name, n in self._updates.items()),
            max_active=engine.settings.max_active,
            left=left,
        )


def _dense_bytes(part: AbstractPart) -> float:
    """Bytes of the weights that a step may change all of; of tables rows change."""
    sparse = {
        id(module.weight)
        for module in part.module.modules()
        if isinstance(module, nn.Embedding) and module.sparse
    }
    some: Iterator[nn.Parameter] = (p for p in part.module.parameters() if id(p) not in sparse)
    return float(sum(p.numel() * p.element_size() for p in some))


def _bottleneck(seen: Sampled, most: int, parts: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The part that takes more than a worker's share of all, if it may have copies."""
    total = sum(seen.shares.values())
    for names, seconds in seen.shares.items():
        if len(names) == 1 and seconds > total / most and names[0] in parts:
            if not parts[names[0]].view.counts_instances:
                return names
    return None

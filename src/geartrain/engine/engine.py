"""The engine: parts, workers and controller of one graph, wired together and ready for a runtime.

             controller ── deliveries ─► worker 0 ◄─► worker 1 ...
                  ▲                          │
                  └──── answered, held ──────┘

Everything here is called by a runtime, which alone waits, times and carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch
from torch import nn

from geartrain.engine.ahead import Ahead
from geartrain.engine.controller import ControllerState
from geartrain.engine.costs import NodeCost
from geartrain.engine.firing import Finished
from geartrain.engine.homes import Homes, span_of
from geartrain.engine.order import standings
from geartrain.engine.parts import original_name, part_names, require_parts
from geartrain.engine.regions import WhatRunsTogether
from geartrain.engine.rounds import Rounds
from geartrain.engine.router import Router
from geartrain.engine.settings import Settings
from geartrain.engine.stock import AbstractStock, PartialStock, Stock
from geartrain.engine.worker import WorkerState
from geartrain.errors import LeakError
from geartrain.graph.drawing import Outline, OutlineNode, outline_edges
from geartrain.graph.ends import Losing
from geartrain.graph.graph import Graph
from geartrain.graph.looping import Looping
from geartrain.graph.operator import AbstractOperator
from geartrain.graph.owners import Owner
from geartrain.graph.through import Through
from geartrain.graph.wiring import Wiring, wire
from geartrain.nodes.kernel import modules_in
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loss import Collected, LossNode, Objective, OutputNode
from geartrain.nodes.method import in_place_of
from geartrain.nodes.node import AbstractNode, Memory
from geartrain.nodes.products import forget_copies
from geartrain.nodes.readout import ReadoutNode
from geartrain.nodes.stack import StackNode
from geartrain.nodes.sums import add_sums
from geartrain.parts.part import PartState
from geartrain.parts.trained import AbstractPart, StepTaken
from geartrain.sharing.alone import AloneState
from geartrain.sharing.assignment import Stocked
from geartrain.sharing.sharing import AbstractSharingState


@final
@dataclass(frozen=True, slots=True)
class MadeOf:
    """What an engine is made of, so that another one with the same nodes can be made elsewhere."""

    graph: Graph
    parts: Mapping[str, PartState]
    settings: Settings
    workers: int
    placement: Mapping[str, int]
    costs: Mapping[str, NodeCost]
    sharing: AbstractSharingState

    def engine(self, trained: int) -> Engine:
        """An engine of it, when so many instances have finished in training."""
        return Engine(
            self.graph,
            self.parts,
            self.settings,
            self.workers,
            self.placement,
            self.costs,
            trained,
            self.sharing,
        )


@final
@dataclass(frozen=True, slots=True)
class Passing:
    """What a pass is for: see ``Engine.begin``."""

    train: bool
    judge: bool
    collect: bool


@final
class Engine:
    """A graph at work.

    Args:
        graph: A checked graph.
        parts: From ``make_parts``: those of the graph.
        settings: Numbers and policies.
        workers: How many.
        placement: Part or node name to worker; the rest is placed by ``costs``.
        costs: By node name, measured; empty: by numbers of parameters.
        trained: Instances finished in training so far.
        sharing: Who else has the weights of the parts; None: nobody has.
    """

    def __init__(
        self,
        graph: Graph,
        parts: Mapping[str, PartState],
        settings: Settings,
        workers: int = 1,
        placement: Mapping[str, int] | None = None,
        costs: Mapping[str, NodeCost] | None = None,
        trained: int = 0,
        sharing: AbstractSharingState | None = None,
    ) -> None:
        self.settings, self.sharing = settings, sharing or AloneState(parts)
        self.made_of = MadeOf(
            graph, parts, settings, workers, placement or {}, costs or {}, self.sharing
        )
        self.passing = Passing(train=True, judge=True, collect=False)
        self.parts = self.sharing.parts
        self.began_s = 0.0
        """Seconds of training before this engine's, for what happens at a certain time."""
        names = require_parts(graph, parts)
        for part in self.parts.values():
            part.in_flight(settings.max_active)
        self._layout = graph.layout()
        self._operators = self._layout.operators
        self._let_messages_count(names)
        self._weights = _weights(graph, names, self.sharing)
        spread = _is_spread(graph, parts, settings.device)
        together = WhatRunsTogether(
            {o.id: o.name for o in self._operators},
            names,
            self.parts,
            span_of(self.sharing, workers),
            placement or {},
            reach=settings.reach,
            measured=settings.meter is not None,
        )
        self.wiring: Wiring = wire(
            graph,
            lambda through: self._owners(through, names.get(through.name), parts),
            self.sharing.copies,
            settings.precision,
            apart={original_name(n) for n in placement or ()},
            spread=spread,
            by_steps=together.why_by_steps,
            apiece=together.why_apiece,
        )
        rounds = Rounds(self.wiring, settings.max_rounds)
        for node in self.wiring.nodes.values():
            if isinstance(node, LoopNode):
                planner = node.planner
                planner.watch, planner.window = rounds.refuse, rounds.window
                planner.endless, planner.patient = rounds.refuse_all, rounds.patient
        self.router = Router(self.wiring, rounds, apart=self.sharing.copies > 1)
        self.homes = Homes(self.wiring, self.sharing, workers, names, placement or {}, costs or {})
        self.gone: set[int] = set()
        """Workers that have died in this pass, or worked with them at one copy."""
        self._standings = standings(self.wiring)
        self.workers = [self._worker(w) for w in range(workers)]
        self.controller = ControllerState(
            self.wiring,
            self.router,
            rounds,
            settings.max_active,
            settings.ramp,
            trained,
            drain=settings.drain,
            device=settings.device if spread else _HOST,
            assignment=self.sharing.assignment(),
        )
        self.ahead = Ahead(self.controller, settings, self.parts, self.sharing)

    def _owners(
        self, through: Through, part: str | None, parts: Mapping[str, PartState]
    ) -> list[Owner]:
        """What the copies of a node run with."""
        if part is None:
            return [Owner(through.function, None)] * self.sharing.copies
        module, function = parts[part].module, through.function
        weights = self._weights[part]
        return [Owner(in_place_of(function, module, w.module), w) for w in weights]

    def _let_messages_count(self, names: Mapping[str, str]) -> None:
        """Tell parts that every instance comes by in one message."""
        single = self._layout.once
        nodes: dict[str, list[str]] = {}
        for node, name in names.items():
            nodes.setdefault(name, []).append(node)
        for part in self.parts.values():
            its = nodes[original_name(part.name)]
            part.counting.once = len(its) == 1 and its[0] in single

    def tell_finished(self) -> list[tuple[int, Finished]]:
        """Whom to tell of the instances that have just finished, and what."""
        controller, many = self.controller, len(self.workers)
        trained, turns = controller.trained, controller.finished_turns
        if not self.sharing.apart:
            return [(w, Finished(turns, trained)) for w in range(many)]
        copies = controller.finished_copies
        return [
            (w, Finished(turns[copies == k], trained, k))
            for k in np.unique(copies).tolist()
            for w in self.homes.of_copy(k)
        ]

    def stock(self, worker: int, *, ahead: bool = False) -> AbstractStock | None:
        """What a worker has that is given instances ahead of time; None: it is not.

        Args:
            worker: Its number.
            ahead: Whether it is given rows of instances that live on several.
        """
        ramp, most = self.settings.ramp, self.settings.max_active
        training, arena = self.passing.train, self.wiring.arena
        trained = self.controller.trained

        def limit(finished: int) -> int:
            return ramp.limit(most, finished) if training else most

        if isinstance(self.controller.assignment, Stocked):
            return Stock(arena, worker, trained, limit, self.workers[worker].waves())
        return PartialStock(arena, trained, limit) if ahead else None

    def set_present(self, worker: int, present: bool) -> None:
        """The copies of a worker take part, or do so no more."""
        for k in self.homes.copies_on(worker):
            self.controller.assignment.open[k] = present
            self.sharing.set_present(k, present)

    def lose(self, worker: int) -> int:
        """A worker has died, and with it the copies of the graph that had anything there.

        Returns:
            How many instances were in flight there; they are to be admitted again.
        """
        unfinished = 0
        for k in self.homes.copies_on(worker):
            unfinished += self.controller.lose(k)
            self.gone |= {*self.homes.of_copy(k)}
        return unfinished

    def release(self) -> bool:
        """Nothing moves: let those that wait for letters in training go on without; if any did."""
        return self.controller.training and self.sharing.release()

    def _worker(self, w: int) -> WorkerState:
        """A worker with the nodes that live there, and of the parts those that they use."""
        used = self.homes.parts_on(w)
        parts = {
            each.name: (k, each)
            for name, weights in self._weights.items()
            for k, each in enumerate(weights)
            if (name, k) in used
        }
        return WorkerState(
            w,
            self.nodes_of(w),
            {name: part for name, (_, part) in parts.items()},
            {name: k for name, (k, _) in parts.items()},
            self.homes.of_node,
            self.router,
            self.settings.policy(w),
            self.settings.portion,
            self.settings.max_rows,
            self._standings,
            self.settings.meter,
            self.sharing.communicator(parts.keys()),
        )

    @property
    def losses(self) -> list[Objective]:
        """Of losses, and of readouts with a loss inside."""
        ends = self.ends(self.wiring.nodes.values())
        return [end for end in ends.values() if isinstance(end, Objective)]

    def ends(self, nodes: Iterable[AbstractNode]) -> dict[int, Objective | OutputNode]:
        """Where rows of these nodes are judged or collected, by number of the node."""
        found: dict[int, Objective | OutputNode] = {}
        for node in nodes:
            if isinstance(node, (LossNode, ReadoutNode)):
                found[node.id] = node.objective
            elif isinstance(node, (LoopNode, StackNode)):
                found |= {each.place.id: each for each in node.ends}
            elif isinstance(node, OutputNode):
                found[node.id] = node
        return found

    def begin(self, *, train: bool, judge: bool = True, collect: bool = False) -> None:
        """Prepare a pass: training or not, computing losses or not, collecting outputs or not."""
        self.passing = Passing(train, judge, collect)
        self.gone.clear()
        self.controller.begin(training=train)
        for part in self.parts.values():
            part.begin()
        forget_copies()  # weights may have been written to in ways that torch does not count
        ends = [*self.ends(self.wiring.nodes.values()).values()]
        outputs = [end for end in ends if isinstance(end, OutputNode)]
        for end in ends:
            end.collected = [] if collect and (not outputs or end in outputs) else None
        targets = {t for o in self.wiring.operators.values() if isinstance(o, Losing)
                   for t in (o.target, o.weight) if isinstance(t, str)}  # fmt: skip
        self.wiring.arena.optional = frozenset() if judge else frozenset(targets)
        for loss in (end for end in ends if isinstance(end, Objective)):
            loss.judge = judge
            loss.sums.forget()
        trained = self.controller.trained
        first = partial(self.controller.assignment.first_turn, trained=trained)
        for worker in self.workers:
            worker.begin(self.wiring.arena, trained, first, train=train)

    def rest(self) -> list[tuple[int, StepTaken]]:
        """Steps that fall due as nothing is in flight any more, and the workers that took them."""
        return [(w.index, step) for w in self.workers for step in w.rest()]

    def check_empty(self) -> None:
        """After a drain: nothing waits anywhere.

        Raises:
            LeakError: Rows wait in a store; names node and rows.
            ProtocolError: Answers and rows fed differ.
            NonFiniteError: A device has found a NaN in one of the last losses or gradients.
        """
        self.controller.check_empty()
        self.sharing.check_settled()
        for number, node in self.wiring.nodes.items():
            if self.homes.of_node[number] not in self.gone:
                node.check_empty()
        for part in self.parts.values():
            part.check_finite()
            if part.gradient.ahead:
                raise LeakError(f"part '{part.name}': gradients of later updates were never added")
        if self.wiring.arena.active:
            raise LeakError(f"{self.wiring.arena.active} frames are still in the arena")

    def story(self, waiting: Iterable[str] | None = None) -> str:
        """Who waits for what.

        Args:
            waiting: What ``waiting`` gave of each worker, where workers are elsewhere; None: here.
        """
        lines = [f"{self.controller.active} instances are unfinished and no node can fire:"]
        lines += [f"  {line}" for line in self.controller.unfinished()]
        if waiting is None:
            waiting = [line for w in range(len(self.workers)) for line in self.waiting(w)]
        return "\n".join([*lines, *(f"  {line}" for line in waiting)])

    def waiting(self, worker: int) -> list[str]:
        """What nodes and parts of a worker wait for, a line each."""
        lines: list[str] = []
        for node in self.nodes_of(worker):
            lines += node.story()
        for name, part in self.workers[worker].parts.items():
            if not part.open:
                lines.append(
                    f"part '{name}' has window={part.rules.window}: {part.outstanding} "
                    "messages are between their forward and their backward, so others wait; where "
                    "rows come back to a part before they are answered, as in a loop, leave window "
                    "out, or give it room for all of their turns"
                )
        return lines

    def nodes_of(self, worker: int) -> list[AbstractNode]:
        """The nodes that live on a worker."""
        return [n for i, n in self.wiring.nodes.items() if self.homes.of_node[i] == worker]

    def sums(self) -> dict[str, tuple[float, float]]:
        """Loss and metrics since the last call: name to (sum, rows), added over the losses.

        Where losses are reported and none is called ``loss``, that is all of them.
        """
        return self._added(loss.sums.take() for loss in self.losses)

    def peek_sums(self) -> dict[str, tuple[float, float]]:
        """The same, for a progress line: nothing is taken, and a firing may be half counted."""
        return self._added(loss.sums.peek() for loss in self.losses)

    def _added(
        self, found: Iterable[Mapping[str, tuple[float, float]]]
    ) -> dict[str, tuple[float, float]]:
        each = list(zip(self.losses, found, strict=True))
        named = any(loss.label == "loss" or "loss" in sums for loss, sums in each)
        total: dict[str, tuple[float, float]] = {}
        for loss, sums in each:
            total = add_sums(total, sums)
            if not named and loss.label is not None and loss.label in sums:
                total = add_sums(total, {"loss": sums[loss.label]})
        return total

    def collected(self) -> dict[str, list[Collected]]:
        """What reached the outputs (or, without outputs, the losses) in this pass."""
        found: dict[str, list[Collected]] = {}
        for end in self.ends(self.wiring.nodes.values()).values():
            if end.collected is not None:
                found.setdefault(original_name(end.name), []).extend(end.collected)
        return found

    def memories(self) -> dict[str, Memory]:
        """What nodes remember from pass to pass, by node name."""
        nodes = self.wiring.nodes.values()
        return {n.name: memory for n in nodes if (memory := n.memory()) is not None}

    def recall(self, memories: Mapping[str, Memory]) -> None:
        """Give nodes what those of the same names remembered."""
        for node in self.wiring.nodes.values():
            if node.name in memories:
                node.recall(memories[node.name])

    def take_over(self, before: Engine) -> None:
        """What loops knew of an engine that is no more."""
        if before._layout is not self._layout:
            return
        known = {n.name: n for n in before.wiring.nodes.values() if isinstance(n, LoopNode)}
        for node in self.wiring.nodes.values():
            if isinstance(node, LoopNode) and node.name in known:
                node.take_over(known[node.name])

    def nodes_by_worker(self) -> dict[str, int]:
        return {n.name: self.homes.of_node[i] for i, n in self.wiring.nodes.items()}

    def outline(self) -> Outline:
        """The graph as it is drawn: each operator with the nodes that do its work."""
        parts = part_names(self.made_of.graph)
        operators = [
            OutlineNode(o.name, o.kind, o.detail(), parts.get(o.name, ""), self._doing(o))
            for o in self._operators
        ]
        return Outline(operators, outline_edges(self._operators))

    def _doing(self, operator: AbstractOperator) -> list[str]:
        """Names of the nodes that do an operator's work; those of its loop, if that runs whole."""
        wiring = self.wiring
        numbers = wiring.copies.get(operator.id, ())
        for other in wiring.operators.values():
            if isinstance(other, Looping) and operator.id in other.region.operators:
                numbers = wiring.copies[other.id]
        for first, members in wiring.stacks.items():
            if operator in members:
                numbers = wiring.copies[first]
        if not numbers and isinstance(operator, Losing):  # it is inside of what is judged
            ((source, _),) = operator.sources[0]
            numbers = wiring.copies.get(source.id, ())
        return [wiring.nodes[number].name for number in numbers]


def _weights(
    graph: Graph, names: Mapping[str, str], sharing: AbstractSharingState
) -> dict[str, Sequence[AbstractPart]]:
    """What the copies of nodes compute with, by name of their part."""
    nodes: dict[str, list[Through]] = {}
    for through in graph.throughs():
        if through.name in names:
            nodes.setdefault(names[through.name], []).append(through)
    return {name: sharing.weights(name, its) for name, its in nodes.items()}


def _is_spread(graph: Graph, parts: Mapping[str, PartState], device: torch.device | None) -> bool:
    """Whether rows may lie elsewhere than on the host: fed there, or meeting a tensor there."""
    if device is not None and device.type != "cpu":
        return True
    criteria = [o.criterion for o in graph.operators if isinstance(o, Losing)]
    modules = [*(p.module for p in parts.values()), *graph.modules()]
    modules += [c for c in criteria if isinstance(c, nn.Module)]
    for inner in (inner for module in dict.fromkeys(modules) for inner in modules_in(module)):
        for x in (*inner._parameters.values(), *inner._buffers.values()):
            if x is not None and not x.is_cpu:
                return True
    return False


_HOST = torch.device("cpu")

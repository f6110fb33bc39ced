"""The engine: parts, workers and controller of one graph, wired together and ready for a runtime.

             controller ── deliveries ─► worker 0 ◄─► worker 1 ...
                  ▲                          │
                  └──── answered, held ──────┘

Everything here is called by a runtime, which alone waits, times and carries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import nn

from geartrain.bounds import ACTIVE, MOST_ACTIVE, MOST_ROWS, ROWS, require_at_most
from geartrain.device import require_device
from geartrain.engine.controller import AbstractRamp, ControllerState, Ramp
from geartrain.engine.instrument import AbstractMeter
from geartrain.engine.mailbox import AbstractPolicy, Sweeps
from geartrain.engine.order import ranks
from geartrain.engine.placement import place
from geartrain.engine.portion import AbstractPortion, UpdatesWorth
from geartrain.engine.rounds import Rounds
from geartrain.engine.router import Outbox, Router
from geartrain.engine.worker import Finished, WorkerState
from geartrain.errors import LeakError
from geartrain.frames.precision import Precision
from geartrain.graph.graph import Graph
from geartrain.graph.operators import Losing
from geartrain.graph.through import Through
from geartrain.graph.visits import once
from geartrain.graph.wiring import Owner, Wiring, copy_name, wire
from geartrain.nodes.loss import Collected, LossNode, Objective, OutputNode
from geartrain.nodes.method import in_place_of
from geartrain.nodes.node import Memory
from geartrain.nodes.products import forget_copies
from geartrain.nodes.readout import ReadoutNode
from geartrain.parts.norms import share_norms
from geartrain.parts.part import PartState, StepTaken
from geartrain.parts.rules import Part, Rules
from geartrain.sharing.replicas import Replicas
from geartrain.sharing.share import AbstractLock, NoLock, Share, share


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine may be told.

    Args:
        max_active: Most instances in flight.
        ramp: How training gets there.
        max_rows: Most rows in one firing.
        policy: Makes the policy of each worker, from its index.
        portion: How much one firing takes.
        drain: Admit only when nothing is in flight: synchronous minibatches.
        lanes: Every worker runs the whole graph for its own instances, all with the same weights.
        precision: Of rows and products.
        meter: Measures what nodes compute in training, or None.
        device: Where the rows of instances are fed; None: where they are, or on the host if all
            modules are there.
        max_rounds: How often rows of one instance may go round loops, as ``Rounds`` counts.
    """

    max_active: int = 64
    ramp: AbstractRamp = field(default_factory=Ramp)
    max_rows: int = 4096
    policy: Callable[[int], AbstractPolicy] = lambda worker: Sweeps()
    portion: AbstractPortion = field(default_factory=UpdatesWorth)
    drain: bool = False
    lanes: bool = False
    precision: Precision = "full"
    meter: AbstractMeter | None = None
    device: torch.device | None = None
    max_rounds: int | None = None

    def __post_init__(self) -> None:
        if self.max_active < 1 or self.max_rows < 1:
            raise ValueError(
                f"Settings(max_active={self.max_active}, max_rows={self.max_rows}): give 1 or more"
            )
        require_at_most(f"max_active={self.max_active}", self.max_active, MOST_ACTIVE, ACTIVE)
        require_at_most(f"max_rows={self.max_rows}", self.max_rows, MOST_ROWS, ROWS)
        if self.max_rounds is not None and self.max_rounds < 1:
            raise ValueError(f"max_rounds={self.max_rounds}: give 1 or more, or None")


@final
class Engine:
    """A graph at work.

    Args:
        graph: A checked graph.
        parts: From ``make_parts``; shared by all engines of a session.
        settings: Numbers and policies.
        workers: How many.
        placement: Part or node name to worker; the rest is placed by ``costs``.
        costs: Seconds by node name, measured; empty: by numbers of parameters.
        trained: Instances finished in training so far.
        lock: The runtime's, for what lanes share.
        replicas: Copies of all parts, each for its own instances; ``parts`` are then not used.
    """

    def __init__(
        self,
        graph: Graph,
        parts: Mapping[str, PartState],
        settings: Settings,
        workers: int = 1,
        placement: Mapping[str, int] | None = None,
        costs: Mapping[str, float] | None = None,
        trained: int = 0,
        lock: Callable[[], AbstractLock] = NoLock,
        replicas: Replicas | None = None,
    ) -> None:
        self.parts = parts if replicas is None else replicas.parts
        self.settings, self.replicas = settings, replicas
        self.began_s = 0.0
        """Seconds of training before this engine's, for what happens at a certain time."""
        names = part_names(graph)
        for part in self.parts.values():
            part.in_flight(settings.max_active)
        self._let_messages_count(graph, names)

        lanes = workers if settings.lanes else 1 if replicas is None else replicas.copies
        shares = (
            {n: share(p, lanes, lock, **_freedom(graph, n, names)) for n, p in parts.items()}
            if settings.lanes and lanes > 1
            else {}
        )

        def owners(through: Through) -> list[Owner]:
            name = names.get(through.name)
            if name is None:
                return [Owner(through.function, None)] * lanes
            copies: Sequence[PartState | Share]
            if shares:
                copies = shares[name]
            elif replicas is not None:
                copies = [d.member.part for d in replicas.desks[name]]
            else:
                copies = copies_of(name, parts)
            module, function = parts[name].module, through.function
            return [Owner(in_place_of(function, module, c.module), c) for c in copies]

        spread = _is_spread(graph, parts, settings.device)
        placed = {original_name(n) for n in placement or ()}
        self.wiring: Wiring = wire(
            graph, owners, lanes, settings.precision, apart=placed, spread=spread
        )
        rounds = Rounds(self.wiring, settings.max_rounds)
        self.router = Router(self.wiring, rounds, lanes=lanes > 1)
        if lanes > 1 or replicas is not None:
            self.home = {
                n: k % workers for ns in self.wiring.copies.values() for k, n in enumerate(ns)
            }
        else:
            self.home = place(self.wiring, parts, workers, placement or {}, costs or {})
        self._ranks = ranks(self.wiring)
        self.workers = [
            self._worker(w, [s[w] for s in shares.values()] or list(self.parts.values()))
            for w in range(workers)
        ]
        self.controller = ControllerState(
            self.wiring,
            self.router,
            rounds,
            settings.max_active,
            settings.ramp,
            trained,
            drain=settings.drain,
            copies=1 if replicas is None else replicas.copies,
            device=settings.device if spread else _HOST,
            lanes=lanes if settings.lanes else 1,
        )
        if replicas is not None:
            self.controller.trained_of[:] = replicas.trained

    def _let_messages_count(self, graph: Graph, names: Mapping[str, str]) -> None:
        """Tell parts that every instance comes by in one message."""
        single = once(graph.copy_with_broadcasts())
        nodes: dict[str, list[str]] = {}
        for node, name in names.items():
            nodes.setdefault(name, []).append(node)
        for part in self.parts.values():
            its = nodes[original_name(part.name)]
            part.once = len(its) == 1 and its[0] in single

    def settle(self, out: Outbox) -> int:
        """Let the controller count, and the copies what each of them has finished."""
        finished = self.controller.settle(out)
        if finished and self.replicas is not None and self.controller.training:
            for k in np.flatnonzero(self.controller.finished_of).tolist():
                self.replicas.finished(k, int(self.controller.finished_of[k]))
        return finished

    def tell_finished(self) -> list[tuple[int, Finished]]:
        """Whom to tell of the instances that have just finished, and what.

        A lane counts its own, and a worker those of the copies of the model that live there.
        """
        controller, many = self.controller, len(self.workers)
        trained, turns = controller.trained, controller.finished_turns
        if self.replicas is None and not self.settings.lanes:
            return [(w, Finished(turns, trained)) for w in range(many)]
        owners = controller.finished_owners
        copied = self.replicas is not None
        return [
            (k % many, Finished(turns[owners == k], trained, k if copied else None))
            for k in np.unique(owners).tolist()
        ]

    def home_of(self, copy: int) -> int:
        """The worker of a copy of the model."""
        return copy % len(self.workers)

    def set_present(self, worker: int, present: bool) -> None:
        """The copies of a worker take part, or do so no more."""
        if self.replicas is None:
            return
        for k in range(worker, self.replicas.copies, len(self.workers)):
            self.controller.open[k] = present
            if self.replicas.present()[k] != present:
                (self.replicas.join if present else self.replicas.leave)(k)

    def _worker(self, w: int, parts: Sequence[PartState | Share]) -> WorkerState:
        """A worker with the nodes that live there, and of the parts those that they use."""
        nodes = [n for i, n in self.wiring.nodes.items() if self.home[i] == w]
        used = {n.part_name for n in nodes}
        return WorkerState(
            w,
            nodes,
            {p.name: p for p in parts if p.name in used},
            self.home,
            self.router,
            self.settings.policy(w),
            self.settings.portion,
            self.settings.max_rows,
            self._ranks,
            self.settings.meter,
            self.replicas,
        )

    @property
    def losses(self) -> list[Objective]:
        """Of losses, and of readouts with a loss inside."""
        nodes = self.wiring.nodes.values()
        return [n.objective for n in nodes if isinstance(n, (LossNode, ReadoutNode))]

    def begin(self, *, train: bool, judge: bool = True, collect: bool = False) -> None:
        """Prepare a pass: training or not, computing losses or not, collecting outputs or not."""
        self.controller.begin(training=train)
        for part in self.parts.values():
            part.begin()
        forget_copies()  # weights may have been written to in ways that torch does not count
        outputs = [n for n in self.wiring.nodes.values() if isinstance(n, OutputNode)]
        for output in outputs:
            output.collected = [] if collect else None
        targets = {t for o in self.wiring.operators.values() if isinstance(o, Losing)
                   for t in (o.target, o.weight) if isinstance(t, str)}  # fmt: skip
        self.wiring.arena.optional = frozenset() if judge else frozenset(targets)
        for loss in self.losses:
            loss.judge = judge
            loss.collected = [] if collect and not outputs else None
            loss.sums.forget()
        for worker in self.workers:
            worker.begin(self.wiring.arena, self.controller.trained, self._first_turn, train=train)

    def rest(self) -> list[tuple[int, StepTaken]]:
        """Steps that fall due as nothing is in flight any more, and the workers that took them."""
        return [(w.index, step) for w in self.workers for step in w.rest()]

    def _first_turn(self, part: str) -> int:
        """The turn of the next instance that may come by a part."""
        if self.replicas is not None:
            copy = next(k for k, d in enumerate(self.replicas.desks[original_name(part)])
                        if d.member.part.name == part)  # fmt: skip
            return int(self.controller.trained_of[copy])
        return 0 if self.settings.lanes and len(self.workers) > 1 else self.controller.trained

    def check_empty(self) -> None:
        """After a drain: nothing waits anywhere.

        Raises:
            LeakError: Rows wait in a store; names node and rows.
            ProtocolError: Answers and rows fed differ.
            NonFiniteError: A device has found a NaN in one of the last losses or gradients.
        """
        self.controller.check_empty()
        if self.replicas is not None:
            self.replicas.check_settled()
        for node in self.wiring.nodes.values():
            node.check_empty()
        for part in self.parts.values():
            part.check_finite()
        if self.wiring.arena.active:
            raise LeakError(f"{self.wiring.arena.active} frames are still in the arena")

    def story(self) -> str:
        """Who waits for what."""
        lines = [f"{self.controller.active} instances are unfinished and no node can fire:"]
        lines += [f"  {line}" for line in self.controller.unfinished()]
        for node in self.wiring.nodes.values():
            lines += [f"  {line}" for line in node.story()]
        for part in self.parts.values():
            if not part.open:
                lines.append(
                    f"  part '{part.name}' has window={part.rules.window}: {part.outstanding} "
                    "messages are between their forward and their backward, so others wait; where "
                    "rows come back to a part before they are answered, as in a loop, leave window "
                    "out, or give it room for all of their turns"
                )
        return "\n".join(lines)

    def sums(self) -> dict[str, tuple[float, float]]:
        """Loss and metrics since the last call: name to (sum, rows), added over the losses."""
        total: dict[str, tuple[float, float]] = {}
        for loss in self.losses:
            for name, (s, n) in loss.sums.take().items():
                old = total.get(name, (0.0, 0.0))
                total[name] = (old[0] + s, old[1] + n)
        return total

    def peek_sums(self) -> dict[str, tuple[float, float]]:
        """The same, for a progress line: nothing is taken, and a firing may be half counted."""
        total: dict[str, tuple[float, float]] = {}
        for loss in self.losses:
            for name, (s, n) in loss.sums.peek().items():
                old = total.get(name, (0.0, 0.0))
                total[name] = (old[0] + s, old[1] + n)
        return total

    def collected(self) -> dict[str, list[Collected]]:
        """What reached the outputs (or, without outputs, the losses) in this pass."""
        found: dict[str, list[Collected]] = {}
        outputs = [n for n in self.wiring.nodes.values() if isinstance(n, OutputNode)]
        ends: list[Objective | OutputNode] = [*self.losses, *outputs]
        for end in ends:
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

    def nodes_by_worker(self) -> dict[str, int]:
        return {n.name: self.home[i] for i, n in self.wiring.nodes.items()}


def part_names(graph: Graph) -> dict[str, str]:
    """Node name to part name, for nodes with parameters."""
    names: dict[int, str] = {}
    found: dict[str, str] = {}
    for through in graph.throughs():
        if not through.parameters:
            continue
        owner = through.owner
        if id(owner) not in names:
            wished = through.part.name if through.part is not None else None
            names[id(owner)] = wished or through.name
        found[through.name] = names[id(owner)]
    return found


def _freedom(graph: Graph, part: str, names: Mapping[str, str]) -> dict[str, bool]:
    """What lanes may do with a part, as all its nodes allow it; see ``share``."""
    throughs = [t for t in graph.throughs() if names.get(t.name) == part]
    kernels = [t.written_kernel() for t in throughs]
    looks_up = all(k is not None and k.looks_up for k in kernels)
    return {"free": None not in kernels, "looks_up": looks_up}


def _is_spread(graph: Graph, parts: Mapping[str, PartState], device: torch.device | None) -> bool:
    """Whether rows may lie elsewhere than on the host: fed there, or meeting a tensor there."""
    criteria = [o.criterion for o in graph.operators if isinstance(o, Losing)]
    modules = [*(p.module for p in parts.values()), *graph.modules()]
    modules += [c for c in criteria if isinstance(c, nn.Module)]
    tensors = (x for m in modules for x in (*m.parameters(), *m.buffers()))
    return (device is not None and device.type != "cpu") or not all(x.is_cpu for x in tensors)


_HOST = torch.device("cpu")


def make_parts(
    graph: Graph, defaults: Rules, device: torch.device | None = None
) -> dict[str, PartState]:
    """The parts of a graph at work, by name; copies of a replicated part are ``name#1`` and so on.

    Args:
        graph: Holds the modules, which are moved to their devices.
        defaults: Of the parts' rules.
        device: Of parts that name none; None leaves them where they are.

    Raises:
        ValueError: Two parts have the same name, a device does not exist, or a part's weights lie
            on several.
    """
    names = part_names(graph)
    parts: dict[str, PartState] = {}
    owners: dict[str, int] = {}
    for through in graph.throughs():
        if through.name not in names:
            continue
        name = names[through.name]
        owner = through.owner
        if owners.setdefault(name, id(owner)) != id(owner):
            raise ValueError(
                f"two parts are called '{name}'; name one of them: Part(..., name=...)"
            )
        if name in parts:
            continue
        if not isinstance(through.part, Part):
            assert through.module is not None
            parts[name] = PartState(name, through.module, defaults, device=device)
            continue
        part, rules = through.part, through.part.rules(defaults)
        where = device
        if part.device is not None:
            where = require_device(part.device, f"part '{name}'")
        for k in range(part.replicas):
            copied = copy_name(name, k)
            module = copy.deepcopy(part.module) if k else part.module
            parts[copied] = PartState(copied, module, rules, part.mixer, where, k, part.replicas)
    share_norms(parts)
    return parts


def copies_of(name: str, parts: Mapping[str, PartState]) -> list[PartState]:
    """A part and its copies."""
    found = [parts[name]]
    while (other := parts.get(copy_name(name, len(found)))) is not None:
        found.append(other)
    return found


def original_name(name: str) -> str:
    """The part that a copy is of."""
    return name.partition("#")[0]

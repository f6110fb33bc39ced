"""What a session and a fit of it share: the graph's parts, the engine of now, and where it stands.

Session   what a user calls          ┐
Fitting   epochs of one fit          ├─► State: passes over data, checkpoints, copies that meet
loading   a checkpoint into it       ┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from geartrain.engine.advice import Advice
from geartrain.engine.costs import NodeCost
from geartrain.engine.engine import Engine
from geartrain.engine.instrument import (
    AbstractInstrument,
    Chosen,
    PartStaleness,
    Restored,
)
from geartrain.engine.parts import original_name, part_names
from geartrain.engine.placement import loads
from geartrain.engine.settings import Settings
from geartrain.errors import DataError, WorkerDiedError
from geartrain.frames.instance import Instance, require_plain
from geartrain.graph.graph import Graph
from geartrain.graph.learning import remarks
from geartrain.graph.wiring import copy_name
from geartrain.native import kind as kernels_kind
from geartrain.native import pool
from geartrain.nodes.kernel import modules_in
from geartrain.nodes.node import Memory
from geartrain.parts.part import PartState
from geartrain.parts.snapshot import parts_to_tensors
from geartrain.runtime.base import AbstractFeeder, AbstractRuntime, Feeder, OnBadInstance
from geartrain.runtime.interrupt import asks_data
from geartrain.sharing.sharing import AbstractSharingState
from geartrain.train.auto import RuntimeChoice
from geartrain.train.checkpoint import Json
from geartrain.train.copies import sharing_to_tensors
from geartrain.train.deaths import Deaths, tell_restored
from geartrain.train.experience import experience_to_json
from geartrain.train.in_flight import InFlight, Seen
from geartrain.train.memories import memories_to_tensors
from geartrain.train.observer import Observer, means_of
from geartrain.train.occupancy import Occupancy
from geartrain.train.random_state import random_state_kept, random_state_to_json
from geartrain.train.results import (
    Evaluation,
    Position,
    epoch_to_json,
    plan_to_json,
    staleness_of,
)
from geartrain.train.source import Source

log = logging.getLogger("geartrain.train")


@final
class State:
    """A graph with its parts, between and in passes over data; at rest between them.

    Args:
        graph, runtime, settings, placement, instruments: As the session has them.
        sharing: Who has copies of the parts.
        seed: Of the order of the data; written into checkpoints.
        on_bad: What is done with instances that are refused.
        in_flight: Finds ``settings.max_active``; None: it is as it is.
        choice: Finds ``runtime`` and ``sharing``; None: they are as they are.

    Attributes:
        position: Where in the training data it stands.
        engine: Of the last segment of training, or of evaluations; None: not made, or it failed.
        plain: Evaluates the consensus, where that is another model than those that are trained.
        memories: Of nodes, when the engine was last at rest.
        costs: Of nodes, measured, for placement.
        met: Instances trained at the last meeting of copies of a part.
        used: Who is at it.
        deaths: Of workers, in the call of now.
        checked: Whether the graph has been.
    """

    def __init__(
        self,
        graph: Graph,
        runtime: AbstractRuntime,
        settings: Settings,
        placement: Mapping[str, int],
        instruments: Sequence[AbstractInstrument],
        sharing: AbstractSharingState,
        seed: int,
        on_bad: OnBadInstance,
        in_flight: InFlight | None = None,
        choice: RuntimeChoice | None = None,
    ) -> None:
        self.graph, self.runtime, self.settings = graph, runtime, settings
        self.placement, self.instruments, self.sharing = placement, instruments, sharing
        self.seed, self.on_bad, self.in_flight = seed, on_bad, in_flight
        self.choice = choice
        self.position = Position()
        self.engine: Engine | None = None
        self.plain: Engine | None = None
        self.memories: dict[str, Memory] = {}
        self.costs: dict[str, NodeCost] = {}
        self.met = 0
        self.used = Occupancy()
        self.deaths = Deaths(runtime.most_deaths)
        self.checked = self._remarked = False
        self._example: Instance | None = None  # that the graph was checked with

    @property
    def trained_parts(self) -> Mapping[str, PartState]:
        """The parts that learn: those of the graph, or copies of them (``name#k``)."""
        return self.sharing.parts

    @property
    def parts(self) -> Mapping[str, PartState]:
        """The parts that evaluate, and are saved first."""
        return self.sharing.consensus.parts

    @property
    def places_by_cost(self) -> bool:
        """Whether it matters where nodes live, time can tell, and nobody has said it."""
        runtime = self.runtime
        if runtime.workers == 1 or runtime.virtual or self.sharing.apart:
            return False
        names = part_names(self.graph)
        return bool(self.trained_parts.keys() - {names.get(n, n) for n in self.placement})

    def ready(self, source: Source, *, fresh: bool = False) -> Engine:
        """The engine, made when it is first wanted; the graph is checked with a first instance.

        Training begins every segment with a fresh one: policies and stores have a past, which is
        part of the order in which sums are added, and a resumed run must find what an
        uninterrupted one does.
        """
        self.check(source)
        consensus = self.sharing.consensus
        if consensus is not self.sharing and not fresh:
            if self.plain is None:
                self.plain = Engine(
                    self.graph,
                    self.parts,
                    self.settings,
                    self.runtime.workers,
                    sharing=consensus,
                )
            return self.plain
        if self.engine is None or fresh:
            return self.ready_again()
        return self.engine

    def _made(self) -> Engine:
        measures = self.choice is not None and self.choice.plan is None
        # What each operator costs is asked for, and what several workers would have.
        settings = replace(self.settings, reach=False) if measures else self.settings
        engine = Engine(
            self.graph,
            self.parts,
            settings,
            self.runtime.workers,
            {} if measures else self.placement,  # it may name more workers than there are
            self.costs,
            self.position.trained,
            self.sharing,
        )
        engine.recall(self.memories)
        engine.began_s = self.position.train_seconds
        return engine

    def check(self, source: Source) -> None:
        """Check the graph with a first instance, when it is first used."""
        if not self.checked:
            self._example = self._first_instance(source)
            shapes = {} if self._example is None else self._shapes(self._example)
            self.graph.check(shapes, like=self._example)
            self.checked = True

    def look_for_active(self, seen: Seen) -> None:
        """Find how many instances are to be in flight from now on, and say so."""
        assert self.in_flight is not None
        number, why = self.in_flight.find(seen)
        if number != self.position.in_flight:
            said = f"max_active='auto': {number} instances in flight, for {why}"
            log.info(said, extra={"screen": True})
            self.put_active(number)

    def choose(self, left: int | None) -> Chosen:
        """Find how the work is done from now on, say so, and have it done so."""
        assert self.choice is not None
        self.costs = self.choice.costs()
        plan = self.choice.decide(self.ready_again(), left)
        self.put_plan(plan)
        return self.chosen(f"runtime='auto': {plan.why}", plan.expected)

    def put_plan(self, plan: Advice) -> Callable[[], None]:
        """Go by a plan from the next pass on; nothing is in flight.

        Returns:
            What goes back to how it was.
        """
        choice, parts = self.choice, self.parts
        assert choice is not None
        self._remember()
        before = choice.plan, self.position.plan, self.runtime, self.sharing, self.costs
        copies = {name: part.copies for name, part in parts.items()}

        def back() -> None:
            choice.plan, self.position.plan, self.runtime, self.sharing, self.costs = before
            for name, part in parts.items():
                part.copies = copies[name]
            self.engine = self.plain = None

        choice.plan = self.position.plan = plan
        runtime = self.runtime = choice.make_runtime(plan)
        self.deaths.most = runtime.most_deaths
        most = self.settings.max_active
        made = choice.make_sharing(plan, self.graph, parts, runtime.lock, most)
        self.sharing = made or self.sharing
        if plan.way == "copies" and plan.part in self.costs:
            cost = self.costs[plan.part]
            share = cost.share(plan.workers)
            names = [copy_name(plan.part, k) for k in range(plan.workers)]
            self.costs = self.costs | dict.fromkeys(names, share)
        self.engine = self.plain = None
        return back

    def chosen(self, why: str, expected: Mapping[str, float] | None = None) -> Chosen:
        """What an instrument is told of how the work is done from now on."""
        engine = self.ready_again()
        return Chosen(
            self.runtime.name,
            self.runtime.workers,
            engine.nodes_by_worker(),
            self.sharing.name,
            why,
            self.position.train_seconds,
            {} if expected is None else expected,
        )

    def why_placed(self) -> str:
        """What the workers take of the seconds that were measured, in a line."""
        engine = self.ready_again()
        busy = loads(engine.wiring, engine.homes.of_node, self.runtime.workers, self.costs)
        total = sum(busy) or 1.0
        named = [", ".join(f"'{n}'" for n in w.parts) or "no part" for w in engine.workers]
        told = [
            f"worker {w} has {names} ({100 * s / total:.0f} %)"
            for w, (names, s) in enumerate(zip(named, busy, strict=True))
        ]
        return f"placed by measured costs: {'; '.join(told)}"

    def ready_again(self) -> Engine:
        """A fresh engine of the graph that was checked; the old one is let go."""
        self._remember()
        before, self.engine = self.engine, self._made()
        if before is not None:
            self.engine.take_over(before)
        return self.engine

    def put_active(self, number: int) -> None:
        """So many instances may be in flight from the next segment on."""
        self.position.in_flight = number
        self.settings = replace(self.settings, max_active=number)

    def remark(self) -> None:
        """Say once what in the graph will never learn, and may not be meant."""
        if not self._remarked:
            for remark in remarks(self.graph, self._example):
                log.warning("%s", remark)
        self._remarked, self._example = True, None

    def run(self, engine: Engine, feeder: AbstractFeeder, watch: Observer) -> float:
        """One segment of a pass; an engine that failed in it is not used again."""
        training = engine.controller.training
        try:
            with (
                self.used.passing(),
                _mode(
                    [*self.graph.modules(), *(p.module for p in self.trained_parts.values())],
                    training,
                ),
            ):
                seconds = self.runtime.run(engine, feeder, watch)
            engine.check_empty()
            watch.progress(engine, seconds)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt) or engine.controller.active:
                self._abandon(training)
            raise
        finally:
            pool.shared.rest()
        return seconds

    def evaluate(self, source: Source, epoch: int, epochs: int, began: float) -> Evaluation:
        def watch() -> Observer:
            return Observer(
                self.instruments, "evaluate", epoch, epochs, source.length, self.parts, began
            )

        with random_state_kept():
            engine, feeder, seconds = self.look(source, watch, self.on_bad)
        source.require_whole(feeder.taken, "an evaluation")
        return Evaluation(means_of(engine.sums()), feeder.taken - feeder.skipped, seconds)

    def look(
        self,
        source: Source,
        watch: Callable[[], Observer],
        on_bad: OnBadInstance,
        *,
        collect: bool = False,
    ) -> tuple[Engine, Feeder, float]:
        """A pass without training, from its beginning again if a worker dies and that may be.

        Args:
            source: The data.
            watch: Makes an observer of the pass.
            on_bad: As for ``Feeder``.
            collect: Keep what reaches the outputs, and judge nothing.

        Returns:
            The engine that has done it, the feeder, and seconds.
        """
        while True:
            engine = self.ready(source)
            engine.begin(train=False, judge=not collect, collect=collect)
            feeder, seen = Feeder(source.epoch(0), on_bad), watch()
            try:
                return engine, feeder, self.run(engine, feeder, seen)
            except WorkerDiedError as death:
                if feeder.closed:  # somebody wants to leave
                    raise
                self.deaths.count(death)
                event = Restored(
                    "predict" if collect else "evaluate",
                    *(death.worker, death.how, len(self.deaths), self.deaths.most, 0),
                    seconds=seen.now_s,
                )
                tell_restored(self.instruments, event)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Json]]:
        tensors, parts = parts_to_tensors(self.parts)
        self._remember()
        remembered, memories = memories_to_tensors(self.memories)
        tensors.update(remembered)
        at = self.position
        document: dict[str, Any] = {
            "parts": parts,
            "memories": memories,
            "seed": self.seed,
            "precision": self.settings.precision,
            "kernels": kernels_kind(),
            "auto": experience_to_json(self.graph),
            "position": {
                "epoch": at.epoch,
                "taken": at.taken,
                "entered": at.entered,
                "trained": at.trained,
                "epoch_seconds": at.epoch_seconds,
                "train_seconds": at.train_seconds,
                "sums": {name: list(pair) for name, pair in at.sums.items()},
                "updates": at.updates,
                "history": [epoch_to_json(e) for e in at.history],
                "best": at.best,
                "best_of": at.best_of,
                "in_flight": at.in_flight,
                "plan": plan_to_json(at.plan),
            },
            "random": random_state_to_json(),
        }
        copied, replicas = sharing_to_tensors(self.sharing)
        return tensors | copied, document | replicas

    def take_staleness(self) -> dict[str, PartStaleness]:
        """Since the last entry of the history, copies of a part together."""
        histograms: dict[str, list[int]] = {}
        for name, part in self.trained_parts.items():
            counts = histograms.setdefault(original_name(name), [])
            for age, rows in enumerate(part.take_histogram()):
                counts.extend([0] * (age + 1 - len(counts)))
                counts[age] += rows
        return {name: staleness_of(counts) for name, counts in histograms.items()}

    def meet(self, *, now: bool) -> None:
        """Let the copies meet whose time has come, or all of them now; nothing is in flight."""
        self.sharing.meet(self.met, self.position.trained, now=now)
        self.met = self.position.trained

    def _remember(self) -> None:
        """Take what nodes remember from an engine at rest."""
        if self.engine is not None:
            self.memories = self.engine.memories()

    @asks_data
    def _first_instance(self, source: Source) -> Instance | None:
        """The first instance that can be made."""
        with random_state_kept():
            items = source.epoch(0)
            for _ in range(_TRIED):
                try:
                    first = next(items, None)
                except DataError:
                    if self.on_bad == "raise":
                        raise
                    continue
                if not isinstance(first, Instance):
                    return None
                require_plain(first)
                return first
        return None

    def _shapes(self, instance: Instance) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the rows that an instance brings, as they enter."""
        shapes = {}
        for name, given in instance.inputs.items():
            rows = given[0] if isinstance(given, tuple) else given
            if isinstance(rows, Tensor):
                short = self.settings.precision == "bf16" and rows.dtype is torch.bfloat16
                dtype = torch.float32 if short else rows.dtype  # modules get it widened
                shapes[name] = tuple(rows.shape[1:]), dtype
        return shapes

    def _abandon(self, training: bool) -> None:
        if not training:
            self._remember()  # an evaluation has left them as they were
        self.engine = self.plain = None
        if training:
            self.sharing.abandon()


_TRIED = 100  # items that are tried for a first instance


@contextmanager
def _mode(modules: Sequence[torch.nn.Module], train: bool) -> Iterator[None]:
    """Modules in training or evaluation mode, and afterwards as they were."""
    once = list(dict.fromkeys(modules))
    inside = [modules_in(module) for module in once]
    before = [(inner, inner.training) for several in inside for inner in several]
    for module, several in zip(once, inside, strict=True):
        if not all(_is_in_mode(inner, train) for inner in several):
            module.train(train)
    try:
        yield
    finally:
        for inner, mode in before:
            if inner.training is not mode:
                inner.training = mode


def _is_in_mode(module: torch.nn.Module, train: bool) -> bool:
    """Whether to tell it so would change nothing; who overrides ``train`` may do more."""
    return module.training is train and type(module).train is torch.nn.Module.train

"""The front door: a graph, its rules, a runtime; fit, evaluate, predict, save, load.

    rules = Rules(optimizer=partial(torch.optim.Adam, lr=1e-3))
    session = Session(graph, rules=rules, runtime=Threads(2))
    session.fit(train, epochs=3, valid=dev, until=Target("accuracy", 0.97))

The modules in the graph are the user's own: after ``fit`` they hold the trained weights, and
inference needs nothing of ours. There is one way to train: instances into the engine, until it is
empty again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from geartrain.bounds import MOST_SEED, SEED
from geartrain.engine.controller import AbstractRamp
from geartrain.engine.engine import Engine, Settings, copies_of, make_parts, original_name
from geartrain.engine.instrument import (
    AbstractInstrument,
    AbstractMeter,
    PartStaleness,
)
from geartrain.engine.mailbox import AbstractPolicy
from geartrain.errors import DataError
from geartrain.ir.graph import Graph
from geartrain.ir.instance import Instance
from geartrain.ir.learning import remarks, require_loss
from geartrain.ir.loss import Collected
from geartrain.ir.node import Memory
from geartrain.ir.operators import Losing
from geartrain.ir.precision import Precision, require_float32, require_precision
from geartrain.native import kind as kernels_kind
from geartrain.native import status as kernels_status
from geartrain.native.transfer import require_device
from geartrain.optim.part import PartState
from geartrain.optim.replicas import Neighbours, Replicas
from geartrain.optim.rules import Rules
from geartrain.runtime.base import AbstractFeeder, AbstractRuntime, Feeder, OnBadInstance
from geartrain.runtime.interrupt import asks_data
from geartrain.runtime.threads import Threads
from geartrain.train.checkpoint import Json, Retention, write_checkpoint
from geartrain.train.copies import replicas_to_tensors
from geartrain.train.fitting import Fitting, require_fit_arguments
from geartrain.train.loading import load_session
from geartrain.train.observer import Observer, means_of
from geartrain.train.occupancy import Occupancy
from geartrain.train.random_state import random_state_kept, random_state_to_json
from geartrain.train.results import (
    Evaluation,
    Fit,
    Position,
    Target,
    epoch_to_json,
    staleness_of,
)
from geartrain.train.snapshot import memories_to_tensors, parts_to_tensors
from geartrain.train.source import Convert, Data, Source

log = logging.getLogger("geartrain.train")


@final
class Session:
    """A graph that learns.

    The modules of the graph are trained in place, and come back in the mode (``training``) in which
    they came. Between calls everything is at rest: no thread is left, no row waits. It does one
    thing at a time: a call while another one runs is refused. An instrument may evaluate, predict
    and save between two passes, as in ``on_epoch_ended``.

    Args:
        graph: Checked when the first instance is seen.
        rules: Defaults of the parts.
        runtime: ``Threads(1)`` unless given.
        max_active: Most instances in flight.
        ramp: How training gets there; ``Ramp(over=0)`` starts at once, ``Synchronous(n)`` after n
            instances, one at a time.
        max_rows: Most rows in one firing.
        max_rounds: How often rows of one instance may go round loops, all of them together: a cycle
            in data would have them do so for ever. None: 100,000 times, and 1,000 more for each of
            its vertices and edges.
        policy: Makes the firing policy of a worker, from its index.
        drain: Admit only when nothing is in flight: minibatches of ``max_active``, the synchronous
            way; with ``update_every=Instances(max_active)`` and no ramp it is minibatch training.
        replicas: Copies of the whole model, each with weights, optimiser and data of its own, that
            exchange while they train; ``max_active`` and ``drain`` then apply to each by itself.
            The modules in the graph hold their consensus after every evaluation, checkpoint and
            epoch.
        lanes: Every worker runs the whole graph for its own instances, all with the same weights,
            instead of its own parts for all instances.
        precision: ``full``: rows have the dtype of the data and the modules. ``bf16``: rows, what
            is kept of them and matrix products are bfloat16; weights, optimisers, sums of gradients
            and losses float32. Modules without a kernel for it run in float32 between casts, as
            does ``Part(full_precision=True)``. What leaves the graph is float32.
        meter: Counts what training computes: ``geartrain.FlopMeter()``.
        device: Where parts live that name no device of their own, and where the rows of instances
            are fed: ``cpu``, ``cuda``, ``cuda:1``. None leaves modules where they are; rows
            are then fed where they are, or on the host if all modules are there.
        placement: Part or node name to worker; what is not named is placed automatically, after a
            short measurement where there are several workers.
        convert: Makes an ``Instance`` of an item of the data. With a parameter named ``epoch`` it
            is also told the epoch, from 1; in evaluations and predictions 0.
        shuffle: Whether lists and map-style training data are shuffled, by seed and epoch. A
            DataLoader shuffles by itself, by seed and epoch too.
        seed: Of the order of the data.
        on_bad: ``raise`` on instances that are refused, or ``skip`` and count them; also where
            ``convert`` raises ``DataError``.
        instruments: Watch. One that raises ends the run with its error.

    Raises:
        ValueError: Two parts have one name, there is no such precision, a device does not exist,
            copies cannot exchange as ``replicas`` says, a number is out of range, or ``lanes`` or
            ``replicas`` do not go together with something else that is given.
        GraphError: ``bf16``, and a module's weights are not float32.
        GraphError: From ``fit``, ``evaluate``, ``predict``: the graph cannot run.
        BusyError: From all methods that train, run, save or load: another one is running.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        rules: Rules | None = None,
        runtime: AbstractRuntime | None = None,
        max_active: int = 64,
        ramp: AbstractRamp | None = None,
        max_rows: int = 4096,
        max_rounds: int | None = None,
        policy: Callable[[int], AbstractPolicy] | None = None,
        drain: bool = False,
        lanes: bool = False,
        replicas: Neighbours | None = None,
        precision: Precision = "full",
        meter: AbstractMeter | None = None,
        device: str | torch.device | None = None,
        placement: Mapping[str, int] | None = None,
        convert: Convert | None = None,
        shuffle: bool = True,
        seed: int = 0,
        on_bad: OnBadInstance = "raise",
        instruments: Sequence[AbstractInstrument] = (),
    ) -> None:
        if not 0 <= seed <= MOST_SEED:
            raise ValueError(f"seed={seed}: give 0 to {MOST_SEED:,}, as {SEED}")
        self.graph = graph
        self.rules = rules or Rules()
        self.runtime = runtime or Threads(1)
        found = None if device is None else require_device(device, "Session")
        defaults = Settings()
        self.settings = Settings(
            max_active=max_active,
            ramp=ramp or defaults.ramp,
            max_rows=max_rows,
            policy=policy or defaults.policy,
            drain=drain,
            lanes=lanes,
            precision=require_precision(precision, "precision="),
            meter=meter,
            device=found,
            max_rounds=max_rounds,
        )
        self.placement = dict(placement or {})
        self.convert, self.shuffle, self.seed, self.on_bad = convert, shuffle, seed, on_bad
        self.instruments = list(instruments)
        self.parts: dict[str, PartState] = make_parts(graph, self.rules, found)
        self._move_modules_without_weights(found)
        self._refuse_lanes_beside_others()
        self._refuse_replicas_beside_others(replicas)
        self._replicas = (
            None if replicas is None else Replicas(self.parts, replicas, self.runtime.lock)
        )
        self._plain: Engine | None = None  # evaluates the consensus where there are replicas
        for part in self.trained_parts.values():
            part.in_flight(max_active)
        if precision == "bf16":
            for name, part in self.parts.items():
                require_float32(name, dict(part.module.named_parameters()))
        self._position = Position()
        self._used = Occupancy()
        self._engine: Engine | None = None
        self._memories: dict[str, Memory] = {}  # of nodes, when the engine was last at rest
        self._costs: dict[str, float] = {}
        self._met = 0  # instances trained at the last meeting of copies
        self._checked = self._remarked = False
        self._example: Instance | None = None  # that the graph was checked with
        kernels_kind()  # compiled now, if need be: later it would count as training

    def fit(
        self,
        train: Data,
        *,
        epochs: int,
        valid: Data | None = None,
        until: Target | None = None,
        folder: Path | str | None = None,
        checkpoint_every: int | None = None,
        keep_last: int = 0,
        evaluate_every: float | None = None,
    ) -> Fit:
        """Train.

        Args:
            train: Instances, or items for ``convert``.
            epochs: The last epoch, counted from the session's first: ``fit(epochs=2)`` and then
                ``fit(epochs=3)`` trains three. A session that was loaded continues in its own.
            valid: Evaluated after every epoch.
            until: Stops after the evaluation that reaches it.
            folder: Gets ``latest.safetensors`` after every evaluation and epoch, and
                ``best.safetensors`` when the metric of ``until`` (without it: the validation loss)
                is the best so far.
            checkpoint_every: Also after so many instances; the graph is drained for it.
            keep_last: Also keep so many numbered checkpoints.
            evaluate_every: Share of an epoch between two evaluations, such as 0.25; None: the end
                of an epoch alone, which is always one. Within an epoch nothing is in flight then:
                the graph is drained, which counts as training time, and copies of a part meet.
                Gradients that wait for their update go on waiting.

        Raises:
            WorkerError, DataError, NonFiniteError, StuckError, EndlessLoopError: As they say; the
                weights are those of the last step. ``fit`` may be called again: it repeats the
                instances since the graph was last drained, for a checkpoint or the end of an
                epoch. To go back to the weights of that time as well, ``load`` the checkpoint.
            CheckpointError: The same, with a checkpoint that cannot be written.
            KeyboardInterrupt: Ctrl-C, after what was in flight has finished and the checkpoint is
                written; ``fit`` continues with the next instance. Data that do not answer are not
                waited for. A second Ctrl-C abandons what is in flight, as a failure does. SIGTERM
                is as a first Ctrl-C, unless the program has a handler of its own; what is raised is
                then ``runtime.interrupt.Terminated``. In the main thread alone.
            ValueError: The arguments do not go together, or ``until`` names no metric.
            GraphError: The graph cannot run, or has no loss.
        """
        require_fit_arguments(
            epochs, until, valid, folder, checkpoint_every, keep_last, evaluate_every
        )
        require_loss(self.graph)
        self._require_metric(until)
        log.info("%s", kernels_status())
        source = self._source(train, shuffle=self.shuffle)
        validation = None if valid is None else self._source(valid, shuffle=False)
        with self._used.by("fit"):
            self._check(source)
            self._remark()
            retention = None
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                retention = Retention(Path(folder), keep_last)
            return Fitting(
                self, source, validation, epochs, until, retention, checkpoint_every, evaluate_every
            ).run()

    def evaluate(self, data: Data) -> Evaluation:
        """Losses and metrics of a pass without training.

        Nothing changes by it: no weight, optimiser, gradient that waits, or random generator.
        """
        with self._used.by("evaluate", inside=True):
            return self._evaluate(self._source(data, shuffle=False), epoch=0, epochs=0, began=0.0)

    def predict(self, data: Data) -> list[Any]:
        """What reaches the outputs, in the order of the instances.

        Without ``Stream.output`` in the graph: the predictions that reach the losses; targets may
        then be missing from the instances.

        Returns:
            For each instance a tensor ``(rows, ...)`` on the host, rows sorted by vertex; a tuple
            where the payload has several tensors; a dict by name where the graph has several
            outputs.
        """
        with self._used.by("predict", inside=True):
            return self._predict(self._source(data, shuffle=False))

    def save(self, path: Path | str) -> None:
        """Write a checkpoint: weights, optimisers, versions, data position, random state.

        Raises:
            CheckpointError: It cannot be written; what was there is intact.
        """
        with self._used.by("save", inside=True):
            tensors, document = self._snapshot()
            write_checkpoint(path, tensors, document)

    def load(self, path: Path | str, *, weights_only: bool = False) -> None:
        """Read a checkpoint; ``fit`` then continues where it stood.

        Args:
            path: From ``save`` or from the folder of a ``fit``.
            weights_only: Leave optimisers, position and random state alone.

        Raises:
            CheckpointError: It cannot be read, or does not fit this graph; the session is as it
                was. A file may come from anybody: nothing in it is executed, and all of it is
                looked at before any of it is loaded.
        """
        with self._used.by("load"):
            load_session(self, path, weights_only=weights_only)

    def statistics(self) -> dict[str, Any]:
        """Versions of the parts, rows that wait, bytes of the stores."""
        engine = self._engine
        return {
            "versions": {name: p.version for name, p in self.parts.items()},
            "trained": self._position.trained,
            "store_bytes": sum(n.nbytes() for n in engine.wiring.nodes.values()) if engine else 0,
        }

    def learning_rates(self) -> dict[str, list[float]]:
        """The rates at which parts step now, by part and parameter group of its optimiser.

        A group's ``lr``, as its torch scheduler has left it, times the ``schedule`` at the number
        of instances trained. What a ``delay`` takes off depends on the gradients of a step and is
        not in it. Copies have entries of their own, ``name#1`` and so on. It may be called while
        training goes on, by instruments and by ``convert``.
        """
        trained = self._position.trained
        if self._engine is not None:
            trained = self._engine.controller.trained
        return {name: p.rates(trained) for name, p in self.trained_parts.items() if p.parameters}

    def _predict(self, source: Source) -> list[Any]:
        engine = self._ready(source)
        engine.begin(train=False, judge=False, collect=True)
        feeder = Feeder(source.epoch(0), "raise")
        watch = Observer(self.instruments, "predict", 0, 0, source.length, self.parts, 0.0)
        self._run(engine, feeder, watch)
        source.require_whole(feeder.taken, "the data to predict")
        outputs = {
            name: _by_instance(collected, feeder.taken)
            for name, collected in engine.collected().items()
        }
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        return [{name: values[i] for name, values in outputs.items()} for i in range(feeder.taken)]

    def _move_modules_without_weights(self, device: torch.device | None) -> None:
        """Those of nodes and losses may have buffers, such as the weights of classes."""
        if device is None:
            return
        owned = {id(inner) for part in self.parts.values() for inner in part.module.modules()}
        losses = [o.criterion for o in self.graph.operators if isinstance(o, Losing)]
        for module in (*self.graph.modules(), *losses):
            if isinstance(module, torch.nn.Module) and id(module) not in owned:
                module.to(device)

    def _refuse_lanes_beside_others(self) -> None:
        if not self.settings.lanes:
            return
        copied = sorted({original_name(n) for n in self.parts if n != original_name(n)})
        for name, value in (("placement", self.placement), ("Part(replicas=...)", copied)):
            if value:
                raise ValueError(
                    f"lanes=True and {name} {value} do not go together: in lanes every worker has "
                    "all nodes and shares all parts; leave one of the two out"
                )
        graphs = [t.name for t in self.graph.throughs() if t.keep == "graph" and t.parameters]
        if graphs:
            raise ValueError(
                f"lanes=True and keep='graph' of {graphs} do not go together: a module that keeps "
                "autograd's graph runs in one thread at a time; leave out lanes, and parts are "
                "spread over the workers"
            )

    def _refuse_replicas_beside_others(self, replicas: Neighbours | None) -> None:
        if replicas is None:
            return
        copied = sorted({original_name(n) for n in self.parts if n != original_name(n)})
        for name, value in (
            ("lanes", self.settings.lanes),
            ("placement", self.placement),
            ("Part(replicas=...)", copied),
        ):
            if value:
                raise ValueError(
                    f"replicas={replicas.copies} copies of the model and {name}={value} do not go "
                    "together: a copy lives on one worker with all its parts; leave one of the two "
                    "out"
                )

    @property
    def trained_parts(self) -> dict[str, PartState]:
        """The parts that learn: those of the graph, or of its copies (``name#k``)."""
        return self.parts if self._replicas is None else self._replicas.parts

    @property
    def _places_by_cost(self) -> bool:
        """Whether it matters where nodes live, and time can tell."""
        runtime = self.runtime
        apart = self.settings.lanes or self._replicas is not None
        return runtime.workers > 1 and not runtime.virtual and not apart

    def _source(self, data: Data, *, shuffle: bool) -> Source:
        return Source(data, self.convert, shuffle=shuffle, seed=self.seed)

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Json]]:
        tensors, parts = parts_to_tensors(self.parts)
        self._remember()
        remembered, memories = memories_to_tensors(self._memories)
        tensors.update(remembered)
        at = self._position
        document: dict[str, Any] = {
            "parts": parts,
            "memories": memories,
            "seed": self.seed,
            "precision": self.settings.precision,
            "kernels": kernels_kind(),
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
            },
            "random": random_state_to_json(),
        }
        if self._replicas is not None:
            copied, document["replicas"] = replicas_to_tensors(self._replicas)
            tensors.update(copied)
        return tensors, document

    def _ready(self, source: Source, *, fresh: bool = False) -> Engine:
        """The engine, made when it is first wanted; the graph is checked with a first instance.

        Training begins every stretch with a fresh one: policies and stores have a past, which is
        part of the order in which sums are added, and a resumed run must find what an
        uninterrupted one does.
        """
        self._check(source)
        if self._replicas is not None and not fresh:
            if self._plain is None:
                self._plain = Engine(self.graph, self.parts, self.settings, self.runtime.workers)
            return self._plain
        if self._engine is None or fresh:
            self._remember()
            self._engine = Engine(
                self.graph,
                self.parts,
                self.settings,
                self.runtime.workers,
                self.placement,
                self._costs,
                self._position.trained,
                self.runtime.lock,
                self._replicas,
            )
            self._engine.recall(self._memories)
            self._engine.began_s = self._position.train_seconds
        return self._engine

    def _check(self, source: Source) -> None:
        """Check the graph with a first instance, when it is first used."""
        if not self._checked:
            self._example = self._first_instance(source)
            shapes = {} if self._example is None else self._shapes(self._example)
            self.graph.check(shapes, like=self._example)
            self._checked = True

    def _remark(self) -> None:
        """Say once what in the graph will never learn, and may not be meant."""
        if not self._remarked:
            for remark in remarks(self.graph, self._example):
                log.warning("%s", remark)
        self._remarked, self._example = True, None

    def _remember(self) -> None:
        """Take what nodes remember from an engine at rest."""
        if self._engine is not None:
            self._memories = self._engine.memories()

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
                return first if isinstance(first, Instance) else None
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

    def _run(self, engine: Engine, feeder: AbstractFeeder, watch: Observer) -> float:
        """One stretch of a pass; an engine that failed in it is not used again."""
        training = engine.controller.training
        try:
            with (
                self._used.passing(),
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
        return seconds

    def _abandon(self, training: bool) -> None:
        if not training:
            self._remember()  # an evaluation has left them as they were
        self._engine = self._plain = None
        if training:
            for part in self.parts.values():
                part.abandon()
            if self._replicas is not None:
                self._replicas.abandon()

    def _evaluate(self, source: Source, epoch: int, epochs: int, began: float) -> Evaluation:
        with random_state_kept():
            engine = self._ready(source)
            engine.begin(train=False)
            feeder = Feeder(source.epoch(0), self.on_bad)
            watch = Observer(
                self.instruments, "evaluate", epoch, epochs, source.length, self.parts, began
            )
            seconds = self._run(engine, feeder, watch)
        source.require_whole(feeder.taken, "an evaluation")
        return Evaluation(means_of(engine.sums()), feeder.taken - feeder.skipped, seconds)

    def _require_metric(self, until: Target | None) -> None:
        losses = [o for o in self.graph.operators if isinstance(o, Losing)]
        known = {o.label for o in losses if o.label} | {name for o in losses for name in o.metrics}
        if until is not None and until.metric not in known:
            raise ValueError(f"until={until}: the graph's losses have {sorted(known)}")

    def _groups(self) -> list[list[PartState]]:
        """Parts that have copies, each with them."""
        originals = [name for name in self.parts if name == original_name(name)]
        groups = [copies_of(name, self.parts) for name in originals]
        return [group for group in groups if len(group) > 1]

    def _take_staleness(self) -> dict[str, PartStaleness]:
        """Since the last entry of the history, copies of a part together."""
        histograms: dict[str, list[int]] = {}
        for name, part in self.trained_parts.items():
            counts = histograms.setdefault(original_name(name), [])
            for age, rows in enumerate(part.take_histogram()):
                counts.extend([0] * (age + 1 - len(counts)))
                counts[age] += rows
        return {name: staleness_of(counts) for name, counts in histograms.items()}

    def _meet(self, *, now: bool) -> None:
        """Let the copies meet whose time has come, or all of them now; nothing is in flight."""
        for group in self._groups():
            every = group[0].mixer.every
            trained = self._position.trained
            due = every is not None and trained // every > self._met // every
            if now or due:
                group[0].mixer.mix(group)
        self._met = self._position.trained


_TRIED = 100  # items that are tried for a first instance


@contextmanager
def _mode(modules: Sequence[torch.nn.Module], train: bool) -> Iterator[None]:
    """Modules in training or evaluation mode, and afterwards as they were."""
    before = {inner: inner.training for module in modules for inner in module.modules()}
    for module in modules:
        module.train(train)
    try:
        yield
    finally:
        for inner, mode in before.items():
            inner.training = mode


def _by_instance(collected: Sequence[Collected], n: int) -> list[Any]:
    """Rows of an output, cut by instance and sorted by vertex."""
    if not collected:
        return [torch.empty(0) for _ in range(n)]
    if len({tuple(x.shape[1:] for x in c[3]) for c in collected}) > 1:
        return _by_message(collected, n)
    repeat = [
        (s, v) if lengths is None else (np.repeat(s, lengths), np.repeat(v, lengths))
        for s, v, lengths, _ in collected
    ]
    serial = np.concatenate([s for s, _ in repeat])
    vertex = np.concatenate([v for _, v in repeat])
    order = np.lexsort((vertex, serial))
    counts = np.bincount(serial, minlength=n).tolist()
    width = len(collected[0][3])
    rows = torch.from_numpy(order)
    columns = [
        torch.cat([c[3][j].cpu() for c in collected]).index_select(0, rows).split(counts)  # type: ignore[no-untyped-call]
        for j in range(width)
    ]
    if width == 1:
        return list(columns[0])
    return list(zip(*columns, strict=True))


def _by_message(collected: Sequence[Collected], n: int) -> list[Any]:
    """The same for bundles whose rows differ in shape from one to the next."""
    found: list[Any] = [torch.empty(0) for _ in range(n)]
    for serials, _, lengths, payload in collected:
        counts = np.ones_like(serials) if lengths is None else lengths
        pieces = [x.split(counts.tolist()) for x in payload]  # type: ignore[no-untyped-call]
        for i, serial in enumerate(serials.tolist()):
            rows = tuple(p[i] for p in pieces)
            found[serial] = rows[0] if len(rows) == 1 else rows
    return found

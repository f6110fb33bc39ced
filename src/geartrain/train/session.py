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
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch

from geartrain.bounds import MOST_SEED, SEED, require_whole
from geartrain.device import require_device
from geartrain.engine.instrument import AbstractInstrument
from geartrain.engine.parts import make_parts
from geartrain.engine.schedule import Schedule
from geartrain.engine.settings import Settings
from geartrain.frames.precision import require_float32, require_precision
from geartrain.graph.ends import Losing
from geartrain.graph.graph import Graph
from geartrain.graph.learning import require_loss
from geartrain.kinds import require_truth
from geartrain.native import kind as kernels_kind
from geartrain.native import status as kernels_status
from geartrain.nodes.loss import Collected
from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.threads import Threads
from geartrain.sharing.alone import Alone
from geartrain.sharing.sharing import AbstractSharing
from geartrain.train.arguments import require_given, require_instruments, require_kinds
from geartrain.train.auto import Auto, RuntimeChoice
from geartrain.train.checkpoint import Retention, made_folder, write_checkpoint
from geartrain.train.fit_arguments import require_fit_arguments
from geartrain.train.fitting import Fitting
from geartrain.train.in_flight import InFlight
from geartrain.train.loading import load_session
from geartrain.train.observer import Observer
from geartrain.train.options import Compute, Keep, Reading
from geartrain.train.results import Evaluation, Fit, Target
from geartrain.train.source import Data, Source
from geartrain.train.state import State
from geartrain.train.validation import require_some

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
        runtime: ``Threads(1)`` unless given. ``"auto"`` measures what the first instances cost, and
            chooses between one worker and several, processes and threads, parts that are spread and
            weights that are shared, and says it; ``Auto(...)`` has other bounds.
        max_active: Most instances in flight. ``"auto"`` finds what the network wants, by rows a
            firing, within bounds of staleness and memory, and says it; ``InFlight(...)`` has other
            bounds.
        sharing: How workers share the weights. ``Alone()``, as None: a part lives on one worker.
            ``PartCopies({"cell": 2})``: some have copies, which meet when nothing is in flight.
            ``SharedWeights()``: every worker runs the whole graph for its own instances, all with
            the same weights. ``Neighbours(...)``: copies of the model, each with weights, optimiser
            and data of its own, exchange while they train; ``max_active`` and ``drain`` then apply
            to each by itself, and the modules in the graph hold their consensus after every
            evaluation, checkpoint and epoch.
        schedule: What runs when, and where: ramp, minibatches, policy, bounds, placement.
        compute: Precision, device, and what is counted.
        reading: How instances come from data: conversion, order, what is done with bad ones.
        seed: Of the order of the data.
        instruments: Watch. One that raises ends the run with its error.

    Raises:
        ValueError: Two parts have one name, there is no such precision, a device does not exist,
            a number is out of range, or ``sharing`` cannot be with these parts, or with a
            ``placement``.
        TypeError: An argument is of another kind.
        GraphError: ``bf16``, and a module's weights are not float32.
        GraphError: From ``fit``, ``evaluate``, ``predict``: the graph cannot run.
        BusyError: From all methods that train, run, save or load: another one is running.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        graph: Graph,
        *,
        rules: Rules | None = None,
        runtime: AbstractRuntime | Auto | Literal["auto"] | None = None,
        sharing: AbstractSharing | None = None,
        max_active: int | Literal["auto"] | InFlight = 64,
        schedule: Schedule | None = None,
        compute: Compute | None = None,
        reading: Reading | None = None,
        seed: int = 0,
        instruments: Sequence[AbstractInstrument] = (),
    ) -> None:
        require_given(graph=graph)
        require_kinds(graph=graph, rules=rules, runtime=runtime, schedule=schedule)
        require_kinds(compute=compute, reading=reading)
        require_whole(f"seed={seed!r:.80}", seed)
        if not 0 <= seed <= MOST_SEED:
            raise ValueError(f"seed={seed}: give 0 to {MOST_SEED:,}, as {SEED}")
        self.graph = graph
        self.rules = rules or Rules()
        schedule, compute = schedule or Schedule(), compute or Compute()
        self.reading = reading = reading or Reading()
        device = None if compute.device is None else require_device(compute.device, "Compute")
        defaults = Settings()
        in_flight = InFlight() if max_active == "auto" else max_active
        if isinstance(in_flight, InFlight):
            if schedule.drain:
                raise ValueError(
                    f"max_active={max_active!r}, drain=True: minibatches are of a size that you "
                    "choose; give max_active a number"
                )
            max_active = min(defaults.max_active, in_flight.most)
        settings = Settings(
            max_active=_require_active(max_active),
            ramp=schedule.ramp,
            max_rows=schedule.max_rows,
            policy=schedule.policy or defaults.policy,
            drain=schedule.drain,
            precision=require_precision(compute.precision, "precision="),
            meter=compute.meter,
            device=device,
            max_rounds=schedule.max_rounds,
        )
        self.seed = seed
        self.instruments = require_instruments(instruments)
        parts = make_parts(graph, self.rules, device)
        self._move_modules_without_weights(parts, device)
        way = Alone() if sharing is None else sharing
        _require_sharing(way)
        choice = None
        if runtime == "auto" or isinstance(runtime, Auto):
            auto = runtime if isinstance(runtime, Auto) else Auto()
            choice = RuntimeChoice(
                *(auto, sharing, schedule.placement),
                *(_why_no_processes(compute), _why_alone(device)),
            )
            runtime = choice.runtime
            if (workers := way.workers_at_once(choice.most)) is not None:
                runtime, choice = choice.at_once(workers), None
        runtime = runtime or Threads(1)
        _require_together(way, schedule, runtime.workers)
        self.state = State(
            graph,
            runtime,
            settings,
            schedule.placement,
            self.instruments,
            way.make(graph, parts, runtime.workers, runtime.lock),
            seed,
            reading.on_bad,
            in_flight if isinstance(in_flight, InFlight) else None,
            choice,
        )
        for part in self.trained_parts.values():
            part.in_flight(settings.max_active)
        if compute.precision == "bf16":
            for name, part in self.parts.items():
                require_float32(name, dict(part.module.named_parameters()))
        kernels_kind()  # compiled now, if need be: later it would count as training

    @property
    def settings(self) -> Settings:
        """Numbers and policies of the engine; with ``max_active="auto"`` as it was found."""
        return self.state.settings

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
        keep: Keep | None = None,
    ) -> Fit:
        """Train.

        Args:
            train: Instances, or items for ``convert``.
            epochs: The last epoch, counted from the session's first: ``fit(epochs=2)`` and then
                ``fit(epochs=3)`` trains three. A session that was loaded continues in its own.
            valid: Evaluated after every epoch; refused where it has no instance.
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
            keep: How often a state is kept to go back to after the death of a worker, besides
                checkpoints; for runtimes that go on after one.

        Raises:
            WorkerError, DataError, NonFiniteError, StuckError, EndlessLoopError: As they say; the
                weights are those of the last step. ``fit`` may be called again: it repeats the
                instances since the graph was last drained, for a checkpoint or the end of an
                epoch. To go back to the weights of that time as well, ``load`` the checkpoint;
                ``gt.Processes(on_worker_death="restore")`` does so by itself where a worker has
                died.
            CheckpointError: The same, with a checkpoint that cannot be written; but where there is
                no room for it (``NoRoomError``) the run goes on, says so, and counts it.
            KeyboardInterrupt: Ctrl-C, after what was in flight has finished and the checkpoint is
                written; ``fit`` continues with the next instance. Data that do not answer are not
                waited for. A second Ctrl-C abandons what is in flight, as a failure does. SIGTERM
                is as a first Ctrl-C, unless the program has a handler of its own; what is raised is
                then ``runtime.interrupt.Terminated``. In the main thread alone.
            ValueError: The arguments do not go together, or ``until`` names no metric.
            GraphError: The graph cannot run, or has no loss.
        """
        require_kinds(until=until, keep=keep, folder=folder)
        require_fit_arguments(
            epochs, until, valid, folder, checkpoint_every, keep_last, evaluate_every
        )
        require_loss(self.graph)
        self._require_metric(until)
        if keep is not None and not self.runtime.most_deaths:
            raise ValueError(
                f"fit(keep={keep}): this runtime goes on after no death, so nothing is gone back "
                "to; give gt.Processes(..., on_worker_death='restore'), or leave keep out"
            )
        log.info("%s", kernels_status())
        source = self._source(train, shuffle=self.reading.shuffle)
        validation = None if valid is None else self._source(valid, shuffle=False)
        require_some(None if validation is None else validation.length)
        with self.state.used.by("fit"), self.state.deaths.of_one_call():
            self.state.check(source)
            self.state.remark()
            retention = None
            if folder is not None:
                retention = Retention(made_folder(folder), keep_last)
            if keep is not None and keep.folder is not None:
                made_folder(keep.folder)
            return Fitting(
                self.state,
                source,
                validation,
                epochs,
                until,
                retention,
                checkpoint_every,
                evaluate_every,
                keep,
            ).run()

    def evaluate(self, data: Data) -> Evaluation:
        """Losses and metrics of a pass without training.

        Nothing changes by it: no weight, optimiser, gradient that waits, or random generator.
        """
        with self.state.used.by("evaluate", inside=True), self.state.deaths.of_one_call():
            return self.state.evaluate(
                self._source(data, shuffle=False), epoch=0, epochs=0, began=0.0
            )

    def predict(self, data: Data) -> list[Any]:
        """What reaches the outputs, in the order of the instances.

        Without ``Stream.output`` in the graph: the predictions that reach the losses; targets may
        then be missing from the instances.

        Returns:
            For each instance a tensor ``(rows, ...)`` on the host, rows sorted by vertex; a tuple
            where the payload has several tensors; a dict by name where the graph has several
            outputs.
        """
        with self.state.used.by("predict", inside=True), self.state.deaths.of_one_call():
            return self._predict(self._source(data, shuffle=False))

    def save(self, path: Path | str) -> None:
        """Write a checkpoint: weights, optimisers, versions, data position, random state.

        Raises:
            CheckpointError: It cannot be written; what was there is intact.
        """
        require_given(path=path)
        with self.state.used.by("save", inside=True):
            tensors, document = self.state.snapshot()
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
        require_given(path=path)
        require_truth("load", weights_only=weights_only)
        with self.state.used.by("load"):
            load_session(self.state, path, weights_only=weights_only)

    def statistics(self) -> dict[str, Any]:
        """Versions of the parts, rows that wait, bytes of the stores."""
        engine = self.state.engine
        return {
            "versions": {name: p.version for name, p in self.parts.items()},
            "trained": self.state.position.trained,
            "store_bytes": sum(n.nbytes() for n in engine.wiring.nodes.values()) if engine else 0,
        }

    def learning_rates(self) -> dict[str, list[float]]:
        """The rates at which parts step now, by part and parameter group of its optimiser.

        A group's ``lr``, as its torch scheduler has left it, times the ``schedule`` at the number
        of instances trained. What a ``delay`` takes off depends on the gradients of a step and is
        not in it. Copies have entries of their own, ``name#1`` and so on. It may be called while
        training goes on, by instruments and by ``convert``.
        """
        trained = self.state.position.trained
        if self.state.engine is not None:
            trained = self.state.engine.controller.trained
        return {name: p.rates(trained) for name, p in self.trained_parts.items() if p.parameters}

    def __repr__(self) -> str:
        weights = sum(p.numel() for part in self.parts.values() for p in part.parameters)
        at = self.state.position
        return (
            f"Session(parts={len(self.parts)}, weights={weights:,}, runtime={self.runtime!r}, "
            f"epoch={at.epoch}, trained={at.trained:,})"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a Session is not copied or pickled, as threads, processes and data are in it: "
            "save(path), make another one of a graph like its own (a Graph may be copied), and "
            "load(path) there"
        )

    def _predict(self, source: Source) -> list[Any]:
        def watch() -> Observer:
            return Observer(self.instruments, "predict", 0, 0, source.length, self.parts, 0.0)

        engine, feeder, _ = self.state.look(source, watch, "raise", collect=True)
        source.require_whole(feeder.taken, "the data to predict")
        outputs = {
            name: _by_instance(collected, feeder.taken)
            for name, collected in engine.collected().items()
        }
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        return [{name: values[i] for name, values in outputs.items()} for i in range(feeder.taken)]

    def _move_modules_without_weights(
        self, parts: Mapping[str, PartState], device: torch.device | None
    ) -> None:
        """Those of nodes and losses may have buffers, such as the weights of classes."""
        if device is None:
            return
        owned = {id(inner) for part in parts.values() for inner in part.module.modules()}
        losses = [o.criterion for o in self.graph.operators if isinstance(o, Losing)]
        for module in (*self.graph.modules(), *losses):
            if isinstance(module, torch.nn.Module) and id(module) not in owned:
                module.to(device)

    @property
    def runtime(self) -> AbstractRuntime:
        """The runtime of now; with ``runtime="auto"`` as it was chosen."""
        return self.state.runtime

    @property
    def parts(self) -> Mapping[str, PartState]:
        """The parts that evaluate, whose weights are in the user's modules."""
        return self.state.parts

    @property
    def trained_parts(self) -> Mapping[str, PartState]:
        """The parts that learn: those of the graph, or copies of them (``name#k``)."""
        return self.state.trained_parts

    def _source(self, data: Data, *, shuffle: bool) -> Source:
        return Source(data, self.reading.convert, shuffle=shuffle, seed=self.seed)

    def _require_metric(self, until: Target | None) -> None:
        losses = [o for o in self.graph.operators if isinstance(o, Losing)]
        known = {o.label for o in losses if o.label} | {name for o in losses for name in o.metrics}
        known |= {"loss"} if any(o.label for o in losses) else set()
        if until is not None and until.metric not in known:
            raise ValueError(f"until={until}: the graph's losses have {sorted(known)}")


def _require_sharing(sharing: object) -> None:
    if not isinstance(sharing, AbstractSharing):
        raise TypeError(
            f"sharing={sharing!r}: give a way to share weights, such as SharedWeights(), "
            'PartCopies({"cell": 2}) or Neighbours(copies=2)'
        )


def _require_together(sharing: AbstractSharing, schedule: Schedule, workers: int) -> None:
    placement = schedule.placement
    if placement and not (sharing.spreads or sharing.splits(workers)):
        raise ValueError(
            f"sharing={type(sharing).__name__}(...) and placement={placement} do not go together: "
            "every copy of the graph lives on one worker with all its parts; leave one of the two "
            "out"
        )
    if schedule.drain and not sharing.may_drain:
        raise ValueError(
            f"sharing={sharing} and drain=True do not go together: a minibatch is of all workers; "
            "give SharedWeights(in_flight='all')"
        )


def _why_no_processes(compute: Compute) -> str | None:
    """Why there can be no worker processes, whatever the graph; None: there can."""
    if not sys.platform.startswith("linux"):
        return f"worker processes want Linux, and this is {sys.platform}"
    if compute.meter is not None:
        return f"Compute(meter={type(compute.meter).__name__}(...)) counts in one process"
    return None


def _why_alone(device: torch.device | None) -> str | None:
    """Why there is to be one worker; None: there may be more."""
    if device is None or device.type == "cpu":
        return None
    return f"the parts are on {device}, which works beside it"


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


def _require_active(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool):
        raise ValueError(f"max_active={given!r}: give a number, 'auto', or gt.InFlight(...)")
    return given

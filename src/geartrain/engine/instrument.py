"""What an observer may see. Instruments watch; they never steer.

The engine reads no clock: times come from the runtime, in seconds since the run began (virtual
seconds in ``simulated``). Every method may be called from any worker thread, one call at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from geartrain.graph.drawing import Outline
from geartrain.nodes.node import Spared
from geartrain.schema import Count, NotNegative


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Once per ``fit``, before the first instance."""

    runtime: str
    workers: int
    max_active: int
    epochs: int
    nodes: Mapping[str, int] = field(default_factory=dict)  # node name -> worker
    graph_text: str = ""  # the printed graph
    graph_mermaid: str = ""  # the graph as Mermaid source
    sharing: str = ""  # how workers share weights, where they have copies of the graph
    outline: Outline = field(default_factory=Outline)  # the graph, to be drawn


@dataclass(frozen=True, slots=True)
class Chosen:
    """What costs had to decide is decided: where nodes live, or with ``runtime="auto"`` all of it.

    It holds from the next pass on. After a resume it is told again, without being measured again.
    """

    runtime: str
    workers: int
    nodes: Mapping[str, int]  # node name -> worker
    sharing: str  # how workers share weights, where they have copies of the graph
    why: str  # a line
    time_s: float
    # Throughput over that of one worker with one kernel thread, of each way that ``runtime="auto"``
    # has looked at, by what it is called.
    expected: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fired:
    """One node ran one batch."""

    worker: int
    node: str
    part: str | None
    direction: Literal["forward", "backward"]
    rows: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Updated:
    """A part took an optimiser step."""

    worker: int
    part: str
    version: int
    rows: int  # gradient rows in this step
    time_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How a pass over the data stands; sent at most a few times a second."""

    mode: Literal["train", "evaluate", "predict"]
    epoch: int  # from 1; 0 outside of fit
    epochs: int
    finished: int  # instances of this pass
    total: int | None  # None when the data has no length
    active: int  # instances in flight now
    loss: float  # mean over the rows with a loss so far in this pass; NaN before the first
    metrics: Mapping[str, float]  # means so far in this pass
    instances_per_second: float  # of this pass so far
    staleness: float  # mean over the parts with gradients so far in this pass
    time_s: float


@dataclass(frozen=True, slots=True)
class PartStaleness:
    """Updates between a row's forward and its backward, over an epoch or what was asked about."""

    mean: float
    max: int
    histogram: tuple[int, ...]  # [k] = gradient rows that were k versions old


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """After the drain (and the validation, if there is one) of a training epoch.

    With ``evaluate_every`` also within an epoch; everything is since the event before it.
    """

    epoch: float  # how far training has come: 2.25 is a quarter into the third
    epochs: int
    instances: int
    seconds: float  # training alone, without validation
    loss: float
    metrics: Mapping[str, float]
    valid: Mapping[str, float]  # empty without validation data
    staleness: Mapping[str, PartStaleness]
    updates: Mapping[str, int]  # part -> optimiser steps
    time_s: float


@dataclass(frozen=True, slots=True)
class CopyExchanged:
    """One copy of the model, since the event before; letters of all its parts together."""

    instances: int
    rounds: int  # own gradients
    instances_per_second: float
    sent: int
    applied: int
    merged: int
    dropped: int
    lost: int  # of those sent: the receiver was absent
    bytes: int  # sent
    bytes_per_round: float
    staleness: PartStaleness  # receiver's versions while a letter was under way
    present: bool
    meetings: int = 0  # times that its weights were mixed with others'; parts meet by themselves
    meetings_per_round: float = 0.0  # mean over its parts
    declined: int = 0  # of those sent: what the receiver did not take up


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What copies of the model have said to one another; before each ``EpochEnded``."""

    epoch: float
    time_s: float
    exchange: str
    distance: float  # root mean square distance of the copies from their mean
    copies: Sequence[CopyExchanged]


@dataclass(frozen=True, slots=True)
class Restored:
    """A worker process has died, and the call goes on, with new ones.

    An evaluation or prediction is done again from its beginning. Training goes back to the last
    checkpoint of the call, or the state in memory that stands for it; or nowhere, where other
    copies of the model go on: ``source`` is then ``copies``, and what is unfinished is fed to them.
    """

    mode: Literal["train", "evaluate", "predict"]
    worker: int | None  # None: not one of them alone
    message: str  # who has died, and how
    deaths: int  # in this call up to now
    most: int  # after so many the call goes on
    epoch: int  # that training goes on in; 0 outside of training, as what follows
    taken: int = 0  # instances of this epoch that are not repeated
    repeated: int = 0  # instances that had been trained since, and are trained again
    unfinished: int = 0  # instances that were in flight, and are fed again
    seconds: float = 0.0  # of training that are lost
    source: str = ""  # the checkpoint, ``memory``, or ``copies``
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Joined:
    """Copies of the model that were absent take part, with weights and optimiser of another one."""

    worker: int
    copies: Sequence[int]
    time_s: float


@dataclass(frozen=True, slots=True)
class NodeWork:
    """One node on one worker, one way."""

    worker: Count
    node: str
    direction: Literal["forward", "backward", "exchange"]  # exchange: letters of copies of a part
    firings: Count
    rows: Count
    seconds: NotNegative
    sizes: tuple[Count, ...]  # firings by their rows: none, 1, 2, 3 to 4, 5 to 8, and so on
    row_squares: Count = 0  # sum over the firings of rows times rows
    row_seconds: NotNegative = 0.0  # and of rows times seconds


@dataclass(frozen=True, slots=True)
class Link:
    """What went from one process to another, in bytes on the wire."""

    sender: Count  # a worker; as many as there are: the program that controls them
    receiver: Count
    messages: Count
    bytes: Count


@dataclass(frozen=True, slots=True)
class Worked:
    """Who did what in training since the event before; before each ``EpochEnded``.

    The passes of training are counted, without validation, checkpoints and what is between them.
    """

    epoch: float
    time_s: float
    seconds: NotNegative  # of the passes
    nodes: Sequence[NodeWork]
    waiting: Sequence[NotNegative]  # seconds of each worker without anything to do
    links: Sequence[Link]  # empty where workers have one memory


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Once per ``fit``, also after a failure or an interrupt."""

    outcome: Literal["done", "target reached", "interrupted", "failed"]
    instances: int
    train_seconds: float
    message: str = ""
    time_s: float = 0.0
    deaths: int = 0  # of worker processes that the run went on after
    repeated: int = 0  # instances that were trained again for it; not among the instances
    unsaved: int = 0  # checkpoints for which there was no room


class AbstractMeter(ABC):
    """Measures the work of nodes from inside their firings; see ``geartrain.observe.flops``."""

    @abstractmethod
    def firing(self, node: str, *, forward: bool) -> AbstractContextManager[Any]:
        """Entered around every firing of a node, by the thread that fires it."""

    @abstractmethod
    def spared(self, node: str, work: Sequence[Spared]) -> None:
        """A slow gear has left this out."""


class AbstractInstrument:
    """Override what you want to see; the rest does nothing."""

    wants_firings: bool = False  # ``on_fired`` is called only if this is True: it costs per firing

    def on_run_started(self, event: RunStarted) -> None:
        """A run begins."""

    def on_chosen(self, event: Chosen) -> None:
        """It has been decided, by what was measured, who does what from now on."""

    def on_fired(self, event: Fired) -> None:
        """A node has run a batch."""

    def on_updated(self, event: Updated) -> None:
        """A part has stepped."""

    def on_progress(self, event: Progress) -> None:
        """The pass has moved on."""

    def on_exchanged(self, event: Exchanged) -> None:
        """Copies of the model have trained up to an evaluation."""

    def on_restored(self, event: Restored) -> None:
        """A worker process has died, and the call goes on."""

    def on_joined(self, event: Joined) -> None:
        """Copies of the model take part that were absent."""

    def on_worked(self, event: Worked) -> None:
        """Workers have trained up to an evaluation."""

    def on_epoch_ended(self, event: EpochEnded) -> None:
        """An epoch, or the part of one up to an evaluation, is over, with its validation."""

    def on_run_ended(self, event: RunEnded) -> None:
        """The run is over; release files here."""

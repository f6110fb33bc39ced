"""What a way costs, measured on a few minibatches: operations, memory of each part, bytes sent.

    minibatches ─► FlopMeter, firings      ─► Bill: virtual seconds of a firing, by node and way
                ─► MemoryMeter             ─► most bytes at once on each device
                ─► Bill                    ─► bytes across cuts

One virtual second is 1e9 operations, on each of as many devices as there are parts; links are
ideal. Memory is what autograd saves for the way back (each storage once, weights of now not), what
leaves a part while its gradient is awaited, rows in replay buffers, and weights, their gradients,
optimiser and views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, final

import torch
from torch import Tensor

from benchmarks.local.methods import Way
from geartrain.engine.firing import Firing
from geartrain.engine.instrument import AbstractInstrument, AbstractMeter, Fired, RunStarted
from geartrain.engine.router import Delivery
from geartrain.frames.instance import Instance
from geartrain.frames.message import Backward
from geartrain.nodes.node import Spared
from geartrain.observe.flops import FlopMeter
from geartrain.parts.part import PartState
from geartrain.parts.snapshot import parts_to_tensors
from geartrain.pipeline.credit import DecoupledGreedy
from geartrain.pipeline.pipeline import Pipeline
from geartrain.recipes.recipe import Task, Value
from geartrain.runtime.costs import Costs, batch_bytes
from geartrain.runtime.simulated import Simulated
from geartrain.train.options import Compute
from geartrain.train.session import Session

OPERATIONS_PER_S: Final = 1e9
MINIBATCHES: Final = 24

Firings = Mapping[tuple[str, bool], float]
"""Node and whether it goes forward, to operations of a firing."""


@final
@dataclass(slots=True)
class Bill:
    """Costs for ``Simulated``, by node and way; counts what it is asked about."""

    operations: Firings
    forward_bytes: int = 0
    backward_bytes: int = 0
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    message_s: float = 0.0
    shared: bool = False
    buffer_bytes: float | None = None
    again_s: float = 0.0
    collective: Literal["ring", "star"] = "ring"

    def firing(self, firing: Firing) -> float:
        return self.operations.get((firing.node, firing.forward), 0.0) / OPERATIONS_PER_S

    def nbytes(self, delivery: Delivery) -> int:
        n = batch_bytes(delivery)
        if isinstance(delivery.batch, Backward):
            self.backward_bytes += n
        else:
            self.forward_bytes += n
        return n


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a way costs.

    Args:
        firings: Operations of a firing.
        forward, backward, spared: Operations of a minibatch.
        memory: Most bytes at once, by device.
        whole: The same on one device.
        sent_forward, sent_backward: Bytes across cuts for a minibatch.
    """

    firings: Firings
    forward: float
    backward: float
    spared: float
    memory: Sequence[int]
    whole: int
    sent_forward: float
    sent_backward: float


def probe(way: Way, recipe: str, options: Mapping[str, Value], n: int = MINIBATCHES) -> Probe:
    """Train a few minibatches twice, and count."""
    meter, fired = FlopMeter(), _Firings()
    session, task = session_of(
        way, recipe, options, compute=Compute(meter=meter), instruments=[fired]
    )
    minibatches = list(task.load("train"))[:n]
    session.fit(minibatches, epochs=1)
    firings = {}
    for node, flops in meter.nodes().items():
        for forward, total in ((True, flops.forward), (False, flops.backward)):
            if total:
                firings[node, forward] = total / fired.counts[node, forward]
    whole = meter.total()
    bill, seen = Bill(firings), MemoryMeter()
    session, task = session_of(
        way, recipe, options, bill, compute=Compute(meter=seen), instruments=[seen]
    )
    seen.watch(session.parts, cast("Pipeline", task.pipeline), minibatches[0])
    session.fit(minibatches, epochs=1)
    return Probe(
        firings=firings,
        forward=whole.forward / n,
        backward=whole.backward / n,
        spared=whole.spared / n,
        memory=[seen.peaks[w] for w in sorted(seen.peaks)],
        whole=seen.whole,
        sent_forward=bill.forward_bytes / n,
        sent_backward=bill.backward_bytes / n,
    )


def session_of(
    way: Way,
    recipe: str,
    options: Mapping[str, Value],
    bill: Bill | None = None,
    *,
    seed: int = 0,
    epochs: int = 1,
    wrap: Callable[[Simulated], Any] = lambda runtime: runtime,
    **others: Any,
) -> tuple[Session, Task]:
    """A session on as many virtual devices as there are parts."""
    task = way.task(recipe, seed, epochs, options)
    costs = Costs(firing_s=0.0, row_s=0.0) if bill is None else bill
    runtime = wrap(Simulated(way.parts, costs=costs))
    told = {"max_active": way.max_active, "seed": seed, **task.settings(way.parts)}
    return Session(task.graph, rules=task.rules, runtime=runtime, **told, **others), task


@final
class _Firings(AbstractInstrument):
    """Counts firings by node and way."""

    wants_firings = True

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, bool]] = Counter()

    def on_fired(self, event: Fired) -> None:
        self.counts[event.node, event.direction == "forward"] += 1


@final
class MemoryMeter(AbstractMeter, AbstractInstrument):
    """What is kept on each device between firings, at its most.

    Attributes:
        peaks: Device to bytes.
        whole: Bytes of all devices together, each storage once.
    """

    wants_firings = True

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self.whole = 0
        self._live: dict[int, Counter[Storage]] = {}
        self._home: Mapping[str, int] = {}
        self._parts: Mapping[str, PartState] = {}
        self._outputs: dict[str, int] = {}
        self._out: Counter[str] = Counter()
        self._buffers: Counter[int] = Counter()

    def watch(
        self, parts: Mapping[str, PartState], pipeline: Pipeline, minibatch: Instance
    ) -> None:
        """Tell it what it cannot see: the parts, and what leaves them."""
        self._parts = parts
        h = cast("Tensor", minibatch.inputs["x"])
        for k, stage in enumerate(pipeline.stages[:-1]):
            with torch.no_grad():
                (h,) = stage(h if isinstance(h, Tensor) else h[0])
            self._outputs[f"part {k}"] = h.nbytes
            if isinstance(pipeline.credit, DecoupledGreedy):
                self._buffers[k + 1] = pipeline.credit.buffer * h.nbytes

    def on_run_started(self, event: RunStarted) -> None:
        self._home = event.nodes
        self._live = {w: Counter() for w in range(event.workers)}

    def spared(self, node: str, work: Sequence[Spared]) -> None:
        """Nothing to keep."""

    def firing(self, node: str, *, forward: bool) -> AbstractContextManager[Any]:
        return self._firing(node, forward)

    @contextmanager
    def _firing(self, node: str, forward: bool) -> Iterator[None]:
        live = self._live[self._home[node]]
        before = live.total()

        def pack(t: Tensor) -> Saved:
            return Saved(t.detach(), live)

        with torch.autograd.graph.saved_tensors_hooks(pack, Saved.unpack):
            yield
        if forward and live.total() > before:
            self._out[node] += 1
        elif not forward and self._out[node]:
            self._out[node] -= 1
        self._look()

    def _look(self) -> None:
        states = self._states()
        everything: set[Storage] = set()
        for w, live in self._live.items():
            held = set(live) | states.get(w, set())
            gradients = sum(
                p.nbytes
                for name, part in self._parts.items()
                if self._device(name) == w
                for p in part.parameters
            )
            outputs = sum(
                n * self._outputs.get(node, 0)
                for node, n in self._out.items()
                if self._home[node] == w
            )
            bytes_ = sum(n for _, n in held) + gradients + outputs + self._buffers[w]
            self.peaks[w] = max(self.peaks.get(w, 0), bytes_)
            everything |= held
        all_gradients = sum(p.nbytes for part in self._parts.values() for p in part.parameters)
        self.whole = max(self.whole, sum(n for _, n in everything) + all_gradients)

    def _states(self) -> dict[int, set[Storage]]:
        """Storages of weights, buffers, optimisers and views, by device."""
        found: dict[int, set[Storage]] = {}
        for name, part in self._parts.items():
            tensors, _ = parts_to_tensors({name: part})
            kept = {key: t for key, t in tensors.items() if "/gradient/" not in key}
            found.setdefault(self._device(name), set()).update(map(storage_of, kept.values()))
        return found

    def _device(self, part: str) -> int:
        return self._home.get(part, 0)


Storage = tuple[int, int]
"""Where it begins, and its bytes."""


def storage_of(t: Tensor) -> Storage:
    """That of a tensor."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@final
class Saved:
    """A tensor that autograd keeps; counted as long as it is kept."""

    __slots__ = ("_key", "_live", "_tensor")

    def __init__(self, tensor: Tensor, live: Counter[Storage]) -> None:
        self._tensor, self._live, self._key = tensor, live, storage_of(tensor)
        live[self._key] += 1

    def unpack(self) -> Tensor:
        """The tensor itself."""
        return self._tensor

    def __del__(self) -> None:
        self._live[self._key] -= 1
        if not self._live[self._key]:
            del self._live[self._key]

"""What the engine costs when the nodes do nothing: firings, rows a second, copies, admission.

    PYTHONPATH=src python -m benchmarks.overhead.main --data ../shared/data

    firing      x ─► pass ─► ... ─► pass ─► loss      a firing from queue to queue, without a
                                                      module: joins, stores, addresses, routing
    rows        the same through ``Session.fit``, many instances in flight
    copies      a recipe's run: bytes of payload and gradient that are moved, and by which file
    admission   a recipe's run: packing and feeding an instance

``pass`` is a module whose kernel returns what it gets; with ``keeps`` it also keeps every row until
its gradient comes, as most modules do. In ``loop`` a row goes round a recurrent loop instead of
down a chain, so every firing also asks a predicate and moves the row to the next vertex.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.firings import Operations, Training, around_firings, name_of
from benchmarks.peers.figures import Document, Spread, machine
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.settings import Settings
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.native.rows import Moves
from geartrain.nn import Recurrent
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel, gathered
from geartrain.runtime.base import Feeder

Shape: TypeAlias = Literal["chain", "loop"]

ROWS: Final = (1, 32, 128, 512)
GOALS_US: Final = {32: 150.0, 512: 300.0}
GOAL_ROWS: Final = 1_000_000
COPIES: Final = {"copy_", "index_select", "index_copy_", "index_put_", "cat", "stack", "clone"}
"""torch's operators that move rows."""
PACKAGE: Final = Path(gt.__file__).parent
PASSED_OVER: Final = {"rows", "message", "main", "firings"}
"""Files that move rows for others, who are looked for further up."""


@final
class PassKernel(AbstractKernel):
    """Returns what it is given.

    Args:
        keeps: Whether each row waits in the store for its gradient.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps

    def forward(
        self, inputs: Payload, inside: gt.Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        return inputs, inputs if self._keeps else ()

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: gt.Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        gathered(kept, rows)
        return gradients


@final
class Pass(nn.Module):
    """The identity, with a kernel of its own."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self._keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        return x

    def row_kernel(self) -> PassKernel:
        return PassKernel(self._keeps)


def total(prediction: Tensor, target: Tensor) -> Tensor:
    """A loss a row whose gradient is not zero."""
    return prediction.sum(1) * target


def graph_of(shape: Shape, nodes: int, keeps: bool) -> gt.Graph:
    """Rows that pass so many nodes, or one node so often."""
    graph = gt.Graph(vertex=("token",), value=("weight",))
    rows = graph.input("x")
    if shape == "loop":
        rows = Recurrent(Pass(keeps), name="pass", run="steps")(rows)
    else:
        for k in range(nodes):
            rows = rows.through(Pass(keeps), name=f"pass {k}")
    graph.merge(rows).loss(total, "weight")  # behind a merge, else the last node computes it
    return graph


def instances_of(n: int, nodes: int, width: int) -> list[gt.Instance]:
    """Instances of one row at vertex 0, with as many vertices as a loop is to have turns."""
    tokens = np.zeros(nodes, np.int64)
    weight = np.float32(0.5)
    return [
        gt.Instance(
            {"x": (torch.full((1, width), 0.1), np.zeros(1, np.int64))},
            vertex={"token": tokens},
            value={"weight": weight},
            key=f"row {i}",
        )
        for i in range(n)
    ]


def firing_us(
    shape: Shape, rows: int, *, keeps: bool, nodes: int, width: int, repeats: int
) -> dict[str, float]:
    """Microseconds of a firing of ``pass`` on so many rows, forward and backward: medians.

    The worker is driven by hand, so that no thread, no watch and no controller is in the figure.
    """
    graph, instances = graph_of(shape, nodes, keeps), instances_of(rows, nodes, width)
    graph.check({"x": ((width,), torch.float32)})
    engine = Engine(graph, {}, Settings(max_active=rows, ramp=gt.Ramp(over=0)))
    engine.begin(train=True)
    took: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(repeats + 2):
        for firing, seconds in _drain(engine, instances):
            if turn > 1 and firing.node.startswith("pass") and firing.rows == rows:
                took[firing.forward].append(seconds)
    engine.check_empty()
    forward, backward = (1e6 * statistics.median(took[way]) for way in (True, False))
    return {"forward": forward, "backward": backward}


def _drain(engine: Engine, instances: Sequence[gt.Instance]) -> Iterator[tuple[Firing, float]]:
    """Admit the instances and fire until they have finished."""
    (worker,) = engine.workers
    for delivery in engine.controller.admit(instances).deliveries:
        worker.deliver(delivery)
    while worker.ready:
        began = time.perf_counter()
        firing = worker.fire()
        yield firing, time.perf_counter() - began
        engine.controller.settle(firing.outbox)


def rows_per_second(
    workers: int,
    in_flight: int,
    *,
    keeps: bool,
    nodes: int,
    width: int,
    instances: int,
    passes: int,
) -> list[float]:
    """Rows through a node, forward and backward, a second: of each pass after the first.

    Several workers share weights, as nodes without weights have no other place.
    """
    session = gt.Session(
        graph_of("chain", nodes, keeps),
        runtime=gt.Threads(workers, kernel_threads=1),
        max_active=in_flight,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        sharing=gt.SharedWeights(),
        reading=gt.Reading(shuffle=False),
    )
    data = instances_of(instances, nodes, width)
    firings: list[int] = []
    with around_firings(after=lambda firing: firings.append(firing.rows)):
        session.fit(data, epochs=1)
    seconds = [session.fit(data, epochs=n).train_seconds for n in range(2, passes + 2)]
    return {"rates": [instances * nodes / s for s in seconds], "seconds": seconds,
            "firings": len(firings), "rows_fired": sum(firings)}  # fmt: skip


@final
class Copies:
    """Rows and bytes that were moved, by the file that asked for it."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.fired = 0  # messages that nodes with a queue ran on, forward
        self._inside = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while this lasts."""
        add = Moves.add

        def counting_add(
            moves: Moves, target: Tensor, target_rows: Any, source: Tensor, source_rows: Any,
            first: int = 0,
        ) -> None:  # fmt: skip
            n = source.shape[0] if source_rows is None else source_rows.size
            if source.is_floating_point():
                self._note(n, n * source[:1].nbytes)
            self._inside = True
            try:
                add(moves, target, target_rows, source, source_rows, first)
            finally:
                self._inside = False

        def note_fired(firing: Firing) -> None:
            self.fired += firing.rows if firing.forward else 0

        Moves.add = counting_add  # type: ignore[method-assign]
        try:
            with around_firings(lambda: Operations(self._see), note_fired):
                yield
        finally:
            Moves.add = add  # type: ignore[method-assign]

    def _see(
        self, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> None:
        name = name_of(operator)
        if name in COPIES and isinstance(result, Tensor):
            # Of what is written in place, the rows that are written.
            at = {"copy_": 1, "index_copy_": 3, "index_put_": 2}.get(name)
            moved = result if at is None else arguments[at]
            self.note(moved if moved.ndim else result)

    def note(self, moved: Tensor) -> None:
        """torch moved the rows of a tensor."""
        if not self._inside and moved.is_floating_point() and moved.ndim > 1:
            self._note(moved.shape[0], moved.nbytes)

    def _note(self, rows: int, size: int) -> None:
        asked = _asked()
        self.rows[asked] += rows
        self.bytes[asked] += size


def _asked() -> str:
    """The file of geartrain on whose behalf rows are moved: ``gather``, ``payload``, ..."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents and path.stem not in PASSED_OVER:
            return f"{path.parent.name}/{path.stem}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def copies_of(training: Training) -> Document:
    """What a pass of a recipe moves."""
    training()
    copies = Copies()
    with copies.counted():
        training()
    return {
        "instances": len(training.instances),
        "rows_fired": copies.fired,
        "rows_moved": dict(copies.rows.most_common()),
        "bytes_moved": dict(copies.bytes.most_common()),
    }


def admission_us(training: Training, passes: int) -> list[float]:
    """Microseconds of admission an instance, pass by pass: packing, frames, the first messages."""
    training()
    return [1e6 * _admitting(training) / len(training.instances) for _ in range(passes)]


def _admitting(training: Training) -> float:
    """Seconds that a pass spends on admission."""
    admit, spent = Feeder.admit, 0.0

    def timed(feeder: Feeder, engine: Engine) -> Any:
        nonlocal spent
        began = time.perf_counter()
        try:
            return admit(feeder, engine)
        finally:
            spent += time.perf_counter() - began

    Feeder.admit = timed  # type: ignore[method-assign]
    try:
        training()
    finally:
        Feeder.admit = admit  # type: ignore[method-assign]
    return spent


def measure(given: argparse.Namespace) -> Document:
    """All four parts."""
    size = {"nodes": given.nodes, "width": given.width}
    time_firing = partial(firing_us, repeats=given.repeats, **size)
    time_rows = partial(rows_per_second, instances=given.instances, passes=given.passes, **size)
    document: Document = {"benchmark": "overhead", "machine": machine(), "settings": size}
    torch.set_num_threads(1)
    document["firing"] = [
        {"shape": shape, "keeps": keeps, "rows": n, **time_firing(shape, n, keeps=keeps)}
        for shape in ("chain", "loop")
        for keeps in (False, True)
        for n in ROWS
    ]
    document["rows"] = [
        {"workers": w, "in_flight": m, "keeps": keeps, **time_rows(w, m, keeps=keeps)}
        for keeps in (False, True)
        for w in (1, 2)
        for m in (256, 1024)
    ]
    torch.sparse.check_sparse_tensor_invariants.disable()
    for part in ("copies", "admission"):
        document[part] = []
    for task, instances in (("sentiment", 500), ("listreduce", 5000)):
        training = Training(task, given.data, size=instances)
        document["copies"].append({"task": task, **copies_of(training)})
        times = admission_us(training, given.passes)
        document["admission"].append({"task": task, "us": times})
    return document


def markdown(document: Document) -> Iterator[str]:
    """Four tables, against the goals."""
    yield from _firings(document)
    yield from ("", f"| rows through {document['settings']['nodes']} nodes | in flight | row kept "
                "| rows/s, median | min to max | of the goal | rows a firing "
                "| us a firing, runtime included |", "|---" * 8 + "|")  # fmt: skip
    for row in document["rows"]:
        spread = Spread.of(row["rates"])
        assert spread is not None
        who = "1 worker" if row["workers"] == 1 else f"{row['workers']} workers, shared weights"
        yield (
            f"| {who} | {row['in_flight']} | {_yes(row['keeps'])} | {spread.median:,.0f} | "
            f"{spread.low:,.0f} to {spread.high:,.0f} | {spread.median / GOAL_ROWS:.0%} | "
            f"{row['rows_fired'] / row['firings']:.0f} | {_per_firing(row):.0f} |"
        )
    yield from _moves(document)
    yield from ("", "| admission | us an instance, median | min to max |", "|---|---|---|")
    for row in document["admission"]:
        spread = Spread.of(row["us"])
        assert spread is not None
        yield f"| {row['task']} | {spread.median:.1f} | {spread.low:.1f} to {spread.high:.1f} |"


def _per_firing(row: Document) -> float:
    """Microseconds of a worker for each of its firings, whatever it did between them."""
    return 1e6 * row["workers"] * statistics.median(row["seconds"]) / row["firings"]


def _firings(document: Document) -> Iterator[str]:
    yield "| firing | row kept | rows | forward, us | backward, us | goal, us | met |"
    yield "|---" * 7 + "|"
    for row in document["firing"]:
        goal = GOALS_US.get(row["rows"])
        told = "| | |"
        if goal is not None:
            told = f"| {goal:.0f} | {_yes(max(row['forward'], row['backward']) <= goal)} |"
        yield (
            f"| {row['shape']} | {_yes(row['keeps'])} | {row['rows']} | {row['forward']:.0f} | "
            f"{row['backward']:.0f} {told}"
        )


def _moves(document: Document) -> Iterator[str]:
    yield from ("", "| moved | rows a row fired | KiB an instance | by file |", "|---|---|---|---|")
    for row in document["copies"]:
        size = sum(row["bytes_moved"].values())
        shares = ", ".join(
            f"{name} {part / size:.0%}" for name, part in list(row["bytes_moved"].items())[:6]
        )
        yield (
            f"| {row['task']} | {sum(row['rows_moved'].values()) / row['rows_fired']:.2f} | "
            f"{size / row['instances'] / 1024:.1f} | {shares} |"
        )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder that holds sst/")
    parser.add_argument("--nodes", type=int, default=16, help="in the chain, turns of the loop")
    parser.add_argument("--width", type=int, default=128, help="numbers in a row")
    parser.add_argument("--repeats", type=int, default=20, help="of the firings")
    parser.add_argument("--instances", type=int, default=20_000, help="for rows a second")
    parser.add_argument("--passes", type=int, default=5, help="that count")
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="measure nothing: tables")
    given = parser.parse_args()
    if given.markdown is not None:
        document = json.loads(given.markdown.read_text())
    else:
        document = measure(given)
        if given.json is not None:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(markdown(document)))


if __name__ == "__main__":
    main()

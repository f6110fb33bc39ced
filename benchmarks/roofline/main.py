"""How near a training run is to its matrix products alone.

    PYTHONPATH=src python -m benchmarks.roofline.main sentiment listreduce --data ../shared/data

A run of the recipe is recorded: every matrix product that its kernels ask torch for, whichever
library does it, with the shapes, strides and dtypes of its operands. Then

    real       the same run, not recorded
    products   the recorded products again, back to back, in their order, and nothing else
    share      products / real: 100 % would be a run whose gates, losses, optimiser steps, moving of
               rows, routing and Python cost nothing

on one thread; on two, real is two workers, and the products are given either two kernel threads or
to two Python threads, each with half of them, whichever is faster. Operands are used again and
again, so they are as near to the core as they can be. Passes alternate; medians are shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import torch
from benchmarks.peers.figures import Document, Spread, machine
from benchmarks.peers.systems import SIZES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import geartrain as gt
from geartrain.engine.worker import Firing, WorkerState
from geartrain.ir.products import affine
from geartrain.recipes import find_recipe
from geartrain.recipes.recipe import Setting

PRODUCTS: Final = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_linear_pointwise"}
"""Operators that are matrix products; ``linear`` and ``matmul`` come down to these."""
SHAPE: Final = (4096, 256, 640)
"""Rows, width in and width out of the product whose rate counts as the machine's peak."""


@final
@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that went into a product; equal ones may be one tensor when it is done again."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    place: str
    """Which argument it was, so that no product gets one tensor twice."""

    @staticmethod
    def of(tensor: Tensor, place: str) -> Operand:
        return Operand(tuple(tensor.shape), tensor.stride(), tensor.dtype, place)

    def make(self) -> Tensor:
        values = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return values.copy_(torch.rand(self.shape) - 0.5)


@final
@dataclass(frozen=True, slots=True)
class Product:
    """One call: the operator, and its arguments with tensors described."""

    operator: Any
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product itself."""
        return operations(
            self.operator, [a.shape for a in self.arguments if isinstance(a, Operand)]
        )


def operations(operator: Any, shapes: Sequence[tuple[int, ...]]) -> int:
    """2 n k m of the product, from the shapes of an operator's tensors in their order."""
    name = name_of(operator)
    if name == "_linear_pointwise":
        (*rows, width), (out, _) = shapes[:2]
        return 2 * int(torch.Size(rows).numel()) * width * out
    left, right = shapes[1:3] if "add" in name else shapes[:2]
    return 2 * int(torch.Size(left).numel()) * right[-1]


def name_of(operator: Any) -> str:
    """``addmm`` of ``aten.addmm.out``."""
    return str(operator.overloadpacket.__name__)


Recording: TypeAlias = list[Product]


class _Recorder(TorchDispatchMode):
    """Writes down the products of one thread."""

    def __init__(self, into: Recording) -> None:
        super().__init__()
        self._into = into

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in PRODUCTS:
            self._into.append(
                Product(
                    func,
                    tuple(_described(a, str(i)) for i, a in enumerate(args)),
                    tuple((name, _described(a, name)) for name, a in kwargs.items()),
                )
            )
        return func(*args, **kwargs)


def _described(argument: Any, place: str) -> Any:
    return Operand.of(argument, place) if isinstance(argument, Tensor) else argument


def record(run: Callable[[], object]) -> Recording:
    """The products of all firings in a run, in the order in which they began."""
    recording: Recording = []
    fire = WorkerState.fire

    def recorded(worker: WorkerState) -> Firing:
        with _Recorder(recording):
            return fire(worker)

    WorkerState.fire = recorded  # type: ignore[method-assign]
    try:
        run()
    finally:
        WorkerState.fire = fire  # type: ignore[method-assign]
    return recording


Call: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any]]


def calls_of(recording: Recording) -> list[Call]:
    """The products with tensors to do them on; operands of one kind are one tensor."""
    tensors: dict[Operand, Tensor] = {}

    def made(argument: Any) -> Any:
        if not isinstance(argument, Operand):
            return argument
        if argument not in tensors:
            tensors[argument] = argument.make()
        return tensors[argument]

    return [
        (p.operator, tuple(made(a) for a in p.arguments), {n: made(a) for n, a in p.named})
        for p in recording
    ]


def repeat(calls: Sequence[Call], kernel_threads: int) -> float:
    """Seconds of all products, one after another."""
    torch.set_num_threads(kernel_threads)
    with torch.no_grad():
        began = time.perf_counter()
        for operator, arguments, named in calls:
            operator(*arguments, **named)
        return time.perf_counter() - began


def repeat_in_two(halves: Sequence[Sequence[Call]]) -> float:
    """Seconds of all products, dealt to two Python threads of one kernel thread each."""
    threads = [threading.Thread(target=repeat, args=(half, 1)) for half in halves]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def peak(kernel_threads: int, repeats: int = 20) -> float:
    """GFLOP/s of one large product, the fastest of some."""
    torch.set_num_threads(kernel_threads)
    rows, width, out = SHAPE
    x, weight, bias = torch.rand(rows, width), torch.rand(out, width), torch.rand(out)
    best = float("inf")
    with torch.no_grad():
        for _ in range(repeats):
            began = time.perf_counter()
            affine(x, weight, bias)
            best = min(best, time.perf_counter() - began)
    return 2 * rows * width * out / best / 1e9


@final
class Training:
    """A recipe in a session; called, it trains a pass and returns its seconds."""

    def __init__(self, task: str, given: argparse.Namespace, workers: int) -> None:
        recipe = find_recipe(task)
        self.passes = 2 + given.repeats
        setting = Setting(
            seed=0,
            epochs=self.passes,
            update_every=recipe.update_every,
            data=given.data,
            options=SIZES[task].of(given.share),
        )
        made = recipe.build(setting)
        self.instances = made.load("train")
        self._session = gt.Session(
            made.graph,
            rules=made.rules,
            runtime=gt.Threads(workers, kernel_threads=1),
            max_active=given.max_active,
            ramp=gt.Ramp(over=0),
        )
        self._epoch = count(1)

    def __call__(self) -> float:
        return self._session.fit(self.instances, epochs=next(self._epoch)).train_seconds


def measure(task: str, given: argparse.Namespace, threads: int) -> Document:
    """Real passes and products alone, in turns, on so many threads."""
    training = Training(task, given, threads)
    training()
    recording = record(training)
    calls = calls_of(recording)
    ways: dict[str, Callable[[], float]] = {
        f"{threads} kernel threads": lambda: repeat(calls, threads)
    }
    if threads == 2:
        halves = [calls_of(recording[place::2]) for place in (0, 1)]
        ways["two Python threads"] = lambda: repeat_in_two(halves)
    for way in ways.values():
        way()
    real: list[float] = []
    alone: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        real.append(training())
        for name, way in ways.items():
            alone[name].append(way())
    return {
        "task": task,
        "threads": threads,
        "instances": len(training.instances),
        "products": len(recording),
        "gflop": sum(p.operations for p in recording) / 1e9,
        "real_s": real,
        "products_s": alone,
        "peak_gflops": peak(threads),
    }


def markdown(document: Document) -> Iterator[str]:
    """A row for every task and number of threads."""
    yield (
        "| task | threads | real, s | products alone, s | share of roofline | products | "
        "GFLOP | GFLOP/s, real | of peak |"
    )
    yield "|---" * 9 + "|"
    for row in document["rows"]:
        shares = Spread.of(shares_of(row))
        assert shares is not None
        real = statistics.median(row["real_s"])
        way, seconds = fastest(row)
        rate = row["gflop"] / real
        yield (
            f"| {row['task']} | {row['threads']} | {real:.2f} | {statistics.median(seconds):.2f} "
            f"({way}) | {shares.median:.0%} ({shares.low:.0%} to {shares.high:.0%}) | "
            f"{row['products']:,} | {row['gflop']:.3g} | {rate:.3g} | "
            f"{rate / row['peak_gflops']:.0%} of {row['peak_gflops']:.0f} |"
        )


def fastest(row: Document) -> tuple[str, Sequence[float]]:
    """The way of doing the products that takes least, and its seconds."""
    return min(row["products_s"].items(), key=lambda item: statistics.median(item[1]))


def shares_of(row: Document) -> list[float]:
    """Products alone over the real run, by repeat."""
    return [a / b for a, b in zip(fastest(row)[1], row["real_s"], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(SIZES))
    parser.add_argument("--data", type=Path, help="folder that holds sst/, babi/, qm9/")
    parser.add_argument("--share", type=float, default=0.25, help="of the peers' instances a pass")
    parser.add_argument("--max-active", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], choices=[1, 2])
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="measure nothing: the table")
    given = parser.parse_args()
    if given.markdown is not None:
        document = json.loads(given.markdown.read_text())
    else:
        if unknown := set(given.tasks) - set(SIZES):
            parser.error(f"no task {', '.join(unknown)}: there is {', '.join(SIZES)}")
        torch.sparse.check_sparse_tensor_invariants.disable()
        document = {"benchmark": "roofline", "machine": machine(), "max_active": given.max_active}
        document["rows"] = [
            measure(task, given, threads)
            for task in given.tasks or list(SIZES)
            for threads in given.threads
        ]
        if given.json is not None:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(markdown(document)))


if __name__ == "__main__":
    main()

"""How near a training run is to its matrix products alone.

    PYTHONPATH=src python -m benchmarks.roofline.main sentiment listreduce --data ../shared/data

A run of the recipe is recorded: every matrix product that its kernels ask torch for, whichever
library does it, with the shapes, strides and dtypes of its operands, and every product inside
native kernels, with its sizes. Then

    real       the same run, not recorded
    products   the recorded products again, back to back, and nothing else: those of torch in their
               order, those of native kernels by the same code, with operands that are packed
    share      products / real: 100 % would be a run whose gates, losses, optimiser steps, moving of
               rows, routing and Python cost nothing

on one thread; on two, real is two workers, and the products are given either two kernel threads or
to two Python threads, each with half of them, whichever is faster. Operands are used again and
again, so they are as near to the core as they can be. Passes alternate; medians are shown.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.firings import Operations, Training, around_firings, name_of
from benchmarks.peers.figures import Document, Spread, machine
from benchmarks.peers.systems import SIZES
from geartrain.native.build import shared_object
from geartrain.native.tally import FIELDS, Noted
from geartrain.nodes.products import affine

PRODUCTS: Final = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_linear_pointwise"}
"""Operators that are matrix products; ``linear`` and ``matmul`` come down to these."""
LANES: Final = 16
"""Columns by which a packed operand may be wider, at most."""
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


@final
class Recording:
    """Products of a run.

    Args:
        products: Those of torch, in the order in which they began.
        inside: Those of native kernels, a row each: ``geartrain.native.tally.FIELDS``.
    """

    def __init__(
        self, products: Sequence[Product] = (), inside: Sequence[NDArray[np.int64]] = ()
    ) -> None:
        self.products, self._inside = list(products), list(inside)

    @property
    def inside(self) -> NDArray[np.int64]:
        """Products of native kernels ``(n, 5)``."""
        return np.concatenate([np.empty((0, len(FIELDS)), np.int64), *self._inside])

    def __len__(self) -> int:
        return len(self.products) + len(self.inside)

    @property
    def operations(self) -> tuple[int, int]:
        """Multiplications and additions: of torch's products, of those in native kernels."""
        return (
            sum(p.operations for p in self.products),
            2 * int(self.inside[:, :3].prod(1).sum()),
        )

    def halves(self) -> tuple[Recording, Recording]:
        """Every other product."""
        return tuple(  # type: ignore[return-value]
            Recording(self.products[place::2], [self.inside[place::2]]) for place in (0, 1)
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Write down the products of this thread meanwhile."""
        noted = Noted()
        with Operations(self._see), noted:
            yield
        self._inside.append(noted.products)

    def _see(
        self, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> None:
        if name_of(operator) in PRODUCTS:
            self.products.append(
                Product(
                    operator,
                    tuple(_described(a, str(i)) for i, a in enumerate(arguments)),
                    tuple((name, _described(a, name)) for name, a in named.items()),
                )
            )


def _described(argument: Any, place: str) -> Any:
    return Operand.of(argument, place) if isinstance(argument, Tensor) else argument


def record(run: Callable[[], object]) -> Recording:
    """The products of all firings in a run."""
    recording = Recording()
    with around_firings(recording.watched):
        run()
    return recording


@final
class Alone:
    """The products of a recording, with tensors to do them on; operands of one kind are one tensor.

    Args:
        recording: Of a run.
    """

    def __init__(self, recording: Recording) -> None:
        tensors: dict[Operand, Tensor] = {}

        def made(argument: Any) -> Any:
            if not isinstance(argument, Operand):
                return argument
            if argument not in tensors:
                tensors[argument] = argument.make()
            return tensors[argument]

        self.calls = [
            (p.operator, tuple(made(a) for a in p.arguments), {n: made(a) for n, a in p.named})
            for p in recording.products
        ]
        self._inside = [
            _Inside(dtype, recording.inside[recording.inside[:, 3] == dtype.itemsize])
            for dtype in (torch.float32, torch.float64)
        ]

    def __call__(self, kernel_threads: int) -> float:
        """Seconds of all products, one after another; native kernels have one thread each."""
        torch.set_num_threads(kernel_threads)
        with torch.no_grad():
            began = time.perf_counter()
            for operator, arguments, named in self.calls:
                operator(*arguments, **named)
            for inside in self._inside:
                inside()
            return time.perf_counter() - began


@final
class _Inside:
    """Products of native kernels in one dtype, and operands as large as the largest of them."""

    def __init__(self, dtype: torch.dtype, products: NDArray[np.int64]) -> None:
        self._products = np.ascontiguousarray(products)
        if not len(products):
            return
        rows, depth, width = products[:, :3].T
        packed = depth * (width + LANES)
        sizes = [int(each.max()) for each in (rows * depth, packed, rows * width)]
        self._operands = [torch.rand(size, dtype=dtype) - 0.5 for size in sizes]
        self._run = getattr(native_products(), f"alone_{str(dtype).removeprefix('torch.')}")

    def __call__(self) -> None:
        if len(self._products):
            self._run(
                len(self._products),
                self._products.ctypes.data,
                *(x.data_ptr() for x in self._operands),
            )


@cache
def native_products() -> ctypes.CDLL:
    """``alone.c``, compiled as the kernels are."""
    library = ctypes.CDLL(str(shared_object(source=Path(__file__).with_name("alone.c"))))
    for name in ("float32", "float64"):
        function = getattr(library, f"alone_{name}")
        function.argtypes, function.restype = (ctypes.c_int64, *[ctypes.c_void_p] * 4), None
    return library


def repeat_in_two(halves: Sequence[Alone]) -> float:
    """Seconds of all products, dealt to two Python threads of one kernel thread each."""
    threads = [threading.Thread(target=half, args=(1,)) for half in halves]
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


def measure(task: str, given: argparse.Namespace, threads: int) -> Document:
    """Real passes and products alone, in turns, on so many threads."""
    training = Training(
        task,
        given.data,
        share=given.share,
        in_flight=given.max_active,
        workers=threads,
        epochs=2 + given.repeats,
    )
    training()
    recording = record(training)
    alone = Alone(recording)
    ways: dict[str, Callable[[], float]] = {
        f"{threads} kernel thread{'s' * (threads > 1)}": lambda: alone(threads)
    }
    if threads == 2:
        halves = [Alone(half) for half in recording.halves()]
        ways["two Python threads"] = lambda: repeat_in_two(halves)
    for way in ways.values():
        way()
    real: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        real.append(training())
        for name, way in ways.items():
            seconds[name].append(way())
    of_torch, inside = recording.operations
    return {
        "task": task,
        "threads": threads,
        "instances": len(training.instances),
        "products": len(recording),
        "gflop": (of_torch + inside) / 1e9,
        "inside": inside / (of_torch + inside),
        "real_s": real,
        "products_s": seconds,
        "peak_gflops": peak(threads),
    }


def markdown(document: Document) -> Iterator[str]:
    """A row for every task and number of threads."""
    yield (
        "| task | threads | real, s | products alone, s | share of roofline | products | "
        "GFLOP | of it in native kernels | GFLOP/s, real | of peak |"
    )
    yield "|---" * 10 + "|"
    for row in document["rows"]:
        shares = Spread.of(shares_of(row))
        assert shares is not None
        real = statistics.median(row["real_s"])
        way, seconds = fastest(row)
        rate = row["gflop"] / real
        yield (
            f"| {row['task']} | {row['threads']} | {real:.2f} | {statistics.median(seconds):.2f} "
            f"({way}) | {shares.median:.0%} ({shares.low:.0%} to {shares.high:.0%}) | "
            f"{row['products']:,} | {row['gflop']:.3g} | {row['inside']:.0%} | {rate:.3g} | "
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

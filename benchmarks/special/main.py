"""What our own steps and casts buy, against what torch would do instead: ratios of processor time.

    PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.special.main [adam] [adagrad] [bf16]

    adam      FusedAdam                       torch.optim.Adam(fused=True)
    adagrad   FusedAdagrad                    torch.optim.Adagrad, fused where gradients are dense
    bf16      gates of bfloat16 rows in C     the same in torch's operators, products included

Both take turns in one process; a line has medians, and the median of the ratios of neighbours with
the third smallest and the third largest.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.native import cells
from geartrain.nn import GatedGraphCell, GatedSum, TokenRNN, TreeLSTMBranch, TreeLSTMLeaf
from geartrain.nodes.casts import in_bf16
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import kernel_of

TURNS = 15
BLOCK_S = 0.02
Run = Callable[[], None]


def compare(name: str, ours: Run, theirs: Run) -> None:
    """Take turns, and print."""
    runs = ours, theirs
    for run in runs:
        _seconds(run, 3)
    count = max(2, int(BLOCK_S / max(_seconds(theirs, 3), 1e-6)))
    took = [[_seconds(run, count) for run in runs] for _ in range(TURNS)]
    mine, other = (1e6 * statistics.median(column) for column in zip(*took, strict=True))
    ratios = sorted(b / a for a, b in took)
    print(
        f"{name:44s} ours {mine:8.1f} us  torch {other:8.1f} us  torch/ours "
        f"{statistics.median(ratios):.2f} ({ratios[2]:.2f} to {ratios[-3]:.2f})",
        flush=True,
    )


def _seconds(run: Run, count: int) -> float:
    began = time.thread_time()
    for _ in range(count):
        run()
    return (time.thread_time() - began) / count


def stepping(
    shapes: Sequence[tuple[int, ...]], make: Callable[..., list[torch.optim.Optimizer]], rows: int
) -> Run:
    """Steps of weights of these shapes, and of a table with gradients of so many rows, if any."""
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for w in weights:
        w.grad = 1e-2 * torch.randn_like(w)
    tables: list[nn.Parameter] = []
    if rows:
        tables = [nn.Parameter(torch.randn(20_000, 100))]
        which = torch.randperm(20_000)[:rows].sort()[0][None]
        values = 1e-2 * torch.randn(rows, 100)
        shape = tables[0].shape
        tables[0].grad = torch.sparse_coo_tensor(
            which, values, shape, is_coalesced=True, check_invariants=False
        )
    optimizers = make(weights, tables)

    def run() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return run


def adam() -> None:
    """Parts of recipes, and layers."""
    parts = {
        "list reduction, cell": TokenRNN(14, 128, embedding_dim=128),
        "list reduction, readout": nn.Linear(128, 10),
        "bAbI, cell": GatedGraphCell(5, 4),
        "QM9, cell": GatedGraphCell(100, 4),
        "QM9, readout": GatedSum(100, 5),
        "a layer of 784 x 784": nn.Linear(784, 784),
    }
    for name, part in parts.items():
        shapes = [tuple(p.shape) for p in part.parameters()]
        ours = stepping(shapes, lambda weights, _: [gt.FusedAdam(weights)], 0)
        theirs = stepping(shapes, lambda weights, _: [torch.optim.Adam(weights, fused=True)], 0)
        compare(f"Adam: {name}", ours, theirs)


def adagrad() -> None:
    """The parts of sentiment; a table in the part of the leaf."""

    def own(weights: list[nn.Parameter], tables: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [gt.FusedAdagrad([*weights, *tables])]

    def apart(
        weights: list[nn.Parameter], tables: list[nn.Parameter]
    ) -> list[torch.optim.Optimizer]:
        fused: list[torch.optim.Optimizer] = [torch.optim.Adagrad(weights, fused=True)]
        return fused + [torch.optim.Adagrad([table]) for table in tables]

    for name, part, rows in (
        ("branch", TreeLSTMBranch(150), 0),
        ("readout", nn.Linear(150, 5), 0),
        ("leaf, 150 of 20,000 rows", TreeLSTMLeaf(100, 150), 150),
        ("leaf, 1000 of 20,000 rows", TreeLSTMLeaf(100, 150), 1000),
    ):
        shapes = [tuple(p.shape) for p in part.parameters()]
        compare(f"Adagrad: {name}", stepping(shapes, own, rows), stepping(shapes, apart, rows))


def bf16() -> None:
    """A cell forward and back, products included, rows read where they lie."""
    narrow = partial(torch.randn, dtype=torch.bfloat16)
    own = cells._function

    def without(name: str, like: Tensor, *others: Tensor | None, entries: int | None = None):  # type: ignore[no-untyped-def]
        return None if like.dtype is torch.bfloat16 else own(name, like, *others, entries=entries)

    for width in (64, 150):
        for n in (1, 32, 256):
            x = narrow(n, width)
            for name, module, inputs in (
                ("GRU", nn.GRUCell(width, width), (x, x)),
                ("LSTM", nn.LSTMCell(width, width), (x, x, x)),
                ("Tree-LSTM, leaf", TreeLSTMLeaf(width, width), (x,)),
                ("Tree-LSTM, branch", TreeLSTMBranch(width), (narrow(n, 2, width),) * 2),
            ):
                found = kernel_of(module)
                assert found is not None
                kernel, rows = in_bf16(found), np.arange(n)

                def run(in_c: bool) -> None:
                    cells._function = own if in_c else without
                    into = GradientSum(module.parameters())  # noqa: B023 (called at once)
                    with torch.no_grad():
                        y, kept = kernel.forward(inputs)  # noqa: B023
                        kernel.backward(y, kept, rows, into)  # noqa: B023

                compare(
                    f"bf16: {name}, {n} rows of {width}", partial(run, True), partial(run, False)
                )
    cells._function = own


def main(*names: str) -> None:
    """Measure what is named, or all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    known = {"adam": adam, "adagrad": adagrad, "bf16": bf16}
    for name in names or known:
        known[name]()


if __name__ == "__main__":
    main(*sys.argv[1:])

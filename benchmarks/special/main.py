"""What our own steps and casts buy, against what torch would do instead: ratios of processor time.

    PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.special.main [adam] [adagrad] ...

    adam      FusedAdam                       torch.optim.Adam(fused=True)
    adagrad   FusedAdagrad                    torch.optim.Adagrad, fused where gradients are dense
    bf16      gates of bfloat16 rows in C     the same in torch's operators, products included
    derived   kernels derived of own cells    running them again, and plain autograd without stores

Both take turns in one process; a line has medians, and the median of the ratios of neighbours with
the third smallest and the third largest.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.native import cells
from geartrain.nn import (
    DerivedKernel,
    GatedGraphCell,
    GatedSum,
    TokenRNN,
    TreeLSTMBranch,
    TreeLSTMLeaf,
)
from geartrain.nodes.call import as_payload
from geartrain.nodes.casts import in_bf16
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel, kernel_of
from geartrain.nodes.payload import Recompute

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


class ChildSum(nn.Module):
    """A cell for two children and a word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates, self.forget = nn.Linear(2 * width, 3 * width), nn.Linear(width, width)

    def forward(self, h: Tensor, c: Tensor, g: Tensor, d: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        i, o, u = self.gates(torch.cat([h + g, x], 1)).chunk(3, 1)
        left, right = torch.sigmoid(self.forget(h)), torch.sigmoid(self.forget(g))
        state = torch.sigmoid(i) * torch.tanh(u) + left * c + right * d
        return torch.sigmoid(o) * torch.tanh(state), state


class Gated(nn.Module):
    """A gated recurrent cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_x, self.of_h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        (a, b, c), (d, e, f) = self.of_x(x).chunk(3, 1), self.of_h(h).chunk(3, 1)
        reset, keep = torch.sigmoid(a + d), torch.sigmoid(b + e)
        return (1 - keep) * torch.tanh(c + reset * f) + keep * h


class Block(nn.Module):
    """Two layers, a norm and a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Expert(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x))))


def derived(width: int = 128) -> None:
    """Own cells forward and back; what nodes keep is stored and gathered, by autograd it is not."""
    own_cells = ((ChildSum(width), 5), (Gated(width), 2), (Block(width), 1), (Expert(width), 1))
    for module, takes in own_cells:
        parameters, name = list(module.parameters()), type(module).__name__
        again = Recompute(module, parameters)
        for n in (8, 32, 128, 512):
            inputs = tuple(torch.randn(n, width) for _ in range(takes))
            order = np.random.default_rng(0).permutation(n)

            def plain() -> None:
                leaves = [x.detach().requires_grad_() for x in inputs]  # noqa: B023
                ys = as_payload(module(*leaves))  # noqa: B023
                torch.autograd.grad(ys, [*leaves, *parameters], ys)  # noqa: B023

            own = _through_stores(DerivedKernel(name, module), parameters, inputs, order)
            second = _through_stores(again, parameters, inputs, order)
            compare(f"derived, again: {name}, {n} rows", own, second)
            compare(f"derived, autograd: {name}, {n} rows", own, plain)


def _through_stores(
    kernel: AbstractKernel,
    parameters: Sequence[nn.Parameter],
    inputs: tuple[Tensor, ...],
    order: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Run:
    into, came = GradientSum(parameters), [0]

    def run() -> None:
        with torch.no_grad():
            ys, kept = kernel.forward(inputs)
            stored = tuple(x if any(x is y for y in inputs) else x.clone() for x in kept)
            kernel.backward(ys, stored, order, into)
        came[0] += order.size
        if came[0] >= 1024:  # a step comes
            came[0] = 0
            for parameter in parameters:
                into.take(parameter)

    return run


def main(*names: str) -> None:
    """Measure what is named, or all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch's, of its own tensors
    known = {"adam": adam, "adagrad": adagrad, "bf16": bf16, "derived": derived}
    for name in names or known:
        known[name]()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run by ``test_hostile``: structure that means harm, given to kernels and to their twins.

    seed, number ─► a sound structure ─► spoilt ─┬─ with kernels ─► the same numbers,
                                                 └─ without ──────► or both refuse

A program of its own, as kernels that watch themselves want the sanitizer loaded first. Arguments: a
seed, the first case, how many, and perhaps the files of kernels to use, as of a path of the system.
It prints each case before it begins, so that the last line tells which ended it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.native import library
from geartrain.native.ledger import WaitingRows
from geartrain.native.losses import cross_entropy
from geartrain.native.maps import map_backward, map_forward
from geartrain.native.rows import Moves, add, put, take, take_whole, total, transposed
from geartrain.nn import (
    GatedGraphCell,
    GatedSum,
    Recurrent,
    TokenRNN,
    Tree,
    TreeLSTMBranch,
    TreeLSTMLeaf,
    VertexChoice,
    WholeList,
    WholeTree,
    choice_loss,
    first_states,
)
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import bundle_kernel_of, kernel_of
from tests.native import hostile_programs as programs
from tests.rigs.spoilt import F64, REFUSALS, Draw, session_of


def passed(
    draw: Draw, module: nn.Module, inputs: Sequence[Tensor], within: Inside
) -> Callable[[], list[Tensor | None]]:
    """Forward and back through a bundle kernel, whose residuals lie in a store."""
    n = inputs[0].shape[0]
    capacity = n + draw.n(0, 9)
    rows = draw.rows(n, capacity) if draw.chance(0.7) else None
    sound = rows is None or (
        np.unique(rows).size == rows.size and ((rows >= 0) & (rows < capacity)).all()
    )
    scale = draw.one_of(1.0, 1.0, -3.0, float("nan"))

    def run() -> list[Tensor | None]:
        kernel = bundle_kernel_of(module)
        assert kernel is not None
        into = GradientSum(module.parameters())
        with torch.no_grad():
            outputs, residuals = kernel.forward(inputs, inside=within)
            gradients = tuple(
                torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape) * scale
                if y.is_floating_point()
                else None
                for y in outputs
            )
            if rows is None:
                answers = kernel.backward(gradients, residuals, None, into, within)
            else:
                kept = []
                for residual in residuals:
                    store = residual.new_zeros((capacity, *residual.shape[1:]))
                    if sound:
                        store[torch.from_numpy(rows.copy())] = residual
                    kept.append(store)
                answers = kernel.backward(gradients, tuple(kept), rows, into, within)
        return [*outputs, *answers, *map(into.take, module.parameters())]

    return run


def whole_trees(draw: Draw) -> Callable[[], list[Tensor | None]]:
    parent, slot, lengths = draw.trees(least=0)
    width, depth, words = draw.one_of(0, 1, 3, 16, 17), draw.one_of(0, 2, 5, 40), draw.chance(0.5)
    leaf = TreeLSTMLeaf(max(depth, 1), max(width, 1), vocabulary=9 if words else None, sparse=False)
    if not words and not depth * width:
        leaf = TreeLSTMLeaf(2, 3)
    module = WholeTree(leaf, TreeLSTMBranch(leaf.hidden)).double()
    n = parent.size
    x = (
        torch.from_numpy(draw.spoilt(draw.ints(9, n), 0.1))
        if words
        else draw.floats(n, leaf.weight.shape[1])
    )
    columns = draw.laid_out(torch.from_numpy(parent)), draw.laid_out(torch.from_numpy(slot))
    if draw.chance(0.05):
        columns = columns[0], columns[1][: max(n - 1, 0)]
    lengths = draw.spoilt(lengths, 0.1)
    if int(np.abs(lengths.astype(np.float64)).sum()) > 1000 or (lengths < 0).any():
        within = Inside(torch.from_numpy(lengths), torch.zeros(n, dtype=torch.int64), {})
    else:
        within = draw.inside(lengths)
    return passed(draw, module, (x, *columns), within)


def whole_lists(draw: Draw) -> Callable[[], list[Tensor | None]]:
    lengths, width = draw.lengths(), draw.one_of(1, 2, 16, 33)
    n, floats = int(lengths.sum()), draw.chance(0.3)
    cell: nn.Module = (
        nn.RNNCell(3, width, nonlinearity=draw.one_of("relu", "tanh"))
        if floats
        else TokenRNN(
            draw.one_of(2, 7, 300),
            width,
            draw.one_of("relu", "tanh"),
            embedding_dim=draw.one_of(None, 3),
            sparse=draw.chance(0.3),
        )
    )
    tokens = draw.spoilt(draw.ints(2, n))
    x = draw.floats(n, 3) if floats else draw.laid_out(torch.from_numpy(tokens))
    module = WholeList(cell.double(), every=draw.chance(0.5))
    return passed(draw, module, (x,), draw.inside(lengths))


def gated_graphs(draw: Draw) -> Callable[[], list[Tensor | None]]:
    lengths, types, width = draw.lengths(), draw.n(1, 3), draw.one_of(1, 2, 8, 17)
    edges = draw.edges(lengths, types)
    if draw.chance(0.05) and edges["source"].size:
        edges[draw.one_of("source", "target", "type")] = np.zeros(0, np.int64)
    module = GatedGraphCell(width, types, steps=draw.n(1, 3), bias=draw.chance(0.5)).double()
    h = draw.laid_out(draw.floats(int(lengths.sum()), width))
    return passed(draw, module, (h,), draw.inside(lengths, edges))


def sums(draw: Draw) -> Callable[[], list[Tensor | None]]:
    lengths, features = draw.lengths(), draw.one_of(0, 1, 4)
    n, width = int(lengths.sum()), draw.one_of(1, 2, 8, 17)
    x: list[Tensor] = []
    if features and draw.chance(0.8):
        ints = torch.from_numpy(draw.spoilt(draw.ints(features, n)))
        x = [draw.laid_out(ints) if draw.chance(0.8) else draw.floats(n, features)]
    if features and x and draw.chance(0.1):
        x[0] = x[0][: max(n - 1, 0)]
    module = GatedSum(width, features, draw.one_of(1, 3)).double()
    return passed(draw, module, (draw.floats(n, width), *x), draw.inside(lengths))


def choices(draw: Draw) -> Callable[[], list[Tensor | None]]:
    lengths, width = draw.lengths(), draw.one_of(1, 2, 8, 17)
    if draw.chance(0.8):
        lengths = lengths + 1
    n = int(lengths.sum())
    answers = np.repeat(draw.spoilt(draw.ints(1, lengths.size)), lengths)
    h = draw.floats(n, width).nan_to_num(0, 1, -1)  # of what is no number the choice is anybody's
    inputs = h, draw.laid_out(torch.from_numpy(answers))
    return passed(draw, VertexChoice(width).double(), inputs, draw.inside(lengths))


def row_cells(draw: Draw) -> Callable[[], list[Tensor | None]]:
    """Kernels of rows, forward and back, out of a store."""
    n, width = draw.n(0, 9), draw.one_of(1, 3, 16)
    h, c = draw.floats(n, width), draw.floats(n, width)
    ids = torch.from_numpy(draw.spoilt(draw.ints(5, n)))
    cases: list[tuple[nn.Module, tuple[Tensor, ...]]] = [
        (nn.LSTMCell(2, width), (draw.floats(n, 2), h, c)),
        (nn.GRUCell(2, width), (draw.floats(n, 2), h)),
        (nn.Embedding(5, width, sparse=draw.chance(0.5)), (ids,)),
        (nn.Linear(width, 3), (h,)),
        (nn.Tanh(), (h,)),
    ]
    module, inputs = draw.one_of(*cases)
    module = module.double()
    inputs = tuple(map(draw.laid_out, inputs))
    capacity = n + draw.n(0, 5)
    rows = draw.rows(n, capacity)
    sound = np.unique(rows).size == n and ((rows >= 0) & (rows < capacity)).all()

    def run() -> list[Tensor | None]:
        kernel = kernel_of(module)
        assert kernel is not None
        into = GradientSum(module.parameters())
        with torch.no_grad():
            outputs, residuals = kernel.forward(inputs)
            kept = []
            for residual in residuals:
                store = residual.new_zeros((capacity, *residual.shape[1:]))
                if sound:
                    store[torch.from_numpy(rows.copy())] = residual
                kept.append(store)
            gradients = tuple(torch.full_like(y, 0.5) for y in outputs)
            answers = kernel.backward(gradients, tuple(kept), rows, into)
        return [*outputs, *answers, *map(into.take, module.parameters())]

    return run


def moves(draw: Draw) -> Callable[[], list[Tensor | None]]:
    """Rows taken, put, added; of any dtype and shape, also of none."""
    dtype = draw.one_of(F64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    how = draw.n(0, 5)
    inner = draw.one_of((), (1,), (3,), (17,), (0,), (2, 3))
    if how > 1 and 0 in inner:  # torch looks at no row number where nothing is written
        inner = (5,)
    limit, n = draw.n(0, 9), draw.n(0, 9)

    def made(rows: int) -> Tensor:
        x = torch.randint(-3, 3, (rows, *inner)).to(dtype)
        return draw.laid_out(x) if inner else x

    store, rows = made(limit), draw.spoilt(draw.ints(limit, n), 0.4)
    other = draw.spoilt(draw.ints(limit, n), 0.4)
    if draw.chance(0.2):
        other = other[::-1]
    short = made(draw.one_of(n, n, n, n + 1, max(n - 1, 0)))
    once = draw.rows(min(n, limit), limit)

    def run() -> list[Tensor | None]:
        target = store.clone()
        if how == 0:
            return list(take((target, target[:, None] if limit else target), rows))
        if how == 1:
            return [take_whole(target, rows, n + 2)]
        if how == 2:
            put(target, once, short[: once.size], None)
            return [target]
        if how == 3:
            return [add(target, rows, short, None) if target.dtype is not torch.bool else None]
        if how == 4:
            return [total(target, rows, target, other) if dtype is not torch.bool else None]
        several, beside = Moves(), store.clone()  # each row is written by one of them
        several.add(target, None, short, None, first=min(1, limit))
        several.add(beside, once, store, once)
        several.run()
        return [target, beside]

    return run


def plain(draw: Draw) -> Callable[[], list[Tensor | None]]:
    """Maps, losses, transposes."""
    n, classes, width = draw.n(0, 40), draw.n(0, 7), draw.n(0, 40)
    dtype = draw.one_of(F64, torch.float32)
    logits = draw.laid_out(draw.floats(n, classes, dtype=dtype))
    labels = torch.from_numpy(draw.spoilt(draw.ints(classes, n)))
    x, w = draw.floats(n, width, dtype=dtype), draw.floats(classes, width, dtype=dtype)
    b = draw.one_of(None, draw.floats(classes, dtype=dtype))

    def run() -> list[Tensor | None]:
        found = cross_entropy(logits, labels)
        if found is None:
            leaf = logits.detach().clone().requires_grad_()
            losses = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
            losses.sum().backward()
            found = losses.detach(), leaf.grad
        made = map_forward(x, w, b)
        back = map_backward(logits, x, w)
        return [
            *found,
            nn.functional.linear(x, w, b) if made is None else made,
            *((logits @ w, logits.t() @ x, logits.sum(0)) if back is None else back),
            transposed(logits),
        ]

    return run


def releases(draw: Draw) -> Callable[[], list[Tensor | None]]:
    sizes = draw.random.integers(1, 5, draw.n(1, 5))
    rows = draw.rows(draw.n(1, int(sizes.sum())), int(sizes.sum()))

    def run() -> list[Tensor | None]:
        ledger = WaitingRows(int(sizes.sum()) + draw_spare, len(sizes))
        for chunk, (start, size) in enumerate(zip(sizes.cumsum() - sizes, sizes, strict=True)):
            ledger.lend(chunk, int(start), int(size))
        freed = ledger.release(rows)
        return [torch.tensor([-1] if freed is None else sorted(freed)), torch.tensor(ledger.live)]

    draw_spare = draw.n(0, 3)
    return run


def trees_in_a_session(draw: Draw) -> Callable[[], list[Tensor | None]]:
    whole = draw.chance(0.7)

    def make() -> tuple[gt.Graph, list[nn.Module]]:
        leaf = TreeLSTMLeaf(3, 4, vocabulary=9).double()
        branch, readout = TreeLSTMBranch(4).double(), nn.Linear(4, 3).double()
        graph = gt.Graph(vertex=("parent", "slot", "label"))
        words = graph.input("word", bundle=whole)
        h = (
            words.through(WholeTree(leaf, branch), read=("parent", "slot"), inside=True)
            if whole
            else Tree(branch, name="branch")(words.through(leaf, name="leaf"))
        )
        h.through(readout, take=0).loss(gt.cross_entropy, "label")
        return graph, [leaf, branch, readout]

    data = []
    for _ in range(draw.n(1, 6)):
        parent, slot, lengths = draw.trees(least=1)
        size = int(lengths[0])
        parent, slot = parent[:size], slot[:size]
        word = draw.spoilt(draw.ints(9, size), 0.1)
        inner = parent[(parent >= 0) & (parent < size)]
        x: Any = torch.from_numpy(word)
        if not whole:
            leaves = np.setdiff1d(np.arange(size), inner)
            x = x[leaves], leaves
        columns = {"parent": parent, "slot": slot, "label": draw.spoilt(draw.ints(3, size), 0.1)}
        data.append(gt.Instance({"word": x}, columns))
    return session_of(draw, make, data)


def lists_in_a_session(draw: Draw) -> Callable[[], list[Tensor | None]]:
    whole, tokens = draw.chance(0.5), draw.one_of(3, 200)

    def make() -> tuple[gt.Graph, list[nn.Module]]:
        cell, readout = TokenRNN(tokens, 4, "tanh").double(), nn.Linear(4, 3).double()
        graph = gt.Graph(vertex=("token",), value=("label",))
        given = graph.input("x", bundle=whole)
        ended = (
            given.through(WholeList(cell), inside=True, pool=True)
            if whole
            else Recurrent(cell, read="token", name="cell")(
                given.through(first_states(4, dtype=F64))
            )
        )
        ended.through(readout).loss(gt.cross_entropy, "label")
        return graph, [cell, readout]

    data = []
    for _ in range(draw.n(1, 6)):
        token = draw.spoilt(draw.ints(3, draw.n(1, 9)), 0.2)
        x: Any = torch.from_numpy(token)
        if not whole:
            x = torch.zeros(1, 1, dtype=F64), np.zeros(1, np.int64)
        label = int(draw.spoilt(draw.ints(3, 1), 0.1)[0])
        data.append(gt.Instance({"x": x}, {"token": token}, value={"label": label}))
    return session_of(draw, make, data)


def graphs_in_a_session(draw: Draw) -> Callable[[], list[Tensor | None]]:
    choose, types = draw.chance(0.5), draw.n(1, 2)

    def make() -> tuple[gt.Graph, list[nn.Module]]:
        network: nn.Module = GatedGraphCell(4, types, steps=2).double()
        graph = gt.Graph(vertex=("kind",), edge=("type",), value=("answer",))
        h = graph.input("x", bundle=True).through(network, inside=True)
        readout = VertexChoice(4).double() if choose else GatedSum(4, 2, 3).double()
        y = h.through(readout, read="answer" if choose else "kind", inside=True, pool=True)
        y.loss(choice_loss if choose else gt.cross_entropy, "answer")
        return graph, [network, readout]

    data = []
    for _ in range(draw.n(1, 6)):
        size = np.array([draw.n(1, 6)])
        n = int(size[0])
        answer = int(draw.spoilt(draw.ints(min(n, 3), 1), 0.1)[0])
        kind = {"kind": draw.spoilt(draw.ints(2, n), 0.1)}
        x = torch.randn(n, 4, dtype=F64)
        data.append(gt.Instance({"x": x}, kind, draw.edges(size, types), {"answer": answer}))
    return session_of(draw, make, data)


KINDS = [
    whole_trees,
    whole_lists,
    gated_graphs,
    sums,
    choices,
    row_cells,
    moves,
    plain,
    releases,
    trees_in_a_session,
    lists_in_a_session,
    graphs_in_a_session,
    *programs.KINDS,
]


def outcome(run: Callable[[], list[Tensor | None]], kernels: library.Library | None) -> Any:
    """Numbers, or the error that it was refused with."""
    library._settled, library._library = True, kernels
    try:
        return run()
    except REFUSALS as error:
        return error


def complaint(have: Any, want: Any) -> str | None:
    """What is wrong with what kernels gave, or None."""
    if isinstance(have, Exception):
        return None if isinstance(want, Exception) else f"refused, and torch does it: {have}"
    if isinstance(want, Exception):
        return f"done, and torch refuses: {type(want).__name__}: {want}"
    for i, (mine, theirs) in enumerate(zip(have, want, strict=True)):
        if (mine is None) != (theirs is None):
            return f"result {i} is {mine} and {theirs}"
        if mine is not None:
            short = mine.dtype in (torch.float32, torch.bfloat16)
            tolerance = {"rtol": 1e-2, "atol": 1e-4} if short else {}
            try:
                torch.testing.assert_close(
                    mine.to_dense(), theirs.to_dense(), equal_nan=True, **tolerance
                )
            except AssertionError as error:
                return f"result {i}: {error}"
    return None


def main(seed: int, first: int, count: int, *file: str) -> int:
    kernels = library.Library([*map(Path, file[0].split(os.pathsep))]) if file else library.load()
    torch.set_num_threads(2)
    refused = wrong = 0
    for case in range(first, first + count):
        kind = KINDS[case % len(KINDS)]
        print(f"case {case}: {kind.__name__}", flush=True)
        run = kind(Draw(seed, case))
        have, want = outcome(run, kernels), outcome(run, None)
        refused += isinstance(have, Exception)
        if (said := complaint(have, want)) is not None:
            wrong += 1
            print(f"WRONG case {case} ({kind.__name__}): {said}", flush=True)
    print(programs.story())
    print(f"{count} cases, {refused} refused, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4]), *sys.argv[4:]))

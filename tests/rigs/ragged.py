"""Programs of modules that read memories or look inside bundles, beside torch row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import call_of_inside, call_of_memory
from geartrain.derived.ragged.derivation import derive_inside, derive_memory
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside

Run: TypeAlias = Callable[[GradientSum], tuple[Sequence[Tensor], Sequence[Tensor | None]]]


def assert_as_torch(
    module: nn.Module, run: Run, outputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> None:
    """What a program has found, of gradients of numbers drawn by a seed, is autograd's."""
    weights = list(module.parameters())
    into = GradientSum(weights)
    with torch.no_grad():
        ys, found = run(into)
    for a, b in zip(ys, outputs, strict=True):
        assert_close(a, b.detach())
    wanted = torch.autograd.grad(
        list(outputs), [*leaves, *weights], tangents(outputs), allow_unused=True
    )
    for mine, theirs in zip([*found, *map(into.take, weights)], wanted, strict=True):
        if mine is None or theirs is None:
            assert mine is None or not mine.any()
            assert theirs is None or not theirs.any()
        else:
            assert_close(mine.to_dense(), theirs, rtol=1e-7, atol=1e-9)


def tangents(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of outputs like these."""
    rng = torch.Generator().manual_seed(7)
    return tuple(torch.randn(y.shape, generator=rng, dtype=y.dtype) for y in outputs)


def check_memory(
    module: nn.Module, lengths: Sequence[int], width: int, names: int | None = None
) -> None:
    """A module ``(h, memory, mask)`` of rows that read so many members each, of one memory.

    Args:
        names: The memory has another tensor, of integers below that; None: it has not.
    """
    n, rng = len(lengths), torch.Generator().manual_seed(3)
    held = torch.randn(sum(lengths) + 3, width, generator=rng)
    called = () if names is None else (torch.randint(names, (len(held),), generator=rng),)
    each = np.array(lengths)
    starts = np.cumsum(each) - each + 2
    h = torch.randn(n, width, generator=rng)
    program = RaggedProgram(derive_memory(module, (h,), (held, *called), 0), Operands(module))

    def run(into: GradientSum) -> tuple[Any, list[Tensor | None]]:
        ys, kept = program.forward(call_of_memory((h,), 0, (held, *called), starts, each))
        sums = {1: torch.zeros_like(held)}
        back = program.backward(kept, tangents(ys), into, sums)
        return ys, [back[0], sums[1]]

    own, memory = h.clone().requires_grad_(), held.clone().requires_grad_()
    rows = []
    for k, (a, size) in enumerate(zip(starts.tolist(), lengths, strict=True)):  # nothing is padded
        mask = torch.ones(1, size, dtype=torch.bool)
        some = [x[a : a + size][None] for x in (memory, *called)]
        rows.append(module(own[k : k + 1], *some, mask))
    assert_as_torch(module, run, [torch.cat(rows)], [own, memory])


def check_inside(
    module: nn.Module,
    *lengths: Sequence[int],
    width: int,
    pools: bool = False,
    kinds: int | None = None,
    edges: int | None = None,
) -> None:
    """A module ``(x, inside)``, of bundles with so many members; one program for all of them.

    Args:
        kinds: It gets a column of integers below that too, ``(x, kind, inside)``; None: no.
        edges: There are edges of so many kinds; None: there are none.
    """
    rng = torch.Generator().manual_seed(3)
    given = (torch.randn(5, width, generator=rng), *_kinds(kinds, 5, rng))
    columns = {} if edges is None else _edges([5], edges, rng)
    program = RaggedProgram(
        derive_inside(module, given, columns, pools=pools),
        Operands(module),
    )
    for each in lengths:
        sizes = torch.tensor(each)
        n = int(sizes.sum())
        x = torch.randn(n, width, generator=rng)
        columns = {} if edges is None else _edges(each, edges, rng)
        inside = Inside(sizes, torch.arange(sizes.numel()).repeat_interleave(sizes), columns)
        _check_one(module, program, (x, *_kinds(kinds, n, rng)), inside)


def _kinds(below: int | None, n: int, rng: torch.Generator) -> tuple[Tensor, ...]:
    return () if below is None else (torch.randint(below, (n,), generator=rng),)


def _edges(lengths: Sequence[int], kinds: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Two of each member, to any of its bundle."""
    first, source, target = 0, list[Tensor](), list[Tensor]()
    for n in lengths:
        source.append(first + torch.arange(n).repeat_interleave(2))
        target.append(first + torch.randint(max(n, 1), (2 * n,), generator=rng))
        first += n
    (kind,) = _kinds(kinds, 2 * first, rng)
    return {"source": torch.cat(source), "target": torch.cat(target), "kind": kind}


def _check_one(
    module: nn.Module, program: RaggedProgram, given: Sequence[Tensor], inside: Inside
) -> None:
    x, *columns = given
    names = dict.fromkeys(inside.edges, True)

    def run(into: GradientSum) -> tuple[Any, list[Tensor | None]]:
        ys, kept = program.forward(call_of_inside(tuple(given), inside, names))
        return ys, [program.backward(kept, tangents(ys), into)[0]]

    leaf = x.clone().requires_grad_()
    assert_as_torch(module, run, [module(leaf, *columns, inside)], [leaf])

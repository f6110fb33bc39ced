"""Where a module is cut: its blocks in a row, what each costs, and parts of about equal cost.

    nn.Sequential       block 0 ─► block 1 ─► ... ─► block n-1
    any other module    stem ─► block 0 ─► ... ─► block n-1 ─► head     one list of blocks inside

    costs  3 1 1 2 | 4 2 | 1 5     parts=3     cuts (4, 6): contiguous, and never an empty part

The stem goes with the first block, the head with the last one.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from geartrain.bounds import require_whole
from geartrain.errors import GraphError
from geartrain.kinds import require_each

Pieces: TypeAlias = str | nn.Module | Sequence[str | nn.Module]
"""Modules in a row: names of submodules (dotted), or modules."""


@final
@dataclass(frozen=True, slots=True)
class Row:
    """A module as a row of blocks.

    Args:
        stem: What comes before the blocks.
        blocks: One or more; cuts are between them.
        head: What comes behind.
    """

    stem: tuple[nn.Module, ...]
    blocks: tuple[nn.Module, ...]
    head: tuple[nn.Module, ...]

    def between(self, start: int, end: int) -> tuple[nn.Module, ...]:
        """The blocks start to end (exclusive), with stem and head at the ends of the row."""
        found = self.blocks[start:end]
        if start == 0:
            found = self.stem + found
        return found + self.head if end == len(self.blocks) else found

    def units(self) -> list[tuple[nn.Module, ...]]:
        """What cuts cannot tear apart: each block, the outer ones with stem and head."""
        return [self.between(k, k + 1) for k in range(len(self.blocks))]


def row_of(
    module: nn.Module,
    blocks: str | Sequence[str] | None = None,
    stem: Pieces | None = None,
    head: Pieces | None = None,
    sample: Tensor | None = None,
) -> Row:
    """A module as stem, blocks and head.

    Args:
        module: A ``nn.Sequential``, whose children are the blocks; or any other module whose
            ``forward`` runs submodules one after the other.
        blocks: Names of the ``ModuleList`` or ``Sequential`` of blocks, or of several in a row;
            default: the only ``ModuleList`` among the children, else the only ``Sequential``.
        stem: What runs before; default: the children that were assigned before the blocks.
        head: What runs behind; default: those that were assigned after them.
        sample: A minibatch ``(n, ...)``; the row is compared with ``module.forward`` on it. Wanted
            where stem or head are guessed.

    Raises:
        GraphError: There is no list of blocks or several; a parameter belongs to no piece; the row
            computes something else than the module; the sample is missing.
    """
    called = type(module).__name__
    if isinstance(module, nn.Sequential) and blocks is stem is head is None:
        if not len(module):
            raise GraphError(f"{called} has no block; give it one or more")
        return Row((), tuple(module), ())
    if blocks is not None:
        listed = [blocks] if isinstance(blocks, str) else blocks
        require_each("Pipeline", str, "names of lists of blocks: ['layer1']", blocks=listed)
    names = _lists(module) if blocks is None else [blocks] if isinstance(blocks, str) else blocks
    children = dict(module.named_children())
    order = list(children)
    guessed = stem is None or head is None
    if guessed and any(name not in children for name in names):
        raise GraphError(
            f"{called}: the blocks {list(names)} are not its own children, so what is before and "
            "behind them cannot be told; name it: stem=[...], head=[...]"
        )
    if stem is None:
        stem = [n for n in order[: order.index(names[0])] if n not in names]
    if head is None:
        head = [n for n in order[order.index(names[-1]) + 1 :] if n not in names]
    found: list[nn.Module] = []
    for name in names:
        inner = _inside(module, name)
        if not isinstance(inner, nn.ModuleList | nn.Sequential):
            raise GraphError(
                f"{called}: '{name}' is a {type(inner).__name__}; blocks= names a ModuleList or "
                "Sequential"
            )
        found += inner
    if not found:
        raise GraphError(f"{called}: {list(names)} hold no block; give one or more")
    row = Row(_pieces(module, "stem", stem), tuple(found), _pieces(module, "head", head))
    _refuse_leftovers(module, row)
    if sample is not None:
        _compare(module, row, sample)
    elif guessed:
        raise GraphError(
            f"{called}: its stem and head are guessed from the order of its children, and want a "
            "check: give sample=, a minibatch of inputs; or name them: stem=[...], head=[...]"
        )
    return row


def _lists(module: nn.Module) -> list[str]:
    for kind in (nn.ModuleList, nn.Sequential):
        found = [name for name, child in module.named_children() if type(child) is kind]
        if len(found) == 1:
            return found
        if found:
            break
    raise GraphError(
        f"{type(module).__name__} has {f'the lists {found}' if found else 'no list'} of blocks; a "
        "pipeline wants exactly one ModuleList or Sequential among its children: name it, or "
        "several that follow each other: blocks=['layer1', 'layer2']"
    )


def _inside(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        raise GraphError(
            f"{type(module).__name__} has no submodule '{name}'; its children are "
            f"{[n for n, _ in module.named_children()]}"
        ) from error


def _pieces(module: nn.Module, name: str, given: Pieces) -> tuple[nn.Module, ...]:
    listed = [given] if isinstance(given, str | nn.Module) else given
    require_each("Pipeline", str | nn.Module, "submodules, or their names", **{name: listed})
    return tuple(p if isinstance(p, nn.Module) else _inside(module, p) for p in listed)


def _refuse_leftovers(module: nn.Module, row: Row) -> None:
    used = {id(p) for unit in row.units() for piece in unit for p in piece.parameters()}
    left = [name for name, p in module.named_parameters() if id(p) not in used]
    if left:
        raise GraphError(
            f"{type(module).__name__}: parameters {left[:5]} belong to no stem, block or head; put "
            "them into a submodule and name it: stem=[...] or head=[...]"
        )


def _compare(module: nn.Module, row: Row, sample: Tensor) -> None:
    called = type(module).__name__
    with quiet([module, *itertools.chain(*row.units())]):
        wanted = module(sample)
        try:
            found = run(itertools.chain(*row.units()), sample)
        except Exception as error:
            raise GraphError(
                f"{called}: stem, blocks and head do not run one after the other "
                f"({type(error).__name__}: {error}); name them: stem=[...], blocks=..., head=[...]"
            ) from error
    if not isinstance(wanted, Tensor):
        raise GraphError(
            f"{called} returns {type(wanted).__name__}; a pipeline wants one tensor of rows"
        )
    if wanted.shape != found.shape or not torch.allclose(wanted, found, equal_nan=True):
        raise GraphError(
            f"{called}: its forward is not stem, blocks and head one after the other: on the "
            f"sample it gives {tuple(wanted.shape)}, they give {tuple(found.shape)} with other "
            "values; name them: stem=[...], head=[...], or write what is between as modules"
        )


@contextmanager
def quiet(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules in evaluation mode, no gradient, and the random generator kept."""
    modes = {inner: inner.training for m in modules for inner in m.modules()}
    for inner in modes:
        inner.training = False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode


def run(modules: Iterable[nn.Module], h: Tensor) -> Tensor:
    """Modules one after the other."""
    for module in modules:
        h = module(h)
    return h


def check_cuts(cuts: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Cuts by hand: the first block of each part but the first.

    Raises:
        ValueError: A part would be empty, or a cut is outside of the row.
    """
    require_each("Pipeline", object, "rising numbers of blocks: [3, 6]", cuts=cuts)
    for cut in cuts:
        require_whole(f"cuts={list(cuts)}", cut)
    ends = [0, *cuts, blocks]
    if any(b <= a for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"cuts={list(cuts)} of {blocks} blocks leave a part empty; give rising numbers from 1 "
            f"to {blocks - 1}, the first block of each part but the first"
        )
    return tuple(cuts)


def balanced_cuts(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Contiguous parts whose costliest one is as cheap as can be, and the others as equal.

    Args:
        costs: Of each block, not negative.
        parts: How many, each of one block or more.

    Raises:
        ValueError: There are fewer blocks than parts.
    """
    n = len(costs)
    require_whole(f"parts={parts!r}", parts)
    if not 1 <= parts <= n:
        raise ValueError(f"parts={parts} of {n} blocks; give 1 to {n}, or more blocks")
    ends = [0.0, *itertools.accumulate(costs)]
    most, _ = _partition(ends, parts, lambda cost: cost, max, math.inf)
    _, cuts = _partition(ends, parts, lambda cost: cost * cost, operator.add, most * (1 + 1e-9))
    return cuts


def _partition(
    ends: Sequence[float],
    parts: int,
    value: Callable[[float], float],
    add: Callable[[float, float], float],
    most: float,
) -> tuple[float, tuple[int, ...]]:
    """The cuts with the least sum of values, no part costing more than ``most``."""
    n = len(ends) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for p in range(1, parts + 1):
        longer = {}
        for end in range(p, n - parts + p + 1):
            options = [
                (add(so_far, value(ends[end] - ends[start])), (*cuts, start))
                for start, (so_far, cuts) in best.items()
                if start < end and ends[end] - ends[start] <= most
            ]
            if options:
                longer[end] = min(options)
        best = longer
    total, starts = best[n]
    return total, starts[1:]


def parameter_costs(row: Row) -> list[float]:
    """Numbers of parameters of the units."""
    return [
        float(sum(p.numel() for p in {id(p): p for m in unit for p in m.parameters()}.values()))
        for unit in row.units()
    ]


def time_costs(row: Row, sample: Tensor, *, warm_up: int = 2, rounds: int = 5) -> list[float]:
    """Seconds of forward and backward of the units; medians after a warm-up.

    Copies of the blocks are run, in training mode: nothing of the module changes.

    Args:
        row: The blocks.
        sample: A minibatch ``(n, ...)``, of the size that will be trained with.
        warm_up, rounds: Runs that do not count, and that do.
    """
    costs: list[float] = []
    h = sample
    with torch.random.fork_rng(devices=[]):
        for unit in row.units():
            copied = nn.ModuleList(copy.deepcopy(list(unit))).train()
            seconds = [_seconds(copied, h, costs) for _ in range(warm_up + rounds)][warm_up:]
            with torch.no_grad():
                h = run(copied, h)
            costs.append(sorted(seconds)[rounds // 2])
    return costs


def _seconds(modules: nn.ModuleList, h: Tensor, earlier: Sequence[float]) -> float:
    """One forward and backward; the first unit needs no gradient of its input."""
    wanted = h.is_floating_point() and bool(earlier)
    x = h.detach().clone().requires_grad_(wanted)
    began = time.perf_counter()
    with torch.enable_grad():
        y = run(modules, x.view_as(x) if wanted else x)
    leaves = [p for p in modules.parameters() if p.requires_grad] + ([x] if wanted else [])
    if leaves and y.requires_grad:
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
    return time.perf_counter() - began

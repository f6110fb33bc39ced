"""Modules of a loop that are called in two: what many rows read is computed once for all of them.

calls of a module whose rows read the same stored rows     edges that leave one vertex, children
    │ program in two: what those rows decide, the rest     of one parent
    ▼
before each call one of the early piece, with the stored rows that no call before has read;
its results are rows of a value of their own, which the late piece reads in their place
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
from torch import Tensor

from geartrain.frames.message import IntArray
from geartrain.nodes.call import Call
from geartrain.nodes.hoisted import Hoisted, hoisted
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loop.columns import Picked, SideBySide
from geartrain.nodes.loop.kernels import LoopKernels
from geartrain.nodes.loop.plan import Called, CallStage, LoopPlan, RowNumbers
from geartrain.nodes.loop.reads import Read, ReadTensor
from geartrain.nodes.loop.turn import Inner
from geartrain.nodes.loop.values import AbstractValue, Stored

SHARE: Final = 0.75
"""Of the rows of a module, so many at most may be different ones for it to be called in two."""
FEWER: Final = 64
"""And so many fewer there have to be: two calls cost more than one."""
SPARED: Final = 1 << 23
"""And so many multiplications of a turn, or what takes as long, have to be spared on the way
forward: to tell C of two modules more takes as long."""


@final
@dataclass(frozen=True, slots=True)
class SharedRows:
    """Stored rows that rows of some calls read, more than one of them the same.

    Args:
        read: Of one of them.
        inputs: Arguments of the module that are theirs.
        columns: Which columns of the stored value those are.
        first: Where each different one is read first, among the rows of the calls.
    """

    read: Read
    inputs: tuple[int, ...]
    columns: tuple[int, ...]
    first: IntArray


def shared_rows(tensors: Sequence[ReadTensor], stored: Sequence[int]) -> SharedRows | None:
    """What arguments have in common between many rows; None: too few.

    Args:
        tensors: What the arguments are made of.
        stored: By value, how many rows it has.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for i, tensor in enumerate(tensors):
        read = tensor.plain
        if read is None or read.parts != 1 or not (read.learns and tensor.dtype.is_floating_point):
            continue
        groups.setdefault((read.number, id(read.rows)), []).append(i)
    if not groups:
        return None
    inputs = max(groups.values(), key=lambda own: sum(tensors[i].width for i in own))
    reads = [tensors[i].reads[0] for i in inputs]
    rows = reads[0].rows
    n, count = rows.size, stored[reads[0].number]
    if n < FEWER or int(rows.min()) < 0 or int(rows.max()) >= count:  # C refuses those
        return None
    at = np.full(count, -1)
    at[rows[::-1]] = np.arange(n - 1, -1, -1)  # of several the last one counts
    first = at[at >= 0]
    if first.size > SHARE * n or n - first.size < FEWER:
        return None
    return SharedRows(reads[0], tuple(inputs), tuple([r.column for r in reads]), np.sort(first))


@final
@dataclass(frozen=True, slots=True)
class HoistedModule:
    """A module of a loop in two.

    Args:
        early, late: The two.
        joined: What the second one reads: rows that the first one has made, and maybe others of
            what the module read.
        work: Multiplications, or what takes as long, that the first one takes for a row.
    """

    early: CallStage
    late: CallStage
    joined: SideBySide
    work: int

    def pays(self, shared: SharedRows) -> bool:
        """Whether enough is spared where rows have so many in common."""
        return self.work * (shared.read.rows.size - shared.first.size) >= SPARED


@final
class Hoists:
    """The modules of one loop that are called in two.

    Args:
        inner: Its modules; gets more.
        kernels: Theirs.
        values: How many values it has.

    Attributes:
        most: How many modules there may be in all; and twice as many values more.
    """

    def __init__(self, inner: list[Inner], kernels: LoopKernels, values: int) -> None:
        self._inner, self._kernels, self._values = inner, kernels, values
        self._modules, self.most = len(inner), 3 * len(inner)
        self._known: dict[Hashable, HoistedModule | None] = {}
        self._next = 0
        self._work: dict[int, int] = {}

    def know(self, number: int, work: int) -> None:
        """What a row takes of a module that has been called in one, as of a ``HoistedModule``."""
        self._work[number] = work

    def may(self, number: int, rows: int) -> bool:
        """Whether a module may be called in two: it sees rows apart, is no piece itself, and so
        many rows take as much as is to be spared, as far as is known."""
        if number >= self._modules or rows * self._work.get(number, SPARED) < SPARED:
            return False
        inner = self._inner[number]
        return inner.reads is None and not inner.call.inside

    def find(
        self,
        stage: CallStage,
        kernel: AbstractKernel,
        shared: SharedRows,
        samples: Sequence[Tensor],
    ) -> HoistedModule | None:
        """A module in two; None: there is nothing to be gained.

        Args:
            stage: Of the module.
            kernel: It.
            shared: What its rows have in common.
            samples: Arguments like its own.
        """
        key = stage.number, kernel, shared.inputs, shared.read.number
        if key not in self._known:
            self._known[key] = self._made(stage, kernel, shared, samples)
        return self._known[key]

    def _made(
        self,
        stage: CallStage,
        kernel: AbstractKernel,
        shared: SharedRows,
        samples: Sequence[Tensor],
    ) -> HoistedModule | None:
        inner = self._inner[stage.number]
        early = frozenset(shared.inputs)
        if len(self._inner) + 2 > self.most:
            return None
        two = hoisted(kernel, inner.call.function, samples, early)
        if two is None or not _are_as_good(kernel, two):
            return None
        form = two.early.listed(0)
        assert form is not None
        payload = len(samples) - len(inner.call.read)
        if any(i >= payload for i in two.early_reads):
            return None
        made, joined_number = Stored(self._values + self._next), self._values + self._next + 1
        self._next += 2
        columns = dict(zip(shared.inputs, shared.columns, strict=True))
        stored = Stored(shared.read.number)
        source = Picked(-1, stored, [columns[i] for i in two.early_reads])
        taken = inner.call.taken(inner.width)
        rest = [taken[i] for i in two.late_reads if i < payload]
        sources: list[AbstractValue] = [made]
        if rest:
            sources.append(Picked(-1, stage.source, rest))
        joined = SideBySide(joined_number, sources, "tuple")
        names = [inner.call.read[i - payload] for i in two.late_reads if i >= payload]
        call = replace(inner.call, take=None, dry_run=None)
        return HoistedModule(
            self._add(inner, two.early, replace(call, read=()), source, made, counts=False),
            self._add(inner, two.late, replace(call, read=tuple(names)), joined, stage.into),
            joined,
            form.forward.steps.work(1),
        )

    def _add(
        self,
        inner: Inner,
        kernel: AbstractKernel,
        call: Call,
        source: AbstractValue,
        into: Stored,
        *,
        counts: bool = True,
    ) -> CallStage:
        """One more module."""
        number = len(self._inner)
        own = Inner(inner.name, inner.place, call, kernel, None, inner.weights, source)
        own.counts = counts
        self._inner.append(own)
        self._kernels.add()
        return CallStage(number, source, into, pools=False)


def _are_as_good(kernel: AbstractKernel, two: Hoisted) -> bool:
    """Whether C can call both, and they tell rows apart if the kernel does."""
    both = two.early, two.late
    listed = all(each.listed(0) is not None for each in both)
    return listed and (not kernel.apart or all(each.apart for each in both))


def call_in_two(
    module: HoistedModule, shared: SharedRows, plan: LoopPlan, numbers: IntArray, rows: RowNumbers
) -> IntArray:
    """Put calls in the place of some of a plan.

    Args:
        module: Whose calls they are.
        shared: What their rows have in common.
        plan: It, whose rows and calls become more.
        numbers: Of the calls.
        rows: Theirs, call by call.

    Returns:
        int64 ``(calls + 1,)``, where each call is now that was one before, and where they end.
    """
    found = [plan.calls[number] for number in numbers.tolist()]
    plan.numbers.reach(module.joined.number + 1)
    read, first = shared.read.rows, shared.first
    made = plan.numbers.more(module.early.into.number, first.size)
    place = np.empty(plan.numbers.counts[shared.read.number], np.int64)
    own = read[first]
    place[own] = made
    sides = [place[read], rows.numbers][: len(module.joined.sources)]
    joined = plan.numbers.join(module.joined.number, sides)
    ends = np.cumsum([len(called.rows) for called in found])
    until = first.searchsorted(ends)
    early: list[tuple[int, Called]] = []
    late: list[tuple[int, Called]] = []
    begin = at = 0
    for called, number, end, next_ in zip(
        found, numbers.tolist(), ends.tolist(), until.tolist(), strict=True
    ):
        if next_ > at:
            new = RowNumbers(own[at:next_], rows.state[:, first[at:next_]])
            early.append((number, Called(module.early, new, int(made[at]))))
        mine = RowNumbers(joined[begin:end], called.rows.state)
        late.append((number, Called(module.late, mine, called.first)))
        begin, at = end, next_
    return _put_in_place(plan, early, late)


def _put_in_place(
    plan: LoopPlan, more: Sequence[tuple[int, Called]], instead: Sequence[tuple[int, Called]]
) -> IntArray:
    """Change the calls of a plan: some come before others, and some in the place of others.

    Returns:
        Where each is now, with those that have come before it, and where they end.
    """
    found = plan.calls
    for number, called in instead:
        found[number] = called
    sizes = np.ones(len(found) + 1, np.int64)
    sizes[[number for number, _ in more]] = 2
    now = np.cumsum(sizes) - sizes
    for number in reversed(range(len(found))):  # the first of calls is the last to be looked at
        together = found[number].together
        if together is not None and together.number == number:
            together.number = int(now[number])
    for number, called in reversed(more):
        found.insert(number, called)
    return now

"""Shares of a part whose firings nobody waits for, and which wait for nobody.

    step ─► the part's own weights ─► copied into a snapshot that no worker holds ─► published
    firing ─► its worker's twin of the module, moved to the latest snapshot

A snapshot is written to by nobody while a worker holds it. Staleness is exact: rows carry the
version of the snapshot, and are compared with the version at which they are settled. Tables whose
gradients are rows are not copied: their rows are read, and stepped, under a guard.

Source: read-copy-update, McKenney and Slingwine 1998.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from geartrain.frames.tables import guard_table
from geartrain.nodes.gradient import GradientSum
from geartrain.parts.part import PartState
from geartrain.sharing.locks import AbstractLock, MakeLock
from geartrain.sharing.share import AbstractShare, SharedPart


@final
@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The weights of a version, for workers to read.

    Args:
        version: Of the part.
        tensors: One for each of its parameters: a copy, or the table itself.
        copies: Those that are copies, by the parameters' places.
    """

    version: int
    tensors: tuple[Tensor, ...]
    copies: Mapping[int, Tensor]


@final
class SnapshotPart(SharedPart):
    """Steps publish snapshots.

    Args:
        part: The part.
        lock: Makes the locks.
        looks_up: Whether its kernels read tables in no other way than by ``look_up``; else they are
            guarded for a whole firing, once it has tables.
    """

    def __init__(self, part: PartState, lock: MakeLock, *, looks_up: bool) -> None:
        super().__init__(lock)
        self._part, self._looks_up = part, looks_up
        self._parameters = list(part.module.parameters())
        self.shares: Sequence[SnapshotShare] = ()
        self._all: list[dict[int, Tensor]] = []  # storage of copies: one for each worker, and two
        self.guards_all = False
        self.current: Snapshot = self._snapshot(part.version)

    def quiet(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def moving(self) -> Iterator[None]:
        part = self._part
        for parameter in part.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                # Firings under way that know it as no table read a copy, which nobody writes to.
                part.tables.add(parameter)
        with ExitStack() as stack:
            if part.tables:
                for share in self.shares:
                    stack.enter_context(share.tables)
            yield
        made = self._snapshot(part.version + 1)
        with self.counts:
            part.version = made.version
            self.current = made
            self.guards_all = bool(part.tables) and not self._looks_up

    def begin(self) -> None:
        self.guards_all = bool(self._part.tables) and not self._looks_up
        self.current = self._snapshot(self._part.version)
        for share in self.shares:
            share.begin()

    @torch.no_grad()
    def _snapshot(self, version: int) -> Snapshot:
        """The weights of now, in storage that no worker holds."""
        tables = self._part.tables
        with self.counts:
            held = [s.holds.copies for s in self.shares if s.holds is not None]
            if self._all:
                held.append(self.current.copies)
        places = {i: p.data for i, p in enumerate(self._parameters) if p not in tables}
        for copies in self._all:
            if not any(copies is x for x in held):
                break
        else:
            copies = {}
            self._all.append(copies)
        for i in copies.keys() - places.keys():
            del copies[i]
        for i, tensor in places.items():
            if i not in copies or copies[i].dtype != tensor.dtype:
                copies[i] = torch.empty_like(tensor)
        if places:
            torch._foreach_copy_([copies[i] for i in places], list(places.values()))
        tensors = tuple(copies.get(i, p.data) for i, p in enumerate(self._parameters))
        return Snapshot(version, tensors, copies)


@final
class SnapshotShare(AbstractShare):
    """A share whose firings nobody waits for.

    Its nodes have a module of their own, ``module``: a copy whose parameters are moved to the
    latest snapshot as a firing begins.

    Args:
        part, shared: As for every share.
        module: A twin of the part's.
        guard: Its own: held while its worker reads tables.
    """

    _shared: SnapshotPart

    def __init__(
        self, part: PartState, shared: SnapshotPart, module: nn.Module, guard: AbstractLock
    ) -> None:
        super().__init__(part, shared)
        self.tables = guard
        self.module = module
        self._leaves = list(self.module.parameters())
        self._original = dict(zip(self._leaves, part.module.parameters(), strict=True))
        self.gradient = GradientSum(self._leaves)
        self._settled = GradientSum(part.module.parameters())
        self.version = part.version
        self.holds: Snapshot | None = None  # written under the lock of counts
        self._guarding = False
        for leaf in self._leaves:
            guard_table(leaf, guard)

    def __enter__(self) -> None:
        shared = self._shared
        with shared.counts:
            before, self.holds = self.holds, shared.current
            guarding = shared.guards_all
        if guarding:
            self.tables.acquire()
            self._guarding = True
        if self.holds is not before:
            self.version = self.holds.version
            for leaf, tensor in zip(self._leaves, self.holds.tensors, strict=True):
                leaf.data = tensor
            # Copies in bfloat16 are made anew for what torch counts, and it does not count this.
            torch.autograd.graph.increment_version(self._leaves)

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        if self._guarding:
            self._guarding = False
            self.tables.release()
        if kind is None:
            self._end_firing()

    def _hand_in(self) -> None:
        self._settled.absorb(self.gradient, self._original)

    def begin(self) -> None:
        """A pass begins: take over what is not a weight."""
        for mine, other in zip(self.module.modules(), self._part.module.modules(), strict=True):
            mine.training = other.training
        for leaf, parameter in self._original.items():
            leaf.requires_grad_(parameter.requires_grad)

    def hand_over(self, into: GradientSum) -> None:
        into.absorb(self._settled)

    def sent(self, rows: int, version: int | None = None) -> None:
        seen = self.version if version is None else version
        self._counts.append(lambda: self._part.sent(rows, seen))

    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        raise AssertionError(f"part '{self.name}' has a node that keeps graphs")


def twin(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own, on the same storage, and the same buffers.

    Raises:
        TypeError, RuntimeError: Something in the module cannot be copied.
    """
    memo: dict[int, Any] = {id(b): b for b in module.buffers()}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(p.data, requires_grad=p.requires_grad)
    return copy.deepcopy(module, memo)

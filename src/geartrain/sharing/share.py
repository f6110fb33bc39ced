"""One part in many hands: every lane computes with the same weights and adds to a sum of its own.

    lane 0   look ─► firing ─► settle: sum, counts ┐
    lane 1      look ─► firing ─► settle           ├─► due? ─► one step, by whoever noticed
                                                   ┘             └─► snapshot of the new version

A lane is a worker that runs the whole graph for its own instances. Nothing travels between lanes;
they meet in the weights alone, and nobody waits for anybody. A firing looks at the weights once, at
its start: it gets the snapshot of the latest version, which is written to by nobody while a lane
holds it. What it adds and counts is settled at its end, in one go. A step moves the part's own
weights, copies them into a snapshot that no lane holds, and publishes it. Staleness is exact: rows
carry the version of the snapshot, and are compared with the version at which they are settled.

Tables whose gradients are rows are not copied: their rows are read, and stepped, under a guard.

Parts whose rules or nodes want more than that (a bound on staleness, modules that run again) are
guarded as a whole: a step waits for the firings that are under way, and they for it.

Source: asynchronous data parallelism in shared memory, as in Niu et al. 2011, arXiv:1106.5730, but
with the steps of a part one after the other, and no firing that sees half of one; snapshots as in
read-copy-update, McKenney and Slingwine 1998.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.message import IntArray
from geartrain.frames.tables import guard_table
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.weights import AbstractWeights, Sight
from geartrain.parts.late.views import Stashed
from geartrain.parts.part import PartState, StepTaken
from geartrain.parts.rules import Rules

log = logging.getLogger("geartrain.sharing")


class AbstractLock(Protocol):
    """What a runtime gives, ``threading.Lock`` or ``NoLock``: floors below it know no threads."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...


@final
class NoLock:
    """For a runtime of one thread."""

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        pass


class Share(AbstractWeights):
    """A part as one lane sees it; entered for each firing.

    What a firing adds and counts is settled at its end, in one go. Whoever completes an update by
    that takes its step at once, and whoever would complete the next one waits for it: so updates
    are as many as was asked for, however many lanes add.

    Args:
        part: The part, whose ``shares`` this becomes one of.
        meeting: Of all its shares.

    Attributes:
        gathers: Whether what is added is settled when so many instances of this lane have finished
            as make an update, and not before.
    """

    gathers = False

    def __init__(self, part: PartState, meeting: AbstractMeeting) -> None:
        self.name, self._part, self._meeting = part.name, part, meeting
        self.module = part.module
        self.wants_graph = part.wants_graph
        self.size, self.trigger = part.size, part.trigger
        self.copy, self.copies = part.copy, part.copies
        self._counts: list[Callable[[], None]] = []
        self._rows = self._messages = self._instances = 0  # that are not settled
        self._reserved = 0
        self._taken: StepTaken | None = None

    @property
    def guard(self) -> Share:
        """What a firing of the part enters."""
        return self

    @abstractmethod
    def __enter__(self) -> None: ...

    @abstractmethod
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...

    @abstractmethod
    def _hand_in(self) -> None:
        """Add the firing's gradient to what has been settled."""

    @abstractmethod
    def hand_over(self, into: GradientSum) -> None:
        """Add what has been settled to a sum."""

    def forget(self) -> None:
        """Drop what firings have added and not settled; none is under way."""
        self.gradient.forget()
        self._counts.clear()
        self._rows = self._messages = self._instances = self._reserved = 0
        self._meeting.reserved = 0
        self._taken = None

    @property
    def open(self) -> bool:
        return self._part.open

    @property
    def device(self) -> torch.device:
        return self._part.device

    @property
    def rules(self) -> Rules:
        return self._part.rules

    @property
    def once(self) -> bool:
        return self._part.once

    @property
    def lacking(self) -> int | None:
        """As of the part, less what firings under way are adding; where nothing is left of that,
        the next update begins."""
        lacking = self._part.lacking
        if lacking is None:
            return None
        left = lacking - self._meeting.reserved
        return left if left > 0 else self.trigger.n

    def reserve(self, units: int) -> None:
        """The next firing is going to add so much, in the unit of the trigger."""
        with self._meeting.counts:
            self._reserved += units
            self._meeting.reserved += units

    def heard(self, progress: int) -> None:
        """So many instances have finished in training."""
        self._meeting.progress = max(progress, self._meeting.progress)

    def finished(self, instances: int) -> None:
        """Instances have finished; called outside of any firing."""
        self._instances += instances
        if not self.gathers or self._instances == self.trigger.n:
            self._settle()

    def rest(self) -> StepTaken | None:
        """Nothing is in flight: settle what is left; a step that falls due by it."""
        self._settle()
        taken, self._taken = self._taken, None
        return taken

    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        self._add(rows, versions.size, lambda: self._part.received(rows, versions, lengths))

    def answered(self, rows: int, messages: int) -> None:
        seen = self.version
        self._add(rows, messages, lambda: self._part.answered(rows, messages, seen))

    def dropped(self, versions: IntArray) -> None:
        self._add(0, versions.size, lambda: self._part.dropped(versions))

    def _add(self, rows: int, messages: int, count: Callable[[], None]) -> None:
        self._rows += rows
        self._messages += messages
        self._counts.append(count)

    def _end_firing(self) -> None:
        """Settle what a firing has added and counted; no lock is held."""
        if not self.gathers and (self._counts or self._reserved):
            self._settle()

    def _settle(self) -> None:
        meeting, part = self._meeting, self._part
        added = self._rows, self._messages, self._instances
        with meeting.counts:
            if not any(added) or part.holding or not part.completes(*added):
                self._count()
                return
        with meeting.stepping:
            with meeting.counts:
                self._count()
            self._taken = self._step_if_due()

    def _count(self) -> None:
        self._meeting.reserved -= self._reserved
        if self._rows or self._messages:
            self._hand_in()
        for count in self._counts:
            count()
        self._part.finished(self._instances)
        self._counts.clear()
        self._rows = self._messages = self._instances = self._reserved = 0

    def _step_if_due(self) -> StepTaken | None:
        with self._meeting.quiet():
            return self._part.step_if_due(self._meeting.progress)

    def note_holding(self) -> bool | None:
        return None

    def step_if_due(self, progress: int) -> StepTaken | None:
        """The step that has been taken since the last call, or one that has been held till now."""
        self.heard(progress)
        taken, self._taken = self._taken, None
        # Another lane that steps just now will do; what is left over comes due with the next rows.
        if taken or not self._part.due() or not self._meeting.stepping.acquire(blocking=False):
            return taken
        try:
            return self._step_if_due()
        finally:
            self._meeting.stepping.release()

    def step(self, progress: int) -> StepTaken | None:
        with self._meeting.stepping, self._meeting.quiet():
            return self._part.step(progress)


@final
class GuardedShare(Share):
    """A share whose firings and steps wait for each other."""

    _meeting: Guarded

    def __init__(self, part: PartState, meeting: Guarded, lock: AbstractLock):
        super().__init__(part, meeting)
        self.lock = lock
        self.gradient = GradientSum(part.module.parameters())
        self._settled = GradientSum(part.module.parameters())

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self.lock.release()
        if kind is None:
            self._end_firing()

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._part.version

    def _hand_in(self) -> None:
        self._settled.absorb(self.gradient)

    def hand_over(self, into: GradientSum) -> None:
        into.absorb(self._settled)

    def forget(self) -> None:
        super().forget()
        self._settled.forget()

    # A step must know of every row that has seen the weights and is not settled, so that is told at
    # once.

    def sent(self, rows: int, version: int | None = None) -> None:
        with self._meeting.counts:
            self._part.sent(rows, version)

    def answered(self, rows: int, messages: int) -> None:
        self.sent(messages)
        versions = np.full(messages, self.version)
        super().answered(rows, messages)
        self._counts.append(lambda: self._part.returned(versions))

    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        with self._meeting.counts:
            return self._part.aliases()

    def compensated(
        self,
        sight: Sight,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        rows: int,
    ) -> Sequence[Tensor | None]:
        with self._meeting.counts:
            return self._part.compensated(sight, parameters, gradients, rows)

    def note_holding(self) -> bool | None:
        with self._meeting.counts:
            return self._part.note_holding()


@final
class FreeShare(Share):
    """A share whose firings nobody waits for.

    Its nodes have a module of their own, ``module``: a copy whose parameters are moved to the
    latest snapshot as a firing begins.

    Args:
        part, meeting: As for every share.
        module: A twin of the part's.
        guard: Its own: held while its lane reads tables.
    """

    _meeting: Free

    def __init__(
        self, part: PartState, meeting: Free, module: nn.Module, guard: AbstractLock
    ) -> None:
        super().__init__(part, meeting)
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
        meeting = self._meeting
        with meeting.counts:
            before, self.holds = self.holds, meeting.current
            guarding = meeting.guards_all
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


class AbstractMeeting(ABC):
    """How lanes and the steps of a part keep out of each other's way.

    Args:
        lock: Makes the locks.
    """

    def __init__(self, lock: Callable[[], AbstractLock]) -> None:
        self.counts = lock()
        """Held while the part counts rows."""
        self.stepping = lock()
        """Held by the one that steps."""
        self.progress = 0
        """Instances finished in training, as far as any lane has been told."""
        self.reserved = 0
        """What firings under way are adding, in the unit of the trigger; under the lock of
        counts."""

    @abstractmethod
    def quiet(self) -> AbstractContextManager[object]:
        """Around a whole step: while no lane may compute, if that is so."""

    def taking(self) -> AbstractContextManager[object]:
        """While sums and counts are taken from lanes."""
        return self.counts

    @abstractmethod
    def moving(self) -> AbstractContextManager[object]:
        """While the weights are written to; those of the next version are seen after it."""

    @abstractmethod
    def begin(self) -> None:
        """A pass begins: weights may have been written to meanwhile, and no lane computes."""


@final
class Guarded(AbstractMeeting):
    """Steps wait for firings, and firings for steps."""

    def __init__(self, lock: Callable[[], AbstractLock]) -> None:
        super().__init__(lock)
        self.shares: list[GuardedShare] = []

    @contextmanager
    def quiet(self) -> Iterator[None]:
        with ExitStack() as stack:
            for share in self.shares:
                stack.enter_context(share.lock)
            yield

    def moving(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self) -> None:
        pass


@final
@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The weights of a version, for lanes to read.

    Args:
        version: Of the part.
        tensors: One for each of its parameters: a copy, or the table itself.
        copies: Those that are copies, by the parameters' places.
    """

    version: int
    tensors: tuple[Tensor, ...]
    copies: Mapping[int, Tensor]


@final
class Free(AbstractMeeting):
    """Steps publish snapshots.

    Args:
        part: The part.
        lock: Makes the locks.
        looks_up: Whether its kernels read tables in no other way than by ``look_up``; else they are
            guarded for a whole firing, once it has tables.
    """

    def __init__(
        self, part: PartState, lock: Callable[[], AbstractLock], *, looks_up: bool
    ) -> None:
        super().__init__(lock)
        self._part, self._looks_up = part, looks_up
        self._parameters = list(part.module.parameters())
        self.shares: list[FreeShare] = []
        self._all: list[dict[int, Tensor]] = []  # storage of copies: one for each lane, and two
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
        """The weights of now, in storage that no lane holds."""
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


def twin(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own, on the same storage, and the same buffers.

    Raises:
        TypeError, RuntimeError: Something in the module cannot be copied.
    """
    memo: dict[int, Any] = {id(b): b for b in module.buffers()}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(p.data, requires_grad=p.requires_grad)
    return copy.deepcopy(module, memo)


def _twins(part: PartState, lanes: int) -> list[nn.Module] | None:
    """A twin for each lane; None where the module holds what cannot be copied."""
    try:
        return [twin(part.module) for _ in range(lanes)]
    except (TypeError, RuntimeError) as error:
        log.debug("part '%s' is guarded in lanes: %s", part.name, error)
        return None


def share(
    part: PartState,
    lanes: int,
    lock: Callable[[], AbstractLock],
    *,
    free: bool = False,
    looks_up: bool = False,
) -> list[Share]:
    """So many views of a part, in place of those that it had; what those had added stays.

    Args:
        part, lanes: The part, and how many.
        lock: Makes a lock.
        free: Whether all its nodes have kernels that read weights from their module at each call.
        looks_up: As for ``Free``.

    Raises:
        ValueError: The part's view writes leaves that lanes would read at the same time.
    """
    if not isinstance(part.view, Stashed):
        raise ValueError(
            f"part '{part.name}': lanes=True and view={part.view} do not go together: lanes see "
            "the weights of a part at the same time; use view=Stashed(), or no lanes"
        )
    part.absorb_shares()
    twins = _twins(part, lanes) if free and part.may_be_seen_by_version else None
    if twins is not None:
        open_to = Free(part, lock, looks_up=looks_up)
        open_to.shares = [FreeShare(part, open_to, module, lock()) for module in twins]
        part.meeting, part.shares = open_to, open_to.shares
        return [*open_to.shares]
    guarded = Guarded(lock)
    guarded.shares = [GuardedShare(part, guarded, lock()) for _ in range(lanes)]
    part.meeting, part.shares = guarded, guarded.shares
    return [*guarded.shares]

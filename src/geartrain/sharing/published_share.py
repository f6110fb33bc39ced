"""One worker's share of a part whose owner, another worker or this one, steps and publishes.

firings ─► gathered until it makes an update ─► a letter to the owner ─► a step
newer weights ◄──────────────────────────────── a letter to all others ◄──┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.message import IntArray, join_arrays
from geartrain.nodes.gradient import GradientSum
from geartrain.parts.counting import Counting
from geartrain.parts.ownership import Gradients, Ownership
from geartrain.parts.part import PartState
from geartrain.parts.trained import StepTaken
from geartrain.sharing.arrivals import (
    FLOOR,
    GRADIENT,
    WEIGHTS,
    handed_in,
    published,
    require_kind,
    told_floor,
)
from geartrain.sharing.floor import Floor
from geartrain.sharing.letters import Letter, Tensors, tensor_bytes
from geartrain.sharing.worker_share import WorkerShare


@final
class Publishing(Ownership):
    """The owner's: what a step has changed is sent to all others."""

    def __init__(self, share: PublishedShare) -> None:
        self._share = share

    def stepped(self, gradients: Gradients) -> None:
        self._share.publish(gradients)


class PublishedShare(WorkerShare):
    """A part as one worker has it.

    Args:
        part: The part, or in a worker that does not own it what it is made like.
        copy: Number of the worker.
        owner: That of the worker that steps it.
        copies: Workers.
        works: Whether this process is that worker; else the share only stands there.
    """

    def __init__(self, part: PartState, copy: int, owner: int, copies: int, *, works: bool) -> None:
        super().__init__(part)
        self._me, self._owner = copy, owner
        self._others = [k for k in range(copies) if k != owner]
        if works and copy != owner:
            self.module = _own(part.module)
        self.parameters = list(self.module.parameters())
        self._theirs = list(part.module.parameters())
        self.gradient = GradientSum(self.parameters)
        self.version = part.version
        self.progress = 0
        self._local = Counting(part.trigger, None, ages_of_steps=False)
        self._local.once = part.once
        self._versions: list[IntArray] = []
        self._lengths: list[IntArray] = []
        self._steps: list[StepTaken] = []
        self.outbox: list[Letter] = []
        self._news: list[Gradients] = []  # of the owner's steps that others do not know of
        self._mail: list[Letter] = []
        window, bounded = part.rules.window, part.rules.max_staleness is not None
        self._window = None if window is None else window // copies + (copy < window % copies)
        self._floor = Floor(self.version) if bounded else None
        self._floors = dict.fromkeys(self._others, self.version)  # as told, where this one owns it

    def bound_steps(self) -> None:
        """Steps of the part go by what workers tell, if staleness is bounded."""
        if self._floor is not None:
            self._part.counting.oldest_elsewhere = self._oldest

    def _oldest(self) -> int:
        assert self._floor is not None
        return min(self._floor.at(self.version), *self._floors.values())

    # What it is.

    @property
    def owns(self) -> bool:
        return self._me == self._owner

    @property
    def _settles(self) -> bool:
        """Whether what it hands in is settled by itself."""
        return self.owns

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        if kind is None:
            self._hand_in_if_whole()

    @property
    def once(self) -> bool:  # type: ignore[override]
        return self._local.once

    @property
    def open(self) -> bool:
        return self._window is None or self.outstanding < self._window

    @property
    def outstanding(self) -> int:
        return self._local.outstanding

    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        if not self.owns:
            raise AssertionError(f"part '{self.name}' has a node that keeps graphs")
        return self._part.aliases()

    # What its worker asks and tells.

    @property
    def lacking(self) -> int | None:
        return self._local.lacking

    def in_cohorts(
        self,
        ahead: Callable[[int], int] | None,
        updates: Callable[[IntArray], IntArray | None] | None,
    ) -> None:
        # Each worker has cohorts of its own, and none waits for another.
        pass

    def heard(self, progress: int) -> None:
        self.progress = max(self.progress, progress)

    def finished(self, instances: int) -> None:
        self._local.finished(instances)
        self._hand_in_if_whole()

    def sent(self, rows: int, version: int | None = None) -> None:
        self._local.sent(rows, self.version)
        if self._floor is not None:
            self._floor.leave(self.version, rows)

    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        self._local.added(rows, versions.size)
        self._local.returned(versions)
        each = np.ones(versions.size, np.int64) if lengths is None else lengths
        self._note(versions, each, left=True)

    def answered(self, rows: int, messages: int) -> None:
        self._local.added(rows, messages)
        lengths = np.zeros(messages, np.int64)
        lengths[:1] = rows
        self._note(np.full(messages, self.version, np.int64), lengths, left=False)

    def dropped(self, versions: IntArray) -> None:
        self._local.dropped(versions)
        self._note(versions, np.zeros(versions.size, np.int64), left=True)

    def step_if_due(self, progress: int) -> StepTaken | None:
        """The step that has been taken since the last call."""
        self.heard(progress)
        return self._steps.pop(0) if self._steps else None

    def step(self, progress: int) -> StepTaken | None:
        return self._part.step(progress)

    def rest(self) -> StepTaken | None:
        """Nothing is in flight: hand in what is left of an update."""
        self._hand_in()
        self._go_by_floors()
        return self.step_if_due(self.progress)

    def note_holding(self) -> bool | None:
        return self._part.note_holding() if self.owns else None

    def leave_pass(self) -> None:
        """The pass is over in this process."""

    # What its worker carries.

    @property
    def ready(self) -> bool:
        return bool(self._mail)

    def receive(self, letter: Letter) -> None:
        self._mail.append(letter)

    def take(self) -> list[Letter]:
        """Take the letters that wait; returns them.

        Raises:
            TransportError: One does not fit the part, or is of a version that there is not.
        """
        letters, self._mail = self._mail, []
        for letter in letters:
            require_kind(letter, (GRADIENT, FLOOR) if self.owns else (WEIGHTS,))
            if letter.kind == WEIGHTS:
                self._renew(letter)
            elif letter.kind == FLOOR:
                self._floors[letter.sender] = told_floor(letter, self._part.version)
            else:
                newest = self._part.version
                tensors, versions, lengths = handed_in(letter, self._theirs, newest)
                self.heard(letter.progress or 0)
                self._settle(tensors, versions, lengths, letter.round)
        if self._floor is not None:
            self._hand_in_if_whole()
        return letters

    def take_steps(self) -> list[StepTaken]:
        steps, self._steps = self._steps, []
        return steps

    def take_letters(self) -> list[Letter]:
        """What there is to send. Tensors of letters are lent: until this worker's next firing."""
        if self._news:
            self._publish()
        letters, self.outbox = self.outbox, []
        return letters

    def publish(self, gradients: Gradients) -> None:
        """The owner has stepped with these; what has become of the weights is sent with the next
        letters, once for however many steps there are until then."""
        stepped = dict(zip(self._part.parameters, gradients, strict=True))
        self._news.append([stepped.get(p) for p in self._theirs])

    @torch.no_grad()
    def _publish(self) -> None:
        each = zip(self._theirs, *self._news, strict=True)
        tensors = tuple(_changed(p, gradients) for p, *gradients in each)
        self._news = []
        self.version = self._part.version
        for k in self._others:
            self._post(WEIGHTS, k, tensors, version=self.version)

    # Updates.

    def _note(self, versions: IntArray, lengths: IntArray, *, left: bool) -> None:
        self._versions.append(versions)
        self._lengths.append(lengths)
        if self._floor is not None:
            self._floor.gather(versions, left=left)

    def _hand_in_if_whole(self) -> None:
        # Where staleness is bounded, what is older than the weights of now would hold up a step.
        held_up = self._floor is not None and self._floor.holds_up(self.version)
        if held_up or self._local.due(self.version):
            self._hand_in()
        self._go_by_floors()

    def _go_by_floors(self) -> None:
        """Tell the owner how old rows of this worker are; or take the step that waited for it."""
        if self._floor is None:
            return
        if self.owns:
            self._step()
        elif (floor := self._floor.news(self.version)) is not None:
            self._post(FLOOR, self._owner, (), version=floor)

    def _step(self) -> None:
        """The owner takes a step if it is due."""
        self.gradient.settle()
        taken = self._part.step_if_due(self.progress)
        self.version = self._part.version
        if taken is not None:
            self._steps.append(taken)

    def _hand_in(self) -> None:
        """What has been gathered goes to the owner."""
        local = self._local
        if not (self._versions or local.instances):
            return
        instances = 0 if local.once else local.instances
        none = np.zeros(0, np.int64)
        versions = join_arrays(self._versions or [none])
        lengths = join_arrays(self._lengths or [none])
        self._versions, self._lengths = [], []
        if self._floor is not None:
            self._floor.hand_in()
        local.take(self.rules.average, flush=not self.trigger.due(local))
        if self._settles:
            self._settle_own(versions, lengths, instances)
            return
        content = (
            *(self.gradient.take(p) for p in self.parameters),
            torch.from_numpy(versions),
            torch.from_numpy(lengths),
        )
        self._post(GRADIENT, self._owner, content, count=instances, progress=self.progress)

    def _settle_own(self, versions: IntArray, lengths: IntArray, instances: int) -> None:
        """The same with what this worker has gathered."""
        self._part.gradient.absorb(self.gradient)
        self._settle((), versions, lengths, instances)

    def _settle(
        self, tensors: Tensors, versions: IntArray, lengths: IntArray, instances: int
    ) -> None:
        """The owner adds an update, or what is left of one, to the part, and steps if it is due.

        Args:
            tensors: The gradient; empty: it has been added.
            versions, lengths: That its messages saw, and their rows.
            instances: That it is of.
        """
        part = self._part
        for parameter, gradient in zip(self._theirs, tensors, strict=bool(tensors)):
            if gradient is not None:
                part.gradient.add(parameter, gradient)
        if self._floor is None:  # nobody asks which versions are on their way
            part.sent(versions.size)
        else:
            for version, messages in zip(*np.unique(versions, return_counts=True), strict=True):
                part.sent(int(messages), int(version))
        part.received(int(lengths.sum()), versions, lengths)
        part.finished(instances)
        self._step()

    @torch.no_grad()
    def _renew(self, letter: Letter) -> None:
        """Another version of the weights has come."""
        self.gradient.settle()
        tensors = published(letter, self.parameters)
        self.version = letter.version
        for mine, tensor in zip(self.parameters, tensors, strict=True):
            if tensor is None:
                continue
            if tensor.is_sparse:
                mine.data[tensor._indices()[0]] = tensor._values()
            else:
                mine.data = tensor
        # Copies in bfloat16 are made anew for what torch counts, and it does not count this.
        torch.autograd.graph.increment_version(self.parameters)

    def _post(
        self,
        kind: str,
        to: int,
        tensors: tuple[Tensor | None, ...],
        *,
        version: int = 0,
        count: int = 0,
        progress: int | None = None,
    ) -> None:
        self.outbox.append(
            Letter(
                *(self.name, self._me, to, kind, tensors),
                version=version,
                round=count,
                nbytes=tensor_bytes(tensors),
                progress=progress,
            )
        )


def _own(module: nn.Module) -> nn.Module:
    """The module with weights of its own, which are those of now, and the same buffers.

    It is the module itself: in this process nobody else has it.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module


def _changed(parameter: nn.Parameter, gradients: Gradients) -> Tensor | None:
    """What steps with these gradients have made of a parameter; None: nothing."""
    there = [g for g in gradients if g is not None]
    if not there:
        return None
    if not all(g.is_sparse for g in there):
        return parameter.detach()
    rows = torch.cat([g._indices()[0] for g in there])
    if len(there) > 1 or not there[0].is_coalesced():
        rows = torch.unique(rows)
    return torch.sparse_coo_tensor(
        rows[None], parameter.detach()[rows], parameter.shape, check_invariants=False
    )

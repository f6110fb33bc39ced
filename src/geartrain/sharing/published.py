"""Shared weights between processes: who has gathered an update steps, or the owner of the part.

    worker 0   its instances ─► gathers an update ─┐
    worker 1   its instances ─► gathers an update ─┴─► one step after the other ─► the next version
                    ▲                                                                    │
                    └────────────────────────────────────────────────────────────────────┘

Every worker runs the whole graph for its own instances, with weights that are those of the last
version that has reached it; nobody waits for newer ones. A worker gathers until what it has alone
makes an update, as the part's rules say: so updates are as many as was asked for. Staleness is
exact: gradients carry the versions that they saw. How steps and weights meet:

    stepped           weights lie in memory that all have, and so does what the optimiser remembers:
                      whoever has an update steps under a lock, and others copy the weights
    published_share   an owner steps each part; gradients travel to it and weights back, by letter:
                      between hosts, in an optimiser's first pass, and where rules want to know more
                      than a worker can by itself. Of a table whose gradient is rows, rows travel. A
                      bound on staleness holds steps, by what workers tell of their oldest rows
                      (``floor``); a window is shared out among them.

Source: the second is the parameter server of Dean et al. 2012, "Large scale distributed deep
networks", here one server a part, among the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from geartrain.graph.through import Through
from geartrain.parts.part import PartState
from geartrain.parts.trained import StepTaken
from geartrain.sharing.assignment import AbstractAssignment, Balanced, Stocked
from geartrain.sharing.communicator import AbstractCommunicator, Taken
from geartrain.sharing.letters import Letter
from geartrain.sharing.locks import AbstractLock
from geartrain.sharing.published_share import PublishedShare, Publishing
from geartrain.sharing.sharing import AbstractSharingState
from geartrain.sharing.stepped import SteppedShare, may_be_stepped_by_all


@final
class PublishedState(AbstractSharingState):
    """Shares of all parts, on workers that have no memory in common.

    Args:
        parts: By name.
        workers: How many share them.
        each: Whether limits on instances in flight hold for each worker.

    Raises:
        ValueError: The rules of a part want what its owner cannot know.
    """

    name = "shared weights"
    apart = True
    talks = True
    by_letters = True

    def __init__(self, parts: Mapping[str, PartState], workers: int, *, each: bool = False) -> None:
        super().__init__()
        self.parts, self.copies, self._each = parts, workers, each
        for part in parts.values():
            _require_known(part, workers)
        self._owners = _owners(parts, workers)
        self._worker: int | None = None
        self._lock: Callable[[int], AbstractLock] | None = None
        self._versions = torch.zeros(len(parts), dtype=torch.int64)  # what all workers see
        self._shares: dict[str, list[PublishedShare]] = {}

    def in_common(self) -> Sequence[Tensor]:
        versions = [part.version for part in self.parts.values()]
        self._versions.copy_(torch.tensor(versions, dtype=torch.int64))
        return [self._versions]

    def live_on(
        self,
        worker: int,
        workers: int,
        *,
        in_common: bool,
        lock: Callable[[int], AbstractLock] | None = None,
    ) -> None:
        self._worker, self._lock = worker, lock if in_common else None

    def leave_pass(self) -> None:
        for shares in self._shares.values():
            for share in shares:
                share.leave_pass()

    def weights(self, name: str, nodes: Sequence[Through]) -> Sequence[PublishedShare]:
        part, owner, me = self.parts[name], self._owners[name], self._worker
        stepped = None
        if me is not None and self._lock is not None and may_be_stepped_by_all(part, nodes):
            number = [*self.parts].index(name)
            board = self._versions.numpy()[number : number + 1]
            stepped = SteppedShare(
                *(part, me, owner, self.copies), lock=self._lock(number), board=board
            )
        shares = [
            stepped
            if stepped is not None and k == me
            else PublishedShare(part, k, owner, self.copies, works=k == me)
            for k in range(self.copies)
        ]
        if stepped is None and me == owner:
            part.ownership = Publishing(shares[owner])
            shares[owner].bound_steps()
        self._shares[name] = shares
        return shares

    def keeps(self, worker: int, part: str) -> bool:
        return self._owners[part] == worker

    def assignment(self) -> AbstractAssignment:
        return Stocked(self.copies) if self._each else Balanced(self.copies)

    def communicator(self, parts: Collection[str]) -> AbstractCommunicator:
        if self._worker is None:
            return Post({})
        return Post({name: self._shares[name][self._worker] for name in parts})


def _owners(parts: Mapping[str, PartState], workers: int) -> dict[str, int]:
    """The worker that steps each part: large ones are spread first."""
    load = [0] * workers
    owners: dict[str, int] = {}
    for part in sorted(parts.values(), key=lambda p: (-p.size, p.name)):
        owner = load.index(min(load))
        owners[part.name] = owner
        load[owner] += part.size + 1
    return owners


def _require_known(part: PartState, workers: int) -> None:
    """The owner of a part knows how old each gradient of a step is; workers, their own rows."""
    rules, view, name = part.rules, part.view, f"part '{part.name}'"
    if rules.max_staleness == 0:
        raise ValueError(
            f"{name}: max_staleness=0 wants that nobody computes while a step is taken, and with "
            "shared weights between processes nobody waits for anybody: give 1 or more, "
            "or use runtime=gt.Threads(...)"
        )
    if rules.window is not None and rules.window < workers:
        raise ValueError(
            f"{name}: window={rules.window} is shared out among {workers} processes that share the "
            f"weights, and each wants at least one message of it: give {workers} or more, or use "
            "runtime=gt.Threads(...)"
        )
    wanted = ""
    if rules.delay is not None and rules.delay.start(part.parameters) is not None:
        wanted = f"delay={rules.delay}"
    elif view.wants_delays or not view.may_be_shared:
        wanted = f"view={view}"
    if wanted:
        raise ValueError(
            f"{name}: its rule {wanted} wants the weights that each row has seen, and of shared "
            "weights the newest are known alone: leave the rule out (those that scale a step by "
            "the age of its gradients are possible, such as ScaledByStaleness()), or leave out "
            "sharing, so that parts live on a worker each"
        )


@final
class Post(AbstractCommunicator):
    """Of the shares of one worker.

    Args:
        shares: By name of the part.
    """

    may_wait = False

    def __init__(self, shares: Mapping[str, PublishedShare]) -> None:
        self._shares = shares
        self._mail: dict[str, None] = {}

    @property
    def ready(self) -> bool:
        return bool(self._mail)

    def waits(self, part: str | None) -> bool:
        return False

    def receive(self, letter: Letter) -> None:
        self._shares[letter.part].receive(letter)
        self._mail[letter.part] = None

    def take(self) -> Taken | None:
        if not self._mail:
            return None
        name = next(iter(self._mail))
        del self._mail[name]
        return Taken(name, self._shares[name].take())

    def take_letters(self, part: str | None = None) -> list[Letter]:
        if part is not None:
            return self._shares[part].take_letters()
        return [x for share in self._shares.values() for x in share.take_letters()]

    def take_steps(self, part: str | None = None) -> list[StepTaken]:
        if part is not None:
            return self._shares[part].take_steps()
        return [x for share in self._shares.values() for x in share.take_steps()]

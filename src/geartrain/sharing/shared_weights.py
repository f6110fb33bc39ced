"""Every worker runs the whole graph for its own instances, all with the same weights.

    worker 0   a copy of every node ─┐
    worker 1   a copy of every node ─┴─► shares of every part ─► one set of weights

Nothing travels between workers; they meet in the weights alone. An instance goes to the worker that
has the fewest. Parts are seen by snapshots, and nobody waits for anybody; those whose rules or
nodes want more than that (a bound on staleness, modules that run again) are guarded as a whole.

Source: asynchronous data parallelism in shared memory, as in Niu et al. 2011, arXiv:1106.5730, but
with the steps of a part one after the other, and no firing that sees half of one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from torch import nn

from geartrain.graph.graph import Graph
from geartrain.graph.through import Through
from geartrain.parts.part import PartState
from geartrain.sharing.alone import AloneState
from geartrain.sharing.assignment import AbstractAssignment, Balanced, Stocked
from geartrain.sharing.guarded import GuardedPart, GuardedShare
from geartrain.sharing.locks import MakeLock, NoLock
from geartrain.sharing.published import PublishedState
from geartrain.sharing.share import AbstractShare
from geartrain.sharing.sharing import AbstractSharing, AbstractSharingState
from geartrain.sharing.snapshots import SnapshotPart, SnapshotShare, twin

log = logging.getLogger("geartrain.sharing")


@final
@dataclass(frozen=True, slots=True)
class SharedWeights(AbstractSharing):
    """Every worker runs the whole graph for its own instances, all with the same weights.

    Args:
        in_flight: What ``max_active`` counts: ``all`` instances of all workers together, or those
            of ``each`` worker. With ``all`` a worker's firings have as many rows fewer as there are
            workers; with ``each`` they are as full as those of one worker, and about so many times
            more updates pass while a row is on its way. Updates are of as many rows in either case.

    Raises:
        ValueError: ``in_flight`` is neither.
        ValueError: From ``Session``: a module keeps autograd's graph, or a part has a view that
            writes what others read.
    """

    in_flight: Literal["all", "each"] = "all"

    def __post_init__(self) -> None:
        if self.in_flight not in ("all", "each"):
            raise ValueError(
                f"SharedWeights(in_flight={self.in_flight!r}): give 'all', so that max_active "
                "counts the instances of all workers together, or 'each'"
            )

    @property
    def may_drain(self) -> bool:
        return self.in_flight == "all"

    def make(
        self,
        graph: Graph,
        parts: Mapping[str, PartState],
        workers: int = 1,
        lock: MakeLock | None = NoLock,
    ) -> AbstractSharingState:
        graphs = [t.name for t in graph.throughs() if t.keep == "graph" and t.parameters]
        if graphs:
            raise ValueError(
                f"sharing={self} and keep='graph' of {graphs} do not go together: a module that "
                "keeps autograd's graph runs in one thread at a time; leave out sharing, and parts "
                "are spread over the workers"
            )
        if workers == 1:
            return AloneState(parts)
        each = self.in_flight == "each"
        if lock is None:
            return PublishedState(parts, workers, each=each)
        return SharedWeightsState(parts, workers, lock, each=each)


@final
class SharedWeightsState(AbstractSharingState):
    """Shares of all parts.

    Args:
        parts: By name.
        workers: How many share them.
        lock: Makes a lock between them.
        each: Whether limits on instances in flight hold for each worker.
    """

    name = "shared weights"
    apart = True
    by_letters = False

    def __init__(
        self, parts: Mapping[str, PartState], workers: int, lock: MakeLock, *, each: bool = False
    ) -> None:
        super().__init__()
        self.parts, self.copies, self._lock = parts, workers, lock
        self._each = each

    def weights(self, name: str, nodes: Sequence[Through]) -> Sequence[AbstractShare]:
        kernels = [node.written_kernel() for node in nodes]
        return share(
            self.parts[name],
            self.copies,
            self._lock,
            free=None not in kernels,
            looks_up=all(k is not None and k.looks_up for k in kernels),
        )

    def assignment(self) -> AbstractAssignment:
        return Stocked(self.copies) if self._each else Balanced(self.copies)


def share(
    part: PartState,
    workers: int,
    lock: MakeLock,
    *,
    free: bool = False,
    looks_up: bool = False,
) -> Sequence[AbstractShare]:
    """So many shares of a part, in place of those that it had; what those had added stays.

    Args:
        part, workers: The part, and how many.
        lock: Makes a lock.
        free: Whether all its nodes have kernels that read weights from their module at each call.
        looks_up: As for ``SnapshotPart``.

    Raises:
        ValueError: The part's view writes leaves that workers would read at the same time.
    """
    if not part.view.may_be_shared:
        raise ValueError(
            f"part '{part.name}': sharing=SharedWeights() and view={part.view} do not go together: "
            "workers see the weights of a part at the same time; use view=Stashed(), or leave out "
            "sharing"
        )
    part.collect()
    twins = _twins(part, workers) if free and part.may_be_seen_by_version else None
    if twins is not None:
        seen = SnapshotPart(part, lock, looks_up=looks_up)
        seen.shares = [SnapshotShare(part, seen, module, lock()) for module in twins]
        part.ownership = seen
        return seen.shares
    guarded = GuardedPart(lock)
    guarded.shares = [GuardedShare(part, guarded, lock()) for _ in range(workers)]
    part.ownership = guarded
    return guarded.shares


def _twins(part: PartState, workers: int) -> list[nn.Module] | None:
    """A twin of the module for each worker; None where it holds what cannot be copied."""
    try:
        return [twin(part.module) for _ in range(workers)]
    except (TypeError, RuntimeError) as error:
        log.debug("part '%s' is guarded: %s", part.name, error)
        return None

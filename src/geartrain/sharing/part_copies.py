"""Copies of single parts, each on a worker of its own: the bottleneck of a graph in many hands.

    part a ─┬─► part b    worker 0          rows choose a copy by their instance; copies meet
            └─► part b#1  worker 1          when nothing is in flight, and become their mean

The module in the graph is the first copy. A node without weights has as many copies as those that
write to it, so a part pulls its structure along.

Source: replicas averaged once an epoch, Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

from geartrain.bounds import COPIES, MOST_COPIES, require_at_most, require_whole
from geartrain.graph.graph import Graph
from geartrain.graph.through import Through
from geartrain.graph.wiring import copy_name
from geartrain.kinds import require_entries
from geartrain.nodes.hooks import copied_with_hooks
from geartrain.parts.norms import share_norms
from geartrain.parts.part import PartState
from geartrain.sharing.assignment import AbstractAssignment, Together
from geartrain.sharing.locks import MakeLock, NoLock
from geartrain.sharing.mixer import AbstractMixer, Average
from geartrain.sharing.sharing import AbstractSharing, AbstractSharingState


@final
@dataclass(frozen=True, slots=True)
class PartCopies(AbstractSharing):
    """Copies of some parts on different workers, each with its own optimiser.

    Args:
        copies: How many, by the part's name; or a number, for every part.
        mixer: When and how the copies of a part meet.

    Raises:
        ValueError: A number is not positive or too large; from ``Session`` also: there is no such
            part, or its view goes by all instances, of which a copy has a share.
    """

    spreads: ClassVar[bool] = True

    copies: Mapping[str, int] | int = 2
    mixer: AbstractMixer = field(default_factory=Average)

    def __post_init__(self) -> None:
        copies = self.copies
        if isinstance(copies, Mapping):
            wanted = "1 or more for every part, or for some by name: {'cell': 2}"
            require_entries("PartCopies", str, object, wanted, copies=copies)
        for n in copies.values() if isinstance(copies, Mapping) else (copies,):
            wanted = "1 or more for every part, or for some by name: {'cell': 2}"
            require_whole(f"PartCopies({copies!r:.80})", n, 1, wanted)
            require_at_most(f"PartCopies({copies!r:.80})", n, MOST_COPIES, COPIES)
        if not isinstance(self.mixer, AbstractMixer):
            raise TypeError(
                f"PartCopies(mixer={self.mixer!r:.80}): give a mixer: Average(every=50)"
            )

    def make(
        self,
        graph: Graph,
        parts: Mapping[str, PartState],
        workers: int = 1,
        lock: MakeLock | None = NoLock,
    ) -> AbstractSharingState:
        copies = self.copies
        given = dict.fromkeys(parts, copies) if not isinstance(copies, Mapping) else dict(copies)
        if foreign := sorted(given.keys() - parts.keys()):
            raise ValueError(f"PartCopies names {foreign}; the graph has parts {sorted(parts)}")
        return PartCopiesState(
            {name: _copies(part, given.get(name, 1)) for name, part in parts.items()}, self.mixer
        )


def _copies(part: PartState, n: int) -> list[PartState]:
    """A part and its copies."""
    if n > 1 and part.view.counts_instances:
        raise ValueError(
            f"part '{part.name}': {n} copies and view={part.view} do not go together: a copy does "
            "not see every instance, so it cannot tell an update's; use another view, or one copy"
        )
    others = [
        PartState(
            copy_name(part.name, k), copied_with_hooks(part.module), part.rules, copy=k, copies=n
        )
        for k in range(1, n)
    ]
    part.copies = n
    return [part, *others]


@final
class PartCopiesState(AbstractSharingState):
    """Parts and their copies at work.

    Args:
        groups: By name of the part, the part and its copies.
        mixer: When and how they meet.
    """

    def __init__(self, groups: Mapping[str, Sequence[PartState]], mixer: AbstractMixer) -> None:
        super().__init__()
        self.groups, self._mixer = groups, mixer
        self.parts = {part.name: part for group in groups.values() for part in group}
        share_norms(self.parts)

    def weights(self, name: str, nodes: Sequence[Through]) -> Sequence[PartState]:
        return self.groups[name]

    def assignment(self) -> AbstractAssignment:
        return Together()

    def meet(self, since: int, trained: int, *, now: bool) -> None:
        every = self._mixer.every
        if now or (every is not None and trained // every > since // every):
            for group in self.groups.values():
                if len(group) > 1:
                    for part in group:
                        part.gradient.settle()
                    self._mixer.mix(group)

    def until_meeting(self, trained: int) -> int | None:
        every = self._mixer.every
        some = any(len(group) > 1 for group in self.groups.values())
        return every - trained % every if some and every is not None else None

"""Letters between copies of a part, where they wait, and what is counted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final, Literal, TypeAlias, final

import torch
from torch import Tensor

from geartrain.bounds import require_whole

Tensors: TypeAlias = Sequence[Tensor | None]
"""One entry a parameter of the part (``Member.parameters``), dense or sparse COO; None: none."""

SHARE: Final = "share"
"""Kind of what a copy gives to a collective in another process: carried, and counted by nobody."""

Full: TypeAlias = Literal["drop", "merge"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    """What one copy of a part sends to another.

    Args:
        part: The part, without the number of a copy.
        sender, receiver: Numbers of the copies.
        kind: What the exchange calls it: ``gradient``, ``weights``, ...
        tensors: Copies, which nobody writes to; of weights that are shared by letters, lent by
            the sender until its next firing, as a letter between processes is written at once.
        version: The sender's version when it was sent.
        round: Own gradients of the sender until then.
        weight: A number that goes with the tensors.
        seen: The receiver's version when it was sent.
        nbytes: Bytes on the link.
        hops: Latencies that it takes: 1, or those of a collective, which its receiver is charged.
        collective: Whether it is the result of one.
        count: Letters that were merged into this one, itself included.
        progress: Of a collective: instances trained, which schedules go by, equal for all.
    """

    part: str
    sender: int
    receiver: int
    kind: str
    tensors: tuple[Tensor | None, ...]
    version: int = 0
    round: int = 0
    weight: float = 1.0
    seen: int = 0
    nbytes: int = 0
    hops: int = 1
    collective: bool = False
    count: int = 1
    progress: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Inbox:
    """How many letters of one sender may wait at a copy, and what becomes of more.

    Args:
        limit: Letters of one sender.
        full: ``drop`` the oldest of that sender, or ``merge`` the new one into the newest by adding
            tensors and weights. Both are counted. Letters whose kind is not among the exchange's
            ``bounded`` are always kept: its own rules bound them.

    Raises:
        ValueError: Other values.
    """

    limit: int = 4
    full: Full = "drop"

    def __post_init__(self) -> None:
        require_whole(f"Inbox(limit={self.limit!r})", self.limit, 1)
        if self.full not in ("drop", "merge"):
            raise ValueError(f"Inbox(full={self.full!r}): give 'drop' or 'merge'")


@final
@dataclass(slots=True)
class Ledger:
    """What a copy of a part has sent and what became of what came; letters that were merged count.

    Between segments ``came == applied + dropped`` for every copy, and over all copies
    ``sent == came + lost``; ``merged`` of those applied came in company.

    ``meetings`` says how often the copy's weights were mixed with others': a pair that meets counts
    it twice, once each. Exchanges of gradients have none.
    """

    rounds: int = 0  # own gradients
    sent: int = 0
    bytes: int = 0
    came: int = 0
    applied: int = 0
    merged: int = 0
    dropped: int = 0
    lost: int = 0  # of those sent: the receiver was absent
    meetings: int = 0
    declined: int = 0  # of those sent: what the receiver did not take up
    staleness: dict[int, int] = field(default_factory=dict)  # versions passed under way -> letters

    def add(self, other: Ledger) -> None:
        """Count what another has counted as well."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for age, letters in other.staleness.items():
            self.staleness[age] = self.staleness.get(age, 0) + letters


_COUNTS: Final = tuple(f.name for f in fields(Ledger) if f.name != "staleness")


def copies(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """Copies without a graph."""
    return tuple(None if t is None else t.detach().clone() for t in tensors)


def tensor_bytes(tensors: Tensors) -> int:
    """Bytes of tensors; of sparse ones, indices and values."""
    total = 0
    for t in tensors:
        if t is not None:
            total += t._indices().nbytes + t._values().nbytes if t.is_sparse else t.nbytes
    return total


def merged(a: Letter, b: Letter) -> Letter:
    """One letter in place of two: tensors and weights are added."""
    tensors = tuple(summed([x, y]) for x, y in zip(a.tensors, b.tensors, strict=True))
    return replace(b, tensors=tensors, weight=a.weight + b.weight, count=a.count + b.count)


def summed(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """A missing gradient counts as zero."""
    there = [t for t in tensors if t is not None]
    if not there:
        return None
    total = there[0].clone()
    for t in there[1:]:
        total = total + t
    return total


@torch.no_grad()
def mean_of(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """A missing gradient counts as zero."""
    total = summed(tensors)
    return None if total is None else total / len(tensors)

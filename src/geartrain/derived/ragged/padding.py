"""Where members are in what a module pads by itself, found by computing its integers and masks.

It is traced with bundles of one length, so that nothing is behind the ends; what it asks of
integers is computed for bundles of several lengths.

    (segment, place of each member), a mask ─► rows move from the members to what is padded, and
    back: nothing moves
    place < length ─► true for all members
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, fx

from geartrain.derived.ragged.lengths import TRIED, TriedLengths, segment_of

_KINDS: Final = torch.int64, torch.bool


@final
class Padding:
    """What is known of a trace of bundles of one length.

    Args:
        lengths, segment: Of the bundles, and the bundle of each member.
        twins: The nodes of the other trace.
        axes: How long axes of bundles, of one bundle's members, and of all members are, in two
            traces.
    """

    def __init__(
        self,
        lengths: fx.Node,
        segment: fx.Node,
        twins: dict[fx.Node, fx.Node],
        axes: Sequence[tuple[int, int]],
    ) -> None:
        self._twins = twins
        self._tried: list[TriedLengths] = []
        for each in TRIED:
            at = torch.tensor(each)
            sizes = dict(zip(axes, (len(each), max(each), sum(each)), strict=True))
            self._tried.append(TriedLengths(at, {lengths: at, segment: segment_of(at)}, sizes))

    def true(self, x: fx.Node) -> bool | None:
        """Whether a mask is true for all members, or for none; None: it is no such mask."""
        found = self._every(x)
        if found is None or any(y.dtype is not torch.bool for y in found):
            return None
        inside = [self._of_members(y, t) for y, t in zip(found, self._tried, strict=True)]
        if all(y is not None and bool(y.all()) for y in inside):
            return True
        return False if all(y is not None and not y.any() for y in inside) else None

    def knows(self, x: fx.Node) -> bool:
        """Whether integers of the bundles alone make it."""
        return self._every(x) is not None

    def are_members(self, index: Sequence[Any]) -> bool:
        """Whether what has these numbers are the members, in order."""
        found = [self._every(x) if isinstance(x, fx.Node) else None for x in index]
        if len(found) == 2 and found[0] is not None and found[1] is not None:
            pairs = zip(found[0], found[1], self._tried, strict=True)
            return all(_same(a, t.segment) and _same(b, t.place) for a, b, t in pairs)
        if len(found) != 1 or found[0] is None:
            return False
        return all(self._are(y, t) for y, t in zip(found[0], self._tried, strict=True))

    def are_firsts(self, x: fx.Node) -> bool:
        """Whether it is the number of the first member of the bundle of each."""
        found = self._every(x)
        if found is None:
            return False
        pairs = zip(found, self._tried, strict=True)
        return all(_same(y.flatten(), t.members - t.place) for y, t in pairs)

    def _are(self, y: Tensor, tried: TriedLengths) -> bool:
        if y.dtype is torch.bool:
            return y.numel() == tried.mask.numel() and _same(
                y.reshape(tried.mask.shape), tried.mask
            )
        padded = tried.segment * tried.mask.shape[1] + tried.place
        if _same(y, tried.members) or _same(y, padded):
            return True
        inside = self._of_members(y, tried)
        return inside is not None and _same(inside, tried.members)

    @staticmethod
    def _of_members(y: Tensor, tried: TriedLengths) -> Tensor | None:
        """What is of members, or of pairs of these, of what is padded."""
        mask = tried.mask
        if y.numel() == mask.numel():
            return y.reshape(mask.shape)[mask]
        if y.numel() == mask.numel() * mask.shape[1]:
            return y.reshape(*mask.shape, -1)[mask[:, :, None] & mask[:, None]]
        rows = mask[tried.segment]
        return y[rows] if y.shape == rows.shape else None

    def _every(self, x: fx.Node) -> list[Tensor] | None:
        """What a node is, for bundles of several lengths."""
        if x.meta.get("dtype") not in _KINDS:
            return None
        found = [t.of(x, self._twins) for t in self._tried]
        return found if all(isinstance(y, Tensor) for y in found) else None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a, b)

"""Integers of a trace for bundles of other lengths than those that it was made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, fx

aten = torch.ops.aten

TRIED: Final[Sequence[Sequence[int]]] = (
    (2, 1, 4),
    (1,),
    (3, 2, 1, 2, 5),
    tuple([1 + k * 7 % 40 for k in range(50)]),
)
_VIEWS: Final = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
)


def numbers_of_rows(x: Tensor) -> Tensor:
    """0, 1, ..., one for each row."""
    return torch.arange(x.shape[0])


def segment_of(lengths: Tensor) -> Tensor:
    """The bundle of each member."""
    return numbers_of_rows(lengths).repeat_interleave(lengths)


def places_of(lengths: Tensor) -> Tensor:
    """The number of each member in its bundle."""
    first = lengths.cumsum(0) - lengths
    segment = segment_of(lengths)
    return numbers_of_rows(segment) - first[segment]


@final
class TriedLengths:
    """Integers of a trace, for bundles of other lengths.

    Args:
        lengths: Of the bundles.
        known: What they are of nodes already.
        sizes: By the lengths of an axis in two traces, what it is for these bundles; that of all
            members comes last.

    Attributes:
        members, segment, place: Of each member its number, its bundle, and its number in that.
        mask: Where they are among what is padded.
    """

    def __init__(
        self,
        lengths: Tensor,
        known: dict[fx.Node, Any],
        sizes: dict[tuple[int, int], int],
    ) -> None:
        self.lengths, self._known, self._sizes = lengths, known, sizes
        self.segment = segment_of(lengths)
        self.members, self.place = numbers_of_rows(self.segment), places_of(lengths)
        self.mask = torch.arange(int(lengths.max())) < lengths[:, None]

    def of(self, x: fx.Node, twins: dict[fx.Node, fx.Node]) -> Any:
        """What a node is; None: that is not known."""
        if x not in self._known:
            self._known[x] = self._computed(x, twins)
        return self._known[x]

    def _computed(self, x: fx.Node, twins: dict[fx.Node, fx.Node]) -> Any:
        if x.op != "call_function":
            return None
        every = [self.of(s, twins) for s in x.all_input_nodes]
        if any(each is None for each in every):
            return None
        target: Any = x.target
        twin = twins[x]
        try:
            numbers = self._alike((x.args, x.kwargs), (twin.args, twin.kwargs), target in _VIEWS)
            args, kwargs = fx.map_arg(numbers, self._known.__getitem__)
            return target(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError):  # for these it is no program
            return None

    def _alike(self, a: Any, b: Any, view: bool) -> Any:
        """Arguments, with what counts rows as it is for these bundles."""
        if isinstance(a, (tuple, list)):
            return type(a)([self._alike(x, y, view) for x, y in zip(a, b, strict=True)])
        if isinstance(a, dict):
            return {name: self._alike(x, b[name], view) for name, x in a.items()}
        if isinstance(a, bool) or not isinstance(a, int) or a == b:
            return a
        if view and (a, b) == tuple(self._sizes)[-1]:
            return -1
        return self._sizes.get((a, b), a)

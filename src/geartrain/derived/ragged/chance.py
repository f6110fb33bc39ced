"""Numbers drawn for members, their pairs and bundles: of a seed that each member has, in C.

seeds of members ─► masks of these, of pairs by their first, of bundles by theirs
                      ─► the way back reads them, or of pairs makes them again

A program that draws is tried as one in which everything that is drawn is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.values import BUNDLES, MEMBERS, PAIRS, Constant, RaggedValue
from geartrain.derived.steps.places import Refused
from geartrain.derived.told.chances import CHANCES
from geartrain.native.fused import Op
from geartrain.native.ragged import Way
from geartrain.nodes.uncompiled import UncompiledMode

aten = torch.ops.aten
_EVEN: Final = frozenset({aten.rand.default, aten.rand_like.default})
DRAWING: Final = frozenset({*_EVEN, aten.bernoulli.p})
"""Operators that have steps."""
SETTLED: Final = 0.5
"""What is drawn between 0 and 1 where all is the same."""


def _draw(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    like, even = low.like(x), x.target in _EVEN
    share = 2.0 if even else float(args[1])
    if low.segment is None:
        raise Refused("chance has a part in what reads a memory")
    whole = like.kind in (BUNDLES, MEMBERS, PAIRS) and like.times == 1 and not like.alone
    if not whole or not (even or 0 <= share <= 1):
        raise Refused("something is drawn for other than bundles and their members")
    number, out = len(low.drawn), low.room(like, late=False)
    low.drawn.append(x)
    low.values[x] = out
    if low.settled:
        low.plain(Op.ZERO, out, late=False)
        low.plain(Op.ADD_NUMBER, out, out, number=SETTLED if even else 1.0, late=False)
        return
    how: Any = {"many": number, "number": share, "late": False}
    if like.kind == MEMBERS:
        low.plain(Op.DRAW, out, RaggedValue(low.seeds, 0, 1, MEMBERS, 1, ()), **how)
        return
    how |= {"index": low.seeds, "width": like.width}
    if like.kind == PAIRS:
        low.step(Way.DRAW_PAIRS, out, kind=MEMBERS, pairs=True, **how)
    else:
        low.step(Way.DRAW_BUNDLE, out, kind=BUNDLES, inside=True, **how)


def _nothing_yet(low: AbstractLowering, x: fx.Node) -> None:
    low.values[x] = Constant(0.0)


CHANCE: Final[Mapping[Any, Convert]] = {
    **dict.fromkeys(DRAWING, _draw),
    aten.empty.memory_format: _nothing_yet,
}


@final
class Settled(UncompiledMode):
    """What is drawn meanwhile is all the same, as in a program that is tried."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in CHANCES:
            with self:
                found = CHANCES[function](*args, **kwargs)
            if found is not None:
                return found
        if function in _EVEN:
            return torch.zeros_like(function(*args, **kwargs)) + SETTLED
        if function is aten.bernoulli_.float:
            return args[0].fill_(1)
        if function is aten.bernoulli.p:
            return torch.ones_like(args[0])
        return function(*args, **kwargs)

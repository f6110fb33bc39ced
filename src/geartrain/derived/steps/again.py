"""What a way back computes again beside its gradient, in one step for both.

gelu(x) again ─┐
its gradient  ─┴─► one step: they have most of their work in common
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from geartrain.native.fused import At, Op, Step

_BOTH: Final[Mapping[Op, tuple[Op, Op]]] = {
    Op.GELU_BACK: (Op.GELU, Op.GELU_BOTH),
    Op.SILU_BACK: (Op.SILU, Op.SILU_BOTH),
}
"""By step of a gradient, what is computed again, and both."""

_ALSO_WRITTEN: Final = 4
"""From this of its places on, a step may write as well."""


def with_gradients(steps: Sequence[Step]) -> list[Step]:
    """The same steps, with fewer of them."""
    found: list[Step] = []
    for step in steps:
        before = _before(found, step)
        if before is None:
            found.append(step)
            continue
        again = found.pop(before)
        places = (*step.places[:3], At(), again.places[0])
        found.append(Step(_BOTH[step.op][1], step.width, places))
    return found


def _before(steps: Sequence[Step], step: Step) -> int | None:
    """Where what a step of a gradient reads has been computed again, if nobody has read that since,
    and nobody has written where it lies or what it is made of."""
    if step.op not in _BOTH:
        return None
    out, came, x = step.places[:3]
    for k in range(len(steps) - 1, -1, -1):
        other = steps[k]
        mine, *read = other.places
        if other.op is _BOTH[step.op][0] and read == [x] and other.width == step.width:
            alone = not (came.one or x.one) and mine.slot not in (out.slot, came.slot, x.slot)
            since = [place.slot for later in steps[k + 1 :] for place in later.places]
            written = {
                place.slot
                for later in steps[k + 1 :]
                for place in (later.places[0], *later.places[_ALSO_WRITTEN:])
            }
            return k if alone and mine.slot not in since and x.slot not in written else None
    return None

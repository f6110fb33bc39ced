"""Integers in steps, which are numbers there: the same as torch's, or refused.

truths, how many there are, places ─► exact, and so are sums and products up to a bound
integers of columns                ─► rounded: moved, chosen, in order; compared with what is
                                      small, or made numbers, as torch makes them
these and what is small, added     ─► exact where they are small, else far from it: compared with
                                      what is small
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering
from geartrain.derived.ragged.integers import COUNTS
from geartrain.derived.ragged.most import UNITS
from geartrain.derived.ragged.traced import SAME
from geartrain.derived.ragged.values import Constant, CountedRows, RaggedValue
from geartrain.derived.steps.entries import TRUTHS
from geartrain.derived.steps.integers import COMPARED
from geartrain.derived.steps.places import Refused

aten = torch.ops.aten

MOST_ROWS: Final = 1 << 20
"""Members of a bundle, and bundles, for which it is known that what counts them is exact."""
_OF_INTEGERS: Final = torch.int64, torch.bool
_TOO_LARGE: Final = (
    "integers that may be too large for a number, in which steps have them: compare them with what "
    "is small, or make numbers of them first"
)


def check_exact(low: AbstractLowering, x: fx.Node) -> None:
    """Note how large the integers may be that steps have made.

    Raises:
        Refused: They may be others than torch's.
    """
    dtype, made = x.meta.get("dtype"), low.values.get(x)
    if not isinstance(made, RaggedValue | list):
        return
    if isinstance(dtype, torch.dtype) and dtype not in _OF_INTEGERS:
        if dtype is not low.dtype:
            raise Refused("numbers of another dtype")
        if any(s in low.beside for s in x.all_input_nodes):
            raise Refused(_TOO_LARGE)
        return
    read = {s.meta.get("dtype") for s in x.all_input_nodes}
    if dtype is None and not read & {*_OF_INTEGERS}:
        return  # several of numbers
    most = _most_of_made(low, x)
    if most is None:
        raise Refused(_TOO_LARGE)
    low.most[x] = most
    if most == math.inf and (by := _beside(low, x)):
        low.beside[x] = by


def is_compared_exactly(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether steps make the truths of an operator of integers."""
    return _most_of_made(low, x) is not None


def _most_of_made(low: AbstractLowering, x: fx.Node) -> float | None:
    """What none of what a node makes is above; None: steps may make others."""
    target: Any = x.target
    if target in COUNTS or target in _NAMES:
        return MOST_ROWS
    if _is_one_or_none(x):
        return 1
    read = [_most_of(low, y) for y in x.args if isinstance(y, fx.Node | int | float)]
    if target in COMPARED:
        return _most_of_truths(low, x, read)
    if target in TRUTHS or target is aten.logical_not.default:
        truths = all(s.meta.get("dtype") is torch.bool for s in x.all_input_nodes)
        return 1 if truths else None
    if target in _MOVED and not _adds_up(x):
        own = x.all_input_nodes if target not in _WITH_NUMBER else []
        return max([_most_of(low, s) for s in own] or read)
    if target not in _GROWN:
        return None
    most = _GROWN[target](low, x, read)
    if most == math.inf and target in _ADDED and read.count(math.inf) == 1:
        return most if _beside(low, x) <= _limit(low) / 4 else None
    return most if most <= _limit(low) else None


def _is_one_or_none(x: fx.Node) -> bool:
    """Whether it is of ones and zeros alone, whatever it is made of."""
    if x.target is aten.embedding.default:
        return x.all_input_nodes[0].target in UNITS
    truth = x.target is aten._to_copy.default and x.meta.get("dtype") is torch.bool
    return truth or x.target in UNITS


def _most_of_truths(low: AbstractLowering, x: fx.Node, read: list[float]) -> float | None:
    """Rounding keeps order, and below the limit there is none."""
    numbers = any(s.meta.get("dtype") not in _OF_INTEGERS for s in x.all_input_nodes)
    beside = any(s in low.beside for s in x.all_input_nodes)
    limit = _limit(low) / 4 if beside else _limit(low)
    return 1 if numbers or min(read) < limit else None


def _adds_up(x: fx.Node) -> bool:
    """Whether what is put where integers say is added there."""
    return x.target is aten.index_put.default and any(x.args[3:])


def _beside(low: AbstractLowering, x: fx.Node) -> float:
    """How much may have been added to integers of which it is not known how large they are."""
    read = [_most_of(low, y) for y in x.args if isinstance(y, fx.Node | int | float)]
    added = [most for most in read if most < math.inf] if x.target in _ADDED else []
    return sum(added) + max(low.beside.get(y, 0.0) for y in x.all_input_nodes)


def _limit(low: AbstractLowering) -> float:
    """Up to which all integers are numbers."""
    return 2 / torch.finfo(low.dtype).eps


def _most_of(low: AbstractLowering, x: Any) -> float:
    """What none of the integers that are read is above."""
    if not isinstance(x, fx.Node):
        return math.fabs(x)
    known = low.values.get(x)
    if isinstance(known, Constant):
        return abs(known.number)
    if x in low.most:
        return low.most[x]
    if x.meta.get("dtype") is torch.bool:
        return 1
    source = known.node if isinstance(known, CountedRows) else x
    counts = source in (low.lengths, low.segment) or source in low.counting
    return MOST_ROWS if counts or x.target in COUNTS else math.inf


def _added_up(low: AbstractLowering, x: fx.Node, read: list[float]) -> float:
    """Of so many each as an axis has, or a bundle."""
    (source, *_) = x.all_input_nodes
    tail, left = (math.prod(low.like(y).tail) for y in (source, x))
    return read[0] * MOST_ROWS * max(1, tail / max(1, left))


_ADDED: Final = frozenset(
    {
        *(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar),
        *(aten.rsub.Tensor, aten.rsub.Scalar),
    }
)
_Bound = Callable[[AbstractLowering, fx.Node, list[float]], float]
_NAMES: Final = {aten.topk.default, aten.argmax.default, aten.argmin.default}
_WITH_NUMBER: Final = {
    aten.masked_fill.Scalar,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.minimum.default,
    aten.maximum.default,
}
_MOVED: Final = {
    *SAME,
    *_WITH_NUMBER,
    operator.getitem,
    aten.where.self,
    aten.neg.default,
    aten.abs.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.unsafe_split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.cat.default,
    aten.stack.default,
    aten.transpose.int,
    aten.permute.default,
    aten.tril.default,
    aten.triu.default,
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.index.Tensor,
    aten.index_select.default,
    aten.embedding.default,
    aten.gather.default,
    aten.index_put.default,
}
"""What gives some of what it reads, in whose order rounding changes nothing."""
_GROWN: Final[Mapping[Any, _Bound]] = {
    **dict.fromkeys(_ADDED, lambda low, x, read: sum(read)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), lambda low, x, read: math.prod(read)),
    aten.sum.dim_IntList: _added_up,
    aten.index_add.default: lambda low, x, read: read[0] + MOST_ROWS * read[3],
}
"""How large what an operator makes may be, of how large that is which it reads."""

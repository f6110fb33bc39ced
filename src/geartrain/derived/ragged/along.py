"""What goes along the members of each bundle: moved by some places, convolved, added up so far.

x[:, :-1] behind a zero, F.pad     ─► an axis with some entries more than members, or fewer
cut to as many as members          ─► members, moved; nothing comes from another bundle
nn.Conv1d of as many as it is given ─► windows of members, and a product

What is padded counts as zero behind each bundle, as it is where a module has put it; where it is
not, the program is refused by its trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.traced import SAME
from geartrain.derived.ragged.values import (
    BUNDLES,
    MEMBERS,
    NO_ROWS,
    PADDED,
    Axes,
    Backwards,
    Beyond,
    Buffer,
    Constant,
    RaggedValue,
)
from geartrain.derived.steps.places import Refused
from geartrain.derived.traces.turns import TURNS, order_of
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

aten = torch.ops.aten


def goes_beyond(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether it makes an axis that has entries more than members, or fewer, or is made of such
    a one; that is known of it then, or its steps are written."""
    convert = _BEYOND.get(x.target)
    of = [y for y in x.all_input_nodes if isinstance(low.values.get(y), Beyond)]
    if convert is None or not (of or low.stretched(x) is not None):
        return False
    parts = convert(low, x)
    if parts is None:
        return False
    found = low.stretched(x)
    if found is not None:
        low.values[x] = Beyond(tuple(parts))
        return True
    like = low.like(x)
    if not like.is_padded:
        raise Refused("members become something else")
    low.values[x] = _added(low, parts, like, late=low.late(x))
    return True


_Parts: TypeAlias = Sequence[tuple[RaggedValue, int]] | None


def is_of_first(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether it is the first member of each bundle, or its gradient; its steps are written."""
    find = _FIRST.get(x.target)
    found = None if find is None or low.padding is None else find(x)
    if found is None or not low.has_rows_first(x):
        return False
    source, larger, dim, where = found
    back, late = larger is x, low.late(x)
    if low.stretched(larger) is not None or not _over_members(low, larger, dim) or where != (0, 1):
        return False
    like = low.like(x)
    if not back and isinstance(low.values.get(source), Constant):
        low.values[x] = low.values[source]
        return True
    if (low.like(source) if back else like).kind != BUNDLES or like.merged:
        return False
    out, value = low.room(like, late=late), low.whole(source, late=late)
    if back:
        low.plain(Op.ZERO, out, late=late)
    way = Way.ADD_INSIDE if back else Way.TAKE_INSIDE
    low.step(way, out, value, kind=BUNDLES, source=MEMBERS, inside=True, late=late)
    low.values[x] = out
    return True


def _sliced(x: fx.Node) -> tuple[Any, int, Any, Any, Any]:
    """What a slice is of: source, axis, start, end and step."""
    args: Any = x.args
    source, dim, start, end, step = list[Any](args) + [0, 0, None, 1][len(args) - 1 :]
    return source, dim, start, end, step


def _first_of_slice(x: fx.Node) -> Any:
    source, dim, start, end, step = _sliced(x)
    return (source, source, dim, (start or 0, end)) if step == 1 else None


_FIRST: Final[Mapping[Any, Callable[[fx.Node], Any]]] = {
    aten.select.int: lambda x: (x.args[0], x.args[0], x.args[1], (x.args[2], 1)),
    aten.select_backward.default: lambda x: (x.args[0], x, x.args[2], (x.args[3], 1)),
    aten.slice.Tensor: _first_of_slice,
    aten.slice_backward.default: lambda x: (x.args[0], x, x.args[2], (x.args[3], x.args[4])),
}
"""Of what: its source, what has all members, along which axis, from where and to where."""


def _added(
    low: AbstractLowering, parts: Sequence[tuple[RaggedValue, int]], like: Axes, *, late: bool
) -> RaggedValue | Constant:
    """All that lies at some place among members."""
    found: RaggedValue | None = None
    for value, by in parts:
        value = low.full(value, late=late)
        if by:
            moved = low.room(low.like_value(value), late=late)
            _windows(low, moved, value, 1, by, 1, late=late)
            value = moved
        if found is not None:
            out = low.room(like, late=late)
            low.plain(Op.ADD, out, found, value, late=late)
            value = out
        found = value
    return Constant(0.0) if found is None else replace(found, tail=like.tail)


def _parts_of(low: AbstractLowering, x: Any) -> _Parts:
    """What lies along an axis of members, or of more or fewer; None: there is no such axis."""
    known = low.values.get(x)
    if isinstance(known, Beyond):
        return known.parts
    if low.stretched(x) is not None:
        return () if isinstance(known, Constant) and not known.number else None
    like = low.like(x)
    if not like.is_padded:
        return None
    if isinstance(known, Constant) and not known.number:
        return ()
    return ((low.value(x, late=low.late(x)), 0),)


def _axis(low: AbstractLowering, x: fx.Node) -> int:
    """That of members, or of more or fewer."""
    found = low.stretched(x)
    return (low.like(x) if found is None else found).members


def _moved(parts: _Parts, by: int) -> _Parts:
    return None if parts is None else [(value, at + by) for value, at in parts]


def _slice(low: AbstractLowering, x: fx.Node) -> _Parts:
    source, dim, start, _, step = _sliced(x)
    return _cut(low, x, source, source, (dim, start, step), -1)


def _slice_back(low: AbstractLowering, x: fx.Node) -> _Parts:
    args: Any = x.args
    source, _, dim, start, _, step = args
    return _cut(low, x, source, x, (dim, start, step), 1)


def _cut(
    low: AbstractLowering,
    x: fx.Node,
    source: Any,
    larger: fx.Node,
    how: tuple[Any, Any, Any],
    sign: int,
) -> _Parts:
    dim, start, step = how
    parts, start = _parts_of(low, source), start or 0
    if parts is None or dim % len(low.shapes[larger]) != _axis(low, larger):
        return None
    at = 2 if sign < 0 else 3
    same = len(x.args) <= at or x.args[at] == low.twin[x].args[at]
    if start < 0 or step != 1 or not same:
        raise Refused("members are cut from the end, or with gaps")
    return _moved(parts, sign * start)


def _pad(low: AbstractLowering, x: fx.Node) -> _Parts:
    args: Any = x.args
    source, pads, *number = args
    parts, ranks = _parts_of(low, source), len(low.shapes[source])
    if parts is None or any(number):
        return None
    by = 0
    for k in range(len(pads) // 2):
        before, behind = pads[2 * k : 2 * k + 2]
        if ranks - 1 - k == _axis(low, source):
            by = before
        elif before or behind:
            return None
    return _moved(parts, by)


def _cat(low: AbstractLowering, x: fx.Node) -> _Parts:
    """Zeros, members, zeros."""
    args: Any = x.args
    pieces, dim = args[0], (*args[1:], 0)[0]
    if dim % len(low.shapes[x]) != _axis(low, x):
        return None
    at, found = 0, None
    for y in pieces:
        size = low.shapes[y][dim]
        varies = size != low.shapes_of_twin(y)[dim]
        known = low.values.get(y)
        if varies and found is None:
            found = _moved(_parts_of(low, y), at)
        elif varies or not isinstance(known, Constant) or known.number:
            return None
        at += size
    return found


def _sum(low: AbstractLowering, x: fx.Node) -> _Parts:
    both = [_parts_of(low, y) for y in x.args]
    if x.kwargs or len(both) != 2 or None in both:
        return None
    return [part for parts in both if parts is not None for part in parts]


def _same(low: AbstractLowering, x: fx.Node) -> _Parts:
    (source,) = x.all_input_nodes
    return _parts_of(low, source) if low.shapes[x] == low.shapes[source] else None


def _turn(low: AbstractLowering, x: fx.Node) -> _Parts:
    (source,) = x.all_input_nodes
    known, shape = low.stretched(source), low.shapes[source]
    if known is None:
        return None
    order = order_of(x, len(shape))
    own = [k for k in (known.tail_axis(d) for d in order if shape[d] != 1) if k >= 0]
    return _parts_of(low, source) if own == sorted(own) and not known.merged else None


_BEYOND: Final[Mapping[Any, Any]] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_back,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
    aten.add.Tensor: _sum,
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(TURNS, _turn),
}


def _windows(
    low: AbstractLowering,
    out: RaggedValue,
    value: RaggedValue,
    many: int,
    by: int,
    apart: int,
    *,
    late: bool,
    back: bool = False,
) -> None:
    """Of each member those from so many places before it on, apart by some; or back."""
    low.step(
        Way.WINDOWS_BACK if back else Way.WINDOWS,
        out,
        value,
        kind=BUNDLES,
        inside=True,
        width=(out if back else value).width,
        many=many,
        inner=by,
        number=float(apart),
        late=late,
    )


def _convolved(
    low: AbstractLowering, source: fx.Node, weight: fx.Node, how: Sequence[Any]
) -> tuple[RaggedValue, int, int, int]:
    """What a convolution reads, from how many places before on, how far apart, and how many.

    Raises:
        Refused: It is another.
    """
    stride, padding, dilation, transposed, _, groups = how
    parts = _parts_of(low, source)
    plain = list(stride) == [1] and not transposed and groups == 1 and weight in low.operands
    plain = plain and _axis(low, source) == len(low.shapes[source]) - 1
    if parts is None or len(parts) != 1 or not plain:
        raise Refused("a convolution of other than members, or with gaps, or in groups")
    ((value, at),) = parts
    return value, at + padding[0], dilation[0], low.shapes[weight][2]


def _of_weight(low: AbstractLowering, weight: fx.Node, *, turned: bool) -> RaggedValue:
    """As a product reads it, seen as a matrix."""
    k, shape = low.operands.index(weight), low.shapes[weight]
    found = low.weights.setdefault(
        (k, turned),
        Buffer(NO_ROWS, math.prod(shape), role="turned" if turned else "weight", number=k),
    )
    return RaggedValue(found, 0, 0, NO_ROWS, 1, shape)


def _convolution(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    source, weight, bias, *how = args
    late, like = low.late(x), low.like(x)
    value, by, apart, many = _convolved(low, source, weight, how)
    rows = low.room(Axes(MEMBERS, 1, (value.width * many,), 1), late=late)
    _windows(low, rows, low.full(value, late=late), many, by, apart, late=late)
    added = None if bias is None else low.value(bias, late=late)
    if (like.kind, like.lead) != (MEMBERS, PADDED) or like.merged:
        raise Refused("a convolution of other than members")
    out = low.values[x] = low.room(like, late=late)
    read = rows, _of_weight(low, weight, turned=False), added
    low.plain(Op.PRODUCT, out, *read, many=rows.width, late=late)


def _convolution_back(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    came, source, weight, _, *how, _ = args
    late = low.late(x)
    value, by, apart, many = _convolved(low, source, weight, how)
    dy, value = low.whole(came, late=late), low.full(value, late=late)
    wide = Axes(MEMBERS, 1, (value.width * many,), 1)
    read, rows = low.room(wide, late=late), low.room(wide, late=late)
    _windows(low, read, value, many, by, apart, late=late)
    turned = _of_weight(low, weight, turned=True)
    low.plain(Op.PRODUCT, rows, dy, turned, None, many=dy.width, late=late)
    out = low.room(low.like_value(value), late=late)
    _windows(low, out, rows, many, by, apart, late=late, back=True)
    at = by - how[1][0]
    found = out if low.stretched(source) is None else Beyond(((out, at),))
    low.values[x] = [found, None, None]
    for y in x.users:
        if y.args[1] == 1:
            low.products[y] = dy, read
        elif y.args[1] == 2:
            low.summed[y] = dy


def _so_far(low: AbstractLowering, x: fx.Node) -> None:
    """Added up from the first member on, or of what is backwards, from the last."""
    args: Any = x.args
    source, dim = args[:2]
    known, late, like = low.values.get(source), low.late(x), low.like(x)
    if not _over_members(low, x, dim) or x.kwargs:
        raise Refused("added up so far along other than members")
    value = known.value if isinstance(known, Backwards) else low.whole(source, late=late)
    out = low.room(like, late=late)
    last = isinstance(known, Backwards)
    low.step(Way.SUM_SO_FAR, out, value, kind=BUNDLES, inside=True, inner=int(last), late=late)
    low.values[x] = Backwards(out) if last else out


def _flip(low: AbstractLowering, x: fx.Node) -> None:
    """Members the other way round: for what is added up from the last on."""
    args: Any = x.args
    source, dims = args
    known = low.values.get(source)
    if len(dims) != 1 or not _over_members(low, x, dims[0]):
        raise Refused("other than members the other way round")
    if isinstance(known, Backwards):
        low.values[x] = known.value
    else:
        low.values[x] = Backwards(low.whole(source, late=low.late(x)))


def _over_members(low: AbstractLowering, x: fx.Node, dim: int) -> bool:
    like = low.like(x)
    return like.is_padded and dim % len(low.shapes[x]) == like.members


ALONG: Final[Mapping[Any, Convert]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_back,
    aten.cumsum.default: _so_far,
    aten.flip.default: _flip,
}

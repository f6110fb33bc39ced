"""Tensors whose first axis counts something else, and whose second counts rows, in a trace.

    torch.stack([a, b])  ─►  (2, n, d);  of it [0] is a
    .mean(0)             ─►  torch.stack([a, b], 1).mean(1): the same, of rows that are first

Steps in C want rows first. What is known of such tensors, made of zeros, by ``unsqueeze(0)``, by
``stack`` and by recurrent layers, is told of their parts, or of the same with rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn import functional


@final
class Layers:
    """What is known of tensors whose first axis does not count rows, during a trace.

    Args:
        call: Calls a function, which may be told by others.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._parts: dict[int, Sequence[Tensor]] = {}
        self._first: dict[int, Tensor | None] = {}  # of stacks the same, with rows first
        self._zeros: set[int] = set()
        self._held: list[Tensor] = []  # or another tensor could come by an id

    def are_zero(self, x: Tensor) -> bool:
        """Whether it was made of zeros."""
        return id(x) in self._zeros

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """What it has along its first axis."""
        return self._parts.get(id(x)) or x.unbind(0)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Of these."""
        found = torch.stack(tuple(parts), 0)
        self._know_stack(found, parts)
        return found

    def _know(self, x: Tensor, parts: Sequence[Tensor]) -> None:
        self._parts[id(x)] = parts
        self._held.append(x)

    def _know_stack(self, x: Tensor, parts: Sequence[Tensor], first: Tensor | None = None) -> None:
        self._know(x, parts)
        self._first[id(x)] = first

    def taken(self, function: Any, args: Sequence[Any], how: Mapping[str, Any]) -> Any:
        """Of a known tensor what a function takes; None: it is another, or takes something else."""
        x = args[0] if args else None
        parts = self._parts.get(id(x)) if isinstance(x, Tensor) else None
        if parts is not None and not how and function in _TAKING:
            return _TAKING[function](parts, *args[1:])
        if function in _WITHIN and not how:
            return self._within(function, args)
        if function is torch.einsum and not how:
            return self._einsum(*args)
        if not isinstance(x, Tensor) or not self._is_stack(x):
            return None
        if function in _LAST:
            return self._as_it_was(self._call(function, self._rows_first(x), *args[1:], **how))
        return self._along(function, x, args[1:], how) if function in _ALONG else None

    def _is_stack(self, x: Any) -> bool:
        """Whether it is known to have something else before rows."""
        return isinstance(x, Tensor) and id(x) in self._first and x.ndim > 1

    def _rows_first(self, x: Tensor) -> Tensor:
        """The same as a stack."""
        found = self._first[id(x)]
        if found is None:
            found = self._first[id(x)] = torch.stack(tuple(self._parts[id(x)]), 1)
        return found

    def _as_it_was(self, x: Tensor) -> Tensor:
        """What has rows first as torch has it, and known."""
        found = x.transpose(0, 1)
        self._know_stack(found, x.unbind(1), x)
        return found

    def _within(self, function: Any, args: Sequence[Any]) -> Tensor | None:
        """A function of entries that face one another, if some are of a stack."""
        ranks = [x.ndim for x in args if self._is_stack(x)]
        faced = [self._faced(x, ranks[0]) for x in args] if ranks else [None]
        if any(x is None for x in faced):
            return None
        return self._as_it_was(self._call(function, *faced))

    def _faced(self, x: Any, rank: int) -> Any:
        """What faces stacks of so many axes where these have rows first; None: it has such."""
        if not isinstance(x, Tensor) or x.ndim < rank - 1:
            return x
        if x.ndim < rank:
            return x.unsqueeze(1)
        if x.ndim > rank or not (self._is_stack(x) or x.shape[1] == 1):
            return None
        return self._rows_first(x) if self._is_stack(x) else x.transpose(0, 1)

    def _einsum(self, equation: Any, *operands: Any) -> Tensor | None:
        """Products of stacks, and others."""
        stacks = [self._is_stack(x) for x in operands]
        if not any(stacks) or not isinstance(equation, str) or "." in equation:
            return None
        left, arrow, out = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        if len(terms) != len(operands):
            return None
        for k, yes in enumerate(stacks):
            if yes:
                terms[k] = terms[k][1] + terms[k][0] + terms[k][2:]
        given = [self._rows_first(x) if yes else x for x, yes in zip(operands, stacks, strict=True)]
        found: Tensor = self._call(torch.einsum, ",".join(terms) + arrow + out, *given)
        return found

    def _along(self, function: Any, x: Tensor, rest: Sequence[Any], how: Mapping[str, Any]) -> Any:
        """A function along an axis that does not count rows."""
        names = _ALONG[function]
        own = dict(zip(names, rest, strict=False)) | dict(how)
        dim = own.get("dim")
        if len(rest) > len(names) or type(dim) is not int or dim % x.ndim == 1:
            return None
        first, stays = dim % x.ndim == 0, function in _ALIKE or bool(own.get("keepdim"))
        if function in _WITH_PLACES and (stays or not first):
            return None
        found = self._call(function, self._rows_first(x), **own | {"dim": 1 if first else dim})
        return self._as_it_was(found) if stays or not first else found

    def notice(self, function: Any, args: Sequence[Any], how: Mapping[str, Any], x: Any) -> None:
        """What a function has made, or written into."""
        if args and _writes(function):
            self._zeros.discard(id(args[0]))
            self._parts.pop(id(args[0]), None)
            self._first.pop(id(args[0]), None)
        elif function is torch.zeros and not how.get("requires_grad"):
            self._zeros.add(id(x))
            self._held.append(x)
        elif function in _BEFORE and [*args[1:], *how.values()] == [0]:
            self._know(x, [args[0]])
        elif function is torch.stack and [*args[1:], *how.values()] in ([], [0]):
            self._know_stack(x, list(args[0]))


def _writes(function: Any) -> bool:
    """Whether it is one of those that write into their first argument, by its name."""
    name = str(getattr(function, "__name__", ""))
    plain = name.endswith("_") and not name.endswith("__")
    return plain or name in _IN_PLACE


_IN_PLACE: Final = {
    "__setitem__",
    *[f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow")],
}


def _one(parts: Sequence[Tensor], which: Any) -> Tensor | None:
    if isinstance(which, tuple) and all(x is None or isinstance(x, slice) for x in which[1:]):
        one = _one(parts, which[0])
        return None if one is None else one[which[1:]]
    there = type(which) is int and -len(parts) <= which < len(parts)
    return parts[which] if there else None


def _one_along(parts: Sequence[Tensor], dim: Any, which: Any) -> Tensor | None:
    return _one(parts, which) if dim == 0 else None


def _only(parts: Sequence[Tensor], dim: Any = None) -> Tensor | None:
    return parts[0] if dim == 0 and len(parts) == 1 else None


def _every(parts: Sequence[Tensor], dim: Any = 0) -> tuple[Tensor, ...] | None:
    return tuple(parts) if dim == 0 else None


def _turned(parts: Sequence[Tensor], *dims: Any) -> Tensor | None:
    return torch.stack(tuple(parts), 1) if dims in ((0, 1), (1, 0)) else None


def _permuted(parts: Sequence[Tensor], *dims: Any) -> Tensor | None:
    order = tuple(dims[0]) if len(dims) == 1 else dims
    return torch.stack(tuple(parts), 1) if order == (1, 0, 2) else None


_BEFORE: Final = {torch.unsqueeze, Tensor.unsqueeze}
_TAKING: Final[Mapping[Any, Callable[..., Any]]] = {
    Tensor.__getitem__: _one,
    **dict.fromkeys((torch.select, Tensor.select), _one_along),
    **dict.fromkeys((torch.squeeze, Tensor.squeeze), _only),
    **dict.fromkeys((torch.unbind, Tensor.unbind), _every),
    **dict.fromkeys((torch.transpose, Tensor.transpose, torch.swapaxes), _turned),
    **dict.fromkeys((torch.permute, Tensor.permute), _permuted),
}


def _both(*names: str) -> set[Any]:
    """Functions of these names, of torch and of its tensors."""
    found = [getattr(where, name, None) for where in (torch, Tensor) for name in names]
    return {each for each in found if each is not None}


_WITH_PLACES: Final = _both("max", "min", "median")
_ALIKE: Final = _both("softmax", "log_softmax", "cumsum") | {
    *(functional.softmax, functional.log_softmax),
}
"""What they give has the axis that they go along."""
_ALONG: Final[Mapping[Any, tuple[str, ...]]] = {
    **dict.fromkeys(_both("sum", "mean", "amax", "amin", "prod", "logsumexp"), ("dim", "keepdim")),
    **dict.fromkeys(_both("argmax", "argmin") | _WITH_PLACES, ("dim", "keepdim")),
    **dict.fromkeys(_ALIKE | _both("var", "std"), ("dim",)),
    **dict.fromkeys(_both("norm"), ()),
}
"""Those that go along an axis, and what they may be told in order."""
_LAST: Final = {functional.linear, functional.layer_norm, functional.rms_norm, functional.dropout}
_WITHIN: Final = _both(
    *("add", "sub", "mul", "div", "true_divide", "pow", "neg", "exp", "log", "sqrt", "abs"),
    *("tanh", "sigmoid", "relu", "square", "maximum", "minimum", "clamp"),
    *[f"__{way}{name}__" for way in ("", "r") for name in ("add", "sub", "mul", "truediv")],
    *("__neg__", "__pow__"),
) | {functional.relu, functional.gelu, functional.silu, functional.softplus, functional.elu}

"""Functions without weights that do nothing but pick some of their arguments.

``lambda h, x, scores: (h, x)`` between two modules of a loop costs as many operations as a module
if a kernel runs it. What it returns is what it was given, which is seen where it is called.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, Final, final

from torch import Tensor, nn

from geartrain.errors import ProtocolError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel

_LOADS: Final = frozenset(
    (
        *("RESUME", "NOP", "CACHE", "BUILD_TUPLE", "RETURN_VALUE", "LOAD_CONST", "LOAD_SMALL_INT"),
        *("BINARY_SUBSCR", "BINARY_OP", "BUILD_SLICE", "BINARY_SLICE"),
        *("BUILD_LIST", "LIST_APPEND", "LIST_EXTEND", "LIST_TO_TUPLE", "CALL_INTRINSIC_1"),
    )
)

_MANY: Final = 64
"""More than a payload has."""
_OTHERWISE: Final = inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR


def known_picks(
    function: Callable[..., Any], take: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Which of its arguments a function returns, where that can be seen without rows.

    ``nn.Identity``, and functions that are written as nothing else: they are read, and what could
    do more is not called.

    Args:
        function: As ``through`` has it.
        take: What of the payload its arguments are, where that was said: only then a function is
            seen that gives as many as come (``lambda *state: state``, ``state[-1]``).

    Returns:
        For each output the argument, or what is taken as that; None: it does more, or it cannot be
        seen.
    """
    found = _picks(function, None if take is None else len(take))
    return found if take is None or found is None else tuple(take[j] for j in found)


def _picks(function: Callable[..., Any], width: int | None) -> tuple[int, ...] | None:
    """Which of so many arguments it returns; None: it does more, or it cannot be seen."""
    if type(function) is nn.Identity:
        hooks = function._forward_hooks, function._forward_pre_hooks, function._backward_hooks
        return None if any(hooks) else (0,)
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    plain = not (code.co_flags & _OTHERWISE or code.co_kwonlyargcount or function.__defaults__)
    given = width if code.co_flags & inspect.CO_VARARGS else code.co_argcount
    if not plain or not _only_loads(code):
        return None
    return _of_any_number(function) if given is None else _returned(function, given)


def _of_any_number(function: FunctionType) -> tuple[int, ...] | None:
    """The same, if it is so for all numbers of arguments for which it can be called."""
    found = _returned(function, _MANY)
    if found is None or found != _returned(function, _MANY + 1):
        return None
    fewest = max(found) + 1
    enough = found == _returned(function, fewest)
    return found if enough and _returned(function, fewest - 1) is None else None


def _returned(function: FunctionType, width: int) -> tuple[int, ...] | None:
    """Which of so many arguments it returns; None: it does more, or wants others."""
    arguments = [object() for _ in range(width)]
    try:
        found = function(*arguments)
    except (TypeError, IndexError):  # it looks into a tensor, or for one that does not come
        return None
    outputs = found if isinstance(found, tuple) else (found,)
    which = {id(x): j for j, x in enumerate(arguments)}
    found = tuple(which.get(id(x), -1) for x in outputs)
    return found if found and -1 not in found else None


@lru_cache(maxsize=256)
def _only_loads(code: CodeType) -> bool:
    """Whether it does nothing but load its arguments, and return them or some of them."""
    names = [each.opname for each in dis.get_instructions(code)]
    return all(n in _LOADS or n.startswith("LOAD_FAST") for n in names)


def count_arguments(function: Callable[..., Any]) -> int | None:
    """How many tensors come to a function whose picks are known; None: it does not say."""
    return function.__code__.co_argcount if isinstance(function, FunctionType) else None


def may_pick(function: Callable[..., Any], weightless: bool) -> bool:
    """Whether it is worth trying: no module, which may draw random numbers or have hooks."""
    return weightless and not isinstance(function, nn.Module)


def picked(function: Callable[..., Any], inputs: Payload) -> tuple[Payload, Picking] | None:
    """What a function returns, and its way back; None: it does more than to pick."""
    found = function(*inputs)
    outputs = (found,) if isinstance(found, Tensor) else found
    if not isinstance(outputs, tuple) or not outputs:
        return None
    places = {id(x): j for j, x in enumerate(inputs)}
    which = tuple(places.get(id(y), -1) for y in outputs)
    if -1 in which:
        return None
    return outputs, Picking(which, len(inputs))


@final
class Picking(AbstractKernel):
    """Gives some of its inputs.

    Args:
        which: For each output, the input that it is.
        width: Inputs.
    """

    residuals = 0
    apart = True

    def __init__(self, which: tuple[int, ...], width: int) -> None:
        self._which, self._width = which, width

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        return tuple(inputs[j] for j in self._which), ()

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        if len(gradients) != len(self._which):
            raise ProtocolError(f"{len(gradients)} gradients of {len(self._which)} outputs came")
        return put_back(gradients, self._which, self._width)


def put_back(gradients: Gradient, which: Sequence[int], width: int) -> Gradient:
    """Gradients of what was picked as those of the ``width`` tensors that it was picked from.

    Args:
        gradients: As many as were picked.
        which: For each of these, the tensor that it is.
        width: Tensors.
    """
    found: list[Tensor | None] = [None] * width
    for j, g in zip(which, gradients, strict=True):
        before = found[j]
        if g is not None:
            found[j] = g if before is None else before + g
    return tuple(found)

"""What verbs are given: of which kind each argument is, and what is run, by whose weights.

What is no such thing is refused as the stream is written, by verb, argument and value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import getattr_static
from numbers import Integral
from typing import Any, Final

import torch
from torch import nn

from geartrain.errors import GraphError
from geartrain.graph.gear import Gear
from geartrain.graph.operator import PartLike
from geartrain.kinds import require_each, require_entries, require_kind, require_truth, require_word
from geartrain.nodes.method import bound, path_inside, weights_of

_KEEPS: Final = ("auto", "inputs", "activations", "graph")
_ROWS: Final = "a function of a View that gives one for each row"
_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "predicate": (Callable, f"{_ROWS}: lambda m: m.parent >= 0"),
    "choose": (Callable, f"{_ROWS}: lambda m: m.kind"),
    "order": (str | Callable | None, "a column, a function of a View, or None"),
    "criterion": (Callable, "a function that gives one loss a row: cross_entropy"),
    "target": (str | Callable | None, "a column, a function of a View, or None"),
    "weight": (str | Callable | None, "a column, a function of a View, or None"),
    "label": (str | None, "a name for reports, or None"),
    "over": (str, "'edge', or the column that numbers the copies"),
    "index": (str | None, "the column that numbers the parts, or None"),
    "gear": (Gear | None, "a gear, such as Gear(period=4), or None"),
    "dtype": (torch.dtype | None, "the dtype of a row, such as torch.float32, or None"),
}
"""Besides those that ``_OF_SEVERAL`` has; of a class no verb makes an object."""


def require_arguments(verb: str, /, **given: object) -> None:
    """Arguments of a verb by name.

    Raises:
        TypeError: One is of another kind than it has to be.
        ValueError: It is none of the words that it may be.
    """
    for name, value in given.items():
        if name in _OF_SEVERAL:
            _OF_SEVERAL[name](verb, name, value)
            continue
        kinds, wanted = _KINDS[name]
        if isinstance(value, type):
            raise TypeError(
                f"{verb}({name}={value.__name__}): give {wanted}; this is a class: make one of it, "
                f"{value.__name__}(...)"
            )
        require_kind(verb, kinds, wanted, **{name: value})


def _require_truth(verb: str, name: str, value: object) -> None:
    require_truth(verb, **{name: value})


def _require_keep(verb: str, name: str, value: object) -> None:
    if value is not None:
        require_word(verb, _KEEPS, **{name: value})


def _require_part(verb: str, name: str, value: object) -> None:
    if value is not None and not isinstance(getattr(value, "module", None), nn.Module):
        require_kind(verb, (), "the gt.Part that owns the weights, or None", **{name: value})


def _require_columns(verb: str, name: str, value: object) -> None:
    if not isinstance(value, str):
        require_each(verb, str, "a column, or a tuple of columns", **{name: value})


def _require_take(verb: str, name: str, value: object) -> None:
    if value is not None and not isinstance(value, Integral):
        wanted = "the number of a payload tensor, or several"
        require_each(verb, Integral, wanted, **{name: value})


def _require_metrics(verb: str, name: str, value: object) -> None:
    if value is not None:
        wanted = "names with functions of prediction and target: {'all': accuracy}"
        require_entries(verb, str, object, wanted, **{name: value})


def _require_shape(verb: str, name: str, value: object) -> None:
    if value is not None:
        require_each(verb, Integral, "the shape of one row, (28, 28), or None", **{name: value})


def _require_key(verb: str, name: str, value: object) -> None:
    wanted = "columns, or {column: a function of a View that sets it first}"
    if isinstance(value, Mapping):
        require_entries(verb, str, Callable | Integral | None, wanted, **{name: value})
    elif not isinstance(value, str):
        require_each(verb, str, wanted, **{name: value})


_OF_SEVERAL: Final[Mapping[str, Callable[[str, str, object], None]]] = {
    **dict.fromkeys(("inside", "pool", "alone", "bundle", "fresh"), _require_truth),
    "keep": _require_keep,
    "part": _require_part,
    "read": _require_columns,
    "take": _require_take,
    "metrics": _require_metrics,
    "shape": _require_shape,
    "by": _require_key,
}


def function_and_part(
    verb: str, module: Callable[..., Any] | PartLike, part: PartLike | None
) -> tuple[Callable[..., Any], PartLike | None]:
    """What a verb runs, and whose weights they are; a ``Part`` stands for its module."""
    if not callable(module) and isinstance(inner := getattr(module, "module", None), nn.Module):
        return inner, module
    if not callable(module) or isinstance(module, type):
        came = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"{verb}() takes a module, a function or a Part, not {came}")
    if isinstance(module, nn.Module) and "forward" not in vars(module):
        if getattr_static(type(module), "forward") is nn.Module.forward:  # jitted ones have none
            raise TypeError(
                f"{verb}() got {type(module).__name__}, which has no forward: give the modules in "
                "it one by one, each its own way behind route(), or a module whose forward calls "
                "them, such as nn.Sequential"
            )
    function = bound(module)
    weights = weights_of(function)
    if part is not None and weights is not None and next(weights.parameters(), None) is not None:
        if path_inside(part.module, weights) is None:
            raise GraphError(
                f"{verb}(): {type(weights).__name__} is not inside the module of its part, "
                f"{type(part.module).__name__}; a Part's module holds the modules of all nodes "
                "that name it"
            )
    return function, part


def refuse_gear(verb: str, part: PartLike | None) -> None:
    if part is not None and part.gear is not None:
        raise ValueError(f"{verb}() got a part with {part.gear}; only through() has gears")


def works_as(function: object) -> object:
    """The same for operators whose work tells of one another: those of modules of one class, or of
    functions of one code."""
    if isinstance(function, nn.Module):
        return type(function)
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", function)


def called(function: object) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else name.lower()

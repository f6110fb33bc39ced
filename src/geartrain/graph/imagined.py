"""What is found out of a module before there are rows: the shapes of what it makes, what may be
wrong with a call that fails, and whether its ``train()`` leaves a part of it in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from geartrain.frames.frame import Schema
from geartrain.frames.message import Payload
from geartrain.graph.operator import ROWS, zeros
from geartrain.nodes.call import Call, arguments, as_payload
from geartrain.nodes.chance import generators_kept
from geartrain.nodes.inside import Inside
from geartrain.nodes.stand_in import StandIn, shell_of, tensors_of
from geartrain.nodes.uncompiled import UncompiledMode, uncompiled

_MOST_NUMBERS: Final = 1 << 24
"""Of a function's own that it computes with here; what has more is told by shapes alone."""


def imagined(function: Callable[..., Any], args: Payload, inside: Inside | None) -> Payload:
    """What a function makes of meta tensors, as such.

    It computes with zeros where it can, and its results have the same shapes whatever the numbers.
    Of meta tensors torch makes most in Python, and imports a library for symbols to do so.

    Args:
        function: A module, or any function.
        args: Its arguments, but for the last.
        inside: The last; None: there is none.
    """
    own = tensors_of(function).values()
    if all(x.is_cpu for x in own) and sum(x.numel() for x in own) <= _MOST_NUMBERS:
        rows, bundles = tuple(map(zeros, args)), None if inside is None else _of_zeros(inside)
        # Code of anybody, of rows that it may not like: what is wrong is told of meta tensors.
        with suppress(Exception), generators_kept(None), _NumbersAlone(), _OperatorsAlone():
            made = StandIn(function).play(rows, bundles)
            return tuple([y.detach().to("meta") for y in made])
    return as_payload(on_meta(function, args if inside is None else (*args, inside)))


def _of_zeros(inside: Inside) -> Inside:
    """Bundles on the host that have equally many rows, or nearly so; edges are all the same."""
    n, rows = inside.lengths.shape[0], inside.segment.shape[0]
    segment = torch.arange(rows) * n // rows
    edges = {name: zeros(x) for name, x in inside.edges.items()}
    return Inside(torch.bincount(segment, minlength=n), segment, edges)


class _Looked(Exception):
    """Numbers decide."""


@final
class _NumbersAlone(TorchFunctionMode):
    """Refuses what gives numbers to Python, or to numpy."""

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _GIVE_NUMBERS:
            raise _Looked
        return function(*args, **(kwargs or {}))


@final
class _OperatorsAlone(UncompiledMode):
    """Refuses operators whose results have shapes, or are Python's, by numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _BY_NUMBERS.isdisjoint(function.tags):
            plain = function is torch.ops.aten.index.Tensor
            if not plain or any(x is not None and x.dtype in _MASKS for x in args[1]):
                raise _Looked
        return function(*args, **(kwargs or {}))


_GIVE_NUMBERS: Final = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})
_BY_NUMBERS: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_MASKS: Final = frozenset({torch.bool, torch.uint8})


def on_meta(function: Callable[..., Any], args: Sequence[Any]) -> object:
    """What a function makes of meta tensors, its weights being such, too."""
    with torch.no_grad(), generators_kept(None), uncompiled(), _LinearByShapes():
        if not isinstance(function, nn.Module):
            return function(*args)
        tensors = tensors_of(function)
        made = {id(t): t.detach().to("meta") for t in tensors.values()}  # one for tied ones
        meta = {name: made[id(t)] for name, t in tensors.items()}
        shell = shell_of(function)
        shell.eval()  # shapes are the same, and nothing random is refused
        return torch.func.functional_call(shell, meta, arguments(function, args))


@final
class _LinearByShapes(TorchFunctionMode):
    """Linear maps of meta tensors that fit together are known by their shapes, without a gradient.

    torch makes them of simpler operators, in Python: a third of the time of a check. What does not
    fit is for torch to refuse.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        plain = not torch.is_grad_enabled() and not kwargs and len(args) == 3
        if function is linear and plain and _fit(*args):
            x, weight, _ = args
            return x.new_empty((*x.shape[:-1], weight.shape[0]))
        return function(*args, **(kwargs or {}))


def _fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = [each for each in (x, weight, bias) if each is not None]
    return (
        all(each.is_meta and each.dtype is x.dtype for each in given)
        and (x.ndim > 1 and weight.ndim == 2)
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


def imagined_inside(schema: Schema) -> Inside:
    """Two bundles of meta rows, with the edge columns of a graph."""

    def column(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int64, device="meta")

    edges = {name: column(4) for name in schema.edge}
    return Inside(column(2), column(ROWS), edges)


def stays_in_evaluation(inner: nn.Module, module: nn.Module) -> bool:
    """Whether a module inside of another is left there by the other's ``train()``, as where a
    ``train`` of its own keeps it so."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        module.train()
        return not inner.training
    finally:
        for each, mode in modes:
            each.training = mode


def hint(call: Call, payload: Sequence[Tensor], error: Exception, *, attends: bool) -> str:
    """What may be wrong with rows of such shapes, or with how a module is called.

    Args:
        call: How it is called.
        payload: With these rows.
        error: What it said.
        attends: Whether it reads a memory.
    """
    function = call.function
    if isinstance(error, TypeError) and "positional argument" in str(error):
        return f"; it is called with {_given(call, len(payload), attends=attends)}"
    if payload[0].ndim == 1:
        return (
            "; each row is one number here: what an instance brings has rows along its first "
            "axis, so a single row of k features is (1, k): x[None]"
        )
    if isinstance(function, torch.jit.ScriptModule):
        return (
            "; give the module that it was scripted or traced from: here it gets weights of "
            "its own for every call, and its operators are recorded"
        )
    if isinstance(function, nn.Linear):
        return f"; it wants {function.in_features} features along the last axis"
    return ""


def _given(call: Call, width: int, *, attends: bool) -> str:
    """The arguments of a call in words, and how others would come."""
    many = len(call.taken(width))
    told = [f"{many} payload tensor{'s' if many > 1 else ''}"]
    told += ["the memory and its mask"] if attends else []
    told += [f"column{'s' if len(call.read) > 1 else ''} {', '.join(call.read)}"] * bool(call.read)
    told += ["an Inside"] * call.inside
    more = [] if call.read else ["read= gives it columns"]
    more += [] if call.inside or attends else ["inside=True an Inside, of bundles"]
    more += ["take= some of the payload"] if many > 1 and call.take is None else []
    return ", then ".join(told) + (f"; {', '.join(more)}" if more else "")


def edge_unknown(call: Call, error: KeyError, schema: Schema) -> str:
    """What to say where a module asks for an edge column that there is not; or nothing."""
    (name, *_) = error.args or ("",)
    if not call.inside or not isinstance(name, str) or name in schema.edge:
        return ""
    return (
        f"asks its Inside for {name!r}, perhaps an edge column; the graph has "
        f"{sorted(schema.edge)}, and those of instances are declared: Graph(edge=('kind',)), or "
        "edge=() for source and target alone"
    )


__all__ = ["edge_unknown", "hint", "imagined", "imagined_inside", "on_meta", "stays_in_evaluation"]

"""Runs of a function that leave no trace in it.

    module ─► shell: the same classes and attributes, in dicts and lists of its own
           ─► copies of its tensors where the rows are, in float64 where that is wanted
           ─► outputs, with autograd's graph of whatever is not among its own tensors

A deep copy would do as well, if every module could be copied, and none held a whole vocabulary.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.message import Payload
from geartrain.nodes.call import arguments, as_payload
from geartrain.nodes.casts import Cast
from geartrain.nodes.inside import Inside

_MOST_IN_DOUBLE: Final = 1 << 22
"""Numbers in a module, at most, that is run in float64, as it is copied for it."""


@final
class StandIn:
    """Runs a function with other tensors in place of its own, where the rows are.

    Args:
        function: A module, or any function; of that, what hangs on it is used as it is, and where
            it is.
        owns: Whether a module's parameters are its own; else they are in the graph like others'.

    Attributes:
        may_double: Whether it may be asked for float64.
        modes: For ``train``: a function has but one.
    """

    def __init__(self, function: Callable[..., Any], *, owns: bool = True) -> None:
        self._shell = shell_of(function) if isinstance(function, nn.Module) else None
        self.modes = (False,) if self._shell is None else (False, True)
        self._owns = owns
        self._function = function
        self._tensors = tensors_of(function)
        self._there: dict[tuple[int, torch.device], Tensor] = {}
        self._double: dict[int, Tensor] = {}
        numbers = sum(x.numel() for x in self._tensors.values())
        self.may_double = owns and numbers <= _MOST_IN_DOUBLE
        inner = function.named_modules() if isinstance(function, nn.Module) else ()
        # Their forward writes into the table.
        renormed = [path for path, m in inner if getattr(m, "max_norm", None) is not None]
        self._written = {f"{path}.weight" if path else "weight" for path in renormed}

    def play(
        self,
        inputs: Payload,
        inside: Inside | None,
        *,
        double: bool = False,
        train: bool = False,
        learns: bool = False,
    ) -> Payload:
        """The outputs, with a graph of what requires a gradient and is not the module's own.

        Args:
            inputs: Arguments, none of which requires a gradient.
            inside: The last argument; None: there is none.
            double: Whether floats become float64, the module's own as well.
            train: Whether a module runs in training mode.
            learns: Whether the module's own is in the graph as well, by tensors in its place.
        """
        if double:
            inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        args = arguments(self._function, inputs)
        args = args if inside is None else (*args, inside)
        with torch.enable_grad():
            if self._shell is None:
                return as_payload(self._function(*args))
            self._shell.train(train)
            own = self._own(double, inputs[0].device if inputs else None)
            if learns:
                own = self._learning(own)
            return as_payload(torch.func.functional_call(self._shell, own, args))

    def _learning(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same, and those that learn want a gradient; tied ones are still one."""
        made: dict[int, Tensor] = {}
        for name, x in own.items():
            learns = self._tensors[name].requires_grad
            made.setdefault(id(x), x.detach().requires_grad_() if learns else x)
        return {name: made[id(x)] for name, x in own.items()}

    def _own(self, double: bool, device: torch.device | None) -> dict[str, Tensor]:
        """Tensors by name, as fresh as in the module; tied ones are one."""
        made: dict[int, Tensor] = {}
        for name, own in self._tensors.items():
            x = own if device is None or not self._owns else self._brought(own, device)
            if isinstance(own, nn.Parameter) and not self._owns:
                made[id(own)] = own
                continue
            read_alone = isinstance(own, nn.Parameter) and name not in self._written
            if double and x.is_floating_point() and x.dtype is not torch.float64:
                made[id(own)] = self._widened(x) if read_alone else x.detach().double()
            else:
                made[id(own)] = x.detach() if read_alone else x.detach().clone()
        return {name: made[id(x)] for name, x in self._tensors.items()}

    def _widened(self, x: Tensor) -> Tensor:
        """A tensor that is read alone, in float64; made once, as many runs ask for it."""
        if id(x) not in self._double:
            self._double[id(x)] = x.detach().double()
        return self._double[id(x)]

    def _brought(self, x: Tensor, device: torch.device) -> Tensor:
        """The tensor on a device, brought there once."""
        if x.device == device:
            return x
        key = id(x), device
        if key not in self._there:
            self._there[key] = x.detach().to(device)
        return self._there[key]


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without casts around it, and not compiled: the first call would compile it."""
    if isinstance(function, Cast):
        function = function.function
    inner = getattr(function, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else function


def tensors_of(function: Callable[..., Any]) -> dict[str, Tensor]:
    """Parameters and buffers by name, under each of their names; of other functions: none."""
    if not isinstance(function, nn.Module):
        return {}
    found: dict[str, Tensor] = dict(function.named_parameters(remove_duplicate=False))
    found.update(function.named_buffers(remove_duplicate=False))
    return found


def shell_of(module: nn.Module) -> nn.Module:
    """The module with the same tensors and attributes; what it sets then is its own."""
    # Not by the class's own __new__, which may want arguments.
    shells: dict[int, Any] = {id(m): object.__new__(type(m)) for m in module.modules()}
    for inner in module.modules():
        shell = shells[id(inner)]
        own = {name: _loose(value, shells) for name, value in vars(inner).items()}
        vars(shell).update(own)
        for slot in _slots(type(inner)):
            if hasattr(inner, slot):
                object.__setattr__(shell, slot, getattr(inner, slot))
    made: nn.Module = shells[id(module)]
    return made


def _slots(kind: type) -> Iterator[str]:
    """Attributes of its instances that are in no dict."""
    for each in kind.__mro__:
        named = vars(each).get("__slots__", ())
        yield from (named,) if isinstance(named, str) else named


def _loose(value: Any, shells: Mapping[int, Any]) -> Any:
    """An attribute for a shell: shells in place of modules, containers and generators anew."""
    if isinstance(value, MethodType):
        return MethodType(value.__func__, shells.get(id(value.__self__), value.__self__))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, shells.get(id(x), x)) for key, x in value.items())
    if type(value) in (list, deque, set):
        return type(value)(shells.get(id(x), x) for x in value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value)
    return shells.get(id(value), value)


__all__ = ["StandIn", "plain", "shell_of", "tensors_of"]

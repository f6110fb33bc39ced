"""A method of a module, as a module of its own, so that its weights are found and its copies work.

    model.encode                  ─► Method(model, Model.encode)
    partial(model.encode, k=2)    ─► the same, with k=2
    partial(encode, model)        ─► the same: the module is the first argument

To Python a bound method is a function that holds its module. Taken for a function it would run, and
nothing in it would learn; and a copy of the part would run the original's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, final

from torch import nn

from geartrain.nodes.kernel import may_have_kernel


@final
class BoundMethod(nn.Module):
    """Calls a function with a module before the rows.

    Args:
        module: What is bound; a copy of it may take its place (``of``).
        function: The method as its class has it, or any function of the module and the rows.
        before: Positional arguments between the module and the rows.
        named: Keyword arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        before: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._function, self._before, self._named = function, tuple(before), dict(named or {})
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def forward(self, *inputs: Any) -> object:
        return self._function(self.module, *self._before, *inputs, **self._named)

    def of(self, module: nn.Module) -> BoundMethod:
        """The same of another module, such as a copy."""
        return BoundMethod(module, self._function, self._before, self._named)

    def detail(self) -> str:
        """``Model.encode``."""
        return f"{type(self.module).__name__}.{self.__name__}"


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method as a ``BoundMethod``, a module's own call as the module; others as they are.

    Args:
        function: Anything that can be called; also a ``functools.partial`` of a module, of a
            method, or of a function whose first argument is a module.
    """
    if isinstance(function, partial):
        inner = bound(function.func)
        if isinstance(inner, BoundMethod):
            return BoundMethod(inner.module, inner._function, function.args, function.keywords)
        if isinstance(inner, nn.Module):
            return BoundMethod(inner, _call, function.args, function.keywords)
        if function.args and isinstance(function.args[0], nn.Module):
            module, *before = function.args
            return BoundMethod(module, function.func, before, function.keywords)
        return function
    if not isinstance(function, MethodType) or not isinstance(function.__self__, nn.Module):
        return function
    module, method = function.__self__, function.__func__
    if method is nn.Module.__call__:
        return module
    if method is getattr(type(module), "forward", None) and may_have_kernel(module):
        return module  # there is no hook that the call of the module would add
    return BoundMethod(module, method)


def _call(module: nn.Module, *inputs: Any, **named: Any) -> object:
    return module(*inputs, **named)


_call.__name__ = "forward"


def weights_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module whose weights a function uses: itself, or what its method is bound to."""
    if isinstance(function, BoundMethod):
        return function.module
    return function if isinstance(function, nn.Module) else None


def called_by(function: Callable[..., Any]) -> str:
    """What errors and drawings call it: a module's class, a function's name."""
    if isinstance(function, BoundMethod):
        return function.detail()
    name = None if isinstance(function, nn.Module) else getattr(function, "__name__", None)
    return name or type(function).__name__


def path_inside(module: nn.Module, inner: nn.Module) -> str | None:
    """Where a module stands inside another; None: it does not."""
    return next((path for path, found in module.named_modules() if found is inner), None)


def in_place_of(
    function: Callable[..., Any], module: nn.Module, copy: nn.Module
) -> Callable[..., Any]:
    """The same function of a copy of the module that it is inside of.

    Args:
        function: A module inside ``module``, or a method of one.
        module: A part's.
        copy: Has the same modules at the same places.
    """
    if copy is module:
        return function
    weights = weights_of(function)
    assert weights is not None
    path = path_inside(module, weights)
    assert path is not None  # ``through`` has seen to it
    there = copy.get_submodule(path)
    if there is weights:
        return function
    return function.of(there) if isinstance(function, BoundMethod) else there

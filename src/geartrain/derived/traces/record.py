"""What a function of tensors calls, as a graph: it is run once, and every operator noted.

    arguments ─► function, under a dispatch mode ─► graph of aten operators, shapes, constants

``make_fx`` would give the same graph. It also makes an imagined twin of every tensor and reads the
stack at every operator, which is most of what it takes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, fx
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

from geartrain.derived.draws import drawn, evenly_drawn
from geartrain.derived.told.chances import CHANCES
from geartrain.derived.told.composed import COMPOSED, WITHIN_ROWS
from geartrain.derived.told.elementary import ELEMENTARY
from geartrain.derived.told.grown import GROWN
from geartrain.derived.told.layers import Layers
from geartrain.derived.told.moved import LAID, MOVED
from geartrain.derived.told.otherwise import OTHERWISE, dropped
from geartrain.derived.told.simpler import SIMPLER
from geartrain.derived.told.unrolled import UNROLLED
from geartrain.derived.told.windows import WINDOWS
from geartrain.derived.traces.turns import TURNS, at_once
from geartrain.derived.traces.unsearched import Unsearched
from geartrain.derived.traces.unvalidated import unvalidated
from geartrain.errors import GraphError
from geartrain.native import library
from geartrain.nodes.uncompiled import UncompiledMode, uncompiled, without_symbols

_TOLD: Final[Mapping[Any, Callable[..., Any]]] = {**SIMPLER, **ELEMENTARY, **MOVED, **CHANCES}
_OF_WINDOWS: Final[dict[Any, Callable[..., Any]]] = {**WINDOWS, **GROWN}
_LIFTED: Final = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


_MOST: Final = (torch.ops.aten.max.default, torch.ops.aten.amax.default)
_PASSING: Final = (
    torch.ops.aten.clone.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten._to_copy.default,
)


class LooksAtValues(GraphError):
    """A function asks a tensor for its values, so that other values may take another way."""


@final
@dataclass(frozen=True, slots=True)
class Trace:
    """A function's operators.

    Args:
        graph: A placeholder for each argument, calls, results; tensors on the CPU have their dtype
            in ``meta``.
        shapes: Of the tensors in it.
        constants: Tensors that it read besides its arguments, by name.
        alien: Whether one of those existed before: it is somebody's, and not made by the code.
        windows: Whether something was told by windows of rows, which torch computes faster.
    """

    graph: fx.Graph
    shapes: Mapping[fx.Node, tuple[int, ...]]
    constants: Mapping[str, Tensor]
    alien: bool
    windows: bool


def record(
    function: Callable[..., Sequence[Tensor]],
    arguments: Sequence[Tensor],
    *,
    composed: bool = False,
    windows: bool = True,
    lengths: int | None = None,
) -> Trace:
    """Run a function and note what it calls; in-place operators are to be made functional before.

    Args:
        function: It.
        arguments: What it is given.
        composed: Whether all is to be made of simpler operators that may be, however much it is.
        windows: Whether else what makes windows of rows is, where there are kernels in C.
        lengths: Which of them says how long bundles are that are all alike: the longest of them
            may be asked for, as it is the length of an axis.

    Raises:
        LooksAtValues: It asks a tensor for its values.
    """
    recorder = _Recorder(lengths)
    for k, x in enumerate(arguments):
        recorder.give(x, recorder.graph.placeholder(f"given_{k}"))
    by_c = windows and library.current() is not None
    told = COMPOSED if composed else WITHIN_ROWS | _OF_WINDOWS if by_c else WITHIN_ROWS
    functions = _WithoutLooking(told, layers=by_c and not composed)
    with uncompiled(), without_symbols(), torch.enable_grad(), unvalidated(), functions, recorder:
        results = function(*arguments)
    recorder.graph.output([recorder.node_of(x) for x in results])
    found = recorder.graph, recorder.shapes, recorder.constants, recorder.alien
    return Trace(*found, functions.windows)


class _WithoutLooking(TorchFunctionMode):
    """Has functions computed by others, which look at no values and have steps in C.

    ``one_hot`` of a number of classes becomes rows of a unit matrix; a class out of range is
    refused by the look-up.

    Args:
        told: What are made of simpler operators.
        layers: Whether layers are looked at; else recurrent ones are torch's.

    Attributes:
        windows: Whether windows of rows were.
    """

    def __init__(self, told: Mapping[Any, Callable[..., Any]], *, layers: bool) -> None:
        super().__init__()
        self._told, self.windows = told, False
        self._layers = Layers(self._call) if layers else None

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(function, (), args, kwargs)

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._layers is not None:
            found = self._layers.taken(function, args, kwargs)
            if found is None and function in UNROLLED:
                found = UNROLLED[function](self._layers, *args, **kwargs)
            if found is not None:
                return found
        if function in OTHERWISE:
            return OTHERWISE[function](*args, **kwargs)
        if function in self._told:
            found = self._told[function](*args, **kwargs)
            if found is not None:
                self.windows = self.windows or function in _OF_WINDOWS
                return found
        found = _called(function, args, kwargs)
        if self._layers is not None:
            self._layers.notice(function, args, kwargs, found)
        return found


def _called(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What torch returns, or the reason why it cannot."""
    try:
        return (dropped if function is dropout else function)(*args, **kwargs)
    except RuntimeError as error:
        if function is Tensor.tolist:
            raise LooksAtValues("its way depends on values: it calls tolist") from error
        raise


@final
class _Recorder(UncompiledMode):
    def __init__(self, lengths: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lengths = lengths
        self.graph = Unsearched()
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.constants: dict[str, Tensor] = {}
        self.alien = False
        self._nodes: dict[int, fx.Node] = {}
        self._given: list[fx.Node] = []
        self._held: list[Tensor] = []  # or another tensor could come by an id

    def give(self, x: Tensor, node: fx.Node) -> None:
        self._given.append(node)
        self.note(x, node)

    def note(self, x: Tensor, node: fx.Node) -> None:
        self._nodes[id(x)] = node
        self._held.append(x)
        self.shapes[node] = tuple(x.shape)
        if x.is_cpu:
            node.meta["dtype"] = x.dtype

    def node_of(self, x: Tensor) -> fx.Node:
        found = self._nodes.get(id(x))
        if found is None:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = x
            found = self.graph.create_node("get_attr", name)
            self.note(x, found)
        return found

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in _TOLD:
            with self:
                found = _TOLD[function](*args, **kwargs)
            if found is not None:
                return self._as_it_lies(found, function, args, kwargs)
        known = len(self.constants)
        node_args, node_kwargs = self._arguments(args), self._arguments(dict(kwargs))
        if len(self.constants) > known and function not in _LIFTED:
            self.alien = True
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            node = self._call(function, node_args, node_kwargs)
            self.note(result, at_once(node, result.dim()) if function in TURNS else node)
        elif isinstance(result, (tuple, list)):
            node = self._call(function, node_args, node_kwargs)
            for k, x in enumerate(result):
                if isinstance(x, Tensor):
                    self.note(x, self.graph.call_function(operator.getitem, (node, k)))
        elif isinstance(result, (bool, int, float, complex)) and self._may_change(node_args):
            if not self._is_longest(node_args):
                raise LooksAtValues(_asks(function))
        return result

    def _as_it_lies(self, found: Any, function: Any, args: Any, kwargs: Any) -> Any:
        """What was told, with the strides of torch's where autograd asks for them."""
        if function not in LAID:
            return found
        result = function(*args, **kwargs)
        self.note(result, self.node_of(found))
        return result

    def _is_longest(self, args: Any) -> bool:
        """Whether an operator got the length of the longest bundle, and they are all alike."""
        if self._lengths is None:
            return False
        seen, asked = args[0], False
        while isinstance(seen, fx.Node) and seen.op == "call_function":
            asked = asked or seen.target in _MOST
            if seen.target not in _MOST and seen.target not in _PASSING:
                return False
            seen = seen.args[0]
        return asked and seen is self._given[self._lengths]

    def _may_change(self, args: Any) -> bool:
        """Whether what an operator got depends on the arguments of the function, or on chance."""
        waiting = [x for x in _flat(args) if isinstance(x, fx.Node)]
        seen: set[fx.Node] = set()
        while waiting:
            x = waiting.pop()
            if x.op == "placeholder" or draws(x):
                return True
            if x not in seen:
                seen.add(x)
                waiting += x.all_input_nodes
        return False

    def _call(self, function: Any, args: Any, kwargs: Any) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (tuple, list)):
            return type(value)([self._arguments(x) for x in value])
        if isinstance(value, dict):
            return {name: self._arguments(x) for name, x in value.items()}
        return value


def _asks(function: Any) -> str:
    """Why there is no trace of what calls this."""
    if function is torch.ops.aten._local_scalar_dense.default:
        return "its way depends on values: .item(), int(), an if on a tensor, or validate_args=True"
    return f"its way depends on values: it calls {function}"


def draws(x: fx.Node) -> bool:
    """Whether it draws random numbers."""
    own = x.target in (drawn, evenly_drawn)
    return own or torch.Tag.nondeterministic_seeded in getattr(x.target, "tags", ())


def _flat(value: Any) -> list[Any]:
    return [y for x in value for y in _flat(x)] if isinstance(value, (tuple, list)) else [value]

"""A graph of operators as a function in Python, and that by torch's own bindings where it has them.

    %mul = aten.mul.Tensor(%a, %b)   ─►   v7 = f3(v1, v2)      f3 = torch.mul
                                          v1 = None            nobody reads it after this

An operator of ``torch.ops`` looks up its schema at each call, which takes as long as a few rows do;
a binding such as ``torch.mul`` has its arguments parsed in C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_BINDINGS: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.add.Tensor: torch.add,
    aten.add.Scalar: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.sub.Scalar: torch.sub,
    aten.rsub.Scalar: torch.rsub,
    aten.mul.Tensor: torch.mul,
    aten.mul.Scalar: torch.mul,
    aten.div.Tensor: torch.div,
    aten.div.Scalar: torch.div,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.relu.default: torch.relu,
    aten.gelu.default: torch._C._nn.gelu,
    aten.silu.default: torch._C._nn.silu,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.where.self: torch.where,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.expand.default: Tensor.expand,
    aten.reshape.default: torch.reshape,
    aten.select.int: torch.select,
    aten.split.Tensor: torch.unsafe_split,  # views too
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.embedding.default: torch.embedding,
}


def emit(graph: fx.Graph, constants: Mapping[str, Tensor]) -> Callable[..., Any]:
    """A function of the graph's placeholders that gives its results as a tuple.

    Args:
        graph: Of placeholders, ``get_attr`` of constants, calls of functions, and an output.
        constants: By name.
    """
    return _Emitter(constants).function(graph)


@final
class _Emitter:
    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        self._constants = constants
        self._space: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._names: dict[fx.Node, str] = {}
        self._known: dict[int, str] = {}

    def function(self, graph: fx.Graph) -> Callable[..., Any]:
        nodes = list(graph.nodes)
        self._names = {x: f"v{k}" for k, x in enumerate(nodes)}
        last = {source: x for x in nodes for source in x.all_input_nodes}
        arguments = [self._names[x] for x in nodes if x.op == "placeholder"]
        lines = []
        for x in nodes:
            if x.op == "call_function":
                lines.append(f"{self._names[x]} = {self._call(x)}")
            elif x.op == "get_attr":
                lines.append(f"{self._names[x]} = {self._held(self._constants[str(x.target)])}")
            elif x.op == "output":
                lines.append(f"return ({''.join(self._value(y) + ', ' for y in x.args[0])})")
            over = [self._names[y] for y in dict.fromkeys(x.all_input_nodes) if last[y] is x]
            if over and x.op != "output":
                lines.append(" = ".join([*over, "None"]))
        source = f"def program({', '.join(arguments)}):\n    " + "\n    ".join(lines) + "\n"
        exec(compile(source, "<derived kernel>", "exec"), self._space)
        program: Callable[..., Any] = self._space["program"]
        return program

    def _call(self, x: fx.Node) -> str:
        args: Any = x.args
        if x.target is operator.getitem:
            return f"{self._value(args[0])}[{self._value(args[1])}]"
        if x.target is operator.mul:
            return f"{self._value(args[0])} * {self._value(args[1])}"
        if x.target is aten.slice.Tensor and len(args) >= 2 and args[1] >= 0:
            ends = ":".join("" if each is None else self._value(each) for each in args[2:])
            return f"{self._value(args[0])}[{':, ' * args[1]}{ends or ':'}]"
        target: Any = x.target
        found = _BINDINGS.get(target, getattr(target, "_op", target))
        given = [self._value(y) for y in args]
        given += [f"{name}={self._value(y)}" for name, y in x.kwargs.items()]
        return f"{self._held(found)}({', '.join(given)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, (tuple, list)):
            inner = ", ".join(self._value(x) for x in value)
            return f"[{inner}]"
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        return self._held(value)

    def _held(self, thing: Any) -> str:
        """A name for what cannot be written down."""
        if id(thing) not in self._known:
            self._known[id(thing)] = f"c{len(self._known)}"
            self._space[self._known[id(thing)]] = thing
        return self._known[id(thing)]

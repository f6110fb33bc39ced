"""Weights that a module computes of its weights: once a firing, as if they were its own.

f(W, x) = x (g / |W| W)ᵀ   ─►   V = g / |W| W,  once      g(W, V, x) = x Vᵀ,  in C
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, fx, nn

from geartrain.derived.operands import Operands
from geartrain.derived.traces.counted import PRODUCTS, CountedGraph, Function
from geartrain.derived.traces.indexed import RowsOfTables
from geartrain.derived.traces.record import draws, record
from geartrain.native.steady import firing
from geartrain.nodes.call import differentiate
from geartrain.nodes.gradient import GradientSum

aten = torch.ops.aten

_PARTS: Final = (aten.slice.Tensor, aten.select.int)
"""Which of an operand, where they meet no rows in a product, have no steps."""
_SEEN: Final = (aten.view.default, aten._unsafe_view.default)
"""How a table may be seen that is looked up in."""
_VIEWS: Final = frozenset(
    {
        aten.t.default,
        *_PARTS,
        *_SEEN,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
    }
)
"""Of an operand they cost nothing, but where it meets rows in a product."""


_View: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The number of an operand, and shape and strides of a view that has each of its entries once."""


@final
@dataclass(frozen=True, slots=True)
class ComputedWeights:
    """What functions of one structure compute of their weights.

    Args:
        code: Gives them, of all operands.
        likes: Tensors of their shapes and dtypes.
        same: Which of them are the same whatever the weights are, and learn nothing.
    """

    code: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    likes: tuple[Tensor, ...]
    same: frozenset[int] = frozenset()

    def learned(self) -> list[bool]:
        """Of each, whether it has a gradient."""
        return [x.is_floating_point() and k not in self.same for k, x in enumerate(self.likes)]


def apart(
    function: Function, operands: Sequence[Tensor], samples: Sequence[Sequence[Tensor]]
) -> tuple[ComputedWeights, Function] | None:
    """What a function computes of operands alone; and it, of operands, those, and inputs.

    Args:
        function: It.
        operands: Its weights and buffers.
        samples: Inputs of ``SIZES`` rows.

    Returns:
        None: It computes nothing of them alone.
    """
    whole = forward_of(function, operands, samples)
    late: set[fx.Node] = {whole.n, *whole.inputs}
    for x in whole.graph.nodes:
        if draws(x) or x.op == "output" or any(y in late for y in x.all_input_nodes):
            late.add(x)
    found: dict[fx.Node, None] = {}
    for x in late:
        for y in x.all_input_nodes if x.op == "call_function" else ():
            if y not in late and (one := _computed(whole, x, y)) is not None:
                found[one] = None
    order = {x: k for k, x in enumerate(whole.graph.nodes)}
    computed = sorted(found, key=order.__getitem__)
    if not computed:
        return None
    code = whole.code([], computed)

    def compute(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(code(0, *given))

    with torch.no_grad():
        likes = tuple([x.detach().contiguous() for x in compute(operands)])
    rest = whole.function([*computed, *whole.inputs], whole.results())
    return ComputedWeights(compute, likes), rest


def forward_of(
    function: Function, operands: Sequence[Tensor], samples: Sequence[Sequence[Tensor]]
) -> CountedGraph:
    """What a function computes, without its gradient."""
    n, inputs = len(operands), len(samples[0])

    def flat(*given: Tensor) -> tuple[Tensor, ...]:
        with RowsOfTables(given[:n]):
            return function(given[:n], [x.clone() for x in given[n:]])

    functional = torch.func.functionalize(flat)
    return CountedGraph([record(functional, [*operands, *x]) for x in samples], n, inputs)


def _computed(whole: CountedGraph, reader: fx.Node, x: fx.Node) -> fx.Node | None:
    """Of what a reader of rows reads of operands alone: what had better be computed before; None:
    it is an operand, a view that costs nothing, or a unit matrix of which rows are looked up."""
    args: Any = reader.args
    if reader.target in PRODUCTS and x is args[-1]:
        own = x.args[0] if x.target is aten.t.default else x
        assert isinstance(own, fx.Node)
        of = own.args[0] if own.target is aten.slice.Tensor else own
        return None if of in whole.operands else own
    looks, y = reader.target is aten.embedding.default and x is args[0], x
    if looks and x.target is aten.eye.default:  # of which a step needs no rows
        return None
    while y.target in _VIEWS:
        if y.target in _PARTS or (looks and y.target not in _SEEN):
            return x
        source = y.args[0]
        assert isinstance(source, fx.Node)
        y = source
    return None if y in whole.operands or y.op != "call_function" else x


@final
class ComputedOperands:
    """The operands of a function, and behind them what it computes of them.

    Args:
        own: Its operands.
        computed: What it computes.

    Attributes:
        names, sparse: As of ``Operands``.
        stand_ins: Parameters that sums of gradients know what is computed by.
    """

    def __init__(self, own: Operands, computed: ComputedWeights) -> None:
        self.own, self._computed = own, computed
        likes = computed.likes
        self.names = [*own.names, *[f"computed {k}" for k in range(len(likes))]]
        self.sparse = [*own.sparse, *[False] * len(likes)]
        self.stand_ins = [nn.Parameter(torch.empty_like(x)) for x in likes]
        self._known: tuple[int, list[Tensor]] = 0, []  # for the length of a firing
        self._views: Sequence[_View | None] = [None] * len(likes)

    @property
    def key(self) -> Hashable:
        """That of its sums."""
        return id(self)

    def tensors(self) -> list[Tensor]:
        """Those of now, not to be written to."""
        number, known = firing.number, self._known
        if number and number == known[0]:
            return known[1]
        own = self.own.tensors()
        learn = any(_learns(x) for x in own)
        with torch.no_grad():
            found = self._computed.code(own)
        self._views = [_view_of(y, own) for y in found]
        computed = [  # in memory of its own
            y.detach().contiguous()
            if view is None
            else y.clone(memory_format=torch.contiguous_format)
            for y, view in zip(found, self._views, strict=True)
        ]
        for y in computed:
            y.requires_grad_(learn)
        self._known = number, [*own, *computed]
        return self._known[1]

    def learner(self, k: int, into: GradientSum) -> tuple[nn.Parameter, GradientSum]:
        """As of ``Operands``; what is computed has a sum of its own."""
        behind = k - len(self.own.names)
        if behind < 0:
            return self.own.learner(k, into)
        return self.stand_ins[behind], into.of_computed(self)

    def back(self, gradients: Sequence[Tensor | None]) -> list[tuple[nn.Parameter, Tensor]]:
        """What weights get, of the gradients of what is computed of them."""
        own = self.own.tensors()
        found, rest = [], list(gradients)
        for k, (d, view) in enumerate(zip(gradients, self._views, strict=True)):
            x = None if view is None or d is None else own[view[0]]
            if isinstance(x, nn.Parameter) and view is not None and d is not None:
                mine = torch.empty_like(x, requires_grad=False)
                mine.as_strided(*view[1:]).copy_(d)
                found.append((x, mine))
                rest[k] = None
        return found if all(d is None for d in rest) else [*found, *self._differentiated(rest)]

    def _differentiated(
        self, gradients: Sequence[Tensor | None]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """What weights get of what is more than a view of one."""
        own = self.own.tensors()
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(_learns(x)) for x in own]
            outputs = self._computed.code(leaves)
            wanted = [x for x in leaves if x.requires_grad]
            found = differentiate(outputs, tuple(gradients), wanted)
        learning = [x for x in own if isinstance(x, nn.Parameter) and _learns(x)]
        return [(x, d) for x, d in zip(learning, found, strict=True) if d is not None]


def _view_of(y: Tensor, own: Sequence[Tensor]) -> _View | None:
    """Of which operand that learns something computed is a view; None: of none."""
    for k, x in enumerate(own):
        if y.data_ptr() == x.data_ptr() and y.numel() == x.numel() and _learns(x):
            if x.is_contiguous() and aten.is_non_overlapping_and_dense(y):
                return k, tuple(y.shape), y.stride()
    return None


def _learns(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) and x.requires_grad and x.is_floating_point()

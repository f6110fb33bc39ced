"""The node for whole messages that stay together: autograd's own graph of each is kept.

    forward   x  ─► y = f(x; θ of the message)     keep autograd's graph
    backward  dy ─► dx, dθ                         go back through it

Source: stages of PipeDream, Narayanan et al. 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.ir.call import (
    Call,
    as_payload,
    differentiate,
    look_inside,
    one_by_one,
    read_columns,
    run_module,
)
from geartrain.ir.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    Payload,
    address,
    join_column,
    join_gradient,
)
from geartrain.ir.node import AbstractNode, Emission, Place
from geartrain.ir.rows import RowStore
from geartrain.ir.weights import AbstractWeights


@final
class GraphNode(AbstractNode):
    """Run a module on one whole message at a time and keep autograd's graph of it.

    For bundles that stay together (minibatches): no forward runs twice, batch normalisation and
    dropout work, and the gradient is that of the weights that made the output.

    Args:
        place: Number, name, frames.
        call: The module and how it is called; must be an ``nn.Module`` if it has parameters.
        weights: The part, or None where there are no parameters.
    """

    alone = True

    def __init__(self, place: Place, call: Call, weights: AbstractWeights | None) -> None:
        super().__init__(place)
        self._call, self._weights = call, weights
        self.part_name = None if weights is None else weights.name
        self._rows = RowStore(place.name, ("origin", "version"))
        self._graphs: dict[int, _Kept] = {}

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        return Emission([(0, self._forward_one(one, train)) for one in one_by_one(batches)])

    def _forward_one(self, one: Forward, train: bool) -> Forward:
        width = len(one.payload)
        inputs = [join_column([(one.payload[j], one.index)]) for j in self._call.taken(width)]
        inputs += read_columns(self._call, self.place, one.state, one.lengths)
        inside = (
            look_inside(self.place, one.state[INSTANCE], one.lengths) if self._call.inside else None
        )
        lengths = None if self._call.pool else one.lengths
        if not train:
            with torch.no_grad():
                outputs = as_payload(run_module(self._call.function, inputs, inside))
            return Forward(outputs, one.state, one.origin, lengths)
        inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        function, parameters, leaves = self._stashed()
        with torch.enable_grad():
            outputs = as_payload(run_module(function, inputs, inside))
        row = self._rows.allocate(1)
        self._rows["origin"][row] = one.origin[0]
        if self._weights is not None:
            self._rows["version"][row] = self._weights.version
            self._weights.sent(1)
        self._graphs[row] = _Kept(inputs, outputs, parameters, leaves, one.lengths, width)
        sent = tuple(y.detach() for y in outputs)
        return Forward(sent, one.state, address(self.id, row, 1), lengths)

    def backward(self, batches: Sequence[Backward]) -> Emission:
        return Emission(backward=[self._backward_one(one) for one in one_by_one(batches)])

    def _backward_one(self, one: Backward) -> Backward:
        row = int(one.rows[0] & ROW_MASK)
        rows = np.array([row], np.int64)
        origin, versions = self._rows["origin"][rows], self._rows["version"][rows]
        self._rows.release(rows)
        kept = self._graphs.pop(row)
        if one.gradient is None:
            if self._weights is not None:
                self._weights.dropped(versions)
            return Backward(origin, None)
        wanted = [x for x in kept.inputs if x.requires_grad]
        found = differentiate(kept.outputs, join_gradient([one]), [*wanted, *kept.leaves])
        if self._weights is not None:
            for parameter, d in zip(kept.parameters, found[len(wanted) :], strict=True):
                if d is not None:
                    self._weights.gradient.add(parameter, d)
            self._weights.received(kept.inputs[0].shape[0], versions, kept.lengths)
        answers = iter(found[: len(wanted)])
        gradient = tuple(next(answers) if x.requires_grad else None for x in kept.inputs)
        gradient = self._call.answer(gradient, kept.width)
        if all(g is None for g in gradient):
            return Backward(origin, None)
        return Backward(origin, gradient, kept.lengths)

    def check_empty(self) -> None:
        self._rows.check_empty()

    def story(self) -> list[str]:
        n = self._rows.waiting
        return [f"'{self.name}' waits for the gradients of {n} messages"] if n else []

    def nbytes(self) -> int:
        return sum(
            x.nelement() * x.element_size()
            for kept in self._graphs.values()
            for x in (*kept.inputs, *kept.outputs)
        )

    def _stashed(self) -> tuple[Callable[..., Any], list[nn.Parameter], list[Tensor]]:
        """The module at the weights of now, whatever steps follow before its backward."""
        module = self._call.function
        if self._weights is None or not isinstance(module, nn.Module):
            return module, [], []
        aliases = self._weights.aliases()
        named = dict(module.named_parameters(remove_duplicate=False))
        stash = {name: aliases[p] for name, p in named.items()}

        def function(*args: object) -> object:
            return torch.func.functional_call(module, stash, args)

        wanted = [p for p in dict.fromkeys(named.values()) if p.requires_grad]
        return function, wanted, [aliases[p] for p in wanted]


@final
@dataclass(frozen=True, slots=True)
class _Kept:
    """Autograd's graph of one message."""

    inputs: list[Tensor]
    outputs: Payload
    parameters: list[nn.Parameter]
    leaves: list[Tensor]
    lengths: IntArray | None
    width: int

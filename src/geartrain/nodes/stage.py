"""The node for whole messages that stay together: autograd's own graph of each is kept.

    forward   x  ─► y = f(x; θ seen)     keep autograd's graph, or x alone where it runs again
    backward  dy ─► dx, dθ               back through the graph, at the θ that the part's view gives

Which weights a forward sees, and which its backward, is the part's affair: ``AbstractWeights.look``
and ``look_back``.

Source: stages of PipeDream, Narayanan et al. 2019, and of PipeMare, Yang et al. 2021,
arXiv:1910.05124.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    Payload,
    address,
    join_gradient,
    wants_gradient,
)
from geartrain.nodes.call import (
    Call,
    arguments,
    as_payload,
    differentiate,
    gather_inputs,
    one_by_one,
    own_integers,
    run_module,
    where_it_computes,
)
from geartrain.nodes.chance import Remembered
from geartrain.nodes.hooks import hooked
from geartrain.nodes.inside import Inside, look_inside
from geartrain.nodes.keeping import KeepingNode
from geartrain.nodes.leaves import foreign, foreign_story
from geartrain.nodes.method import called_by
from geartrain.nodes.node import Emission, Place
from geartrain.nodes.stand_in import plain
from geartrain.nodes.weights import AbstractWeights, WeightVersion


@final
class GraphNode(KeepingNode):
    """Run a module on one whole message at a time and keep autograd's graph of it.

    For bundles that stay together (minibatches): batch normalisation and dropout work, and the
    gradient is that of the weights that the part's view says: of those that made the output, unless
    told otherwise.

    Args:
        place: Number, name, frames.
        call: The module and how it is called; must be an ``nn.Module`` if it has parameters.
        weights: The part, or None where there are no parameters.
    """

    alone = True
    kept_are = "messages"

    def __init__(self, place: Place, call: Call, weights: AbstractWeights | None) -> None:
        super().__init__(place, call, weights)
        self._kept: dict[int, _Kept] = {}
        self._parameters: list[nn.Parameter] = []
        self._walked = False
        self._held: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] | None = None
        if weights is not None and isinstance(call.function, nn.Module):
            self._parameters = [p for p in call.function.parameters() if p.requires_grad]

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        return Emission([(0, self.forward_one(one, train)) for one in one_by_one(batches)])

    def forward_one(self, one: Forward, train: bool, *, learn: bool = True) -> Forward:
        """One message; without ``learn`` its gradient will pass through and leave no trace."""
        width = len(one.payload)
        if self.place.spread:
            self._device = where_it_computes(self._call, self._weights, [one])
        device = self._device
        inputs = list(
            gather_inputs(self._call, self.place, [one], one.state, one.lengths, {}, device)
        )
        inside = None
        if self._call.inside:
            inside = look_inside(self.place, one.state[INSTANCE], one.lengths, device)
        came = [x._version for x in inputs]
        lengths = None if self._call.pool else one.lengths
        if not train:
            with torch.no_grad():
                outputs = as_payload(run_module(self._call.function, inputs, inside))
            self._refuse_writing(inputs, came)
            return Forward(own_integers(outputs), one.state, one.origin, lengths)
        kept = _Kept(inputs, inside, one.lengths, width, learn, wants_gradient(one.origin))
        kept = self._run(kept, int(one.state[INSTANCE, 0]))
        self._refuse_writing(inputs, came)
        row = self._rows.allocate(1)
        self._rows["origin"][row] = one.origin[0]
        self._rows["instance"][row] = one.state[INSTANCE, 0]
        if self._weights is not None and kept.seen is not None:
            self._rows["version"][row] = kept.seen.version
            self._weights.sent(1, kept.seen.version)
        self._kept[row] = kept
        sent = own_integers(tuple(y.detach() for y in kept.outputs))
        if kept.chance is not None:
            kept.outputs = ()
        return Forward(sent, one.state, address(self.id, row, 1), lengths)

    def _run(self, kept: _Kept, slot: int) -> _Kept:
        """The forward of a message in training, for the way back."""
        if self._weights is not None:
            number, rows = int(self.place.arena.serial[slot]), kept.inputs[0].shape[0]
            kept.seen = self._weights.look(number, rows)
            if kept.seen.again:
                with torch.no_grad(), Remembered() as kept.chance:
                    kept.outputs = as_payload(
                        run_module(self._call.function, kept.inputs, kept.inside)
                    )
                return kept
        self._trace(kept, None if kept.seen is None else kept.seen.leaves)
        return kept

    def _trace(
        self, kept: _Kept, leaves: Mapping[nn.Parameter, Tensor] | None, *, again: bool = False
    ) -> None:
        """Make autograd's graph of a message, at these weights."""
        function = self._at(leaves, learn=kept.learn, again=again)
        kept.inputs = [
            x.detach().requires_grad_(kept.answered) if x.is_floating_point() else x
            for x in kept.inputs
        ]
        with torch.enable_grad():
            kept.outputs = as_payload(run_module(function, kept.inputs, kept.inside))
        if not self._walked:
            self._refuse_foreign(kept, function, [] if leaves is None else list(leaves.values()))

    @torch.enable_grad()
    def _refuse_foreign(
        self, kept: _Kept, called: Callable[..., Any], leaves: Sequence[Tensor]
    ) -> None:
        """Once: nothing else may learn from a message than the leaves that it is differentiated by.

        Raises:
            GraphError: The module uses weights that are not its own, or not by its attributes.
        """
        self._walked = True
        function = plain(self._call.function)
        weights = foreign(
            kept.outputs,
            [*kept.inputs, *leaves],
            function,
            lambda: as_payload(run_module(called, kept.inputs, kept.inside)),
        )
        if weights is not None:
            raise GraphError(foreign_story(self.name, called_by(function), weights))

    def backward(self, batches: Sequence[Backward]) -> Emission:
        return Emission(backward=[self.backward_one(one) for one in one_by_one(batches)])

    def backward_one(
        self, one: Backward, want: Literal["all", "inputs", "weights"] = "all"
    ) -> Backward:
        """One answer; ``inputs`` computes their gradient alone, and the message goes on waiting."""
        row = int(one.rows[0] & ROW_MASK)
        rows = np.array([row], np.int64)
        origin, versions = self._rows["origin"][rows], self._rows["version"][rows]
        kept = self._kept[row]
        if want != "inputs":
            self._rows.release(rows)
            del self._kept[row]
        if one.gradient is None:
            if self._weights is not None:
                self._weights.dropped(versions)
            return Backward(origin, None)
        leaves = self._leaves_back(kept)
        wanted = [x for x in kept.inputs if x.requires_grad and want != "weights"]
        found = differentiate(
            kept.outputs,
            join_gradient([one], self._device),
            [*wanted, *(leaves if want != "inputs" else ())],
            retain=want == "inputs",
        )
        by_weights = [
            d if leaf is p else hooked(p, d)
            for p, leaf, d in zip(self._parameters, leaves, found[len(wanted) :], strict=False)
        ]
        if self._weights is not None and not kept.learn:
            self._weights.dropped(versions)
        elif self._weights is not None and kept.seen is not None and want != "inputs":
            n = kept.inputs[0].shape[0]
            gradients = self._weights.compensated(kept.seen, self._parameters, by_weights, n)
            for parameter, d in zip(self._parameters, gradients, strict=True):
                if d is not None:
                    self._weights.gradient.add(parameter, d)
            self._weights.received(n, versions, kept.lengths)
        answers = iter(found[: len(wanted)])
        gradient = tuple(next(answers) if wanted and x.requires_grad else None for x in kept.inputs)
        gradient = self._call.answer(gradient, kept.width)
        if all(g is None for g in gradient):
            return Backward(origin, None)
        return Backward(origin, gradient, kept.lengths)

    def _leaves_back(self, kept: _Kept) -> list[Tensor]:
        """The leaves to differentiate by; a module that runs again has done so."""
        if self._weights is None or kept.seen is None:
            return []
        leaves = self._weights.look_back(kept.seen)
        if kept.chance is not None:
            with kept.chance.repeated():
                self._trace(kept, leaves, again=True)
        if not kept.learn:
            return []
        return [leaves[p] for p in self._parameters]

    def nbytes(self) -> int:
        return sum(kept.nbytes() for kept in self._kept.values())

    def _refuse_writing(self, inputs: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Others may read the same rows: heads beside this node, buffers of replays."""
        for j, (x, version) in enumerate(zip(inputs, versions, strict=True)):
            if x._version != version:
                raise GraphError(
                    f"'{self.name}': its module writes into its argument {j}, which others may "
                    "read; begin it with an operation that is not in place (inplace=False)"
                )

    def _at(
        self,
        leaves: Mapping[nn.Parameter, Tensor] | None,
        *,
        learn: bool = True,
        again: bool = False,
    ) -> Callable[..., Any]:
        """The module at these weights; what it writes into buffers the second time is lost."""
        module = self._call.function
        if leaves is None or not isinstance(module, nn.Module):
            return module
        seen = leaves if learn else {p: leaf.detach() for p, leaf in leaves.items()}
        if not again and not isinstance(module, torch.jit.ScriptModule):
            return partial(self._called_at, module, seen)
        named = module.named_parameters(remove_duplicate=False)
        tensors = {name: seen[p] for name, p in named}
        copies: dict[int, Tensor] = {}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            tensors[name] = copies.setdefault(id(buffer), buffer.clone())

        def function(*args: Any) -> object:
            return torch.func.functional_call(module, tensors, arguments(module, args))

        return function

    def _called_at(
        self, module: nn.Module, leaves: Mapping[nn.Parameter, Tensor], *args: Any
    ) -> object:
        """``torch.func.functional_call``, with where parameters are looked up once."""
        if self._held is None:
            self._held = [
                (inner._parameters, name, p)
                for inner in module.modules()
                for name, p in inner._parameters.items()
                if p is not None
            ]
        try:
            for parameters, name, p in self._held:
                parameters[name] = leaves[p]  # type: ignore[assignment]
            return module(*arguments(module, args))
        finally:
            for parameters, name, p in self._held:
                parameters[name] = p


@final
@dataclass(slots=True)
class _Kept:
    """What one message waits with."""

    inputs: list[Tensor]
    inside: Inside | None
    lengths: IntArray | None
    width: int
    learn: bool
    answered: bool
    outputs: Payload = ()
    seen: WeightVersion | None = None
    chance: Remembered | None = None

    def nbytes(self) -> int:
        held = sum(x.nelement() * x.element_size() for x in (*self.inputs, *self.outputs))
        return held + (0 if self.chance is None else self.chance.nbytes())

"""Synthetic gradients: a guess is the answer, and learns from the true one when that comes.

    part below ◄─ guess M(h) ─ ┌───────────┐ ─ h ─► part above
                               │ interface │
                               └───────────┘ ◄─ true gradient ─   M learns on ‖guess - true‖²

The part below learns at once. Its instance stays open until the true gradient has come.

Source: decoupled neural interfaces of Jaderberg et al. 2016, arXiv:1608.05343.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from geartrain.errors import GraphError
from geartrain.frames.message import (
    CONTROLLER,
    INSTANCE,
    ROW_BITS,
    ROW_MASK,
    Backward,
    Forward,
    Gradient,
    IntArray,
    Payload,
    join_gradient,
)
from geartrain.graph.operator import Spec, describe
from geartrain.graph.use import AbstractUse
from geartrain.nodes.call import Call, one_by_one
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.stage import GraphNode
from geartrain.nodes.weights import AbstractWeights


@final
class SyntheticNode(AbstractNode):
    """Answer every message with a guess, and train what guesses.

    Args:
        inner: Runs the synthesiser; has the same place.
    """

    alone = True

    def __init__(self, inner: GraphNode) -> None:
        super().__init__(inner.place)
        self._inner = inner
        self._guesses: dict[int, Payload] = {}
        self.part_name = inner.part_name

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        if not train:
            return Emission([(0, batch) for batch in batches])
        emission = Emission()
        for one in one_by_one(batches):
            self._forward_one(one, emission)
        return emission

    def _forward_one(self, one: Forward, emission: Emission) -> None:
        slots = one.state[INSTANCE].copy()
        guess = self._inner.forward_one(one.with_origin(slots | (CONTROLLER << ROW_BITS)), True)
        rows, width = one.payload_rows(), len(one.payload)
        _require_shapes(self.name, one.payload, guess.payload, rows)
        self._guesses[int(guess.origin[0] & ROW_MASK)] = guess.payload
        gradient: Gradient = (*guess.payload, *[None] * (width - len(guess.payload)))
        emission.backward.append(Backward(one.origin, gradient, one.lengths))
        emission.forward.append((0, one.with_origin(guess.origin)))
        emission.spawn(slots)

    def backward(self, batches: Sequence[Backward]) -> Emission:
        return Emission(backward=[self._backward_one(one) for one in one_by_one(batches)])

    def _backward_one(self, one: Backward) -> Backward:
        guesses = self._guesses.pop(int(one.rows[0] & ROW_MASK))
        if one.gradient is None:
            return self._inner.backward_one(one)
        true = join_gradient([one])
        error = tuple(
            None if t is None else 2 * (guess - t.to(guess.device))
            for guess, t in zip(guesses, true, strict=False)
        )
        return self._inner.backward_one(Backward(one.rows, error, one.lengths))

    def origins(self, rows: IntArray) -> IntArray | None:
        return self._inner.origins(rows)

    def slots(self, batch: Forward | Backward) -> IntArray:
        return self._inner.slots(batch)

    def check_empty(self) -> None:
        self._inner.check_empty()

    def story(self) -> list[str]:
        n = len(self._guesses)
        return [f"'{self.name}' waits for the true gradients of {n} messages"] if n else []

    def nbytes(self) -> int:
        return self._inner.nbytes()


@final
@dataclass(frozen=True, slots=True)
class Synthesizing(AbstractUse):
    """How ``synthesize`` uses its module."""

    def specs(self, name: str, given: Spec, sent: Spec) -> list[Spec]:
        if given.payload is not None and sent.payload is not None:
            _require_shapes(name, given.payload, sent.payload, given.payload[0].shape[0])
        return [given]

    def make(self, place: Place, call: Call, weights: AbstractWeights | None) -> AbstractNode:
        return SyntheticNode(GraphNode(place, call, weights))

    def detail(self) -> str:
        return "synthetic gradient"


def _require_shapes(
    name: str, payload: Sequence[Tensor], guess: Sequence[Tensor], rows: int
) -> None:
    """A guess for payload tensor 0, 1, ... has its shape."""
    wanted = [(rows, *x.shape[1:]) for x in payload[: len(guess)]]
    if len(guess) > len(payload) or [tuple(g.shape) for g in guess] != wanted:
        raise GraphError(
            f"'{name}': the synthesiser made {describe(guess)} for rows of {describe(payload)}; "
            "it gives the gradient of the first payload tensor, or of the first few, in their "
            "shapes"
        )

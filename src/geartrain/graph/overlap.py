"""Overlapping local losses: a part learns from its own head and from the one above.

    own head  ──gradient──► ┌──────┐ ──input gradient──► the part below
    part above ─gradient──► │ part │      (of the own head's loss alone)
                            └──────┘  weights: both (sum), or the one from above (later)

A local loss so reaches its own part and exactly one further down. The module runs once; the
gradient of the input leaves as soon as the own head has answered, the weights' comes when both
have.

Source: Laskin et al. 2020, arXiv:2012.03837; which of the two rules the paper means is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, final

import numpy as np

from geartrain.frames.message import (
    CONTROLLER,
    INSTANCE,
    ROW_BITS,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    address,
    join_gradient,
)
from geartrain.frames.rows import RowStore
from geartrain.graph.operator import Spec
from geartrain.graph.use import AbstractUse
from geartrain.nodes.call import Call, one_by_one
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.stage import GraphNode
from geartrain.nodes.weights import AbstractWeights

OverlapRule: TypeAlias = Literal["sum", "later"]
UP: Final = 0
OWN: Final = 1


@final
@dataclass(slots=True)
class _Pair:
    """One message that was sent twice, and what has come back of it so far.

    Args:
        inner: Its address in the inner node.
        origin: Where its input came from.
        slot: Of its instance, which stays open until the part above has answered.
    """

    inner: IntArray
    origin: IntArray
    slot: IntArray
    answers: dict[int, Backward] = field(default_factory=dict)


@final
class OverlapNode(AbstractNode):
    """Send every message to the part above (port 0) and to an own head (port 1).

    Args:
        inner: Runs the module and keeps autograd's graph; has the same place.
        rule: ``sum``: the weights' gradient is of both losses; ``later``: of the loss above, or of
            the own one where nothing comes from above.
    """

    alone = True

    def __init__(self, inner: GraphNode, rule: OverlapRule) -> None:
        super().__init__(inner.place)
        self._inner, self._rule = inner, rule
        self._rows = RowStore(inner.place.name, ())
        self._pairs: dict[int, tuple[int, _Pair]] = {}
        self.part_name = inner.part_name

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        emission = Emission()
        for one in one_by_one(batches):
            sent = self._inner.forward_one(one, train)
            slot = one.state[INSTANCE].copy()
            emission.spawn(slot)
            if train:
                start = self._rows.allocate(2)
                pair = _Pair(sent.origin, one.origin, slot)
                for port in (UP, OWN):
                    self._pairs[start + port] = port, pair
                up, own = (address(self.id, start + port, 1) for port in (UP, OWN))
            else:
                up, own = one.origin, slot | (CONTROLLER << ROW_BITS)
            emission.forward.append((UP, sent.with_origin(up)))
            emission.forward.append((OWN, sent.with_origin(own)))
        return emission

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        for one in one_by_one(batches):
            rows = one.rows & ROW_MASK
            port, pair = self._pairs[int(rows[0])]
            pair.answers[port] = one
            if port == OWN:
                emission.backward.append(self._send_down(pair, one))
            else:
                emission.backward.append(Backward(pair.slot | (CONTROLLER << ROW_BITS), None))
            if len(pair.answers) == 2:
                self._learn(pair)
            del self._pairs[int(rows[0])]
            self._rows.release(rows)
        return emission

    def _send_down(self, pair: _Pair, own: Backward) -> Backward:
        if own.gradient is None:
            return Backward(pair.origin, None)
        return self._inner.backward_one(_at(pair.inner, own), "inputs")

    def _learn(self, pair: _Pair) -> None:
        up, own = pair.answers[UP], pair.answers[OWN]
        if up.gradient is None or own.gradient is None:
            taught = own if up.gradient is None else up
        elif self._rule == "later":
            taught = up
        else:
            both = zip(join_gradient([up]), join_gradient([own]), strict=True)
            total = tuple(
                b if a is None else a if b is None else a + b.to(a.device) for a, b in both
            )
            taught = Backward(pair.inner, total, up.lengths)
        self._inner.backward_one(_at(pair.inner, taught), "weights")

    def slots(self, batch: Forward | Backward) -> IntArray:
        if isinstance(batch, Forward):
            return super().slots(batch)
        rows = (batch.rows & ROW_MASK).tolist()
        return np.concatenate([self._pairs[row][1].slot for row in rows])

    @property
    def open(self) -> bool:
        return self._inner.open

    def origins(self, rows: IntArray) -> IntArray | None:
        slots = [self._pairs[row][1].slot for row in rows.tolist() if row in self._pairs]
        return np.concatenate(slots) if slots else None

    def check_empty(self) -> None:
        self._rows.check_empty()
        self._inner.check_empty()

    def story(self) -> list[str]:
        n = self._rows.waiting
        return [f"'{self.name}' waits for {n} gradients from above or from its head"] if n else []

    def nbytes(self) -> int:
        return self._inner.nbytes()


def _at(rows: IntArray, answer: Backward) -> Backward:
    """The same answer to another address."""
    return Backward(rows, answer.gradient, answer.lengths, answer.index)


@final
@dataclass(frozen=True, slots=True)
class Overlapped(AbstractUse):
    """How ``overlap`` uses its module."""

    rule: OverlapRule
    ways = 2
    ports = ("up", "own")

    def specs(self, name: str, given: Spec, sent: Spec) -> list[Spec]:
        return [sent, sent]

    def make(self, place: Place, call: Call, weights: AbstractWeights | None) -> AbstractNode:
        return OverlapNode(GraphNode(place, call, weights), self.rule)

    def detail(self) -> str:
        return f"overlapping, {self.rule}"

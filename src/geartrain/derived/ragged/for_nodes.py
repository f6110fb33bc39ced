"""A ragged program as nodes call it: with rows, and with bundles or a memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from geartrain.derived.ragged.calls import RaggedCall, RaggedKept, call_of_inside, call_of_memory
from geartrain.derived.ragged.listed import inputs_of, listed
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.frames.message import Gradient, Payload
from geartrain.native.calls import SeveralForm
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import Recalled
from geartrain.nodes.inside import Inside
from geartrain.nodes.ragged import AbstractRaggedProgram


@final
class DerivedRagged(AbstractRaggedProgram):
    """A ragged program as nodes call it.

    Args:
        program: It.
        columns: How many of the inputs are columns.
        edges: Names of the edge columns that it knows of, and which of them it reads.
    """

    def __init__(self, program: RaggedProgram, columns: int, edges: Mapping[str, bool]) -> None:
        self.program, self._columns, self._edges = program, columns, edges
        self._listed: list[SeveralForm | None] = []

    def begin_anew(self) -> bool:
        """Whether it is what would be made now; if so it has nothing of the fit before."""
        return self.program.begin_anew()

    @property
    def listed(self) -> SeveralForm | None:
        if not self._listed:
            cut = self.program.cut
            self._listed.append(listed(self.program, inputs_of(cut, self._edges)))
        return self._listed[0]

    def inside(
        self, inputs: Payload, inside: Inside, seeds: Tensor | None = None
    ) -> tuple[Payload, Any]:
        return self.program.forward(call_of_inside(inputs, inside, self._edges, seeds))

    def memory(self, inputs: Payload, memory: Recalled) -> tuple[Payload, Any]:
        call = call_of_memory(inputs, self._columns, memory.payload, memory.starts, memory.lengths)
        return self.program.forward(call)

    def lasting(self, kept: Any) -> Any:
        return self.program.lasting(kept)

    def backward(
        self, kept: Any, gradients: Gradient, into: GradientSum, memory: Recalled | None
    ) -> Gradient:
        call: RaggedCall = kept.call
        if memory is None:
            found = self.program.backward(kept, gradients, into)
            return found[: len(found) - 2 - len(self._edges)]
        sums = None
        touched = self.program.touched(gradients)
        if touched and memory.wanted:
            first = min(call.held)
            sums = {i: total for i, total in enumerate(memory.sums, first) if total is not None}
        found = self.program.backward(_with_memory(kept, memory), gradients, into, sums)
        if sums is not None:
            gets = [total if touched.get(i) else None for i, total in enumerate(memory.sums, first)]
            memory.held.touch(memory.reached, tuple(gets))
        at = min(call.held)
        return (*found[:at], *found[at + len(call.held) + 1 :])


def _with_memory(kept: RaggedKept, memory: Recalled) -> RaggedKept:
    """The call with the memory's tensors of now: they move when more is held."""
    call = kept.call
    held = dict(zip(call.held, memory.payload, strict=True))
    if all(held[i] is x for i, x in call.held.items()):
        return kept
    new = RaggedCall(call.sizes, call.inputs, call.ends, call.cells, held, call.counted)
    return RaggedKept(new, kept.ints, kept.floats, kept.residuals, kept.places)

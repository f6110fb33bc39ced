"""A ragged program as C calls it many at a time: where the tensors of a call lie.

What is to be had so are programs in which nothing but bundles connects rows, and that make rows of
bundles, or of their members, or of what reads one.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from geartrain.derived.ragged.calls import RaggedFound
from geartrain.derived.ragged.cut import RaggedCut, Tensors
from geartrain.derived.ragged.lengths import segment_of
from geartrain.derived.ragged.program import RaggedPlan, RaggedProgram
from geartrain.derived.ragged.values import BUNDLES, MEMBERS, Buffer
from geartrain.native.calls import (
    AbstractSeveralFound,
    Lies,
    SeveralForm,
    SeveralRoutine,
    available,
)
from geartrain.nodes.gradient import GradientSum


def listed(program: RaggedProgram, form: RaggedInputs) -> SeveralForm | None:
    """How C calls a program; None: it cannot."""
    cut = program.cut
    if not available(cut.dtype) or not _fits(cut, program.plans, form):
        return None
    return _Listed(program, form).form()


@final
class RaggedInputs:
    """What the inputs of a program are.

    Args:
        rows: Of each row by row its number, payload first and then columns.
        held: Of a memory.
        lengths, segment: Of bundles, or -1.
    """

    def __init__(
        self, rows: Sequence[int], held: Sequence[int], lengths: int = -1, segment: int = -1
    ) -> None:
        self.rows, self.held = list(rows), list(held)
        self.lengths, self.segment = lengths, segment

    @property
    def inside(self) -> bool:
        """Whether the program looks inside bundles."""
        return self.segment >= 0

    @property
    def kind(self) -> int:
        """Of its rows."""
        return MEMBERS if self.inside else BUNDLES


def inputs_of(cut: RaggedCut, edges: Sized) -> RaggedInputs:
    """What the inputs of a module's program are: see ``calls.py``.

    Args:
        cut: Its programs.
        edges: Edge columns that it knows of.
    """
    if cut.memory:
        first, n = cut.memory[0], len(cut.memory)
        after = [*range(first + n + 1, cut.inputs)]
        return RaggedInputs([*range(first), *after], cut.memory)
    rows = cut.inputs - 2 - len(edges)
    return RaggedInputs(range(rows), (), rows, rows + 1)


def _fits(cut: RaggedCut, plans: Sequence[RaggedPlan], inputs: RaggedInputs) -> bool:
    if not all(plan.routine.steps.apart for plan in plans):
        return False
    if cut.draws or any(isinstance(y, int) and y not in inputs.rows for y in cut.outputs):
        return False
    answer = _answer(cut, inputs)
    if answer is None or (answer == MEMBERS and not inputs.inside):
        return False
    buffers = [*cut.residuals, *(t.buffer for t in cut.made)]
    if any(b.kind not in (BUNDLES, MEMBERS) for b in buffers):
        return False
    if any(each.kind not in (BUNDLES, MEMBERS) for each in cut.ints):
        return False
    told = {*inputs.rows, inputs.lengths, inputs.segment}
    return all(each.apart and each.inputs <= told for each in cut.ints)


def _answer(cut: RaggedCut, inputs: RaggedInputs) -> int | None:
    """Of which kind outputs are rows; None: of several."""
    kinds = [y.buffer.kind if isinstance(y, Tensors) else inputs.kind for y in cut.outputs]
    alike = len(set(kinds)) == 1 and kinds[0] in (BUNDLES, MEMBERS)
    return kinds[0] if alike else None


@final
class _Listed:
    """The making of a form."""

    def __init__(self, program: RaggedProgram, inputs: RaggedInputs) -> None:
        self._program, self._inputs = program, inputs
        cut = self._cut = program.cut
        self._number = {k: i for i, k in enumerate(inputs.rows)}
        self._residual = {b: k for k, b in enumerate(cut.residuals)}
        self._made = {t.buffer: k for k, t in enumerate(cut.made)}
        self._output = {y.buffer: j for j, y in enumerate(cut.outputs) if isinstance(y, Tensors)}
        self._ints = {each.node: k for k, each in enumerate(cut.ints)}
        self._routines: dict[SeveralRoutine, RaggedPlan] = {}

    def form(self) -> SeveralForm:
        cut, inputs, own = self._cut, self._inputs, self._number.keys()
        forward, backward, without = map(self._routine, self._program.plans)
        like = torch.empty(0, dtype=cut.dtype)
        outputs = [
            like.new_empty((0, *y.tail)) if isinstance(y, Tensors) else self._number[y]
            for y in cut.outputs
        ]
        gradients = {
            self._number[i]: (of, self._lies(t.buffer))
            for i, (t, of) in cut.gradients.items()
            if i in self._number
        }
        return SeveralForm(
            forward,
            backward,
            without,
            inputs.inside,
            _answer(cut, inputs) == MEMBERS,
            len(inputs.rows),
            tuple(outputs),
            cut.tangents,
            gradients,
            [(b.kind, b.entries) for b in cut.residuals],
            [(t.buffer.kind, t.buffer.entries) for t in cut.made],
            [(each.kind, each.times) for each in cut.ints],
            frozenset([self._number[i] for each in cut.ints for i in each.inputs & own]),
            sorted({n for plan in self._program.plans for _, n in plan.floats}),
            cut.dtype,
            self._addresses,
            self._counted,
            self._learn,
            self._touched,
        )

    def _routine(self, plan: RaggedPlan) -> SeveralRoutine:
        slots = {slot: self._lies(b) for b, slot in plan.routine.slots.items()}
        own = {slot: lies for slot, lies in slots.items() if lies is not None}
        found = SeveralRoutine(plan.routine.steps, own)
        self._routines[found] = plan
        return found

    def _lies(self, buffer: Buffer) -> Any:
        """Where a buffer lies; None: it is made of operands."""
        role, number = buffer.role, buffer.number
        if role in ("operand", "weight", "turned"):
            return None
        if buffer in self._residual:
            return "own", self._residual[buffer]
        if buffer in self._made:
            return "made", self._made[buffer]
        if buffer in self._output:
            return "output", self._output[buffer]
        if role == "given":
            late = number - self._cut.inputs
            return ("tangent", late) if late >= 0 else ("input", self._number[number])
        if role in ("ints", "as_float"):
            assert buffer.node is not None
            return "float" if role == "as_float" else "ints", self._ints[buffer.node]
        if role in ("held", "sums"):
            return role, self._inputs.held.index(number)
        return role, 0

    def _addresses(self, routine: SeveralRoutine) -> list[int]:
        return self._program.operand_addresses(self._routines[routine])

    def _counted(self, given: Sequence[Tensor], lengths: Tensor) -> Sequence[Tensor]:
        inputs = self._inputs
        every: list[Tensor | None] = [None] * self._cut.inputs
        for k, x in zip(inputs.rows, given, strict=True):
            every[k] = x
        if inputs.inside:
            every[inputs.lengths] = lengths
            if any(inputs.segment in each.inputs for each in self._cut.ints):
                every[inputs.segment] = segment_of(lengths)
        return self._cut.count(*every)

    def _came(self, outputs: int) -> frozenset[int]:
        return frozenset([k for k, j in enumerate(self._cut.tangents) if outputs >> j & 1])

    def _learn(self, found: AbstractSeveralFound, outputs: int, into: GradientSum) -> None:
        ints = [found.rows_of(("ints", k)).view(-1) for k in range(len(self._cut.ints))]
        sizes = [found.count(BUNDLES), found.count(MEMBERS)]
        kind = self._inputs.kind
        mine = RaggedFound(partial(self._found, found), ints, sizes, kind, found.owners)
        self._program.learn(mine, self._came(outputs), into)

    def _found(self, found: AbstractSeveralFound, t: Tensors) -> Tensor:
        lies: Lies = self._lies(t.buffer)
        return found.rows_of(lies).reshape(-1, *t.tail)

    def _touched(self, outputs: int) -> Sequence[bool]:
        came, held = self._came(outputs), self._cut.held
        return [bool(held.get(i, frozenset()) & came) for i in self._inputs.held]

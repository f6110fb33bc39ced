"""``keep="auto"`` of a module without a written kernel: runs again, or by a derived kernel.

    training ─► runs again ─► FIRINGS and ROWS are done ─► traced, both ways measured, once
                                                            │ derived takes less than WORTH of it
                                                            ├─► the derived kernel from now on
                                                            └─► runs again for good

When is a matter of counting, so that runs which begin alike go on alike; who wins is measured, and
remembered for the structure and the size of the firing while the process lives. Where there are
windows of rows, C and torch are measured once more as firings come to have several times as many
rows: torch takes its time before it begins. Nothing is left behind by a measurement: no gradient,
no random number drawn, no row kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from geartrain.derived.cut import Cut, by_whom
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.registry import REGISTRY, Known, kind_of
from geartrain.derived.structure import Structure
from geartrain.frames.message import Gradient, Payload
from geartrain.native import operations
from geartrain.native.heap import heap
from geartrain.nodes.choice import UNDECIDED, AbstractChoice, Experience
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel, may_have_kernel

log = logging.getLogger("geartrain.nn")

FIRINGS: Final = 32
"""Firings in training before anything is traced: short runs never pay for a trace."""
ROWS: Final = 1000
"""Rows in them."""
LARGE_FIRINGS: Final = 4
"""Firings that will do where they are large ..."""
LARGE_ROWS: Final = 2048
"""... and have so many rows together: what runs again costs as much as a trace by then."""
WORTH: Final = 0.95
"""Derived kernels are taken if they take no more than this part of the time."""
WHOLE: Final = 1.3
"""Times as much in what runs whole: C calls them there with others, and Python has no part in it,
as it has in what is measured."""
CLEAR: Final = 0.8
"""What takes no more than this with four times as many rows, or a quarter, needs no measurement."""
UNCLEAR: Final = (0.75, 1.25)
"""What is beyond these after a few turns is measured no longer."""
BY_TORCH: Final = 0.6
"""Windows of rows are left to torch if that takes less than this part of what C takes: loops that
run whole call C alone, and have memory for it."""
MOST_CHANGES: Final = 4
"""How often settings may change under a derived kernel; then the module runs again for good."""
_TURNS: Final = 6
_FEW_TURNS: Final = 3
_BLOCK: Final = 2
_MOST_ROWS: Final = 128
_MANY_ROWS: Final = 1024
"""Rows that are measured where it is not clear with fewer, and there are so many."""
_MOST_WINDOWS: Final = 256
"""Rows of windows that are measured: torch gains by every row there."""
_MOST_FUNCTIONS: Final = 16


class _Left(NamedTuple):
    """What a choice leaves to that of a later fit.

    Args:
        structure: Of the function, as the program was made for it.
        kind: Of the rows.
        program: The derived kernel.
    """

    structure: Structure
    kind: Hashable
    program: Program


@final
class MeasuredChoice(AbstractChoice):
    """Chooses for one node.

    Args:
        name: The node.
        function: Its module or function.
        first: Runs it again.
        before: What its operator has done so far, in other fits and copies too, and others whose
            modules are of its class.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], first: AbstractKernel, before: Experience
    ) -> None:
        self._name, self._function, self._first = name, function, first
        self._experience, self._done = before, before.done
        self._derived: Program | None = None
        self._structure: Structure | None = None
        self._kind: Hashable = None
        # Of this kind, without a row: who asks once a firing asks with the same ones.
        self._alike: Payload | None = None
        self._changes = 0
        self._settled = False
        # Where there are windows: the size of firings by which C or torch was chosen.
        self._size: int | None = None
        self._left: _Left | None = None

    def kernel(self, inputs: Payload) -> AbstractKernel:
        if self._settled:
            return self._first
        if self._derived is not None and self._structure is not None:
            if self._structure.now() == self._structure.settings and kind_of(inputs) == self._kind:
                return self._of_more(inputs)
            self._derived = self._experience.chosen = None
            self._changes += 1
            if self._changes == MOST_CHANGES:
                return self._settle("its settings change while it works")
            self._done.firings = self._done.rows = 0
        n = inputs[0].shape[0]
        self._done.firings += 1
        self._done.rows += n
        firings, rows = self._done.firings, self._done.rows
        ripe = firings >= FIRINGS and rows >= ROWS
        ripe = ripe or (firings >= LARGE_FIRINGS and rows >= LARGE_ROWS)
        # A few rows that are left over are no measure, nor is what is being watched. Where another
        # module of the class was measured with as many or more, nothing is.
        typical = 2 * n * self._done.firings >= self._done.rows or self._known_of_more(n)
        return self._decide(inputs) if ripe and typical and not _watched() else self._first

    @property
    def decided(self) -> bool:
        return self._settled or self._derived is not None

    @property
    def apart(self) -> bool:
        if not self.decided:  # as it was in another fit, if there was one
            chosen = self._experience.chosen
            return chosen == "derived" if chosen is not None else not self._done.firings
        return (self._first if self._derived is None else self._derived).apart

    @property
    def replaced(self) -> bool:
        return self._derived is not None

    @property
    def recalls(self) -> bool:
        undecided = self._derived is None and not self._settled  # as ``decided``, asked often
        return undecided and self._experience.chosen == "derived"

    def recall(self, inputs: Payload) -> None:
        if self.recalls and not operations.listening:
            self._decide(inputs, measured=False)

    def chosen(self, inputs: Payload) -> AbstractKernel | None:
        if self._settled:
            return self._first
        if self._derived is None or self._structure is None:
            return None
        if inputs is not self._alike:
            if kind_of(inputs) != self._kind:
                return None
            if inputs and not inputs[0].shape[0]:
                self._alike = inputs
        return self._derived if self._structure.now() == self._structure.settings else None

    def take_over(self, before: AbstractChoice) -> None:
        if isinstance(before, MeasuredChoice) and before._function is self._function:
            self._left = before._leaves()

    def _leaves(self) -> _Left | None:
        """What a later fit may use."""
        if self._derived is None or self._structure is None:
            return self._left
        if self._size is not None:  # what is best for windows goes by what has been measured since
            return None
        return _Left(self._structure, self._kind, self._derived)

    def _as_before(self, inputs: Payload) -> Program | None:
        """The program of the fit before, if it is what would be made for these rows now."""
        left, self._left = self._left, None
        if left is None or self._experience.story == UNDECIDED:
            return None
        function, kind = self._function, kind_of(inputs)
        if isinstance(function, torch.nn.Module) and not may_have_kernel(function):
            return None
        if left.structure.now() != left.structure.settings or left.kind != kind:
            return None
        if not left.program.begin_anew():
            return None
        self._structure, self._kind, self._alike = left.structure, kind, None
        self._derived = left.program
        return left.program

    def _decide(self, inputs: Payload, *, measured: bool = True) -> AbstractKernel:
        if not measured and (known_program := self._as_before(inputs)) is not None:
            return known_program
        self._structure = self._looked_at()
        self._kind, self._alike = kind_of(inputs), None
        known = REGISTRY.ask(self._name, self._function, self._structure, inputs)
        if known.cut is None:
            return self._settle(f"cannot be cut: {known.refused}")
        operands = Operands(self._function)
        program = self._program(known.cut, known, operands, inputs, measured=measured)
        experience = self._experience
        if experience.chosen is None:
            ratio = self._ratio(known, program, operands, inputs)
            again = ratio > worth(experience, in_c=program.in_c)
            experience.chosen = "again" if again else "derived"
            self._tell(
                f"runs again (derived would take {ratio:.2f} of it)"
                if again
                else f"derived, {ratio:.2f} of running again{_by(program)}"
            )
        elif experience.story == UNDECIDED:
            again = experience.chosen == "again"
            derived = f"derived, as chosen before{_by(program)}"
            self._tell("runs again, as chosen before" if again else derived)
        if experience.chosen == "again":
            self._settled = True
            return self._first
        self._derived = program
        return program

    def _program(
        self, cut: Cut, known: Known, operands: Operands, inputs: Payload, *, measured: bool
    ) -> Program:
        """By C; or by torch, if that takes less where there are windows of rows.

        Rows that are not to be measured say nothing of how many will come: it is as it was with
        the most.
        """
        program, self._size = Program(cut, operands), None
        if not (cut.parts.windows and program.in_c) or cut.computed is not None:
            return program
        by_torch, self._size = known.by_torch, max(known.by_torch, default=-1)
        other = Program(cut, operands, fused=False)
        if measured:
            self._size = _size(inputs[0].shape[0])
            if self._size not in by_torch:
                ratio = compare(other, program, inputs, _parameters(operands), _MOST_WINDOWS)
                by_torch[self._size] = ratio < BY_TORCH
        return other if by_torch.get(self._size) else program

    def _of_more(self, inputs: Payload) -> AbstractKernel:
        """The derived kernel, chosen once more where there are windows and firings have come to
        have several times as many rows as those that it was chosen by."""
        program = self._derived
        assert program is not None
        if self._size is None or _size(inputs[0].shape[0]) <= self._size or _watched():
            return program
        assert self._structure is not None
        known = REGISTRY.ask(self._name, self._function, self._structure, inputs)
        if known.cut is None:
            return program
        found = self._program(known.cut, known, program.own, inputs, measured=True)
        if found.in_c is not program.in_c:
            self._derived = program = found
            self._tell(f"derived, by as many rows as come now{_by(program)}")
        return program

    def _looked_at(self) -> Structure:
        """What the function looks like, which the nodes of another fit may have found."""
        seen = self._experience.known
        function, known = seen.get(id(self._function), (None, None))
        if function is self._function and isinstance(known, Structure):
            if known.now() == known.settings:
                return known
        if len(seen) >= _MOST_FUNCTIONS:
            seen.clear()
        found = Structure(self._function)
        seen[id(self._function)] = self._function, found
        return found

    def _ratio(self, known: Known, program: Program, operands: Operands, inputs: Payload) -> float:
        size = _size(inputs[0].shape[0])
        if size not in known.ratios:
            near = [known.ratios[k] for k in (size - 1, size + 1) if k in known.ratios]
            if near and max(near) <= CLEAR:
                return max(near)
            # Modules of one class that differ in a number alone are traced each, and measured once.
            others = self._done.ratios
            alike: Hashable = (self._kind, *(x.shape for x in operands.tensors()))
            near = [ratio for (who, k), ratio in others.items() if who == alike and k >= size - 1]
            if near and max(near) <= CLEAR:
                return max(near)
            ratio = compare(program, self._first, inputs, _parameters(operands))
            if ratio > CLEAR and inputs[0].shape[0] >= _MANY_ROWS:
                ratio = compare(program, self._first, inputs, _parameters(operands), _MANY_ROWS)
            known.ratios[size] = others[alike, size] = ratio
        return known.ratios[size]

    def _known_of_more(self, n: int) -> bool:
        """Whether it is clear that a module of this class gains by a derived kernel."""
        found = [ratio for (_, k), ratio in self._done.ratios.items() if k >= _size(n)]
        return bool(found) and max(found) <= CLEAR

    def _settle(self, why: str) -> AbstractKernel:
        self._settled = True
        self._tell(f"runs again ({why})")
        return self._first

    def _tell(self, story: str) -> None:
        if self._experience.story != story:
            self._experience.story = story
            log.info("'%s', keep='auto': %s", self._name, story)


def _watched() -> bool:
    """Whether somebody looks on: that would be measured, too."""
    return bool(operations.listening) or _get_current_dispatch_mode() is not None


def _by(program: Program) -> str:
    """Who computes it, where that is not C, and why."""
    parts = program.cut.parts
    if parts.fused is not None and not program.in_c and parts.windows:
        return "; by torch: that takes less for its windows"
    return by_whom(program.cut)


def _parameters(operands: Operands) -> list[torch.nn.Parameter]:
    return [x for x in operands.tensors() if isinstance(x, torch.nn.Parameter)]


def _size(n: int) -> int:
    """Firings of about as many rows have one."""
    return min(n, _MOST_ROWS).bit_length() // 2


def worth(experience: Experience, *, in_c: bool = True) -> float:
    """The most of the time alone for which a derived kernel is taken, where its nodes run.

    Args:
        experience: Of the operator.
        in_c: Whether all of the kernel is.
    """
    return WORTH * (WHOLE if experience.whole and in_c else 1.0)


def compare(
    one: AbstractKernel,
    other: AbstractKernel,
    inputs: Payload,
    parameters: list[torch.nn.Parameter],
    most: int = _MOST_ROWS,
) -> float:
    """What one kernel takes of the time of another, forward and backward of these rows, or
    the first of them.

    They take turns, fewer where one is clearly faster; counted is the fastest of each. Residuals
    are stored and gathered as a node does it, and weights are multiplied once for a few firings.
    """
    inputs = tuple(x[:most].detach() for x in inputs)
    devices = sorted({x.device.index for x in inputs if x.is_cuda})
    order = np.random.default_rng(0).permutation(inputs[0].shape[0])
    best = [float("inf"), float("inf")]
    heap.tried()
    with torch.random.fork_rng(devices), torch.no_grad():
        for turn in range(_TURNS):
            for k, kernel in enumerate((one, other)):
                took = _seconds(kernel, inputs, parameters, order, _BLOCK if turn else 1)
                if turn:
                    best[k] = min(best[k], took)
            if turn + 1 >= _FEW_TURNS and not UNCLEAR[0] < best[0] / best[1] < UNCLEAR[1]:
                break
    return best[0] / best[1]


def _seconds(
    kernel: AbstractKernel,
    inputs: Payload,
    parameters: list[torch.nn.Parameter],
    order: np.ndarray[Any, np.dtype[np.int64]],
    firings: int,
) -> float:
    into = GradientSum(parameters)
    # Others work beside this thread, but on a device the clock of the host counts.
    clock = time.perf_counter if _wait(inputs) else time.thread_time
    began = clock()
    for _ in range(firings):
        outputs, residuals = kernel.forward(inputs)
        kept = tuple(x if any(x is y for y in inputs) else x.clone() for x in residuals)
        kernel.backward(_like(outputs), kept, order, into)
    for parameter in parameters:
        into.take(parameter)
    _wait(inputs)
    return clock() - began


def _like(outputs: Payload) -> Gradient:
    return tuple(y if y.is_floating_point() else None for y in outputs)


def _wait(inputs: Payload) -> bool:
    """Whether there was a device to wait for."""
    found = any(x.is_cuda for x in inputs)
    if found:
        torch.cuda.synchronize()
    return found

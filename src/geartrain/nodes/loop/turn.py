"""Instances that go through a loop together, and what its modules keep of them.

Inner   a module of the loop
Turn    a plan, the tensors, who is unanswered; of each call what it has kept
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from geartrain.frames.message import INSTANCE, Backward, Gradient, IntArray, Payload
from geartrain.nodes.call import Call
from geartrain.nodes.choice import AbstractChoice
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import AbstractHeld, Held, Recalled
from geartrain.nodes.inside import Inside, look_inside
from geartrain.nodes.kernel import AbstractKernel, AbstractKernels, gathered
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.memories import HeldInTurn
from geartrain.nodes.loop.plan import Called, JointCall, LoopPlan
from geartrain.nodes.loop.tensors import AbstractTensors
from geartrain.nodes.loop.values import AbstractValue, Stored
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.node import Place
from geartrain.nodes.remembering import Recorded, Remembering, RememberingRead
from geartrain.nodes.weights import AbstractWeights

Got: TypeAlias = dict[str, list[IntArray]]
"""By part, the places in a turn of the instances whose rows have come back, row by row."""


@final
@dataclass(frozen=True, slots=True)
class Reads:
    """What the rows of a module read besides.

    Args:
        held: The memory, which lives on this worker; or the value that it is in the loop.
        column: State column of the handle.
    """

    held: Held | Stored
    column: int

    @property
    def value(self) -> int:
        """That which is read, if it is held in the loop; -1: it is held outside."""
        return self.held.number if isinstance(self.held, Stored) else -1

    def memory(self, tensors: AbstractTensors) -> AbstractHeld:
        """It, in a turn with these tensors."""
        if isinstance(self.held, Held):
            return self.held
        assert isinstance(tensors, FiringTensors)
        return HeldInTurn(tensors, self.held.number)


@final
@dataclass(slots=True)
class Inner:
    """A module of the loop.

    Args:
        name: Of its operator.
        place: Of it, for columns and errors.
        call: How it is called.
        kernel: Computes it.
        choice: Chooses other kernels while it works; None: it keeps this one.
        weights: Its part, or None.
        source: The value that it reads.
        reads: A memory that it reads too, or None.
        twin: Derived beside a kernel that reads a memory, for C to call; None: nothing is.
        width: Payload tensors of the value, seen last.
        counts: Whether its rows are gradient rows of the part; else those of another module are,
            which reads what it makes.
    """

    name: str
    place: Place
    call: Call
    kernel: AbstractKernel | AbstractMemoryKernel
    choice: AbstractChoice | None
    weights: AbstractWeights | None
    source: AbstractValue
    reads: Reads | None = None
    twin: RememberingRead | None = None
    width: int = 1
    counts: bool = True

    def recalled(
        self, tensors: AbstractTensors, state: IntArray, lengths: IntArray | None
    ) -> Recalled:
        """What rows with these columns read of its memory, in a turn with these tensors."""
        assert self.reads is not None
        handles = state[self.reads.column]
        if lengths is not None:
            handles = handles.repeat(lengths)
        return Recalled(self.reads.memory(tensors), handles, self.place.device)


@final
@dataclass(frozen=True, slots=True)
class KeptCall:
    """What one call has left for its way back.

    Args:
        kernel: That has computed it.
        residuals: Its own.
        memory: What its rows have read of a memory.
        inside: Of the bundles that it looked into.
        graph: Autograd's, if the kernel remembers one.
    """

    kernel: AbstractKernel | AbstractMemoryKernel
    residuals: Payload
    memory: Recalled | None = None
    inside: Inside | None = None
    graph: Recorded | None = None

    def backward(
        self,
        inner: Inner,
        tensors: AbstractTensors,
        gradient: Gradient,
        state: IntArray,
        lengths: IntArray | None,
        at: IntArray | None,
        into: GradientSum,
    ) -> Gradient:
        """The gradients of the call's arguments.

        Args:
            inner: The module.
            tensors: Of the turn.
            gradient: Of the rows that have come back.
            state, lengths: Theirs.
            at: Which of the residuals' rows they are; None: all.
            into: Gets the gradients of the parameters.
        """
        kernel, memory, inside = self.kernel, self.memory, self.inside
        if isinstance(kernel, AbstractMemoryKernel):
            if memory is None or at is not None:
                memory = inner.recalled(tensors, state, lengths)
            if isinstance(kernel, RememberingRead) and self.graph is not None:
                return kernel.answer(self.graph, gradient, self.residuals, at, memory, into)
            return kernel.backward(gradient, gathered(self.residuals, at), memory, into)
        if inside is not None and at is not None:
            inside = look_inside(inner.place, state[INSTANCE], lengths, inner.place.device)
        if isinstance(kernel, Remembering):
            return kernel.answer(self.graph, gradient, self.residuals, at, into, inside)
        return kernel.backward(gradient, self.residuals, at, into, inside)


@final
@dataclass(frozen=True, slots=True)
class KeptJointCall:
    """What calls that were taken together have left for their way back.

    Args:
        together: The calls.
        kernels: That have computed them.
        each: The same, by call.
        residuals: Of all rows.
    """

    together: JointCall
    kernels: AbstractKernels
    each: Sequence[AbstractKernel]
    residuals: Payload

    def of(self, number: int) -> KeptCall:
        """What one of them has left: number in the plan."""
        k = number - self.together.number
        sizes = self.together.sizes
        begin = sum(sizes[:k])
        kept = tuple(x[begin : begin + sizes[k]] for x in self.residuals)
        return KeptCall(self.each[k], kept)

    def backward(self, gradient: Gradient, into: Sequence[GradientSum]) -> Gradient:
        """The gradients of the arguments of all rows.

        Args:
            gradient: Of all rows.
            into: Gets the gradients of the parameters, by call.
        """
        return self.kernels.backward(gradient, self.residuals, self.together.sizes, into)


class AbstractTape(Protocol):
    """One graph of autograd's for all calls of a turn; ``tape.Tape`` says more."""

    def enter(self, number: int, row: int) -> None: ...

    def recording(self, run: Callable[[int, Called], None]) -> Callable[[int, Called], None]: ...

    def run(
        self,
        inner: Inner,
        kernel: AbstractKernel | AbstractMemoryKernel,
        inputs: Payload,
        called: Called,
        inside: Inside | None,
    ) -> tuple[Payload, KeptCall]: ...

    def note(self, inputs: Payload, inner: Inner | None) -> None: ...

    def answer(self, got: Got) -> bool: ...

    def forget(self) -> None: ...

    def wasted(self) -> None: ...


class AbstractNativeKept(Protocol):
    """What one call has left that C has made; ``native.NativeKept`` says more."""

    @property
    def kernel(self) -> AbstractKernel | AbstractMemoryKernel | None: ...

    @property
    def residuals(self) -> Payload: ...

    def of(self, number: int) -> KeptCall: ...


class AbstractNativeCalls(Protocol):
    """Calls that C makes, many at a time; ``native.NativeCalls`` says more."""

    @property
    def rows(self) -> Mapping[int, int]: ...

    @property
    def count(self) -> int: ...

    def leave(self) -> Any: ...

    def plan(self) -> None: ...

    def found(self, number: int, called: Called) -> int: ...

    def make(self) -> int: ...

    def forward(self, number: int) -> int: ...

    def made(self, number: int) -> bool: ...

    def backward(self, end: int, got: Got, updates: Mapping[str, IntArray]) -> int: ...


@final
@dataclass(slots=True)
class Turn:
    """Some instances that go through the loop together.

    Args:
        plan: What happens to them.
        held: Its tensors.
        slots: int64 ``(n,)``, of the instances.
        local: Slot to its place among these; -1 elsewhere.
        pending: Answers that each one awaits.
        entered: By entry, the rows that came: their slots and where to answer them.
        addresses: Of the instances at the node, in training.
        kept: Of each call, in training; None where nothing is kept.
        rows: By part, the rows of its calls of each instance.
        totals: Likewise of all instances, and how many of these have any.
        versions: By part, that of its weights in the forward.
        awaited: Instances of which rows that have left are unanswered.
        kernels: Those that were chosen in place of the first ones, by module.
        unanswered: Instances that are unanswered themselves, in training.
        seen: Instances and lengths of the bundles that were looked into last, and their inside.
        tape: The graph of all calls, as long as it may be of use; None: each goes back by itself.
        native: Makes calls in C, many at a time; None: each is made by itself.
    """

    plan: LoopPlan
    held: AbstractTensors
    slots: IntArray
    local: IntArray
    pending: IntArray
    entered: list[tuple[IntArray, IntArray]]
    addresses: IntArray | None = None
    kept: list[KeptCall | KeptJointCall | AbstractNativeKept | None] = field(default_factory=list)
    rows: dict[str, IntArray] = field(default_factory=dict)
    totals: dict[str, tuple[int, int]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    kernels: dict[int, AbstractKernel] = field(default_factory=dict)
    awaited: int = 0
    unanswered: int = 0
    seen: tuple[IntArray, IntArray, Inside] | None = None
    tape: AbstractTape | None = None
    native: AbstractNativeCalls | None = None

    def left(self, number: int) -> KeptCall:
        """What one call has left for its way back."""
        found = self.kept[number]
        assert found is not None
        return found if isinstance(found, KeptCall) else found.of(number)

    def nbytes(self) -> int:
        """Bytes of its tensors; what several hold is counted once."""
        seen = {
            x.untyped_storage().data_ptr(): x for call in self.kept if call for x in call.residuals
        }
        mine = {x.data_ptr() for x in self.held.tensors()}
        return self.held.nbytes() + sum(x.nbytes for at, x in seen.items() if at not in mine)


def zero_answers(turn: Turn, which: IntArray) -> list[Backward]:
    """What tells those who sent the rows of some instances that no gradient will come."""
    mine = np.zeros(turn.slots.size, np.bool_)
    mine[which] = True
    found = []
    for slots, origin in turn.entered:
        chosen = origin[mine[turn.local[slots]]]
        if chosen.size:
            found.append(Backward(chosen, None))
    return found


def wanted_of(turn: Turn, called: Called, mine: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Which rows of a call have got a gradient, of the instances that are ``mine``."""
    touched, n = turn.held.touched.get(called.stage.into.number), len(called.rows)
    if touched is None:
        return np.zeros(n, np.bool_)
    found = touched[called.first : called.first + n]
    return found if mine is None else found & mine[turn.local[called.rows.state[INSTANCE]]]


def await_rows(turn: Turn) -> None:
    """Count the rows that leave."""
    n = turn.slots.size
    for rows in turn.plan.exits:
        for each in rows:
            turn.pending += np.bincount(turn.local[each.state[INSTANCE]], minlength=n)
    turn.awaited = int((turn.pending > 0).sum())

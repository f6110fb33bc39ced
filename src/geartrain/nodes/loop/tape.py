"""One graph of autograd's for a whole turn of a loop that runs whole.

    rows that enter ─► leaves ─┐                                   ┌─► rows that leave ─► gradients
    memories, padded once ─────┴─► every call of the turn, taped ──┘           │
         ▲                                                                     │
         └──────────────── one pass of autograd, if all is answered ◄──────────┘

What autograd would do call by call, each with its own leaves and a gradient handed over in Python,
it does in one go, as for a batch that is put together by hand. Kernels that are not autograd's take
part as functions of the graph. If some instances are answered without the others, or if the weights
have moved, the graph is thrown away and each call goes back by itself, from what it has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import GeartrainError, GraphError, WorkerError
from geartrain.frames.counted import consecutive, counted
from geartrain.frames.message import INSTANCE, Gradient, IntArray, Payload, distinct
from geartrain.nodes.call import as_payload, differentiate, own_integers, run_module
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import AbstractHeld, Recalled
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loop.pieces import TapeTensors
from geartrain.nodes.loop.plan import Called, CallStage
from geartrain.nodes.loop.stories import story_of
from geartrain.nodes.loop.turn import Got, Inner, KeptCall, Turn, wanted_of
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.payload import Recompute
from geartrain.nodes.remembering import Remembering, RememberingRead, versions_of
from geartrain.nodes.weights import AbstractWeights

PATIENCE: Final = 16
"""If so many turns more have been taped for nothing than for use, none is any more."""


class AbstractRunsAgain(Protocol):
    """A kernel that runs a module."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those of the module that learn."""


@final
class Taping:
    """Whether turns of a loop are taped.

    Args:
        name: Of the loop's node, for messages.
        inner: Its modules.
        able: Whether all that is between them is such that autograd can follow.
    """

    def __init__(self, name: str, inner: Sequence[Inner], *, able: bool) -> None:
        self.name, self._inner, self._able = name, inner, able
        self._wasted = 0
        self.used = 0
        """Turns that were answered by their graph."""

    @property
    def gains(self) -> bool:
        """Whether turns are to be taped now."""
        if not self._able or self._wasted >= PATIENCE:
            return False
        return any(_gains(each) for each in self._inner)

    def begin(self, turn: Turn) -> Tape | None:
        """The tape of a turn that begins; None: its calls go back one by one."""
        if not isinstance(turn.held, TapeTensors) or not self.gains:
            return None
        return Tape(self, turn, turn.held, self._inner)

    def told(self, *, used: bool) -> None:
        """What has become of a tape."""
        self.used += used
        self._wasted = max(self._wasted - 1, 0) if used else self._wasted + 1


def _gains(inner: Inner) -> bool:
    """Whether autograd computes a module of the loop for good, so that a graph of all spares
    something: before it is decided, no more than its inputs are kept."""
    running = _running(inner.kernel, inner)
    choice = inner.choice
    settled = choice is None or (choice.decided and not choice.replaced)
    return running is not None and bool(running.parameters) and settled


def _running(
    kernel: AbstractKernel | AbstractMemoryKernel, inner: Inner
) -> AbstractRunsAgain | None:
    """The kernel, if it runs the module as it is, and nobody has asked for its inputs alone."""
    if isinstance(kernel, Remembering | RememberingRead):
        return None if kernel.replaced else kernel
    return kernel if isinstance(kernel, Recompute) and inner.choice is not None else None


@final
class _Block:
    """A memory as several rows read it, padded, as leaves.

    Args:
        recalled: Of bundles, each once.
    """

    def __init__(self, recalled: Recalled) -> None:
        self.recalled = recalled
        self.tensors, self._mask = recalled.padded()
        if recalled.wanted:
            for x in self.tensors:
                x.requires_grad_(x.is_floating_point())
        self._order = recalled.handles.argsort()
        self._sorted = recalled.handles[self._order]
        self._read = np.zeros(recalled.handles.size, np.bool_)

    def at(self, handles: IntArray) -> IntArray | None:
        """Where these bundles are among its own; None: one of them is not."""
        n = handles.size
        if np.array_equal(handles, self.recalled.handles[:n]):
            return counted(0, n)
        found = self._sorted.searchsorted(handles)
        found[found == self._sorted.size] = 0
        if (self._sorted[found] != handles).any():
            return None
        places: IntArray = self._order[found]
        return places

    def rows(self, at: IntArray) -> tuple[Payload, Tensor]:
        """Tensors and mask for rows that read these of its bundles."""
        first = consecutive(at) if at.size else 0
        if first >= 0:
            if at.size == self._sorted.size:
                return self.tensors, self._mask
            some = slice(first, first + at.size)
            return tuple([x[some] for x in self.tensors]), self._mask[some]
        where = torch.from_numpy(at)
        chosen = tuple([x.index_select(0, where) for x in self.tensors])
        return chosen, self._mask.index_select(0, where)

    def reach(self, handles: IntArray) -> None:
        """The gradient of rows that have read these will come."""
        at = self.at(handles)
        if at is not None:
            self._read[at] = True

    def add(self, gradients: Gradient) -> None:
        """Add gradients of its tensors where the memory is held."""
        if self._read.all():
            self.recalled.add_padded(gradients)
        elif self._read.any():
            some = Recalled(self.recalled.held, self.recalled.handles[self._read])
            mine, n = torch.from_numpy(self._read), some.longest
            some.add_padded(tuple([None if g is None else g[mine, :n] for g in gradients]))


@final
class Tape:
    """That of one turn.

    Args:
        taping: Is told whether it was of use.
        turn: The turn.
        held: Its tensors.
        inner: The modules.
    """

    def __init__(
        self, taping: Taping, turn: Turn, held: TapeTensors, inner: Sequence[Inner]
    ) -> None:
        self._taping, self._turn, self._held, self._inner = taping, turn, held, inner
        self._entered: list[tuple[int, int, list[Tensor]]] = []
        self._blocks: list[_Block] = []
        self._owners: dict[nn.Parameter, AbstractWeights | None] = {}
        for each in inner:
            running = _running(each.kernel, each)
            self._owners |= dict.fromkeys(running.parameters if running else (), each.weights)
        self._seen = versions_of([*self._owners])
        self._given: list[Sequence[bool | None]] = []
        # What kernels that are not autograd's seem to depend on: it goes where it is asked for.
        self._spark = torch.zeros((), requires_grad=True)

    def enter(self, number: int, row: int) -> None:
        """Rows of a stored value have come in, and are leaves."""
        piece = self._held.piece(number, row)
        for x in piece:
            x.requires_grad_(x.is_floating_point())
        self._entered.append((number, row, piece))

    def recording(self, run: Callable[[int, Called], None]) -> Callable[[int, Called], None]:
        """The same calls, taped."""

        def recorded(number: int, called: Called) -> None:
            with torch.enable_grad():
                run(number, called)

        return recorded

    def run(
        self,
        inner: Inner,
        kernel: AbstractKernel | AbstractMemoryKernel,
        inputs: Payload,
        called: Called,
        inside: Inside | None,
    ) -> tuple[Payload, KeptCall]:
        """Compute the next call.

        Raises:
            GraphError: A module has written over its input.
        """
        own = tuple([x.detach() for x in inputs])
        runs = _running(kernel, inner) is not None
        if runs:
            versions = [x._version for x in inputs]
            if isinstance(kernel, RememberingRead):
                state, lengths = called.rows.state, called.lengths
                kernel.look(own, partial(inner.recalled, self._held, state, lengths))
                outputs = as_payload(kernel.called(inputs, *self._recalled(inner, called)))
            else:
                if isinstance(kernel, Remembering):
                    kernel.look(own, inside)
                outputs = as_payload(run_module(inner.call.function, inputs, inside))
            if [x._version for x in inputs] != versions:
                raise GraphError(
                    f"'{inner.name}' writes over its input, which others of its loop may still "
                    "read; begin it with an operation that is not in place (inplace=False)"
                )
            outputs, kept = own_integers(outputs), KeptCall(kernel, own, None, inside)
        else:
            with torch.no_grad():
                outputs, kept = _computed(inner, self._held, kernel, own, called, inside)
        picked = None if runs else _picked(outputs, own, inputs)
        if picked is not None:
            outputs = picked
        elif not runs:
            way = _Way(self._turn, inner, kept, called)
            outputs = _Attached.apply(way, outputs, self._spark, *inputs)  # type: ignore[no-untyped-call]
        self.note(inputs, inner)
        return outputs, kept

    def note(self, inputs: Payload, inner: Inner | None) -> None:
        """Which of what the next call reads may get a gradient.

        Args:
            inputs: Its arguments.
            inner: Its module; None: it copies its rows.
        """
        flags: Any = tuple([x.requires_grad for x in inputs])
        if inner is not None:
            flags = inner.call.answer(flags, inner.width)
        self._given.append(flags)

    def answer(self, got: Got) -> bool:
        """Take all instances back; False, and nothing has happened: calls go back by themselves.

        Args:
            got: By part, gets the places of the instances whose rows have come back.

        Raises:
            WorkerError: Autograd cannot.
        """
        turn, held = self._turn, self._held
        moved = versions_of([*self._owners]) != self._seen
        self._taping.told(used=not moved)
        if moved:
            return False
        self._reach(got)
        roots, gradients = held.rooted()
        turn.kept = [None] * len(turn.kept)
        held.let_go({number for number, *_ in self._entered})
        tensors = [x for _, _, piece in self._entered for x in piece]
        tensors += [x for block in self._blocks for x in block.tensors]
        leaves = [x for x in tensors if x.requires_grad]
        try:
            found = differentiate(
                tuple(roots), tuple(gradients), [*leaves, *self._owners, self._spark]
            )
        except GeartrainError:
            raise
        except Exception as error:
            raise WorkerError(
                f"{type(error).__name__} in the loop '{self._taping.name}', backward, "
                f"{len(turn.kept)} calls in one graph, {turn.slots.size} instances: {error}"
            ) from error
        learned = found[len(leaves) : -1]
        for (parameter, weights), d in zip(self._owners.items(), learned, strict=True):
            if d is not None and weights is not None:
                weights.gradient.add(parameter, d)
        rest = iter(found[: len(leaves)])
        for number, row, piece in self._entered:
            some = tuple([next(rest) if x.requires_grad else None for x in piece])
            held.answer(number, row, some)
        for block in self._blocks:
            some = tuple([next(rest) if x.requires_grad else None for x in block.tensors])
            if block.recalled.wanted:
                block.add(some)
        return True

    def forget(self) -> None:
        """Calls go back by themselves."""
        self._held.forget()
        self._blocks.clear()

    def wasted(self) -> None:
        """Some instances have come back without the others."""
        self._taping.told(used=False)

    def _reach(self, got: Got) -> None:
        """Find out which rows of which calls get a gradient, as going back one by one would."""
        turn = self._turn
        for number in reversed(range(len(turn.plan.calls))):
            called = turn.plan.calls[number]
            wanted = wanted_of(turn, called, None)
            if not wanted.any():
                continue
            stage, rows, lengths = called.stage, called.rows, called.lengths
            read, slots = rows.numbers, rows.state[INSTANCE]
            some = not wanted.all()
            if some:
                read, slots = read[wanted], slots[wanted]
                lengths = None if lengths is None else lengths[wanted]
            if any(self._given[number]):
                stage.source.reach(self._held, read, self._given[number])
            if not isinstance(stage, CallStage):
                continue
            inner = self._inner[stage.number]
            if inner.reads is not None and isinstance(inner.kernel, RememberingRead):
                handles = rows.state[inner.reads.column]
                memory = inner.reads.memory(self._held)
                self._block(memory, handles[wanted] if some else handles)
            if inner.weights is not None:
                local = turn.local[slots]
                got[inner.weights.name].append(local if lengths is None else local.repeat(lengths))

    def _block(self, held: AbstractHeld, handles: IntArray) -> None:
        for block in self._blocks:
            if block.recalled.held is held:
                block.reach(handles)

    def _recalled(self, inner: Inner, called: Called) -> tuple[Payload, Tensor]:
        """What the rows of a call read of a memory, of what was padded once for the turn."""
        reads = inner.reads
        assert reads is not None
        handles = called.rows.state[reads.column]
        if called.lengths is not None:
            handles = handles.repeat(called.lengths)
        held = reads.memory(self._held)
        for block in self._blocks:
            at = block.at(handles) if block.recalled.held is held else None
            if at is not None:
                return block.rows(at)
        once = distinct(handles)
        if once.size == handles.size:
            once = handles  # in the order of the rows
        block = _Block(Recalled(held, once))
        self._blocks.append(block)
        at = block.at(handles)
        assert at is not None
        return block.rows(at)


def _computed(
    inner: Inner,
    tensors: TapeTensors,
    kernel: AbstractKernel | AbstractMemoryKernel,
    inputs: Payload,
    called: Called,
    inside: Inside | None,
) -> tuple[Payload, KeptCall]:
    """What a kernel that is not autograd's makes of a call, and what it keeps."""
    if isinstance(kernel, AbstractMemoryKernel):
        memory = inner.recalled(tensors, called.rows.state, called.lengths)
        if isinstance(kernel, RememberingRead):
            outputs, graph = kernel.record(inputs, memory)
            return outputs, KeptCall(kernel, inputs, memory, None, graph)
        outputs, residuals = kernel.forward(inputs, memory)
        return outputs, KeptCall(kernel, residuals, memory)
    if isinstance(kernel, Remembering):
        outputs, recorded = kernel.record(inputs, inside)
        return outputs, KeptCall(kernel, inputs, None, inside, recorded)
    outputs, residuals = kernel.forward(inputs, inside)
    return outputs, KeptCall(kernel, residuals, None, inside)


def _picked(outputs: Payload, own: Payload, inputs: Payload) -> Payload | None:
    """The inputs with their graph, where a kernel has given just some of those without."""
    places = {id(x): j for j, x in enumerate(own)}
    found = [places.get(id(y), -1) for y in outputs]
    return None if -1 in found else tuple([inputs[j] for j in found])


@final
class _Way:
    """The way back of a call whose kernel is not autograd's."""

    __slots__ = ("_called", "_inner", "_kept", "_number", "_turn")

    def __init__(self, turn: Turn, inner: Inner, kept: KeptCall, called: Called) -> None:
        self._turn, self._number, self._inner = turn, len(turn.kept), inner
        self._kept, self._called = kept, called

    def back(self, gradients: Gradient) -> Gradient:
        """Gradients of the call's arguments."""
        inner, rows, lengths = self._inner, self._called.rows, self._called.lengths
        into = GradientSum(()) if inner.weights is None else inner.weights.gradient
        memory = self._kept.memory
        if memory is not None:
            wanted = wanted_of(self._turn, self._called, None)
            each = wanted if lengths is None else wanted.repeat(lengths)
            memory.reached = memory.handles[each]
        try:
            tensors = self._turn.held
            return self._kept.backward(inner, tensors, gradients, rows.state, lengths, None, into)
        except Exception as error:
            slots = rows.state[INSTANCE]
            story = story_of(inner, "backward", gradients, slots, self._number, self._turn)
            if isinstance(error, GeartrainError):
                error.add_note(story)
                raise
            raise WorkerError(f"{type(error).__name__} in node {story}: {error}") from error


class _Attached(torch.autograd.Function):
    """What a kernel has made of its inputs, with its way back in the graph."""

    @staticmethod
    def forward(ctx: Any, way: _Way, outputs: Payload, *asking: Tensor) -> Payload:
        ctx.set_materialize_grads(False)
        ctx.way = way
        return tuple([y.detach() for y in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.way.back(gradients)

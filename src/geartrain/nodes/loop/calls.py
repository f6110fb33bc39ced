"""The calls of a loop that runs whole, in the order of its plan, and back in the reverse of it.

    calls that follow upon one another ─► C makes those that it can, in one go (``native.py``)
                                       ─► others by themselves, or several of one round together

What each call keeps for its way back lies in the turn. Instances, which of them have been answered
and what their parts are told of it are the business of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from operator import is_
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.errors import GeartrainError, WorkerError
from geartrain.frames.message import INSTANCE, Payload, ragged_index
from geartrain.nodes.call import read_columns, require_rows, unsettled
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside, look_inside
from geartrain.nodes.kernel import AbstractKernel, AbstractKernels
from geartrain.nodes.loop.kernels import LoopKernels
from geartrain.nodes.loop.plan import Called, CallStage, JointCall
from geartrain.nodes.loop.stories import blame, story_of
from geartrain.nodes.loop.tensors import AbstractTensors, detached, put_some, some_of
from geartrain.nodes.loop.turn import Got, Inner, KeptCall, KeptJointCall, Turn, wanted_of
from geartrain.nodes.loop.updates import Updates
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.remembering import Remembering, RememberingRead


@final
class LoopCalls:
    """Those of one loop.

    Args:
        name: Of the loop's node.
        inner: Its modules.
        kernels: Theirs.

    Attributes:
        made: Of modules, so far.
        together: How often several of them were taken together.
    """

    def __init__(self, name: str, inner: Sequence[Inner], kernels: LoopKernels) -> None:
        self._name, self._inner, self._kernels = name, inner, kernels
        self.made = self.together = 0
        self._apart: set[tuple[int, ...]] = set()  # modules that cannot be called together
        self._beside: dict[tuple[int, ...], tuple[list[AbstractKernel], AbstractKernels]] = {}

    def take_over(self, before: LoopCalls) -> None:
        """What was made for the same loop of an engine that is no more."""
        self._beside = before._beside  # of the same kernels, where those stay

    def planned(self, turn: Turn, run: Callable[[int, Called], None]) -> None:
        """Make all calls of a turn that has been planned."""
        found, native, number = turn.plan.calls, turn.native, 0
        if native is not None:
            native.plan()
        while number < len(found):
            if native is not None and len(turn.kept) == number:
                begin, number = number, native.forward(number)
                made = [isinstance(c.stage, CallStage) for c in found[begin:number]]
                self.made += sum(made)
            if number < len(found):
                run(number, found[number])
                number += 1

    def found(
        self, turn: Turn, run: Callable[[int, Called], None], number: int, called: Called
    ) -> None:
        """A call has been found while a turn is planned: it is made, or waits."""
        if number < len(turn.kept):
            return  # taken together with one before
        made = 0 if turn.native is None else turn.native.found(number, called)
        if not made:
            self.make(turn, run)
            run(number, called)
        elif isinstance(called.stage, CallStage):
            self.made += made

    def make(self, turn: Turn, run: Callable[[int, Called], None]) -> None:
        """Make the calls that have been found, and wait."""
        if turn.native is None:
            return
        while lacking := turn.native.make():
            first, calls = len(turn.kept), turn.plan.calls
            again = calls[first : first + lacking]
            self.made -= sum([isinstance(called.stage, CallStage) for called in again])
            for number, called in enumerate(again, first):
                self.found(turn, run, number, called)

    def run(self, turn: Turn, train: bool, number: int, called: Called) -> None:
        """Make one call, forward."""
        stage, rows, held = called.stage, called.rows, turn.held
        if number < len(turn.kept):
            return  # taken together with one before
        if not isinstance(stage, CallStage):
            found = stage.source.gather(held, rows.numbers)
            held.put(stage.into.number, self._name, called.first, found)
            if turn.tape is not None:
                turn.tape.note(found, None)
            turn.kept.append(None)
            return
        together = called.together if train and turn.tape is None else None
        if together is not None and number == together.number and self._inner[0].place.on_host:
            if self._call_together(turn, together):
                return
        inner = self._inner[stage.number]
        self.made += 1
        inputs: Payload = ()
        try:
            inputs = self._inputs(inner, stage.number, called, held)
            outputs, kept = self._compute(turn, stage.number, called, inputs, train)
            single = called.lengths is None or stage.pools
            require_rows(inner.name, outputs, len(rows) if single else inputs[0].shape[0])
        except GeartrainError as error:
            error.add_note(story_of(inner, "forward", inputs, rows.state[INSTANCE], number, turn))
            raise
        except Exception as error:
            story = story_of(inner, "forward", inputs, rows.state[INSTANCE], number, turn)
            raise WorkerError(f"{type(error).__name__} in node {story}: {error}") from error
        put_some(held, stage.into.number, inner.name, called.first, outputs, stage.which)
        turn.kept.append(kept if train else None)

    def _call_together(self, turn: Turn, together: JointCall) -> bool:
        """Make several calls, forward; False, and nothing has happened: each is to be alone."""
        held, rows, stage = turn.held, together.rows, together.stages[0]
        numbers = together.numbers
        if numbers in self._apart or not all(map(self._kernels.known, numbers)):
            return False
        inner = [self._inner[k] for k in numbers]
        payload = inner[0].source.gather(held, rows.numbers)
        inputs = tuple(payload[j] for j in inner[0].call.taken(len(payload)))
        place = inner[0].place
        inputs += tuple(read_columns(inner[0].call, place, rows.state, None, place.device))
        each = [self._kernels.recalled(turn, k, inputs) for k in numbers]
        found = [kernel for kernel in each if kernel is not None]
        if len(found) < len(each):
            return False
        before = self._beside.get(numbers)
        if before is None or not all(map(is_, before[0], found)):
            kernels = found[0].beside(found[1:])
            if kernels is None:
                self._apart.add(numbers)
                return False
            before = self._beside[numbers] = found, kernels
        kernels = before[1]
        try:
            outputs, residuals = kernels.forward(inputs, together.sizes)
        except Exception as error:
            blame(error, inner, "forward", inputs, together, turn)
            raise
        for one in inner:
            one.width = len(payload)
        into = stage.into.number
        put_some(held, into, inner[0].name, together.first, outputs, stage.which)
        turn.kept += [KeptJointCall(together, kernels, found, residuals)] * len(found)
        self.made += len(found)
        self.together += 1
        return True

    def _inputs(self, inner: Inner, number: int, called: Called, held: AbstractTensors) -> Payload:
        """The arguments of a call."""
        rows, lengths, place = called.rows, called.lengths, inner.place
        source, take = inner.source, inner.call.take
        if take is None:
            inputs = source.gather(held, rows.numbers)
            inner.width = len(inputs)
        else:
            inputs = source.gather_some(held, rows.numbers, take)
            inner.width = source.width(held)
        inputs += tuple(read_columns(inner.call, place, rows.state, lengths, place.device))
        dry_run = self._kernels.dry_runs[number]
        if dry_run is not None:
            with torch.no_grad():
                tried = detached(inputs)
                dry_run.look(inner.call, place, tried, rows.state, lengths, place.device)
            self._kernels.dry_runs[number] = unsettled(inner.call)
        return inputs

    def _compute(
        self, turn: Turn, number: int, called: Called, inputs: Payload, train: bool
    ) -> tuple[Payload, KeptCall]:
        """Run a module."""
        inner, tape = self._inner[number], turn.tape
        pick = self._kernels.pick(number, inputs)
        if pick is not None:
            if tape is not None:
                tape.note(inputs, inner)
            return pick[0], KeptCall(pick[1], ())
        kernel = self._kernels.now(turn, number, inputs, train=train)
        inside = self._inside(turn, inner, called) if inner.call.inside else None
        if tape is not None:
            return tape.run(inner, kernel, inputs, called, inside)
        if isinstance(kernel, AbstractMemoryKernel):
            memory = inner.recalled(turn.held, called.rows.state, called.lengths)
            if train and isinstance(kernel, RememberingRead):
                outputs, recorded = kernel.record(inputs, memory)
                return outputs, KeptCall(kernel, inputs, memory, None, recorded)
            outputs, residuals = kernel.forward(inputs, memory)
            return outputs, KeptCall(kernel, residuals, memory)
        if not train:
            return kernel.evaluate(inputs, inside), KeptCall(kernel, ())
        if isinstance(kernel, Remembering):
            outputs, graph = kernel.record(inputs, inside)
            return outputs, KeptCall(kernel, inputs, None, inside, graph)
        outputs, residuals = kernel.forward(inputs, inside)
        return outputs, KeptCall(kernel, residuals, None, inside)

    def _inside(self, turn: Turn, inner: Inner, called: Called) -> Inside:
        """Of the bundles of a call; the same object where the same ones were looked into last."""
        slots, lengths = called.rows.state[INSTANCE], called.lengths
        before = turn.seen
        if before is not None and before[0].size == slots.size:
            same = lengths is not None and np.array_equal(before[1], lengths)
            if same and np.array_equal(before[0], slots):
                return before[2]
        found = look_inside(inner.place, slots, lengths, inner.place.device)
        if lengths is not None:
            turn.seen = slots, lengths, found
        return found

    def take_back(
        self,
        turn: Turn,
        mine: NDArray[np.bool_] | None,
        got: Got,
        updates: Updates,
        *,
        apart: bool,
    ) -> None:
        """Take back all calls, the last one first."""
        native = turn.native if mine is None and (apart or not updates) else None
        number, rows_of = len(turn.plan.calls), updates if apart else {}
        while number:
            if native is not None and native.made(number - 1):
                number = native.backward(number, got, updates)
                continue
            number -= 1
            left = turn.kept[number]
            if isinstance(left, KeptJointCall):
                if self._back_together(turn, left, mine, got, rows_of):
                    number = left.together.number
                    continue
            self._back(turn, number, mine, got, rows_of)
            if mine is None:
                called = turn.plan.calls[number]
                turn.held.answered(called.stage.into.number, called.first, len(called.rows))

    def _back(
        self,
        turn: Turn,
        number: int,
        mine: NDArray[np.bool_] | None,
        got: Got,
        updates: Updates,
    ) -> None:
        """The way back of one call."""
        called = turn.plan.calls[number]
        stage, held, rows = called.stage, turn.held, called.rows
        wanted = wanted_of(turn, called, mine)
        if not wanted.any():
            return
        which = None if wanted.all() else np.flatnonzero(wanted)
        gradient = held.gradient(stage.into.number, called.first, len(rows), which)
        read, state, lengths, at = rows.numbers, rows.state, called.lengths, which
        if which is not None:
            read, state = read[which], state[:, which]
            if lengths is not None:
                at, lengths = ragged_index(lengths, which), lengths[which]
        if not isinstance(stage, CallStage):
            stage.source.scatter(held, read, gradient)
            return
        gradient = some_of(gradient, stage.which)
        inner = self._inner[stage.number]
        into = GradientSum(()) if inner.weights is None else inner.weights.gradient
        left = turn.left(number)
        if mine is None:
            turn.kept[number] = None  # all have come: what it holds is free when it is answered
        slots = state[INSTANCE]
        local = turn.local[slots] if lengths is None else turn.local[slots].repeat(lengths)
        each = updates.get(inner.weights.name) if updates and inner.weights is not None else None
        try:
            with nullcontext() if each is None else into.of_updates(each[local]):
                found = left.backward(inner, held, gradient, state, lengths, at, into)
        except GeartrainError as error:
            error.add_note(story_of(inner, "backward", gradient, slots, number, turn))
            raise
        except Exception as error:
            story = story_of(inner, "backward", gradient, slots, number, turn)
            raise WorkerError(f"{type(error).__name__} in node {story}: {error}") from error
        found = inner.call.answer(found, inner.width)
        if any(g is not None for g in found):
            inner.source.scatter(held, read, found)
        if inner.weights is not None and inner.counts:
            got[inner.weights.name].append(local)

    def _back_together(
        self,
        turn: Turn,
        left: KeptJointCall,
        mine: NDArray[np.bool_] | None,
        got: Got,
        updates: Updates,
    ) -> bool:
        """The way back of calls that were taken together; False: some of their rows stay."""
        held, together = turn.held, left.together
        rows, first, into = together.rows, together.first, together.stages[0].into.number
        touched = held.touched.get(into)
        if mine is not None or touched is None or not touched[first : first + len(rows)].all():
            return False
        gradient = held.gradient(into, first, len(rows), None)
        gradient = some_of(gradient, together.stages[0].which)
        inner = [self._inner[number] for number in together.numbers]
        sums = [GradientSum(()) if i.weights is None else i.weights.gradient for i in inner]
        ends = np.cumsum(together.sizes)[:-1]
        local = np.split(turn.local[rows.state[INSTANCE]], ends)
        try:
            with ExitStack() as stack:
                for one, places, into_ in zip(inner, local, sums, strict=True) if updates else ():
                    each = None if one.weights is None else updates.get(one.weights.name)
                    if each is not None:
                        stack.enter_context(into_.of_updates(each[places]))
                found = left.backward(gradient, sums)
        except Exception as error:
            blame(error, inner, "backward", gradient, together, turn)
            raise
        for number in range(together.number, together.number + len(inner)):
            turn.kept[number] = None
        held.answered(into, first, len(rows))
        found = inner[0].call.answer(found, inner[0].width)
        if any(g is not None for g in found):
            inner[0].source.scatter(held, rows.numbers, found)
        for one, places in zip(inner, local, strict=True):
            if one.weights is not None:
                got[one.weights.name].append(places)
        return True

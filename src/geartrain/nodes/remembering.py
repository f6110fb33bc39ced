"""Kernels for modules that look inside bundles, and for those that read memories: autograd's graph
of a firing, while it is of use.

    forward   x ─► y = f(x; θ), and its graph      kept: x, and which firing and row it was
    backward  all rows of one firing, the same θ ─► its graph
              some of them, or θ has changed     ─► f runs again, from x

    or, where one has been found faster, a program in place of f and its graph

Bundles that went through a module together mostly come back together, as what waits is taken as a
whole. To run the module again is then a third of all its work.
"""

from __future__ import annotations

from abc import ABC
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import Gradient, IntArray, Payload, distinct
from geartrain.native.calls import SeveralForm
from geartrain.nodes.call import as_payload, differentiate, own_integers, run_module
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import Recalled
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered
from geartrain.nodes.memory import ReadAgain
from geartrain.nodes.payload import Recompute
from geartrain.nodes.ragged import AbstractRaggedChoice, AbstractRaggedProgram

MOST_GRAPHS: Final = 64
"""Firings whose graphs are kept; those before them run again."""
PATIENCE: Final = 16
"""If so many graphs more have been of no use than of use, no more are kept."""

_SHIFT: Final = 32


@final
@dataclass(frozen=True, slots=True, eq=False)
class RecordedGraph:
    """One firing.

    Args:
        leaves: Its inputs.
        outputs: With their graph.
        rows: How many went in.
        seen: Of the weights.
    """

    leaves: Payload
    outputs: Payload
    rows: int
    seen: tuple[tuple[int, int], ...]


def _is_light(choice: AbstractRaggedChoice | None) -> bool:
    return choice is not None and choice.light


def versions_of(parameters: Sequence[nn.Parameter]) -> tuple[tuple[int, int], ...]:
    """Tells weights of now from those of another moment."""
    return tuple([(p._version, p.data_ptr()) for p in parameters])


@final
@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One firing that a program has computed.

    Args:
        program: It.
        kept: What it wants on the way back.
        rows: How many went in.
        seen: Of the weights.
        seeds: Of the rows, from which follows what was drawn.
    """

    program: AbstractRaggedProgram
    kept: Any
    rows: int
    seen: tuple[tuple[int, int], ...]
    seeds: Tensor | None = None


Recorded: TypeAlias = RecordedGraph | RecordedCall


class AbstractRemembering(ABC):
    """A kernel that runs by autograd, until a program may have been found that is faster."""

    _choice: AbstractRaggedChoice | None

    @property
    def replaced(self) -> bool:
        """Whether a program computes in place of autograd."""
        return self._choice is not None and self._choice.replaced

    def give_up(self, why: str) -> None:
        """Its program is used no more."""
        if self._choice is not None:
            self._choice.give_up(why)

    def take_over(self, before: AbstractRemembering) -> None:
        """What was made for the same module of an engine that is no more."""
        if self._choice is not None and before._choice is not None:
            self._choice.take_over(before._choice)


@final
class Remembering(AbstractRemembering, AbstractKernel):
    """Keeps the inputs, and autograd's graph of whole firings beside them.

    Gradients are those of ``Recompute``, to which it leaves what a graph cannot answer. Where a
    program has been found faster than autograd, it takes its place.

    Args:
        function: The module.
        parameters: Its weights.
        choice: Looks for a program; None: nobody does.
        draws: Whether the module draws random numbers: then a program computes it from the first
            firing on, of seeds that are kept with the rows.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Sequence[nn.Parameter],
        choice: AbstractRaggedChoice | None = None,
        *,
        draws: bool = False,
    ) -> None:
        self._function, self._choice, self._draws = function, choice, draws
        self._parameters = [p for p in parameters if p.requires_grad]
        self._again = Recompute(function, parameters)
        self._graphs: OrderedDict[int, Recorded] = OrderedDict()
        self._next = 0
        self._wasted = 0
        self.used = 0
        """Firings that were answered by their graphs."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those of the module that learn."""
        return self._parameters

    def look(self, inputs: Payload, inside: Inside | None) -> None:
        """Autograd computes these rows for somebody else: a program is looked for."""
        if self._choice is not None and self._choice.undecided and inside is not None:
            self._choice.inside(inputs, inside)

    def listed_inside(self, inputs: Payload) -> SeveralForm | None:
        """How C calls it many at a time, for rows like these; None: it is called by itself."""
        return None if self._choice is None else self._choice.listed(inputs, None)

    @property
    def apart(self) -> bool:  # type: ignore[override]
        return not self._parameters or (self.replaced and _is_light(self._choice))

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.replaced or self._wasted < PATIENCE

    def evaluate(self, inputs: Payload, inside: Inside | None = None) -> Payload:
        return self._again.evaluate(inputs, inside)

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        n = inputs[0].shape[0]
        self._next += 1
        tickets = torch.arange(n) + (self._next << _SHIFT)
        if self._draws:
            outputs, recorded = self._drawn(inputs, inside)
            self._graphs[self._next] = recorded
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
            return outputs, (*inputs, cast(Tensor, recorded.seeds), tickets)
        if not self.remembers or not all(x.is_cpu for x in inputs):
            return self._again.evaluate(inputs, inside), (*inputs, tickets)
        outputs, self._graphs[self._next] = self._run(inputs, inside)
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
            self._wasted += 1
        return outputs, (*inputs, tickets)

    def record(self, inputs: Payload, inside: Inside | None) -> tuple[Payload, Recorded | None]:
        """Outputs, and the graph of them, which whoever asks keeps; ``answer`` takes it back.

        The graph is None if none is to be kept.
        """
        if self._draws:
            return self._drawn(inputs, inside)
        if not self.remembers or not all(x.is_cpu for x in inputs):
            return self._again.evaluate(inputs, inside), None
        return self._run(inputs, inside)

    def answer(
        self,
        graph: Recorded | None,
        gradients: Gradient,
        inputs: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None,
    ) -> Gradient:
        """``backward`` of what ``record`` has given.

        Args:
            graph: As it gave it, and once only.
            gradients: Of the rows.
            inputs: Those of ``record``.
            rows: int64, which of them have come back; None: all, in order.
            into: Gets the gradients of the parameters.
            inside: Of the bundles that have come back.
        """
        mixed = isinstance(graph, RecordedGraph) and into.of_several
        if graph is None or rows is not None or mixed or graph.seen != self._seen():
            self._wasted += graph is not None
            seeds = graph.seeds if isinstance(graph, RecordedCall) else None
            again = inputs if seeds is None else (*inputs, seeds)
            return self._once_more(gradients, again, rows, into, inside)
        self.used += 1
        self._wasted = max(self._wasted - 1, 0)
        return self._back(graph, gradients, into)

    def _once_more(
        self,
        gradients: Gradient,
        inputs: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        """Compute these rows again, for their gradient; inputs are followed by seeds where
        something is drawn."""
        if self._draws:
            *mine, seeds = gathered(inputs, rows)
            found = self._program(tuple(mine), inside)
            _, kept = found.inside(tuple(mine), cast(Inside, inside), seeds)
            return found.backward(kept, gradients, into, None)
        program = None if self._choice is None else self._choice.program
        if program is None or inside is None:
            return self._again.backward(gradients, inputs, rows, into, inside, wanted=wanted)
        _, kept = program.inside(gathered(inputs, rows), inside)
        return program.backward(kept, gradients, into, None)

    def _program(self, inputs: Payload, inside: Inside | None) -> AbstractRaggedProgram:
        """What computes a module that draws."""
        program = None
        if self._choice is not None and inside is not None and all(x.is_cpu for x in inputs):
            program = self._choice.at_once(inputs, inside)
        if program is None:
            raise GraphError(
                "a module draws random numbers in bundles whose rows are not on the host, or while "
                "it is in evaluation; use keep='graph'"
            )
        return program

    def _drawn(self, inputs: Payload, inside: Inside | None) -> tuple[Payload, RecordedCall]:
        """Outputs of rows that get new seeds."""
        program, n = self._program(inputs, inside), inputs[0].shape[0]
        seeds = row_seeds(n)
        outputs, kept = program.inside(inputs, cast(Inside, inside), seeds)
        return own_integers(outputs), RecordedCall(program, kept, n, self._seen(), seeds)

    def _run(self, inputs: Payload, inside: Inside | None) -> tuple[Payload, Recorded]:
        if self._choice is not None and inside is not None:
            program = self._choice.inside(inputs, inside)
            if program is not None:
                try:
                    outputs, kept = program.inside(inputs, inside)
                except IndexError:  # which the module itself will tell of, if it is one
                    self._choice.give_up("it asks for rows in another way")
                else:
                    call = RecordedCall(program, kept, inputs[0].shape[0], self._seen())
                    return own_integers(outputs), call
        # Not ``detach``: rows of a store lie beside others that are written to meanwhile.
        leaves = tuple([x.data.requires_grad_() if x.is_floating_point() else x for x in inputs])
        with torch.enable_grad():
            outputs = as_payload(run_module(self._function, leaves, inside))
        graph = RecordedGraph(leaves, outputs, inputs[0].shape[0], self._seen())
        return own_integers(tuple([y.detach() for y in outputs])), graph

    def _back(self, graph: Recorded, gradients: Gradient, into: GradientSum) -> Gradient:
        if isinstance(graph, RecordedCall):
            return graph.program.backward(graph.kept, gradients, into, None)
        asked = [x for x in graph.leaves if x.requires_grad]
        found = differentiate(graph.outputs, gradients, [*asked, *self._parameters])
        for parameter, d in zip(self._parameters, found[len(asked) :], strict=True):
            if d is not None:  # row numbers of a sparse one are the input's, and wait for the step
                into.add(parameter, d.clone() if d.is_sparse else d)
        answers = iter(found[: len(asked)])
        return tuple([next(answers) if x.requires_grad else None for x in graph.leaves])

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        (tickets,) = gathered(kept[-1:], rows)
        numbers = distinct((tickets >> _SHIFT).numpy()).tolist() if self._graphs else []
        graphs = [self._graphs.pop(number, None) for number in numbers]
        order = None
        mixed = into.of_several and any(isinstance(g, RecordedGraph) for g in graphs)
        if len(graphs) == 1 and graphs[0] is not None and not mixed:
            order = self._order(graphs[0], tickets, gradients, inside, into)
        if order is None:
            self._wasted += sum(graph is not None for graph in graphs)
            return self._once_more(gradients, kept[:-1], rows, into, inside, wanted=wanted)
        self.used += 1
        self._wasted = max(self._wasted - 1, 0)
        graph, places, came = graphs[0], *order
        assert graph is not None
        if isinstance(graph, RecordedCall):  # whose inputs lie in the store
            graph = replace(graph, kept=graph.program.lasting(graph.kept))
        dys = tuple([g if g is None or came is None else g[came] for g in gradients])
        back = self._back(graph, dys, into)
        return tuple([d if d is None or came is None else d[places] for d in back])

    def _order(
        self,
        graph: Recorded,
        tickets: Tensor,
        gradients: Gradient,
        inside: Inside | None,
        into: GradientSum,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Where rows that came back were in the firing, and an order of the gradients that is that
        of its outputs; None for that: they are in order. None: the graph cannot answer.
        """
        if tickets.numel() != graph.rows or graph.seen != self._seen():
            return None
        places = tickets & ((1 << _SHIFT) - 1)
        if into.of_several and not bool((places[1:] > places[:-1]).all()):
            return None  # updates are told in the order of the rows that came
        if bool((places[1:] > places[:-1]).all()):
            return places, None
        if all(g is None or g.shape[0] == graph.rows for g in gradients):
            return places, places.argsort()
        if inside is None or bool((inside.lengths == 0).any()):
            return None  # empty bundles have no place
        first = inside.lengths.cumsum(0) - inside.lengths
        return places, places[first].argsort()

    def _seen(self) -> tuple[tuple[int, int], ...]:
        return versions_of(self._parameters)


@final
class RememberingRead(AbstractRemembering, ReadAgain):
    """For a module that reads a memory: the graph of a call, where whoever calls keeps it.

    A loop that runs whole takes its calls back as they were made, so nothing runs twice. Elsewhere
    it is what it extends, with the same arguments. Where a program has been found faster than
    autograd, it takes its place everywhere.

    Args:
        function, parameters, columns: As of what it extends.
        choice: Looks for a program; None: nobody does.
        beside: Whether it is beside a kernel that was written by hand: a program is taken at once,
            as soon as C might call it.
    """

    used = 0
    """Calls that were answered by their graphs."""

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Sequence[nn.Parameter],
        columns: int,
        choice: AbstractRaggedChoice | None = None,
        *,
        beside: bool = False,
    ) -> None:
        super().__init__(function, parameters, columns)
        self._choice, self._beside = choice, beside

    def look(self, inputs: Payload, recalled: Callable[[], Recalled]) -> None:
        """Autograd computes these rows for somebody else: a program is looked for."""
        if self._choice is not None and self._choice.undecided:
            self._choice.memory(inputs, recalled())

    def listed(self, inputs: Payload, memory: Payload) -> SeveralForm | None:
        """How C calls it many at a time, for rows and a memory like these; None: it is called by
        itself."""
        if self._choice is None:
            return None
        if self._beside:
            self._choice.read_at_once(inputs, memory)
        return self._choice.listed(inputs, memory)

    @property
    def apart(self) -> bool:
        """Whether gradients of several updates may come in one call."""
        return not self._parameters or (self.replaced and _is_light(self._choice))

    def forward(self, inputs: Payload, memory: Recalled) -> tuple[Payload, Payload]:
        found = self._computed(inputs, memory)
        return super().forward(inputs, memory) if found is None else (found[0], inputs)

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        memory: Recalled,
        into: GradientSum,
        *,
        wanted: bool = True,
    ) -> Gradient:
        program = None if self._choice is None else self._choice.program
        if program is None:
            return super().backward(gradients, kept, memory, into, wanted=wanted)
        _, left = program.memory(kept, memory)
        return program.backward(left, gradients, into, memory)

    def record(self, inputs: Payload, memory: Recalled) -> tuple[Payload, Recorded]:
        """Outputs, and the graph of them, which ``answer`` takes back."""
        n, seen = inputs[0].shape[0], versions_of(self._parameters)
        found = self._computed(inputs, memory)
        if found is not None:
            outputs, kept, program = found
            return outputs, RecordedCall(program, kept, n, seen)
        leaves, outputs = self.run(inputs, memory)
        graph = RecordedGraph(leaves, outputs, n, seen)
        return own_integers(tuple([y.detach() for y in outputs])), graph

    def _computed(
        self, inputs: Payload, memory: Recalled
    ) -> tuple[Payload, Any, AbstractRaggedProgram] | None:
        """Outputs, what is kept, and the program that has computed them; None: there is none."""
        program = None if self._choice is None else self._choice.memory(inputs, memory)
        if program is None or self._choice is None:
            return None
        try:
            outputs, kept = program.memory(inputs, memory)
        except IndexError:  # which the module itself will tell of, if it is one
            self._choice.give_up("it asks for rows in another way")
            return None
        return own_integers(outputs), kept, program

    def answer(
        self,
        graph: Recorded,
        gradients: Gradient,
        inputs: Payload,
        rows: IntArray | None,
        memory: Recalled,
        into: GradientSum,
    ) -> Gradient:
        """``backward`` of what ``record`` has given.

        Args:
            graph: As it gave it, and once only.
            gradients: Of the rows that have come back.
            inputs: Those of ``record``.
            rows: int64, which of them have come back; None: all, in order.
            memory: What these rows read.
            into: Gets the gradients of the parameters.
        """
        mixed = isinstance(graph, RecordedGraph) and into.of_several
        if rows is not None or mixed or graph.seen != versions_of(self._parameters):
            return self.backward(gradients, gathered(inputs, rows), memory, into)
        self.used += 1
        if isinstance(graph, RecordedCall):
            return graph.program.backward(graph.kept, gradients, into, memory)
        return self.back(graph.leaves, len(inputs), graph.outputs, gradients, memory, into)

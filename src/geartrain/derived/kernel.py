"""Row kernels that nobody wrote: of any row-wise module, out of a trace of it and its gradient.

    forward   inputs ─► program of the module's settings, traced at first ─► outputs, residuals
    backward  gradients, residuals ─► the same program's other half
    refused   ─► the reason in the log, and the module runs again from its inputs

Residuals are of then and weights of now, as for every kernel. So are buffers, and whatever is
computed of weights alone: a transposed weight, a normalised one.

What Python does inside a module is done once, when it is traced, for all modules of its structure
and the life of the process. The settings, which are the numbers, strings and flags that its code
finds (``training``, ``p``), are compared at each call, and new ones are looked up or traced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from torch import Tensor, nn

from geartrain.derived.cut import by_whom
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.registry import REGISTRY, kind_of
from geartrain.derived.structure import Structure, modules_of
from geartrain.errors import GraphError, ProtocolError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.payload import Recompute

log = logging.getLogger("geartrain.nn")

MOST_PROGRAMS: Final = 16
"""Settings whose programs a kernel remembers; the oldest is forgotten."""


@final
class DerivedKernel(AbstractKernel):
    """A kernel for any module or function that maps rows to rows.

    The first call with new settings, or with inputs of another kind, traces the module (tens of
    milliseconds), unless one of its structure has been traced in this process. What cannot be
    traced and cut is run again instead, and a line in the log of ``geartrain.nn`` says why.

    Args:
        name: The node, for the log.
        function: The module or function.
        tell: Is told what has come of it, for the printed graph.

    Attributes:
        refused: Why the module is run again instead, under the latest settings; None if it is not.
    """

    traces = True

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._name, self._function, self._tell = name, function, tell
        self._structure = Structure(function)
        self._operands = Operands(function)
        self._programs: dict[object, tuple[object, AbstractKernel]] = {}
        self._order: tuple[int | None, ...] | None = None
        self._restless: AbstractKernel | None = None
        self.refused: str | None = None

    @property
    def apart(self) -> bool:  # type: ignore[override]
        return all(program.apart for _, program in self._programs.values())

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        if self._restless is not None:
            return self._restless.forward(inputs)
        settings, kind = self._structure.now(), kind_of(inputs)
        known, program = self._programs.get(settings, (None, None))
        if program is None or known != kind:
            program = self._derived(inputs)
            self._programs.pop(settings, None)
            self._programs[settings] = kind, program
            if len(self._programs) > MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        outputs, residuals = program.forward(inputs)
        return outputs, self._in_order(inputs, residuals)

    def begin_anew(self) -> bool:
        its = [*self._programs.items()]
        if self._restless is not None or len(its) != 1 or its[0][0] != self._structure.now():
            return False
        ((_, (_, program)),) = its
        return program.begin_anew()

    def for_rows(self, inputs: Payload) -> AbstractKernel | None:
        known, program = self._programs.get(self._structure.now(), (None, None))
        return program if known == kind_of(inputs) else None

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
        if self._restless is not None:
            return self._restless.backward(gradients, kept, rows, into)
        found = self._programs.get(self._structure.now())
        if found is None:
            raise ProtocolError(
                f"'{self._name}': gradients came for settings of the module that no row was sent "
                "forward with; change its attributes when nothing is in flight"
            )
        return found[1].backward(gradients, kept, rows, into)

    def _derived(self, inputs: Sequence[Tensor]) -> AbstractKernel:
        if self._structure.settings != self._structure.now():
            self._structure = Structure(self._function)
        known = REGISTRY.ask(self._name, self._function, self._structure, inputs)
        self.refused = known.refused
        if known.cut is not None:
            self._tell(f"derived{by_whom(known.cut)}")
            return Program(known.cut, self._operands)
        if any(drops(each) for each in modules_of(self._function)):
            raise GraphError(
                f"'{self._name}': no kernel is found for it ({known.refused}), and dropout would "
                "draw another mask when the module is run again; use geartrain.nn.RowDropout as a "
                "node of its own, or keep='graph' with bundles"
            )
        self._tell(f"runs again (cannot be cut: {known.refused})")
        if not known.told:
            known.told = True
            log.warning("'%s' runs again for its gradient: %s", self._name, known.refused)
        again = running_again(self._function)
        if known.restless:
            self._restless = again
        return again

    def _in_order(self, inputs: Sequence[Tensor], residuals: Payload) -> Payload:
        """Residuals that are inputs lie where they are joined, so they never change their place."""
        order = tuple(
            next((i for i, x in enumerate(inputs) if x is kept), None) for kept in residuals
        )
        self._order = self._order or order
        if order == self._order:
            return residuals
        return tuple(x if i is None else x.clone() for i, x in zip(order, residuals, strict=True))


def running_again(function: Callable[..., Any]) -> Recompute:
    """The kernel that runs a function again from its inputs."""
    parameters = [p for each in modules_of(function) for p in each.parameters(recurse=False)]
    return Recompute(function, list(dict.fromkeys(parameters)))


def drops(module: nn.Module) -> bool:
    """Whether it draws a mask."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training

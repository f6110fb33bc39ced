"""Row kernels that nobody wrote: of any row-wise module, out of a trace of it and its gradient.

    forward   inputs ─► program of the module's settings, traced at first ─► outputs, residuals
    backward  gradients, residuals ─► the same program's other half
    refused   ─► the reason in the log, and the module runs again from its inputs

Residuals are of then and weights of now, as for every kernel. So are buffers, and whatever is
computed of weights alone: a transposed weight, a normalised one.

What Python does inside a module is done once, when it is traced. The settings, which are the
numbers, strings and flags among the attributes of the module and its submodules (``training``,
``p``), are compared at each call, and new ones are traced.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn

from geartrain.errors import GraphError, ProtocolError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.frames.tables import sparse_tables
from geartrain.nn.split import SIZES, Term, TraceSplit, split
from geartrain.nodes.call import as_payload
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered, may_have_kernel
from geartrain.nodes.payload import Recompute

log = logging.getLogger("geartrain.nn")

MOST_PROGRAMS: Final = 16
"""Settings whose programs a kernel remembers; the oldest is forgotten."""

_TRACING = threading.Lock()
"""A tracer changes ``nn.Module`` itself for a while, so two of them would not find it as it was."""


@final
class DerivedKernel(AbstractKernel):
    """A kernel for any module or function that maps rows to rows.

    The first call with new settings, or with inputs of another kind, traces the module (tens of
    milliseconds, the first in a process about a second). What cannot be traced and cut is run again
    instead, and a line in the log of ``geartrain.nn`` says why.

    Args:
        name: The node, for the log.
        function: The module or function.

    Attributes:
        refused: Why the module is run again instead, under the latest settings; None if it is not.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._settings = _Settings(function)
        self._programs: dict[object, tuple[object, AbstractKernel]] = {}
        self._order: tuple[int | None, ...] | None = None
        self._restless: AbstractKernel | None = None
        self.refused: str | None = None

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        if self._restless is not None:
            return self._restless.forward(inputs)
        settings, kind = self._settings.now(), _kind(inputs)
        known, program = self._programs.get(settings, (None, None))
        if program is None or known != kind:
            program = self._derived(inputs)
            self._programs.pop(settings, None)
            self._programs[settings] = kind, program
            if len(self._programs) > MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        outputs, residuals = program.forward(inputs)
        return outputs, self._in_order(inputs, residuals)

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
        found = self._programs.get(self._settings.now())
        if found is None:
            raise ProtocolError(
                f"'{self._name}': gradients came for settings of the module that no row was sent "
                "forward with; change its attributes when nothing is in flight"
            )
        return found[1].backward(gradients, kept, rows, into)

    def _derived(self, inputs: Sequence[Tensor]) -> AbstractKernel:
        try:
            program = _derive(self._function, inputs)
        except GraphError as error:
            self.refused = str(error)
            if any(_drops(each) for each in _modules(self._function)):
                raise GraphError(
                    f"'{self._name}': keep='activations' finds no kernel ({error}), and dropout "
                    "would draw another mask when the module is run again; use "
                    "geartrain.nn.RowDropout as a node of its own, or keep='graph' with bundles"
                ) from error
            log.warning("'%s' runs again for its gradient: %s", self._name, error)
            again = _running_again(self._function)
            if isinstance(error, _RestlessError):
                self._restless = again
            return again
        self.refused = None
        return program

    def _in_order(self, inputs: Sequence[Tensor], residuals: Payload) -> Payload:
        """Residuals that are inputs lie where they are joined, so they never change their place."""
        order = tuple(
            next((i for i, x in enumerate(inputs) if x is kept), None) for kept in residuals
        )
        self._order = self._order or order
        if order == self._order:
            return residuals
        return tuple(x if i is None else x.clone() for i, x in zip(order, residuals, strict=True))


class _RestlessError(GraphError):
    """No two calls of the module find the same settings, so none is known by them."""


@final
class _Program(AbstractKernel):
    """A split and the operands it is called with."""

    def __init__(
        self,
        parts: TraceSplit,
        operands: Sequence[tuple[dict[str, Any], str]],
        sparse: Sequence[bool],
        inputs: int,
        outputs: Sequence[Tensor],
    ) -> None:
        self._parts, self._operands, self._sparse, self._inputs = parts, operands, sparse, inputs
        self._empty = [y[:0].detach().clone() for y in outputs]
        self._first = len(parts.gradients)

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        found = self._parts.forward(inputs[0].shape[0], *self._tensors(), *inputs)
        return found[: self._parts.outputs], found[self._parts.outputs :]

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
        parts = self._parts
        dys = [gradients[j] for j in parts.tangents]
        came = frozenset(k for k, d in enumerate(dys) if d is not None)
        answers: list[Tensor | None] = [None] * self._inputs
        if not came:
            return tuple(answers)
        n = next(d.shape[0] for d in dys if d is not None)
        if len(came) < len(dys):
            empty = (self._empty[j] for j in parts.tangents)
            dys = [
                e.new_zeros((n, *e.shape[1:])) if d is None else d
                for d, e in zip(dys, empty, strict=True)
            ]
        operands = self._tensors()
        found = parts.backward(n, *operands, *gathered(kept, rows), *dys)
        for k, (i, of) in enumerate(parts.gradients.items()):
            if of & came:
                answers[i] = found[k]
        for term in parts.terms:
            if term.tangents & came and operands[term.operand].requires_grad:
                self._add(term, operands[term.operand], found[term.first :], into)
        return tuple(answers)

    def _tensors(self) -> list[Tensor]:
        return [owner[name] for owner, name in self._operands]

    def _add(self, term: Term, operand: Tensor, found: Payload, into: GradientSum) -> None:
        parameter = cast(nn.Parameter, operand)
        if term.how == "value":
            into.add(parameter, found[0])
        elif term.how == "product":
            into.add_product(parameter, found[0], found[1])
        elif term.how == "sum":
            into.add_sum(parameter, found[0])
        else:
            rows, ids = found[0].reshape(-1, parameter.shape[1]), found[1].reshape(-1)
            if term.padding >= 0:
                learns = ids != term.padding
                rows, ids = rows[learns], ids[learns]
            if self._sparse[term.operand]:
                into.add_rows(parameter, ids.long(), rows)
            else:
                into.add(parameter, torch.zeros_like(parameter).index_add_(0, ids, rows))


@final
class _Settings:
    """What a trace of a module takes as constant, and may change: see the module's docstring."""

    def __init__(self, function: Callable[..., Any]) -> None:
        modules = _modules(function)
        self._slots = [
            (vars(each), name)
            for each in modules
            for name, value in vars(each).items()
            if isinstance(value, bool | int | float | str | None)
        ]

    def now(self) -> object:
        return tuple([owner[name] for owner, name in self._slots])


def _modules(function: Callable[..., Any]) -> list[nn.Module]:
    return list(function.modules()) if isinstance(function, nn.Module) else []


def _running_again(function: Callable[..., Any]) -> Recompute:
    parameters = [p for each in _modules(function) for p in each.parameters(recurse=False)]
    return Recompute(function, list(dict.fromkeys(parameters)))


def _learns(x: Tensor) -> bool:
    # Frozen ones too: they may be thawed, and what is kept for them costs little.
    return isinstance(x, nn.Parameter) and x.is_floating_point()


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training


def _kind(inputs: Sequence[Tensor]) -> object:
    return [(x.dtype, x.shape[1:], x.device) for x in inputs]


def _derive(function: Callable[..., Any], inputs: Sequence[Tensor]) -> _Program:
    """Trace, cut, and try the two programs on rows like these.

    Raises:
        GraphError: Why it cannot be.
    """
    if isinstance(function, nn.Module) and not may_have_kernel(function):
        raise GraphError("a hook hangs on it, or a forward of its own")
    devices = {x.device for x in inputs if x.is_cuda}
    with _TRACING, torch.random.fork_rng(list(devices)):
        try:
            return _Derivation(function, inputs).program()
        except GraphError:
            raise
        except Exception as error:  # code of anybody is run, by a tracer of torch's
            reason = str(error).strip().split("\n")[0]
            raise GraphError(f"{type(error).__name__}: {reason}") from error


@final
class _Derivation:
    """The making of one program.

    It works with a copy of the module, which shares its tensors: a trace puts others in their
    place, and other workers may compute with the module meanwhile.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self._operands: list[tuple[dict[str, Any], str]] = []
        self._names: list[str] = []
        self._sparse: list[bool] = []
        self._own = function
        if isinstance(function, nn.Module):
            self._find_operands(function)
            memo: dict[int, Any] = {id(x): x for x in self._tensors()}
            for inner in function.modules():
                memo |= {id(x): x for x in vars(inner).values() if isinstance(x, Tensor)}
            self._own = copy.deepcopy(function, memo)
            for inner in self._own.modules():
                if isinstance(inner, nn.Embedding | nn.EmbeddingBag):
                    inner.sparse = False  # a tracer knows dense tensors; _Program adds rows
        self._samples = _sample(inputs, SIZES[0]), _sample(inputs, SIZES[1])

    def program(self) -> _Program:
        tensors = self._tensors()
        learns = [_learns(x) for x in tensors]
        # Copies, as a module may write into its buffers, or into a table (max_norm).
        operands = [x.detach().clone() for x in tensors]
        before = _Settings(self._own).now()
        parts = split(self._call, operands, learns, self._samples)
        if _Settings(self._own).now() != before:
            raise _RestlessError("its forward changes attributes of the module")
        with torch.no_grad():
            outputs = self._call(operands, self._samples[0])
        program = _Program(parts, self._operands, self._sparse, len(self._samples[0]), outputs)
        self._try(program, parts)
        return program

    def _find_operands(self, module: nn.Module) -> None:
        seen: set[int] = set()
        sparse = {id(table) for table in sparse_tables(module)}
        for path, inner in module.named_modules():
            for owner in (inner._parameters, inner._buffers):
                for name, x in owner.items():
                    if x is None or id(x) in seen:
                        continue
                    seen.add(id(x))
                    self._operands.append((cast("dict[str, Any]", owner), name))
                    self._names.append(f"{path}.{name}" if path else name)
                    self._sparse.append(id(x) in sparse)

    def _tensors(self) -> list[Tensor]:
        return [owner[name] for owner, name in self._operands]

    def _call(self, operands: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not isinstance(self._own, nn.Module):
            return as_payload(self._own(*inputs))
        named = dict(zip(self._names, operands, strict=True))
        return as_payload(torch.func.functional_call(self._own, named, tuple(inputs)))

    def _try(self, program: _Program, parts: TraceSplit) -> None:
        """Rows forward at once, and backward in two goes and another order.

        Raises:
            GraphError: That is not what autograd says, or, where chance has a part, not what the
                rows in one go say.
        """
        inputs = self._samples[1]
        with torch.no_grad():
            outputs, residuals = program.forward(tuple(inputs))
            dys = tuple(torch.randn_like(y) if y.is_floating_point() else None for y in outputs)
            cut = [self._backward(program, dys, residuals, rows) for rows in _ORDERS]
            whole = [self._backward(program, dys, residuals, [list(range(SIZES[1]))])]
            if not parts.draws:
                whole.append(self._by_autograd(outputs, dys, inputs))
                few = program.forward(tuple(x[:2] for x in inputs))[0]
                _compare([y[:2] for y in outputs], few, "rows alone give other outputs")
        for found in [*cut, *whole[:1]]:
            _compare(whole[-1], found, "rows apart give other gradients than together")

    def _backward(
        self,
        program: _Program,
        dys: tuple[Tensor | None, ...],
        residuals: Payload,
        goes: Sequence[list[int]],
    ) -> list[Tensor | None]:
        into = GradientSum([x for x in self._tensors() if isinstance(x, nn.Parameter)])
        back: list[list[Tensor | None]] = []
        for rows in goes:
            some = tuple(None if d is None else d[rows] for d in dys)
            mine = tuple(x[rows] for x in residuals)
            back.append(list(program.backward(some, mine, None, into)))
        order = torch.tensor([row for rows in goes for row in rows]).argsort()
        answers: list[Tensor | None] = [
            None if each[0] is None else torch.cat([d for d in each if d is not None])[order]
            for each in zip(*back, strict=True)
        ]
        sums = [into.take(x) if isinstance(x, nn.Parameter) else None for x in self._tensors()]
        return answers + [d.to_dense() if d is not None else None for d in sums]

    def _by_autograd(
        self, outputs: Payload, dys: tuple[Tensor | None, ...], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        operands = [x.detach().clone().requires_grad_(_learns(x)) for x in self._tensors()]
        leaves = [
            x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs
        ]
        with torch.enable_grad():
            ys = self._call(operands, [x.clone() for x in leaves])
        _compare([y.detach() for y in ys], outputs, "the trace gives other outputs")
        pairs = [(y, d) for y, d in zip(ys, dys, strict=True) if y.requires_grad]
        everything = [*leaves, *operands]
        wanted = [x for x in everything if x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True
            )
        )
        answers = [next(found) if x.requires_grad else None for x in everything]
        frozen = [*[False] * len(leaves), *[not x.requires_grad for x in self._tensors()]]
        return [None if no else d for d, no in zip(answers, frozen, strict=True)]


_ORDERS = ([[3, 0], [4, 2, 1]], [[4, 3, 2, 1], [0]])


def _sample(inputs: Sequence[Tensor], n: int) -> list[Tensor]:
    """n rows like these, no two of them the same."""
    generator = torch.Generator().manual_seed(n)
    found = []
    for x in inputs:
        rows = x.shape[0]
        y = x[torch.arange(n) % rows] if rows else x.new_zeros((n, *x.shape[1:]))
        if x.is_floating_point():
            near = 0.9 + 0.2 * torch.rand(y.shape, generator=generator)
            y = y * near.to(y.device, y.dtype)
        found.append(y.detach().contiguous())
    return found


def _compare(expected: Sequence[Tensor | None], found: Sequence[Tensor | None], what: str) -> None:
    for a, b in zip(expected, found, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            raise GraphError(what)
        if a.is_floating_point():
            near = torch.finfo(a.dtype).eps ** 0.5
            size = float(a.abs().nan_to_num().max()) if a.numel() else 0.0
            same = torch.allclose(a, b, rtol=near, atol=near * size, equal_nan=True)
        else:
            same = torch.equal(a, b)
        if not same:
            raise GraphError(what)

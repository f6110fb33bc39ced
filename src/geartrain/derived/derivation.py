"""From a function to the programs of its structure: trace, cut, and try on a few rows.

function ─► copy that shares its tensors ─► trace at 3 and at 5 rows ─► cut ─► trial ─► Cut
                                                                         │ against autograd,
                                                                         │ rows apart and mixed
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from geartrain.derived.computed import apart
from geartrain.derived.cut import Cut
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.split import TraceSplit, split
from geartrain.derived.structure import Structure
from geartrain.derived.traces.counted import SIZES, Function
from geartrain.derived.traces.unsearched import taken_apart
from geartrain.errors import GraphError
from geartrain.frames.message import Payload
from geartrain.nodes.call import arguments, as_payload, differentiate
from geartrain.nodes.gradient import GradientSum


class RestlessError(GraphError):
    """No two calls of the function find the same settings, so none is known by them."""


def derive(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Cut:
    """Trace, cut, and try the two programs on rows like these.

    Raises:
        GraphError: Why it cannot be.
    """
    operands = Operands(function)
    own = own_copy(function, operands)
    structure = Structure(own)

    def settled() -> None:
        if structure.now() != structure.settings:
            raise RestlessError("its forward changes attributes of the module")

    samples = sample(inputs, SIZES[0]), sample(inputs, SIZES[1])
    return made(Derivation(call_of(own, operands), operands, samples, settled))


@taken_apart()
def made(derivation: Derivation) -> Cut:
    """What a derivation gives; the generators are as before.

    Raises:
        GraphError: Why it cannot be.
    """
    with guarded(derivation.samples[0]):
        return derivation.cut()


@contextmanager
def guarded(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Runs anybody's code, by a tracer of torch's: the generators are as before after it.

    Raises:
        GraphError: In place of whatever it raises.
    """
    devices = {x.device for x in inputs if x.is_cuda}
    with torch.random.fork_rng(list(devices)):
        try:
            yield
        except GraphError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise GraphError(f"{type(error).__name__}: {reason}") from error


def own_copy(function: Callable[..., Any], operands: Operands) -> Callable[..., Any]:
    """A module of its own for a trace, with the same tensors."""
    if not isinstance(function, nn.Module):
        return function
    memo: dict[int, Any] = {id(x): x for x in operands.tensors()}
    for inner in function.modules():
        memo |= {id(x): x for x in vars(inner).values() if isinstance(x, Tensor)}
    own = copy.deepcopy(function, memo)
    for inner in own.modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            inner.sparse = False  # a tracer knows dense tensors; Program adds rows
    return own


def learns(x: Tensor) -> bool:
    """Whether it is differentiated."""
    # Frozen ones too: they may be thawed, and what is kept for them costs little.
    return isinstance(x, nn.Parameter) and x.is_floating_point()


def call_of(function: Callable[..., Any], operands: Operands) -> Function:
    """A function of operands, in the order of programs, and inputs."""

    def call(given: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not isinstance(function, nn.Module):
            return as_payload(function(*inputs))
        named = dict(zip(operands.names, given, strict=True))
        return as_payload(torch.func.functional_call(function, named, arguments(function, inputs)))

    return call


@final
class Derivation:
    """The making of one program.

    Args:
        call: Of operands and inputs. It works with a copy of the module, which shares its tensors:
            a trace puts others in their place, and other workers may compute with the module
            meanwhile.
        operands: Those of the module.
        samples: Inputs of ``SIZES`` rows.
        settled: Raises if a trace is worth nothing, as the call changes what it depends on.
    """

    def __init__(
        self,
        call: Function,
        operands: Operands,
        samples: tuple[Sequence[Tensor], Sequence[Tensor]],
        settled: Callable[[], None] | None = None,
    ) -> None:
        self._call, self._operands, self.samples = call, operands, samples
        self._settled = settled

    def cut(self) -> Cut:
        """Trace, cut and try.

        Raises:
            GraphError: It cannot be cut, or gives something else than the call.
        """
        tensors = self._operands.tensors()
        learned = [learns(x) for x in tensors]
        # Copies, as a module may write into its buffers, or into a table (max_norm).
        operands = [x.detach().clone() for x in tensors]
        parts = split(self._call, operands, learned, self.samples)
        if self._settled is not None:
            self._settled()
        with torch.no_grad():
            outputs = self._call(operands, self.samples[0])
        empty = tuple(y[:0].detach().clone() for y in outputs)
        cut = own = Cut(parts, len(self.samples[0]), empty, parts.alien)
        if parts.fused is None:
            cut = self._with_computed(operands, learned, cut) or cut
        if cut.parts.windows and cut.computed is None:
            cut = self._plainly(operands, learned, cut) or cut
        try:
            self._try(Program(cut, self._operands), cut.parts)
        except GraphError as error:
            if cut.parts.fused is None:
                raise
            cut = self._by_torch(own, f"its steps in C give something else: {error}")
        return cut

    def _by_torch(self, cut: Cut, why: str) -> Cut:
        """The same without steps: of entries that are alike, C may take others than torch.

        Raises:
            GraphError: Torch gives something else than the call, too.
        """
        found = replace(cut, parts=replace(cut.parts, fused=None, unfused=why))
        self._try(Program(found, self._operands), found.parts)
        return found

    def _plainly(self, operands: Sequence[Tensor], learned: Sequence[bool], cut: Cut) -> Cut | None:
        """The same, but that torch makes no windows of rows; None: that cannot be cut."""
        try:
            plain = split(self._call, operands, learned, self.samples, windows=False)
            had = cut.parts
            parts = replace(plain, fused=had.fused, unfused=had.unfused, windows=True)
            found = replace(cut, parts=parts)
            self._try(Program(found, self._operands, fused=False), parts)
        except GraphError:
            return None
        return found

    def _with_computed(
        self, operands: Sequence[Tensor], learned: Sequence[bool], cut: Cut
    ) -> Cut | None:
        """The same with weights that are computed of weights apart; None: C has no steps for it."""
        try:
            found = apart(self._call, operands, self.samples)
            if found is None:
                return None
            weights, function = found
            every = [*operands, *weights.likes]
            learn = [*learned, *[x.is_floating_point() for x in weights.likes]]
            parts = split(function, every, learn, self.samples, len(weights.likes))
        except GraphError:
            return None
        return None if parts.fused is None else replace(cut, parts=parts, computed=weights)

    def _try(self, program: Program, parts: TraceSplit) -> None:
        """Rows forward at once, and backward in two goes and another order.

        Raises:
            GraphError: That is not what autograd says, or, where chance has a part, not what the
                rows in one go say.
        """
        inputs = self.samples[1]
        with torch.no_grad():
            outputs, residuals = program.forward(tuple(inputs))
            dys = tuple(torch.randn_like(y) if y.is_floating_point() else None for y in outputs)
            cut = [self._backward(program, dys, residuals, rows) for rows in _ORDERS]
            whole = [self._backward(program, dys, residuals, [list(range(SIZES[1]))])]
            if not parts.draws:
                whole.append(self._by_autograd(outputs, dys, inputs))
                few = program.forward(tuple(x[:2] for x in inputs))[0]
                compare([y[:2] for y in outputs], few, "rows alone give other outputs")
        for found in [*cut, *whole[:1]]:
            compare(whole[-1], found, "rows apart give other gradients than together")

    def _backward(
        self,
        program: Program,
        dys: tuple[Tensor | None, ...],
        residuals: Payload,
        goes: Sequence[list[int]],
    ) -> list[Tensor | None]:
        into = GradientSum([x for x in self._operands.tensors() if isinstance(x, nn.Parameter)])
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
        sums = [
            into.take(x) if isinstance(x, nn.Parameter) else None for x in self._operands.tensors()
        ]
        return answers + [d.to_dense() if d is not None else None for d in sums]

    def _by_autograd(
        self, outputs: Payload, dys: tuple[Tensor | None, ...], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        operands = [x.detach().clone().requires_grad_(learns(x)) for x in self._operands.tensors()]
        leaves = [
            x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs
        ]
        with torch.enable_grad():
            ys = self._call(operands, [x.clone() for x in leaves])
        compare([y.detach() for y in ys], outputs, "the trace gives other outputs")
        everything = [*leaves, *operands]
        found = iter(differentiate(ys, dys, [x for x in everything if x.requires_grad]))
        answers = [next(found) if x.requires_grad else None for x in everything]
        frozen = [*[False] * len(leaves), *[not x.requires_grad for x in self._operands.tensors()]]
        return [None if no else d for d, no in zip(answers, frozen, strict=True)]


_ORDERS = ([[3, 0], [4, 2, 1]], [[4, 3, 2, 1], [0]])


def sample(inputs: Sequence[Tensor], n: int) -> list[Tensor]:
    """n rows like these, no two of them the same; where nothing but zeros came, others than these.

    Of zeros all are alike, so that nobody could tell the first of the largest.
    """
    generator = torch.Generator().manual_seed(n)
    found = []
    for x in inputs:
        rows = x.shape[0]
        y = x[torch.arange(n) % rows] if rows else x.new_zeros((n, *x.shape[1:]))
        if x.is_floating_point():
            some = torch.rand(y.shape, generator=generator).to(y.device, y.dtype)
            y = y * (0.9 + 0.2 * some) if bool(y.any()) else some
        found.append(y.detach().contiguous())
    return found


_ROUNDING: Final = 256
"""So many times the precision of the largest is the rounding of any."""


def compare(expected: Sequence[Tensor | None], found: Sequence[Tensor | None], what: str) -> None:
    """Raises:
    GraphError: They differ by more than rounding.
    """
    # What adds up to nothing, as a bias's gradient before a softmax, is rounding of the others.
    sizes = [
        float(a.abs().nan_to_num().max())
        for a in expected
        if a is not None and a.is_floating_point() and a.numel()
    ]
    largest = min(max(sizes, default=0.0), 1e30)
    for a, b in zip(expected, found, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            raise GraphError(what)
        if a.is_floating_point():
            near = torch.finfo(a.dtype).eps ** 0.5
            size = float(a.abs().nan_to_num().max()) if a.numel() else 0.0
            least = near * size + _ROUNDING * torch.finfo(a.dtype).eps * largest
            same = torch.allclose(a, b, rtol=near, atol=least, equal_nan=True)
        else:
            same = torch.equal(a, b)
        if not same:
            raise GraphError(what)

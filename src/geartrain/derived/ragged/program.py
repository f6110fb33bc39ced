"""Calls of a ragged cut: what goes where, forward and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn

from geartrain.derived.computed import ComputedOperands
from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import RaggedCall, RaggedFound, RaggedKept, address_of
from geartrain.derived.ragged.cut import RaggedCut, RaggedTerm, Tensors
from geartrain.derived.ragged.routine import RaggedRoutine
from geartrain.derived.ragged.values import HELD, MEMBERS, Buffer
from geartrain.errors import ProtocolError
from geartrain.frames.message import Gradient, Payload
from geartrain.native import library, pool
from geartrain.native.fused import packed
from geartrain.native.ragged import UNNAMED, RowsToLearn
from geartrain.native.steady import firing
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.products import matrix

MOST_LATER: Final = 128
"""Of so many rows products are made at once, and not with those of other calls."""
_OF_ROWS: Final = ("product", "sum", "sum of axes")
"""Terms that C adds up while rows are there, or that wait for those of other calls."""


@final
class RaggedPlan:
    """Where a routine's addresses come from.

    Args:
        routine: It.
        program: Whose residuals and tensors it has.
    """

    def __init__(
        self,
        routine: RaggedRoutine,
        residuals: Mapping[Buffer, int],
        made: Mapping[Buffer, int],
        ints: Mapping[Any, int],
    ) -> None:
        self.routine = routine
        self.residuals: list[tuple[int, int]] = []
        self.made: list[tuple[int, int]] = []
        self.given: list[tuple[int, int, int, int]] = []
        self.ints: list[tuple[int, int, int, int]] = []
        self.floats: list[tuple[int, int]] = []
        self.held: list[tuple[int, int, bool]] = []
        self.numbers: list[tuple[int, str]] = []
        self.operands: list[tuple[int, int, bool | None, int]] = []
        for buffer, slot in routine.slots.items():
            role, number = buffer.role, buffer.number
            if role in ("operand", "weight", "turned"):
                turned = None if role == "operand" else role == "turned"
                self.operands.append((slot, number, turned, buffer.parts))
            elif buffer in residuals:
                self.residuals.append((slot, residuals[buffer]))
            elif buffer in made:
                self.made.append((slot, made[buffer]))
            elif role == "given":
                self.given.append((slot, number, buffer.kind, buffer.entries))
            elif role == "ints":
                self.ints.append((slot, ints[buffer.node], buffer.kind, buffer.entries))
            elif role == "as_float":
                self.floats.append((slot, ints[buffer.node]))
            elif role in ("held", "sums"):
                self.held.append((slot, number, role == "sums"))
            else:
                self.numbers.append((slot, role))


@final
class RaggedProgram:
    """A cut and the operands that it is called with.

    Args:
        cut: What it does.
        operands: Of the function.
    """

    def __init__(self, cut: RaggedCut, operands: Operands) -> None:
        self._cut, self._own = cut, operands
        self._operands: Operands | ComputedOperands = operands
        if cut.computed is not None:
            self._operands = ComputedOperands(operands, cut.computed)
        self._library = library.current()
        self._like = torch.empty(0, dtype=cut.dtype)
        self._size = self._like.itemsize
        self._firing = 0
        self._always: dict[RaggedPlan, tuple[list[int], list[Tensor]]] = {}
        self._places = ints = {each.node: k for k, each in enumerate(cut.ints)}
        self._residuals = residuals = {b: k for k, b in enumerate(cut.residuals)}
        self._of_rows = [t for t in cut.terms if t.how in _OF_ROWS]
        self._others = [t for t in cut.terms if t.how not in _OF_ROWS]
        of_rows = [x for t in self._of_rows for x in t.tensors]
        self._in_c = all(len(x.tail) == 1 and x.buffer.kind != HELD for x in of_rows)
        of_terms = [t.buffer for term in cut.terms for t in term.tensors]
        self._multiplied = {b.number for b in of_terms if b.role == "given"}
        self._widths = [(b.kind, b.entries) for b in cut.residuals]
        made = [y for y in cut.outputs if isinstance(y, Tensors)]
        self._outputs = [_shape(y) for y in made]
        self._of_made = [_shape(y) for y in cut.made]
        self._number = {y.buffer: k for k, y in enumerate(cut.made)}
        of_output = {y.buffer: k for k, y in enumerate(made)}
        self._forward = RaggedPlan(cut.forward, residuals, of_output, ints)
        self._back = RaggedPlan(cut.back, residuals, self._number, ints)
        self._without = RaggedPlan(cut.without, residuals, self._number, ints)

    def begin_anew(self) -> bool:
        """Whether it is what would be made now; if so it has nothing of the fit before."""
        if self._library is not library.current() or not self._own.are_those_of_then():
            return False
        self._always, self._firing = {}, 0
        return True

    def forward(self, call: RaggedCall) -> tuple[Payload, RaggedKept]:
        """Outputs, and what ``backward`` wants.

        Raises:
            IndexError: A row is asked for that is not there.
        """
        cut, sizes = self._cut, call.sizes
        if cut.draws and call.seeds is None:
            call = replace(call, seeds=row_seeds(sizes[MEMBERS]))
        ints = cut.count(*call.inputs) if cut.ints else ()
        places, total = [], 0
        for kind, entries in self._widths:
            places.append(total)
            total += entries * sizes[kind]
        kept = RaggedKept(call, ints, {}, pool.made((total,), cut.dtype), places)
        made = self._made(self._outputs, sizes)
        self._run(self._forward, kept, made, (), None)
        ours = iter(made)
        outputs = [
            cast(Tensor, call.inputs[y]) if isinstance(y, int) else next(ours) for y in cut.outputs
        ]
        return tuple(outputs), kept

    def backward(
        self,
        kept: RaggedKept,
        gradients: Gradient,
        into: GradientSum,
        sums: Mapping[int, Tensor] | None = None,
    ) -> Gradient:
        """Gradients of the inputs.

        Args:
            kept: What ``forward`` left.
            gradients: By output; None is zero.
            into: Gets the gradients of the parameters.
            sums: By input, what gets the gradients of a memory; None: nobody wants them.
        """
        cut, call = self._cut, kept.call
        answers: list[Tensor | None] = [None] * len(call.inputs)
        came = self._came(gradients)
        if not came:
            return tuple(answers)
        dys = self._tangents(gradients, call)
        made = self._made(self._of_made, call.sizes)
        learnt = self._to_learn(kept, came, made, dys, into)
        self._run(self._back if sums else self._without, kept, made, dys, sums, learnt)
        for i, (t, of) in cut.gradients.items():
            if of & came:
                answers[i] = self._shaped(t, kept, made, dys)
        self._learn(kept, came, made, dys, into, less=learnt is not None)
        return tuple(answers)

    def lasting(self, kept: RaggedKept) -> RaggedKept:
        """The same with inputs of its own, where weights' gradients are made of them."""
        call = kept.call
        lent = {x.data_ptr() for x in call.inputs if x is not None}
        inputs = [
            pool.copied(x) if x is not None and k in self._multiplied else x
            for k, x in enumerate(call.inputs)
        ]
        ints = tuple([pool.copied(x) if x.data_ptr() in lent else x for x in kept.ints])
        own = replace(call, inputs=inputs)
        return RaggedKept(own, ints, kept.floats, kept.residuals, kept.places)

    @property
    def cut(self) -> RaggedCut:
        """What it does."""
        return self._cut

    @property
    def plans(self) -> tuple[RaggedPlan, RaggedPlan, RaggedPlan]:
        """Of the way forward, of that back, and of that back without gradients of a memory."""
        return self._forward, self._back, self._without

    def touched(self, gradients: Gradient) -> dict[int, bool]:
        """By input that a memory holds, whether it gets a gradient."""
        came = self._came(gradients)
        return {i: bool(of & came) for i, of in self._cut.held.items()}

    def _came(self, gradients: Gradient) -> frozenset[int]:
        some = enumerate(self._cut.tangents)
        return frozenset([k for k, j in some if gradients[j] is not None])

    def _tangents(self, gradients: Gradient, call: RaggedCall) -> list[Tensor]:
        """All of them, with zeros for those that have not come."""
        found = []
        for j in self._cut.tangents:
            d, y = gradients[j], self._cut.outputs[j]
            if d is None and isinstance(y, int):
                d = torch.zeros_like(cast(Tensor, call.inputs[y]))
            elif d is None:
                assert isinstance(y, Tensors)
                d = self._like.new_zeros((call.sizes[y.buffer.kind], *y.tail))
            found.append(d)
        return found

    def _made(
        self, shapes: Sequence[tuple[int, int, tuple[int, ...]]], sizes: Sequence[int]
    ) -> list[Tensor]:
        new, dtype = pool.made, self._cut.dtype
        return [new((sizes[kind] * times, *tail), dtype) for kind, times, tail in shapes]

    def _shaped(
        self, t: Tensors, kept: RaggedKept, made: Sequence[Tensor], dys: Sequence[Tensor]
    ) -> Tensor:
        """A tensor of rows that a call has had to do with."""
        buffer, call = t.buffer, kept.call
        k = self._number.get(buffer)
        if k is not None:
            x = made[k]
        elif buffer in self._residuals:
            first = kept.places[self._residuals[buffer]]
            n = buffer.entries * call.sizes[buffer.kind]
            x = kept.residuals[first : first + n]
        elif buffer.number < len(call.inputs):
            x = cast(Tensor, call.inputs[buffer.number])
        else:
            x = dys[buffer.number - len(call.inputs)]
        return x if x.shape[1:] == t.tail else x.reshape(-1, *t.tail)

    def _run(
        self,
        plan: RaggedPlan,
        kept: RaggedKept,
        made: Sequence[Tensor],
        dys: Sequence[Tensor],
        sums: Mapping[int, Tensor] | None,
        learnt: RowsToLearn | None = None,
    ) -> None:
        call, dtype, size = kept.call, self._cut.dtype, self._size
        inputs, sizes = call.inputs, call.sizes
        addresses = self.operand_addresses(plan).copy()
        base, places = kept.residuals.data_ptr(), kept.places
        for slot, k in plan.residuals:
            addresses[slot] = base + places[k] * size
        for slot, k in plan.made:
            addresses[slot] = made[k].data_ptr()
        copies: list[Tensor] = []
        for slot, k, kind, entries in plan.given:
            x = inputs[k] if k < len(inputs) else dys[k - len(inputs)]
            if x is None or x.dtype is not dtype:
                raise ProtocolError(f"rows of {dtype} were expected")
            addresses[slot] = address_of(x, sizes[kind] * entries, copies)
        for slot, k, kind, entries in plan.ints:
            addresses[slot] = address_of(kept.ints[k], sizes[kind] * entries, copies)
        for slot, k in plan.floats:
            addresses[slot] = kept.as_floats(k, dtype).data_ptr()
        for slot, k, adds in plan.held:
            x = call.held[k] if not adds or sums is None else sums[k]
            addresses[slot] = address_of(x, x.numel(), copies)
        for slot, role in plan.numbers:
            addresses[slot] = call.numbers_at(role)
        plan.routine.steps.run(sizes, addresses, learnt)

    def operand_addresses(self, plan: RaggedPlan) -> list[int]:
        """Where weights lie, for the length of a firing."""
        number = firing.number
        if number != self._firing or not number:
            self._always, self._firing = {}, number
        known = self._always.get(plan)
        if known is None:
            operands, found, held = self._operands.tensors(), [0] * plan.routine.size, []
            for slot, k, turned, parts in plan.operands:
                x = operands[k].contiguous()
                if x.dtype is not self._cut.dtype:
                    raise ProtocolError(f"a weight is {x.dtype}, and was {self._cut.dtype}")
                if turned is not None:
                    x = packed(matrix(x), turned=turned, parts=parts)
                held.append(x)
                found[slot] = held[-1].data_ptr()
            known = self._always[plan] = found, held
        return known[0]

    def _learn(
        self,
        kept: RaggedKept,
        came: frozenset[int],
        made: Sequence[Tensor],
        dys: Sequence[Tensor],
        into: GradientSum,
        *,
        less: bool,
    ) -> None:
        """Add what the way back has found for the weights; less: without what was added by C."""
        if less and not self._others:
            return
        call = kept.call
        kind, owners = call.counted
        shaped = partial(self._shaped, kept=kept, made=made, dys=dys)
        found = RaggedFound(shaped, kept.ints, call.sizes, kind, owners)
        self.learn(found, came, into, less=less)

    def _to_learn(
        self,
        kept: RaggedKept,
        came: frozenset[int],
        made: Sequence[Tensor],
        dys: Sequence[Tensor],
        into: GradientSum,
    ) -> RowsToLearn | None:
        """Products and sums that are added while rows are in a cache; None: later."""
        sizes = kept.call.sizes
        terms = [t for t in self._of_rows if t.tangents & came]
        if into.of_several or not terms or not self._in_c:
            return None
        rows = max([sizes[t.tensors[0].buffer.kind] for t in terms])
        operands = self._operands.tensors()
        if rows < MOST_LATER or not all(operands[t.operand].requires_grad for t in terms):
            return None
        learnt, some = RowsToLearn(self._cut.dtype), []
        for term in terms:
            lying = [self._lies(t.buffer, kept, made, dys) for t in term.tensors]
            parameter, its = self._operands.learner(term.operand, into)
            whole = its.whole
            if whole is None or not all(lying) or (len(lying) > 1 and parameter.ndim < 2):
                return None
            buffer, (width,) = term.tensors[0].buffer, term.tensors[0].tail
            times = buffer.entries // max(width, 1)
            n, right = sizes[buffer.kind] * times, lying[1] if len(lying) > 1 else 0
            piece = lying[0], right, buffer.kind, times, *self._naming(term, kept), n
            some.append((whole, parameter, piece))
        return learnt if GradientSum.add_all_in(learnt, some) else None

    def _naming(self, term: RaggedTerm, kept: RaggedKept) -> tuple[int, int, int, int]:
        """What names the parts of rows that a product is of, as C has it."""
        named = term.named
        ints = None if named is None else kept.ints[self._places[cast(Any, named.numbers.node)]]
        if named is None or ints is None or not ints.is_contiguous():
            return UNNAMED
        return ints.data_ptr(), named.parts, named.kind, named.times

    def _lies(
        self, buffer: Buffer, kept: RaggedKept, made: Sequence[Tensor], dys: Sequence[Tensor]
    ) -> int:
        """Where the rows lie that a call has had to do with; 0: not as C reads them."""
        k = self._number.get(buffer)
        if k is not None:
            return made[k].data_ptr()
        k = self._residuals.get(buffer)
        if k is not None:
            return kept.residuals.data_ptr() + kept.places[k] * self._size
        inputs, n = kept.call.inputs, kept.call.sizes[buffer.kind] * buffer.entries
        x = inputs[k] if (k := buffer.number) < len(inputs) else dys[k - len(inputs)]
        if x is None or x.dtype is not self._cut.dtype or x.numel() != n or not x.is_contiguous():
            return 0
        return x.data_ptr()

    def learn(
        self, found: RaggedFound, came: frozenset[int], into: GradientSum, *, less: bool = False
    ) -> None:
        """Add what the way back of some calls has found for the weights.

        Args:
            found: It.
            came: Tangents that have come.
            into: Gets it; updates are told row by row of the kind that ``found`` counts.
            less: Whether products and sums of rows have been added.
        """
        operands = self._operands.tensors()
        several = None
        if into.of_several:
            several = into.updates_of(found.sizes[found.counted])
        terms: Sequence[RaggedTerm] = self._others if less else self._cut.terms
        if not less and several is None and len(came) == len(self._cut.tangents) and self._of_rows:
            rows = max([found.sizes[t.tensors[0].buffer.kind] for t in self._of_rows])
            learn = all(operands[t.operand].requires_grad for t in self._of_rows)
            if rows < MOST_LATER and learn:
                some = [found.tensor(x) for t in self._of_rows for x in t.tensors]
                terms = self._others if into.add_later(self, tuple(some), rows) else terms
        for term in terms:
            if not term.tangents & came or not operands[term.operand].requires_grad:
                continue
            tensors = [found.tensor(t) for t in term.tensors]
            kind = term.tensors[0].buffer.kind
            if several is None or kind == found.counted:
                self._add(term, *self._operands.learner(term.operand, into), tensors, found)
                continue
            with into.of_updates(several[found.owners(kind)]):
                self._add(term, *self._operands.learner(term.operand, into), tensors, found)

    def add_all(self, found: Sequence[Payload], into: GradientSum) -> None:
        """Add the products and sums of several calls."""
        whole, k = into, 0
        for term in self._of_rows:
            parameter, into = self._operands.learner(term.operand, whole)
            if term.how == "product":
                into.add_products(parameter, [(each[k], each[k + 1]) for each in found])
            elif term.how == "sum":
                into.add_sums(parameter, [each[k] for each in found])
            else:
                for each in found:
                    into.add_sum_of_axes(parameter, each[k])
            k += len(term.tensors)

    def _add(
        self,
        term: RaggedTerm,
        parameter: nn.Parameter,
        into: GradientSum,
        tensors: Sequence[Tensor],
        found: RaggedFound,
    ) -> None:
        if term.how == "product":
            into.add_product(parameter, tensors[0], tensors[1])
        elif term.how == "sum":
            into.add_sum(parameter, tensors[0])
        elif term.how == "sum of axes":
            into.add_sum_of_axes(parameter, tensors[0])
        else:
            ids = found.ints[self._places[cast(Any, term.index)]]
            self._add_by_number(term, parameter, tensors, ids, into)

    def _add_by_number(
        self,
        term: RaggedTerm,
        parameter: nn.Parameter,
        tensors: Sequence[Tensor],
        ids: Tensor,
        into: GradientSum,
    ) -> None:
        """Rows of a table, or products of rows, by the number of its row."""
        sparse, rows = self._operands.sparse[term.operand], tensors[0]
        if term.how == "products" and not sparse:
            into.add_products_at(parameter, ids, *tensors)
            return
        if term.how == "products":
            rows = rows[:, :, None] * tensors[1][:, None]
        if term.padding >= 0:
            rows = rows.masked_fill((ids == term.padding)[:, None], 0.0)
        if not term.table:
            rows = rows.reshape(-1, *parameter.shape[1:])
        if sparse and not term.table:
            into.add_rows(parameter, ids, rows)
        else:
            into.add_at(parameter, ids, rows)


def _shape(t: Tensors) -> tuple[int, int, tuple[int, ...]]:
    """The kind of its rows, how many times these, and the rest of its shape."""
    return t.buffer.kind, t.buffer.entries // max(math.prod(t.tail), 1), t.tail

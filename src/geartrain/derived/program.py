"""The kernel that a trace makes: a cut program and the weights that it is called with."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, Final, final
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from geartrain.derived.computed import ComputedOperands
from geartrain.derived.cut import Cut
from geartrain.derived.draws import seeded_by
from geartrain.derived.fused import PackedWeights, Pair, Routine, run_together
from geartrain.derived.operands import Operands
from geartrain.derived.sorted_terms import Lookups, SortedTerms
from geartrain.derived.terms import Term
from geartrain.errors import ProtocolError
from geartrain.frames.message import Gradient, IntArray, Payload, join_arrays
from geartrain.native import library
from geartrain.native.calls import CallForm, RowsLearnt
from geartrain.native.fused import available
from geartrain.native.rows import take
from geartrain.native.steady import firing
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, AbstractKernels, gathered, lying

_LEARNS: Final = attrgetter("requires_grad")


@final
class Program(AbstractKernel):
    """A cut and the operands it is called with.

    Args:
        cut: What it does.
        operands: Of the function.
        fused: Whether C does it, where it can.
    """

    def __init__(self, cut: Cut, operands: Operands, *, fused: bool = True) -> None:
        self.cut, self._parts, self.own = cut, cut.parts, operands
        self.operands: Operands | ComputedOperands = operands
        if cut.computed is not None:
            self.operands = ComputedOperands(operands, cut.computed)
        self._inputs, self._empty = cut.inputs, cut.outputs
        self._pair = cut.parts.fused if fused else None
        self._packed = PackedWeights()
        self._learning = 0, False  # for the length of a firing
        self._side = 0
        self._by_torch = SortedTerms(cut.parts.terms)
        self._in_c = None if self._pair is None else SortedTerms(self._pair.terms)
        self._lookups = Lookups()
        self._learnt: dict[int, tuple[GradientSum, list[object], list[RowsLearnt]]] = {}
        self.apart = not self.terms.by_update or (
            self._pair is not None
            and available(self._pair.dtype)
            and self._pair.backward.beside_others(len(operands.names))
        )
        self._library = library.current()
        # As long as somebody has one: each has the program, and would be garbage with it.
        self._forms: WeakValueDictionary[Routine, CallForm] = WeakValueDictionary()

    def begin_anew(self) -> bool:
        if self._library is not library.current() or not self.own.are_those_of_then():
            return False
        self._packed.begin()
        self._learnt, self._lookups, self._learning = {}, Lookups(), (0, False)
        return True

    @property
    def room_for(self) -> int | None:  # type: ignore[override]
        """Residuals that lie side by side are the last."""
        pair = self._pair
        if pair is None or pair.forward.block is None or not available(pair.dtype):
            return None
        return pair.forward.residuals(self._parts.outputs) - 1

    @property
    def in_c(self) -> bool:
        """Whether it is C that computes."""
        return self._pair is not None and available(self._pair.dtype)

    @property
    def terms(self) -> SortedTerms:
        """Those of who computes."""
        pair = self._pair
        if pair is None or self._in_c is None or not available(pair.dtype):
            return self._by_torch
        return self._in_c

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        n, operands = inputs[0].shape[0], self.operands.tensors()
        pair = self._pair
        if pair is not None and available(pair.dtype):
            there = pair.forward_of(self._packed.expects(n) if pair.folded else 0)
            given = [*operands, *inputs, row_seeds(n)] if pair.draws else [*operands, *inputs]
            found = there(n, given, self._packed, room)
        elif pair is not None and pair.draws:
            with seeded_by(row_seeds(n)):
                found = self._parts.forward(n, *operands, *inputs)
        else:
            found = self._parts.forward(n, *operands, *inputs)
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
        came, dys = self._tangents(gradients)
        if not came:
            return (None,) * self._inputs
        n, operands = dys[0].shape[0], self.operands.tensors()
        if into.of_several and self.terms.by_update:
            return Programs((self,)).backward(gradients, gathered(kept, rows), [n], [into])
        pair = self._pair
        if pair is not None and available(pair.dtype):
            lying = self._lying(kept, rows, pair.backward, len(operands))
            found = pair.backward(n, [*operands, *lying, *dys], self._packed)
        else:
            found = parts.backward(n, *operands, *gathered(kept, rows), *dys)
        self._learn(found, came, n, operands, into)
        return self._answers(found, came)

    @staticmethod
    def _lying(kept: Payload, rows: IntArray | None, back: Routine, first: int) -> Payload:
        """Residuals of these rows: where they lie, if those are neighbours and nobody gets them."""
        there = lying(kept, rows)
        if rows is None or there is None:
            return gathered(kept, rows)
        found = [*there]
        lost = [k for k in range(len(kept)) if back.hands_over(first + k)]
        for k, x in zip(lost, gathered(tuple([kept[k] for k in lost]), rows), strict=True):
            found[k] = x
        return tuple(found)

    def listed(self, rows: int) -> CallForm | None:
        pair = self._pair
        if pair is None or not available(pair.dtype):
            return None
        there = pair.forward_of(rows)
        form = self._forms.get(there)
        if form is None:
            parts = self._parts
            form = self._forms[there] = CallForm(
                there.form,
                pair.backward.form,
                len(self.operands.names),
                self._inputs,
                self._empty,
                parts.tangents,
                parts.gradients,
                pair.dtype,
                partial(self._addresses, there),
                self._learn_listed,
                self._rows_learnt,
                self.terms.by_update,
                pair.draws,
            )
        return form if form.possible else None

    def _addresses(self, there: Routine, forward: bool) -> list[int]:
        """Those of operands by slot, for the length of a firing."""
        routine = there if forward else self.pair.backward
        return self._packed.of(routine, self.operands.tensors()).addresses

    def _came(self, outputs: int) -> frozenset[int]:
        """Which tangents came, by the outputs that got a gradient."""
        return frozenset([k for k, j in enumerate(self._parts.tangents) if outputs >> j & 1])

    def _rows_learnt(
        self, outputs: int, into: GradientSum
    ) -> tuple[Sequence[RowsLearnt], Collection[int]]:
        """Products and sums of rows that weights learn, and the results that what else they learn
        is made of."""
        own, operands = self.terms, self.operands.tensors()
        if not own.lying or not all(map(_LEARNS, [operands[k] for k in own.learning])):
            return (), ()
        first = len(self.own.names)  # behind them is what is computed of them, anew each time
        same: list[object] = [operands[k] for k in own.learning if k < first]
        if own.learning[-1] >= first:  # what is computed has one sum
            same.append(self.operands.learner(own.learning[-1], into)[1])
        before = self._learnt.get(outputs)
        if before is not None and before[0] is into and all(map(is_, before[1], same)):
            return before[2], own.resting
        came, found = self._came(outputs), []
        for term in own.lying:
            if term.tangents & came:
                parameter, its = self.operands.learner(term.operand, into)
                right = term.first + 1 if term.how == "product" else None
                rest = term.first, right, term.how == "value"
                found.append(RowsLearnt(its, its.slot(parameter), term.columns, *rest))
        self._learnt[outputs] = into, same, found
        return found, own.resting

    def _learn_listed(
        self, found: Sequence[Any], outputs: int, n: int, into: GradientSum, less: bool
    ) -> None:
        """Add what the backward of n rows has found.

        Args:
            found, outputs, n, into: Its results, who got a gradient, how many rows, and the sum.
            less: Whether products and sums of rows have been added.
        """
        came = self._came(outputs)
        if less:
            self._learn_rest(tuple(found), came, into)
        else:
            self._learn(tuple(found), came, n, self.operands.tensors(), into)

    def _learn_rest(self, found: Payload, came: frozenset[int], into: GradientSum) -> None:
        """Add what is neither products nor sums of rows."""
        operands = self.operands.tensors()
        for term in self.terms.rest:
            if term.tangents & came:
                self._add(term, operands, found[term.first :], into)

    def _tangents(self, gradients: Gradient) -> tuple[frozenset[int], list[Tensor]]:
        """Which of them came, and all as they were traced: whole, with zeros for the others."""
        parts = self._parts
        some = [None if (d := gradients[j]) is None else d.contiguous() for j in parts.tangents]
        dys = [d for d in some if d is not None]
        if len(dys) == len(some) or not dys:
            return frozenset(range(len(dys))), dys
        came, n = frozenset(k for k, d in enumerate(some) if d is not None), dys[0].shape[0]
        empty = (self._empty[j] for j in parts.tangents)
        return came, [
            e.new_zeros((n, *e.shape[1:])) if d is None else d
            for d, e in zip(some, empty, strict=True)
        ]

    def _answers(self, found: Payload, came: frozenset[int]) -> Gradient:
        """The gradients of the inputs among the results of the backward."""
        answers: list[Tensor | None] = [None] * self._inputs
        for k, (i, of) in enumerate(self._parts.gradients.items()):
            if of & came:
                answers[i] = found[k]
        return tuple(answers)

    def _learn(
        self,
        found: Payload,
        came: frozenset[int],
        n: int,
        operands: Sequence[Tensor],
        into: GradientSum,
    ) -> None:
        """Add what the backward of n rows has found for the weights."""
        own = self.terms
        terms = own.all
        if own.later and len(came) == len(self._parts.tangents) and self._all_learn(operands):
            many = n * (self._side or self._side_by_side(found))
            terms = own.at_once if into.add_later(self, found, many) else terms
        for term in terms:
            if term.tangents & came:
                self._add(term, operands, found[term.first :], into)

    def _side_by_side(self, found: Payload) -> int:
        """Rows of a product, at most, that lie in one row, as the backward found them."""
        self._side = max([math.prod(found[t.first].shape[1:-1]) for t in self.terms.later])
        return self._side

    def _all_learn(self, operands: Sequence[Tensor]) -> bool:
        """Whether all weights learn whose gradients are products and sums."""
        number, known = firing.number, self._learning
        if not number or number != known[0]:
            learn = all(operands[t.operand].requires_grad for t in self.terms.later)
            known = self._learning = number, learn
        return known[1]

    @property
    def pair(self) -> Pair:
        """Its two programs in C.

        Raises:
            ProtocolError: It has none.
        """
        if self._pair is None:
            raise ProtocolError("a program without C has no pair of routines")
        return self._pair

    def beside(self, others: Sequence[AbstractKernel]) -> AbstractKernels | None:
        programs = [p for p in (self, *others) if isinstance(p, Program) and self._alike(p)]
        return Programs(programs) if len(programs) == 1 + len(others) else None

    def _alike(self, other: Program) -> bool:
        """Whether rows of both can be computed side by side."""
        mine, its, pair, n = self._parts, other._parts, self._pair, len(self.operands.names)
        if pair is None or other._pair is None or not available(pair.dtype):
            return False
        return (
            (mine.outputs, mine.tangents, self._inputs, n)
            == (its.outputs, its.tangents, other._inputs, len(other.operands.names))
            and mine.gradients == its.gradients
            and pair.forward.alike(other._pair.forward)
            and pair.backward.alike(other._pair.backward)
            and _alike(pair.folded, other._pair.folded)
            and pair.forward.beside_others(n)
            and pair.backward.beside_others(n)
            and all(pair.forward.in_rows)
        )

    def add_all(self, found: Sequence[Payload], into: GradientSum) -> None:
        """Add the products and sums of several calls."""
        operands, whole = self.operands.tensors(), into
        for term in self.terms.later:
            parameter, into = self.operands.learner(term.operand, whole)
            k = term.first
            if term.how == "sum":
                into.add_sums(parameter, [_rows(each[k]) for each in found])
                continue
            pairs = [(each[k], each[k + 1]) for each in found]
            if term.how == "product":
                pairs = [(_rows(left), _rows(right)) for left, right in pairs]
                into.add_products(parameter, pairs, columns=term.columns)
            else:
                into.add_looked_up(self._lookups.of(term, operands, self.operands.sparse), pairs)

    def _add(
        self, term: Term, operands: Sequence[Tensor], found: Payload, into: GradientSum
    ) -> None:
        if term.how == "looked up":
            into.add_looked_up(
                self._lookups.of(term, operands, self.operands.sparse), [(found[0], found[1])]
            )
            return
        if not operands[term.operand].requires_grad:
            return
        parameter, into = self.operands.learner(term.operand, into)
        if term.how == "value":
            into.add(parameter, found[0])
        elif term.how == "product":
            into.add_product(parameter, _rows(found[0]), _rows(found[1]), columns=term.columns)
        elif term.how == "sum":
            into.add_sum(parameter, _rows(found[0]))
        else:
            tail = (parameter.numel() // term.table,) if term.table else parameter.shape[1:]
            rows, ids = found[0].reshape(-1, *tail), found[1].reshape(-1)
            if term.padding >= 0:
                learns = ids != term.padding
                rows, ids = rows[learns], ids[learns]
            if self.operands.sparse[term.operand] and not term.table:
                into.add_rows(parameter, ids.long(), rows)
            else:
                into.add_at(parameter, ids, rows)


@final
class Programs(AbstractKernels):
    """Programs that are alike: arguments, and memory, of all rows at once, and C for each.

    Args:
        programs: At least one.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs

    def forward(self, inputs: Payload, sizes: Sequence[int]) -> tuple[Payload, Payload]:
        programs = self._programs
        outputs = programs[0]._parts.outputs
        expected = [p._packed.expects(n) for p, n in zip(programs, sizes, strict=True)]
        there = [p.pair.forward_of(rows) for p, rows in zip(programs, expected, strict=True)]
        if any(found is p.pair.forward for p, found in zip(programs, there, strict=True)):
            there = [p.pair.forward for p in programs]
        seeds = [row_seeds(sum(sizes))] if programs[0].pair.draws else []
        results = run_together(
            there,
            sizes,
            [p.operands.tensors() for p in self._programs],
            [*inputs, *seeds],
            [p._packed for p in self._programs],
        )
        found = tuple([x for (x,) in results])
        return found[:outputs], found[outputs:]

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        sizes: Sequence[int],
        into: Sequence[GradientSum],
    ) -> Gradient:
        first = self._programs[0]
        came, dys = first._tangents(gradients)
        if not came:
            return (None,) * first._inputs
        operands = [p.operands.tensors() for p in self._programs]
        if first.terms.by_update and any(each.of_several for each in into):
            return self._back_by_update(came, [*kept, *dys], sizes, operands, into)
        found = run_together(
            [p.pair.backward for p in self._programs],
            sizes,
            operands,
            [*kept, *dys],
            [p._packed for p in self._programs],
        )
        in_rows = first.pair.backward.in_rows
        pieces = [
            x[0].split_with_sizes(list(sizes)) if rows else x
            for x, rows in zip(found, in_rows, strict=True)
        ]
        for p, n, own, theirs, *mine in zip(
            self._programs, sizes, operands, into, *pieces, strict=True
        ):
            p._learn(tuple(mine), came, n, own, theirs)
        return first._answers(tuple([x[0] for x in found]), came)

    def _back_by_update(
        self,
        came: frozenset[int],
        rows: Sequence[Tensor],
        sizes: Sequence[int],
        operands: Sequence[Sequence[Tensor]],
        into: Sequence[GradientSum],
    ) -> Gradient:
        """``backward`` where what is added up is of several updates: a routine for each of them."""
        pieces, order = _pieces(sizes, into)
        if order is not None:
            rows = take([x.contiguous() for x in rows], order)
        own, first = [self._programs[k] for k, _, _ in pieces], self._programs[0]
        found = run_together(
            [p.pair.backward for p in own],
            [n for _, _, n in pieces],
            [operands[k] for k, _, _ in pieces],
            rows,
            [p._packed for p in own],
        )
        start, in_rows = 0, first.pair.backward.in_rows
        for number, (k, update, n) in enumerate(pieces):
            mine = tuple(
                [
                    x[0][start : start + n] if by_row else x[number]
                    for x, by_row in zip(found, in_rows, strict=True)
                ]
            )
            with into[k].of_updates(update):
                own[number]._learn(mine, came, n, operands[k], into[k])
            start += n
        results = [x[0] for x in found]
        if order is not None:
            back = np.empty_like(order)
            back[order] = np.arange(order.size)
            results = [
                take([x], back)[0] if by_row else x
                for x, by_row in zip(results, in_rows, strict=True)
            ]
        return first._answers(tuple(results), came)


def _rows(x: Tensor) -> Tensor:
    """One below the other, where there are several for each row."""
    return x if x.ndim == 2 else x.flatten(0, -2)


def _alike(one: Routine | None, other: Routine | None) -> bool:
    return one is other if one is None or other is None else one.alike(other)


def _pieces(
    sizes: Sequence[int], into: Sequence[GradientSum]
) -> tuple[list[tuple[int, int, int]], IntArray | None]:
    """Rows of several programs, side by side, by program and update.

    Args:
        sizes: Rows of each program.
        into: The sums of each, which know of what updates rows are.

    Returns:
        Program, update and rows of each piece; and where its rows are, one piece after the other;
        None: they lie so.
    """
    pieces: list[tuple[int, int, int]] = []
    places: list[IntArray] = []
    start, moved = 0, False
    for k, (size, one) in enumerate(zip(sizes, into, strict=True)):
        each = one.updates_of(size)
        order = np.argsort(each, kind="stable")
        moved = moved or bool((np.diff(each) < 0).any())
        places.append(order + start)
        pieces += [(k, u, n) for u, n in enumerate(np.bincount(each).tolist()) if n]
        start += size
    return pieces, join_arrays(places) if moved else None

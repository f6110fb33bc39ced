"""Terms by what becomes of them: which wait for those of other calls, which lie in rows; and what
is looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from torch import Tensor

from geartrain.derived.terms import Term
from geartrain.nodes.looked_up import Lookup

_TENSORS: Final = {"value": 1, "product": 2, "sum": 1, "rows": 2, "looked up": 2}
"""Results that a term is made of."""
_LYING: Final = ("product", "sum", "value")
_LATER: Final = ("product", "sum", "looked up")


@final
class SortedTerms:
    """What operands get of a backward.

    Attributes:
        all: Of them.
        later: Those that may wait for those of other calls.
        at_once: The others.
        lying: Products and sums of rows, and what has been added up, which may be made, or
            added, from where it lies.
        rest: The others.
        resting: Which results of the backward these are made of.
        learning: Operands that get what lies, or may wait.
        by_update: Whether it is to be done update by update: what the backward adds up itself, and
            rows of which some are left out.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.all = terms
        self.later = [t for t in terms if t.how in _LATER]
        self.at_once = [t for t in terms if t.how not in _LATER]
        self.lying = [t for t in terms if t.how in _LYING]
        self.rest = [t for t in terms if t.how not in _LYING]
        self.learning = sorted({t.operand for t in (*self.lying, *self.later)})
        self.resting = frozenset([t.first + k for t in self.rest for k in range(_TENSORS[t.how])])
        self.by_update = any(t.how == "value" or t.padding >= 0 for t in self.at_once)


@final
class Lookups:
    """What is looked up, by term; the same one as long as its tensors are."""

    def __init__(self) -> None:
        self._known: dict[Term, Lookup] = {}

    def of(self, term: Term, operands: Sequence[Tensor], sparse: Sequence[bool]) -> Lookup:
        """What a term looks up, of the tensors of now.

        Args:
            term: Its ``how`` is ``looked up``.
            operands: All of them.
            sparse: Whether the gradient of each is asked for as rows.
        """
        table = operands[term.operand]
        weight = None if term.weight < 0 else operands[term.weight]
        bias = None if term.bias < 0 else operands[term.bias]
        known = self._known.get(term)
        if (
            known is None
            or known.table is not table
            or known.weight is not weight
            or known.bias is not bias
        ):
            rows = sparse[term.operand] and not term.table
            rest = term.columns, term.padding, rows, term.table
            known = self._known[term] = Lookup(table, weight, term.weighs, bias, *rest)
        return known

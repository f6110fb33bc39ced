"""What the backward of a program finds for weights, as the sum of gradients likes to have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

How: TypeAlias = Literal["value", "product", "sum", "rows", "looked up"]


@final
@dataclass(frozen=True, slots=True)
class Term:
    """A summand of an operand's gradient; of two operands', where rows are looked up.

    Args:
        operand: Its number.
        how: ``value`` has one tensor, the gradient; ``looked up`` rows and where in the table they
            come from, as ``GradientSum.add_looked_up`` takes them; the others have what the
            ``add_*`` of that name takes.
        first: Where its tensors begin among the results of the backward.
        tangents: It is zero where these are.
        padding: Of rows of a table: the index that gets nothing, or -1.
        weight: Of what is looked up: the weight that meets rows of the table, the operand, before
            anything else does; -1: none.
        weighs: Whether that weight gets its gradient by this term too.
        bias: Of what is looked up: the operand whose gradient is the sum of all rows; -1: none.
        columns: Of products: which of the weight's, first and end of neighbours; of what is looked
            up: which meet the table; None: all.
        table: Of rows of a weight that is looked up in as a table of other rows than its own: how
            many these are; 0: it is looked up in as it is.
    """

    operand: int
    how: How
    first: int
    tangents: frozenset[int]
    padding: int = -1
    weight: int = -1
    weighs: bool = False
    bias: int = -1
    columns: tuple[tuple[int, int], ...] | None = None
    table: int = 0

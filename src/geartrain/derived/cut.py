"""What a function has been cut into, once for all functions of its structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from geartrain.derived.computed import ComputedWeights
from geartrain.derived.split import TraceSplit


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """Programs for any function of one structure, and inputs of one kind.

    Args:
        parts: The programs.
        inputs: How many it takes.
        outputs: Each with no row.
        private: Whether it reads tensors that belong to the one function that was traced.
        computed: Weights that it computes of its weights: operands behind the others.
        hoists: What it was cut into once more, by the inputs that were known before the others;
            None: nothing is to be gained.
    """

    parts: TraceSplit
    inputs: int
    outputs: tuple[Tensor, ...]
    private: bool
    computed: ComputedWeights | None = None
    hoists: dict[frozenset[int], HoistedCuts | None] = field(default_factory=dict, compare=False)


@final
@dataclass(frozen=True, slots=True)
class HoistedCuts:
    """One program as two: what some inputs decide, and the rest.

    Args:
        early: Of some inputs; its outputs are the first inputs of the other.
        late: Of those and of other inputs.
        early_reads, late_reads: Which of the inputs.
    """

    early: Cut
    late: Cut
    early_reads: tuple[int, ...]
    late_reads: tuple[int, ...]


def by_whom(cut: Cut) -> str:
    """Who computes it, where that is not C, and why."""
    return f"; by torch: {cut.parts.unfused}" if cut.parts.unfused else ""

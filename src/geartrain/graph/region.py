"""Regions of a graph: loops and sections, as they are found in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias, final

from geartrain.graph.operator import Port

Run: TypeAlias = Literal["auto", "steps", "whole"]
DEFAULT: Final[Run] = "auto"
"""How a loop runs of which nothing is said: whole, if nothing but speed tells that from steps."""

STRONGEST: Final[tuple[Run, ...]] = ("steps", "whole", "auto")
"""Of several that are asked for, the first of these."""


class Deciders(NamedTuple):
    """Who says more of rows than columns do: numbers of operators, in order.

    Args:
        deciding: Those that read a payload to decide where rows go, or how many they are.
        parting: Those that make rows of the parts of a row.
    """

    deciding: list[int]
    parting: list[int]


@final
@dataclass(slots=True)
class Region:
    """A loop, or a section: operators without a loop that rows pass in one direction.

    Args:
        name: Of the first of its ``graph.loop``; of a section, that of its first operator with
            ``section`` behind it; of a stack, that of its first module.
        run: As it was asked for, or the default.
        said: Whether it was asked for.
        operators: Numbers of those in it, without merges.
        entries: Input ports in it that rows from outside come to.
        exits: Output ports in it whose reader is outside.
        inputs: Input name to the rows that enter for each row that an instance brings there.
        bundles: Input name to the rows that enter for the bundle that an instance brings there.
        counted: Whether an instance waits until all of its rows have come; else it goes on with
            those that have, as nothing in the loop brings rows together.
        reason: Why it cannot run whole; None: it can.
        uncounted: Whether that is only as nobody says how many rows enter it: with what makes them
            it may run whole.
        loops: Whether rows go round in it; else it is a section.
        look: Finds those that decide.
        made_of: The loops and sections that are in it, where it reaches further than these: what
            runs whole in its place if it shall not.
    """

    name: str
    run: Run
    operators: frozenset[int]
    entries: list[Port] = field(default_factory=list)
    exits: list[Port] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    bundles: dict[str, int] = field(default_factory=dict)
    reason: str | None = None
    said: bool = False
    counted: bool = True
    uncounted: bool = False
    loops: bool = True
    look: Callable[[Region], Deciders] = field(default=lambda region: Deciders([], []), repr=False)
    made_of: Sequence[Region] = ()
    _deciders: Deciders | None = None

    @property
    def deciders(self) -> Deciders:
        """Those in it: their functions may be called for it, so it is asked of what runs whole."""
        if self._deciders is None:
            self._deciders = self.look(self)
        return self._deciders

    @property
    def deciding(self) -> list[int]:
        """Numbers of those in it that read the payload to decide where rows go, or how many they
        are, in order."""
        return self.deciders.deciding

    @property
    def whole(self) -> bool:
        """Whether it may run whole."""
        return self.reason is None


Refusal: TypeAlias = Callable[[Region], str | None]
"""Says why a loop shall not run whole here, or None."""


def overlap(one: Region, other: Region) -> bool:
    """Whether both run whole and have operators in common."""
    return one.whole and other.whole and bool(one.operators & other.operators)

"""What has been written of a graph so far: its operators, and the names that are taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from geartrain.errors import GraphError
from geartrain.graph.operator import AbstractOperator, PartLike
from geartrain.graph.through import Through
from geartrain.kinds import require_kind

RESERVED: Final = frozenset(
    "vertex instance edge source target size payload lengths in_degree out_degree".split()
)
"""Names that a view or the library gives a meaning."""


@final
class Draft:
    """Operators in the order in which they were written, names and columns each once.

    Args:
        vertex, edge, value: Columns of instances; without edges None.
    """

    def __init__(
        self, vertex: tuple[str, ...], edge: tuple[str, ...] | None, value: tuple[str, ...]
    ) -> None:
        self.vertex, self.edge, self.value = vertex, edge, value
        self.columns = ["instance", "vertex"]
        self.operators: list[AbstractOperator] = []
        self._names: set[str] = set()
        self._numbers: dict[str, int] = {}  # by default name, the first that may be free

    def add(self, operator: AbstractOperator) -> None:
        """One more operator."""
        self.operators.append(operator)

    def throughs(self) -> Iterator[Through]:
        """The operators that run modules and functions."""
        return (o for o in self.operators if isinstance(o, Through))

    def first_of(self, part: PartLike | None) -> bool:
        """Whether no node of this part was written yet."""
        return part is None or all(t.part is not part for t in self.throughs())

    def name(self, given: str | None, default: str) -> str:
        """A name that nobody has: the one that was given, or the default with a number.

        Raises:
            GraphError: The given one is taken.
        """
        require_kind(default, str | None, "a name, or None", name=given)
        if given is not None:
            if given in self._names:
                first = next((o.kind for o in self.operators if o.name == given), "node")
                raise GraphError(
                    f"the name '{given}' is taken; inputs, nodes and outputs of a graph have names "
                    f"of their own: choose another for this one, or for the {first} that has it"
                )
            self._names.add(given)
            return given
        name, k = default, self._numbers.get(default, 2)
        while name in self._names:
            name, k = f"{default}_{k}", k + 1
        self._names.add(name)
        self._numbers[default] = k
        return name

    def declare(self, column: str) -> None:
        """A state column, unless there is one of its name.

        Raises:
            GraphError: The name is that of a column of instances, or of what a view gives by
                itself.
        """
        if column in ("instance",):
            raise GraphError("the column 'instance' cannot be changed: rows stay in their instance")
        if column in self.vertex or column in (self.edge or ()) or column in self.value:
            raise GraphError(
                f"'{column}' is a column of instances; a state column needs a name of its own"
            )
        if column in RESERVED - {"vertex", "edge"}:
            raise GraphError(
                f"'{column}' is what m.{column} gives by itself; a state column needs a name of "
                "its own"
            )
        if column not in self.columns:
            self.columns.append(column)

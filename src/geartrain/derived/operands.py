"""What programs of a function take besides its rows: its weights and buffers, as they are now."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, cast, final

from torch import Tensor, nn

from geartrain.frames.tables import sparse_tables
from geartrain.native.steady import firing
from geartrain.nodes.gradient import GradientSum


@final
class Operands:
    """The weights and buffers of a function, in the order in which programs take them.

    Attributes:
        names: Of each one the first name.
        sparse: Whether its gradient is asked for as rows.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._owners: list[tuple[dict[str, Any], str]] = []
        self._known: tuple[int, list[Tensor]] = 0, []  # for the length of a firing
        self.names: list[str] = []
        self.sparse: list[bool] = []
        self._seen: list[tuple[dict[str, Any], list[str], list[Tensor | None]]] = []
        if not isinstance(function, nn.Module):
            return
        seen: set[int] = set()
        sparse = {id(table) for table in sparse_tables(function)}
        for path, inner in function.named_modules():
            for owner in (inner._parameters, inner._buffers):
                if owner:
                    its = cast("dict[str, Any]", owner)
                    self._seen.append((its, [*its], [*its.values()]))
                for name, x in owner.items():
                    if x is None or id(x) in seen:
                        continue
                    seen.add(id(x))
                    self._owners.append((cast("dict[str, Any]", owner), name))
                    self.names.append(f"{path}.{name}" if path else name)
                    self.sparse.append(id(x) in sparse)

    def are_those_of_then(self) -> bool:
        """Whether modules have the weights and buffers, each one the same tensor, under the names
        that they had when this was made; modules themselves are not looked at."""
        for owner, names, tensors in self._seen:
            if [*owner] != names or not all(map(is_, owner.values(), tensors)):
                return False
        return True

    def tensors(self) -> list[Tensor]:
        """Those of now, not to be written to."""
        number, known = firing.number, self._known
        if number and number == known[0]:
            return known[1]
        found = [owner[name] for owner, name in self._owners]
        self._known = number, found
        return found

    def learner(self, k: int, into: GradientSum) -> tuple[nn.Parameter, GradientSum]:
        """The parameter that operand k is, which learns, and the sum that has it."""
        return cast(nn.Parameter, self.tensors()[k]), into

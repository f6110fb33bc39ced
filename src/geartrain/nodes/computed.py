"""Gradients of weights that are computed of weights, which become those of the weights themselves.

W = g / |V| V, W = A B, W = stack(...)     once a firing
rows meet W      ─►  dW, a sum over rows   as of any weight
the step comes   ─►  dg, dV = vjp(dW)      once, of the weights of then
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar, final

from torch import Tensor, nn

IDLE: Final = 16
"""Settlings for which nothing came of computed weights after which their sum is let go: those of a
fit that is over never come again."""


class AbstractComputed(Protocol):
    """What knows what some weights are computed of.

    Attributes:
        key: Equal for those whose gradients are added up together.
        stand_ins: Parameters of the shapes of what is computed: sums know these.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def stand_ins(self) -> Sequence[nn.Parameter]: ...

    def back(self, gradients: Sequence[Tensor | None]) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """What weights get, of the gradients of what is computed of them."""


class AbstractTakenByUpdate(Protocol):
    """Gradients of computed weights, by their stand-ins."""

    @property
    def ahead(self) -> bool: ...

    @property
    def holds(self) -> bool: ...

    def take_by_update(self, parameters: Sequence[nn.Parameter]) -> list[list[Tensor | None]]: ...


_Sum = TypeVar("_Sum", bound=AbstractTakenByUpdate)


@final
@dataclass(slots=True)
class _Computed(Generic[_Sum]):
    """Gradients of weights that are computed of the parameters.

    Args:
        of: Knows how.
        sum: They.
        idle: How often in a row it was settled when nothing had come.
    """

    of: AbstractComputed
    sum: _Sum
    idle: int = 0


@final
class ComputedSums(Generic[_Sum]):
    """Sums for weights that are computed, by ``AbstractComputed.key``.

    Args:
        make: An empty sum of some parameters.
    """

    def __init__(self, make: Callable[[Sequence[nn.Parameter]], _Sum]) -> None:
        self._make = make
        self._known: dict[Hashable, _Computed[_Sum]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def ahead(self) -> bool:
        """Whether something of later updates has been added."""
        return any(known.sum.ahead for known in self._known.values())

    def of(self, computed: AbstractComputed) -> _Sum:
        """The sum of what is computed so."""
        known = self._known.get(computed.key)
        if known is None:
            made = self._make(computed.stand_ins)
            known = self._known[computed.key] = _Computed(computed, made)
        return known.sum

    def settle(self, add: Callable[[int, nn.Parameter, Tensor], None]) -> None:
        """Make all that came gradients of what weights are computed of.

        Args:
            add: Gets the number of an update, a parameter, and its gradient.
        """
        for key, each in list(self._known.items()):
            came = False
            taken = each.sum.take_by_update(each.of.stand_ins) if each.sum.holds else ()
            for update, found in enumerate(taken):
                if any(d is not None for d in found):
                    came = True
                    for parameter, gradient in each.of.back(found):
                        add(update, parameter, gradient)
            each.idle = 0 if came else each.idle + 1
            if each.idle >= IDLE:
                del self._known[key]

"""Which weights messages see of a part, and what becomes of a gradient that has come late.

    forward  ─► look      ─► leaves, and the version that staleness counts from
    backward ─► look_back ─► leaves ─► gradient ─► compensated ─► added

A view says the first, a delay rule the second; see ``late.views`` and ``late.delay``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import Tensor, nn

from geartrain.codec import require_like
from geartrain.errors import CheckpointError
from geartrain.nodes.weights import WeightVersion
from geartrain.parts.late.delay import AbstractDelay
from geartrain.parts.late.seeing import Viewed
from geartrain.parts.late.views import AbstractView
from geartrain.schema import Count, Finite, NotNegative, read


@final
@dataclass(frozen=True, slots=True)
class ViewEntry:
    """What a part's view and delay remember besides tensors, as JSON has it."""

    view: Mapping[str, Any]
    of: tuple[str, str]
    messages: Count
    rows_each: Count
    rate_factor: Finite
    step_delay: NotNegative
    step_ages: Sequence[Count]


class Looked(Viewed, Protocol):
    """What must be known of the part: all that a view wants, and its parameters that learn."""

    @property
    def parameters(self) -> list[nn.Parameter]: ...


@final
class Looking:
    """The view and the delay rule of one part, at work.

    Args:
        part: The part.
        view, delay: Settings.
        average_rows: Whether sums of gradients will be divided by their rows.

    Attributes:
        updates_before: Updates before that of an instance, by its number, where instances are in
            cohorts.
        rows_each: Payload rows of the last message.

    Raises:
        ValueError: View and delay do not go together.
    """

    def __init__(
        self, part: Looked, view: AbstractView, delay: AbstractDelay | None, *, average_rows: bool
    ) -> None:
        self._part, self.view, self.delay = part, view, delay
        self._average_rows = average_rows
        self._compensation = None if delay is None else delay.start(part.parameters)
        if self._compensation is not None and not view.keeps_then:
            raise ValueError(
                f"part '{part.name}': delay={delay} compares the weights of now with those that a "
                f"gradient is of, which view={view} does not keep; use view=Stashed()"
            )
        self.updates_before: Callable[[int], int] | None = None
        self.rows_each = 0
        self._number = 0
        self._aliases: dict[nn.Parameter, Tensor] | None = None
        self.seeing = view.start(part)

    @property
    def wants_graph(self) -> str | None:
        """The setting, if any, that only nodes with ``keep="graph"`` can follow."""
        if self.view.wants_graph:
            return f"view={self.view}"
        return None if self._compensation is None else f"delay={self.delay}"

    def look(self, number: int, rows: int) -> WeightVersion:
        self.rows_each, self._number = rows, number
        return self.seeing.look(number)

    def expected_delay(self, otherwise: int) -> int:
        """Updates until the message that leaves now is answered.

        Args:
            otherwise: Of instances that are in no cohorts.
        """
        return otherwise if self.updates_before is None else self.updates_before(self._number)

    def compensated(
        self,
        seen: WeightVersion,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        rows: int,
    ) -> Sequence[Tensor | None]:
        """What is added of a message's gradients, sums over so many payload rows."""
        if self._compensation is None:
            return gradients
        divisor = rows if self._average_rows else 1
        return [
            None
            if g is None
            else self._compensation.apply(
                p, g.to_dense() if g.is_sparse else g, seen.leaves[p].data, divisor
            )
            for p, g in zip(parameters, gradients, strict=True)
        ]

    def before_step(self) -> dict[nn.Parameter, Tensor]:
        """The weights, where the delay rule wants to see what a step makes of them."""
        if self._compensation is None or not self._compensation.wants_steps:
            return {}
        return {p: p.data.clone() for p in self._part.parameters}

    def after_step(self, before: Mapping[nn.Parameter, Tensor]) -> None:
        """A step is done; ``before`` is from ``before_step``."""
        if before and self._compensation is not None:
            self._compensation.stepped(before)

    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        """Leaves that share the parameters' storage, but not their version counters."""
        if self._aliases is None:
            # ``.data``, not ``detach()``: a detached tensor shares the parameter's version counter,
            # and a step would make every graph that is kept raise, whatever storage it holds.
            self._aliases = {
                p: p.data.requires_grad_(p.requires_grad) for p in self._part.module.parameters()
            }
        return self._aliases

    def renew(self) -> None:
        """Move the weights to fresh storage: graphs that are kept hold the old one."""
        if self._aliases is not None:
            for parameter in self._part.module.parameters():
                parameter.data = parameter.data.clone()
            self._aliases = None

    def forget(self) -> None:
        """Nothing is in flight any more."""
        self._aliases = None
        self.seeing.rest()

    @property
    def of(self) -> tuple[str, str]:
        """The classes of view and delay rule."""
        return type(self.view).__name__, type(self.delay).__name__

    def tensors(self) -> dict[str, Tensor]:
        """What view and delay rule remember, by name; their own, not copies."""
        tensors = {f"view/{name}": t for name, t in self.seeing.tensors().items()}
        if self._compensation is not None:
            held = self._compensation.tensors()
            names = {p: n for n, p in self._part.module.named_parameters()}
            tensors.update({f"delay/{names[p]}": t for p, t in held.items()})
        return tensors

    def check(
        self, tensors: Mapping[str, Tensor], document: Any, number: int | None = None
    ) -> ViewEntry:
        """Look at what a part with this view and delay rule has written.

        Args:
            tensors: Of ``tensors``.
            document: Its ``ViewEntry``, as JSON.
            number: Of the instance in training that comes next, if it is known.

        Raises:
            CheckpointError, Mismatch: It was that of another view or another delay rule, or the
                tensors are of other shapes.
        """
        entry = read(ViewEntry, document, "view")
        if entry.of != self.of:
            raise CheckpointError(
                f"its view and delay are {entry.of}, those of the session {self.of}; use the "
                "same, or load with weights_only=True"
            )
        self.seeing.check(inside(tensors, "view/"), entry.view, number)
        require_like(inside(tensors, "delay/"), inside(self.tensors(), "delay/"), "delay")
        return entry

    def load(self, tensors: Mapping[str, Tensor], entry: ViewEntry) -> None:
        """Put back what ``check`` let pass, after the weights."""
        self.rows_each = entry.rows_each
        self.seeing.load(inside(tensors, "view/"), entry.view)
        if self._compensation is not None:
            named = dict(self._part.module.named_parameters())
            found = inside(tensors, "delay/")
            self._compensation.load({named[name]: t for name, t in found.items()})


def inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

"""Views at work on one part: which leaves a message's forward and its backward differentiate by.

    look        before a forward: the leaves, and the version that they are of
    look_back   right before its backward: the leaves of now
    turn, before_step, after_step, rest, replaced        what happens to the weights meanwhile

The settings that make them, and their papers, are in `views`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geartrain.codec import require_like
from geartrain.errors import ProtocolError
from geartrain.nodes.weights import WeightVersion
from geartrain.parts.late.leaves import by_name, copies_of, new_leaves, restore, write_now
from geartrain.parts.late.prediction import Leaves, by_difference, by_momentum
from geartrain.schema import Count, Mismatch, Range, read

By: TypeAlias = Literal["momentum", "difference"]


class Viewed(Protocol):
    """What a view must know of its part."""

    name: str
    module: nn.Module
    version: int

    @property
    def optimizer(self) -> Optimizer | None: ...

    @property
    def rate_factor(self) -> float:
        """What the learning rates of the optimiser are multiplied by."""
        ...

    @property
    def step_delay(self) -> float:
        """Mean staleness of the gradients of the step that is taken, or was last."""
        ...

    @property
    def outstanding(self) -> int:
        """Messages that will be answered."""
        ...

    @property
    def period(self) -> int | None:
        """Messages to an update, where the part counts messages."""
        ...

    def aliases(self) -> Mapping[nn.Parameter, Tensor]: ...

    def renew(self) -> None:
        """Move the parameters to fresh storage: aliases keep the values of before."""
        ...

    def expected_delay(self) -> int:
        """Updates until the message that leaves now is answered, if answers come in order."""
        ...


class AbstractSeeing:
    """A view at work on one part; a stash that does nothing at steps, unless overridden.

    Args:
        part: The part.
    """

    def __init__(self, part: Viewed) -> None:
        self._part = part

    def look(self, number: int) -> WeightVersion:
        """The weights for the forward of a message of that instance."""
        return WeightVersion(self._part.aliases(), self._part.version)

    def look_back(self, seen: WeightVersion) -> Mapping[nn.Parameter, Tensor]:
        """The leaves for its backward, right before it."""
        return seen.leaves

    def in_flight(self, most: int) -> None:
        """So many instances may be in flight, at most.

        Raises:
            ValueError: They are too many.
        """

    def turn(self) -> None:
        """An update is due; the weights are those of before, and may stay."""

    def before_step(self) -> None:
        """The weights are about to be written over."""

    def after_step(self) -> None:
        """They have been."""

    def rest(self) -> None:
        """Nothing is in flight, and no gradient waits."""

    def replaced(self) -> None:
        """The weights have become others, and not by a step."""

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers, by name; its own, not copies."""
        return {}

    def document(self) -> dict[str, Any]:
        """The rest of what it remembers, as JSON."""
        return {}

    def check(
        self, tensors: Mapping[str, Tensor], document: Mapping[str, Any], number: int | None
    ) -> None:
        """Refuse what no other one of its kind can have remembered.

        Args:
            tensors, document: What it has remembered.
            number: Of the instance that comes next, if it is known.

        Raises:
            CheckpointError, Mismatch: It is of other tensors or numbers.
        """
        require_like(dict(document), self.document(), "view")
        require_like(dict(tensors), self.tensors(), "view")

    def load(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Put back what another one of its kind remembered, and ``check`` has let pass."""


@final
class Stashing(AbstractSeeing):
    def before_step(self) -> None:
        if self._part.outstanding:
            self._part.renew()


@final
class Mixing(AbstractSeeing):
    """Aliases share the parameters' storage, and nobody moves these to another."""


@final
class Recomputing(AbstractSeeing):
    def look(self, number: int) -> WeightVersion:
        return WeightVersion(self._part.aliases(), self._part.version, again=True)

    def look_back(self, seen: WeightVersion) -> Mapping[nn.Parameter, Tensor]:
        return self._part.aliases()


MOST_AGE: Final = 1 << 20
"""Updates that the weights of before may be behind those of now, in a checkpoint: ages of gradients
are counted one by one."""


@final
@dataclass(frozen=True, slots=True)
class _Buffered:
    """What ``Buffering`` remembers besides weights."""

    first: Count | None
    turns: Count
    age: Annotated[int, Range(0, MOST_AGE)]


@final
class Buffering(AbstractSeeing):
    """Two versions; a message's number says which of them is its own."""

    def __init__(self, part: Viewed) -> None:
        super().__init__(part)
        if part.period is None:
            raise ValueError(
                f"part '{part.name}': DoubleBuffered() wants update_every=Messages(m), with m at "
                "least the minibatches in flight"
            )
        self._period = part.period
        self._plain = False
        self._first: int | None = None
        self._turns = 0
        self._previous: Mapping[nn.Parameter, Tensor] | None = None
        self._previous_version = 0

    def in_flight(self, most: int) -> None:
        if most > self._period:
            raise ValueError(
                f"part '{self._part.name}': DoubleBuffered() with update_every="
                f"Messages({self._period}) and max_active={most}: two versions do not do for so "
                f"many in flight; give Messages({most}) or more, or a smaller max_active"
            )
        self._plain = most == 1

    def look(self, number: int) -> WeightVersion:
        part = self._part
        if self._plain:
            return WeightVersion(part.aliases(), part.version)
        if self._first is None:
            self._first, self._turns, self._previous = number, 0, None
        wanted = self._wanted(number, self._first)
        if wanted == self._turns:
            return WeightVersion(part.aliases(), part.version)
        if wanted == self._turns - 1 and self._previous is not None:
            return WeightVersion(self._previous, self._previous_version)
        raise ProtocolError(
            f"part '{part.name}': instance {number} wants the weights after {wanted} updates since "
            f"instance {self._first}, and the part has made {self._turns}; DoubleBuffered() is for "
            "chains of parts, each of which sees every instance once and in order"
        )

    def _wanted(self, number: int, first: int) -> int:
        """Updates that its weights have seen."""
        return max((number - first) // self._period - 1, 0)

    def turn(self) -> None:
        if not self._plain:
            self._previous, self._previous_version = self._part.aliases(), self._part.version
            self._turns += 1
            self._part.renew()

    def before_step(self) -> None:
        if self._part.outstanding:
            self._part.renew()

    def rest(self) -> None:
        self._first, self._turns, self._previous = None, 0, None

    def tensors(self) -> dict[str, Tensor]:
        if self._previous is None:
            return {}
        return by_name(self._part.module, self._previous)

    def document(self) -> dict[str, Any]:
        age = self._part.version - self._previous_version
        return {"first": self._first, "turns": self._turns, "age": min(age, MOST_AGE)}

    def check(
        self, tensors: Mapping[str, Tensor], document: Mapping[str, Any], number: int | None
    ) -> None:
        kept = read(_Buffered, dict(document), "view")
        if kept.first is not None and number is not None and not self._plain:
            wanted = self._wanted(number, kept.first)
            if wanted != kept.turns and (wanted != kept.turns - 1 or not tensors):
                raise Mismatch(
                    f"view has {kept.turns} updates since instance {kept.first}, expected {wanted} "
                    f"for instance {number}"
                )
        if tensors:
            everything = dict(self._part.module.named_parameters())
            require_like(dict(tensors), {n: p.data for n, p in everything.items()}, "view")

    def load(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        self._first, self._turns = document["first"], document["turns"]
        self._previous_version = self._part.version - document["age"]
        self._previous = None
        if tensors:
            self._previous = new_leaves(self._part.module)
            restore(self._part.module, self._previous, tensors)


@final
class Predicting(AbstractSeeing):
    """The settings are those of ``Predicted``."""

    def __init__(self, part: Viewed, steps: int | None, backward: int | None, by: By) -> None:
        super().__init__(part)
        self._steps, self._backward, self._by = steps, backward, by
        self._before = copies_of(part.module) if by == "difference" else {}
        self._working = None if backward is None else new_leaves(part.module)
        self._made: tuple[int, int, Leaves] | None = None

    def look(self, number: int) -> WeightVersion:
        part = self._part
        steps = part.expected_delay() if self._steps is None else self._steps
        if self._working is not None:
            self._predict(steps, self._working)
            return WeightVersion(self._working, part.version)
        if steps == 0:
            return WeightVersion(part.aliases(), part.version)
        if not part.outstanding or self._made is None or self._made[:2] != (part.version, steps):
            leaves = new_leaves(part.module)
            self._predict(steps, leaves)
            self._made = part.version, steps, leaves
        return WeightVersion(self._made[2], part.version)

    def look_back(self, seen: WeightVersion) -> Mapping[nn.Parameter, Tensor]:
        if self._working is not None and self._backward is not None:
            self._predict(self._backward, self._working)
        return seen.leaves

    def before_step(self) -> None:
        self._made = None
        write_now(self._before)
        if self._working is None and self._part.outstanding:
            self._part.renew()

    def replaced(self) -> None:
        write_now(self._before)

    def tensors(self) -> dict[str, Tensor]:
        return by_name(self._part.module, self._before)

    def load(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        self._made = None
        restore(self._part.module, self._before, tensors)

    def _predict(self, steps: int, leaves: Leaves) -> None:
        part = self._part
        if self._by == "difference":
            by_difference(leaves, self._before, steps)
        else:
            by_momentum(leaves, part.optimizer, part.rate_factor, steps)


@final
class Correcting(AbstractSeeing):
    """Leaves are a copy of their own, so that the parameters are never disturbed; the settings are
    those of ``Corrected``."""

    def __init__(self, part: Viewed, decay: float, delay: int | None) -> None:
        super().__init__(part)
        self._decay, self._delay = decay, delay
        self._working = new_leaves(part.module)
        self._mean = {p: torch.zeros_like(p, requires_grad=False) for p in self._working}
        self._before: dict[nn.Parameter, Tensor] = {}

    def look(self, number: int) -> WeightVersion:
        write_now(self._working)
        return WeightVersion(self._working, self._part.version)

    def look_back(self, seen: WeightVersion) -> Mapping[nn.Parameter, Tensor]:
        delay = self._part.version - seen.version if self._delay is None else self._delay
        for p, leaf in self._working.items():
            if delay and p.requires_grad:
                torch.sub(p.data, self._mean[p], alpha=delay, out=leaf.data)
            else:
                leaf.data.copy_(p.data)
        return self._working

    def before_step(self) -> None:
        self._before = copies_of(self._part.module)

    def after_step(self) -> None:
        delay = self._part.step_delay if self._delay is None else self._delay
        decay = self._decay ** (1 / max(delay, 1))
        for p, before in self._before.items():
            self._mean[p].lerp_(p.data - before, 1 - decay)
        self._before = {}

    def tensors(self) -> dict[str, Tensor]:
        return by_name(self._part.module, self._mean)

    def load(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        restore(self._part.module, self._mean, tensors)

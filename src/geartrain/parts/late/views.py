"""Weight views: which weights a message's forward sees, and which its backward.

    view              forward       backward                   a gradient of
    Stashed           now           those of its forward       f at the weights of then
    Mixed             now           now, activations of then   none, in general
    Recomputed        now           now, forward run again     f at the weights of now
    DoubleBuffered    one update old, in every part            f at those
    Predicted         ahead         those, or predicted anew   f at those, or mixed
    Corrected         now           now, moved back; mixed     about f at the weights of then

A view is a setting; ``start`` makes it work on one part. Views are for nodes that keep autograd's
graph of whole minibatches. Buffers, such as running statistics, are in no view: they are of now.

Sources: PipeDream, Narayanan et al. 2019; 2BW, Narayanan et al. 2021, arXiv:2006.09503; PipeMare,
Yang et al. 2021, arXiv:1910.05124; SpecTrain, Chen et al. 2018, arXiv:1809.02839; XPipe, Guan et
al. 2019, arXiv:1911.04610.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geartrain.bounds import require_number, require_whole
from geartrain.codec import require_like
from geartrain.errors import ProtocolError
from geartrain.nodes.weights import WeightVersion
from geartrain.parts.late.leaves import by_name, copies_of, new_leaves, restore, write_now
from geartrain.parts.late.prediction import Leaves, by_difference, by_momentum, require_predictable
from geartrain.schema import Count, Mismatch, Range, read


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


class AbstractView(ABC):
    """Says which weights messages see; a setting."""

    keeps_then = False
    """Whether the leaves still have the values of the forward when the gradient comes."""

    may_be_shared = False
    """Whether several workers may see the weights at the same time: it writes no leaves."""

    wants_graph = True
    """Whether only nodes that keep autograd's graph can follow it."""

    wants_delays = False
    """Whether it wants to know how old the gradients of each step are."""

    counts_instances = False
    """Whether it goes by the numbers of instances, so that its part must see every one."""

    @abstractmethod
    def start(self, part: Viewed) -> AbstractSeeing:
        """The view at work.

        Raises:
            ValueError: It does not go together with the part's other rules.
        """


@final
@dataclass(frozen=True, slots=True)
class Stashed(AbstractView):
    """The backward sees the weights of its forward (PipeDream's weight stashing).

    The gradient is exactly f's at those weights. Memory: a copy of the weights for each version
    that messages in flight have seen.
    """

    keeps_then = True
    may_be_shared = True
    wants_graph = False

    def start(self, part: Viewed) -> AbstractSeeing:
        return _Stashing(part)


@final
@dataclass(frozen=True, slots=True)
class Mixed(AbstractView):
    """Activations of then, weights of now: one copy of the weights, whatever is in flight.

    For one affine map that is the gradient at the weights of now; otherwise it is none. PipeMare's
    asynchronous pipeline works so.
    """

    def start(self, part: Viewed) -> AbstractSeeing:
        return _Mixing(part)


@final
@dataclass(frozen=True, slots=True)
class Recomputed(AbstractView):
    """The forward runs again at the weights of now: the exact gradient there for that input.

    Memory: one copy of the weights, and of each message its inputs and random numbers. The second
    run draws the same numbers, and what it writes into buffers is lost, so running statistics are
    updated once.
    """

    def start(self, part: Viewed) -> AbstractSeeing:
        return _Recomputing(part)


@final
@dataclass(frozen=True, slots=True)
class DoubleBuffered(AbstractView):
    """Weights one update old in every part, at any depth: W' = W - η ∇f(W of the update before).

    Wants ``update_every=Messages(m)`` with m at least the instances in flight, and answers in
    order, as in a chain of parts. Messages are counted from the last flush, whose first m see the
    weights of now. With one instance in flight at most it is ``Stashed``. Memory: two versions.
    """

    keeps_then = True
    counts_instances = True

    def start(self, part: Viewed) -> AbstractSeeing:
        return _Buffering(part)


By: TypeAlias = Literal["momentum", "difference"]


@final
@dataclass(frozen=True, slots=True)
class Predicted(AbstractView):
    """The forward sees the weights as they will probably be at the update.

    Args:
        steps: Updates ahead; None: as many as the part will make until the answer comes, which
            a chain of parts knows exactly.
        backward: None: the backward sees what the forward saw. A number: predicted anew, so many
            updates ahead, with activations of then.
        by: ``momentum``: from the optimiser's state, w - s η v for SGD with momentum (SpecTrain)
            and w - s η m̂ / (√v̂ + ε) for Adam (XPipe; with AdamW's decay). ``difference``:
            w + s (w - w before the last update), for any optimiser, at one more copy.

    Raises:
        ValueError: A number is negative, or ``by`` is neither.
    """

    steps: int | None = None
    backward: int | None = None
    by: By = "momentum"

    @property
    def keeps_then(self) -> bool:  # type: ignore[override]
        return self.backward is None

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("backward", self.backward)):
            if value is not None:
                what = f"Predicted({name}={value!r})"
                require_whole(what, value, 0, "0 or more updates, or None")
        if self.by not in ("momentum", "difference"):
            raise ValueError(f"Predicted(by={self.by!r}): give 'momentum' or 'difference'")

    def start(self, part: Viewed) -> AbstractSeeing:
        if self.by == "momentum":
            require_predictable(part.name, part.optimizer)
        return _Predicting(part, self)


@final
@dataclass(frozen=True, slots=True)
class Corrected(AbstractView):
    """The backward sees the weights of now, moved back to about those of its forward (T2).

    A running mean δ of updates, δ ← γ δ + (1 - γ) (w' - w), stands for those since the forward, τ
    of them: the backward sees w - τ δ, with activations of then. γ = decay^(1/τ). Memory: three
    copies of the weights. Where fresh weights help it hurts, so it is a choice.

    Args:
        decay: D of the paper.
        delay: τ; None: as measured, for each message.

    Raises:
        ValueError: A number is out of range.
    """

    wants_delays = True

    decay: float = 0.135
    delay: int | None = None

    def __post_init__(self) -> None:
        what = f"Corrected(decay={self.decay!r})"
        require_number(what, self.decay, "0 <= decay < 1", least=0, below=1)
        if self.delay is not None:
            what = f"Corrected(delay={self.delay!r})"
            require_whole(what, self.delay, 0, "0 or more updates, or None")

    def start(self, part: Viewed) -> AbstractSeeing:
        return _Correcting(part, self)


@final
class _Stashing(AbstractSeeing):
    def before_step(self) -> None:
        if self._part.outstanding:
            self._part.renew()


@final
class _Mixing(AbstractSeeing):
    """Aliases share the parameters' storage, and nobody moves these to another."""


@final
class _Recomputing(AbstractSeeing):
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
    """What ``_Buffering`` remembers besides weights."""

    first: Count | None
    turns: Count
    age: Annotated[int, Range(0, MOST_AGE)]


@final
class _Buffering(AbstractSeeing):
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
class _Predicting(AbstractSeeing):
    def __init__(self, part: Viewed, view: Predicted) -> None:
        super().__init__(part)
        self._view = view
        self._before = copies_of(part.module) if view.by == "difference" else {}
        self._working = None if view.backward is None else new_leaves(part.module)
        self._made: tuple[int, int, Leaves] | None = None

    def look(self, number: int) -> WeightVersion:
        part = self._part
        steps = part.expected_delay() if self._view.steps is None else self._view.steps
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
        if self._working is not None and self._view.backward is not None:
            self._predict(self._view.backward, self._working)
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
        if self._view.by == "difference":
            by_difference(leaves, self._before, steps)
        else:
            by_momentum(leaves, part.optimizer, part.rate_factor, steps)


@final
class _Correcting(AbstractSeeing):
    """Leaves are a copy of their own, so that the parameters are never disturbed."""

    def __init__(self, part: Viewed, view: Corrected) -> None:
        super().__init__(part)
        self._view = view
        self._working = new_leaves(part.module)
        self._mean = {p: torch.zeros_like(p, requires_grad=False) for p in self._working}
        self._before: dict[nn.Parameter, Tensor] = {}

    def look(self, number: int) -> WeightVersion:
        write_now(self._working)
        return WeightVersion(self._working, self._part.version)

    def look_back(self, seen: WeightVersion) -> Mapping[nn.Parameter, Tensor]:
        delay = self._view.delay
        delay = self._part.version - seen.version if delay is None else delay
        for p, leaf in self._working.items():
            if delay and p.requires_grad:
                torch.sub(p.data, self._mean[p], alpha=delay, out=leaf.data)
            else:
                leaf.data.copy_(p.data)
        return self._working

    def before_step(self) -> None:
        self._before = copies_of(self._part.module)

    def after_step(self) -> None:
        delay = self._part.step_delay if self._view.delay is None else self._view.delay
        decay = self._view.decay ** (1 / max(delay, 1))
        for p, before in self._before.items():
            self._mean[p].lerp_(p.data - before, 1 - decay)
        self._before = {}

    def tensors(self) -> dict[str, Tensor]:
        return by_name(self._part.module, self._mean)

    def load(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        restore(self._part.module, self._mean, tensors)

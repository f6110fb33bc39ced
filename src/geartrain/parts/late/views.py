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
from dataclasses import dataclass
from typing import final

from geartrain.bounds import require_number, require_whole
from geartrain.parts.late.prediction import require_predictable
from geartrain.parts.late.seeing import (
    AbstractSeeing,
    Buffering,
    By,
    Correcting,
    Mixing,
    Predicting,
    Recomputing,
    Stashing,
    Viewed,
)


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
        return Stashing(part)


@final
@dataclass(frozen=True, slots=True)
class Mixed(AbstractView):
    """Activations of then, weights of now: one copy of the weights, whatever is in flight.

    For one affine map that is the gradient at the weights of now; otherwise it is none. PipeMare's
    asynchronous pipeline works so.
    """

    def start(self, part: Viewed) -> AbstractSeeing:
        return Mixing(part)


@final
@dataclass(frozen=True, slots=True)
class Recomputed(AbstractView):
    """The forward runs again at the weights of now: the exact gradient there for that input.

    Memory: one copy of the weights, and of each message its inputs and random numbers. The second
    run draws the same numbers, and what it writes into buffers is lost, so running statistics are
    updated once.
    """

    def start(self, part: Viewed) -> AbstractSeeing:
        return Recomputing(part)


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
        return Buffering(part)


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
        return Predicting(part, self.steps, self.backward, self.by)


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
        return Correcting(part, self.decay, self.delay)

"""Where a part's gradient comes from.

    Backprop     part 0 ◄── part 1 ◄── part 2 ◄── loss                 all the way down
    Greedy       part 0 ◄─ head    part 1 ◄─ head    part 2 ◄── loss   a loss of its own each
    Chunked      part 0 ◄── part 1 ◄─ head    part 2 ◄── loss          one for several parts
    Overlapping  a head's loss trains its part and the one below       one further down
    Critics      heads that learn to predict the loss above them
    Synthetic    heads that guess the gradient, and learn from the true one
    DecoupledGreedy   greedy, and every part trains on stored rows of the part below

An object that wires the parts of a pipeline; nothing else of the engine changes.

Sources: Laskin et al. 2020, arXiv:2012.03837; Lee et al. 2022, arXiv:2102.01963; Jaderberg et al.
2016, arXiv:1608.05343; Belilovsky et al. 2020, arXiv:1901.08164.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from geartrain.bounds import require_whole
from geartrain.errors import GraphError
from geartrain.graph.graph import Stream
from geartrain.graph.overlap import OverlapRule
from geartrain.kinds import require_truth, require_word
from geartrain.nodes.loss import Metric
from geartrain.nodes.replay import Draw, Replays
from geartrain.parts.rules import MakeOptimizer, Part, require_maker
from geartrain.pipeline.critic import LocalCritic
from geartrain.pipeline.rowwise import RowCriterion
from geartrain.pipeline.stage import Stage, linear_head, zero_map


@final
@dataclass(frozen=True, slots=True)
class Local:
    """A head beside a part, and how it is judged.

    Args:
        module: The head: prediction, critic or synthesiser from what leaves the part.
        criterion: ``(prediction, y) -> (n,)``.
        metrics: What is reported of it.
        label: What its loss is called in reports; None: it is not reported.
        number: Of the part that it hangs on.
    """

    module: nn.Module
    criterion: RowCriterion
    metrics: Mapping[str, Metric]
    label: str | None
    number: int

    def part(self, module: nn.Module, optimizer: MakeOptimizer | None = None) -> Part:
        """The head's own part, which runs it inside this module."""
        return Part(module, name=f"head {self.number}", keep="graph", optimizer=optimizer)

    def judge(self, stream: Stream) -> None:
        """Send rows through the head into the local loss."""
        stream.through(self.part(Stage([self.module]))).loss(
            self.criterion,
            metrics=self.metrics,
            label=self.label,
            name=f"loss {self.number}",
            alone=True,
        )


class AbstractCredit(ABC):
    """How gradients reach the parts of a pipeline."""

    @abstractmethod
    def heads(self, parts: int) -> Sequence[int]:
        """The parts that want a local head, by number.

        Raises:
            ValueError: So many parts do not fit.
        """

    def cuts(self, parts: int) -> Sequence[int]:
        """The parts at whose inlet no gradient of the loss passes, by number."""
        return [k + 1 for k in self.heads(parts)]

    def window(self, k: int, parts: int) -> int | None:
        """Messages of part k between forward and backward; None: as many as are in flight.

        A part whose gradient comes from close by would else run ahead of those above it, and keep
        the graphs of all that is in flight.
        """
        return 2

    def make_head(self, h: Tensor, prediction: Tensor) -> nn.Module:
        """A local head where none is given, from samples of what leaves its part and the network.

        Raises:
            GraphError: The shapes tell none.
        """
        return linear_head(h, prediction)

    @abstractmethod
    def wire(
        self,
        stream: Stream,
        parts: Sequence[Part],
        local: Mapping[int, Local],
        criterion: RowCriterion,
    ) -> Stream:
        """Send a stream through the parts.

        Args:
            stream: Minibatches ``(x, y)``.
            parts: In their order.
            local: Part number to its head.
            criterion: That of the last part, which is added behind what is returned.

        Returns:
            What leaves the last part.
        """


@final
@dataclass(frozen=True, slots=True)
class Backprop(AbstractCredit):
    """The loss reaches every part."""

    def heads(self, parts: int) -> Sequence[int]:
        return ()

    def window(self, k: int, parts: int) -> int | None:
        return parts - k  # one forward, one backward

    def wire(
        self,
        stream: Stream,
        parts: Sequence[Part],
        local: Mapping[int, Local],
        criterion: RowCriterion,
    ) -> Stream:
        for part in parts:
            stream = stream.through(part)
        return stream


@final
@dataclass(frozen=True, slots=True)
class Chunked(AbstractCredit):
    """Chunks of consecutive parts; backpropagation inside, a head at the end of each but the last.

    Args:
        chunks: How many, of about equally many parts; None: as many as there are parts (greedy).

    Raises:
        ValueError: There are fewer parts than chunks.
    """

    chunks: int | None = None

    def __post_init__(self) -> None:
        if self.chunks is not None:
            require_whole(f"Chunked({self.chunks!r})", self.chunks, 1, "1 chunk or more")

    def heads(self, parts: int) -> Sequence[int]:
        chunks = parts if self.chunks is None else self.chunks
        if chunks > parts:
            raise ValueError(f"{self} of {parts} parts; give at most {parts} chunks, or more parts")
        return tuple(k * parts // chunks - 1 for k in range(1, chunks))

    def window(self, k: int, parts: int) -> int | None:
        end = next(e for e in (*self.heads(parts), parts - 1) if e >= k)
        return end - k + 1

    def wire(
        self,
        stream: Stream,
        parts: Sequence[Part],
        local: Mapping[int, Local],
        criterion: RowCriterion,
    ) -> Stream:
        for k, part in enumerate(parts):
            stream = stream.through(part)
            if k in local:
                local[k].judge(stream)
                stream = stream.detach(name=f"cut {k}")
        return stream


def Greedy() -> Chunked:
    """Every part learns from its own head, and the last one from the loss."""
    return Chunked()


@final
@dataclass(frozen=True, slots=True)
class Overlapping(AbstractCredit):
    """A part learns from its own head and the one above; a local loss reaches one part further.

    The first part has no head: it learns from that of the second. With two parts it is
    backpropagation.

    Args:
        rule: Whose gradient a part with two gets: their ``sum``, or the ``later`` one.
    """

    rule: OverlapRule = "sum"

    def __post_init__(self) -> None:
        require_word("Overlapping", ("sum", "later"), rule=self.rule)

    def heads(self, parts: int) -> Sequence[int]:
        return range(1, parts - 1)

    def cuts(self, parts: int) -> Sequence[int]:
        return ()

    def wire(
        self,
        stream: Stream,
        parts: Sequence[Part],
        local: Mapping[int, Local],
        criterion: RowCriterion,
    ) -> Stream:
        geared = [part.name for part in parts if part.gear is not None]
        if geared:
            raise GraphError(
                f"{self}: gears of {geared} have no meaning where two losses share a part; use "
                "another credit, or no gears"
            )
        for k, part in enumerate(parts):
            if k in local:
                stream, own = stream.overlap(part, rule=self.rule)
                local[k].judge(own)
            else:
                stream = stream.through(part)
        return stream


@final
@dataclass(frozen=True, slots=True)
class Critics(AbstractCredit):
    """Each part but the last has a critic that predicts the loss above, and learns from it.

    Args:
        optimizer: Of the critics; None: that of the parts.
    """

    optimizer: MakeOptimizer | None = None

    def __post_init__(self) -> None:
        require_maker(self.optimizer)

    def heads(self, parts: int) -> Sequence[int]:
        return range(parts - 1)

    def wire(
        self,
        stream: Stream,
        parts: Sequence[Part],
        local: Mapping[int, Local],
        criterion: RowCriterion,
    ) -> Stream:
        losses = []
        for k, part in enumerate(parts):
            stream = stream.through(part)
            if k in local:
                critic = LocalCritic(local[k].module, criterion)
                losses.append(stream.through(local[k].part(critic, self.optimizer)))
                stream = stream.detach(name=f"cut {k}")
        if losses:
            judged = stream.detach(name="last cut").through(criterion, name="last", keep="graph")
            for k, (own, above) in enumerate(zip(losses, [*losses[1:], judged], strict=True)):
                _teach(k, own, above, local[k].label)
        return stream


def _teach(k: int, losses: Stream, above: Stream, label: str | None) -> None:
    """A critic's loss trains its part, and its distance from the loss above trains the critic."""
    losses.loss(_first, label=label, name=f"loss {k}", alone=True)
    target = above.detach(name=f"target {k}")
    pairs = losses.graph.concat(losses, target, on="instance", how="tuple", name=f"pairs {k}")
    pairs.loss(_distance, label=None, name=f"distance {k}", alone=True)


def _first(loss: Tensor, *own: Tensor) -> Tensor:
    """The loss itself, one a row."""
    return loss


def _distance(loss: Tensor, own: Tensor, above: Tensor, *rest: Tensor) -> Tensor:
    """How far the critic's own value is from the loss above, one a row."""
    return (above - own).abs()


@final
@dataclass(frozen=True, slots=True)
class Synthetic(AbstractCredit):
    """Each part but the last gets a guessed gradient at once, from a module that learns to guess.

    Heads are synthesisers: they map what leaves a part to its gradient, in the same shape.

    Args:
        targets: Whether they get ``(h, y)``; such modules are to be given. Else h alone.
    """

    targets: bool = False

    def __post_init__(self) -> None:
        require_truth("Synthetic", targets=self.targets)

    def heads(self, parts: int) -> Sequence[int]:
        return range(parts - 1)

    def make_head(self, h: Tensor, prediction: Tensor) -> nn.Module:
        if self.targets:
            raise GraphError(f"{self}: give heads=, modules of (h, y) that give a gradient of h")
        return zero_map(h)

    def wire(
        self,
        stream: Stream,
        parts: Sequence[Part],
        local: Mapping[int, Local],
        criterion: RowCriterion,
    ) -> Stream:
        for k, part in enumerate(parts):
            stream = stream.through(part)
            if k in local:
                take = (0, 1) if self.targets else 0
                stream = stream.synthesize(local[k].part(local[k].module), take=take)
        return stream


@final
@dataclass(frozen=True, slots=True)
class DecoupledGreedy(AbstractCredit):
    """Greedy, where every part but the first trains on stored rows of the part below.

    Args:
        buffer: Minibatches that are stored at each cut. With one it is greedy.
        times: Stored minibatches that a part trains on for each one that comes.
        draw: Which: ``least_used`` (the freshest of them), ``newest`` or ``uniform``.
        max_age: Minibatches after which a stored one is dropped, or None.
        seed: Of ``uniform``.

    Raises:
        ValueError: A number is out of range.
    """

    buffer: int = 1
    times: int = 1
    draw: Draw = "least_used"
    max_age: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        Replays(self.times, self.buffer, self.draw, self.max_age, False, self.seed)

    def heads(self, parts: int) -> Sequence[int]:
        return range(parts - 1)

    def window(self, k: int, parts: int) -> int | None:
        return 1

    def wire(
        self,
        stream: Stream,
        parts: Sequence[Part],
        local: Mapping[int, Local],
        criterion: RowCriterion,
    ) -> Stream:
        for k, part in enumerate(parts):
            stream = stream.through(part)
            if k in local:
                local[k].judge(stream)
                stream = stream.detach(name=f"cut {k}").replay(
                    times=self.times,
                    buffer=self.buffer,
                    draw=self.draw,
                    max_age=self.max_age,
                    fresh=False,
                    seed=self.seed,
                    name=f"buffer {k}",
                )
        return stream

"""Where a part's gradient comes from.

    Backprop   part 0 ◄── part 1 ◄── part 2 ◄── loss                   all the way down
    Greedy     part 0 ◄─ head    part 1 ◄─ head    part 2 ◄── loss     a loss of its own each
    Chunked    part 0 ◄── part 1 ◄─ head    part 2 ◄── loss            one for several parts

An object that wires the parts of a pipeline; nothing else of the engine changes.

Source: Laskin et al. 2020, arXiv:2012.03837.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from geartrain.ir.graph import Stream
from geartrain.ir.loss import Metric
from geartrain.nn.rowwise import RowLoss
from geartrain.optim.part import Part


@final
@dataclass(frozen=True, slots=True)
class Local:
    """A head beside a part, and how it is judged.

    Args:
        head: Its own part; ``(h, y) -> (prediction, y)``.
        criterion: ``(prediction, y) -> (n,)``.
        metrics: What is reported of it.
        label: What its loss is called in reports; None: it is not reported.
        number: Of the part that it hangs on.
    """

    head: Part
    criterion: RowLoss
    metrics: Mapping[str, Metric]
    label: str | None
    number: int

    def judge(self, stream: Stream) -> None:
        """Send rows through the head into the local loss."""
        stream.through(self.head).loss(
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

    @abstractmethod
    def wire(self, stream: Stream, parts: Sequence[Part], local: Mapping[int, Local]) -> Stream:
        """Send a stream through the parts.

        Args:
            stream: Minibatches ``(x, y)``.
            parts: In their order.
            local: Part number to its head.

        Returns:
            What leaves the last part.
        """


@final
@dataclass(frozen=True, slots=True)
class Backprop(AbstractCredit):
    """The loss reaches every part."""

    def heads(self, parts: int) -> Sequence[int]:
        return ()

    def wire(self, stream: Stream, parts: Sequence[Part], local: Mapping[int, Local]) -> Stream:
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
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(f"Chunked({self.chunks}): give 1 chunk or more")

    def heads(self, parts: int) -> Sequence[int]:
        chunks = parts if self.chunks is None else self.chunks
        if chunks > parts:
            raise ValueError(f"{self} of {parts} parts; give at most {parts} chunks, or more parts")
        return tuple(k * parts // chunks - 1 for k in range(1, chunks))

    def wire(self, stream: Stream, parts: Sequence[Part], local: Mapping[int, Local]) -> Stream:
        for k, part in enumerate(parts):
            stream = stream.through(part)
            if k in local:
                local[k].judge(stream)
                stream = stream.detach(name=f"cut {k}")
        return stream


def Greedy() -> Chunked:
    """Every part learns from its own head, and the last one from the loss."""
    return Chunked()

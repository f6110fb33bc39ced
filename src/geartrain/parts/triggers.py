"""When a part takes a step: what its updates are counted in, and how far one has come.

    Rows(750)      ..... 740 ┃ 760: due, and 10 count for the next ┃ ...      bundles are not cut
    Instances(8)   a cohort of 8 ┃ the next 8 ┃ ...
    Messages(1)    one after another
    Flush()        when the session says so

The mean size of updates is the number asked for, and so is their number: what an update has too
much counts for the next one, though it is divided by what is truly in its sum.

Source: min_update_frequency of Gaunt et al. 2017, arXiv:1705.09786, which counts gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias, final

from geartrain.bounds import COUNT, MOST_COUNT, require_at_most, require_whole

Unit: TypeAlias = Literal["rows", "instances", "messages"]


class Counts(Protocol):
    """How far an update has come.

    Attributes:
        rows: Payload rows whose gradients are in the sum.
        instances: Finished since the last update; of a part that every instance comes by in one
            message, those messages.
        messages: Answered, those with a zero gradient too.
        over: What the update before had too much, in the unit of the trigger: it counts for this.
    """

    rows: int
    instances: int
    messages: int
    over: int


class AbstractTrigger(ABC):
    """When a part takes a step.

    Attributes:
        unit: What is counted; None: nothing, a flush alone ends an update.
        n: So many.
    """

    unit: ClassVar[Unit | None]
    n: int

    @abstractmethod
    def counted(self, so_far: Counts) -> int:
        """Of its unit, how many have come."""

    def lacking(self, so_far: Counts) -> int | None:
        """How many the update still wants, 0 or less when it is due; None: it never is."""
        return self.n - so_far.over - self.counted(so_far)

    def due(self, so_far: Counts) -> bool:
        """Whether the update has what it wants."""
        counted = self.counted(so_far)
        return counted > 0 and so_far.over + counted >= self.n

    def carried(self, so_far: Counts, *, held: bool) -> int:
        """What a step that is taken now leaves to count for the next ones.

        Args:
            so_far: How far the update has come.
            held: Whether steps are held back at times: whole updates then count as one.
        """
        too_much = so_far.over + self.counted(so_far) - self.n
        # Messages that are larger than updates make one each, and no debt.
        return too_much % self.n if held else min(too_much, 2 * self.n - 1)

    def rows_to_divide_by(self, so_far: Counts) -> float:
        """The rows of the update.

        The last update of an epoch has fewer than it takes to fall due. It counts for what it is, a
        share of an update: the mean of a handful would be noise at the full rate.
        """
        return so_far.rows * max(1.0, self._wanted(so_far) / max(self.counted(so_far), 1))

    def instances_to_divide_by(self, so_far: Counts) -> float:
        """The instances of the update."""
        return max(so_far.instances, 1)

    def delay(self, so_far: Counts, outstanding: int, each: int) -> int:
        """Updates until a message that leaves now is answered, if answers come in order.

        Args:
            so_far: How far the update has come.
            outstanding: Messages that left before and will be answered.
            each: Payload rows of a message.
        """
        return (so_far.over + self.counted(so_far) + outstanding) // self.n

    def _wanted(self, so_far: Counts) -> int:
        return self.n - so_far.over


@final
@dataclass(frozen=True, slots=True)
class Rows(AbstractTrigger):
    """Step when so many gradient rows have been added (AMPNet's min_update_frequency).

    Bundles are not cut: what the last one of an update has too much counts for the next update.
    """

    unit: ClassVar[Unit] = "rows"
    n: int

    def __post_init__(self) -> None:
        require_positive("Rows", self.n)

    def counted(self, so_far: Counts) -> int:
        return so_far.rows

    def rows_to_divide_by(self, so_far: Counts) -> float:
        return max(so_far.rows, self._wanted(so_far))

    def delay(self, so_far: Counts, outstanding: int, each: int) -> int:
        rows = so_far.over + so_far.rows + outstanding * each
        return min(rows // self.n, outstanding)  # a message makes one update at most


@final
@dataclass(frozen=True, slots=True)
class Instances(AbstractTrigger):
    """Step for every so many instances, in the order in which they came; others wait their turn.

    A part that every instance comes by in one message steps when it has answered so many. Any other
    one steps when so many have finished, and gradients of those that were admitted after them wait
    at the part till then.
    """

    unit: ClassVar[Unit] = "instances"
    n: int = 1

    def __post_init__(self) -> None:
        require_positive("Instances", self.n)

    def counted(self, so_far: Counts) -> int:
        return so_far.instances

    def instances_to_divide_by(self, so_far: Counts) -> float:
        return max(so_far.instances, self._wanted(so_far))


@final
@dataclass(frozen=True, slots=True)
class Messages(AbstractTrigger):
    """Step when so many messages have been answered; a minibatch that travels whole is one."""

    unit: ClassVar[Unit] = "messages"
    n: int = 1

    def __post_init__(self) -> None:
        require_positive("Messages", self.n)

    def counted(self, so_far: Counts) -> int:
        return so_far.messages


@final
@dataclass(frozen=True, slots=True)
class Flush(AbstractTrigger):
    """Step only when the session flushes: at the end of an epoch, or when it is told to."""

    unit: ClassVar[None] = None

    def counted(self, so_far: Counts) -> int:
        return 0

    def lacking(self, so_far: Counts) -> int | None:
        return None

    def carried(self, so_far: Counts, *, held: bool) -> int:
        return 0

    def rows_to_divide_by(self, so_far: Counts) -> float:
        return so_far.rows

    def delay(self, so_far: Counts, outstanding: int, each: int) -> int:
        return 0


Trigger: TypeAlias = Rows | Instances | Messages | Flush


def require_positive(what: str, n: int) -> None:
    """Raises:
    ValueError: The number is below 1, or beyond all that can be counted.
    TypeError: It is not whole.
    """
    require_whole(f"{what}({n!r})", n, 1)
    require_at_most(f"{what}({n})", n, MOST_COUNT, COUNT)

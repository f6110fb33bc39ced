"""Which kernel a node has, where that is found out while it works.

rows ─► first kernel ─► enough work done: a look ─► the other one, or the first for good
                                                    │ rows in flight are answered by
                                                    │ the kernel that they left by
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

from geartrain.frames.message import Payload
from geartrain.nodes.kernel import AbstractKernel

UNDECIDED = "undecided"


@final
@dataclass(slots=True)
class Done:
    """What nodes have done in training.

    Args:
        firings: How many.
        rows: In them.
        ratios: What another kernel was measured to take of the time of the first, by what tells
            modules of a class from one another, and the size of the firing.
    """

    firings: int = 0
    rows: int = 0
    ratios: dict[tuple[Hashable, int], float] = field(default_factory=dict)


@final
@dataclass(slots=True)
class Experience:
    """What the nodes of one operator have gone through in training, in all its fits.

    Args:
        done: Their work, and that of operators of a graph whose modules are of the same class, or
            whose functions are of the same code: one of many experts sees few rows, and what is
            found of another is true of it.
        story: What came of it, for the printed graph.
        chosen: The kernel that was found better; a checkpoint brings it into another process,
            where it is not measured again.
        known: By ``id`` of a function, it and what whoever chooses knows of it, for the nodes to
            come: every fit makes some.
        whole: Whether they are called in what runs whole, where C calls many at a time.
    """

    done: Done = field(default_factory=Done)
    story: str = UNDECIDED
    chosen: Literal["derived", "again"] | None = None
    known: dict[int, tuple[Callable[..., Any], Any]] = field(default_factory=dict)
    whole: bool = False

    def goes_whole(self) -> None:
        """Nodes are called in what runs whole from now on: a kernel that was found a little slower
        by steps in this process is judged anew, by what was measured then."""
        if not self.whole and self.chosen == "again" and self.story != UNDECIDED:
            self.chosen = None
        self.whole = True

    def __reduce__(self) -> tuple[Any, ...]:
        # Of functions of this process; in another one they are others, and looked at there.
        return Experience, (self.done, self.story, self.chosen)


class AbstractChoice(ABC):
    """Chooses the kernel of one node in training."""

    @property
    def decided(self) -> bool:
        """Whether ``chosen`` may know one."""
        return False

    @property
    def replaced(self) -> bool:
        """Whether another kernel than the first one has been found better."""
        return False

    @property
    def apart(self) -> bool:
        """Whether its kernel tells gradients of several updates apart, or has had no row."""
        return False

    @property
    def recalls(self) -> bool:
        """Whether a derived kernel was found better before, in another fit, and nothing has been
        decided in this one."""
        return False

    def recall(self, inputs: Payload) -> None:  # noqa: B027
        """Decide as before, if there was a before.

        Args:
            inputs: Some rows of the kind that will come; their numbers have no meaning.
        """

    def take_over(self, before: AbstractChoice) -> None:  # noqa: B027
        """The node is that of another fit, in which this was its choice: what that has made may
        serve again, if it is what would be made."""

    @abstractmethod
    def kernel(self, inputs: Payload) -> AbstractKernel:
        """That for these rows; the same object as before, or another from now on."""

    def chosen(self, inputs: Payload) -> AbstractKernel | None:
        """That for rows of this kind if it has been found out; nothing is counted."""
        return None


Choose = Callable[[str, Callable[..., Any], AbstractKernel, Experience], AbstractChoice]
"""Makes the choice of a node, from its name, function, first kernel, and what was before."""


@final
class Choosing:
    """Who chooses; ``geartrain.nn`` registers the one that traces and measures."""

    registered: ClassVar[list[Choose]] = []


def register_choice(choose: Choose) -> None:
    """Let ``choice_of`` answer."""
    Choosing.registered[:] = [choose]


def choice_of(
    name: str, function: Callable[..., Any], first: AbstractKernel, before: Experience
) -> AbstractChoice:
    """The choice of the node ``name``, which begins with its first kernel."""
    (choose,) = Choosing.registered
    return choose(name, function, first, before)

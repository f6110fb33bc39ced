"""Programs of modules that see more than rows apart: the bundles of rows, or a memory.

    rows, and what is inside their bundles ─┐
    rows, and what each reads of a memory ──┴─► program ─► outputs, what is kept of the call
                                                  ▲
                             gradients ───────────┴─────► gradients of the rows and of the memory

Who looks on while the module runs by autograd says when there is one, and that it is faster; it
lies in ``geartrain.nn`` and is registered here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from geartrain.frames.message import Gradient, Payload
from geartrain.native.calls import SeveralForm
from geartrain.nodes.choice import Experience
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import Recalled
from geartrain.nodes.inside import Inside


class AbstractRaggedProgram(ABC):
    """What computes a module in place of autograd, with gradients told apart by rows."""

    @abstractmethod
    def inside(
        self, inputs: Payload, inside: Inside, seeds: Tensor | None = None
    ) -> tuple[Payload, Any]:
        """Rows of bundles: outputs, and what ``backward`` wants.

        Args:
            inputs, inside: They.
            seeds: int64, of each row, from which follows what is drawn; None: they are drawn.

        Raises:
            IndexError: A row is asked for that is not there.
        """

    @abstractmethod
    def memory(self, inputs: Payload, memory: Recalled) -> tuple[Payload, Any]:
        """The same for rows that read a memory."""

    @abstractmethod
    def backward(
        self, kept: Any, gradients: Gradient, into: GradientSum, memory: Recalled | None
    ) -> Gradient:
        """The gradients of the inputs.

        Args:
            kept: What the call has left.
            gradients: By output; None is zero.
            into: Gets the gradients of the parameters.
            memory: Gets the gradient of what was read, if anybody wants it.
        """

    @abstractmethod
    def lasting(self, kept: Any) -> Any:
        """What a call has left, with inputs that nobody writes to.

        Products of a way back wait for the step; rows of a store are given to others before that.
        """

    @property
    @abstractmethod
    def listed(self) -> SeveralForm | None:
        """How C calls it many at a time; None: it is called by itself."""


class AbstractRaggedChoice(ABC):
    """Finds out, while a module runs by autograd, whether a program is faster."""

    @property
    @abstractmethod
    def program(self) -> AbstractRaggedProgram | None:
        """The program that was found faster, for the rows that the module gets."""

    @property
    @abstractmethod
    def replaced(self) -> bool:
        """Whether there is one."""

    @abstractmethod
    def take_over(self, before: AbstractRaggedChoice) -> None:
        """The node is that of another fit, in which this was its choice: what that has made may
        serve again, if it is what would be made."""

    @property
    @abstractmethod
    def light(self) -> bool:
        """Whether a call has so few rows that those of several updates are best taken together."""

    @property
    @abstractmethod
    def undecided(self) -> bool:
        """Whether it still looks on."""

    @abstractmethod
    def inside(self, inputs: Payload, inside: Inside) -> AbstractRaggedProgram | None:
        """That for these rows, which are counted; None: autograd computes them."""

    @abstractmethod
    def at_once(self, inputs: Payload, inside: Inside) -> AbstractRaggedProgram | None:
        """That for these rows, whatever it takes; None: the module is one of evaluations.

        Raises:
            GraphError: There is none.
        """

    @abstractmethod
    def memory(self, inputs: Payload, memory: Recalled) -> AbstractRaggedProgram | None:
        """That for rows that read a memory."""

    @abstractmethod
    def read_at_once(self, inputs: Payload, memory: Payload) -> None:
        """Take a program for rows and a memory like these, if there is one, whatever it takes."""

    @abstractmethod
    def listed(self, inputs: Payload, memory: Payload | None) -> SeveralForm | None:
        """How C calls the program for rows like these; None: there is none, or it is called by
        itself.

        Args:
            inputs: Tensors like the arguments.
            memory: Those of the memory that rows read, or None.
        """

    @abstractmethod
    def give_up(self, why: str) -> None:
        """No program is used any more."""


@final
@dataclass(frozen=True, slots=True)
class RaggedModule:
    """The module of a node.

    Args:
        name: Of the node, for the log.
        function: The module.
        columns: How many of its inputs are columns, which come last.
        pools: Whether it makes a row of each bundle.
        experience: What its operator has gone through.
    """

    name: str
    function: Callable[..., Any]
    columns: int
    pools: bool
    experience: Experience


ChooseRagged = Callable[[RaggedModule], AbstractRaggedChoice]


@final
class ChoosingRagged:
    """Who chooses; ``geartrain.nn`` registers the one that traces and measures."""

    registered: ClassVar[list[ChooseRagged]] = []


def register_ragged_choice(choose: ChooseRagged) -> None:
    """Let ``ragged_choice_of`` answer."""
    ChoosingRagged.registered[:] = [choose]


def ragged_choice_of(module: RaggedModule) -> AbstractRaggedChoice:
    """The choice of a node, which begins with autograd."""
    (choose,) = ChoosingRagged.registered
    return choose(module)

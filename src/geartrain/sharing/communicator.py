"""What the copies on one worker send to others, and take from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from geartrain.parts.trained import StepTaken
from geartrain.sharing.letters import Letter


@final
@dataclass(frozen=True, slots=True)
class Taken:
    """Letters that a copy of a part has taken.

    Args:
        part: Its name.
        letters: In the order in which they came.
    """

    part: str
    letters: Sequence[Letter]


class AbstractCommunicator(ABC):
    """Of one worker.

    Attributes:
        talks: Whether anything is ever sent.
        may_wait: Whether parts wait for letters at times.
    """

    talks = True
    may_wait = True

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether letters wait that may be taken now."""

    @abstractmethod
    def waits(self, part: str | None) -> bool:
        """Whether nothing may be computed with a part until letters come."""

    @abstractmethod
    def receive(self, letter: Letter) -> None:
        """A letter has come for a copy that lives here."""

    @abstractmethod
    def take(self) -> Taken | None:
        """Let one copy of a part have the letters that wait for it; None: none may be taken now.

        Raises:
            WorkerError: The exchange raised; names it and the part.
        """

    @abstractmethod
    def take_letters(self, part: str | None = None) -> list[Letter]:
        """What copies that live here have sent: those of a part, or all."""

    @abstractmethod
    def take_steps(self, part: str | None = None) -> list[StepTaken]:
        """Steps that exchanges have taken: with a part, or with any."""


@final
class Silent(AbstractCommunicator):
    """Where nobody has anything to say."""

    talks = False
    may_wait = False
    ready = False

    def waits(self, part: str | None) -> bool:
        return False

    def receive(self, letter: Letter) -> None:
        raise AssertionError(f"{letter.kind} of part '{letter.part}' for copies that do not talk")

    def take(self) -> Taken | None:
        return None

    def take_letters(self, part: str | None = None) -> list[Letter]:
        return []

    def take_steps(self, part: str | None = None) -> list[StepTaken]:
        return []

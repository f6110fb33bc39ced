"""Who starts workers on hosts and hears how they ended: what a pool knows of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

from geartrain.runtime.hosts.worker import Greeting, Hello

START_S: Final = 120.0
"""Until a worker has imported torch, on a host that is busy."""


class AbstractLauncher(ABC):
    """Starts workers, kills them, and knows how they ended; batches go another way.

    Attributes:
        told_s: From a connection that ended until it is known whether and how its worker has.
        renews: Whether some workers can be started anew while others work; else all are.
    """

    told_s: float = 1.0
    renews: bool = False

    @abstractmethod
    def binds(self) -> Sequence[str]:
        """Addresses of the hosts where workers are to be, by worker, as others reach them.

        Raises:
            GeartrainError: There are not so many.
        """

    @abstractmethod
    def start(self, greetings: Sequence[Greeting]) -> Sequence[Hello]:
        """Start the workers.

        Returns:
            What each says of itself, in their order.

        Raises:
            GeartrainError: One could not be started.
        """

    def places_again(self, workers: Sequence[int]) -> Sequence[str] | None:
        """Hosts for some workers that are to be started anew, while the others stay.

        Returns:
            Their addresses, as others reach them; None: that cannot be, and all are to be started
            again.
        """
        return None

    def at_hand(self, workers: Sequence[int]) -> Sequence[str] | None:
        """As ``places_again``, of what is known by now: it waits for nothing."""
        return None

    def begin_again(self, greetings: Sequence[Greeting]) -> None:  # noqa: B027 - may do nothing
        """Start some workers anew, where they have got places; waits for nothing."""

    def begun(self, worker: int) -> bool | None:
        """Whether a worker that was to be started anew is there; None: it will not come."""
        return None

    def hellos_again(self, workers: Sequence[int]) -> Sequence[Hello]:
        """What workers that were to be started anew say of themselves.

        Raises:
            GeartrainError: One does not come.
        """
        return ()

    @abstractmethod
    def deaths(self, wait_s: float = 0.0) -> Mapping[int, str]:
        """Workers that have ended, and how: ``was killed by SIGKILL (9)``.

        Args:
            wait_s: Wait so long for one more, at most.
        """

    @abstractmethod
    def kill(self, worker: int) -> None:
        """End a worker at once; it may be stopped, or its host be gone."""

    def suspect(self, worker: int) -> None:  # noqa: B027 - may do nothing
        """A worker does not answer: its host may be gone, and another one be better."""

    def avoid(self, worker: int) -> None:  # noqa: B027 - may do nothing
        """A worker's host answers, but others do not reach it: another one is better."""

    def tend(self) -> None:  # noqa: B027 - may do nothing
        """Now and then: see to hosts that are spare, or were lost; waits for nothing."""

    @abstractmethod
    def forget(self) -> None:
        """The workers are over with; whoever still lives is ended, without a wait."""

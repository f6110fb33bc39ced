"""How a pass over several processes ends: nobody has anything to do, and nothing is under way.

all are fed ─► rest ─► nothing under way ─► end               copies that write to each other
            └► ask  ─► resting? ─► each: gone on, or not ─► end     ... and wait for letters
none of it  ─► nothing under way ─► what does each wait for? ─► StuckError
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

from geartrain.engine.engine import Engine
from geartrain.errors import StuckError
from geartrain.runtime.processes.messages import Kind, named_to_record
from geartrain.runtime.processes.quiet import Quiet, Release
from geartrain.transport.record import Record


class Speaks(Protocol):
    """Who sends to workers."""

    def send(self, to: int, record: Record) -> None:
        """To one of them."""

    def send_all(self, word: int, *ints: int) -> None:
        """A word, to all that live."""


@final
class Ending:
    """The end of a pass, as the parent sees it. It is told by whom to speak, and keeps nobody: a
    pass that is over shall not be garbage.

    Args:
        engine: Of the pass.
        there: Workers that live; who owns the list takes those out that die.
        quiet: What was sent, and had.

    Attributes:
        begun: Whether everything has been fed and counted, and the workers know it.
    """

    def __init__(self, engine: Engine, there: Sequence[int], quiet: Quiet) -> None:
        self._engine, self._there, self._quiet = engine, there, quiet
        self._release = Release()
        self._stories: dict[int, list[str]] | None = None
        self.begun = self._resting = False

    def begin(self, line: Speaks) -> None:
        """All has been fed and counted: the workers are asked to rest, or to end."""
        sharing = self._engine.sharing
        self.begun, self._resting = True, sharing.talks
        if sharing.releases:
            line.send_all(Kind.ASK)
        else:
            line.send_all(Kind.REST if sharing.talks else Kind.END)

    def ask_anew(self) -> None:
        """Somebody has died: what was said before counts no more."""
        self._release.ask_anew()

    def look(self, line: Speaks) -> None:
        """Go on with it, if nothing is under way between any two and nobody has anything to do.

        Raises:
            StuckError: It has not begun, so that they wait in vain.
        """
        if (self.begun and not self._resting) or not self._quiet.over(self._there):
            return
        if self._engine.sharing.releases and not self._release.stuck:
            line.send_all(Kind.RESTING, self._release.ask())
        elif self._resting:
            self._end(line)
        elif self._stories is None:
            self._stories = {}
            line.send_all(Kind.STORY)
        elif self._stories.keys() >= {*self._there}:
            lines = [line for w in self._there for line in self._stories[w]]
            raise StuckError(self._engine.story(lines))

    def told_story(self, worker: int, lines: list[str]) -> None:
        """What a worker waits for."""
        if self._stories is not None:
            self._stories[worker] = lines

    def told_of_letters(
        self, line: Speaks, worker: int, what: str, number: int, document: Any
    ) -> None:
        """Copies that may wait for letters which do not come: all are asked, then all are told.

        Args:
            line: To the workers.
            worker: Who says it.
            what: ``resting``, with what its copies say of themselves; or ``released``, with whether
                they have gone on since they heard of all.
            number: Of the question.
            document: What is said.
        """
        release, workers = self._release, len(self._there)
        if number != release.number:  # before somebody died
            return
        if what == "resting":
            if (every := release.told(worker, document, workers)) is not None:
                for to in self._there:
                    line.send(to, named_to_record("release", [number, every], {}))
        elif release.in_vain(worker, document, workers):
            if self._resting:
                self._end(line)
            else:
                release.stuck = True

    def _end(self, line: Speaks) -> None:
        self._resting = False
        line.send_all(Kind.END)

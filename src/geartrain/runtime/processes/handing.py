"""The way a pass gets to its workers, before anything of it runs.

    every worker is handed what a pass is ─► each says that it is ready ─► all are told to go

Until the last of these nothing of the pass has been done: who fails here can begin anew.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, NoReturn, TypeVar, final

from geartrain.engine.engine import Engine
from geartrain.errors import WorkerDiedError
from geartrain.runtime.processes.child import Pass
from geartrain.runtime.processes.contents import of_parts, pickled
from geartrain.runtime.processes.failures import error_of_json
from geartrain.runtime.processes.members import AbstractPool
from geartrain.runtime.processes.memory import Apart
from geartrain.transport.link import Transport

TOLD_S: Final = 2.0
"""Until a death is told."""
HANDED_S: Final = 300.0
"""So long a worker that lives may take nothing of what it is handed, and say nothing of it: then it
is ended."""

T = TypeVar("T")


def _not_at_all() -> None:
    """Nobody is looked after."""


@final
class Handing:
    """Hands a pass to the workers of a pool.

    Args:
        pool: Has them.
        engine: Of the parent.
        look: Called whenever nothing has moved for a moment; raises what ends it.

    Attributes:
        phase: Whether the workers have heard of the pass, and whether they have begun it.
    """

    def __init__(self, pool: AbstractPool, engine: Engine, look: Callable[[], None]) -> None:
        self._pool, self._engine, self._look = pool, engine, look
        self.phase: Literal["apart", "handing over", "together"] = "apart"
        self._awaited: int | None = None  # who is to take what it is handed, and to say so
        self._handed_s, self._untaken = 0.0, 0  # since when, and what is under way to him

    def over(
        self, given: Pass, transport: Transport, meanwhile: Callable[[], None] = _not_at_all
    ) -> None:
        """Give the workers the graph, the parts as they are, and what they need to know.

        Args:
            given, transport: The pass, and what is to connect them.
            meanwhile: Called once while they make themselves ready.

        Raises:
            WorkerDiedError: A worker is gone, or takes nothing and says nothing.
            ValueError: Something in it cannot be pickled.
        """
        pool, engine = self._pool, self._engine
        contents = self._contents(given)
        pool.begin({n.id: n.name for n in engine.wiring.nodes.values()})
        self.phase = "handing over"
        for member, (content, own) in self._each(zip(pool.members, contents, strict=True)):
            member.meanwhile = self._meanwhile
            self._through(member.hand_over, content, own)
        meanwhile()
        told = [self._through(member.hear) for member in self._each(pool.members)]
        for w, answer in enumerate(told):
            if "failed" in answer:
                self._raise(answer["failed"], w)
        go = pool.join(transport, told)
        for member in self._each(pool.members):
            self._through(member.send, go)
        self.phase = "together"

    def forget(self) -> None:
        """Let go of whose pass it was: whatever that has goes when nobody uses it any more."""
        self._look = _not_at_all

    def _each(self, of_workers: Iterable[T]) -> Iterator[T]:
        """One after another; none is waited for longer than ``HANDED_S``."""
        for self._awaited, each in enumerate(of_workers):
            self._handed_s = time.perf_counter()
            yield each
        self._awaited = None

    def _contents(self, given: Pass) -> Iterator[tuple[bytes, bytes]]:
        """What each worker is handed; where no memory is shared, weights of its parts apart."""
        pool, engine = self._pool, self._engine
        if pool.shares:
            return itertools.repeat((pickled(given, pool, engine.parts), b""), len(pool.members))
        apart = Apart(of_parts(engine, engine.parts))
        content = pickled(given, pool, engine.parts, apart)
        return ((content, apart.content(of_parts(engine, w.parts))) for w in engine.workers)

    def _through(self, call: Any, *given: Any) -> Any:
        """Call, and tell the death of a worker as such."""
        try:
            return call(*given)
        except (OSError, EOFError) as error:
            self._pool.check(TOLD_S)
            raise WorkerDiedError("a worker process has closed its channel") from error

    def _meanwhile(self) -> None:
        """While a worker is waited for."""
        self._look()
        self._pool.look()
        if (w := self._awaited) is None:
            return
        now, untaken = time.perf_counter(), self._pool.members[w].untaken()
        if untaken != self._untaken:  # a slow link; it goes on
            self._handed_s, self._untaken = now, untaken
        if now - self._handed_s > HANDED_S:
            raise WorkerDiedError(
                f"worker {w} has said nothing for {HANDED_S:.0f} s of what it was handed, the "
                f"graph and its parts{self._pool.members[w].last_words()}, and is ended: look at "
                "what modules do as they are made again from a pickle, or run again, as it may "
                "have waited for a lock, or for a processor",
                w,
            )

    def _raise(self, told: Any, w: int) -> NoReturn:
        error = error_of_json(told, w)
        error.add_note(
            "it was raised as the graph was made again in a worker process: everything in it has "
            "to be what cloudpickle can carry, and what it names has to be importable there"
        )
        raise error

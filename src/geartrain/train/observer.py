"""Between a runtime and the instruments: counts what a pass did and tells those who look."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, final

from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.instrument import AbstractInstrument, Fired, Joined, Progress, Updated
from geartrain.nodes.sums import add_sums
from geartrain.parts.part import PartState
from geartrain.parts.trained import StepTaken
from geartrain.runtime.interrupt import interruptible
from geartrain.train.work import PassWork

log = logging.getLogger("geartrain.train")

_PAUSE_S = 0.1  # between two progress events


@final
class Observer:
    """The ``Watch`` of one pass.

    Args:
        instruments: Told of firings, updates and progress.
        mode: What the pass is for.
        epoch, epochs: For progress.
        total: Instances in the pass, or None.
        parts: For staleness.
        began_s: Seconds of the run before this pass.
        done: Instances of this pass that were finished before (of a resumed epoch).
        sums: Loss and metric sums of those.
        clock: Real seconds, for the pause between progress events.
        on_left: Called with a worker that has died while others go on, how, the instances that are
            fed again, and the time.
        on_finished: Called with the seconds of the pass when instances have finished.
    """

    def __init__(
        self,
        instruments: Sequence[AbstractInstrument],
        mode: Literal["train", "evaluate", "predict"],
        epoch: int,
        epochs: int,
        total: int | None,
        parts: Mapping[str, PartState],
        began_s: float,
        done: int = 0,
        sums: Callable[[], Mapping[str, tuple[float, float]]] = dict,
        clock: Callable[[], float] = time.monotonic,
        on_left: Callable[[int | None, str, int, float], None] | None = None,
        on_finished: Callable[[float], None] | None = None,
    ) -> None:
        self._on_finished = on_finished
        self._on_left = on_left or (lambda *_: None)
        self._instruments = instruments
        self._firing = [i for i in instruments if i.wants_firings]
        self._mode, self._epoch, self._epochs, self._total = mode, epoch, epochs, total
        self._parts, self._began, self._done, self._sums = parts, began_s, done, sums
        self._clock = clock
        self._told: float | None = None
        self._told_finished = -1
        self.work = PassWork()
        self.updates: dict[str, int] = {}
        self.firings = self.rows = 0
        """Of parts, on the way forward: how many, and the payload rows in them."""
        self.now_s = 0.0
        """Of this pass, when something was last seen."""

    def fired(self, worker: int, firing: Firing, start_s: float, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)
        self.work.fired(worker, firing, end_s - start_s)
        if firing.forward and firing.part is not None and not firing.taken:
            self.firings += 1
            self.rows += firing.cells
        if self._firing:
            event = Fired(
                worker,
                firing.node,
                firing.part,
                "forward" if firing.forward else "backward",
                firing.rows,
                self._began + start_s,
                self._began + end_s,
            )
            tell(self._firing, "on_fired", event)

    def stepped(self, worker: int, step: StepTaken, now_s: float) -> None:
        self.updates[step.part] = self.updates.get(step.part, 0) + 1
        event = Updated(worker, step.part, step.version, step.rows, self._began + now_s)
        tell(self._instruments, "on_updated", event)

    def finished(self, engine: Engine, now_s: float) -> None:
        if self._on_finished is not None:
            self._on_finished(now_s)
        if not self._instruments:
            return
        now = self._clock()
        if self._told is None or now - self._told >= _PAUSE_S:
            self._told = now
            self.progress(engine, now_s)

    def left(self, worker: int | None, how: str, unfinished: int, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)
        self._on_left(worker, how, unfinished, self._began + now_s)

    def joined(self, worker: int, copies: Sequence[int], now_s: float) -> None:
        tell_joined(self._instruments, Joined(worker, tuple(copies), self._began + now_s))

    def waited(self, worker: int, seconds: float) -> None:
        self.work.waiting[worker] = seconds

    def carried(self, sender: int, receiver: int, messages: int, nbytes: int) -> None:
        self.work.links[sender, receiver] = messages, nbytes

    def progress(self, engine: Engine, now_s: float) -> None:
        """Send a ``Progress`` now, unless the last one said as much."""
        if not self._instruments or self._told_finished == engine.controller.finished:
            return
        self._told_finished = engine.controller.finished
        means = means_of(add_sums(self._sums(), engine.peek_sums()))
        ages, rows = 0.0, 0
        for part in self._parts.values():
            s, n = part.peek_staleness()
            ages, rows = ages + s, rows + n
        event = Progress(
            mode=self._mode,
            epoch=self._epoch,
            epochs=self._epochs,
            finished=self._done + engine.controller.finished,
            total=self._total,
            active=engine.controller.in_flight,
            loss=means.pop("loss", float("nan")),
            metrics=means,
            instances_per_second=engine.controller.finished / now_s if now_s > 0 else 0.0,
            staleness=ages / rows if rows else 0.0,
            time_s=self._began + now_s,
        )
        tell(self._instruments, "on_progress", event)


def tell_joined(instruments: Iterable[AbstractInstrument], event: Joined) -> None:
    """Say to log and instruments that copies take part again."""
    told = ", ".join(map(str, event.copies))
    log.info("worker %d has come: copy %s goes on with the weights of another", event.worker, told)
    tell(instruments, "on_joined", event)


def listens(instruments: Iterable[AbstractInstrument], method: str) -> bool:
    """Whether an instrument does something in this method."""
    plain = getattr(AbstractInstrument, method)
    return any(
        getattr(type(each), method) is not plain or method in getattr(each, "__dict__", ())
        for each in instruments
    )


@interruptible
def tell(instruments: Iterable[AbstractInstrument], method: str, event: object) -> None:
    """Call a method of every instrument.

    Raises:
        Exception: What the first one raised that did, with a note that says which it was: a run
            whose instrument fails is a run that fails.
    """
    for instrument in instruments:
        try:
            getattr(instrument, method)(event)
        except Exception as error:
            error.add_note(
                f"raised by the instrument {type(instrument).__name__} in {method}; the run stops "
                "with it: mend the instrument, or leave it out"
            )
            raise


def means_of(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Sum over rows; NaN where there are none."""
    return {name: s / n if n else float("nan") for name, (s, n) in sums.items()}

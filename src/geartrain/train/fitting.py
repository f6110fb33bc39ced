"""One call of ``fit``: epochs of segments, with meetings, checkpoints and validation between them.

    epoch ─► segment ─► drained ─► copies meet? validate? checkpoint? ─► segment ... ─► flush
                                                                            validate ◄────┘

A segment is a run of the engine until it is empty again; there is no other way to train. What is
done for training while the engine rests (its making, steps of a flush, copies that meet) counts as
training time; validation and checkpoints do not.

A signal is heard all the while. Between segments it waits until what has been begun is done, or a
checkpoint would be of a moment that never was.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, final

from geartrain.data.points import evaluation_points
from geartrain.engine.engine import Engine
from geartrain.engine.instrument import (
    Chosen,
    EpochEnded,
    Restored,
    RunEnded,
    RunStarted,
    Updated,
)
from geartrain.engine.parts import original_name
from geartrain.errors import DataError, WorkerDiedError
from geartrain.garbage import old_objects_spared
from geartrain.nodes.sums import add_sums
from geartrain.parts.trained import StepTaken
from geartrain.runtime.base import AbstractFeeder
from geartrain.runtime.interrupt import Interruptible
from geartrain.runtime.kernel_threads import with_kernel_threads
from geartrain.train.auto import MOST_MEASURED, measured_instances
from geartrain.train.checkpoint import Retention
from geartrain.train.copies import ExchangeCounts, Feed
from geartrain.train.deaths import COPIES, tell_restored
from geartrain.train.in_flight import seen_in
from geartrain.train.observer import Observer, listens, means_of, tell
from geartrain.train.options import Keep
from geartrain.train.restart import CallCounts
from geartrain.train.results import Fit, Reached, Target
from geartrain.train.saving import Saving
from geartrain.train.source import Source
from geartrain.train.state import State
from geartrain.train.validation import Validation
from geartrain.train.work import Work

log = logging.getLogger("geartrain.train")


@final
class Fitting:
    """One call of ``fit``."""

    def __init__(
        self,
        state: State,
        source: Source,
        valid: Source | None,
        epochs: int,
        until: Target | None,
        retention: Retention | None,
        every: int | None,
        evaluate_every: float | None,
        keep: Keep | None = None,
    ) -> None:
        self._s, self._source = state, source
        self._epochs = epochs
        self._counts = CallCounts()
        self._saving = Saving(state, self._counts, retention, every, keep)
        self._points = _points(source, evaluate_every, state)
        self._seconds = 0.0
        self._reached: Reached | None = None
        self._interrupt = Interruptible()
        self._validation = Validation(state, valid, until, epochs, self._interrupt)
        self._exchanged = ExchangeCounts(state.sharing)
        self._work = Work(state.runtime.workers)

    def run(self) -> Fit:
        try:
            with self._interrupt, old_objects_spared():
                return self._run()
        finally:
            self._saving.close()

    def _run(self) -> Fit:
        outcome: Literal["done", "target reached", "interrupted", "failed"] = "failed"
        message = ""
        failure: BaseException | None = None
        try:
            self._s.ready(self._source)
            if listens(self._s.instruments, "on_run_started"):
                tell(self._s.instruments, "on_run_started", self._started())
            self._saving.set_restart(None)
            self._epochs_until_the_end()
            outcome = "target reached" if self._reached else "done"
        except KeyboardInterrupt as error:
            outcome, message, failure = "interrupted", str(error), error
            if self._s.engine is not None:
                self._s.sharing.agree()  # without a search for the best: somebody waits
                self._saving.save(is_best=False)
            raise
        except BaseException as error:
            message, failure = f"{type(error).__name__}: {error}", error
            raise
        finally:
            at, deaths = self._s.position, self._s.deaths
            ended = RunEnded(
                *(outcome, self._counts.trained, self._seconds, message, at.train_seconds),
                *(len(deaths), deaths.repeated, self._saving.unsaved),
            )
            self._say_farewell(ended, failure)
        last = at.history[-1].staleness if at.history else {}
        counts = self._counts
        return Fit(
            *(tuple(at.history), self._reached, counts.trained, self._seconds, counts.skipped),
            *(last, len(deaths), deaths.repeated, self._saving.unsaved, self._saving.is_saved),
        )

    def _epochs_until_the_end(self) -> None:
        at = self._s.position
        if (advice := self._s.sharing.advice()) is not None:
            log.warning("%s", advice)
        if at.epoch > self._epochs:
            log.warning(
                "fit(epochs=%d): the session has trained %d epochs already; ask for more epochs",
                self._epochs,
                at.epoch - 1,
            )
        # A restart puts another position in the place of this one.
        while self._s.position.epoch <= self._epochs and self._reached is None:
            self._epoch()

    def _say_farewell(self, ended: RunEnded, failure: BaseException | None) -> None:
        """Tell every instrument, even if one raises: they release files here."""
        for instrument in self._s.instruments:
            try:
                tell([instrument], "on_run_ended", ended)
            except Exception as error:  # noqa: BLE001 - raised below, or a note of what already is
                if failure is None:
                    failure = error
                else:
                    failure.add_note(f"also: {type(error).__name__}: {error}")
                told = f"{type(error).__name__}: {error}"
                log.error("%s could not end the run: %s", type(instrument).__name__, told)
        if failure is not None and ended.outcome in ("done", "target reached"):
            raise failure

    def _epoch(self) -> None:
        """To the end of the epoch, to the target, or to where a restart begins."""
        at = self._s.position
        s = self._s
        feed = Feed(self._source, s.sharing, at.epoch, at.taken, s.on_bad)
        while self._reached is None:
            self._interrupt.check()
            if self._is_due():  # here, as a resumed run may have been interrupted in validation
                self._enter(epoch_ended=False)
                continue
            before = at.taken
            ended = self._segment(feed)
            if ended is None:
                return
            self._meet(now=False)
            if ended:
                if not at.taken:
                    raise DataError(f"the training data gave no instance in epoch {at.epoch}")
                self._source.require_whole(at.taken, f"epoch {at.epoch}")
                self._flush()
                self._enter(epoch_ended=True)
                return
            if self._saving.is_due(before, at.taken) and not self._is_due():
                self._validation.agree()
                self._saving.save(is_best=False)
            elif self._saving.is_kept_now() and not self._is_due():
                self._saving.keep()

    def _is_due(self) -> bool:
        """Whether there was a point within the epoch to validate at, and nobody has yet."""
        at = self._s.position
        return any(at.entered < point <= at.taken for point in self._points[:-1])

    def _enter(self, *, epoch_ended: bool) -> None:
        """Validate, and add to the history what was trained since its last entry."""
        s, at = self._s, self._s.position
        # One model is validated and kept, not one for each copy.
        self._meet(now=True)
        self._validation.agree()
        event = self._ended(epoch_ended=epoch_ended)
        exchanged = self._exchanged.event(event.epoch, at.train_seconds, at.epoch_seconds)
        if exchanged is not None:
            tell(s.instruments, "on_exchanged", exchanged)
        tell(s.instruments, "on_worked", self._work.take(event.epoch, at.train_seconds))
        at.history.append(event)
        at.sums, at.updates, at.epoch_seconds, at.entered = {}, {}, 0.0, at.taken
        if epoch_ended:
            with self._counted():
                s.sharing.epoch_ended(at.epoch)
            at.epoch, at.taken, at.entered = at.epoch + 1, 0, 0
        best = self._validation.is_best(event)
        self._reached = self._validation.reached(event)
        self._saving.save(is_best=best)
        tell(s.instruments, "on_epoch_ended", event)

    def _meet(self, *, now: bool) -> None:
        with self._counted():
            self._s.meet(now=now)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count this as training, where seconds are real."""
        began = time.perf_counter()
        yield
        if not self._s.runtime.virtual:
            self._spend(time.perf_counter() - began)

    def _spend(self, seconds: float) -> None:
        at = self._s.position
        at.epoch_seconds += seconds
        at.train_seconds += seconds
        self._seconds += seconds

    def _flush(self) -> None:
        """The steps of an epoch's end, with whatever gradients are left."""
        s = self._s
        assert s.engine is not None
        for worker in s.engine.workers:
            with self._counted(), with_kernel_threads(s.runtime.kernel_threads):
                steps = worker.flush()
            self._tell_steps(worker.index, steps)
        with self._counted():
            steps = s.sharing.settle()
        self._tell_steps(0, steps)
        s.sharing.check_settled()
        with self._counted():
            for part in s.trained_parts.values():
                part.check_finite()

    def _tell_steps(self, worker: int, steps: Sequence[StepTaken]) -> None:
        s, at = self._s, self._s.position
        for step in steps:
            at.updates[step.part] = at.updates.get(step.part, 0) + 1
            updated = Updated(worker, step.part, step.version, step.rows, at.train_seconds)
            tell(s.instruments, "on_updated", updated)

    def _segment(self, feed: Feed) -> bool | None:
        """Train until the engine is to be drained, or the epoch ends; True at the end.

        None: a worker has died, and the session is back at an earlier state.
        """
        s, at = self._s, self._s.position
        measures = self._measures()
        limit = self._limit(measures)
        with self._counted():
            engine = s.ready(self._source, fresh=True)
        engine.begin(train=True)
        feeder = feed.segment(at.taken, limit)
        watch = Observer(
            s.instruments,
            "train",
            at.epoch,
            self._epochs,
            self._source.length,
            s.trained_parts,
            at.train_seconds,
            at.taken,
            lambda: at.sums,
            on_left=self._went_on,
            on_finished=self._saving.pausing(feeder),
        )
        began, began_s = engine.controller.trained, time.perf_counter()
        try:
            seconds = s.run(engine, feeder, watch)
        except KeyboardInterrupt:
            if s.engine is not None:
                self._account(engine, feeder, watch, watch.now_s, began)
                self._rest(engine)
            raise
        except WorkerDiedError as death:
            if feeder.closed:  # somebody wants to leave
                raise
            now_s = time.perf_counter() - began_s if death.at_s is None else death.at_s
            self._go_back(death, engine, now_s)
            return None
        self._account(engine, feeder, watch, seconds, began)
        self._rest(engine)
        if s.in_flight is not None and (
            measures == "in flight" or (at.epoch == 1 and feeder.source_ended)
        ):
            s.look_for_active(seen_in(engine, watch, began))
        if measures == "choice":
            assert s.choice is not None
            s.choice.saw(watch.work, seconds, engine.controller.trained - began, watch.updates)
            s.choice.go_on(s.settings.max_active)
        elif measures == "costs":
            s.costs = watch.work.costs()
            log.info("measured, in seconds: %s", s.costs)
            self._tell_chosen(s.chosen(s.why_placed()))
        return feeder.source_ended

    def _measures(self) -> Literal["in flight", "choice", "costs"] | None:
        """What the next segment is to tell; a choice that needs nothing more is made."""
        s = self._s
        if s.in_flight is not None and s.position.in_flight is None:
            return "in flight"
        if s.choice is not None and s.choice.plan is None:
            if s.choice.measures:
                s.runtime = s.choice.runtime
                return "choice"
            self._choose()
        return "costs" if s.places_by_cost and not s.costs else None

    def _limit(self, measures: Literal["in flight", "choice", "costs"] | None) -> int | None:
        """Instances until the graph is drained; None: the end of the epoch."""
        s, at, most = self._s, self._s.position, self._s.settings.max_active
        meeting = s.sharing.until_meeting(at.trained)
        until_next = [] if meeting is None else [meeting]
        until_next += self._saving.limits()
        until_next += [point - at.taken for point in self._points[:-1] if point > at.taken][:1]
        if measures is not None:
            wanted = MOST_MEASURED if measures == "in flight" else measured_instances(most)
            if measures == "choice":
                assert s.choice is not None
                wanted = s.choice.wanted(most)
            if s.settings.drain:  # whole minibatches, or those after it would straddle updates
                wanted = -(-wanted // most) * most
            until_next.append(wanted)
        return min(until_next, default=None)

    def _choose(self) -> None:
        """Go on by what the first instances have cost."""
        with self._counted():
            event = self._s.choose(self._left())
        self._work.workers = self._s.runtime.workers
        self._saving.set_restart(None)  # copies are not in a state of before
        self._tell_chosen(event)

    def _tell_chosen(self, event: Chosen) -> None:
        log.info(event.why, extra={"screen": True})
        tell(self._s.instruments, "on_chosen", event)

    def _left(self) -> int | None:
        """Instances that are still to be trained, if none is skipped; None: nobody knows."""
        length, at = self._source.length, self._s.position
        return None if length is None else (self._epochs - at.epoch + 1) * length - at.taken

    def _go_back(self, death: WorkerDiedError, engine: Engine, seconds: float) -> None:
        """Go on from the last state that is whole; the time that is lost for it stays spent.

        Args:
            death: Why.
            engine: Of the segment that has failed.
            seconds: That it took up to now.

        Raises:
            WorkerDiedError: It is not to be gone on after.
        """
        s, restart = self._s, self._saving.restart
        s.deaths.count(death)
        assert restart is not None
        self._spend(seconds)
        spent, controller = s.position.train_seconds, engine.controller
        repeated = controller.trained - restart.trained
        restart.load(s)
        at = s.position
        lost = spent - at.train_seconds
        at.train_seconds, at.epoch_seconds = spent, at.epoch_seconds + lost
        self._counts.trained, self._counts.skipped = restart.counts.trained, restart.counts.skipped
        s.deaths.repeated += repeated
        s.deaths.seconds += lost
        event = Restored(
            mode="train",
            worker=death.worker,
            message=death.how,
            deaths=len(s.deaths),
            most=s.deaths.most,
            epoch=at.epoch,
            taken=at.taken,
            repeated=repeated,
            unfinished=controller.active,
            seconds=lost,
            source=str(restart),
            time_s=spent,
        )
        tell_restored(s.instruments, event)

    def _went_on(self, worker: int | None, how: str, unfinished: int, time_s: float) -> None:
        """A worker has died, and other copies of the model go on.

        Raises:
            WorkerDiedError: Too many have died.
        """
        s = self._s
        s.deaths.count(WorkerDiedError(how, worker))
        s.deaths.repeated += unfinished
        event = Restored(
            *("train", worker, how, len(s.deaths), s.deaths.most, s.position.epoch),
            taken=s.position.taken,
            unfinished=unfinished,
            source=COPIES,
            time_s=time_s,
        )
        tell_restored(s.instruments, event)

    def _rest(self, engine: Engine) -> None:
        """The steps that fall due as workers hand in what they have gathered."""
        with self._counted():
            steps = engine.rest()
        for worker, step in steps:
            self._tell_steps(worker, [step])

    def _account(
        self, engine: Engine, feeder: AbstractFeeder, watch: Observer, seconds: float, began: int
    ) -> None:
        at = self._s.position
        at.taken += feeder.taken
        at.trained = engine.controller.trained
        self._spend(seconds)
        self._work.add(watch.work, seconds)
        at.sums = add_sums(at.sums, engine.sums())
        for part, n in watch.updates.items():
            at.updates[part] = at.updates.get(part, 0) + n
        self._counts.trained += engine.controller.trained - began
        self._counts.skipped += feeder.skipped

    def _ended(self, *, epoch_ended: bool) -> EpochEnded:
        s, at = self._s, self._s.position
        valid = self._validation.metrics()
        staleness = s.take_staleness()
        means = means_of(at.sums)
        return EpochEnded(
            epoch=at.epoch if epoch_ended else at.epoch - 1 + at.taken / self._points[-1],
            epochs=self._epochs,
            instances=at.taken - at.entered,
            seconds=at.epoch_seconds,
            loss=means.pop("loss", math.nan),
            metrics=means,
            valid=valid,
            staleness=staleness,
            updates=self._updates(),
            time_s=at.train_seconds,
        )

    def _updates(self) -> dict[str, int]:
        """Optimiser steps by part as it is saved: those of the copies of a model together."""
        summed: dict[str, int] = {}
        for part, n in self._s.position.updates.items():
            name = part if part in self._s.parts else original_name(part)
            summed[name] = summed.get(name, 0) + n
        return summed

    def _started(self) -> RunStarted:
        s = self._s
        engine = s.ready(self._source)
        return RunStarted(
            runtime=s.runtime.name,
            workers=s.runtime.workers,
            max_active=s.settings.max_active,
            epochs=self._epochs,
            nodes=engine.nodes_by_worker(),
            graph_text=str(s.graph),
            graph_mermaid=s.graph.mermaid(),
            sharing=s.sharing.name,
            outline=engine.outline(),
        )


def _points(source: Source, every: float | None, state: State) -> list[int]:
    """Instances of an epoch that are done at each evaluation; the last stands for the end.

    Raises:
        ValueError: A share of an epoch is asked for, and the data have no length.
    """
    if every is None:
        return [0]
    if source.length is None:
        raise ValueError(
            f"evaluate_every={every:g} is a share of an epoch, and the training data do not know "
            "their length; give them a __len__, or leave out evaluate_every"
        )
    # Whole minibatches where they are drained, or those after it would straddle updates.
    whole = state.settings.max_active if state.settings.drain else 1
    return evaluation_points(source.length, every, whole)

"""A part at work: who owns weights, and when they move.

    gradients ─► GradientSum ─► due? ─► average, clip, schedule ─► optimiser step ─► version + 1
                                Counting       Stepping               Ownership: who else has them
    forward, backward ─► Looking: which weights they see

A part steps by itself when it has seen enough; nothing waits for a global step. What a user writes,
``Part`` and ``Rules``, is in ``geartrain.parts.rules``.

Source: local updates after min_update_frequency gradients, Gaunt et al. 2017, arXiv:1705.09786;
ours is called ``update_every``, as it is a count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from geartrain.frames.message import IntArray
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.weights import WeightVersion
from geartrain.parts.ahead import AbstractAhead, UpdatesAhead
from geartrain.parts.counting import Counting, Told
from geartrain.parts.late.delay import mean_age
from geartrain.parts.late.views import AbstractView, Stashed
from geartrain.parts.looking import Looking
from geartrain.parts.norms import Norms
from geartrain.parts.ownership import Ownership
from geartrain.parts.pending import gradients_to_tensors, load_gradients
from geartrain.parts.rules import Rules
from geartrain.parts.stepping import Stepping
from geartrain.parts.trained import StepTaken
from geartrain.parts.usable import require_made, require_one_device, require_same


@final
class PartState(AbstractAhead):
    """A part at work. One worker owns it; nothing here is locked.

    Args:
        name: Unique among the parts.
        module: Its parameters are changed in place.
        rules: When and how.
        device: Where the module is moved to; None: it stays where it is.
        copy, copies: It is one of so many copies, each of which gets every so-many-th instance.

    While ``frozen`` is True, gradients pass through the part and its weights stay. Parameters that
    do not require a gradient when the part is made stay for good.

    Attributes:
        counting: How far its update is, what is in flight, how old gradients are.
        stepping: Its optimiser, and what is done to gradients before it.
        looking: Which weights messages see.
        ownership: Who else has the weights.
        norms: Of all parts, where one is limited by them.
        tables: Parameters whose gradients have come as rows.
        progress: Instances trained, at the last step.
        step_delay: Mean staleness of the gradients of the step that is taken, or was last.

    Raises:
        ValueError: The optimiser wants a closure, the scheduler a metric at every step, or the
            weights lie on several devices.
        GraphError: Weights are not there yet, or have a hook that nobody calls.
        TypeError: What the rules make is no optimiser.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        rules: Rules,
        device: torch.device | None = None,
        copy: int = 0,
        copies: int = 1,
    ) -> None:
        require_made(name, module)
        if device is not None:
            module.to(device)
        require_one_device(name, module)
        self.name, self.module, self.rules = name, module, rules
        self.copy, self.copies = copy, copies
        self.version = 0
        self.frozen = False
        self.gradient = GradientSum(module.parameters())
        self.size = sum(p.numel() for p in module.parameters())
        self.trigger = rules.trigger()
        self.stepping = Stepping(name, module, rules)
        view = rules.view or Stashed()
        delayed = rules.delay is not None or view.wants_delays
        self._wants_ages = delayed or self.stepping.wants_delays
        self.counting = Counting(self.trigger, rules.max_staleness, self._wants_ages)
        self.step_delay = 0.0
        self.looking = Looking(self, view, rules.delay, average_rows=rules.average == "rows")
        self.wants_graph = self.looking.wants_graph
        self.ownership = Ownership()
        self.guard: AbstractContextManager[Any] = nullcontext()
        self.norms: Norms | None = None
        self.tables: set[nn.Parameter] = set()
        self.progress = 0
        self._held_rows = 0
        plain = rules.max_staleness is None and rules.window is None and rules.delay is None
        plain = plain and not self._wants_ages and rules.view is None
        self._plain = plain and self.trigger.unit == "instances"
        self._steps_plainly = rules.delay is None and not self._wants_ages
        self._steps_plainly &= self.stepping.may_be_told and self.scheduler is None
        self._ahead = UpdatesAhead(self.counting, self._count)
        self._known = tuple(module.parameters())
        self._first = self._known[0] if self._known else None

    # What it is.

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self._first is None else self._first.device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that learn."""
        return self.stepping.parameters

    @property
    def optimizer(self) -> Optimizer | None:
        return self.stepping.optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        return self.stepping.scheduler

    @property
    def view(self) -> AbstractView:
        return self.looking.view

    @property
    def once(self) -> bool:  # type: ignore[override]
        return self.counting.once

    @property
    def open(self) -> bool:
        return self.rules.window is None or self.outstanding < self.rules.window

    @property
    def at_rest(self) -> bool:
        """Whether no row of it is in flight."""
        return not self.outstanding

    @property
    def may_be_seen_by_version(self) -> bool:
        """Whether others may compute with versions of the weights that are not those of now."""
        rules = self.rules
        bounded = rules.max_staleness is not None or rules.window is not None
        return not bounded and not self._wants_ages

    # What its view asks.

    @property
    def rate_factor(self) -> float:
        return self.stepping.rate_factor

    @property
    def outstanding(self) -> int:
        return self.counting.outstanding

    @property
    def period(self) -> int | None:
        return self.trigger.n if self.trigger.unit == "messages" else None

    def expected_delay(self) -> int:
        return self.looking.expected_delay(self.counting.delay(self.looking.rows_each))

    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        return self.looking.aliases()

    def renew(self) -> None:
        self.looking.renew()

    # What nodes ask and tell.

    def look(self, number: int, rows: int) -> WeightVersion:
        return self.looking.look(number, rows)

    def look_back(self, seen: WeightVersion) -> Mapping[nn.Parameter, Tensor]:
        return self.looking.seeing.look_back(seen)

    def compensated(
        self,
        seen: WeightVersion,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        rows: int,
    ) -> Sequence[Tensor | None]:
        return self.looking.compensated(seen, parameters, gradients, rows)

    def sent(self, rows: int, version: int | None = None) -> None:
        self.counting.sent(rows, self.version if version is None else version)

    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        self.counting.received(self.version, rows, versions, lengths)

    def received_of(self, version: int, rows: int, messages: int) -> None:
        self.counting.received_of(self.version, version, rows, messages)

    def answered(self, rows: int, messages: int, version: int | None = None) -> None:
        self.counting.answered(0 if version is None else self.version - version, rows, messages)

    def dropped(self, versions: IntArray) -> None:
        self.counting.dropped(versions)

    def _count(self, told: Told) -> None:
        told.tell(self.counting, self.version)

    # What a worker asks and tells.

    @property
    def lacking(self) -> int | None:
        return self.counting.lacking

    def begun(self, n: int) -> int:
        return self.counting.instances % n

    def in_cohorts(
        self,
        ahead: Callable[[int], int] | None,
        updates: Callable[[IntArray], IntArray | None] | None,
    ) -> None:
        self.looking.updates_before, self._ahead.of_slots = ahead, updates

    @property
    def takes_ahead(self) -> bool:  # type: ignore[override]
        return self._plain and self._alone

    @property
    def _alone(self) -> bool:
        """Whether nobody else has the weights."""
        return type(self.ownership) is Ownership

    def finished(self, instances: int) -> None:
        self.counting.finished(instances)

    def note_holding(self) -> bool | None:
        return self.counting.note_holding(self.version)

    def due(self) -> bool:
        """Whether the part should step now."""
        return self.counting.due(self.version)

    @property
    def holding(self) -> bool:
        """Whether a step that is due waits for older rows to come back."""
        return self.counting.holding(self.version)

    def step_if_due(self, progress: int) -> StepTaken | None:
        """Take a step if one is due."""
        return self._step(progress) if self.counting.due(self.version) else None

    def step(self, progress: int) -> StepTaken | None:
        """Take an optimiser step with the gradient so far; None if there is none.

        Args:
            progress: Instances finished in training, for the schedule.

        Raises:
            NonFiniteError: The gradient is NaN or infinite; the weights are as they were. On a
                device other than the CPU this is found some steps later, without a wait: a step
                with such a gradient is then taken with zeros in its place.
        """
        taken = self._step(progress, flush=True)
        self.flushed()
        return taken

    def flushed(self) -> None:
        """A step has been taken with whatever there was."""
        if not self.outstanding:
            self.looking.seeing.rest()

    def _step(self, progress: int, *, flush: bool = False) -> StepTaken | None:
        rows, divisor = self.end_update(flush=flush)
        found = self.gradient.take_each(self.parameters) if rows else ([], None)
        return self.step_by(*found, rows, divisor, progress)

    def end_update(self, *, flush: bool) -> tuple[int, float]:
        """The update ends, and the next one begins.

        Args:
            flush: Whether it ends before it is due.

        Returns:
            Its rows, none if there is nothing to step with, and what their sums are divided by.
        """
        self.stepping.verdicts.look()
        with self.ownership.taking():
            self.ownership.collect(self.gradient)
            rows, divisor = self.counting.take(self.rules.average, flush=flush)
        self.looking.seeing.turn()
        if self.frozen:
            for parameter in self._known:
                self.gradient.take(parameter)
        return 0 if self.frozen else rows, divisor

    def step_by(
        self,
        sums: Sequence[Tensor | None],
        squares: float | None,
        rows: int,
        divisor: float,
        progress: int,
    ) -> StepTaken | None:
        """The step of an update that has ended, with the sums of its gradients and the squares of
        all their entries, if these are known."""
        counting, stepping = self.counting, self.stepping
        gradients, norm = stepping.gather(sums, squares, self.version)
        if not gradients:
            counting.step_ages.clear()
            return None
        stepping.tame(gradients, norm, divisor, self.version, self.norms)
        if self._wants_ages:
            self.step_delay = mean_age(counting.step_ages.counts)
        self.progress = progress
        if not self._offer():
            self._held_rows = rows
            counting.step_ages.clear()
            return None
        self._move(lambda: self._optimize(progress))
        counting.step_ages.clear()
        if not self._alone:
            self.ownership.stepped([p.grad for p in self.parameters])
        stepping.clear()
        stepping.stepped()
        return StepTaken(self.name, self.version, rows)

    def step_with(self, gradients: Sequence[Tensor | None], *, own: bool) -> StepTaken | None:
        """Take a step with gradients from elsewhere; what is waiting here goes on waiting.

        Args:
            gradients: One a parameter that learns; None: no gradient. They may be written to.
            own: Whether it stands for a step that was held.
        """
        if self.optimizer is None or self.frozen:
            return None
        self.stepping.put(gradients)
        self._move(lambda: self._optimize(self.progress))
        self.stepping.clear()
        if own:
            self.counting.step_ages.clear()
            self.stepping.stepped()
        return StepTaken(self.name, self.version, self._held_rows if own else 0)

    def _offer(self) -> bool:
        """Let those who have copies say what to step with; False: the step is held."""
        if self._alone:
            return True
        mine = [p.grad for p in self.parameters]
        chosen = self.ownership.stepping(mine)
        if chosen is mine:
            return True
        for parameter, gradient in zip(self.parameters, chosen or [None] * len(mine), strict=True):
            parameter.grad = gradient
        return chosen is not None

    def _move(self, write: Callable[[], None]) -> None:
        """The weights become those of the next version."""
        before = self.version
        self.gradient.settle()
        with self.ownership.moving():
            self.looking.seeing.before_step()
            write()
        if self.version == before:  # else those who share it have been told
            self.version += 1
        self.looking.seeing.after_step()

    @property
    def steps_plainly(self) -> bool:
        """Whether nobody else has the weights, and a step is what an optimiser that may be told
        makes of gradients times one factor; ``about_to_move`` and ``moved`` are then all that is
        beside it."""
        plainly = self._steps_plainly and self.norms is None and not self.frozen
        return plainly and type(self.ownership) is Ownership and not self.stepping.elsewhere

    def about_to_move(self) -> None:
        """Before a step that may be taken with those of others; it may be told so again."""
        self.gradient.settle()
        self.looking.seeing.before_step()

    def moved(self, rows: int, progress: int) -> StepTaken:
        """After it."""
        self.version += 1
        self.looking.seeing.after_step()
        self.progress = progress
        return StepTaken(self.name, self.version, rows)

    def _optimize(self, progress: int) -> None:
        """A step at the rate of now, and what the rules want to learn from it."""
        delay, factor = self.rules.delay, 1.0
        if delay is not None:
            factor = delay.rate(self.counting.step_ages.counts, self.version)
        before = self.looking.before_step()
        self.stepping.optimize(progress, factor, self.step_delay)
        self.looking.after_step(before)

    # What a session asks and tells, and those who have its weights too.

    def in_flight(self, most: int) -> None:
        """So many instances may be in flight.

        Raises:
            ValueError: They are too many for the part's view.
        """
        self.looking.seeing.in_flight(most)

    def begin(self) -> None:
        """A pass begins.

        Raises:
            GraphError: The module has other parameters than when the part was made.
        """
        require_same(self.name, self.module, self._known)
        self.ownership.begin()

    def rates(self, progress: int) -> list[float]:
        """The learning rate of each group of parameters now, without what ``delay`` takes off.

        Args:
            progress: Instances finished in training, for the schedule.
        """
        return self.stepping.rates(progress)

    @torch.no_grad()
    def overwrite(self, weights: Sequence[Tensor]) -> None:
        """Copy these into the parameters that learn; a version of its own."""

        def write() -> None:
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)

        self._move(write)
        self.replaced()

    @torch.no_grad()
    def adopt(self, other: PartState) -> None:
        """Take over weights, buffers, and what optimiser and scheduler remember, of a copy."""
        self.overwrite([p.detach() for p in other.parameters])
        both = zip(self.module.buffers(), other.module.buffers(), strict=True)
        for mine, theirs in both:
            mine.copy_(theirs)
        self.stepping.adopt(other.stepping)

    def replaced(self) -> None:
        """The weights have become others, and not by a step."""
        self.looking.seeing.replaced()

    def collect(self) -> None:
        """Take over the gradients that others have handed in; none of them may be adding."""
        self.ownership.collect(self.gradient)

    def check_finite(self) -> None:
        """Wait for what the device has to say of the last steps.

        Raises:
            NonFiniteError: A gradient was NaN or infinite.
        """
        self.stepping.verdicts.look(wait=True)

    def abandon(self) -> None:
        """Forget the rows in flight and the gradient that waits: nothing of them comes any more."""
        self.ownership.forget()
        self.collect()
        self.counting.forget()
        self._ahead.forget()
        self.gradient.forget()
        self.looking.forget()
        self.stepping.verdicts.forget()

    def take_histogram(self) -> tuple[int, ...]:
        """Gradient rows by staleness since the last call."""
        return self.counting.staleness.take()

    def histogram(self) -> tuple[int, ...]:
        """The same, and it stays."""
        return self.counting.staleness.to_tuple()

    def peek_staleness(self) -> tuple[float, int]:
        """Sum of ages and rows so far, for a progress line."""
        return self.counting.staleness.total()

    # For checkpoints.

    def pending_gradients(self) -> dict[str, Tensor]:
        """The gradient that waits for a step, by parameter name; it goes on waiting."""
        self.collect()
        return gradients_to_tensors(self.module, self.gradient)

    def load_pending_gradients(self, found: Mapping[str, Tensor]) -> None:
        """Put back what ``pending_gradients`` gave, and ``pending.check_gradients`` let pass."""
        load_gradients(self.module, self.gradient, found)

"""Parts: who owns weights, and when they move.

    gradients ─► GradientSum ─► due? ─► average, clip, schedule ─► optimiser step ─► version + 1

A part steps by itself when it has seen enough; nothing waits for a global step. ``PartState`` is
what runs; what a user writes, ``Part`` and ``Rules``, is in ``geartrain.parts.rules``.

Source: local updates after min_update_frequency gradients, Gaunt et al. 2017, arXiv:1705.09786;
ours is called ``update_every``, as it is a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from geartrain.codec import require_like
from geartrain.device import Verdicts
from geartrain.errors import CheckpointError, NonFiniteError
from geartrain.frames.message import IntArray
from geartrain.native.steps import norm_of, scaled_
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.weights import Sight
from geartrain.parts.late.delay import mean_age
from geartrain.parts.late.views import Corrected, Stashed
from geartrain.parts.norms import Norms
from geartrain.parts.ownership import Ownership
from geartrain.parts.rules import Clip, Rules, make_optimizer
from geartrain.parts.staleness import Ages, bincount
from geartrain.parts.trained import AbstractPart, StepTaken
from geartrain.parts.triggers import Messages
from geartrain.schema import Count, Finite, NotNegative, read


@final
@dataclass(frozen=True, slots=True)
class ViewEntry:
    """What a part's view and delay remember besides tensors, as JSON has it."""

    view: Mapping[str, Any]
    of: tuple[str, str]
    messages: Count
    rows_each: Count
    rate_factor: Finite
    step_delay: NotNegative
    step_ages: Sequence[Count]


@final
class PartState(AbstractPart):
    """A part at work. One worker owns it; nothing here is locked.

    Args:
        name: Unique among the parts.
        module: Its parameters are changed in place.
        rules: When and how.
        device: Where the module is moved to; None: it stays where it is.
        copy, copies: It is one of so many copies, each of which gets every so-many-th instance.

    While ``frozen`` is True, gradients pass through the part and its weights stay. Parameters that
    do not require a gradient when the part is made stay for good.

    ``rows``, ``instances``, ``messages`` and ``over`` say how far the update in the making is; see
    ``triggers.Counts``.

    Raises:
        ValueError: The optimiser wants a closure, the scheduler a metric at every step, or the
            weights lie on several devices.
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
        if device is not None:
            module.to(device)
        _on_one_device(name, module)
        self.name, self.module, self.rules = name, module, rules
        self.version = 0
        self.rows = 0
        self.instances = 0
        self.messages = 0
        self.over = 0
        self.once = False
        """Whether every instance comes by in exactly one message, which then counts for it."""
        self.copy, self.copies = copy, copies
        self.updates_before: Callable[[int], int] | None = None
        """Updates before that of an instance, by its number, where instances are in cohorts."""
        self.frozen = False
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.gradient = GradientSum(module.parameters())
        self.size = sum(p.numel() for p in module.parameters())
        self.optimizer = (
            make_optimizer(name, rules.optimizer, self.parameters) if self.parameters else None
        )
        self.trigger = rules.trigger()
        self._scheduler = (
            rules.scheduler(self.optimizer)
            if rules.scheduler is not None and self.optimizer is not None
            else None
        )
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"part '{name}': ReduceLROnPlateau wants a metric, and a part steps without one; "
                "use another scheduler, or schedule="
            )
        self._histogram = Ages()
        self._step_ages = Ages()
        self.outstanding = 0
        self.step_delay = 0.0
        self.rate_factor = 1.0
        self._alterations = 0  # of rates, and of those the returns: odd while they are altered
        self._set_aside: list[float] = []
        self._rows_each = 0
        self._number = 0
        self._ages: dict[int, int] = {}
        self._aliases: dict[nn.Parameter, Tensor] | None = None
        self._told_holding = False
        self._verdicts = Verdicts()
        self._first = next(module.parameters(), None)
        self.ownership = Ownership()
        self.tables: set[nn.Parameter] = set()  # whose gradients have come as rows
        self.guard: AbstractContextManager[Any] = nullcontext()
        self.norms: Norms | None = None  # of all parts, where one is limited by them
        self._held_rows = 0
        self.progress = 0  # instances trained, at the last step
        self.view = rules.view or Stashed()
        self.delay = rules.delay
        self._compensation = None if self.delay is None else self.delay.start(self.parameters)
        if self._compensation is not None and not self.view.keeps_then:
            raise ValueError(
                f"part '{name}': delay={self.delay} compares the weights of now with those that a "
                f"gradient is of, which view={self.view} does not keep; use view=Stashed()"
            )
        if not isinstance(self.view, Stashed):
            self.wants_graph = f"view={self.view}"
        elif self._compensation is not None:
            self.wants_graph = f"delay={self.delay}"
        self._seeing = self.view.start(self)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        told = any("measured_delay" in group for group in groups)
        self._wants_ages = told or self.delay is not None or isinstance(self.view, Corrected)

    @property
    def at_rest(self) -> bool:
        """Whether no row of it is in flight."""
        return not self.outstanding

    @property
    def device(self) -> torch.device:
        return _CPU if self._first is None else self._first.device

    @property
    def _elsewhere(self) -> bool:
        """Whether the weights are on another device than the host."""
        return self._first is not None and not self._first.is_cpu

    @property
    def scheduler(self) -> LRScheduler | None:
        return self._scheduler

    @property
    def holding(self) -> bool:
        """Whether a step that is due waits for older rows to come back."""
        return self.trigger.due(self) and not self._young_enough()

    @property
    def lacking(self) -> int | None:
        """What one firing may add, in the unit of the trigger, 1 or more; None: any number.

        While a step is held back, gradients go on adding up.
        """
        if self.trigger.unit == "instances" and not self.once:
            return None  # the queues hold what may be added
        left = self.trigger.lacking(self)
        if left is None or left > 0:
            return left
        return self.trigger.n if self.trigger.due(self) else 1

    def completes(self, rows: int = 0, messages: int = 0, instances: int = 0) -> bool:
        """Whether the update would be due with so much more."""
        if self.once:
            instances = messages
        more = _Sum(
            self.rows + rows, self.instances + instances, self.messages + messages, self.over
        )
        return self.trigger.due(more)

    @property
    def period(self) -> int | None:
        """Messages to an update, where they are what is counted."""
        return self.trigger.n if isinstance(self.trigger, Messages) else None

    def rates(self, progress: int) -> list[float]:
        """The learning rate of each group of parameters now, without what ``delay`` takes off.

        Args:
            progress: Instances finished in training, for the schedule.
        """
        factor = 1.0 if self.rules.schedule is None else self.rules.schedule(progress)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        while True:  # a step that another thread takes just now has set rates aside
            seen, rates = self._alterations, self._set_aside
            if seen % 2 == 0:
                rates = [float(group["lr"]) for group in groups]
            if seen == self._alterations:
                return [rate * factor for rate in rates]

    def in_flight(self, most: int) -> None:
        """So many instances may be in flight.

        Raises:
            ValueError: They are too many for the part's view.
        """
        self._seeing.in_flight(most)

    @property
    def open(self) -> bool:
        return self.rules.window is None or self.outstanding < self.rules.window

    def look(self, number: int, rows: int) -> Sight:
        self._rows_each, self._number = rows, number
        return self._seeing.look(number)

    def look_back(self, sight: Sight) -> Mapping[nn.Parameter, Tensor]:
        return self._seeing.look_back(sight)

    def compensated(
        self,
        sight: Sight,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        rows: int,
    ) -> Sequence[Tensor | None]:
        if self._compensation is None:
            return gradients
        divisor = rows if self.rules.average == "rows" else 1
        return [
            None
            if g is None
            else self._compensation.apply(
                p, g.to_dense() if g.is_sparse else g, sight.leaves[p].data, divisor
            )
            for p, g in zip(parameters, gradients, strict=True)
        ]

    def expected_delay(self) -> int:
        """Updates until the message that leaves now is answered, if answers come in order."""
        if self.updates_before is not None:
            return self.updates_before(self._number)
        return self.trigger.delay(self, self.outstanding, self._rows_each)

    def sent(self, rows: int, version: int | None = None) -> None:
        self.outstanding += rows
        if self.rules.max_staleness is not None:
            version = self.version if version is None else version
            self._ages[version] = self._ages.get(version, 0) + rows

    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        self.rows += rows
        counts = bincount(self.version - versions, lengths)
        self._histogram.add(counts)
        if self._wants_ages:
            self._step_ages.add(counts)
        self.dropped(versions)

    def answered(self, rows: int, messages: int, version: int | None = None) -> None:
        self._answer(messages)
        if not rows:
            return
        self.rows += rows
        counts = np.zeros(1 if version is None else self.version - version + 1, np.int64)
        counts[-1] = rows
        self._histogram.add(counts)
        if self._wants_ages:
            self._step_ages.add(counts)

    def dropped(self, versions: IntArray) -> None:
        self._answer(versions.size)
        self.returned(versions)

    def returned(self, versions: IntArray) -> None:
        """Rows that left at these versions are in flight no more."""
        self.outstanding -= versions.size
        if self.rules.max_staleness is not None:
            values, counts = np.unique(versions, return_counts=True)
            for version, count in zip(values.tolist(), counts.tolist(), strict=True):
                left = self._ages[version] - count
                if left:
                    self._ages[version] = left
                else:
                    del self._ages[version]

    def _answer(self, messages: int) -> None:
        self.messages += messages
        if self.once:
            self.instances += messages

    def begun(self, n: int) -> int:
        return self.instances % n

    def in_cohorts(self, ahead: Callable[[int], int] | None) -> None:
        self.updates_before = ahead

    def finished(self, instances: int) -> None:
        """Instances have finished anywhere in the graph."""
        if not self.once:
            self.instances += instances

    def due(self) -> bool:
        """Whether the part should step now."""
        return self.trigger.due(self) and self._young_enough()

    def note_holding(self) -> bool | None:
        """Whether a step is held back, where that has changed since the last call; else None."""
        if self.rules.max_staleness is None or self.holding == self._told_holding:
            return None
        self._told_holding = not self._told_holding
        return self._told_holding

    def step_if_due(self, progress: int) -> StepTaken | None:
        """Take a step if one is due."""
        return self._step(progress) if self.due() else None

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
        if not self.outstanding:
            self._seeing.rest()
        return taken

    def _step(self, progress: int, *, flush: bool = False) -> StepTaken | None:
        self._verdicts.look()
        with self.ownership.taking():
            self.collect()
            rows, divisor = self.rows, self._divisor()
            held = self.rules.max_staleness is not None
            self.over = 0 if flush else self.trigger.carried(self, held=held)
            self.rows = self.instances = self.messages = 0
        self._seeing.turn()
        if self.frozen:
            self._discard_gradient()
        if self.optimizer is None or not rows or self.frozen:
            self._step_ages.clear()
            return None
        gradients = self._gradients()
        if not gradients:
            self._step_ages.clear()
            return None
        self._tame(gradients, divisor)
        if self._wants_ages:
            self.step_delay = mean_age(self._step_ages.counts)
        self.progress = progress
        if not self._offer():
            self._held_rows = rows
            self._step_ages.clear()
            return None
        with self._moving():
            self._optimize(self.optimizer, progress)
        self._step_ages.clear()
        self.ownership.stepped([p.grad for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        if self._scheduler is not None:
            self._scheduler.step()
        return StepTaken(self.name, self.version, rows)

    def step_with(self, gradients: Sequence[Tensor | None], *, own: bool) -> StepTaken | None:
        """Take a step with gradients from elsewhere; what is waiting here goes on waiting.

        Args:
            gradients: One a parameter that learns; None: no gradient. They may be written to.
            own: Whether it stands for a step that was held.
        """
        rows = self._held_rows if own else 0
        if self.optimizer is None or self.frozen:
            return None
        sparse = _takes_sparse(self.optimizer)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.is_sparse and not sparse:
                gradient = gradient.to_dense()
            parameter.grad = gradient
        with self._moving():
            self._optimize(self.optimizer, self.progress)
        for parameter in self.parameters:
            parameter.grad = None
        if own:
            self._step_ages.clear()
            if self._scheduler is not None:
                self._scheduler.step()
        return StepTaken(self.name, self.version, rows)

    @torch.no_grad()
    def overwrite(self, weights: Sequence[Tensor]) -> None:
        """Copy these into the parameters that learn; a version of its own."""
        with self._moving():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)
        self.replaced()

    def forget_optimizer(self) -> None:
        """The optimiser's state becomes that of a new one; learning rates stay."""
        if self.optimizer is not None:
            self.optimizer.state = self.rules.optimizer(self.parameters).state

    def _offer(self) -> bool:
        """Let those who have copies say what to step with; False: the step is held."""
        mine = [p.grad for p in self.parameters]
        chosen = self.ownership.stepping(mine)
        if chosen is mine:
            return True
        for parameter, gradient in zip(self.parameters, chosen or [None] * len(mine), strict=True):
            parameter.grad = gradient
        return chosen is not None

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """The weights become those of the next version."""
        before = self.version
        with self.ownership.moving():
            self._seeing.before_step()
            yield
        if self.version == before:  # else those who share it have been told
            self.version += 1
        self._seeing.after_step()

    def begin(self) -> None:
        """A pass begins."""
        self.ownership.begin()

    @property
    def may_be_seen_by_version(self) -> bool:
        """Whether others may compute with versions of the weights that are not those of now."""
        rules = self.rules
        bounded = rules.max_staleness is not None or rules.window is not None
        return not bounded and not self._wants_ages

    def check_finite(self) -> None:
        """Wait for what the device has to say of the last steps.

        Raises:
            NonFiniteError: A gradient was NaN or infinite.
        """
        self._verdicts.look(wait=True)

    def collect(self) -> None:
        """Take over the gradients that others have handed in; none of them may be adding."""
        self.ownership.collect(self.gradient)

    def abandon(self) -> None:
        """Forget the rows in flight and the gradient that waits: nothing of them comes any more."""
        self.ownership.forget()
        self.collect()
        self._discard_gradient()
        self.rows = self.instances = self.messages = self.over = self.outstanding = 0
        self._ages.clear()
        self._step_ages.clear()
        self._aliases = None
        self._seeing.rest()
        self._verdicts.forget()

    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        if self._aliases is None:
            # ``.data``, not ``detach()``: a detached tensor shares the parameter's version counter,
            # and a step would make every graph that is kept raise, whatever storage it holds.
            self._aliases = {
                p: p.data.requires_grad_(p.requires_grad) for p in self.module.parameters()
            }
        return self._aliases

    def pending_gradients(self) -> dict[str, Tensor]:
        """The gradient that waits for a step, dense, by parameter name; it goes on waiting."""
        self.collect()
        found: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            gradient = self.gradient.take(parameter)
            if gradient is None:
                continue
            if gradient.is_sparse:
                # Rows as they came, not added up: a resumed run adds them in the same order.
                self.gradient.add(parameter, gradient)
                found[f"{name}/indices"] = gradient._indices()[0]
                found[f"{name}/values"] = gradient._values()
            else:
                found[name] = gradient.clone()
                self.gradient.add(parameter, found[name])
        return found

    def check_pending_gradients(self, found: Mapping[str, Tensor]) -> None:
        """Refuse what ``pending_gradients`` of such a part cannot have given.

        Raises:
            CheckpointError: A gradient of another shape or dtype than its parameter, of rows that
                it does not have, or of a parameter that is not there.
        """
        left = dict(found)
        for name, parameter in self.module.named_parameters():
            dense = left.pop(name, None)
            indices, values = left.pop(f"{name}/indices", None), left.pop(f"{name}/values", None)
            if dense is not None:
                _require_tensor(dense, parameter.shape, parameter.dtype, f"gradient/{name}")
            if indices is not None and values is not None and dense is None and parameter.dim():
                n, rows = indices.numel(), parameter.shape[0]
                _require_tensor(indices, (n,), torch.int64, f"gradient/{name}/indices")
                shape = (n, *parameter.shape[1:])
                _require_tensor(values, shape, parameter.dtype, f"gradient/{name}/values")
                if n and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
                    raise CheckpointError(
                        f"the gradient that waits for '{name}' is of rows {int(indices.min())} to "
                        f"{int(indices.max())}, the parameter has {rows}; use another checkpoint"
                    )
            elif indices is not None or values is not None:
                left[f"{name}/..."] = parameter
        if left:
            raise CheckpointError(
                f"gradients wait for {sorted(left)[:3]}, which the part has not, or not so; use "
                "another checkpoint of the run"
            )

    def load_pending_gradients(self, found: Mapping[str, Tensor]) -> None:
        """Put back what ``pending_gradients`` gave, and ``check_pending_gradients`` let pass."""
        for name, parameter in self.module.named_parameters():
            self.gradient.take(parameter)
            if name in found:
                self.gradient.add(parameter, found[name])
            elif f"{name}/indices" in found:
                indices, values = found[f"{name}/indices"], found[f"{name}/values"]
                device = parameter.device
                self.gradient.add_rows(parameter, indices.to(device), values.to(device))

    def take_histogram(self) -> tuple[int, ...]:
        """Gradient rows by staleness since the last call."""
        counts = self.histogram()
        self._histogram.clear()
        return counts

    def histogram(self) -> tuple[int, ...]:
        """The same, and it stays."""
        return self._histogram.to_tuple()

    def load_histogram(self, counts: Iterable[int]) -> None:
        """Put back what ``histogram`` gave."""
        self._histogram.load(counts)

    def peek_staleness(self) -> tuple[float, int]:
        """Sum of ages and rows so far, for a progress line."""
        counts = self._histogram.counts
        return float(counts @ np.arange(counts.size)), int(counts.sum())

    def replaced(self) -> None:
        """The weights have become others, and not by a step."""
        self._seeing.replaced()

    def view_to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What view, delay and limits remember: tensors by name, its own, and JSON."""
        tensors = {f"view/{name}": t for name, t in self._seeing.tensors().items()}
        if self.norms is not None:
            tensors["norm/last"] = torch.tensor(self.norms.last(self.name), dtype=torch.float64)
        if self._compensation is not None:
            held = self._compensation.tensors()
            names = {p: n for n, p in self.module.named_parameters()}
            tensors.update({f"delay/{names[p]}": t for p, t in held.items()})
        return tensors, {
            "view": self._seeing.document(),
            "of": [type(self.view).__name__, type(self.delay).__name__],
            "messages": self.messages,
            "rows_each": self._rows_each,
            "rate_factor": self.rate_factor,
            "step_delay": self.step_delay,
            "step_ages": list(self._step_ages.to_tuple()),
        }

    def check_view(
        self, tensors: Mapping[str, Tensor], document: Any, number: int | None = None
    ) -> ViewEntry:
        """What ``load_view`` takes.

        Args:
            tensors, document: From ``view_to_tensors``.
            number: Of the instance in training that comes next, if it is known.

        Raises:
            CheckpointError, Mismatch: It was that of another view or another delay rule, or the
                tensors are of other shapes.
        """
        entry = read(ViewEntry, document, "view")
        own = (type(self.view).__name__, type(self.delay).__name__)
        if entry.of != own:
            raise CheckpointError(
                f"its view and delay are {entry.of}, those of the session {own}; use the "
                "same, or load with weights_only=True"
            )
        kept, _ = self.view_to_tensors()
        self._seeing.check(_inside(tensors, "view/"), entry.view, number)
        require_like(_inside(tensors, "delay/"), _inside(kept, "delay/"), "delay")
        require_like(_inside(tensors, "norm/"), _inside(kept, "norm/"), "norm")
        return entry

    def load_view(self, tensors: Mapping[str, Tensor], entry: ViewEntry) -> None:
        """Put back what ``view_to_tensors`` gave and ``check_view`` let pass, after the weights."""
        self.messages, self._rows_each = entry.messages, entry.rows_each
        self.rate_factor, self.step_delay = entry.rate_factor, entry.step_delay
        self._step_ages.load(entry.step_ages)
        self._seeing.load(_inside(tensors, "view/"), entry.view)
        if self.norms is not None:
            self.norms.note(self.name, float(tensors["norm/last"]))
        if self._compensation is not None:
            found = _inside(tensors, "delay/")
            named = dict(self.module.named_parameters())
            self._compensation.load({named[name]: t for name, t in found.items()})

    def _young_enough(self) -> bool:
        bound = self.rules.max_staleness
        return bound is None or not self._ages or self.version + 1 - min(self._ages) <= bound

    def _divisor(self) -> float:
        """What the sum is divided by."""
        if self.rules.average == "rows":
            return self.trigger.rows_to_divide_by(self)
        if self.rules.average == "instances":
            return self.trigger.instances_to_divide_by(self)
        return 1

    def _gradients(self) -> list[Tensor]:
        gradients, owners = [], []
        for parameter in self.parameters:
            gradient = self.gradient.take(parameter)
            if gradient is None or not parameter.requires_grad:
                continue
            if gradient.is_sparse and not _takes_sparse(self.optimizer):
                gradient = gradient.to_dense()
            if gradient.is_sparse and self.rules.clip is not None:
                gradient = gradient.coalesce()  # limits are on the sum, not on what it is made of
            dense = gradient._values() if gradient.is_sparse else gradient
            parameter.grad = gradient
            gradients.append(dense)
            owners.append(parameter)
        if self._elsewhere:
            self._check_later(owners, gradients)
        return gradients

    @torch.no_grad()
    def _check_later(self, owners: list[nn.Parameter], gradients: list[Tensor]) -> None:
        """Zero a gradient that is not finite, and have the device say so when it comes to it.

        A look at it now would wait for all that the device has still to do.
        """
        if not gradients:
            return
        bad = ~torch.isfinite(torch.stack([g.sum() for g in gradients]))
        for g in gradients:
            g.masked_fill_(bad.any(), 0)
        names = {p: n for n, p in self.module.named_parameters()}
        version = self.version

        def tell(found: list[bool]) -> None:
            told = [names[p] for p, is_bad in zip(owners, found, strict=True) if is_bad]
            raise self._non_finite(told, version)

        self._verdicts.ask(bad, tell)

    def _tame(self, gradients: list[Tensor], divisor: float) -> None:
        """Divide the sums, and clip what comes of it.

        Raises:
            NonFiniteError: They are NaN or infinite; those on a device have been looked at.
        """
        clip = self.rules.clip or Clip()
        if not self._elsewhere and (clip.norm is None or clip.value is not None):
            known = norm_of(gradients)
            total = sum((float(g.sum()) for g in gradients), 0.0) if known is None else known
            if total - total != 0.0:
                self._refuse_non_finite()
        if clip.value is not None:
            if divisor != 1:
                torch._foreach_div_(gradients, divisor)
            divisor = 1
            for g in gradients:
                g.clamp_(-clip.value, clip.value)
        factor = 1.0
        if clip.norm is not None or self.norms is not None:
            known = None if self._elsewhere else norm_of(gradients)
            if known is None:
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                if self._elsewhere:  # a look at the norm would wait for the device
                    scale = self._scale_there(clip, norm / divisor) / divisor
                    for g in gradients:
                        g.mul_(scale)
                    return
                known = float(norm)
            total = known
            if total - total != 0.0:
                self._refuse_non_finite()
            norm_now = total / divisor
            if self.norms is not None:
                self.norms.note(self.name, norm_now)
                norm_now = self.norms.of_all() if clip.over == "all" else norm_now
            if clip.norm is not None:
                factor = min(1.0, clip.norm / (norm_now + 1e-6))
        if factor != divisor and not scaled_(gradients, factor / divisor):
            torch._foreach_mul_(gradients, factor / divisor)

    def _scale_there(self, clip: Clip, norm: Tensor) -> Tensor | float:
        """What a limit makes of a gradient with this norm, on the device where that is."""
        if self.norms is not None:
            self.norms.note(self.name, norm)
            norm = self.norms.of_all_on(self.device) if clip.over == "all" else norm
        return 1.0 if clip.norm is None else (clip.norm / (norm + 1e-6)).clamp(max=1)

    def _optimize(self, optimizer: Optimizer, progress: int) -> None:
        """A step at the rate of now, and what the rules want to learn from it."""
        factor = 1.0
        if self.rules.schedule is not None:
            factor *= self.rules.schedule(progress)
        if self.delay is not None:
            factor *= self.delay.rate(self._step_ages.counts, self.version)
        self.rate_factor = factor
        for group in optimizer.param_groups:
            if "measured_delay" in group:
                group["measured_delay"] = self.step_delay
        before = {}
        if self._compensation is not None and self._compensation.wants_steps:
            before = {p: p.data.clone() for p in self.parameters}
        self._step_at(optimizer, factor)
        if before and self._compensation is not None:
            self._compensation.stepped(before)

    def _step_at(self, optimizer: Optimizer, factor: float) -> None:
        if factor == 1.0:
            optimizer.step()
            return
        # Set for this step alone, so that a torch scheduler goes on from its own numbers.
        rates = self._set_aside = [group["lr"] for group in optimizer.param_groups]
        self._alterations += 1
        try:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self._alterations += 1

    def _discard_gradient(self) -> None:
        for parameter in self.module.parameters():
            self.gradient.take(parameter)

    def renew(self) -> None:
        """Move the weights to fresh storage: graphs that are kept hold the old one."""
        if self._aliases is not None:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone()
            self._aliases = None

    def _refuse_non_finite(self) -> None:
        names = {p: n for n, p in self.module.named_parameters()}
        bad = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None:
                dense = gradient._values() if gradient.is_sparse else gradient
                if not torch.isfinite(dense).all():
                    bad.append(names[parameter])
            parameter.grad = None
        raise self._non_finite(bad or "its parameters (their sum overflows)", self.version)

    def _non_finite(self, what: Sequence[str] | str, version: int) -> NonFiniteError:
        return NonFiniteError(
            f"part '{self.name}': the gradient of {what} is NaN or infinite after {version} "
            "updates; clip it, lower the learning rate, or look at the instances of this batch"
        )


_CPU = torch.device("cpu")


@final
@dataclass(slots=True)
class _Sum:
    """Counts that might be."""

    rows: int
    instances: int
    messages: int
    over: int


def _on_one_device(name: str, module: nn.Module) -> None:
    found = sorted({str(p.device) for p in module.parameters()})
    if len(found) > 1:
        raise ValueError(
            f"part '{name}': its parameters lie on {', '.join(found)}, and a part lives on one "
            "device; move its module there, or say where: Part(module, device=...)"
        )


def _require_tensor(found: Tensor, shape: Sequence[int], dtype: torch.dtype, called: str) -> None:
    if found.shape != tuple(shape) or found.dtype != dtype:
        raise CheckpointError(
            f"'{called}' has shape {tuple(found.shape)} and dtype {found.dtype}, expected "
            f"{tuple(shape)} and {dtype}; use another checkpoint of the run"
        )


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _takes_sparse(optimizer: Optimizer | None) -> bool:
    """Whether an optimiser steps with sparse gradients; the others get dense ones."""
    if not isinstance(optimizer, (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad)):
        return False
    return not any(g.get("fused") or g.get("foreach") for g in optimizer.param_groups)

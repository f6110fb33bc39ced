"""Parts: who owns weights, and when they move.

    gradients ─► GradientSum ─► due? ─► average, clip, schedule ─► optimiser step ─► version + 1

A part steps by itself when it has seen enough; nothing waits for a global step. ``Part`` is what a
user writes, ``PartState`` what runs.

Source: local updates after min_update_frequency gradients, Gaunt et al. 2017, arXiv:1705.09786;
ours is called ``update_every``, as it is a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from geartrain.errors import NonFiniteError
from geartrain.ir.gradient import GradientSum
from geartrain.ir.message import IntArray
from geartrain.ir.operator import Keep
from geartrain.ir.weights import AbstractWeights
from geartrain.native.transfer import Verdicts
from geartrain.optim.mixer import AbstractMixer, Average

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
Averaging: TypeAlias = Literal["rows", "instances", "none"]


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Step when so many gradient rows have been added (AMPNet's min_update_frequency)."""

    n: int

    def __post_init__(self) -> None:
        _positive("Rows", self.n)


@final
@dataclass(frozen=True, slots=True)
class Instances:
    """Step when so many instances have finished."""

    n: int = 1

    def __post_init__(self) -> None:
        _positive("Instances", self.n)


@final
@dataclass(frozen=True, slots=True)
class Flush:
    """Step only when the session flushes: at the end of an epoch, or when it is told to."""


Trigger: TypeAlias = Rows | Instances | Flush


@final
@dataclass(frozen=True, slots=True)
class Clip:
    """Limit the gradient before a step.

    Args:
        norm: Largest 2-norm over all parameters of the part.
        value: Largest absolute entry; applied before the norm where both are given.

    Raises:
        ValueError: A limit is not positive.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for limit in (self.norm, self.value):
            if limit is not None and not limit > 0:
                raise ValueError(f"{self}: a limit is positive, or None for no limit")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How parts learn; a ``Part`` overrides what it names.

    Args:
        optimizer: Makes the optimiser from parameters: ``partial(torch.optim.Adam, lr=1e-3)``.
        update_every: A number of gradient rows, ``Rows``, ``Instances`` or ``Flush``.
        average: What the summed gradient is divided by: the ``rows`` that it has, the ``instances``
            that finished, or nothing. An update at the end of an epoch that has fewer rows (or
            instances) than ``update_every`` is divided by ``update_every``.
        clip: Limits on the averaged gradient.
        schedule: Factor on the learning rate, from the number of instances finished in training.
        scheduler: Makes a torch scheduler of the part's optimiser; it steps once an update. With a
            ``schedule`` as well, the two multiply.
        max_staleness: A step waits while it would make a row older than so many versions; admission
            pauses meanwhile. None: no bound.

    Raises:
        ValueError: A number is out of range, or ``average`` is none of the three.
        TypeError: ``update_every`` is something else.
    """

    optimizer: MakeOptimizer = torch.optim.Adam
    update_every: int | Trigger = 100
    average: Averaging = "rows"
    clip: Clip | None = None
    schedule: Callable[[int], float] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.update_every, int | Rows | Instances | Flush):
            raise TypeError(
                f"update_every={self.update_every!r}: give a number of gradient rows, Rows(n), "
                "Instances(n) or Flush()"
            )
        self.trigger()
        if self.average not in ("rows", "instances", "none"):
            raise ValueError(f"average={self.average!r}: give 'rows', 'instances' or 'none'")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness}: give 0 or more, or None")

    def trigger(self) -> Trigger:
        return Rows(self.update_every) if isinstance(self.update_every, int) else self.update_every


@final
@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A module, its optimiser and its rules.

    Args:
        module: Its parameters belong to this part alone.
        name: In logs and traces; default: the name of the first node that uses it.
        optimizer, update_every, average, clip, schedule, scheduler, max_staleness: As in ``Rules``;
            None takes the session's.
        keep: What nodes keep for the way back; see ``Stream.through``.
        replicas: Copies of the part on different workers, each with its own optimiser; rows are
            spread over them by instance. ``module`` is the first copy.
        mixer: When and how the copies meet.
        full_precision: Whether its nodes compute in float32 also where the session's precision is
            ``bf16``; rows come and go in bfloat16 all the same.
        device: Where the module is moved to, and where its rows are computed and kept: ``cpu``,
            ``cuda``, ``cuda:1``. None takes the session's.
    """

    module: nn.Module
    name: str | None = None
    optimizer: MakeOptimizer | None = None
    update_every: int | Trigger | None = None
    average: Averaging | None = None
    clip: Clip | None = None
    schedule: Callable[[int], float] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_staleness: int | None = None
    keep: Keep = "auto"
    replicas: int = 1
    mixer: AbstractMixer = field(default_factory=Average)
    full_precision: bool = False
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        _positive("Part(replicas=...)", self.replicas)

    def rules(self, defaults: Rules) -> Rules:
        """The session's rules with this part's own in front."""
        own = {f.name: value for f in fields(Rules) if (value := getattr(self, f.name)) is not None}
        return replace(defaults, **own)


@final
@dataclass(frozen=True, slots=True)
class StepTaken:
    """One optimiser step of a part."""

    part: str
    version: int
    rows: int


class AbstractShare(Protocol):
    """What a part must know of a lane's view of it; see ``geartrain.optim.share``."""

    @property
    def gradient(self) -> GradientSum: ...

    @property
    def guard(self) -> AbstractContextManager[Any]: ...


class AbstractDesk(Protocol):
    """What a part tells of its steps where it has copies; see ``geartrain.optim.replicas``."""

    def stepping(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None: ...

    def stepped(self, gradients: Sequence[Tensor | None]) -> None: ...


@final
class PartState(AbstractWeights):
    """A part at work. One worker owns it; nothing here is locked.

    Args:
        name: Unique among the parts.
        module: Its parameters are changed in place.
        rules: When and how.
        mixer: How it meets its copies.
        device: Where the module is moved to; None: it stays where it is.

    While ``frozen`` is True, gradients pass through the part and its weights stay. Parameters that
    do not require a gradient when the part is made stay for good.

    Raises:
        ValueError: The scheduler wants a metric at every step, or the weights lie on several
            devices.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        rules: Rules,
        mixer: AbstractMixer | None = None,
        device: torch.device | None = None,
    ) -> None:
        if device is not None:
            module.to(device)
        _on_one_device(name, module)
        self.name, self.module, self.rules = name, module, rules
        self.mixer = mixer or Average()
        self.version = 0
        self.rows = 0
        self.instances = 0
        self.frozen = False
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.gradient = GradientSum(module.parameters())
        self.optimizer = rules.optimizer(self.parameters) if self.parameters else None
        self._trigger = rules.trigger()
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
        self._histogram = np.zeros(8, np.int64)
        self._outstanding = 0
        self._ages: dict[int, int] = {}
        self._aliases: dict[nn.Parameter, Tensor] | None = None
        self._told_holding = False
        self._verdicts = Verdicts()
        self._first = next(module.parameters(), None)
        self.shares: Sequence[AbstractShare] = ()
        self.guard: AbstractContextManager[Any] = nullcontext()
        self.desk: AbstractDesk | None = None
        self._held_rows = 0
        self.progress = 0  # instances trained, at the last step

    @property
    def at_rest(self) -> bool:
        """Whether no row of it is in flight."""
        return not self._outstanding

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
        return self._enough() and not self._young_enough()

    def sent(self, rows: int) -> None:
        self._outstanding += rows
        if self.rules.max_staleness is not None:
            self._ages[self.version] = self._ages.get(self.version, 0) + rows

    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        self.rows += rows
        old = self.version - versions
        counts = np.bincount(old, lengths).astype(np.int64)
        if counts.size > self._histogram.size:
            self._histogram = np.concatenate([self._histogram, np.zeros(2 * counts.size, np.int64)])
        self._histogram[: counts.size] += counts
        self.dropped(versions)

    def answered(self, rows: int) -> None:
        self.rows += rows
        self._histogram[0] += rows

    def dropped(self, versions: IntArray) -> None:
        self._outstanding -= versions.size
        if self.rules.max_staleness is not None:
            values, counts = np.unique(versions, return_counts=True)
            for version, count in zip(values.tolist(), counts.tolist(), strict=True):
                left = self._ages[version] - count
                if left:
                    self._ages[version] = left
                else:
                    del self._ages[version]

    def finished(self, instances: int) -> None:
        """Instances have finished anywhere in the graph."""
        self.instances += instances

    def due(self) -> bool:
        """Whether the part should step now."""
        return self._enough() and self._young_enough()

    def note_holding(self) -> bool | None:
        """Whether a step is held back, where that has changed since the last call; else None."""
        if self.rules.max_staleness is None or self.holding == self._told_holding:
            return None
        self._told_holding = not self._told_holding
        return self._told_holding

    def step_if_due(self, progress: int) -> StepTaken | None:
        """``step`` if one is due."""
        return self.step(progress) if self.due() else None

    def step(self, progress: int) -> StepTaken | None:
        """Take an optimiser step with the gradient so far; None if there is none.

        Args:
            progress: Instances finished in training, for the schedule.

        Raises:
            NonFiniteError: The gradient is NaN or infinite; the weights are as they were. On a
                device other than the CPU this is found some steps later, without a wait: a step
                with such a gradient is then taken with zeros in its place.
        """
        self._verdicts.look()
        with self._undisturbed():
            self.absorb_shares()
            rows, instances = self.rows, self.instances
            self.rows = self.instances = 0
        if self.frozen:
            self._discard_gradient()
        if self.optimizer is None or not rows or self.frozen:
            return None
        gradients = self._gradients(self._divisor(rows, instances))
        if not gradients:
            return None
        self._clip(gradients)
        self.progress = progress
        if self.desk is not None and not self._offer(self.desk):
            self._held_rows = rows
            return None
        with self._moving():
            self._optimize(self.optimizer, progress)
        if self.desk is not None:
            self.desk.stepped([p.grad for p in self.parameters])
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
        if own and self._scheduler is not None:
            self._scheduler.step()
        return StepTaken(self.name, self.version, rows)

    @torch.no_grad()
    def overwrite(self, weights: Sequence[Tensor]) -> None:
        """Copy these into the parameters that learn; a version of its own."""
        with self._moving():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)

    def forget_optimizer(self) -> None:
        """The optimiser's state becomes that of a new one; learning rates stay."""
        if self.optimizer is not None:
            self.optimizer.state = self.rules.optimizer(self.parameters).state

    def _offer(self, desk: AbstractDesk) -> bool:
        """Let copies say what to step with; False: the step is held."""
        mine = [p.grad for p in self.parameters]
        chosen = desk.stepping(mine)
        for parameter, gradient in zip(self.parameters, chosen or [None] * len(mine), strict=True):
            parameter.grad = gradient
        return chosen is not None

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """The weights become those of the next version."""
        with self._undisturbed():
            self._protect_kept_graphs()
            yield
            self.version += 1

    def check_finite(self) -> None:
        """Wait for what the device has to say of the last steps.

        Raises:
            NonFiniteError: A gradient was NaN or infinite.
        """
        self._verdicts.look(wait=True)

    def absorb_shares(self) -> None:
        """Take over what lanes have added up; none of them may be computing."""
        for share in self.shares:
            self.gradient.absorb(share.gradient)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """While no lane computes with the weights, or adds a gradient."""
        with ExitStack() as stack:
            for share in self.shares:
                stack.enter_context(share.guard)
            yield

    def abandon(self) -> None:
        """Forget the rows in flight and the gradient that waits: nothing of them comes any more."""
        self.absorb_shares()
        self._discard_gradient()
        self.rows = self.instances = self._outstanding = 0
        self._ages.clear()
        self._aliases = None
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
        self.absorb_shares()
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

    def load_pending_gradients(self, found: Mapping[str, Tensor]) -> None:
        """Put back what ``pending_gradients`` gave."""
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
        self._histogram[:] = 0
        return counts

    def histogram(self) -> tuple[int, ...]:
        """The same, and it stays."""
        return tuple(np.trim_zeros(self._histogram, "b").tolist())

    def load_histogram(self, counts: Iterable[int]) -> None:
        """Put back what ``histogram`` gave."""
        given = np.fromiter(counts, np.int64)
        self._histogram = np.concatenate([given, np.zeros(8, np.int64)])

    def peek_staleness(self) -> tuple[float, int]:
        """Sum of ages and rows so far, for a progress line."""
        ages = np.arange(self._histogram.size)
        return float(self._histogram @ ages), int(self._histogram.sum())

    def _enough(self) -> bool:
        match self._trigger:
            case Rows(n):
                return self.rows >= n
            case Instances(n):
                return self.instances >= n
            case _:
                return False

    def _young_enough(self) -> bool:
        bound = self.rules.max_staleness
        return bound is None or not self._ages or self.version + 1 - min(self._ages) <= bound

    def _divisor(self, rows: int, instances: int) -> float:
        """What the sum is divided by.

        The last update of an epoch has fewer rows than it takes to fall due. It counts for what it
        is, a share of an update: the mean of a handful would be noise at the full rate.
        """
        match self.rules.average, self._trigger:
            case "rows", Rows(n):
                return max(rows, n)
            case "rows", Instances(n):
                return rows * max(1.0, n / max(instances, 1))
            case "rows", _:
                return rows
            case "instances", Instances(n):
                return max(instances, n)
            case "instances", _:
                return max(instances, 1)
            case _:
                return 1

    def _gradients(self, divisor: float) -> list[Tensor]:
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
            if divisor != 1:
                dense.div_(divisor)
            parameter.grad = gradient
            gradients.append(dense)
            owners.append(parameter)
        if self._elsewhere:
            self._check_later(owners, gradients)
            return gradients
        total = sum((float(g.sum()) for g in gradients), 0.0)
        if total - total != 0.0:
            self._refuse_non_finite()
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

    def _clip(self, gradients: list[Tensor]) -> None:
        clip = self.rules.clip
        if clip is None:
            return
        if clip.value is not None:
            for g in gradients:
                g.clamp_(-clip.value, clip.value)
        if clip.norm is not None:
            norm = torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(g) for g in gradients])
            )
            scale = clip.norm / (norm + 1e-6)
            if self._elsewhere:  # a look at the norm would wait for the device
                for g in gradients:
                    g.mul_(scale.clamp(max=1))
            elif (factor := float(scale)) < 1:
                for g in gradients:
                    g.mul_(factor)

    def _optimize(self, optimizer: Optimizer, progress: int) -> None:
        if self.rules.schedule is None:
            optimizer.step()
            return
        # Set for this step alone, so that a torch scheduler goes on from its own numbers.
        rates = [group["lr"] for group in optimizer.param_groups]
        factor = self.rules.schedule(progress)
        try:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _discard_gradient(self) -> None:
        for parameter in self.module.parameters():
            self.gradient.take(parameter)

    def _protect_kept_graphs(self) -> None:
        """A step overwrites weights in place; graphs that are still kept hold the old storage."""
        if self._aliases is not None and self._outstanding:
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


def _on_one_device(name: str, module: nn.Module) -> None:
    found = sorted({str(p.device) for p in module.parameters()})
    if len(found) > 1:
        raise ValueError(
            f"part '{name}': its parameters lie on {', '.join(found)}, and a part lives on one "
            "device; move its module there, or say where: Part(module, device=...)"
        )


def _takes_sparse(optimizer: Optimizer | None) -> bool:
    """Whether an optimiser steps with sparse gradients; the others get dense ones."""
    if not isinstance(optimizer, (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad)):
        return False
    return not any(g.get("fused") or g.get("foreach") for g in optimizer.param_groups)


def _positive(what: str, n: int) -> None:
    if n < 1:
        raise ValueError(f"{what}({n}): give 1 or more")

"""How a part's weights move: the sum of gradients, averaged, limited, and given to the optimiser.

    GradientSum ─► gathered into .grad ─► divided, clipped ─► optimiser at the rate of now

It is asked for a step by ``PartState``, which knows when one is due and who else has the weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from geartrain.device import Verdicts
from geartrain.errors import NonFiniteError, WorkerError
from geartrain.native.steps import norm_of, scaled_
from geartrain.nodes.uncompiled import uncompiled
from geartrain.parts.fresh import takes_sparse
from geartrain.parts.norms import Norm, Norms
from geartrain.parts.optimizers import lie_as_weights, plainly_stepped
from geartrain.parts.rules import Clip, Rules, make_optimizer
from geartrain.parts.told import StepJob, StepTeller, may_be_told


@final
class Stepping:
    """The optimiser of one part, and what is done to gradients before it.

    Args:
        name: Of the part, for messages.
        module: Its parameters are changed in place.
        rules: The part's.

    Attributes:
        parameters: Those that learn.
        optimizer: None where none does.
        scheduler: torch's, or None.
        rate_factor: What learning rates were multiplied by at the last step.
        verdicts: What a device has still to say of gradients.

    Raises:
        ValueError: The optimiser wants a closure, or the scheduler a metric at every step.
        TypeError: What the rules make is no optimiser.
    """

    def __init__(self, name: str, module: nn.Module, rules: Rules) -> None:
        self._name, self._module, self._rules = name, module, rules
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer: Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        self._teller: StepTeller | None = None
        if self.parameters:
            self.optimizer = make_optimizer(name, rules.optimizer, self.parameters)
            self.scheduler = None if rules.scheduler is None else rules.scheduler(self.optimizer)
            self._teller = StepTeller(self.optimizer, self.parameters)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"part '{name}': ReduceLROnPlateau wants a metric, and a part steps without one; "
                "use another scheduler, or schedule="
            )
        self.rate_factor = 1.0
        self.verdicts = Verdicts()
        self._alterations = 0  # of rates, and of those the returns: odd while they are altered
        self._set_aside: list[float] = []
        self._first = next(module.parameters(), None)

    @property
    def elsewhere(self) -> bool:
        """Whether the weights are on another device than the host."""
        return self._first is not None and not self._first.is_cpu

    @property
    def wants_delays(self) -> bool:
        """Whether the optimiser wants to know how old gradients are."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return any("measured_delay" in group for group in groups)

    def rates(self, progress: int) -> list[float]:
        """The learning rate of each group of parameters now, without what ``delay`` takes off.

        Args:
            progress: Instances finished in training, for the schedule.
        """
        factor = self._scheduled(progress)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        while True:  # a step that another thread takes just now has set rates aside
            seen, rates = self._alterations, self._set_aside
            if seen % 2 == 0:
                rates = [float(group["lr"]) for group in groups]
            if seen == self._alterations:
                return [rate * factor for rate in rates]

    @uncompiled()
    def forget(self) -> None:
        """The optimiser's state becomes that of a new one; learning rates stay."""
        if self.optimizer is not None:
            self.optimizer.state = self._rules.optimizer(self.parameters).state

    @uncompiled()
    def adopt(self, other: Stepping) -> None:
        """Remember what that of a copy remembers."""
        if self.optimizer is not None and other.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        if self.scheduler is not None and other.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(other.scheduler.state_dict()))

    def gather(
        self, sums: Sequence[Tensor | None], squares: float | None, version: int
    ) -> tuple[list[Tensor], float | None]:
        """Move gradients from their sums into ``.grad``.

        Args:
            sums: Of each parameter; or nothing at all.
            squares: Of all entries, if they are known.
            version: Of the part, for messages.

        Returns:
            Their dense tensors, or the values of sparse ones; and their 2-norm, if it is known.
        """
        gradients, owners = [], []
        norm = None if squares is None else math.sqrt(squares) if squares >= 0 else math.nan
        for parameter, gradient in zip(self.parameters if sums else (), sums, strict=True):
            if gradient is None:
                continue
            if not parameter.requires_grad:
                norm = None  # it counts gradients that go nowhere
                continue
            if gradient.is_sparse and not takes_sparse(self.optimizer):
                gradient = gradient.to_dense()
            if gradient.is_sparse and self._rules.clip is not None:
                gradient = gradient.coalesce()  # limits are on the sum, not on what it is made of
            parameter.grad = gradient
            gradients.append(gradient._values() if gradient.is_sparse else gradient)
            owners.append(parameter)
        if self.elsewhere and gradients:
            self._check_later(owners, gradients, version)
        return gradients, norm

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Give parameters gradients from elsewhere, which may be written to."""
        sparse = takes_sparse(self.optimizer)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.is_sparse and not sparse:
                gradient = gradient.to_dense()
            parameter.grad = gradient

    def clear(self) -> None:
        """Parameters have no gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def tame(
        self,
        gradients: list[Tensor],
        norm: float | None,
        divisor: float,
        version: int,
        norms: Norms | None,
    ) -> None:
        """Divide the sums, and clip what comes of it.

        Args:
            gradients: Dense, or values of sparse ones.
            norm: Of all of them; None: it is not known yet.
            divisor: Of all of them.
            version: Of the part, for messages.
            norms: Of all parts, where one is limited by them.

        Raises:
            NonFiniteError: They are NaN or infinite; those on a device have been looked at.
        """
        clip = self._rules.clip or Clip()
        if not self.elsewhere and (clip.norm is None or clip.value is not None):
            known = norm_of(gradients) if norm is None else norm
            total = sum((float(g.sum()) for g in gradients), 0.0) if known is None else known
            self._require_finite(total, version)
        if clip.value is not None:
            if divisor != 1:
                torch._foreach_div_(gradients, divisor)
            divisor, norm = 1, None
            for g in gradients:
                g.clamp_(-clip.value, clip.value)
        factor = 1.0
        if clip.norm is not None or norms is not None:
            found = self._norm(gradients) if norm is None else norm
            if isinstance(found, Tensor):  # there; a look at it would wait for the device
                scale = self._scale_there(clip, found / divisor, norms) / divisor
                for g in gradients:
                    g.mul_(scale)
                return
            self._require_finite(found, version)
            factor = self._scale(clip, found / divisor, norms)
        if factor != divisor and not scaled_(gradients, factor / divisor):
            torch._foreach_mul_(gradients, factor / divisor)

    def _norm(self, gradients: list[Tensor]) -> Norm:
        """Of all of them, where they are."""
        known = None if self.elsewhere else norm_of(gradients)
        if known is not None:
            return known
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm if self.elsewhere else float(norm)

    def _scale(self, clip: Clip, norm: float, norms: Norms | None) -> float:
        """What a limit makes of a gradient with this norm."""
        if norms is not None:
            norms.note(self._name, norm)
            norm = norms.of_all() if clip.over == "all" else norm
        return 1.0 if clip.norm is None else min(1.0, clip.norm / (norm + 1e-6))

    def _scale_there(self, clip: Clip, norm: Tensor, norms: Norms | None) -> Tensor | float:
        """The same, on the device where the norm is."""
        if norms is not None:
            norms.note(self._name, norm)
            norm = norms.of_all_on(norm.device) if clip.over == "all" else norm
        return 1.0 if clip.norm is None else (clip.norm / (norm + 1e-6)).clamp(max=1)

    def told(self, sums: Sequence[Tensor | None], progress: int) -> StepJob | None:
        """The step that these sums make, at the rate of now, that others may be taken with; None:
        it is one by itself.

        Args:
            sums: Of the gradients of each parameter.
            progress: Instances finished in training, for the schedule.

        Raises:
            WorkerError: As of ``optimize``.
        """
        job = None if self._teller is None else self._teller.told(sums)
        if job is None:
            return None
        self.rate_factor = factor = self._scheduled(progress)
        if factor == 1.0:
            return job
        settings = {**job.settings, "rate": job.settings["rate"] * factor}
        return job._replace(settings=settings)

    @property
    def may_be_told(self) -> bool:
        """Whether what comes before a step of the optimiser is one factor, and C may take it."""
        clip = self._rules.clip
        plain = clip is None or (clip.value is None and clip.over == "part")
        return plain and may_be_told(self.optimizer)

    def factor(self, norm: float, divisor: float) -> float:
        """What ``told`` sums are multiplied by: divided, and limited by their norm."""
        clip = self._rules.clip
        return (1.0 if clip is None else self._scale(clip, norm / divisor, None)) / divisor

    def optimize(self, progress: int, delayed: float, delay: float) -> None:
        """A step with the gradients of parameters, at the rate of now.

        Args:
            progress: Instances finished in training, for the schedule.
            delayed: A factor on rates for the age of the gradients ...
            delay: ... which is this, in the mean.

        Raises:
            WorkerError: The optimiser or the schedule raised, or the schedule gave no factor.
        """
        assert self.optimizer is not None
        factor = delayed * self._scheduled(progress)
        self.rate_factor = factor
        for group in self.optimizer.param_groups:
            if "measured_delay" in group:
                group["measured_delay"] = delay
        lie_as_weights(self.optimizer)
        try:
            self._step_at(self.optimizer, factor)
        except Exception as error:
            raise self._told(f"{type(self.optimizer).__name__}.step()", error) from error
        # Fused steps, torch's too, are not counted; copies of weights and kept graphs go by it.
        groups = self.optimizer.param_groups
        torch.autograd.graph.increment_version([p for g in groups for p in g["params"]])

    def stepped(self) -> None:
        """A step of the part's own is done: torch schedulers step.

        Raises:
            WorkerError: The scheduler raised.
        """
        if self.scheduler is not None:
            try:
                self.scheduler.step()
            except Exception as error:
                raise self._told(f"{type(self.scheduler).__name__}.step()", error) from error

    def _scheduled(self, progress: int) -> float:
        """The factor of the schedule, if there is one, for so many instances trained.

        Raises:
            WorkerError: It raised, or what it gave is no factor.
        """
        if self._rules.schedule is None:
            return 1.0
        try:
            factor = self._rules.schedule(progress)
        except Exception as error:
            raise self._told(f"schedule({progress})", error) from error
        try:
            found = float(factor)
        except (TypeError, ValueError):
            found = math.nan
        if not 0 <= found < math.inf:
            raise WorkerError(
                f"part '{self._name}': schedule({progress}) gave {factor!r:.80}; it is given the "
                "number of instances trained and gives a factor on the learning rate, 0 or more"
            )
        return found

    def _told(self, what: str, error: Exception) -> WorkerError:
        """An error of what a user has given, which is no fault of the node that just fired."""
        return WorkerError(
            f"{type(error).__name__} in a step of part '{self._name}', of {what}: {error}"
        )

    def _step_at(self, optimizer: Optimizer, factor: float) -> None:
        if factor == 1.0:
            plainly_stepped(optimizer)
            return
        # Set for this step alone, so that a torch scheduler goes on from its own numbers.
        rates = self._set_aside = [group["lr"] for group in optimizer.param_groups]
        self._alterations += 1
        try:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            plainly_stepped(optimizer)
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self._alterations += 1

    @torch.no_grad()
    def _check_later(
        self, owners: list[nn.Parameter], gradients: list[Tensor], version: int
    ) -> None:
        """Zero a gradient that is not finite, and have the device say so when it comes to it.

        A look at it now would wait for all that the device has still to do.
        """
        there = [(p, g) for p, g in zip(owners, gradients, strict=True) if g.numel()]
        if not there:
            return
        # Of all of them at once: a kernel for each would take the host as long as a step.
        largest = torch._foreach_norm([g for _, g in there], math.inf)
        bad = ~torch.isfinite(torch.stack([x.float() for x in largest]))
        some = bad.any()
        for _, g in there:
            g.masked_fill_(some, 0)

        def tell(found: list[bool]) -> None:
            names = {p: n for n, p in self._module.named_parameters()}
            told = [names[p] for (p, _), is_bad in zip(there, found, strict=True) if is_bad]
            raise self._non_finite(told, version)

        self.verdicts.ask(bad, tell)

    def _require_finite(self, total: float, version: int) -> None:
        """Refuse gradients whose sum or norm is not finite."""
        if total - total == 0.0:
            return
        names = {p: n for n, p in self._module.named_parameters()}
        bad = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None:
                dense = gradient._values() if gradient.is_sparse else gradient
                if not torch.isfinite(dense).all():
                    bad.append(names[parameter])
            parameter.grad = None
        raise self._non_finite(bad or "its parameters (their sum overflows)", version)

    def _non_finite(self, what: Sequence[str] | str, version: int) -> NonFiniteError:
        return NonFiniteError(
            f"part '{self._name}': the gradient of {what} is NaN or infinite after {version} "
            "updates; clip it, lower the learning rate, or look at the instances of this batch"
        )

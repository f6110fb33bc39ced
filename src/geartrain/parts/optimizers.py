"""Optimisers for gradients that come late, and torch's own for many small steps.

    FusedAdagrad          torch's Adagrad in one pass each, dense weights and rows of tables alike
    FusedAdam             torch's Adam in one call for all weights
    SpikeCompensatedSGD   a late gradient moves the weights at once as far as it would have by now
    LookAheadSGD          gradients are taken where the momentum leads

They are torch optimisers, for ``Rules(optimizer=partial(...))``, and go without geartrain too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch
from torch.optim.adagrad import adagrad
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from geartrain.bounds import require_number
from geartrain.native.steps import AdagradStep, AdamStep
from geartrain.nodes.unrecorded import Unrecorded
from geartrain.parts.ways import adam_settings, adam_tensors

_Step = TypeVar("_Step", AdagradStep, AdamStep)

_GUARDED: Final = getattr(of_torch, "_use_grad_for_differentiable", None)
_GUARD: Final = None if _GUARDED is None else _GUARDED(lambda: None).__code__
"""Of what torch puts around a step for its compiler, and so that autograd follows one if asked."""


@final
class FusedAdagrad(torch.optim.Adagrad):
    """torch's Adagrad in one call and one pass, also where some gradients are sparse.

    Of the rows of a table torch makes several sparse tensors: its step takes 3.6 times as long
    where 150 rows of 20,000 have a gradient, 5 times where 1000 have, 1.2 where all are dense.
    Arguments and state are those of ``torch.optim.Adagrad`` but for ``foreach``, ``fused`` and
    ``differentiable``. Weights that are not float32 or float64 on the host, and all where there
    are no native kernels, are stepped by torch.

    Args:
        params: Parameters or groups of them.
        lr: Rate.
        lr_decay: The rate is divided by 1 + lr_decay (step - 1).
        weight_decay: Added to a dense gradient, times the weight.
        initial_accumulator_value: Of the sums of squares.
        eps: Added to their root.
        maximize: Step along the gradient, not against it.

    Raises:
        ValueError: A number is out of range, or there is weight decay and a sparse gradient.

    Source: Duchi, Hazan, Singer 2011, JMLR 12:2121-2159.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            maximize=maximize,
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update."""
        with Unrecorded():
            loss = _evaluated(closure)
            for number, group in enumerate(self.param_groups):
                self._step_group(number, group)
            return loss

    def _step_group(self, number: int, group: dict[str, Any]) -> None:
        parameters = group["params"]
        weights, gradients = with_gradients(parameters, [p.grad for p in parameters])
        if not weights:
            return
        sparse = any(g.is_sparse for g in gradients)
        if group["weight_decay"] and sparse:
            raise ValueError(
                f"FusedAdagrad(weight_decay={group['weight_decay']}) and a sparse gradient do "
                "not go together: give the table a group of its own without weight decay"
            )
        states = [self.state[p] for p in weights]
        sums, steps = [s["sum"] for s in states], [s["step"] for s in states]
        step = _known_step(self, number, AdagradStep, (weights, sums, steps))
        if step.suits(gradients):
            step.take(
                gradients,
                rate=float(group["lr"]),
                rate_decay=group["lr_decay"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
            )
            return
        adagrad(
            weights,
            gradients,
            sums,
            steps,
            has_sparse_grad=sparse,
            has_complex=any(p.is_complex() for p in weights),
            **{k: group[k] for k in ("lr", "weight_decay", "lr_decay", "eps", "maximize")},
        )


@final
class FusedAdam(torch.optim.Adam):
    """torch's Adam in one call for all weights: what small parts with frequent updates want.

    A step of ``torch.optim.Adam(fused=True)`` takes 1.3 to 1.6 times as long for the small parts of
    recipes, 1.1 times for a layer of 784 x 784: most of that is what is around its kernel.
    Arguments and state are those of ``torch.optim.Adam(fused=True)``. Weights that are not float32
    or float64 on the host, sparse gradients, and all where there are no native kernels are stepped
    by torch.

    Args:
        params: Parameters or groups of them.
        lr: Rate.
        betas: Decay of the means of gradients and of their squares.
        eps: Added to the root of the squares.
        weight_decay: Added to a gradient, times the weight.
        maximize: Step along the gradient, not against it.

    Raises:
        ValueError: A number is out of range.

    Source: Kingma, Ba 2015, arXiv:1412.6980.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update."""
        with Unrecorded():
            return self._unrecorded_step(closure)

    def _unrecorded_step(self, closure: Callable[[], float] | None) -> float | None:
        loss = _evaluated(closure)
        groups = self.param_groups
        left = [group for k, group in enumerate(groups) if not self._step_group(k, group)]
        if left:
            self.param_groups = left
            try:
                _stepped_as(torch.optim.Adam, self)  # this step has told hooks and profilers
            finally:
                self.param_groups = groups
        return loss

    def _step_group(self, number: int, group: dict[str, Any]) -> bool:
        """Step its weights in C; False, and nothing has happened, where torch is to do it."""
        parameters = group["params"]
        weights, gradients = with_gradients(parameters, [p.grad for p in parameters])
        if not weights:
            return True
        settings, tensors = adam_settings(self, group), adam_tensors(self, group, weights)
        if settings is None or tensors is None:
            return False
        step = _known_step(self, number, AdamStep, tensors)
        if not step.suits(gradients):
            return False
        step.take(gradients, **settings)
        return True


def _known_step(
    optimizer: Optimizer, number: int, kind: type[_Step], tensors: Sequence[Sequence[Tensor]]
) -> _Step:
    """What steps a group, by its number: that of before, if it was for these tensors."""
    known: dict[int, _Step] = optimizer.__dict__.setdefault("_known", {})
    if number not in known or not known[number].fits(tensors):
        known[number] = kind(tensors)
    return known[number]


def with_gradients(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Those parameters that have one, and their gradients."""
    given = [g for g in gradients if g is not None]
    if len(given) == len(parameters):
        return [*parameters], given
    return [p for p, g in zip(parameters, gradients, strict=True) if g is not None], given


def lie_as_weights(optimizer: Optimizer) -> None:
    """Where steps are torch's fused ones, gradients and what is remembered come to lie as their
    weights do: such steps take it for granted, and sums, and what was loaded, lie row by row.

    What is remembered is looked at once: a step writes to it where it lies.
    """
    seen: dict[int, Any] = optimizer.__dict__.setdefault("_lying", {})
    for group in optimizer.param_groups:
        for p in group["params"] if group.get("fused") else ():
            gradient = p.grad
            if gradient is None:
                continue
            lying = _lying_as(p, gradient)
            if lying is not gradient:
                p.grad = lying
            state = optimizer.state.get(p)
            if state and seen.get(id(p)) is not state:
                seen[id(p)] = state
                for name, x in state.items():
                    if isinstance(x, Tensor):
                        state[name] = _lying_as(p, x)


def _lying_as(p: Tensor, x: Tensor) -> Tensor:
    if x.is_sparse or x.stride() == p.stride() or x.shape != p.shape:
        return x
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)


def is_watched(optimizer: Optimizer) -> bool:
    """Whether somebody hears of steps of an optimiser, or wraps them: a hook, a profiler, a
    scheduler."""
    return bool(
        not getattr(type(optimizer).step, "hooked", False)
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


def plainly_stepped(optimizer: Optimizer) -> None:
    """Let an optimiser step, without what torch puts around a step for profilers and hooks where
    there are none: a part of few weights steps in less time than that takes."""
    if is_watched(optimizer):
        optimizer.step()
    else:
        _stepped_as(type(optimizer), optimizer)


def _stepped_as(kind: type[Optimizer], optimizer: Optimizer) -> None:
    """Let it take the step of a kind, without what torch puts around that: for profilers and hooks
    as soon as there is an optimiser of the kind, and for its compiler, which it would import."""
    step: Any = kind.step
    step = step.__wrapped__ if hasattr(step, "hooked") else step
    guarded = _GUARD is not None and getattr(step, "__code__", None) is _GUARD
    if guarded and not optimizer.defaults["differentiable"]:
        with Unrecorded():
            step.__wrapped__(optimizer)
    else:
        step(optimizer)


@final
class SpikeCompensatedSGD(Optimizer):
    """SGD with momentum whose response to a gradient is, from its arrival on, that of no delay.

    v' = m v + g and w' = w - η (a v' + b g), with a = m^D and b = (1 - m^D) / (1 - m). At D = 0 it
    is SGD with momentum.

    Args:
        params: Parameters or groups of them.
        lr: η.
        momentum: m.
        weight_decay: Added to the gradient, times the weight.
        delay: D, in updates; None: the mean staleness of each step's gradients, which a geartrain
            part writes into its groups as ``measured_delay``; 0 elsewhere.

    Raises:
        ValueError: A number is out of range.

    Source: Kosson et al. 2021, arXiv:2003.11666.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        delay: float | None = None,
    ) -> None:
        _require(lr, momentum, weight_decay)
        if delay is not None:
            what = f"SpikeCompensatedSGD(delay={delay!r})"
            require_number(what, delay, "0 or more, or None", least=0)
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "delay": delay,
                "measured_delay": 0.0,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            m = group["momentum"]
            delay = group["measured_delay"] if group["delay"] is None else group["delay"]
            a = m**delay
            b = (1 - a) / (1 - m)
            for p in group["params"]:
                g = _gradient(p, group["weight_decay"])
                if g is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                v = state["momentum_buffer"].mul_(m).add_(g)
                p.add_(v, alpha=-group["lr"] * a)
                if b:
                    p.add_(g, alpha=-group["lr"] * b)
        return loss


@final
class LookAheadSGD(Optimizer):
    """Nesterov's accelerated gradient, weighted for asynchronous pipelines.

    With d = γ (w - w before), w' = w + d - η (1 - γ) ∇f(w + d), the gradient as old as it comes.
    The parameters hold w + d, the point that forwards look from; w is in the state. At γ = 0 it is
    SGD.

    Args:
        params: Parameters or groups of them.
        lr: η.
        momentum: γ; 0.99 for delays of several updates.
        weight_decay: Decoupled: w' loses η λ of the parameters.

    Raises:
        ValueError: A number is out of range.

    Source: Nesterov's method for asynchronous pipelines, arXiv:2505.01099. The same in Adam:
    ``torch.optim.NAdam`` with ``betas=(0.99, 0.999), decoupled_weight_decay=True``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.99,
        weight_decay: float = 0.0,
    ) -> None:
        _require(lr, momentum, weight_decay)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            lr, m = group["lr"], group["momentum"]
            for p in group["params"]:
                g = _gradient(p, 0.0)
                if g is None:
                    continue
                state = self.state[p]
                if "weights" not in state:
                    state["weights"] = p.detach().clone()
                old = state["weights"]
                new = p - lr * (1 - m) * g - lr * group["weight_decay"] * p
                p.copy_(new + m * (new - old))
                old.copy_(new)
        return loss


def _require(lr: float, momentum: float, weight_decay: float) -> None:
    what = f"lr={lr!r}, momentum={momentum!r}, weight_decay={weight_decay!r}"
    wanted = "lr and weight_decay of 0 or more, and 0 <= momentum < 1"
    for value in (lr, weight_decay):
        require_number(what, value, wanted, least=0)
    require_number(what, momentum, wanted, least=0, below=1)


def _evaluated(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _gradient(p: Tensor, weight_decay: float) -> Tensor | None:
    """Dense, with decay; None where none came."""
    if p.grad is None:
        return None
    g = p.grad.to_dense() if p.grad.is_sparse else p.grad
    return g.add(p, alpha=weight_decay) if weight_decay else g

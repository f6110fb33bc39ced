"""What an optimiser will do in the next updates, if its state stays as it is.

    SGD, momentum v     ŵ = w - s η v                         SpecTrain, arXiv:1809.02839
    Adam, AdamW         ŵ = w - s η m̂ / (√v̂ + ε) [- s η λ w]  XPipe, arXiv:1911.04610
    any                 ŵ = w + s (w - w before)              Kosson et al. 2021, arXiv:2003.11666

With a constant gradient and a settled momentum these are the weights s updates later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Leaves: TypeAlias = Mapping[nn.Parameter, Tensor]


def require_predictable(part: str, optimizer: Optimizer | None) -> None:
    """Raises:
    ValueError: The momentum of this optimiser is not known here.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.SGD | torch.optim.Adam):
        return
    raise ValueError(
        f"part '{part}': Predicted(by='momentum') knows SGD, Adam and AdamW, not "
        f"{type(optimizer).__name__}; use Predicted(by='difference')"
    )


@torch.no_grad()
def by_momentum(leaves: Leaves, optimizer: Optimizer | None, factor: float, steps: int) -> None:
    """Write predicted weights into leaves.

    Args:
        leaves: By parameter.
        optimizer: SGD, Adam or AdamW.
        factor: On its learning rates.
        steps: How many updates ahead.
    """
    for p, leaf in leaves.items():
        leaf.data.copy_(p.data)
    if optimizer is None or not steps:
        return
    for group in optimizer.param_groups:
        rate = float(group["lr"]) * factor * steps
        for p in group["params"]:
            state = optimizer.state.get(p)
            if state and p in leaves:
                _move(leaves[p].data, p.data, group, state, rate)


@torch.no_grad()
def by_difference(leaves: Leaves, before: Leaves, steps: int) -> None:
    """The same for any optimiser, from the weights before its last step."""
    for p, leaf in leaves.items():
        torch.lerp(before[p], p.data, 1 + steps, out=leaf.data)


def _move(
    leaf: Tensor, weight: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], rate: float
) -> None:
    sign = -1.0 if not group.get("maximize", False) else 1.0
    velocity = state.get("momentum_buffer")
    if velocity is not None:  # has weight decay in it
        leaf.add_(velocity, alpha=sign * rate)
        return
    if "exp_avg" not in state:
        return
    beta1, beta2 = group["betas"]
    t = float(state["step"])
    second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    scale = (second / (1 - beta2**t)).sqrt_().add_(group["eps"])
    leaf.addcdiv_(state["exp_avg"], scale, value=sign * rate / (1 - beta1**t))
    if group.get("decoupled_weight_decay") and group["weight_decay"]:
        leaf.add_(weight, alpha=-rate * group["weight_decay"])

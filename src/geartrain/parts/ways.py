"""How steps of some optimisers are told to C: settings and tensors, as their ``take`` wants them.

    FusedAdam           its own
    Adam, AdamW, SGD    torch's, of one operator after the other

Whatever else torch's are asked for (``amsgrad``, ``foreach``, ``fused``, numbers that are tensors)
has no way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Final, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from geartrain.native.as_torch import AdamOfTorch, SgdOfTorch
from geartrain.native.steps import AdamStep, AdamTensors

WeightsStep: TypeAlias = AdamStep | AdamOfTorch | SgdOfTorch
Group: TypeAlias = Mapping[str, Any]


class StepWay(NamedTuple):
    """How steps of an optimiser's class are told.

    Args:
        step: What takes them.
        settings: Of such an optimiser, for a group; None: torch is to take its steps.
        tensors: What a step writes, of some weights of a group, kind by kind; None: torch is to
            take it, as it makes what is remembered in the first one.
    """

    step: type[WeightsStep]
    settings: Callable[[Optimizer, Group], dict[str, Any] | None]
    tensors: Callable[[Optimizer, Group, Sequence[Tensor]], Sequence[Sequence[Tensor]] | None]


def adam_settings(_: Optimizer, group: Group) -> dict[str, Any] | None:
    """What steps of a group's weights have in common, as ``AdamStep.take`` wants it."""
    if group["amsgrad"] or isinstance(group["lr"], Tensor):
        return None
    return {
        "rate": group["lr"],
        "betas": tuple(group["betas"]),
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "maximize": group["maximize"],
    }


def adam_tensors(optimizer: Optimizer, _: Group, weights: Sequence[Tensor]) -> AdamTensors | None:
    """What a step of these by Adam writes."""
    states = _states(optimizer, weights)
    if not all(states):
        return None
    return AdamTensors(
        weights,
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [s["step"] for s in states],
    )


def _adam_of_torch(optimizer: Optimizer, group: Group) -> dict[str, Any] | None:
    found = adam_settings(optimizer, group)
    if found is None or not _is_plain(group, found, *found["betas"]):
        return None
    return {**found, "decoupled": group.get("decoupled_weight_decay", type(optimizer) is AdamW)}


def _sgd_of_torch(_: Optimizer, group: Group) -> dict[str, Any] | None:
    found = {"rate": group["lr"], **{name: group[name] for name in _OF_SGD}}
    return found if _is_plain(group, found) else None


def _momenta(
    optimizer: Optimizer, group: Group, weights: Sequence[Tensor]
) -> Sequence[Sequence[Tensor]] | None:
    if not group["momentum"]:
        return (weights,)
    kept = [s.get("momentum_buffer") for s in _states(optimizer, weights)]
    momenta = [m for m in kept if m is not None]
    return (weights, momenta) if len(momenta) == len(weights) else None


def _states(optimizer: Optimizer, weights: Sequence[Tensor]) -> Sequence[Mapping[str, Any]]:
    """What is remembered of some weights; nothing, of those that have not stepped."""
    state = optimizer.state
    if len(state) == len(weights) and all(map(is_, state, weights)):
        return [*state.values()]  # hashes of tensors are slow
    return [state.get(p, {}) for p in weights]


def _is_plain(group: Group, settings: Mapping[str, Any], *more: Any) -> bool:
    """Whether torch would call one operator after the other, with numbers."""
    numbers = *(settings[name] for name in _NUMBERS if name in settings), *more
    another = any(group.get(name) for name in _ANOTHER_WAY)
    return not another and all(isinstance(x, float | int) for x in numbers)


_OF_SGD: Final = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
_NUMBERS: Final = ("rate", "eps", "weight_decay", "momentum", "dampening")
_ANOTHER_WAY: Final = ("foreach", "fused", "capturable", "differentiable")

OF_TORCH: Final[Mapping[type[Any], StepWay]] = {
    Adam: StepWay(AdamOfTorch, _adam_of_torch, adam_tensors),
    AdamW: StepWay(AdamOfTorch, _adam_of_torch, adam_tensors),
    SGD: StepWay(SgdOfTorch, _sgd_of_torch, _momenta),
}
"""Those of torch's own."""

"""What is found out of a module before there are rows: the shapes of what it makes, by tensors that
have nothing else, and whether its ``train()`` leaves a part of it in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.frames.frame import Schema
from geartrain.graph.operator import ROWS
from geartrain.nodes.call import arguments
from geartrain.nodes.chance import generators_kept
from geartrain.nodes.inside import Inside
from geartrain.nodes.stand_in import shell_of, tensors_of


def on_meta(function: Callable[..., Any], args: Sequence[Any]) -> object:
    """What a function makes of tensors that have nothing but shapes."""
    with torch.no_grad(), generators_kept(None):
        if not isinstance(function, nn.Module):
            return function(*args)
        tensors = tensors_of(function)
        made = {id(t): t.detach().to("meta") for t in tensors.values()}  # one for tied ones
        meta = {name: made[id(t)] for name, t in tensors.items()}
        shell = shell_of(function)
        shell.eval()  # shapes are the same, and nothing random is refused
        return torch.func.functional_call(shell, meta, arguments(function, args))


def imagined_inside(schema: Schema) -> Inside:
    """Bundles of which nothing is known but how many there are."""

    def column(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int64, device="meta")

    edges = {name: column(4) for name in schema.edge}
    return Inside(column(2), column(ROWS), edges)


def stays_in_evaluation(inner: nn.Module, module: nn.Module) -> bool:
    """Whether a module inside of another is left there by the other's ``train()``, as where a
    ``train`` of its own keeps it so."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        module.train()
        return not inner.training
    finally:
        for each, mode in modes:
            each.training = mode


def hint_of(function: Callable[..., Any], payload: Sequence[Tensor]) -> str:
    """What may be wrong with rows of such shapes."""
    if payload[0].ndim == 1:
        return (
            "; each row is one number here: what an instance brings has rows along its first "
            "axis, so a single row of k features is (1, k): x[None]"
        )
    if isinstance(function, torch.jit.ScriptModule):
        return (
            "; give the module that it was scripted or traced from: here it gets weights of "
            "its own for every call, and its operators are recorded"
        )
    if isinstance(function, nn.Linear):
        return f"; it wants {function.in_features} features along the last axis"
    return ""

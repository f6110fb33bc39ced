"""Parts as named tensors and JSON, for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from geartrain.errors import CheckpointError
from geartrain.optim.part import PartState
from geartrain.optim.state import (
    load_optimizer_state,
    load_scheduler_state,
    optimizer_state_to_tensors,
    scheduler_state_to_json,
)


def parts_to_tensors(parts: Mapping[str, PartState]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, buffers, optimiser state, gradients that wait for a step; and versions."""
    tensors: dict[str, Tensor] = {}
    document: dict[str, Any] = {}
    for name, part in parts.items():
        for key, value in part.module.state_dict().items():
            tensors[f"{name}/weights/{key}"] = value
        entry: dict[str, Any] = {
            "version": part.version,
            "rows": part.rows,
            "instances": part.instances,
            "optimizer": None,
            "scheduler": None,
        }
        if part.optimizer is not None:
            state, entry["optimizer"] = optimizer_state_to_tensors(part.optimizer)
            tensors.update({f"{name}/optimizer/{key}": value for key, value in state.items()})
        if part.scheduler is not None:
            entry["scheduler"] = scheduler_state_to_json(part.scheduler)
        for key, gradient in part.pending_gradients().items():
            tensors[f"{name}/gradient/{key}"] = gradient
        document[name] = entry
    return tensors, document


def load_parts(
    parts: Mapping[str, PartState],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    weights_only: bool,
    path: str,
) -> None:
    """Put the state of parts back.

    Raises:
        CheckpointError: Other parts, or weights of other names or shapes.
    """
    if set(parts) != set(document):
        raise CheckpointError(
            f"{path}: holds parts {sorted(document)}, the graph has {sorted(parts)}; build the "
            "graph as it was when the checkpoint was written"
        )
    for name, part in parts.items():
        _check_weights(name, part, _inside(tensors, f"{name}/weights/"), path)
    for name, part in parts.items():
        part.module.load_state_dict(_inside(tensors, f"{name}/weights/"))
        if weights_only:
            continue
        entry = document[name]
        part.version, part.rows, part.instances = (
            entry["version"],
            entry["rows"],
            entry["instances"],
        )
        if part.optimizer is not None and entry["optimizer"] is not None:
            state = _inside(tensors, f"{name}/optimizer/")
            load_optimizer_state(part.optimizer, state, entry["optimizer"])
        if part.scheduler is not None and entry["scheduler"] is not None:
            load_scheduler_state(part.scheduler, entry["scheduler"])
        part.load_pending_gradients(_inside(tensors, f"{name}/gradient/"))


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _check_weights(name: str, part: PartState, found: Mapping[str, Tensor], path: str) -> None:
    wanted = part.module.state_dict()
    if set(wanted) != set(found):
        differ = sorted(set(wanted) ^ set(found))
        raise CheckpointError(f"{path}: part '{name}' differs in {differ[:5]}")
    for key, tensor in wanted.items():
        if tensor.shape != found[key].shape:
            raise CheckpointError(
                f"{path}: part '{name}': '{key}' has shape {tuple(found[key].shape)}, the module "
                f"has {tuple(tensor.shape)}"
            )

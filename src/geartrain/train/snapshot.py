"""Parts, and what nodes remember, as named tensors and JSON, for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from geartrain.engine.engine import original_name
from geartrain.errors import CheckpointError
from geartrain.ir.node import Memory
from geartrain.optim.part import PartState
from geartrain.optim.state import (
    load_optimizer_state,
    load_scheduler_state,
    optimizer_state_to_tensors,
    scheduler_state_to_json,
)


def parts_to_tensors(parts: Mapping[str, PartState]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, buffers, optimiser state, gradients that wait for a step; versions and staleness.

    The tensors are the parts' own: write or clone them before the next step.
    """
    tensors: dict[str, Tensor] = {}
    document: dict[str, Any] = {}
    for name, part in parts.items():
        for key, value in part.module.state_dict().items():
            tensors[f"{name}/weights/{key}"] = value
        entry: dict[str, Any] = {
            "version": part.version,
            "rows": part.rows,
            "instances": part.instances,
            "staleness": list(part.histogram()),
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
        held, entry["view"] = part.view_to_tensors()
        tensors.update({f"{name}/{key}": value for key, value in held.items()})
        document[name] = entry
    return tensors, document


def load_parts(
    parts: Mapping[str, PartState],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    weights_only: bool,
    path: str,
) -> None:
    """Put the state of parts back: all of it, or on failure nothing.

    Raises:
        CheckpointError: Other parts, weights of other names or shapes, or another optimiser.
    """
    if set(parts) != set(document):
        raise CheckpointError(
            f"{path}: holds parts {sorted(document)}, the graph has {sorted(parts)}; build the "
            "graph as it was when the checkpoint was written"
        )
    for name, part in parts.items():
        _check_weights(name, part, _inside(tensors, f"{name}/weights/"), weights_only, path)
    if weights_only:
        for name, part in parts.items():
            part.module.load_state_dict(_inside(tensors, f"{name}/weights/"))
            part.replaced()
        return
    own, entries = parts_to_tensors(parts)
    own = {key: tensor.clone() for key, tensor in own.items()}
    try:
        _put(parts, tensors, document, path)
    except BaseException:
        _put(parts, own, entries, path)
        raise


def memories_to_tensors(
    memories: Mapping[str, Memory],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What nodes remember (buffers of replays), by node name."""
    tensors = {
        f"{name}/memory/{key}": tensor
        for name, (found, _) in memories.items()
        for key, tensor in found.items()
    }
    return tensors, {name: document for name, (_, document) in memories.items()}


def tensors_to_memories(
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    names: Sequence[str],
    path: str,
) -> dict[str, Memory]:
    """The reverse.

    Raises:
        CheckpointError: The graph has no such nodes.
    """
    if foreign := sorted(n for n in document if original_name(n) not in names):
        raise CheckpointError(
            f"{path}: holds buffers of {foreign}, the graph replays at {sorted(names)}; build the "
            "graph as it was when the checkpoint was written"
        )
    return {n: (_inside(tensors, f"{n}/memory/"), dict(d)) for n, d in document.items()}


def _put(
    parts: Mapping[str, PartState],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    path: str,
) -> None:
    for name, part in parts.items():
        try:
            _put_one(name, part, tensors, document[name])
        except CheckpointError as error:
            raise CheckpointError(f"{path}: part '{name}': {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: part '{name}': its entry is damaged ({type(error).__name__}: {error}); "
                "use another checkpoint of the run"
            ) from error


def _put_one(
    name: str, part: PartState, tensors: Mapping[str, Tensor], entry: Mapping[str, Any]
) -> None:
    part.abandon()
    part.module.load_state_dict(_inside(tensors, f"{name}/weights/"))
    part.version, part.rows, part.instances = entry["version"], entry["rows"], entry["instances"]
    part.load_histogram(entry["staleness"])
    if part.optimizer is not None and entry["optimizer"] is not None:
        state = _inside(tensors, f"{name}/optimizer/")
        load_optimizer_state(part.optimizer, state, entry["optimizer"])
    if part.scheduler is not None and entry["scheduler"] is not None:
        load_scheduler_state(part.scheduler, entry["scheduler"])
    part.load_pending_gradients(_inside(tensors, f"{name}/gradient/"))
    if (view := entry.get("view")) is not None:
        kinds = tuple(f"{name}/{kind}/" for kind in ("view", "delay", "norm"))
        held = {k: v for k, v in tensors.items() if k.startswith(kinds)}
        part.load_view(_inside(held, f"{name}/"), view)


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _check_weights(
    name: str, part: PartState, found: Mapping[str, Tensor], weights_only: bool, path: str
) -> None:
    wanted = part.module.state_dict()
    if set(wanted) != set(found):
        missing, foreign = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        raise CheckpointError(
            f"{path}: part '{name}' differs: the file lacks {missing[:5] or 'nothing'} and has "
            f"{foreign[:5] or 'nothing'} besides; build the module as it was when it was written"
        )
    for key, tensor in wanted.items():
        if tensor.shape != found[key].shape:
            raise CheckpointError(
                f"{path}: part '{name}': '{key}' has shape {tuple(found[key].shape)}, the module "
                f"has {tuple(tensor.shape)}; build it with the sizes that it had"
            )
        if tensor.dtype != found[key].dtype and not weights_only:
            raise CheckpointError(
                f"{path}: part '{name}': '{key}' is {found[key].dtype}, the module has "
                f"{tensor.dtype}; convert the module, or load with weights_only=True, which casts"
            )

"""What an optimiser and its schedule remember, as tensors and JSON.

    optimizer ─► (tensors, json) ─► file ─► (tensors, json) ─► an optimizer made the same way

Works for every optimiser that keeps torch's contract: state per parameter, options per group.
Parameters are known by their order. A loaded optimiser continues to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from geartrain.errors import CheckpointError
from geartrain.optim.plain import Json, decode, encode

__all__ = [
    "Json",
    "load_optimizer_state",
    "load_scheduler_state",
    "optimizer_state_to_tensors",
    "scheduler_state_to_json",
]


def optimizer_state_to_tensors(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Everything that the optimiser remembers: its state and its groups' options.

    Returns:
        Tensors by name, such as ``state.0.exp_avg`` (parameter 0) or ``groups.1.lr``: the
        optimiser's own, not copies, so write or clone them before the next step. And JSON
        that refers to them. Pass both to ``load_optimizer_state``.

    Raises:
        CheckpointError: An entry of a type that cannot be held; the message names it.
    """
    tensors: dict[str, Tensor] = {}
    packed = optimizer.state_dict()
    name = type(optimizer).__name__
    try:
        state = [[k, encode(v, f"state.{k}", tensors)] for k, v in packed["state"].items()]
        groups = [encode(g, f"groups.{i}", tensors) for i, g in enumerate(packed["param_groups"])]
    except CheckpointError as error:
        raise CheckpointError(f"optimizer {name}: {error}") from error
    return tensors, {
        "class": name,
        "parameters": _parameters_to_json(optimizer),
        "state": state,
        "groups": groups,
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], document: Mapping[str, Json]
) -> None:
    """Give the optimiser the state and the options that another one had.

    Tensors are copied and move to where torch puts them: to their parameter's device, a step
    count to wherever the options want it. They keep the dtype they had, unless the parameter
    has another dtype than then. On failure the optimiser is as it was.

    Args:
        optimizer: Of the same class, with as many groups and parameters, of the same shapes in
            the same order. Its options (learning rate and so on) are replaced.
        tensors: As ``optimizer_state_to_tensors`` returned them; others may be among them.
        document: Its JSON.

    Raises:
        CheckpointError: The state is that of other parameters or of another class, or damaged.
    """
    name = type(optimizer).__name__
    _require_class("optimizer", name, document)
    _require_parameters(optimizer, name, document)
    state = _decode_state(name, tensors, document)
    groups = _decode_groups(optimizer, name, tensors, document)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _undo_casts(optimizer, state, document)


def scheduler_state_to_json(scheduler: LRScheduler) -> dict[str, Json]:
    """What a learning-rate schedule remembers; pass it to ``load_scheduler_state``.

    Functions are not part of it (torch leaves them out): make the new schedule with the same.

    Raises:
        CheckpointError: An entry that JSON cannot hold; the message names it.
    """
    name = type(scheduler).__name__
    try:
        return {"class": name, "state": encode(scheduler.state_dict(), "state")}
    except CheckpointError as error:
        raise CheckpointError(f"scheduler {name}: {error}") from error


def load_scheduler_state(scheduler: LRScheduler, document: Mapping[str, Json]) -> None:
    """Set a schedule to where another of its class was; load its optimiser's state as well.

    Raises:
        CheckpointError: The state is that of another class, or damaged.
    """
    name = type(scheduler).__name__
    _require_class("scheduler", name, document)
    state = decode(document.get("state"), f"scheduler {name}")
    if not isinstance(state, dict):
        raise CheckpointError(
            f"scheduler {name}: its state is a {type(state).__name__}; expected a dict. Use a "
            f"document made by scheduler_state_to_json"
        )
    scheduler.load_state_dict(state)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _parameters_to_json(optimizer: torch.optim.Optimizer) -> list[Json]:
    return [{"shape": list(p.shape), "dtype": str(p.dtype)} for p in _parameters(optimizer)]


def _require_class(what: str, name: str, document: Mapping[str, Json]) -> None:
    if document.get("class") != name:
        raise CheckpointError(
            f"{what} {name}: the state is that of {document.get('class')!r}; expected {name!r}. "
            f"Make the {what} that the checkpoint was written with, or start it afresh"
        )


def _require_parameters(
    optimizer: torch.optim.Optimizer, name: str, document: Mapping[str, Json]
) -> None:
    remedy = "Build the model as it was when the checkpoint was written, parameters in that order"
    saved, own = _list(document, "parameters", name), _parameters(optimizer)
    if len(saved) != len(own):
        raise CheckpointError(
            f"optimizer {name}: the state is that of {len(saved)} parameters, the optimizer has "
            f"{len(own)}. {remedy}"
        )
    for index, (entry, parameter) in enumerate(zip(saved, own, strict=True)):
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        if shape != list(parameter.shape):
            raise CheckpointError(
                f"optimizer {name}: the state of parameter {index} is that of shape {shape}, the "
                f"parameter has {list(parameter.shape)}. {remedy}"
            )


def _decode_state(
    name: str, tensors: Mapping[str, Tensor], document: Mapping[str, Json]
) -> dict[int | str, Any]:
    state: dict[int | str, Any] = {}
    for pair in _list(document, "state", name):
        match pair:
            case [int() | str() as key, value]:
                state[key] = decode(value, f"optimizer {name}, state.{key}", tensors)
            case _:
                raise CheckpointError(
                    f"optimizer {name}: a state entry is {pair!r:.80}; expected a pair of a "
                    f"parameter's number and its state. Use the document as it was written"
                )
    return state


def _decode_groups(
    optimizer: torch.optim.Optimizer,
    name: str,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Json],
) -> list[dict[str, Any]]:
    groups = [
        decode(group, f"optimizer {name}, groups.{i}", tensors)
        for i, group in enumerate(_list(document, "groups", name))
    ]
    saved = [g.get("params") if isinstance(g, dict) else None for g in groups]
    own = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if saved != own:
        raise CheckpointError(
            f"optimizer {name}: the state has the parameters {saved} in its groups, the "
            f"optimizer has {own}. Make the groups as they were when the checkpoint was written"
        )
    return [group for group in groups if isinstance(group, dict)]


def _list(document: Mapping[str, Json], key: str, name: str) -> Sequence[Json]:
    value = document.get(key)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CheckpointError(
            f"optimizer {name}: {key!r} in its document is a {type(value).__name__}; expected a "
            f"list. Use a document made by optimizer_state_to_tensors"
        )
    return value


def _undo_casts(
    optimizer: torch.optim.Optimizer,
    state: Mapping[int | str, Any],
    document: Mapping[str, Json],
) -> None:
    # ``load_state_dict`` casts floating state to its parameter's dtype: float32 running products
    # beside bfloat16 weights would come back rounded, and float64 runs would gain digits.
    for index, (parameter, entry) in enumerate(
        zip(_parameters(optimizer), _list(document, "parameters", ""), strict=True)
    ):
        same = isinstance(entry, Mapping) and entry.get("dtype") == str(parameter.dtype)
        if same and index in state:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], state[index])


def _as_saved(now: Any, saved: Any) -> Any:
    if isinstance(now, Tensor) and isinstance(saved, Tensor):
        return saved.to(now.device) if now.dtype != saved.dtype else now
    if isinstance(now, dict) and isinstance(saved, dict):
        return {key: _as_saved(value, saved.get(key)) for key, value in now.items()}
    if isinstance(now, list | tuple) and isinstance(saved, list | tuple):
        return type(saved)(_as_saved(a, b) for a, b in zip(now, saved, strict=True))
    # It also takes a string for a collection of items to cast.
    return saved if isinstance(saved, str) else now

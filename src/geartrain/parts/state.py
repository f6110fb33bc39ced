"""What an optimiser and its schedule remember, as tensors and JSON.

    optimizer ─► (tensors, json) ─► file ─► (tensors, json) ─► an optimizer made the same way

Works for every optimiser that keeps torch's contract: state per parameter, options per group.
Parameters are known by their order. A loaded optimiser continues to the last bit.

A file may come from anybody, and steps in C write where the state says. So all of it is checked
before any of it is loaded: each entry against what an optimiser of this class, with these options,
makes of such a parameter (``geartrain.parts.fresh``). Of a class that is neither torch's nor ours
nothing is known but what it has in common with the one of these that it is derived from.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from geartrain.codec import Json, decode, encode, require_like
from geartrain.errors import CheckpointError
from geartrain.nodes.uncompiled import uncompiled
from geartrain.parts.fresh import Made, made_of, require_state

__all__ = [
    "Json",
    "OptimizerState",
    "check_optimizer_state",
    "check_scheduler_state",
    "load_optimizer_state",
    "load_scheduler_state",
    "optimizer_state_to_tensors",
    "scheduler_state_to_json",
]


@uncompiled()
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


@final
@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What ``check_optimizer_state`` has found in order; its tensors are copies.

    Args:
        state: By parameter's number.
        groups: Options, and ``params``.
        dtypes: Of the parameters when it was written.
    """

    state: Mapping[int | str, Any]
    groups: Sequence[Mapping[str, Any]]
    dtypes: Sequence[str]


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], document: Mapping[str, Json]
) -> None:
    """Give the optimiser the state and the options that another one had.

    Tensors are copied and move to where torch puts them: to their parameter's device, a step
    count to wherever the options want it. They keep the dtype they had, unless the parameter
    has another dtype than then. On failure the optimiser is as it was.

    Args:
        optimizer: Of the same class, with as many groups and parameters, of the same shapes in
            the same order. Its options (learning rate and so on) are replaced, but for those that
            say how torch computes (``foreach``, ``fused``, ``capturable``, ``differentiable``).
        tensors: As ``optimizer_state_to_tensors`` returned them; others may be among them.
        document: Its JSON.

    Raises:
        CheckpointError: The state is that of other parameters or of another class, or damaged.
    """
    put_optimizer_state(optimizer, check_optimizer_state(optimizer, tensors, document))


def check_optimizer_state(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Json],
    sparse: Collection[Tensor] = (),
) -> OptimizerState:
    """The state that ``load_optimizer_state`` would load; nothing is changed.

    Args:
        optimizer: That is to go on with it.
        tensors, document: As ``optimizer_state_to_tensors`` gave them.
        sparse: Parameters whose gradients are rows.

    Raises:
        CheckpointError: The state is that of other parameters or of another class, or damaged.
    """
    name = type(optimizer).__name__
    _require_class("optimizer", name, document)
    if foreign := sorted(set(document) - {"class", "parameters", "state", "groups"}):
        raise CheckpointError(f"optimizer {name}: its document has {foreign[:3]} besides")
    dtypes = _require_parameters(optimizer, name, document)
    groups = _decode_groups(optimizer, name, tensors, document)
    state = _decode_state(name, tensors, document)
    _require_states(optimizer, name, state, groups, dtypes, sparse)
    return OptimizerState(state, groups, dtypes)


@uncompiled()
def put_optimizer_state(optimizer: torch.optim.Optimizer, found: OptimizerState) -> None:
    """Load what ``check_optimizer_state`` has found for this optimiser."""
    groups = [dict(group) for group in found.groups]
    optimizer.load_state_dict({"state": dict(found.state), "param_groups": groups})
    # ``load_state_dict`` casts floating state to its parameter's dtype: float32 running products
    # beside bfloat16 weights would come back rounded, and float64 runs would gain digits.
    both = zip(_parameters(optimizer), found.dtypes, strict=True)
    for index, (parameter, dtype) in enumerate(both):
        if dtype == str(parameter.dtype) and index in found.state:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], found.state[index])


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
    scheduler.load_state_dict(check_scheduler_state(scheduler, document))


def check_scheduler_state(scheduler: LRScheduler, document: Mapping[str, Json]) -> dict[str, Any]:
    """The state that ``load_scheduler_state`` would load; nothing is changed.

    Raises:
        CheckpointError: The state is that of another class, or damaged.
    """
    name = type(scheduler).__name__
    _require_class("scheduler", name, document)
    if foreign := sorted(set(document) - {"class", "state"}):
        raise CheckpointError(f"scheduler {name}: its document has {foreign[:3]} besides")
    place = f"scheduler {name}"
    state = decode(document.get("state"), place)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{place}: its state is a {type(state).__name__}; expected a dict. Use a "
            f"document made by scheduler_state_to_json"
        )
    # As it would be written: ``load_state_dict`` takes any key for an attribute to overwrite.
    own = decode(encode(scheduler.state_dict(), "state"), place)
    require_like(state, own, place)
    _try_scheduler(scheduler, state, place)
    return state


def _try_scheduler(scheduler: LRScheduler, state: Mapping[str, Any], place: str) -> None:
    """Let a copy take a step from there, beside an optimiser of its own."""
    if not _may_be_tried(scheduler):
        return
    optimizer = scheduler.optimizer

    def step() -> None:
        """As torch marks it: else a step of the scheduler warns."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    aside = SimpleNamespace(
        param_groups=[{**group, "params": []} for group in optimizer.param_groups],
        defaults=dict(optimizer.defaults),
        step=step,
        _opt_called=True,
    )
    for group in aside.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()
    twin = copy.deepcopy(scheduler, {id(optimizer): aside})
    try:
        twin.load_state_dict(copy.deepcopy(dict(state)))
        twin.step()
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"{place}: a schedule cannot go on from this state ({type(error).__name__}: {error}). "
            "The document was edited: use another checkpoint of the run"
        ) from error


def _may_be_tried(scheduler: Any) -> bool:
    """Whether it is torch's own, and calls nothing of the user's: that must not be done twice."""
    if not type(scheduler).__module__.startswith("torch.") or isinstance(scheduler, _WITH_CALLS):
        return False
    inner = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "_scale_fn_custom", None) is None and all(map(_may_be_tried, inner))


_WITH_CALLS: Final = (
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.ReduceLROnPlateau,  # steps with a metric
)


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
) -> list[str]:
    """Returns the dtypes that they had."""
    remedy = "Build the model as it was when the checkpoint was written, parameters in that order"
    saved, own = _list(document, "parameters", name), _parameters(optimizer)
    if len(saved) != len(own):
        raise CheckpointError(
            f"optimizer {name}: the state is that of {len(saved)} parameters, the optimizer has "
            f"{len(own)}. {remedy}"
        )
    dtypes: list[str] = []
    for index, (entry, parameter) in enumerate(zip(saved, own, strict=True)):
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        if shape != list(parameter.shape) or not _are_whole(shape):
            raise CheckpointError(
                f"optimizer {name}: the state of parameter {index} is that of shape {shape}, the "
                f"parameter has {list(parameter.shape)}. {remedy}"
            )
        dtype = entry.get("dtype") if isinstance(entry, Mapping) else None
        if not isinstance(dtype, str) or not dtype.startswith("torch."):
            raise CheckpointError(
                f"optimizer {name}: the state of parameter {index} is that of dtype {dtype!r:.40}, "
                f"the parameter has {parameter.dtype}. {remedy}"
            )
        dtypes.append(dtype)
    return dtypes


def _are_whole(shape: object) -> bool:
    return isinstance(shape, list) and all(type(size) is int for size in shape)


def _decode_state(
    name: str, tensors: Mapping[str, Tensor], document: Mapping[str, Json]
) -> dict[int | str, Any]:
    state: dict[int | str, Any] = {}
    for pair in _list(document, "state", name):
        match pair:
            case [int() | str() as key, value] if key not in state and not isinstance(key, bool):
                state[key] = decode(value, f"optimizer {name}, state.{key}", tensors)
            case _:
                raise CheckpointError(
                    f"optimizer {name}: a state entry is {pair!r:.80}; expected a pair of a "
                    f"parameter's number and its state, each number once. Use the document as it "
                    "was written"
                )
    return state


def _require_states(
    optimizer: torch.optim.Optimizer,
    name: str,
    state: Mapping[int | str, Any],
    groups: Sequence[Mapping[str, Any]],
    dtypes: Sequence[str],
    sparse: Collection[Tensor],
) -> None:
    """Each parameter's entries are those that an optimiser with these options makes of it."""
    seen: dict[tuple[Any, ...], Made | None] = {}
    rows = {id(parameter) for parameter in sparse}
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        options = {k: v for k, v in groups[number].items() if k != "params"}
        for parameter in group["params"]:
            by_rows = id(parameter) in rows
            kind = (number, parameter.shape, parameter.dtype, parameter.device, by_rows)
            if kind not in seen:
                place = f"optimizer {name}"
                seen[kind] = made_of(optimizer, options, parameter, place, sparse=by_rows)
            place, made = f"optimizer {name}, state.{index}", seen[kind]
            same = dtypes[index] == str(parameter.dtype)
            require_state(state.get(index, {}), made, place, optimizer.state.get(parameter), same)
            index += 1
    if foreign := [k for k in state if isinstance(k, int) and not 0 <= k < index]:
        raise CheckpointError(
            f"optimizer {name}: it has state of parameter {foreign[0]}, expected 0 to {index - 1}. "
            "Use the document as it was written"
        )


@uncompiled()
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
    if saved != own or not all(type(n) is int for some in saved for n in some):
        raise CheckpointError(
            f"optimizer {name}: the state has the parameters {saved!r:.80} in its groups, the "
            f"optimizer has {own!r:.80}. Make the groups as they were when the checkpoint was "
            "written"
        )
    return [
        _options(group, mine, f"optimizer {name}, groups.{i}")
        for i, (group, mine) in enumerate(zip(groups, optimizer.param_groups, strict=True))
        if isinstance(group, dict)
    ]


def _options(found: Mapping[Any, Any], own: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A group's options; what is missing, as in files of other versions of torch, is our own."""
    if foreign := [k for k in found if k not in own]:
        raise CheckpointError(
            f"'{place}' has an option {foreign[0]!r:.40}, which the optimizer has not. Make the "
            "optimizer as it was when the checkpoint was written"
        )
    options = {k: found.get(k, mine) for k, mine in own.items()} | {"params": found["params"]}
    for key, value in options.items():
        if key in _SWITCHES:
            if not isinstance(value, bool | None):
                raise CheckpointError(f"'{place}.{key}' is {value!r:.40}, expected True or False")
            options[key] = own[key]
        elif key != "params":
            require_like(value, own[key], f"{place}.{key}")
            _require_fits(value, f"{place}.{key}")
    return options


def _require_fits(value: Any, place: str) -> None:
    """Refuse a number that a step could not multiply weights with, float32 as they mostly are."""
    most = torch.finfo(torch.float32).max
    if isinstance(value, float) and not abs(value) <= most:
        raise CheckpointError(
            f"'{place}' is {value:g}, expected a number of at most {most:.1e}, as float32 "
            "has them. Use the document as it was written"
        )


_SWITCHES: Final = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how torch computes, on which device: as here, not as there."""


def _list(document: Mapping[str, Json], key: str, name: str) -> Sequence[Json]:
    value = document.get(key)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CheckpointError(
            f"optimizer {name}: {key!r} in its document is a {type(value).__name__}; expected a "
            f"list. Use a document made by optimizer_state_to_tensors"
        )
    return value


def _as_saved(now: Any, saved: Any) -> Any:
    if isinstance(now, Tensor) and isinstance(saved, Tensor):
        return saved.to(now.device) if now.dtype != saved.dtype else now
    if isinstance(now, dict) and isinstance(saved, dict):
        return {key: _as_saved(value, saved.get(key)) for key, value in now.items()}
    if isinstance(now, list | tuple) and isinstance(saved, list | tuple):
        return type(saved)(_as_saved(a, b) for a, b in zip(now, saved, strict=True))
    # It also takes a string for a collection of items to cast.
    return saved if isinstance(saved, str) else now

"""Parts as named tensors and JSON, for a checkpoint or another process, and back."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from geartrain.codec import decode, require_like
from geartrain.errors import CheckpointError
from geartrain.frames.tables import sparse_tables
from geartrain.nodes.uncompiled import uncompiled
from geartrain.parts.extra import copied, renew_extra, state_of, state_to_tensors
from geartrain.parts.looking import ViewEntry, inside
from geartrain.parts.part import PartState
from geartrain.parts.pending import check_gradients
from geartrain.parts.state import (
    OptimizerState,
    check_optimizer_state,
    check_scheduler_state,
    optimizer_state_to_tensors,
    put_optimizer_state,
    scheduler_state_to_json,
)
from geartrain.schema import Count, Mismatch, read


def parts_to_tensors(parts: Mapping[str, PartState]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, buffers, optimiser state, gradients that wait for a step; versions and staleness.

    The tensors are the parts' own: write or clone them before the next step.
    """
    tensors: dict[str, Tensor] = {}
    document: dict[str, Any] = {}
    for name, part in parts.items():
        state, extra = state_to_tensors(part.module, name)
        tensors.update(state)
        entry: dict[str, Any] = {
            "version": part.version,
            "rows": part.counting.rows,
            "instances": part.counting.instances,
            "over": part.counting.over,
            "staleness": list(part.histogram()),
            "optimizer": None,
            "scheduler": None,
            "extra": extra,
        }
        if part.optimizer is not None:
            state, entry["optimizer"] = optimizer_state_to_tensors(part.optimizer)
            tensors.update({f"{name}/optimizer/{key}": value for key, value in state.items()})
        if part.scheduler is not None:
            entry["scheduler"] = scheduler_state_to_json(part.scheduler)
        for key, gradient in part.pending_gradients().items():
            tensors[f"{name}/gradient/{key}"] = gradient
        held, entry["view"] = view_to_tensors(part)
        tensors.update({f"{name}/{key}": value for key, value in held.items()})
        document[name] = entry
    return tensors, document


def view_to_tensors(part: PartState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What view, delay and limits of a part remember: tensors by name, its own, and JSON."""
    tensors = part.looking.tensors()
    if part.norms is not None:
        tensors["norm/last"] = torch.tensor(part.norms.last(part.name), dtype=torch.float64)
    return tensors, {
        "view": part.looking.seeing.document(),
        "of": list(part.looking.of),
        "messages": part.counting.messages,
        "rows_each": part.looking.rows_each,
        "rate_factor": part.stepping.rate_factor,
        "step_delay": part.step_delay,
        "step_ages": list(part.counting.step_ages.to_tuple()),
    }


def check_view(
    part: PartState, tensors: Mapping[str, Tensor], document: Any, number: int | None = None
) -> ViewEntry:
    """What ``load_view`` takes.

    Args:
        part: That is to remember it.
        tensors, document: From ``view_to_tensors``.
        number: Of the instance in training that comes next, if it is known.

    Raises:
        CheckpointError, Mismatch: It was that of another view or another delay rule, or the
            tensors are of other shapes.
    """
    entry = part.looking.check(tensors, document, number)
    kept, _ = view_to_tensors(part)
    require_like(inside(tensors, "norm/"), inside(kept, "norm/"), "norm")
    return entry


def load_view(part: PartState, tensors: Mapping[str, Tensor], entry: ViewEntry) -> None:
    """Put back what ``view_to_tensors`` gave and ``check_view`` let pass, after the weights."""
    part.counting.messages = entry.messages
    part.counting.step_ages.load(entry.step_ages)
    part.stepping.rate_factor, part.step_delay = entry.rate_factor, entry.step_delay
    part.looking.load(tensors, entry)
    if part.norms is not None:
        part.norms.note(part.name, float(tensors["norm/last"]))


@final
@dataclass(frozen=True, slots=True)
class PartEntry:
    """A part besides its tensors, as JSON has it."""

    version: Count
    rows: Count
    instances: Count
    staleness: Sequence[Count]
    optimizer: Mapping[str, Any] | None
    scheduler: Mapping[str, Any] | None
    view: Mapping[str, Any] | None = None
    over: Count = 0  # of what the trigger counts; not in runs from before updates counted it
    extra: Mapping[str, Any] | None = None  # of a module, besides tensors; not in earlier runs


@final
@dataclass(frozen=True, slots=True)
class FoundPart:
    """What ``check_parts`` has found in order of one part."""

    weights: Mapping[str, Any]
    entry: PartEntry
    optimizer: OptimizerState | None
    scheduler: Mapping[str, Any] | None
    gradients: Mapping[str, Tensor]
    held: Mapping[str, Tensor]
    view: ViewEntry | None


def check_weights(
    parts: Mapping[str, PartState], tensors: Mapping[str, Tensor], document: Any, path: str
) -> dict[str, dict[str, Any]]:
    """The weights that would be loaded, by part; nothing is changed.

    Raises:
        CheckpointError: Other parts, or weights of other names or shapes.
    """
    _require_names(parts, document, path)
    found = {name: _state_of(name, tensors, document[name], path) for name in parts}
    for name, part in parts.items():
        _check_weights(name, part, found[name], True, path)
    return found


def _state_of(name: str, tensors: Mapping[str, Tensor], entry: Any, path: str) -> dict[str, Any]:
    """What a part's module would be given."""
    try:
        own = entry.get("extra") or {} if isinstance(entry, Mapping) else {}
        return state_of(inside(tensors, f"{name}/"), own)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: part '{name}': {error}") from error


def put_weights(parts: Mapping[str, PartState], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Load what ``check_weights`` let pass, or on failure nothing."""
    before = {name: copied(part.module.state_dict()) for name, part in parts.items()}
    try:
        _put_weights(parts, found)
    except BaseException:
        _put_weights(parts, before)
        raise


def _put_weights(parts: Mapping[str, PartState], found: Mapping[str, Mapping[str, Any]]) -> None:
    for name, part in parts.items():
        part.module.load_state_dict(found[name])
        part.replaced()


def check_parts(
    parts: Mapping[str, PartState],
    tensors: Mapping[str, Tensor],
    document: Any,
    path: str,
    numbers: Mapping[str, int] | None = None,
) -> dict[str, FoundPart]:
    """All that would be loaded, by part; nothing is changed.

    Args:
        parts: As they are.
        tensors, document: From ``parts_to_tensors``.
        path: For messages.
        numbers: By part, of the instance in training that comes next.

    Raises:
        CheckpointError: Other parts, weights of other names or shapes, another optimiser, or
            anything that the parts as they are would not have written.
    """
    _require_names(parts, document, path)
    for name, part in parts.items():
        state = _state_of(name, tensors, document[name], path)
        _check_weights(name, part, state, False, path)
    found: dict[str, FoundPart] = {}
    for name, part in parts.items():
        own = inside(tensors, f"{name}/")
        try:
            number = None if numbers is None else numbers[name]
            found[name] = _check_one(part, own, document[name], number)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: part '{name}': {error}") from error
        except Mismatch as error:
            raise CheckpointError(
                f"{path}: part '{name}': its entry is damaged ({error}); use another checkpoint of "
                "the run"
            ) from error
    return found


def put_parts(parts: Mapping[str, PartState], found: Mapping[str, FoundPart]) -> None:
    """Load what ``check_parts`` let pass, or on failure (no memory is left) nothing."""
    before = {name: _copied(part) for name, part in parts.items()}
    try:
        _put(parts, found)
    except BaseException:
        _put(parts, before)
        raise


@uncompiled()
def _copied(part: PartState) -> FoundPart:
    """The part as it is."""
    tensors, document = parts_to_tensors({"": part})
    kept = {key.removeprefix("/"): tensor for key, tensor in copied(tensors).items()}
    entry = PartEntry(**document[""])
    optimizer = scheduler = None
    if part.optimizer is not None:
        packed = copy.deepcopy(part.optimizer.state_dict())
        optimizer = OptimizerState(
            packed["state"],
            packed["param_groups"],
            [str(p.dtype) for group in part.optimizer.param_groups for p in group["params"]],
        )
    if part.scheduler is not None:
        scheduler = copy.deepcopy(part.scheduler.state_dict())
    return FoundPart(
        state_of(kept, entry.extra),
        entry,
        optimizer,
        scheduler,
        inside(kept, "gradient/"),
        _of_rules(kept),
        ViewEntry(**document[""]["view"]),
    )


def _of_rules(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that view, delay and limits remember."""
    return {k: x for k, x in tensors.items() if k.startswith(("view/", "delay/", "norm/"))}


def require_no_others(
    tensors: Iterable[str], parts: Iterable[str], nodes: Iterable[str], path: str
) -> None:
    """Refuse tensors that nobody has looked at.

    Args:
        tensors: Names in a file.
        parts, nodes: Those whose tensors have been looked at.

    Raises:
        CheckpointError: There is one.
    """
    known = tuple(
        [f"{name}/{kind}/" for name in parts for kind in _KINDS]
        + [f"{name}/memory/" for name in nodes]
    )
    if foreign := sorted(name for name in tensors if not name.startswith(known)):
        raise CheckpointError(
            f"{path}: has tensors besides, {', '.join(foreign)[:120]}; use a checkpoint as it was "
            "written, or load with weights_only=True"
        )


_KINDS = ("weights", "extra", "optimizer", "gradient", "view", "delay", "norm", "exchange")


def _require_names(parts: Mapping[str, PartState], document: Any, path: str) -> None:
    names = sorted(document) if isinstance(document, dict) else document
    if not isinstance(document, dict) or set(parts) != set(document):
        raise CheckpointError(
            f"{path}: holds parts {names!r:.200}, the graph has {sorted(parts)}; build the graph "
            "as it was when the checkpoint was written"
        )


def _check_one(
    part: PartState, tensors: Mapping[str, Tensor], document: Any, number: int | None
) -> FoundPart:
    entry = read(PartEntry, document, "it")
    for name, mine in (("optimizer", part.optimizer), ("scheduler", part.scheduler)):
        if (mine is None) != (getattr(entry, name) is None):
            which = ("no", "one") if mine is not None else ("one", "none")
            raise CheckpointError(
                f"it has {which[0]} {name}, the session has {which[1]}; use the same modules and "
                "rules, or load with weights_only=True"
            )
    optimizer = scheduler = view = None
    if part.optimizer is not None and entry.optimizer is not None:
        state = inside(tensors, "optimizer/")
        optimizer = check_optimizer_state(
            part.optimizer, state, entry.optimizer, sparse_tables(part.module)
        )
    if part.scheduler is not None and entry.scheduler is not None:
        scheduler = check_scheduler_state(part.scheduler, entry.scheduler)
    gradients = inside(tensors, "gradient/")
    check_gradients(part.module, gradients)
    held = _of_rules(tensors)
    if entry.view is not None:
        view = check_view(part, held, entry.view, number)
    weights = state_of(tensors, entry.extra or {})
    return FoundPart(weights, entry, optimizer, scheduler, gradients, held, view)


def _put(parts: Mapping[str, PartState], found: Mapping[str, FoundPart]) -> None:
    for name, part in parts.items():
        _put_one(part, found[name])


def _put_one(part: PartState, found: FoundPart) -> None:
    part.abandon()
    part.module.load_state_dict(found.weights)
    if part.optimizer is not None and found.optimizer is not None:
        put_optimizer_state(part.optimizer, found.optimizer)
    _put_counts(part, found)


def _put_counts(part: PartState, found: FoundPart) -> None:
    """All but weights and the optimiser's state."""
    entry = found.entry
    part.version, counting = entry.version, part.counting
    counting.rows, counting.instances, counting.over = entry.rows, entry.instances, entry.over
    counting.staleness.load(entry.staleness)
    if part.scheduler is not None and found.scheduler is not None:
        part.scheduler.load_state_dict(dict(found.scheduler))
    part.load_pending_gradients(found.gradients)
    if found.view is not None:
        load_view(part, found.held, found.view)


def take_over(
    part: PartState, tensors: Mapping[str, Tensor], document: Any, shared: Sequence[str]
) -> None:
    """Have the part go on from where it has got in another process.

    Nothing is checked, as the process is one of ours. Of the optimiser's state what both processes
    have in one memory stays where it is, and weights that are the same are not written to: a graph
    of autograd's that has seen them stays good.

    Args:
        part: As it was when the other process began; its weights may be those of now already.
        tensors, document: What ``parts_to_tensors`` gave there, of this part; buffers by the names
            that the module has for them, as those count as well that no checkpoint keeps.
        shared: Names of tensors that are as they are here, as they lie in memory that both have or
            have not been stepped; they are missing in ``tensors``.
    """
    before, _ = parts_to_tensors({part.name: part})
    found = inside({**{name: before[name] for name in shared}, **tensors}, f"{part.name}/")
    sent = {name.partition("/")[2]: x for name, x in tensors.items()}
    part.abandon()
    _renew_weights(part, inside(sent, "weights/"))
    _renew_buffers(part.module, inside(sent, "buffers/"))
    entry = read(PartEntry, document, "it")
    renew_extra(part.module, found, entry.extra or {})
    if part.optimizer is not None and entry.optimizer is not None:
        kept = inside({name: before[name] for name in shared}, f"{part.name}/optimizer/")
        _continue_optimizer(part.optimizer, inside(found, "optimizer/"), entry.optimizer, kept)
    held = _of_rules(found)
    scheduler: Any = None
    if entry.scheduler is not None:
        scheduler = decode(entry.scheduler["state"], "scheduler")
    view = None if entry.view is None else check_view(part, held, entry.view)
    gradients = inside(found, "gradient/")
    _put_counts(part, FoundPart({}, entry, None, scheduler, gradients, held, view))


def _renew_weights(part: PartState, weights: Mapping[str, Tensor]) -> None:
    now = part.module.state_dict()
    changed = {key: x for key, x in weights.items() if not _same_bits(now[key], x)}
    if changed:
        part.module.load_state_dict(changed, strict=False)


def _renew_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Also those that are new, or of another shape than before: a module may make them anew."""
    for key, x in buffers.items():
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        now = owner._buffers.get(name)
        if now is not None and (now.shape, now.dtype) == (x.shape, x.dtype):
            if not _same_bits(now, x):
                now.copy_(x)
        elif name in owner._buffers:
            setattr(owner, name, x)
        else:
            owner.register_buffer(name, x)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """As the sign of a zero counts as well."""
    return a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


def _continue_optimizer(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    kept: Collection[str],
) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, value in document["state"]:
        optimizer.state[parameters[key]] = decode(value, f"state.{key}", tensors, kept)
    for i, group in enumerate(optimizer.param_groups):
        options: Any = decode(document["groups"][i], f"groups.{i}", tensors, kept)
        group.update((k, v) for k, v in options.items() if k != "params")


def _check_weights(
    name: str, part: PartState, found: Mapping[str, Any], weights_only: bool, path: str
) -> None:
    wanted = part.module.state_dict()
    if set(wanted) != set(found):
        missing, foreign = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        raise CheckpointError(
            f"{path}: part '{name}' differs: the file lacks {missing[:5] or 'nothing'} and has "
            f"{foreign[:5] or 'nothing'} besides; build the module as it was when it was written"
        )
    for key, tensor in wanted.items():
        if not (isinstance(tensor, Tensor) and isinstance(found[key], Tensor)):
            if isinstance(tensor, Tensor) or isinstance(found[key], Tensor):
                raise CheckpointError(
                    f"{path}: part '{name}': '{key}' is {_kind(found[key])}, the module has "
                    f"{_kind(tensor)}; build the module as it was when it was written"
                )
            continue
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


def _kind(value: object) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"

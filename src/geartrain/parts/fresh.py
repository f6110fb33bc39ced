"""What an optimiser remembers of a parameter: shapes, dtypes and names, from one that is new.

    class, options, shape ─► made for a parameter of zeros ─► one step ─► the state that it has then

Steps in C read and write an optimiser's state by the size of its parameter. State from a file is
therefore compared with state that torch itself has made, entry by entry, before it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geartrain.codec import is_finite, is_number, require_like
from geartrain.errors import CheckpointError
from geartrain.nodes.uncompiled import uncompiled
from geartrain.parts.optimizers import plainly_stepped


@final
@dataclass(frozen=True, slots=True)
class Made:
    """State that an optimiser makes of a parameter.

    Args:
        state: After a step with a gradient of zeros.
        at_once: Whether it is there before the first step.
        whole: Whether it is all that there is; else a class of somebody's may keep more.
    """

    state: Mapping[str, Any]
    at_once: bool
    whole: bool


@uncompiled()
@torch.no_grad()
def made_of(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    parameter: Tensor,
    place: str,
    *,
    sparse: bool = False,
) -> Made | None:
    """What such an optimiser makes of such a parameter.

    Memory: some copies of the parameter, for as long as the state lives.

    Args:
        optimizer: Whose class it is; of one that is neither torch's nor ours, the class that it is
            derived from.
        options: Of the parameter's group.
        parameter: For its shape, dtype and device.
        place: Begins the error message.
        sparse: Whether the parameter's gradients are rows.

    Returns:
        None where no class is known, or it has no state of each parameter's own.

    Raises:
        CheckpointError: The class refuses these options, or gradients of rows with them.
    """
    cls, whole = _known(type(optimizer))
    if cls is None:
        return None
    blank = nn.Parameter(torch.zeros_like(parameter), requires_grad=True)
    known = signature(cls).parameters
    try:
        fresh = cls([blank], **{k: v for k, v in options.items() if k in known})
    except (ValueError, TypeError, RuntimeError) as error:
        if not whole:
            return None
        raise _edited(place, error) from error
    _require_same_kind(optimizer, options, known, place)
    for group in fresh.param_groups:
        group.update({k: v for k, v in options.items() if k in group and k != "params"})
    at_once = bool(fresh.state.get(blank))
    blank.grad = _no_gradient(blank, cls)
    plainly_stepped(fresh)
    made = Made(dict(fresh.state.get(blank, {})), at_once, whole)
    if sparse and whole and takes_sparse(fresh):
        blank.grad = _no_rows(blank)
        try:
            plainly_stepped(fresh)
        except (ValueError, RuntimeError) as error:
            raise _edited(place, error) from error
    return made


def remembers_all(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether what a step reads and writes, but for weights and gradients, is in tensors that are
    there already: so are the states of torch's optimisers and ours after their first step, of some
    before it.

    Args:
        optimizer: Any.
        parameters: Those that it steps.
    """
    cls, whole = _known(type(optimizer))
    if cls is None or not whole:
        return False
    states = [optimizer.state.get(p) or {} for p in parameters]
    if not any(states):
        plain = cls is torch.optim.SGD
        return plain and not any(g["momentum"] for g in optimizer.param_groups)
    return all(states) and all(isinstance(x, Tensor) for s in states for x in s.values())


def takes_sparse(optimizer: Optimizer | None) -> bool:
    """Whether an optimiser steps with sparse gradients; the others get dense ones."""
    if not isinstance(optimizer, (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad)):
        return False
    return not any(g.get("fused") or g.get("foreach") for g in optimizer.param_groups)


def _edited(place: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{place}: {error}; its options were edited: use another checkpoint of the run"
    )


def require_state(found: Any, made: Made | None, place: str, own: Any, same: bool) -> None:
    """Refuse state that is not what is made.

    Args:
        found: Of a parameter, from a file; empty: there was none.
        made: By a new optimiser; None: all is taken that has a type of its own.
        place: Begins the error message.
        own: What the optimiser of now has of this parameter.
        same: Whether the parameter has the dtype that it had.

    Raises:
        CheckpointError: An entry is missing, foreign, of another shape, dtype or type, or a count
            that is not finite.
    """
    if not isinstance(found, dict):
        raise CheckpointError(f"'{place}' is a {type(found).__name__}, expected a dict. {_REMEDY}")
    if made is None:
        return
    entries: dict[Any, Any] = found
    if not entries and not (made.at_once and made.whole):
        return
    missing, foreign = made.state.keys() - entries.keys(), entries.keys() - made.state.keys()
    if made.whole and (missing or foreign):
        raise CheckpointError(
            f"'{place}' has {sorted(map(str, entries))[:8]}, expected {sorted(made.state)}. "
            f"{_REMEDY}"
        )
    for key, wanted in made.state.items():
        if key in entries:
            _require_entry(entries[key], wanted, f"{place}.{key}", key, same)


def _known(cls: type[Optimizer]) -> tuple[type[Any] | None, bool]:
    """The class itself, or the nearest that it is derived from, of those whose state is known."""
    for each in cls.__mro__:
        if each in _UNKNOWN:
            return None, False
        if each.__module__.startswith(("torch.optim.", "geartrain.parts.")):
            return each, each is cls
    return None, False


_UNKNOWN: Final = (Optimizer, torch.optim.LBFGS)  # whose one state is of all parameters together


def _require_same_kind(
    optimizer: Optimizer, options: Mapping[str, Any], known: Mapping[str, Any], place: str
) -> None:
    """What a class sets for good (``FusedAdam`` has no amsgrad) is as it sets it."""
    for key, value in options.items():
        if key not in known and isinstance(value, bool) and value != optimizer.defaults.get(key):
            raise CheckpointError(
                f"{place}: its option {key} is {value}, expected {optimizer.defaults.get(key)}. "
                f"{_REMEDY}"
            )


def _no_gradient(parameter: Tensor, cls: type[Any]) -> Tensor:
    if cls is torch.optim.SparseAdam:
        return _no_rows(parameter)
    return torch.zeros_like(parameter)


def _no_rows(parameter: Tensor) -> Tensor:
    """A sparse gradient of zeros."""
    shape = tuple(parameter.shape)
    rows = torch.zeros(1, *shape[1:], dtype=parameter.dtype, device=parameter.device)
    row = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(row, rows, shape, check_invariants=False)


def _require_entry(found: Any, wanted: Any, place: str, key: str, same: bool) -> None:
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        if found.shape != wanted.shape or not _suits(found.dtype, wanted.dtype, same, found.dim()):
            raise CheckpointError(
                f"'{place}' has shape {tuple(found.shape)} and dtype {found.dtype}, expected "
                f"{tuple(wanted.shape)} and {wanted.dtype}. {_REMEDY}"
            )
    elif isinstance(wanted, Tensor) or isinstance(found, Tensor):
        raise CheckpointError(
            f"'{place}' is a {type(found).__name__}, expected a {type(wanted).__name__}. {_REMEDY}"
        )
    else:
        require_like(found, wanted, place)
    if is_number(found) and (not is_finite(found) or (key == "step" and found < 0)):
        raise CheckpointError(
            f"'{place}' is {float(found):g}, expected a finite number"
            f"{' of 0 or more' if key == 'step' else ''}. {_REMEDY}"
        )


def _suits(found: torch.dtype, wanted: torch.dtype, same: bool, dimensions: int) -> bool:
    if found == wanted:
        return True
    if not dimensions:  # counts are of torch's default dtype of then
        return {found, wanted} <= {torch.float32, torch.float64}
    return not same and found.is_floating_point and wanted.is_floating_point


_REMEDY: Final = "The document was edited, or the optimizer was made otherwise: make it as it was"

"""What modules remember besides tensors: what their ``get_extra_state()`` gives.

    state_dict() ─► tensors, by name
                 └► the others ─► JSON, and tensors that it refers to ─► set_extra_state()

Of such a value a checkpoint holds what JSON and tensors can say (``geartrain.codec``). What it
cannot say stays among the tensors as it is, and is refused by name where the file is written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from geartrain.codec import Json, decode, encode
from geartrain.errors import CheckpointError
from geartrain.parts.looking import inside


def state_to_tensors(module: nn.Module, name: str) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """A module's state by ``name/weights/...``, and what it has besides.

    Returns:
        Tensors, the module's own; those of the others are ``name/extra/...``. And JSON by key.
    """
    tensors: dict[str, Any] = {}
    extra: dict[str, Json] = {}
    for key, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            held: dict[str, Tensor] = {}
            try:
                extra[key] = encode(value, key, held)
            except CheckpointError:
                pass
            else:
                tensors |= {f"{name}/extra/{at}": x for at, x in held.items()}
                continue
        tensors[f"{name}/weights/{key}"] = value
    return tensors, extra


def state_of(tensors: Mapping[str, Tensor], document: Any) -> dict[str, Any]:
    """What ``load_state_dict`` takes, of what ``state_to_tensors`` gave for one module.

    Args:
        tensors: Without the name.
        document: The JSON; it may come from anybody.

    Raises:
        CheckpointError: It is damaged.
    """
    if not isinstance(document, Mapping):
        raise CheckpointError(f"'extra' is {document!r:.80}, expected an object; it was edited")
    held = inside(tensors, "extra/")
    others = {key: decode(value, key, held) for key, value in document.items()}
    return {**inside(tensors, "weights/"), **others}


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A ``state_dict`` that no step changes."""
    return {k: x.clone() if isinstance(x, Tensor) else copy.deepcopy(x) for k, x in state.items()}


def renew_extra(
    module: nn.Module, tensors: Mapping[str, Tensor], document: Mapping[str, Json]
) -> None:
    """Give a module what another process's has besides tensors; what is the same is not given.

    Args:
        module: Of the same kind.
        tensors, document: From ``state_to_tensors`` there, the tensors without the name.
    """
    before, own = state_to_tensors(module, "")
    held, mine = inside(tensors, "extra/"), inside(before, "/extra/")
    changed = {
        key: decode(value, key, held)
        for key, value in document.items()
        if own.get(key) != value
        or any(not x.equal(mine[at]) for at, x in held.items() if at in mine and _is_of(at, key))
    }
    if changed:
        module.load_state_dict(changed, strict=False)


def _is_of(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")

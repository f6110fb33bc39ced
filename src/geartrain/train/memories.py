"""What nodes remember from pass to pass as named tensors and JSON, for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from geartrain.engine.parts import original_name
from geartrain.errors import CheckpointError
from geartrain.nodes.node import Memory
from geartrain.nodes.replay import require_memory
from geartrain.parts.looking import inside


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
    document: Any,
    names: Sequence[str],
    path: str,
) -> dict[str, Memory]:
    """The reverse.

    Raises:
        CheckpointError: The graph has no such nodes, or a buffer is damaged.
    """
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{path}: its buffers are a {type(document).__name__}, expected an object; use another "
            "checkpoint of the run"
        )
    if foreign := sorted(n for n in document if original_name(n) not in names):
        raise CheckpointError(
            f"{path}: holds buffers of {foreign}, the graph replays at {sorted(names)}; build the "
            "graph as it was when the checkpoint was written"
        )
    found: dict[str, Memory] = {}
    for name, entry in document.items():
        kept = inside(tensors, f"{name}/memory/")
        try:
            require_memory(kept, entry, name)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        found[name] = kept, entry
    return found

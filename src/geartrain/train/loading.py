"""A checkpoint into a session: looked at as a whole, and then loaded as a whole.

    file ─► read ─► document and tensors ─► each against what this session would have written
                                              └► CheckpointError: nothing has changed
                                                 in order: weights, optimisers, copies, position,
                                                 buffers, random state

A file may come from anybody. Its checksum says that it came as it was sent, and nothing of who
sent it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from geartrain.errors import CheckpointError
from geartrain.graph.operators import Replaying
from geartrain.native import kind as kernels_kind
from geartrain.native import status as kernels_status
from geartrain.parts.snapshot import (
    check_parts,
    check_weights,
    put_parts,
    put_weights,
    require_no_others,
)
from geartrain.train.checkpoint import Checkpoint, read_checkpoint
from geartrain.train.copies import check_sharing
from geartrain.train.experience import experience_from_json, put_experience
from geartrain.train.memories import tensors_to_memories
from geartrain.train.random_state import check_random_state
from geartrain.train.results import Position, position_from_json
from geartrain.train.state import State

log = logging.getLogger("geartrain.train")

_REQUIRED = {"parts", "seed", "position", "random"}
_LATER = {
    "auto",
    "kernels",
    "memories",
    "precision",
    "replicas",
}  # not in the first checkpoints, or not in all
# These are all keys of the document that ``State.snapshot`` makes: others are refused.


def load_session(state: State, path: Path | str, *, weights_only: bool) -> None:
    """As ``Session.load`` says.

    Raises:
        CheckpointError: The file cannot be read or does not fit; the session is as it was.
    """
    checkpoint = read_checkpoint(path)
    document: dict[str, Any] = dict(checkpoint.document)
    if missing := _REQUIRED - set(document):
        raise CheckpointError(
            f"{path}: has no {sorted(missing)}; Session.save writes them: give a checkpoint of "
            "a session"
        )
    if weights_only:
        found = check_weights(state.parts, checkpoint.tensors, document["parts"], str(path))
        put_weights(state.parts, found)
        state.sharing.restart()
    else:
        load_checkpoint(state, checkpoint, str(path))


def load_checkpoint(state: State, checkpoint: Checkpoint, path: str) -> None:
    """Bring a session to where a checkpoint stands that has all required keys.

    Args:
        state: The session's.
        checkpoint: What was read; nobody else may have its tensors.
        path: For messages.

    Raises:
        CheckpointError: It does not fit; the session is as it was.
    """
    document: dict[str, Any] = dict(checkpoint.document)
    _require_same_session(state, document, path)
    position = position_from_json(document["position"], path)
    choice, back = state.choice, None
    if choice is not None and choice.plan is None and position.plan is not None:
        back = state.put_plan(position.plan)
    try:
        _load(state, checkpoint, position, path)
    except CheckpointError:
        if back is not None:
            back()
        raise


def _load(state: State, checkpoint: Checkpoint, position: Position, path: str) -> None:
    document: dict[str, Any] = dict(checkpoint.document)
    tensors, sharing = checkpoint.tensors, state.sharing
    numbers = dict.fromkeys(state.parts, position.trained)
    parts = check_parts(state.parts, tensors, document["parts"], path, numbers)
    kept, copies = check_sharing(sharing, tensors, document, path)
    replaying = [o.name for o in state.graph.operators if isinstance(o, Replaying)]
    memories = tensors_to_memories(tensors, document.get("memories", {}), replaying, path)
    experience = None
    if "auto" in document:
        experience = experience_from_json(document["auto"], state.graph, path)
    names = [*state.parts, *sharing.parts]
    require_no_others(tensors, names, memories, path)
    if not isinstance(document["random"], dict):
        raise CheckpointError(
            f"{path}: its random state is a {type(document['random']).__name__}, expected an "
            "object; use another checkpoint of the run"
        )
    try:
        random = check_random_state(document["random"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error

    # From here on nothing is refused any more; and should memory run out, nothing is loaded.
    put = kept.copied()
    put_parts({**state.parts, **sharing.parts}, parts | copies)
    put()
    state.position, state.met = position, position.trained
    if state.in_flight is not None and position.in_flight is not None:
        state.put_active(position.in_flight)
    state.engine, state.plain, state.memories = None, None, memories
    random.set()
    if experience is not None:
        put_experience(state.graph, experience)
    used = document.get("kernels", kernels_kind())
    if used != kernels_kind():
        log.warning(
            "%s: was made with %s kernels, and goes on with %s: the same numbers, but for their "
            "rounding (%s)",
            path,
            used,
            kernels_kind(),
            kernels_status(),
        )


def _require_same_session(state: State, document: dict[str, Any], path: str) -> None:
    if document["seed"] != state.seed or type(document["seed"]) is not int:
        raise CheckpointError(
            f"{path}: was made with seed {document['seed']!r:.40}, the session has {state.seed}; "
            "the order of the data would differ: use the same seed, or weights_only=True"
        )
    was = document.get("precision", "full")
    if was != state.settings.precision:
        raise CheckpointError(
            f"{path}: was made with precision {was!r:.40}, the session has "
            f"{state.settings.precision!r}; the run would not go on as it was: use the same "
            "precision, or weights_only=True"
        )
    used = document.get("kernels", kernels_kind())
    if used not in ("native", "torch"):
        raise CheckpointError(
            f"{path}: was made with kernels {used!r:.40}, expected 'native' or 'torch'; use "
            "another checkpoint of the run"
        )
    if foreign := sorted(document.keys() - _REQUIRED - _LATER):
        raise CheckpointError(
            f"{path}: has {', '.join(foreign)[:120]} besides, which this session would not have "
            "written; use the version of geartrain that wrote it, or load with weights_only=True"
        )

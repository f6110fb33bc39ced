"""What ``keep="auto"`` has counted and chosen, as JSON for a checkpoint, and back.

A run that goes on in another process then switches where it would have switched, and measures
nothing that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from geartrain.codec import Json
from geartrain.errors import CheckpointError
from geartrain.graph.graph import Graph
from geartrain.nodes.choice import Done, Experience

_CHOICES: Final = ("derived", "again", None)
_MOST: Final = 1 << 53


def experience_to_json(graph: Graph) -> dict[str, Json]:
    """By name of the node, where it has done anything."""
    return {
        through.name: {
            "firings": through.experience.done.firings,
            "rows": through.experience.done.rows,
            "chosen": through.experience.chosen,
        }
        for through in graph.throughs()
        if through.experience.done.firings
    }


def experience_from_json(document: Any, graph: Graph, path: str) -> dict[str, Experience]:
    """The reverse; nothing is changed.

    Args:
        document: What a file says.
        graph: The session's.
        path: For messages.

    Raises:
        CheckpointError: It is not what ``experience_to_json`` gives for such a graph.
    """
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{path}: what keep='auto' has chosen is a {type(document).__name__}, expected an "
            "object; use another checkpoint of the run"
        )
    names = {through.name for through in graph.throughs()}
    if foreign := sorted(set(document) - names):
        raise CheckpointError(
            f"{path}: says what keep='auto' has chosen for {foreign[:3]}, the graph runs modules "
            f"at {sorted(names)}; build the graph as it was when the checkpoint was written"
        )
    return {name: _experience(entry, name, path) for name, entry in document.items()}


def put_experience(graph: Graph, found: Mapping[str, Experience]) -> None:
    """Let nodes go on with what ``experience_from_json`` has found; others begin anew."""
    for through in graph.throughs():
        mine, other = through.experience, found.get(through.name, Experience())
        mine.done.firings, mine.done.rows = other.done.firings, other.done.rows
        if mine.chosen != other.chosen:
            mine.chosen, mine.story = other.chosen, other.story


def _experience(entry: Any, name: str, path: str) -> Experience:
    match entry:
        case {"firings": int(firings), "rows": int(rows), "chosen": chosen} if (
            len(entry) == 3
            and chosen in _CHOICES
            and all(type(n) is int and 0 <= n < _MOST for n in (firings, rows))
        ):
            return Experience(Done(firings, rows), chosen=chosen)
    raise CheckpointError(
        f"{path}: of '{name}' keep='auto' has done and chosen {entry!r:.80}; expected firings, "
        "rows, and 'derived', 'again' or null: use another checkpoint of the run"
    )

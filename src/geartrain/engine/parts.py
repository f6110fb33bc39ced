"""The parts of a graph: their names, and how they are made."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from geartrain.device import require_device
from geartrain.errors import GraphError
from geartrain.graph.graph import Graph
from geartrain.nodes.uncompiled import uncompiled
from geartrain.parts.norms import share_norms
from geartrain.parts.part import PartState
from geartrain.parts.rules import Part, Rules


def part_names(graph: Graph) -> dict[str, str]:
    """Node name to part name, for nodes with parameters or buffers."""
    names: dict[int, str] = {}
    found: dict[str, str] = {}
    for through in graph.throughs():
        if not through.has_state:
            continue
        owner = through.owner
        if id(owner) not in names:
            wished = through.part.name if through.part is not None else None
            names[id(owner)] = wished or through.name
        found[through.name] = names[id(owner)]
    return found


@uncompiled()
def make_parts(
    graph: Graph, defaults: Rules, device: torch.device | None = None
) -> dict[str, PartState]:
    """The parts of a graph at work, by name.

    Args:
        graph: Holds the modules, which are moved to their devices.
        defaults: Of the parts' rules.
        device: Of parts that name none; None leaves them where they are.

    Raises:
        ValueError: Two parts have the same name, a device does not exist, or a part's weights lie
            on several.
    """
    names = part_names(graph)
    parts: dict[str, PartState] = {}
    owners: dict[str, int] = {}
    for through in graph.throughs():
        if through.name not in names:
            continue
        name = names[through.name]
        owner = through.owner
        if owners.setdefault(name, id(owner)) != id(owner):
            raise ValueError(
                f"two parts are called '{name}'; name one of them: Part(..., name=...)"
            )
        if name in parts:
            continue
        if not isinstance(through.part, Part):
            assert through.module is not None
            parts[name] = PartState(name, through.module, defaults, device=device)
            continue
        part, rules = through.part, through.part.rules(defaults)
        where = device
        if part.device is not None:
            where = require_device(part.device, f"part '{name}'")
        parts[name] = PartState(name, part.module, rules, where)
    share_norms(parts)
    return parts


def require_parts(graph: Graph, parts: Mapping[str, object]) -> dict[str, str]:
    """The names of a graph's parts, as ``part_names`` gives them, of which these are some.

    Raises:
        GraphError: The graph has a part that was not there when they were made, or one has gone.
    """
    names, known = part_names(graph), {original_name(name) for name in parts}
    if gone := sorted(known - set(names.values())):
        raise GraphError(
            f"part '{gone[0]}': its module has no parameters and no buffers any more; put back "
            "those that it had when the session was made, or make a new Session"
        )
    for node, name in names.items():
        if name not in known:
            raise GraphError(
                f"'{node}' came to the graph after its session was made, which has no part for it: "
                "make a new Session, which takes the weights of the others as they are"
            )
    return names


def original_name(name: str) -> str:
    """The part that a copy is of."""
    return name.partition("#")[0]

"""What of a graph learns: which nodes a loss reaches, and which weights no node uses.

A graph in which something never learns runs as well as any other, and looks healthy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from geartrain.errors import GraphError
from geartrain.graph.ends import Losing
from geartrain.graph.operator import AbstractOperator
from geartrain.graph.operators import Detaching, Replaying

if TYPE_CHECKING:
    from geartrain.frames.instance import Instance
    from geartrain.graph.graph import Graph


def require_loss(graph: Graph) -> None:
    """Raises:
    GraphError: The graph has no loss.
    """
    if not any(isinstance(o, Losing) for o in graph.operators):
        raise GraphError(
            "the graph has no loss, so nothing in it would learn; end a stream in "
            ".loss(criterion, target)"
        )


def remarks(graph: Graph, like: Instance | None) -> Iterator[str]:
    """What may be meant, and often is not; a line each.

    Args:
        graph: Will be trained.
        like: An instance that it will be trained with, if one is known.
    """
    yield from _unreached(graph)
    yield from _severed(graph)
    yield from _unused(graph)
    if like is not None:
        yield from _undeclared(graph, like)


def _unreached(graph: Graph) -> Iterator[str]:
    """Nodes with weights that learn, of parts to which no loss leads back."""
    reached = _reached(graph.operators)
    learning = [t for t in graph.throughs() if any(p.requires_grad for p in t.parameters)]
    fed = {id(t.owner) for t in learning if t in reached}
    for through in learning:
        if id(through.owner) not in fed:
            yield (
                f"'{through.name}' never learns: no loss is behind it, but outputs, stops and "
                "detaches alone; if that is meant, freeze it: requires_grad_(False)"
            )


def _severed(graph: Graph) -> Iterator[str]:
    """Nodes that were seen to make what has no gradient of their weights."""
    for through in graph.throughs():
        if through.dry_run.severed:
            yield (
                f"'{through.name}' never learns: what it makes has no gradient of its weights; "
                "look for torch.no_grad(), .detach(), numpy or integers in it; if that is meant, "
                "freeze it: requires_grad_(False)"
            )


def _reached(operators: Sequence[AbstractOperator]) -> set[AbstractOperator]:
    """Operators whose rows get a gradient from a loss."""
    found: set[AbstractOperator] = set()
    queue: list[AbstractOperator] = [o for o in operators if isinstance(o, Losing)]
    while queue:
        for sources in queue.pop().sources:
            for source, _ in sources:
                ends = isinstance(source, Detaching) or (
                    isinstance(source, Replaying) and not source.rule.fresh
                )
                if source not in found and not ends:
                    found.add(source)
                    queue.append(source)
    return found


def _unused(graph: Graph) -> Iterator[str]:
    """Weights of parts that are in no module of their nodes."""
    parts = {id(t.part): (t, t.part) for t in graph.throughs() if t.part is not None}
    for first, part in parts.values():
        used = {id(p) for t in graph.throughs() if t.part is part for p in t.parameters}
        named = [n for n, p in part.module.named_parameters() if id(p) not in used]
        if named:
            more = f" and {len(named) - 4} more" if len(named) > 4 else ""
            yield (
                f"the part of '{first.name}' has weights that none of its nodes uses, so they "
                f"never learn: {', '.join(named[:4])}{more}"
            )


def _undeclared(graph: Graph, like: Instance) -> Iterator[str]:
    """Columns that an instance brings, and the graph might have meant by another name."""
    kinds = {"vertex": graph.vertex, "edge": graph.edge or (), "value": graph.value}
    of = {name: kind for kind, names in kinds.items() for name in names}
    for kind, names in kinds.items():
        built_in = {"source", "target"} if kind == "edge" else set()
        for name in getattr(like, kind).keys() - built_in - set(names):
            close = difflib.get_close_matches(name, of, 1)
            if name in of:
                right = of[name]
                yield (
                    f"instances bring '{name}' as a {kind} column, and the graph declares it as a "
                    f"{right} column: Instance(..., {right}={{'{name}': ...}}) brings it there, or "
                    f"Graph({kind}=('{name}',)) declares it so"
                )
            elif close:
                yield (
                    f"instances bring {kind} column '{name}', which the graph does not declare, so "
                    f"it is ignored; it declares '{close[0]}'"
                )


__all__ = ["remarks", "require_loss"]

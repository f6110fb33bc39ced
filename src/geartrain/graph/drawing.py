"""A graph as text, as Mermaid and as Graphviz DOT."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from geartrain.graph.blueprint import AbstractGraph
from geartrain.graph.fusion import fused
from geartrain.graph.operator import AbstractOperator
from geartrain.graph.region import Region
from geartrain.graph.through import Through


@dataclass(frozen=True, slots=True)
class OutlineNode:
    """An operator of a graph, as it is drawn."""

    name: str
    kind: str
    detail: str = ""
    part: str = ""  # whose weights it uses
    nodes: Sequence[str] = ()  # of the engine, that do its work; none: it is only wiring


@dataclass(frozen=True, slots=True)
class OutlineEdge:
    """Where rows go, from operator to operator by their places in the outline."""

    source: int
    target: int
    label: str = ""  # of the port


@dataclass(frozen=True, slots=True)
class Outline:
    """A graph as a program can draw it."""

    operators: Sequence[OutlineNode] = ()
    edges: Sequence[OutlineEdge] = ()


_SHAPES = {
    "input": ("([", "])", "oval"),
    "through": ("[", "]", "box"),
    "route": ("{", "}", "diamond"),
    "merge": ("((", "))", "circle"),
    "loss": ("[[", "]]", "doubleoctagon"),
    "output": ("([", "])", "oval"),
    "stop": ("([", "])", "plaintext"),
}
_OTHER = ("(", ")", "ellipse")
_WIDEST = 72
"""Columns of a text; what is longer, as the reason why a module runs again, moves no other line."""


def text(graph: AbstractGraph) -> str:
    """One line an operator: number, name, what it does, where its rows go."""
    operators = graph.layout().operators
    targets = _targets(operators)
    endings = fused(operators)
    rows = []
    for operator in operators:
        does = operator.kind if not operator.detail() else f"{operator.kind} {operator.detail()}"
        if isinstance(operator, Through):
            loss = endings.get(operator.id)
            does += f" [{operator.keeps()}{'' if loss is None else f', fused with {loss.name}'}]"
        to = ", ".join(
            (f"{label}: " if label else "") + reader.name for label, reader in targets[operator.id]
        )
        rows.append((str(operator.id), operator.name, does, f"→ {to}" if to else ""))
    widths = [min(max(len(row[i]) for row in rows), _WIDEST) for i in range(3)]
    parts = len({id(t.owner) for t in graph.throughs() if t.has_state})
    head = f"graph of {len(operators)} operators, {parts} parts"
    lines = [
        f"  {n:>{widths[0]}}  {name:<{widths[1]}}  {does:<{widths[2]}}  {to}".rstrip()
        for n, name, does, to in rows
    ]
    return "\n".join([head, *lines, *_regions(graph, operators, endings)])


def _regions(
    graph: AbstractGraph, operators: Sequence[AbstractOperator], endings: Collection[int]
) -> list[str]:
    """One line a loop or section: how it runs, and why so."""
    unread = [o for o in operators if any(not sources for sources in o.sources)]
    if unread:
        return []
    names = {o.id: o.name for o in operators}
    layout = graph.layout()
    regions = layout.regions(endings)
    reaches = layout.reaching(regions)
    taken = {number for r in (*regions, *reaches) if r.whole for number in r.operators}
    return [
        *(_region(region, reaches, names) for region in regions),
        *(_reach(reach, names) for reach in reaches),
        *(
            f"  on one worker, with updates of instances, '{stack.name}' runs with "
            f"{_others(stack, names)}, there and back in one firing"
            for stack in layout.stacks(endings, (), taken)
        ),
    ]


def _region(region: Region, reaches: Sequence[Region], names: Mapping[int, str]) -> str:
    """How a loop or section runs, and what is in it."""
    how = "runs whole" if region.whole else f"runs by steps, as {region.reason}"
    if region.whole and not region.said:
        how += ", unless its parts count rows or have windows"
    if region.whole and region.deciding:
        how += f", payload decides ({', '.join(names[k] for k in region.deciding)})"
    if not region.whole and any(region.operators <= r.operators for r in reaches):
        how += ", unless it goes with others, as said below"
    kind = "loop" if region.loops else "section"
    inside = ", ".join(names[number] for number in sorted(region.operators))
    return f"  {kind} {_quoted(region)} {how}: {inside}"


def _reach(reach: Region, names: Mapping[int, str]) -> str:
    """Which loops and sections go with what is beside them."""
    whose = " and ".join(map(_quoted, reach.made_of or [reach]))
    takes = "run together" if len(reach.made_of) > 1 else "runs"
    told = _others(reach, names)
    return f"  on one worker, with updates of instances, {whose} {takes}{told and f' with {told}'}"


def _others(region: Region, names: Mapping[int, str]) -> str:
    """What is in it besides the loops and sections that it is made of, and what it is called by."""
    more = region.operators.difference(*(r.operators for r in region.made_of))
    return ", ".join(names[k] for k in sorted(more) if names[k] != region.name)


def _quoted(region: Region) -> str:
    return f"'{region.name.removesuffix(' section')}'"


def outline_edges(operators: Sequence[AbstractOperator]) -> list[OutlineEdge]:
    """Who sends rows to whom.

    Args:
        operators: With broadcasts; edges name them by their places among these.
    """
    place = {operator.id: k for k, operator in enumerate(operators)}
    return [
        OutlineEdge(place[number], place[reader.id], label)
        for number, targets in _targets(operators).items()
        for label, reader in targets
    ]


def mermaid(graph: AbstractGraph) -> str:
    """Mermaid flowchart source."""
    operators = graph.layout().operators
    lines = ["flowchart LR"]
    for operator in operators:
        left, right, _ = _SHAPES.get(operator.kind, _OTHER)
        label = _label(operator).replace("<", "&lt;").replace("\n", "<br/>")
        lines.append(f'    n{operator.id}{left}"{label}"{right}')
    for number, targets in _targets(operators).items():
        for label, reader in targets:
            arrow = f"-->|{label}|" if label else "-->"
            lines.append(f"    n{number} {arrow} n{reader.id}")
    return "\n".join(lines) + "\n"


def dot(graph: AbstractGraph) -> str:
    """Graphviz source."""
    operators = graph.layout().operators
    lines = ["digraph geartrain {", "    rankdir=LR;"]
    for operator in operators:
        shape = _SHAPES.get(operator.kind, _OTHER)[2]
        label = _label(operator).replace("\n", "\\n")
        lines.append(f'    n{operator.id} [label="{label}", shape={shape}];')
    for number, targets in _targets(operators).items():
        for label, reader in targets:
            option = f' [label="{label}"]' if label else ""
            lines.append(f"    n{number} -> n{reader.id}{option};")
    return "\n".join([*lines, "}"]) + "\n"


def _label(operator: AbstractOperator) -> str:
    detail = operator.detail().replace('"', "'")
    return f"{operator.name}\n{detail}" if detail else operator.name


def _targets(
    operators: Sequence[AbstractOperator],
) -> dict[int, list[tuple[str, AbstractOperator]]]:
    targets: dict[int, list[tuple[str, AbstractOperator]]] = {o.id: [] for o in operators}
    for reader in operators:
        for sources in reader.sources:
            for source, port in sources:
                label = source.port_name(port) if source.kind != "broadcast" else ""
                targets[source.id].append((label, reader))
    return targets

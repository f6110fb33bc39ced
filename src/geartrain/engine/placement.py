"""Which worker a node lives on.

Nodes of one part live together, with the part; copies of it on different workers. Longest
processing time first: the costliest part goes to the worker with least to do. A node without
weights lives where most of its rows come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from geartrain.graph.wiring import Wiring
from geartrain.nodes.node import AbstractNode
from geartrain.parts.part import PartState


def place(
    wiring: Wiring,
    parts: Mapping[str, PartState],
    workers: int,
    by_hand: Mapping[str, int],
    costs: Mapping[str, float],
) -> dict[int, int]:
    """Node number to worker.

    Args:
        wiring: The graph made into nodes.
        parts: By name.
        workers: How many.
        by_hand: Part or node name to worker.
        costs: Seconds by node name; where there are none, numbers of parameters stand for them.

    Raises:
        ValueError: A name or a worker does not exist, or a part would be torn apart.
    """
    nodes = wiring.nodes
    _check_names(nodes, parts, workers, by_hand)
    home: dict[int, int] = {}
    load = [0.0] * workers
    taken: dict[str, int] = {}
    groups, whole = _groups(nodes)
    weight = {name: _cost(whole[name], group, parts, costs) for name, group in groups.items()}
    named = {name for name in groups if not by_hand.keys().isdisjoint(whole[name])}
    for name in sorted(groups, key=lambda g: (g not in named, -weight[g], g)):
        group = groups[name]
        wished = {by_hand[n.name] for n in group if n.name in by_hand}
        wished |= {by_hand[part] for part in whole[name] if part in by_hand}
        if len(wished) > 1:
            raise ValueError(
                f"part '{name}' is placed on workers {sorted(wished)}; it lives on one"
            )
        original = name.split("#")[0]
        beside = [taken[g] for g in taken if g.split("#")[0] == original]
        free = [w for w in range(workers) if w not in beside] or list(range(workers))
        worker = wished.pop() if wished else min(free, key=lambda w: (load[w], w))
        load[worker] += weight[name]
        taken[name] = worker
        for node in group:
            home[node.id] = worker
    _place_others(wiring, by_hand, home)
    return home


def _groups(
    nodes: Mapping[int, AbstractNode],
) -> tuple[dict[str, list[AbstractNode]], dict[str, list[str]]]:
    """Nodes that live together, and the parts that they have, each by the first of these.

    Parts live together where one node computes with them.
    """
    first: dict[str, str] = {}
    for node in nodes.values():
        names = node.part_names
        known = {first[name] for name in names if name in first}
        for name in names:
            first.setdefault(name, names[0])
        for part, head in first.items():
            if head in known or part in names:
                first[part] = names[0]
    groups: dict[str, list[AbstractNode]] = {}
    whole: dict[str, list[str]] = {}
    for part, head in first.items():
        whole.setdefault(head, []).append(part)
    for node in nodes.values():
        if node.part_names:
            groups.setdefault(first[node.part_names[0]], []).append(node)
    return groups, whole


def _cost(
    names: Sequence[str],
    group: list[AbstractNode],
    parts: Mapping[str, PartState],
    costs: Mapping[str, float],
) -> float:
    if costs:
        return sum(costs.get(n.name, 0.0) for n in group)
    return float(sum(p.numel() for name in names for p in parts[name].parameters))


def _place_others(wiring: Wiring, by_hand: Mapping[str, int], home: dict[int, int]) -> None:
    """Nodes without weights: beside the writer that they are wired to, copy by copy."""
    writers: dict[int, list[int]] = {}
    for (source, _), (reader, _) in wiring.readers.items():
        writers.setdefault(reader, []).append(source)
    left = [
        (operator, k, number)
        for operator, numbers in wiring.copies.items()
        for k, number in enumerate(numbers)
        if number not in home
    ]
    for _, _, number in left:
        name = wiring.nodes[number].name
        if name in by_hand:
            home[number] = by_hand[name]
    for operator, k, number in left:
        if number not in home and wiring.nodes[number].beside is None:
            home[number] = _nearest(operator, k, writers, wiring, home)
    for _, _, number in left:
        other = wiring.nodes[number].beside
        if other is not None:
            home[number] = home[other]


def _nearest(
    operator: int,
    k: int,
    writers: Mapping[int, list[int]],
    wiring: Wiring,
    home: Mapping[int, int],
) -> int:
    """Where copy k of the nearest placed operator upstream lives; a loop's last writer first."""
    seen, ring = {operator}, [operator]
    while ring:
        ahead: list[int] = []
        for at in ring:
            for source in reversed(writers.get(at, [])):
                copies = wiring.copies[source]
                number = copies[min(k, len(copies) - 1)] if copies else None
                if number is not None and number in home:
                    return home[number]
                if source not in seen:
                    seen.add(source)
                    ahead.append(source)
        ring = ahead
    return 0


def _check_names(
    nodes: Mapping[int, AbstractNode],
    parts: Mapping[str, PartState],
    workers: int,
    by_hand: Mapping[str, int],
) -> None:
    known = {n.name for n in nodes.values()} | set(parts)
    for name, worker in by_hand.items():
        if name not in known:
            raise ValueError(f"placement names '{name}'; there are {sorted(known)}")
        if not 0 <= worker < workers:
            raise ValueError(
                f"placement puts '{name}' on worker {worker}; there are 0..{workers - 1}"
            )

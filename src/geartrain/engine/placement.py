"""Which worker a node lives on.

Nodes of one part live together, with the part; copies of it on different workers. Longest
processing time first: the costliest part goes to the worker with least to do. A node without
weights lives where most of its rows come from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from geartrain.graph.wiring import Wiring
from geartrain.nodes.node import AbstractNode
from geartrain.parts.part import PartState


def place(
    wiring: Wiring,
    parts: Mapping[str, PartState],
    workers: int,
    by_hand: Mapping[str, int],
    costs: Mapping[str, float],
    among: Collection[int] | None = None,
) -> dict[int, int]:
    """Node number to worker.

    Args:
        wiring: The graph made into nodes.
        parts: By name.
        workers: How many.
        by_hand: Part or node name to worker.
        costs: Seconds by node name; where there are none, numbers of parameters stand for them.
        among: The nodes that are to be placed; None: all.

    Raises:
        ValueError: A name or a worker does not exist, or a part would be torn apart.
    """
    nodes = {n: x for n, x in wiring.nodes.items() if among is None or n in among}
    _check_names(nodes, parts, workers, by_hand)
    home: dict[int, int] = {}
    load = [0.0] * workers
    taken: dict[str, int] = {}
    groups, whole = _groups(nodes)
    weight = {name: _cost(whole[name], group, parts, costs) for name, group in groups.items()}
    wished = {name: _wished(whole[name], group, by_hand) for name, group in groups.items()}
    blocks = _blocks(wiring, groups)
    heavy = {block: sum(weight[name] for name in block) for block in blocks}
    named = {block: any(wished[name] is not None for name in block) for block in blocks}
    for block in sorted(blocks, key=lambda b: (not named[b], -heavy[b], b)):
        wishes = {wish for name in block if (wish := wished[name]) is not None}
        if len(wishes) > 1:
            told = ", ".join(f"'{n}' on {wished[n]}" for n in block if wished[n] is not None)
            raise ValueError(
                f"parts that read one memory are placed apart, {told}; all that reads a memory "
                "lives on one worker, with the memory: name one worker for them"
            )
        originals = {name.split("#")[0] for name in block}
        beside = [taken[g] for g in taken if g.split("#")[0] in originals]
        free = [w for w in range(workers) if w not in beside] or list(range(workers))
        worker = wishes.pop() if wishes else min(free, key=lambda w: (load[w], w))
        load[worker] += heavy[block]
        for name in block:
            taken[name] = worker
            for node in groups[name]:
                home[node.id] = worker
    _place_others(wiring, nodes, by_hand, home)
    for numbers in wiring.together:
        if len({home[number] for number in numbers if number in home}) > 1:
            _refuse_parted(wiring, numbers, home)
    return home


def _wished(
    names: Sequence[str], group: Sequence[AbstractNode], by_hand: Mapping[str, int]
) -> int | None:
    """The worker that is named for parts that one node computes with, or None.

    Raises:
        ValueError: Several are.
    """
    wished = {by_hand[n.name] for n in group if n.name in by_hand}
    wished |= {by_hand[name] for name in names if name in by_hand}
    if len(wished) > 1:
        raise ValueError(
            f"part '{names[0]}' is placed on workers {sorted(wished)}; it lives on one"
        )
    return wished.pop() if wished else None


def _blocks(wiring: Wiring, groups: Mapping[str, Sequence[AbstractNode]]) -> list[tuple[str, ...]]:
    """Names of parts that live together, as they read one memory; most are by themselves."""
    head = {node.id: name for name, group in groups.items() for node in group}
    block = {name: [name] for name in groups}
    for numbers in wiring.together:
        names = [head[i] for i in numbers if i in head]
        for name in names[1:]:
            first, other = block[names[0]], block[name]
            if first is not other:
                first += other
                block |= dict.fromkeys(other, first)
    return list({id(names): tuple(sorted(names)) for names in block.values()}.values())


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


def _place_others(
    wiring: Wiring,
    nodes: Mapping[int, AbstractNode],
    by_hand: Mapping[str, int],
    home: dict[int, int],
) -> None:
    """Nodes without weights: beside the writer that they are wired to, copy by copy."""
    writers: dict[int, list[int]] = {}
    for (source, _), (reader, _) in wiring.readers.items():
        writers.setdefault(reader, []).append(source)
    left = [
        (operator, k, number)
        for operator, numbers in wiring.copies.items()
        for k, number in enumerate(numbers)
        if number not in home and number in nodes
    ]
    for _, _, number in left:
        name = wiring.nodes[number].name
        if name in by_hand:
            home[number] = by_hand[name]
    beside = {number: numbers for numbers in wiring.together for number in numbers}
    for operator, k, number in left:
        placed = [home[n] for n in beside.get(number, ()) if n in home]
        if placed:
            home.setdefault(number, placed[0])
        if number not in home and wiring.nodes[number].beside is None:
            home[number] = _nearest(operator, k, writers, wiring, home)
    for _, _, number in left:
        other = wiring.nodes[number].beside
        if other is not None:
            home[number] = home[other]


def _refuse_parted(wiring: Wiring, numbers: Sequence[int], home: Mapping[int, int]) -> NoReturn:
    memory, *readers = (wiring.nodes[n] for n in numbers)
    told = ", ".join(f"'{reader.name}' on {home[reader.id]}" for reader in readers)
    raise ValueError(
        f"memory '{memory.name}' on {home[memory.id]} and what reads it are placed on different "
        f"workers: {told}; they share a store: place them on one, or name one of them alone"
    )


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

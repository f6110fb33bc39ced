"""Which worker a node lives on.

Nodes of one part live together, with the part; copies of it on different workers. A node without
weights lives where most of its rows come from.

    measured costs     the worker with most to do has as little as can be found: its nodes' seconds,
                       those without weights among them, and the batches that it sends and
                       receives; all batches count once more, as they are waited for
    none               longest processing time first, by numbers of parameters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NoReturn, TypeAlias, final

from geartrain.engine.costs import BYTE_S, MESSAGE_S, NOTHING, NodeCost
from geartrain.graph.wiring import Wiring
from geartrain.nodes.node import AbstractNode
from geartrain.parts.part import PartState

Block: TypeAlias = tuple[str, ...]
"""Names of groups of nodes that live together."""

_SWAPPED: Final = 12  # blocks, at most, that are tried in each other's place


def place(
    wiring: Wiring,
    parts: Mapping[str, PartState],
    workers: int,
    by_hand: Mapping[str, int],
    costs: Mapping[str, NodeCost],
    among: Collection[int] | None = None,
) -> dict[int, int]:
    """Node number to worker.

    Args:
        wiring: The graph made into nodes.
        parts: By name.
        workers: How many.
        by_hand: Part or node name to worker.
        costs: By node name; where there are none, numbers of parameters stand for them.
        among: The nodes that are to be placed; None: all.

    Raises:
        ValueError: A name or a worker does not exist, or a part would be torn apart.
    """
    nodes = {n: x for n, x in wiring.nodes.items() if among is None or n in among}
    _check_names(nodes, parts, workers, by_hand)
    groups, whole = _groups(nodes)
    blocks = _blocks(wiring, groups)
    wished = {name: _wished(whole[name], group, by_hand) for name, group in groups.items()}
    fixed = {b: w for b in blocks if (w := _wish(b, wished)) is not None}
    if costs:
        beside = _beside(wiring, nodes, groups, blocks, by_hand)
        weight = _weights_by_cost(wiring, blocks, beside, costs)
    else:
        one = workers == 1  # all live there, whatever they weigh
        weight = {b: 0.0 if one else _parameters(b, whole, parts) for b in blocks}
    chosen = _longest_first(blocks, weight, fixed, workers)
    if costs and workers > 1:
        crossing = _crossings(wiring, beside, costs)
        bill = _Bill(weight, crossing, workers)
        together = {block: fixed.get(block, 0) for block in blocks}
        starts = [chosen, _in_a_row(blocks, weight, fixed, workers), together]
        chosen = min((_improved(start, fixed, bill) for start in starts), key=bill)
    home = {n.id: w for block, w in chosen.items() for name in block for n in groups[name]}
    _place_others(wiring, nodes, by_hand, home)
    for numbers in wiring.together:
        if len({home[number] for number in numbers if number in home}) > 1:
            _refuse_parted(wiring, numbers, home)
    return home


def loads(
    wiring: Wiring, home: Mapping[int, int], workers: int, costs: Mapping[str, NodeCost]
) -> list[float]:
    """Seconds of each worker where nodes live so, with its half of what batches from others cost:
    from workers, and by their bytes from the program."""
    found = [0.0] * workers
    for number, node in wiring.nodes.items():
        found[home[number]] += costs.get(node.name, NOTHING).seconds
    for number, seconds in _fed(wiring, costs):
        found[home[number]] += seconds / 2
    for a, b, seconds in _wires(wiring, costs):
        if home[a] != home[b]:
            found[home[a]] += seconds / 2
            found[home[b]] += seconds / 2
    return found


def fed_s(wiring: Wiring, costs: Mapping[str, NodeCost]) -> float:
    """Seconds of the bytes that the program feeds, its own half of them."""
    return sum(seconds for _, seconds in _fed(wiring, costs)) / 2


def shares(
    wiring: Wiring, by_hand: Mapping[str, int], costs: Mapping[str, NodeCost]
) -> dict[Block, float]:
    """Parts that live together, and seconds of their nodes and of those beside them."""
    groups, whole = _groups(wiring.nodes)
    blocks = _blocks(wiring, groups)
    beside = _beside(wiring, wiring.nodes, groups, blocks, by_hand)
    weight = _weights_by_cost(wiring, blocks, beside, costs)
    return {tuple(n for head in b for n in whole[head]): s for b, s in weight.items()}


def _longest_first(
    blocks: Sequence[Block],
    weight: Mapping[Block, float],
    fixed: Mapping[Block, int],
    workers: int,
) -> dict[Block, int]:
    """The costliest block goes to the worker with least to do, those placed by hand first."""
    load, chosen = [0.0] * workers, dict[Block, int]()
    taken: dict[str, set[int]] = {}  # where copies of a part live
    for block in sorted(blocks, key=lambda b: (b not in fixed, -weight[b], b)):
        originals = {name.split("#")[0] for name in block}
        beside = set().union(*(taken.get(name, ()) for name in originals))
        free = [w for w in range(workers) if w not in beside] or list(range(workers))
        worker = fixed[block] if block in fixed else min(free, key=lambda w: (load[w], w))
        load[worker] += weight[block]
        for name in originals:
            taken.setdefault(name, set()).add(worker)
        chosen[block] = worker
    return chosen


def _in_a_row(
    blocks: Sequence[Block],
    weight: Mapping[Block, float],
    fixed: Mapping[Block, int],
    workers: int,
) -> dict[Block, int]:
    """Blocks in the order of the graph, so that what follows one another lives together."""
    total, before, chosen = sum(weight.values()), 0.0, dict[Block, int]()
    for block in blocks:
        middle = before + weight[block] / 2
        worker = min(int(workers * middle / total), workers - 1) if total else 0
        chosen[block] = fixed.get(block, worker)
        before += weight[block]
    return chosen


@final
class _Bill:
    """What a placement costs; a smaller one is better.

    Args:
        weight: Seconds of each block.
        crossing: Seconds of the batches between two blocks, if these live apart.
        workers: How many.
    """

    def __init__(
        self,
        weight: Mapping[Block, float],
        crossing: Mapping[tuple[Block, Block], float],
        workers: int,
    ) -> None:
        self.workers = workers
        self._weight, self._crossing = weight, crossing
        originals = [(b, {name.split("#")[0] for name in b}) for b in weight]
        self._copies = [
            (a, b) for k, (a, one) in enumerate(originals) for b, two in originals[:k] if one & two
        ]

    def __call__(self, chosen: Mapping[Block, int]) -> tuple[int, float, float]:
        """Copies that live with one another, seconds of the worker with most, and of batches.

        While a batch is on its way somebody may have nothing to do, and who admits needs a core,
        too: so what all batches cost counts once more.
        """
        load, carried = [0.0] * self.workers, 0.0
        for block, worker in chosen.items():
            load[worker] += self._weight[block]
        for (a, b), seconds in self._crossing.items():
            if chosen[a] != chosen[b]:
                load[chosen[a]] += seconds / 2
                load[chosen[b]] += seconds / 2
                carried += seconds
        # Rounded, so that sums in another order are no reason to move.
        beside = sum(chosen[a] == chosen[b] for a, b in self._copies)
        seconds = max(load) + carried
        return beside, float(f"{seconds:.9g}"), float(f"{carried:.9g}")


def _improved(
    chosen: dict[Block, int], fixed: Mapping[Block, int], bill: _Bill
) -> dict[Block, int]:
    """Moved and swapped one by one, for as long as that makes it better."""
    best = bill(chosen)
    while True:
        found = min(_changed(chosen, fixed, bill.workers), key=bill, default=chosen)
        if bill(found) >= best:
            return chosen
        chosen, best = found, bill(found)


def _changed(
    chosen: Mapping[Block, int], fixed: Mapping[Block, int], workers: int
) -> Iterator[dict[Block, int]]:
    free = [block for block in chosen if block not in fixed]
    for block in free:
        for worker in range(workers):
            if worker != chosen[block]:
                yield {**chosen, block: worker}
    # Of many there is always one to move that makes up for the rest.
    for k, a in enumerate(free if len(free) <= _SWAPPED else ()):
        for b in free[:k]:
            if chosen[a] != chosen[b]:
                yield {**chosen, a: chosen[b], b: chosen[a]}


def _weights_by_cost(
    wiring: Wiring,
    blocks: Sequence[Block],
    beside: Mapping[int, Block | None],
    costs: Mapping[str, NodeCost],
) -> dict[Block, float]:
    """Seconds of each block, with those of the nodes that will live beside it."""
    weight = dict.fromkeys(blocks, 0.0)
    for number, block in beside.items():
        if block is not None:
            weight[block] += costs.get(wiring.nodes[number].name, NOTHING).seconds
    return weight


def _crossings(
    wiring: Wiring,
    beside: Mapping[int, Block | None],
    costs: Mapping[str, NodeCost],
) -> dict[tuple[Block, Block], float]:
    """Seconds of the batches that go from block to block."""
    found: dict[tuple[Block, Block], float] = {}
    for a, b, seconds in _wires(wiring, costs):
        ends = beside.get(a), beside.get(b)
        if ends[0] is not None and ends[1] is not None and ends[0] != ends[1]:
            key = ends[0], ends[1]
            found[key] = found.get(key, 0.0) + seconds
    return found


def _wires(wiring: Wiring, costs: Mapping[str, NodeCost]) -> Iterator[tuple[int, int, float]]:
    """Nodes that send to one another, and what their batches cost where they live apart.

    Of a node's bytes each of its wires has as many as the others.
    """
    readers_of = Counter(source for source, _ in wiring.readers)
    sources_of = Counter(reader for reader, _ in wiring.readers.values())
    for (source, _), (reader, _) in wiring.readers.items():
        writers, readers = wiring.copies[source], wiring.copies[reader]
        for k in range(max(len(writers), len(readers)) if writers and readers else 0):
            a, b = writers[min(k, len(writers) - 1)], readers[min(k, len(readers) - 1)]
            of_a = costs.get(wiring.nodes[a].name, NOTHING)
            of_b = costs.get(wiring.nodes[b].name, NOTHING)
            there = of_b.forward_bytes / sources_of[reader]
            back = of_a.backward_bytes / readers_of[source]
            yield a, b, (of_a.forward + of_b.backward) * MESSAGE_S + (there + back) * BYTE_S


def _fed(wiring: Wiring, costs: Mapping[str, NodeCost]) -> Iterator[tuple[int, float]]:
    """Nodes that read what is fed, and what its bytes cost, as if nothing else were read there."""
    for number in {wiring.readers[operator.id, 0][0] for operator in wiring.inputs.values()}:
        for node in wiring.copies[number]:
            yield node, costs.get(wiring.nodes[node].name, NOTHING).forward_bytes * BYTE_S


def _beside(
    wiring: Wiring,
    nodes: Mapping[int, AbstractNode],
    groups: Mapping[str, Sequence[AbstractNode]],
    blocks: Sequence[Block],
    by_hand: Mapping[str, int],
) -> dict[int, Block | None]:
    """The block that each node lives with, wherever that is; None: it is placed by hand."""
    number = {name: k for k, block in enumerate(blocks) for name in block}
    at = {node.id: number[name] for name, group in groups.items() for node in group}
    alone = [n.name for n in nodes.values() if n.name in by_hand and n.id not in at]
    _place_others(wiring, nodes, dict.fromkeys(alone, -1), at)
    return {n: blocks[k] if 0 <= k < len(blocks) else None for n, k in at.items()}


def _parameters(
    block: Block, whole: Mapping[str, Sequence[str]], parts: Mapping[str, PartState]
) -> float:
    names = [name for head in block for name in whole[head]]
    return float(sum(p.numel() for name in names for p in parts[name].parameters))


def _wish(block: Block, wished: Mapping[str, int | None]) -> int | None:
    """The worker that is named for a block.

    Raises:
        ValueError: Several are.
    """
    wishes = {wish for name in block if (wish := wished[name]) is not None}
    if len(wishes) > 1:
        told = ", ".join(f"'{n}' on {wished[n]}" for n in block if wished[n] is not None)
        raise ValueError(
            f"parts that read one memory are placed apart, {told}; all that reads a memory "
            "lives on one worker, with the memory: name one worker for them"
        )
    return wishes.pop() if wishes else None


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


def _blocks(wiring: Wiring, groups: Mapping[str, Sequence[AbstractNode]]) -> list[Block]:
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
    together: dict[str, list[str]] = {}  # by the first of them
    for node in nodes.values():
        names = node.part_names
        heads = {first.setdefault(name, name) for name in names}
        if heads <= {*names[:1]} and all(name in together for name in heads):
            continue
        parts = [part for head in heads for part in together.pop(head, [head])]
        first |= dict.fromkeys(parts, names[0])
        together[names[0]] = parts
    groups: dict[str, list[AbstractNode]] = {}
    whole: dict[str, list[str]] = {}
    for part, head in first.items():
        whole.setdefault(head, []).append(part)
    for node in nodes.values():
        if node.part_names:
            groups.setdefault(first[node.part_names[0]], []).append(node)
    return groups, whole


def _place_others(
    wiring: Wiring,
    nodes: Collection[int],
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
        if not isinstance(worker, int) or not 0 <= worker < workers:
            raise ValueError(
                f"placement puts '{name}' on worker {worker!r}; there are 0..{workers - 1}"
            )

"""Cycles of a graph: where they close, and what can be reached from where."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from geartrain.graph.operator import Port


def back_ports(readers: Mapping[Port, Port], first: Sequence[int] = ()) -> set[Port]:
    """Output ports without which the graph would have no cycle: those that lead back.

    Args:
        readers: Output port to the input port that it leads to.
        first: Where rows come in, if all are on cycles. What is found depends on it: seen from
            there, ways that part and meet again are beside one another.
    """
    ahead: dict[int, list[Port]] = {}
    for port in readers:
        ahead.setdefault(port[0], []).append(port)
    found: set[Port] = set()
    done: set[int] = set()
    entered = {reader for reader, _ in readers.values()}
    starts = [*(number for number in ahead if number not in entered), *first, *ahead]
    for start in starts:
        if start in done:
            continue
        path = {start}
        stack = [(start, iter(ahead.get(start, ())))]
        while stack:
            number, ports = stack[-1]
            for port in ports:
                reader = readers[port][0]
                if reader in path:
                    found.add(port)
                elif reader not in done:
                    path.add(reader)
                    stack.append((reader, iter(ahead.get(reader, ()))))
                    break
            else:
                stack.pop()
                path.discard(number)
                done.add(number)
    return found


def reached(starts: Collection[int], ahead: Mapping[int, set[int]]) -> frozenset[int]:
    """These, and all that is reached from them."""
    seen, stack = set(starts), list(starts)
    while stack:
        for reader in ahead.get(stack.pop(), set()) - seen:
            seen.add(reader)
            stack.append(reader)
    return frozenset(seen)

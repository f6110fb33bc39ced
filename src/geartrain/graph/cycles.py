"""Cycles of a graph: where they close, what is on them, and what can be reached from where.

A graph may be thousands of operators long, so nothing here calls itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from geartrain.graph.operator import Port

T = TypeVar("T", bound=Hashable)


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


def furthest_first(starts: Iterable[T], ahead: Callable[[T], Iterable[T]]) -> list[T]:
    """These and all that is reached from them, each behind those that it leads to.

    Args:
        starts: Looked at in this order.
        ahead: Where one leads to. On a cycle one of them comes before some that it leads to.
    """
    found: list[T] = []
    begun: set[T] = set()
    for start in starts:
        if start in begun:
            continue
        begun.add(start)
        stack = [(start, iter(ahead(start)))]
        while stack:
            place, rest = stack[-1]
            for further in rest:
                if further not in begun:
                    begun.add(further)
                    stack.append((further, iter(ahead(further))))
                    break
            else:
                found.append(place)
                stack.pop()
    return found


def components(ahead: Mapping[int, Collection[int]]) -> list[frozenset[int]]:
    """Those that lead to one another, together; each component behind those that lead to it.

    Args:
        ahead: To which ones each leads.
    """
    before: dict[int, list[int]] = {}
    for number, readers in ahead.items():
        for reader in readers:
            before.setdefault(reader, []).append(number)
    found: list[frozenset[int]] = []
    done: set[int] = set()
    for number in reversed(furthest_first(ahead, lambda k: ahead.get(k, ()))):
        if number in done:
            continue
        done.add(number)
        members = [number]
        for member in members:  # grows meanwhile
            more = {k for k in before.get(member, ()) if k not in done}
            done |= more
            members += sorted(more)
        found.append(frozenset(members))
    return found

"""Where nodes live, parts with them, and copies of the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from geartrain.engine.costs import NodeCost
from geartrain.engine.placement import place
from geartrain.graph.wiring import Wiring
from geartrain.sharing.letters import Letter
from geartrain.sharing.sharing import AbstractSharingState


def span_of(sharing: AbstractSharingState, workers: int) -> int:
    """How many workers a copy of the graph lives on; where there are none, all."""
    return max(1, workers // sharing.copies) if sharing.apart else workers


@final
class Homes:
    """Which worker has what.

    Args:
        wiring: The nodes.
        sharing: Says how many copies of the graph there are, and whether each has workers of its
            own.
        workers: How many.
        names: Node name to part name, for nodes with parameters.
        placement: Part or node name to worker; the rest is placed by ``costs``.
        costs: By node name, measured; empty: by numbers of parameters.
    """

    def __init__(
        self,
        wiring: Wiring,
        sharing: AbstractSharingState,
        workers: int,
        names: Mapping[str, str],
        placement: Mapping[str, int],
        costs: Mapping[str, NodeCost],
    ) -> None:
        self._wiring, self._sharing, self._workers = wiring, sharing, workers
        self._span = span_of(sharing, workers)
        self.of_node = self._placed(placement, costs)
        """Node number to worker."""
        self._parts: dict[int, set[tuple[str, int]]] = {w: set() for w in range(workers)}
        self._of_part: dict[tuple[str, int], int] = {}
        for number, part, copy in self._parts_used(names):
            worker = self.of_node[number]
            self._parts[worker].add((part, copy))
            self._of_part[part, copy] = worker

    def _placed(
        self, placement: Mapping[str, int], costs: Mapping[str, NodeCost]
    ) -> dict[int, int]:
        wiring, parts, span = self._wiring, self._sharing.parts, self._span
        if not self._sharing.apart:
            return place(wiring, parts, self._workers, placement, costs)
        copies = wiring.copies.values()
        if span == 1:
            return {n: k % self._workers for numbers in copies for k, n in enumerate(numbers)}
        first = {numbers[0] for numbers in copies if numbers}
        nodes = {wiring.nodes[n].name for n in first}
        # A part's name is that of all its copies.
        by_hand = {
            name if name in nodes or f"{name}#0" not in parts else f"{name}#0": worker
            for name, worker in placement.items()
        }
        home = place(wiring, parts, span, by_hand, costs, among=first)
        return {n: home[numbers[0]] + k * span for numbers in copies for k, n in enumerate(numbers)}

    def _parts_used(self, names: Mapping[str, str]) -> Iterator[tuple[int, str, int]]:
        """Of each node with parameters its number, its part and the copy."""
        for operator, numbers in self._wiring.copies.items():
            whole = self._wiring.throughs(operator)
            for part in (names[each.name] for each in whole if each.name in names):
                for copy, number in enumerate(numbers):
                    yield number, part, copy

    def parts_on(self, worker: int) -> set[tuple[str, int]]:
        """The parts that nodes of a worker use, and of which copy of the graph."""
        return self._parts[worker]

    def of_copy(self, copy: int) -> Sequence[int]:
        """The workers of a copy of the graph that has workers of its own."""
        span = self._span
        return [copy % self._workers] if span == 1 else range(copy * span, (copy + 1) * span)

    def copies_on(self, worker: int) -> Sequence[int]:
        """The copies of the graph that live on a worker, wholly or in part."""
        copies = self._sharing.copies
        if self._span == 1:
            return range(worker, copies, self._workers)
        return [worker // self._span] if worker < copies * self._span else []

    def of_letter(self, letter: Letter) -> int:
        """The worker of the copy of a part that a letter is for."""
        return self._of_part[letter.part, letter.receiver]

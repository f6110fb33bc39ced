"""Where in the graph a queue stands: the order in which a sweep comes by.

    leaf 1 ─► loop 2 ⟲ ─► readout 3 ─► loss 4        forward, and back again
    leaf 8 ◄─ loop 7 ⟲ ◄─ readout 6 ◄─ (loss answers where it stands)

The nodes of a loop stand at one place, as each of them may feed every other.
"""

from __future__ import annotations

from geartrain.graph.wiring import Wiring


def ranks(wiring: Wiring) -> dict[int, tuple[int, int]]:
    """Node number to its places: of its rows, and of its answers behind all rows.

    A place is the number of operators from which rows may come here, itself among them: one that
    feeds another and is not fed by it has fewer, and those of a loop have the same.
    """
    readers: dict[int, list[int]] = {}
    for (source, _), (reader, _) in wiring.readers.items():
        readers.setdefault(source, []).append(reader)
    before = dict.fromkeys(wiring.operators, 0)
    for start in wiring.operators:
        for reached in _reached(start, readers):
            before[reached] += 1
    last = 2 * len(before) + 1
    return {
        number: (before[operator], last - before[operator])
        for number, operator in wiring.operator_of.items()
    }


def _reached(start: int, readers: dict[int, list[int]]) -> set[int]:
    """The operators that rows may come to from this one, itself among them."""
    seen, ahead = {start}, [start]
    while ahead:
        for reader in readers.get(ahead.pop(), []):
            if reader not in seen:
                seen.add(reader)
                ahead.append(reader)
    return seen

"""What is said together: one message to each process, or a few if there is much.

Whatever any of them says stands in the stamps of all: a receiver that writes to another one by what
it is told is heard there after what that one is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

from geartrain.frames.message import IntArray
from geartrain.transport.causal import CausalOrder
from geartrain.transport.record import Record, joined

_MOST_TOGETHER: Final = 1 << 20
"""Bytes of arrays in one message of several records; a larger record has one of its own."""
_MANY_TOGETHER: Final = 64


@final
class SaidTogether:
    """Records of one process that wait for others that are said with them.

    Args:
        me: Number of the process.
        order: Numbers its messages.

    Attributes:
        gathers: Whether records wait.
    """

    __slots__ = ("_gathered", "_me", "_order", "gathers")

    def __init__(self, me: int, order: CausalOrder[Record]) -> None:
        self._me, self._order = me, order
        self.gathers = False
        self._gathered: dict[int, list[Record]] = {}  # of whom is written to, in that order

    def add(self, to: int, record: Record) -> None:
        """Have a record wait."""
        self._gathered.setdefault(to, []).append(record)

    def forget(self, who: int) -> None:
        """A process is gone: nothing waits for it."""
        self._gathered.pop(who, None)

    def messages(self) -> list[tuple[int, Record, IntArray]]:
        """To whom, what, and its stamp, of all that waits; nothing does afterwards."""
        if not self._gathered:
            return []
        gathered, self._gathered = self._gathered, {}
        order, me = self._order, self._me
        lots = [
            (to, joined(lot))
            for to, records in gathered.items()
            for lot in _lots(records)
            if to not in order.gone
        ]
        left = [0] * len(order.arrived)
        for to, _ in lots:
            order.count(to)
            left[to] += 1
        found: list[tuple[int, Record, IntArray]] = []
        for to, record in lots:
            stamp = order.sent.copy()
            stamp[me, to] -= left[to]
            left[to] -= 1
            found.append((to, record, stamp))
        return found


def _lots(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Records to one process, cut into those of one message each."""
    lot: list[Record] = []
    total = 0
    for record in records:
        nbytes = sum(x.nbytes for x in record.arrays if x is not None)
        if lot and (total + nbytes > _MOST_TOGETHER or len(lot) == _MANY_TOGETHER):
            yield lot
            lot, total = [], 0
        lot.append(record)
        total += nbytes
    yield lot

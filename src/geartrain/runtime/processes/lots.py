"""What workers are given ahead of time: lots of instances, as records for each of them.

A lot costs a message each way, and that the parent is woken, whatever is in it. Where instances are
small, one that has what a worker does in a while has many more than half of those in flight. What
waits at a worker sees no weights, so nothing grows old by it; but towards the end of the data lots
are smaller, so that all workers end together. A lot is what a worker does in as long of a core, not
of a clock: where cores are shared, with other workers or other programs, messages are as many as
where they are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from geartrain.engine.engine import Engine
from geartrain.engine.router import Delivery
from geartrain.engine.stock import Lot, waits_for
from geartrain.frames.frame import Admitted
from geartrain.frames.message import Forward, IntArray, join_arrays
from geartrain.runtime.processes.messages import admitted_to_record, lot_to_record
from geartrain.transport.record import Record

_LOT_S: Final = 0.25  # of a core's time
_KNOWN_S: Final = 0.2  # of a core's time, until it is known how many that are
_MOST: Final = 4096  # instances


def worth_a_lot(finished: int, seconds: float, left: int, workers: int) -> int:
    """Instances that are worth a lot, where they live wholly on a worker.

    Args:
        finished: In this pass, by all workers ...
        seconds: ... in so long of a core, all of theirs together.
        left: That are still to come.
        workers: How many.
    """
    each = finished / max(seconds, _KNOWN_S)  # a second of a core
    return min(int(each * _LOT_S), left // (workers + 1), _MOST)


def whole_lots(
    engine: Engine, news: Sequence[Admitted], deliveries: Sequence[Delivery], finished: IntArray
) -> Iterator[tuple[int, Record]]:
    """Instances to the workers on which they live wholly.

    Args:
        engine: The parent's.
        news: What has been admitted.
        deliveries: Its rows.
        finished: int64, instances finished in training in this pass, by copy.
    """
    controller, homes = engine.controller, engine.homes
    by_copy: dict[int, list[Admitted]] = {}
    for told in news:
        by_copy.setdefault(told.copy, []).append(told)
    for copy, some in by_copy.items():
        w = homes.of_copy(copy)[0]
        for told in some[:-1]:  # as when instances came one by one
            yield w, admitted_to_record(told)
        rows = [d for d in deliveries if homes.of_node[d.node] == w]
        slots = join_arrays([told.slots for told in some])
        elsewhere = controller.trained - int(finished[copy])
        lot = Lot(slots, controller.waits_for(slots), elsewhere, rows)
        yield w, lot_to_record(some[-1], lot)


def partial_lots(
    engine: Engine, news: Sequence[Admitted], deliveries: Sequence[Delivery], to: Collection[int]
) -> Iterator[tuple[int, Record]]:
    """To each worker the rows that it is fed of instances that live on several, and all frames.

    Args:
        engine, news, deliveries: As of ``whole_lots``.
        to: The workers.
    """
    *earlier, last = news
    slots = join_arrays([told.slots for told in news])
    frames = [admitted_to_record(told) for told in earlier]
    for w in to:
        for record in frames:
            yield w, record
        rows = [d for d in deliveries if engine.homes.of_node[d.node] == w]
        if rows:
            lot = Lot(slots, waits_for(rows, slots), engine.controller.trained, rows)
            yield w, lot_to_record(last, lot)
        else:
            yield w, admitted_to_record(last)


def bytes_each(news: Sequence[Admitted], deliveries: Sequence[Delivery]) -> int:
    """About how many bytes the rows of one instance are."""
    total = 0
    for delivery in deliveries:
        if isinstance(delivery.batch, Forward):
            total += sum(x.nbytes for x in delivery.batch.payload)
    return total // max(1, sum(told.slots.size for told in news))

"""What workers have in stock: instances that the parent gives them ahead of time, and how many.

Of a model that a worker has wholly, an instance goes to one worker, which begins it. Of a model
that is spread over workers, each gets the rows that it is fed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import final

import numpy as np

from geartrain.engine.engine import Engine
from geartrain.engine.router import Delivery
from geartrain.frames.message import IntArray
from geartrain.runtime.base import AbstractFeeder
from geartrain.runtime.processes.lots import bytes_each, partial_lots, whole_lots, worth_a_lot
from geartrain.transport.record import Record


@final
class Stocking:
    """What the parent of a pass gives its workers ahead of time.

    Args:
        engine, feeder: Of the parent.
        workers: How many begin.

    Attributes:
        whole: Whether an instance lives wholly on one worker.
        ahead: Whether instances go ahead that live on several.
    """

    def __init__(self, engine: Engine, feeder: AbstractFeeder, workers: int) -> None:
        self._engine, self._feeder = engine, feeder
        self.whole = engine.ahead.stock_up()
        self.ahead = feeder.waits_for_nobody and engine.ahead.may_go
        self._empty = workers if self.whole else 0  # that have had no lot
        self._finished = np.zeros(engine.sharing.copies, np.int64)  # in training, by copy
        self._bytes_each = 0  # of the rows of an instance, about

    def finished(self, copies: IntArray) -> None:
        """Instances have finished in training, of these copies."""
        self._finished += np.bincount(copies, minlength=self._finished.size)

    def size(self, busy_s: float, workers: int) -> None:
        """Have lots be as large as is worth a message, after so long of cores, all together."""
        finished, left = self._engine.controller.finished, self._feeder.left
        many = worth_a_lot(finished, busy_s, left, workers)
        self._engine.ahead.give_together(many, self._bytes_each)

    def gives_a_first(self) -> bool:
        """Whether the lot that is given now is the first of a worker's."""
        self._empty -= 1
        return self._empty >= 0

    def lots(
        self, deliveries: Sequence[Delivery], there: Collection[int]
    ) -> Iterator[tuple[int, Record]]:
        """What has been admitted, as records for the workers that live."""
        engine = self._engine
        news = engine.wiring.arena.take_news()
        if self.whole:
            self._bytes_each = bytes_each(news, deliveries)
            return whole_lots(engine, news, deliveries, self._finished)
        engine.ahead.go(bytes_each(news, deliveries))
        return partial_lots(engine, news, deliveries, there)

"""Feeders whose data do not answer in the middle of a minibatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from geartrain.engine.router import Outbox
from geartrain.errors import DataError
from geartrain.frames.instance import Instance
from geartrain.runtime.base import Feeder


class LeftBehind(BaseException):
    """Stands for the end of a thread that waited for data."""


class Data:
    """Two good instances, a bad one, a good one; then nobody waits for an answer any more."""

    def __init__(self) -> None:
        self._asked = 0

    def __iter__(self) -> Iterator[Instance]:
        return self

    def __next__(self) -> Instance:
        self._asked += 1
        if self._asked == 3:
            raise DataError("no such word")
        if self._asked > 4:
            raise LeftBehind
        return Instance({"x": torch.zeros(1, 2)})


class Door:
    """Wants minibatches of four."""

    packer: Any = None
    one_by_one = False
    whole = True

    def __init__(self) -> None:
        self.admitted: list[int] = []

    def want(self) -> int:
        return 4

    def admit(self, instances: Sequence[Instance]) -> Outbox:
        self.admitted.append(len(instances))
        return Outbox()


def test_what_was_admitted_before_the_data_stopped_is_handed_over_once() -> None:
    """Without it the controller would wait for instances that no worker has got."""
    feeder, door = Feeder(iter(Data()), "skip"), Door()
    with pytest.raises(LeftBehind):
        feeder.feed(door)
    assert (door.admitted, feeder.begun) == ([3], True)
    assert (feeder.taken, feeder.skipped) == (4, 1)
    feeder.close()
    assert feeder.feed(door) is not None
    assert not feeder.begun and feeder.feed(door) is None
    assert door.admitted == [3]

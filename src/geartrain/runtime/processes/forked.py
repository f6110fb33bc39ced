"""The way to the parent of a worker that was forked on its host: a channel, memory in common."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any, final

import torch

from geartrain.runtime.processes.control import Control
from geartrain.runtime.processes.locks import RegionLock
from geartrain.runtime.processes.members import AbstractChannel
from geartrain.runtime.processes.memory import (
    COMMON,
    NOTE_BYTES,
    RINGS,
    SharedRegion,
    common_of,
    loads,
)
from geartrain.transport.link import Transport
from geartrain.transport.rings import Bells, Rings


@final
class ForkedChannel(AbstractChannel):
    """A worker's end.

    Args:
        control: The channel to the parent.
    """

    shares = True

    def __init__(self, control: Control) -> None:
        self._control = control
        self.regions: dict[int, SharedRegion] = {}
        self._bells = Bells(())

    def await_pass(self) -> bytes:
        self._receive_regions()
        return self._control.receive()[0]

    def _receive_regions(self) -> None:
        """Take the memory that is new, and leave what nobody uses any more."""
        said, fds = self._control.receive()
        told = json.loads(said)
        self.regions |= {
            number: SharedRegion(fd, os.fstat(fd).st_size)
            for number, fd in zip(told["fresh"], fds, strict=False)
        }
        if bells := fds[len(told["fresh"]) :]:
            self._bells = Bells(bells)
        for number in told["gone"]:
            del self.regions[number]
        if told["gone"]:
            gc.collect()  # engines have cycles, and hold tensors

    def loads(self, content: bytes) -> Any:
        return loads(content, self.regions)

    def transport(self, me: int, n: int, place: tuple[str | None, int]) -> Transport:
        folder, generation = place
        assert folder is not None
        common = common_of(self.regions[COMMON].bytes, me, n)
        rings = Rings.if_possible(self.regions[RINGS].bytes.numpy(), me, n, self._bells)
        return Transport(me, n, Path(folder), generation, common=common, rings=rings)

    def join(self, transport: Transport, told: bytes) -> None:
        """All are found by the names of their socket files."""

    def note(self, worker: int) -> memoryview:
        place = worker * NOTE_BYTES // 8
        notes: Any = self.regions[0].bytes.view(torch.int64).numpy()
        return memoryview(notes)[place : place + 1]

    def lock(self, number: int) -> RegionLock:
        return RegionLock(self.regions[0], number)

    def tell(self, **what: Any) -> None:
        self._control.tell(**what)

    def hear(self) -> bytes:
        return self._control.receive()[0]

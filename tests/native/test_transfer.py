"""The ring of pinned memory, and answers that are looked at late; memory and events are ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from geartrain import device as transfer
from geartrain.device import Staging, Verdicts, moved, read, require_device, upload

CPU = torch.device("cpu")


class Device:
    """Stands for a GPU that has not got to the copies yet: events come true when it is told."""

    def __init__(self) -> None:
        self.events: list[Reached] = []
        self.waits = 0
        self.pinned: list[tuple[int, ...]] = []

    def pin(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.pinned.append(shape)
        return torch.empty(shape, dtype=dtype)

    def record(self, device: torch.device) -> Reached:
        self.events.append(Reached(self))
        return self.events[-1]


class Reached:
    """An event of such a device."""

    def __init__(self, device: Device) -> None:
        self._device, self.is_reached = device, False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self._device.waits += not self.is_reached
        self.is_reached = True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(transfer, "pinned", made.pin)
    monkeypatch.setattr(transfer, "recorded", made.record)
    return made


def test_what_goes_through_the_ring_arrives_whole(device: Device) -> None:
    ring = Staging(CPU, segment_bytes=256, segments=2)
    sources = [
        torch.arange(n).to(dtype).reshape(shape)
        for dtype in (torch.int64, torch.float32, torch.bool, torch.bfloat16)
        for n, shape in ((0, (0, 3)), (1, ()), (7, (7,)), (12, (3, 4)), (100, (100,)))
    ]
    sent = [ring.upload(x) for x in sources]
    for x, y in zip(sources, sent, strict=True):
        assert_close(y, x, rtol=0, atol=0)
        assert y.data_ptr() != x.data_ptr() or not x.numel()


def test_a_segment_is_not_written_again_before_the_device_has_read_it(device: Device) -> None:
    ring = Staging(CPU, segment_bytes=64, segments=3)
    for _ in range(3):
        ring.upload(torch.zeros(8))  # 32 bytes: two fill a segment
        ring.upload(torch.zeros(8))
    assert len(device.events) == 2 and not device.waits  # the ring is full, nothing was overwritten
    ring.upload(torch.zeros(8))
    assert device.waits == 1 and [e.is_reached for e in device.events] == [True, False, False]
    device.events[1].is_reached = True
    ring.upload(torch.zeros(8))
    ring.upload(torch.zeros(8))
    assert device.waits == 1  # the device was there already
    assert device.pinned == [(64,)] * 3


def test_what_is_larger_than_a_segment_gets_memory_of_its_own(device: Device) -> None:
    ring = Staging(CPU, segment_bytes=64)
    assert ring.upload(torch.arange(100.0)).tolist() == list(range(100))
    assert device.pinned == [(100,)] and not device.events


def test_a_ring_of_one_segment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"segments=1.*2 segments or more"):
        Staging(CPU, segments=1)


def test_a_verdict_is_heard_when_it_is_there_and_not_before(device: Device) -> None:
    heard: list[list[bool]] = []
    verdicts = Verdicts()
    verdicts.ask(torch.tensor([False, True]), heard.append)
    verdicts.look()
    assert not heard and not device.waits
    device.events[0].is_reached = True
    verdicts.look()
    assert heard == [[False, True]] and not device.waits


def test_good_verdicts_are_told_to_nobody_and_many_open_ones_are_waited_for(
    device: Device,
) -> None:
    heard: list[list[bool]] = []
    verdicts = Verdicts(most=2)
    for bad in (False, False, True):
        verdicts.ask(torch.tensor([bad]), heard.append)
    verdicts.look()
    assert device.waits == 1 and not heard  # one too many: the oldest was waited for
    verdicts.look(wait=True)
    assert heard == [[True]]
    verdicts.ask(torch.tensor([True]), heard.append)
    verdicts.forget()
    verdicts.look(wait=True)
    assert heard == [[True]]


def test_on_the_host_nothing_is_copied() -> None:
    rows = np.arange(4)
    sent = upload(rows, CPU)
    rows[0] = 9
    assert sent.tolist() == [9, 1, 2, 3]
    assert moved(sent, CPU) is sent
    assert read([sent.sum(), torch.tensor(0.5)]) == [15.0, 0.5]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("gpu", "device='gpu' is none that torch knows"),
        ("meta", "device='meta' is of a kind that parts cannot live on"),
        ("cuda:99", "device='cuda:99' does not exist; torch .* sees cpu"),
    ],
)
def test_a_device_that_cannot_be_is_refused_by_name(asked: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^part 'p': {said}"):
        require_device(asked, "part 'p'")


def test_the_cpu_is_always_there() -> None:
    assert require_device("cpu:0", "p") == require_device(CPU, "p") == CPU


def test_a_dry_run_sends_nothing_however_much_it_is() -> None:
    meta = torch.device("meta")
    for _ in range(2 * transfer.SEGMENTS):
        assert transfer.upload(np.zeros(transfer.SEGMENT_BYTES // 8), meta).is_meta
    assert meta not in transfer._stagings

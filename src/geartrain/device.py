"""Between the host and devices: copies that nobody waits for, and answers that are read late.

    host ── pinned ring ──► device        moved, upload: the copy runs while the host goes on
    device ──► device                     moved: behind what was asked of both before
    device ──► host                       moved, read: the only calls that wait
    device ─ flags ─► pinned ─► host      Verdicts: asked now, looked at when the answer is there

All threads are taken to ask their work of a device's current stream, torch's default: what one has
asked for before is done before what another asks for later, so tensors pass from worker to worker
without any wait.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEGMENT_BYTES: Final = 1 << 20
SEGMENTS: Final = 4
_ALIGNMENT: Final = 16
_CPU: Final = torch.device("cpu")


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@final
class Staging:
    """A ring of pinned memory through which small tensors reach a device.

    A tensor is copied behind the last one and sent from there; the host goes on at once. A segment
    that is full gets an event, and is written again only when the device has passed it, so that no
    copy is overwritten before it is done. Tensors that are larger than a segment get pinned memory
    of their own, which torch keeps until they are copied.

    Args:
        device: Where to.
        segment_bytes: Of one segment.
        segments: How many; made when they are first reached.
    """

    def __init__(
        self, device: torch.device, segment_bytes: int = SEGMENT_BYTES, segments: int = SEGMENTS
    ) -> None:
        if segment_bytes < 1 or segments < 2:
            raise ValueError(
                f"Staging(segment_bytes={segment_bytes}, segments={segments}): give 1 byte or more "
                "and 2 segments or more, one to write while the other is read"
            )
        self._device, self._segment_bytes, self._segments = device, segment_bytes, segments
        self._memory: list[Tensor] = []
        self._passed: list[Event | None] = [None] * segments
        self._at, self._used = -1, segment_bytes
        self._lock = threading.Lock()

    def upload(self, source: Tensor) -> Tensor:
        """A copy of a host tensor on the device; the source may change at once."""
        out = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        size = source.nbytes
        if not size:
            return out
        if size > self._segment_bytes:
            staged = pinned(tuple(source.shape), source.dtype).copy_(source)
            return out.copy_(staged, non_blocking=True)
        with self._lock:
            staged = self._room(size).view(source.dtype).view(source.shape)
            staged.copy_(source)
            out.copy_(staged, non_blocking=True)
        return out

    def _room(self, size: int) -> Tensor:
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + size > self._segment_bytes:
            self._turn()
            start = 0
        self._used = start + size
        return self._memory[self._at][start : self._used]

    def _turn(self) -> None:
        """On to the next segment, once the device has read what was in it."""
        if self._at >= 0:
            self._passed[self._at] = recorded(self._device)
        self._at = (self._at + 1) % self._segments
        if self._at == len(self._memory):
            self._memory.append(pinned((self._segment_bytes,), torch.uint8))
        elif (passed := self._passed[self._at]) is not None:
            passed.synchronize()


@final
class Verdicts:
    """Yes-or-no questions to a device whose answers are looked at when they are there.

    Args:
        most: Questions that may be open; one more waits for the oldest answer.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._open: deque[tuple[Tensor, Event, Callable[[list[bool]], None]]] = deque()

    def ask(self, bad: Tensor, tell: Callable[[list[bool]], None]) -> None:
        """Ask whether any of these is so.

        Args:
            bad: bool ``(k,)`` on a device.
            tell: Gets the answers, unless all are no; it is expected to raise.
        """
        flags = pinned(tuple(bad.shape), torch.bool)
        flags.copy_(bad, non_blocking=True)
        self._open.append((flags, recorded(bad.device), tell))

    def look(self, *, wait: bool = False) -> None:
        """Hear the answers that are there, oldest first, or all of them after a wait."""
        while self._open:
            flags, answered, tell = self._open[0]
            if not wait and len(self._open) <= self._most and not answered.query():
                return
            answered.synchronize()
            self._open.popleft()
            found: list[bool] = flags.tolist()
            if any(found):
                self.forget()
                tell(found)

    def forget(self) -> None:
        """Ask no more."""
        self._open.clear()


def upload(values: NDArray[Any], device: torch.device | None) -> Tensor:
    """An array as a tensor of a device; on the host, or with None, it is the same memory."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if device is None or device.type == "cpu" else moved(host, device)


def uploads(arrays: Sequence[NDArray[np.int64]], device: torch.device | None) -> list[Tensor]:
    """Arrays of whole numbers as tensors of a device, in one copy; as ``upload`` on the host."""
    if device is None or device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(each)) for each in arrays]
    whole = moved(torch.from_numpy(np.concatenate([each.ravel() for each in arrays])), device)
    parts = torch.split_with_sizes(whole, [each.size for each in arrays])
    return [part.view(each.shape) for part, each in zip(parts, arrays, strict=True)]


def moved(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device: x itself if it is there; waits for the copy only if that is the host.

    No gradient flows through it.
    """
    if x.device == device:
        return x
    x = x.detach()
    if device.type == "cpu":
        return _fetched(x)
    if x.is_cpu and device.type != "meta":  # a dry run of a module has nothing to send
        return _staging(device).upload(x)
    return x.to(device, non_blocking=True)


def read(values: Sequence[Tensor]) -> list[float]:
    """Numbers that lie on devices, after one wait for each device that has some."""
    found = [0.0] * len(values)
    for device in {x.device for x in values}:
        here = [i for i, x in enumerate(values) if x.device == device]
        numbers = torch.stack([values[i].double() for i in here]).tolist()
        for i, number in zip(here, numbers, strict=True):
            found[i] = number
    return found


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that devices copy from and to by themselves."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def recorded(device: torch.device) -> Event:
    """An event behind all that has been asked of the device's current stream."""
    event: Event = torch.cuda.current_stream(device).record_event()
    return event


def require_device(device: str | torch.device, whose: str) -> torch.device:
    """The device of this name, with its number.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        whose: Begins the message.

    Raises:
        ValueError: torch does not know it or does not see it.
    """
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{whose}: device={device!r} is none that torch knows ({str(error).splitlines()[0]}); "
            "give 'cpu', 'cuda' or 'cuda:0'"
        ) from error
    if asked.type == "cpu":
        return _CPU
    if asked.type != "cuda":
        raise ValueError(
            f"{whose}: device='{asked}' is of a kind that parts cannot live on; {_seen()}: give "
            "'cpu', or 'cuda' with a number"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = asked.index
    if index is None and count:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        raise ValueError(f"{whose}: device='{asked}' does not exist; {_seen()}: {_remedy(count)}")
    return torch.device("cuda", index)


def _seen() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = ", ".join(["cpu", *(f"cuda:{k}" for k in range(count))])
    return f"torch {torch.__version__} sees {devices}"


def _remedy(count: int) -> str:
    if count:
        return "give one of these, and look at CUDA_VISIBLE_DEVICES"
    if torch.version.cuda is None and torch.version.hip is None:
        return "give 'cpu', or install a build of torch with CUDA"
    return "give 'cpu', or look at the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"


_stagings: dict[torch.device, Staging] = {}


def _staging(device: torch.device) -> Staging:
    found = _stagings.get(device)
    return _stagings.setdefault(device, Staging(device)) if found is None else found


def _fetched(x: Tensor) -> Tensor:
    host = pinned(tuple(x.shape), x.dtype)
    host.copy_(x, non_blocking=True)
    recorded(x.device).synchronize()
    return host


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

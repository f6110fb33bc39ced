"""Records become frames and the same records again; what is not a message is refused."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from geartrain.errors import TransportError
from geartrain.transport.record import (
    APART_BYTES,
    PACKED_BYTES,
    Bounds,
    Record,
    decode,
    encode,
)

N = 3
STAMP = np.arange(N * N, dtype=np.int64).reshape(N, N)
BOUNDS = Bounds(N)
TENSORS = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
ARRAYS = ["?", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def frames_of(record: Record) -> list[bytes]:
    """As they come out of a socket."""
    return [bytes(frame) for frame in encode(record, STAMP, 1, 4)]


def there_and_back(record: Record) -> Record:
    envelope, found = decode(frames_of(record), BOUNDS)
    assert (envelope.sender, envelope.generation) == (1, 4)
    assert np.array_equal(envelope.stamp, STAMP)
    assert envelope.nbytes == sum(map(len, frames_of(record)))
    return found


def bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def require_same(found: Any, given_: Any) -> None:
    if given_ is None:
        assert found is None
    elif isinstance(given_, Tensor):
        assert isinstance(found, Tensor)
        assert (found.dtype, found.shape) == (given_.dtype, given_.shape)
        assert torch.equal(bits(found), bits(given_))
    else:
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (given_.dtype, given_.shape)
        assert found.tobytes() == given_.tobytes()
        assert found.flags.writeable and found.flags.aligned


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 0, 2), (4, 7), (1, 2, 1, 3)])
@pytest.mark.parametrize("dtype", TENSORS, ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.arange(math.prod(shape)).remainder(2).reshape(shape).to(dtype)
    found = there_and_back(Record(7, arrays=(None, tensor, tensor))).arrays
    for x, expected in zip(found, (None, tensor, tensor), strict=True):
        require_same(x, expected)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0), (4, 7)])
@pytest.mark.parametrize("dtype", ARRAYS)
def test_arrays_of_every_dtype_and_shape_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype)
    (found,) = there_and_back(Record(7, arrays=(array,))).arrays
    require_same(found, array)


@st.composite
def records(draw: st.DrawFn) -> Record:
    integers = st.integers(-(2**63), 2**63 - 1)
    ints = tuple(draw(st.lists(integers, max_size=5)))
    floats = tuple(draw(st.lists(st.floats(), max_size=4)))
    arrays: list[object] = []
    for _ in range(draw(st.integers(0, 5))):
        rows = draw(st.sampled_from([0, 1, 3, 5, 40, 3000]))
        width = draw(st.sampled_from([1, 2, 7]))
        which = draw(st.integers(0, 3))
        if which == 0:
            arrays.append(None)
        elif which == 1:
            arrays.append((np.arange(rows * width) % 100).astype("i2").reshape(rows, width))
        elif which == 2:
            arrays.append((torch.arange(rows * width) % 100).to(torch.bfloat16).view(rows, width))
        else:
            arrays.append(np.arange(rows))
    return Record(draw(st.integers(0, 0xFFFF)), ints, floats, tuple(arrays))


@given(records())
def test_any_record_comes_back_and_no_message_is_longer_than_it_says(record: Record) -> None:
    found = there_and_back(record)
    assert (found.kind, found.ints) == (record.kind, record.ints)
    assert struct.pack(f"{len(found.floats)}d", *found.floats) == struct.pack(
        f"{len(record.floats)}d", *record.floats
    )
    for x, expected in zip(found.arrays, record.arrays, strict=True):
        require_same(x, expected)


def test_what_came_can_be_written_to_and_outlives_the_frames() -> None:
    large, small = torch.ones(PACKED_BYTES), torch.ones(3)
    for arrays in ((small, np.ones(3)), (large, small, np.ones(9000))):
        frames = [bytearray(frame) for frame in encode(Record(1, arrays=arrays), STAMP, 0, 0)]
        _, record = decode(frames, BOUNDS)
        del frames
        for x in record.arrays:
            x += 1
            assert (x == 2).all()


def test_large_arrays_are_frames_that_share_the_memory_of_what_is_sent() -> None:
    large, small = torch.zeros(PACKED_BYTES // 4), np.arange(5)
    frames = encode(Record(1, arrays=(small, large)), STAMP, 0, 0)
    assert len(frames) == 2
    assert np.shares_memory(np.asarray(frames[1]), large.numpy())
    _, record = decode([bytes(frame) for frame in frames], BOUNDS)
    require_same(record.arrays[0], small)
    require_same(record.arrays[1], large)


def test_many_small_arrays_beyond_the_bound_stay_one_frame() -> None:
    arrays = tuple(torch.full((APART_BYTES // 8,), k) for k in range(40))[:40]
    small = tuple(x[: APART_BYTES // 16] for x in arrays)
    frames = frames_of(Record(1, arrays=small))
    assert len(frames) == 1 and len(frames[0]) > PACKED_BYTES
    for x, expected in zip(decode(frames, BOUNDS)[1].arrays, small, strict=True):
        require_same(x, expected)


def test_views_and_what_numpy_does_not_know_are_sent_as_they_look() -> None:
    square = torch.arange(12.0).view(3, 4)
    turned = torch.tensor([1 + 2j, 3 - 1j]).conj()
    negative = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    given_ = (square.t(), square[:, 1:3], square.clone().requires_grad_(), turned, negative)
    for x, expected in zip(there_and_back(Record(1, arrays=given_)).arrays, given_, strict=True):
        assert torch.equal(x, expected.detach())
    array = np.arange(12).reshape(3, 4)
    there = (array.T, array[:, ::2], array.astype(">i4"))
    for x, expected in zip(there_and_back(Record(1, arrays=there)).arrays, there, strict=True):
        assert np.array_equal(x, expected) and x.dtype.isnative


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (Record(1 << 16), "kind"),
        (Record(1, (1 << 63,)), "64 bits"),
        (Record(1, tuple(range(70000))), "65536"),
        (Record(1, arrays=(np.array(["a"]),)), "<U1"),
        (Record(1, arrays=(np.zeros((1,) * 9),)), "9 dimensions"),
        (Record(1, arrays=(torch.zeros((1,) * 9),)), "9 dimensions"),
        (Record(1, arrays=(torch.zeros(2, dtype=torch.bits8),)), "bits8"),
        (Record(1, arrays=(np.zeros(2, "M8[s]"),)), "datetime64"),
    ],
)
def test_what_no_message_can_carry_is_refused_with_its_name(record: Record, told: str) -> None:
    with pytest.raises(TransportError, match=told):
        encode(record, STAMP, 0, 0)


SAMPLE = Record(3, (1, -2), (0.5,), (np.arange(6).reshape(2, 3), None, torch.ones(3, 5)))
LARGE = Record(
    3, (1, -2), (0.5,), (torch.zeros(PACKED_BYTES), None, np.arange(5), torch.ones(9999), None)
)


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_bytes_that_nobody_sent_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(TransportError):
        decode(frames, BOUNDS)


@given(st.data())
def test_a_good_beginning_and_garbage_behind_it_is_refused_or_a_record(data: st.DataObject) -> None:
    good = frames_of(SAMPLE)[0]
    kept = data.draw(st.integers(4, len(good)))
    behind = data.draw(st.binary(max_size=400))
    try:
        _, record = decode([good[:kept] + behind], BOUNDS)
    except TransportError:
        return
    assert all(x is None or isinstance(x, Tensor | np.ndarray) for x in record.arrays)


@pytest.mark.parametrize("sample", [SAMPLE, LARGE], ids=["packed", "apart"])
@given(data=st.data())
def test_flipped_bits_are_refused_or_give_what_fits_into_the_bytes(
    sample: Record, data: st.DataObject
) -> None:
    frames = [bytearray(frame) for frame in frames_of(sample)]
    for _ in range(data.draw(st.integers(1, 4))):
        # most bits of a large message are numbers of arrays: aim at what describes them
        at = data.draw(st.integers(0, 8 * min(len(frames[0]), 300) - 1))
        frames[0][at // 8] ^= 1 << at % 8
    try:
        envelope, record = decode([bytes(frame) for frame in frames], BOUNDS)
    except TransportError:
        return
    assert sum(x.nbytes for x in record.arrays if x is not None) <= envelope.nbytes


@pytest.mark.parametrize("sample", [SAMPLE, LARGE], ids=["packed", "apart"])
@given(data=st.data())
def test_a_message_that_is_cut_or_longer_is_refused(sample: Record, data: st.DataObject) -> None:
    frames = frames_of(sample)
    which = data.draw(st.integers(0, len(frames) - 1))
    change = data.draw(st.sampled_from(["cut", "longer", "gone", "twice"]))
    if change == "cut":
        frames[which] = frames[which][: data.draw(st.integers(0, len(frames[which]) - 1))]
    elif change == "longer":
        frames[which] += data.draw(st.binary(min_size=1, max_size=16))
    elif change == "gone":
        del frames[which]
    else:
        frames.insert(which, frames[which])
    with pytest.raises(TransportError):
        decode(frames, BOUNDS)


def test_two_frames_that_changed_places_are_refused() -> None:
    head, first, second = frames_of(LARGE)
    assert len(first) != len(second)
    with pytest.raises(TransportError, match="frame"):
        decode([head, second, first], BOUNDS)


def test_a_bool_that_is_neither_is_refused() -> None:
    (frame,) = frames_of(Record(1, arrays=(torch.ones(8, dtype=torch.bool),)))
    broken = frame[:-8] + bytes([1, 0, 1, 2, 1, 1, 1, 1])
    with pytest.raises(TransportError, match="bools is 2"):
        decode([broken], BOUNDS)


def test_lengths_that_nobody_could_allocate_are_refused() -> None:
    (frame,) = frames_of(Record(1, arrays=(np.zeros((0, 1, 1)),)))
    shape = struct.pack("<3q", 0, 1, 1)
    for wrong in ((0, 1 << 40, 1 << 40), (0, -1, -1), (-1, -8, 0), (2**62, 2, 2), (-4, -2, 1)):
        assert frame.count(shape) == 1
        with pytest.raises(TransportError):
            decode([frame.replace(shape, struct.pack("<3q", *wrong))], BOUNDS)


def test_bounds_are_of_the_receiver() -> None:
    frames = frames_of(SAMPLE)
    with pytest.raises(TransportError, match="process"):
        decode(frames, Bounds(N + 1))
    with pytest.raises(TransportError, match="200 at most"):
        decode(frames, Bounds(N, 200))
    with pytest.raises(TransportError, match="beginning"):
        decode([b"gtw0" + frames[0][4:]], BOUNDS)

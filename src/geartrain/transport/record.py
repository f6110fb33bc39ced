"""What processes tell one another: a kind, numbers and arrays, as frames of bytes and back.

    below 64 KiB   [ head | stamp | ints | floats | shapes | array | array | ... ]
    larger         [ head | stamp | ints | floats | shapes | small arrays ]  [ array ]  [ array ]

All of a small message is one frame: its arrays are copied once and found again where they came, 8
bytes aligned. Of a larger one each large array is a frame by itself, which nobody copies here.
Numbers are little-endian. The **stamp** says what was sent before (`causal.py`).

Nothing here names a class or a function, and every count, shape and length is compared with the
bytes that came before anything is made of it: what is not a message raises ``TransportError`` and
makes no more than a copy of itself.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from struct import Struct
from typing import Any, Final, NoReturn, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import TransportError
from geartrain.frames.message import IntArray

Array: TypeAlias = NDArray[Any] | Tensor
Frame: TypeAlias = bytes | bytearray | memoryview

HEARD: Final = 0xFFFF
"""Kind of a record that says only, by its stamp, what its sender has had; no poll returns it."""
GONE: Final = 0xFFFE
"""A process is gone, its number the first int: what it sent and nobody has is not waited for."""
SEVERAL: Final = 0xFFFC
"""Kind of a record that is several in one; no poll returns it."""
PACKED_BYTES: Final = 1 << 16
"""A message of fewer bytes is one frame."""
APART_BYTES: Final = 1 << 13
"""An array of so many bytes, in a larger message, is a frame of its own."""
MOST_BYTES: Final = 1 << 30
MOST_DIMENSIONS: Final = 8

_MAGIC: Final = b"gtw1"  # with the version
_HEAD: Final = Struct("<4s6HIIQQ")
"""Magic; kind, sender, side of the stamp, ints, floats, arrays; words, frames of arrays;
generation, bytes of all frames."""
_NONE: Final = 0  # the code of an array that is not there
_MOST_WORDS: Final = 128
"""Descriptions of so many are kept."""
_MOST_LAYOUTS: Final = 256
"""That are kept. Where shapes repeat they are few; where they do not, each is a kilobyte for
nothing, and 4,096 of them made workers grow by 4 MiB over a long training."""
_PADS: Final = tuple(bytes(k) for k in range(8))


@final
@dataclass(slots=True, eq=False)
class Record:
    """A message.

    Args:
        kind: What it is about, 0..65535; ``HEARD`` belongs to transports.
        ints: Each fits into 64 bits.
        floats: Come back to the last bit.
        arrays: Tensors of the host come back as tensors, numpy arrays as numpy arrays, None as
            None; of any shape of 8 dimensions at most.
    """

    kind: int
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    arrays: tuple[Array | None, ...] = ()


def joined(records: Sequence[Record]) -> Record:
    """Several records as one, for one receiver; ``parted`` has them again."""
    if len(records) == 1:
        return records[0]
    ints: list[int] = []
    floats: list[float] = []
    arrays: list[Array | None] = []
    for each in records:
        ints += each.kind, len(each.ints), len(each.floats), len(each.arrays), *each.ints
        floats += each.floats
        arrays += each.arrays
    return Record(SEVERAL, tuple(ints), tuple(floats), tuple(arrays))


def parted(record: Record) -> list[Record]:
    """The reverse of ``joined``, for a record of kind ``SEVERAL``.

    Raises:
        TransportError: Its counts are not those of what it holds.
    """
    ints, floats, arrays = record.ints, record.floats, record.arrays
    found: list[Record] = []
    at = a = b = 0
    while at < len(ints):
        if at + 4 > len(ints):
            _refuse("several records", f"{len(ints) - at} ints", "4 for each of them")
        kind, i, f, x = ints[at : at + 4]
        at += 4
        fits = 0 <= i <= len(ints) - at and 0 <= f <= len(floats) - a and 0 <= x <= len(arrays) - b
        if not fits or not 0 <= kind < SEVERAL - 1:
            _refuse("one of several records", (kind, i, f, x), "a kind, and counts of what is left")
        found.append(Record(kind, ints[at : at + i], floats[a : a + f], arrays[b : b + x]))
        at, a, b = at + i, a + f, b + x
    if a < len(floats) or b < len(arrays):
        left = f"{len(floats) - a} floats and {len(arrays) - b} arrays"
        _refuse("end of several records", left, "none")
    return found


@final
@dataclass(slots=True, eq=False)
class Envelope:
    """What is written on a message.

    Args:
        sender: Number of the process.
        generation: Of the run's processes.
        stamp: int64 ``(n, n)``, what the sender knew to have been sent, by whom and to whom.
        nbytes: Of all its frames.
    """

    sender: int
    generation: int
    stamp: IntArray
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Bounds:
    """What a receiver accepts.

    Args:
        n: Processes that there are.
        most_bytes: Of one message, all frames together.
    """

    n: int
    most_bytes: int = MOST_BYTES


_CARRIED: Final[dict[torch.dtype, torch.dtype | None]] = {
    **{
        getattr(torch, name): None
        for name in (
            *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""Dtypes of tensors, and as what numpy sees those that it does not know."""
_NUMPY: Final = [
    np.dtype(code)
    for code in ("?", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
]
NUMPY_CODES_FROM: Final = 64  # codes of numpy's dtypes begin here
_TENSOR_CODES: Final = {dtype: (k, view) for k, (dtype, view) in enumerate(_CARRIED.items(), 1)}
_NUMPY_CODES: Final = {dtype: k for k, dtype in enumerate(_NUMPY, NUMPY_CODES_FROM)}
_INT64: Final = np.dtype(np.int64)


def _bools(array: NDArray[Any]) -> NDArray[Any]:
    """Bools that are nothing else: torch computes nonsense with others."""
    most = int(array.view(np.uint8).max(initial=0))
    if most > 1:
        _refuse("array of bools", most, "0 or 1")
    return array


def _bool_tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(_bools(array))


def _seen_as(dtype: torch.dtype, array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).view(dtype)


KINDS: Final[dict[int, tuple[np.dtype[Any], Callable[[Any], Array] | None]]] = {
    **{
        code: (
            torch.empty(0, dtype=view or dtype).numpy().dtype,
            partial(_seen_as, dtype) if view else torch.from_numpy,
        )
        for dtype, (code, view) in _TENSOR_CODES.items()
    },
    **{code: (dtype, None) for dtype, code in _NUMPY_CODES.items()},
    _TENSOR_CODES[torch.bool][0]: (np.dtype("?"), _bool_tensor),
    _NUMPY_CODES[np.dtype("?")]: (np.dtype("?"), _bools),
}
"""Of each code: as what numpy reads it, and what makes of that what was sent."""

if sys.byteorder != "little":  # pragma: no cover
    raise TransportError("messages between processes are little-endian, and this machine is not")


def encode(record: Record, stamp: IntArray, sender: int, generation: int) -> list[Any]:
    """The frames of a message.

    Args:
        record: What is in it; the large arrays of a large message are not copied here.
        stamp: int64 ``(n, n)``, contiguous.
        sender: Who sends, below n.
        generation: 0 or more.

    Returns:
        Bytes, and one buffer for each array that is a frame by itself.

    Raises:
        TransportError: A dtype, shape or number that no message can carry.
    """
    words: list[int] = []
    arrays: list[NDArray[Any]] = []
    inside = 0
    for x in record.arrays:
        if x is None:
            words.append(_NONE)
            continue
        array, code = plain_tensor(x) if isinstance(x, Tensor) else _plain(x)
        shape = array.shape
        arrays.append(array)
        words.append(code | len(shape) << 8)
        words += shape
        inside += array.nbytes + 7 & -8
    ints, floats = record.ints, record.floats
    count = len(words)
    before = _HEAD.size + stamp.nbytes + 8 * (len(ints) + len(floats) + count)
    apart: list[Any] = []
    total = before + inside
    if total >= PACKED_BYTES:
        apart, arrays, total = _set_apart(arrays, words, before)
    try:
        head = _HEAD.pack(
            _MAGIC,
            record.kind,
            sender,
            stamp.shape[0],
            len(ints),
            len(floats),
            len(record.arrays),
            count,
            len(apart),
            generation,
            total,
        )
        numbers = _numbers(len(ints), len(floats), count).pack(*ints, *floats, *words)
    except struct.error as error:
        raise TransportError(
            f"a record of kind {record.kind} with {len(ints)} ints, {len(floats)} floats and "
            f"{len(record.arrays)} arrays does not fit ({error}): give a kind and counts below "
            "65536, and ints of 64 bits; more numbers go into an array"
        ) from error
    parts: list[Any] = [head, stamp, numbers]
    for array in arrays:
        parts.append(array)
        if odd := array.nbytes & 7:
            parts.append(_PADS[8 - odd])
    packed = b"".join(parts)
    return [packed, *apart] if apart else [packed]


def decode(frames: Sequence[Frame], bounds: Bounds) -> tuple[Envelope, Record]:
    """The message that frames are; arrays lie in their memory, and may be written to.

    Args:
        frames: As they came; the first one is copied unless it is a ``bytearray``.
        bounds: What is accepted.

    Raises:
        TransportError: They are no message, or beyond the bounds; names what, its value, and what
            was expected.
    """
    first = frames[0] if frames else b""
    size = len(first)
    if size < _HEAD.size:
        _refuse("first frame", f"{size} bytes", f"{_HEAD.size} or more")
    magic, kind, sender, n, ints, floats, arrays, words, apart, generation, total = (
        _HEAD.unpack_from(first)
    )
    if magic != _MAGIC:
        _refuse("beginning", repr(magic), repr(_MAGIC))
    if n != bounds.n or sender >= n:
        _refuse("sender", f"{sender} of {n}", f"one of {bounds.n} processes")
    lengths = (size,) if len(frames) == 1 else tuple(map(len, frames))
    came = sum(lengths)
    if total != came or total > bounds.most_bytes:
        expected = f"the {came:,} that came, {bounds.most_bytes:,} at most"
        _refuse("size", f"{total:,} bytes", expected)
    if apart != len(lengths) - 1:
        _refuse("number of frames", f"1 + {apart}", f"the {len(lengths)} that came")
    at = _HEAD.size + 8 * n * n
    described = at + 8 * (ints + floats)
    here = described + 8 * words
    if here > size or arrays > words:
        told = f"{ints} ints, {floats} floats, {arrays} arrays in {words} words"
        _refuse("head", told, f"what fits into a frame of {size} bytes")
    base = first if type(first) is bytearray else bytearray(first)
    layout = _layout if words <= _MOST_WORDS else _layout.__wrapped__
    places, inside, sizes = layout(bytes(base[described:here]), arrays)
    if here + inside != size:
        _refuse("arrays", f"{inside:,} bytes", f"the {size - here:,} bytes behind their shapes")
    if sizes != lengths[1:]:
        _refuse("arrays in frames of their own", f"{sizes} bytes", f"the {lengths[1:]} that came")
    stamp: IntArray = np.ndarray((n, n), _INT64, base, _HEAD.size)
    numbers = _numbers(ints, floats, 0).unpack_from(base, at)
    found = _arrays(places, base, here, frames[1:] if apart else ())
    record = Record(kind, numbers[:ints], numbers[ints:], found)
    return Envelope(sender, generation, stamp, total), record


_Place: TypeAlias = "tuple[tuple[int, ...], np.dtype[Any], int, Callable[[Any], Array] | None]"
"""Of an array: its shape, as what numpy reads it, where it begins behind the words (-1: it is a
frame by itself), and what makes of it what was sent, if it is not that already."""


@lru_cache(_MOST_LAYOUTS)
def _layout(described: bytes, count: int) -> tuple[tuple[_Place | None, ...], int, tuple[int, ...]]:
    """What the words say about arrays; batches that are alike are looked at once.

    Returns:
        The places of ``count`` arrays, the bytes of those inside, and of each that is a frame.
    """
    # Without signs: a length below 0 is one that no message has room for.
    words = Struct(f"<{len(described) // 8}Q").unpack(described)
    places: list[_Place | None] = []
    apart: list[int] = []
    at = inside = 0
    while len(places) < count:
        word = words[at] if at < len(words) else -1
        at += 1
        if word == _NONE:
            places.append(None)
            continue
        ndim, kind = word >> 8 & 255, KINDS.get(word & 255)
        if kind is None or ndim > MOST_DIMENSIONS or word >> 17 or at + ndim > len(words):
            _refuse("array", f"described as {word:#x}", "a known dtype and 8 dimensions at most")
        dtype, make = kind
        shape = words[at : at + ndim]
        at += ndim
        nbytes = math.prod(shape) * dtype.itemsize
        _require_sane(shape, nbytes)
        if word >> 16:
            places.append((shape, dtype, -1, make))
            apart.append(nbytes)
        else:
            places.append((shape, dtype, inside, make))
            inside += nbytes + 7 & -8
    if at != len(words):
        _refuse("end", f"{len(words) - at} words after the last array", "none")
    return tuple(places), inside, tuple(apart)


def _arrays(
    places: tuple[_Place | None, ...], base: bytearray, here: int, apart: Sequence[Frame]
) -> tuple[Array | None, ...]:
    """The arrays of a layout that fits, in the first frame from ``here`` on and in the others."""
    found: list[Array | None] = []
    frames = iter(apart)
    for place in places:
        if place is None:
            found.append(None)
            continue
        shape, dtype, at, make = place
        if at >= 0:
            array = np.ndarray(shape, dtype, base, here + at)
        else:
            array = _view(next(frames), shape, dtype)
        found.append(array if make is None else make(array))
    return tuple(found)


def _view(frame: Frame, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A frame as an array that can be written to and is aligned: itself if it can be."""
    array: NDArray[Any] = np.ndarray(shape, dtype, frame)
    flags = array.flags
    return array if flags.writeable and flags.aligned else array.copy()


def _require_sane(shape: tuple[int, ...], nbytes: int) -> None:
    """Refuse an empty array which would be too large for any machine if it were not empty."""
    if not nbytes and math.prod(d for d in shape if d) > 1 << 48:
        _refuse("shape", shape, "lengths whose product is 2**48 at most, those of 0 left out")


def _plain(array: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """The array, contiguous, of this machine's byte order, and the code of its dtype."""
    code = _NUMPY_CODES.get(array.dtype)
    if code is not None and array.flags.c_contiguous and array.ndim <= MOST_DIMENSIONS:
        return array, code
    if code is None:
        native = array.dtype.newbyteorder("=")
        code = _NUMPY_CODES.get(native)
        if code is None:
            _refuse_dtype(array.dtype)
        array = array.astype(native)
    if array.ndim > MOST_DIMENSIONS:
        _refuse_shape(array.shape)
    return (array if array.flags.c_contiguous else array.copy("C")), code


def plain_tensor(tensor: Tensor) -> tuple[NDArray[Any], int]:
    """As ``_plain``, of a tensor, as the array that shares its memory if that is contiguous."""
    known = _TENSOR_CODES.get(tensor.dtype)
    if known is None:
        _refuse_dtype(tensor.dtype)
    code, view = known
    array: NDArray[Any]
    try:
        array = (tensor if view is None else tensor.view(view)).numpy()
    except (TypeError, RuntimeError):  # of a device, of autograd, conjugated
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        array = (tensor if view is None else tensor.view(view)).numpy()
    if array.ndim > MOST_DIMENSIONS:
        _refuse_shape(array.shape)
    return (array if array.flags.c_contiguous else array.copy("C")), code


def _set_apart(
    arrays: list[NDArray[Any]], words: list[int], before: int
) -> tuple[list[Any], list[NDArray[Any]], int]:
    """Large arrays, the others, and the bytes of all frames; large ones are marked in words."""
    apart: list[Any] = []
    inside: list[NDArray[Any]] = []
    total, place = before, 0
    for array in arrays:
        while words[place] == _NONE:
            place += 1
        here, place = place, place + 1 + array.ndim
        if array.nbytes >= APART_BYTES:
            words[here] |= 1 << 16
            apart.append(array)
            total += array.nbytes
        else:
            inside.append(array)
            total += array.nbytes + 7 & -8
    return apart, inside, total


@lru_cache(1024)
def _numbers(ints: int, floats: int, words: int) -> Struct:
    return Struct(f"<{ints}q{floats}d{words}q")


def _refuse_dtype(dtype: object) -> NoReturn:
    raise TransportError(
        f"an array of {dtype} cannot be sent; give numbers or bools of at most 128 bits"
    )


def _refuse_shape(shape: tuple[int, ...]) -> NoReturn:
    raise TransportError(
        f"an array of shape {shape} cannot be sent: it has {len(shape)} dimensions, and "
        f"{MOST_DIMENSIONS} are the most; reshape it"
    )


def _refuse(what: str, value: object, expected: str) -> NoReturn:
    raise TransportError(
        f"a message that cannot be read: {what} is {value}, expected {expected}. It was not sent "
        "by this version of geartrain, or was damaged on its way"
    )

"""The safetensors format, written and read in one pass, with a checksum.

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, data_offsets; "__metadata__" -> strings, "crc32" too
    data      the tensors' bytes, without gaps

The safetensors library reads these files. Ours is needed to write and read them: the library gives
no ``errno`` when the disk is full, refuses tensors that share memory or have gaps, and neither
writes nor checks a checksum, without which a flipped bit in a weight goes unnoticed.

Source: the format's description, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

import torch
from torch import Tensor

MAX_HEADER_BYTES: Final = 64 << 20  # the library refuses headers beyond 100 million bytes
_CHUNK_BYTES: Final = 4 << 20  # what is read or written is checksummed while it is in the cache
_NO_CRC: Final = "0" * 8
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor's place in the data, which begins with byte 0 after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds.

    Args:
        entries: In the order of their bytes, without gaps.
        metadata: Strings, without the checksum.
        data_begin: The byte in the file at which the data begins.
    """

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_begin: int
    crc: str = _NO_CRC

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_begin + (self.entries[-1].end if self.entries else 0)


def plan(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Header:
    """The header of the file that ``write`` will write for these tensors.

    Raises:
        ValueError: A tensor that cannot be stored, or a header beyond ``MAX_HEADER_BYTES``.
    """
    for name, tensor in tensors.items():
        _require_storable(name, tensor)
    # Wide items first keeps every tensor aligned to its item size, for readers that map the file.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries, end = [], 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape), begin, end))
    header = Header(tuple(entries), metadata, 0)
    return Header(header.entries, metadata, len(_header_bytes(header)))


def write(file: BinaryIO, header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Write the file, tensor by tensor; nobody may change them meanwhile.

    Args:
        file: Empty and seekable.
        header: What ``plan`` gave for the same tensors.
        tensors: Any layout in memory, any device; one at a time is copied if it must be.
    """
    file.write(_header_bytes(header))
    crc = _crc_of_header(header)
    for entry in header.entries:
        for chunk in _chunks(_bytes_of(tensors[entry.name])):
            crc = zlib.crc32(chunk, crc)
            file.write(chunk)
    file.seek(0)
    file.write(
        _header_bytes(Header(header.entries, header.metadata, header.data_begin, f"{crc:08x}"))
    )


def read_header(file: BinaryIO, file_bytes: int) -> Header:
    """Read and check everything before the data.

    Args:
        file: At its beginning; afterwards at the data.
        file_bytes: Its size; nothing beyond it is ever allocated.

    Raises:
        ValueError: Not this format, or truncated.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError(
            f"the first 8 bytes give a header of {length} bytes, expected 2 to {MAX_HEADER_BYTES}: "
            f"it is no safetensors file (pickles and archives of them are never loaded)"
        )
    if length > file_bytes - 8:
        raise ValueError(f"truncated: header of {length} bytes, but a file of {file_bytes}")
    try:
        document = json.loads(file.read(length).decode("utf-8"))
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"its header is a JSON {type(document).__name__}, expected an object")
    metadata = _parse_metadata(document.pop("__metadata__", {}))
    parsed = [_parse_entry(name, value) for name, value in document.items()]
    entries = tuple(sorted(parsed, key=lambda entry: (entry.begin, entry.end)))
    crc = metadata.pop("crc32", "")
    header = Header(entries, metadata, 8 + length, crc)
    _require_without_gaps(header, file_bytes)
    return header


def read_tensors(file: BinaryIO, header: Header) -> dict[str, Tensor]:
    """Read the data into fresh tensors on the CPU, and compare the checksum.

    Raises:
        ValueError: The file ends early, or its checksum is wrong or missing.
    """
    crc = _crc_of_header(header)
    tensors: dict[str, Tensor] = {}
    for entry in header.entries:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in _chunks(_bytes_of(tensor)):
            if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                raise ValueError(f"truncated: it ends inside of tensor '{entry.name}'")
            crc = zlib.crc32(chunk, crc)
        tensors[entry.name] = tensor
    if header.crc != f"{crc:08x}":
        raise ValueError(
            f"its checksum is {header.crc or 'missing'}, but its bytes have {crc:08x}: they were "
            f"changed after they were written"
        )
    return tensors


def _require_storable(name: str, tensor: Tensor) -> None:
    if name == "__metadata__":
        raise ValueError("a tensor is named '__metadata__', which the format reserves; rename it")
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"'{name}' is a {type(tensor).__name__}, expected a tensor: what a module's state_dict "
            "has besides, as of get_extra_state(), is to be a tensor, numbers, text, or lists, "
            "tuples and dicts of these"
        )
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ValueError(
            f"tensor '{name}' has layout {tensor.layout} on device {tensor.device}, expected a "
            f"dense tensor with values; make it dense (``to_dense()``) or leave it out"
        )
    if tensor.dtype not in _NAMES:
        raise ValueError(
            f"tensor '{name}' has dtype {tensor.dtype}, expected one of "
            f"{', '.join(str(dtype) for dtype in _NAMES)}; convert it"
        )


def _header_bytes(header: Header) -> bytes:
    text = _header_text(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header with the document would be {len(text)} bytes, expected at most "
            f"{MAX_HEADER_BYTES}; move large lists out of the document into tensors"
        )
    return len(text).to_bytes(8, "little") + text


def _header_text(header: Header) -> str:
    document: dict[str, object] = {"__metadata__": {**header.metadata, "crc32": header.crc}}
    for entry in header.entries:
        document[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [entry.begin, entry.end],
        }
    return json.dumps(document, separators=(",", ":"))


def _crc_of_header(header: Header) -> int:
    metadata = dict(sorted(header.metadata.items()))
    return zlib.crc32(_header_text(Header(header.entries, metadata, 0)).encode("utf-8"))


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), _CHUNK_BYTES):
        yield data[begin : begin + _CHUNK_BYTES]


def _parse_metadata(value: object) -> dict[str, str]:
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return dict(value)
    raise ValueError("its metadata is no object of strings")


def _parse_entry(name: str, value: object) -> TensorEntry:
    match value:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [begin, end]} if (
            code in _DTYPES and all(type(n) is int and n >= 0 for n in [*shape, begin, end])
        ):
            dtype = _DTYPES[code]
        case _:
            raise ValueError(f"tensor '{name}' is described by {value!r:.120}")
    needed = math.prod(shape) * dtype.itemsize
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"tensor '{name}' has the shape {shape}, whose strides no tensor can have")
    if end - begin != needed:
        raise ValueError(f"tensor '{name}' of shape {shape} has {end - begin} bytes, not {needed}")
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _require_without_gaps(header: Header, file_bytes: int) -> None:
    at = 0
    for entry in header.entries:
        if entry.begin != at:
            raise ValueError(f"tensor '{entry.name}' begins at byte {entry.begin}, expected {at}")
        at = entry.end
    if header.file_bytes != file_bytes:
        raise ValueError(f"truncated or overlong: {file_bytes} bytes, expected {header.file_bytes}")

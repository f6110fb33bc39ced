"""Arrays from an npz archive that anybody may have made.

    member ─► its header says dtype and shape ─► as many bytes as the member has? within the limit?
                                                  └► only then memory is taken, and the rest read

No pickles, no compression but numpy's own.
"""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from geartrain.data import limits
from geartrain.errors import DataError
from geartrain.files import open_regular, require_size

_LARGEST_SIZE: Final = 2**48  # of one dimension
_DENSEST: Final = 1100  # bytes that deflate makes of one, at most: about 1030


def read_npz(path: Path, names: Sequence[str], where: str) -> dict[str, NDArray[Any]]:
    """Read arrays by name.

    Args:
        path: The archive.
        names: Those that are wanted; others are not looked at.
        where: The module whose docstring says what they mean.

    Raises:
        DataError: It is no npz file, is damaged, lacks an array, holds pickled objects, or promises
            more than it has or than is read (``geartrain.data.limits``).
    """
    try:
        with open_regular(path) as stream:
            most = limits.most(limits.ARRAYS)
            require_size(os.fstat(stream.fileno()).st_size, most, path, limits.REMEDY)
            with zipfile.ZipFile(stream) as archive:
                arrays = _read(archive, names, path, most)
    except (OSError, ValueError, EOFError, zlib.error, *_OF_ARCHIVES) as error:
        raise DataError(
            f"no readable npz file: {error}; expected the arrays {', '.join(names)}, no pickled "
            "objects. Write it with numpy.savez_compressed, or fetch it anew",
            path=path,
        ) from error
    if absent := [name for name in names if name not in arrays]:
        raise DataError(
            f"no array {', '.join(absent)}; expected {', '.join(names)}. See the docstring of "
            f"{where} for their meaning",
            path=path,
        )
    return arrays


_OF_ARCHIVES: Final = (zipfile.BadZipFile, RuntimeError, OverflowError, MemoryError)
_OF_HEADERS: Final = (ValueError, TypeError, SyntaxError, LookupError, ArithmeticError, EOFError)
_OF_HEADERS_TOO: Final = (tokenize.TokenError, RecursionError, MemoryError)


def _read(
    archive: zipfile.ZipFile, names: Sequence[str], path: Path, most: int
) -> dict[str, NDArray[Any]]:
    there = set(archive.namelist())
    members = {name: archive.getinfo(f"{name}.npy") for name in names if f"{name}.npy" in there}
    total = 0
    for name, member in members.items():
        total += _checked_bytes(archive, name, member)
    require_size(total, most, path, f"these are bytes of arrays, decompressed; {limits.REMEDY}")
    arrays: dict[str, NDArray[Any]] = {}
    for name, member in members.items():
        with archive.open(member) as stream:
            arrays[name] = npy.read_array(stream, allow_pickle=False)
    return arrays


def _checked_bytes(archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> int:
    """Bytes of an array, which its member is able to hold.

    Raises:
        ValueError: It is not.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"array {name} is compressed in a way that numpy does not write")
    if member.file_size > _DENSEST * (member.compress_size + 1):
        raise ValueError(
            f"array {name} claims {member.file_size:,} bytes, which cannot come of the "
            f"{member.compress_size:,} that the archive has of it"
        )
    with archive.open(member) as stream:
        shape, dtype, begin = _header(name, stream)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded: they are pickles")
    if not dtype.itemsize or not all(0 <= size <= _LARGEST_SIZE for size in shape):
        raise ValueError(f"array {name} has shape {shape} and dtype {dtype}, which none has")
    needed = math.prod(shape) * dtype.itemsize
    if begin + needed != member.file_size:
        raise ValueError(
            f"array {name} of shape {shape} and dtype {dtype} takes {needed:,} bytes, and "
            f"{member.file_size - begin:,} are there"
        )
    return needed


def _header(name: str, stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype, and where the entries begin."""
    try:
        # What numpy reads of a header is some kilobytes; a copy of them says where it ends.
        start = io.BytesIO(stream.read(1 << 17))
        version = npy.read_magic(start)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"a header of version {version}")
        shape, _, dtype = read(start)
    except (*_OF_HEADERS, *_OF_HEADERS_TOO) as error:
        raise ValueError(f"array {name} has no header of numpy's: {error}") from error
    return shape, dtype, start.tell()

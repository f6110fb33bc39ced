"""Digits: MNIST from its four gzipped idx files.

    byte 0, 1   0, 0
    byte 2      8: the values are unsigned bytes
    byte 3      number of dimensions d: 3 for images, 1 for labels
    d times 4   the sizes, big-endian
    the rest    the values, row by row

Checked by content, never by a checksum of the gzip wrapper: two wrappers of the same data differ.
Source: LeCun, Bottou, Bengio, Haffner 1998.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, final

import numpy as np
from numpy.typing import NDArray

from geartrain.data import limits
from geartrain.data.folder import find_data
from geartrain.data.policy import Policy, Refusals
from geartrain.errors import DataError
from geartrain.files import open_regular, require_size

SIDE = 28
CLASSES = 10
FILES = {"train": "train", "test": "t10k"}


@final
@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """N images with their labels.

    Args:
        images: uint8 ``(N, 28, 28)``, 0 is background.
        labels: int64 ``(N,)``, 0..9.
        skipped: Records that were left out; 0 under the policy ``"raise"``.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    skipped: int

    def __len__(self) -> int:
        return len(self.labels)


def load_mnist(
    folder: Path | None = None,
    split: Literal["train", "test"] = "train",
    *,
    policy: Policy = "raise",
) -> Digits:
    """Read ``mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz`` of the data folder.

    Args:
        folder: The data folder, which holds ``mnist/``; None takes ``$GEARTRAIN_DATA``.
        split: ``"train"`` (60,000) or ``"test"`` (10,000).
        policy: What to do with a label that is not 0..9. A damaged file always raises, as its
            images and labels could no longer be matched.

    Raises:
        DataError: A file is missing, cut, no gzip, no idx, or of other sizes.
        ValueError: Another split.
    """
    if split not in FILES:
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    images_name = f"mnist/{FILES[split]}-images-idx3-ubyte.gz"
    labels_name = f"mnist/{FILES[split]}-labels-idx1-ubyte.gz"
    root = find_data(folder, images_name, labels_name)
    images, labels = read_idx(root / images_name, 3), read_idx(root / labels_name, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"images are {images.shape[1]} x {images.shape[2]}; expected {SIDE} x {SIDE}. "
            "Put the original file here",
            path=root / images_name,
        )
    if len(images) != len(labels):
        raise DataError(
            f"{len(labels)} labels for {len(images)} images of {images_name}; expected one each. "
            "Take both files from the same place",
            path=root / labels_name,
        )
    return _keep_good(images, labels, Refusals(policy, root / labels_name))


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read one gzipped idx file of unsigned bytes; the array is writable and owns its memory.

    Args:
        path: The ``.gz`` file.
        dimensions: How many the array must have.

    Raises:
        DataError: The file cannot be read or is cut, is no gzip, has another magic number, or
            more or fewer values than its sizes say; or these say more than is read
            (``geartrain.data.limits``). The message gives the byte.
    """
    start = 4 + 4 * dimensions
    header = _unzip(path, start)
    magic = bytes((0, 0, 8, dimensions))
    if header[:4] != magic:
        raise DataError(
            f"magic number (bytes 0 to 3) is 0x{header[:4].hex()}; expected 0x{magic.hex()}: "
            f"unsigned bytes in {dimensions} dimension{'s' if dimensions > 1 else ''}. See whether "
            "the images and labels files were exchanged, or fetch the file anew",
            path=path,
        )
    if len(header) < start:
        raise DataError(
            f"the content ends at byte {len(header)}, inside the header; expected {start} bytes "
            "of header. Fetch the file anew",
            path=path,
        )
    shape = tuple(int(size) for size in np.frombuffer(header, ">u4", dimensions, 4))
    expected = start + math.prod(shape)
    require_size(expected, limits.most(limits.ARRAYS), path, limits.REMEDY)
    # A little more than is wanted, to see whether the file ends there.
    content = _unzip(path, expected + 4096)
    if len(content) != expected:
        fault = "is cut" if len(content) < expected else "goes on too long"
        ends = "goes on past" if len(content) == expected + 4096 else "ends at"
        raise DataError(
            f"the content {fault}: it {ends} byte {len(content)}; expected byte {expected} for "
            f"sizes {' x '.join(map(str, shape))}. Fetch the file anew",
            path=path,
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _unzip(path: Path, most: int) -> bytearray:
    """So many bytes of the content, or all that there are."""
    content = bytearray()
    try:
        with open_regular(path) as stream:
            allowed = limits.most(limits.ARRAYS)
            require_size(os.fstat(stream.fileno()).st_size, allowed, path, limits.REMEDY)
            for piece in _unzipped(stream, most):
                content += piece
    except (EOFError, zlib.error) as error:
        what = str(error).replace("incorrect data check", "its CRC is wrong")  # zlib's word for it
        raise DataError(
            f"no whole gzip file: {what} (after {len(content)} bytes of content); expected a "
            "gzipped idx file. Fetch it anew, or compress it with gzip if it is not compressed",
            path=path,
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}; expected a gzipped idx file. Check name and "
            "permissions",
            path=path,
        ) from error
    return content


def _unzipped(stream: BinaryIO, most: int) -> Iterator[bytes]:
    """So many bytes in pieces, so that an error can tell how far the file was good.

    Not by ``gzip``, which reads zeros behind the end byte by byte, however many there are.

    Raises:
        EOFError, zlib.error: The file is cut or damaged.
    """
    unpacker, packed = zlib.decompressobj(_GZIP), b""
    while most:
        if unpacker.eof:
            if not (packed := _behind_zeros(stream, unpacker.unused_data)):
                return
            unpacker = zlib.decompressobj(_GZIP)
        if not packed and not (packed := stream.read(_PIECE)):
            raise EOFError("it ends before its end-of-stream marker")
        piece = unpacker.decompress(packed, min(most, _PIECE))
        packed = unpacker.unconsumed_tail
        most -= len(piece)
        yield piece


def _behind_zeros(stream: BinaryIO, rest: bytes) -> bytes:
    """The next bytes that are not zero, if there are any."""
    while not (rest := rest.lstrip(b"\0")):
        if not (rest := stream.read(_PIECE)):
            return b""
    return rest


_GZIP = 31  # zlib's number for a stream with gzip's header and checksum
_PIECE = 1 << 20


def _keep_good(images: NDArray[np.uint8], labels: NDArray[np.uint8], refusals: Refusals) -> Digits:
    wrong = labels >= CLASSES
    if not wrong.any():
        return Digits(images, labels.astype(np.int64), 0)
    for record in np.flatnonzero(wrong).tolist():
        refusals.refuse(
            DataError(
                f"record {record} (from 0): label {labels[record]}; expected 0..{CLASSES - 1}. "
                'Fetch the file anew, or read it with policy="skip"',
                path=refusals.path,
            )
        )
    kept = np.flatnonzero(~wrong)
    return Digits(images[kept], labels[kept].astype(np.int64), refusals.close(len(kept)))

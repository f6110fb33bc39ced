"""Checkpoints: one file that is either the old one or the new one, never something between.

    tensors, document ─► .name.3f9a01c2.partial ─► fsync ─► rename to name ─► fsync the folder

The file is a safetensors file; the document is JSON in its metadata under the key ``geartrain``.
A crash, a full disk or a kill at any moment leaves the file that was there; what is left of the
attempt is removed by the next one. Reading runs no code from the file: no pickle.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from torch import Tensor

from geartrain.codec import Json
from geartrain.errors import CheckpointError, NoRoomError
from geartrain.files import open_regular
from geartrain.schema import parsed
from geartrain.train import tensor_file

__all__ = ["FORMAT", "Checkpoint", "Json", "Retention", "read_checkpoint", "write_checkpoint"]

FORMAT: Final = 1
_KEY: Final = "geartrain"
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one file holds.

    Args:
        tensors: By name, on the CPU, each with memory of its own.
        document: The JSON that was written with them.
    """

    tensors: dict[str, Tensor]
    document: dict[str, Json]


def made_folder(path: Path | str) -> Path:
    """A folder for checkpoints, which is made if need be.

    Raises:
        CheckpointError: It cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"folder '{folder}' cannot be made: {error}; give one that is there, or "
            "that may be made"
        ) from error
    return folder


def write_checkpoint(
    path: Path | str, tensors: Mapping[str, Tensor], document: Mapping[str, Json]
) -> None:
    """Replace the file at ``path`` by a new checkpoint, whole or not at all.

    One process writes to a path at a time. Memory: at most one tensor is copied, and that only if
    it is not contiguous on the CPU already.

    Args:
        path: In a folder that exists. By custom it ends in ``.safetensors``.
        tensors: Dense, of any shape, strides and device; nobody may change them meanwhile. Two
            that share memory are written twice and come back apart.
        document: Values that JSON has, with text as keys; NaN and infinities are allowed and
            written as Python's ``json`` writes them.

    Raises:
        CheckpointError: Nothing was replaced, and the message says why and what to do. (Or, if it
            says so, the new file is in place and its folder could not be flushed.)
    """
    path = Path(path)
    if not path.name:
        raise CheckpointError(f"'{path}' is a folder: give the name of a file in it")
    text = json.dumps({"format": FORMAT, "document": _plain(document, f"{path}: document")})
    try:
        header = tensor_file.plan(tensors, {_KEY: text})
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    with _installed(path, header.file_bytes) as partial, partial.open("xb") as file:
        tensor_file.write(file, header, tensors)
        file.flush()
        os.fsync(file.fileno())


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint, whoever wrote it: nothing in it is executed, a pipe is not waited for.

    Raises:
        CheckpointError: The file is missing, not allowed to be read, foreign, damaged (by
            checksum), or of another format version; the message says which and what to do.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            header = tensor_file.read_header(file, os.fstat(file.fileno()).st_size)
            document = _document(path, header.metadata)
            return Checkpoint(tensor_file.read_tensors(file, header), document)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path}: no intact checkpoint: {error}. Use another checkpoint of the run, or copy "
            f"the file again from where it came"
        ) from error


@final
@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a run stay: the latest, the best, and perhaps the last few by number.

        latest.safetensors   best.safetensors   checkpoint-00000012.safetensors ...

    Names of the same checkpoint are hard links to one file where the file system has them.

    Args:
        folder: Made when needed.
        keep_last: How many numbered files stay; with 0 none is made or removed.

    Raises:
        ValueError: ``keep_last`` is negative.
    """

    folder: Path
    keep_last: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 0:
            raise ValueError(f"keep_last is {self.keep_last}, expected 0 or more")

    @property
    def latest(self) -> Path:
        """Where the last saved checkpoint is."""
        return self.folder / "latest.safetensors"

    @property
    def best(self) -> Path:
        """Where the last checkpoint saved with ``is_best`` is."""
        return self.folder / "best.safetensors"

    def numbered(self) -> list[Path]:
        """The numbered files that exist, in the order of their numbers."""
        return [path for _, path in self._numbered()]

    def save(
        self,
        number: int,
        tensors: Mapping[str, Tensor],
        document: Mapping[str, Json],
        *,
        is_best: bool,
    ) -> None:
        """Write one checkpoint under every name it deserves, then remove numbered files too many.

        ``latest`` changes last: who resumes from it never misses that it was the best. Files
        numbered above ``number`` (the run was set back) are left until the run gets there.

        Args:
            number: Such as the epoch or the count of saves; 0 or more.
            tensors: As for ``write_checkpoint``.
            document: As for ``write_checkpoint``.
            is_best: Also becomes ``best``.

        Raises:
            CheckpointError: As for ``write_checkpoint``; every name still has a whole file.
        """
        if number < 0:
            raise ValueError(f"number is {number}, expected 0 or more")
        with _explained(self.folder, 0):
            self.folder.mkdir(parents=True, exist_ok=True)
        names = [self.best] if is_best else []
        names += [self.folder / f"checkpoint-{number:08d}.safetensors"] if self.keep_last else []
        first, *others = [*names, self.latest]
        write_checkpoint(first, tensors, document)
        for other in others:
            _link(first, other)
        if self.keep_last:
            self._remove_old(number)

    def _remove_old(self, number: int) -> None:
        past = [path for n, path in self._numbered() if n <= number]
        for path in past[: -self.keep_last]:
            with _explained(path, 0):
                path.unlink(missing_ok=True)

    def _numbered(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        found = [
            (int(match[1]), path)
            for path in self.folder.iterdir()
            if (match := re.fullmatch(r"checkpoint-(\d{8,})\.safetensors", path.name))
        ]
        return sorted(found)


def _link(source: Path, target: Path) -> None:
    with _installed(target, source.stat().st_size) as partial:
        try:
            os.link(source, partial)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _copy(source, partial)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, 4 << 20)
        new.flush()
        os.fsync(new.fileno())


@contextmanager
def _installed(path: Path, needed: int) -> Iterator[Path]:
    """Lend a name beside ``path``; what was made there, flushed, becomes ``path``."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with _explained(path, needed):
        _remove_leftovers(path)
        try:
            yield partial
            os.replace(partial, path)
        finally:
            # Also after success: renaming a link to the very file that ``path`` is does nothing.
            partial.unlink(missing_ok=True)
    try:
        _flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the new checkpoint is in place, but its folder could not be flushed "
            f"({error}), so a power cut may bring the previous one back. Check the disk"
        ) from error


def _remove_leftovers(path: Path) -> None:
    # Names are never used twice, so a file of ours in the making can be removed but not mixed up:
    # a second writer makes the first one's rename fail, and no half file gets into place.
    leftover = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    for sibling in path.parent.iterdir():
        if leftover.fullmatch(sibling.name):
            sibling.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kept = "the previous checkpoint is intact" if path.is_file() else "no file was left there"
        said = f"{path}: cannot be written ({kept}):"
        if error.errno in _NO_ROOM:
            raise NoRoomError(
                f"{said} {error.strerror}: {needed} bytes are needed and "
                f"{_free_bytes(path.parent)} free; make room, raise the quota or file-size limit, "
                "or choose another folder"
            ) from error
        raise CheckpointError(f"{said} {_reason(error)}") from error


def _reason(error: OSError) -> str:
    what = error.strerror or str(error)
    match error:
        case PermissionError():
            return f"{what}; change the permissions of file and folder, or run as their owner"
        case FileNotFoundError():
            return (
                f"{what}: {error.filename}; make the folder, check the name, or stop the other "
                "process that writes there"
            )
        case IsADirectoryError() | NotADirectoryError():
            return f"{what}: {error.filename}; give the name of a file in a folder"
    return f"{what}; check the disk"


def _free_bytes(folder: Path) -> str:
    try:
        return str(shutil.disk_usage(folder).free)
    except OSError as error:
        return f"an unknown number ({error.strerror})"


def _document(path: Path, metadata: Mapping[str, str]) -> dict[str, Json]:
    if _KEY not in metadata:
        raise ValueError(f"its metadata has no '{_KEY}': another program wrote it")
    envelope = parsed(metadata[_KEY], "its document")
    version = envelope.get("format") if isinstance(envelope, dict) else None
    if version != FORMAT or type(version) is not int:
        raise CheckpointError(
            f"{path}: has checkpoint format {version!r:.40}, expected {FORMAT}. Read it with the "
            f"version of geartrain that wrote it, or upgrade geartrain"
        )
    document = envelope.get("document")
    if not isinstance(document, dict):
        raise ValueError(f"its document is a {type(document).__name__}, expected an object")
    return document


def _plain(value: Json, place: str) -> Json:
    """The value as dicts and lists, or an error that names the place that is no JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{place}: the key {key!r} is no text; use str({key!r})")
        return {key: _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, tuple | bytes):
        return [_plain(item, f"{place}.{i}") for i, item in enumerate(value)]
    raise CheckpointError(
        f"{place} is a {type(value).__name__}; expected None, bool, int, float, str, list or dict. "
        f"Tuples become lists, so convert them; tensors go among the tensors"
    )

"""The folder of a run: what was asked for, what came of it, and what is needed to go on.

    runs/<name>/config.json          settings and versions; written first
                metrics.jsonl        events, a line each
                graph.mmd            the graph as Mermaid source
                latest.safetensors   the last checkpoint, and best.safetensors
                trace.json           with a trace
                run.log              messages, and the traceback of a failure
                result.json          written last: a run without it is unfinished
                files/...            what the recipe needs to be built again
                .lock                held by the process that trains here; see ``lock``

Everything is text or safetensors; nothing in it is executed when it is read.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from geartrain.errors import DataError, GeartrainError
from geartrain.files import read_bytes
from geartrain.schema import Mismatch, parsed, read
from geartrain.train.lock import held

_FILES: Final = "files"
_MOST_FILES: Final = 100
_MOST_BYTES: Final = 256 << 20  # of one of them; a vocabulary has some 100 kB


@final
@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps its things.

    Args:
        path: The folder; it need not exist.
    """

    path: Path

    @property
    def latest(self) -> Path:
        """The last checkpoint."""
        return self.path / "latest.safetensors"

    @property
    def best(self) -> Path:
        """The checkpoint with the best validation."""
        return self.path / "best.safetensors"

    @property
    def metrics(self) -> Path:
        """Events as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """The Perfetto trace."""
        return self.path / "trace.json"

    @property
    def log(self) -> Path:
        """Messages of the run."""
        return self.path / "run.log"

    @property
    def result_file(self) -> Path:
        """The result of a run that has ended well."""
        return self.path / "result.json"

    @property
    def config_file(self) -> Path:
        """The settings."""
        return self.path / "config.json"

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config_file.is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder, which is made if need be, from other processes.

        Raises:
            BusyError: One of them has it.
            GeartrainError: The folder cannot be written.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(self.path / ".lock"))
            except OSError as error:
                raise self._unwritable(error) from error
            yield

    def check_free(self) -> None:
        """Refuse to write over a run that somebody may want.

        Raises:
            ValueError: There is a checkpoint or a result of a run here, or a file has the name.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is not a folder; give --out another name")
        if self.result_file.exists():
            raise ValueError(
                f"{self.path} holds a finished run; give --out another folder, or remove this one"
            )
        if self.latest.exists():
            raise ValueError(
                f"{self.path} holds an unfinished run; continue it with --resume, or give --out "
                "another folder"
            )

    def create(self, config: Mapping[str, Any], graph: str, files: Mapping[str, str]) -> None:
        """Write what is known before training; leftovers of a run without checkpoint are removed.

        Args:
            config: Any JSON.
            graph: Mermaid source.
            files: Name to text.

        Raises:
            GeartrainError: The folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in (self.metrics, self.trace, self.log, self.best):
                left.unlink(missing_ok=True)
            shutil.rmtree(self.path / _FILES, ignore_errors=True)
            for name, text in files.items():
                (self.path / _FILES).mkdir(exist_ok=True)
                _write(self.path / _FILES / name, text)
            _write(self.path / "graph.mmd", graph)
            _write(self.config_file, json.dumps(config, indent=2) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> GeartrainError:
        return GeartrainError(
            f"{self.path}: the run's folder cannot be written: {error.strerror or error}; give "
            "--out a folder that can"
        )

    def read_config(self) -> dict[str, Any]:
        """What ``create`` wrote.

        Raises:
            DataError: This is no folder of a run, or the file was damaged.
        """
        if not self.is_run:
            what = "has no config.json" if self.path.is_dir() else "is no folder"
            raise DataError(
                f"this is not the folder of a run: it {what}; expected what 'geartrain train' "
                "made, such as runs/listreduce-0-...",
                path=self.path,
            )
        return _read_object(self.config_file)

    def read_files(self) -> dict[str, str]:
        """What the recipe kept.

        Raises:
            DataError: A file cannot be read.
        """
        folder = self.path / _FILES
        if not folder.is_dir():
            return {}
        files = [file for file in sorted(folder.iterdir()) if file.is_file()]
        if len(files) > _MOST_FILES:
            raise DataError(
                f"holds {len(files)} files; a recipe keeps {_MOST_FILES} at most: this is not the "
                "folder of a run",
                path=folder,
            )
        return {file.name: _read(file) for file in files}

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, which makes the run a finished one."""
        _write(self.result_file, json.dumps(result, allow_nan=False) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        """The result, or None for an unfinished run.

        Raises:
            DataError: The file cannot be read, or is none that ``finish`` wrote.
        """
        if not self.result_file.exists():
            return None
        result = _read_object(self.result_file)
        try:
            read(_Result, result, "it", more=True)
            json.dumps(result, allow_nan=False)
        except ValueError as error:
            raise DataError(
                f"{error}; copy the run's folder again", path=self.result_file
            ) from error
        return result


@final
@dataclass(frozen=True, slots=True)
class _Result:
    """What is looked at of a result."""

    reached: Mapping[str, Any] | None
    valid: Mapping[str, float | None]


def _write(path: Path, text: str) -> None:
    """All of it or nothing, also when the machine stops."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        content = read_bytes(path, _MOST_BYTES, "this is not what geartrain wrote there")
        return content.decode("utf-8")
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror or error}; copy the run's folder again", path=path
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"cannot be read: {error}; copy the run's folder again", path=path
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = parsed(_read(path), "it")
    except Mismatch as error:
        raise DataError(f"{error}; copy the run's folder again", path=path) from error
    if not isinstance(value, dict):
        raise DataError(f"holds a {type(value).__name__}, expected a JSON object", path=path)
    return value

"""One file that is either the old checkpoint or the new one, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
import pickle  # noqa: TID251  (to see it refused)
import resource
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from geartrain.errors import CheckpointError
from geartrain.train import checkpoint as module
from geartrain.train import tensor_file
from geartrain.train.checkpoint import Retention, read_checkpoint, write_checkpoint

SHARED = torch.arange(12.0).reshape(3, 4)
TENSORS = {
    "transposed": SHARED.t(),
    "row of the same memory": SHARED[1],
    "expanded": torch.tensor([7.0]).expand(5),
    "0-d": torch.tensor(3.25),
    "empty": torch.zeros(0, 3, dtype=torch.float64),
    "bf16": torch.tensor([[1.5, -0.0], [float("inf"), float("nan")]], dtype=torch.bfloat16),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "bool": torch.tensor([True, False, True]),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
    "weight": torch.nn.Parameter(torch.tensor([0.1, 0.2], dtype=torch.float16)),
    "f8": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
}
OLD = {"weight": torch.full((500,), 1.0)}
NEW = {"weight": torch.full((500,), 2.0)}


def assert_same(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.shape == expected[name].shape, name
        assert bits(tensor) == bits(expected[name]), name


def bits(tensor: Tensor) -> list[int]:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist()  # type: ignore[no-any-return]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file can grow beyond ``size`` bytes: as a full disk, but of this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fork(child: Callable[[], None]) -> int:
    """Run ``child`` in a copy of this process, which ends with it; return its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking beside torch's threads: the child starts none
        pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    return pid


def no_space(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.safetensors", TENSORS, {})
    assert_same(read_checkpoint(tmp_path / "a.safetensors").tensors, TENSORS)


def test_tensors_that_shared_memory_come_back_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", TENSORS, {})
    tensors = read_checkpoint(tmp_path / "a").tensors
    tensors["transposed"].zero_()
    assert tensors["row of the same memory"].tolist() == [4.0, 5.0, 6.0, 7.0]


@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    shapes=st.dictionaries(st.text(max_size=4), st.lists(st.integers(0, 3), max_size=3)),
    document=st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
)
def test_any_names_shapes_and_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], document: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_checkpoint(path, tensors, document)
    found = read_checkpoint(path)
    assert_same(found.tensors, tensors)
    assert json.dumps(found.document) == json.dumps(document)  # 0 and False, 0.0 and -0.0 differ


def test_the_document_keeps_nan_and_infinities(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", {}, {"best": float("-inf"), "loss": float("nan")})
    document = read_checkpoint(tmp_path / "a").document
    assert document["best"] == float("-inf")
    assert document["loss"] != document["loss"]


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, TENSORS, {"epoch": 3})
    assert_same(load_file(path), TENSORS)
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["geartrain"]) == {"format": 1, "document": {"epoch": 3}}


def test_the_header_reader_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        name: t.detach().resolve_conj().contiguous().clone(memory_format=torch.contiguous_format)
        for name, t in TENSORS.items()
    }
    save_file(tensors, path)
    with path.open("rb") as file:
        header = tensor_file.read_header(file, path.stat().st_size)
    assert {(e.name, e.dtype, e.shape) for e in header.entries} == {
        (name, t.dtype, tuple(t.shape)) for name, t in tensors.items()
    }


@pytest.mark.parametrize("size", [0, 7, 100, 1000, 2100])
def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, OLD, {"epoch": 1})
    needed = path.stat().st_size
    with file_size_limit(size), pytest.raises(CheckpointError) as error:
        write_checkpoint(path, NEW, {"epoch": 2})
    assert_same(read_checkpoint(path).tensors, OLD)
    assert list(tmp_path.iterdir()) == [path]
    for part in (str(path), f"{needed} bytes are needed", "previous checkpoint is intact"):
        assert part in str(error.value)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_found_full_only_at_the_end_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, OLD, {})
    with monkeypatch.context() as patch:
        patch.setattr(os, call, no_space)
        with pytest.raises(CheckpointError, match=r"previous checkpoint is intact.*No space left"):
            write_checkpoint(path, NEW, {})
    assert_same(read_checkpoint(path).tensors, OLD)
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_checkpoint_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(100), pytest.raises(CheckpointError, match="no file was left there"):
        write_checkpoint(tmp_path / "a", NEW, {})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_writing_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "a"
    write_checkpoint(path, OLD, {})
    with monkeypatch.context() as patch:
        patch.setattr(zlib, "crc32", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(path, NEW, {})
    assert_same(read_checkpoint(path).tensors, OLD)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("size", [0, 9, 700, 2100])
def test_a_process_killed_at_any_byte_leaves_the_previous_checkpoint(
    tmp_path: Path, size: int
) -> None:
    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills at this very byte
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with file_size_limit(size):
            write_checkpoint(path, NEW, {})

    path = tmp_path / "a.safetensors"
    write_checkpoint(path, OLD, {})
    _, status = os.waitpid(fork(child), 0)
    assert os.WTERMSIG(status) == signal.SIGXFSZ
    assert_same(read_checkpoint(path).tensors, OLD)
    assert len(list(tmp_path.iterdir())) == 2  # what the killed process could not remove
    write_checkpoint(path, NEW, {})
    assert_same(read_checkpoint(path).tensors, NEW)
    assert list(tmp_path.iterdir()) == [path]


def test_kill_9_in_a_loop_of_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {str(i): torch.full((1 << 17,), float(i)) for i in range(8)}
    for saves in (1, 2, 3):
        receive, send = os.pipe()

        def child(send: int = send) -> None:
            while True:
                write_checkpoint(path, tensors, {})
                os.write(send, b".")

        pid = fork(child)
        os.close(send)
        for _ in range(saves):
            assert os.read(receive, 1) == b"."
        os.kill(pid, signal.SIGKILL)  # in the next save, about to write 4 MiB
        os.close(receive)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        assert_equal_sums(read_checkpoint(path).tensors, tensors)


def assert_equal_sums(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert {k: float(t.sum()) for k, t in tensors.items()} == {
        k: float(t.sum()) for k, t in expected.items()
    }


def test_the_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        folder = found.st_ino == tmp_path.stat().st_ino
        calls.append("flush the folder" if folder else f"flush {found.st_size} bytes")
        fsync(descriptor)

    def spy_replace(source: Path, target: Path) -> None:
        assert source.parent == target.parent
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_checkpoint(tmp_path / "a", NEW, {})
    size = (tmp_path / "a").stat().st_size
    assert calls == [f"flush {size} bytes", "rename", "flush the folder"]


def test_a_folder_that_cannot_be_flushed_is_reported_after_the_new_file_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    monkeypatch.setattr(module, "_flush_folder", no_space)
    with pytest.raises(CheckpointError, match="the new checkpoint is in place"):
        write_checkpoint(path, NEW, {})
    assert_same(read_checkpoint(path).tensors, NEW)


def test_of_two_writers_to_one_path_the_overtaken_one_fails_and_no_half_file_gets_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "a", tensor_file.write

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(tensor_file, "write", write)
        write_checkpoint(path, NEW, {})
        write(*arguments)

    monkeypatch.setattr(tensor_file, "write", overtaken)
    with pytest.raises(CheckpointError, match="stop the other process"):
        write_checkpoint(path, OLD, {})
    assert_same(read_checkpoint(path).tensors, NEW)


def test_leftovers_of_other_names_are_not_touched(tmp_path: Path) -> None:
    others = [".b.01234567.partial", ".a.0123456.partial", "a.01234567.partial", ".a.notes.partial"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".a.01234567.partial").touch()
    write_checkpoint(tmp_path / "a", NEW, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "a"])


def test_a_flipped_bit_and_a_cut_are_noticed_wherever_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {"w": torch.arange(4.0), "n": torch.tensor([1])}, {"epoch": 12})
    whole = path.read_bytes()
    text_end = 8 + len(whole[8 : 8 + int.from_bytes(whole[:8], "little")].rstrip(b" "))
    for at in range(0, len(whole), 2):
        if text_end <= at < 8 + int.from_bytes(whole[:8], "little"):
            continue  # padding carries nothing
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"a.safetensors"):
            read_checkpoint(path)
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="no intact checkpoint"):
            read_checkpoint(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="truncated or overlong"):
        read_checkpoint(path)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(pickle.dumps(Bomb())),
        lambda path: path.write_bytes(pickle.dumps({"weight": [0.0] * 1000}, protocol=0)),
        lambda path: torch.save({"weight": torch.ones(3)}, path),
        lambda path: torch.save(Bomb(), path, _use_new_zipfile_serialization=False),
    ],
)
def test_a_pickle_under_another_name_is_refused_and_not_executed(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a.safetensors: no intact checkpoint.*no safetens"):
        read_checkpoint(tmp_path / "a.safetensors")


def test_a_safetensors_file_of_another_program_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="another program wrote it"):
        read_checkpoint(tmp_path / "a")


def test_another_format_version_is_refused_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMAT", 7)
        write_checkpoint(tmp_path / "a", NEW, {})
    with pytest.raises(CheckpointError, match=r"format 7, expected 1.*upgrade"):
        read_checkpoint(tmp_path / "a")


def header_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        (2**63).to_bytes(8, "little") + b"{}",
        (tensor_file.MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        header_file([]),
        header_file(b"{" * 100_000),
        header_file(b'{"a":' * 100_000),
        header_file(b"\xff\xfe"),
        header_file({"__metadata__": {"geartrain": 1}}),
        header_file({"__metadata__": {"geartrain": "[" * 100_000}}),
        header_file({"__metadata__": {"geartrain": '{"format": 1}'}}),
        header_file({"w": entry(dtype="F99")}, b"1234"),
        header_file({"w": entry(shape=[-1])}, b"1234"),
        header_file({"w": entry(shape=[True])}, b"1234"),
        header_file({"w": entry(shape=[1 << 60], offsets=[0, 1 << 62])}, b"1234"),
        header_file({"w": entry(shape=[2])}, b"1234"),
        header_file({"w": entry(offsets=[4, 8])}, b"12345678"),
        header_file({"v": entry(), "w": entry()}, b"1234"),
        *(
            header_file(
                {
                    "__metadata__": {"geartrain": '{"format": 1, "document": {}}'},
                    "w": entry(shape=shape, offsets=[0, 0]),
                }
            )
            for shape in ([1 << 70, 0], [1 << 62, 1 << 62, 0])
        ),
    ],
)
def test_a_file_made_to_hurt_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        read_checkpoint(tmp_path / "a")


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: cannot be read: No such file"):
        read_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"cannot be written.*make the folder"):
        write_checkpoint(tmp_path / "none" / "a", NEW, {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path)


def test_a_name_that_is_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="give the name of a file"):
        write_checkpoint(tmp_path / "a", NEW, {})
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_missing_permission_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_checkpoint(tmp_path / "a", OLD, {})
    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(CheckpointError, match="a: cannot be read: Permission denied; change the"):
        read_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"previous checkpoint is intact.*Permission denied"):
        write_checkpoint(tmp_path / "a", NEW, {})


def test_a_pipe_a_device_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(CheckpointError, match=f"it is {kind}, and a regular file was expected"):
            read_checkpoint(path)
    with pytest.raises(CheckpointError, match="it is a folder, and a regular file was expected"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        ({"k": 3}, r"is a dict, expected a tensor.*get_extra_state\(\)"),
    ],
)
def test_a_tensor_that_cannot_be_stored_is_named(
    tmp_path: Path, tensor: Tensor, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"'bad one' .*{reason}"):
        write_checkpoint(tmp_path / "a", {"bad one": tensor}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"a": {"b": (1, 2)}}, r"document\.a\.b is a tuple"),
        ({"a": [torch.ones(1)]}, r"document\.a\.0 is a Tensor"),
        ({"a": {1: 2}}, r"document\.a: the key 1"),
    ],
)
def test_a_document_that_would_come_back_changed_is_refused(
    tmp_path: Path, document: Any, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        write_checkpoint(tmp_path / "a", {}, document)


def test_a_document_beyond_the_limit_is_refused_when_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match="expected at most 1000; move large lists"):
        write_checkpoint(tmp_path / "a", {}, {"order": list(range(1000))})


def weight(path: Path) -> float:
    return float(read_checkpoint(path).tensors["w"])


def save(retention: Retention, number: int, is_best: bool = False) -> None:
    retention.save(number, {"w": torch.tensor(float(number))}, {"number": number}, is_best=is_best)


def test_the_latest_the_best_and_the_last_few_stay(tmp_path: Path) -> None:
    retention = Retention(tmp_path / "run", keep_last=2)
    for number in range(1, 6):
        save(retention, number, is_best=number in (1, 3))
    assert weight(retention.latest) == 5
    assert weight(retention.best) == 3
    assert [weight(path) for path in retention.numbered()] == [4, 5]
    assert len(list(retention.folder.iterdir())) == 4


def test_without_numbers_only_latest_and_best_stay(tmp_path: Path) -> None:
    retention = Retention(tmp_path)
    save(retention, 1, is_best=True)
    save(retention, 2)
    assert sorted(tmp_path.iterdir()) == [retention.best, retention.latest]
    assert (weight(retention.best), weight(retention.latest)) == (1, 2)


def test_names_of_one_checkpoint_are_one_file(tmp_path: Path) -> None:
    retention = Retention(tmp_path, keep_last=1)
    save(retention, 1, is_best=True)
    assert retention.latest.stat().st_nlink == 3
    assert retention.latest.samefile(retention.best)


def test_a_name_that_is_already_a_link_to_the_file_leaves_no_litter(tmp_path: Path) -> None:
    retention = Retention(tmp_path)
    save(retention, 1, is_best=True)
    module._link(retention.best, retention.latest)
    assert sorted(tmp_path.iterdir()) == [retention.best, retention.latest]
    assert weight(retention.latest) == 1


def test_where_links_are_impossible_the_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", impossible)
    retention = Retention(tmp_path)
    save(retention, 1, is_best=True)
    save(retention, 2)
    assert (weight(retention.best), weight(retention.latest)) == (1, 2)
    assert not retention.latest.samefile(retention.best)


@pytest.mark.parametrize("is_best", [False, True])
def test_a_full_disk_leaves_every_name_with_a_whole_file(tmp_path: Path, is_best: bool) -> None:
    retention = Retention(tmp_path, keep_last=2)
    save(retention, 1, is_best=True)
    with file_size_limit(20), pytest.raises(CheckpointError):
        save(retention, 2, is_best=is_best)
    assert [weight(path) for path in sorted(tmp_path.iterdir())] == [1, 1, 1]


def test_a_run_set_back_keeps_what_it_just_wrote(tmp_path: Path) -> None:
    retention = Retention(tmp_path, keep_last=2)
    for number in (8, 9, 3, 4, 5):
        save(retention, number)
    assert [weight(path) for path in retention.numbered()] == [4, 5, 8, 9]
    assert weight(retention.latest) == 5


def test_a_crash_between_best_and_latest_does_not_lose_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retention = Retention(tmp_path)
    save(retention, 1, is_best=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_space)
        with pytest.raises(CheckpointError, match="latest"):
            save(retention, 2, is_best=True)
    assert (weight(retention.best), weight(retention.latest)) == (2, 1)


@pytest.mark.parametrize(
    "make", [lambda p: Retention(p, keep_last=-1), lambda p: save(Retention(p), -1)]
)
def test_negative_numbers_are_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    with pytest.raises(ValueError, match="-1, expected 0 or more"):
        make(tmp_path)

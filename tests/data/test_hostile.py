"""Data files that ask for more than they are, or are no files: refused at once, with the reason."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from geartrain.data import limits
from geartrain.data.babi import load_babi
from geartrain.data.cifar10 import FILE as CIFAR
from geartrain.data.cifar10 import load_cifar10
from geartrain.data.mnist import load_mnist, read_idx
from geartrain.data.npz import read_npz
from geartrain.data.qm9 import FILE as QM9
from geartrain.data.qm9 import load_qm9
from geartrain.data.sst import Vocabulary, load_sst
from geartrain.data.text import FILE as TEXT
from geartrain.data.text import Tokens, load_text
from geartrain.errors import DataError

LOADERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "sst": (lambda folder: load_sst(folder, ("train",)), "sst/train.txt"),
    "babi": (load_babi, "babi/en/qa15_basic-deduction_train.txt"),
    "text": (load_text, TEXT),
    "mnist": (load_mnist, "mnist/train-images-idx3-ubyte.gz"),
    "qm9": (load_qm9, QM9),
    "cifar10": (load_cifar10, CIFAR),
}
SPARSE = 40 << 30


def put(folder: Path, name: str, content: bytes = b"x") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if name.startswith("mnist"):  # wants two
        (path.parent / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"x"))
    return path


@pytest.mark.parametrize("name", [n for n in LOADERS if n != "mnist"])
def test_a_sparse_file_of_forty_gigabytes_is_not_read(name: str, tmp_path: Path) -> None:
    load, file = LOADERS[name]
    os.truncate(put(tmp_path, file), SPARSE)
    with pytest.raises(DataError, match=rf"{file}.*42,949,672,960 bytes, and [\d,]+ are read at"):
        load(tmp_path)


@pytest.mark.parametrize("name", LOADERS)
def test_a_pipe_or_folder_in_place_of_a_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    load, file = LOADERS[name]
    for make in (os.mkfifo, os.mkdir):
        path = put(tmp_path, file)
        path.unlink()
        make(path)
        with pytest.raises(DataError, match="is not a regular file"):
            load(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_pipe_is_refused_by_the_readers_themselves(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (lambda path: read_idx(path, 1), lambda path: read_npz(path, ("a",), "here")):
        with pytest.raises(DataError, match="it is a pipe, and a regular file was expected"):
            read(tmp_path / "pipe")


def test_the_environment_says_how_much_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, TEXT, b"words of a text " * 100)
    assert load_text(tmp_path)
    monkeypatch.setenv(limits.VARIABLE, "1k")
    with pytest.raises(DataError, match=r"1,600 bytes, and 1,024 are read .* \$GEARTRAIN_DATA_BYT"):
        load_text(tmp_path)
    for text, found in (("12", 12), ("3GiB", 3 << 30), ("7MB", 7 << 20), ("", 5)):
        monkeypatch.setenv(limits.VARIABLE, text)
        assert limits.most(5) == found
    monkeypatch.setenv(limits.VARIABLE, "much")
    with pytest.raises(ValueError, match=r"\$GEARTRAIN_DATA_BYTES=much: write a number of bytes"):
        load_text(tmp_path)


def test_a_gzip_bomb_is_read_no_further_than_its_header_says(tmp_path: Path) -> None:
    head = struct.pack(">4B3I", 0, 0, 8, 3, 10, 28, 28)
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    content = packer.compress(head) + b"".join(packer.compress(bytes(1 << 20)) for _ in range(8))
    path = tmp_path / "bomb.gz"
    path.write_bytes(content + packer.flush())
    with pytest.raises(DataError, match="goes on too long: it goes on past byte 11952"):
        read_idx(path, 3)


def test_a_header_that_promises_terabytes_takes_none(tmp_path: Path) -> None:
    path = tmp_path / "large.gz"
    path.write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 28, 28) + b"few"))
    with pytest.raises(DataError, match=r"1,683,627,180,048 bytes, and 4,294,967,296 are read"):
        read_idx(path, 3)


def member(descr: str, shape: str, data: bytes = b"") -> bytes:
    """An npy file with this header."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


def archive(path: Path, content: bytes, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("a.npy", content)
    return path


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (member("'<f8'", "(1649267441664,)"), "takes 13,194,139,533,312 bytes, and 0 are there"),
        (member("'<f8'", "(1000000, 1000000, 1000)"), "bytes, and 0 are there"),
        (member("'<f8'", "(2, -2)", bytes(32)), r"has shape \(2, -2\)"),
        (member("'<U0'", "(1000000000000,)"), "which none has"),
        (member("'|O'", "(1,)", b"cos\nsystem\n(S'x'\ntR."), "Object arrays"),
        (member("[('a', '|O')]", "(1,)", bytes(8)), "Object arrays"),
        (member("'<f8'", "(3,)", bytes(25)), "takes 24 bytes, and 25 are there"),
        (member("'<f8'", "'(3,)'"), "no header of numpy's"),
        (member("(" * 3000, "(3,)"), "no header of numpy's"),
        (member("'''", "(3,)"), "no header of numpy's"),
        (b"", "no header of numpy's"),
        (b"\x93NUMPY\x09\x00" + bytes(200), "no header of numpy's"),
    ],
)
def test_a_member_of_an_npz_is_what_its_header_says_or_refused(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = archive(tmp_path / "a.npz", content)
    with pytest.raises(DataError, match=rf"a\.npz: no readable npz file: .*{reason}"):
        read_npz(path, ("a",), "here")


def test_an_npz_bomb_is_refused_by_what_it_would_be_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(limits.VARIABLE, "2M")
    path = archive(tmp_path / "a.npz", member("'|u1'", f"({4 << 20},)", bytes(4 << 20)))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match=r"4,194,304 bytes, and 2,097,152 .* decompressed"):
        read_npz(path, ("a",), "here")


def test_an_archive_that_lies_of_the_size_of_a_member_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", member("'|u1'", f"({1 << 31},)", bytes(100)))
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        size = file.getinfo("a.npy").file_size
    header = size - 100
    # Sizes stand as 32 bits in the directory and before the member.
    forged = content.replace(struct.pack("<I", size), struct.pack("<I", header + (1 << 31)))
    assert forged != content
    path.write_bytes(forged)
    with pytest.raises(DataError, match="claims 2,147,483,776 bytes, which cannot come of the"):
        read_npz(path, ("a",), "here")


def test_an_archive_that_is_locked_or_packed_otherwise_is_refused(tmp_path: Path) -> None:
    good = member("'<f8'", "(1,)", bytes(8))
    packed = archive(tmp_path / "b.npz", good, zipfile.ZIP_BZIP2)
    with pytest.raises(DataError, match="compressed in a way that numpy does not write"):
        read_npz(packed, ("a",), "here")
    content = bytearray(archive(tmp_path / "c.npz", good).read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + flags] |= 1
    (tmp_path / "c.npz").write_bytes(content)
    with pytest.raises(DataError, match="encrypted"):
        read_npz(tmp_path / "c.npz", ("a",), "here")


def test_a_molecule_of_very_many_atoms_is_refused_before_its_pairs_are_counted(
    tmp_path: Path,
) -> None:
    n = 10**5
    put(tmp_path, QM9)
    np.savez(
        tmp_path / QM9,
        id=np.array([1, 2]), n_atoms=np.array([n, 1]), Z=np.ones(n + 1, np.uint8),
        R=np.arange(3.0 * (n + 1)).reshape(-1, 3), mu=np.ones(2),
    )  # fmt: skip
    with pytest.raises(DataError, match="has 100000 atoms; expected at least one, and at most"):
        load_qm9(tmp_path)
    np.savez(
        tmp_path / QM9,
        id=np.array([1, 2, 3]), n_atoms=np.array([2**63, 2**63, 1], np.uint64), Z=np.ones(1, int),
        R=np.zeros((1, 3)), mu=np.ones(3),
    )  # fmt: skip
    with pytest.raises(DataError, match="n_atoms is 9223372036854775808; expected"):
        load_qm9(tmp_path)


def test_numbers_that_float32_cannot_hold_are_not_finite(tmp_path: Path) -> None:
    put(tmp_path, QM9)
    arrays = {"id": np.array([1]), "n_atoms": np.array([1]), "Z": np.array([6])}
    for R, mu, said in ((1e300, 1.0, "finite coordinates"), (1.0, 1e300, "finite dipole moment")):
        np.savez(tmp_path / QM9, **arrays, R=np.full((1, 3), R), mu=np.array([mu]))
        with pytest.raises(DataError, match=said):
            load_qm9(tmp_path)


def test_a_line_of_a_story_has_a_length(tmp_path: Path) -> None:
    line = b"1 The " + b"a fits inside the " * 60000 + b"b"
    name = "babi/en/qa18_size-reasoning_train.txt"
    put(tmp_path, name, line)
    with pytest.raises(DataError, match=r":1: the line has 1080007 characters; expected 1000"):
        load_babi(tmp_path, 18)


def test_files_that_a_run_keeps_are_refused_by_what_is_wrong_in_them() -> None:
    deep = "[" * 100_000
    for read in (Vocabulary.from_json, Tokens.from_json):
        for text in (deep, "[" * 90 + "]" * 90, "9" * 5000, '{"words": null}', "null"):
            with pytest.raises(DataError):
                read(text)
    doubling = ",".join(f"[{n}, {n}]" for n in range(60))
    with pytest.raises(DataError, match="id 14 stands for 16384 characters; expected 10000 at mo"):
        Tokens.from_json(f'{{"alphabet": "a", "merges": [{doubling}]}}')

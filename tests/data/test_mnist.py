import gzip
import struct

import numpy as np
import pytest

from geartrain.data.mnist import load_mnist, read_idx
from geartrain.errors import DataError

IMAGES = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
LABELS = np.array([7, 0, 9], np.uint8)


def idx(array, kind=8):
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.tobytes()
    )


def write(folder, images=None, labels=None, split="train"):
    (folder / "mnist").mkdir(exist_ok=True)
    for name, content in (("images-idx3", images), ("labels-idx1", labels)):
        path = folder / "mnist" / f"{split}-{name}-ubyte.gz"
        path.write_bytes(gzip.compress(content))
    return folder


def test_images_and_labels_come_out_as_written(tmp_path):
    write(tmp_path, idx(IMAGES), idx(LABELS))
    write(tmp_path, idx(IMAGES[:1]), idx(LABELS[:1]), split="t10k")
    train, test = load_mnist(tmp_path), load_mnist(tmp_path, "test")
    assert (train.images == IMAGES).all()
    assert train.labels.tolist() == [7, 0, 9]
    assert (train.images.dtype, train.labels.dtype) == (np.uint8, np.int64)
    assert train.images.flags.writeable, "a tensor that shares it would warn"
    assert (len(train), len(test), train.skipped) == (3, 1, 0)


BAD_IMAGES = [
    (idx(IMAGES, kind=13), "magic number (bytes 0 to 3) is 0x00000d03; expected 0x00000803"),
    (idx(LABELS), "is 0x00000801; expected 0x00000803"),
    (b"\0\0", "is 0x0000; expected"),
    (idx(IMAGES)[:9], "ends at byte 9, inside the header; expected 16 bytes"),
    (idx(IMAGES)[:-1], "is cut: it ends at byte 2367; expected byte 2368 for sizes 3 x 28 x 28"),
    (idx(IMAGES) + b"\0", "goes on too long: it ends at byte 2369"),
    (idx(IMAGES[:, :20]), "images are 20 x 28; expected 28 x 28"),
]


@pytest.mark.parametrize(("content", "reason"), BAD_IMAGES)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_damaged_images_file_is_refused_whatever_the_policy(tmp_path, content, reason, policy):
    write(tmp_path, content, idx(LABELS))
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path, policy=policy)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/mnist/train-images-idx3-ubyte.gz: ")


def test_images_without_their_labels_are_refused(tmp_path):
    write(tmp_path, idx(IMAGES), idx(LABELS[:2]))
    with pytest.raises(DataError, match="2 labels for 3 images"):
        load_mnist(tmp_path)


def test_a_cut_gzip_is_refused_with_how_far_it_was_good(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx(IMAGES))[:-12])
    with pytest.raises(DataError, match=r"x\.gz: no whole gzip file: .*after \d+ bytes"):
        read_idx(path, 3)


def test_a_flipped_bit_is_refused_by_the_checksum(tmp_path):
    content = bytearray(gzip.compress(idx(IMAGES), compresslevel=0))
    content[500] ^= 1
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(DataError, match="CRC"):
        read_idx(tmp_path / "x.gz", 3)


def test_a_file_that_is_not_compressed_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "x.gz").write_bytes(idx(IMAGES))
    with pytest.raises(DataError, match="compress it with gzip"):
        read_idx(tmp_path / "x.gz", 3)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz is missing"):
        load_mnist(tmp_path, "test")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_idx(tmp_path / "x.gz", 3)


def test_a_label_out_of_range_is_refused_or_skipped_with_its_image(tmp_path):
    write(tmp_path, idx(IMAGES), idx(np.array([7, 10, 9], np.uint8)))
    with pytest.raises(DataError, match=r"record 1 \(from 0\): label 10; expected 0\.\.9"):
        load_mnist(tmp_path)
    kept = load_mnist(tmp_path, policy="skip")
    assert kept.labels.tolist() == [7, 9]
    assert (kept.images == IMAGES[[0, 2]]).all()
    assert kept.skipped == 1


def test_another_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="split is 'dev'"):
        load_mnist(tmp_path, "dev")


def test_the_real_digits_have_the_known_counts(real_data):
    train, test = load_mnist(real_data), load_mnist(real_data, "test")
    assert train.images.shape == (60_000, 28, 28)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(train.labels).tolist() == counts
    assert test.images.shape == (10_000, 28, 28)
    # The normalisation that everybody uses: mean and deviation of the training pixels.
    assert round(float(train.images.mean()) / 255, 4) == 0.1307

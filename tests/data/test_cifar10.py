"""Photographs: read as written, refused with array and remedy, shifted and mirrored by the draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.data.cifar10 import (
    FILE,
    MEAN,
    PAD,
    SPREAD,
    augmented,
    channels_first,
    load_cifar10,
    standardised,
)
from geartrain.errors import DataError

CLASSES = np.array(["airplane", *(f"class {i}" for i in range(1, 10))])


def arrays(n=7):
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8),
        "y_train": np.arange(n, dtype=np.uint8) % 10,
        "x_test": draw.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8),
        "y_test": np.array([1, 0, 9], np.uint8),
        "classes": CLASSES,
    }


def write(folder, **changes):
    path = folder / FILE
    path.parent.mkdir(exist_ok=True)
    found = arrays() | changes
    np.savez_compressed(path, **{name: a for name, a in found.items() if a is not None})
    return folder


def test_images_labels_and_classes_come_out_as_written(tmp_path):
    write(tmp_path)
    train, test = load_cifar10(tmp_path), load_cifar10(tmp_path, "test")
    assert np.array_equal(train.images, arrays()["x_train"])
    assert test.labels.tolist() == [1, 0, 9]
    assert (train.images.dtype, train.labels.dtype) == (np.uint8, np.int64)
    assert (len(train), len(test), train.skipped) == (7, 3, 0)
    assert train.classes == tuple(CLASSES.tolist())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"y_train": None}, "no array y_train; expected x_train, y_train, classes"),
        ({"x_train": np.zeros((7, 3, 32, 32), np.uint8)}, "x_train is uint8 (7, 3, 32, 32); exp"),
        ({"x_train": np.zeros((7, 32, 32, 3), np.float32)}, "x_train is float32"),
        ({"x_train": np.zeros((0, 32, 32, 3), np.uint8)}, "with N of 1 or more"),
        ({"y_train": np.zeros(6, np.uint8)}, "y_train is uint8 (6,) for 7 images of x_train"),
        ({"y_train": np.zeros(7)}, "y_train is float64"),
        ({"classes": CLASSES[:9]}, "expected 10 strings"),
    ],
)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_damaged_archive_is_refused_whatever_the_policy(tmp_path, changes, reason, policy):
    write(tmp_path, **changes)
    with pytest.raises(DataError) as caught:
        load_cifar10(tmp_path, policy=policy)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/{FILE}: ")


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_cut_file_is_refused(tmp_path, keep):
    path = write(tmp_path) / FILE
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DataError, match=r"no readable npz file|is empty"):
        load_cifar10(tmp_path)


def test_pickles_and_single_arrays_are_refused(tmp_path):
    path = write(tmp_path, classes=np.array([object()])) / FILE
    with pytest.raises(DataError, match="no pickled objects"):
        load_cifar10(tmp_path)
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(DataError, match="no readable npz"):
        load_cifar10(tmp_path)


def test_a_missing_file_is_refused_with_what_to_put_where(tmp_path):
    with pytest.raises(DataError, match=r"npz is missing\. Put into cifar10/: one npz"):
        load_cifar10(tmp_path)


def test_labels_that_cannot_be_are_refused_or_skipped_with_their_images(tmp_path):
    labels = np.array([0, 1, 10, 3, 4, 255, 6], np.uint8)
    write(tmp_path, y_train=labels)
    with pytest.raises(DataError, match=r"y_train\[2\] is 10; expected 0\.\.9"):
        load_cifar10(tmp_path)
    kept = load_cifar10(tmp_path, policy="skip")
    assert (kept.labels.tolist(), kept.skipped) == ([0, 1, 3, 4, 6], 2)
    assert np.array_equal(kept.images, arrays()["x_train"][[0, 1, 3, 4, 6]])


def test_another_split_is_a_mistake_of_the_caller(tmp_path):
    with pytest.raises(ValueError, match="split is 'valid'"):
        load_cifar10(tmp_path, "valid")


# --- augmentation


def scaled(images):
    found = (images.astype(np.float32) - np.float32(MEAN)) / np.float32(SPREAD)
    return torch.from_numpy(found.transpose(0, 3, 1, 2))


def drawn(images, seed):
    return augmented(channels_first(images), torch.Generator().manual_seed(seed))


def test_channels_come_first_and_pixels_are_standardised():
    images = arrays()["x_train"]
    torch.testing.assert_close(standardised(channels_first(images)), scaled(images))


def test_every_image_is_a_shift_of_itself_perhaps_mirrored_with_grey_at_the_rim():
    images = arrays()["x_train"]
    rows = np.arange(7).repeat(30)
    found = drawn(images[rows], 5)
    grey = np.rint(MEAN).astype(np.uint8)
    wide = np.broadcast_to(grey, (7, 32 + 2 * PAD, 32 + 2 * PAD, 3)).copy()
    wide[:, PAD:-PAD, PAD:-PAD] = images
    ways = [(down, right, m) for down in range(9) for right in range(9) for m in (False, True)]
    seen = set()
    for row in range(7):
        made = torch.cat([cut(wide[row], *way) for way in ways])
        for image in found[rows == row]:
            (fits,) = ((made - image).abs().amax((1, 2, 3)) < 1e-5).nonzero(as_tuple=True)
            assert len(fits) == 1
            seen.add(ways[int(fits[0])])
    assert len(seen) > 80, "of 162 there are, in 210 draws"
    assert {mirrored for _, _, mirrored in seen} == {False, True}
    assert {down for down, _, _ in seen} == {right for _, right, _ in seen} == set(range(9))


def cut(wide, down, right, mirrored):
    piece = wide[down : down + 32, right : right + 32]
    return scaled(np.ascontiguousarray(piece[:, ::-1] if mirrored else piece)[None])


def test_what_is_drawn_depends_on_the_generator_alone():
    images = arrays()["x_train"]
    before = torch.get_rng_state()
    first = drawn(images, 1)
    assert torch.equal(first, drawn(images, 1))
    assert not torch.equal(first, drawn(images, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(images, arrays()["x_train"])


def test_the_real_photographs_have_the_mean_and_spread_that_they_are_standardised_by(real_data):
    train, test = load_cifar10(real_data), load_cifar10(real_data, "test")
    assert (len(train), len(test)) == (10_000, 2_000)
    assert np.bincount(train.labels).tolist() == [1000] * 10
    sample = standardised(channels_first(train.images[:1000]))
    assert sample.mean((0, 2, 3)).abs().max() < 0.05
    assert (sample.std((0, 2, 3)) - 1).abs().max() < 0.05

import numpy as np
import pytest

from geartrain.data.shapes import CLASSES, draw_shapes


def test_a_seed_gives_the_same_images_again_and_another_seed_others():
    first, again, other = draw_shapes(30, 1), draw_shapes(30, 1), draw_shapes(30, 2)
    assert np.array_equal(first.images, again.images) and np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.images, other.images)


def test_images_are_of_the_size_and_type_of_photographs():
    found = draw_shapes(2100, 0)  # several blocks
    assert found.images.shape == (2100, 32, 32, 3) and found.images.dtype == np.uint8
    assert found.labels.dtype == np.int64 and set(found.labels.tolist()) == set(range(10))
    assert found.classes == CLASSES and len(set(CLASSES)) == 10 and found.skipped == 0
    assert np.bincount(found.labels).min() > 150


def test_classes_differ_in_how_much_of_an_image_they_fill():
    """A disc fills more than its ring, a square more than its frame: pixels unlike the corner's."""
    found = draw_shapes(3000, 0)
    images = found.images.astype(np.float64)
    ground = images[:, :2, :2].mean((1, 2), keepdims=True)
    unlike = (np.abs(images - ground).max(-1) > 60.0).mean((1, 2))
    filled = {name: unlike[found.labels == k].mean() for k, name in enumerate(CLASSES)}
    assert filled["disc"] > 1.3 * filled["ring"] > 0
    assert filled["square"] > 1.3 * filled["frame"]
    assert filled["plus"] > 1.3 * filled["bar"] and filled["disc"] > 1.7 * filled["half disc"]


def test_the_colour_of_a_shape_is_not_that_of_its_ground():
    found = draw_shapes(400, 3)
    discs = found.images[found.labels == 0].astype(np.float64)
    spread = discs.reshape(len(discs), -1, 3).std(1).max(1)
    assert spread.min() > 20.0  # noise alone has 16


def test_no_images_are_refused():
    with pytest.raises(ValueError, match="give 1 or more"):
        draw_shapes(0, 0)

"""Small images of ten shapes, drawn here: nothing is read, and a seed gives the same ones again.

    shape, place, size, turn, two colours, noise ─► uint8 (N, 32, 32, 3), label 0..9

Every pixel is inside of the shape or not, by its place as the shape sees it: moved to its middle,
turned, and divided by its size.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from geartrain.data.cifar10 import CHANNELS, SIDE, Photographs

CLASSES: Final = (
    *("disc", "ring", "square", "frame", "diamond"),
    *("plus", "bar", "two bars", "half disc", "triangle"),
)
NOISE: Final = 16.0  # spread of what is added to each pixel and channel, of 255
_SIZE: Final = (8.0, 12.0)  # from the middle to the border, in pixels
_TURN: Final = 0.2  # radians, either way
_BLOCK: Final = 1024  # images that are drawn at a time


def draw_shapes(n: int, seed: int) -> Photographs:
    """N images, classes in equal shares but for chance.

    Args:
        n: How many.
        seed: Of everything that is drawn.

    Raises:
        ValueError: ``n`` is not positive.
    """
    if n < 1:
        raise ValueError(f"draw_shapes(n={n}): give 1 or more")
    random = np.random.default_rng(seed)
    labels = random.integers(len(CLASSES), size=n)
    images = np.empty((n, SIDE, SIDE, CHANNELS), np.uint8)
    for start in range(0, n, _BLOCK):
        some = slice(start, min(start + _BLOCK, n))
        images[some] = _images(labels[some], random)
    return Photographs(images, labels.astype(np.int64), CLASSES, 0)


def _images(labels: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.uint8]:
    n = len(labels)
    size = random.uniform(*_SIZE, (n, 1, 1))
    middle = random.uniform(size, SIDE - size, (2, n, 1, 1))
    turn = random.uniform(-_TURN, _TURN, (n, 1, 1))
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    across, down = (x - middle[0]) / size, (y - middle[1]) / size
    u = np.cos(turn) * across + np.sin(turn) * down
    v = np.cos(turn) * down - np.sin(turn) * across
    inside = np.zeros((n, SIDE, SIDE), bool)
    for label in range(len(CLASSES)):
        here = labels == label
        inside[here] = _inside(label, u[here], v[here])
    ground, colour = random.uniform(0.0, 255.0, (2, n, 1, 1, CHANNELS))
    # A shape of nearly the colour of its ground could not be seen.
    colour = np.where(np.abs(colour - ground) < 64.0, ground + 128.0, colour) % 256.0
    pixels = np.where(inside[..., None], colour, ground)
    pixels += random.normal(0.0, NOISE, pixels.shape)
    drawn: NDArray[np.uint8] = np.clip(np.rint(pixels), 0.0, 255.0).astype(np.uint8)
    return drawn


def _inside(label: int, u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which places belong to a shape whose border is about 1 from its middle."""
    radius, most = np.hypot(u, v), np.maximum(np.abs(u), np.abs(v))
    found: NDArray[np.bool_] = (
        lambda: radius < 1.0,
        lambda: (radius < 1.0) & (radius > 0.6),
        lambda: most < 0.85,
        lambda: (most < 0.85) & (most > 0.5),
        lambda: np.abs(u) + np.abs(v) < 1.0,
        lambda: (most < 0.95) & (np.minimum(np.abs(u), np.abs(v)) < 0.25),
        lambda: (np.abs(u) < 0.95) & (np.abs(v) < 0.25),
        lambda: (np.abs(u) < 0.95) & (np.abs(np.abs(v) - 0.6) < 0.22),
        lambda: (radius < 1.0) & (v < 0.0),
        lambda: (v < 0.7) & (np.abs(u) < 0.5 * (v + 0.9)),
    )[label]()
    return found

"""Small photographs: CIFAR-10, or a part of it, from one npz archive.

    x_train, x_test   uint8 (N, 32, 32, 3)   rows from the top, red green blue
    y_train, y_test   integers (N,)          0..9
    classes           strings (10,)          what the labels mean

    image ─► 4 pixels of grey on every side ─► 32 x 32 of it, anywhere ─► mirrored, or not

``augmented`` makes whole minibatches of that at once, and is what ``Minibatches(augment=...)``
takes: what is drawn depends on (seed, epoch, minibatch) alone.
Source: Krizhevsky 2009; the augmentation is that of Lee et al. 2015, arXiv:1409.5185.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.data.folder import find_data
from geartrain.data.npz import read_npz
from geartrain.data.policy import Policy, Refusals
from geartrain.errors import DataError

SIDE: Final = 32
CHANNELS: Final = 3
CLASSES: Final = 10
PAD: Final = 4  # pixels on every side
FILE: Final = "cifar10/cifar10_jpeg_subset.npz"
MEAN: Final = (125.3, 123.0, 113.9)  # of the channels, over the training images
SPREAD: Final = (63.0, 62.1, 66.7)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Photographs:
    """N images with their labels.

    Args:
        images: uint8 ``(N, 32, 32, 3)``.
        labels: int64 ``(N,)``, 0..9.
        classes: What the labels mean.
        skipped: Records that were left out; 0 under the policy ``"raise"``.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    skipped: int

    def __len__(self) -> int:
        return len(self.labels)


def load_cifar10(
    folder: Path | None = None,
    split: Literal["train", "test"] = "train",
    *,
    policy: Policy = "raise",
) -> Photographs:
    """Read ``cifar10/cifar10_jpeg_subset.npz`` of the data folder.

    Args:
        folder: The data folder, which holds ``cifar10/``; None takes ``$GEARTRAIN_DATA``.
        split: ``"train"`` or ``"test"``.
        policy: What to do with a label that is not 0..9. A damaged archive always raises.

    Raises:
        DataError: The file is missing, no npz, or lacks an array; an array has another dtype or
            shape.
        ValueError: Another split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    path = find_data(folder, FILE) / FILE
    x, y = f"x_{split}", f"y_{split}"
    arrays = read_npz(path, (x, y, "classes"), "geartrain.data.cifar10")
    _check(arrays[x], arrays[y], arrays["classes"], x, y, path)
    classes = tuple(str(name) for name in arrays["classes"])
    return _keep_good(arrays[x], arrays[y], classes, Refusals(policy, path), y)


def _check(
    images: NDArray[Any],
    labels: NDArray[Any],
    classes: NDArray[Any],
    x: str,
    y: str,
    path: Path,
) -> None:
    inner = (SIDE, SIDE, CHANNELS)
    if images.dtype != np.uint8 or images.shape[1:] != inner or not len(images):
        raise DataError(
            f"{x} is {images.dtype} {images.shape}; expected uint8 (N, {SIDE}, {SIDE}, {CHANNELS}) "
            "with N of 1 or more: height, width, channels. Transpose or convert it",
            path=path,
        )
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataError(
            f"{y} is {labels.dtype} {labels.shape} for {len(images)} images of {x}; expected "
            f"integers ({len(images)},), a label each. Convert it, or take both arrays from the "
            "same place",
            path=path,
        )
    if classes.dtype.kind != "U" or classes.shape != (CLASSES,):
        raise DataError(
            f"classes is {classes.dtype} {classes.shape}; expected {CLASSES} strings, the name of "
            "each label. Write the names in the order of the labels",
            path=path,
        )


def _keep_good(
    images: NDArray[np.uint8],
    labels: NDArray[Any],
    classes: tuple[str, ...],
    refusals: Refusals,
    called: str,
) -> Photographs:
    wrong = (labels < 0) | (labels >= CLASSES)
    for record in np.flatnonzero(wrong).tolist():
        refusals.refuse(
            DataError(
                f"{called}[{record}] is {labels[record]}; expected 0..{CLASSES - 1}. Fetch the "
                'file anew, or read it with policy="skip"',
                path=refusals.path,
            )
        )
    kept = np.flatnonzero(~wrong)
    whole = len(kept) == len(labels)
    return Photographs(
        images if whole else images[kept],
        labels[kept].astype(np.int64),
        classes,
        refusals.close(len(kept)),
    )


def channels_first(images: NDArray[np.uint8]) -> Tensor:
    """Images ``(N, 32, 32, 3)`` as uint8 ``(N, 3, 32, 32)``, as convolutions take them."""
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def standardised(images: Tensor) -> Tensor:
    """Images uint8 ``(n, 3, 32, 32)`` as float32 of about mean 0 and spread 1."""
    mean, spread = (torch.tensor(each)[:, None, None] for each in (MEAN, SPREAD))
    return images.to(torch.float32).sub_(mean).div_(spread)


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images uint8 ``(n, 3, 32, 32)``, shifted, mirrored or not, and standardised; all at once.

    Args:
        images: Of a minibatch.
        generator: Draws where each is cut out of its margin, and whether it is mirrored.
    """
    n, c, h, w = images.shape
    # What is grey here becomes about 0, so the margin says nothing.
    wide = torch.tensor(MEAN).round().to(torch.uint8)[:, None, None]
    wide = wide.expand(n, c, h + 2 * PAD, w + 2 * PAD).contiguous()
    wide[:, :, PAD : PAD + h, PAD : PAD + w] = images
    down, right = torch.randint(2 * PAD + 1, (2, n), generator=generator)
    mirrored = torch.rand(n, generator=generator) < 0.5
    # (n, 9, 9, 3, 32, 32): all places where an image can be cut out; no copies.
    cuts = wide.unfold(2, h, 1).unfold(3, w, 1).permute(0, 2, 3, 1, 4, 5)
    cut = cuts[torch.arange(n), down, right]
    return standardised(torch.where(mirrored[:, None, None, None], cut.flip(-1), cut))

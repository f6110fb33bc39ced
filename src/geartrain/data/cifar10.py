"""Small photographs: CIFAR-10, or a part of it, from one npz archive.

    x_train, x_test   uint8 (N, 32, 32, 3)   rows from the top, red green blue
    y_train, y_test   integers (N,)          0..9
    classes           strings (10,)          what the labels mean

    image ─► 4 pixels of grey on every side ─► 32 x 32 of it, anywhere ─► mirrored, or not

``AugmentedImages`` makes whole minibatches of that at once. What is drawn depends on (seed, epoch,
minibatch) alone, so a run that is resumed sees the same images.
Source: Krizhevsky 2009; the augmentation is that of Lee et al. 2015, arXiv:1409.5185.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.data.folder import find_data
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
    arrays = _read(path, (x, y, "classes"))
    _check(arrays[x], arrays[y], arrays["classes"], x, y, path)
    classes = tuple(str(name) for name in arrays["classes"])
    return _keep_good(arrays[x], arrays[y], classes, Refusals(policy, path), y)


def _read(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    try:
        # Opened here, as numpy leaves its own handle open when the archive is damaged.
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("it holds a single array")
            with file:
                arrays = {name: file[name] for name in names if name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"no readable npz file: {error}; expected the arrays {', '.join(names)}, no pickled "
            "objects. Write it with numpy.savez_compressed, or fetch it anew",
            path=path,
        ) from error
    if absent := [name for name in names if name not in arrays]:
        raise DataError(
            f"no array {', '.join(absent)}; expected {', '.join(names)}. See the docstring of "
            "geartrain.data.cifar10 for their meaning",
            path=path,
        )
    return arrays


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


@final
class AugmentedImages:
    """Minibatches of shifted and mirrored images, each made at once.

    Args:
        images: uint8 ``(N, 32, 32, 3)``; kept once more with a margin, as uint8.
        seed: Of what is drawn; None: every image as it is.
    """

    def __init__(self, images: NDArray[np.uint8], *, seed: int | None = None) -> None:
        self._seed = seed
        self._margin = 0 if seed is None else PAD
        margin = (self._margin, self._margin)
        # What a pixel of the mean becomes is 0, so the margin says nothing.
        padded = np.empty(
            (len(images), CHANNELS, SIDE + sum(margin), SIDE + sum(margin)), dtype=np.uint8
        )
        padded[:] = np.rint(MEAN).astype(np.uint8)[:, None, None]
        inner = slice(self._margin, self._margin + SIDE)
        padded[:, :, inner, inner] = images.transpose(0, 3, 1, 2)
        # (N, 9, 9, 3, 32, 32): all places where an image can be cut out; no copies.
        self._cuts = torch.from_numpy(padded).unfold(2, SIDE, 1).unfold(3, SIDE, 1)
        self._cuts = self._cuts.permute(0, 2, 3, 1, 4, 5)
        self._mean = torch.tensor(MEAN)[:, None, None]
        self._scale = torch.tensor(SPREAD)[:, None, None].reciprocal()

    def __len__(self) -> int:
        return len(self._cuts)

    def batch(self, rows: NDArray[np.int64], epoch: int = 0, number: int = 0) -> Tensor:
        """Images float32 ``(len(rows), 3, 32, 32)``, of about mean 0 and spread 1.

        Args:
            rows: Which images.
            epoch: Of the training.
            number: Of the minibatch within the epoch.
        """
        chosen = torch.from_numpy(np.ascontiguousarray(rows))
        if self._seed is None:
            return self._standardised(self._cuts[chosen, 0, 0])
        draw = np.random.default_rng((self._seed, epoch, number))
        down, right = torch.from_numpy(draw.integers(0, 2 * PAD + 1, (2, len(rows))))
        mirrored = torch.from_numpy(draw.random(len(rows)) < 0.5)
        cut = self._cuts[chosen, down, right]
        cut = torch.where(mirrored[:, None, None, None], cut.flip(-1), cut)
        return self._standardised(cut)

    def _standardised(self, pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32).sub_(self._mean).mul_(self._scale)

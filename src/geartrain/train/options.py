"""How a session computes, and how it reads its data, as a user may say it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from geartrain.bounds import require_number, require_whole
from geartrain.engine.instrument import AbstractMeter
from geartrain.frames.precision import Precision
from geartrain.kinds import require_kind, require_truth, require_word
from geartrain.runtime.base import OnBadInstance
from geartrain.train.source import Convert


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """How numbers are computed, and on what.

    Args:
        precision: ``full``: rows have the dtype of the data and the modules. ``bf16``: rows, what
            is kept of them and matrix products are bfloat16; weights, optimisers, sums of gradients
            and losses float32. Modules without a kernel for it run in float32 between casts, as
            does ``Part(full_precision=True)``. What leaves the graph is float32.
        device: Where parts live that name no device of their own, and where the rows of instances
            are fed: ``cpu``, ``cuda``, ``cuda:1``. None leaves modules where they are; rows
            are then fed where they are, or on the host if all modules are there.
        meter: Counts what training computes: ``geartrain.FlopMeter()``.
    """

    precision: Precision = "full"
    device: str | torch.device | None = None
    meter: AbstractMeter | None = None

    def __post_init__(self) -> None:
        require_word("Compute", ("full", "bf16"), precision=self.precision)
        wanted = "a device, such as 'cpu' or 'cuda:1', or None"
        require_kind("Compute", str | torch.device | None, wanted, device=self.device)
        wanted = "what counts: geartrain.FlopMeter(), or None"
        require_kind("Compute", AbstractMeter | None, wanted, meter=self.meter)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How often a state is kept that training goes back to when a worker dies, and where.

    The graph is drained for it, as for a checkpoint, and weights, buffers and optimisers are
    copied; what was trained since is what a death costs. Checkpoints of the run are such states as
    well.

    Args:
        every: After so many instances.
        seconds: After so many seconds of training.
        folder: Where it is written, as ``kept.safetensors``, which is removed at the end; None: in
            the memory of the process that called ``fit``, which no worker's death takes along.

    Raises:
        ValueError: Neither is given, or one is not positive.
    """

    every: int | None = None
    seconds: float | None = None
    folder: Path | str | None = None

    def __post_init__(self) -> None:
        if self.every is None and self.seconds is None:
            raise ValueError("Keep(): give every=, in instances, or seconds=, or both")
        wanted = "a path, or None"
        require_kind("Keep", str | os.PathLike | None, wanted, folder=self.folder)
        what = f"Keep(every={self.every!r}, seconds={self.seconds!r})"
        wanted = "1 or more instances, and more than 0 seconds"
        if self.every is not None:
            require_whole(what, self.every, 1, wanted)
        if self.seconds is not None:
            require_number(what, self.seconds, wanted, above=0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How instances come from data.

    Args:
        convert: Makes an ``Instance`` of an item of the data. With a parameter named ``epoch`` it
            is also told the epoch, from 1; in evaluations and predictions 0.
        shuffle: Whether lists and map-style training data are shuffled, by seed and epoch. A
            DataLoader shuffles by itself, by seed and epoch too.
        on_bad: ``raise`` on instances that are refused, or ``skip`` and count them; also where
            ``convert`` raises ``DataError``.

    Raises:
        ValueError: ``on_bad`` is neither.
        TypeError: ``convert`` is no function.
    """

    convert: Convert | None = None
    shuffle: bool = True
    on_bad: OnBadInstance = "raise"

    def __post_init__(self) -> None:
        if self.on_bad not in ("raise", "skip"):
            raise ValueError(f"Reading(on_bad={self.on_bad!r}): give 'raise' or 'skip'")
        require_truth("Reading", shuffle=self.shuffle)
        if self.convert is not None and not callable(self.convert):
            raise TypeError(
                f"Reading(convert={self.convert!r:.80}): give a function that makes an Instance of "
                "an item of the data, or None"
            )

"""How a session computes, and how it reads its data, as a user may say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from geartrain.engine.instrument import AbstractMeter
from geartrain.frames.precision import Precision
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
    """

    convert: Convert | None = None
    shuffle: bool = True
    on_bad: OnBadInstance = "raise"

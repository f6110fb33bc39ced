"""What a node must know of the part that owns its weights; the part itself lives one floor up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from geartrain.ir.gradient import GradientSum
from geartrain.ir.message import IntArray


class AbstractWeights(ABC):
    """Weights with a version: what nodes read, and where their gradients go."""

    name: str
    version: int
    """Optimiser steps so far; nodes stamp it on the rows that they send."""

    gradient: GradientSum

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are: nodes compute there, and keep rows and gradients there."""

    @abstractmethod
    def sent(self, rows: int) -> None:
        """Rows have left a node at the version of now and will be answered."""

    @abstractmethod
    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        """Gradients have been added.

        Args:
            rows: Payload rows that the gradients belong to.
            versions: int64 ``(n,)``, the version at each message's forward.
            lengths: Payload rows of each message where they are bundles.
        """

    @abstractmethod
    def answered(self, rows: int) -> None:
        """Gradients have been added in the firing that made the rows, at the version of now.

        Args:
            rows: Payload rows that the gradients belong to.
        """

    @abstractmethod
    def dropped(self, versions: IntArray) -> None:
        """Rows have come back with a zero gradient."""

    @abstractmethod
    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        """Leaves that keep the values of this version, whatever steps follow (a stash).

        Nothing is copied until a step would overwrite values that a kept graph still needs.
        """

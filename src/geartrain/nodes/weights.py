"""What a node must know of the part that owns its weights; the part itself lives one floor up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.message import IntArray
from geartrain.nodes.gradient import GradientSum


@final
@dataclass(frozen=True, slots=True, eq=False)
class WeightVersion:
    """The weights that one message's forward saw, until its gradient has come.

    Args:
        leaves: A leaf for each parameter: gradients are those of the leaves.
        version: That of the weights it came from; staleness counts from it.
        again: Whether the module runs again in the backward, so that no graph is kept.
    """

    leaves: Mapping[nn.Parameter, Tensor]
    version: int
    again: bool = False


class AbstractWeights(ABC):
    """Weights with a version: what nodes read, and where their gradients go."""

    name: str
    version: int
    """Optimiser steps so far; nodes stamp it on the rows that they send."""

    gradient: GradientSum

    wants_graph: str | None = None
    """The setting of the part, if any, that only nodes with ``keep="graph"`` can follow."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are: nodes compute there, and keep rows and gradients there."""

    @abstractmethod
    def sent(self, rows: int, version: int | None = None) -> None:
        """Rows have left a node and will be answered.

        Args:
            rows: Messages.
            version: Of the weights that they saw; None: that of now.
        """

    @abstractmethod
    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        """Gradients have been added.

        Args:
            rows: Payload rows that the gradients belong to.
            versions: int64 ``(n,)``, the version at each message's forward.
            lengths: Payload rows of each message where they are bundles.
        """

    def received_of(self, version: int, rows: int, messages: int) -> None:
        """Gradients have been added, of messages that saw one version.

        Args:
            version: At their forward.
            rows: Payload rows that the gradients belong to.
            messages: How many messages these are, at least one.
        """
        lengths = np.zeros(messages, np.int64)
        lengths[0] = rows
        self.received(rows, np.full(messages, version, np.int64), lengths)

    @abstractmethod
    def answered(self, rows: int, messages: int) -> None:
        """Gradients have been added in the firing that made the rows, at the version it saw.

        Args:
            rows: Payload rows that the gradients belong to.
            messages: How many messages these are.
        """

    def updates_of(self, slots: IntArray) -> IntArray | None:
        """Of which updates the gradients of these messages are, counted from the present one.

        Args:
            slots: int64 ``(n,)``, of their instances, in the order in which they are answered.

        Returns:
            int64 ``(n,)``, 0 for the present one; None: all are of that, and ``received`` and
            ``answered`` are told of them. Else ``received_for`` or ``answered_for`` are.
        """
        return None

    def received_for(
        self, updates: IntArray, versions: IntArray, lengths: IntArray | None = None
    ) -> None:
        """Gradients have been added, ``gradient.of_updates`` these.

        Args:
            updates: int64 ``(n,)``, as ``updates_of`` gave them.
            versions, lengths: As of ``received``.
        """
        raise AssertionError(f"part '{self.name}' has no gradients of later updates")

    def answered_for(self, updates: IntArray, lengths: IntArray | None) -> None:
        """The same, in the firing that made the rows, at the version it saw."""
        raise AssertionError(f"part '{self.name}' has no gradients of later updates")

    @abstractmethod
    def dropped(self, versions: IntArray) -> None:
        """Rows have come back with a zero gradient."""

    @abstractmethod
    def aliases(self) -> Mapping[nn.Parameter, Tensor]:
        """Leaves that share the parameters' storage, but not their version counters.

        Nothing is copied until a step would overwrite values that a kept graph still needs.
        """

    @property
    def open(self) -> bool:
        """Whether one more message may begin its forward now."""
        return True

    def look(self, number: int, rows: int) -> WeightVersion:
        """The weights for the forward of one message.

        Args:
            number: Of the message's instance, counted through the run.
            rows: Its payload rows.
        """
        return WeightVersion(self.aliases(), self.version)

    def look_back(self, seen: WeightVersion) -> Mapping[nn.Parameter, Tensor]:
        """The leaves for the backward of the message, right before it; they are kept no longer."""
        return seen.leaves

    def compensated(
        self,
        seen: WeightVersion,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        rows: int,
    ) -> Sequence[Tensor | None]:
        """What is added of a message's gradients, sums over so many payload rows."""
        return gradients

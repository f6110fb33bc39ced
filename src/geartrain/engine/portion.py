"""How much one firing takes of what waits for a node.

    adds gradients       what the update still lacks, so that no update takes more than it was asked
    only computes        what one update wants, so that what waits for its way back has seen few
                         updates; but enough payload rows to be worth a firing
    evaluation           all there is

A worker asks its ``Portion``; another one is ``Settings(portion=...)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from geartrain.engine.mailbox import Queue
from geartrain.nodes.node import AbstractNode
from geartrain.parts.trained import AbstractPart


class AbstractPortion(ABC):
    """Says how many messages of a queue one firing of training takes. Stateless."""

    def together(self, node: AbstractNode, rows: float, parts: Collection[AbstractPart]) -> int:
        """Updates whose gradients are added in one firing of a node that tells them apart.

        Args:
            node: That adds.
            rows: Payload rows of an update, about.
            parts: To which it adds.
        """
        return 1

    @abstractmethod
    def adding(self, queue: Queue, node: AbstractNode, part: AbstractPart) -> int | None:
        """Most messages of a firing that adds gradients to a part; None: any number."""

    @abstractmethod
    def computing(
        self, queue: Queue, node: AbstractNode, parts: Collection[AbstractPart], weights: int
    ) -> int | None:
        """Most bundles of a firing that only computes; None: any number.

        Args:
            queue: Where they wait.
            node: That computes.
            parts: Its part, or all parts of the worker where it has none.
            weights: Of all parts of the worker, together.
        """


@final
@dataclass(frozen=True, slots=True)
class UpdatesWorth(AbstractPortion):
    """About what one update wants.

    Args:
        worth: Payload rows from which on a firing of bundles gains little by more.
        light: Weights of a worker's parts, at most, that make a row cost next to nothing.
        worth_light: As ``worth`` where the parts are light ...
        updates_light: ... and no more than in so many updates.
        worth_apart: Rows of whole updates, for each call of a module in a firing, up to which those
            of several go together where their gradients are told apart: what they have seen is
            older by as many updates, and a firing is one less ...
        updates_apart: ... and so many updates at most; of those that workers gather each by itself
            for one part, so many in all ...
        updates_each: ... but so many of each worker, as firings would else be half as full, as long
            as that is no more than twice as many in all: steps of more spoil one another.
    """

    worth: int = 512
    light: int = 4096
    worth_light: int = 2048
    updates_light: int = 4
    worth_apart: int = 2048
    updates_apart: int = 4
    updates_each: int = 2

    def together(self, node: AbstractNode, rows: float, parts: Collection[AbstractPart]) -> int:
        worth = self.worth_apart * node.calls_a_firing
        return self._at_most(int(worth // max(rows, 1)), parts)

    def adding(self, queue: Queue, node: AbstractNode, part: AbstractPart) -> int | None:
        """As many as the update lacks.

        Rows that move in lockstep would else come back together, and one update would take them
        all, however few it was asked for.
        """
        lacking = part.lacking
        if lacking is not None and part.once and part.takes_ahead and node.apart:
            n = part.trigger.n
            return lacking + (self._together(queue, node, n, [part]) - 1) * n
        if lacking is None or part.trigger.unit != "rows" or not (queue.bundled or node.bundled):
            return lacking
        name = part.name
        return queue.messages_with(lacking, lambda batch: node.rows_of(batch, name), name)

    def computing(
        self, queue: Queue, node: AbstractNode, parts: Collection[AbstractPart], weights: int
    ) -> int | None:
        """As many as a whole update takes, or as are worth a firing.

        Where autograd's graph of a firing is kept it is of use if all come back together, which
        those of one update do.
        """
        rows, messages = self.worth, 1
        for part in parts:
            trigger = part.trigger
            if trigger.unit is None:
                return None
            if trigger.unit == "rows":
                rows = max(rows, trigger.n)
            else:
                messages = max(messages, trigger.n)
        if messages > 1 and node.keeps_graphs:
            return messages
        most = max(messages, queue.messages_with(rows, node.lengths))
        if messages > 1 and node.apart and all(part.takes_ahead for part in parts):
            most = max(most, self._together(queue, node, messages, parts) * messages)
        if messages > 1 and weights <= self.light:
            more = queue.messages_with(self.worth_light, node.lengths)
            most = max(most, min(self.updates_light * messages, more))
        return most

    def _together(
        self, queue: Queue, node: AbstractNode, n: int, parts: Collection[AbstractPart]
    ) -> int:
        """Updates of n messages each that may go together, of what waits in a queue."""
        worth = queue.messages_with(self.worth_apart * node.calls_a_firing, node.lengths)
        return self._at_most(worth // n, parts)

    def _at_most(self, updates: int, parts: Collection[AbstractPart]) -> int:
        """Of so many updates those that may go together, whoever else steps these parts."""
        steppers = max((part.steppers for part in parts), default=1)
        one, most = self.updates_apart, self.updates_apart // steppers
        each = min(self.updates_each, one, 2 * one // steppers)
        return max(1, min(max(most, each), updates))

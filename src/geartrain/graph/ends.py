"""Operators behind which nothing comes: losses, what a prediction returns, rows that stop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.frame import Schema, View
from geartrain.graph.dry_run import DryRun
from geartrain.graph.operator import (
    AbstractOperator,
    Made,
    Spec,
    describe,
    imagine,
    readable,
)
from geartrain.graph.sample_rows import SampleRows
from geartrain.nodes.call import Call
from geartrain.nodes.control import Stop
from geartrain.nodes.loss import (
    LossNode,
    Metric,
    Objective,
    OutputNode,
    Target,
    column_of,
    per_row,
)
from geartrain.nodes.node import Place
from geartrain.nodes.weights import AbstractWeights


@final
class Losing(AbstractOperator):
    """Loss, and its gradient at once."""

    kind = "loss"
    ways = 0

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        criterion: Callable[..., Any],
        target: Target,
        metrics: Mapping[str, Metric],
        weight: Target,
        label: str | None = "loss",
        alone: bool = False,
    ) -> None:
        super().__init__(name, [[source]])
        self.criterion, self.target = criterion, target
        self.metrics, self.weight = dict(metrics), weight
        self.label, self.alone = label, alone
        self.classes: int | None = None
        """Columns of the prediction, where a check of the graph could tell."""
        self.dry_run = DryRun(name, self._called(), mixes=alone, judges=True)

    def _called(self) -> str:
        return getattr(self.criterion, "__name__", None) or repr(self.criterion)

    def detail(self) -> str:
        called = self._called()
        target = self.target if isinstance(self.target, str) else None
        return f"{called}{f' against {target}' if target else ''}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        for column in (self.target, self.weight):
            if isinstance(column, str):
                readable(self.name, column, given[0].columns, schema)
            elif callable(column):
                imagine(self.name, column, given[0], schema)
        for metric in self.metrics.values():
            if metric.where is not None:
                imagine(self.name, metric.where, given[0], schema)
        payload = given[0].payload
        if payload is not None:
            self._refuse_number(len(payload))
        if payload is not None and payload[0].ndim == 2:
            self.classes = int(payload[0].shape[1])
        return []

    def _refuse_number(self, width: int) -> None:
        """Raises:
        GraphError: The criterion takes more than it gets, or less.
        """
        criterion = per_row(self.criterion, self.name)
        asked = criterion.forward if isinstance(criterion, nn.Module) else criterion
        try:
            parameters = inspect.signature(asked).parameters.values()
        except (TypeError, ValueError):  # of C: it says nothing of itself
            return
        may = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        wanted = [p.name for p in may if p.default is p.empty]
        takes = f"'{self.name}': {self._called()} takes {', '.join(wanted)}, and gets {width}"
        tensors = f"payload tensor{'s' if width > 1 else ''}"
        alone = self.target is None
        if alone and len(wanted) > width:
            raise GraphError(
                f"{takes} {tensors} alone; target= gives it a column: "
                "loss(criterion, target='label')"
            )
        any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if width + (not alone) > len(may) and not any_number:
            raise GraphError(
                f"{takes} {tensors}{'' if alone else ' and the target'}; put a function before it "
                "that gives what it wants: .through(lambda logits, state: logits).loss(...)"
            )

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return LossNode(place, self.objective(place), self.alone)

    def try_out(self, given: Spec, sample_rows: SampleRows, known: Sequence[Tensor | None]) -> None:
        """Run the criterion on predictions that are made up, and real targets.

        Args:
            given: What comes in.
            sample_rows: Where such rows are.
            known: Of each payload tensor rows of the example, or None.

        Raises:
            GraphError: It has weights, does not take the dtypes, or mixes rows.
        """
        if given.payload is None:
            return
        target = self.target
        read = () if target is None else (target if isinstance(target, str) else "target",)

        def look_up(view: View) -> list[Tensor]:
            column = column_of(target, view)
            return [] if column is None else [column]

        call = Call(per_row(self.criterion, self.name), read)
        self.dry_run.imagine(call, sample_rows.samples(call, given.payload, known, look_up))

    def objective(self, place: Place) -> Objective:
        """What it computes, counted anew."""
        return Objective(
            place,
            self.criterion,
            self.target,
            self.metrics,
            self.weight,
            self.label,
            self.dry_run,
        )


@final
class Outputting(AbstractOperator):
    """Rows that a prediction returns."""

    kind = "output"
    ways = 0

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        take: int | None = None,
        alone: bool = False,
    ) -> None:
        super().__init__(name, [[source]])
        self.take, self.alone = take, alone

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        payload = given[0].payload
        if self.take is not None and payload is not None and self.take >= len(payload):
            raise GraphError(
                f"'{self.name}': takes payload {self.take}, but rows of {describe(payload)} come, "
                f"payload 0..{len(payload) - 1}"
            )
        return []

    def make(self, place: Place, weights: AbstractWeights | None) -> OutputNode:
        return OutputNode(place, self.take, self.alone)


@final
class Stopping(AbstractOperator):
    """Rows end here with a zero gradient."""

    kind = "stop"
    ways = 0

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        return []

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Stop(place)

"""A static network as parts in a row, through which whole minibatches go.

    x ─┐
       ├─► part 0 ─► part 1 ─► ... ─► part P-1 ─► loss
    y ─┘   blocks    blocks           blocks      (prediction, y)

A minibatch is one instance: its rows travel together, autograd's graph of each part is kept, and
every part steps as soon as its own gradient is there. With ``max_active`` minibatches in flight
and parts on several workers that is an asynchronous pipeline with stashed weights; with one in
flight it is plain training, exactly.

Source: one forward, one backward and stashed weights of PipeDream, Narayanan et al. 2019 (SOSP).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, final

from torch import Tensor, nn

from geartrain.bounds import require_whole
from geartrain.engine.controller import Ramp
from geartrain.engine.mailbox import AbstractPolicy, BackwardFirst
from geartrain.engine.schedule import Schedule
from geartrain.errors import GraphError
from geartrain.graph.gear import Gear, check_gears
from geartrain.graph.graph import Graph
from geartrain.kinds import require_each, require_entries, require_kind, require_truth
from geartrain.nodes.loss import Metric, cross_entropy
from geartrain.parts.late.delay import AbstractDelay
from geartrain.parts.late.views import AbstractView
from geartrain.parts.rules import MakeOptimizer, Messages, Part, Rules
from geartrain.pipeline.credit import AbstractCredit, Backprop, Local
from geartrain.pipeline.cutter import (
    Pieces,
    Row,
    balanced_cuts,
    check_cuts,
    parameter_costs,
    row_of,
    time_costs,
)
from geartrain.pipeline.rowwise import Criterion, RowCriterion, row_metric
from geartrain.pipeline.stage import Stage, boundaries, refuse_shared

T = TypeVar("T")
Heads: TypeAlias = Sequence[nn.Module] | Callable[[int, Tensor], nn.Module]


@final
class Pipeline:
    """A module cut into parts.

    The parts hold the module's own blocks: after training its ``state_dict`` has the weights, and
    inference needs nothing of ours.

    Args:
        module: An ``nn.Sequential``, or a module with one list of blocks, perhaps with a stem
            before and a head behind it.
        parts: How many; or ``cuts``.
        cuts: The first block of each part but the first, by hand.
        by: What is balanced between parts: numbers of ``parameters``, or measured ``time``.
        sample: A minibatch of inputs ``(n, ...)``; wanted to measure time, to make local heads,
            and to check what was guessed of a module that is no ``nn.Sequential``.
        criterion: ``(prediction, target)`` to one loss a row or position; see ``pipeline.rowwise``.
        view: Which weights a part's forward and backward see; one for all parts, or one for each.
            Default: ``Stashed``.
        delay: Rules for late gradients; one for all parts, or one for each.
        gears: Speeds; one for all parts, or one for each. See ``Gear``.
        slack: Minibatches in flight beyond one for each part. Parts then wait less for each other
            where their times vary or their links are slow, and gradients come later, by as many
            updates at most; in the last part they never do.
        credit: Where gradients come from: ``"backprop"`` or an object of ``pipeline.credit``.
        heads: Modules for the local heads, in order; or a function of the part's number and a
            sample of what leaves it. Default: pooling and a linear map, made from ``sample``.
        metrics: Name to ``(prediction, target)``, one number a row or position, or ``Metric``.
        judge_heads: Whether the losses and metrics of local heads are reported, as ``loss 0`` and
            so on. ``loss`` is the last part's in any case.
        blocks, stem, head: Where the module has several lists of blocks, or runs other submodules
            before and behind than those assigned before and after: their names.

    Attributes:
        graph: For ``Session``; inputs ``x`` and ``y``, parts ``part 0`` ..., ``head 0`` ....
        stages: What each part runs.
        heads: Local heads by part number.
        cuts: The first block of each part but the first.
        max_active: Minibatches in flight that keep all parts busy: one for each part, and slack.

    Raises:
        ValueError: Neither parts nor cuts are given, or a part would be empty.
        GraphError: The module cannot be cut there: it shares weights across a cut, or is no row of
            blocks; or a sample is wanted and missing.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        parts: int | None = None,
        cuts: Sequence[int] | None = None,
        by: Literal["parameters", "time"] = "parameters",
        sample: Tensor | None = None,
        criterion: Criterion = cross_entropy,
        view: AbstractView | Sequence[AbstractView | None] | None = None,
        delay: AbstractDelay | Sequence[AbstractDelay | None] | None = None,
        gears: Gear | Sequence[Gear | None] | None = None,
        slack: int = 0,
        credit: AbstractCredit | Literal["backprop"] = "backprop",
        heads: Heads | None = None,
        metrics: Mapping[str, Criterion | Metric] | None = None,
        judge_heads: bool = False,
        blocks: str | Sequence[str] | None = None,
        stem: Pieces | None = None,
        head: Pieces | None = None,
    ) -> None:
        require_whole(f"slack={slack!r}", slack, 0, "0 or more minibatches")
        _require_kinds(module, sample, criterion, metrics)
        require_truth("Pipeline", judge_heads=judge_heads)
        self.module = module
        row = row_of(module, blocks, stem, head, sample)
        self.cuts = _cuts(row, parts, cuts, by, sample)
        ends = [0, *self.cuts, len(row.blocks)]
        self.stages = [Stage(row.between(a, b), first=a == 0) for a, b in itertools.pairwise(ends)]
        self.credit = _credit(credit)
        wanted = self.credit.heads(len(self.stages))
        self.heads = _make_heads(self.credit, wanted, heads, self.stages, sample)
        self.max_active = len(self.stages) + slack
        self._criterion = RowCriterion(criterion)
        self._metrics = {name: row_metric(metric) for name, metric in (metrics or {}).items()}
        views = self._each("view", view, AbstractView, "a view, such as Stashed()")
        delays = self._each("delay", delay, AbstractDelay, "a rule, such as GapAware()")
        speeds = self._each("gears", gears, Gear, "a gear, such as Gear(period=4)")
        self.parts = [
            Part(
                stage,
                name=f"part {k}",
                keep="graph",
                view=views[k],
                delay=delays[k],
                gear=speeds[k],
                window=self._window(k, slack, gears is not None),
            )
            for k, stage in enumerate(self.stages)
        ]
        self._check_gears(speeds)
        local = {k: self._local(k, module, judge_heads) for k, module in self.heads.items()}
        refuse_shared(
            {f"part {k}": stage for k, stage in enumerate(self.stages)}
            | {f"head {k}": head for k, head in self.heads.items()},
            module,
        )
        self.graph = self._graph(local)

    def rules(self, optimizer: MakeOptimizer, **others: Any) -> Rules:
        """Rules with an update for each minibatch and part, on the mean over its rows.

        Args:
            optimizer: ``partial(torch.optim.Adam, lr=1e-3)``.
            others: As in ``Rules``; ``update_every=Messages(4)`` gathers four minibatches.
        """
        return Rules(optimizer=optimizer, **({"update_every": Messages(1)} | others))

    def placement(self, workers: int) -> dict[str, int]:
        """Part name to worker: consecutive parts together, a head beside its part.

        Raises:
            ValueError: There are more workers than parts.
        """
        n = len(self.parts)
        require_whole(f"placement of {n} parts on {workers!r} workers", workers)
        if not 1 <= workers <= n:
            raise ValueError(f"placement of {n} parts on {workers} workers; give 1 to {n}")
        found = {f"part {k}": k * workers // n for k in range(n)}
        return found | {f"head {k}": found[f"part {k}"] for k in self.heads}

    def settings(self, workers: int = 1) -> dict[str, Any]:
        """What ``Session`` is told of a pipeline besides graph, rules and runtime.

        ``Session(pipe.graph, rules=..., runtime=Threads(2), **pipe.settings(workers=2))``: parts
        placed in their order, answers before new minibatches, ``max_active`` from the start.
        """
        return {
            "max_active": self.max_active,
            "schedule": Schedule(
                ramp=Ramp(start=1, over=0),
                policy=_backward_first,
                placement=self.placement(workers),
            ),
        }

    def _each(
        self, name: str, given: T | Sequence[T | None] | None, kind: Any, wanted: str
    ) -> Sequence[T | None]:
        """One setting for every part."""
        wanted += " for all parts, or a list with one for each"
        if isinstance(given, Sequence):
            require_each("Pipeline", kind | None, wanted, **{name: given})
        else:
            require_kind("Pipeline", kind | None, wanted, **{name: given})
        if not isinstance(given, Sequence):
            return [given] * len(self.stages)
        if len(given) != len(self.stages):
            raise ValueError(
                f"{name}= has {len(given)} entries for {len(self.stages)} parts; give one for "
                "each, None for the default, or a single one for all"
            )
        return given

    def _window(self, k: int, slack: int, geared: bool) -> int | None:
        """Messages of a part between forward and backward, as its credit wants them.

        The last part gets no slack: its gradients come from the loss beside it, so it waits for
        nobody, and what went forward before them would only be older when they come.
        """
        window = None if geared else self.credit.window(k, len(self.stages))
        last = k == len(self.stages) - 1
        return window if window is None or last else window + slack

    def _check_gears(self, speeds: Sequence[Gear | None]) -> None:
        """Raises:
        GraphError: A part would wait for gradients that never come; names both.
        """
        if any(speeds):
            named = {f"part {k}": gear or Gear() for k, gear in enumerate(speeds)}
            check_gears(named, [f"part {k}" for k in self.credit.cuts(len(speeds))])

    def _local(self, k: int, module: nn.Module, judged: bool) -> Local:
        return Local(
            module,
            self._criterion,
            {f"{name} {k}": metric for name, metric in self._metrics.items()} if judged else {},
            f"loss {k}" if judged else None,
            k,
        )

    def _graph(self, local: Mapping[int, Local]) -> Graph:
        graph = Graph()
        x = graph.input("x", bundle=True, alone=True)
        y = graph.input("y", bundle=True, alone=True)
        stream = graph.concat(x, y, on="instance", how="tuple", name="minibatch")
        stream = self.credit.wire(stream, self.parts, local, self._criterion)
        stream.output("prediction", take=0, alone=True)
        stream.loss(self._criterion, metrics=self._metrics, alone=True)
        return graph


def _require_kinds(module: object, sample: object, criterion: object, metrics: object) -> None:
    """Raises:
    TypeError: One is of another kind.
    """
    require_kind("Pipeline", nn.Module, "a module, such as an nn.Sequential", module=module)
    wanted = "a minibatch of inputs (n, ...), or None"
    require_kind("Pipeline", Tensor | None, wanted, sample=sample)
    wanted = "a function of prediction and target: cross_entropy"
    require_kind("Pipeline", Callable, wanted, criterion=criterion)
    if metrics is not None:
        wanted = "names with functions of prediction and target: {'accuracy': accuracy}"
        require_entries("Pipeline", str, Callable | Metric, wanted, metrics=metrics)


def _backward_first(worker: int) -> AbstractPolicy:
    return BackwardFirst()


def _credit(given: AbstractCredit | str) -> AbstractCredit:
    if isinstance(given, AbstractCredit):
        return given
    if given != "backprop":
        raise ValueError(f"credit={given!r}: give 'backprop' or an object such as Greedy()")
    return Backprop()


def _cuts(
    row: Row,
    parts: int | None,
    cuts: Sequence[int] | None,
    by: str,
    sample: Tensor | None,
) -> tuple[int, ...]:
    if cuts is not None:
        found = check_cuts(cuts, len(row.blocks))
        if parts is not None and parts != len(found) + 1:
            raise ValueError(f"cuts={list(cuts)} make {len(found) + 1} parts, not parts={parts}")
        return found
    if parts is None:
        raise ValueError("Pipeline() got neither parts nor cuts; give parts=4 or cuts=[3, 6]")
    if by not in ("parameters", "time"):
        raise ValueError(f"by={by!r}: give 'parameters' or 'time'")
    if by == "parameters":
        return balanced_cuts(parameter_costs(row), parts)
    if sample is None:
        raise GraphError("by='time' runs a minibatch through the blocks: give it as sample=")
    return balanced_cuts(time_costs(row, sample), parts)


def _make_heads(
    credit: AbstractCredit,
    wanted: Sequence[int],
    given: Heads | None,
    stages: Sequence[Stage],
    sample: Tensor | None,
) -> dict[int, nn.Module]:
    wished = "modules, one for each local head, or a function of a part's number and a sample"
    if isinstance(given, Sequence | nn.ModuleList | nn.Sequential):
        require_each("Pipeline", nn.Module, wished, heads=given)
        if len(given) != len(wanted):
            raise ValueError(f"heads= has {len(given)} modules; parts {list(wanted)} want one each")
        return dict(zip(wanted, given, strict=True))
    require_kind("Pipeline", Callable | None, wished, heads=given)
    if not wanted:
        return {}
    if sample is None:
        raise GraphError(
            f"parts {list(wanted)} want local heads, made from what leaves the parts: give "
            "sample=, a minibatch of inputs, or heads= as modules"
        )
    rows = boundaries(stages, sample)
    if given is not None:
        return {k: given(k, rows[k]) for k in wanted}
    return {k: credit.make_head(rows[k], rows[-1]) for k in wanted}

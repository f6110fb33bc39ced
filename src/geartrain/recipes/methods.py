"""Ways to train a pipeline, by name: what the option ``method`` of a recipe stands for.

    method ─► Method ─► credit of the Pipeline, rules of its parts, minibatches in flight

    backprop             one minibatch in flight: plain training
    stash, pipemare ...  as many in flight as there are parts; the loss reaches all of them
    greedy, dni ...      the same, with local losses or guessed gradients
    option gear          slows the lower half of the parts, by any of them

A method changes nothing else: network, data, order, batch and rate are the recipe's. Sources are
those of the views, rules and credits that it is made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from geartrain.engine.controller import AbstractRamp, Ramp, Synchronous
from geartrain.graph.gear import Gear
from geartrain.nodes.loss import Metric
from geartrain.parts.late.delay import (
    AbstractDelay,
    AnnealedRate,
    DelayCompensated,
    GapAware,
    ScaledByStaleness,
)
from geartrain.parts.late.views import (
    AbstractView,
    Corrected,
    DoubleBuffered,
    Mixed,
    Predicted,
    Recomputed,
)
from geartrain.parts.rules import Clip, MakeOptimizer, Messages
from geartrain.pipeline.credit import (
    AbstractCredit,
    Backprop,
    Chunked,
    Critics,
    DecoupledGreedy,
    Greedy,
    Overlapping,
    Synthetic,
)
from geartrain.pipeline.cutter import balanced_cuts
from geartrain.pipeline.pipeline import Pipeline
from geartrain.recipes.recipe import Choice, LoadSplit, Option, Setting, Task, Value

PARTS: Final = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a method may have to know of the training.

    Args:
        minibatches: Of all epochs.
        parts: Of the pipeline.
    """

    minibatches: int
    parts: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to train a pipeline.

    Args:
        what: Half a sentence.
        credit: Where gradients come from.
        alone: One minibatch in flight; else as many as there are parts.
        rules: Fields of ``Rules`` for a course, such as a weight view.
        ramp: How minibatches in flight grow, for a course.
        leading: Whether gradients are taken where the momentum leads, by ``Network.leading``.
        heads: Whether its heads are ``Network.head``; else the credit makes what it needs.
    """

    what: str
    credit: AbstractCredit = field(default_factory=Backprop)
    alone: bool = False
    rules: Callable[[Course], Mapping[str, Any]] = lambda course: {}
    ramp: Callable[[Course], AbstractRamp] = lambda course: Ramp(start=1, over=0)
    leading: bool = False
    heads: bool = True


def _viewed(view: AbstractView) -> Callable[[Course], Mapping[str, Any]]:
    return lambda course: {"view": view}


def _late(delay: AbstractDelay) -> Callable[[Course], Mapping[str, Any]]:
    return lambda course: {"delay": delay}


def _pipemare(course: Course) -> Mapping[str, Any]:
    return {"view": Corrected(), "delay": AnnealedRate(over=max(course.minibatches // 4, 1))}


METHODS: Final[Mapping[str, Method]] = {
    "backprop": Method(what="one minibatch in flight: plain training", alone=True),
    "stash": Method(what="the backward pass has the weights of its forward pass (PipeDream)"),
    "mixed": Method(what="activations of then, weights of now", rules=_viewed(Mixed())),
    "recompute": Method(
        what="the forward pass runs again at the weights of now", rules=_viewed(Recomputed())
    ),
    "2bw": Method(
        what="two versions of the weights, an update for as many minibatches as there are parts",
        rules=lambda course: {"view": DoubleBuffered(), "update_every": Messages(course.parts)},
    ),
    "spectrain": Method(
        what="the forward pass has predicted weights (SpecTrain, XPipe)", rules=_viewed(Predicted())
    ),
    "pipemare": Method(
        what="weights of now moved back, rate annealed by the delay (PipeMare)", rules=_pipemare
    ),
    "pipemare-warm": Method(
        what="the same after a synchronous tenth of the training",
        rules=_pipemare,
        ramp=lambda course: Synchronous(course.minibatches // 10),
    ),
    "nesterov": Method(
        what="stashed, gradients where the momentum leads (look-ahead)", leading=True
    ),
    "scaled": Method(what="stashed, steps divided by staleness", rules=_late(ScaledByStaleness())),
    "dcasgd": Method(
        what="stashed, gradients moved by a guess of the curvature (DC-ASGD)",
        rules=_late(DelayCompensated(2.0, adaptive=0.95)),
    ),
    "gap": Method(what="stashed, gradients divided by the gap", rules=_late(GapAware())),
    "greedy": Method(what="a local loss for every part", credit=Greedy()),
    "chunk2": Method(what="a local loss for each half of the parts", credit=Chunked(2)),
    "overlap": Method(what="a local loss reaches its part and the one below", credit=Overlapping()),
    "critic": Method(what="critics predict the loss above", credit=Critics(), heads=False),
    "dgl": Method(
        what="greedy, on a buffer of eight stored minibatches (decoupled greedy learning)",
        credit=DecoupledGreedy(buffer=8),
    ),
    "dni": Method(
        what="gradients are guessed (synthetic gradients)", credit=Synthetic(), heads=False
    ),
}


def method_options(default: str = "stash", *, parts: int = PARTS) -> tuple[Option | Choice, ...]:
    """The options that a recipe of a static network has.

    Args:
        default: Method; one of the recipe's own may be.
        parts: Default number.
    """
    words = tuple(dict.fromkeys((default, *METHODS)))
    return (
        Choice("method", default, words, "how the parts learn"),
        Option("parts", parts, 1, "parts that the network is cut into"),
        Option("gear", 1, 1, "the lower half of the parts learns from one minibatch in so many"),
    )


def in_flight(options: Mapping[str, Value]) -> int:
    """Minibatches in flight by the method's default."""
    return 1 if METHODS[str(options["method"])].alone else int(options["parts"])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network to be trained by any method.

    Args:
        module: Blocks in a row.
        sample: A minibatch of its inputs, of the size that is trained with.
        metrics: Of validation.
        optimizer: Makes one from parameters and ``lr=``.
        rate: Learning rate.
        minibatches: Of all epochs.
        head: Makes a local head from the number of a part and a sample of what leaves it; None: a
            linear map.
        schedule: Factor on the rate, from the number of minibatches finished.
        clip: Limits on a part's gradient.
        leading: Makes the optimiser of methods whose gradients are taken where the momentum leads,
            from parameters and ``lr=``.
    """

    module: nn.Sequential
    sample: Tensor
    metrics: Mapping[str, Callable[..., Any] | Metric]
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: float
    minibatches: int
    head: Callable[[int, Tensor], nn.Module] | None = None
    schedule: Callable[[int], float] | None = None
    clip: Clip | None = None
    leading: Callable[..., torch.optim.Optimizer] | None = None


def pipeline_of(network: Network, options: Mapping[str, Value]) -> Pipeline:
    """The network cut into parts, with the credit of the method.

    Raises:
        ValueError: There are fewer blocks than parts, or too few parts for the method.
    """
    parts = int(options["parts"])
    method = METHODS[str(options["method"])]
    return Pipeline(
        network.module,
        cuts=balanced_cuts(flops_of(network.module, network.sample), parts),
        sample=network.sample,
        credit=method.credit,
        heads=network.head if method.heads else None,
        gears=_gears(int(options["gear"]), parts),
        metrics=network.metrics,
    )


def _gears(period: int, parts: int) -> Sequence[Gear | None] | None:
    """The lower half of the parts slow, the others at full speed."""
    if period == 1:
        return None
    if parts < 2:
        raise ValueError(f"option gear={period}: there is no lower half of {parts} part")
    lower = parts // 2
    return [Gear(period=period)] * lower + [None] * (parts - lower)


def task_of(
    network: Network,
    setting: Setting,
    splits: Mapping[str, LoadSplit],
    *,
    validation: str,
    files: Mapping[str, str] | None = None,
) -> Task:
    """The network as a task, by the method that the options name.

    Args:
        network: With its optimiser.
        setting: With the options ``method``, ``parts`` and ``learning_rate``.
        splits: As ``Task`` has them.
        validation: The split to validate on.
        files: As ``Task`` has them.

    Raises:
        ValueError: There are fewer blocks than parts, or too few parts for the method.
    """
    options = setting.options
    method = METHODS[str(options["method"])]
    course = Course(minibatches=network.minibatches, parts=int(options["parts"]))
    pipeline = pipeline_of(network, options)
    made = network.leading if method.leading else network.optimizer
    if made is None:
        raise ValueError(f"option method={options['method']}: there is no optimiser for it here")
    optimizer: MakeOptimizer = partial(made, lr=network.rate)
    fields = {
        "schedule": network.schedule,
        "clip": network.clip,
        "update_every": Messages(setting.update_every),
        **method.rules(course),
    }
    rules = pipeline.rules(optimizer, **fields)
    return Task(
        graph=pipeline.graph,
        rules=rules,
        splits=splits,
        validation=validation,
        ramp=method.ramp(course),
        files=files or {},
        pipeline=pipeline,
    )


def flops_of(module: nn.Sequential, sample: Tensor) -> list[float]:
    """Operations of the matrix products and convolutions of each block, for one row.

    Args:
        module: Blocks in a row; copies are run, without values.
        sample: A minibatch of inputs.
    """
    counts = []
    h: Tensor = sample[:1].to("meta")
    for block in copy.deepcopy(module).to("meta").eval():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            h = block(h)
        counts.append(float(counter.get_total_flops()))
    return counts

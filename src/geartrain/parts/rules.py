"""What a user says of how weights move: parts and their rules; triggers are in ``parts.triggers``.

``Part`` and ``Rules`` are values; what runs them is ``PartState`` in ``geartrain.parts.part``.

Source: local updates after min_update_frequency gradients, Gaunt et al. 2017, arXiv:1705.09786;
ours is called ``update_every``, as it is a count.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from geartrain.bounds import require_number, require_whole
from geartrain.graph.gear import Gear
from geartrain.graph.operator import Keep
from geartrain.kinds import require_kind, require_truth, require_word
from geartrain.nodes.uncompiled import uncompiled
from geartrain.parts.late.delay import AbstractDelay
from geartrain.parts.late.views import AbstractView
from geartrain.parts.triggers import Flush as Flush
from geartrain.parts.triggers import Instances as Instances
from geartrain.parts.triggers import Messages as Messages
from geartrain.parts.triggers import Rows as Rows
from geartrain.parts.triggers import Trigger as Trigger

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
Averaging: TypeAlias = Literal["rows", "instances", "none"]


@final
@dataclass(frozen=True, slots=True)
class Clip:
    """Limit the gradient before a step.

    Args:
        norm: Largest 2-norm over all parameters.
        value: Largest absolute entry; applied before the norm where both are given.
        over: Whose norm: of the ``part`` alone, or of ``all`` parts. Parts step by themselves: of
            the others it is that of their last steps (0 before the first). A part with such a limit
            is scaled by norm / (norm of all). Exactly torch's ``clip_grad_norm_`` over several
            modules is one ``Part`` of them all.

    Raises:
        ValueError: A limit is not positive, ``over`` is neither, or ``all`` without a norm.
        TypeError: A limit is no number.
    """

    norm: float | None = None
    value: float | None = None
    over: Literal["part", "all"] = "part"

    def __post_init__(self) -> None:
        for limit in (self.norm, self.value):
            if limit is not None and not (isinstance(limit, float) and limit == math.inf):
                require_number(f"{self}", limit, "a positive limit, or None for none", above=0)
        if self.over not in ("part", "all"):
            raise ValueError(f"{self}: give over='part' or over='all'")
        if self.over == "all" and self.norm is None:
            raise ValueError(f"{self}: what is over all parts is the norm; give norm=...")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How parts learn; a ``Part`` overrides what it names.

    Args:
        optimizer: Makes the optimiser from parameters: ``partial(torch.optim.Adam, lr=1e-3)``.
        update_every: A number of gradient rows, ``Rows``, ``Instances``, ``Messages`` or ``Flush``.
        average: What the summed gradient is divided by: the ``rows`` that it has, the ``instances``
            that finished, or nothing. An update at the end of an epoch that has fewer rows (or
            instances) than ``update_every`` is divided by ``update_every``.
        clip: Limits on the averaged gradient.
        schedule: Factor on the learning rate, from the number of instances finished in training.
        scheduler: Makes a torch scheduler of the part's optimiser; it steps once an update. With a
            ``schedule`` as well, the two multiply.
        max_staleness: A step waits while it would make a row older than so many versions; admission
            pauses meanwhile. None: no bound.
        view: Which weights forward and backward see, for nodes with ``keep="graph"``; see
            ``geartrain.parts.late.views``. None: ``Stashed()``.
        delay: What is done about the age of gradients; see ``geartrain.parts.late.delay``.
        window: Most messages between their forward and their backward; others wait at the part. For
            chains of nodes that run one message at a time, where P - s for part s of P makes one
            forward one backward; elsewhere it may block for ever. None: no bound.

    Raises:
        ValueError: A number is out of range, or ``average`` is none of the three.
        TypeError: Something else is given, such as an optimiser in place of what makes one.
    """

    optimizer: MakeOptimizer = torch.optim.Adam
    update_every: int | Trigger = 100
    average: Averaging = "rows"
    clip: Clip | None = None
    schedule: Callable[[int], float] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_staleness: int | None = None
    view: AbstractView | None = None
    delay: AbstractDelay | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name, wanted in (
            ("optimizer", "partial(torch.optim.Adam, lr=1e-3); what shall not learn, freeze"),
            ("update_every", "a number of gradient rows, or Flush() for the end of an epoch"),
            ("average", "'rows', 'instances' or 'none'"),
        ):
            if getattr(self, name) is None:
                raise TypeError(f"Rules({name}=None): give {wanted}")
        _require_kinds(self)
        _require_numbers(self)

    def trigger(self) -> Trigger:
        return Rows(self.update_every) if isinstance(self.update_every, int) else self.update_every


@final
@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A module, its optimiser and its rules.

    Args:
        module: Its parameters belong to this part alone.
        name: In logs and traces; default: the name of the first node that uses it.
        optimizer, update_every, average, clip: As in ``Rules``; None takes the session's.
        schedule, scheduler, max_staleness, view, delay, window: Likewise.
        keep: What nodes keep for the way back; see ``Stream.through``. With a ``view`` it is
            ``graph``.
        full_precision: Whether its nodes compute in float32 also where the session's precision is
            ``bf16``; rows come and go in bfloat16 all the same.
        gear: Its speed, for all its nodes; wants ``keep="graph"``.
        device: Where the module is moved to, and where its rows are computed and kept: ``cpu``,
            ``cuda``, ``cuda:1``. None takes the session's.

    Raises:
        ValueError: A number is out of range, or a ``view`` and ``keep`` do not go together.
        TypeError: Something else is given, as in ``Rules``.
    """

    module: nn.Module
    name: str | None = None
    optimizer: MakeOptimizer | None = None
    update_every: int | Trigger | None = None
    average: Averaging | None = None
    clip: Clip | None = None
    schedule: Callable[[int], float] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_staleness: int | None = None
    view: AbstractView | None = None
    delay: AbstractDelay | None = None
    window: int | None = None
    keep: Keep = "auto"
    full_precision: bool = False
    gear: Gear | None = None
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        _require_own(self)
        _require_kinds(self)
        _require_numbers(self)
        if self.view is None:
            return
        if self.keep not in ("auto", "graph"):
            raise ValueError(
                f"Part(view={self.view}, keep='{self.keep}'): a view is for keep='graph'; leave "
                "one of the two out"
            )
        object.__setattr__(self, "keep", "graph")

    def rules(self, defaults: Rules) -> Rules:
        """The session's rules with this part's own in front."""
        own = {f.name: value for f in fields(Rules) if (value := getattr(self, f.name)) is not None}
        return replace(defaults, **own)


@uncompiled()
def make_optimizer(part: str, make: MakeOptimizer, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimiser of a part.

    Raises:
        TypeError: What was made is none.
        ValueError: It wants a closure that computes the loss again, or has other parameters.
    """
    try:
        made = make(parameters)
    except AttributeError as error:
        raise TypeError(
            f"part '{part}': optimizer= raised AttributeError: {error}; it gets a list of the "
            "part's parameters, and may make groups of these by what they are: p.ndim > 1"
        ) from error
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"part '{part}': optimizer= made {_article(made)}; it gets the parameters of a part "
            "and makes a torch.optim.Optimizer of them: partial(torch.optim.Adam, lr=1e-3)"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"part '{part}': {type(made).__name__}.step() wants a closure that computes the loss "
            "again, and a part steps with gradients that have come, of rows that are gone; use an "
            "optimiser that steps with what is in .grad, such as SGD, Adam or Adagrad"
        )
    own = {id(p) for p in parameters}
    for p in (p for group in made.param_groups for p in group["params"]):
        if id(p) not in own:
            raise ValueError(
                f"part '{part}': optimizer= made {_article(made)} of a parameter of shape "
                f"{tuple(p.shape)} that is none of the part's: make it of the parameters that it "
                "gets, as every part makes one for its own"
            )
    return made


def require_maker(optimizer: object) -> None:
    """Raises:
    TypeError: It is neither None nor what makes an optimiser.
    """
    if isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(
            f"optimizer={kind}(...): an optimiser has its parameters already, and every part makes "
            f"one for its own; give what makes it: partial(torch.optim.{kind}, lr=...)"
        )
    if optimizer is not None and (not callable(optimizer) or isinstance(optimizer, nn.Module)):
        raise TypeError(
            f"optimizer={optimizer!r:.80}: give what makes an optimiser of parameters: "
            "partial(torch.optim.Adam, lr=1e-3)"
        )


def _require_kinds(rules: Rules | Part) -> None:
    """Raises:
    TypeError: A field holds what is no such thing.
    """
    require_maker(rules.optimizer)
    if rules.average is not None:
        require_word(type(rules).__name__, ("rows", "instances", "none"), average=rules.average)
    if isinstance(rules.scheduler, LRScheduler):
        kind = type(rules.scheduler).__name__
        raise TypeError(
            f"scheduler={kind}(...): a scheduler has its optimiser already, and every part makes "
            f"one of its own; give what makes it: partial(torch.optim.lr_scheduler.{kind}, ...)"
        )
    for name, wanted in (
        ("schedule", "a function of the instances trained that gives a factor"),
        ("scheduler", "what makes a torch scheduler of an optimiser"),
    ):
        value = getattr(rules, name)
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r}: give {wanted}")
    for name, kinds, wanted in (
        (
            "update_every",
            (int, Rows, Instances, Messages, Flush),
            "a number of gradient rows, Rows(n), Instances(n), Messages(n) or Flush()",
        ),
        ("clip", (Clip,), "Clip(norm=...) or Clip(value=...)"),
        ("view", (AbstractView,), "a view, such as Stashed()"),
        ("delay", (AbstractDelay,), "a rule, such as GapAware()"),
    ):
        value = getattr(rules, name)
        if value is not None and not isinstance(value, kinds):
            raise TypeError(f"{name}={value!r}: give {wanted}")


def _require_own(part: Part) -> None:
    """Raises:
    TypeError: What a part has besides rules is no such thing.
    ValueError: There is no such ``keep``.
    """
    wanted = "a module, such as torch.nn.Linear(128, 5)"
    require_kind("Part", nn.Module, wanted, module=part.module)
    require_kind("Part", str | None, "a name, or None", name=part.name)
    require_word("Part", ("auto", "inputs", "activations", "graph"), keep=part.keep)
    require_truth("Part", full_precision=part.full_precision)
    require_kind("Part", Gear | None, "a gear, such as Gear(period=4), or None", gear=part.gear)
    wanted = "a device, such as 'cpu' or 'cuda:1', or None"
    require_kind("Part", str | torch.device | None, wanted, device=part.device)


def _require_numbers(rules: Rules | Part) -> None:
    """Raises:
    ValueError: A number is out of range.
    TypeError: It is not whole.
    """
    for name, least, wanted in (
        ("max_staleness", 0, "0 or more, or None"),
        ("window", 1, "1 or more messages, or None"),
    ):
        value = getattr(rules, name)
        if value is not None:
            require_whole(f"{name}={value!r:.80}", value, least, wanted)
    if isinstance(rules.update_every, int):
        Rows(rules.update_every)


def _article(thing: object) -> str:
    return "nothing" if thing is None else f"a {type(thing).__name__}"

"""The ways to train that are compared: words of the recipes' option ``method``, and a few more.

    name ─► Way ─► the recipe's task, its pipeline with more slack, its rules with others

``deep`` ways have ``DEEP`` minibatches more in flight than there are parts, so that a gradient of
part s of P is P - 1 - s + DEEP updates old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from geartrain.engine.controller import Synchronous
from geartrain.nodes.loss import accuracy
from geartrain.parts.late.delay import AnnealedRate, ScaledByStaleness
from geartrain.pipeline.credit import AbstractCredit, DecoupledGreedy
from geartrain.pipeline.pipeline import Pipeline
from geartrain.recipes import find_recipe
from geartrain.recipes.methods import METHODS
from geartrain.recipes.recipe import Setting, Task, Value

PARTS: Final = 4
DEEP: Final = 8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train a recipe.

    Args:
        what: Half a sentence.
        method: Of the recipe.
        gear: Period of the lower half of the parts.
        parts: Of the pipeline.
        slack: Minibatches in flight beyond one for each part.
        credit: Instead of the method's, with the same heads.
        rules: Fields of ``Rules`` instead of the method's.
        annealed: Rate divided by the delay over this share of the training; None: it is not.
        warm: Share of the training that is synchronous.
        share: Of the minibatches that others train on.
        window: Most messages of a part between forward and backward; None: the pipeline's own.
    """

    what: str
    method: str
    gear: int = 1
    parts: int = PARTS
    slack: int = 0
    credit: AbstractCredit | None = None
    rules: Mapping[str, Any] = field(default_factory=dict)
    annealed: float | None = None
    warm: float = 0.0
    share: float = 1.0
    window: int | None = None

    @property
    def max_active(self) -> int:
        """Minibatches in flight."""
        return 1 if METHODS[self.method].alone else self.parts + self.slack

    def task(self, recipe: str, seed: int, epochs: int, options: Mapping[str, Value]) -> Task:
        """The recipe's task, freshly initialised."""
        chosen = {**options, "method": self.method, "gear": self.gear, "parts": self.parts}
        if self.share < 1:
            batch = int(options["batch"])
            chosen["train_size"] = int(self.share * int(options["train_size"])) // batch * batch
        setting = Setting(seed=seed, epochs=epochs, update_every=1, options=chosen)
        task = find_recipe(recipe).build(setting)
        minibatches = epochs * len(task.load("train"))
        changed = dict(self.rules)
        if self.annealed is not None:
            changed["delay"] = AnnealedRate(over=max(int(self.annealed * minibatches), 1))
        if self.window is not None:
            changed["window"] = self.window
        if changed:
            task = replace(task, rules=replace(task.rules, **changed))
        if self.warm:
            task = replace(task, ramp=Synchronous(int(self.warm * minibatches)))
        return self._rewired(task) if self.slack or self.credit else task

    def _rewired(self, task: Task) -> Task:
        """The same parts with more minibatches in flight, or another credit."""
        old = task.pipeline
        assert old is not None
        pipeline = Pipeline(
            old.module,
            cuts=old.cuts,
            credit=self.credit or old.credit,
            heads=list(old.heads.values()),
            slack=self.slack,
            metrics={"accuracy": accuracy},
        )
        return replace(task, graph=pipeline.graph, pipeline=pipeline)


def _named(*methods: str) -> dict[str, Way]:
    return {name: Way(what=METHODS[name].what, method=name) for name in methods}


def _local(**windows: int) -> dict[str, Way]:
    return {name: replace(way, window=windows[name]) for name, way in _named(*windows).items()}


LOCAL: Final = _local(greedy=1, overlap=2, chunk2=2, critic=2, dgl=1, dni=2) | {
    "dgl uniform": Way(
        what="greedy, on any one of the last eight minibatches",
        method="dgl",
        window=1,
        credit=DecoupledGreedy(buffer=8, draw="uniform"),
    ),
}

PIPED: Final = {
    **_named("stash", "mixed", "spectrain", "2bw"),
    "t1": Way(what="mixed, rate annealed by the delay", method="mixed", annealed=0.25),
    "t1+t2": Way(what=METHODS["pipemare"].what, method="pipemare"),
    "t1+t2+t3": Way(what=METHODS["pipemare-warm"].what, method="pipemare-warm"),
    "nesterov": Way(what=METHODS["nesterov"].what, method="nesterov"),
    "scaled": Way(what=METHODS["scaled"].what, method="scaled"),
}

GEARS: Final = {
    f"gear {period}": Way(
        what=f"lower half learns from one minibatch in {period}", method="backprop", gear=period
    )
    for period in (2, 4, 8)
}


SHORT: Final = {
    f"short {period}": Way(
        what=f"as many minibatches as cost what gear {period} does", method="backprop", share=share
    )
    for period, share in ((2, 0.833), (4, 0.750), (8, 0.708))
}


def _deep(what: str, method: str, **others: Any) -> Way:
    return Way(what=f"{what}; {DEEP} more in flight", method=method, slack=DEEP, **others)


DEEP_WAYS: Final = {
    "deep mixed": _deep("no correction: activations of then, weights of now", "mixed"),
    "deep stash": _deep("stashed weights, nothing else", "stash"),
    "deep spectrain": _deep("predicted weights", "spectrain"),
    "deep recompute": _deep("forward again at the weights of now", "recompute"),
    "deep pipemare": _deep("T1 and T2", "pipemare"),
    "deep pipemare-warm": _deep("T1, T2 and T3", "pipemare-warm"),
    "deep nesterov": _deep("look-ahead", "nesterov"),
    "deep scaled": _deep("steps divided by staleness", "scaled"),
    "deep dcasgd": _deep("DC-ASGD", "dcasgd"),
    "deep gap": _deep("gap-aware", "gap"),
    "deep annealed": _deep("stashed, rate annealed by the delay", "stash", annealed=0.5),
    "deep scaled warm": _deep(
        "steps divided by staleness, a synchronous tenth first", "scaled", warm=0.1
    ),
    "deep annealed warm": _deep(
        "stashed, rate annealed by the delay, a synchronous fifth first",
        "stash",
        annealed=0.5,
        warm=0.2,
    ),
    "deep spectrain scaled": _deep(
        "predicted weights, steps divided by staleness",
        "spectrain",
        rules={"delay": ScaledByStaleness()},
    ),
}


def _pair(what: str, method: str, **others: Any) -> Way:
    return Way(what=f"two parts, {what}", method=method, parts=2, **others)


PAIRS: Final = {
    "pair stash": _pair("stashed weights, nothing else", "stash"),
    "pair stash warm": _pair("stashed, a synchronous tenth first", "stash", warm=0.1),
    "pair spectrain": _pair("predicted weights", "spectrain"),
    "pair spectrain warm": _pair(
        "predicted weights, a synchronous tenth first", "spectrain", warm=0.1
    ),
    "pair recompute": _pair("forward again at the weights of now", "recompute"),
    "pair nesterov": _pair("look-ahead", "nesterov"),
    "pair t1+t2+t3": _pair("PipeMare", "pipemare-warm"),
}

WAYS: Final[Mapping[str, Way]] = {
    **_named("backprop"),
    **LOCAL,
    **PIPED,
    **GEARS,
    **SHORT,
    **DEEP_WAYS,
    **PAIRS,
}

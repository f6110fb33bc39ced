"""Numbers of ways from the lines of their trials.

lines ─► Standing of a way: what a minibatch costs, where it ended, what a target loss took
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

Line = Mapping[str, Any]

BASE: Final = "backprop"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What a target took, as means over seeds.

    Args:
        minibatches: Trained on.
        operations: Of all of them.
        virtual_s: On ideal parallel hardware.
        cpu_s: Processor seconds here.
        wall_s: Seconds here.
    """

    minibatches: float
    operations: float
    virtual_s: float
    cpu_s: float
    wall_s: float


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """The trials of a way; those that failed are ``failures``.

    Args:
        way: Its name.
        lines: One or more.
        failures: Seed to reason.
    """

    way: str
    lines: Sequence[Line]
    failures: Mapping[int, str]

    @property
    def losses(self) -> list[float]:
        """At the end, by seed."""
        return [line["curve"][-1]["loss"] for line in self.lines]

    @property
    def loss(self) -> float:
        """Their mean; NaN where every trial failed."""
        return mean(self.losses)

    @property
    def accuracy(self) -> float:
        """At the end."""
        return mean([line["curve"][-1]["accuracy"] for line in self.lines])

    @property
    def operations(self) -> float:
        """Of a minibatch."""
        return mean([line["forward"] + line["backward"] for line in self.lines])

    @property
    def virtual_s(self) -> float:
        """Of a minibatch, on ideal parallel hardware."""
        return self._each("virtual_s")

    @property
    def cpu_s(self) -> float:
        """Of a minibatch, here."""
        return self._each("cpu_s")

    @property
    def wall_s(self) -> float:
        """Of a minibatch, here."""
        return self._each("wall_s")

    @property
    def memory(self) -> int:
        """Of the part that has most."""
        return max(max(line["memory"]) for line in self.lines)

    @property
    def whole(self) -> int:
        """Of all parts on one device."""
        return max(line["whole"] for line in self.lines)

    @property
    def sent(self) -> tuple[float, float]:
        """Bytes across cuts for a minibatch, forward and backward."""
        forward, backward = zip(*(line["sent"] for line in self.lines), strict=True)
        return mean(forward), mean(backward)

    @property
    def spared(self) -> float:
        """Operations of a minibatch that gears left out."""
        return mean([line["spared"] for line in self.lines])

    @property
    def staleness(self) -> list[float]:
        """Of the parts, in their order."""
        parts = [name for name in self.lines[0]["staleness"] if name.startswith("part")]
        return [mean([line["staleness"][name] for line in self.lines]) for name in parts]

    @property
    def seeds(self) -> set[int]:
        """Of the trials that did not fail."""
        return {line["seed"] for line in self.lines}

    def only(self, seeds: Collection[int]) -> Standing:
        """The trials with these seeds."""
        return Standing(
            self.way,
            [line for line in self.lines if line["seed"] in seeds],
            {seed: why for seed, why in self.failures.items() if seed in seeds},
        )

    def reached(self, target: float) -> Reached | None:
        """What it took to a target loss; None unless every trial got there."""
        found = [_crossing(line, target) for line in self.lines]
        there = [point for point in found if point is not None]
        if self.failures or not there or len(there) < len(found):
            return None
        return Reached(**{name: mean([point[name] for point in there]) for name in there[0]})

    def _each(self, name: str) -> float:
        return mean([line["curve"][-1][name] / line["minibatches"] for line in self.lines])


def mean(values: Sequence[float]) -> float:
    """The mean, or NaN of nothing."""
    return statistics.fmean(values) if values else float("nan")


def standings(lines: Sequence[Line]) -> dict[str, Standing]:
    """By way, in the order of the first lines."""
    found = {}
    for way in dict.fromkeys(line["way"] for line in lines):
        here = [line for line in lines if line["way"] == way]
        done = [line for line in here if line["outcome"] == "done"]
        failures = {line["seed"]: line["reason"] for line in here if line["outcome"] != "done"}
        found[way] = Standing(way, done, failures)
    return found


def paired(standing: Standing, base: Standing) -> Iterator[tuple[float, float]]:
    """Final losses of a way and of another, of the seeds that both have."""
    others = {line["seed"]: line["curve"][-1]["loss"] for line in base.lines}
    for line in standing.lines:
        if line["seed"] in others:
            yield line["curve"][-1]["loss"], others[line["seed"]]


def gap(standing: Standing, base: Standing) -> float:
    """Mean of final loss / the other's - 1, over the seeds that both have."""
    return mean([own / other - 1 for own, other in paired(standing, base)])


def recovered(standing: Standing, broken: Standing, base: Standing) -> float:
    """Share of the loss that a broken way adds to the base, which this way takes away again."""
    ours, lost = dict(_by_seed(standing)), dict(_by_seed(broken))
    best = dict(_by_seed(base))
    seeds = ours.keys() & lost.keys() & best.keys()
    added = sum(lost[seed] - best[seed] for seed in seeds)
    left = sum(ours[seed] - best[seed] for seed in seeds)
    return 1 - left / added if added else float("nan")


def pareto(found: Mapping[str, Reached]) -> set[str]:
    """The ways that no other beats in operations or ideal time without losing in the other."""
    costs = {way: (one.operations, one.virtual_s) for way, one in found.items()}
    return {
        way
        for way, (operations, time) in costs.items()
        if not any(
            o <= operations and t <= time and (o, t) != (operations, time)
            for o, t in costs.values()
        )
    }


def _by_seed(standing: Standing) -> Iterator[tuple[int, float]]:
    for line in standing.lines:
        yield line["seed"], line["curve"][-1]["loss"]


def _crossing(line: Line, target: float) -> dict[str, float] | None:
    """Where the loss first passes the target, in a line between two evaluations."""
    before = None
    for point in line["curve"]:
        if point["loss"] <= target:
            share = 1.0
            if before is not None:
                share = (before["loss"] - target) / (before["loss"] - point["loss"])
            start = before or {}
            names = "minibatches", "virtual_s", "cpu_s", "wall_s"
            at = {n: start.get(n, 0.0) + share * (point[n] - start.get(n, 0.0)) for n in names}
            each = line["forward"] + line["backward"]
            return {**at, "operations": each * at["minibatches"]}
        before = point
    return None

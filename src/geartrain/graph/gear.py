"""Gears: parts at different speeds.

    minibatch    0   1   2   3   4 ...
    period 1     B   B   B   B   B       backward work for every minibatch
    period 2     B   ·   B   ·   B       forward for all, backward for every second
    never        ·   ·   ·   ·   ·       a frozen part

Off-turn, ``skip="backward"`` keeps no graph, answers zero at once and passes the rows on detached;
``skip="weights"`` hands the gradient of the input down and leaves the weights alone. Minibatch t is
on-turn where t is a multiple of the period; minibatches are numbered through the whole training.
A copy of the model numbers its own.
Replayed rows (see ``replay``) are on-turn for all that are not ``never``.

Only the abstract of Gear Training says what it is: a model is split and its parts are trained
separately, at different speeds. The rules here are our construction.

Source of the idea: Dong et al. 2018, arXiv:1806.03925.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch

from geartrain.bounds import require_whole
from geartrain.errors import GraphError
from geartrain.frames.message import (
    CONTROLLER,
    INSTANCE,
    ROW_BITS,
    SKIPPED,
    Backward,
    Forward,
    IntArray,
    wants_gradient,
)
from geartrain.graph.operator import Spec
from geartrain.graph.use import AbstractUse
from geartrain.kinds import require_each, require_entries
from geartrain.nodes.call import Call, one_by_one
from geartrain.nodes.node import AbstractNode, Emission, Place, Spared
from geartrain.nodes.replay import REPLAY, Draw, Replays
from geartrain.nodes.stage import GraphNode
from geartrain.nodes.weights import AbstractWeights

Never: TypeAlias = Literal["never"]
Period: TypeAlias = int | Never


@final
@dataclass(frozen=True, slots=True)
class Gear:
    """The speed of a part.

    Args:
        period: Backward work for every so many minibatches, or ``never``. A mapping shifts gears:
            number of the minibatch at which it begins, to period; it has an entry for 0.
        skip: What an off-turn leaves out: ``backward`` all of the way back, also for parts below;
            ``weights`` the gradient of this part's weights alone.
        replays: Steps more on stored rows, begun at this part's inlet after every minibatch.
        buffer: Minibatches that the inlet stores.
        draw: Which of them is replayed, see ``Stream.replay``.
        max_age: Minibatches after which a stored one is dropped, or None.

    Raises:
        ValueError: A number is out of range, or a mapping says nothing of minibatch 0.
    """

    period: Period | Mapping[int, Period] = 1
    skip: Literal["backward", "weights"] = "backward"
    replays: int = 0
    buffer: int = 1
    draw: Draw = "newest"
    max_age: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.period, Mapping):
            wanted = "minibatches with periods: {0: 1, 500: 4}"
            require_entries("Gear", int, int | str, wanted, period=self.period)
        shifts = self._shifts()
        if 0 not in shifts or min(shifts) < 0:
            raise ValueError(
                f"Gear(period={self.period}): a mapping begins with minibatch 0: give "
                "{0: 1, 500: 4}"
            )
        for period in shifts.values():
            wanted = "1 or more, or 'never'"
            if not isinstance(period, str):
                require_whole(f"Gear(period={period!r})", period, 1, wanted)
            elif period != "never":
                raise ValueError(f"Gear(period={period!r}): give {wanted}")
        if self.skip not in ("backward", "weights"):
            raise ValueError(f"Gear(skip={self.skip!r}): give 'backward' or 'weights'")
        require_whole(f"Gear(replays={self.replays!r})", self.replays, 0)
        self.replay_rule()

    def period_at(self, minibatch: int) -> Period:
        """The period in force at a minibatch."""
        if not isinstance(self.period, Mapping):
            return self.period
        return self.period[max(t for t in self.period if t <= minibatch)]

    def on_turn(self, minibatch: int, *, replayed: bool = False) -> bool:
        """Whether the part learns from a minibatch."""
        period = self.period_at(minibatch)
        return period != "never" and (replayed or minibatch % period == 0)

    def shifts(self) -> Sequence[int]:
        """Numbers of the minibatches at which the period changes, 0 among them."""
        return sorted(self._shifts())

    def replay_rule(self) -> Replays:
        """The replays at the part's inlet; with ``times=0`` there are none."""
        return Replays(self.replays, self.buffer, self.draw, self.max_age)

    @property
    def slow(self) -> bool:
        """Whether there is a turn that this gear leaves out."""
        return any(period != 1 for period in self._shifts().values())

    def __str__(self) -> str:
        return f"period {self.period}, skips {self.skip}"

    def _shifts(self) -> Mapping[int, Period]:
        return self.period if isinstance(self.period, Mapping) else {0: self.period}


@final
class GearedNode(AbstractNode):
    """A graph node that leaves turns out.

    Args:
        inner: Runs the module; has the same place.
        call: How it is called.
        gear: Which turns it takes.
    """

    alone = True

    def __init__(self, inner: GraphNode, call: Call, gear: Gear) -> None:
        super().__init__(inner.place)
        self._inner, self._call, self._gear = inner, call, gear
        self._replay = inner.place.schema.state.get(REPLAY)
        self.part_name = inner.part_name

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        emission = Emission()
        for one in one_by_one(batches):
            if not train:
                emission.forward.append((0, self._inner.forward_one(one, False)))
            elif self._on_turn(one):
                emission.forward.append((0, self._inner.forward_one(one, True)))
                if int(one.origin[0]) & SKIPPED:
                    self._note("weights", one, emission)
            else:
                self._off_turn(one, emission)
        return emission

    def backward(self, batches: Sequence[Backward]) -> Emission:
        return self._inner.backward(batches)

    def slots(self, batch: Forward | Backward) -> IntArray:
        return self._inner.slots(batch)

    @property
    def open(self) -> bool:
        return self._inner.open

    def origins(self, rows: IntArray) -> IntArray | None:
        return self._inner.origins(rows)

    def check_empty(self) -> None:
        self._inner.check_empty()

    def story(self) -> list[str]:
        return self._inner.story()

    def nbytes(self) -> int:
        return self._inner.nbytes()

    def _on_turn(self, one: Forward) -> bool:
        replayed = self._replay is not None and bool(one.state[self._replay, 0])
        minibatch = int(self.place.arena.serial[one.state[INSTANCE, 0]])
        return self._gear.on_turn(minibatch, replayed=replayed)

    def _off_turn(self, one: Forward, emission: Emission) -> None:
        if self._gear.skip == "weights":
            emission.forward.append((0, self._inner.forward_one(one, True, learn=False)))
            self._note("input" if wants_gradient(one.origin) else "nothing", one, emission)
            return
        slots = one.state[INSTANCE].copy()
        sent = self._inner.forward_one(one, False)
        origin = slots | (CONTROLLER << ROW_BITS) | SKIPPED
        emission.forward.append((0, sent.with_origin(origin)))
        emission.backward.append(Backward(one.origin, None))
        emission.spawn(slots)
        self._note("nothing", one, emission)

    def _note(
        self, done: Literal["nothing", "input", "weights"], one: Forward, emission: Emission
    ) -> None:
        wanted = wants_gradient(one.origin) or bool(int(one.origin[0]) & SKIPPED)
        taken = [one.payload[j] for j in self._call.taken(len(one.payload))]
        rows = one.payload_rows()
        inputs = tuple((torch.Size((rows, *x.shape[1:])), x.dtype) for x in taken)
        emission.spared = emission.spared or []
        emission.spared.append(Spared(self._call.function, inputs, done, wanted))


@final
@dataclass(frozen=True, slots=True)
class Geared(AbstractUse):
    """How a ``through`` with a gear uses its module."""

    gear: Gear

    def specs(self, name: str, given: Spec, sent: Spec) -> list[Spec]:
        return [sent]

    def make(self, place: Place, call: Call, weights: AbstractWeights | None) -> AbstractNode:
        return GearedNode(GraphNode(place, call, weights), call, self.gear)

    def detail(self) -> str:
        return str(self.gear)


def check_gears(gears: Mapping[str, Gear], cut: Sequence[str] = ()) -> None:
    """Find gears that leave another part without gradients, or replays that teach nobody.

    Args:
        gears: Part name to gear, from the input to the loss.
        cut: Parts at whose inlet no gradient passes down (local losses, synthetic gradients): parts
            below one of these do not depend on it.

    Raises:
        GraphError: A part skips the way back on a turn of a part below, or never learns and stands
            above a part that replays; names both, and the way out.
        ValueError: ``cut`` names no part.
    """
    wanted = "part names with gears: {'part 0': Gear(period=4)}"
    require_entries("check_gears", str, Gear, wanted, gears=gears)
    require_each("check_gears", str, "a list of part names", cut=cut)
    names = list(gears)
    if unknown := [name for name in cut if name not in gears]:
        raise ValueError(f"check_gears(cut={unknown}): the parts are {names}")
    for k, upper in enumerate(names):
        for lower in reversed(names[: k + 1]):
            if lower != upper:
                refuse_starving(upper, gears[upper], lower, gears[lower])
            refuse_idle_replays(upper, gears[upper], lower, gears[lower].replays)
            if lower in cut:
                break


def refuse_starving(upper: str, above: Gear, lower: str, below: Gear) -> None:
    """Raises:
    GraphError: The upper part skips the way back on a turn of the lower one.
    """
    if above.skip == "weights":
        return
    for minibatch in sorted({*above.shifts(), *below.shifts()}):
        p, q = above.period_at(minibatch), below.period_at(minibatch)
        if q == "never" or (p != "never" and q % p == 0):
            continue
        since = f" from minibatch {minibatch} on" if minibatch else ""
        raise GraphError(
            f"'{upper}' has period {p}{since} and skips all of the way back, but '{lower}' below "
            f"it has period {q}: on some of its turns no gradient would come. A period that skips "
            f"divides the periods of all parts below; choose one, or skip='weights' for '{upper}'"
        )


def refuse_idle_replays(upper: str, above: Gear, lower: str, replays: int) -> None:
    """Raises:
    GraphError: Rows are replayed at the lower part, and the upper part sends no gradient back.
    """
    if replays and above.skip == "backward":
        frozen = [t for t in above.shifts() if above.period_at(t) == "never"]
        if frozen:
            raise GraphError(
                f"'{lower}' replays rows, but '{upper}' never learns (from minibatch {frozen[0]} "
                "on) and skips all of the way back, so no gradient of a replay comes; replay above "
                f"it, or give '{upper}' skip='weights'"
            )

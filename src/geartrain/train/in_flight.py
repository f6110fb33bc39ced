"""How many instances a network wants in flight, found by what its first ones did.

    first instances ─► rows a firing, updates an instance, bytes an instance ─► a number, and why

Rows of a firing grow with the instances in flight, and with them what a firing earns; gradients
grow older, and more rows are kept. All three are counted, nothing is timed: the same run finds the
same number on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from geartrain.bounds import ACTIVE, MOST_ACTIVE, require_at_most, require_number, require_whole
from geartrain.engine.engine import Engine
from geartrain.train.observer import Observer


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """What instances of a run have done.

    Args:
        active: That were in flight, on the mean.
        rows: Payload rows of a firing of a part on its way forward, on the mean.
        updates: Of an instance, of the part that has most.
        bytes: That nodes hold for an instance.
    """

    active: float
    rows: float
    updates: float
    bytes: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Find the number of instances in flight that a network wants: ``max_active="auto"``.

    It is found after the first 256 instances of a run, and looked at again at the end of the first
    epoch.

    Args:
        rows: Payload rows that a firing is to have, on the mean over the firings of parts.
        max_staleness: Updates that others take while a row is on its way, on the mean, at most.
            Instances in flight go in step, so of k updates' instances in flight a row waits for
            (k - 1) / 2 on the mean.
        max_bytes: What nodes may hold of instances in flight; of each copy of the model.
        most: Instances in flight.

    Raises:
        ValueError: A number is out of range.
    """

    rows: int = 256
    max_staleness: float = 1.0
    max_bytes: int = 1 << 30
    most: int = 4096

    def __post_init__(self) -> None:
        for name in ("rows", "max_bytes", "most"):
            value = getattr(self, name)
            require_whole(f"InFlight({name}={value!r})", value, 1)
        what = f"InFlight(max_staleness={self.max_staleness!r})"
        require_number(what, self.max_staleness, "0 or more", least=0)
        require_at_most(f"InFlight(most={self.most})", self.most, MOST_ACTIVE, ACTIVE)

    def find(self, seen: Seen) -> tuple[int, str]:
        """A number, and what decides about it."""
        wanted = self.rows * seen.active / max(seen.rows, 1e-9)
        bounds = [(wanted, f"{self.rows} rows a firing")]
        if seen.updates > 0:
            stale = (2 * self.max_staleness + 1) / seen.updates
            bounds.append((stale, f"a staleness of {self.max_staleness:g} updates"))
        if seen.bytes > 0:
            held = self.max_bytes / seen.bytes
            bounds.append((held, f"{self.max_bytes / 2**20:,.0f} MiB of rows"))
        bounds.append((float(self.most), f"at most {self.most}"))
        number, why = min(bounds)
        return max(1, round(number)), why


def seen_in(engine: Engine, watch: Observer, began: int) -> Seen:
    """What the instances of a segment have done that began when so many had been trained."""
    controller, ramp, most = engine.controller, engine.settings.ramp, engine.settings.max_active
    trained = max(controller.trained - began, 1)
    first, last = ramp.limit(most, began), ramp.limit(most, controller.trained)
    active = min(0.5 * (first + last), trained)
    held = sum(node.nbytes() for node in engine.wiring.nodes.values())
    return Seen(
        active,
        watch.rows / max(watch.firings, 1),
        # Each copy has so many in flight; what is updated by one of them grows old for all.
        max(watch.updates.values(), default=0) * controller.copies / trained,
        held / (active * controller.copies),
    )

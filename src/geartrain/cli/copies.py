"""Copies of the model on the command line: who talks to whom, how, over what links, how fast.

--replicas 16 --topology torus --mixer weights --speeds 1,1,0.25 --link 50us,1.25GB
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, Final, NamedTuple, final

from geartrain.engine.instrument import AbstractInstrument, Exchanged
from geartrain.recipes.recipe import meant
from geartrain.runtime.costs import Costs
from geartrain.sharing.neighbours import EXCHANGES

_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "": 1.0}
_SLOWEST: Final = 1e-6
_FASTEST: Final = 1e6
_LONGEST_S: Final = 1e6
_BYTES: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_NUMBER: Final = r"([\d.e+]+)([kMG])?"
_LINK: Final = re.compile(rf"([\d.e+-]+)(s|ms|us|ns)?,{_NUMBER}(?:B(?:/s)?)?(?:,{_NUMBER}B?)?")


def require_mixer(name: str) -> str:
    """A mixer by name.

    Raises:
        ValueError: There is none.
    """
    if name not in EXCHANGES:
        raise ValueError(
            f"--mixer {name}: expected one of {', '.join(EXCHANGES)}" + meant(name, [*EXCHANGES])
        )
    return name


def parse_speeds(text: str | None, workers: int) -> tuple[float, ...]:
    """A speed for each worker, as multiples of this machine's; fewer are repeated in turn.

    Raises:
        ValueError: One is not positive, or no number.
    """
    try:
        speeds = [float(each) for each in ("1" if text is None else text).split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(_SLOWEST <= speed <= _FASTEST for speed in speeds):
        raise ValueError(
            f"speeds {text:.80}: write SPEED[,SPEED...] with positive numbers from {_SLOWEST:g} to "
            f"{_FASTEST:g}"
        )
    return tuple(speeds[k % len(speeds)] for k in range(workers))


class ImaginedLink(NamedTuple):
    """What a host is connected by.

    Args:
        latency_s: One way.
        bytes_per_s: Each way; None: no bound.
        buffer_bytes: What may wait before its way out, and its way in; None: all finds room.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    buffer_bytes: float | None = None

    def on(self, costs: Costs) -> Costs:
        """The same costs, over such links."""
        return replace(costs, **self._asdict())


def parse_link(text: str | None) -> ImaginedLink:
    """A link from ``50us,1.25GB`` or ``50us,1.25GB,256kB``; None: no latency, no bound.

    Raises:
        ValueError: It is not of this form.
    """
    if text is None:
        return ImaginedLink()
    found = _LINK.fullmatch(text.strip())
    try:
        if found is not None:
            latency = float(found[1]) * _SECONDS[found[2] or ""]
            bandwidth = float(found[3]) * _BYTES[found[4] or ""]
            room = None if found[5] is None else float(found[5]) * _BYTES[found[6] or ""]
            bounded = 0 <= latency <= _LONGEST_S and 0 < bandwidth < math.inf
            if bounded and (room is None or 1 <= room < math.inf):
                return ImaginedLink(latency, bandwidth, room)
    except ValueError:
        pass
    raise ValueError(
        f"--link {text[:80]}: write LATENCY,BANDWIDTH or LATENCY,BANDWIDTH,BUFFER as seconds, "
        "bytes a second and bytes, such as 50us,1.25GB or 0.0001,1e9 or 10ms,12.5MB,256kB"
    )


@final
class CopiesSeen(AbstractInstrument):
    """Sums up what copies of the model have exchanged."""

    def __init__(self) -> None:
        self._events: list[Exchanged] = []

    def on_exchanged(self, event: Exchanged) -> None:
        """Keep it."""
        self._events.append(event)

    def summary(self) -> dict[str, Any] | None:
        """For the JSON of a run; None where there were no copies of the model."""
        if not self._events:
            return None
        copies = [c for e in self._events for c in e.copies]
        rounds = sum(c.rounds for c in copies)
        letters = sum(sum(c.staleness.histogram) for c in copies)
        ages = sum(a * n for c in copies for a, n in enumerate(c.staleness.histogram))
        return {
            "distance": self._events[-1].distance,
            "bytes_per_gradient": sum(c.bytes for c in copies) / rounds if rounds else 0.0,
            "letters": {
                name: sum(getattr(c, name) for c in copies)
                for name in ("sent", "applied", "merged", "dropped", "lost", "declined")
            },
            "meetings": sum(c.meetings for c in copies),
            "meetings_per_gradient": (
                sum(c.meetings_per_round * c.rounds for c in copies) / rounds if rounds else 0.0
            ),
            "letter_staleness": ages / letters if letters else 0.0,
            "instances": [
                sum(e.copies[k].instances for e in self._events)
                for k in range(len(self._events[-1].copies))
            ],
        }

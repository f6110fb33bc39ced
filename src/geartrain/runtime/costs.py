"""What firings and links of imagined machines take, in virtual seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, final, runtime_checkable

from geartrain.bounds import require_number
from geartrain.engine.firing import Firing
from geartrain.engine.router import Delivery
from geartrain.frames.message import Backward
from geartrain.kinds import require_entries, require_truth
from geartrain.runtime.links import Quality

_NOT_NEGATIVE: Final = (
    *("firing_s", "row_s", "backward", "latency_s", "letter_s", "letter_byte_s", "message_s"),
    "again_s",
)

_COPY: Final = re.compile(r"#\d+")


@runtime_checkable
class CostModel(Quality, Protocol):
    """What ``Simulated`` asks of costs."""

    @property
    def collective(self) -> Literal["ring", "star"]: ...

    def firing(self, firing: Firing) -> float:
        """Seconds that it takes."""
        ...

    def nbytes(self, delivery: Delivery) -> int:
        """For which a batch occupies its link."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What things take, in virtual seconds.

    Args:
        firing_s: Every firing.
        row_s: Every row of it.
        nodes: Node name to its own (seconds a firing, seconds a row); copies of a node have those
            of the first. ``NAME backward`` is its backward, which else costs ``backward`` forwards;
            ``PART exchange`` are the letters that a part's copies take, for rows.
        backward: A backward costs so many forwards.
        latency_s: A batch or letter between two workers.
        bytes_per_s: Bandwidth of a link between two workers; None: infinite.
        letter_s: Every letter that a copy of the model takes, with the step or mix that it causes.
        letter_byte_s: Every byte of it.
        message_s: What a batch or a letter takes besides, between any two programs.
        shared: Whether a worker is a host with one way out and one way in, which all that it sends,
            and all that is sent to it, share; else each two have a link of their own.
        buffer_bytes: What may wait before a host's way out, and before its way in, where ways are
            ``shared``: of what is sent while more of others waits, the rest is dropped, and sent
            again. None: all finds room, as in front of a card that holds programs back.
        again_s: Until then; a kernel that hears nothing waits so long, Linux 200 ms at least.
        collective: How copies make a mean of all: ``ring``, as libraries of collectives do, or
            ``star``, as workers of this library that are processes do: all send theirs to the
            first, which sends the mean to each.

    A batch or a letter waits until those before it have left, occupies its link for bytes /
    bandwidth and arrives a latency later. A letter between copies on one worker takes no time.
    Round a ring, the result of an all-reduce of n copies takes 2 (n - 1) latencies and the time of
    2 (n - 1) / n of the bytes, from the last contribution on; by a star two latencies, and all
    bytes of all copies pass by its middle.

    Raises:
        ValueError: ``collective`` is neither; a number is out of range; a buffer has no byte, or
            ways are not shared.
        TypeError: A number is none.
    """

    firing_s: float = 100e-6
    row_s: float = 1e-6
    nodes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    backward: float = 2.0
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    letter_s: float = 0.0
    letter_byte_s: float = 0.0
    message_s: float = 0.0
    shared: bool = False
    buffer_bytes: float | None = None
    again_s: float = 0.2
    collective: Literal["ring", "star"] = "ring"

    def __post_init__(self) -> None:
        if self.collective not in ("ring", "star"):
            raise ValueError(f"Costs(collective={self.collective!r}): give 'ring' or 'star'")
        require_truth("Costs", shared=self.shared)
        wanted = "node names, each with two numbers: {'cell': (1e-3, 1e-5)}"
        require_entries("Costs", str, Sequence, wanted, nodes=self.nodes)
        self._require_numbers()
        if self.buffer_bytes is None:
            return
        if self.buffer_bytes < 1 or not self.again_s > 0:
            raise ValueError(
                f"Costs(buffer_bytes={self.buffer_bytes}, again_s={self.again_s}): give 1 byte or "
                "more, and more than 0 seconds"
            )
        if not self.shared:
            raise ValueError(
                f"Costs(buffer_bytes={self.buffer_bytes}): it is before a host's ways out and in, "
                "which all that it sends and gets shares; give shared=True, too"
            )

    def _require_numbers(self) -> None:
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            require_number(f"Costs({name}={value!r})", value, "0 or more", least=0)
        for name, pair in self.nodes.items():
            for value in pair:
                what = f"Costs(nodes={{{name!r}: {pair!r:.80}}})"
                require_number(what, value, "0 or more seconds a firing, and a row", least=0)
        for name, some in (("bytes_per_s", self.bytes_per_s), ("buffer_bytes", self.buffer_bytes)):
            if some is not None:
                require_number(f"Costs({name}={some!r})", some, "more than 0, or None", above=0)

    def firing(self, firing: Firing) -> float:
        name = _COPY.sub("", firing.node)
        own = self.nodes.get(firing.node) or self.nodes.get(name)
        if firing.taken:
            if own is not None:
                return own[0] + own[1] * firing.rows
            nbytes = sum(x.nbytes for x in firing.taken)
            return self.letter_s * firing.rows + self.letter_byte_s * nbytes
        if not firing.forward and (back := self.nodes.get(f"{name} backward")) is not None:
            return back[0] + back[1] * firing.rows
        fixed, per_row = own or (self.firing_s, self.row_s)
        passes = (1.0 if firing.forward else 0.0) + (
            self.backward if firing.both or not firing.forward else 0.0
        )
        return fixed + per_row * firing.rows * passes

    def nbytes(self, delivery: Delivery) -> int:
        """For which a batch occupies its link."""
        return batch_bytes(delivery)


def batch_bytes(delivery: Delivery) -> int:
    """Bytes of a batch on a wire: payload or gradient, state, addresses."""
    batch = delivery.batch
    columns = (batch.gradient or ()) if isinstance(batch, Backward) else batch.payload
    n = len(batch) if batch.lengths is None else int(batch.lengths.sum())
    each = sum(c[:1].nelement() * c.element_size() for c in columns if c is not None)
    state = 0 if isinstance(batch, Backward) else batch.state.nbytes
    return n * each + state + 8 * len(batch)

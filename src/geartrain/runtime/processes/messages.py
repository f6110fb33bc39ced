"""What parent and workers tell one another during a pass, as records.

    parent ─► worker    Admitted      frames of instances, before their rows
                        rows          a delivery (``transport.batches``)
                        Lot           both, of instances that wait there until there is room
                        Finished      which instances are over, with their slots
                        a word        REST, END, ABANDON, DROP, STORY, ASK
    worker ─► worker    rows, gradients; letters between copies
    worker ─► parent    Report        firings, answers, steps since the last one
                        Idle          how much it has sent to whom, and had, when it has no work
                        Named         tensors and JSON: parts, memories, outputs, an error

Names of nodes and parts travel as numbers, which both sides know from the graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geartrain.engine.firing import Finished, Firing
from geartrain.engine.rounds import Passed
from geartrain.engine.router import Delivery, Outbox
from geartrain.engine.stock import Lot
from geartrain.errors import TransportError
from geartrain.frames.frame import Admitted
from geartrain.frames.message import IntArray, join_arrays
from geartrain.parts.trained import StepTaken
from geartrain.sharing.letters import Letter
from geartrain.transport.batches import Accepted, to_delivery_parts, to_record
from geartrain.transport.record import Array, Record


class Kind(IntEnum):
    """Of a record; rows have the numbers of ``transport.batches``."""

    ADMITTED = 64
    FINISHED = 65
    END = 66
    ABANDON = 67
    STORY = 68
    REPORT = 69
    IDLE = 70
    NAMED = 71
    REST = 72
    LETTER = 73
    RESTING = 74
    LOT = 75
    ASK = 76
    DROP = 77


_NONE = np.zeros(0, np.int64)
_ELSEWHERE = Letter("", 0, 0, "", ())  # stands for those that another process has taken


def text(value: object) -> NDArray[np.uint8]:
    """JSON as an array of bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def read_text(array: Any) -> Any:
    """The reverse of ``text``."""
    return json.loads(bytes(array))


def admitted_to_record(told: Admitted) -> Record:
    """Frames of instances."""
    columns: list[NDArray[Any]] = []
    names: list[list[str]] = []
    for some in (told.vertex, told.edge, told.value, told.fed):
        names.append(list(some))
        columns += some.values()
    said = [names, list(told.names)]
    arrays: tuple[Array, ...] = (told.slots, told.places, text(said), *columns)
    return Record(Kind.ADMITTED, (told.start, told.edge_start), (), arrays)


def record_to_admitted(record: Record) -> Admitted:
    """The reverse."""
    slots, places, said, *columns = record.arrays
    names, keys = read_text(said)
    found: list[dict[str, Any]] = []
    for some in names:
        found.append(dict(zip(some, columns[: len(some)], strict=True)))
        columns = columns[len(some) :]
    start, edge_start = record.ints
    vertex, edge, value, fed = found
    return Admitted(slots, places, start, edge_start, keys, vertex, edge, value, fed)  # type: ignore[arg-type]


def lot_to_record(told: Admitted, lot: Lot) -> Record:
    """Instances with the frames of those of them that were admitted last, and all rows."""
    frames = admitted_to_record(told)
    rows = [to_record(d.node, d.port, d.batch) for d in lot.deliveries]
    ints = [*frames.ints, lot.elsewhere, len(frames.arrays)]
    arrays: list[Array | None] = [*frames.arrays, lot.slots, lot.open]
    for each in rows:
        ints += each.kind, len(each.ints), *each.ints, len(each.arrays)
        arrays += each.arrays
    return Record(Kind.LOT, tuple(ints), (), tuple(arrays))


def record_to_lot(record: Record, accepted: Accepted) -> tuple[Admitted, Lot]:
    """The reverse.

    Raises:
        TransportError: Its rows are not for here, or do not agree.
    """
    start, edge_start, elsewhere, at, *ints = record.ints
    told = record_to_admitted(Record(Kind.ADMITTED, (start, edge_start), (), record.arrays[:at]))
    slots: Any = record.arrays[at]
    left: Any = record.arrays[at + 1]
    at += 2
    deliveries: list[Delivery] = []
    while ints:
        kind, many = ints[:2]
        arrays = ints[2 + many]
        rows = Record(kind, tuple(ints[2 : 2 + many]), (), record.arrays[at : at + arrays])
        deliveries.append(Delivery(*to_delivery_parts(rows, accepted)))
        at += arrays
        del ints[: 3 + many]
    return told, Lot(slots, left, elsewhere, deliveries)


def finished_to_record(told: Finished, slots: IntArray) -> Record:
    """That instances have finished, and where they were."""
    copy = -1 if told.copy is None else told.copy
    return Record(Kind.FINISHED, (told.trained, copy), (), (told.turns, slots))


def record_to_finished(record: Record) -> tuple[Finished, IntArray]:
    """The reverse."""
    trained, copy = record.ints
    turns, slots = record.arrays
    return Finished(turns, trained, None if copy < 0 else copy), slots  # type: ignore[arg-type,return-value]


@final
class Names:
    """Nodes, parts, ports of loops by number; the same on both sides, as the graph is.

    Args:
        nodes, parts: In one order on both sides.
    """

    def __init__(self, nodes: Sequence[str], parts: Sequence[str]) -> None:
        self.parts = list(parts)
        self.nodes = [*nodes, *(f"{part} exchange" for part in parts)]
        self.node = {name: k for k, name in enumerate(self.nodes)}
        self.part = {name: k for k, name in enumerate(self.parts)}
        self.part[None] = -1  # type: ignore[index]


@final
@dataclass(slots=True)
class Report:
    """What a worker has done since its last report.

    Args:
        firings: With start and end in seconds of the machine's clock.
        steps: With the time of each.
        out: What concerns the controller.
        held: Parts that have begun or ceased to hold a step back.
        busy_s: Seconds of a core that it has had in this pass, as it is told.
    """

    firings: list[tuple[Firing, float, float]] = field(default_factory=list)
    steps: list[tuple[StepTaken, float]] = field(default_factory=list)
    out: Outbox = field(default_factory=Outbox)
    held: dict[str, bool] = field(default_factory=dict)
    busy_s: float = 0.0

    @property
    def matters(self) -> bool:
        """Whether the controller waits for it, or others must not hear more before it has."""
        return bool(self.out.answered or self.out.spawned or self.held)

    @property
    def presses(self) -> bool:
        """Whether others must not hear more before the controller has heard of it: one that counts
        an answer before what it answers has been counted takes an instance for finished."""
        return bool(self.out.spawned or self.held)

    def __bool__(self) -> bool:
        return bool(self.firings or self.steps or self.matters or self.out.rounds)

    def to_record(self, names: Names) -> Record:
        """It as a message."""
        fired = np.empty((len(self.firings), 8))
        for k, (f, start, end) in enumerate(self.firings):
            flags = f.forward + 2 * f.both + 4 * bool(f.taken)
            fired[k] = (
                *(names.node[f.node], names.part[f.part], flags, f.rows, f.cells),  # type: ignore[index]
                *(f.nbytes, start, end),
            )
        steps = np.array(
            [(names.part[s.part], s.version, s.rows, t) for s, t in self.steps], np.float64
        )
        held = np.array([(names.part[n], h) for n, h in self.held.items()], np.int64)
        out = self.out
        rounds = out.rounds
        ports = np.array([(*port, slots.size) for port, slots in rounds], np.int64)
        arrays = (
            fired,
            steps,
            held,
            join_arrays(out.answered) if out.answered else _NONE,
            join_arrays(out.spawned) if out.spawned else _NONE,
            ports,
            join_arrays([slots for _, slots in rounds]) if rounds else _NONE,
        )
        return Record(Kind.REPORT, (), (self.busy_s,), arrays)

    @classmethod
    def of_record(cls, record: Record, names: Names) -> Report:
        """The reverse; firings know nothing of what they have sent."""
        fired, steps, held, answered, spawned, ports, slots = record.arrays
        report = cls(busy_s=record.floats[0])
        for node, part, flags, rows, cells, nbytes, start, end in fired.tolist():  # type: ignore[union-attr]
            firing = Firing(
                names.nodes[int(node)],
                None if part < 0 else names.parts[int(part)],
                bool(int(flags) & 1),
                int(rows),
                bool(int(flags) & 2),
                int(cells),
                int(nbytes),
                taken=[_ELSEWHERE] if int(flags) & 4 else [],
            )
            report.firings.append((firing, start, end))
        for part, version, rows, t in steps.tolist():  # type: ignore[union-attr]
            report.steps.append((StepTaken(names.parts[int(part)], int(version), int(rows)), t))
        report.held = {names.parts[int(k)]: bool(h) for k, h in held.tolist()}  # type: ignore[union-attr]
        out = report.out
        out.answered = [answered] if answered.size else []  # type: ignore[list-item,union-attr]
        out.spawned = [spawned] if spawned.size else []  # type: ignore[list-item,union-attr]
        at = 0
        for operator, port, n in ports.tolist():  # type: ignore[union-attr]
            passed: Passed = ((operator, port), slots[at : at + n])  # type: ignore[assignment,index]
            out.rounds.append(passed)
            at += n
        return report


def named_to_record(what: str, document: Any, tensors: Mapping[str, Tensor]) -> Record:
    """Tensors by name and JSON."""
    arrays: tuple[Array, ...] = (text([what, document, list(tensors)]), *tensors.values())
    return Record(Kind.NAMED, (), (), arrays)


def record_to_named(record: Record) -> tuple[str, Any, dict[str, Tensor]]:
    """The reverse."""
    said, *tensors = record.arrays
    what, document, names = read_text(said)
    if len(names) != len(tensors):
        raise TransportError(f"'{what}' has {len(tensors)} tensors, and names of {len(names)}")
    return what, document, dict(zip(names, tensors, strict=True))

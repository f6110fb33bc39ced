"""Steps that touch only state and addresses: no store, so rows pass them where they are made.

    where, route   (Cond)  split rows by a function of state or payload     no way back
    move           (Isu)   new state columns                                none, no inverse
    loop, merge    (Phi)   wiring alone: several streams lead to one reader
    stop, detach           answer zero at once; swallow the rows or pass them on

A gradient goes straight to the node that made the payload; the way back does not know these steps.

Source: Gaunt et al. 2017, arXiv:1705.09786; return addresses in place of inverse state updates are
ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
import torch

from geartrain.device import upload
from geartrain.errors import GraphError
from geartrain.frames.frame import View
from geartrain.frames.message import CONTROLLER, INSTANCE, ROW_BITS, Backward, Forward, IntArray
from geartrain.nodes.node import Place

assert CONTROLLER == 0  # a slot is its own address at the controller
_INSIDE: Final = frozenset(("vertex", "edge"))
"""Columns that are numbered inside their instance by who moves rows, and in the arena by us."""


@final
@dataclass(slots=True)
class Passage:
    """What a step makes of a batch.

    Args:
        forward: Batches by output port.
        backward: Answers that are due at once.
        spawned: Slots of the instances for which the controller must await one answer more, one
            entry a row; it must learn of them before the answers travel.
    """

    forward: list[tuple[int, Forward]] = field(default_factory=list)
    backward: list[Backward] = field(default_factory=list)
    spawned: IntArray | None = None


class AbstractStep(ABC):
    """A step without a store."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.name = place.name

    @abstractmethod
    def apply(self, batch: Forward) -> Passage:
        """Route or rename the rows of a batch."""


@final
class Route(AbstractStep):
    """Split rows by a function of state or payload.

    Args:
        place: Number, name, frames.
        choose: Gets a ``View`` of n rows, returns n integers in ``[0, ways)``: numpy or torch.
        ways: Number of output ports.
        halves: It says of n rows whether something holds instead: by booleans, or by integers that
            are not 0. Those rows leave by port 0.
    """

    def __init__(
        self, place: Place, choose: Callable[[View], Any], ways: int, *, halves: bool = False
    ) -> None:
        super().__init__(place)
        self._choose, self._ways, self._halved = choose, ways, halves

    def apply(self, batch: Forward) -> Passage:
        return Passage(
            [
                (way, batch if rows is None else batch.take(rows))
                for way, rows in self.split(batch, self.place.view(batch))
            ]
        )

    def split(self, batch: Forward, view: View) -> list[tuple[int, IntArray | None]]:
        """By which ports rows leave, and which of them, in order; None: all."""
        choice = self._chosen(batch, view)
        if self._halved:
            return _halves(choice if choice.dtype == np.bool_ else choice != 0)
        ports = choice.astype(np.int64)
        order = ports.argsort(kind="stable")
        ranked = ports[order]
        low, high = int(ranked[0]), int(ranked[-1])
        if low < 0 or high >= self._ways:
            raise GraphError(
                f"'{self.name}': its function chose port {low}..{high}, "
                f"but the route has {self._ways} ways, 0..{self._ways - 1}"
            )
        if low == high:
            return [(low, None)]
        ends = ranked.searchsorted(np.arange(low, high + 1), "right").tolist()
        begins = [0, *ends]
        return [
            (k, order[begin:end])
            for k, begin, end in zip(range(low, high + 1), begins, ends, strict=False)
            if end > begin
        ]

    @property
    def ways(self) -> int:
        """Number of output ports."""
        return self._ways

    def ports(self, batch: Forward, view: View) -> IntArray:
        """By which port each row would leave, maybe one that there is not."""
        choice = self._chosen(batch, view)
        ports: IntArray = choice == 0 if self._halved else choice
        return ports.astype(np.int64)

    def _chosen(self, batch: Forward, view: View) -> Any:
        """What the function says of rows."""
        choice = _array(self._choose(view))
        if choice.shape != (len(batch),):
            raise GraphError(
                f"'{self.name}': its function returned shape {choice.shape} for "
                f"{_came(batch)}; it gets columns and returns a column{_as_column(choice.shape)}"
            )
        self._check_kind(choice)
        return choice

    def _check_kind(self, choice: Any) -> None:
        if choice.dtype.kind in ("biu" if self._halved else "iu"):
            return
        wanted = (
            "where() takes booleans: m.x > 0"
            if self._halved
            else "route() takes numbers of ways; where() splits by booleans"
        )
        raise GraphError(f"'{self.name}': its function returned {choice.dtype}; {wanted}")


def _halves(mask: Any) -> list[tuple[int, IntArray | None]]:
    """Rows of which something holds leave by port 0, others by port 1."""
    (yes,) = mask.nonzero()
    if yes.size == mask.size:
        return [(0, None)]
    if yes.size == 0:
        return [(1, None)]
    (no,) = (~mask).nonzero()
    return [(0, yes), (1, no)]


def by_columns(error: Exception) -> str:
    """A hint for who wrote a function of one row, or one that mixes tensors with arrays."""
    said = str(error)
    of_one = ("truth value", "Boolean value of Tensor", "to Scalar", "to Python scalars")
    if any(each in said for each in of_one):
        return "; it gets columns of n rows, and gives one: np.where(m.x > 0, 1, 2) for an if"
    lone = ("tuple indices must be", "'tuple' object has no attribute", "instances of 'tuple' and")
    if any(each in said for each in lone):
        return "; m.payload is a tuple of tensors, also where there is one: m.payload[0]"
    mixed = "'Tensor'" in said and "'numpy.ndarray'" in said
    if mixed or "Concatenation operation is not implemented" in said:  # numpy's, of array + tensor
        return (
            "; columns are numpy arrays and m.payload is of tensors: m.payload[0].numpy(), "
            "or torch.from_numpy(m.x)"
        )
    return ""


@final
class Move(AbstractStep):
    """Give state columns new values.

    Args:
        place: Number, name, frames.
        fields: Column name to a function of the ``View``, or to a constant. All functions see the
            old state. ``vertex`` and ``edge`` are numbered inside the instance.
    """

    def __init__(self, place: Place, fields: Mapping[str, Callable[[View], Any] | int]) -> None:
        super().__init__(place)
        self._fields = dict(fields)

    def apply(self, batch: Forward) -> Passage:
        return Passage([(0, batch.with_state(self.move(batch, self.place.view(batch))))])

    def move(self, batch: Forward, view: View) -> IntArray:
        """The new state of rows; only the state of ``batch`` is read."""
        state = batch.state.copy()
        columns = self.place.schema.state
        for name, value in self._values(batch, view):
            if name in _INSIDE:
                value = self._absolute(batch, value, name)
            state[columns[name]] = value
        return state

    def columns(self, batch: Forward, view: View) -> Iterator[tuple[int, IntArray]]:
        """What columns of rows become, each; -1: a vertex or edge that there is not."""
        for name, value in self._values(batch, view):
            found = np.empty(len(batch), np.int64)
            found[:] = value
            if name in _INSIDE:
                bad, moved = self._inside(batch, found, name)
                found = np.where(bad, -1, moved)
            yield self.place.schema.state[name], found

    @property
    def moves(self) -> list[int]:
        """The columns that get new values."""
        return [self.place.schema.state[name] for name in self._fields]

    def _values(self, batch: Forward, view: View) -> Iterator[tuple[str, IntArray]]:
        """What functions say of rows, by the name of the column that gets it."""
        for name, function in self._fields.items():
            value = _array(function(view) if callable(function) else function)
            if value.dtype.kind not in "iub" or value.shape not in ((), (len(batch),)):
                raise GraphError(
                    f"'{self.name}': {name} became {value.dtype} {value.shape} for "
                    f"{_came(batch)}; a state column is integers, one a "
                    f"{'row' if batch.lengths is None else 'bundle'}"
                )
            yield name, value

    def _inside(self, batch: Forward, value: IntArray, kind: str) -> tuple[Any, IntArray]:
        """Vertices or edges of rows' instances: which there are not, and where they all are."""
        arena, slots = self.place.arena, batch.state[INSTANCE]
        base, size = (
            (arena.base, arena.size) if kind == "vertex" else (arena.edge_base, arena.edge_size)
        )
        bad = value.view(np.uint64) >= size.take(slots).view(np.uint64)  # or negative
        return bad, value + base.take(slots)

    def _absolute(self, batch: Forward, value: IntArray, kind: str) -> IntArray:
        value = np.array(value, np.int64)  # ours: checked is what is used
        bad, moved = self._inside(batch, value, kind)
        if np.count_nonzero(bad):
            arena, slots = self.place.arena, batch.state[INSTANCE]
            size = arena.size if kind == "vertex" else arena.edge_size
            i = int(np.flatnonzero(bad)[0])
            slot = int(slots[i])
            at = int(np.broadcast_to(value, slots.shape)[i])
            raise GraphError(
                f"'{self.name}': a row of {arena.describe(slot)} was moved to {kind} {at}, but the "
                f"instance has {kind} 0..{int(size[slot]) - 1}; split such rows off with where() "
                "first"
            )
        return moved


@final
class Stop(AbstractStep):
    """Swallow rows; their gradient is zero."""

    def apply(self, batch: Forward) -> Passage:
        return Passage(backward=[Backward(batch.origin, None)])


@final
class Detach(AbstractStep):
    """Pass rows on and answer zero at once; what comes back later ends at the controller.

    The instance stays unfinished until that has come, as its frame is still in use. A payload
    that is read where it lies is copied: who made it may write over it once it is answered.
    """

    def apply(self, batch: Forward) -> Passage:
        slots = batch.state[INSTANCE].copy()
        copied = tuple(
            x if batch.index is None else x.index_select(0, upload(batch.index, x.device))
            for x in batch.payload
        )
        origin = slots | (CONTROLLER << ROW_BITS)
        return Passage(
            [(0, Forward(copied, batch.state, origin, batch.lengths))],
            [Backward(batch.origin, None)],
            slots,
        )


def _came(batch: Forward) -> str:
    """What a function was to answer, for errors."""
    lengths = batch.lengths
    if lengths is None:
        return f"{len(batch)} rows"
    return f"{len(batch)} bundles of {int(lengths.sum())} rows (m.lengths says how many each has)"


def _as_column(shape: tuple[int, ...]) -> str:
    """How what a function returned would be one."""
    if not shape:
        return ": np.where(m.x > 0, 1, 2) for an if"
    return ": f(m)[:, 0] of what it returned" if shape[1:] == (1,) else ""


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)

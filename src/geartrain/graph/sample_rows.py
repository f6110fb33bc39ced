"""Rows to try a function on, before there are any: random numbers in an example's frame.

example instance x 3 ─► arena ─► columns and edges, as rows in flight will read them
meta tensors that come, random numbers ─► payload
                                  together ─► Sample: the arguments of calls with some of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.device import moved
from geartrain.errors import DataError
from geartrain.frames.frame import Arena, Schema, View
from geartrain.frames.instance import Instance
from geartrain.frames.message import INSTANCE, VERTEX, IntArray, Payload, ragged_index
from geartrain.frames.packer import Packer
from geartrain.graph.operator import Input
from geartrain.nodes.call import Call, read_columns
from geartrain.nodes.inside import Inside, look_inside
from geartrain.nodes.node import Place
from geartrain.nodes.stand_in import plain

MESSAGES: Final = 3
"""So many are tried together."""

MOST_ROWS: Final = 4096
"""More rows in a dry run would take time; where a bundle is so large, nothing is tried."""


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """Messages to try a function on.

    Args:
        inputs: Its arguments but for the ``Inside``.
        n: How many messages.
        lengths: Rows of each; None: one.
        inside: Makes the ``Inside`` of some of them; None: there is none.
    """

    inputs: Payload
    n: int
    lengths: IntArray | None = None
    inside: Callable[[IntArray], Inside] | None = None

    def rows(self, messages: IntArray) -> IntArray:
        """The rows of some messages, message by message."""
        return messages if self.lengths is None else ragged_index(self.lengths, messages)

    def arguments(self, messages: IntArray) -> tuple[Payload, Inside | None]:
        """Those of a call with some of the messages."""
        rows = torch.from_numpy(self.rows(messages))
        inputs = tuple(x.index_select(0, rows.to(x.device)) for x in self.inputs)
        return inputs, None if self.inside is None else self.inside(messages)

    def apart(self) -> Sample:
        """The same with floats that differ a little, so that no two rows are alike."""
        return Sample(tuple(map(_apart, self.inputs)), self.n, self.lengths, self.inside)


@final
class SampleRows:
    """An example instance, as if it were in flight ``MESSAGES`` times.

    Args:
        arena: Empty; declares the columns.
        schema: Of the graph.
        inputs: By name.
        like: The example.

    Raises:
        DataError: The instance is none of this graph.
    """

    def __init__(
        self, arena: Arena, schema: Schema, inputs: Mapping[str, Input], like: Instance
    ) -> None:
        arena.optional = frozenset((*arena.vertex_names, *arena.edge_names, *arena.value_names))
        packed = Packer(arena, inputs).pack([like] * MESSAGES)
        self._slots = arena.admit(packed, 0)
        for table in (arena.vertices, arena.edges, arena.values):
            for name in arena.optional & table.columns.keys() - getattr(like, table.kind).keys():
                table.columns[name] = None  # nothing is known of it: reading it is refused
        self._place = Place(0, "dry run", arena, schema)
        self.rows = {
            name: rows.payload[: int(rows.lengths[0])]
            for name, rows in packed.inputs.items()
            if rows.payload is not None
        }
        """What the instance brings, by input."""

    def samples(
        self,
        call: Call,
        payload: Sequence[Tensor],
        known: Sequence[Tensor | None],
        look_up: Callable[[View], Sequence[Tensor]] | None = None,
    ) -> list[Sample]:
        """Several ways to fill the messages, the best one first, zeros last; none if none works.

        They are on the host, wherever the function is: to look an id up that a table does not have
        is an error there, and the end of the process on a GPU.

        Args:
            call: How a node calls the function.
            payload: Meta tensors of the rows that come to the node.
            known: For each of them rows of the example that are of this kind, or None.
            look_up: Gives the arguments after the payload; None: the columns that the call reads.
        """
        taken = call.taken(len(payload))
        here = [(payload[j], _fitting(known[j], payload[j])) for j in taken]
        each = None
        if call.inside:
            given = (rows.shape[0] for _, rows in here if rows is not None)
            each = next(given, int(self._place.arena.size[self._slots[0]]))
        state = self._state(each)
        lengths = None if each is None else np.full(MESSAGES, each, np.int64)

        def inside(messages: IntArray) -> Inside:
            sizes = None if lengths is None else lengths[messages]
            return look_inside(self._place, state[INSTANCE, messages], sizes, None)

        try:
            if look_up is None:
                columns = read_columns(call, self._place, state, lengths, None)
            else:
                columns = list(look_up(self._place.row_view(state, lengths)))
            if call.inside:
                inside(np.arange(MESSAGES))
        except Exception:  # noqa: BLE001 - the example has not what rows, or a user's function, want
            return []
        rows, ids = MESSAGES * (each or 1), min(map(len, _tables(call)), default=2)
        found: list[Sample] = []
        if rows > MOST_ROWS:
            return found
        for fill in (_normal, _share, _real, _nought):
            draws = torch.Generator(_HOST).manual_seed(0)
            made = [
                fill((rows, *like.shape[1:]), like.dtype, own, ids, draws) for like, own in here
            ]
            inputs = [x for x in made if x is not None]
            if len(inputs) == len(made):
                last = inside if call.inside else None
                found.append(Sample((*inputs, *columns), MESSAGES, lengths, last))
        return found

    def _state(self, each: int | None) -> IntArray:
        """State columns of messages of ``each`` rows; of one row, each is at another vertex."""
        arena, slots = self._place.arena, self._slots
        state = np.zeros((len(self._place.schema.state), slots.size), np.int64)
        which = np.arange(slots.size)
        state[INSTANCE], state[VERTEX] = slots, arena.base[slots]
        if each is None:
            state[VERTEX] += which % arena.size[slots]
        if (edge := self._place.schema.state.get("edge")) is not None:
            state[edge] = arena.edge_base[slots] + which % np.maximum(arena.edge_size[slots], 1)
        return state


def sample_rows_of(
    arena: Callable[[], Arena], schema: Schema, inputs: Mapping[str, Input], like: Instance | None
) -> SampleRows | None:
    """The sample rows of an example, or of one that is made up; None: too little is known for one.

    Args:
        arena: Makes one.
        schema, inputs: As for ``SampleRows``.
        like: The example; where it is refused, what feeds it will say why.
    """
    for found in (like, _made_up(inputs)):
        try:
            if found is not None:
                return SampleRows(arena(), schema, inputs, found)
        except DataError:
            continue
    return None


def _made_up(inputs: Mapping[str, Input]) -> Instance | None:
    """An instance of zeros, whose vertices are a ring, without any column."""
    rows = {
        name: torch.zeros((MESSAGES, *o.shape), dtype=o.dtype, device=_HOST)
        for name, o in inputs.items()
        if o.shape is not None and o.dtype is not None
    }
    if not rows:
        return None
    ring = np.arange(MESSAGES)
    return Instance(rows, edge={"source": ring, "target": np.roll(ring, 1)})


_HOST: Final = torch.device("cpu")  # whatever torch's default is


def _normal(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    known: Tensor | None,
    ids: int,
    draws: torch.Generator,
) -> Tensor | None:
    """Normal numbers; integers are the example's, or below the number of ids."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draws, device=_HOST).to(dtype)
    if known is not None:
        return known[torch.randint(known.shape[0], shape[:1], generator=draws, device=_HOST)]
    return torch.randint(ids, shape, generator=draws, device=_HOST).to(dtype)


def _share(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    known: Tensor | None,
    ids: int,
    draws: torch.Generator,
) -> Tensor | None:
    """Numbers from a quarter to three, as shares of one; integers as for ``_normal``."""
    if dtype.is_floating_point:
        return (0.25 + 0.5 * torch.rand(shape, generator=draws, device=_HOST)).to(dtype)
    return _normal(shape, dtype, known, ids, draws)


def _real(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    known: Tensor | None,
    ids: int,
    draws: torch.Generator,
) -> Tensor | None:
    """The rows of the example, one after the other."""
    if known is None:
        return None
    return _apart(known[torch.arange(shape[0], device=known.device) % known.shape[0]])


def _nought(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    known: Tensor | None,
    ids: int,
    draws: torch.Generator,
) -> Tensor | None:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype, device=_HOST)


def _apart(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    draws = torch.Generator(_HOST).manual_seed(0)
    near = 0.9 + 0.2 * torch.rand(x.shape, generator=draws, device=_HOST)
    return x * moved(near.to(x.dtype), x.device)


def _fitting(known: Tensor | None, like: Tensor) -> Tensor | None:
    """Rows of an example, if they are such rows."""
    if known is None or known.shape[1:] != like.shape[1:] or known.dtype is not like.dtype:
        return None
    return known if known.shape[0] else None


def _tables(call: Call) -> Iterator[Tensor]:
    """The tables that a module looks integers up in."""
    function = plain(call.function)
    for inner in function.modules() if isinstance(function, nn.Module) else ():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            yield inner.weight


__all__ = ["MESSAGES", "MOST_ROWS", "Sample", "SampleRows", "sample_rows_of"]

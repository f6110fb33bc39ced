"""Calls of ragged programs: what one is given, of bundles and of rows that read a memory; what it
leaves for its way back, and what that finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor

from geartrain.derived.ragged.cut import Tensors
from geartrain.derived.ragged.values import BUNDLES, EDGES, MEMBERS, PAIRS
from geartrain.errors import ProtocolError
from geartrain.frames.message import IntArray, Payload, ends_of, ranges
from geartrain.nodes.inside import Inside


@final
@dataclass(frozen=True, slots=True)
class RaggedCall:
    """What a call is given.

    Args:
        sizes: Bundles, their members, edges, rows of a memory, pairs of members.
        inputs: By number; None: a tensor of a memory, or a mask.
        ends: int64 ``(bundles + 1,)``, where bundles begin and end.
        cells: int64 ``(members,)``, where they lie in a memory, or None.
        held: By input, the memory's tensors.
        counted: Kind of the rows that updates are told for, and the owner of each row of another
            kind among them, by kind.
        seeds: int64, of each member, from which follows what is drawn; None: they are drawn.
    """

    sizes: tuple[int, int, int, int, int]
    inputs: Sequence[Tensor | None]
    ends: IntArray
    cells: IntArray | None
    held: dict[int, Tensor]
    counted: tuple[int, Callable[[int], IntArray]]
    seeds: Tensor | None = None

    def numbers_at(self, role: str) -> int:
        """Where the ends of bundles, cells of a memory or seeds lie; 0: there are none."""
        if role == "seeds":
            return 0 if self.seeds is None else address_of(self.seeds, self.sizes[MEMBERS], [])
        found = self.ends if role == "ends" else self.cells
        return 0 if found is None else found.ctypes.data


@final
@dataclass(frozen=True, slots=True)
class RaggedKept:
    """What a call has left for its way back.

    Args:
        call: It.
        ints, floats: Row numbers that were counted, and the same as floats.
        residuals: Side by side.
        places: Where each of them begins.
    """

    call: RaggedCall
    ints: tuple[Tensor, ...]
    floats: dict[int, Tensor]
    residuals: Tensor
    places: list[int]

    def as_floats(self, k: int, dtype: torch.dtype) -> Tensor:
        """Row numbers k as floats."""
        if k not in self.floats:
            self.floats[k] = self.ints[k].to(dtype).contiguous()
        return self.floats[k]


@final
@dataclass(frozen=True, slots=True)
class RaggedFound:
    """What the way back of some calls has found for the weights.

    Args:
        tensor: Gives it.
        ints: Row numbers that were counted.
        sizes: How many rows of each kind there are.
        counted: Kind of the rows that updates are told for.
        owners: The owner of each row of another kind among those, by kind.
    """

    tensor: Callable[[Tensors], Tensor]
    ints: Sequence[Tensor]
    sizes: Sequence[int]
    counted: int
    owners: Callable[[int], IntArray]


def address_of(x: Tensor, n: int, copies: list[Tensor]) -> int:
    """Where n numbers lie side by side, if need be those of a copy.

    Raises:
        ProtocolError: There are not so many.
    """
    if x.numel() != n:
        raise ProtocolError(f"{tuple(x.shape)} came where {n} numbers were expected")
    if not x.is_contiguous():
        x = x.contiguous()
        copies.append(x)
    return x.data_ptr()


def call_of_inside(
    inputs: Payload, inside: Inside, names: Mapping[str, bool], seeds: Tensor | None = None
) -> RaggedCall:
    """Of rows of bundles, and what is inside; by name of an edge column, whether it is read; what
    is drawn follows from seeds of the rows."""
    edges = [inside.edges[name] if read else None for name, read in names.items()]
    lengths = inside.lengths.numpy()
    ends = ends_of(lengths)
    n = inputs[0].shape[0]
    count = next((x.shape[0] for x in edges if x is not None), 0)
    given: list[Tensor | None] = [*inputs, inside.lengths, inside.segment, *edges]
    owners = partial(_owners_inside, inside, ends, n)
    sizes = lengths.size, n, count, 0, int(lengths @ lengths)
    of = None if seeds is None else seeds.contiguous()
    return RaggedCall(sizes, given, ends, None, {}, (MEMBERS, owners), of)


def call_of_memory(
    inputs: Payload, columns: int, held: Payload, starts: IntArray, lengths: IntArray
) -> RaggedCall:
    """Of rows that read bundles of a memory.

    Args:
        inputs: Payload and columns.
        columns: How many are columns.
        held: The memory's tensors.
        starts, lengths: Of what each row reads.
    """
    at = len(inputs) - columns
    given: list[Tensor | None] = [*inputs[:at], *[None] * (len(held) + 1), *inputs[at:]]
    cells, ends = ranges(starts, lengths), ends_of(lengths)
    owners = partial(_owners_reading, lengths)
    sizes = lengths.size, cells.size, 0, held[0].shape[0], int(lengths @ lengths)
    memory = {at + k: x for k, x in enumerate(held)}
    return RaggedCall(sizes, given, ends, cells, memory, (BUNDLES, owners))


def _owners_inside(inside: Inside, ends: IntArray, n: int, kind: int) -> IntArray:
    """A member for each bundle, edge or pair."""
    if kind == EDGES:
        found: IntArray = inside.edges["source"].numpy()
        return found
    if kind == PAIRS:
        lengths = np.diff(ends)
        return np.arange(n).repeat(lengths.repeat(lengths))
    return np.minimum(ends[:-1], max(n - 1, 0))


def _owners_reading(lengths: IntArray, kind: int) -> IntArray:
    """The row of each member, or pair of these."""
    return np.arange(lengths.size).repeat(lengths * lengths if kind == PAIRS else lengths)

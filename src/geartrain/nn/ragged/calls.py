"""What a call of a ragged program is given: of bundles, and of rows that read a memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from torch import Tensor

from geartrain.frames.message import IntArray, Payload, ends_of, ranges
from geartrain.nn.ragged.program import RaggedCall
from geartrain.nn.ragged.values import BUNDLES, EDGES, MEMBERS, PAIRS
from geartrain.nodes.inside import Inside


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

"""What joined columns of instances are looked at for: places, ends of edges, numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import DataError
from geartrain.frames.frame import BY_SOURCE, FIRST_OUT
from geartrain.frames.instance import Instance, called
from geartrain.frames.message import IntArray
from geartrain.frames.packed import PackedRows
from geartrain.frames.table import Column


def owner(lengths: IntArray, entry: int) -> int:
    """Whose entry it is."""
    return int(np.searchsorted(np.cumsum(lengths), entry, side="right"))


def check_ends(
    instances: Sequence[Instance], edge: dict[str, Column], sizes: IntArray, edge_sizes: IntArray
) -> None:
    """Ends of edges are vertices of their instance; they come as int64."""
    limit = np.repeat(sizes, edge_sizes)
    for name in ("source", "target"):
        column = edge[name]
        if column.dtype.kind != "i" and column.size:
            first = instances[int(np.argmax(edge_sizes > 0))]
            raise DataError(
                f"{called(first)}: edge column '{name}' holds {column.dtype}; expected integers"
            )
        edge[name] = column = column.astype(np.int64, copy=False)
        bad = np.flatnonzero((column < 0) | (column >= limit))
        if bad.size:
            whose = owner(edge_sizes, int(bad[0]))
            raise DataError(
                f"{called(instances[whose])}: an edge has {name} {int(column[bad[0]])}, but the "
                f"instance has {_vertices(int(sizes[whose]))}"
            )


def check_places(
    instances: Sequence[Instance], name: str, rows: PackedRows, sizes: IntArray
) -> None:
    """Rows enter at vertices of their instance."""
    bad = np.flatnonzero((rows.at < 0) | (rows.at >= np.repeat(sizes, rows.lengths)))
    if bad.size:
        whose = owner(rows.lengths, int(bad[0]))
        raise DataError(
            f"{called(instances[whose])}: input '{name}' has a row at vertex "
            f"{int(rows.at[bad[0]])}, but the instance has {_vertices(int(sizes[whose]))}"
        )


def _vertices(n: int) -> str:
    return f"vertices 0..{n - 1}" if n else "no vertex: its vertex columns are empty"


def add_sources(
    vertex: dict[str, Column], edge: dict[str, Column], sizes: IntArray, edge_sizes: IntArray
) -> None:
    """Add degrees, and which edges leave each vertex: one after the other, as they are numbered."""
    offsets = np.repeat(np.cumsum(sizes) - sizes, edge_sizes)
    source, target = edge["source"] + offsets, edge["target"] + offsets
    in_order = not (np.diff(source) < 0).any()
    edge[BY_SOURCE] = np.arange(source.size) if in_order else np.argsort(source, kind="stable")
    total = int(sizes.sum())
    out = np.bincount(source, minlength=total).astype(np.int64)
    vertex["out_degree"] = out
    vertex[FIRST_OUT] = np.cumsum(out) - out
    vertex["in_degree"] = np.bincount(target, minlength=total).astype(np.int64)


def check_finite(
    instances: Sequence[Instance], name: str, payload: Tensor, lengths: IntArray
) -> None:
    """What is fed is finite."""
    if not payload.is_floating_point() or payload.sum().isfinite():
        return  # what is not finite shows in the sum, which may also just be too large
    if payload.isfinite().all():
        return
    broken = ~torch.isfinite(payload).flatten(1).all(1) if payload.ndim > 1 else ~payload.isfinite()
    whose = owner(lengths, int(torch.nonzero(broken)[0, 0]))
    raise DataError(
        f"{called(instances[whose])}: input '{name}' holds NaN or infinity; clean the features "
        "before they are fed"
    )

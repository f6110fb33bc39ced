"""Structure that means harm: sound things drawn by chance, and what spoils them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import geartrain as gt
from geartrain.errors import GeartrainError
from geartrain.nodes.inside import Inside

Ints = NDArray[np.int64]
F64 = torch.float64
EXTREMES = [
    *(s * 2**k + d for k in (31, 32, 62, 63) for s in (-1, 1) for d in (-1, 0, 1)),
    *(-7, -2, -1, 0, 1, 2, 3, 7, 100),
]
EXTREMES = [x for x in EXTREMES if -(2**63) <= x < 2**63]
REFUSALS = (GeartrainError, ValueError, IndexError, RuntimeError)
"""The last two are torch's, which a session would wrap."""


_UPDATE = 2


class Draw:
    """Sound things, and what spoils them."""

    def __init__(self, seed: int, case: int) -> None:
        self.random = np.random.default_rng([seed, case])
        torch.manual_seed(case)

    def n(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def one_of(self, *values: Any) -> Any:
        return values[self.n(0, len(values) - 1)]

    def ints(self, limit: int, n: int) -> Ints:
        return self.random.integers(0, max(limit, 1), n)

    def spoilt(self, column: Ints, share: float = 0.35) -> Ints:
        """With entries that are extreme, doubled, or one beside the range."""
        column = column.copy()
        if not column.size or not self.chance(share):
            return column
        for _ in range(self.n(1, 3)):
            at = self.n(0, column.size - 1)
            near = int(column.max()) + self.n(0, 2)
            column[at] = self.one_of(
                self.one_of(*EXTREMES), column[self.n(0, column.size - 1)], min(near, 2**63 - 1)
            )
        return column

    def laid_out(self, x: Tensor) -> Tensor:
        """The same numbers, perhaps with others between them."""
        if x.ndim == 0 or not self.chance(0.2):
            return x
        wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
        wide[..., ::2] = x
        return wide[..., ::2]

    def floats(self, *shape: int, dtype: torch.dtype = F64) -> Tensor:
        x = torch.randn(*shape, dtype=dtype)
        if x.numel() and self.chance(0.1):
            x.view(-1)[self.n(0, x.numel() - 1)] = self.one_of(np.nan, 50.0, -50.0)
        return x

    def rows(self, n: int, limit: int) -> Ints:
        """n different row numbers of a store; in the usual memory, or not."""
        rows = self.random.permutation(limit)[:n].astype(np.int64)
        rows = self.spoilt(rows, 0.3)
        if self.chance(0.2):
            wide = np.zeros(2 * n, np.int64)
            wide[::2] = rows
            return wide[::2]
        return rows

    def lengths(self) -> Ints:
        return self.random.integers(0, self.one_of(2, 6, 12), self.n(0, self.one_of(1, 4, 9)))

    def inside(self, lengths: Ints, edges: dict[str, Ints] | None = None) -> Inside:
        segment = torch.arange(lengths.size).repeat_interleave(torch.from_numpy(lengths))
        columns = {k: torch.from_numpy(v) for k, v in (edges or {}).items()}
        return Inside(torch.from_numpy(lengths), segment, columns)

    def trees(self, least: int) -> tuple[Ints, Ints, Ints]:
        """Parent, slot, lengths; vertices named in any order."""
        parents, slots, lengths = [], [], []
        for _ in range(self.n(least, 5)):
            leaves = self.n(1, 7)
            size = 2 * leaves - 1
            name = self.random.permutation(size)
            parent, slot, roots = np.full(size, -1), np.zeros(size, np.int64), list(range(leaves))
            for made in range(leaves, size):
                at = self.n(0, len(roots) - 2)
                left, right = roots[at : at + 2]
                parent[name[left]] = parent[name[right]] = name[made]
                slot[name[right]] = 1
                roots[at : at + 2] = [made]
            parents.append(self.spoilt(parent, 0.15))
            slots.append(self.spoilt(slot, 0.1))
            lengths.append(size)
        none = [np.zeros(0, np.int64)]
        return (
            np.concatenate([*none, *parents]),
            np.concatenate([*none, *slots]),
            np.array(lengths, np.int64),
        )

    def edges(self, lengths: Ints, types: int) -> dict[str, Ints]:
        """Within each graph, or spoilt."""
        starts = lengths.cumsum() - lengths
        count = self.ints(12, lengths.size) * (lengths > 0)
        of = np.repeat(np.arange(lengths.size), count)
        ends = [
            (self.random.random(of.size) * lengths[of]).astype(np.int64) + starts[of]
            for _ in range(2)
        ]
        return {
            "source": self.spoilt(ends[0], 0.2),
            "target": self.spoilt(ends[1], 0.2),
            "type": self.spoilt(self.ints(types, of.size), 0.2),
        }


def session_of(
    draw: Draw,
    make: Callable[[], tuple[gt.Graph, list[nn.Module]]],
    data: Any,
    *,
    drain: bool = False,
) -> Any:
    """A pass; ``drain``: an update at a time, and none is in flight while a step is taken."""
    active, seed = draw.n(1, 9), draw.n(0, 9)

    def run() -> list[Tensor | None]:
        torch.manual_seed(seed)
        graph, modules = make()
        rules = gt.Rules(
            optimizer=partial(torch.optim.SGD, lr=0.1), update_every=gt.Instances(_UPDATE)
        )
        session = gt.Session(
            graph,
            rules=rules,
            runtime=gt.Simulated(seed=seed),
            max_active=_UPDATE if drain else active,
            schedule=gt.Schedule(drain=drain),
        )
        session.fit(data, epochs=1)
        return [p.detach().clone() for m in modules for p in m.parameters()]

    return run

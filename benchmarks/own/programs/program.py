"""What every program here is: modules of its own, and three ways to run them.

    items = program.generate(n, seed)      plain data: dicts of numpy arrays
    program.graph()                        the geartrain program, and instance(item) what it is fed
    program.plain(item)                    one instance by ordinary control flow
    program.hand(items)                    a batch as a good engineer writes it in an hour

All three use the same modules, so their gradients can be compared. A loss is the sum over the rows
of an instance that have one; updates average it over instances.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import geartrain as gt

Item: TypeAlias = Mapping[str, Any]
"""One example: arrays and numbers by name."""


class AbstractProgram(ABC, nn.Module):
    """Modules of one's own with their three ways; its parameters are those of the modules.

    Attributes:
        name: As it is chosen on the command line.
        told: What it is, in a line.
        width: Of the rows, unless told otherwise.
        looks: Whether its control flow looks at payloads.
    """

    name: ClassVar[str]
    told: ClassVar[str]
    width: ClassVar[int] = 96
    looks: ClassVar[bool] = False

    @abstractmethod
    def generate(self, n: int, seed: int) -> list[Item]:
        """Examples drawn at random."""

    @abstractmethod
    def graph(self) -> gt.Graph:
        """The program in geartrain."""

    @abstractmethod
    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        """What the graph is fed for an example."""

    @abstractmethod
    def plain(self, item: Item) -> Tensor:
        """The loss of one example, by ordinary control flow."""

    @abstractmethod
    def hand(self, items: Sequence[Item]) -> Tensor:
        """The sum of the losses of a batch; it is put together here, too."""

    def losses(self, items: Sequence[Item]) -> int:
        """Rows with a loss in a batch: one of each example, unless told otherwise."""
        return len(items)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def tokens(values: NDArray[np.int64] | int) -> Tensor:
    """Integers as a tensor of one dimension, on the device that is torch's default."""
    made = torch.from_numpy(np.atleast_1d(np.asarray(values, np.int64)))
    return made.to(torch.get_default_device(), non_blocking=True)


def labelled_sets(n: int, seed: int, most: int, features: int, classes: int) -> list[Item]:
    """Sets of 4 to ``most`` tokens, ``x``, with the class that their sum has most of as label."""
    random, fixed = np.random.default_rng(seed), np.random.default_rng(0)
    centre, items = fixed.standard_normal((features, classes)), []
    for _ in range(n):
        x = random.standard_normal((random.integers(4, most + 1), features)).astype(np.float32)
        items.append({"x": x, "label": int((x @ centre).sum(0).argmax())})
    return items


def instance_of_set(item: Item, dtype: torch.dtype) -> gt.Instance:
    """What a graph with the values ``label`` and ``tokens`` is fed for one of them."""
    value = {"label": item["label"], "tokens": len(item["x"])}
    return gt.Instance({"x": torch.from_numpy(item["x"]).to(dtype)}, value=value)


def parents_at_random(random: np.random.Generator, n: int, reach: int) -> NDArray[np.int64]:
    """Parents of n vertices, children before parents: each is within ``reach`` of its child."""
    parent = np.arange(n) + random.integers(1, reach + 1, n)
    parent = np.minimum(parent, n - 1)
    parent[-1] = -1
    return parent


def binary_tree(
    random: np.random.Generator, leaves: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Parents and slots (0 left, 1 right) of a random binary tree; leaves first, the root last."""
    n = 2 * leaves - 1
    parent, slot = np.full(n, -1), np.zeros(n, np.int64)
    open_, made = list(range(leaves)), leaves
    while len(open_) > 1:
        at = int(random.integers(0, len(open_) - 1))
        for k in (0, 1):
            parent[open_[at + k]], slot[open_[at + k]] = made, k
        open_[at : at + 2] = [made]
        made += 1
    return parent, slot


def heights(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Levels from the leaves, children having smaller numbers than their parents."""
    found = np.zeros(parent.size, np.int64)
    for v, p in enumerate(parent.tolist()):
        if p >= 0 and found[p] <= found[v]:
            found[p] = found[v] + 1
    return found


def joined(items: Sequence[Item], name: str) -> NDArray[Any]:
    """A column of all items, one below the other."""
    return np.concatenate([item[name] for item in items])


def offsets_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each begins."""
    return np.cumsum(sizes) - sizes


@final
class Levels:
    """The vertices of a batch of trees by their height; what goes up lies ready where it is wanted.

    A level is sorted by its parents' levels, so what each sends is cut into pieces without a copy,
    and what a level receives is one ``cat``.

    Args:
        items: With ``parent`` and ``level``.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        sizes = np.array([item["parent"].size for item in items])
        level, parent = joined(items, "level"), joined(items, "parent")
        root = parent < 0
        self.parent = np.where(root, -1, parent + offsets_of(sizes).repeat(sizes))
        self.item = np.arange(sizes.size).repeat(sizes)
        self.count = int(level.max()) + 1
        above = np.where(root, self.count, level[self.parent])
        order = np.lexsort((above, level))
        counts = np.bincount(level)
        self._rows = np.split(order, counts.cumsum()[:-1])
        self._place = np.empty_like(order)
        self._place[order] = np.arange(order.size) - offsets_of(counts).repeat(counts)
        coming = order[np.argsort(above[order], kind="stable")]
        self._coming = np.split(coming, np.bincount(above).cumsum()[:-1])
        self._above = above
        self._inbox: list[list[tuple[Tensor, ...]]] = [[] for _ in range(self.count + 1)]

    def rows(self, level: int) -> NDArray[np.int64]:
        """The vertices of a level, in the order in which they are to be computed."""
        return self._rows[level]

    def coming(self, level: int) -> NDArray[np.int64]:
        """The vertices that have sent something to a level; beyond the last level: the roots."""
        return self._coming[level]

    def at(self, vertices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where vertices are in the order of their level."""
        return self._place[vertices]

    def send(self, level: int, *state: Tensor) -> None:
        """What a level has computed goes to the parents."""
        sizes = np.bincount(self._above[self._rows[level]], minlength=self.count + 1)
        to = np.flatnonzero(sizes)
        cut = [column.split(sizes[to].tolist()) for column in state]
        for k, pieces in zip(to.tolist(), zip(*cut, strict=True), strict=True):
            self._inbox[k].append(pieces)

    def receive(self, level: int) -> tuple[Tensor, ...]:
        """What ``coming(level)`` have sent, in that order."""
        found = zip(*self._inbox[level], strict=True)
        return tuple(x[0] if len(x) == 1 else torch.cat(x) for x in found)

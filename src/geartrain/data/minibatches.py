"""Minibatches as instances: rows enter a pipeline together, inputs as ``x``, targets as ``y``.

tensors      (seed, epoch) ─► order ─► rows of a minibatch ─► augment ─► Instance
DataLoader   (x, y), (x, y), ...                                       ─► Instance, Instance
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, TypeAlias, final, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from geartrain.bounds import require_whole
from geartrain.data.loader import seeded
from geartrain.errors import DataError
from geartrain.frames.instance import Instance
from geartrain.kinds import require_kind, require_truth

Augment: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]


@final
class Minibatches(Sequence[Instance]):
    """Tensors cut into minibatches, an instance each; the last one may be smaller.

    Args:
        x: Inputs ``(N, ...)``.
        y: Targets ``(N, ...)``; None for a prediction: they are zeros then.
        batch: Rows of a minibatch.
        seed: Deals the rows out anew for every epoch, by (seed, epoch); None leaves their order,
            and a session then shuffles whole minibatches unless it has ``shuffle=False``.
        augment: Gets the inputs of a minibatch and a generator that follows from (seed, epoch,
            minibatch), returns the inputs to train on; the same again in a resumed run.
        drop_last: Leave out a last minibatch that is smaller.

    Raises:
        DataError: No row, or inputs and targets of unequal length.
        ValueError: ``batch`` is not positive, or nothing is left with ``drop_last``.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        batch: int,
        seed: int | None = None,
        augment: Augment | None = None,
        drop_last: bool = False,
    ) -> None:
        _require_tensors("Minibatches", x, y)
        require_truth("Minibatches", drop_last=drop_last)
        wanted = "a function of inputs and a generator, or None"
        require_kind("Minibatches", Callable | None, wanted, augment=augment)
        n = len(x)
        if not n or (y is not None and len(y) != n):
            raise DataError(
                f"minibatches of {n} inputs and {n if y is None else len(y)} targets; expected "
                "equally many, one or more"
            )
        require_whole(f"batch={batch!r} of {n} rows", batch)
        if seed is not None:
            require_whole(f"Minibatches(seed={seed!r})", seed, 0, "0 or more, or None")
        if batch < 1 or (drop_last and batch > n):
            raise ValueError(f"batch={batch} of {n} rows; give 1 or more, and at most {n}")
        self._x = x
        self._y = torch.zeros(n, dtype=torch.int64) if y is None else y
        self._batch, self._seed, self._augment = batch, seed, augment
        self._count = n // batch if drop_last else -(-n // batch)
        self._order = torch.arange(n)
        self._epoch = 0
        self.set_epoch(0)

    def set_epoch(self, number: int) -> None:
        """Deal the rows out for an epoch; what was dealt before does not matter."""
        self._epoch = number
        if self._seed is not None:
            generator = np.random.default_rng((self._seed, number))
            self._order = torch.from_numpy(generator.permutation(len(self._x)))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Instance: ...
    @overload
    def __getitem__(self, at: slice) -> list[Instance]: ...
    def __getitem__(self, at: int | slice) -> Instance | list[Instance]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        rows = self._order[number * self._batch : (number + 1) * self._batch]
        x = self._x.index_select(0, rows)
        if self._augment is not None:
            x = self._augment(x, self._generator(number))
        return minibatch(x, self._y.index_select(0, rows), key=f"minibatch {number}")

    def _generator(self, number: int) -> torch.Generator:
        drawn = np.random.SeedSequence((self._seed or 0, self._epoch, number, 1))
        seed = int(drawn.generate_state(1, np.uint64)[0] >> np.uint64(1))
        return torch.Generator().manual_seed(seed)


def _require_tensors(owner: str, x: object, y: object) -> None:
    require_kind(owner, Tensor, "a tensor (n, ...) of rows", x=x)
    require_kind(owner, Tensor | None, "a tensor (n, ...) of targets, or None", y=y)
    for name, rows in (("x", x), ("y", y)):
        if isinstance(rows, Tensor) and not rows.dim():
            raise DataError(f"{owner}({name}={rows!r:.80}): give rows (n, ...)")


@final
class LoadedMinibatches:
    """The batches of a DataLoader, an instance each.

    Args:
        loader: Gives pairs of tensors ``(x (n, ...), y (n, ...))``, of any shapes.
        seed: What the loader draws follows from it and the epoch.
    """

    def __init__(self, loader: DataLoader[Any], seed: int = 0) -> None:
        wanted = "a torch DataLoader of pairs (x, y)"
        require_kind("LoadedMinibatches", DataLoader, wanted, loader=loader)
        require_whole(f"LoadedMinibatches(seed={seed!r})", seed, 0)
        self._loader, self._seed, self._epoch = loader, seed, 0

    def set_epoch(self, number: int) -> None:
        """The order, and what the data draw, of an epoch."""
        self._epoch = number
        if (tell := getattr(self._loader.sampler, "set_epoch", None)) is not None:
            tell(number)

    def __len__(self) -> int:
        assert isinstance(self._loader, Sized)
        return len(self._loader)

    def __iter__(self) -> Iterator[Instance]:
        with torch.random.fork_rng(devices=[]), seeded(self._loader, self._seed, self._epoch):
            batches = iter(self._loader)
            first = list(itertools.islice(batches, 1))  # a sampler draws when it is first asked
        for number, batch in enumerate(itertools.chain(first, batches)):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise DataError(
                    f"batch {number} of the DataLoader is {type(batch).__name__}; it gives pairs "
                    "(x, y) of tensors: use a dataset of pairs and the default collate_fn"
                )
            yield minibatch(batch[0], batch[1], key=f"minibatch {number}")


def minibatch(x: Tensor, y: Tensor, key: object = None) -> Instance:
    """Rows that travel together.

    Args:
        x: Inputs ``(n, ...)``.
        y: Targets ``(n, ...)``.
        key: What errors call it.

    Raises:
        DataError: They are no tensors, or of unequal length.
    """
    for name, rows in (("x", x), ("y", y)):
        if not isinstance(rows, Tensor) or not rows.ndim or not len(rows):
            came = tuple(rows.shape) if isinstance(rows, Tensor) else f"{rows!r:.80}"
            raise DataError(f"{key or 'minibatch'}: {name} is {came}: give rows (n, ...)")
    if len(x) != len(y):
        raise DataError(
            f"{key or 'minibatch'}: {len(x)} inputs and {len(y)} targets; one for each row"
        )
    return Instance({"x": x, "y": y}, key=key)

"""Where instances come from: any iterable, a Dataset, a DataLoader, in an order set by the seed.

Sequence or map-style Dataset   shuffled by (seed, epoch); an epoch can be resumed anywhere
DataLoader                      its own order; batches are taken apart (collate_fn=list)
any other iterable              its own order; resuming skips what was seen
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeAlias, final

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from geartrain.ir.instance import Instance

Data: TypeAlias = Iterable[Any]
Convert: TypeAlias = Callable[[Any], Instance]


@final
class Source:
    """Instances of one pass after the other.

    Args:
        data: See above; items are ``Instance`` unless ``convert`` makes them.
        convert: Item to ``Instance``, called when the item is admitted.
        shuffle: Whether map-style data are shuffled.
        seed: Of the order.
    """

    def __init__(
        self, data: Data, convert: Convert | None = None, *, shuffle: bool = False, seed: int = 0
    ) -> None:
        self._data, self._convert = data, convert
        self._shuffle, self._seed = shuffle, seed
        self._map_style = (
            hasattr(data, "__getitem__")
            and isinstance(data, Sized)
            and not isinstance(data, (DataLoader, IterableDataset, dict, str))
        )
        if not self._map_style and iter(data) is data:
            raise TypeError(
                f"the data is a {type(data).__name__}, which can be read once only; give a list, a "
                "Dataset, a DataLoader, or an object whose __iter__ starts anew for every epoch"
            )

    def __len__(self) -> int:
        """Instances in a pass.

        Raises:
            TypeError: The data does not know.
        """
        if isinstance(self._data, DataLoader):
            return len(self._data.dataset)  # type: ignore[arg-type]
        return len(self._data)  # type: ignore[arg-type]

    @property
    def length(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None

    def epoch(self, number: int, start: int = 0) -> Iterator[Instance]:
        """The instances of an epoch, from position ``start`` on."""
        items = self._items(number, start)
        return items if self._convert is None else map(self._convert, items)

    def _items(self, number: int, start: int) -> Iterator[Any]:
        if not self._map_style:
            return itertools.islice(_flat(self._data), start, None)
        data: Any = self._data
        if not self._shuffle:
            return (data[i] for i in range(start, len(data)))
        order = np.random.default_rng((self._seed, number)).permutation(len(data))
        return (data[i] for i in order[start:].tolist())


def _flat(data: Iterable[Any]) -> Iterator[Any]:
    """Items; lists and tuples of them, as a DataLoader gives, are taken apart."""
    for item in data:
        if isinstance(item, (list, tuple)):
            yield from item
        else:
            yield item

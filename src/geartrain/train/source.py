"""Where instances come from: any iterable, a Dataset, a DataLoader, in an order set by the seed.

list, map-style Dataset   shuffled by (seed, epoch); an epoch can be resumed anywhere; if it has a
                          ``set_epoch``, it is told the epoch first, to draw its items anew
DataLoader                what it gives, batches taken apart; its shuffling follows (seed, epoch)
any other iterable        its own order, after ``set_epoch`` if it has one; resuming skips what was
                          seen
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, Final, TypeAlias, final

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_collate

from geartrain.data.loader import seeded
from geartrain.errors import DataError
from geartrain.frames.columns import Columns
from geartrain.frames.instance import InOrder, Instance, stopped
from geartrain.runtime.interrupt import asks_data
from geartrain.train.random_state import random_state_kept

Data: TypeAlias = Iterable[Any]
Convert: TypeAlias = Callable[..., Instance]
"""Item to instance: ``convert(item)``, or ``convert(item, epoch)`` by the name of its parameter."""


@final
class Source:
    """Instances of one pass after the other.

    A failing item (``convert`` or ``__getitem__`` raises) does not end the pass of a list or
    Dataset: whoever pulls may skip it and pull on.

    Args:
        data: See above; items are ``Instance`` unless ``convert`` makes them.
        convert: Item to ``Instance``, called when the item is admitted. If it has a parameter named
            ``epoch``, it is told the number of the epoch, from 1; outside of training 0.
        shuffle: Whether lists and map-style datasets are shuffled.
        seed: Of the order.

    Raises:
        TypeError: The data can be read once only or not at all, or a DataLoader collates into
            tensors.
    """

    def __init__(
        self, data: Data, convert: Convert | None = None, *, shuffle: bool = False, seed: int = 0
    ) -> None:
        self._data, self._convert = data, convert
        self._tells_epoch = convert is not None and _has_epoch(convert)
        self._shuffle, self._seed = shuffle, seed
        self._map_style = (
            hasattr(data, "__getitem__")
            and isinstance(data, Sized)
            and not isinstance(data, DataLoader | IterableDataset | dict | str)
        )
        if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
            raise TypeError(
                f"the data is a {type(data).__name__}; give instances: a list of them, a Dataset, "
                "a DataLoader, or an object whose __iter__ starts anew for every epoch"
            )
        if isinstance(data, Iterator):
            raise TypeError(
                f"the data is a {type(data).__name__}, which can be read once only; give a list, a "
                "Dataset, a DataLoader, or an object whose __iter__ starts anew for every epoch"
            )
        if isinstance(data, DataLoader) and _batched(data) and data.collate_fn is default_collate:
            raise TypeError(
                "the DataLoader collates items into tensors, but instances stay single (they are "
                "batched node by node); build it with collate_fn=list"
            )

    def __len__(self) -> int:
        """Instances in a pass.

        Raises:
            TypeError: The data does not know.
        """
        if isinstance(self._data, DataLoader):
            return _loader_length(self._data)
        return len(self._data)  # type: ignore[arg-type]

    @property
    def length(self) -> int | None:
        """The same, or None."""
        try:
            return len(self)
        except TypeError:
            return None

    @asks_data
    def epoch(self, number: int, start: int = 0) -> Iterator[Instance]:
        """The instances of an epoch, from position ``start`` on.

        Finding the place disturbs no random generator.

        Raises:
            DataError: The data end before it.
        """
        return self._converted(self._items(number, start), number)

    def require_whole(self, taken: int, what: str) -> None:
        """After a pass; one over items by their places cannot end too early.

        Args:
            taken: Instances that it gave, refused ones among them.
            what: The pass.

        Raises:
            DataError: They are fewer than the data say that they have.
        """
        length = None if self._map_style else self.length
        if length is not None and taken < length:
            raise DataError(
                f"{what} ended after {taken} of {length} instances, which is the length that the "
                f"{type(self._data).__name__} has; find out why it ends too early, or let it have "
                "the length that it gives"
            )

    def shard(self, number: int, copy: int, copies: int, start: int = 0) -> Iterator[Instance]:
        """Every so-many-th instance of an epoch's order.

        Args:
            number: The epoch.
            copy: The first of them; those that follow are ``copies`` apart.
            copies: Shards.
            start: Position within the shard to begin with.
        """
        items = self._in_order(self._order(number)[copy::copies][start:])
        return self._converted(items, number)

    def require_shards(self, copies: int) -> None:
        """Raises:
        ValueError: The data cannot be cut into so many shards, or one would have no instance.
        """
        if not self._map_style:
            raise ValueError(
                f"shards='static' wants data with a length and places, not a "
                f"{type(self._data).__name__}; give a list or a Dataset, or use shards='pull'"
            )
        if len(self) < copies:
            raise ValueError(
                f"{copies} copies and {len(self)} instances: {copies - len(self)} shards would "
                "have no data; use fewer copies, more instances (smaller minibatches), or "
                "shards='pull'"
            )

    def require_start(self, start: int) -> None:
        """Raises:
        DataError: Data with places have fewer instances.
        """
        if self._map_style and start > len(self):
            raise _ends_before(start, len(self))

    def _in_order(self, order: Any) -> Iterator[Any]:
        """Items of map-style data at these places."""
        data: Any = self._data
        if type(data) in (list, tuple, Columns):
            return InOrder(data, order)
        return map(_not_the_end(data.__getitem__), order)

    def _converted(self, items: Iterator[Any], number: int) -> Iterator[Instance]:
        if self._convert is None:
            return items
        told = partial(self._convert, epoch=number) if self._tells_epoch else self._convert
        return map(_not_the_end(told), items)

    def _order(self, number: int) -> Any:
        """Places in map-style data, in the order of an epoch."""
        data: Any = self._data
        if not self._shuffle:
            return range(len(data))
        generator = np.random.default_rng((self._seed, number))
        order = generator.permutation(len(data))
        return order if type(data) is Columns else order.tolist()

    def begin(self, number: int) -> None:
        """Tell data with a ``set_epoch`` which epoch its shards will be of."""
        if (set_epoch := getattr(self._data, "set_epoch", None)) is not None:
            set_epoch(number)

    def _items(self, number: int, start: int) -> Iterator[Any]:
        data: Any = self._data
        if (set_epoch := getattr(data, "set_epoch", None)) is not None:
            set_epoch(number)
        if self._map_style:
            self.require_start(start)
            return self._in_order(self._order(number)[start:])
        with random_state_kept():
            if isinstance(data, DataLoader):
                return self._loaded(data, number, start)
            items: Iterator[Any] = iter(data)
            _skip(items, start)
            return items

    def _loaded(self, loader: DataLoader[Any], number: int, start: int) -> Iterator[Any]:
        set_epoch = getattr(loader.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(number)
        with seeded(loader, self._seed, number):
            batches = iter(loader)
            items = _apart(batches) if _batched(loader) else iter(batches)
            _skip(items, start)
            first = list(itertools.islice(items, 1))  # a sampler draws when it is first asked
        return itertools.chain(first, items)


def _not_the_end(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function; a ``StopIteration`` in it is an error, not the end of the data."""

    def call(item: Any) -> Any:
        try:
            return function(item)
        except StopIteration as error:
            plain = function.func if isinstance(function, partial) else function
            called = getattr(plain, "__qualname__", repr(plain))
            raise stopped(f"{called}({_short(item)})") from error

    return call


def _short(item: Any) -> str:
    return repr(item) if isinstance(item, int | str) else type(item).__name__


def _has_epoch(convert: Convert) -> bool:
    """Whether it asks for the epoch; what has no signature to look at does not."""
    try:
        found = inspect.signature(convert).parameters.get("epoch")
    except (TypeError, ValueError):
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def _skip(items: Iterator[Any], n: int) -> None:
    if n and next(itertools.islice(items, n - 1, n), _NOTHING) is _NOTHING:
        raise _ends_before(n, "fewer")


_NOTHING: Final = object()


def _ends_before(start: int, length: int | str) -> DataError:
    return DataError(
        f"{start} instances of this epoch were trained before, and the data have {length}: they "
        "are not those that training began with; give it those, or load the checkpoint with "
        "weights_only=True and begin anew"
    )


def _batched(loader: DataLoader[Any]) -> bool:
    return loader.batch_sampler is not None


def _loader_length(loader: DataLoader[Any]) -> int:
    if not _batched(loader):
        return len(loader)
    if loader.batch_size is None:
        raise TypeError("a batch sampler says how many batches it has, and not how large they are")
    if isinstance(loader.dataset, IterableDataset):
        return len(loader.dataset)  # type: ignore[arg-type]
    if loader.drop_last:
        return len(loader) * loader.batch_size
    return len(loader.sampler)  # type: ignore[arg-type]


def _apart(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        if not isinstance(batch, list | tuple):
            raise TypeError(
                f"the DataLoader gave a batch of type {type(batch).__name__}; it gives lists of "
                "items: build it with collate_fn=list"
            )
        yield from batch

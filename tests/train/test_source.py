"""Any data, epoch by epoch, in an order that can be found again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import geartrain as gt
from geartrain.train.source import Source
from tests.rigs.sessions import session_of


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == 3 and self.n == 5:
            raise gt.DataError("three")
        return i


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Again:
    def __iter__(self):
        return iter([(1, 2), (3, 4)])


def taken(source, epoch=1, start=0):
    return list(source.epoch(epoch, start))


def loader(**options):
    return DataLoader(Numbers(10), **{"collate_fn": list, "batch_size": 3, **options})


@pytest.mark.parametrize(
    "data",
    [
        list(range(10)),
        Numbers(10),
        np.arange(10),
        loader(),
        loader(batch_size=None, collate_fn=None),
        Stream(),
    ],
)
def test_every_kind_of_data_gives_its_items_in_order_and_from_anywhere(data):
    source = Source(data)
    assert [int(i) for i in taken(source)] == list(range(10))
    assert [int(i) for i in taken(source, epoch=2, start=7)] == [7, 8, 9]
    assert taken(source, start=10) == []


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (list(range(10)), {"shuffle": True}),
        (loader(shuffle=True), {}),
        (loader(shuffle=True, generator=torch.Generator().manual_seed(5)), {}),
        (loader(sampler=RandomSampler(range(10), generator=torch.Generator())), {}),
        (loader(shuffle=True, batch_size=1), {}),
    ],
)
def test_the_order_of_an_epoch_is_a_function_of_seed_and_epoch(data, options):
    orders = {
        (seed, epoch): taken(Source(data, seed=seed, **options), epoch)
        for seed in (0, 1)
        for epoch in (1, 2)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(sorted(order) == list(range(10)) for order in orders.values())
    torch.manual_seed(99)  # nothing that others draw changes it
    for (seed, epoch), order in reversed(orders.items()):
        source = Source(data, seed=seed, **options)
        assert taken(source, epoch) == order
        assert taken(source, epoch, start=4) == order[4:]


@pytest.mark.parametrize("data", [list(range(10)), loader(shuffle=True), Stream()])
def test_finding_the_place_disturbs_no_random_generator(data):
    torch.manual_seed(12345)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    taken(Source(data, shuffle=True), start=5)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_tuples_of_other_iterables_are_items_not_batches():
    assert taken(Source(Again())) == [(1, 2), (3, 4)]
    assert taken(Source(Again(), convert=sum)) == [3, 7]


def test_a_sampler_that_wants_the_epoch_is_told():
    class Sampler(RandomSampler):
        told = None

        def set_epoch(self, epoch):
            self.told = epoch

    sampler = Sampler(range(10))
    taken(Source(loader(sampler=sampler)), epoch=4)
    assert sampler.told == 4


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (list(range(10)), 10),
        (loader(), 10),
        (loader(drop_last=True), 9),
        (loader(batch_size=None, collate_fn=None), 10),
        (loader(sampler=range(4)), 4),
        (Again(), None),
        (DataLoader(Stream(), batch_size=2, collate_fn=list), None),
    ],
)
def test_the_length_counts_instances_where_the_data_knows_it(data, length):
    source = Source(data)
    assert source.length == length
    assert length is None or len(taken(source)) == length


def test_what_can_be_read_once_only_is_refused():
    for once in ((i for i in [1]), iter([1]), map(int, ["1"])):
        with pytest.raises(TypeError, match="can be read once only"):
            Source(once)


def test_a_loader_that_makes_tensors_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match="collate_fn=list"):
        Source(DataLoader(Numbers(10), batch_size=3))
    with pytest.raises(TypeError, match=r"batch of type Tensor.*collate_fn=list"):
        taken(Source(loader(collate_fn=torch.tensor)))


def test_an_item_that_fails_does_not_end_the_pass():
    items = Source(Numbers(5)).epoch(1)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(gt.DataError, match="three"):
        next(items)
    assert list(items) == [4]


def test_a_list_that_draws_its_items_anew_is_told_the_epoch() -> None:
    class Deals:
        def __init__(self) -> None:
            self.epoch = -1

        def set_epoch(self, number: int) -> None:
            self.epoch = number

        def __len__(self) -> int:
            return 3

        def __getitem__(self, at: int) -> str:
            return f"{self.epoch}.{at}"

    source = Source(Deals())
    assert list(source.epoch(4)) == ["4.0", "4.1", "4.2"]
    assert list(source.epoch(2, start=1)) == ["2.1", "2.2"]


@pytest.mark.parametrize("data", [list(range(10)), Numbers(10), loader(), Again()])
def test_data_that_end_before_the_place_to_go_on_from_are_refused(data) -> None:
    source = Source(data, convert=lambda item: item)
    length = len(list(source.epoch(1)))
    assert list(source.epoch(1, length)) == []
    with pytest.raises(
        gt.DataError, match=f"{length + 1} instances of this epoch .* the data have"
    ):
        source.epoch(1, length + 1)


class Stopping(Dataset):
    """Its 59th item asks an iterator that has nothing left."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, i: int) -> gt.Instance:
        return next(iter([gt.Instance({"x": torch.zeros(1, 2)})] if i != 58 else []))


class Short:
    """Says that it has 300 instances, and gives 58."""

    def __len__(self) -> int:
        return 300

    def __iter__(self):
        return iter([gt.Instance({"x": torch.zeros(1, 2)})] * 58)


def session(**given) -> gt.Session:
    graph = gt.Graph()
    graph.input("x").through(torch.nn.Linear(2, 1), name="map").loss(lambda y: y.square().sum(1))
    return session_of(graph, shuffle=False, **given)


class ShortStream(IterableDataset):
    def __len__(self) -> int:
        return 300

    def __iter__(self):
        return iter(Short())


class Calling:
    """An instance's key that has nothing left to give."""

    def __call__(self, i: int) -> object:
        return next(iter([i] if i != 58 else []))


LENGTHS = np.ones(300, np.int64)


@pytest.mark.parametrize(
    ("data", "convert", "named"),
    [
        (Stopping(), None, r"Stopping.__getitem__\(58\) raised StopIteration"),
        (list(range(300)), lambda i: Stopping()[i], r"<lambda>\(58\) raised StopIteration"),
        (
            gt.Columns(LENGTHS, {"x": torch.zeros(300, 2)}, called=Calling()),
            None,
            "item 58 of a Columns raised StopIteration",
        ),
        (Short(), None, "ended after 58 of 300 instances, which is the length that the Short has"),
        (
            DataLoader(ShortStream(), batch_size=7, collate_fn=list),
            None,
            "ended after 58 of 300 instances",
        ),
    ],
    ids=["item", "convert", "key", "iterable", "loader"],
)
@pytest.mark.parametrize("use", ["fit", "evaluate", "predict"])
def test_nothing_ends_an_epoch_before_its_length(data, convert, named, use):
    made = session(convert=convert)
    with pytest.raises(gt.DataError, match=named):
        made.fit(data, epochs=1) if use == "fit" else getattr(made, use)(data)


def test_an_item_that_stops_may_be_skipped_and_the_others_are_trained() -> None:
    fit = session(on_bad="skip").fit(Stopping(), epochs=1)
    assert (fit.instances, fit.skipped) == (299, 1)


def test_copies_do_not_begin_their_shards_anew_where_an_item_stops() -> None:
    made = session(sharing=gt.Neighbours(copies=2), runtime=gt.Simulated(2))
    with pytest.raises(gt.DataError, match=r"__getitem__\(58\) raised StopIteration"):
        made.fit(Stopping(), epochs=1)


def test_batches_of_unknown_sizes_have_no_length() -> None:
    batches = [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9]]
    source = Source(DataLoader(Numbers(10), batch_sampler=batches, collate_fn=list))
    assert source.length is None and taken(source) == list(range(10))

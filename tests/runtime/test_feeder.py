"""The feeder: lists are packed ahead, and nobody can tell but by the clock."""

from __future__ import annotations

import logging

import pytest
import torch

from geartrain.engine.controller import Ramp
from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.errors import DataError
from geartrain.frames.instance import InOrder, Instance
from geartrain.frames.packed import Packed
from geartrain.frames.packer import Packer
from geartrain.graph.graph import Graph
from geartrain.runtime import base
from geartrain.runtime.base import Feeder, PackedAhead

N = 300


def engine(max_active: int = 50) -> Engine:
    made = Graph()
    made.input("x").through(torch.sin, name="sin").stop()
    ready = Engine(made, {}, Settings(max_active=max_active, ramp=Ramp(over=0)))
    ready.begin(train=True)
    return ready


def rows(bad: int | None = None, width: int = 2) -> list[Instance]:
    return [
        Instance({"x": torch.full((1, width), float("nan") if i == bad else float(i))}, key=i)
        for i in range(N)
    ]


def fed(feeder: Feeder, ready: Engine, most: int = 50) -> list[int]:
    """What is admitted, every instance finishing at once."""
    found: list[int] = []
    while (out := feeder.admit(ready)) is not None:
        for delivery in out.deliveries:
            found += [int(v) for v in delivery.batch.payload[0][:, 0]]
            out.answered.append(delivery.batch.state[0])
        assert ready.controller.active <= most
        ready.controller.settle(out)
    return found


@pytest.mark.parametrize("width", [2, 30_000])
def test_a_list_is_fed_in_its_order_whatever_the_blocks(width):
    order = list(range(N))[::-1]
    feeder = Feeder(InOrder(rows(width=width), order))
    assert fed(feeder, engine()) == order
    assert (feeder.taken, feeder.source_ended) == (N, True)


@pytest.mark.parametrize(
    ("together", "blocks"), [(4, [4, 16, 64, 216]), (50, [50, 200, 50]), (300, [300])]
)
def test_the_first_instances_wait_for_few_others(together, blocks, monkeypatch):
    packed: list[int] = []
    pack = Packer.pack

    def seen(self: Packer, instances: list[Instance]) -> Packed:
        packed.append(len(instances))
        return pack(self, instances)

    monkeypatch.setattr(Packer, "pack", seen)
    assert fed(Feeder(InOrder(rows(), range(N))), engine(together), together) == [*range(N)]
    assert packed == blocks


def test_no_few_of_a_block_are_left_to_go_by_themselves(monkeypatch):
    monkeypatch.setattr(base, "_BLOCK", 100)
    sizes: list[int] = []
    take = PackedAhead.take

    def taking(self: PackedAhead, n: int, packer: Packer) -> Packed | None:
        found = take(self, n, packer)
        sizes.extend([] if found is None else [len(found)])
        return found

    monkeypatch.setattr(PackedAhead, "take", taking)
    assert fed(Feeder(InOrder(rows(), range(N))), engine(30), 30) == [*range(N)]
    assert sizes == [30] * (N // 30)


def test_what_is_made_ready_before_a_pass_is_fed_like_any_other(monkeypatch):
    found: list[int] = []
    pack = Packer.pack

    def counting(self: Packer, instances: list[Instance]) -> Packed:
        found.append(len(instances))
        return pack(self, instances)

    monkeypatch.setattr(Packer, "pack", counting)
    feeder, ready = Feeder(InOrder(rows(), range(N))), engine()
    feeder.look_ahead(ready)
    feeder.look_ahead(ready)
    assert found == [50] and feeder.taken == 0 and feeder.left == N
    assert fed(feeder, ready) == list(range(N))
    assert found == [50, 200, 50]


@pytest.mark.parametrize("kind", [list, iter])
def test_nothing_is_made_ready_where_nothing_is_to_come_or_nobody_may_look(kind):
    feeder = Feeder(InOrder(rows(), []) if kind is list else iter(rows()))
    feeder.look_ahead(engine())
    assert feeder.taken == 0


def test_what_is_wrong_with_what_is_made_ready_is_told_at_its_place():
    feeder = Feeder(InOrder(rows(bad=30), range(N)))
    ready = engine(20)
    feeder.look_ahead(ready)
    with pytest.raises(DataError, match="30"):
        fed(feeder, ready)


def test_what_is_left_of_a_list_is_known_and_of_what_is_none_it_is_not():
    ready = engine()
    feeder = Feeder(InOrder(rows(), range(N)))
    assert feeder.left == N
    feeder.admit(ready)  # fifty of a block
    assert feeder.left == N - 50
    feeder.close()
    assert feeder.left == 0
    cut = Feeder(InOrder(rows(), range(N)), limit=70)
    assert cut.left == 70
    cut.admit(engine())
    assert cut.left == 20
    assert Feeder(iter(rows())).left == 0


def test_limits_cut_a_list_without_losing_or_repeating_any():
    source, found = InOrder(rows(), range(N)), []
    for limit in (1, 70, 130, None):
        feeder = Feeder(source, limit=limit)
        found.append(fed(feeder, engine()))
        assert feeder.exhausted and feeder.source_ended == (limit is None)
    assert [len(f) for f in found] == [1, 70, 130, 99]
    assert [i for some in found for i in some] == list(range(N))


def test_what_is_wrong_in_a_block_is_told_at_its_place():
    ready, feeder = engine(), Feeder(InOrder(rows(bad=120), range(N)))
    with pytest.raises(DataError, match="instance 120: input 'x' holds NaN"):
        fed(feeder, ready)
    assert ready.controller.finished == 100  # two admissions of 50 went before


def test_one_that_is_skipped_takes_no_other_with_it(caplog):
    ready, feeder = engine(), Feeder(InOrder(rows(bad=120), range(N)), "skip")
    with caplog.at_level(logging.WARNING, "geartrain.runtime"):
        assert fed(feeder, ready) == [i for i in range(N) if i != 120]
    assert (feeder.taken, feeder.skipped) == (N, 1)
    assert "instance 120" in caplog.text


def test_items_of_a_list_that_are_no_instances_are_named():
    with pytest.raises(DataError, match=r"the data gave a dict; it gives gt\.Instance"):
        fed(Feeder(InOrder([*rows(), {}], range(N + 1))), engine())


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("lock", [True, False], ids=["on the way out of a lock", "bare"])
def test_an_interrupt_ends_data_that_are_waited_for_no_more_and_nothing_else(lock, closed):
    """``threading.Condition`` raises RuntimeError where it is interrupted as it lets go."""

    def data():
        yield from rows()[:2]
        feeder.closed = closed
        try:
            raise KeyboardInterrupt
        finally:
            if lock:
                raise RuntimeError("release unlocked lock")

    feeder = Feeder(data())
    if not closed:
        with pytest.raises(RuntimeError if lock else KeyboardInterrupt):
            feeder.admit(engine())
    else:
        assert fed(feeder, engine()) == []
        assert feeder.taken == 0


def test_an_error_of_data_that_are_waited_for_no_more_is_raised():
    def data():
        yield rows()[0]
        feeder.closed = True
        raise RuntimeError("of the data")

    feeder = Feeder(data())
    with pytest.raises(RuntimeError, match="of the data"):
        feeder.admit(engine())


def test_who_ends_a_thread_whose_data_have_answered_too_late_is_not_held_up():
    class LeftBehind(BaseException):
        pass

    class Outside:
        def __enter__(self) -> None:
            feeder.closed = True

        def __exit__(self, *raised: object) -> None:
            raise LeftBehind

    def data():
        raise KeyboardInterrupt
        yield

    feeder = Feeder(data())
    feeder.surround(Outside())
    with pytest.raises(LeftBehind):
        feeder.admit(engine())

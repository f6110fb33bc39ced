"""How many instances are given to a worker together, where they live wholly on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.frames.packed import Packed
from geartrain.runtime.base import AbstractRuntime, PackedAhead
from geartrain.runtime.processes import parent, stocking
from geartrain.runtime.processes.handing import Handing
from geartrain.runtime.processes.lots import worth_a_lot
from geartrain.runtime.processes.messages import Kind
from geartrain.sharing.assignment import Stocked, Together
from geartrain.transport.link import Transport
from geartrain.transport.record import Record
from tests.rigs.pairs import pass_of_two
from tests.rigs.passes import hosts, processes

MANY = 1_000_000


def test_a_lot_is_what_a_worker_does_in_a_quarter_of_a_second() -> None:
    assert worth_a_lot(1600, 2.0, MANY, 2, 8) == 100
    assert worth_a_lot(3200, 2.0, MANY, 4, 8) == 100
    assert worth_a_lot(3, 20.0, MANY, 2, 8) == 0  # each takes long


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_workers_that_are_more_than_the_cores_have_lots_as_large_as_with_one_each(
    workers: int,
) -> None:
    """With less of a core each, so many more messages would go for the same instances."""
    assert worth_a_lot(1600, 2.0, MANY, workers, 2) == 100
    assert worth_a_lot(1600, 2.0, MANY, workers, 1) == 200
    assert worth_a_lot(1600, 2.0, MANY, workers, workers) == 200 // workers
    assert worth_a_lot(1600, 2.0, 90, workers, 2) == 90 // (workers + 1)  # and end together


def test_little_is_known_at_the_beginning_and_lots_are_bounded() -> None:
    assert worth_a_lot(0, 0.0, MANY, 2, 8) == 0
    assert worth_a_lot(10, 1e-4, MANY, 2, 8) == 12  # as if it had been a tenth of a second
    assert worth_a_lot(MANY, 0.1, MANY, 2, 8) == 1024


@pytest.mark.parametrize(("left", "lot"), [(300, 100), (299, 99), (30, 10), (2, 0), (0, 0)])
def test_towards_the_end_lots_are_a_share_of_what_is_left(left: int, lot: int) -> None:
    assert worth_a_lot(4000, 2.0, left, 2, 8) == lot


def test_whoever_gets_a_lot_towards_the_end_leaves_as_much_to_each_of_the_others() -> None:
    for workers in (2, 3, 8):
        left = 999
        lot = worth_a_lot(MANY, 2.0, left, workers, 8)
        assert 0 < workers * lot <= left - lot


def test_a_lot_of_large_rows_has_two_mebibytes_and_pipelines_have_lots_of_their_own() -> None:
    made = gt.Graph()
    made.input("x").through(torch.sin, name="sin").stop()
    engine = Engine(made, {}, Settings(max_active=8))
    engine.give_together(100, 1)
    assert isinstance(engine.controller.assignment, Together)
    assert engine.controller.assignment.lot == 1
    stocked = engine.controller.assignment = Stocked(2)
    for nbytes, lot in ((0, 100), (1 << 10, 100), (1 << 20, 2), (1 << 22, 0)):
        engine.give_together(100, nbytes)
        assert stocked.lot == lot


def test_small_instances_go_by_lots_larger_than_are_in_flight() -> None:
    """And all of them are trained, the last ones too."""
    fit, event = pass_of_two(4000, 4)
    told = sum(x.messages for x in event.links if x.sender == 2)
    assert fit.history[-1].instances == 4000
    assert told < 1000, told  # 2000 lots of two


@pytest.mark.parametrize(("runtime", "told"), [(processes, 1), (hosts, 2)])
def test_cores_are_counted_where_workers_share_a_machine(
    monkeypatch: pytest.MonkeyPatch, runtime: Callable[[int], AbstractRuntime], told: int
) -> None:
    heard: set[tuple[int, int]] = set()

    def worth(finished: int, seconds: float, left: int, workers: int, cores: int) -> int:
        heard.add((workers, cores))
        return worth_a_lot(finished, seconds, left, workers, cores)

    monkeypatch.setattr(parent, "cores", lambda: 1)
    monkeypatch.setattr(stocking, "worth_a_lot", worth)
    pass_of_two(400, 4, runtime)
    assert heard == {(2, told)}


def test_the_first_instances_are_packed_as_workers_get_ready_and_each_has_its_lot_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not when the packing of what others get is over."""
    had: list[set[int]] = []  # who has a lot, as instances are taken
    packed: list[str] = []
    lots: set[int] = set()
    send, take, pack = Transport._send, PackedAhead.take, PackedAhead._pack
    over = Handing.over

    def sending(self: Transport, to: int, record: Record, *given: Any) -> None:
        if record.kind == Kind.LOT:
            lots.add(to)
        send(self, to, record, *given)

    def taking(self: PackedAhead, *given: Any) -> Packed | None:
        had.append({*lots})
        return take(self, *given)

    def packing(self: PackedAhead, *given: Any) -> Packed | None:
        packed.append("packed")
        return pack(self, *given)

    def handed(self: Handing, *given: Any) -> None:
        over(self, *given)
        packed.append("handed over")

    monkeypatch.setattr(Transport, "_send", sending)
    monkeypatch.setattr(PackedAhead, "take", taking)
    monkeypatch.setattr(PackedAhead, "_pack", packing)
    monkeypatch.setattr(Handing, "over", handed)
    pass_of_two(200, 4)
    assert [len(some) for some in had[:3]] == [0, 1, 2]
    assert packed[:2] == ["packed", "handed over"]

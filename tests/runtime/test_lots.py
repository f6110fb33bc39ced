"""How many instances are given to a worker together, where they live wholly on one."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.engine.ahead import Ahead
from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.frames.packed import Packed
from geartrain.runtime.base import AbstractRuntime, PackedAhead
from geartrain.runtime.processes import stocking
from geartrain.runtime.processes.handing import Handing
from geartrain.runtime.processes.lots import worth_a_lot
from geartrain.runtime.processes.messages import Kind, Names, Report
from geartrain.sharing.assignment import Stocked, Together
from geartrain.transport.link import Transport
from geartrain.transport.record import Record
from tests.rigs.pairs import pass_of_two
from tests.rigs.passes import hosts, processes

MANY = 1_000_000


def test_a_lot_is_what_a_worker_does_in_a_quarter_of_a_second() -> None:
    assert worth_a_lot(1600, 4.0, MANY, 2) == 100
    assert worth_a_lot(3200, 8.0, MANY, 4) == 100
    assert worth_a_lot(3, 40.0, MANY, 2) == 0  # each takes long


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_lots_go_by_what_cores_have_done_however_many_share_them(workers: int) -> None:
    """With less of a core each, so many more messages would go for the same instances."""
    assert worth_a_lot(1600, 4.0, MANY, workers) == 100
    assert worth_a_lot(1600, 4.0, 90, workers) == 90 // (workers + 1)  # and end together


def test_little_is_known_at_the_beginning_and_lots_are_bounded() -> None:
    assert worth_a_lot(0, 0.0, MANY, 2) == 0
    assert worth_a_lot(10, 1e-4, MANY, 2) == 12  # as if it had been a fifth of a second
    assert worth_a_lot(MANY, 0.2, MANY, 2) == 4096


@pytest.mark.parametrize(("left", "lot"), [(300, 100), (299, 99), (30, 10), (2, 0), (0, 0)])
def test_towards_the_end_lots_are_a_share_of_what_is_left(left: int, lot: int) -> None:
    assert worth_a_lot(4000, 4.0, left, 2) == lot


def test_whoever_gets_a_lot_towards_the_end_leaves_as_much_to_each_of_the_others() -> None:
    for workers in (2, 3, 8):
        left = 999
        lot = worth_a_lot(MANY, 4.0, left, workers)
        assert 0 < workers * lot <= left - lot


def test_a_lot_of_large_rows_has_two_mebibytes_and_pipelines_have_lots_of_their_own() -> None:
    made = gt.Graph()
    made.input("x").through(torch.sin, name="sin").stop()
    engine = Engine(made, {}, Settings(max_active=8))
    engine.ahead.give_together(100, 1)
    assert isinstance(engine.controller.assignment, Together)
    assert engine.controller.assignment.lot == 1
    stocked = engine.controller.assignment = Stocked(2)
    for nbytes, lot in ((0, 100), (1 << 10, 100), (1 << 20, 2), (1 << 22, 0)):
        engine.ahead.give_together(100, nbytes)
        assert stocked.lot == lot


@pytest.mark.parametrize(
    ("triggers", "update"),
    [
        ([gt.Instances(4), gt.Instances(6)], 6),
        ([gt.Rows(9), gt.Instances(4)], 4),
        ([gt.Rows(9), gt.Messages(9)], 1),
        ([], 1),
    ],
)
def test_lots_are_of_whole_updates_of_parts_that_gather_instances(
    triggers: list[Any], update: int
) -> None:
    parts = {str(k): SimpleNamespace(trigger=t, once=False) for k, t in enumerate(triggers)}
    parts["once"] = SimpleNamespace(trigger=gt.Instances(50), once=True)  # counted as it comes by
    stocked = Stocked(2)
    controller: Any = SimpleNamespace(assignment=stocked)
    given: Any = parts
    sharing: Any = None
    assert Ahead(controller, Settings(), given, sharing).stock_up()
    assert stocked.update == update


def test_small_instances_go_by_lots_larger_than_are_in_flight() -> None:
    """And all of them are trained, the last ones too."""
    fit, event = pass_of_two(4000, 4)
    told = sum(x.messages for x in event.links if x.sender == 2)
    assert fit.history[-1].instances == 4000
    assert told < 1000, told  # 2000 lots of two


def lots_heard(
    monkeypatch: pytest.MonkeyPatch, runtime: Callable[[int], AbstractRuntime]
) -> list[tuple[int, float, int]]:
    """Of a pass of two workers: finished, seconds of a core, and workers, as lots are sized."""
    heard: list[tuple[int, float, int]] = []

    def worth(finished: int, seconds: float, left: int, workers: int) -> int:
        heard.append((finished, seconds, workers))
        return worth_a_lot(finished, seconds, left, workers)

    monkeypatch.setattr(stocking, "worth_a_lot", worth)
    pass_of_two(400, 4, runtime)
    return heard


@pytest.mark.parametrize("runtime", [processes, hosts])
def test_workers_tell_how_long_they_have_had_a_core(
    monkeypatch: pytest.MonkeyPatch, runtime: Callable[[int], AbstractRuntime]
) -> None:
    began = time.perf_counter()
    heard = lots_heard(monkeypatch, runtime)
    seconds = [each for _, each, _ in heard]
    assert {workers for *_, workers in heard} == {2}
    assert seconds == sorted(seconds) and seconds[0] == 0
    assert 0 < seconds[-1] < 2 * (time.perf_counter() - began)


def test_what_each_worker_has_told_last_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    of_record = Report.of_record

    def heard_as(record: Record, names: Names) -> Report:
        report = of_record(record, names)
        report.busy_s = 7.0
        return report

    monkeypatch.setattr(Report, "of_record", heard_as)
    assert lots_heard(monkeypatch, processes)[-1][1] == 14.0


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

"""The benchmark of worker processes: batches there and back, what they cost, tables."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

import geartrain as gt
from benchmarks.processes.expected import system_of
from benchmarks.processes.main import CASES, cpu_us, sharing_of
from benchmarks.processes.transport import (
    END,
    Inbox,
    answered,
    bare_us,
    batch_of,
    codec_us,
    markdown,
    one_way,
    serve,
)
from benchmarks.processes.turns import Turn, at_most, table
from geartrain.transport.link import Transport
from geartrain.transport.record import Record


def test_batches_are_sent_answered_and_counted(tmp_path: Path) -> None:
    other = threading.Thread(target=serve, args=(tmp_path,))
    other.start()
    with (
        zmq.Context() as context,
        Transport(0, 2, tmp_path) as me,
        context.socket(zmq.PUSH) as push,
    ):
        push.connect(f"ipc://{tmp_path}/bare")
        inbox = Inbox(me)
        found = one_way(inbox, 100_000, 30)
        assert found.keys() == {"rate", "sender_us", "receiver_us"}
        assert min(found.values()) > 0
        assert min(answered(inbox, 512, 5)) > 0 < bare_us(inbox, push, 512, 20)
        traffic = me.monitor()
        assert traffic.sent_messages[1] == 1 + 30 + 1 + 5 + 1
        assert traffic.sent_bytes[1] > 30 * 100_000
        me.send(1, Record(END))
        other.join(20.0)
    assert not other.is_alive()


def test_a_batch_is_as_large_as_it_says_and_the_codec_takes_it() -> None:
    for nbytes in (512, 8192):
        batch = batch_of(nbytes)
        size = batch.payload[0].nbytes + batch.state.nbytes + batch.origin.nbytes
        assert nbytes - 160 < size <= nbytes
    assert codec_us(512, repeats=2) > 0


def test_cpu_is_that_of_all_processes_for_each_instance() -> None:
    assert cpu_us({"cpu_s": [0.2, 1.0, 0.8], "instances": 4000}) == pytest.approx(500.0)


@pytest.mark.parametrize(("rate", "told"), [(19_000.0, "missed"), (21_000.0, "met")])
def test_the_table_says_whether_goals_are_met(rate: float, told: str) -> None:
    trial = {
        "rate": rate,
        "sender_us": 20.0,
        "receiver_us": 30.0,
        "codec_us": 15.0,
        "bare_us": 18.0,
        "answered_us": 60.0,
        "answered_cpu_us": 44.0,
    }
    document = {"trials": {"512": [trial], "8192": [trial, trial]}}
    lines = list(markdown(document))
    assert lines[3].startswith(f"| 8 KiB | {rate:,.0f} | ")
    assert "| 20.0 | 30.0 | 50.0 | 50.0 to 50.0 | 15.0 | 18.0 | 60 | 44.0 |" in lines[3]
    assert lines[-1].endswith(told)


def turn(*cpu_s: float, seconds: float = 4.0) -> Turn:
    return Turn([*cpu_s], [0.0] * len(cpu_s), seconds, waited_s=[1.0] * (len(cpu_s) - 1))


def test_the_busiest_process_or_all_cores_together_bound_what_workers_gain() -> None:
    one = turn(6.0)
    assert at_most(one, turn(0.5, 2.0, 1.5), cores=2) == pytest.approx(3.0)  # all: 4 s on two
    assert at_most(one, turn(0.5, 3.0, 1.5), cores=2) == pytest.approx(2.0)  # the busiest: 3 s
    assert at_most(one, turn(0.5, 2.0, 1.5), cores=1) == pytest.approx(1.5)


def test_the_table_of_turns_has_medians_bounds_and_waiting() -> None:
    found = {
        "one": [turn(6.0, seconds=6.0), turn(8.0, seconds=8.0), turn(7.0, seconds=7.0)],
        "two": [turn(0.5, 2.0, 1.5), turn(0.5, 2.0, 1.5), turn(0.5, 3.0, 1.5)],
    }
    name, one, _, two, more = table("lists", found, 2)
    assert name == "lists" and "CPU s 7.00 " in one and "at most" not in one
    assert "CPU s 0.50, 2.00, 1.50 " in two
    assert "at most x 3.00 (2.33 to 4.00)" in two
    assert "by the clock x 1.75 (1.50 to 2.00)" in two
    assert "waiting 25 %" in more
    del found["one"]
    found["hosts"] = [turn(9.0, seconds=4.0), turn(9.0, seconds=8.0), turn(9.0, seconds=5.0)]
    text = table("lists", found, 2)[3]
    assert "at most" not in text and "by the clock x 0.80 (0.50 to 1.00)" in text


@pytest.mark.parametrize(
    ("way", "case", "system"),
    [
        ("one worker", "mnist", ("one", "each")),
        ("one worker with 2 kernel threads", "qm9", ("kernels", "each")),
        ("two worker processes", "mnist", ("two", "spread")),
        ("two worker processes", "qm9", ("two", "spread")),
        ("two worker processes that share all weights", "qm9", ("two", "each")),
        ("two worker processes that share all weights", "mnist", None),
        (
            "two worker processes that share all weights and the instances in flight",
            "qm9",
            ("two", "all"),
        ),
        ("two workers as threads that share all weights", "sentiment", ("threads", "each")),
        ("two worker processes with copies of 'tree'", "sentiment", ("two", "copies of 'tree'")),
    ],
)
def test_what_is_expected_is_put_beside_the_system_that_does_it(
    way: str, case: str, system: tuple[str, str] | None
) -> None:
    assert system_of(way, case) == system


@pytest.mark.parametrize(
    ("case", "how", "workers", "sharing"),
    [
        ("qm9", "each", 1, None),
        ("qm9", "each", 2, gt.SharedWeights("each")),
        ("qm9", "all", 2, gt.SharedWeights("all")),
        ("mnist", "each", 2, None),
        ("qm9", "spread", 2, None),
    ],
)
def test_a_case_shares_its_work_as_it_is_told(case, how, workers, sharing) -> None:
    assert sharing_of(CASES[case], how, workers, 4) == sharing


def test_a_bottleneck_has_a_copy_on_each_worker() -> None:
    sharing = sharing_of(CASES["mnist"], "copies of 'linear 2'", 2, 4)
    assert isinstance(sharing, gt.PartCopies) and sharing.copies == {"linear 2": 2}

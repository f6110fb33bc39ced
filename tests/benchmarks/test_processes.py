"""The benchmark of worker processes: batches there and back, what they cost, tables."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

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
        assert answered(inbox, 512, 5) > 0 < bare_us(inbox, push, 512, 20)
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


@pytest.mark.parametrize(("rate", "told"), [(19_000.0, "missed"), (21_000.0, "met")])
def test_the_table_says_whether_goals_are_met(rate: float, told: str) -> None:
    trial = {
        "rate": rate,
        "sender_us": 20.0,
        "receiver_us": 30.0,
        "codec_us": 15.0,
        "bare_us": 18.0,
        "answered_us": 60.0,
    }
    document = {"trials": {"512": [trial], "8192": [trial, trial]}}
    lines = list(markdown(document))
    assert lines[3].startswith(f"| 8 KiB | {rate:,.0f} | ")
    assert "| 20.0 | 30.0 | 50.0 | 50.0 to 50.0 | 15.0 | 18.0 | 60 |" in lines[3]
    assert lines[-1].endswith(told)

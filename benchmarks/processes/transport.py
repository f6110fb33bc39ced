"""What a batch costs between two processes: rate one way, CPU of both ends, and there and back.

    PYTHONPATH=src python -m benchmarks.processes.transport

    codec     to_record, encode, decode and to_delivery_parts in one process, without sockets
    one way   a process sends batches as fast as it can, the other one takes them: batches/s, and
              CPU of both processes, with all of their threads, for each batch
    answered  one batch at a time, there and back: half of it, which is waking up for the most part

A batch is rows of 32 float32, three state columns and a return address, 160 bytes a row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.peers.figures import Document, Spread, machine
from geartrain.frames.message import Forward
from geartrain.transport.batches import Accepted, to_delivery_parts, to_record
from geartrain.transport.link import Transport
from geartrain.transport.record import Bounds, Record, decode, encode

SIZES: Final = (512, 8 << 10, 128 << 10, 1 << 20)
ROW_BYTES: Final = 160
COLUMNS: Final = 3
GOAL_CPU_US: Final = 60.0
GOAL_RATE: Final = 20_000.0
"""Of batches of 8 KiB."""
IN_FLIGHT: Final = 32 << 20
"""Bytes that the sender lets travel."""
ACCEPTED: Final = Accepted(frozenset({1}), COLUMNS)
TAKE, ANSWER, DONE = 20, 21, 22
"""Kinds: so many batches will come; each is to be answered; CPU seconds that they took."""


def batch_of(nbytes: int) -> Forward:
    """Rows of about so many bytes in all."""
    n = max(1, nbytes // ROW_BYTES)
    draw = torch.Generator().manual_seed(0)
    payload = torch.randn(n, 32, generator=draw)
    return Forward((payload,), np.zeros((COLUMNS, n), np.int64), np.arange(n))


def codec_us(nbytes: int, repeats: int = 2000) -> float:
    """Both ways of the codec, a batch, without the copy into and out of the sockets."""
    batch, stamp, bounds = batch_of(nbytes), np.zeros((2, 2), np.int64), Bounds(2)
    start = time.process_time()
    for _ in range(repeats):
        frames = encode(to_record(1, 0, batch), stamp, 0, 0)
        to_delivery_parts(decode([memoryview(x).cast("B") for x in frames], bounds)[1], ACCEPTED)
    return 1e6 * (time.process_time() - start) / repeats


def serve(folder: Path) -> None:
    """The other process: takes batches until it is told to end."""
    with Transport(1, 2, folder) as me:
        expected, answered, start, parent = 0, False, 0.0, os.getppid()
        while os.getppid() == parent:
            for _, record in me.poll(1.0):
                if record.kind in (TAKE, ANSWER):
                    (expected,), answered = record.ints, record.kind == ANSWER
                    start = time.process_time()
                    continue
                _, _, batch = to_delivery_parts(record, ACCEPTED)
                expected -= 1
                if answered:
                    me.send(0, to_record(1, 0, batch))
                if not expected:
                    me.send(0, Record(DONE, (), (time.process_time() - start,)))


def one_way(me: Transport, nbytes: int, count: int) -> Document:
    """``count`` batches, and what they took."""
    batch = batch_of(nbytes)
    me.send(1, Record(TAKE, (count,)))
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        while me.in_flight_bytes(1) > IN_FLIGHT:
            me.poll(1.0)
        me.send(1, to_record(1, 0, batch))
    found: list[tuple[int, Record]] = []
    while not found:
        found = me.poll(1.0)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "rate": count / seconds,
        "sender_us": 1e6 * cpu / count,
        "receiver_us": 1e6 * found[0][1].floats[0] / count,
    }


def answered(me: Transport, nbytes: int, count: int) -> float:
    """Microseconds of one way, a batch at a time."""
    batch = batch_of(nbytes)
    me.send(1, Record(ANSWER, (count,)))
    start = time.perf_counter()
    for _ in range(count):
        me.send(1, to_record(1, 0, batch))
        while not (found := me.poll(1.0)):
            pass
        to_delivery_parts(found[0][1], ACCEPTED)
    seconds = time.perf_counter() - start
    while not (found[-1][1].kind == DONE or me.poll(0.1)):
        pass
    return 1e6 * seconds / count / 2


def measure(repeats: int, count: int) -> Document:
    """All sizes, one after the other, so many times."""
    trials: dict[str, list[Document]] = {str(nbytes): [] for nbytes in SIZES}
    with tempfile.TemporaryDirectory() as folder, Transport(0, 2, Path(folder)) as me:
        other = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.processes.transport", "--serve", folder]
        )
        try:
            one_way(me, SIZES[0], 1000)
            for _ in range(repeats):
                for nbytes in SIZES:
                    some = max(count // 50, min(count, (512 << 20) // nbytes))
                    found = one_way(me, nbytes, some)
                    found["answered_us"] = answered(me, nbytes, some // 20)
                    found["codec_us"] = codec_us(nbytes)
                    trials[str(nbytes)].append(found)
        finally:
            other.send_signal(signal.SIGTERM)
            other.wait()
    return {"machine": machine(), "settings": {"repeats": repeats}, "trials": trials}


def markdown(document: Document) -> Iterator[str]:
    """The table, against the goals."""
    yield "| batch | codec, us | one way, batches/s | min to max | MiB/s | CPU us: sender | receiver | both | min to max | answered, us |"  # noqa: E501
    yield "|---" * 10 + "|"
    for name, trials in document["trials"].items():
        rates = Spread.of([trial["rate"] for trial in trials])
        both = Spread.of([trial["sender_us"] + trial["receiver_us"] for trial in trials])
        assert rates is not None and both is not None
        middle = {
            key: statistics.median(trial[key] for trial in trials)
            for key in ("codec_us", "sender_us", "receiver_us", "answered_us")
        }
        yield (
            f"| {_size(int(name))} | {middle['codec_us']:.1f} | {rates.median:,.0f} | "
            f"{rates.low:,.0f} to {rates.high:,.0f} | {rates.median * int(name) / 2**20:,.0f} | "
            f"{middle['sender_us']:.1f} | {middle['receiver_us']:.1f} | {both.median:.1f} | "
            f"{both.low:.1f} to {both.high:.1f} | {middle['answered_us']:.0f} |"
        )
        if int(name) == 8 << 10:
            goal = f"8 KiB: at most {GOAL_CPU_US:.0f} us of CPU, {GOAL_RATE:,.0f} batches/s: "
            met = both.median <= GOAL_CPU_US and rates.median >= GOAL_RATE
    yield from ("", goal + ("met" if met else "missed"))


def _size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1024 else f"{nbytes >> 10} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40_000, help="of a trial, small ones")
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve is not None:
        serve(given.serve)
        return
    document = measure(given.repeats, given.batches)
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(markdown(document)))


if __name__ == "__main__":
    main()

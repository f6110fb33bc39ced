"""What a batch costs between two processes: rate one way, CPU of both ends, and there and back.

    PYTHONPATH=src python -m benchmarks.processes.transport [--line ipc|memory|tcp|curve]

    codec     to_record, encode, decode and to_delivery_parts in one process, without sockets
    one way   a process sends batches as fast as it can, the other one takes them: batches/s, and
              CPU of both processes, with all of their threads, for each batch
    bare      the same bytes by ZeroMQ alone, without codec, order and counters: CPU of both
    answered  one batch at a time, there and back: half of it, which is waking up for the most part;
              and its CPU, of both processes with all their threads

A batch is rows of 32 float32, three state columns and a return address, 160 bytes a row.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
import zmq

from benchmarks.peers.figures import Document, Spread, machine
from geartrain.frames.message import Forward
from geartrain.transport.batches import Accepted, to_delivery_parts, to_record
from geartrain.transport.common import AREA_BYTES, Common
from geartrain.transport.keys import Keys
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
TAKE, ANSWER, BARE, DONE, END = 20, 21, 22, 23, 24
"""Kinds: so many batches will come; each is to be answered; they come by bare sockets; CPU seconds
that they took; nothing more will come."""


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


def end_of(line: str, number: int, folder: Path) -> Transport:
    """One end of a line: of socket files; of socket files and common memory, as worker processes of
    one host have it; of tcp, or of tcp with keys."""
    if line == "ipc":
        return Transport(number, 2, folder)
    if line == "memory":
        with (folder / "common").open("ab+") as file:
            os.ftruncate(file.fileno(), 2 * AREA_BYTES)
            memory = np.frombuffer(mmap.mmap(file.fileno(), 2 * AREA_BYTES), np.uint8)
        common = Common(memory, number, 2, (0, 1))
        return Transport(number, 2, folder, common=common)
    keys = Keys.make() if line == "curve" else None
    me = Transport(number, 2, "tcp://127.0.0.1:*", keys=keys, plain=keys is None)
    public = "" if keys is None else keys.public.decode()
    mine, other = folder / f"end{number}", folder / f"end{1 - number}"
    mine.with_suffix(".new").write_text(json.dumps([me.address, public]))
    mine.with_suffix(".new").rename(mine)
    while not other.exists():
        time.sleep(0.01)
    address, key = json.loads(other.read_text())
    me.connect({1 - number: address}, None if keys is None else {1 - number: key.encode()})
    me.gather(60.0)
    return me


def serve(folder: Path, line: str = "ipc") -> None:
    """The other process: takes batches until it is told to end."""
    with zmq.Context() as context, end_of(line, 1, folder) as me:
        bare = context.socket(zmq.PULL)
        bare.set_hwm(0)
        bare.bind(f"ipc://{folder}/bare")
        expected, answered, start, parent = 0, False, 0.0, os.getppid()
        while os.getppid() == parent:
            for _, record in me.poll(1.0):
                if record.kind == END:
                    bare.close()
                    return
                if record.kind == BARE:
                    me.send(0, Record(DONE, (), (take_bare(bare, *record.ints),)))
                    continue
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


@final
class Inbox:
    """What has come, one record at a time."""

    def __init__(self, me: Transport) -> None:
        self.me = me
        self._left: deque[Record] = deque()

    def next(self) -> Record:
        """The next record, waited for."""
        while not self._left:
            self._left += [record for _, record in self.me.poll(1.0)]
        return self._left.popleft()


def take_bare(pull: zmq.Socket[bytes], count: int) -> float:
    """CPU seconds of taking so many messages, as many at a time as there are."""
    start, pair = time.process_time(), [(pull, zmq.POLLIN)]
    while count:
        zmq.zmq_poll(pair, 1000)
        while count and zmq.zmq_poll(pair, 0):
            bytearray(pull.recv(copy=False).buffer)
            count -= 1
    return time.process_time() - start


def bare_us(inbox: Inbox, push: zmq.Socket[bytes], nbytes: int, count: int) -> float:
    """CPU microseconds of both processes for a message of as many bytes as a batch."""
    message, spent, left = bytes(nbytes), 0.0, count
    while left:
        some = min(left, max(1, IN_FLIGHT // nbytes))
        inbox.me.send(1, Record(BARE, (some,)))
        start = time.process_time()
        for _ in range(some):
            push.send(message, zmq.NOBLOCK)
        spent += inbox.next().floats[0] + time.process_time() - start
        left -= some
    return 1e6 * spent / count


def one_way(inbox: Inbox, nbytes: int, count: int) -> Document:
    """``count`` batches, and what they took."""
    me, batch = inbox.me, batch_of(nbytes)
    me.send(1, Record(TAKE, (count,)))
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        while me.in_flight_bytes(1) > IN_FLIGHT:
            me.poll(1.0)
        me.send(1, to_record(1, 0, batch))
    done = inbox.next()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "rate": count / seconds,
        "sender_us": 1e6 * cpu / count,
        "receiver_us": 1e6 * done.floats[0] / count,
    }


def answered(inbox: Inbox, nbytes: int, count: int) -> tuple[float, float]:
    """Microseconds of one way, a batch at a time: by the clock, and of CPU of both processes."""
    me, batch = inbox.me, batch_of(nbytes)
    me.send(1, Record(ANSWER, (count,)))
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        me.send(1, to_record(1, 0, batch))
        record = inbox.next()
        to_delivery_parts(record, ACCEPTED)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    done = inbox.next()
    return 1e6 * seconds / count / 2, 1e6 * (cpu + done.floats[0]) / count / 2


def measure(repeats: int, count: int, line: str = "ipc") -> Document:
    """All sizes, one after the other, so many times."""
    trials: dict[str, list[Document]] = {str(nbytes): [] for nbytes in SIZES}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if line == "memory" else None) as folder,
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
        ExitStack() as stack,
    ):
        push.set_hwm(0)
        push.setsockopt(zmq.LINGER, 0)
        push.connect(f"ipc://{folder}/bare")
        words = [sys.executable, "-m", "benchmarks.processes.transport", "--line", line]
        other = subprocess.Popen([*words, "--serve", folder])
        try:
            me = stack.enter_context(end_of(line, 0, Path(folder)))
            inbox = Inbox(me)
            one_way(inbox, SIZES[0], 1000)
            for _ in range(repeats):
                for nbytes in SIZES:
                    some = max(count // 50, min(count, (512 << 20) // nbytes))
                    found = one_way(inbox, nbytes, some)
                    by_clock, cpu = answered(inbox, nbytes, some // 20)
                    found |= {"answered_us": by_clock, "answered_cpu_us": cpu}
                    found["codec_us"] = codec_us(nbytes)
                    found["bare_us"] = bare_us(inbox, push, nbytes, some)
                    trials[str(nbytes)].append(found)
            me.send(1, Record(END))
            other.wait(10.0)
        finally:
            other.kill()
            other.wait()
    return {"machine": machine(), "settings": {"repeats": repeats, "line": line}, "trials": trials}


def markdown(document: Document) -> Iterator[str]:
    """The table, against the goals."""
    heads = ("batch", "one way, batches/s", "min to max", "MiB/s", "CPU, us: sender", "receiver")
    heads += ("both", "min to max", "codec, us", "bare, us", "answered, us", "CPU, us")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name, trials in document["trials"].items():
        rates = Spread.of([trial["rate"] for trial in trials])
        both = Spread.of([trial["sender_us"] + trial["receiver_us"] for trial in trials])
        assert rates is not None and both is not None
        middle = {
            key: statistics.median(trial[key] for trial in trials)
            for key in (
                *("codec_us", "sender_us", "receiver_us", "bare_us"),
                *("answered_us", "answered_cpu_us"),
            )
        }
        yield (
            f"| {_size(int(name))} | {rates.median:,.0f} | "
            f"{rates.low:,.0f} to {rates.high:,.0f} | {rates.median * int(name) / 2**20:,.0f} | "
            f"{middle['sender_us']:.1f} | {middle['receiver_us']:.1f} | {both.median:.1f} | "
            f"{both.low:.1f} to {both.high:.1f} | {middle['codec_us']:.1f} | "
            f"{middle['bare_us']:.1f} | {middle['answered_us']:.0f} | "
            f"{middle['answered_cpu_us']:.1f} |"
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
    parser.add_argument("--line", choices=("ipc", "memory", "tcp", "curve"), default="ipc")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve is not None:
        serve(given.serve, given.line)
        return
    document = measure(given.repeats, given.batches, given.line)
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(markdown(document)))


if __name__ == "__main__":
    main()

"""What a second thread is worth on this machine, for matrix products alone.

    PYTHONPATH=src python -m benchmarks.machine.main

Threads multiply matrices of their own with one kernel thread each; torch releases the interpreter
lock while they do. Where two threads are hardly faster than one, the cores that the system counts
share one core's arithmetic units, and no way of dividing a network makes its products faster.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import torch
from torch import Tensor

from geartrain.nodes.products import affine


@torch.no_grad()
def speed(threads: int, rows: int, width: int, seconds: float) -> float:
    """GFLOP/s of so many threads together.

    Args:
        threads: That multiply at the same time.
        rows: Of each product's first operand, ``(rows, width)``; the second is square.
        width: Of both.
        seconds: How long.
    """
    done = [0] * threads
    start = threading.Barrier(threads + 1)

    def work(k: int) -> None:
        torch.set_num_threads(1)
        x, weight = torch.randn(rows, width), torch.randn(width, width)
        _repeat(x, weight, seconds / 10)
        start.wait()
        done[k] = _repeat(x, weight, seconds)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    taken = time.perf_counter() - begin
    return sum(done) * 2 * rows * width * width / taken / 1e9


@torch.no_grad()
def _repeat(x: Tensor, weight: Tensor, seconds: float) -> int:
    end, n = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        affine(x, weight, None)
        n += 1
    return n


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    ratios = []
    for _ in range(given.rounds):
        one, two = (speed(k, given.rows, given.width, given.seconds) for k in (1, 2))
        ratios.append(two / one)
        print(f"one thread {one:.0f} GFLOP/s, two {two:.0f}: {two / one:.2f} times", flush=True)
    print(f"median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

"""The same network on the same minibatches, by one system; a process of its own.

    plain:K         one process, K kernel threads: forward, backward, step
    ours:N          a pipeline of two parts, a worker thread each; N whole minibatches in flight
    processes:N     the same, on two worker processes
    1f1b:M          torch.distributed.pipelining over M microbatches, two processes, gloo;
    gpipe:M         another schedule of it; interleaved:M and zerobubble:M have four parts, two a
                    process

``python -m benchmarks.pipeline.systems`` reads one request (JSON), trains to get warm and says so;
then it trains as many minibatches for each line that comes, and prints a reply (JSON). A rank of
the peer is such a process too; ``main`` starts both, and they meet on the loopback.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional as F

import geartrain as gt
from geartrain.data.cifar10 import CLASSES, channels_first, load_cifar10, standardised
from geartrain.data.mnist import load_mnist
from geartrain.data.text import Tokens, load_text
from geartrain.nn.residual import residual_network
from geartrain.nn.transformer import decoder
from geartrain_baselines.mnist import columns, make_net

SEED: Final = 0

SCHEDULES: Final[dict[str, Any]] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zerobubble": ScheduleInterleavedZeroBubble,
}
MEET_S: Final = 120.0
"""Ranks of the peer wait so long for one another."""

OF_SEVERAL: Final = ("interleaved", "zerobubble")
"""Schedules that want several parts of each process."""


@dataclass(frozen=True)
class Work:
    """What is trained, and for how long.

    Args:
        network: ``decoder``, a Transformer on characters; ``residual``, on small photographs;
            ``perceptron``, on digits. The latter two as their recipes have them.
        data: The data folder; None: inputs drawn at random.
        dim, blocks, heads, length: Of the Transformer.
        batch: Rows of a minibatch.
        rate: Adam's for the Transformer, and SGD's with momentum.
        warm_up, steps: Minibatches that are not timed, and that are.
        cuts: First blocks of the parts after the first.
        four: The same, for four parts.
        kernel_threads: Of a process, or of a worker.
    """

    network: str = "decoder"
    data: str | None = None
    dim: int = 64
    blocks: int = 8
    heads: int = 4
    length: int = 128
    batch: int = 16
    rate: float = 1e-3
    warm_up: int = 10
    steps: int = 40
    cuts: tuple[int, ...] = (5,)
    four: tuple[int, ...] = (3, 5, 8)
    kernel_threads: int = 1


Minibatch = tuple[Tensor, Tensor]


class Began:
    """When the timed minibatches began."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def reply(self, work: Work, losses: Sequence[float]) -> dict[str, float]:
        """Rows a second, the process's CPU time of a row, and the mean loss, until now."""
        rows = work.steps * work.batch
        return {
            "rows_per_second": rows / (time.perf_counter() - self._wall),
            "cpu_ms_per_row": 1e3 * (time.process_time() - self._cpu) / rows,
            "loss": sum(losses) / len(losses),
        }


def network(work: Work, tokens: int) -> nn.Sequential:
    """The network, the same in every process."""
    torch.manual_seed(SEED)
    if work.network == "residual":
        return residual_network(CLASSES, width=32, blocks=3, stride=2)
    if work.network == "perceptron":
        return make_net(784)
    return decoder(tokens, dim=work.dim, blocks=work.blocks, heads=work.heads, length=work.length)


def minibatches(work: Work) -> tuple[list[Minibatch], int]:
    """As many as are trained on, and how many tokens there are; the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    count = work.warm_up + work.steps
    if work.network == "decoder":
        tokens, text = characters(work, generator)
        starts = torch.randint(0, len(text) - work.length, (count, work.batch), generator=generator)
        windows = text[starts[..., None] + torch.arange(work.length + 1)]
        return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows], tokens
    x, y = pictures(work, generator)
    rows = torch.randint(0, len(x), (count, work.batch), generator=generator)
    return [(x[chosen], y[chosen]) for chosen in rows], CLASSES


def characters(work: Work, generator: torch.Generator) -> tuple[int, Tensor]:
    """How many there are, and the text as numbers int64 ``(n,)``."""
    if work.data is None:
        return 65, torch.randint(0, 65, (20_000,), generator=generator)
    train = load_text(Path(work.data)).train
    alphabet = Tokens.characters(train)
    return len(alphabet), torch.from_numpy(alphabet.encode(train))


def pictures(work: Work, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Photographs float32 ``(n, 3, 32, 32)`` or digits ``(n, 784)``, and their classes int64."""
    shape = (3, 32, 32) if work.network == "residual" else (784,)
    if work.data is None:
        classes = torch.randint(0, CLASSES, (2000,), generator=generator)
        return torch.randn(2000, *shape, generator=generator), classes
    if work.network == "residual":
        found = load_cifar10(Path(work.data), "train")
        return standardised(channels_first(found.images)), torch.from_numpy(found.labels)
    return columns(load_mnist(Path(work.data), "train"), None)


def make_optimizer(work: Work) -> Any:
    """The same for all systems; fused, as that is torch's fastest on a CPU."""
    if work.network == "decoder":
        return partial(torch.optim.Adam, lr=work.rate, fused=True)
    return partial(torch.optim.SGD, lr=10 * work.rate, momentum=0.9, fused=True)


def mean_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over all rows and positions."""
    return F.cross_entropy(prediction.flatten(0, -2), target.flatten())


Passes = Generator[dict[str, float], None, None]
"""Replies, one for each pass over the timed minibatches; an empty one before says that it is warm.
"""


def plain(work: Work) -> Passes:
    """One process, one minibatch after the other."""
    batches, tokens = minibatches(work)
    model = network(work, tokens)
    optimizer = make_optimizer(work)(model.parameters())

    def train(some: Sequence[Minibatch]) -> list[float]:
        losses = []
        for x, y in some:
            optimizer.zero_grad()
            loss = mean_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    train(batches[: work.warm_up])
    yield {}
    while True:
        began = Began()
        yield began.reply(work, train(batches[work.warm_up :]))


def ours(work: Work, in_flight: int, runtime: gt.AbstractRuntime) -> Passes:
    """Two parts on two workers, so many minibatches in flight."""
    batches, tokens = minibatches(work)
    model = network(work, tokens)
    workers = len(work.cuts) + 1
    pipe = gt.Pipeline(model, cuts=work.cuts, slack=max(in_flight - workers, 0))
    session = gt.Session(
        pipe.graph,
        rules=pipe.rules(make_optimizer(work)),
        runtime=runtime,
        reading=gt.Reading(shuffle=False),
        **pipe.settings(workers) | {"max_active": in_flight},
    )
    instances = [gt.minibatch(x, y) for x, y in batches]
    session.fit(instances[: work.warm_up], epochs=1)
    yield {}
    for epoch in itertools.count(2):
        began = Began()
        pids = getattr(runtime, "pids", ())
        before = [cpu_s(pid) for pid in pids]
        fit = session.fit(instances[work.warm_up :], epochs=epoch)
        told = began.reply(work, [fit.history[-1].loss])
        rows = work.steps * work.batch
        used = sum(cpu_s(pid) - was for pid, was in zip(pids, before, strict=True))
        yield told | {"cpu_ms_per_row": told["cpu_ms_per_row"] + 1e3 * used / rows}


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has had, user's and system's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peer(work: Work, rank: int, store: str, name: str, microbatches: int) -> Passes:
    """One of the two ranks of torch's pipeline; the last one knows the losses."""
    ranks = len(work.cuts) + 1
    dist.init_process_group(
        "gloo", rank=rank, world_size=ranks, init_method=store, timeout=timedelta(seconds=MEET_S)
    )
    batches, tokens = minibatches(work)
    model = network(work, tokens)
    ends = [0, *(work.four if name in OF_SEVERAL else work.cuts), len(model)]
    numbers = range(rank, len(ends) - 1, ranks)
    parts = [model[ends[k] : ends[k + 1]] for k in numbers]
    optimizer = make_optimizer(work)([p for part in parts for p in part.parameters()])
    stages = [
        PipelineStage(part, k, len(ends) - 1, torch.device("cpu"))
        for k, part in zip(numbers, parts, strict=True)
    ]
    schedule = SCHEDULES[name](
        stages if name in OF_SEVERAL else stages[0], microbatches, loss_fn=mean_loss
    )

    def train(some: Sequence[Minibatch]) -> list[float]:
        losses: list[float] = []
        for x, y in some:
            optimizer.zero_grad()
            judged: list[Tensor] = []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=judged, return_outputs=False)
                losses += map(float, judged)
            optimizer.step()
        return losses

    try:
        train(batches[: work.warm_up])
        dist.barrier()
        yield {}
        while True:
            dist.barrier()
            began = Began()
            losses = train(batches[work.warm_up :])
            dist.barrier()
            yield began.reply(work, losses or [float("nan")])
    finally:
        dist.destroy_process_group()


def passes(request: dict[str, Any]) -> Passes:
    """What a request asks for."""
    given = request["work"]
    work = Work(**{**given, "cuts": tuple(given["cuts"]), "four": tuple(given["four"])})
    torch.set_num_threads(kernel_threads_of(request["system"], work))
    system, _, number = request["system"].partition(":")
    workers = len(work.cuts) + 1
    if system == "plain":
        return plain(work)
    if system == "ours":
        return ours(work, int(number), gt.Threads(workers, kernel_threads=work.kernel_threads))
    if system == "processes":
        return ours(work, int(number), gt.Processes(workers, kernel_threads=work.kernel_threads))
    if system in SCHEDULES:
        return peer(work, request["rank"], request["store"], system, int(number))
    raise ValueError(
        f"system {request['system']!r}: give plain:KERNEL_THREADS, ours:IN_FLIGHT, "
        f"processes:IN_FLIGHT, or MICROBATCHES behind one of {', '.join(SCHEDULES)}"
    )


def is_peer(system: str) -> bool:
    """Whether it is torch's pipeline."""
    return system.partition(":")[0] in SCHEDULES


def kernel_threads_of(system: str, work: Work) -> int:
    """Kernel threads of each process or worker."""
    name, _, number = system.partition(":")
    return int(number) if name == "plain" else work.kernel_threads


def requests(system: str, work: Work, store: str) -> list[dict[str, Any]]:
    """What each process of a system is asked."""
    ranks = len(work.cuts) + 1 if is_peer(system) else 1
    asked = {"system": system, "work": asdict(work), "store": store}
    return [asked | {"rank": rank} for rank in range(ranks)]


def serve() -> None:
    """Read a request, and answer each line that comes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    with closing(passes(json.loads(sys.stdin.readline()))) as found:
        for reply in found:
            print(json.dumps(reply), file=replies, flush=True)
            if not sys.stdin.readline():
                return


if __name__ == "__main__":
    serve()

"""Copies of a small model on hosts: neighbours, or torch's all-reduce; a program on a host.

    ours    gt.Neighbours on worker processes of hosts; the program that hands out work has a host
            of its own
    ddp     DistributedDataParallel over gloo: all gradients are averaged at each step

Copies read digits where they are: only the numbers of rows travel to them. A sleep of DEVICE_MS (of
the environment of each) in every forward stands for a device's compute, so that more copies than
cores do not wait for one another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from benchmarks.cluster import stages
from geartrain.cli.copies import CopiesSeen
from geartrain.data.mnist import CLASSES
from geartrain.engine.instrument import AbstractInstrument

DEVICE_MS: Final = "DEVICE_MS"
Reply = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is trained.

    Args:
        data: The data folder with digits; None: drawn at random.
        hidden: Width of the only hidden layer.
        batch: Rows of a minibatch of one copy.
        rate, momentum: Of SGD.
        steps: Minibatches for each copy, on average.
        exchange, topology: Of ``gt.Neighbours``; ``weights:N``: N offers may be open at once.
        seed: Of weights and of minibatches.
    """

    data: str | None = None
    hidden: int = 32
    batch: int = 25
    rate: float = 0.09
    momentum: float = 0.9
    steps: int = 150
    exchange: str = "weights"
    topology: str = "ring"
    seed: int = 0


digits = lru_cache(2)(stages.digits)
"""Read once a process."""


class Lookup(nn.Module):
    """Images by number: ``(n,)`` to ``(n, 784)``; and a device takes its time."""

    def __init__(self, data: str | None) -> None:
        super().__init__()
        self.data = data

    def forward(self, rows: Tensor) -> Tensor:
        time.sleep(float(os.environ.get(DEVICE_MS, "0")) * 1e-3)
        return digits(self.data, "train")[0][rows]


class Judge:
    """Cross entropy of classes by number; writes down when it was, and which copy.

    Args:
        data: As for ``Lookup``.
        path: A file that all processes see.
    """

    def __init__(self, data: str | None, path: Path) -> None:
        self._data, self._path = data, str(path)

    def __call__(self, prediction: Tensor, rows: Tensor) -> Tensor:
        losses = F.cross_entropy(prediction, digits(self._data, "train")[1][rows], reduction="none")
        if prediction.requires_grad:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{time.time()!r} {os.getpid()}\n")
        return losses

    def read(self) -> list[tuple[float, int]]:
        """Time and process of each minibatch, by time."""
        lines = Path(self._path).read_text(encoding="utf-8").splitlines()
        return sorted((float(a), int(b)) for a, b in (line.split() for line in lines))


def network(work: Work) -> nn.Sequential:
    """The same in every process, behind the lookup."""
    torch.manual_seed(work.seed)
    layers = nn.Linear(784, work.hidden), nn.ReLU(), nn.Linear(work.hidden, CLASSES)
    return nn.Sequential(Lookup(work.data), *layers)


def order(work: Work, count: int) -> Tensor:
    """Numbers of rows, int64 ``(count, batch)``; the same in every process."""
    draw = torch.Generator().manual_seed(work.seed)
    n = len(digits(work.data, "train")[0])
    return torch.randint(0, n, (count, work.batch), generator=draw)


def accuracy(work: Work, model: nn.Sequential) -> float:
    """Of digits that it has not seen."""
    x, y = digits(work.data, "test")
    with torch.no_grad():
        return float((model[1:](x).argmax(1) == y).float().mean())


def ours(
    work: Work,
    copies: int,
    runtime: Any,
    instruments: Sequence[AbstractInstrument] = (),
    epochs: int = 1,
) -> Reply:
    """Copies with neighbours, each on a worker; their mean is judged. The last epoch counts."""
    model = network(work)
    with TemporaryDirectory() as folder:
        judge = Judge(work.data, Path(folder) / "seen")
        exchanged = CopiesSeen()
        # Two in flight: the next one is at the copy before it is through with one.
        pipe = gt.Pipeline(model, parts=1, criterion=judge, slack=1)
        session = gt.Session(
            pipe.graph,
            rules=pipe.rules(partial(torch.optim.SGD, lr=work.rate, momentum=work.momentum)),
            runtime=runtime,
            reading=gt.Reading(shuffle=False),
            sharing=gt.Neighbours(
                copies=copies,
                exchange=_exchange(work),
                topology=work.topology,
                shards="pull" if work.exchange.startswith("weights") else "static",
            ),
            max_active=2,
            instruments=[exchanged, *instruments],
        )
        rows = order(work, work.steps * copies)
        session.fit([gt.minibatch(each, each) for each in rows], epochs=epochs)
        seen = judge.read()
    if len(seen) != epochs * len(rows):
        raise RuntimeError(f"{len(seen)} losses of {epochs * len(rows)} minibatches")
    seen = seen[-len(rows) :]
    began = len(seen) // 10
    seconds = seen[-1][0] - seen[began][0]
    told = exchanged.summary() or {}
    by = {pid: sum(1 for _, other in seen if other == pid) for _, pid in seen}
    return {
        "rows_per_second": (len(seen) - 1 - began) * work.batch / seconds,
        "accuracy": accuracy(work, model),
        "minibatches": sorted(by.values()),
        **{
            name: told[name] for name in ("meetings_per_gradient", "bytes_per_gradient", "distance")
        },
    }


def _exchange(work: Work) -> Any:
    name, _, at_once = work.exchange.partition(":")
    return gt.PairAverage(at_once=int(at_once)) if at_once else name


def together(work: Work, copies: int) -> float:
    """Accuracy after one process has trained what all-reduce trains: a step for all minibatches."""
    model = network(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.rate, momentum=work.momentum)
    y = digits(work.data, "train")[1]
    for rows in order(work, work.steps * copies).view(work.steps, -1):
        optimizer.zero_grad()
        F.cross_entropy(model(rows), y[rows]).backward()
        optimizer.step()
    return accuracy(work, model)


def ddp(work: Work, rank: int, copies: int, store: str) -> Reply:
    """One rank of all-reduce."""
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=copies,
        init_method=store,
        timeout=timedelta(seconds=120),
    )
    model = network(work)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.rate, momentum=work.momentum)
    rows = order(work, work.steps * copies)[rank::copies]
    warm_up = work.steps // 10
    began = 0.0
    for k, each in enumerate(rows):
        if k == warm_up:
            dist.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(parallel(each), digits(work.data, "train")[1][each]).backward()
        optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - began
    reply = {
        "rows_per_second": (len(rows) - warm_up) * copies * work.batch / seconds,
        "accuracy": accuracy(work, model),
        "minibatches": [len(rows)] * copies,
    }
    dist.destroy_process_group()
    return reply


def answers(request: Mapping[str, Any]) -> Iterator[Reply]:
    """The reply to a request."""
    torch.set_num_threads(1)
    work, copies = Work(**request["work"]), request["copies"]
    if request["kind"] == "ddp":
        yield ddp(work, request["rank"], copies, request["store"])
    else:
        with closing(stages.runtime_of(request, copies)) as runtime:
            yield ours(work, copies, runtime)


if __name__ == "__main__":
    from benchmarks.cluster import copies

    stages.reply(
        copies.answers
    )  # of the module that workers import; what is of this one goes by value

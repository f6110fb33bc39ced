"""The same Transformer on the same minibatches, by one system; a process of its own.

    plain       one process: forward, backward, step
    ours:N      a pipeline of two parts, a worker each; N whole minibatches in flight
    peer:M      torch.distributed.pipelining, 1F1B over M microbatches, two processes, gloo

``python -m benchmarks.pipeline.systems`` reads one request (JSON) and prints one reply (JSON). A
rank of the peer is such a process too; ``main`` starts both, and they meet on the loopback.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import geartrain as gt
from geartrain.data.text import Tokens, load_text
from geartrain.nn.transformer import decoder

SEED: Final = 0


@dataclass(frozen=True)
class Work:
    """What is trained, and for how long.

    Args:
        data: The data folder; None: tokens drawn at random.
        dim, blocks, heads, length, batch: Of the Transformer and its minibatches.
        rate: Adam's.
        warm_up, steps: Minibatches that are not timed, and that are.
        cuts: First block of the second part.
        kernel_threads: Of a process, or of a worker.
    """

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
    """The Transformer, the same in every process."""
    torch.manual_seed(SEED)
    return decoder(tokens, dim=work.dim, blocks=work.blocks, heads=work.heads, length=work.length)


def minibatches(work: Work) -> tuple[list[Minibatch], int]:
    """As many as are trained on, and how many tokens there are; the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    count = work.warm_up + work.steps
    if work.data is None:
        tokens, text = 65, torch.randint(0, 65, (20_000,), generator=generator)
    else:
        train = load_text(Path(work.data)).train
        alphabet = Tokens.characters(train)
        tokens, text = len(alphabet), torch.from_numpy(alphabet.encode(train))
    starts = torch.randint(0, len(text) - work.length, (count, work.batch), generator=generator)
    windows = text[starts[..., None] + torch.arange(work.length + 1)]
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows], tokens


def make_optimizer(work: Work) -> Any:
    return partial(torch.optim.Adam, lr=work.rate, foreach=False)


def mean_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    return F.cross_entropy(prediction.flatten(0, 1), target.flatten())


def plain(work: Work) -> dict[str, float]:
    """One process, one minibatch after the other."""
    batches, tokens = minibatches(work)
    model = network(work, tokens)
    optimizer = make_optimizer(work)(model.parameters())
    losses = []
    for k, (x, y) in enumerate(batches):
        if k == work.warm_up:
            began = Began()
        optimizer.zero_grad()
        loss = mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return began.reply(work, losses[work.warm_up :])


def ours(work: Work, in_flight: int) -> dict[str, float]:
    """Two parts on two workers of one process, so many minibatches in flight."""
    batches, tokens = minibatches(work)
    model = network(work, tokens)
    workers = len(work.cuts) + 1
    pipe = gt.Pipeline(model, cuts=work.cuts, slack=max(in_flight - workers, 0))
    session = gt.Session(
        pipe.graph,
        rules=pipe.rules(make_optimizer(work)),
        runtime=gt.Threads(workers, kernel_threads=work.kernel_threads),
        reading=gt.Reading(shuffle=False),
        **pipe.settings(workers) | {"max_active": in_flight},
    )
    instances = [gt.minibatch(x, y) for x, y in batches]
    session.fit(instances[: work.warm_up], epochs=1)
    began = Began()
    fit = session.fit(instances[work.warm_up :], epochs=2)
    return began.reply(work, [fit.history[-1].loss])


def peer(work: Work, rank: int, store: str, microbatches: int) -> dict[str, float]:
    """One of the two ranks of torch's pipeline; the last one knows the losses."""
    ranks = len(work.cuts) + 1
    dist.init_process_group(
        "gloo", rank=rank, world_size=ranks, init_method=store, timeout=timedelta(seconds=60)
    )
    batches, tokens = minibatches(work)
    model = network(work, tokens)
    ends = [0, *work.cuts, len(model)]
    stage = model[ends[rank] : ends[rank + 1]]
    optimizer = make_optimizer(work)(stage.parameters())
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, ranks, torch.device("cpu")), microbatches, loss_fn=mean_loss
    )
    losses: list[float] = []
    for k, (x, y) in enumerate(batches):
        if k == work.warm_up:
            dist.barrier()
            losses, began = [], Began()
        optimizer.zero_grad()
        judged: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=judged, return_outputs=False)
            losses += map(float, judged)
        optimizer.step()
    dist.barrier()
    found = began.reply(work, losses or [float("nan")])
    dist.destroy_process_group()
    return found


def answer(request: dict[str, Any]) -> dict[str, float]:
    """Do what a request asks for."""
    given = request["work"]
    work = Work(**{**given, "cuts": tuple(given["cuts"])})
    torch.set_num_threads(work.kernel_threads)
    system, _, number = request["system"].partition(":")
    if system == "plain":
        return plain(work)
    if system == "ours":
        return ours(work, int(number))
    if system == "peer":
        return peer(work, request["rank"], request["store"], int(number))
    raise ValueError(
        f"system {request['system']!r}: give plain, ours:IN_FLIGHT or peer:MICROBATCHES"
    )


def requests(system: str, work: Work, store: str) -> Iterator[dict[str, Any]]:
    """What each process of a system is asked."""
    ranks = len(work.cuts) + 1 if system.startswith("peer") else 1
    for rank in range(ranks):
        yield {"system": system, "work": asdict(work), "rank": rank, "store": store}


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    print(json.dumps(answer(json.loads(sys.stdin.read()))), file=replies, flush=True)

"""Parts of a perceptron on hosts, trained by one system after the other; a program on a host.

    plain         one process, one minibatch after the other: the loss that synchronous ones have
    async:N       parts on worker processes of hosts, N minibatches in flight, no flush
    drained:M     the same parts and workers, a minibatch in M microbatches, and nothing else until
                  it is through
    1f1b:M        torch.distributed.pipelining over M microbatches, gloo; gpipe:M another schedule,
                  interleaved:M has two parts on each host

``python -m benchmarks.cluster.stages`` reads a request (JSON) with all systems that it is to run,
and prints a reply to each on a line. What is timed is the steady state, by the clock of the host
that has the loss, for ours; between two barriers, for torch's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

import geartrain as gt
from benchmarks.cluster.methods import METHODS
from benchmarks.pipeline.systems import OF_SEVERAL, SCHEDULES
from geartrain.data.mnist import CLASSES, load_mnist
from geartrain.engine.instrument import AbstractInstrument
from geartrain.runtime.base import AbstractRuntime
from geartrain_baselines.mnist import columns

SEED: Final = 0
SMOOTH: Final = 50
"""Minibatches whose mean loss says whether a target is reached."""

Minibatch = tuple[Tensor, Tensor]
Reply = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is trained.

    Args:
        data: The data folder with digits; None: drawn at random.
        hidden, layers: Width, and number of hidden layers of it.
        batch: Rows of a minibatch.
        parts: How many, each on a host of its own.
        rate, momentum: Of SGD; the rate rises over ``rising`` minibatches and falls linearly, to
            nothing after ``minibatches``.
        rising: Minibatches.
        minibatches: Of a training from beginning to end.
        device_ms: Milliseconds that devices sleep for a minibatch, all parts together, a third
            forward. It stands for what they compute, where there are fewer cores than parts.
        warm_up, steps: Minibatches of other runs that are not timed, and that are.
        seed: Of weights and of minibatches.
    """

    data: str | None = None
    hidden: int = 784
    layers: int = 4
    batch: int = 100
    parts: int = 2
    rate: float = 0.03
    momentum: float = 0.9
    rising: int = 100
    minibatches: int = 1200
    device_ms: float = 0.0
    warm_up: int = 8
    steps: int = 40
    seed: int = SEED

    def factor(self, minibatch: int) -> float:
        """What the rate is multiplied by, after so many minibatches."""
        rising = min(1.0, (minibatch + 1) / self.rising)
        return rising * max(0.0, 1.0 - minibatch / self.minibatches)

    def ends(self, parts: int) -> list[int]:
        """First blocks of the parts, and the number of blocks: layers shared out."""
        return [2 * (k * self.layers // parts) for k in range(parts)] + [2 * self.layers + 1]


class _Sleep(torch.autograd.Function):
    """Sleeps for a time a row, twice as long on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_s: float) -> Tensor:
        ctx.row_s = row_s
        time.sleep(row_s * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.row_s * len(dy[0]))
        return dy[0], None


class Timed(nn.Module):
    """ReLU on a device that takes so many seconds a row in training, both ways together."""

    def __init__(self, row_s: float) -> None:
        super().__init__()
        self._row_s = row_s

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        return _Sleep.apply(x, self._row_s / 3) if self.training else x


def network(work: Work) -> nn.Sequential:
    """Linear maps and ReLU, and a linear map to the classes; the same in every process."""
    torch.manual_seed(work.seed)
    blocks: list[nn.Module] = []
    wide = 784
    for _ in range(work.layers):
        slept = work.device_ms * 1e-3 / work.layers / work.batch
        blocks += [nn.Linear(wide, work.hidden), Timed(slept) if slept else nn.ReLU()]
        wide = work.hidden
    return nn.Sequential(*blocks, nn.Linear(wide, CLASSES))


def digits(data: str | None, which: str) -> Minibatch:
    """Images float32 ``(n, 784)`` and their classes int64; without data drawn at random."""
    if data is None:
        draw = torch.Generator().manual_seed(SEED)
        y = torch.randint(0, CLASSES, (500,), generator=draw)
        return torch.randn(500, 784, generator=draw) + y[:, None] / CLASSES, y
    x, y = columns(load_mnist(Path(data), which), None)
    return x, y


def minibatches(work: Work, count: int) -> Iterator[Minibatch]:
    """The same in every process."""
    x, y = digits(work.data, "train")
    draw = torch.Generator().manual_seed(work.seed)
    for _ in range(count):
        rows = torch.randint(0, len(x), (work.batch,), generator=draw)
        yield x[rows], y[rows]


def judged(work: Work, model: nn.Module) -> Reply:
    """Loss and accuracy of digits that it has not seen."""
    x, y = digits(work.data, "test")
    model.eval()
    with torch.no_grad():
        found = model(x)
    right = (found.argmax(1) == y).float().mean()
    return {"test_loss": float(F.cross_entropy(found, y)), "test_accuracy": float(right)}


def sgd(work: Work) -> Any:
    return partial(torch.optim.SGD, lr=work.rate, momentum=work.momentum, foreach=False)


def plain(work: Work) -> Reply:
    """One process, from beginning to end."""
    model = network(work)
    optimizer = sgd(work)(model.parameters())
    losses = []
    for k, (x, y) in enumerate(minibatches(work, work.minibatches)):
        for group in optimizer.param_groups:
            group["lr"] = work.rate * work.factor(k)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, **judged(work, model)}


class Recorded:
    """Cross entropy that writes down when it was computed, and its mean.

    Args:
        path: A file that all processes see.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(prediction, target, reduction="none")
        if prediction.requires_grad:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{time.time()!r} {float(losses.detach().mean())!r} {len(losses)}\n")
        return losses

    def read(self) -> list[tuple[float, float, int]]:
        """Time, mean loss and rows of each, in their order."""
        lines = Path(self._path).read_text(encoding="utf-8").splitlines()
        return [(float(a), float(b), int(c)) for a, b, c in (line.split() for line in lines)]


def ours(
    work: Work,
    system: str,
    runtime: AbstractRuntime,
    view: str,
    instruments: Sequence[AbstractInstrument] = (),
    epochs: int = 1,
) -> Reply:
    """Parts on the workers of a runtime.

    Args:
        work: What is trained: ``minibatches`` if nothing is flushed, else as many as are timed.
        system: ``async:N`` or ``drained:M``.
        runtime: As many workers as parts.
        view: What is done about late gradients, of ``METHODS``; where nothing is flushed.
        instruments: Of the session.
        epochs: As often the same minibatches; the last time counts.
    """
    name, _, number = system.partition(":")
    flushes, most = name == "drained", int(number)
    model = network(work)
    with TemporaryDirectory() as folder:
        recorded = Recorded(Path(folder) / "losses")
        session = _session(
            *(work, model, recorded, runtime, most, instruments), flushes=flushes, view=view
        )
        rows = work.batch // most if flushes else work.batch
        count = work.warm_up + work.steps if flushes else work.minibatches
        given = [
            gt.minibatch(x[k : k + rows], y[k : k + rows])
            for x, y in minibatches(work, count)
            for k in range(0, work.batch, rows)
        ]
        fit = session.fit(given, epochs=epochs)
        seen = recorded.read()
    if len(seen) != epochs * len(given):
        raise RuntimeError(f"{system}: {len(seen)} losses of {epochs * len(given)} messages")
    seen = seen[-len(given) :]
    a, b = work.warm_up * work.batch // rows - 1, len(seen) - 1
    seconds = seen[b][0] - seen[a][0]
    reply: Reply = {
        "rows_per_second": (b - a) * rows / seconds,
        "loss": sum(loss for _, loss, _ in seen[a + 1 :]) / (b - a),
        "staleness": {part: told.mean for part, told in fit.staleness.items()},
        "seconds": fit.train_seconds,
    }
    if not flushes:
        reply |= {"losses": [loss for _, loss, _ in seen], **judged(work, model)}
    return reply


def _session(
    work: Work,
    model: nn.Sequential,
    criterion: Recorded,
    runtime: AbstractRuntime,
    most: int,
    instruments: Sequence[AbstractInstrument],
    *,
    flushes: bool,
    view: str,
) -> gt.Session:
    method = METHODS["stashed" if flushes else view]
    pipe = gt.Pipeline(
        model,
        cuts=work.ends(work.parts)[1:-1],
        criterion=criterion,
        slack=most if flushes else max(0, most - work.parts),  # who drains has no other bound
        **({} if flushes else method.parts(work.minibatches)),
    )
    every = most if flushes else 1
    rules = pipe.rules(
        method.optimizer(work.rate, work.momentum),
        update_every=gt.Messages(every),
        schedule=lambda trained: work.factor(trained // every),
    )
    placed = pipe.settings(work.parts)
    if flushes:
        placed["schedule"] = gt.Schedule(
            drain=True, placement=pipe.placement(work.parts), policy=placed["schedule"].policy
        )
    elif method.alone:
        alone = gt.Synchronous(round(method.alone * work.minibatches))
        placed["schedule"] = replace(placed["schedule"], ramp=alone)
    return gt.Session(
        pipe.graph,
        rules=rules,
        runtime=runtime,
        reading=gt.Reading(shuffle=False),
        instruments=instruments,
        **placed | {"max_active": most},
    )


def peer(work: Work, rank: int, system: str) -> Reply:
    """One rank of torch's pipeline; the last one knows the losses."""
    name, _, number = system.partition(":")
    model = network(work)
    ends = work.ends(2 * work.parts if name in OF_SEVERAL else work.parts)
    numbers = range(rank, len(ends) - 1, work.parts)
    parts = [model[ends[k] : ends[k + 1]] for k in numbers]
    optimizer = sgd(work)([p for part in parts for p in part.parameters()])
    stages = [
        PipelineStage(part, k, len(ends) - 1, torch.device("cpu"))
        for k, part in zip(numbers, parts, strict=True)
    ]
    given = stages if name in OF_SEVERAL else stages[0]
    schedule = SCHEDULES[name](given, int(number), loss_fn=F.cross_entropy)
    losses: list[float] = []
    began = 0.0
    for k, (x, y) in enumerate(minibatches(work, work.warm_up + work.steps)):
        if k == work.warm_up:
            dist.barrier()
            losses, began = [], time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = work.rate * work.factor(k)
        optimizer.zero_grad()
        found: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=found, return_outputs=False)
        losses += [float(loss.detach()) for loss in found]
        optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - began
    return {
        "rows_per_second": work.steps * work.batch / seconds,
        "loss": sum(losses) / len(losses) if losses else None,
    }


def answers(request: Mapping[str, Any]) -> Iterator[Reply]:
    """A reply to each of the systems that a request wants."""
    torch.set_num_threads(1)
    work, systems = Work(**request["work"]), request["systems"]
    if request["kind"] == "plain":
        yield plain(work)
    elif request["kind"] == "peer":
        dist.init_process_group(
            "gloo",
            rank=request["rank"],
            world_size=work.parts,
            init_method=request["store"],
            timeout=timedelta(seconds=120),
        )
        for system in systems:
            yield peer(work, request["rank"], system)
        dist.destroy_process_group()
    else:
        with closing(runtime_of(request, work.parts)) as runtime:
            for system, view, changed in systems:
                yield ours(Work(**asdict(work) | changed), system, runtime, view)


def runtime_of(request: Mapping[str, Any], workers: int) -> AbstractRuntime:
    """Worker processes on the hosts that a request names; without any, on this one.

    Args:
        request: ``hosts``, each with an address and a command; ``address``, that of this program.
        workers: One a host.
    """
    if not request["hosts"]:
        return gt.Processes(workers, kernel_threads=1)
    hosts = [gt.Host(told["address"], command=told["command"]) for told in request["hosts"]]
    return gt.Hosts(hosts, workers, kernel_threads=1, address=request["address"])


def first_to_reach(losses: Sequence[float], target: float, smooth: int = SMOOTH) -> int | None:
    """Minibatches until the mean of the last ones is as low as the target; None: never."""
    total = 0.0
    for k, loss in enumerate(losses):
        total += loss - (losses[k - smooth] if k >= smooth else 0.0)
        if k + 1 >= smooth and total <= target * smooth:
            return k + 1
    return None


def reply(answers: Callable[[Mapping[str, Any]], Iterator[object]]) -> None:
    """Answer the request on stdin, a line each as they come."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    for each in answers(json.loads(sys.stdin.read())):
        print(json.dumps(each), file=replies, flush=True)


if __name__ == "__main__":
    from benchmarks.cluster import stages

    stages.reply(
        stages.answers
    )  # of the module that workers import; what is of this one goes by value

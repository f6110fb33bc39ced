"""One system that trains in this process: geartrain, or a plain PyTorch program beside it.

python -m benchmarks.peers.child        the request on stdin, the reply on stdout; see protocol
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from benchmarks.peers.protocol import Checked, Request, Training, serve
from geartrain.data.listreduce import generate
from geartrain.data.sst import load_sst
from geartrain.recipes import find_recipe
from geartrain.recipes.recipe import Setting
from geartrain_baselines import PEERS, Terms
from geartrain_baselines.listreduce import ListRnn, Lists, mixed_batches
from geartrain_baselines.sentiment import Forest, TreeLstm, summed_loss


def answer(request: Request) -> Training | Checked:
    """Make the system that is asked for."""
    torch.set_num_threads(request["threads"])
    torch.sparse.check_sparse_tensor_invariants.disable()
    if "check" in request:
        return check(request)
    kinds: dict[str, Callable[[Request], Training]] = {
        "ours": ours,
        "baseline": baseline,
        "steps": steps,
    }
    return kinds[request["system"]["kind"]](request)


def ours(request: Request) -> Training:
    """A recipe's graph and rules in a session; whatever else the session is to be told goes in."""
    system, recipe = request["system"], find_recipe(request["task"])
    setting = Setting(
        seed=request["seed"],
        epochs=1 + request["repeats"],
        update_every=request.get("update_every") or recipe.update_size(request["options"]),
        data=_folder(request),
        options=request["options"],
    )
    task = recipe.build(setting)
    instances = task.load("train")
    workers = system["workers"]
    session = gt.Session(
        task.graph,
        rules=task.rules,
        runtime=gt.Threads(workers, kernel_threads=max(1, request["threads"] // workers)),
        max_active=system["in_flight"],
        ramp=gt.Ramp(over=0),
        seed=request["seed"],
        **system["session"],
    )
    passes = (session.fit(instances, epochs=n).train_seconds for n in count(1))
    return Training(
        len(instances),
        passes,
        _versions(geartrain=gt.__version__),
        lambda: session.statistics()["versions"],
    )


def baseline(request: Request) -> Training:
    """A program of ``geartrain_baselines``; the validation between passes is not timed."""
    system, recipe = request["system"], find_recipe(request["task"])
    found = next(b for b in PEERS[request["task"]].baselines if b.name == system["method"])
    terms = Terms(
        seed=request["seed"],
        epochs=1 + request["repeats"],
        batch=system["batch"],
        data=_folder(request),
        options={o.name: o.default for o in recipe.options} | request["options"],
    )
    epochs = found.train(terms)
    first = next(epochs)  # also tells how many instances there are
    updates = first.updates

    def passes() -> Iterator[float]:
        nonlocal updates
        yield first.seconds
        before = first.seconds
        for epoch in epochs:
            updates += epoch.updates
            yield epoch.seconds - before
            before = epoch.seconds

    extra = {}
    if found.needs is not None:
        extra = {found.needs: __import__(found.needs).__version__}
    versions = _versions(**extra)
    return Training(int(first.instances), passes(), versions, lambda: {found.name: updates})


def steps(request: Request) -> Training:
    """The cell as a Python loop over the steps of packed lists: no product is saved or folded."""
    options = request["options"]
    torch.manual_seed(request["seed"])
    net = ListRnn()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)
    lists = Lists.of(generate(options["train_size"], request["seed"]))
    random = np.random.default_rng(request["seed"])
    updates = 0

    def passes() -> Iterator[float]:
        nonlocal updates
        while True:
            begin = time.perf_counter()
            for rows in mixed_batches(lists.length, request["system"]["batch"], random):
                optimizer.zero_grad()
                length = lists.length[rows]
                scores = stepped(net, lists.tokens[: int(length[0]), rows], length)
                F.cross_entropy(scores, lists.label[rows]).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                updates += 1
            yield time.perf_counter() - begin

    return Training(len(lists.label), passes(), _versions(), lambda: {"steps": updates})


def stepped(net: ListRnn, tokens: Tensor, length: Tensor) -> Tensor:
    """Scores ``(B, 10)`` of tokens int64 ``(T, B)``, the longest list first, step by step.

    Computes what ``net.packed`` does, list by list as they end.
    """
    weight, recurrent, bias, other = net.rnn.all_weights[0]
    going = (length > torch.arange(len(tokens))[:, None]).sum(1).tolist()
    h = torch.relu(F.linear(net.embedding(tokens[0]), weight, bias + other))
    ended: list[Tensor] = []
    for step, n in zip(tokens[1:], going[1:], strict=True):
        if n < len(h):
            ended.append(h[n:])
        x = F.linear(net.embedding(step[:n]), weight, bias)
        h = torch.relu(x + F.linear(h[:n], recurrent, other))
    scores: Tensor = net.readout(torch.cat([h, *reversed(ended)]))
    return scores


def check(request: Request) -> Checked:
    """The loss of the first trees, summed over their vertices, at the agreed weights."""
    sst = load_sst(_folder(request), ("train",))
    net = TreeLstm(len(sst.vocabulary))
    with torch.no_grad():
        for parameter in net.parameters():
            n = parameter.numel()
            values = 0.1 * np.sin(np.arange(n, dtype=np.float64))
            parameter.copy_(torch.from_numpy(values).view_as(parameter))
        forest = Forest(sst.train[: request["check"]])
        loss = summed_loss(net, "fused", forest, np.arange(len(forest)))
    return Checked(loss.item())


def _folder(request: Request) -> Path | None:
    return None if request["data"] is None else Path(request["data"])


def _versions(**more: Any) -> dict[str, str]:
    known = {"python": platform.python_version(), "torch": torch.__version__}
    return known | {"numpy": np.__version__} | {k: str(v) for k, v in more.items()}


if __name__ == "__main__":
    serve(answer)

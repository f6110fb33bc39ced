"""Forged checkpoints with valid checksums: a process of its own, as they once ended it.

    python tests/rigs/forged.py KIND,... SEED COUNT

    a good checkpoint ─► something is changed ─► signed anew ─► load ─┬► refused: nothing changed
                                                                      └► loaded: trains on

Prints how many were refused. Anything else ends it, and what had been changed last stands before.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.train.checkpoint import read_checkpoint, write_checkpoint
from tests.rigs.sessions import session_of

Json = Any
Tensors = dict[str, Tensor]


def rows(n: int = 40, *, words: bool = True) -> list[gt.Instance]:
    """Instances of two rows and two words; without words of one row."""
    draw = np.random.default_rng(0)
    made = []
    for key in range(n):
        x = draw.standard_normal((1 + words, 3)).astype(np.float32)
        inputs = {"x": torch.from_numpy(x)}
        if words:
            inputs["word"] = torch.from_numpy(draw.integers(0, 5, 2))
        label = (x.sum(1) > 0).astype(np.int64)
        made.append(gt.Instance(inputs, {"label": label}, key=key))
    return made


def session(
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
    rules: dict[str, Any] | None = None,
    *,
    words: bool = True,
    sparse: bool = True,
    **options: Any,
) -> gt.Session:
    """Rows through three parts, and words into one; what is given goes to the first two."""
    torch.manual_seed(0)
    graph = gt.Graph(vertex=("label",))
    one = gt.Part(nn.Linear(3, 4), name="one", **(first or {}))
    two = gt.Part(nn.Linear(4, 4), name="two", **(second or {}))
    table = gt.Part(nn.Embedding(5, 4, sparse=sparse), name="table")
    if words:
        graph.input("word").through(table).loss(lambda y: y.square().sum(1))
    hidden = graph.input("x").through(one, name="one").through(torch.tanh).through(two, name="two")
    hidden.through(nn.Linear(4, 2), name="three").loss(gt.cross_entropy, target="label")
    given = {"update_every": 7, "optimizer": partial(torch.optim.Adagrad, lr=0.05), **(rules or {})}
    return session_of(
        graph, rules=gt.Rules(**given), runtime=gt.Simulated(), max_active=4, **options
    )


def adam() -> gt.Session:
    fused = partial(torch.optim.Adam, lr=0.01, fused=True)
    ours = partial(gt.FusedAdam, lr=0.01)
    return session({"optimizer": fused}, {"optimizer": ours})


def scheduled() -> gt.Session:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    steps = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9)
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=3)
    return session(
        {"optimizer": sgd, "scheduler": steps},
        {"optimizer": partial(torch.optim.NAdam, lr=0.01), "scheduler": cosine},
        {"optimizer": partial(gt.FusedAdagrad, lr=0.05)},
    )


def seen() -> gt.Session:
    """Views and rules for late gradients."""
    sgd = partial(torch.optim.SGD, lr=0.05)
    return session(
        {"view": gt.DoubleBuffered(), "update_every": gt.Messages(4), "optimizer": sgd},
        {
            "view": gt.Predicted(steps=1, by="difference"),
            "delay": gt.DelayCompensated(adaptive=0.9),
            "optimizer": partial(torch.optim.RMSprop, lr=0.01),
        },
        {"delay": gt.GapAware(), "optimizer": sgd},
        words=False,
    )


def stored() -> gt.Session:
    torch.manual_seed(0)
    graph = gt.Graph()
    stream = graph.input("x").through(gt.Part(nn.Linear(3, 4), keep="graph", name="one"))
    stream = stream.replay(times=1, buffer=3, draw="uniform")
    stream.through(gt.Part(nn.Linear(4, 1), keep="graph", name="two")).loss(
        lambda y: y.square().sum(1)
    )
    return gt.Session(graph, runtime=gt.Simulated(), max_active=2)


def copies(exchange: Any) -> gt.Session:
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
    setting = gt.Neighbours(copies=2, exchange=exchange)
    return session(rules={"optimizer": sgd}, sparse=False, sharing=setting)


WITHOUT_WORDS = ("views", "buffers")
KINDS: dict[str, Callable[[], gt.Session]] = {
    "adam": adam,
    "scheduled": scheduled,
    "views": seen,
    "buffers": stored,
    "diloco": lambda: copies(gt.DiLoCo(every=2)),
    "push-sum": lambda: copies(gt.PushSum()),
    "nesterov": lambda: copies(gt.DelayedNesterov(every=2)),
    "neighbours": lambda: copies("gradients"),
    "d-psgd": lambda: copies("d-psgd"),
}
NASTY: list[Json] = [
    *(None, True, False, -1, 0, 1, 2, 7, 10**6, 2**31, 2**53, 2**63, -(2**63), 10**400),
    *(0.0, -0.5, 0.5, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "torch.float64", [], [0], [[]], {}, {"dict": []}, {"tensor": "no such"}),
    *({"scalar": "float32", "value": 0.5}, {"tuple": [1, 2]}, [10**6] * 5, {"a": {"b": [None]}}),
]


def forge(draw: random.Random, tensors: Tensors, document: Json) -> str:
    """Change something in place; returns what."""
    changed = [
        forge_tensor(draw, tensors) if draw.random() < 0.4 else forge_document(draw, document)
        for _ in range(draw.choice((1, 1, 1, 2)))
    ]
    return "; ".join(changed)


def forge_tensor(draw: random.Random, tensors: Tensors) -> str:
    name = draw.choice(sorted(tensors))
    x = tensors[name]
    how = draw.choice(("shape", "shape", "dtype", "values", "name", "gone", "more"))
    match how:
        case "shape":
            shapes = [(), (0,), (1,), (x.numel(),), (*x.shape, 1), (*x.shape, 3), (3, *x.shape)]
            shapes += [tuple(n + 1 for n in x.shape), tuple(max(n - 1, 0) for n in x.shape)]
            shape = draw.choice(shapes)
            flat = x.reshape(-1).repeat(1 + math.prod(shape) // max(x.numel(), 1))
            flat = flat if flat.numel() else torch.ones(math.prod(shape), dtype=x.dtype)
            tensors[name] = flat[: math.prod(shape)].reshape(shape).clone()
        case "dtype":
            kinds = (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool)
            tensors[name] = x.to(draw.choice(kinds))
        case "values" if x.numel():
            nasty = (-1, 0, 5, 10**6) if x.dtype == torch.int64 else (math.nan, math.inf, -1, 1e30)
            x = x.clone()
            value = draw.choice(nasty)
            x.reshape(-1)[draw.randrange(x.numel())] = value
            tensors[name] = x
        case "name":
            tensors[draw.choice(("", "x/", "one/gradient/")) + name + "x"] = tensors.pop(name)
        case "gone":
            del tensors[name]
        case _:
            tensors[name + "/indices"] = torch.tensor([0, 10**6])
            tensors[name + "/values"] = torch.ones(2, 4)
    return f"tensor {name}: {how}"


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = list(enumerate(value))[:6]
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def forge_document(draw: random.Random, document: Json) -> str:
    every = list(places(document))
    # Random states have most of the places, and not most of what there is.
    every = [p for p in every if p[0] != "random" or draw.random() < 0.3] or every
    *way, last = draw.choice(every)
    holder = document
    for key in way:
        holder = holder[key]
    old = holder[last]
    how = draw.choice(("value", "value", "value", "value", "gone", "more", "bytes"))
    if how == "bytes" and isinstance(old, dict) and "base64" in old:
        place = draw.randrange(0, 40)
        old["base64"] = old["base64"][:place] + "////" + old["base64"][place + 4 :]
    elif how == "gone":
        del holder[last]
    elif how == "more" and isinstance(holder, list):
        holder.insert(last, copy.deepcopy(old))
    elif how == "more":
        holder[f"{last}x"] = copy.deepcopy(old)
    else:
        holder[last] = copy.deepcopy(draw.choice(NASTY))
    return f"{'.'.join(map(str, (*way, last)))}: {how} {str(holder)[:60] if how == 'value' else ''}"


def state(s: gt.Session) -> tuple[Tensors, str]:
    tensors, document = s.state.snapshot()
    return {k: v.clone() for k, v in tensors.items()}, json.dumps(document)


def same(one: tuple[Tensors, str], other: tuple[Tensors, str]) -> bool:
    (tensors, document), (others, theirs) = one, other
    return (
        document == theirs
        and tensors.keys() == others.keys()
        and all(torch.equal(tensors[k], others[k]) for k in tensors)
    )


class Trials:
    """Loads forged files into a session, which is made anew once it has taken one.

    Args:
        make: Makes the session.
        data: To train on.
    """

    def __init__(self, make: Callable[[], gt.Session], data: list[gt.Instance]) -> None:
        self._make, self._data = make, data
        self._session: gt.Session | None = None
        self._before: tuple[Tensors, str] = {}, ""

    def refuses(self, path: Path) -> bool:
        """Whether it refuses the file, and is as it was; else it has loaded it, and trained on."""
        if self._session is None:
            self._session = self._make()
            self._session.fit(self._data[:10], epochs=1)
            state(self._session)  # what waits to be added up is added up
            self._before = state(self._session)
        s = self._session
        try:
            s.load(path)
        except gt.CheckpointError as error:
            assert same(self._before, state(s)), f"the session has changed, in spite of: {error}"
            return True
        self._session = None
        try:
            s.fit(self._data, epochs=min(s.state.position.epoch, 10**6))
        except (gt.DataError, gt.NonFiniteError):
            pass  # data of another length, weights that are not finite
        except gt.GeartrainError as error:
            if "the buffer of" not in str(error):  # only the graph at work knows what comes there
                raise
        s.state.snapshot()
        return False


def forge_all(kind: str, seed: int, count: int) -> int:
    """Forge so many files; returns how many were refused."""
    make, draw = KINDS[kind], random.Random(seed)
    data = rows(words=kind not in WITHOUT_WORDS)
    trials, refused = Trials(make, data), 0
    with tempfile.TemporaryDirectory() as folder:
        make().fit(data, epochs=1, folder=folder, checkpoint_every=30, keep_last=3)
        middle = sorted(Path(folder).glob("checkpoint-*"))[0]
        kept = read_checkpoint(middle)
        assert not trials.refuses(middle)
        for number in range(count):
            tensors, document = dict(kept.tensors), copy.deepcopy(dict(kept.document))
            what = forge(draw, tensors, document)
            sys.stderr.write(f"{kind} {number}: {what}\n")  # should it end all
            sys.stderr.flush()
            write_checkpoint(Path(folder) / "forged", tensors, document)
            refused += trials.refuses(Path(folder) / "forged")
            sys.stdout.write(f"{refused}\n")  # whoever waits knows that it goes on
            sys.stdout.flush()
    return refused


def main(kinds: str, seed: int, count: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    refused = sum(forge_all(kind, seed, count) for kind in kinds.split(","))
    sys.stdout.write(f"{refused}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

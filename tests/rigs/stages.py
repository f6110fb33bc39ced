"""Minibatches as bundles through a stack of stages, and the same stack in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from tests.rigs.sessions import session_of

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.05)
WIDTHS = (3, 6, 5, 4, 3)


class Stage(nn.Module):
    """A module on the first payload tensor; the rest rides along."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return self.module(h), *rest


class Poison(torch.autograd.Function):
    """The identity, whose gradient is far too large, or NaN."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d * ctx.value, None


class Poisoned(nn.Module):
    """A module, with poison for whoever is below it."""

    def __init__(self, module: nn.Module, value: float = float("nan")) -> None:
        super().__init__()
        self.module, self.value = module, value

    def forward(self, h: Tensor) -> Tensor:
        return self.module(Poison.apply(h, self.value))


def losses(prediction: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(prediction, y, reduction="none")


def blocks(n: int = 4, seed: int = 0) -> list[nn.Module]:
    """Of which the last ends in 3 classes."""
    torch.manual_seed(seed)
    widths = (*WIDTHS[:n], 3)
    made: list[nn.Module] = []
    for k in range(n):
        linear = nn.Linear(widths[k], widths[k + 1])
        made.append(linear if k == n - 1 else nn.Sequential(linear, nn.Tanh()))
    return [m.double() for m in made]


def heads(n: int = 4, seed: int = 1) -> list[nn.Module]:
    """A head for each block but the last, which has an identity."""
    torch.manual_seed(seed)
    return [*(nn.Linear(WIDTHS[k + 1], 3).double() for k in range(n - 1)), nn.Identity()]


def batches(n: int = 5, rows: int = 5, seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    return [
        (torch.randn(rows, 3, dtype=torch.float64), torch.randint(0, 3, (rows,))) for _ in range(n)
    ]


def begin(graph: gt.Graph) -> gt.Stream:
    """Rows (x, y) of minibatches."""
    x, y = graph.input("x", bundle=True), graph.input("y", bundle=True)
    return graph.concat(x, y, how="tuple")


def instances(data: Sequence[tuple[Tensor, Tensor]]) -> list[gt.Instance]:
    return [gt.Instance({"x": x, "y": y}) for x, y in data]


def session(graph: gt.Graph, optimizer: Callable[..., object] = SGD, **options) -> gt.Session:
    """An update for each message of a part; one minibatch in flight unless told otherwise."""
    options.setdefault("runtime", gt.Simulated())
    options.setdefault("max_active", 1)
    rules = gt.Rules(optimizer=optimizer, update_every=gt.Rows(1))
    return session_of(graph, rules=rules, ramp=gt.Ramp(over=0), shuffle=False, **options)


def train(
    graph: gt.Graph,
    data: Sequence[tuple[Tensor, Tensor]],
    optimizer: Callable[..., object] = SGD,
    **options,
) -> gt.Session:
    made = session(graph, optimizer, **options)
    made.fit(instances(data), epochs=1)
    return made


def weights(*groups: Sequence[nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for modules in groups for m in modules for p in m.parameters()]


def assert_equal_weights(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def bits_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def backprop(modules: Sequence[nn.Module]) -> gt.Graph:
    """All of them in a row, under one loss."""
    graph = gt.Graph()
    stream = begin(graph)
    for k, module in enumerate(modules):
        stream = stream.through(Stage(module), keep="graph", name=f"stage {k}")
    stream.loss(losses)
    return graph


def plain_backprop(modules, data, optimizer=SGD):
    """The oracle: one optimiser a module, in plain PyTorch."""
    optimizers = [optimizer(m.parameters()) for m in modules]
    for x, y in data:
        loss = losses(nn.Sequential(*modules)(x), y).mean()
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()


def greedy(modules, local_heads, **replay):
    """A head a part; no gradient crosses a cut."""
    graph = gt.Graph()
    stream = begin(graph)
    for k, (module, head) in enumerate(zip(modules, local_heads, strict=True)):
        if k and replay:
            stream = stream.replay(**replay)
        stream = stream.through(Stage(module), keep="graph", name=f"stage {k}")
        stream.through(Stage(head), keep="graph", name=f"head {k}").loss(losses)
        stream = stream.detach()
    stream.stop()
    return graph


def plain_greedy(modules, local_heads, data, optimizer=SGD):
    optimizers = [
        optimizer(m.parameters()) for m in (*modules, *local_heads) if list(m.parameters())
    ]
    for x, y in data:
        h, total = x, 0.0
        for module, head in zip(modules, local_heads, strict=True):
            h = module(h.detach())
            total = total + losses(head(h), y).mean()
        for o in optimizers:
            o.zero_grad()
        total.backward()  # type: ignore[attr-defined]
        for o in optimizers:
            o.step()

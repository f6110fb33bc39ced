"""Chains of parts in float64, minibatches for them, and a clock of one forward one backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.frames.message import Backward, Forward, address
from geartrain.parts.part import PartState
from tests.rigs.sessions import session_of

SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
EACH = gt.Messages(1)
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


def stages(n: int, width: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).double()
        for _ in range(n)
    ]


def chain(modules: Sequence[nn.Module], *, windows: bool = True, keep: str = "graph") -> gt.Graph:
    """A graph of one part for each module; with windows it is one forward one backward."""
    graph = gt.Graph(vertex=("y",))
    stream = graph.input("x", bundle=True)
    for i, module in enumerate(modules):
        window = len(modules) - i if windows else None
        part = gt.Part(module, name=f"stage {i}", keep=keep, window=window)
        stream = stream.through(part, name=f"stage {i}", alone=True)
    stream.ungroup(index="vertex", name="rows").loss(error, target="y", name="error")
    return graph


def error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().sum(1)


def minibatches(n: int, rows: int = 4, width: int = 3) -> list[gt.Instance]:
    torch.manual_seed(1)
    made = []
    for _ in range(n):
        x = torch.randn(rows, width, dtype=torch.float64)
        made.append(gt.Instance({"x": x}, {"y": x.flip(1).sin().numpy()}))
    return made


def clock(workers: int) -> gt.Simulated:
    """A firing of a stage takes one second, forward or backward; nothing else takes any."""
    nothing = {name: (0.0, 0.0) for name in ("rows", "error")}
    return gt.Simulated(workers, costs=gt.Costs(firing_s=1.0, row_s=0.0, nodes=nothing))


def session(graph: gt.Graph, rules: gt.Rules, *, active: int, workers: int = 1, **settings):
    """Backward first, nothing shuffled, all in flight at once."""
    return session_of(
        graph,
        rules=rules,
        runtime=clock(workers),
        max_active=active,
        placement={f"stage {i}": i for i in range(workers)} if workers > 1 else None,
        policy=lambda worker: gt.BackwardFirst(),
        shuffle=False,
        **{"ramp": gt.Ramp(over=0), **settings},
    )


def plain(modules: Sequence[nn.Module], data: Sequence[gt.Instance], optimizer, epochs: int = 1):
    """Plain training, an update after every minibatch."""
    model = nn.Sequential(*modules)
    optimizers = [optimizer(m.parameters()) for m in modules]
    for _ in range(epochs):
        for one in data:
            x, y = one.inputs["x"], torch.from_numpy(one.vertex["y"])
            for each in optimizers:
                each.zero_grad()
            error(model(x), y).mean().backward()
            for each in optimizers:
                each.step()


def weights_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for m in modules for p in m.parameters()]


class OneNode:
    """One part whose messages are sent and answered by hand."""

    def __init__(self, module: nn.Module, **rules: object) -> None:
        graph = gt.Graph()
        part = gt.Part(module, name="p", keep="graph")
        graph.input("x", bundle=True).through(part, name="node").stop()
        given = {"optimizer": SGD, "update_every": gt.Flush(), "average": "none", **rules}
        self.part = PartState("p", module, gt.Rules(**given))
        engine = Engine(graph, {"p": self.part}, Settings(max_active=4))
        engine.begin(train=True)
        (self.node,) = (n for n in engine.wiring.nodes.values() if n.name == "node")
        self.engine, self.sent = engine, 0

    def forward(self, x: torch.Tensor) -> Forward:
        instance = gt.Instance({"x": x})
        (delivery,) = self.engine.controller.admit([instance]).deliveries
        self.sent += 1
        below = address(99, self.sent, 1)  # as if a part below wanted its gradient
        batch = delivery.batch.with_origin(below)
        return self.node.forward(0, [batch], True).forward[0][1]

    def backward(self, sent: Forward, dy: torch.Tensor) -> torch.Tensor:
        (answer,) = self.node.backward([Backward(sent.origin, (dy,), sent.lengths)]).backward
        assert answer.gradient is not None
        return answer.gradient[0]

    def gradients(self) -> list[torch.Tensor]:
        return [self.part.gradient.take(p).clone() for p in self.part.module.parameters()]

    def step_by_chance(self) -> None:
        """An update by some other message."""
        self.part.sent(1)
        for p in self.part.module.parameters():
            self.part.gradient.add(p, torch.randn_like(p))
        self.part.received(1, np.array([self.part.version]))
        self.part._step(0)

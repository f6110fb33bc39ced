"""Early exit: a row leaves the stack of blocks as soon as a head is sure enough of its answer.

    x ─► stem ─► ((again)) ─► block ─► head ─► sure, or at the last step? ──yes──► loss
                     ▲         the step is a state column         │ no
                     └──────────────── step + 1 ◄─────────────────┘

    python examples/early_exit.py

The control flow depends on what the network has just computed: ``route`` reads ``m.payload``. Easy
rows make one round, hard ones up to five; rows of different rounds still share each batch.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

import geartrain as gt

STEPS, CLASSES = 5, 2


class Block(nn.Module):
    """One residual block; the step picks its bias, so rounds share weights and still differ."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.step = nn.Embedding(STEPS, width)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x) + self.step(step)))


class Head(nn.Module):
    """Logits beside the row that made them, so that the next stream can look at both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


def build(width: int, threshold: float) -> gt.Graph:
    def choose(m: gt.View) -> Tensor:
        """0: leave with this answer; 1: one more round."""
        _, logits = m.payload
        confidence = logits.softmax(1).amax(1)
        last = torch.from_numpy(m.step == STEPS - 1)
        return torch.where((confidence >= threshold) | last, 0, 1)

    graph = gt.Graph(value=("label",))
    again = graph.loop(name="again")
    again.join(graph.input("x", step=0).through(nn.Linear(2, width), name="stem"))
    judged = again.through(Block(width), name="block", read="step").through(
        Head(width), name="head"
    )
    sure, unsure = judged.route(choose, 2, name="sure")
    answer = sure.through(lambda x, logits: logits, name="answer")
    answer.loss(gt.cross_entropy, target="label", metrics={"accuracy": gt.accuracy})
    answer.output("logits")
    sure.through(lambda x, logits, step: step + 1, name="rounds", read="step").output("round")
    again.join(unsure.through(lambda x, logits: x, name="row").move(step=lambda m: m.step + 1))
    return graph


def generate(n: int, seed: int) -> list[gt.Instance]:
    """Points of two spirals: easy outside, hard near the middle."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (n,), generator=random)
    radius = torch.rand(n, generator=random)
    angle = 5 * radius + label * torch.pi
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    points += 0.02 * torch.randn(n, 2, generator=random)
    return [gt.Instance({"x": points[i : i + 1]}, value={"label": int(label[i])}) for i in range(n)]


def main(argv: list[str] | None = None) -> gt.Evaluation:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--points", type=int, default=2000)
    arguments.add_argument("--epochs", type=int, default=12)
    arguments.add_argument("--threshold", type=float, default=0.95)
    options = arguments.parse_args(argv)

    torch.manual_seed(0)
    session = gt.Session(
        build(32, options.threshold),
        rules=gt.Rules(optimizer=partial(torch.optim.Adam, lr=3e-3), update_every=64),
        runtime=gt.Threads(1, kernel_threads=1),  # small matrices: more threads only wait
        max_active=64,
    )
    session.fit(generate(options.points, seed=1), epochs=options.epochs)
    fresh = generate(500, seed=2)
    result = session.evaluate(fresh)
    print(f"accuracy {result.metrics['accuracy']:.3f} on {result.instances} new points")
    answers = session.predict(fresh)  # a dict for each instance, as the graph has two outputs
    rounds = torch.cat([answer["round"] for answer in answers])
    for step, n in enumerate(torch.bincount(rounds, minlength=STEPS + 1)[1:].tolist(), 1):
        print(f"left after round {step}: {n} points")
    return result


if __name__ == "__main__":
    main()

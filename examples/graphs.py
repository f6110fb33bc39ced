"""Graphs as bundles: a gated graph network that sends one message per graph and step.

    atoms ─► embed ─► ((rounds)) ─► pass along the bonds ─► enough? ──yes──► pool ─► loss
                          ▲                                    │ no
                          └───────────── step + 1 ◄────────────┘

    python examples/graphs.py

All vertices of a graph travel together (``bundle=True``). Bundles of many graphs, of different
sizes and at different steps, are concatenated; ``inside=True`` tells the module where each one
begins and gives it the edges, numbered for this batch. Big graphs make more rounds.

Source: gated graph networks, Li et al. 2016, arXiv:1511.05493.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt

ELEMENTS, BONDS = 4, 3


class Propagate(nn.Module):
    """Each vertex adds up what its neighbours send over typed bonds, and a GRU decides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.send = nn.Linear(width, BONDS * width)
        self.cell = nn.GRUCell(width, width)

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        source, target, bond = (inside.edges[name] for name in ("source", "target", "bond"))
        sent = self.send(h).view(-1, BONDS, self.width)[source, bond]
        return self.cell(torch.zeros_like(h).index_add(0, target, sent), h)


class Pool(nn.Module):
    """One number of each graph: the sum over its vertices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vertex = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        energy = self.vertex(h)
        return energy.new_zeros(len(inside.lengths), 1).index_add(0, inside.segment, energy)


def build(width: int) -> gt.Graph:
    graph = gt.Graph(edge=("bond",), value=("energy",))
    rounds = graph.loop(name="rounds")
    atoms = graph.input("element", bundle=True, step=0)
    rounds.join(atoms.through(nn.Embedding(ELEMENTS, width), name="embed"))
    passed = rounds.through(Propagate(width), name="propagate", inside=True)
    done, more = passed.where(lambda m: m.step + 1 >= np.minimum(m.size // 3, 4))
    rounds.join(more.move(step=lambda m: m.step + 1))
    done.through(Pool(width), name="pool", inside=True, pool=True).loss(
        nn.functional.mse_loss, target="energy"
    )
    return graph


def generate(n: int, seed: int) -> list[gt.Instance]:
    """Rings with chords; every bond adds an energy that depends on its type and both elements."""
    random = np.random.default_rng(seed)
    instances = []
    for _ in range(n):
        size = int(random.integers(4, 16))
        ends = [(v, (v + 1) % size) for v in range(size)]
        ends += [(v, (v + 2) % size) for v in range(size) if random.random() < 0.3]
        a, b = np.array(ends).T
        element, bond = random.integers(0, ELEMENTS, size), random.integers(0, BONDS, len(a))
        energy = ((bond - 1) * (element[a] == element[b]) + 0.3 * (bond == 0)).sum()
        instances.append(
            gt.Instance(
                inputs={"element": torch.from_numpy(element)},
                edge={  # both directions
                    "source": np.concatenate([a, b]),
                    "target": np.concatenate([b, a]),
                    "bond": np.concatenate([bond, bond]),
                },
                value={"energy": np.float32(energy)},
            )
        )
    return instances


def main(argv: list[str] | None = None) -> gt.Fit:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--graphs", type=int, default=800)
    arguments.add_argument("--epochs", type=int, default=6)
    options = arguments.parse_args(argv)

    torch.manual_seed(0)
    session = gt.Session(
        build(32),
        # gradients are averaged over graphs; a row of a bundle is one vertex
        rules=gt.Rules(
            optimizer=partial(torch.optim.Adam, lr=3e-3),
            update_every=gt.Instances(20),
            average="instances",
        ),
        runtime=gt.Threads(1, kernel_threads=1),  # small matrices: more threads only wait
    )
    fit = session.fit(generate(options.graphs, 1), epochs=options.epochs, valid=generate(200, 2))
    for epoch in fit.history:
        print(
            f"epoch {epoch.epoch}: squared error {epoch.valid['loss']:.3f}, "
            f"{epoch.instances / epoch.seconds:.0f} graphs/s"
        )
    return fit


if __name__ == "__main__":
    main()

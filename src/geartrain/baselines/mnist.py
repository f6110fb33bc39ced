"""Digits with a perceptron in plain PyTorch, in minibatches.

    images (B, 784) ─► linear, ReLU ─► linear, ReLU ─► linear ─► cross-entropy

    minibatch  SGD 0.1 on the mean over minibatches of 100

The task and its rate are those of Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.baselines.baseline import Baseline, Epoch, Terms, shuffler
from geartrain.baselines.lap import Lap
from geartrain.data.mnist import CLASSES, SIDE, Digits, load_mnist
from geartrain.recipes.mnist import MEAN, SPREAD

RATE: Final = 0.1


def make_net(hidden: int) -> nn.Sequential:
    """Three linear maps, with PyTorch's own initial values.

    Args:
        hidden: Width between them.
    """
    return nn.Sequential(
        nn.Linear(SIDE * SIDE, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def train(terms: Terms) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation; the metric is ``accuracy``.

    Instances are counted as the recipe counts them: minibatches of its option ``batch``.
    """
    most = int(terms.options["train_size"]) or None
    x, y = columns(load_mnist(terms.data, "train"), most)
    held, truth = columns(load_mnist(terms.data, "test"), None)
    torch.manual_seed(terms.seed)
    net = make_net(int(terms.options["hidden"]))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, fused=True)
    instances = -(-len(y) // int(terms.options["batch"]))
    lap = Lap(len(y), terms.evaluate_every, instances=instances)
    for epoch in range(1, terms.epochs + 1):
        order = torch.from_numpy(shuffler(terms.seed, epoch).permutation(len(y)))
        for first in range(0, len(order), terms.batch):
            rows = order[first : first + terms.batch]
            loss = F.cross_entropy(net(x.index_select(0, rows)), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            lap.add(loss.item() * len(rows), len(rows))
            if lap.ends():
                yield lap.entry({"accuracy": share_right(net, held, truth)})
                lap.resume()


@torch.no_grad()
def share_right(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of the images labelled right."""
    return cast(float, (net(images).argmax(1) == labels).double().mean().item())


def columns(digits: Digits, most: int | None) -> tuple[Tensor, Tensor]:
    """Pixels float32 ``(N, 784)``, standardised as in the recipe, and labels int64 ``(N,)``."""
    pixels = torch.from_numpy(digits.images[:most]).flatten(1).to(torch.float32)
    return pixels.sub_(MEAN).div_(SPREAD), torch.from_numpy(digits.labels[:most])


BASELINES: Final = (
    Baseline(name="minibatch", what="minibatches, SGD 0.1", batch=100, train=train),
)

"""Digits with a perceptron in plain PyTorch, in minibatches.

    images (B, 784) ─► linear, ReLU ─► linear, ReLU ─► linear ─► cross-entropy

    minibatch  SGD on the mean over minibatches of 100

Rate and momentum are those of ``benchmarks/tuning``. The task is that of Gaunt et al. 2017,
arXiv:1705.09786, who take SGD 0.1 without momentum.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.data.mnist import CLASSES, SIDE, Digits, load_mnist
from geartrain.recipes.mnist import MEAN, SPREAD
from geartrain_baselines.baseline import Baseline, Epoch, Terms, segments


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


@final
@dataclass(frozen=True, slots=True)
class DigitPlan:
    """How to learn.

    Args:
        optimizer: ``sgd`` or ``adam``.
        rate: Its rate.
        momentum: Of ``sgd``.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    rate: float = 0.05
    momentum: float = 0.9

    def make(self, net: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of a network."""
        if self.optimizer == "adam":
            return torch.optim.Adam(net.parameters(), lr=self.rate, fused=True)
        return torch.optim.SGD(net.parameters(), lr=self.rate, momentum=self.momentum, fused=True)


PLAN: Final = DigitPlan()


def train(terms: Terms, plan: DigitPlan = PLAN) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation; the metric is ``accuracy``.

    Instances are counted as the recipe counts them: minibatches of its option ``batch``.

    Args:
        terms: With the options ``train_size``, ``hidden`` and ``batch``.
        plan: How to learn.
    """
    most = int(terms.options["train_size"]) or None
    x, y = columns(load_mnist(terms.data, "train"), most)
    held, truth = columns(load_mnist(terms.data, "test"), None)
    torch.manual_seed(terms.seed)
    net = make_net(int(terms.options["hidden"]))
    optimizer = plan.make(net)
    seconds = 0.0
    instances = -(-len(y) // int(terms.options["batch"]))
    order = segments(
        len(y),
        terms.batch,
        seed=terms.seed,
        epochs=terms.epochs,
        evaluate_every=terms.evaluate_every,
    )
    for segment in order:
        begin, loss_sum = time.perf_counter(), 0.0
        for numbers in segment.batches:
            rows = torch.from_numpy(numbers)
            loss = F.cross_entropy(net(x.index_select(0, rows)), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += loss.item() * len(rows)
        seconds += time.perf_counter() - begin
        with torch.no_grad():
            right = (net(held).argmax(1) == truth).double().mean().item()
        yield Epoch(
            epoch=segment.epoch,
            seconds=seconds,
            instances=instances * len(segment) / len(y),
            loss=loss_sum / len(segment),
            updates=len(segment.batches),
            valid={"accuracy": right},
        )


def columns(digits: Digits, most: int | None) -> tuple[Tensor, Tensor]:
    """Pixels float32 ``(N, 784)``, standardised as in the recipe, and labels int64 ``(N,)``."""
    pixels = torch.from_numpy(digits.images[:most]).flatten(1).to(torch.float32)
    return pixels.sub_(MEAN).div_(SPREAD), torch.from_numpy(digits.labels[:most])


BASELINES: Final = (
    Baseline(name="minibatch", what="minibatches, SGD 0.05, momentum 0.9", batch=100, train=train),
)

"""Small photographs with the recipe's residual network in plain PyTorch: synchronous training.

    minibatch ─► network ─► cross entropy ─► backward ─► SGD step of all weights

The minibatches, their order, the shifts and the schedule are those of the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from geartrain.data.cifar10 import CLASSES, load_cifar10
from geartrain.nn.residual import residual_network
from geartrain.recipes.cifar import WARM, minibatches
from geartrain.recipes.schedules import up_and_down
from geartrain_baselines.baseline import Baseline, Epoch, Terms
from geartrain_baselines.rows import Plan, train_rows


def train(terms: Terms) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation; the metric is ``accuracy``.

    Args:
        terms: With the options of the recipe.
    """
    options = terms.options
    most = int(options["train_size"]) or None
    data = minibatches(load_cifar10(terms.data, "train"), terms.batch, most, terms.seed)
    held = minibatches(load_cifar10(terms.data, "test"), terms.batch)
    torch.manual_seed(terms.seed)
    net = residual_network(
        CLASSES, width=int(options["width"]), blocks=int(options["blocks"]), stride=2
    )
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=float(options["learning_rate"]),
        momentum=float(options["momentum"]),
        weight_decay=float(options["weight_decay"]),
        fused=True,
    )
    plan = Plan(net, optimizer, up_and_down(terms.epochs * len(data), WARM), {"accuracy": _right})
    yield from train_rows(terms, plan, data, held)


def _right(scores: Tensor, target: Tensor) -> Tensor:
    return (scores.argmax(-1) == target).double().mean()


BASELINES: Final = (
    Baseline(name="minibatch", what="plain PyTorch, minibatches of 50", batch=50, train=train),
)

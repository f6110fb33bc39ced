"""Small photographs with a residual network, cut into parts that are trained by a method.

    image (50, 3, 32, 32) ─► shifted, mirrored ─► stem ─► 9 residual blocks ─► head ─► 10 scores
                                                 └ part 0 ┴ part 1 ┴ part 2 ┴ part 3 ┘

A minibatch is one instance. Which images share it, and how they are shifted, is drawn from the
seed, the epoch and its number. SGD's rate rises over the first fifth of the training and then falls
to nothing. The stem has stride 2, so that all blocks cost about the same on CPUs: with 32 x 32
places in the first stage, norms and memory took most of the time there.

Source: He, Zhang, Ren, Sun 2016, arXiv:1603.05027; the data are those of Krizhevsky 2009, or a part
of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Final, Literal

import torch

from geartrain.data.cifar10 import (
    CHANNELS,
    CLASSES,
    FILE,
    SIDE,
    Photographs,
    augmented,
    channels_first,
    load_cifar10,
    standardised,
)
from geartrain.data.minibatches import Minibatches
from geartrain.graph.graph import Graph
from geartrain.nn.residual import PooledHead, residual_network
from geartrain.nodes.loss import accuracy
from geartrain.parts.optimizers import LookAheadSGD
from geartrain.recipes.methods import Network, in_flight, method_options, pipeline_of, task_of
from geartrain.recipes.recipe import LoadSplit, Option, Recipe, Setting, Task, Value
from geartrain.recipes.schedules import up_and_down

RATE: Final = 0.05  # SGD's at its peak, on the mean over a minibatch
MOMENTUM: Final = 0.9
DECAY: Final = 5e-4
LEAD: Final = 0.99  # momentum of the method that leads
BATCH: Final = 50
WIDTH: Final = 32
BLOCKS: Final = 3  # of each stage
WARM: Final = 0.2  # share of the training in which the rate rises


def build(setting: Setting) -> Task:
    """The task; reads the data, as the schedule ends with them; see ``Recipe.build``."""
    options = setting.options
    batch = int(options["batch"])
    most = int(options["train_size"]) or None

    @cache
    def images(name: Literal["train", "test"]) -> Photographs:
        return load_cifar10(setting.data, name)

    def split(name: Literal["train", "test"]) -> LoadSplit:
        return lambda: minibatches(
            images(name), batch, *((most, setting.seed) if name == "train" else ())
        )

    n = min(len(images("train")), most or len(images("train")))
    network = make_network(options, setting.epochs * -(-n // batch))
    splits = {"train": split("train"), "test": split("test")}
    return task_of(network, setting, splits, validation="test")


def minibatches(
    photographs: Photographs, batch: int, most: int | None = None, seed: int | None = None
) -> Minibatches:
    """Instances of so many photographs.

    Args:
        photographs: To take.
        batch: Of a minibatch.
        most: Take the first so many; None takes all.
        seed: Deals them out and draws their shifts; None: they come as they are, in order.
    """
    x = channels_first(photographs.images[:most])
    y = torch.from_numpy(photographs.labels[:most])
    if seed is None:
        return Minibatches(standardised(x), y, batch=batch)
    return Minibatches(x, y, batch=batch, seed=seed, augment=augmented)


def make_network(options: Mapping[str, Value], minibatches: int) -> Network:
    """The residual network and how it learns.

    Args:
        options: Of the recipe, complete.
        minibatches: Of all epochs.
    """
    return Network(
        module=residual_network(
            CLASSES, width=int(options["width"]), blocks=int(options["blocks"]), stride=2
        ),
        sample=torch.zeros(int(options["batch"]), CHANNELS, SIDE, SIDE),
        metrics={"accuracy": accuracy},
        head=lambda part, h: PooledHead(h.shape[1], CLASSES),
        optimizer=partial(
            torch.optim.SGD,
            momentum=float(options["momentum"]),
            weight_decay=float(options["weight_decay"]),
        ),
        rate=float(options["learning_rate"]),
        schedule=up_and_down(minibatches, WARM),
        minibatches=minibatches,
        leading=partial(LookAheadSGD, momentum=LEAD, weight_decay=float(options["weight_decay"])),
    )


def _draw() -> Graph:
    return pipeline_of(make_network(CIFAR.complete({}), 1), CIFAR.complete({})).graph


CIFAR: Final = Recipe(
    name="cifar",
    summary="tell small photographs apart with a residual network in parts, by any method",
    paper="He et al. 2016, arXiv:1603.05027; Krizhevsky 2009",
    metrics=("accuracy",),
    target="accuracy>=0.6",
    max_active=in_flight,
    whole_minibatches=True,
    runtime="processes",
    why="two worker processes, parts in a pipeline: 1.6 to 2.0 times one worker",
    update_every=1,
    unit="instances",
    epochs=10,
    make=build,
    draw=_draw,
    needs=(FILE,),
    options=(
        *method_options(),
        Option("batch", BATCH, 1, "images of a minibatch, which is one instance"),
        Option("width", WIDTH, 1, "channels of the first stage"),
        Option("blocks", BLOCKS, 1, "residual blocks of each of the three stages"),
        Option("train_size", 0, 0, "train on the first so many images; 0 takes all"),
        Option("learning_rate", RATE, 0.0, "SGD's peak rate; a method may scale it"),
        Option("momentum", MOMENTUM, 0.0, "SGD's momentum"),
        Option("weight_decay", DECAY, 0.0, "SGD's weight decay"),
    ),
)

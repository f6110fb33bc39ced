"""Ten shapes, drawn here, with a residual network of equal blocks: a pipeline without a file.

    image (25, 3, 32, 32) ─► stem ─► 8 residual blocks, all (25, 48, 8, 8) ─► head ─► 10 scores
                            └──────── part 0 ─────────┴──────── part 1 ─────────┘

It is what ``geartrain demo`` trains: the blocks take equally long, so that parts are level whatever
the machine; firings take milliseconds, so that messages between processes hardly show; and the task
is learned within a minute. A minibatch is one instance. SGD's rate rises over the first fifth of
the training and then falls to nothing.

Source: blocks as in He, Zhang, Ren, Sun 2016, arXiv:1603.05027.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Final

import torch
from torch import nn

from geartrain.data.cifar10 import CHANNELS, SIDE, Photographs
from geartrain.data.shapes import CLASSES, draw_shapes
from geartrain.graph.graph import Graph
from geartrain.nn.residual import PooledHead, ResidualBlock
from geartrain.nodes.loss import accuracy
from geartrain.parts.optimizers import LookAheadSGD
from geartrain.recipes.cifar import minibatches
from geartrain.recipes.methods import Network, in_flight, method_options, pipeline_of, task_of
from geartrain.recipes.recipe import Option, Recipe, Setting, Task, Value
from geartrain.recipes.schedules import up_and_down

RATE: Final = 0.05  # SGD's at its peak, on the mean over a minibatch
MOMENTUM: Final = 0.9
LEAD: Final = 0.99  # momentum of the method that leads
BATCH: Final = 25
WIDTH: Final = 48
BLOCKS: Final = 8
PATCH: Final = 4  # pixels of a side that the stem makes one place of
WARM: Final = 0.2  # share of the training in which the rate rises
TRAIN: Final = 2000  # images
VALID: Final = 400
_OTHER_SEEDS: Final = {"train": 0, "valid": 1_000_003, "test": 2_000_003}  # added to the run's


def build(setting: Setting) -> Task:
    """The task; see ``Recipe.build``."""
    options = setting.options
    batch = int(options["batch"])
    sizes = {"train": int(options["train_size"]), "valid": int(options["valid_size"])}

    @cache
    def images(name: str) -> Photographs:
        return draw_shapes(sizes.get(name, sizes["valid"]), setting.seed + _OTHER_SEEDS[name])

    updates = setting.epochs * -(-sizes["train"] // batch)
    splits = {
        "train": lambda: minibatches(images("train"), batch, seed=setting.seed),
        "valid": lambda: minibatches(images("valid"), batch),
        "test": lambda: minibatches(images("test"), batch),
    }
    return task_of(make_network(options, updates), setting, splits, validation="valid")


def make_network(options: Mapping[str, Value], updates: int) -> Network:
    """The network and how it learns.

    Args:
        options: Of the recipe, complete.
        updates: Minibatches of all epochs.
    """
    width = int(options["width"])
    blocks = [ResidualBlock(width, width) for _ in range(int(options["blocks"]))]
    stem = nn.Conv2d(CHANNELS, width, PATCH, PATCH, bias=False)
    return Network(
        module=nn.Sequential(stem, *blocks, PooledHead(width, len(CLASSES))),
        sample=torch.zeros(int(options["batch"]), CHANNELS, SIDE, SIDE),
        metrics={"accuracy": accuracy},
        head=lambda part, h: PooledHead(h.shape[1], len(CLASSES)),
        optimizer=partial(torch.optim.SGD, momentum=float(options["momentum"])),
        rate=float(options["learning_rate"]),
        schedule=up_and_down(updates, WARM),
        minibatches=updates,
        leading=partial(LookAheadSGD, momentum=LEAD),
    )


def _draw() -> Graph:
    options = SHAPES.complete({})
    return pipeline_of(make_network(options, 1), options).graph


SHAPES: Final = Recipe(
    name="shapes",
    summary="tell drawn shapes apart with a residual network in parts, by any method; no files",
    paper="blocks as in He et al. 2016, arXiv:1603.05027",
    metrics=("accuracy",),
    target="accuracy>=0.8",
    max_active=in_flight,
    whole_minibatches=True,
    runtime="processes",
    why="two worker processes, parts in a pipeline: 1.3 to 1.4 times one worker",
    update_every=1,
    unit="instances",
    epochs=5,
    make=build,
    draw=_draw,
    options=(
        *method_options("spectrain", parts=2),
        Option("batch", BATCH, 1, "images of a minibatch, which is one instance"),
        Option("width", WIDTH, 1, "channels"),
        Option("blocks", BLOCKS, 1, "residual blocks, all of one size"),
        Option("train_size", TRAIN, 1, "images to train on"),
        Option("valid_size", VALID, 1, "images to validate on"),
        Option("learning_rate", RATE, 0.0, "SGD's peak rate; a method may scale it"),
        Option("momentum", MOMENTUM, 0.0, "SGD's momentum"),
    ),
)

"""Ten shapes, drawn here, with the residual network of recipe ``cifar``: a pipeline without a file.

    image (50, 3, 32, 32) ─► stem ─► residual blocks ─► head ─► 10 scores
                            └─ part 0 ─┴─ part 1 ─┴─ part 2 ─┴─ part 3 ─┘

It is what ``geartrain demo`` trains: parts of about equal cost, firings of milliseconds, and a task
that is learned within a minute. Network, methods and options are those of ``cifar``.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from geartrain.data.cifar10 import Photographs
from geartrain.data.shapes import draw_shapes
from geartrain.graph.graph import Graph
from geartrain.recipes import cifar
from geartrain.recipes.methods import in_flight, method_options, pipeline_of, task_of
from geartrain.recipes.recipe import Option, Recipe, Setting, Task

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
        "train": lambda: cifar.minibatches(images("train"), batch, seed=setting.seed),
        "valid": lambda: cifar.minibatches(images("valid"), batch),
        "test": lambda: cifar.minibatches(images("test"), batch),
    }
    return task_of(cifar.make_network(options, updates), setting, splits, validation="valid")


def _draw() -> Graph:
    options = SHAPES.complete({})
    return pipeline_of(cifar.make_network(options, 1), options).graph


SHAPES: Final = Recipe(
    name="shapes",
    summary="tell drawn shapes apart with a residual network in parts, by any method; no files",
    paper="the network is that of He et al. 2016, arXiv:1603.05027",
    metrics=("accuracy",),
    target="accuracy>=0.9",
    max_active=in_flight,
    whole_minibatches=True,
    update_every=1,
    unit="instances",
    epochs=3,
    make=build,
    draw=_draw,
    options=(
        *method_options(),
        Option("batch", cifar.BATCH, 1, "images of a minibatch, which is one instance"),
        Option("width", cifar.WIDTH, 1, "channels of the first stage"),
        Option("blocks", cifar.BLOCKS, 1, "residual blocks of each of the three stages"),
        Option("train_size", TRAIN, 1, "images to train on"),
        Option("valid_size", VALID, 1, "images to validate on"),
        Option("learning_rate", cifar.RATE, 0.0, "SGD's peak rate; a method may scale it"),
        Option("momentum", cifar.MOMENTUM, 0.0, "SGD's momentum"),
        Option("weight_decay", cifar.DECAY, 0.0, "SGD's weight decay"),
    ),
)

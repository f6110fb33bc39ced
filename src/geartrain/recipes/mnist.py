"""Digits: a perceptron of three linear maps, each a part of its own; a message is a minibatch.

    images (100, 784) ─► linear 1, ReLU ─► linear 2, ReLU ─► linear 3 ─► cross entropy, accuracy

An instance is a minibatch: its images travel as one bundle and its labels are a vertex column. Each
map runs one minibatch at a time, so that several in flight, on separate workers, form a pipeline
without bubbles. Which images share a minibatch is drawn anew for every epoch from (seed, epoch).
Every number of the recipe stands at the top.

The method ``rows`` is that: row kernels, whose gradients mix the activations of then with the
weights of now. By any other method of ``recipes.methods`` the maps are the parts of a ``Pipeline``.

Source: the task is that of Gaunt et al. 2017, arXiv:1705.09786; the digits are those of LeCun,
Bottou, Bengio, Haffner 1998.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Literal, final, overload

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.data import minibatches
from geartrain.data.mnist import CLASSES, SIDE, Digits, load_mnist
from geartrain.engine.controller import Ramp
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loss import accuracy, cross_entropy
from geartrain.parts.optimizers import LookAheadSGD
from geartrain.parts.rules import Rows, Rules
from geartrain.recipes import methods
from geartrain.recipes.methods import Network, method_options, task_of
from geartrain.recipes.recipe import LoadSplit, Option, Recipe, Setting, Task, Value

RATE: Final = 0.03  # SGD's, on the mean over the images of an update
MOMENTUM: Final = 0.9
LEAD: Final = 0.99  # momentum of the method that leads
PIXELS: Final = SIDE * SIDE
MAPS: Final = 3
TRAIN: Final = 60_000  # images
ROWS: Final = "rows"  # the method that is no pipeline
RAMP: Final = Ramp(start=1, over=0)  # SGD has no sums of squares that early steps could swell
MEAN, SPREAD = 0.1307 * 255, 0.3081 * 255  # of the pixels of the training images


def build(setting: Setting) -> Task:
    """The task; reads no data before a split is asked for; see ``Recipe.build``."""
    options = setting.options
    batch, most = int(options["batch"]), int(options["train_size"]) or None
    rows = options["method"] == ROWS

    def split(name: Literal["train", "test"]) -> LoadSplit:
        def load() -> Sequence[Instance]:
            digits = load_mnist(setting.data, name)
            first, seed = (most, setting.seed) if name == "train" else (None, None)
            if rows:
                return DigitMinibatches(digits, batch, most=first, seed=seed, key=f"{name} images")
            labels = torch.from_numpy(digits.labels[:first])
            return minibatches.Minibatches(pixels(digits, first), labels, batch=batch, seed=seed)

        return load

    splits = {"train": split("train"), "test": split("test")}
    network = make_network(options, setting.epochs * -(-(most or TRAIN) // batch))
    if not rows:
        return task_of(network, setting, splits, validation="test")
    return Task(
        graph=make_graph(*widths(options)),
        rules=Rules(
            optimizer=partial(network.optimizer, lr=network.rate),
            # Rows, not instances: a map steps when its minibatch is back, not when those below
            # it have had it too.
            update_every=Rows(batch * setting.update_every),
        ),
        splits=splits,
        validation="test",
        ramp=RAMP,
    )


def widths(options: Mapping[str, Value]) -> tuple[int, int]:
    """Widths of what the first and the second map give.

    Args:
        options: Of the recipe, complete.
    """
    hidden = int(options["hidden"])
    return hidden, int(options["second"]) or hidden


def make_blocks(hidden: int, second: int) -> nn.Sequential:
    """Three linear maps in a row, ReLU behind all but the last.

    Args:
        hidden: Width of what the first gives.
        second: Of what the second gives.
    """
    return nn.Sequential(
        nn.Sequential(nn.Linear(PIXELS, hidden), nn.ReLU()),
        nn.Sequential(nn.Linear(hidden, second), nn.ReLU()),
        nn.Linear(second, CLASSES),
    )


def make_graph(hidden: int, second: int) -> Graph:
    """The maps as nodes of their own.

    Args:
        hidden: Width of what the first gives.
        second: Of what the second gives.
    """
    graph = Graph(vertex=("label",))
    images = graph.input("images", shape=(PIXELS,), dtype=torch.float32, bundle=True)
    for number, block in enumerate(make_blocks(hidden, second), 1):
        images = images.through(block, name=f"linear {number}", alone=True)
    images.loss(cross_entropy, "label", metrics={"accuracy": accuracy})
    return graph


def make_network(options: Mapping[str, Value], updates: int) -> Network:
    """The maps as blocks of a pipeline, and how they learn.

    Args:
        options: Of the recipe, complete.
        updates: Minibatches of all epochs.
    """
    return Network(
        module=make_blocks(*widths(options)),
        sample=torch.zeros(int(options["batch"]), PIXELS),
        metrics={"accuracy": accuracy},
        optimizer=partial(torch.optim.SGD, momentum=float(options["momentum"])),
        rate=float(options["learning_rate"]),
        minibatches=updates,
        leading=partial(LookAheadSGD, momentum=LEAD),
    )


@final
class DigitMinibatches(Sequence[Instance]):
    """Digits cut into minibatches, an instance each; the last one may be smaller.

    Args:
        digits: The pixels are converted once, to float32 ``(N, 784)`` of mean 0 and spread 1.
        batch: Images of a minibatch.
        most: Take the first so many images; None takes all.
        seed: Deals the images out anew for every epoch, by (seed, epoch); None leaves their order.
        key: What errors call the images.
    """

    def __init__(
        self,
        digits: Digits,
        batch: int,
        *,
        most: int | None = None,
        seed: int | None = None,
        key: str = "images",
    ) -> None:
        self._pixels = pixels(digits, most)
        self._labels = digits.labels[:most]
        self._batch, self._seed, self._key = batch, seed, key
        self._order = np.arange(len(self._labels))
        self.set_epoch(0)

    def set_epoch(self, number: int) -> None:
        """Deal the images out for an epoch; what was dealt before does not matter."""
        if self._seed is not None:
            generator = np.random.default_rng((self._seed, number))
            self._order = generator.permutation(len(self._labels))

    def __len__(self) -> int:
        return -(-len(self._labels) // self._batch)

    @overload
    def __getitem__(self, at: int) -> Instance: ...
    @overload
    def __getitem__(self, at: slice) -> list[Instance]: ...
    def __getitem__(self, at: int | slice) -> Instance | list[Instance]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        start = range(len(self))[at] * self._batch
        rows = self._order[start : start + self._batch]
        return Instance(
            {"images": self._pixels.index_select(0, torch.from_numpy(rows))},
            vertex={"label": self._labels[rows]},
            key=f"{self._key} {start} to {start + len(rows) - 1} of the order",
        )


def pixels(digits: Digits, most: int | None) -> Tensor:
    """The first so many images, float32 ``(N, 784)`` of mean 0 and spread 1."""
    images = torch.from_numpy(digits.images[:most])
    return images.flatten(1).to(torch.float32).sub_(MEAN).div_(SPREAD)


def in_flight(options: Mapping[str, Value]) -> int:
    """Minibatches in flight by the method's default: one for each map, and one on its way."""
    return MAPS + 1 if options["method"] == ROWS else methods.in_flight(options)


MNIST: Final = Recipe(
    name="mnist",
    summary="tell handwritten digits apart; whole minibatches go through a pipeline",
    paper="Gaunt et al. 2017, arXiv:1705.09786; LeCun et al. 1998",
    metrics=("accuracy",),
    target="accuracy>=0.97",
    max_active=in_flight,
    update_every=1,
    unit="instances",
    epochs=3,
    make=build,
    draw=lambda: make_graph(PIXELS, PIXELS),
    whole_minibatches=True,
    runtime="processes",
    why="two worker processes, three parts: 1.6 to 1.8 times one worker; with two kernel threads "
    "one has 1.4, and nothing asynchronous",
    needs=(
        "mnist/train-images-idx3-ubyte.gz",
        "mnist/train-labels-idx1-ubyte.gz",
        "mnist/t10k-images-idx3-ubyte.gz",
        "mnist/t10k-labels-idx1-ubyte.gz",
    ),
    options=(
        *method_options(ROWS, parts=MAPS),
        Option("batch", 100, 1, "images of a minibatch, which is one instance"),
        Option("hidden", PIXELS, 1, "width between the linear maps"),
        Option("second", 0, 0, "width behind the second map, if it is another; 0: as hidden"),
        Option("train_size", 0, 0, "train on the first so many images; 0 takes all"),
        Option("learning_rate", RATE, 0.0, "SGD's rate; a method may scale it"),
        Option("momentum", MOMENTUM, 0.0, "SGD's momentum"),
    ),
)

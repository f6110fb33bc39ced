"""The next character, or pair-encoded token, of a text: a decoder cut into parts.

    tokens (16, 64) ─► embedding ─► 8 blocks of attention and MLP ─► readout ─► scores (16, 64, V)
                      └─ part 0 ─┴─ part 1 ─┴─ part 2 ─┴─ part 3 ─┘

A minibatch is one instance: segments of the training text, which begin at another place in every
epoch. The metric ``bits`` is per character, whatever the tokens are, so that vocabularies can be
compared. AdamW's rate rises over the first tenth of the training and then falls to nothing.

Source: Vaswani et al. 2017, arXiv:1706.03762, with the norms of Radford et al. 2019; tokens as in
Sennrich et al. 2016, arXiv:1508.07909.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor
from torch.nn import functional as F

from geartrain.data.text import FILE, Text, Tokens, Windows, load_text
from geartrain.graph.graph import Graph
from geartrain.nn.transformer import TokenReadout, decoder
from geartrain.nodes.loss import accuracy
from geartrain.parts.rules import Clip
from geartrain.recipes.methods import Network, in_flight, method_options, pipeline_of, task_of
from geartrain.recipes.recipe import Choice, LoadSplit, Option, Recipe, Setting, Task, Value
from geartrain.recipes.schedules import up_and_down

RATE: Final = 4e-3  # AdamW's at its peak, on the mean over the tokens of a minibatch
DECAY: Final = 0.01
BETAS: Final = (0.9, 0.99)
LEAD: Final = 0.99  # first beta of NAdam, for the method that leads
CLIP: Final = 1.0  # norm of a part's gradient
WARM: Final = 0.1  # share of the training in which the rate rises
TOKENS: Final = 512  # of pairs
TOKENS_FILE: Final = "tokens.json"


@final
@dataclass(frozen=True)
class Corpus:
    """The text and its tokens, read when they are asked for.

    Args:
        data: The data folder.
        tokens: ``characters`` or ``pairs``.
        kept: ``Tokens`` as JSON, of the run that is built again; None: they are counted anew.
    """

    data: Path | None
    tokens: str
    kept: str | None

    @cached_property
    def text(self) -> Text:
        """Both pieces."""
        return load_text(self.data)

    @cached_property
    def vocabulary(self) -> Tokens:
        """Of the training text."""
        if self.kept is not None:
            return Tokens.from_json(self.kept)
        if self.tokens == "characters":
            return Tokens.characters(self.text.train)
        return Tokens.pairs(self.text.train, TOKENS)

    @cached_property
    def bits(self) -> Bits:
        """The metric, for the validation text."""
        return Bits(len(self.text.valid) / len(self.vocabulary.encode(self.text.valid)))


@final
@dataclass(frozen=True, slots=True)
class Bits:
    """Bits a character that a prediction costs, for each token.

    Args:
        characters: Of a token, on average.
    """

    characters: float

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(prediction, target, reduction="none")
        return losses / (math.log(2) * self.characters)


def build(setting: Setting) -> Task:
    """The task; reads the text, as the model is shaped by its tokens; see ``Recipe.build``."""
    options = setting.options
    corpus = Corpus(setting.data, str(options["tokens"]), setting.files.get(TOKENS_FILE))
    length, batch = int(options["length"]), int(options["batch"])

    def train() -> Windows:
        ids = corpus.vocabulary.encode(corpus.text.train)
        most = int(options["train_size"]) or None
        return Windows(ids, length, batch=batch, most=most, seed=setting.seed)

    def valid() -> Windows:
        return Windows(corpus.vocabulary.encode(corpus.text.valid), length, batch=batch)

    splits: dict[str, LoadSplit] = {"train": train, "valid": valid}
    network = make_network(
        options, len(corpus.vocabulary), corpus.bits, setting.epochs * len(train())
    )
    files = {TOKENS_FILE: corpus.vocabulary.to_json()}
    return task_of(network, setting, splits, validation="valid", files=files)


def make_network(
    options: Mapping[str, Value], tokens: int, bits: Bits, minibatches: int
) -> Network:
    """The decoder and how it learns.

    Args:
        options: Of the recipe, complete.
        tokens: Size of the vocabulary.
        bits: The metric.
        minibatches: Of all epochs.
    """
    length = int(options["length"])
    return Network(
        module=decoder(
            tokens,
            dim=int(options["dim"]),
            blocks=int(options["blocks"]),
            heads=int(options["heads"]),
            length=length,
            dropout=float(options["dropout"]),
        ),
        sample=torch.zeros(int(options["batch"]), length, dtype=torch.int64),
        metrics={"bits": bits, "accuracy": accuracy},
        head=lambda part, h: TokenReadout(h.shape[2], tokens),
        optimizer=partial(
            torch.optim.AdamW, betas=BETAS, weight_decay=float(options["weight_decay"])
        ),
        rate=float(options["learning_rate"]),
        schedule=up_and_down(minibatches, WARM),
        minibatches=minibatches,
        clip=Clip(norm=CLIP),
        leading=partial(
            torch.optim.NAdam,
            betas=(LEAD, BETAS[1]),
            weight_decay=float(options["weight_decay"]),
            decoupled_weight_decay=True,
        ),
    )


def _draw() -> Graph:
    options = CHARLM.complete({})
    return pipeline_of(make_network(options, 65, Bits(1.0), 1), options).graph


CHARLM: Final = Recipe(
    name="charlm",
    summary="predict the next character of a text with a Transformer in parts, by any method",
    paper="Vaswani et al. 2017, arXiv:1706.03762; Sennrich et al. 2016, arXiv:1508.07909",
    metrics=("bits", "accuracy"),
    target="bits<=2.6",
    max_active=in_flight,
    whole_minibatches=True,
    runtime="processes",
    why="two worker processes, parts in a pipeline: 1.6 to 2.0 times one worker",
    update_every=1,
    unit="instances",
    epochs=4,
    make=build,
    draw=_draw,
    needs=(FILE,),
    options=(
        *method_options(),
        Choice("tokens", "characters", ("characters", "pairs"), "what is predicted"),
        Option("batch", 16, 1, "segments of a minibatch, which is one instance"),
        Option("length", 64, 1, "tokens of a segment"),
        Option("dim", 64, 1, "entries of a vector, a multiple of heads"),
        Option("blocks", 8, 1, "of attention and MLP"),
        Option("heads", 4, 1, "of the attention"),
        Option("dropout", 0.0, 0.0, "share of the entries that training leaves out"),
        Option("train_size", 0, 0, "segments of an epoch; 0 takes all"),
        Option("learning_rate", RATE, 0.0, "AdamW's peak rate; a method may scale it"),
        Option("weight_decay", DECAY, 0.0, "AdamW's weight decay"),
    ),
)

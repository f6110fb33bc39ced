"""Text with the recipe's decoder in plain PyTorch: synchronous training.

    minibatch ─► decoder ─► cross entropy ─► backward, clip ─► AdamW step of all weights

The minibatches, their order and the schedule are those of the recipe. The gradient is clipped by
its norm over all weights, where the recipe clips each part's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from geartrain.data.text import Windows
from geartrain.nn.transformer import decoder
from geartrain.recipes.charlm import BETAS, CLIP, WARM, Corpus
from geartrain.recipes.schedules import up_and_down
from geartrain_baselines.baseline import Baseline, Epoch, Terms
from geartrain_baselines.rows import Plan, train_rows


def train(terms: Terms) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation; metrics ``bits``, ``accuracy``.

    Args:
        terms: With the options of the recipe.
    """
    options = terms.options
    corpus = Corpus(terms.data, str(options["tokens"]), None)
    tokens, length = corpus.vocabulary, int(options["length"])
    most = int(options["train_size"]) or None
    data = Windows(
        tokens.encode(corpus.text.train), length, batch=terms.batch, most=most, seed=terms.seed
    )
    held = Windows(tokens.encode(corpus.text.valid), length, batch=terms.batch)
    torch.manual_seed(terms.seed)
    net = decoder(
        len(tokens),
        dim=int(options["dim"]),
        blocks=int(options["blocks"]),
        heads=int(options["heads"]),
        length=length,
        dropout=float(options["dropout"]),
    )
    optimizer = torch.optim.AdamW(
        net.parameters(),
        lr=float(options["learning_rate"]),
        betas=BETAS,
        weight_decay=float(options["weight_decay"]),
        fused=True,
    )
    metrics = {"bits": lambda x, y: corpus.bits(x, y).mean(), "accuracy": _right}
    schedule = up_and_down(terms.epochs * len(data), WARM)
    yield from train_rows(terms, Plan(net, optimizer, schedule, metrics, CLIP), data, held)


def _right(scores: Tensor, target: Tensor) -> Tensor:
    return (scores.argmax(-1) == target).double().mean()


BASELINES: Final = (
    Baseline(name="minibatch", what="plain PyTorch, minibatches of 16", batch=16, train=train),
)

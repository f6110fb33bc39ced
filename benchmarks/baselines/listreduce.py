"""List reduction with a ReLU network in plain PyTorch: what a synchronous trainer reaches.

    tokens (T, B) ─► embedding ─► h ← relu(W x + U h + b), T times ─► linear ─► label of the list

Five ways to run one and the same network, equal in parameters and gradients:

    bucketed   ``nn.RNN`` over minibatches in which all lists have one length: nothing is padded
    packed     ``nn.RNN`` over minibatches of any lengths, through ``pack_padded_sequence``
    loop       bucketed, the cell written out as a Python loop over the steps
    folded     loop, with the embedding multiplied by W once a batch: 14 rows instead of T * B
    mixed      folded, over minibatches of any lengths: lists that have ended drop out of the loop

    python -m benchmarks.baselines.listreduce --method mixed --seed 0

The task is that of Gaunt et al. 2017, arXiv:1705.09786; ``geartrain.data.listreduce`` makes the
lists. Nothing else of geartrain is used.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, cast, final, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from geartrain.data.listreduce import CLASSES, SYMBOLS, ListReduction, generate

Method = Literal["bucketed", "packed", "loop", "folded", "mixed"]


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train; the defaults label 97 % right after three epochs of mixed minibatches.

    The rate rises in a line from 0 to ``lr`` over the first ``warmup`` of all updates, then falls
    in a line to 0; ``constant`` keeps it at ``lr``.

    Args:
        batch: Lists per update.
        epochs: Passes over the training lists; the schedule ends with the last.
        lr: Adam's highest rate.
        betas: Adam's two decay rates.
        clip: Largest norm of the gradient of all parameters; 0 clips nothing.
        warmup: Share of all updates, between 0 and 1, both excluded.
        constant: Keep the rate.
    """

    batch: int = 100
    epochs: int = 3
    lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    warmup: float = 0.1
    constant: bool = False

    def rate(self, update: int, updates: int) -> float:
        """Return the rate of an update, counted from 0, of so many."""
        done = (update + 1) / (updates + 1)
        if self.constant:
            return self.lr
        return self.lr * min(done / self.warmup, (1 - done) / (1 - self.warmup))


@final
@dataclass(frozen=True, slots=True)
class Epoch:
    """What an epoch came to.

    Args:
        epoch: Counted from 1.
        loss: Mean cross-entropy over the epoch's lists, in nats.
        valid: Share of the validation lists labelled right.
        unseen: The same, of those validation lists that are not among the training lists.
        lists_per_second: Of this epoch's training.
        seconds: Training so far, without validation.
    """

    epoch: int
    loss: float
    valid: float
    unseen: float
    lists_per_second: float
    seconds: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """N lists: tokens int64 ``(T, N)``, padded with 0; length and label int64 ``(N,)``."""

    tokens: Tensor
    length: Tensor
    label: Tensor

    @classmethod
    def of(cls, lists: ListReduction) -> Lists:
        inside = np.arange(lists.tokens.shape[1]) < lists.length[:, None]
        columns = np.where(inside, lists.tokens, 0), lists.length, lists.label
        tokens, length, label = map(torch.from_numpy, columns)
        return cls(tokens.t().contiguous(), length, label)


@final
class ListRnn(nn.Module):
    """The network, with PyTorch's own initial values."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, hidden)
        self.rnn = nn.RNN(hidden, hidden, nonlinearity="relu")
        self.readout = nn.Linear(hidden, CLASSES)

    def bucketed(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Return scores ``(B, 10)`` of tokens int64 ``(T, B)``, all lists of length T."""
        _, h = self.rnn(self.embedding(tokens))
        return cast(Tensor, self.readout(h[0]))

    def packed(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Return scores ``(B, 10)`` of tokens int64 ``(T, B)``, the longest list first."""
        _, h = self.rnn(pack_padded_sequence(self.embedding(tokens), length))
        return cast(Tensor, self.readout(h[0]))

    def loop(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Do as ``bucketed`` does, step by step."""
        bias = self.rnn.bias_ih_l0 + self.rnn.bias_hh_l0
        return self._steps(F.linear(self.embedding(tokens), self.rnn.weight_ih_l0, bias))

    def folded(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Do as ``loop`` does; W applied to the 14 symbols is looked up for the tokens."""
        return self._steps(F.embedding(tokens, self._symbols()))

    def mixed(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Do as ``packed`` does, step by step."""
        going = (length > torch.arange(len(tokens))[:, None]).sum(1).tolist()
        inside = torch.cat([tokens[step, :count] for step, count in enumerate(going)])
        first, *later = F.embedding(inside, self._symbols()).split(going)
        h = torch.relu(first)
        recurrent = self.rnn.weight_hh_l0.t()
        ended: list[Tensor] = []
        for step in later:
            if len(step) < len(h):
                h, done = h.split([len(step), len(h) - len(step)])
                ended.append(done)
            h = torch.addmm(step, h, recurrent).relu_()
        return cast(Tensor, self.readout(torch.cat([h, *reversed(ended)])))

    def _symbols(self) -> Tensor:
        bias = self.rnn.bias_ih_l0 + self.rnn.bias_hh_l0
        return F.linear(self.embedding.weight, self.rnn.weight_ih_l0, bias)

    def _steps(self, driven: Tensor) -> Tensor:
        first, *later = driven.unbind()
        h = torch.relu(first)  # the state before it is zero
        recurrent = self.rnn.weight_hh_l0.t()
        for step in later:
            h = torch.addmm(step, h, recurrent).relu_()
        return cast(Tensor, self.readout(h))


def bucketed_batches(length: Tensor, batch: int, generator: torch.Generator) -> list[Tensor]:
    """Deal all lists into batches of one length each; a length's last batch may be smaller."""
    batches: list[Tensor] = []
    for value in length.unique():
        same = (length == value).nonzero()[:, 0]
        batches += same[torch.randperm(len(same), generator=generator)].split(batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def mixed_batches(length: Tensor, batch: int, generator: torch.Generator) -> list[Tensor]:
    """Deal all lists into random batches, each with its longest lists first."""
    dealt = torch.randperm(len(length), generator=generator).split(batch)
    return [rows[length[rows].argsort(descending=True)] for rows in dealt]


def predict(net: ListRnn, lists: Lists, batch: int = 1000) -> Tensor:
    """Return the likeliest labels, int64 ``(N,)``."""
    label = torch.empty_like(lists.label)
    with torch.no_grad():
        for rows in bucketed_batches(lists.length, batch, torch.Generator()):
            steps = int(lists.length[rows[0]])
            scores = net.folded(lists.tokens[:steps, rows], lists.length[rows])
            label[rows] = scores.argmax(1)
    return label


def train(
    method: Method = "mixed",
    recipe: Recipe | None = None,
    *,
    seed: int = 0,
    lists: int = 100_000,
    validation: int = 10_000,
) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every epoch.

    Args:
        method: One of the four above.
        recipe: How; None takes the defaults.
        seed: Of the lists, of the initial values and of the order.
        lists: How many to train on.
        validation: How many to validate on.
    """
    recipe = recipe or Recipe()
    torch.manual_seed(seed)
    net = ListRnn()
    run = getattr(net, method)
    optimizer = torch.optim.Adam(net.parameters(), betas=recipe.betas, fused=True)
    drawn, held = generate(lists, seed), generate(validation, seed, "validation")
    unseen = torch.from_numpy(~np.isin(held.codes(), drawn.codes()))
    data, valid = Lists.of(drawn), Lists.of(held)
    deal = mixed_batches if method in ("packed", "mixed") else bucketed_batches
    generator = torch.Generator().manual_seed(seed)
    update, seconds = 0, 0.0
    for epoch in range(1, recipe.epochs + 1):
        begin, loss_sum = time.perf_counter(), 0.0
        batches = deal(data.length, recipe.batch, generator)
        for rows in batches:
            # Epochs differ by a few batches at most, as bucketing is by length alone: not at all.
            rate = recipe.rate(update, recipe.epochs * len(batches))
            optimizer.param_groups[0]["lr"] = rate
            length = data.length[rows]
            scores = run(data.tokens[: int(length[0]), rows], length)
            loss = F.cross_entropy(scores, data.label[rows])
            optimizer.zero_grad()
            loss.backward()
            if recipe.clip:
                nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
            optimizer.step()
            update += 1
            loss_sum += loss.item() * len(rows)
        spent = time.perf_counter() - begin
        seconds += spent
        right = (predict(net, valid) == valid.label).double()
        yield Epoch(
            epoch=epoch,
            loss=loss_sum / lists,
            valid=right.mean().item(),
            unseen=right[unseen].mean().item(),
            lists_per_second=lists / spent,
            seconds=seconds,
        )


def main() -> None:
    """Print one JSON line an epoch."""
    default = Recipe()
    parser = argparse.ArgumentParser(description="list reduction in plain PyTorch")
    parser.add_argument("--method", choices=get_args(Method), default="mixed")
    parser.add_argument("--batch", type=int, default=default.batch)
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--beta2", type=float, default=default.betas[1])
    parser.add_argument("--clip", type=float, default=default.clip)
    parser.add_argument("--warmup", type=float, default=default.warmup)
    parser.add_argument("--constant", action="store_true", help="keep the rate")
    parser.add_argument("--lists", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    recipe = Recipe(
        batch=given.batch,
        epochs=given.epochs,
        lr=given.lr,
        betas=(default.betas[0], given.beta2),
        clip=given.clip,
        warmup=given.warmup,
        constant=given.constant,
    )
    for epoch in train(given.method, recipe, seed=given.seed, lists=given.lists):
        line = {"method": given.method, "batch": given.batch, "seed": given.seed, **asdict(epoch)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

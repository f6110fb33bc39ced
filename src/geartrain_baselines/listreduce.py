"""List reduction with a ReLU network in plain PyTorch: what a synchronous trainer reaches.

    tokens (T, B) ─► embedding ─► h ← relu(W x + U h + b), T times ─► linear ─► label of the list

Six ways to run one and the same network, equal in parameters and gradients:

    single     ``nn.RNN`` one list at a time, gradients added up to the minibatch
    bucketed   ``nn.RNN`` over minibatches in which all lists have one length: nothing is padded
    packed     ``nn.RNN`` over minibatches of any lengths, through ``pack_padded_sequence``
    loop       bucketed, the cell written out as a Python loop over the steps
    folded     loop, with the embedding multiplied by W once a batch: 14 rows instead of T * B
    mixed      folded, over minibatches of any lengths: lists that have ended drop out of the loop

Adam with a rate that rises and then falls to 0; the schedule was chosen by the sweep that is
recorded beside ``benchmarks.baselines.listreduce``, which runs one form alone, update size and
highest rate by ``benchmarks/tuning``. The task is that of Gaunt et al. 2017, arXiv:1705.09786;
``geartrain.data.listreduce`` makes the lists.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from geartrain.data.listreduce import CLASSES, SYMBOLS, ListReduction, generate
from geartrain_baselines.baseline import Baseline, Epoch, Terms, cut, rate_at, shuffler

Method = Literal["single", "bucketed", "packed", "loop", "folded", "mixed"]

# Adam's highest, by batch.
RATES: Final = {50: 4e-3, 100: 4e-3, 200: 8e-3, 400: 8e-3, 800: 1.6e-2}


@final
@dataclass(frozen=True, slots=True)
class ListPlan:
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
        weight, _, *biases = self._weights()
        return self._steps(F.linear(self.embedding(tokens), weight, biases[0] + biases[1]))

    def folded(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Do as ``loop`` does; W applied to the 14 symbols is looked up for the tokens."""
        return self._steps(F.embedding(tokens, self._symbols()))

    def mixed(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Do as ``packed`` does, step by step."""
        going = (length > torch.arange(len(tokens))[:, None]).sum(1).tolist()
        inside = torch.cat([tokens[step, :count] for step, count in enumerate(going)])
        first, *later = F.embedding(inside, self._symbols()).split(going)  # type: ignore[no-untyped-call]
        h = torch.relu(first)
        recurrent = self._weights()[1].t()
        ended: list[Tensor] = []
        for step in later:
            if len(step) < len(h):
                h, done = h.split([len(step), len(h) - len(step)])  # type: ignore[no-untyped-call]
                ended.append(done)
            h = torch.addmm(step, h, recurrent).relu_()
        return cast(Tensor, self.readout(torch.cat([h, *reversed(ended)])))

    def _symbols(self) -> Tensor:
        weight, _, *biases = self._weights()
        return F.linear(self.embedding.weight, weight, biases[0] + biases[1])

    def _weights(self) -> list[Tensor]:
        """Of the inputs, of the state, and the bias of each."""
        return cast(list[Tensor], self.rnn.all_weights[0])

    def _steps(self, driven: Tensor) -> Tensor:
        first, *later = driven.unbind()
        h = torch.relu(first)  # the state before it is zero
        recurrent = self._weights()[1].t()
        for step in later:
            h = torch.addmm(step, h, recurrent).relu_()
        return cast(Tensor, self.readout(h))


def bucketed_batches(length: Tensor, batch: int, random: np.random.Generator) -> list[Tensor]:
    """Deal all lists into batches of one length each; a length's last batch may be smaller."""
    order = torch.from_numpy(random.permutation(len(length)))
    batches: list[Tensor] = []
    for value in length.unique():  # type: ignore[no-untyped-call]
        batches += order[length[order] == value].split(batch)  # type: ignore[no-untyped-call]
    return [batches[i] for i in random.permutation(len(batches)).tolist()]


def mixed_batches(length: Tensor, batch: int, random: np.random.Generator) -> list[Tensor]:
    """Deal all lists into random batches, each with its longest lists first."""
    dealt = torch.from_numpy(random.permutation(len(length))).split(batch)  # type: ignore[no-untyped-call]
    return [rows[length[rows].argsort(descending=True)] for rows in dealt]


def predict(net: ListRnn, lists: Lists, batch: int = 1000) -> Tensor:
    """Return the likeliest labels, int64 ``(N,)``."""
    label = torch.empty_like(lists.label)
    with torch.no_grad():
        for rows in bucketed_batches(lists.length, batch, np.random.default_rng(0)):
            steps = int(lists.length[rows[0]])
            scores = net.folded(lists.tokens[:steps, rows], lists.length[rows])
            label[rows] = scores.argmax(1)
    return label


def train(
    method: Method = "mixed",
    plan: ListPlan | None = None,
    *,
    seed: int = 0,
    lists: int = 100_000,
    validation: int = 10_000,
    hidden: int = 128,
    evaluate_every: float | None = None,
) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation.

    The metrics are ``accuracy``, the share of the validation lists labelled right, and ``unseen``,
    the same of those that are not among the training lists.

    Args:
        method: One of the six above.
        plan: How; None takes the defaults.
        seed: Of the lists, of the initial values and of the order.
        lists: How many to train on.
        validation: How many to validate on.
        hidden: Width of the state and of the token vectors.
        evaluate_every: Share of an epoch between two evaluations; None: the end alone.
    """
    plan = plan or ListPlan()
    torch.manual_seed(seed)
    net = ListRnn(hidden)
    optimizer = torch.optim.Adam(net.parameters(), betas=plan.betas, fused=True)
    drawn, held = generate(lists, seed), generate(validation, seed, "validation")
    unseen = torch.from_numpy(~np.isin(held.codes(), drawn.codes()))
    data, valid = Lists.of(drawn), Lists.of(held)
    deal = bucketed_batches if method in ("bucketed", "loop", "folded") else mixed_batches
    update, seconds = 0, 0.0
    for epoch in range(1, plan.epochs + 1):
        begin = time.perf_counter()
        batches = deal(data.length, plan.batch, shuffler(seed, epoch))
        # All epochs have as many batches: bucketing is by length alone.
        updates = plan.epochs * len(batches)
        for segment in cut(batches, epoch, evaluate_every):
            loss_sum = 0.0
            for rows in segment.batches:
                optimizer.param_groups[0]["lr"] = plan.rate(update, updates)
                optimizer.zero_grad()
                loss_sum += add_gradients(net, method, data, rows) * len(rows)
                if plan.clip:
                    nn.utils.clip_grad_norm_(net.parameters(), plan.clip)
                optimizer.step()
                update += 1
            seconds += time.perf_counter() - begin
            yield Epoch(
                epoch=segment.epoch,
                seconds=seconds,
                instances=len(segment),
                loss=loss_sum / len(segment),
                updates=len(segment.batches),
                valid=shares_right(net, valid, unseen),
            )
            begin = time.perf_counter()


def shares_right(net: ListRnn, lists: Lists, unseen: Tensor) -> dict[str, float]:
    """Return the shares of the lists, and of those marked as unseen, that are labelled right."""
    right = (predict(net, lists) == lists.label).double()
    shares = {"accuracy": right.mean().item()}
    if unseen.any():
        shares["unseen"] = right[unseen].mean().item()
    return shares


def add_gradients(net: ListRnn, method: Method, lists: Lists, rows: Tensor) -> float:
    """Add the gradient of the mean loss of some lists to the parameters; return that loss."""
    groups = rows.split(1) if method == "single" else (rows,)  # type: ignore[no-untyped-call]
    run = net.bucketed if method == "single" else getattr(net, method)
    total = 0.0
    for group in groups:
        length = lists.length[group]
        scores = run(lists.tokens[: int(length[0]), group], length)
        loss = F.cross_entropy(scores, lists.label[group]) * (len(group) / len(rows))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def train_under(terms: Terms, method: Method, rate: float | None = None) -> Iterator[Epoch]:
    """Do as ``train`` does, under the terms of a comparison.

    Args:
        terms: With the options ``train_size``, ``valid_size`` and ``hidden``.
        method: One of the six above.
        rate: Adam's highest; None takes the tuned one.
    """
    lr = rate_at(terms.batch, RATES) if rate is None else rate
    return train(
        method,
        ListPlan(batch=terms.batch, epochs=terms.epochs, lr=lr),
        seed=terms.seed,
        lists=int(terms.options["train_size"]),
        validation=int(terms.options["valid_size"]),
        hidden=int(terms.options["hidden"]),
        evaluate_every=terms.evaluate_every,
    )


def _baseline(name: Method, what: str, batch: int, *, slow: bool = False) -> Baseline:
    train = partial(train_under, method=name)
    return Baseline(name=name, what=what, batch=batch, epochs=4, train=train, slow=slow)


BASELINES: Final = (
    _baseline("single", "nn.RNN, one list at a time", 100, slow=True),
    _baseline("packed", "nn.RNN, packed minibatches of any lengths", 200),
    _baseline("bucketed", "nn.RNN, minibatches of one length", 100),
    _baseline("loop", "bucketed, the cell as a Python loop", 100, slow=True),
    _baseline("folded", "loop, input weights applied to the 14 symbols", 100),
    _baseline("mixed", "folded, any lengths, ended lists drop out", 200),
)

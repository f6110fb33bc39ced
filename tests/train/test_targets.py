"""Targets and the best checkpoint, and what is called the loss where a graph has several."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.instrument import Progress

SGD = partial(torch.optim.SGD, lr=0.1)


def test_a_target_ends_the_run_and_the_best_checkpoint_is_kept(
    make_line, make_rows, recorder, tmp_path
):
    line, rows, dev = make_line(), make_rows(200), make_rows(50, seed=1)
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=0.05), update_every=16)
    session = gt.Session(line.graph, rules=rules, runtime=gt.Simulated(), instruments=[recorder])
    fit = session.fit(
        rows,
        epochs=50,
        valid=dev,
        until=gt.Target("accuracy", 0.95),
        folder=tmp_path,
        keep_last=2,
    )
    assert fit.reached is not None and fit.reached.value >= 0.95
    assert fit.reached.epochs == len(fit.history) < 50
    assert recorder.events[-1].outcome == "target reached"
    assert len(list(tmp_path.glob("checkpoint-*.safetensors"))) == min(2, len(fit.history))
    fresh = gt.Session(make_line(seed=9).graph, runtime=gt.Simulated())
    fresh.load(tmp_path / "best.safetensors", weights_only=True)
    best = max(e.valid["accuracy"] for e in fit.history)
    assert fresh.evaluate(dev).metrics["accuracy"] == pytest.approx(best)


def test_the_best_checkpoint_is_not_replaced_by_a_worse_one(make_line, make_rows, tmp_path):
    dev = make_rows(50, seed=1)
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.3, maximize=True))
    session = gt.Session(make_line().graph, rules=rules, runtime=gt.Simulated())
    fit = session.fit(make_rows(200), epochs=3, valid=dev, folder=tmp_path)
    losses = [e.valid["loss"] for e in fit.history]
    assert losses == sorted(losses)  # uphill: the first epoch was the best
    fresh = gt.Session(make_line(seed=9).graph, runtime=gt.Simulated())
    fresh.load(tmp_path / "best.safetensors", weights_only=True)
    assert fresh.evaluate(dev).metrics["loss"] == pytest.approx(losses[0])
    fresh.load(tmp_path / "latest.safetensors", weights_only=True)
    assert fresh.evaluate(dev).metrics["loss"] == pytest.approx(losses[-1])


def test_targets_are_read_from_text_and_compared():
    assert gt.Target.parse(" all >= 0.81 ") == gt.Target("all", 0.81)
    assert gt.Target.parse("loss<=5e-1") == gt.Target("loss", 0.5, at_least=False)
    assert str(gt.Target.parse("loss<=0.5")) == "loss<=0.5"
    for wrong in ("all>0.8", "all", ">=1", "all>=x"):
        with pytest.raises(ValueError, match="METRIC>=VALUE"):
            gt.Target.parse(wrong)
    assert gt.Target("a", 1.0).reached({"a": 1.0}) and not gt.Target("a", 1.0).reached({"a": 0.9})
    assert gt.Target("a", 1.0, at_least=False).reached({"a": 0.9})
    with pytest.raises(ValueError, match="'b'"):
        gt.Target("a", 1.0).reached({"b": 1.0})
    assert gt.Target("a", 1.0).better(0.1, math.nan)
    assert not gt.Target("a", 1.0).better(math.nan, 0.1)


def two_losses(one="loss", other="loss"):
    """A graph with a loss for both columns of two labels, each counted in rows of its own."""
    torch.manual_seed(0)
    graph = gt.Graph(vertex=("label",))
    low, high = graph.input("x").where(lambda m: m.vertex == 0)
    low.through(nn.Linear(2, 2), name="a").loss(gt.cross_entropy, target="label", label=one)
    high.through(nn.Linear(2, 2), name="b").loss(gt.cross_entropy, target="label", label=other)
    return graph


def bags():
    made = torch.Generator().manual_seed(1)
    return [
        gt.Instance({"x": torch.randn(n, 2, generator=made)}, {"label": [k % 2] * n})
        for k, n in enumerate((1, 3, 2, 4))
    ]


def test_loss_is_the_mean_of_all_labels_where_none_is_called_so(recorder, tmp_path):
    told, fits = [], []
    for names in ((), ("a", "b")):
        session = gt.Session(two_losses(*names), rules=gt.Rules(optimizer=SGD))
        session.instruments = [recorder] if names else []
        fits.append(session.fit(bags(), epochs=3, valid=bags(), folder=tmp_path if names else None))
        told.append([(e.loss, e.valid["loss"]) for e in fits[-1].history])
    assert told[0] == pytest.approx(np.array(told[1]))
    assert set(fits[1].history[0].metrics) == {"a", "b"}
    assert set(fits[1].valid) == {"a", "b", "loss"}
    assert not any(math.isnan(e.loss) for e in recorder.events if isinstance(e, Progress))


def test_the_best_checkpoint_is_that_of_the_least_loss_whatever_losses_are_called(tmp_path):
    graph = two_losses("a", "b")
    session = gt.Session(graph, rules=gt.Rules(optimizer=SGD))
    fit = session.fit(bags(), epochs=3, valid=bags(), folder=tmp_path)
    losses = [e.valid["loss"] for e in fit.history]
    assert losses[2] < losses[0]
    session.load(tmp_path / "best.safetensors")
    assert session.evaluate(bags()).metrics["loss"] == pytest.approx(min(losses))


def test_a_loss_that_is_called_so_is_not_mixed_with_others():
    fit = gt.Session(two_losses("loss", "b"), rules=gt.Rules(optimizer=SGD)).fit(bags(), epochs=1)
    alone = gt.Session(two_losses("loss", None), rules=gt.Rules(optimizer=SGD))
    assert fit.history[0].loss == pytest.approx(alone.fit(bags(), epochs=1).history[0].loss)


def test_a_target_may_be_the_loss_of_all_labels():
    session = gt.Session(two_losses("a", "b"), rules=gt.Rules(optimizer=SGD))
    until = gt.Target("loss", 100.0, at_least=False)
    assert session.fit(bags(), epochs=2, valid=bags(), until=until).reached is not None

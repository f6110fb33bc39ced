"""Evaluation within epochs: when, of what, and what it leaves alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import geartrain as gt
from geartrain.engine.instrument import EpochEnded, Updated
from geartrain.runtime.threads import Threads
from geartrain.train.checkpoint import read_checkpoint
from geartrain.train.fitting import Fitting
from tests.rigs.sessions import session_of

ADAM = partial(torch.optim.Adam, lr=0.05)
RULES = gt.Rules(optimizer=ADAM, update_every=7)


class Endless:
    """Knows no length."""

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        return iter(self._items)


def session(graph, **options):
    given = {"runtime": gt.Simulated(2, seed=4, jitter=0.4), "max_active": 6, "rules": RULES}
    return session_of(graph, **{**given, **options})


def test_the_history_has_an_entry_for_each_share_of_an_epoch(make_line, make_rows, recorder):
    trained = session(make_line().graph, instruments=[recorder])
    fit = trained.fit(make_rows(50), epochs=2, valid=make_rows(9, seed=1), evaluate_every=0.4)
    assert [e.epoch for e in fit.history] == [0.4, 0.8, 1, 1.4, 1.8, 2]
    assert [e.instances for e in fit.history] == [20, 20, 10] * 2
    assert recorder.of(EpochEnded) == list(fit.history)
    times = [e.time_s for e in fit.history]
    assert times == sorted(times)
    assert sum(e.seconds for e in fit.history) == pytest.approx(fit.train_seconds)
    assert fit.train_seconds == pytest.approx(times[-1])
    steps = {part: sum(e.updates.get(part, 0) for e in fit.history) for part in ("first", "second")}
    told = recorder.of(Updated)
    assert steps == {part: sum(u.part == part for u in told) for part in steps}
    rows = sum(len(i.inputs["x"]) for i in make_rows(50))
    assert sum(sum(e.staleness["second"].histogram) for e in fit.history) == 2 * rows


def test_an_entry_evaluates_the_weights_of_its_time(make_line, make_rows, tmp_path):
    dev = make_rows(20, seed=1)
    trained = session(make_line().graph)
    fit = trained.fit(
        make_rows(60), epochs=1, valid=dev, evaluate_every=0.5, folder=tmp_path, keep_last=9
    )
    half = session(make_line(seed=5).graph)
    half.load(tmp_path / "checkpoint-00000030.safetensors")
    assert half.evaluate(dev).metrics == fit.history[0].valid
    assert trained.evaluate(dev).metrics == fit.history[1].valid


def test_one_at_a_time_the_weights_are_those_of_a_run_without(make_line, make_rows):
    """Gradients that wait for their update wait across an evaluation."""
    rows, dev = make_rows(50), make_rows(9, seed=1)
    often, once = (session(make_line().graph, max_active=1) for _ in range(2))
    often.fit(rows, epochs=2, valid=dev, evaluate_every=0.1)
    once.fit(rows, epochs=2, valid=dev)
    for part, other in zip(often.parts.values(), once.parts.values(), strict=True):
        assert part.version == other.version
        for p, q in zip(part.parameters, other.parameters, strict=True):
            torch.testing.assert_close(p, q)


def test_a_target_ends_the_run_within_the_epoch_and_fit_goes_on_from_there(
    make_line, make_rows, tmp_path
):
    rows, dev = make_rows(40), make_rows(20, seed=1)
    trained = session(make_line().graph)
    target = gt.Target("loss", 100.0, at_least=False)
    fit = trained.fit(rows, epochs=2, valid=dev, until=target, evaluate_every=0.25, folder=tmp_path)
    assert fit.reached is not None
    assert fit.reached.epochs == 0.25
    assert fit.reached.seconds == fit.history[-1].time_s == fit.train_seconds
    assert (fit.instances, fit.valid) == (10, fit.history[0].valid)
    assert (tmp_path / "best.safetensors").exists()
    resumed = session(make_line(seed=5).graph)
    resumed.load(tmp_path / "latest.safetensors")
    for goes_on in (trained, resumed):
        rest = goes_on.fit(rows, epochs=1, valid=dev, evaluate_every=0.25)
        assert [e.epoch for e in rest.history] == [0.25, 0.5, 0.75, 1]
        assert rest.instances == 30


@pytest.mark.parametrize(
    "stop", [20, 25, 60, *(pytest.param(k, marks=pytest.mark.slow) for k in (30, 75))]
)
def test_a_run_resumed_within_an_epoch_is_the_uninterrupted_one(
    make_line, make_rows, tmp_path, stop
):
    def make(seed):
        return session(make_line(seed=seed).graph)

    whole, rows, dev = make(0), make_rows(50), make_rows(9, seed=1)
    options = {"epochs": 2, "valid": dev, "evaluate_every": 0.5, "checkpoint_every": 10}
    fit = whole.fit(rows, folder=tmp_path, keep_last=99, **options)
    resumed = make(1)
    resumed.load(tmp_path / f"checkpoint-{stop:08d}.safetensors")
    again = resumed.fit(rows, folder=tmp_path / "again", **options)
    assert again.history == fit.history
    (one, at), (other, where) = whole.state.snapshot(), resumed.state.snapshot()
    assert at == where
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_an_evaluation_that_was_interrupted_is_made_up_for(make_line, make_rows, monkeypatch):
    rows, dev = make_rows(40), make_rows(9, seed=1)
    trained = session(make_line().graph)
    evaluate, calls = type(trained.state).evaluate, []

    def interrupted(self, *given, **options):
        calls.append(self.position.taken)
        if calls == [20]:
            raise KeyboardInterrupt
        return evaluate(self, *given, **options)

    monkeypatch.setattr(type(trained.state), "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained.fit(rows, epochs=1, valid=dev, evaluate_every=0.5)
    fit = trained.fit(rows, epochs=1, valid=dev, evaluate_every=0.5)
    assert calls == [20, 20, 40]
    assert [e.epoch for e in fit.history] == [0.5, 1]


def test_drained_minibatches_stay_whole(make_line, make_rows):
    rules = gt.Rules(optimizer=ADAM, update_every=gt.Instances(8))
    trained = session(
        make_line().graph, rules=rules, max_active=8, drain=True, ramp=gt.Ramp(over=0)
    )
    fit = trained.fit(make_rows(50), epochs=1, valid=make_rows(9, seed=1), evaluate_every=0.25)
    assert [e.instances for e in fit.history] == [16, 16, 8, 10]
    assert all(p.max == 0 for e in fit.history for p in e.staleness.values())


def test_copies_meet_before_they_are_evaluated(make_line, make_rows, tmp_path):
    trained = session(make_line().graph, sharing=gt.PartCopies(2))
    trained.fit(
        make_rows(60), epochs=1, valid=make_rows(9, seed=1), evaluate_every=0.5,
        folder=tmp_path, keep_last=9,
    )  # fmt: skip
    half = read_checkpoint(tmp_path / "checkpoint-00000030.safetensors").tensors
    for part in ("first", "second"):
        one, other = (half[f"{name}/weights/weight"] for name in (part, f"{part}#1"))
        assert torch.equal(one, other)


def test_data_without_a_length_have_no_shares(make_line, make_rows):
    trained = session(make_line().graph)
    with pytest.raises(ValueError, match="do not know their length"):
        trained.fit(Endless(make_rows(9)), epochs=1, valid=make_rows(3), evaluate_every=0.5)


def test_what_is_done_between_stretches_counts_as_training_where_seconds_are_real(
    make_line, make_rows, monkeypatch
):
    spent = []
    spend = Fitting._spend

    def noted(self, seconds):
        spent.append(seconds)
        spend(self, seconds)

    monkeypatch.setattr(Fitting, "_spend", noted)
    for runtime, least in ((Threads(1), 6), (gt.Simulated(), 2)):
        spent.clear()
        trained = session(make_line().graph, runtime=runtime)
        fit = trained.fit(make_rows(10), epochs=1, valid=make_rows(3), evaluate_every=0.5)
        assert fit.train_seconds == pytest.approx(sum(spent))
        # Segments; on threads also the making of engines, meetings and the flush.
        assert len(spent) >= least

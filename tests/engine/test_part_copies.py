"""Copies of a part: rows go to the copy of their instance, and copies meet."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close

import geartrain as gt
from geartrain.parts.part import PartState
from tests.rigs.pairs import graph_of_pairs, pairs, square


def copies_of(session: gt.Session) -> list[PartState]:
    """``first`` and its copies."""
    return [part for name, part in session.parts.items() if name.partition("#")[0] == "first"]


def copies(n: int, every: int | None = None) -> gt.PartCopies:
    return gt.PartCopies({"first": n}, gt.Average(every))


@pytest.mark.parametrize("runtime", [gt.Simulated(3, jitter=0.5), gt.Threads(2), gt.Threads(1)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_gradients_of_all_copies_add_up_to_those_of_one(runtime, replicas: int) -> None:
    sums = []
    for k in (1, replicas):
        rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.0), update_every=gt.Flush())
        session = gt.Session(
            graph_of_pairs(),
            rules=rules,
            runtime=runtime,
            reading=gt.Reading(shuffle=False),
            sharing=copies(k),
        )
        taken = {}

        def spy(part, taken=taken) -> None:
            step = part.step

            def remember(progress: int):
                for name, value in part.pending_gradients().items():
                    key = (part.name.partition("#")[0], name)
                    taken[key] = taken.get(key, 0) + value
                return step(progress)

            part.step = remember

        for part in session.parts.values():
            spy(part)
        session.fit(pairs(20), epochs=1)
        assert len(copies_of(session)) == k
        sums.append(taken)
    assert set(sums[0]) == set(sums[1])
    for key, value in sums[0].items():
        assert_close(value, sums[1][key], rtol=1e-12, atol=1e-12)


def test_copies_live_on_different_workers_and_every_one_gets_rows() -> None:
    session = gt.Session(
        graph_of_pairs(),
        sharing=copies(2),
        runtime=gt.Simulated(2),
        reading=gt.Reading(shuffle=False),
    )
    session.fit(pairs(40), epochs=1)
    engine = session.state.engine
    assert engine is not None
    nodes = engine.nodes_by_worker()
    assert nodes["first"] != nodes["first#1"]
    assert nodes["group"] != nodes["group#1"]
    assert {c.version > 0 for c in copies_of(session)} == {True}


def test_averaging_equal_copies_changes_nothing_and_unequal_ones_become_their_mean() -> None:
    session = gt.Session(graph_of_pairs(), sharing=copies(2), rules=gt.Rules(update_every=2))
    a, b = copies_of(session)
    before = {n: p.detach().clone() for n, p in a.module.named_parameters()}
    gt.Average().mix([a, b])
    for name, p in [*a.module.named_parameters(), *b.module.named_parameters()]:
        assert torch.equal(p, before[name])
    with torch.no_grad():
        b.module.weight.add_(2.0)
    gt.Average().mix([a, b])
    for copy in (a, b):
        assert_close(copy.module.weight.detach(), before["weight"] + 1.0)


def test_copies_are_equal_after_every_epoch_and_after_every_meeting() -> None:
    session = gt.Session(
        graph_of_pairs(),
        sharing=copies(3, every=8),
        rules=gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4),
        runtime=gt.Simulated(3),
        max_active=4,
    )
    met = []
    mix = gt.Average.mix

    class Counts(gt.AbstractInstrument):
        def on_epoch_ended(self, event) -> None:
            one, *others = copies_of(session)
            for copy in others:
                for p, q in zip(copy.parameters, one.parameters, strict=True):
                    assert torch.equal(p, q)
                    state, other = copy.optimizer.state[p], one.optimizer.state[q]
                    assert torch.equal(state["exp_avg"], other["exp_avg"])
            met.append(event.epoch)

    session.instruments.append(Counts())
    calls = []
    try:
        gt.Average.mix = lambda self, copies: (calls.append(1), mix(self, copies))  # type: ignore
        session.fit(pairs(32), epochs=2)
    finally:
        gt.Average.mix = mix  # type: ignore
    assert met == [1, 2]
    assert len(calls) == 2 * 4 + 2  # every 8 of 32 instances, and at the end of each epoch


def test_copies_are_saved_and_come_back(tmp_path) -> None:
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4)
    session = gt.Session(graph_of_pairs(), sharing=copies(2), rules=rules, runtime=gt.Simulated(2))
    session.fit(pairs(20), epochs=1)
    with torch.no_grad():
        copies_of(session)[1].module.weight.add_(0.5)
    session.save(tmp_path / "a.safetensors")
    other = gt.Session(graph_of_pairs(), sharing=copies(2), rules=rules, runtime=gt.Simulated(2))
    other.load(tmp_path / "a.safetensors")
    for name, part in session.parts.items():
        for p, q in zip(part.parameters, other.parts[name].parameters, strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("runtime", [gt.Simulated(1), gt.Threads(2)])
def test_draining_admission_is_minibatch_training(runtime) -> None:
    data = pairs(24)
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=gt.Instances(4))
    graph = graph_of_pairs()
    session = gt.Session(
        graph,
        rules=rules,
        runtime=runtime,
        max_active=4,
        schedule=gt.Schedule(drain=True, ramp=gt.Ramp(over=0)),
        reading=gt.Reading(shuffle=False),
    )
    session.fit(data, epochs=1)

    plain = graph_of_pairs()
    first, last = plain.modules()
    sgd = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    for k in range(0, 24, 4):
        x = torch.stack([d.inputs["x"] for d in data[k : k + 4]])
        root = first(x).sum(1).tanh()
        losses = square(last(root))
        sgd.zero_grad()
        losses.sum().backward()
        for p in first.parameters():
            p.grad /= 8  # gradient rows: two leaves a tree
        for p in last.parameters():
            p.grad /= 4
        sgd.step()
    for p, q in zip(graph.modules(), plain.modules(), strict=True):
        for a, b in zip(p.parameters(), q.parameters(), strict=True):  # type: ignore[attr-defined]
            assert_close(a, b, rtol=1e-10, atol=1e-12)

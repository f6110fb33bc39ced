"""The front door: what goes in, what comes out, and what stays as it was."""

from __future__ import annotations

import copy
import math
import random
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import geartrain as gt
import geartrain.train.fitting as fitting_module
from geartrain.engine.instrument import EpochEnded, Fired, Progress, RunEnded, RunStarted, Updated
from geartrain.nn.dropout import RowDropout
from geartrain.train.observer import Observer
from tests.rigs.sessions import session_of

SGD = partial(torch.optim.SGD, lr=0.1)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.05)


class Pairs(Dataset):
    """Map-style items that are no instances."""

    def __init__(self, instances):
        self._instances = instances

    def __len__(self):
        return len(self._instances)

    def __getitem__(self, i):
        return self._instances[i].inputs["x"], self._instances[i].vertex["label"]


class ConvertsByEpoch:
    """An object whose call asks for the epoch."""

    def __init__(self):
        self.seen = []

    def __call__(self, pair, *, epoch):
        self.seen.append(epoch)
        return to_instance(pair)


class Again:
    """Starts anew for every epoch; knows no length."""

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        return iter(self._items)


def to_instance(pair):
    x, label = pair
    return gt.Instance({"x": x}, {"label": label})


def simulated(graph, **options):
    options.setdefault("rules", gt.Rules(optimizer=SGD, update_every=8))
    return session_of(graph, runtime=options.pop("runtime", None) or gt.Simulated(), **options)


@pytest.mark.parametrize("shards", [None, "static", "pull"])
def test_convert_is_told_the_epoch_if_it_asks_for_it(shards, make_line, make_rows, tmp_path):
    def session(convert):
        copies = None
        if shards is not None:
            copies = gt.Neighbours(copies=2, exchange="weights", shards=shards)
        return simulated(make_line().graph, convert=convert, sharing=copies)

    pairs = Pairs(make_rows(12))
    convert = ConvertsByEpoch()
    told = session(convert)
    told.fit(pairs, epochs=2, folder=tmp_path, checkpoint_every=6, keep_last=9)
    assert [convert.seen.count(epoch) for epoch in (1, 2)] == [12, 12]
    assert convert.seen[0] == 0 == convert.seen.index(0)  # one item was looked at first, for shapes
    convert.seen.clear()
    told.evaluate(pairs)
    told.predict(pairs)
    assert convert.seen == [0] * 24
    convert.seen.clear()
    resumed = session(convert)
    resumed.load(sorted(tmp_path.glob("*18*.safetensors"))[0])
    resumed.fit(pairs, epochs=3)
    assert [convert.seen.count(epoch) for epoch in (1, 2, 3)] == [0, 6, 12]


@pytest.mark.parametrize(
    "convert",
    [to_instance, lambda pair, *epoch: to_instance(pair), lambda pair, **k: to_instance(pair)],
    ids=["plain", "positional", "named"],
)
def test_convert_is_told_no_epoch_that_it_does_not_name(convert, make_line, make_rows):
    fit = simulated(make_line().graph, convert=convert).fit(Pairs(make_rows(5)), epochs=1)
    assert fit.instances == 5


@pytest.mark.parametrize("kind", ["list", "dataset", "loader", "loader of singles", "iterable"])
def test_instances_come_from_any_iterable(kind, make_line, make_rows, weights_of):
    rows = make_rows(30)
    pairs = Pairs(rows)
    data, convert = {
        "list": (rows, None),
        "dataset": (pairs, to_instance),
        "loader": (DataLoader(pairs, batch_size=7, collate_fn=list), to_instance),
        "loader of singles": (DataLoader(pairs, batch_size=None), to_instance),
        "iterable": (Again([pairs[i] for i in range(30)]), to_instance),
    }[kind]
    line, expected = make_line(), make_line()
    simulated(expected.graph, shuffle=False).fit(rows, epochs=2)
    fit = simulated(line.graph, shuffle=False, convert=convert).fit(data, epochs=2)
    assert fit.instances == 60
    for ours, theirs in zip(
        weights_of([line.first, line.second]),
        weights_of([expected.first, expected.second]),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_a_generator_is_refused_as_it_can_be_read_once_only(make_line, make_rows):
    session = simulated(make_line().graph)
    with pytest.raises(TypeError, match="generator, which can be read once only; give a list"):
        session.fit((i for i in make_rows(3)), epochs=1)


def test_items_that_are_no_instances_are_refused_with_the_remedy(make_line, make_rows):
    session = simulated(make_line().graph)
    with pytest.raises(gt.DataError, match=r"the data gave a tuple.*convert="):
        session.fit(Pairs(make_rows(3)), epochs=1)
    with pytest.raises(gt.DataError, match="NoneType"):
        simulated(make_line().graph, convert=lambda item: None).fit(make_rows(3), epochs=1)


def test_data_without_an_instance_is_an_error_not_an_epoch(make_line):
    session = simulated(make_line().graph)
    with pytest.raises(gt.DataError, match="no instance in epoch 1"):
        session.fit([], epochs=2)


def test_the_modules_of_the_user_hold_the_trained_weights(make_line, make_rows):
    line, rows, dev = make_line(), make_rows(300), make_rows(80, seed=1)
    session = gt.Session(line.graph, rules=gt.Rules(optimizer=ADAM, update_every=16))
    session.fit(rows, epochs=3)
    x = torch.cat([i.inputs["x"] for i in dev])
    label = torch.from_numpy(np.concatenate([i.vertex["label"] for i in dev]))
    accuracy = float((line(x).argmax(1) == label).double().mean())
    assert accuracy > 0.9
    assert session.evaluate(dev).metrics["accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("runtime", [gt.Simulated(2, seed=3, jitter=0.5), gt.Threads(2)])
def test_predictions_are_in_the_order_of_the_instances(runtime, make_line, make_rows):
    line, rows = make_line(), make_rows(200)
    session = gt.Session(
        line.graph, runtime=runtime, max_active=50, schedule=gt.Schedule(max_rows=7)
    )
    without_targets = [gt.Instance(i.inputs) for i in rows]
    predicted = session.predict(without_targets)
    assert len(predicted) == 200
    for instance, logits in zip(rows, predicted, strict=True):
        torch.testing.assert_close(logits, line(instance.inputs["x"]))


def test_predictions_of_trees_are_sorted_by_vertex(make_forest, make_trees):
    forest, trees = make_forest(), make_trees(60)
    many = gt.Session(
        forest.graph, runtime=gt.Threads(2), max_active=60, schedule=gt.Schedule(max_rows=5)
    )
    one = gt.Session(forest.graph, runtime=gt.Simulated(), max_active=1)
    both = zip(trees, many.predict(trees), one.predict(trees), strict=True)
    for tree, ours, alone in both:
        assert ours.shape == (len(tree.vertex["parent"]), 3)
        torch.testing.assert_close(ours, alone)
        leaves = forest.readout(forest.word(tree.inputs["word"]))
        torch.testing.assert_close(ours[: len(leaves)], leaves)


def test_several_outputs_come_by_name_and_several_tensors_as_tuples(make_rows):
    graph = gt.Graph()
    x = graph.input("x")
    positive, rest = x.where(lambda m: m.payload[0][:, 0] > 0)
    positive.through(lambda x: (x, 2 * x), name="double").output("two")
    rest.through(torch.neg, name="negative").output("one")
    session = gt.Session(graph, runtime=gt.Threads(2), max_active=20)
    rows = make_rows(60)
    for instance, found in zip(rows, session.predict(rows), strict=True):
        x = instance.inputs["x"]
        assert set(found) == {"one", "two"}
        assert torch.equal(found["one"], -x[x[:, 0] <= 0])
        a, b = found["two"]
        assert torch.equal(a, x[x[:, 0] > 0]) and torch.equal(b, 2 * a)


def test_an_output_that_no_instance_reaches_is_empty_for_each(make_rows):
    graph = gt.Graph()
    never, always = graph.input("x").where(lambda m: m.vertex < 0)
    never.output("never")
    always.output("always")
    found = gt.Session(graph).predict(make_rows(3, rows=2))
    assert [len(f["never"]) for f in found] == [0, 0, 0]
    assert [len(f["always"]) for f in found] == [2, 2, 2]


def test_bundles_are_predicted_whole(make_rows):
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    graph = gt.Graph(value=("answer",))
    stream = graph.input("x", bundle=True).through(linear, name="linear")
    stream.loss(torch.nn.functional.mse_loss, target="answer")
    rows = make_rows(40)
    session = gt.Session(graph, runtime=gt.Threads(2), max_active=16)
    for instance, found in zip(rows, session.predict(rows), strict=True):
        torch.testing.assert_close(found, linear(instance.inputs["x"]))


@pytest.mark.parametrize("data", ["list", "loader"])
def test_an_evaluation_changes_nothing(data, make_forest, make_trees):
    forest, trees = make_forest(), make_trees(40)
    session = gt.Session(
        forest.graph,
        rules=gt.Rules(optimizer=ADAGRAD, update_every=gt.Instances(50), average="instances"),
        runtime=gt.Simulated(),
        reading=gt.Reading(
            convert=lambda tree: (tree.key == 20 and signal.raise_signal(signal.SIGINT), tree)[1]
        ),
    )
    with pytest.raises(KeyboardInterrupt):
        session.fit(trees, epochs=1)  # so that gradients wait for their step
    session.reading = gt.Reading(
        convert=lambda tree: (torch.rand(1), np.random.rand(), random.random(), tree)[-1]
    )
    assert session.parts["embed"].pending_gradients()
    forest.branch.eval()
    before = copy.deepcopy(session.state.snapshot())
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    valid = trees if data == "list" else DataLoader(trees, batch_size=4, collate_fn=list)
    first, second = session.evaluate(valid), session.evaluate(valid)
    assert first.metrics == second.metrics and first.instances == 40
    after = session.state.snapshot()
    assert after[0].keys() == before[0].keys()
    assert all(torch.equal(after[0][k], before[0][k]) for k in before[0])
    assert after[1] == before[1]
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    assert (np.random.get_state()[1] == state[2]).all()
    assert not forest.branch.training and forest.readout.training


def test_validation_between_epochs_leaves_training_as_it_is(make_forest, make_trees, weights_of):
    found = []
    for valid in (None, make_trees(10, seed=5)):
        forest = make_forest()
        session = simulated(forest.graph, runtime=gt.Simulated(2, jitter=0.3), max_active=8)
        session.fit(make_trees(24), epochs=3, valid=valid)
        found.append(weights_of([forest.word, forest.branch, forest.readout]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_one_seed_gives_bit_equal_weights_twice_and_another_does_not(
    make_forest, make_trees, weights_of
):
    found = []
    for seed in (1, 1, 2):
        forest = make_forest()
        session = gt.Session(
            forest.graph,
            rules=gt.Rules(optimizer=ADAGRAD, update_every=20),
            runtime=gt.Simulated(3, seed=seed, jitter=0.5),
            max_active=16,
            seed=seed,
        )
        session.fit(make_trees(30), epochs=2)
        found.append(torch.cat([w.flatten() for w in weights_of([forest.word, forest.branch])]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_modules_come_back_in_the_mode_in_which_they_came(make_line, make_rows):
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            if x.device.type != "meta":
                seen.append(self.training)
            return super().forward(x)

    line = make_line(wrap=lambda name, module: Spy(3, 4) if name == "first" else module)
    spy = line.graph.modules()[0]
    spy.eval()
    session = simulated(line.graph)
    session.predict(make_rows(3))  # the first time the graph is checked, in both modes
    assert not spy.training
    seen.clear()
    session.fit(make_rows(3), epochs=1)
    assert set(seen) == {True} and not spy.training
    seen.clear()
    spy.train()
    session.predict(make_rows(3))
    assert set(seen) == {False} and spy.training


class Freezes(nn.Linear):
    """Says in what mode it is to be, and stays in evaluation mode whatever it is told."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.told: list[bool] = []

    def train(self, mode: bool = True) -> Freezes:
        self.told.append(mode)
        return super().train(False)


def test_who_overrides_train_is_told_of_each_pass(make_rows):
    graph, module = gt.Graph(vertex=("label",)), Freezes()
    hidden = graph.input("x").through(nn.Linear(3, 4), name="first")
    hidden.through(module, name="second").loss(gt.cross_entropy, target="label")
    session = simulated(graph)
    session.fit(make_rows(3), epochs=2, valid=make_rows(3))
    assert module.told == [True, False, True, False] and module.training


def test_dropout_keeps_its_mask_in_training_and_is_off_in_evaluation(make_rows):
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    masks = []

    class Seen(nn.Module):
        """Sees what dropout made of its rows."""

        def forward(self, x):
            masks.append(x.detach().clone())
            return x

    graph = gt.Graph(vertex=("label",))
    dropped = graph.input("x").through(RowDropout(0.5), name="dropout")
    seen = dropped.through(Seen(), name="seen", keep="inputs")
    seen.through(linear, name="linear").loss(gt.cross_entropy, target="label")
    rules = gt.Rules(optimizer=SGD, update_every=gt.Flush(), average="none")
    session = gt.Session(
        graph, rules=rules, runtime=gt.Simulated(), max_active=1, reading=gt.Reading(shuffle=False)
    )
    rows = make_rows(20, rows=2)
    plain = copy.deepcopy(linear)
    session.predict(rows)  # the first time the graph is checked, which runs the module too
    masks.clear()
    session.fit(rows, epochs=1)
    forward, again = masks[0::2], masks[1::2]  # one in flight: an instance's backward follows
    assert len(masks) == 40 and all(map(torch.equal, forward, again))
    x, dropped_x = torch.cat([i.inputs["x"] for i in rows]), torch.cat(forward)
    assert 0.2 < float((dropped_x == 0).double().mean()) < 0.8
    torch.testing.assert_close(dropped_x[dropped_x != 0], 2 * x[dropped_x != 0])
    label = torch.from_numpy(np.concatenate([i.vertex["label"] for i in rows]))
    nn.functional.cross_entropy(plain(dropped_x), label, reduction="sum").backward()
    SGD(plain.parameters()).step()
    torch.testing.assert_close(linear.weight, plain.weight)
    torch.testing.assert_close(linear.bias, plain.bias)
    masks.clear()
    session.evaluate(rows)
    torch.testing.assert_close(torch.cat(masks), x)


def test_the_ramp_is_on_by_default_and_survives_a_resume(
    make_line, make_rows, recorder, monkeypatch, tmp_path
):
    clock = iter(range(10**9))
    monkeypatch.setattr(fitting_module, "Observer", partial(Observer, clock=lambda: next(clock)))
    rows = make_rows(1000)
    session = simulated(make_line().graph, instruments=[recorder], max_active=64, max_rows=4)
    session.fit(rows, epochs=1, folder=tmp_path)
    active = [e.active for e in recorder.of(Progress) if e.finished < 950]
    early = max(active[: len(active) // 8])
    late = max(active)
    assert early < 8 and 15 < late < 64
    recorder.events.clear()
    resumed = simulated(make_line().graph, instruments=[recorder], max_active=64, max_rows=4)
    resumed.load(tmp_path / "latest.safetensors")
    resumed.fit(rows, epochs=2)
    active = [e.active for e in recorder.of(Progress) if 100 < e.finished < 900]
    assert min(active) > late * 0.6 and max(active) > 55


def test_the_events_of_a_run_come_in_order_and_add_up(make_line, make_rows, recorder):
    rows, dev = make_rows(50, rows=2), make_rows(10, seed=1)
    session = simulated(make_line().graph, instruments=[recorder])
    fit = session.fit(rows, epochs=2, valid=dev)
    first, last = recorder.events[0], recorder.events[-1]
    assert isinstance(first, RunStarted) and isinstance(last, RunEnded)
    assert (first.runtime, first.workers, first.epochs) == ("simulated", 1, 2)
    assert set(first.nodes.values()) == {0} and "first" in first.graph_text
    assert first.graph_mermaid.startswith("flowchart")
    assert (last.outcome, last.instances, last.message) == ("done", 100, "")
    assert last.train_seconds == fit.train_seconds > 0
    epochs = recorder.of(EpochEnded)
    assert [e.epoch for e in epochs] == [1, 2] and list(fit.history) == epochs
    assert epochs[0].instances == 50 and set(epochs[0].valid) == {"loss", "accuracy"}
    updated = recorder.of(Updated)
    assert sum(e.updates["first"] for e in epochs) == len([u for u in updated if u.part == "first"])
    # also the step of the flush, with the rows that were left
    assert sum(u.rows for u in updated if u.part == "first") == 200
    assert [u.version for u in updated if u.part == "second"] == list(
        range(1, session.parts["second"].version + 1)
    )
    fired = [f for f in recorder.of(Fired) if f.node == "first" and f.direction == "backward"]
    assert sum(f.rows for f in fired) == 200
    assert all(f.part == "first" and f.end_s >= f.start_s for f in fired)
    ends = [p for p in recorder.of(Progress) if p.finished == p.total]
    assert [(p.mode, p.epoch, p.total) for p in ends] == [
        ("train", 1, 50),
        ("evaluate", 1, 10),
        ("train", 2, 50),
        ("evaluate", 2, 10),
    ]
    assert all(p.active == 0 for p in ends)
    assert ends[0].loss == pytest.approx(epochs[0].loss)
    assert sum(epochs[0].staleness["first"].histogram) == 100


def test_firings_are_told_only_to_those_who_want_them(make_line, make_rows, recorder):
    recorder.wants_firings = False
    simulated(make_line().graph, instruments=[recorder]).fit(make_rows(5), epochs=1)
    assert not recorder.of(Fired) and recorder.of(Updated)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": -1}, "epochs=-1"),
        ({"epochs": 1, "checkpoint_every": 5}, "want a folder"),
        ({"epochs": 1, "keep_last": 1}, "want a folder"),
        ({"epochs": 1, "checkpoint_every": 0, "folder": "unused"}, "checkpoint_every=0"),
        ({"epochs": 1, "until": gt.Target("accuracy", 1.0)}, "wants validation data"),
        (
            {"epochs": 1, "until": gt.Target("acuracy", 1.0), "valid": []},
            r"until=acuracy>=1: the graph's losses have \['accuracy', 'loss'\]",
        ),
        ({"epochs": 1, "evaluate_every": 0.5}, "evaluate_every=0.5 wants validation data"),
        ({"epochs": 1, "evaluate_every": 2.0, "valid": []}, "evaluate_every=2: give a share"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_before_training(
    options, message, make_line, make_rows
):
    session = simulated(make_line().graph)
    with pytest.raises(ValueError, match=message):
        session.fit(make_rows(3), **options)
    assert session.statistics()["trained"] == 0


def test_a_fit_with_nothing_to_do_says_so(make_line, make_rows, caplog):
    session = simulated(make_line().graph)
    session.fit(make_rows(3), epochs=2)
    fit = session.fit(make_rows(3), epochs=2)
    assert fit.instances == 0 and len(fit.history) == 2
    assert "has trained 2 epochs already" in caplog.text
    assert session.fit(make_rows(3), epochs=3).instances == 3


class Costly(nn.Linear):
    """Takes long, on purpose, and has fewer parameters than the cheap one."""

    def forward(self, x):
        y = x
        for _ in range(300):
            y = torch.tanh(y)
        return super().forward(x) + 0 * y[:, :1]


def costly_and_cheap():
    torch.manual_seed(0)
    costly = [Costly(3, 3), Costly(3, 3)]
    cheap = [nn.Linear(3, 64), nn.Linear(64, 3)]
    graph = gt.Graph(vertex=("label",))
    stream = graph.input("x").through(costly[0], name="costly_1").through(cheap[0], name="wide")
    stream = stream.through(cheap[1], name="narrow").through(costly[1], name="costly_2")
    stream.loss(gt.cross_entropy, target="label")
    return graph


def test_the_two_costly_parts_end_on_different_workers_after_the_measurement(make_rows):
    session = gt.Session(costly_and_cheap(), runtime=gt.Threads(2), max_active=16)
    session.fit(make_rows(400), epochs=1)
    assert session.state.engine is not None
    at = session.state.engine.nodes_by_worker()
    assert {at["costly_1"], at["costly_2"]} == {0, 1}
    assert set(session.state.costs) >= {"costly_1", "costly_2", "wide", "narrow"}
    # by numbers of parameters, as before the measurement, the wide two would be kept apart
    unmeasured = gt.Session(costly_and_cheap(), runtime=gt.Simulated(2))
    unmeasured.fit(make_rows(5), epochs=1)
    assert unmeasured.state.engine is not None
    at = unmeasured.state.engine.nodes_by_worker()
    assert {at["wide"], at["narrow"]} == {0, 1}


def test_placement_by_hand_is_honoured(make_rows, recorder):
    session = gt.Session(
        costly_and_cheap(),
        runtime=gt.Threads(2),
        schedule=gt.Schedule(placement={"costly_1": 1, "costly_2": 1, "narrow": 0, "loss": 0}),
        instruments=[recorder],
    )
    session.fit(make_rows(80), epochs=1)
    started = recorder.events[0]
    assert started.nodes["costly_1"] == started.nodes["costly_2"] == 1
    assert {f.worker for f in recorder.of(Fired) if f.node.startswith("costly")} == {1}
    assert {f.worker for f in recorder.of(Fired) if f.node in ("narrow", "loss")} == {0}


@pytest.mark.parametrize(
    ("placement", "message"),
    [({"frist": 0}, "'frist'.*'first'"), ({"first": 2}, r"worker 2; there are 0\.\.1")],
)
def test_a_placement_of_unknown_names_or_workers_is_refused(
    placement, message, make_line, make_rows
):
    session = gt.Session(
        make_line().graph, runtime=gt.Threads(2), schedule=gt.Schedule(placement=placement)
    )
    with pytest.raises(ValueError, match=message):
        session.fit(make_rows(3), epochs=1)


def test_nothing_is_left_running_after_a_fit(make_line, make_rows):
    before = threading.active_count()
    session = gt.Session(make_line().graph, runtime=gt.Threads(2))
    session.fit(make_rows(50), epochs=2, valid=make_rows(5))
    assert threading.active_count() == before
    assert session.state.engine is not None
    session.state.engine.check_empty()


def test_skipped_instances_are_counted(make_line, make_rows, caplog):
    def convert(instance):
        if instance.key == 0:
            raise gt.DataError("unbalanced", path="trees.txt", line=7)
        return instance

    rows = make_rows(20)
    bad = [gt.Instance({"x": torch.full((1, 3), math.nan)}, {"label": [0]}, key="nan")]
    session = simulated(make_line().graph, convert=convert, on_bad="skip")
    fit = session.fit(rows[:1] + bad + rows[1:], epochs=1)
    assert (fit.skipped, fit.instances) == (2, 19)
    assert "trees.txt:7: unbalanced" in caplog.text and "instance nan" in caplog.text
    assert session.evaluate(rows).instances == 19
    for runtime in (gt.Simulated(), gt.Threads(2)):
        only_bad = simulated(
            make_line().graph, on_bad="skip", convert=convert, runtime=runtime, shuffle=False
        )
        assert only_bad.fit(bad * 10 + rows[:1] * 10, epochs=1).skipped == 20
    with pytest.raises(gt.DataError, match=r"trees\.txt:7"):
        simulated(make_line().graph, convert=convert).fit(rows, epochs=1)


def test_gradients_pass_through_frozen_parts_whose_weights_stay(make_rows):
    torch.manual_seed(0)
    modules = [nn.Linear(3, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]
    modules.append(nn.Linear(4, 2))
    graph = gt.Graph(vertex=("label",))
    stream = graph.input("x")
    for name, module in zip(("first", "still", "frozen", "last"), modules, strict=True):
        stream = stream.through(module, name=name)
    stream.loss(gt.cross_entropy, target="label")
    rules = gt.Rules(optimizer=SGD, update_every=gt.Flush(), average="none")
    session = gt.Session(graph, rules=rules, max_active=8)
    session.parts["frozen"].frozen = True
    before = copy.deepcopy(modules)
    rows = make_rows(12)
    fit = session.fit(rows, epochs=1)
    assert {k: v for k, v in fit.history[0].updates.items() if v} == {"first": 1, "last": 1}
    for at in (1, 2):
        assert torch.equal(modules[at].weight, before[at].weight)
    x = torch.cat([i.inputs["x"] for i in rows])
    label = torch.from_numpy(np.concatenate([i.vertex["label"] for i in rows]))
    plain = nn.Sequential(*before)
    nn.functional.cross_entropy(plain(x), label, reduction="sum").backward()
    SGD([*before[0].parameters(), *before[3].parameters()]).step()
    for at in (0, 3):
        torch.testing.assert_close(modules[at].weight, before[at].weight)


def test_parts_step_by_their_own_rules_in_one_session(make_line, make_rows):
    overrides = {
        "first": {"optimizer": partial(torch.optim.SGD, lr=0.0), "update_every": gt.Instances(10)},
        "second": {"update_every": 30, "clip": gt.Clip(norm=1e-3), "average": "none"},
    }
    line = make_line(wrap=lambda name, module: gt.Part(module, **overrides[name]))
    first, second = line.first.weight.detach().clone(), line.second.weight.detach().clone()
    session = simulated(line.graph, max_active=1)
    fit = session.fit(make_rows(60, rows=1), epochs=1)
    assert fit.history[0].updates == {"first": 6, "second": 2}
    assert torch.equal(line.first.weight, first)
    moved = float((line.second.weight.detach() - second).norm())
    assert 0 < moved <= 2 * 0.1 * 1e-3


def test_a_limit_over_all_parts_is_by_the_norms_of_their_last_steps(make_line, make_rows):
    line, twin = make_line(), make_line()
    rules = gt.Rules(optimizer=SGD, update_every=gt.Instances(1), clip=gt.Clip(0.2, over="all"))
    data = make_rows(20)
    session = simulated(line.graph, rules=rules, max_active=1, shuffle=False)
    session.fit(data, epochs=1)
    last = {"first": 0.0, "second": 0.0}
    modules = {"first": twin.first, "second": twin.second}
    for instance in data:
        label = torch.as_tensor(instance.vertex["label"])
        for module in modules.values():
            module.zero_grad()
        nn.functional.cross_entropy(twin(instance.inputs["x"]), label).backward()
        for name in session.parts:  # the order in which they step
            gradients = [p.grad for p in modules[name].parameters()]
            last[name] = float(torch.stack([g.norm() for g in gradients]).norm())
            factor = min(1.0, 0.2 / (math.hypot(*last.values()) + 1e-6))
            with torch.no_grad():
                for p, g in zip(modules[name].parameters(), gradients, strict=True):
                    p.sub_(g * factor, alpha=0.1)
    for ours, theirs in ((line.first, twin.first), (line.second, twin.second)):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("copies", [None, 3])
def test_a_resumed_run_goes_on_with_the_norms_of_all_parts(copies, make_line, make_rows, tmp_path):
    def session():
        ring = None if copies is None else gt.Neighbours(copies=copies, exchange="weights")
        rules = gt.Rules(optimizer=ADAM, update_every=4, clip=gt.Clip(0.01, over="all"))
        return simulated(make_line().graph, rules=rules, sharing=ring)

    whole, resumed = session(), session()
    segments = {"epochs": 2, "checkpoint_every": 10}
    whole.fit(make_rows(30), folder=tmp_path, keep_last=9, **segments)
    resumed.load(sorted(tmp_path.glob("*20*.safetensors"))[0])
    resumed.fit(make_rows(30), folder=tmp_path / "resumed", **segments)
    for name, part in whole.trained_parts.items():
        assert part.norms is not None and part.norms.last(name) > 0
        found = resumed.trained_parts[name]
        assert part.norms.last(name) == found.norms.last(name)
        for p, q in zip(part.parameters, found.parameters, strict=True):
            assert torch.equal(p, q)


def test_the_learning_rate_of_now_can_be_read_between_fits_and_while_one_runs(make_line, make_rows):
    read = []

    class Reading(gt.AbstractInstrument):
        def on_epoch_ended(self, event: EpochEnded) -> None:
            read.append(session.learning_rates())

    line = make_line()
    rules = gt.Rules(
        optimizer=SGD,
        update_every=gt.Instances(10),
        schedule=lambda trained: 1 if trained < 30 else 0.5,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.1),
    )
    session = simulated(line.graph, rules=rules, instruments=[Reading()])
    assert session.learning_rates() == {"first": [0.1], "second": [0.1]}
    session.fit(make_rows(20), epochs=2)
    assert read[0] == {"first": [0.1], "second": [0.1]}
    assert read[1]["first"] == [pytest.approx(0.005)]  # 40 instances, 4 updates
    assert session.learning_rates() == read[1]


def test_learning_rates_are_those_of_each_group_and_each_copy(make_line):
    line = make_line()

    def two_groups(parameters):
        weight, *others = parameters
        return torch.optim.SGD([{"params": [weight]}, {"params": others, "lr": 0.2}], lr=0.1)

    ring = gt.Neighbours(copies=2, exchange="weights")
    session = simulated(line.graph, rules=gt.Rules(optimizer=two_groups), sharing=ring)
    found = session.learning_rates()
    assert found == {key: [0.1, 0.2] for key in ("first#0", "first#1", "second#0", "second#1")}


def test_a_schedule_counts_the_instances_of_the_run_also_after_a_resume(
    make_line, make_rows, tmp_path
):
    asked = []

    def schedule(trained):
        asked.append(trained)
        return 1.0

    rules = gt.Rules(optimizer=SGD, update_every=gt.Instances(10), schedule=schedule)
    session = simulated(make_line().graph, rules=rules, max_active=1)
    session.fit(make_rows(30), epochs=1, folder=tmp_path)
    assert sorted(set(asked)) == [10, 20, 30]
    asked.clear()
    resumed = simulated(make_line().graph, rules=rules, max_active=1)
    resumed.load(tmp_path / "latest.safetensors")
    resumed.fit(make_rows(30), epochs=2)
    assert sorted(set(asked)) == [40, 50, 60]


def test_dense_embeddings_train_with_dense_optimizers(make_forest, make_trees):
    forest = make_forest(sparse=False)
    before = forest.word.weight.detach().clone()
    session = simulated(forest.graph, rules=gt.Rules(optimizer=ADAM, update_every=10))
    session.fit(make_trees(10), epochs=1)
    assert not torch.equal(forest.word.weight, before)


def test_copies_of_a_part_resume_to_the_last_bit(make_line, make_rows, tmp_path):
    def session(seed):
        return simulated(
            make_line(seed=seed).graph,
            rules=gt.Rules(optimizer=ADAM, update_every=6),
            runtime=gt.Simulated(2),
            sharing=gt.PartCopies({"second": 2}),
        )

    whole, rows = session(0), make_rows(50)
    whole.fit(rows, epochs=2, folder=tmp_path, checkpoint_every=20, keep_last=9)
    resumed = session(1)
    resumed.load(tmp_path / "checkpoint-00000070.safetensors")
    resumed.fit(rows, epochs=2, folder=tmp_path / "again", checkpoint_every=20)
    (one, at), (other, where) = whole.state.snapshot(), resumed.state.snapshot()
    assert at == where and one.keys() == other.keys()
    assert "second#1/weights/weight" in one
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert torch.equal(one["second/weights/weight"], one["second#1/weights/weight"])

"""Gears and replays against plain PyTorch, one fresh minibatch in flight; then many."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.errors import CheckpointError, GraphError
from geartrain.train.checkpoint import read_checkpoint
from tests.rigs.stages import (
    ADAM,
    SGD,
    Stage,
    assert_equal_weights,
    batches,
    begin,
    bits_equal,
    blocks,
    greedy,
    heads,
    instances,
    losses,
    plain_backprop,
    plain_greedy,
    session,
    train,
    weights,
)

BOTH = pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
NEVER = gt.Gear("never")


def geared(modules, gears):
    """Parts in a row, each with its gear."""
    graph = gt.Graph()
    stream = begin(graph)
    for k, (module, gear) in enumerate(zip(modules, gears, strict=True)):
        part = gt.Part(Stage(module), keep="graph", name=f"part {k}", gear=gear)
        stream = stream.through(part, name=f"stage {k}")
    stream.loss(losses)
    return graph


def plain_periods(modules, data, steps, optimizer=SGD):
    """Backpropagation in which optimiser k steps on minibatch t only if ``steps(k, t)``."""
    optimizers = [optimizer(m.parameters()) for m in modules]
    for t, (x, y) in enumerate(data):
        for o in optimizers:
            o.zero_grad()
        losses(nn.Sequential(*modules)(x), y).mean().backward()
        for k, o in enumerate(optimizers):
            if steps(k, t):
                o.step()


def plain_replays(modules, data, at, pick, optimizer=SGD):
    """A plain step, and then steps of parts ``at`` and up on stored inlets ``pick(t)``."""
    optimizers = [optimizer(m.parameters()) for m in modules]
    stored = []
    for t, (x, y) in enumerate(data):
        h = nn.Sequential(*modules[:at])(x)
        stored.append((h.detach(), y))
        for k, (inlet, target) in enumerate([(h, y), *(stored[i] for i in pick(t))]):
            for o in optimizers:
                o.zero_grad()
            losses(nn.Sequential(*modules[at:])(inlet), target).mean().backward()
            for o in optimizers[at:] if k else optimizers:
                o.step()


@BOTH
def test_a_ratio_of_one_with_a_buffer_of_one_is_plain_training(optimizer):
    ours, theirs = blocks(), blocks()
    graph = gt.Graph()
    stream = begin(graph)
    for module in ours:
        stream = stream.replay(times=0, buffer=1)
        stream = stream.through(Stage(module), keep="graph", gear=gt.Gear(1, buffer=1))
    stream.loss(losses)
    train(graph, batches(), optimizer)
    plain_backprop(theirs, batches(), optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


@BOTH
@pytest.mark.parametrize("periods", [(4, 2, 1), (4, 4, 2), (6, 3, 3)])
def test_periods_are_backpropagation_in_which_each_part_steps_on_its_own_turns(optimizer, periods):
    ours, theirs = blocks(3), blocks(3)
    train(geared(ours, map(gt.Gear, periods)), batches(9), optimizer)
    plain_periods(theirs, batches(9), lambda k, t: t % periods[k] == 0, optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


@BOTH
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_skipping_weights_alone_leaves_the_gradients_below_whole(optimizer, slow):
    ours, theirs = blocks(3), blocks(3)
    gears = [gt.Gear(3, skip="weights") if k == slow else gt.Gear() for k in range(3)]
    train(geared(ours, gears), batches(8), optimizer)
    plain_periods(theirs, batches(8), lambda k, t: k != slow or t % 3 == 0, optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


@BOTH
@pytest.mark.parametrize("at", [0, 1, 2])
def test_replays_are_steps_more_of_the_parts_above_on_detached_rows(optimizer, at):
    ours, theirs = blocks(3), blocks(3)
    gears = [gt.Gear(replays=2) if k == at else gt.Gear() for k in range(3)]
    made = train(geared(ours, gears), batches(), optimizer)
    plain_replays(theirs, batches(), at, lambda t: [t, t], optimizer)
    assert_equal_weights(weights(ours), weights(theirs))
    updates = made.statistics()["versions"]
    assert updates == {f"part {k}": 15 if k >= at else 5 for k in range(3)}


@BOTH
def test_a_part_that_never_learns_is_a_frozen_one(optimizer):
    ours, theirs = blocks(3), blocks(3)
    train(geared(ours, [NEVER, NEVER, gt.Gear()]), batches(), optimizer)
    plain_periods(theirs, batches(), lambda k, t: k == 2, optimizer)
    assert_equal_weights(weights(ours), weights(theirs))
    assert bits_equal(weights(ours[:2]), weights(blocks(3)[:2]))


@BOTH
def test_a_frozen_part_above_hands_the_gradient_down(optimizer):
    ours, theirs = blocks(3), blocks(3)
    gears = [gt.Gear(), gt.Gear(), gt.Gear("never", skip="weights")]
    train(geared(ours, gears), batches(), optimizer)
    plain_periods(theirs, batches(), lambda k, t: k < 2, optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


@BOTH
def test_gears_shift_at_the_minibatch_that_was_named(optimizer):
    ours, theirs = blocks(2), blocks(2)
    train(geared(ours, [gt.Gear({0: 1, 4: 2, 7: "never"}), gt.Gear()]), batches(10), optimizer)
    turns = [0, 1, 2, 3, 4, 6]
    plain_periods(theirs, batches(10), lambda k, t: k == 1 or t in turns, optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


def test_turns_are_counted_through_epochs():
    ours, theirs = blocks(2), blocks(2)
    made = session(geared(ours, [gt.Gear(2), gt.Gear()]))
    made.fit(instances(batches(5)), epochs=3)
    plain_periods(theirs, batches(5) * 3, lambda k, t: k == 1 or t % 2 == 0)
    assert_equal_weights(weights(ours), weights(theirs))


def test_running_statistics_and_dropout_see_every_minibatch_of_a_slow_part():
    norm, expected = (nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2))
    ours = [norm, nn.Linear(3, 3).double()]
    train(geared(ours, [gt.Gear(3), gt.Gear()]), batches())
    for x, _ in batches():
        expected(x)
    assert torch.equal(norm.running_mean, expected.running_mean)
    assert int(norm.num_batches_tracked) == 5


@BOTH
def test_replays_of_a_slow_stack_step_on_every_replay(optimizer):
    """Replays make the parts above at least as fast, on their off-turns too."""
    ours, theirs = blocks(2), blocks(2)
    train(geared(ours, [gt.Gear(2), gt.Gear(2, replays=1)]), batches(), optimizer)
    optimizers = [optimizer(m.parameters()) for m in theirs]
    for t, (x, y) in enumerate(batches()):
        h = theirs[0](x)
        for inlet, steps in ((h, t % 2 == 0), (h.detach(), True)):
            for o in optimizers:
                o.zero_grad()
            losses(theirs[1](inlet), y).mean().backward()
            if steps:
                for o in optimizers if inlet is h else optimizers[1:]:
                    o.step()
    assert_equal_weights(weights(ours), weights(theirs))


def test_uniform_draws_repeat_by_their_seed_and_reach_old_rows():
    def run(seed):
        modules = blocks(2)
        graph = gt.Graph()
        stream = begin(graph).through(Stage(modules[0]), keep="graph")
        stream = stream.replay(times=2, buffer=5, draw="uniform", seed=seed)
        stream.through(Stage(modules[1]), keep="graph").loss(losses)
        train(graph, batches(8))
        return weights(modules)

    assert bits_equal(run(0), run(0))
    assert not bits_equal(run(0), run(1))


def test_rows_that_are_too_old_are_dropped():
    ours, theirs = blocks(2), blocks(2)
    gears = [gt.Gear(), gt.Gear(replays=1, buffer=9, draw="least_used", max_age=0)]
    train(geared(ours, gears), batches())
    plain_replays(theirs, batches(), 1, lambda t: [t])
    assert_equal_weights(weights(ours), weights(theirs))


def test_replays_from_below_pass_the_buffers_above():
    """Speed of a part: one update, and those of all replays at its inlet or below."""
    modules = blocks(3)
    gears = [gt.Gear(), gt.Gear(replays=1), gt.Gear(replays=2)]
    made = train(geared(modules, gears), batches(5))
    assert made.statistics()["versions"] == {"part 0": 5, "part 1": 10, "part 2": 20}


@BOTH
@pytest.mark.parametrize("draw", ["newest", "least_used", "uniform"])
def test_decoupled_greedy_learning_with_a_buffer_of_one_in_lock_step_is_greedy(optimizer, draw):
    ours, our_heads, theirs, their_heads = blocks(), heads(), blocks(), heads()
    graph = greedy(ours, our_heads, times=1, buffer=1, draw=draw, fresh=False)
    train(graph, batches(), optimizer)
    plain_greedy(theirs, their_heads, batches(), optimizer)
    assert_equal_weights(weights(ours, our_heads), weights(theirs, their_heads))


@BOTH
def test_decoupled_greedy_learning_trains_on_what_its_buffers_hold(optimizer):
    ours, our_heads, theirs, their_heads = blocks(2), heads(2), blocks(2), heads(2)
    graph = greedy(ours, our_heads, times=2, buffer=2, draw="least_used", fresh=False)
    train(graph, batches(4), optimizer)
    parts = (*theirs, their_heads[0])
    optimizers = [optimizer(m.parameters()) for m in parts]

    def step(loss, members):
        for o in optimizers:
            o.zero_grad()
        loss.mean().backward()
        for i in members:
            optimizers[i].step()

    stored, uses = [], {}
    for t, (x, y) in enumerate(batches(4)):
        h = theirs[0](x)
        stored.append((h.detach(), y))
        step(losses(their_heads[0](h), y), [0, 2])
        uses[t] = 0
        for _ in range(2):
            i = min(range(max(0, t - 1), t + 1), key=lambda i: (uses[i], -i))
            uses[i] += 1
            inlet, target = stored[i]
            step(losses(theirs[1](inlet), target), [1])
    assert_equal_weights(weights(ours, our_heads), weights(theirs, their_heads))


@pytest.mark.parametrize("runtime", ["simulated", "threads"])
@pytest.mark.parametrize("fresh", [True, False])
def test_many_minibatches_in_flight_leave_nothing_behind(runtime, fresh):
    made = gt.Threads(2) if runtime != "simulated" else gt.Simulated(3, seed=3, jitter=0.5)
    modules = blocks()
    if fresh:
        gears = [gt.Gear(2), gt.Gear(1, replays=1, buffer=3, draw="uniform"),
                 gt.Gear(3, skip="weights"), gt.Gear(replays=2)]  # fmt: skip
        graph = geared(modules, gears)
    else:
        graph = greedy(modules, heads(), times=2, buffer=4, draw="least_used", fresh=False)
    before = weights(modules)
    run = session(graph, runtime=made, max_active=5)
    run.fit(instances(batches(7)), epochs=2, valid=instances(batches(2)))
    assert not any(torch.equal(a, b) for a, b in zip(weights(modules), before, strict=True))


@pytest.mark.parametrize("draw", ["newest", "least_used", "uniform"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(tmp_path, draw):
    def made():
        modules = blocks(3)
        gears = [gt.Gear({0: 1, 9: 2}), gt.Gear(), gt.Gear(replays=2, buffer=4, draw=draw)]
        return modules, session(geared(modules, gears), ADAM)

    data = instances(batches(7))
    whole, run = made()
    run.fit(data * 3, epochs=1)  # in one go: nothing is handed over
    _, stopped = made()
    stopped.fit(data, epochs=1, folder=tmp_path / "part", checkpoint_every=5, keep_last=9)
    (middle,) = (tmp_path / "part").glob("*00000005.safetensors")
    resumed, run = made()
    run.load(middle)
    run.fit(data, epochs=3, folder=tmp_path / "rest", checkpoint_every=5)
    assert bits_equal(weights(whole), weights(resumed))


def test_buffers_outlive_evaluations_and_epochs():
    runs = []
    for epochs in (1, 3):
        modules = blocks(2)
        graph = geared(modules, [gt.Gear(), gt.Gear(replays=2, buffer=4, draw="uniform")])
        run = session(graph)
        data = instances(batches(4)) * (3 // epochs)
        for epoch in range(1, epochs + 1):
            run.fit(data, epochs=epoch, valid=instances(batches(1)))
        runs.append(weights(modules))
    assert bits_equal(*runs)


def test_a_checkpoint_with_buffers_does_not_fit_a_graph_without(tmp_path):
    made = train(geared(blocks(2), [gt.Gear(), gt.Gear(replays=1)]), batches(2))
    made.save(tmp_path / "c.safetensors")
    (entry,) = read_checkpoint(tmp_path / "c.safetensors").document["memories"]["replay"]["entries"]
    assert entry == {"minibatch": 1, "uses": 2, "width": 2, "rows": 5}  # sent fresh, and replayed
    other = session(geared(blocks(2), [gt.Gear(), gt.Gear()]))
    with pytest.raises(CheckpointError, match=r"holds buffers of \['replay'\]"):
        other.load(tmp_path / "c.safetensors")
    other.load(tmp_path / "c.safetensors", weights_only=True)


def test_a_gear_that_starves_a_part_below_is_refused_and_names_both():
    with pytest.raises(GraphError, match=r"'stage 2' has period 2 .* 'stage 1' below it has perio"):
        train(geared(blocks(3), [gt.Gear(6), gt.Gear(3), gt.Gear(2)]), batches(1))
    with pytest.raises(GraphError, match="'stage 1' has period never"):
        train(geared(blocks(2), [gt.Gear(2), NEVER]), batches(1))


def test_behind_a_cut_a_part_is_as_slow_as_it_likes():
    modules = blocks(2)
    graph = gt.Graph()
    stream = begin(graph).through(Stage(modules[0]), keep="graph", name="low")
    stream.through(Stage(nn.Linear(6, 3).double()), keep="graph", name="head").loss(losses)
    stream = stream.detach()
    stream.through(Stage(modules[1]), keep="graph", name="high", gear=gt.Gear(5)).loss(losses)
    versions = train(graph, batches(6)).statistics()["versions"]
    assert versions == {"low": 6, "head": 6, "high": 2}


def test_rows_that_are_replayed_may_not_read_the_frame_of_their_instance():
    graph = gt.Graph(vertex=("label",))
    stream = graph.input("x", bundle=True).replay()
    stream.through(nn.Linear(3, 3), keep="graph").loss(gt.cross_entropy, target="label")
    instance = gt.Instance({"x": torch.randn(2, 3)}, {"label": [0, 1]})
    with pytest.raises(GraphError, match="'loss' reads 'label' of the instance"):
        gt.Session(graph).fit([instance], epochs=1)


def test_the_printed_graph_tells_gears_and_replays():
    told = str(geared(blocks(2), [gt.Gear(2), gt.Gear(replays=1, buffer=3)]))
    assert "period 2, skips backward" in told and "1 times, newest of 3" in told

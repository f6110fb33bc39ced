"""Weight views against autograd and against recursions written out by hand, in float64."""

from __future__ import annotations

import copy
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.errors import GraphError, ProtocolError
from geartrain.nodes.inside import Inside
from geartrain.parts.part import PartState
from tests.rigs.pipes import (
    ADAM,
    EACH,
    MOMENTUM,
    SGD,
    OneNode,
    chain,
    close,
    error,
    minibatches,
    plain,
    session,
    stages,
    weights_of,
)
from tests.rigs.products import halved, in_pairs
from tests.rigs.sessions import session_of

VIEWS = [
    gt.Stashed(),
    gt.Mixed(),
    gt.Recomputed(),
    gt.DoubleBuffered(),
    gt.Predicted(),
    gt.Predicted(by="difference"),
    gt.Predicted(backward=0),
    gt.Corrected(),
]
DELAYS = [
    None,
    gt.AnnealedRate(over=10),
    gt.ScaledByStaleness(),
    gt.DelayCompensated(),
    gt.DelayCompensated(2.0, adaptive=0.95),
    gt.GapAware(),
]


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def affine() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, 2).double()


def autograd(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(module(x), [x, *module.parameters()], dy))


def late(module: nn.Module, view: gt.AbstractView, **rules: object) -> list[torch.Tensor]:
    """Gradients of a message between whose forward and backward two updates were made."""
    one = OneNode(module, view=view, **rules)
    torch.manual_seed(4)
    x, dy = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    sent = one.forward(x)
    one.step_by_chance()
    one.step_by_chance()
    dx = one.backward(sent, dy)
    assert one.part.histogram()[-1] == 5 and len(one.part.histogram()) == 3
    one.node.check_empty()
    return [dx, *one.gradients()]


def of_late() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)


def test_a_stash_gives_autograds_gradient_at_the_weights_of_then():
    module = two_layers()
    then = copy.deepcopy(module)
    close(late(module, gt.Stashed()), autograd(then, *of_late()))


def test_running_again_gives_autograds_gradient_at_the_weights_of_now():
    module = two_layers()
    found = late(module, gt.Recomputed())
    close(found, autograd(module, *of_late()))


def test_mixed_is_running_again_for_one_affine_map_and_nothing_of_the_kind_for_two_layers():
    module = affine()
    close(late(module, gt.Mixed()), autograd(module, *of_late()))
    module = two_layers()
    then = copy.deepcopy(module)
    found = late(module, gt.Mixed())
    for other in (module, then):
        exact = autograd(other, *of_late())
        assert not torch.allclose(found[0], exact[0], rtol=1e-3)
        assert not torch.allclose(found[1], exact[1], rtol=1e-3)


def test_mixed_weights_are_one_copy_however_many_updates_are_made():
    one = OneNode(two_layers(), view=gt.Mixed())
    before = [p.data_ptr() for p in one.part.module.parameters()]
    x, dy = of_late()
    sent = [one.forward(x) for _ in range(3)]
    one.step_by_chance()
    assert [p.data_ptr() for p in one.part.module.parameters()] == before
    for each in sent:
        one.backward(each, dy)


def test_a_correction_of_no_delay_is_mixed_and_a_correction_of_the_last_update_is_a_stash():
    module = affine()
    once = copy.deepcopy(module)
    close(late(module, gt.Corrected(delay=0)), autograd(module, *of_late()))
    # decay 0: the mean of updates is the last one, and going back by one undoes it.
    one = OneNode(once, view=gt.Corrected(decay=0.0))
    then = copy.deepcopy(once)
    x, dy = of_late()
    sent = one.forward(x)
    one.step_by_chance()
    close([one.backward(sent, dy), *one.gradients()], autograd(then, x, dy))
    assert [p.tolist() for p in one.part.module.parameters()] != [
        p.tolist() for p in then.parameters()
    ]


def test_the_correction_is_the_papers_running_mean():
    one = OneNode(affine(), view=gt.Corrected(decay=0.3, delay=2))
    (weight, _) = one.part.module.parameters()
    mean, gamma = torch.zeros_like(weight), 0.3 ** (1 / 2)
    for _ in range(5):
        old = weight.detach().clone()
        one.step_by_chance()
        mean = gamma * mean + (1 - gamma) * (weight.detach() - old)
    x, dy = of_late()
    dx = one.backward(one.forward(x), dy)
    close(dx, dy @ (weight.detach() - 2 * mean))


def test_no_steps_ahead_are_the_weights_of_now():
    for by in ("momentum", "difference"):
        one = OneNode(two_layers(), view=gt.Predicted(steps=0, by=by), optimizer=MOMENTUM)
        one.step_by_chance()
        seen = one.part.look(0, 1)
        assert all(torch.equal(leaf, p) for p, leaf in seen.leaves.items())


@in_pairs(
    optimizer={
        "momentum": MOMENTUM,
        "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.5, nesterov=True),
        "adam": ADAM,
        "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    },
    by=["momentum", "difference"],
    factor=[1.0, 0.25],
)
def test_with_a_constant_gradient_the_prediction_is_where_the_weights_will_be(
    optimizer, by, factor
):
    module = affine()
    part = PartState(
        "p",
        module,
        gt.Rules(
            optimizer=optimizer,
            update_every=gt.Flush(),
            average="none",
            view=gt.Predicted(steps=3, by=by),
            schedule=lambda progress: factor,
        ),
    )
    torch.manual_seed(5)
    constant = {p: torch.randn_like(p) for p in module.parameters()}

    def update() -> None:
        part.sent(1)
        for p, g in constant.items():
            part.gradient.add(p, g)
        part.received(1, np.array([part.version]))
        part._step(0)

    for _ in range(400):
        update()
    predicted = {p: leaf.detach().clone() for p, leaf in part.look(0, 1).leaves.items()}
    for _ in range(3):
        update()
    for p, leaf in predicted.items():
        torch.testing.assert_close(p.detach(), leaf, rtol=1e-9, atol=1e-9)


def test_decay_that_is_decoupled_is_predicted_too():
    module = affine()
    optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01)
    one = OneNode(module, view=gt.Predicted(steps=1), optimizer=optimizer)
    for _ in range(2):
        one.step_by_chance()
    (weight, _) = module.parameters()
    state = one.part.optimizer.state[weight]
    scale = (state["exp_avg_sq"] / (1 - 0.999**2)).sqrt() + 1e-8
    step = state["exp_avg"] / (1 - 0.9**2) / scale
    close(
        one.part.look(0, 1).leaves[weight].detach(),
        (weight - 0.1 * (step + 0.01 * weight)).detach(),
    )


def test_a_prediction_that_is_made_anew_for_the_backward_is_mixed():
    module = affine()
    one = OneNode(module, view=gt.Predicted(steps=2, backward=1), optimizer=MOMENTUM)
    for _ in range(3):
        one.step_by_chance()
    x, dy = of_late()
    (weight, bias) = module.parameters()

    def ahead(p: torch.Tensor, steps: int) -> torch.Tensor:
        return (p - steps * 0.05 * one.part.optimizer.state[p]["momentum_buffer"]).detach()

    sent = one.forward(x)
    close(sent.payload[0], x @ ahead(weight, 2).T + ahead(bias, 2))
    one.step_by_chance()
    close(one.backward(sent, dy), dy @ ahead(weight, 1))


def test_double_buffering_has_the_weights_of_the_update_before_at_any_depth():
    period, data = 4, minibatches(24)
    modules, twins = stages(4), stages(4)
    rules = gt.Rules(optimizer=MOMENTUM, update_every=gt.Messages(period), view=gt.DoubleBuffered())
    ours = session(chain(modules), rules, active=4, workers=4)
    fit = ours.fit(data, epochs=1)
    # W' = W - step of the mean of grad f(W of the update before)
    now, old = nn.Sequential(*twins), copy.deepcopy(nn.Sequential(*twins))
    optimizer = MOMENTUM(now.parameters())
    for at in range(0, len(data), period):
        total = sum(
            error(old(one.inputs["x"]), torch.from_numpy(one.vertex["y"])).mean()
            for one in data[at : at + period]
        )
        gradients = torch.autograd.grad(total / period, list(old.parameters()))
        old.load_state_dict(now.state_dict())
        for p, g in zip(now.parameters(), gradients, strict=True):
            p.grad = g
        optimizer.step()
    close(weights_of(modules), weights_of(twins))
    for staleness in fit.staleness.values():
        assert staleness.histogram == (period * 4, (len(data) - period) * 4)


def test_double_buffering_begins_anew_after_the_update_that_an_epoch_cuts_short():
    modules, twins = stages(2), stages(2)
    rules = gt.Rules(optimizer=SGD, update_every=gt.Messages(2), view=gt.DoubleBuffered())
    data = minibatches(5)
    session(chain(modules), rules, active=2, workers=2).fit(data, epochs=2)
    now = nn.Sequential(*twins)
    optimizer = SGD(now.parameters())
    for _ in range(2):
        old = copy.deepcopy(now)
        for at in (0, 2, 4):
            some = data[at : at + 2]
            total = sum(
                error(old(one.inputs["x"]), torch.from_numpy(one.vertex["y"])).mean()
                for one in some
            )
            gradients = torch.autograd.grad(total / 2, list(old.parameters()))
            old.load_state_dict(now.state_dict())
            for p, g in zip(now.parameters(), gradients, strict=True):
                p.grad = g
            optimizer.step()
    close(weights_of(modules), weights_of(twins))


def test_windows_make_a_pipeline_of_one_forward_one_backward_and_no_idle_time():
    """2 seconds a minibatch, and 2 for each further stage to fill and drain."""
    rules = gt.Rules(optimizer=SGD, update_every=EACH)
    seconds = {
        windows: session(chain(stages(4), windows=windows), rules, active=4, workers=4)
        .fit(minibatches(20), epochs=1)
        .history[0]
        .seconds
        for windows in (True, False)
    }
    assert seconds[True] == 2 * 20 + 2 * 3 < seconds[False]


@pytest.mark.parametrize("keep", ["graph", "inputs"])
def test_a_window_bounds_the_messages_that_wait_and_nothing_gets_stuck(keep):
    rules = gt.Rules(optimizer=SGD, update_every=EACH, window=1)
    graph = chain(stages(3), windows=False, keep=keep)
    for runtime in (gt.Simulated(3, jitter=0.5), gt.Threads(3, kernel_threads=1)):
        ours = gt.Session(graph, rules=rules, runtime=runtime, max_active=5)
        fit = ours.fit(minibatches(6), epochs=1)
        assert {s.histogram for s in fit.staleness.values()} == {(6 * 4,)}
        assert ours.evaluate(minibatches(6)).metrics["loss"] > 0


@pytest.mark.parametrize("depth", [2, 4, 5])
@pytest.mark.parametrize("view", [gt.Stashed(), gt.Mixed(), gt.Predicted()])
def test_with_one_forward_one_backward_part_s_of_p_is_p_minus_1_minus_s_updates_late(depth, view):
    rules = gt.Rules(optimizer=MOMENTUM, update_every=EACH, view=view)
    ours = session(chain(stages(depth)), rules, active=depth, workers=depth)
    expected: dict[str, list[int]] = {}
    for part in ours.parts.values():
        _record(part, expected.setdefault(part.name, []))
    fit = ours.fit(minibatches(20), epochs=1)
    for s in range(depth):
        counts = fit.staleness[f"stage {s}"].histogram
        late = depth - 1 - s
        assert len(counts) == late + 1
        assert counts[:late] == (4,) * late, "while the pipeline fills"
        # what the part expected when it sent a message is what came
        told = np.bincount(expected[f"stage {s}"], minlength=late + 1) * 4
        assert told.tolist() == list(counts)


def _record(part: PartState, found: list[int]) -> None:
    look = part.looking.seeing.look

    def recorded(number: int):
        found.append(part.expected_delay())
        return look(number)

    part.looking.seeing.look = recorded


@pytest.mark.parametrize(
    "update_every", [gt.Messages(3), gt.Rows(12), gt.Rows(10), gt.Instances(1)]
)
def test_a_part_knows_how_late_an_answer_will_come(update_every):
    rules = gt.Rules(optimizer=SGD, update_every=update_every)
    ours = session(chain(stages(4)), rules, active=4, workers=4)
    told: list[int] = []
    _record(ours.parts["stage 0"], told)
    fit = ours.fit(minibatches(30), epochs=1)
    counts = fit.staleness["stage 0"].histogram
    assert (np.bincount(told, minlength=len(counts)) * 4).tolist() == list(counts)


def rules_of(view, delay, optimizer) -> gt.Rules:
    return gt.Rules(optimizer=optimizer, update_every=EACH, view=view, delay=delay)


PAIRS = [(view, None) for view in VIEWS] + [(gt.Stashed(), delay) for delay in DELAYS[1:]]


@halved(pair=PAIRS, optimizer={"momentum": MOMENTUM, "adam": ADAM})
def test_one_in_flight_is_plain_training(pair, optimizer):
    view, delay = pair
    modules, twins = stages(3), stages(3)
    session(chain(modules), rules_of(view, delay, optimizer), active=1, workers=3).fit(
        minibatches(6), epochs=2
    )
    plain(twins, minibatches(6), optimizer, epochs=2)
    close(weights_of(modules), weights_of(twins))


@pytest.mark.parametrize(("view", "delay"), [p for p in PAIRS if p[0] != gt.DoubleBuffered()])
def test_one_part_is_plain_training_whatever_is_in_flight(view, delay):
    modules, twins = stages(1), stages(1)
    session(chain(modules), rules_of(view, delay, MOMENTUM), active=3).fit(minibatches(8), epochs=1)
    plain(twins, minibatches(8), MOMENTUM)
    close(weights_of(modules), weights_of(twins))


@pytest.mark.parametrize(("view", "delay"), PAIRS)
def test_in_flight_views_and_rules_make_a_difference_and_stay_finite(view, delay):
    if view == gt.Stashed() and delay is None:
        return
    found = in_flight(view, delay)
    assert found.isfinite().all()
    assert not torch.allclose(in_flight(gt.Stashed(), None, view == gt.DoubleBuffered()), found)


@cache
def in_flight(view: gt.AbstractView, delay: object, three: bool = False) -> torch.Tensor:
    """Weights after an epoch with three minibatches in flight; three: and an update of three."""
    rules = rules_of(view, delay, MOMENTUM)
    if three or view == gt.DoubleBuffered():
        rules = gt.Rules(optimizer=MOMENTUM, update_every=gt.Messages(3), view=view)
    modules = stages(3)
    session(chain(modules), rules, active=3, workers=3).fit(minibatches(12), epochs=1)
    return torch.cat([w.flatten() for w in weights_of(modules)])


def test_a_synchronous_first_phase_is_plain_training():
    modules, twins = stages(3), stages(3)
    rules = gt.Rules(optimizer=MOMENTUM, update_every=EACH, view=gt.Mixed())
    ours = session(chain(modules), rules, active=3, workers=3, ramp=gt.Synchronous(8))
    ours.fit(minibatches(8), epochs=1)
    plain(twins, minibatches(8), MOMENTUM)
    close(weights_of(modules), weights_of(twins))
    fit = ours.fit(minibatches(12), epochs=2)
    assert fit.staleness["stage 0"].max == 2


class Noisy(nn.Module):
    """Normalises over the minibatch, drops values, adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 8).double()
        self.norm, self.drop = nn.BatchNorm1d(8).double(), nn.Dropout(0.4)
        self.outer = nn.Linear(8, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.inner(x)))
        return self.outer(h + 0.1 * torch.randn_like(h) + 0.1 * torch.rand(8, dtype=h.dtype))


@pytest.mark.parametrize("view", [gt.Recomputed(), gt.Stashed()])
def test_statistics_move_once_and_chance_is_the_same_when_a_module_runs_again(view):
    torch.manual_seed(6)
    module = Noisy()
    twin = copy.deepcopy(module)
    one = OneNode(module, view=view)
    x, dy = of_late()
    torch.manual_seed(7)
    sent = one.forward(x)
    after = torch.get_rng_state()
    torch.randn(100)  # somebody else draws meanwhile
    dx = one.backward(sent, dy)
    torch.manual_seed(7)
    close([dx, *one.gradients()], autograd(twin, x, dy))
    assert torch.equal(torch.get_rng_state(), after)
    assert module.norm.num_batches_tracked == 1
    close(module.norm.running_mean, twin.norm.running_mean)


def test_chance_that_depends_on_values_cannot_run_again():
    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return y * torch.bernoulli(y.sigmoid().detach())

    one = OneNode(Sampled(), view=gt.Recomputed())
    with pytest.raises(GraphError, match=r"bernoulli.*depend on its input"):
        one.forward(of_late()[0])


def copied(**rules: object) -> gt.Session:
    graph = gt.Graph()
    stage = gt.Part(affine(), update_every=gt.Messages(64), **rules)
    graph.input("x", bundle=True).through(stage, name="stage").output()
    return gt.Session(graph, sharing=gt.PartCopies({"stage": 2}))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gt.Predicted(steps=-1), "steps=-1"),
        (lambda: gt.Predicted(by="luck"), "by='luck'"),
        (lambda: gt.Corrected(decay=1.0), "decay=1.0"),
        (lambda: gt.Corrected(delay=-1), "delay=-1"),
        (lambda: gt.Part(affine(), view=gt.Mixed(), keep="inputs"), "keep='inputs'"),
        (lambda: copied(view=gt.DoubleBuffered()), "2 copies and view=DoubleBuffered"),
        (lambda: OneNode(affine(), view=gt.DoubleBuffered()), r"update_every=Messages\(m\)"),
        (
            lambda: OneNode(affine(), view=gt.DoubleBuffered(), update_every=gt.Messages(3)),
            "max_active=4",
        ),
        (
            lambda: OneNode(affine(), view=gt.Mixed(), delay=gt.DelayCompensated()),
            "use view=Stashed",
        ),
        (
            lambda: OneNode(affine(), view=gt.Predicted(), optimizer=torch.optim.RMSprop),
            "not RMSprop; use Predicted",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_view_is_for_nodes_that_keep_graphs():
    graph = gt.Graph()
    stream = graph.input("x").through(affine(), name="node").through(torch.tanh, name="tanh")
    stream.loss(lambda y: y.square().sum(1))
    ours = gt.Session(graph, rules=gt.Rules(view=gt.Mixed()))
    with pytest.raises(GraphError, match=r"view=Mixed\(\) of part 'node' .* keep='auto'"):
        ours.fit([gt.Instance({"x": torch.zeros(1, 3, dtype=torch.float64)})], epochs=1)


def test_a_readout_that_is_never_late_may_have_any_view():
    graph = gt.Graph(vertex=("y",))
    stream = graph.input("x", bundle=True)
    stream = stream.through(gt.Part(affine(), keep="graph"), name="stage")
    readout = nn.Linear(2, 3).double()
    stream.ungroup(index="vertex").through(readout, name="readout").loss(error, target="y")
    assert "fused with" in str(graph)
    rules = gt.Rules(optimizer=SGD, update_every=EACH, view=gt.Mixed(), delay=gt.AnnealedRate(9))
    ours = session(graph, rules, active=2)
    fit = ours.fit(minibatches(4), epochs=1)
    assert fit.staleness["readout"].max == 0 and ours.parts["readout"].version == 16


def test_a_view_is_for_parts_that_workers_do_not_share():
    graph = chain(stages(1))
    rules = gt.Rules(optimizer=SGD, view=gt.Mixed())
    with pytest.raises(ValueError, match=r"sharing=SharedWeights\(.*\) and keep='graph'"):
        gt.Session(graph, rules=rules, runtime=gt.Simulated(2), sharing=gt.SharedWeights())


def test_double_buffering_refuses_messages_that_are_too_old_or_too_new():
    one = OneNode(affine(), view=gt.DoubleBuffered(), update_every=gt.Messages(4))
    one.part.look(0, 1)
    with pytest.raises(ProtocolError, match="instance 8 wants the weights after 1 updates"):
        one.part.look(8, 1)


@pytest.mark.parametrize("view", VIEWS)
def test_views_hold_on_threads(view):
    every = gt.Messages(3) if view == gt.DoubleBuffered() else EACH
    rules = gt.Rules(optimizer=MOMENTUM, update_every=every, view=view)
    modules, twins = stages(3), stages(3)
    threads = gt.Threads(3, kernel_threads=1)
    at_once = {"runtime": threads, "ramp": gt.Ramp(over=0), "shuffle": False}
    fit = session_of(chain(modules), rules=rules, max_active=3, **at_once).fit(
        minibatches(9), epochs=1
    )
    assert all(w.isfinite().all() for w in weights_of(modules))
    late = [1, 1, 1] if view == gt.DoubleBuffered() else [2, 1, 0]
    assert all(fit.staleness[f"stage {i}"].max <= most for i, most in enumerate(late))
    one = session_of(
        chain(modules := stages(3)), rules=rules_of(view, None, ADAM), max_active=1, **at_once
    )
    one.fit(minibatches(6), epochs=1)
    plain(twins, minibatches(6), ADAM)
    close(weights_of(modules), weights_of(twins))


SPIKE = partial(gt.SpikeCompensatedSGD, lr=0.05)
AHEAD = partial(gt.LookAheadSGD, lr=0.05)
RESUMED = [
    *[(v, d, MOMENTUM, gt.Messages(3) if v == gt.DoubleBuffered() else EACH) for v, d in PAIRS],
    (gt.Stashed(), None, SPIKE, gt.Messages(3)),  # the ages of two gradients that wait matter
    (gt.Predicted(), gt.GapAware(), ADAM, gt.Rows(11)),
    (gt.Stashed(), None, AHEAD, EACH),
]


@pytest.mark.parametrize(
    ("view", "delay", "optimizer", "every"),
    [
        # Slow: views that keep nothing, and settings that keep what others do.
        pytest.param(*case, marks=[pytest.mark.slow] * (k in (1, 2, 6, 10)))
        for k, case in enumerate(RESUMED)
    ],
)
def test_a_run_that_is_resumed_ends_like_one_that_was_not(view, delay, optimizer, every, tmp_path):
    def fresh() -> tuple[list[nn.Module], gt.Session]:
        modules = stages(2)
        rules = gt.Rules(optimizer=optimizer, update_every=every, view=view, delay=delay)
        return modules, session(chain(modules), rules, active=2, workers=2)

    data = minibatches(8)
    whole, ours = fresh()
    ours.fit(data, epochs=2, folder=tmp_path / "whole", checkpoint_every=5)
    _, ours = fresh()
    ours.fit(data, epochs=1, folder=tmp_path / "half", checkpoint_every=5, keep_last=9)
    first = sorted((tmp_path / "half").glob("checkpoint-*"))[0]
    assert first.name == "checkpoint-00000005.safetensors"
    resumed, ours = fresh()
    ours.load(first)
    ours.fit(data, epochs=2, folder=tmp_path / "more", checkpoint_every=5)
    assert all(
        torch.equal(a, b) for a, b in zip(weights_of(resumed), weights_of(whole), strict=True)
    )


def test_weights_of_elsewhere_are_no_update_to_be_predicted_from(tmp_path):
    rules = gt.Rules(optimizer=SGD, view=gt.Predicted(steps=2, by="difference"))
    session(chain(stages(1)), rules, active=1).save(tmp_path / "a.safetensors")
    module = stages(1)[0]
    for p in module.parameters():
        p.data.add_(1.0)
    ours = session(chain([module]), rules, active=1)
    ours.load(tmp_path / "a.safetensors", weights_only=True)
    leaves = ours.parts["stage 0"].look(0, 1).leaves
    assert all(torch.equal(leaf, p) for p, leaf in leaves.items())


def test_a_checkpoint_of_another_view_is_refused(tmp_path):
    def fresh(view: gt.AbstractView) -> gt.Session:
        rules = gt.Rules(optimizer=SGD, update_every=EACH, view=view)
        return session(chain(stages(2)), rules, active=2)

    fresh(gt.Corrected()).save(tmp_path / "a.safetensors")
    other = fresh(gt.Mixed())
    with pytest.raises(gt.CheckpointError, match=r"'Corrected'.*'Mixed'.*weights_only=True"):
        other.load(tmp_path / "a.safetensors")
    other.load(tmp_path / "a.safetensors", weights_only=True)


class Summed(nn.Module):
    """Adds what comes over the edges; the second run looks them up in another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor, inside: Inside) -> torch.Tensor:
        y = self.linear(x)
        first = not torch.is_grad_enabled()
        source = inside.edges["source"] if first else torch.from_numpy(inside.on_host("source"))
        return y.index_add(0, inside.edges["target"], y.index_select(0, source)).tanh()


def test_a_module_that_runs_again_sees_the_edges_of_its_own_instance():
    found = []
    for view in (gt.Stashed(), gt.Recomputed()):
        torch.manual_seed(5)
        graph, module = gt.Graph(vertex=("number",), edge=()), Summed()
        graph.input("x", bundle=True).through(
            gt.Part(module, "summed", keep="graph"), inside=True
        ).loss(lambda y: y.square().sum(1))
        data = [
            gt.Instance(
                {"x": torch.randn(n, 3, dtype=torch.float64)},
                vertex={"number": np.arange(n)},
                edge={"source": np.arange(n), "target": np.roll(np.arange(n), k)},
            )
            for k, n in enumerate([2, 5, 3, 7, 1, 4, 6, 2])
        ]
        rules = gt.Rules(optimizer=SGD, update_every=gt.Flush(), view=view)
        gt.Session(graph, rules=rules, max_active=4, reading=gt.Reading(shuffle=False)).fit(
            data, epochs=2
        )
        found.append([p.detach().clone() for p in module.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)

"""Optimisers for late gradients against torch's and against recursions by hand."""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.native import library
from geartrain.nodes.gradient import GradientSum
from geartrain.parts.optimizers import FusedAdam, plainly_stepped
from geartrain.parts.state import load_optimizer_state, optimizer_state_to_tensors
from tests.rigs.pipes import (
    EACH,
    OneNode,
    chain,
    close,
    minibatches,
    plain,
    session,
    stages,
    weights_of,
)

SPIKE = partial(gt.SpikeCompensatedSGD, lr=0.05, momentum=0.9)
AHEAD = partial(gt.LookAheadSGD, lr=0.05, momentum=0.9)


def positions(optimizer, gradients: list[float]) -> list[float]:
    """Of one weight that starts at 0, after each gradient."""
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    made = optimizer([w])
    found = []
    for g in gradients:
        w.grad = torch.full((1,), g, dtype=torch.float64)
        made.step()
        found.append(w.item())
    return found


@pytest.mark.parametrize("delay", [1, 2, 5])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_response_to_a_late_gradient_is_that_of_no_delay_from_its_arrival_on(delay, momentum):
    impulse = [1.0] + [0.0] * 30
    undelayed = positions(partial(torch.optim.SGD, lr=0.1, momentum=momentum), impulse)
    ours = positions(
        partial(gt.SpikeCompensatedSGD, lr=0.1, momentum=momentum, delay=delay), impulse
    )
    assert ours[: 31 - delay] == pytest.approx(undelayed[delay:], rel=1e-9)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_without_delay_it_is_sgd_with_momentum(weight_decay):
    torch.manual_seed(0)
    gradients = torch.randn(20).tolist()
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": weight_decay}
    assert positions(partial(gt.SpikeCompensatedSGD, **settings), gradients) == pytest.approx(
        positions(partial(torch.optim.SGD, **settings), gradients), rel=1e-12
    )


def test_a_part_tells_its_optimiser_how_late_the_gradients_are():
    rules = gt.Rules(optimizer=SPIKE, update_every=EACH)
    ours = session(chain(stages(4)), rules, active=4, workers=4)
    ours.fit(minibatches(12), epochs=1)
    told = [p.optimizer.param_groups[0]["measured_delay"] for p in ours.parts.values()]
    assert told == [3.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("optimizer", [SPIKE, AHEAD])
def test_one_in_flight_is_plain_training_with_the_same_optimiser(optimizer):
    modules, twins = stages(3), stages(3)
    rules = gt.Rules(optimizer=optimizer, update_every=EACH)
    session(chain(modules), rules, active=1, workers=3).fit(minibatches(8), epochs=1)
    plain(twins, minibatches(8), optimizer)
    close(weights_of(modules), weights_of(twins))


@pytest.mark.parametrize("late", [0, 1, 3])
def test_looking_ahead_is_the_papers_recursion_with_gradients_as_old_as_they_come(late):
    rate, momentum = 0.3, 0.9
    module = torch.nn.Linear(1, 1, bias=False).double()
    one = OneNode(
        module,
        optimizer=partial(gt.LookAheadSGD, lr=rate, momentum=momentum),
        update_every=gt.Messages(1),
    )
    before = now = module.weight.item()
    looked: list[float] = []
    waiting: deque = deque()
    x = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(15):
        looked.append(now + momentum * (now - before))
        assert module.weight.item() == pytest.approx(looked[-1], rel=1e-12)
        waiting.append(one.forward(x))
        if len(waiting) > late:
            sent = waiting.popleft()
            one.backward(sent, sent.payload[0])
            one.part.step_if_due(0)
            gradient = looked[len(looked) - 1 - late]  # of w² / 2
            now, before = looked[-1] - rate * (1 - momentum) * gradient, now


def test_looking_nowhere_is_sgd_and_decay_is_decoupled():
    torch.manual_seed(0)
    gradients = torch.randn(20).tolist()
    assert positions(partial(gt.LookAheadSGD, lr=0.1, momentum=0.0), gradients) == pytest.approx(
        positions(partial(torch.optim.SGD, lr=0.1), gradients), rel=1e-12
    )
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    w.grad = torch.zeros_like(w)
    gt.LookAheadSGD([w], lr=0.1, momentum=0.0, weight_decay=0.5).step()
    assert w.item() == pytest.approx(0.95)


@pytest.mark.parametrize("optimizer", [SPIKE, AHEAD])
def test_what_they_remember_is_kept_and_closures_are_called(optimizer):
    torch.manual_seed(0)
    one, two = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    first, second = optimizer([one]), optimizer([two])

    def loss(w):
        def closure():
            w.grad = None
            value = w.square().sum()
            value.backward()
            return value

        return closure

    assert first.step(loss(one)).item() == 3.0
    first.step(loss(one))
    with torch.no_grad():
        two.copy_(one)
    load_optimizer_state(second, *optimizer_state_to_tensors(first))
    first.step(loss(one))
    second.step(loss(two))
    assert torch.equal(one, two)


def test_dense_parameters_may_have_sparse_gradients_or_none():
    table = torch.nn.Embedding(4, 2, sparse=True).double()
    idle = torch.nn.Parameter(torch.ones(1))
    for optimizer in (SPIKE, AHEAD):
        made = optimizer([table.weight, idle])
        before = table.weight.detach().clone()
        table.weight.grad = None
        table(torch.tensor([1])).sum().backward()
        made.step()
        moved = (table.weight.detach() != before).any(1).tolist()
        assert moved == [False, True, False, False] and idle.item() == 1.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gt.SpikeCompensatedSGD([], momentum=1.0), "momentum=1.0"),
        (lambda: gt.LookAheadSGD([], lr=-1.0), "lr=-1.0"),
        (lambda: gt.SpikeCompensatedSGD([], delay=-1), "delay=-1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "told",
    [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.3, "eps": 0.01, "maximize": True}],
)
def test_fused_adagrad_steps_as_torchs_own(told, dtype, native, monkeypatch) -> None:
    if not native:
        monkeypatch.setattr(library, "current", lambda: None)
    torch.sparse.check_sparse_tensor_invariants.disable()
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(9, 5, generator=draw, dtype=dtype) for _ in range(3)]
    made = {}
    for kind in (torch.optim.Adagrad, gt.FusedAdagrad):
        draw.manual_seed(1)
        weights = [x.clone().requires_grad_() for x in start]
        optimizer = kind(weights, lr=0.2, **told)
        for _ in range(4):
            rows = torch.randint(9, (1, 6), generator=draw)  # some of them twice
            values = torch.randn(6, 5, generator=draw, dtype=dtype)
            weights[0].grad = torch.sparse_coo_tensor(rows, values, (9, 5))
            weights[1].grad = torch.randn(9, 5, generator=draw, dtype=dtype)
            optimizer.step()  # the third never gets one
        made[kind] = weights, optimizer.state_dict()["state"]
    (expected, state), (found, own) = made.values()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    for number, each in state.items():
        for name, value in each.items():
            torch.testing.assert_close(own[number][name], value)


def test_fused_adagrad_refuses_to_decay_the_weights_of_a_table() -> None:
    w = torch.zeros(3, 2, requires_grad=True)
    optimizer = gt.FusedAdagrad([w], weight_decay=0.1)
    w.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2))
    with pytest.raises(ValueError, match=r"weight_decay=0\.1.*a group of its own"):
        optimizer.step()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "told", [{}, {"betas": (0.8, 0.98), "weight_decay": 0.1}, {"eps": 0.01, "maximize": True}]
)
def test_fused_adam_steps_as_torchs_own(told, dtype, native, monkeypatch) -> None:
    if not native:
        monkeypatch.setattr(library, "current", lambda: None)
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(n, 5, generator=draw, dtype=dtype) for n in (900, 3, 7, 2)]
    made = {}
    for kind in (partial(torch.optim.Adam, fused=True), gt.FusedAdam):
        draw.manual_seed(1)
        weights = [x.clone().requires_grad_() for x in start]
        optimizer = kind([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.1}], **told)
        for step in range(4):
            for w in weights[: 3 - (step == 2)]:  # the fourth never gets one
                w.grad = torch.randn(w.shape, generator=draw, dtype=dtype)
            optimizer.step()
            optimizer.zero_grad()
        made[kind] = weights, optimizer.state_dict()["state"]
    (expected, state), (found, own) = made.values()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert own.keys() == state.keys()
    for number, each in state.items():
        for name, value in each.items():
            torch.testing.assert_close(own[number][name], value)


@pytest.mark.parametrize(
    "kind", [gt.FusedAdam, gt.FusedAdagrad, partial(torch.optim.Adam, fused=True)]
)
def test_steps_of_a_part_are_counted_at_its_weights_whoever_takes_them(kind) -> None:
    """Copies in bfloat16 and kept graphs know by that that weights have changed."""
    graph = gt.Graph(value=("label",))
    module = torch.nn.Linear(3, 2)
    scores = graph.input("x").through(module, name="readout")
    scores.loss(gt.cross_entropy, target="label")
    points = [gt.Instance({"x": torch.rand(1, 3)}, value={"label": k % 2}) for k in range(8)]
    session = gt.Session(graph, rules=gt.Rules(optimizer=partial(kind, lr=0.1), update_every=2))
    before = module.weight._version, module.bias._version
    session.fit(points, epochs=1)
    after = module.weight._version, module.bias._version
    assert all(b - a >= 4 for a, b in zip(before, after, strict=True))


def test_what_fused_adam_cannot_step_torch_does() -> None:
    made = []
    for kind in (partial(torch.optim.Adam, fused=True), gt.FusedAdam):
        plain, turned = torch.ones(3, 2), torch.ones(4, 3).t()
        weights = [x.requires_grad_() for x in (plain, turned)]
        optimizer = kind([{"params": [w]} for w in weights], lr=0.1)
        for _ in range(3):
            for w in weights:
                w.grad = torch.full_like(w, 0.5)
            optimizer.step()
        made.append(weights)
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["in C", "by torch"])
def test_a_step_passes_by_what_torch_puts_around_it_unless_somebody_has_asked_for_it(
    dtype: torch.dtype,
):
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = FusedAdam([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.ones(3, dtype=dtype)
        plainly_stepped(optimizer)
    other = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    its = torch.optim.Adam([other], lr=0.1)
    for _ in range(2):
        other.grad = torch.ones(3, dtype=dtype)
        its.step()
    torch.testing.assert_close(weight, other)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    plainly_stepped(optimizer)
    assert seen == ["before", "after"]


def test_a_profiler_sees_steps_of_parts():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([weight], lr=0.1)
    weight.grad = torch.ones(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        plainly_stepped(optimizer)
    assert any("Optimizer.step" in event.key for event in profiler.key_averages())


def test_a_fused_step_leaves_the_mode_of_autograd_as_it_was():
    weight = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([weight], lr=0.1)

    def closure() -> float:
        assert torch.is_grad_enabled()
        loss = (weight * weight).sum()
        loss.backward()
        return loss.item()

    def raises() -> float:
        raise KeyError("closure")

    for _ in range(3):  # by torch, then in C
        optimizer.zero_grad()
        optimizer.step(closure)
        assert torch.is_grad_enabled() and weight.is_leaf
    with pytest.raises(KeyError, match="closure"):
        optimizer.step(raises)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        optimizer.step(closure)
        assert not torch.is_grad_enabled()


def test_a_sum_that_is_taken_is_no_part_of_a_graph():
    weight = nn.Parameter(torch.zeros(2, 3))
    total = GradientSum([weight])
    left, right = torch.ones(4, 2, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    total.add_product(weight, left, right)
    taken = total.take(weight)
    assert taken is not None and not taken.requires_grad and torch.is_grad_enabled()
    assert torch.equal(taken, torch.full((2, 3), 4.0))


FUSED = {
    "Adam of ours": (gt.FusedAdam, torch.optim.Adam),
    "Adagrad of ours": (gt.FusedAdagrad, torch.optim.Adagrad),
    "Adam": (partial(torch.optim.Adam, fused=True), torch.optim.Adam),
    "AdamW": (partial(torch.optim.AdamW, fused=True), torch.optim.AdamW),
    "SGD": (
        partial(torch.optim.SGD, momentum=0.9, fused=True),
        partial(torch.optim.SGD, momentum=0.9),
    ),
}


def turned() -> nn.Linear:
    """Its weight has columns that lie one by one."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3, dtype=torch.float64)
    module.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64).t())
    return module


@pytest.mark.parametrize("loaded", [False, True], ids=["on", "loaded"])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_steps_are_right_where_weights_lie_column_by_column(kind, loaded, tmp_path) -> None:
    """Sums of gradients, and what was saved, lie row by row."""
    fused, plain = (partial(each, lr=0.05) for each in FUSED[kind])
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rules = gt.Rules(optimizer=fused, update_every=gt.Instances(8), average="instances")

    def fitted(module: nn.Module, epochs: range) -> gt.Session:
        graph = gt.Graph()
        graph.input("x").through(module, name="map").loss(lambda y: y.square().sum(1), name="size")
        session = gt.Session(graph, rules=rules)
        if epochs.start > 1:
            session.load(tmp_path / "saved.safetensors")
        for epoch in epochs:
            session.fit([gt.Instance({"x": row[None]}) for row in x], epochs=epoch)
        return session

    module, expected = turned(), turned()
    session = fitted(module, range(1, 3 if loaded else 5))
    if loaded:
        session.save(tmp_path / "saved.safetensors")
        module = turned()
        fitted(module, range(3, 5))
    optimizer = plain(expected.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        expected(x).square().sum(1).mean().backward()
        optimizer.step()
    assert module.weight.stride() == (1, 3)
    torch.testing.assert_close([*module.parameters()], [*expected.parameters()])

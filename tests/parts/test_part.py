"""Parts against steps computed by hand."""

from __future__ import annotations

import copy
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import geartrain as gt
from geartrain.parts.norms import share_norms
from geartrain.parts.part import PartState
from geartrain.parts.snapshot import check_view, load_view, view_to_tensors

SGD = partial(torch.optim.SGD, lr=0.5)


def linear_part(**rules):
    torch.manual_seed(0)
    module = nn.Linear(2, 1, bias=False).double()
    return PartState("p", module, gt.Rules(**{"optimizer": SGD, **rules}))


def feed(part, gradient, rows=1, versions=None):
    """Rows go out and their gradients come back."""
    (weight,) = part.module.parameters()
    if versions is None:
        part.sent(rows)
        versions = np.full(rows, part.version)
    part.gradient.add(weight, torch.tensor(gradient, dtype=weight.dtype).view_as(weight))
    part.received(rows, versions)


def weight_of(part):
    return part.module.weight.detach().clone().flatten()


@pytest.mark.parametrize(
    ("update_every", "due"),
    [
        (5, [False, False, True, True]),
        (gt.Rows(7), [False, False, True, True]),
        (gt.Instances(2), [False, False, False, True]),
        (gt.Flush(), [False, False, False, False]),
    ],
)
def test_a_step_falls_due_by_rows_instances_or_flush(update_every, due):
    part = linear_part(update_every=update_every)
    found = []
    for _ in range(2):
        feed(part, [1.0, 1.0], rows=4)
        found.append(part.due())
        part.finished(1)
        found.append(part.due())
    assert found == due  # after 4 rows, 1 instance, 8 rows, 2 instances


@pytest.mark.parametrize(("average", "divisor"), [("rows", 6), ("instances", 3), ("none", 1)])
def test_gradients_are_averaged_over_rows_instances_or_nothing(average, divisor):
    part = linear_part(average=average, update_every=6)
    before = weight_of(part)
    feed(part, [6.0, -12.0], rows=4)
    feed(part, [6.0, 0.0], rows=2)
    part.finished(3)
    step = part.step(0)
    assert (step.part, step.version, step.rows) == ("p", 1, 6)
    expected = before - 0.5 * torch.tensor([12.0, -12.0], dtype=torch.float64) / divisor
    torch.testing.assert_close(weight_of(part), expected)
    assert (part.counting.rows, part.counting.instances) == (0, 0)
    assert part.module.weight.grad is None


@pytest.mark.parametrize(
    ("average", "update_every", "divisor"),
    [
        ("rows", 8, 8),
        ("rows", gt.Flush(), 4),
        ("rows", gt.Instances(3), 6),
        ("instances", gt.Instances(5), 5),
    ],
)
def test_an_update_that_an_epoch_cuts_short_counts_for_its_share(average, update_every, divisor):
    part = linear_part(average=average, update_every=update_every)
    before = weight_of(part)
    feed(part, [6.0, -12.0], rows=4)
    part.finished(2)
    assert not part.due()
    part.step(0)
    expected = before - 0.5 * torch.tensor([6.0, -12.0], dtype=torch.float64) / divisor
    torch.testing.assert_close(weight_of(part), expected)


def test_a_step_without_rows_is_none():
    part = linear_part(update_every=gt.Instances(1), average="instances")
    before = weight_of(part)
    part.finished(1)
    assert part.due() and part.step(1) is None
    assert part.version == 0 and torch.equal(weight_of(part), before)
    assert not part.due()


@given(
    values=st.lists(st.floats(-5, 5), min_size=2, max_size=2),
    norm=st.one_of(st.none(), st.floats(0.1, 3)),
    value=st.one_of(st.none(), st.floats(0.1, 3)),
)
def test_clipping_is_that_of_torch(values, norm, value):
    part = linear_part(clip=gt.Clip(norm=norm, value=value), update_every=2)
    twin = copy.deepcopy(part.module)
    feed(part, values, rows=2)
    part.step(0)
    twin.weight.grad = torch.tensor([values], dtype=torch.float64) / 2
    if value is not None:
        nn.utils.clip_grad_value_(twin.parameters(), value)
    if norm is not None:
        nn.utils.clip_grad_norm_(twin.parameters(), norm)
    SGD(twin.parameters()).step()
    torch.testing.assert_close(part.module.weight, twin.weight)


def test_an_update_that_is_put_back_half_way_ends_as_the_one_that_went_on():
    rules = {"update_every": gt.Messages(3), "delay": gt.ScaledByStaleness()}
    rules |= {"clip": gt.Clip(norm=0.5, over="all"), "average": "none"}
    part, other = linear_part(**rules), linear_part(**rules)
    for each in (part, other):
        share_norms({each.name: each})
        each.version = 4

    def message(to, gradient, seen):
        to.sent(1)
        to.gradient.add(to.module.weight, torch.tensor([gradient], dtype=torch.float64))
        to.received(2, np.array([seen]), np.array([2]))

    for seen in (1, 3, 4):
        message(part, [3.0, -1.0], seen)
    assert part.step_if_due(0) is not None and part.step_delay == pytest.approx(4 / 3)
    for seen in (0, 2):
        message(part, [1.0, 2.0], seen)
    tensors, document = view_to_tensors(part)
    other.module.load_state_dict(part.module.state_dict())
    other.version, other.counting.rows = part.version, part.counting.rows
    other.load_pending_gradients(part.pending_gradients())
    load_view(other, tensors, check_view(other, tensors, json.loads(json.dumps(document))))
    for each in (part, other):
        assert (each.step_delay, each.rate_factor) == (pytest.approx(4 / 3), pytest.approx(7 / 9))
        assert each.norms.last(each.name) == pytest.approx(3 * math.hypot(3, 1))
        assert not each.due()
        message(each, [0.0, 5.0], 5)
        assert each.step_if_due(0) is not None
        assert each.step_delay == pytest.approx((5 + 3) / 3)
        assert each.rate_factor == pytest.approx((1 / 5 + 1 / 3 + 1) / 3)
    assert torch.equal(weight_of(other), weight_of(part))


def test_the_norm_is_over_all_parameters_of_the_part():
    module = nn.Linear(1, 1).double()
    part = PartState("p", module, gt.Rules(optimizer=SGD, average="none", clip=gt.Clip(norm=1.0)))
    before = [p.detach().clone() for p in module.parameters()]
    part.sent(1)
    part.gradient.add(module.weight, torch.full((1, 1), 3.0, dtype=torch.float64))
    part.gradient.add(module.bias, torch.full((1,), 4.0, dtype=torch.float64))
    part.received(1, np.zeros(1, np.int64))
    part.step(0)
    moved = [float(b - p.detach()) for b, p in zip(before, module.parameters(), strict=True)]
    assert moved == pytest.approx([0.5 * 0.6, 0.5 * 0.8], rel=1e-5)


def embedding_part(optimizer, *, sparse=True, **rules):
    torch.manual_seed(0)
    module = nn.Embedding(6, 2, sparse=sparse).double()
    part = PartState("e", module, gt.Rules(optimizer=optimizer, average="none", **rules))
    return part, copy.deepcopy(module)


def feed_rows(part, ids, rows):
    part.sent(len(ids))
    part.gradient.add_rows(part.module.weight, ids, rows)
    part.received(len(ids), np.full(len(ids), part.version))


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.Adagrad, lr=0.1),
        partial(torch.optim.SparseAdam, lr=0.1),
    ],
)
@pytest.mark.parametrize("clip", [None, gt.Clip(norm=0.5), gt.Clip(value=0.3)])
def test_sparse_gradients_with_repeated_ids_step_as_in_torch(optimizer, clip):
    part, twin = embedding_part(optimizer, clip=clip)
    theirs = optimizer(twin.parameters())
    torch.manual_seed(1)
    for _ in range(3):
        ids = torch.tensor([1, 4, 1, 1])
        rows = torch.randn(4, 2, dtype=torch.float64)
        feed_rows(part, ids[:2], rows[:2])
        feed_rows(part, ids[2:], rows[2:])
        part.step(0)
        theirs.zero_grad()
        (twin(ids) * rows).sum().backward()
        gradient = twin.weight.grad.coalesce()
        values = gradient.values()
        if clip is not None and clip.value is not None:
            values.clamp_(-clip.value, clip.value)
        if clip is not None and clip.norm is not None:
            values.mul_(min(1.0, float(clip.norm / (values.norm() + 1e-6))))
        twin.weight.grad = gradient
        theirs.step()
    torch.testing.assert_close(part.module.weight, twin.weight)
    untouched = [0, 2, 3, 5]
    assert torch.equal(
        part.module.weight[untouched], embedding_part(optimizer)[1].weight[untouched]
    )


def test_a_schedule_scales_the_rate_by_instances_and_leaves_the_options_alone():
    part = linear_part(schedule=lambda n: 1.0 if n < 10 else 0.1, average="none")
    moves = []
    for trained in (0, 9, 10, 5):
        before = weight_of(part)
        feed(part, [1.0, 1.0])
        part.step(trained)
        moves.append(float((before - weight_of(part))[0]))
    assert moves == pytest.approx([0.5, 0.5, 0.05, 0.5])
    assert part.optimizer.param_groups[0]["lr"] == 0.5


def test_a_torch_scheduler_steps_once_an_update_and_multiplies_with_a_schedule():
    part = linear_part(
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1),
        schedule=lambda n: 3.0,
        average="none",
    )
    moves = []
    for _ in range(4):
        before = weight_of(part)
        feed(part, [1.0, 0.0])
        part.step(0)
        moves.append(float((before - weight_of(part))[0]))
    assert moves == pytest.approx([1.5, 1.5, 0.15, 0.15])


def test_the_rate_of_now_is_that_of_the_next_step_also_while_one_is_taken():
    seen = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            seen.append((self.param_groups[0]["lr"], part.rates(20)))
            return super().step(closure)

    part = linear_part(
        optimizer=partial(Looking, lr=0.4),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        schedule=lambda n: 1 / (1 + n),
        average="none",
    )
    assert [part.rates(0), part.rates(3)] == [[0.4], [0.1]]
    feed(part, [1.0, 1.0])
    part.step(3)
    assert part.rates(3) == [0.05]  # the scheduler has stepped
    assert seen == [(pytest.approx(0.1), [pytest.approx(0.4 / 21)])]


def test_a_part_without_weights_that_learn_has_no_rates():
    module = nn.Linear(2, 1).requires_grad_(False)
    assert PartState("p", module, gt.Rules()).rates(0) == []


def test_a_scheduler_that_wants_a_metric_is_refused():
    with pytest.raises(ValueError, match="part 'p': ReduceLROnPlateau wants a metric"):
        linear_part(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


@pytest.mark.parametrize("given", [math.nan, math.inf, -1.0, None, "half"])
def test_a_schedule_that_gives_no_factor_is_told_before_the_weights_move(given):
    part = linear_part(schedule=lambda n: given)
    before = weight_of(part)
    feed(part, [1.0, 1.0])
    with pytest.raises(gt.WorkerError, match=rf"part 'p': schedule\(7\) gave {given!r}; it is giv"):
        part.step(7)
    assert torch.equal(weight_of(part), before)
    with pytest.raises(gt.WorkerError, match="gives a factor on the learning rate, 0 or more"):
        part.rates(7)


class Stubborn(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("not today")


class Stuck(torch.optim.lr_scheduler.ConstantLR):
    def step(self, epoch=None):
        if getattr(self, "last_epoch", -1) >= 0:
            raise KeyError("lost")
        super().step(epoch)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"optimizer": partial(Stubborn, lr=0.1)}, "RuntimeError .*'p', of Stubborn.step.*not to"),
        ({"scheduler": Stuck}, r"KeyError in a step of part 'p', of Stuck.step\(\): 'lost'"),
        ({"schedule": lambda n: [1.0][n]}, r"IndexError .*'p', of schedule\(7\): list index"),
    ],
)
def test_what_raises_in_a_step_is_told_as_of_the_part(rules, words):
    part = linear_part(**rules)
    feed(part, [1.0, 1.0])
    with pytest.raises(gt.WorkerError, match=words) as raised:
        part.step(7)
    assert raised.value.__cause__ is not None


def test_a_frozen_part_keeps_its_weights_and_no_gradient_for_later():
    part = linear_part(average="none")
    before = weight_of(part)
    part.frozen = True
    feed(part, [1.0, 1.0])
    assert part.step(0) is None
    assert torch.equal(weight_of(part), before) and part.version == 0
    part.frozen = False
    feed(part, [0.0, 2.0])
    part.step(0)
    torch.testing.assert_close(weight_of(part), before - torch.tensor([0.0, 1.0]).double())


def test_parameters_that_want_no_gradient_stay():
    module = nn.Linear(1, 1).double()
    module.bias.requires_grad_(False)
    part = PartState("p", module, gt.Rules(optimizer=SGD))
    assert part.parameters == [module.weight]
    before = module.bias.detach().clone()
    part.sent(1)
    for parameter in module.parameters():
        part.gradient.add(parameter, torch.ones_like(parameter))
    part.received(1, np.zeros(1, np.int64))
    part.step(0)
    assert torch.equal(module.bias, before)
    nothing = PartState("q", nn.Linear(1, 1).requires_grad_(False), gt.Rules(optimizer=SGD))
    assert nothing.optimizer is None and nothing.step(0) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_names_part_and_parameter_and_changes_no_weight(bad):
    module = nn.Linear(2, 2).double()
    part = PartState("head", module, gt.Rules(optimizer=partial(torch.optim.Adam, lr=1.0)))
    before = [p.detach().clone() for p in module.parameters()]
    part.sent(1)
    part.gradient.add(module.weight, torch.ones(2, 2, dtype=torch.float64))
    part.gradient.add(module.bias, torch.tensor([1.0, bad], dtype=torch.float64))
    part.received(1, np.zeros(1, np.int64))
    with pytest.raises(gt.NonFiniteError, match=r"part 'head': the gradient of \['bias'\] is NaN"):
        part.step(0)
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert part.version == 0 and module.weight.grad is None and not part.optimizer.state


def test_a_bound_on_staleness_holds_a_step_until_older_rows_are_back():
    part = linear_part(update_every=2, max_staleness=1)
    part.sent(4)  # at version 0
    feed(part, [1.0, 1.0], rows=2, versions=np.array([0, 0]))
    assert part.due() and not part.holding
    part.step(0)
    part.sent(2)  # at version 1
    feed(part, [1.0, 1.0], rows=2, versions=np.array([1, 1]))
    assert not part.due() and part.holding  # a step would make two rows two versions old
    part.dropped(np.array([0]))
    assert part.holding
    feed(part, [1.0, 1.0], rows=1, versions=np.array([0]))
    assert part.due() and not part.holding
    part.step(0)
    assert part.take_histogram() == (4, 1)
    assert part.take_histogram() == ()


def test_staleness_counts_rows_of_bundles():
    part = linear_part()
    part.version = 3
    part.counting.outstanding = 2
    part.received(5, np.array([3, 1]), np.array([2, 3]))
    assert part.histogram() == (2, 0, 3)
    assert part.peek_staleness() == (6.0, 5)
    other = linear_part()
    other.counting.staleness.load(part.histogram())
    other.version = 20
    other.counting.outstanding = 1
    other.received(1, np.array([5]))
    assert other.take_histogram() == (2, 0, 3, *[0] * 12, 1)


def test_an_abandoned_run_leaves_nothing_behind():
    part = linear_part(update_every=1, max_staleness=0)
    part.sent(3)
    feed(part, [1.0, 1.0], rows=1, versions=np.array([0]))
    part.finished(1)
    assert part.holding
    part.abandon()
    assert not part.holding and part.step(0) is None and not part.pending_gradients()
    before = weight_of(part)
    feed(part, [2.0, 2.0])
    assert part.due()
    part.step(0)
    torch.testing.assert_close(weight_of(part), before - 1.0)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_that_wait_survive_saving_and_loading(sparse):
    parts = [embedding_part(SGD)[0] for _ in range(2)]
    ids, rows = torch.tensor([2, 2, 5]), torch.randn(3, 2, dtype=torch.float64)
    for part in parts:
        if sparse:
            feed_rows(part, ids, rows)
        else:
            part.sent(1)
            part.gradient.add(part.module.weight, torch.ones(6, 2, dtype=torch.float64))
            part.received(1, np.zeros(1, np.int64))
    loaded, _ = embedding_part(SGD)
    found = parts[0].pending_gradients()
    loaded.load_pending_gradients({name: value.clone() for name, value in found.items()})
    loaded.counting.rows = parts[0].counting.rows
    for part in (*parts, loaded):  # the first one has been looked at, the second not
        feed_rows(part, ids[:1], rows[:1])
        part.step(0)
    assert torch.equal(parts[0].module.weight, parts[1].module.weight)
    assert torch.equal(parts[0].module.weight, loaded.module.weight)


def test_a_part_overrides_what_it_names_and_takes_the_rest_from_the_session():
    adagrad = partial(torch.optim.Adagrad, lr=0.2)
    defaults = gt.Rules(optimizer=SGD, update_every=7, average="none", max_staleness=3)
    part = gt.Part(nn.Linear(1, 1), optimizer=adagrad, update_every=gt.Flush(), average="rows")
    rules = part.rules(defaults)
    assert (rules.optimizer, rules.update_every, rules.average) == (adagrad, gt.Flush(), "rows")
    assert rules.max_staleness == 3 and rules.clip is None
    assert gt.Part(nn.Linear(1, 1)).rules(defaults) == defaults


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gt.Rules(update_every=0), ValueError, r"Rows\(0\)"),
        (lambda: gt.Instances(0), ValueError, r"Instances\(0\)"),
        (lambda: gt.Rules(update_every=2.5), TypeError, r"update_every=2.5: give a number"),
        (lambda: gt.Rules(average="mean"), ValueError, r"Rules\(average='mean'\): give 'rows'"),
        (lambda: gt.Rules(max_staleness=-1), ValueError, "max_staleness=-1"),
        (lambda: gt.Clip(norm=0.0), ValueError, "positive"),
        (lambda: gt.Clip(value=-1.0), ValueError, "positive"),
        (
            lambda: gt.Part(nn.Linear(1, 1), average="sum").rules(gt.Rules()),
            ValueError,
            "average='sum'",
        ),
    ],
)
def test_rules_that_cannot_be_are_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_two_parts_with_one_name_are_refused():
    graph = gt.Graph()
    x = graph.input("x")
    x = x.through(gt.Part(nn.Linear(2, 2), name="same"), name="a")
    x.through(gt.Part(nn.Linear(2, 2), name="same"), name="b").output()
    with pytest.raises(ValueError, match="two parts are called 'same'"):
        gt.Session(graph)


def test_a_parameter_in_two_parts_is_refused_by_name():
    shared = nn.Linear(2, 2)
    graph = gt.Graph()
    x = graph.input("x").through(gt.Part(shared, name="one"), name="a")
    x.through(nn.Sequential(shared, nn.Tanh()), name="b").output()
    with pytest.raises(gt.GraphError, match=r"'0.weight' of 'b' also belongs to 'a'"):
        gt.Session(graph).predict([gt.Instance({"x": torch.zeros(1, 2)})])


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.Adagrad, fused=True)])
def test_an_optimiser_without_sparse_steps_gets_dense_gradients(optimizer) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    graph = gt.Graph()
    graph.input("id").through(table, name="table").loss(lambda y: y.sum(1))
    data = [gt.Instance({"id": torch.tensor([1, 1, 3])})]
    gt.Session(graph, rules=gt.Rules(optimizer=partial(optimizer, lr=0.1))).fit(data, epochs=1)
    moved = (table.weight != before).any(1)
    assert moved.tolist() == [False, True, False, True, False]

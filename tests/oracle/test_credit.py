"""Local credit against plain PyTorch: greedy, overlapping, local critics, synthetic gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.errors import GraphError, NonFiniteError
from geartrain.nn import LocalCritic, RowLoss, teach_critics
from tests.rigs.stages import (
    ADAM,
    SGD,
    Poisoned,
    Stage,
    assert_equal_weights,
    backprop,
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
RUNTIMES = {
    "simulated": lambda: gt.Simulated(3, seed=5, jitter=0.5),
    "threads": lambda: gt.Threads(2, kernel_threads=1),
}


def overlapping(modules, local_heads, rule="sum"):
    """The bare form: no head at the first part."""
    graph = gt.Graph()
    up = begin(graph).through(Stage(modules[0]), keep="graph", name="stage 0")
    for k in range(1, len(modules)):
        if k < len(modules) - 1:
            up, own = up.overlap(Stage(modules[k]), rule=rule, name=f"stage {k}")
        else:
            own = up.through(Stage(modules[k]), keep="graph", name=f"stage {k}")
        own.through(Stage(local_heads[k]), keep="graph", name=f"head {k}").loss(losses)
    return graph


def plain_overlapping(modules, local_heads, data, rule="sum", optimizer=SGD):
    """Units of two blocks, each on its own graph; what a block gets is decided loss by loss."""
    n = len(modules)
    optimizers = [
        optimizer(m.parameters()) for m in (*modules, *local_heads[1:]) if list(m.parameters())
    ]
    for x, y in data:
        inlets = [x]
        with torch.no_grad():
            for module in modules:
                inlets.append(module(inlets[-1]))
        grads = {}
        for j in range(n - 1):  # unit j: blocks j and j + 1, head j + 1
            h = modules[j + 1](modules[j](inlets[j]))
            loss = losses(local_heads[j + 1](h), y).mean()
            members = [modules[j], modules[j + 1], local_heads[j + 1]]
            if rule == "later" and j + 1 < n - 1:
                members.remove(modules[j + 1])
            parameters = [p for m in members for p in m.parameters()]
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                grads[p] = grads[p] + g if p in grads else g
        for p, g in grads.items():
            p.grad = g
        for o in optimizers:
            o.step()


def critics(modules, made, **replay):
    """A critic beside each part but the last."""
    graph = gt.Graph()
    stream, levels = begin(graph), []
    for k, module in enumerate(modules):
        stream = stream.through(Stage(module), keep="graph", name=f"stage {k}")
        if k < len(made):
            critic = LocalCritic(made[k], losses)
            levels.append(stream.overlap(critic, name=f"critic {k}"))
            stream = stream.detach()
        if replay and 0 < k < len(modules) - 1:
            stream = stream.replay(**replay)
    teach_critics(levels, stream.through(RowLoss(losses), keep="graph", name="true"))
    return graph


def plain_critics(modules, made, data, optimizer=SGD):
    optimizers = [optimizer(m.parameters()) for m in (*modules, *made)]
    for x, y in data:
        h, group, own = x, [], []
        for k, module in enumerate(modules):
            h = module(h.detach())
            if k < len(made):
                group.append(losses(made[k](h), y))
                own.append(losses(made[k](h.detach()), y))
        group.append(losses(h, y))
        for k, module in enumerate(modules):
            parameters = list(module.parameters())
            for p, g in zip(
                parameters,
                torch.autograd.grad(group[k].mean(), parameters, retain_graph=True),
                strict=True,
            ):
                p.grad = g
        for k, critic in enumerate(made):
            parameters = list(critic.parameters())
            gap = (group[k + 1].detach() - own[k]).abs().mean()
            for p, g in zip(parameters, torch.autograd.grad(gap, parameters), strict=True):
                p.grad = g
        for o in optimizers:
            o.step()


def synthetic(modules, synthesisers):
    graph = gt.Graph()
    stream = begin(graph)
    for k, module in enumerate(modules):
        stream = stream.through(Stage(module), keep="graph", name=f"stage {k}")
        if k < len(synthesisers):
            made = synthesisers[k]
            takes = (0, 1) if not isinstance(made, nn.Module) else 0
            stream = stream.synthesize(made, take=takes, name=f"guess {k}")
    stream.loss(losses)
    return graph


def zeroed(width):
    module = nn.Linear(width, width).double()
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


METHODS = {
    "greedy": lambda b: greedy(b, heads()),
    "overlap": lambda b: overlapping(b, heads()),
    "later": lambda b: overlapping(b, heads(), "later"),
    "critics": lambda b: critics(b, heads()[:3]),
    "synthetic": lambda b: synthetic(b, [zeroed(w) for w in (6, 5, 4)]),
}


@BOTH
def test_greedy_is_autograd_with_a_detach_at_each_cut_and_the_sum_of_the_losses(optimizer):
    ours, our_heads, theirs, their_heads = blocks(), heads(), blocks(), heads()
    train(greedy(ours, our_heads), batches(), optimizer)
    plain_greedy(theirs, their_heads, batches(), optimizer)
    assert_equal_weights(weights(ours, our_heads), weights(theirs, their_heads))


@BOTH
@pytest.mark.parametrize("rule", ["sum", "later"])
def test_overlapping_reaches_exactly_one_part_further_down(optimizer, rule):
    ours, our_heads, theirs, their_heads = blocks(), heads(), blocks(), heads()
    train(overlapping(ours, our_heads, rule), batches(), optimizer)
    plain_overlapping(theirs, their_heads, batches(), rule, optimizer)
    assert_equal_weights(weights(ours, our_heads), weights(theirs, their_heads))


def test_both_rules_of_overlapping_differ():
    one, other = blocks(), blocks()
    train(overlapping(one, heads(), "sum"), batches(2))
    train(overlapping(other, heads(), "later"), batches(2))
    assert not bits_equal(weights(one[1:3]), weights(other[1:3]))


@BOTH
def test_local_critics_learn_to_predict_the_loss_above_and_train_their_group(optimizer):
    ours, our_critics, theirs, their_critics = blocks(), heads()[:3], blocks(), heads()[:3]
    train(critics(ours, our_critics), batches(), optimizer)
    plain_critics(theirs, their_critics, batches(), optimizer)
    assert_equal_weights(weights(ours, our_critics), weights(theirs, their_critics))


@BOTH
@pytest.mark.parametrize("method", ["greedy", "critics", "dgl"])
def test_one_part_is_backpropagation(optimizer, method):
    ours, theirs = blocks(), blocks()
    whole = [nn.Sequential(*ours)]
    graph = {
        "greedy": lambda: greedy(whole, [nn.Identity()]),
        "critics": lambda: critics(whole, []),
        "dgl": lambda: greedy(whole, [nn.Identity()], times=1, fresh=False),
    }[method]()
    train(graph, batches(), optimizer)
    plain_backprop(theirs, batches(), optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


@BOTH
@pytest.mark.parametrize("rule", ["sum", "later"])
def test_without_a_gradient_from_its_own_head_a_part_learns_from_the_one_above(optimizer, rule):
    """Nor has it one to send down: what lies below stays as it is."""
    ours, theirs = blocks(3), blocks(3)
    graph = gt.Graph()
    below = begin(graph).through(Stage(ours[0]), keep="graph", name="stage 0")
    up, own = below.overlap(Stage(ours[1]), rule=rule, name="stage 1")
    own.stop()
    up.through(Stage(ours[2]), keep="graph", name="stage 2").loss(losses)
    before = weights(ours)
    train(graph, batches(), optimizer)
    assert bits_equal(weights(ours[:1]), before[: len(weights(ours[:1]))])
    for p in theirs[0].parameters():
        p.requires_grad_(False)
    plain_backprop(theirs, batches(), optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


@BOTH
@pytest.mark.parametrize("as_overlap", [False, True])
@pytest.mark.parametrize("rule", ["sum", "later"])
def test_bare_overlapping_of_two_parts_is_backpropagation(optimizer, as_overlap, rule):
    ours, theirs = blocks(2), blocks(2)
    if as_overlap:  # the last part, too, with nobody above
        graph = gt.Graph()
        first = begin(graph).through(Stage(ours[0]), keep="graph")
        up, own = first.overlap(Stage(ours[1]), rule=rule)
        up.stop()
        own.loss(losses)
    else:
        graph = overlapping(ours, [nn.Identity()] * 2, rule)
    train(graph, batches(), optimizer)
    plain_backprop(theirs, batches(), optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


@BOTH
def test_a_synthesiser_that_knows_the_true_gradient_gives_backpropagation(optimizer):
    ours, theirs = blocks(), blocks()

    def truth(k):
        def gradient(h, y):
            with torch.enable_grad():
                h = h.detach().requires_grad_()
                loss = losses(nn.Sequential(*ours[k + 1 :])(h), y).sum()
                return torch.autograd.grad(loss, h)[0]

        return gradient

    train(synthetic(ours, [truth(k) for k in range(3)]), batches(), optimizer)
    plain_backprop(theirs, batches(), optimizer)
    assert_equal_weights(weights(ours), weights(theirs))


@BOTH
def test_a_synthesiser_of_zeros_makes_no_first_move_and_then_learns_the_gradient(optimizer):
    ours, theirs, guess, (x, y) = blocks(2), blocks(2), zeroed(6), batches(1)[0]
    train(synthetic(ours, [guess]), [(x, y)], optimizer)
    assert bits_equal(weights(ours[:1]), weights(theirs[:1]))
    h = theirs[0](x).detach().requires_grad_()
    (true,) = torch.autograd.grad(losses(theirs[1](h), y).sum(), h)
    reference = zeroed(6)
    stepper = optimizer(reference.parameters())
    ((reference(h.detach()) - true) ** 2).sum(1).mean().backward()
    stepper.step()
    assert_equal_weights(weights([guess]), weights([reference]))


def test_a_synthesiser_may_be_told_the_targets():
    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_h, self.of_y = nn.Linear(6, 6).double(), nn.Embedding(3, 6).double()

        def forward(self, h, y):
            return self.of_h(h) + self.of_y(y)

    torch.manual_seed(0)
    told = Told()
    before = weights([told])
    ours = blocks(2)
    graph = gt.Graph()
    stream = begin(graph).through(Stage(ours[0]), keep="graph").synthesize(told)
    stream.through(Stage(ours[1]), keep="graph").loss(losses)
    train(graph, batches(3))
    assert not any(torch.equal(a, b) for a, b in zip(weights([told]), before, strict=True))


def test_a_synthesiser_of_the_wrong_shape_is_refused():
    graph = synthetic(blocks(2), [nn.Linear(6, 4).double()])
    with pytest.raises(GraphError, match=r"'guess 0': the synthesiser made float64 \(n, 4\)"):
        train(graph, batches(1))


@pytest.mark.parametrize("method", ["greedy", "overlap", "later", "critics"])
def test_weights_above_change_no_bit_of_the_gradients_below(method):
    one, other, data = blocks(), blocks(), batches(1)
    with torch.no_grad():
        for p in other[3].parameters():
            p.mul_(-3.0)
    train(METHODS[method](one), data)
    train(METHODS[method](other), data)
    reach = 2 if method in ("overlap", "later") else 3
    assert bits_equal(weights(one[:reach]), weights(other[:reach]))
    assert reach == 3 or not bits_equal(weights(one[2:3]), weights(other[2:3]))


@pytest.mark.parametrize("method", ["greedy", "critics"])
@pytest.mark.parametrize("where", [1, 2, 3])
def test_poison_above_a_cut_changes_no_bit_at_all(method, where):
    one, other = blocks(), blocks()
    train(METHODS[method](one), batches())
    poisoned = [Poisoned(m) if k == where else m for k, m in enumerate(other)]
    train(METHODS[method](poisoned), batches())
    assert bits_equal(weights(one), weights(other))


@pytest.mark.parametrize("method", ["overlap", "later"])
@pytest.mark.parametrize("where", [2, 3])
def test_poison_reaches_the_part_below_that_overlaps_and_no_further(method, where):
    one, other, data = blocks(), blocks(), batches(1)
    train(METHODS[method](one), data)
    poisoned = [Poisoned(m, 1e30) if k == where else m for k, m in enumerate(other)]
    train(METHODS[method](poisoned), data)
    assert bits_equal(weights(one[: where - 1]), weights(other[: where - 1]))
    assert not bits_equal(weights(one[where - 1 : where]), weights(other[where - 1 : where]))


def test_poison_above_a_synthesiser_changes_no_bit_below_in_its_first_move():
    one, other, data = blocks(), blocks(), batches(1)
    torch.manual_seed(2)
    guesses = [[nn.Linear(6, 6).double()] for _ in range(2)]
    guesses[1][0].load_state_dict(guesses[0][0].state_dict())
    train(synthetic(one, guesses[0]), data)
    train(synthetic([other[0], Poisoned(other[1], 1e30), *other[2:]], guesses[1]), data)
    assert bits_equal(weights(one[:1]), weights(other[:1]))
    assert not bits_equal(weights(guesses[0]), weights(guesses[1]))


def test_poison_bites_where_there_is_no_cut():
    modules = blocks()
    modules[3] = Poisoned(modules[3])
    with pytest.raises(NonFiniteError):
        train(backprop(modules), batches())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_many_minibatches_in_flight_leave_nothing_behind(method, runtime):
    modules = blocks()
    made = session(METHODS[method](modules), runtime=RUNTIMES[runtime](), max_active=4)
    before = weights(modules)
    fit = made.fit(instances(batches(5)), epochs=2, valid=instances(batches(2, seed=9)))
    assert fit.instances == 10  # the session looks for leaks after every pass
    assert not any(torch.equal(a, b) for a, b in zip(weights(modules), before, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_with_one_minibatch_in_flight_threads_are_lock_step(method):
    one, other = blocks(), blocks()
    train(METHODS[method](one), batches())
    train(METHODS[method](other), batches(), runtime=gt.Threads(2, kernel_threads=1))
    assert_equal_weights(weights(one), weights(other))


def test_evaluation_and_prediction_pass_overlaps_and_synthesisers():
    for method in ("overlap", "synthetic"):
        modules = blocks()
        made = session(METHODS[method](modules))
        x, y = batches(1)[0]
        expected = losses(nn.Sequential(*modules)(x), y).mean().item()
        if method == "synthetic":
            loss = made.evaluate(instances([(x, y)])).metrics["loss"]
            assert loss == pytest.approx(expected)
        before = weights(modules)
        made.evaluate(instances(batches()))
        assert bits_equal(weights(modules), before)


def test_an_update_is_one_a_minibatch_however_many_teachers_a_part_has():
    made = train(overlapping(blocks(), heads()), batches(6))
    versions = made.statistics()["versions"]
    assert {versions[f"stage {k}"] for k in range(4)} == {6}


def test_a_module_that_writes_into_its_input_is_refused():
    modules = blocks(2)
    modules[1] = nn.Sequential(nn.ReLU(inplace=True), modules[1])
    with pytest.raises(GraphError, match="'stage 1': its module writes into its argument 0"):
        train(greedy(modules, [nn.Linear(6, 3).double(), nn.Identity()]), batches(1))


def test_a_use_that_keeps_graphs_refuses_another_keeping():
    graph = gt.Graph()
    with pytest.raises(GraphError, match="wants autograd's graph of whole messages"):
        begin(graph).through(Stage(blocks(1)[0]), keep="inputs", gear=gt.Gear(period=2))


def test_a_rule_that_is_none_is_refused():
    with pytest.raises(ValueError, match="give 'sum' or 'later'"):
        begin(gt.Graph()).overlap(nn.Identity(), rule="both")


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.0)])
def test_with_a_rate_of_zero_no_method_moves_a_weight(optimizer):
    for build in METHODS.values():
        modules = blocks()
        before = weights(modules)
        train(build(modules), batches(3), optimizer)
        assert bits_equal(weights(modules), before)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_critics_learn_from_fresh_rows_where_parts_replay(runtime):
    modules, made = blocks(), heads()[:3]
    graph = critics(modules, made, times=1, buffer=2, draw="least_used")
    versions = train(graph, batches(6), runtime=RUNTIMES[runtime](), max_active=3).parts
    updates = {name: part.version for name, part in versions.items()}
    assert [updates[f"stage {k}"] for k in range(4)] == [6, 6, 12, 18]
    assert updates["critic 0"] == 6


def test_replays_may_end_early_at_a_head_of_their_own():
    graph = gt.Graph()
    stream = begin(graph).replay(times=2)
    stream = stream.through(Stage(blocks()[0]), keep="graph", name="low")
    stream.through(Stage(heads()[0]), keep="graph", name="head").loss(losses)
    fresh, again = stream.where(lambda m: m.replay == 0)
    again.stop()
    top = Stage(nn.Linear(6, 3).double())
    fresh.detach().through(top, keep="graph", name="high").loss(losses)
    versions = train(graph, batches(4)).statistics()["versions"]
    assert versions == {"low": 12, "head": 12, "high": 4}


def test_a_part_with_a_gear_does_not_overlap():
    with pytest.raises(ValueError, match="only through"):
        begin(gt.Graph()).overlap(gt.Part(nn.Identity(), gear=gt.Gear(2)))

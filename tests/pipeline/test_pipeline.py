"""Pipelines against plain PyTorch: one minibatch in flight, and every credit with one part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.errors import GraphError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
CREDITS: list[gt.AbstractCredit] = [
    gt.Backprop(),
    gt.Greedy(),
    gt.Chunked(1),
    gt.Overlapping(),
    gt.Overlapping("later"),
    gt.Critics(),
    gt.Synthetic(),
    gt.DecoupledGreedy(buffer=3, times=2),
]


ONE = {"max_active": 1}


class Skip(nn.Module):
    """A residual block with batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.relu(self.linear(self.norm(h)))


class Tied(nn.Module):
    """Blocks around one embedding, which is also the read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2)
        )
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        Skip(8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 3),
    ).double()


def data(n: int = 43) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, dtype=torch.float64, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def plain(
    model: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer],
    batches: list[tuple[Tensor, Tensor]],
    epochs: int = 2,
) -> None:
    """The usual loop."""
    made = optimizer(model.parameters())
    model.train()
    for _ in range(epochs):
        for x, y in batches:
            made.zero_grad()
            prediction = model(x)
            F.cross_entropy(prediction.flatten(0, -2), y.flatten()).backward()
            made.step()


def session(
    pipe: gt.Pipeline,
    optimizer: Callable[..., torch.optim.Optimizer],
    workers: int = 1,
    max_active: int = 1,
) -> gt.Session:
    settings = pipe.settings(workers) | {"max_active": max_active}
    return gt.Session(
        pipe.graph,
        rules=pipe.rules(optimizer),
        runtime=gt.Threads(workers, kernel_threads=1),
        reading=gt.Reading(shuffle=False),
        **settings,
    )


def assert_equal(one: nn.Module, other: nn.Module, tolerance: float = 1e-9) -> None:
    """All weights and buffers."""
    found = other.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.both_ways
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_parts_with_one_minibatch_in_flight_are_plain_training_with_batch_norm_and_skips(
    parts: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    x, y = data()
    wanted, model = network(), network()
    plain(wanted, optimizer, list(zip(x.split(10), y.split(10), strict=True)))
    if parts == 6:  # parts without parameters too
        pipe = gt.Pipeline(model, cuts=[1, 2, 3, 4, 5])
    else:
        pipe = gt.Pipeline(model, parts=parts)
    fit = session(pipe, optimizer, min(parts, 2)).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert fit.instances == 10
    assert_equal(wanted, model)
    assert_equal(model, wanted)


@pytest.mark.parametrize("credit", CREDITS, ids=repr)
def test_every_credit_with_one_part_is_backpropagation_bit_by_bit(
    credit: gt.AbstractCredit,
) -> None:
    x, y = data()
    wanted, model = network(), network()
    plain(wanted, ADAM, list(zip(x.split(10), y.split(10), strict=True)))
    backprop = network()
    for module, how in ((backprop, "backprop"), (model, credit)):
        pipe = gt.Pipeline(module, parts=1, credit=how, sample=x[:4])
        session(pipe, ADAM).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(model, wanted)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), backprop.state_dict().values(), strict=True)
    )


def test_several_minibatches_in_flight_learn_and_report_their_staleness() -> None:
    x, y = data(200)
    pipe = gt.Pipeline(network(), parts=3, metrics={"accuracy": gt.accuracy})
    assert pipe.max_active == 3
    trainer = session(pipe, ADAM, workers=2, max_active=3)
    fit = trainer.fit(gt.Minibatches(x, y, batch=10), epochs=12)
    assert fit.history[-1].metrics["accuracy"] > fit.history[0].metrics["accuracy"]
    # Judged when training is over: what is reported of an epoch is of all its weights, of which the
    # order of threads has a say.
    assert trainer.evaluate(gt.Minibatches(x, y, batch=10)).metrics["accuracy"] > 0.8
    assert fit.staleness["part 0"].max >= 1


def test_greedy_parts_learn_from_their_own_heads_and_equal_a_loop_with_detach() -> None:
    x, y = data()
    wanted, model = network(), network()
    pipe = gt.Pipeline(model, cuts=[3], credit=gt.Greedy(), sample=x[:4], judge_heads=True)
    head = copy.deepcopy(pipe.heads[0])
    lower, upper = wanted[:3], wanted[3:]
    optimizers = [ADAM(m.parameters()) for m in (lower, head, upper)]
    for _ in range(2):
        for xs, ys in zip(x.split(10), y.split(10), strict=True):
            h = lower(xs)
            F.cross_entropy(head(h), ys).backward()
            F.cross_entropy(upper(h.detach()), ys).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    fit = session(pipe, ADAM, 2).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(wanted, model)
    assert_equal(head, pipe.heads[0])
    assert fit.history[-1].metrics["loss 0"] > 0


@pytest.mark.parametrize("judged", [False, True], ids=["heads unheard", "heads judged"])
@pytest.mark.parametrize("credit", CREDITS, ids=repr)
def test_the_loss_that_is_reported_is_that_of_the_last_part_alone(
    credit: gt.AbstractCredit, judged: bool
) -> None:
    x, y = data()
    model = network()
    pipe = gt.Pipeline(model, cuts=[3, 5], credit=credit, sample=x[:4], judge_heads=judged)
    ours = gt.Session(pipe.graph, rules=pipe.rules(SGD), **pipe.settings())
    found = ours.evaluate(gt.Minibatches(x, y, batch=10)).metrics
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(F.cross_entropy(model.eval()(x), y)))
    assert judged or set(found) == {"loss"}


POISONED = [
    gt.Backprop(),
    gt.Greedy(),
    gt.Chunked(2),
    gt.Overlapping(),
    gt.Critics(),
    gt.DecoupledGreedy(2),
]


@pytest.mark.parametrize("credit", POISONED, ids=repr)
def test_a_poisoned_weight_above_a_cut_changes_nothing_below_it(credit: gt.AbstractCredit) -> None:
    x, y = data()
    if isinstance(credit, gt.Overlapping | gt.Critics):
        x, y = x[:10], y[:10]  # later on, what is above has learned of the poison, and teaches
    states = []
    for poison in (1.0, 100.0):
        model = network()
        torch.manual_seed(3)
        pipe = gt.Pipeline(model, cuts=[1, 3, 5], credit=credit, sample=x[:4])
        with torch.no_grad():
            model[5].weight.mul_(poison)
        rules = pipe.rules(partial(torch.optim.SGD, lr=1e-5))
        gt.Session(
            pipe.graph, rules=rules, reading=gt.Reading(shuffle=False), **pipe.settings() | ONE
        ).fit(gt.Minibatches(x, y, batch=10), epochs=1)
        states.append({k: v.clone() for k, v in model[:3].state_dict().items()})
    unharmed = all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert unharmed == (credit != gt.Backprop())


def test_chunks_hang_heads_on_the_ends_of_about_equally_many_parts() -> None:
    assert gt.Chunked(2).heads(4) == (1,)
    assert gt.Chunked(3).heads(4) == (0, 1)
    assert gt.Greedy().heads(4) == (0, 1, 2)
    assert gt.Chunked(1).heads(4) == ()
    with pytest.raises(ValueError, match="give at most 2 chunks"):
        gt.Chunked(3).heads(2)
    with pytest.raises(ValueError, match="give 1 chunk or more"):
        gt.Chunked(0)


def test_dropout_draws_what_plain_training_draws() -> None:
    def noisy() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5),
            nn.Linear(8, 3),
        ).double()  # fmt: skip

    x, y = data()
    wanted, model = noisy(), noisy()
    torch.manual_seed(5)
    plain(wanted, SGD, list(zip(x.split(10), y.split(10), strict=True)))
    pipe = gt.Pipeline(model, parts=2)
    torch.manual_seed(5)
    session(pipe, SGD, 2).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(wanted, model)


def test_a_tied_embedding_inside_a_part_trains_and_across_a_cut_is_refused() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    wanted = copy.deepcopy(model)
    x = torch.randint(0, 11, (20, 7))
    y = (x + 1) % 11
    plain(wanted, ADAM, list(zip(x.split(8), y.split(8), strict=True)))
    pipe = gt.Pipeline(model, parts=1, sample=x[:2])
    session(pipe, ADAM).fit(gt.Minibatches(x, y, batch=8), epochs=2)
    assert_equal(wanted, model)
    assert model.out.weight is model.embed.weight
    with pytest.raises(GraphError, match=r"of part 0 is also .* of part 1: .*move the cut"):
        gt.Pipeline(model, parts=2, sample=x[:2])


def test_a_module_that_is_used_twice_and_a_weight_that_is_computed_train_as_they_would() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        twice = nn.Linear(8, 8)
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        first = nn.Linear(6, 8)
        return nn.Sequential(first, twice, nn.Tanh(), normed, twice, nn.Linear(8, 3)).double()

    x, y = data()
    wanted, model = made(), made()
    plain(wanted, SGD, list(zip(x.split(10), y.split(10), strict=True)))
    session(gt.Pipeline(model, parts=1), SGD).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(wanted, model)


def test_a_module_that_raises_has_its_own_parameters_afterwards() -> None:
    class Raising(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and x.requires_grad:
                raise ValueError("as asked")
            return super().forward(x)

    x, y = data()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Raising(8, 8), nn.Linear(8, 3)).double()
    before = dict(model.named_parameters())
    pipe = gt.Pipeline(model, parts=2, cuts=[2])
    with pytest.raises(gt.WorkerError, match="as asked"):
        session(pipe, SGD, 2).fit(gt.Minibatches(x, y, batch=10), epochs=1)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_minibatches_of_changing_shape_train_are_judged_and_predicted() -> None:
    def sequence_model() -> Tied:
        torch.manual_seed(0)
        model = Tied().double()
        model.out.weight = nn.Parameter(model.embed.weight.detach().clone())
        return model

    batches = [torch.randint(0, 11, (n, t)) for n, t in ((4, 5), (3, 9), (6, 2), (1, 7))]
    pairs = [(x, (x + 1) % 11) for x in batches]
    instances = [gt.minibatch(x, y) for x, y in pairs]
    wanted, model = sequence_model(), sequence_model()
    plain(wanted, ADAM, pairs)
    metrics = {"accuracy": gt.accuracy}
    pipe = gt.Pipeline(model, parts=2, sample=batches[0], metrics=metrics)
    session(pipe, ADAM, 2).fit(instances, epochs=2)
    assert_equal(wanted, model)
    for credit in CREDITS[1:]:
        pipe = gt.Pipeline(
            model, parts=2, sample=batches[0], credit=credit, metrics={"accuracy": gt.accuracy}
        )
        trainer = session(pipe, ADAM, workers=2, max_active=4)
        trainer.fit(instances * 3, epochs=1)
        found = trainer.predict(instances)
        with torch.no_grad():
            model.eval()
            for prediction, (x, _) in zip(found, pairs, strict=True):
                torch.testing.assert_close(prediction, model(x))
            right = sum((model(x).argmax(-1) == y).double().mean(1).sum() for x, y in pairs)
        judged = trainer.evaluate(instances).metrics
        assert judged["accuracy"] == pytest.approx(float(right) / sum(len(x) for x in batches))


def test_evaluation_and_prediction_are_the_whole_modules_whatever_the_credit() -> None:
    x, y = data()
    for credit in CREDITS:
        model = network()
        pipe = gt.Pipeline(model, cuts=[2, 4], credit=credit, sample=x[:4])
        trainer = session(pipe, ADAM, workers=2, max_active=3)
        trainer.fit(gt.Minibatches(x, y, batch=10), epochs=1)
        model.eval()
        with torch.no_grad():
            prediction = model(x)
        torch.testing.assert_close(
            torch.cat(trainer.predict(gt.Minibatches(x, batch=10))), prediction
        )
        found = trainer.evaluate(gt.Minibatches(x, y, batch=10)).metrics
        assert found == {"loss": pytest.approx(float(F.cross_entropy(prediction, y)))}


def test_a_run_that_is_resumed_from_a_checkpoint_goes_on_as_if_nothing_had_been(tmp_path) -> None:
    x, y = data()

    def noise(rows: Tensor, generator: torch.Generator) -> Tensor:
        return rows + 0.1 * torch.randn(rows.shape, dtype=rows.dtype, generator=generator)

    def fresh() -> tuple[nn.Module, gt.Session, gt.Minibatches]:
        model = network()
        torch.manual_seed(9)
        pipe = gt.Pipeline(model, parts=3, credit=gt.Greedy(), sample=x[:4])
        batches = gt.Minibatches(x, y, batch=10, seed=4, augment=noise)
        return model, session(pipe, ADAM), batches

    whole, trainer, batches = fresh()
    trainer.fit(batches, epochs=4)
    _, first, batches = fresh()
    first.fit(batches, epochs=2)
    first.save(tmp_path / "half.safetensors")
    model, second, batches = fresh()
    second.load(tmp_path / "half.safetensors")
    second.fit(batches, epochs=4)
    for a, b in zip(whole.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_torch_criteria_are_asked_for_no_reduction_and_weighted_means_are_refused() -> None:
    x, y = data()
    losses = []
    for criterion in (gt.cross_entropy, F.cross_entropy, nn.CrossEntropyLoss()):
        pipe = gt.Pipeline(network(), parts=2, criterion=criterion)
        losses.append(session(pipe, SGD).evaluate(gt.Minibatches(x, y, batch=10)).metrics["loss"])
    assert losses[1:] == pytest.approx(losses[:1] * 2)
    with pytest.raises(GraphError, match="divides by the weights"):
        gt.Pipeline(network(), parts=2, criterion=nn.CrossEntropyLoss(weight=torch.ones(3)))


def test_regression_with_targets_of_floats_trains_like_plain_pytorch() -> None:
    x, _ = data()
    y = x[:, :3] * 2
    wanted, model = network(), network()
    optimizer = SGD(wanted.parameters())
    for xs, ys in zip(x.split(10), y.split(10), strict=True):
        optimizer.zero_grad()
        F.mse_loss(wanted(xs), ys).backward()
        optimizer.step()
    pipe = gt.Pipeline(model, parts=2, criterion=F.mse_loss)
    session(pipe, SGD).fit(gt.Minibatches(x, y, batch=10), epochs=1)
    assert_equal(wanted, model)


def test_a_part_may_have_statistics_and_no_weights() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(2, affine=False)
        return nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2)).double()

    x, y = torch.randn(40, 2).double() + 3, torch.randn(40, 2).double()
    model, wanted = made(), made()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    for xs, ys in zip(x.split(10), y.split(10), strict=True):
        optimizer.zero_grad()
        F.mse_loss(wanted(xs), ys).backward()
        optimizer.step()
    pipe = gt.Pipeline(model, cuts=[1, 2], criterion=F.mse_loss)
    session(pipe, partial(torch.optim.SGD, lr=0.1)).fit(gt.Minibatches(x, y, batch=10), epochs=1)
    assert_equal(wanted, model)
    torch.testing.assert_close(dict(model.named_buffers()), dict(wanted.named_buffers()))


def test_what_cannot_be_built_is_refused_with_a_remedy() -> None:
    x, _ = data()
    with pytest.raises(ValueError, match="neither parts nor cuts"):
        gt.Pipeline(network())
    with pytest.raises(ValueError, match="make 2 parts, not parts=3"):
        gt.Pipeline(network(), parts=3, cuts=[2])
    with pytest.raises(ValueError, match="by='memory'"):
        gt.Pipeline(network(), parts=2, by="memory")
    with pytest.raises(GraphError, match="give it as sample="):
        gt.Pipeline(network(), parts=2, by="time")
    with pytest.raises(ValueError, match="credit='local'"):
        gt.Pipeline(network(), parts=2, credit="local")
    with pytest.raises(GraphError, match="want local heads"):
        gt.Pipeline(network(), parts=2, credit=gt.Greedy())
    with pytest.raises(ValueError, match=r"heads= has 2 modules; parts \[0\]"):
        gt.Pipeline(network(), parts=2, credit=gt.Greedy(), heads=[nn.Identity()] * 2)
    with pytest.raises(ValueError, match="placement of 2 parts on 3 workers"):
        gt.Pipeline(network(), parts=2).settings(3)
    with pytest.raises(GraphError, match="no local head is known"):
        gt.Pipeline(
            nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.Linear(3, 3)).double(),
            cuts=[1],
            credit=gt.Greedy(),
            sample=x[:2],
        )


def test_heads_may_be_modules_or_made_from_what_leaves_a_part() -> None:
    x, y = data()
    made: list[tuple[int, tuple[int, ...]]] = []

    def head(number: int, rows: Tensor) -> nn.Module:
        made.append((number, tuple(rows.shape)))
        return nn.Linear(rows.shape[1], 3).double()

    pipe = gt.Pipeline(network(), cuts=[2, 4], credit=gt.Greedy(), sample=x[:4], heads=head)
    assert made == [(0, (4, 8)), (1, (4, 8))]
    own = [nn.Linear(8, 3).double() for _ in range(2)]
    pipe = gt.Pipeline(network(), cuts=[2, 4], credit=gt.Greedy(), heads=own)
    before = own[1].weight.detach().clone()
    session(pipe, ADAM).fit(gt.Minibatches(x, y, batch=10), epochs=1)
    assert not torch.equal(own[1].weight, before)


@pytest.mark.parametrize("rule", ["sum", "later"])
def test_overlapping_losses_with_two_parts_are_backpropagation(rule: str) -> None:
    x, y = data()
    wanted, model = network(), network()
    plain(wanted, ADAM, list(zip(x.split(10), y.split(10), strict=True)))
    pipe = gt.Pipeline(model, parts=2, credit=gt.Overlapping(rule), sample=x[:4])
    assert not pipe.heads
    session(pipe, ADAM, 2).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(wanted, model)


def test_an_overlapping_loss_reaches_its_part_and_one_further_down() -> None:
    x, y = data()
    wanted, model = network(), network()
    pipe = gt.Pipeline(model, cuts=[3, 5], credit=gt.Overlapping(), sample=x[:4])
    head = copy.deepcopy(pipe.heads[1])
    lower, middle, upper = wanted[:3], wanted[3:5], wanted[5:]
    modules = (lower, middle, upper, head)
    optimizers = [ADAM(m.parameters()) for m in modules]
    for xs, ys in zip(x.split(10), y.split(10), strict=True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        h = lower(xs)
        below = h.detach().requires_grad_()
        between = middle(below)
        F.cross_entropy(head(between), ys).backward(retain_graph=True)
        own = below.grad.clone()
        F.cross_entropy(upper(between), ys).backward()
        h.backward(own)
        for optimizer in optimizers:
            optimizer.step()
    session(pipe, ADAM, 2).fit(gt.Minibatches(x, y, batch=10), epochs=1)
    assert_equal(wanted, model)
    assert_equal(head, pipe.heads[1])


def test_critics_train_their_parts_and_learn_the_distance_from_the_loss_above() -> None:
    x, y = data()
    wanted, model = network(), network()
    slow = partial(torch.optim.Adam, lr=1e-4)
    pipe = gt.Pipeline(model, cuts=[3, 5], credit=gt.Critics(slow), sample=x[:4], judge_heads=True)
    critics = [copy.deepcopy(pipe.heads[k]) for k in range(2)]
    parts = [wanted[:3], wanted[3:5], wanted[5:]]
    optimizers = [SGD(m.parameters()) for m in parts] + [slow(m.parameters()) for m in critics]

    def each(module: nn.Module, h: Tensor, ys: Tensor) -> Tensor:
        return F.cross_entropy(module(h), ys, reduction="none")

    for xs, ys in zip(x.split(10), y.split(10), strict=True):
        h = parts[0](xs)
        between = parts[1](h.detach())
        values = [each(critics[0], h.detach(), ys), each(critics[1], between.detach(), ys)]
        last = each(parts[2], between.detach(), ys)
        grads: list[tuple[nn.Module, Tensor]] = [
            (parts[0], each(critics[0], h, ys)),
            (parts[1], each(critics[1], between, ys)),
            (parts[2], last),
            (critics[0], (values[1].detach() - values[0]).abs()),
            (critics[1], (last.detach() - values[1]).abs()),
        ]
        found = [
            torch.autograd.grad(loss.mean(), list(m.parameters()), retain_graph=True)
            for m, loss in grads
        ]
        for (module, _), gradients, optimizer in zip(grads, found, optimizers, strict=True):
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    fit = session(pipe, SGD, 2).fit(gt.Minibatches(x, y, batch=10), epochs=1)
    assert_equal(wanted, model)
    for k, critic in enumerate(critics):
        assert_equal(critic, pipe.heads[k])
    assert {"loss 0", "loss 1"} <= set(fit.history[-1].metrics)


def test_decoupled_greedy_with_a_buffer_of_one_is_greedy_and_a_larger_one_is_not() -> None:
    x, y = data()
    states = []
    for credit in (gt.Greedy(), gt.DecoupledGreedy(), gt.DecoupledGreedy(buffer=3, draw="uniform")):
        model = network()
        torch.manual_seed(3)
        pipe = gt.Pipeline(model, cuts=[3, 5], credit=credit, sample=x[:4])
        session(pipe, ADAM).fit(gt.Minibatches(x, y, batch=10), epochs=1)
        states.append({k: v.clone() for k, v in model.state_dict().items()})
    greedy, one, three = states
    assert all(torch.equal(greedy[k], one[k]) for k in greedy)
    assert not torch.equal(greedy["5.weight"], three["5.weight"])
    assert torch.equal(greedy["0.weight"], three["0.weight"])


def test_synthesisers_begin_with_zeros_and_learn_to_guess() -> None:
    x, y = data()
    model = network()
    pipe = gt.Pipeline(model, cuts=[1], credit=gt.Synthetic(), sample=x[:4])
    first = model[0].weight.detach().clone()
    trainer = session(pipe, partial(torch.optim.SGD, lr=0.01))
    trainer.fit(gt.Minibatches(x[:10], y[:10], batch=10), epochs=1)
    assert torch.equal(model[0].weight, first)
    trainer.fit(gt.Minibatches(x[:10], y[:10], batch=10), epochs=3)
    assert not torch.equal(model[0].weight, first)
    with pytest.raises(GraphError, match="give heads="):
        gt.Pipeline(network(), cuts=[1], credit=gt.Synthetic(targets=True), sample=x[:4])


def test_a_synthesiser_that_sees_the_targets_and_knows_the_gradient_is_backpropagation() -> None:
    class Knows(nn.Module):
        def __init__(self, upper: nn.Module) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            self._upper = [upper]

        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            with torch.enable_grad():
                rows = torch.zeros(h.shape, dtype=h.dtype, device=h.device, requires_grad=True)
                rows = rows + h.detach()
                weights = {n: p.detach().to(h.device) for n, p in self._upper[0].named_parameters()}
                logits = torch.func.functional_call(self._upper[0], weights, (rows,))
                loss = F.cross_entropy(logits, y.to(h.device), reduction="sum")
                (gradient,) = torch.autograd.grad(loss, rows)
            return gradient + 0 * self.nothing

    def simple() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    x, y = data()
    wanted, model = simple(), simple()
    plain(wanted, SGD, list(zip(x.split(10), y.split(10), strict=True)))
    pipe = gt.Pipeline(model, cuts=[2], credit=gt.Synthetic(targets=True), heads=[Knows(model[2])])
    session(pipe, SGD).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(wanted, model)


def test_gears_of_one_to_one_are_plain_training_and_slow_ones_skip() -> None:
    x, y = data()
    wanted, model = network(), network()
    plain(wanted, SGD, list(zip(x.split(10), y.split(10), strict=True)))
    pipe = gt.Pipeline(model, parts=3, gears=gt.Gear())
    session(pipe, SGD).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(wanted, model)
    pipe = gt.Pipeline(network(), parts=3, gears=[gt.Gear(4), gt.Gear(2), None])
    fit = session(pipe, SGD).fit(gt.Minibatches(x[:40], y[:40], batch=5), epochs=1)
    assert fit.history[-1].updates == {"part 0": 2, "part 1": 4, "part 2": 8}


def test_gears_that_starve_a_part_are_refused_and_a_cut_lets_it_be() -> None:
    x, _ = data()
    gears = [gt.Gear(1), gt.Gear(2), None]
    with pytest.raises(GraphError, match="'part 1' has period 2"):
        gt.Pipeline(network(), parts=3, gears=gears)
    pipe = gt.Pipeline(network(), parts=3, gears=gears, credit=gt.Greedy(), sample=x[:4])
    assert [part.gear for part in pipe.parts] == gears
    with pytest.raises(GraphError, match=r"gears of .* have no meaning"):
        gt.Pipeline(network(), parts=3, gears=gears[:1] * 3, credit=gt.Overlapping(), sample=x[:4])


@pytest.mark.parametrize("slack", [0, 1])
def test_a_part_is_as_late_as_one_forward_one_backward_says_and_slack_adds_to_all_but_the_last(
    slack: int,
) -> None:
    x, y = data(200)
    pipe = gt.Pipeline(network(), cuts=[1, 3, 5], slack=slack)
    assert pipe.max_active == 4 + slack
    trainer = gt.Session(
        pipe.graph,
        rules=pipe.rules(partial(torch.optim.SGD, lr=0.01)),
        runtime=gt.Simulated(4, costs=gt.Costs(firing_s=1e-3, row_s=0.0)),
        **pipe.settings(4),
    )
    staleness = trainer.fit(gt.Minibatches(x, y, batch=10), epochs=1).staleness
    assert [staleness[f"part {k}"].max for k in range(4)] == [3 + slack, 2 + slack, 1 + slack, 0]


def test_images_and_sequences_get_pooled_heads() -> None:
    images = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4))
    pipe = gt.Pipeline(images, cuts=[2], credit=gt.Greedy(), sample=torch.randn(2, 3, 8, 8))
    assert pipe.heads[0](torch.randn(7, 5, 6, 6)).shape == (7, 4)
    words = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Flatten(), nn.Linear(18, 4))
    pipe = gt.Pipeline(
        words, cuts=[2], credit=gt.Greedy(), sample=torch.zeros(2, 3, dtype=torch.int64)
    )
    assert pipe.heads[0](torch.randn(7, 3, 6)).shape == (7, 4)


def test_consecutive_parts_live_together_with_their_heads() -> None:
    pipe = gt.Pipeline(network(), cuts=[1, 3, 5], credit=gt.Greedy(), sample=data()[0][:4])
    assert pipe.placement(2) == {
        "part 0": 0, "part 1": 0, "part 2": 1, "part 3": 1, "head 0": 0, "head 1": 0, "head 2": 1,
    }  # fmt: skip


def test_gradients_of_several_minibatches_make_one_update() -> None:
    x, y = data(40)
    wanted, model = network(), network()
    optimizer = SGD(wanted.parameters())
    for xs, ys in zip(x.split(20), y.split(20), strict=True):
        optimizer.zero_grad()
        for half in range(2):
            rows = slice(10 * half, 10 * half + 10)
            (F.cross_entropy(wanted(xs[rows]), ys[rows]) / 2).backward()
        optimizer.step()
    pipe = gt.Pipeline(model, parts=2)
    rules = pipe.rules(SGD, update_every=gt.Messages(2))
    settings = pipe.settings() | {"max_active": 1}
    trainer = gt.Session(pipe.graph, rules=rules, reading=gt.Reading(shuffle=False), **settings)
    trainer.fit(gt.Minibatches(x, y, batch=10), epochs=1)
    assert_equal(wanted, model)


VIEWS: list[gt.AbstractView] = [
    gt.Stashed(), gt.Mixed(), gt.Recomputed(), gt.DoubleBuffered(), gt.Predicted(), gt.Corrected(),
]  # fmt: skip
DELAYS: list[gt.AbstractDelay] = [
    gt.AnnealedRate(over=5), gt.ScaledByStaleness(), gt.DelayCompensated(), gt.GapAware(),
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS, ids=repr)
def test_every_view_is_plain_training_where_one_minibatch_is_in_flight(
    view: gt.AbstractView,
) -> None:
    x, y = data()
    wanted, model = network(), network()
    plain(wanted, SGD, list(zip(x.split(10), y.split(10), strict=True)))
    pipe = gt.Pipeline(model, parts=3, view=view)
    session(pipe, SGD, 2).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(wanted, model)


@pytest.mark.parametrize("delay", DELAYS, ids=repr)
def test_every_rule_for_late_gradients_is_plain_training_where_none_is_late(
    delay: gt.AbstractDelay,
) -> None:
    x, y = data()
    wanted, model = network(), network()
    plain(wanted, SGD, list(zip(x.split(10), y.split(10), strict=True)))
    pipe = gt.Pipeline(model, parts=3, delay=delay)
    session(pipe, SGD, 2).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    assert_equal(wanted, model)


def test_parts_may_have_views_of_their_own() -> None:
    pipe = gt.Pipeline(network(), parts=3, view=[gt.Mixed(), None, gt.Predicted()])
    assert [part.view for part in pipe.parts] == [gt.Mixed(), None, gt.Predicted()]
    x, y = data()
    session(pipe, SGD, 2, max_active=3).fit(gt.Minibatches(x, y, batch=10), epochs=2)
    with pytest.raises(ValueError, match="view= has 2 entries for 3 parts"):
        gt.Pipeline(network(), parts=3, view=[gt.Mixed(), None])


@pytest.mark.parametrize(
    ("credit", "windows"),
    [
        (gt.Backprop(), [4, 3, 2, 1]),
        (gt.Greedy(), [1, 1, 1, 1]),
        (gt.Chunked(2), [2, 1, 2, 1]),
        (gt.DecoupledGreedy(), [1, 1, 1, 1]),
        (gt.Overlapping(), [2, 2, 2, 2]),
    ],
)
def test_a_part_runs_ahead_of_its_gradient_no_further_than_its_credit_needs(credit, windows):
    blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    pipeline = gt.Pipeline(
        blocks,
        parts=4,
        criterion=nn.functional.cross_entropy,
        credit=credit,
        sample=torch.ones(2, 6),
    )
    assert [part.window for part in pipeline.parts] == windows

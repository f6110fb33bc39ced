"""Methods of modules learn as the modules do, in copies too; what could never learn is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import geartrain as gt
from tests.rigs.products import in_pairs
from tests.rigs.sessions import session_of

RATE = 0.3


class Coder(nn.Module):
    """Two maps that are used by methods, one of them inside of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 4), Inner()

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.first(x)) * scale

    def decode(self, h: Tensor) -> Tensor:
        return self.inner.read(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def read(self, h: Tensor) -> Tensor:
        return self.last(h) + 0.1

    def forward(self, h: Tensor) -> Tensor:
        return self.read(h)


def as_function(coder: Coder, x: Tensor) -> Tensor:
    return coder.decode(coder.encode(x))


def fresh(kind: Callable[[], nn.Module] = Coder) -> Any:
    torch.manual_seed(0)
    return kind().double()


def data(n: int = 12) -> list[gt.Instance]:
    torch.manual_seed(1)
    x = torch.randn(n, 3, dtype=torch.float64)
    return [gt.Instance({"x": x[i : i + 1]}, value={"label": i % 3}, key=i) for i in range(n)]


def once(
    graph: gt.Graph, rows: list[gt.Instance], average: Any = "rows", **options: Any
) -> gt.Session:
    """One step with the mean over all rows, or over all instances."""
    options.setdefault("runtime", gt.Simulated(1))
    optimizer = partial(torch.optim.SGD, lr=RATE)
    session = session_of(
        graph,
        rules=gt.Rules(optimizer=optimizer, update_every=gt.Flush(), average=average),
        **options,
    )
    session.fit(rows, epochs=1)
    return session


def stepped(
    module: nn.Module, function: Callable[[Tensor], Tensor], rows: list[gt.Instance]
) -> None:
    """The same in plain PyTorch."""
    x = torch.cat([each.inputs["x"] for each in rows])
    F.cross_entropy(function(x), torch.tensor([each.value["label"] for each in rows])).backward()
    torch.optim.SGD(module.parameters(), lr=RATE).step()


def same(found: nn.Module, expected: nn.Module) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


FORMS: dict[str, Callable[[Coder], Any]] = {
    "a method": lambda m: m.forward,
    "its call": lambda m: m.__call__,
    "a method of another name": lambda m: m.whole,
    "a partial of a method": lambda m: partial(m.scaled, scale=2.0),
    "a partial of a partial": lambda m: partial(partial(m.scaled), scale=2.0),
    "a partial of the module": lambda m: partial(m),
    "a partial of a function of the module": lambda m: partial(as_function, m),
}


class Many(Coder):
    def whole(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def scaled(self, x: Tensor, scale: float) -> Tensor:
        return self.decode(self.encode(x, scale))


@in_pairs(form=[*FORMS], keep=["inputs", "activations", "graph"], named=[True, False])
def test_a_method_learns_as_its_module_does(form: str, named: bool, keep: Any) -> None:
    module, expected, rows = fresh(Many), fresh(Many), data()
    graph = gt.Graph(value=("label",))
    part = gt.Part(module, keep=keep) if named else None
    y = graph.input("x").through(FORMS[form](module), part=part, keep=keep)
    y.loss(gt.cross_entropy, "label")
    once(graph, rows)
    stepped(expected, FORMS[form](expected), rows)
    same(module, expected)


def two_nodes(module: Coder, part: gt.Part | None) -> gt.Graph:
    """Two methods, the second of a module inside the first's, and the module inside itself."""
    graph = gt.Graph(value=("label",))
    h = graph.input("x").through(module.encode, part=part, name="encode")
    if part is None:
        h.through(module.decode, name="decode").loss(gt.cross_entropy, "label")
    else:
        h.through(module.inner.read, part=part, name="decode").loss(gt.cross_entropy, "label")
    return graph


@pytest.mark.parametrize("named", [True, False])
def test_methods_of_one_module_are_one_part(named: bool) -> None:
    module, expected, rows = fresh(), fresh(), data()
    graph = two_nodes(module, gt.Part(module, name="coder") if named else None)
    session = once(graph, rows, "instances")  # both nodes have rows
    assert list(session.parts) == ["coder" if named else "encode"]
    assert graph.modules()[0] is module
    assert "Coder.encode" in str(graph)
    stepped(expected, expected, rows)
    same(module, expected)


def one_node(module: Many, part: gt.Part | None) -> gt.Graph:
    graph = gt.Graph(value=("label",))
    graph.input("x").through(module.whole, part=part, name="coder").loss(gt.cross_entropy, "label")
    return graph


def test_copies_of_a_part_run_the_methods_of_their_own_module() -> None:
    module, expected, rows = fresh(Many), fresh(Many), data()
    session = once(one_node(module, gt.Part(module)), rows, sharing=gt.PartCopies(2))
    stepped(expected, expected, rows)
    # Each copy steps with the mean of its half; they meet in the mean of both.
    same(session.parts["coder"].module, expected)
    same(session.parts["coder#1"].module, expected)
    assert session.parts["coder#1"].version == 1


@pytest.mark.parametrize("named", [True, False])
def test_workers_that_share_weights_run_the_methods_of_one_module(named: bool) -> None:
    module, expected, rows = fresh(), fresh(), data()
    graph = two_nodes(module, gt.Part(module) if named else None)
    once(graph, rows, "instances", runtime=gt.Simulated(2), sharing=gt.SharedWeights())
    stepped(expected, expected, rows)
    same(module, expected)


@pytest.mark.parametrize("exchange", ["gradients", "weights", "all-reduce"])
def test_copies_of_the_model_run_the_methods_of_their_own_modules(exchange: str) -> None:
    rows = data()

    def trained(method: bool) -> dict[str, nn.Module]:
        module = fresh(Many)
        graph = gt.Graph(value=("label",))
        y = graph.input("x").through(module.whole if method else module, name="coder")
        y.loss(gt.cross_entropy, "label")
        copies = gt.Neighbours(copies=2, exchange=exchange, topology="full")
        rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=RATE), update_every=2)
        session = gt.Session(graph, rules=rules, runtime=gt.Simulated(2), sharing=copies)
        session.fit(rows, epochs=2)
        return {n: p.module for n, p in session.trained_parts.items()} | {"": module}

    found, expected = trained(True), trained(False)
    assert found.keys() == expected.keys() and len(found) == 3
    for name, module in found.items():
        same(module, expected[name])
        assert (module.first.weight - fresh(Many).first.weight).abs().max() > 0.01


def test_weights_of_a_method_are_kept_under_the_names_of_its_module(tmp_path: Any) -> None:
    module, other, rows = fresh(), fresh(), data()
    once(two_nodes(module, None), rows).save(tmp_path / "a.safetensors")
    graph = gt.Graph(value=("label",))
    graph.input("x").through(other, name="encode").loss(gt.cross_entropy, "label")
    gt.Session(graph).load(tmp_path / "a.safetensors", weights_only=True)
    same(other, module)


def test_a_method_of_a_module_outside_of_its_part_is_refused_as_it_is_written() -> None:
    x = gt.Graph().input("x")
    with pytest.raises(gt.GraphError, match="Coder is not inside the module of its part, Linear"):
        x.through(Coder().encode, part=gt.Part(nn.Linear(2, 2)))


def test_a_class_in_place_of_a_module_is_refused_as_it_is_written() -> None:
    with pytest.raises(TypeError, match="not the class ReLU"):
        gt.Graph().input("x").through(nn.ReLU)


class Holder:
    """A callable object, as users have them; its module is no part's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)


class Hiding(nn.Module):
    """Weights in a list, which torch does not find."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.own, self.hidden = nn.Linear(3, 3).double(), [module]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.own(x))


def nothing_found(m: nn.Module) -> Callable[[Tensor], Tensor]:
    weight = m.weight * 2  # the graph of this leads to the weight
    return lambda x: x @ weight.T


LINEAR = nn.Linear(3, 3).double()


STRANGERS: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "a closure": (lambda m: lambda x: m(x), r"m\.weight \(3, 3\), m\.bias \(3,\)"),
    "a weight in a closure": (lambda m: nothing_found(m), r"a tensor \(3, 3\)"),
    "a callable object": (lambda m: Holder(m), r"module\.weight"),
    "a method of such an object": (lambda m: Holder(m).__call__, r"module\.weight"),
    "a partial's argument": (
        lambda m: partial(lambda x, by: by(x), by=m),
        r"by\.weight \(3, 3\)",
    ),
    "a global": (lambda m: lambda x: LINEAR(x), r"LINEAR\.weight"),
    "a module in a list": (lambda m: Hiding(m), r"hidden\[0\]\.weight"),
    "a tensor that wants a gradient": (
        lambda m: partial(torch.mul, torch.ones(3, dtype=torch.float64, requires_grad=True)),
        r" \(3,\)",
    ),
}


@pytest.mark.parametrize("keep", ["auto", "inputs", "activations", "graph"])
@pytest.mark.parametrize("form", STRANGERS)
def test_weights_that_belong_to_no_part_are_refused_by_name(form: str, keep: Any) -> None:
    make, name = STRANGERS[form]
    graph = gt.Graph(value=("label",))
    y = graph.input("x").through(make(fresh(lambda: nn.Linear(3, 3))), keep=keep, name="node")
    y.loss(gt.cross_entropy, "label")
    with pytest.raises(gt.GraphError, match=rf"'node': .* not its own.*{name}.*through\(model"):
        once(graph, data())


def test_weights_of_another_node_are_called_by_it() -> None:
    embed = nn.Linear(3, 3).double()
    graph = gt.Graph(value=("label",))
    h = graph.input("x").through(embed, name="embed")
    h.through(lambda h: h @ embed.weight, name="tied").loss(gt.cross_entropy, "label")
    with pytest.raises(gt.GraphError, match=r"'tied': .*learn here: weight of 'embed' \(3, 3\);"):
        once(graph, data())


def test_weights_that_shall_not_learn_may_be_anywhere() -> None:
    frozen, other = fresh(lambda: nn.Linear(3, 3)), fresh(lambda: nn.Linear(3, 3))
    frozen.requires_grad_(False)

    def without_gradient(x: Tensor) -> Tensor:
        with torch.no_grad():
            return other(x)

    module = fresh()
    graph = gt.Graph(value=("label",))
    x = graph.input("x").through(lambda x: frozen(x)).through(without_gradient)
    x.through(module).loss(gt.cross_entropy, "label")
    before = other.weight.clone()
    once(graph, data())
    assert_close(other.weight, before, rtol=0, atol=0)


class Energy(nn.Module):
    """A step down an energy, by a leaf that each call makes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (down,) = torch.autograd.grad(self.map(at).tanh().sum(), at, create_graph=True)
        return self.map(x) - down


@pytest.mark.parametrize("keep", ["auto", "inputs", "activations", "graph"])
def test_a_leaf_that_a_call_makes_for_itself_is_no_strangers(keep: Any) -> None:
    module, expected, rows = fresh(Energy), fresh(Energy), data()
    graph = gt.Graph(value=("label",))
    graph.input("x").through(module, keep=keep).loss(gt.cross_entropy, "label")
    once(graph, rows)
    stepped(expected, expected, rows)
    same(module, expected)


@pytest.mark.parametrize("keep", ["auto", "graph"])
def test_weights_that_a_call_makes_for_itself_would_never_learn(keep: Any) -> None:
    graph = gt.Graph(value=("label",))
    x = graph.input("x").through(lambda x: nn.Linear(3, 3).double()(x), keep=keep, name="node")
    x.through(fresh()).loss(gt.cross_entropy, "label")
    with pytest.raises(gt.GraphError, match=r"'node': .* not its own.*a tensor \(3, 3\)"):
        once(graph, data())


def test_a_module_that_has_no_place_for_a_column_is_refused_before_anything_moves() -> None:
    graph = gt.Graph(value=("label",))
    y = graph.input("x").through(fresh(lambda: nn.Linear(3, 3)), read="label", name="node")
    y.loss(gt.cross_entropy, "label")
    with pytest.raises(gt.GraphError, match=r"'node': Linear, reads label .*3 were given"):
        once(graph, data())


@pytest.mark.parametrize(
    "chosen",
    [lambda m: m.payload[:, 0] > 0, lambda m: m.payload > 0, lambda m: m.payload.argmax(1) > 0],
)
def test_a_predicate_that_takes_the_payload_for_a_tensor_is_told_so(chosen: Any) -> None:
    graph = gt.Graph(value=("label",))
    yes, no = graph.input("x").where(chosen)
    yes.through(fresh()).loss(gt.cross_entropy, "label")
    no.stop()
    with pytest.raises(gt.WorkerError, match=r"a tuple of tensors, .*: m\.payload\[0\]$"):
        once(graph, data())


def test_an_instance_without_a_vertex_is_called_so() -> None:
    graph = gt.Graph(vertex=("label",))
    graph.input("x").through(fresh()).loss(gt.cross_entropy, "label")
    bare = gt.Instance({"x": (torch.zeros(1, 3).double(), [0])}, {"label": []})
    with pytest.raises(gt.DataError, match=r"at vertex 0, but the instance has no vertex: "):
        once(graph, [bare])


class Picky(nn.Module):
    """Takes rows of real data alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.own, self.hidden = nn.Linear(3, 3).double(), [module]

    def forward(self, x: Tensor) -> Tensor:
        if not ((x[:, 0] - 7).abs() < 1).all():
            raise RuntimeError("these are no data")
        return self.hidden[0](self.own(x))


@pytest.mark.parametrize("keep", ["inputs", "activations", "graph"])
def test_where_made_up_rows_do_not_tell_the_first_real_ones_do(keep: Any) -> None:
    graph = gt.Graph(value=("label",))
    shift = torch.tensor([7.0, 0.0, 0.0], dtype=torch.float64)
    x = graph.input("x").through(lambda x: x * 0.1 + shift)
    x.through(Picky(nn.Linear(3, 3).double()), name="picky", keep=keep).loss(
        gt.cross_entropy, "label"
    )
    with pytest.raises(gt.GraphError, match=r"'picky': .* not its own.*hidden\[0\]\.weight"):
        once(graph, data())


class Clinging(nn.Module):
    """Its own weights, by a function that holds the module it was made in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.apply_it = lambda x: self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_it(x)


def test_a_copy_that_would_run_the_originals_weights_is_refused() -> None:
    module, expected, rows = fresh(Clinging), fresh(Clinging), data()

    def graph(part: gt.Part) -> gt.Graph:
        found = gt.Graph(value=("label",))
        found.input("x").through(part, name="node").loss(gt.cross_entropy, "label")
        return found

    once(graph(gt.Part(module)), rows)
    stepped(expected, expected, rows)
    same(module, expected)
    with pytest.raises(gt.GraphError, match=r"'node': .* not its own"):
        once(graph(gt.Part(module)), rows, sharing=gt.PartCopies(2))


def test_a_criterion_has_no_weights_that_would_learn() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, y: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(y * self.scale, target, reduction="none")

    criterion = Scaled()
    for given in (criterion, lambda y, target: criterion(y, target)):
        graph = gt.Graph(value=("label",))
        graph.input("x").through(fresh()).loss(given, "label", name="judge")
        with pytest.raises(gt.GraphError, match=r"'judge': .*scale \(3,\); run what holds them"):
            once(graph, data())
    criterion.requires_grad_(False)
    once(graph, data())


def test_a_graph_without_a_loss_is_not_fitted() -> None:
    graph = gt.Graph(value=("label",))
    graph.input("x").through(fresh()).output()
    session = gt.Session(graph)
    with pytest.raises(gt.GraphError, match=r"no loss, so nothing in it would learn; end a stream"):
        session.fit(data(), epochs=1)
    assert len(session.predict(data())) == 12


def test_what_will_never_learn_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    whole, aside = fresh(), fresh()
    graph = gt.Graph(value=("label",))
    x = graph.input("x")
    x.through(whole.encode, part=gt.Part(whole.first and whole)).stop()
    part = gt.Part(nn.ModuleList([aside, nn.Linear(2, 2)]))
    h = x.through(aside, part=part, name="aside")
    h.loss(gt.cross_entropy, "label")
    rows = [gt.Instance(r.inputs, value=r.value | {"labels": 0}) for r in data()]
    session = gt.Session(graph, runtime=gt.Simulated(1))
    with caplog.at_level(logging.WARNING, "geartrain.train"):
        session.predict(rows)
        assert not caplog.records
        session.fit(rows, epochs=1)
        session.fit(rows, epochs=2)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "'encode' never learns: no loss is behind it" in said[0]
    assert "part of 'aside' has weights that none of its nodes uses" in said[1]
    assert "1.weight, 1.bias" in said[1]
    assert "value column 'labels'" in said[2] and "declares 'label'" in said[2]


def test_an_lstm_cell_gets_its_two_states_as_a_pair() -> None:
    """Its kernel takes three arguments; so do the dry run and a run again."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = nn.LSTMCell(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h, _ = self.cell(x, (x.new_zeros(len(x), 4), x.new_ones(len(x), 4)))
            return self.last(h)

    def states(x: Tensor) -> tuple[Tensor, ...]:
        return x, x.new_zeros(x.shape[0], 4), x.new_ones(x.shape[0], 4)

    for keep in ("auto", "inputs", "activations", "graph"):
        module, expected, rows = fresh(Plain), fresh(Plain), data()
        graph = gt.Graph(value=("label",))
        h = graph.input("x").through(states).through(module.cell, keep=keep)
        h.through(module.last, take=0).loss(gt.cross_entropy, "label")
        once(graph, rows)
        stepped(expected, expected, rows)
        same(module, expected)

"""Derived kernels against autograd in float64: rows leave in two forwards and come back mixed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain import Graph, Instance, Part, Rules, Session, Simulated
from geartrain.derived.kernel import MOST_PROGRAMS, DerivedKernel
from geartrain.derived.registry import REGISTRY
from geartrain.errors import GraphError, ProtocolError
from geartrain.nodes.gradient import GradientSum
from geartrain.parts.rules import Flush
from geartrain.train.options import Compute

ROWS, SENT, D, V = 7, 4, 3, 5
Tensors = tuple[Tensor, ...]


class Cell(nn.Module):
    """Several inputs and outputs, an integer among either, a table that is used twice."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * D, 3 * D)
        self.norm = nn.LayerNorm(D)
        self.table = nn.Embedding(V, D, sparse=sparse, padding_idx=2)
        self.register_buffer("scale", torch.rand(D) + 0.5)

    def forward(self, h: Tensor, c: Tensor, ids: Tensor) -> Tensors:
        both = torch.cat([h + self.table(ids), c], 1)
        i, f, o = self.gates(both).chunk(3, 1)
        c = f.sigmoid() * c + i.tanh() + self.table((ids + 1) % V)
        return self.norm(o.sigmoid() * c.tanh()) * self.scale, c, c.argmax(1)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x.mul_(2).sin()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b = nn.Linear(D, D)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.silu(self.a(x)))


class Placed(nn.Module):
    """A row is put into a stack, at a depth of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(D, D)

    def forward(self, stack: Tensor, x: Tensor, depth: Tensor) -> Tensor:
        here = F.one_hot(depth, num_classes=4)[:, :, None]
        return stack + here * (self.map(x)[:, None] - stack)


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2))


def _floats(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, dtype=torch.float64)


def _weight_norm() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, 2))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensors]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, 2), nn.ReLU(inplace=True)),
        lambda: (_floats(D),),
    ),
    "matrices": (
        lambda: nn.Sequential(nn.Linear(D, 8), nn.SiLU(), nn.Linear(8, 2)),
        lambda: (_floats(4, D),),
    ),
    "cell": (Cell, lambda: (_floats(D), _floats(D), torch.randint(V, (ROWS,)))),
    "cell, sparse": (
        partial(Cell, sparse=True),
        lambda: (_floats(D), _floats(D), torch.randint(V, (ROWS,))),
    ),
    "one-hot": (Placed, lambda: (_floats(4, D), _floats(D), torch.randint(4, (ROWS,)))),
    "in place": (InPlace, lambda: (_floats(D),)),
    "tied": (Tied, lambda: (_floats(D),)),
    "weight norm": (_weight_norm, lambda: (_floats(D),)),
    "convolution": (_convolution, lambda: (_floats(1, 6, 6),)),
    "encoder": (_encoder, lambda: (_floats(3, 4),)),
    "bilinear": (lambda: nn.Bilinear(D, D, 2), lambda: (_floats(D), _floats(D))),
}
every_case = pytest.mark.parametrize("name", CASES)
_MADE: dict[str, tuple[nn.Module, DerivedKernel]] = {}


def _built(name: str) -> tuple[nn.Module, DerivedKernel, Tensors]:
    torch.manual_seed(0)
    make, inputs = CASES[name]
    if name not in _MADE:
        module = make().double()
        _MADE[name] = module, DerivedKernel(name, module)
    return *_MADE[name], inputs()


def _outputs(module: Callable[..., object], inputs: Tensors) -> Tensors:
    out = module(*inputs)
    return out if isinstance(out, tuple) else (out,)


def _autograd(module: nn.Module, inputs: Tensors, dys: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients of inputs and then parameters, dense."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    ys = _outputs(module, tuple(x.clone() for x in leaves))
    pairs = [(y, d) for y, d in zip(ys, dys, strict=True) if d is not None and y.requires_grad]
    wanted = [*leaves, *module.parameters()]
    real = [x for x in wanted if x.requires_grad]
    found = iter(
        torch.autograd.grad([y for y, _ in pairs], real, [d for _, d in pairs], allow_unused=True)
    )
    each = [next(found) if x.requires_grad else None for x in wanted]
    return [d if d is None or not d.is_sparse else d.to_dense() for d in each]


def _run(
    kernel: DerivedKernel,
    module: nn.Module,
    inputs: Tensors,
    dys: list[Tensor | None],
    goes: list[list[int]],
    sent: int = SENT,
) -> tuple[Tensors, list[Tensor | None]]:
    """Outputs, and gradients as ``_autograd`` has them, of rows that come back in goes."""
    with torch.no_grad():
        halves = [kernel.forward(tuple(x[s].clone() for x in inputs)) for s in _halves(sent)]
        outputs = tuple(torch.cat(pair) for pair in zip(*(h[0] for h in halves), strict=True))
        kept = tuple(torch.cat(pair) for pair in zip(*(h[1] for h in halves), strict=True))
        into = GradientSum(module.parameters())
        back: list[Tensor | None] = [None] * len(inputs)
        for rows in goes:
            some = tuple(None if d is None else d[rows] for d in dys)
            for i, d in enumerate(kernel.backward(some, tuple(r[rows] for r in kept), None, into)):
                if d is not None:
                    total = torch.zeros_like(inputs[i]) if back[i] is None else back[i]
                    assert total is not None
                    total[rows] = d
                    back[i] = total
    sums = [into.take(p) for p in module.parameters()]
    return outputs, back + [d.to_dense() if d is not None else None for d in sums]


def _halves(sent: int) -> list[slice]:
    return [slice(0, sent), slice(sent, None)] if sent else [slice(0, None)]


def _close(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, rtol=1e-10, atol=1e-11)


@every_case
@settings(max_examples=5)
@given(order=st.permutations(range(ROWS)), cut=st.integers(1, ROWS - 1))
def test_gradients_are_those_of_autograd_however_rows_come_back(
    name: str, order: list[int], cut: int
) -> None:
    module, kernel, inputs = _built(name)
    ys = _outputs(module, tuple(x.clone() for x in inputs))
    dys = [torch.randn_like(y) if y.is_floating_point() else None for y in ys]
    outputs, found = _run(kernel, module, inputs, dys, [order[:cut], order[cut:]])
    assert kernel.refused is None
    for y, expected in zip(outputs, ys, strict=True):
        assert_close(y, expected.detach())
    _close(found, _autograd(module, inputs, dys))


def test_outputs_without_a_gradient_leave_none_where_autograd_does() -> None:
    module, kernel, inputs = _built("cell")
    ys = _outputs(module, inputs)
    for silent in range(2):
        dys = [torch.randn_like(y) if k == 1 - silent else None for k, y in enumerate(ys)]
        _, found = _run(kernel, module, inputs, dys, [list(range(ROWS))])
        _close(found, _autograd(module, inputs, dys))
    _, found = _run(kernel, module, inputs, [None] * 3, [list(range(ROWS))])
    assert found == [None] * len(found)


@every_case
@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row_are_ordinary_batches(name: str, rows: int) -> None:
    module, kernel, inputs = _built(name)
    kernel.forward(inputs)
    few = tuple(x[:rows] for x in inputs)
    ys = _outputs(module, tuple(x.clone() for x in few))
    dys = [torch.randn_like(y) if y.is_floating_point() else None for y in ys]
    outputs, found = _run(kernel, module, few, dys, [list(range(rows))], 0)
    assert [y.shape for y in outputs] == [y.shape for y in ys]
    if rows:
        _close(found, _autograd(module, few, dys))


def test_a_kernel_can_begin_with_no_row() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.GELU())
    kernel = DerivedKernel("net", module)
    assert kernel.forward((torch.ones(0, D),))[0][0].shape == (0, D)
    assert kernel.refused is None


def test_frozen_parameters_get_nothing_and_may_be_thawed() -> None:
    module, kernel, inputs = _built("perceptron")
    dys: list[Tensor | None] = [torch.randn(ROWS, 2, dtype=torch.float64)]
    first = next(module.parameters())
    for frozen in (True, False):
        first.requires_grad_(not frozen)
        _, found = _run(kernel, module, inputs, dys, [list(range(ROWS))])
        assert (found[1] is None) == frozen
        _close(found, _autograd(module, inputs, dys))


def test_the_weights_are_those_of_now_and_the_residuals_of_then() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(D, D), nn.Softplus()).double()
    kernel, x = DerivedKernel("net", module), _floats(D)
    with torch.no_grad():
        _, kept = kernel.forward((x,))
        slope = torch.sigmoid(module[0](x))
        module[0].weight.add_(1.0)
        (dx,) = kernel.backward(
            (torch.ones(ROWS, D).double(),), kept, None, GradientSum(module.parameters())
        )
        assert_close(dx, slope @ module[0].weight)


def test_dropout_keeps_its_mask_and_evaluation_has_none() -> None:
    torch.manual_seed(0)
    module = nn.Dropout(0.5)
    kernel, x = DerivedKernel("drop", module), torch.rand(200, D) + 1
    with torch.no_grad():
        (y,), kept = kernel.forward((x,))
        (other,), _ = kernel.forward((x,))
        rows = torch.randperm(200)
        into = GradientSum(())
        (dx,) = kernel.backward((x[rows],), tuple(r[rows] for r in kept), None, into)
        assert_close(dx, y[rows])
        assert 0.3 < float((y == 0).float().mean()) < 0.7
        assert not torch.equal(y, other)
        module.eval()
        assert torch.equal(kernel.forward((x,))[0][0], x)
        module.train()
        assert (kernel.forward((x,))[0][0] == 0).any()


def test_tracing_draws_no_random_number_and_changes_no_buffer() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), Cell().norm)
    x = torch.randn(ROWS, D)
    before = torch.get_rng_state()
    kernel = DerivedKernel("net", module)
    torch.manual_seed(5)
    first = kernel.forward((x,))[0][0]
    torch.manual_seed(5)
    assert torch.equal(first, kernel.forward((x,))[0][0])
    torch.set_rng_state(before)


def test_a_number_that_the_module_holds_may_change() -> None:
    class Power(nn.Module):
        k = 2

        def __init__(self) -> None:
            super().__init__()
            self.power = 2

        def forward(self, x: Tensor) -> Tensor:
            return x**self.power

    module = Power()
    kernel, x = DerivedKernel("power", module), torch.rand(ROWS, D)
    for power in (*range(2, 2 + MOST_PROGRAMS), 3, 2):
        module.power = power
        (y,), kept = kernel.forward((x,))
        assert_close(y, x**power)
        (dx,) = kernel.backward((torch.ones_like(y),), kept, None, GradientSum(()))
        assert_close(dx, power * x ** (power - 1))
    module.power = 99
    with pytest.raises(ProtocolError, match="settings"):
        kernel.backward((torch.ones_like(y),), kept, None, GradientSum(()))


def test_numbers_of_rows_are_not_traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from geartrain.derived import registry

    traced = []
    true = registry.derive
    registry.REGISTRY.forget()
    monkeypatch.setattr(registry, "derive", lambda *a: traced.append(1) or true(*a))
    kernel = DerivedKernel("net", nn.Sequential(nn.Linear(D, D), nn.GELU()))
    for n in (1, 2, 32, 7, 0, 512):
        kernel.forward((torch.randn(n, D),))
    assert len(traced) == 1


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Gram(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.t()).softmax(1) @ x


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0).sin().flip(0)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if float(x.sum()) > 0 else x.cos()


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * F.one_hot(x.argmax(1)).sum(1, keepdim=True)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin()


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.shape[0])
        return x.sin()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Centred(), "rows alone give other outputs"),
        (Gram(), "not one row for each"),
        (Turned(), "other gradients than together"),
        (Branching(), "its way depends on values"),
        (Largest(), "say how many"),
        (Counting(), "changes attributes"),
        (Running(), "mutate|writes into"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_cut_runs_again_and_the_log_says_why(
    module: nn.Module, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    REGISTRY.forget()  # a structure is told of once
    kernel, x = DerivedKernel("odd", module), torch.rand(ROWS, D)
    with caplog.at_level(logging.WARNING, "geartrain.nn"), torch.no_grad():
        (y,), kept = kernel.forward((x,))
        (dx,) = kernel.backward((torch.ones_like(y),), kept, None, GradientSum(()))
    assert "'odd' runs again for its gradient" in caplog.text
    assert re.search(why, kernel.refused or "")
    x.requires_grad_()
    assert_close(dx, torch.autograd.grad(module(x).sum(), x)[0])


def test_a_class_out_of_range_is_refused_by_a_derived_kernel_too() -> None:
    kernel = DerivedKernel("placed", Placed())
    stack, x = torch.rand(ROWS, 4, D), torch.rand(ROWS, D)
    kernel.forward((stack, x, torch.zeros(ROWS, dtype=torch.int64)))
    assert kernel.refused is None
    for depth in (4, -1):
        with pytest.raises(IndexError):
            kernel.forward((stack, x, torch.full((ROWS,), depth)))


def test_dropout_that_cannot_be_cut_is_refused() -> None:
    module = nn.Sequential(Gram(), nn.Dropout(0.5))
    with pytest.raises(GraphError, match=r"'net': .*another mask"):
        DerivedKernel("net", module).forward(torch.rand(ROWS, D))


def test_a_session_learns_with_a_derived_kernel_what_it_learns_by_running_again() -> None:
    data = [Instance({"x": torch.randn(1, D)}, value={"y": k % 2}) for k in range(20)]

    def weights(keep: str) -> list[Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).double()
        for instance in data:
            instance.inputs["x"] = instance.inputs["x"].double()
        graph = Graph(value=("y",))
        stream = graph.input("x").through(Part(net, keep=keep), name="net")
        stream.loss(F.cross_entropy, target="y")
        assert ("derived" in str(graph)) == (keep == "activations")
        rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.5), update_every=Flush())
        Session(graph, rules=rules, runtime=Simulated(2, seed=3)).fit(data, epochs=3)
        return [p.detach() for p in net.parameters()]

    _close(list(weights("activations")), list(weights("inputs")))


class TurnedPairs(nn.Module):
    """Pairs as complex numbers, turned: torch has it, as views that want numbers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(D, 8)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.map(x).view(-1, 4, 2))
        angle = torch.arange(4.0, dtype=x.dtype)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(1)


def test_gradients_that_are_spread_out_come_as_those_of_the_trace() -> None:
    torch.manual_seed(0)
    module, x = TurnedPairs().double(), _floats(D)
    one: Tensor = _floats(1).expand(-1, 8)  # as that of a sum is
    kernel = DerivedKernel("turned", module)
    found = _run(kernel, module, (x,), [one], [list(range(ROWS))])[1]
    assert kernel.refused is None
    with torch.no_grad():
        _, kept = kernel.forward((x,))
        (spread,) = kernel.backward((one,), kept, None, GradientSum(module.parameters()))
    _close(found, _autograd(module, (x,), [one]))
    _close([spread], found[:1])


def test_in_bfloat16_it_works_between_casts() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, 2))
    data = [Instance({"x": torch.randn(1, D)}, value={"y": k % 2}) for k in range(20)]
    graph = Graph(value=("y",))
    stream = graph.input("x").through(Part(net, keep="activations"), name="net")
    stream.loss(F.cross_entropy, target="y")
    before = [p.detach().clone() for p in net.parameters()]
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.5), update_every=Flush())
    Session(
        graph, rules=rules, runtime=Simulated(1, seed=3), compute=Compute(precision="bf16")
    ).fit(data, epochs=1)
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

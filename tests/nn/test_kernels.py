"""What every row kernel promises, against autograd in float64.

Rows leave in two forwards and come back mixed, in any order, cut in two, some outputs without a
gradient. Rows of dy are all different: an answer in the order of arrival fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.errors import GraphError, ProtocolError
from geartrain.nn import DerivedKernel, TokenRNN, TreeLSTMBranch, TreeLSTMLeaf
from geartrain.nn.kernels import LinearKernel
from geartrain.nodes.casts import CastKernel
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel, kernel_of

ROWS, SENT = 7, 4  # seven rows: four leave in the first forward, three in the second
D, H, V = 3, 4, 5
Tensors = tuple[Tensor, ...]


def _floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def _ids(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(V, (n, *shape))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: tuple[Callable[[int], Tensor], ...]
    call: Callable[[nn.Module, Tensors], Tensor | Tensors] = lambda m, xs: m(*xs)
    derived: bool = False

    def build(self, seed: int = 0) -> tuple[nn.Module, AbstractKernel, Tensors]:
        torch.manual_seed(seed)
        module = self.make().double()
        return module, self.kernel(module), tuple(make(ROWS) for make in self.inputs)

    def kernel(self, module: nn.Module) -> AbstractKernel:
        """The one that somebody wrote, or one that is derived."""
        kernel = DerivedKernel("cell", module) if self.derived else kernel_of(module)
        assert kernel is not None
        return kernel

    def outputs(self, module: nn.Module, inputs: Tensors) -> Tensors:
        out = self.call(module, inputs)
        return out if isinstance(out, tuple) else (out,)


def _lstm(cell: nn.Module, xs: Tensors) -> Tensors:
    return cell(xs[0], (xs[1], xs[2]))


def _perceptron() -> nn.Module:
    inner = nn.Sequential(nn.Linear(H, H, bias=False), nn.Sigmoid(), nn.Identity())
    return nn.Sequential(nn.Linear(D, H), nn.ReLU(), inner, nn.Tanh(), nn.Linear(H, 2), nn.ReLU())


def _pairs(act: type[nn.Module], width: int = D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, H), act(), nn.Linear(H, H), act())


def _tied() -> nn.Module:
    layer = nn.Linear(D, D)
    return nn.Sequential(layer, nn.Tanh(), layer)


CASES = {
    "linear": Case(lambda: nn.Linear(D, H), (_floats(D),)),
    "linear without bias": Case(lambda: nn.Linear(D, H, bias=False), (_floats(D),)),
    "linear on matrices": Case(lambda: nn.Linear(D, H), (_floats(2, D),)),
    "embedding": Case(lambda: nn.Embedding(V, D), (_ids(),)),
    "embedding, sparse": Case(lambda: nn.Embedding(V, D, sparse=True), (_ids(),)),
    "embedding with padding": Case(lambda: nn.Embedding(V, D, padding_idx=2), (_ids(3),)),
    "embedding, sparse, with padding": Case(
        lambda: nn.Embedding(V, D, sparse=True, padding_idx=2), (_ids(3),)
    ),
    "relu": Case(nn.ReLU, (_floats(D),)),
    "relu in place": Case(lambda: nn.ReLU(inplace=True), (_floats(D),), lambda m, xs: m(1 * xs[0])),
    "tanh": Case(nn.Tanh, (_floats(2, D),)),
    "sigmoid": Case(nn.Sigmoid, (_floats(D),)),
    "elu": Case(nn.ELU, (_floats(D),)),
    "elu of negative alpha": Case(lambda: nn.ELU(-0.5), (_floats(D),)),
    "elu in place": Case(
        lambda: nn.ELU(0.3, inplace=True), (_floats(D),), lambda m, xs: m(1 * xs[0])
    ),
    "leaky relu": Case(nn.LeakyReLU, (_floats(2, D),)),
    "leaky relu of negative slope": Case(lambda: nn.LeakyReLU(-0.4), (_floats(D),)),
    "leaky relu of slope zero": Case(lambda: nn.LeakyReLU(0.0), (_floats(D),)),
    "gelu": Case(nn.GELU, (_floats(D),)),
    "gelu by tanh": Case(lambda: nn.GELU("tanh"), (_floats(D),)),
    "silu": Case(nn.SiLU, (_floats(D),)),
    "softplus": Case(nn.Softplus, (_floats(D),)),
    "softplus, mostly linear": Case(lambda: nn.Softplus(3.0, 0.2), (_floats(D),)),
    "identity": Case(nn.Identity, (_floats(D),)),
    "perceptron": Case(_perceptron, (_floats(D),)),
    **{
        f"linear, {act.__name__.lower()}, twice": Case(lambda act=act: _pairs(act), (_floats(D),))
        for act in (nn.Tanh, nn.Sigmoid, nn.Identity, nn.ELU, nn.LeakyReLU, nn.GELU, nn.SiLU)
    },
    "pairs of all kinds": Case(
        lambda: nn.Sequential(
            *_pairs(nn.GELU), nn.ELU(), *_pairs(nn.Tanh, H), nn.SiLU(), nn.SiLU()
        ),
        (_floats(D),),
    ),
    "one linear map twice": Case(_tied, (_floats(D),)),
    "embedding in a sequence": Case(
        lambda: nn.Sequential(nn.Embedding(V, D), nn.Tanh(), nn.Linear(D, H)), (_ids(),)
    ),
    "empty sequence": Case(nn.Sequential, (_floats(D),)),
    "lstm": Case(lambda: nn.LSTMCell(D, H), (_floats(D), _floats(H), _floats(H)), _lstm),
    "lstm without bias": Case(
        lambda: nn.LSTMCell(D, H, bias=False), (_floats(D), _floats(H), _floats(H)), _lstm
    ),
    "gru": Case(lambda: nn.GRUCell(D, H), (_floats(D), _floats(H))),
    "gru without bias": Case(lambda: nn.GRUCell(D, H, bias=False), (_floats(D), _floats(H))),
    **{
        name: replace(case, derived=True)
        for name, case in {
            "rnn": Case(lambda: nn.RNNCell(D, H), (_floats(D), _floats(H))),
            "rnn with relu, without bias": Case(
                lambda: nn.RNNCell(D, H, bias=False, nonlinearity="relu"), (_floats(D), _floats(H))
            ),
            "a leaf in a sequence": Case(
                lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(), TreeLSTMLeaf(D, H)),
                (_floats(D),),
            ),
            "tree leaf": Case(lambda: TreeLSTMLeaf(D, H), (_floats(D),)),
            "tree leaf with words": Case(lambda: TreeLSTMLeaf(D, H, vocabulary=V), (_ids(),)),
            "tree leaf with words, dense": Case(
                lambda: TreeLSTMLeaf(D, H, vocabulary=V, sparse=False), (_ids(),)
            ),
            "tree branch": Case(lambda: TreeLSTMBranch(H), (_floats(2, H), _floats(2, H))),
            "token rnn": Case(lambda: TokenRNN(V, H), (_floats(H), _ids())),
            "token rnn, tanh, sparse": Case(
                lambda: TokenRNN(V, H, "tanh", sparse=True), (_floats(H), _ids())
            ),
            "token rnn with an input matrix": Case(
                lambda: TokenRNN(V, H, embedding_dim=D), (_floats(H), _ids())
            ),
        }.items()
    },
}
every_kernel = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_kernel
@settings(max_examples=6)
@given(data=st.data())
def test_gradients_are_those_of_autograd_however_rows_come_back(
    case: Case, data: st.DataObject
) -> None:
    send_back(case, data)


@pytest.mark.slow
@every_kernel
@settings(max_examples=100)
@given(data=st.data())
def test_gradients_are_those_of_autograd_in_very_many_orders(
    case: Case, data: st.DataObject
) -> None:
    send_back(case, data)


def send_back(case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(ROWS)), label="order")
    cut = data.draw(st.integers(0, ROWS), label="cut")
    module, kernel, inputs = case.build()
    outputs = case.outputs(module, inputs)
    dys = [torch.randn_like(y) for y in outputs]
    silent = data.draw(st.sets(st.tuples(st.integers(0, 1), st.integers(0, len(dys) - 1))))
    for part, k in silent:
        dys[k][order[:cut] if part == 0 else order[cut:]] = 0
    want_inputs, want_parameters = _autograd(case, module, inputs, tuple(dys))

    kept = _sent_in_two(kernel, inputs)
    into = GradientSum(module.parameters())
    back: list[Tensor | None] = [
        torch.zeros_like(x) if x.is_floating_point() else None for x in inputs
    ]
    for part, rows in enumerate((order[:cut], order[cut:])):
        answer = _backward(
            kernel,
            tuple(None if (part, k) in silent else dy[rows] for k, dy in enumerate(dys)),
            tuple(r[rows] for r in kept),
            into,
        )
        assert len(answer) == len(inputs)
        for total, dx in zip(back, answer, strict=True):
            assert total is not None or dx is None
            if total is not None and dx is not None:
                total[rows] = dx
    for got, want in zip(back, want_inputs, strict=True):
        if got is not None:
            _assert_equal(got, want)
    for parameter, want in zip(module.parameters(), want_parameters, strict=True):
        _assert_equal(_taken(into, parameter), want)


@every_kernel
def test_the_kernel_forward_is_the_module_forward(case: Case) -> None:
    module, kernel, inputs = case.build()
    with torch.no_grad():
        outputs, residuals = kernel.forward(inputs)
        want = case.outputs(module, inputs)
    assert len(outputs) == len(want)
    for got, y in zip(outputs, want, strict=True):
        _assert_equal(got, y)
    assert all(each.shape[0] == ROWS for each in residuals)


@every_kernel
def test_in_single_precision_it_agrees_to_rounding(case: Case) -> None:
    module, _, inputs = case.build()
    module.float()
    inputs = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    kernel = case.kernel(module)
    with torch.no_grad():
        outputs, residuals = kernel.forward(inputs)
        want = case.outputs(module, inputs)
    dys = tuple(torch.randn_like(y) for y in want)
    want_inputs, want_parameters = _autograd(case, module, inputs, dys)
    into = GradientSum(module.parameters())
    answer = _backward(kernel, dys, residuals, into)
    pairs = [*zip(outputs, want, strict=True), *zip(answer, want_inputs, strict=True)]
    pairs += [
        (_taken(into, parameter), gradient)
        for parameter, gradient in zip(module.parameters(), want_parameters, strict=True)
    ]
    for got, true in pairs:
        if got is not None:
            assert_close(got, true, rtol=1e-5, atol=2e-6)


@every_kernel
def test_a_frozen_parameter_is_skipped_and_the_others_are_not(case: Case) -> None:
    module, kernel, inputs = case.build()
    dys = tuple(torch.randn_like(y) for y in case.outputs(module, inputs))
    want_inputs, want_parameters = _autograd(case, module, inputs, dys)
    want = dict(zip(module.parameters(), want_parameters, strict=True))
    with torch.no_grad():
        _, residuals = kernel.forward(inputs)
    for frozen in module.parameters():
        frozen.requires_grad_(False)
        others = [p for p in module.parameters() if p is not frozen]
        into = GradientSum(others)  # refuses the frozen one
        answer = _backward(kernel, dys, residuals, into)
        for other in others:
            _assert_equal(_taken(into, other), want[other])
        for got, dx in zip(answer, want_inputs, strict=True):
            if got is not None:
                _assert_equal(got, dx)
        frozen.requires_grad_(True)


@every_kernel
def test_without_any_gradient_nothing_is_added(case: Case) -> None:
    module, kernel, inputs = case.build()
    with torch.no_grad():
        outputs, residuals = kernel.forward(inputs)
    into = GradientSum(module.parameters())
    assert _backward(kernel, (None,) * len(outputs), residuals, into) == (None,) * len(inputs)
    assert all(into.take(p) is None for p in module.parameters())


@every_kernel
def test_nothing_that_a_kernel_is_given_changes(case: Case) -> None:
    module, kernel, inputs = case.build()
    given_inputs = [x.clone() for x in inputs]
    with torch.no_grad():
        outputs, residuals = kernel.forward(inputs)
    dys = tuple(torch.randn_like(y) for y in outputs)
    given_back = [each.clone() for each in (*dys, *residuals)]
    _backward(kernel, dys, residuals, GradientSum(module.parameters()))
    assert all(map(torch.equal, inputs, given_inputs))
    assert all(map(torch.equal, (*dys, *residuals), given_back))


@every_kernel
def test_no_row_at_all_is_an_ordinary_batch(case: Case) -> None:
    module, kernel, inputs = case.build()
    with torch.no_grad():
        outputs, residuals = kernel.forward(tuple(x[:0] for x in inputs))
    want = case.outputs(module, tuple(x[:0] for x in inputs))
    assert [y.shape for y in outputs] == [y.shape for y in want]
    into = GradientSum(module.parameters())
    answer = _backward(kernel, tuple(y.clone() for y in outputs), residuals, into)
    for x, dx in zip(inputs, answer, strict=True):
        assert dx is None or dx.shape == x[:0].shape
    for parameter in module.parameters():
        assert not _taken(into, parameter).any()


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("identity", "empty sequence")]
)
def test_the_suite_would_notice_rows_that_are_mixed_up(name: str) -> None:
    case = CASES[name]
    module, kernel, inputs = case.build()
    dys = tuple(torch.randn_like(y) for y in case.outputs(module, inputs))
    want_inputs, want_parameters = _autograd(case, module, inputs, dys)
    with torch.no_grad():
        _, residuals = kernel.forward(inputs)
    into = GradientSum(module.parameters())
    mixed_up = tuple(r.roll(1, 0) for r in residuals)
    answer = _backward(kernel, dys, mixed_up, into)
    got = [dx for dx in answer if dx is not None]
    want = [dx for dx, seen in zip(want_inputs, answer, strict=True) if seen is not None]
    got += [_taken(into, p) for p in module.parameters()]
    want += want_parameters
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(got, want, strict=True))


def test_a_sequence_keeps_a_tensor_once_that_two_neighbours_need() -> None:
    torch.manual_seed(0)
    kernel = kernel_of(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, 2)))
    assert kernel is not None
    with torch.no_grad():
        _, residuals = kernel.forward((torch.randn(ROWS, D),))
    assert [tuple(r.shape) for r in residuals] == [(ROWS, D), (ROWS, H)]


def test_a_sequence_answers_rows_that_another_of_its_kernels_has_sent() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(D, H), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    one, other = kernel_of(module), kernel_of(module)
    assert one is not None and other is not None
    dy, sums = torch.randn(ROWS, H), [GradientSum(module.parameters()) for _ in range(2)]
    with torch.no_grad():
        _, residuals = one.forward((torch.randn(ROWS, D),))
        found = [
            k.backward((dy,), residuals, None, s) for k, s in zip((one, other), sums, strict=True)
        ]
    assert_close(*found)
    assert_close(*[s.take(module[0].weight) for s in sums])


@pytest.mark.parametrize("shape", [(ROWS, 72), (ROWS, 2, 72)])
@pytest.mark.parametrize("deep", [False, True])
def test_a_gradient_that_nobody_reads_is_not_made(shape: tuple[int, ...], deep: bool) -> None:
    torch.manual_seed(0)
    module: nn.Module = nn.Linear(72, 64)  # too large for the one call of C
    module = nn.Sequential(module, nn.ReLU(), nn.Linear(64, 64)) if deep else module
    kernel = kernel_of(module)
    assert kernel is not None
    sums = [GradientSum(module.parameters()) for _ in range(2)]
    with torch.no_grad():
        (y,), residuals = kernel.forward((torch.randn(shape),))
        dy = torch.randn_like(y)
        (dx,) = kernel.backward((dy,), residuals, None, sums[0], wanted=True)
        (none,) = kernel.backward((dy,), residuals, None, sums[1], wanted=False)
    assert dx is not None and dx.shape == shape
    assert none is None
    for parameter in module.parameters():
        assert_close(*[_taken(into, parameter) for into in sums])


class Silent(nn.Module):
    """Its kernel, a linear map's, does not say how many residuals it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.map(x)
        return y

    def row_kernel(self) -> AbstractKernel:
        kernel = CastKernel(LinearKernel(self.map))
        kernel.residuals = None
        return kernel


class TwiceKernel(AbstractKernel):
    """Of rows that are given twice."""

    residuals = 0

    def forward(self, inputs, inside=None, room=None):
        return (*inputs, *inputs), ()

    def backward(self, gradients, kept, rows, into, inside=None, *, wanted=True):
        raise AssertionError("nobody gets so far")


class Two(nn.Module):
    """Gives its rows twice."""

    def forward(self, x: Tensor) -> Tensors:
        return x, x

    def row_kernel(self) -> AbstractKernel:
        return TwiceKernel()


@pytest.mark.parametrize("rows", [range(3, 40), range(39, 2, -1)], ids=["as they lie", "turned"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_map_is_done_with_its_rows_or_has_copied_them_when_it_returns(
    rows: range, frozen: bool
) -> None:
    torch.manual_seed(0)
    module, kept = nn.Linear(D, H), torch.randn(50, D)
    module.weight.requires_grad_(not frozen)
    kernel, into = LinearKernel(module), GradientSum([*module.parameters()])
    at, dy = np.array(rows), torch.randn(len(rows), H)
    wanted = dy.t() @ kept[at]
    with torch.no_grad():
        assert kernel.backward((dy,), (kept,), at, into, wanted=False) == (None,)
        kept.fill_(math.nan)
        (d, _), _ = into.take_each([module.weight, module.bias])
    assert_close(d, None if frozen else wanted)


def test_in_a_sequence_one_kernel_need_not_say_what_it_keeps() -> None:
    module = nn.Sequential(nn.Dropout(0.5), Silent(), nn.Tanh(), nn.Dropout(0.5))
    kernel, into = kernel_of(module), GradientSum(module.parameters())
    assert kernel is not None
    assert kernel.residuals is None
    with torch.no_grad():
        _, residuals = kernel.forward((torch.randn(ROWS, D),))
        (dx,) = kernel.backward((torch.randn(ROWS, D),), residuals, None, into)
    assert len(residuals) == 4
    assert dx is not None and dx.shape == (ROWS, D)


def test_a_sequence_refuses_two_kernels_that_do_not_say_what_they_keep() -> None:
    with pytest.raises(GraphError, match="CastKernel and CastKernel do not say how many residuals"):
        kernel_of(nn.Sequential(Silent(), nn.Tanh(), Silent()))


def test_a_sequence_refuses_gradients_before_rows() -> None:
    module = nn.Sequential(nn.Linear(D, H), nn.ReLU())
    kernel = kernel_of(module)
    assert kernel is not None
    with pytest.raises(ProtocolError, match="before any row"):
        kernel.backward((torch.ones(1, H),), (), None, GradientSum(module.parameters()))


def test_a_sequence_refuses_two_tensors_in_its_middle() -> None:
    kernel = kernel_of(nn.Sequential(Two(), nn.Tanh()))
    assert kernel is not None
    with torch.no_grad(), pytest.raises(ValueError, match="gets 2 tensors; expected one"):
        kernel.forward((torch.randn(ROWS, D),))


@pytest.mark.parametrize(("module", "count"), [(nn.LSTMCell(D, H), 3), (nn.GRUCell(D, H), 2)])
def test_a_cell_without_its_state_is_refused_by_name(module: nn.Module, count: int) -> None:
    kernel = kernel_of(module)
    assert kernel is not None
    with pytest.raises(
        ValueError, match=f"{type(module).__name__}: 1 inputs came.*expected {count}"
    ):
        kernel.forward((torch.randn(ROWS, D),))


def _sent_in_two(kernel: AbstractKernel, inputs: Tensors) -> Tensors:
    with torch.no_grad():
        _, first = kernel.forward(tuple(x[:SENT] for x in inputs))
        _, second = kernel.forward(tuple(x[SENT:] for x in inputs))
    return tuple(torch.cat(pair) for pair in zip(first, second, strict=True))


def _backward(
    kernel: AbstractKernel,
    gradients: tuple[Tensor | None, ...],
    residuals: Tensors,
    into: GradientSum,
) -> tuple[Tensor | None, ...]:
    with torch.no_grad():
        return kernel.backward(gradients, residuals, None, into)


def _autograd(
    case: Case, module: nn.Module, inputs: Tensors, dys: Tensors
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients at the inputs and at the parameters; zeros where nothing arrives."""
    leaves = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
    floats = [x for x in leaves if x.requires_grad]
    wanted = [*floats, *module.parameters()]
    outputs = case.outputs(module, leaves)
    found = torch.autograd.grad(outputs, wanted, dys, allow_unused=True) if wanted else ()
    whole = [
        torch.zeros_like(x) if g is None else g.to_dense()
        for x, g in zip(wanted, found, strict=True)
    ]
    at_floats = iter(whole)
    at_inputs = [next(at_floats) if x.requires_grad else torch.zeros(()) for x in leaves]
    return at_inputs, list(at_floats)


def _taken(into: GradientSum, parameter: nn.Parameter) -> Tensor:
    gradient = into.take(parameter)
    return torch.zeros_like(parameter) if gradient is None else gradient.to_dense()


def _assert_equal(got: Tensor, want: Tensor) -> None:
    scale = float(want.abs().max()) if want.numel() else 0.0
    assert_close(got, want, rtol=1e-12, atol=1e-12 * scale)

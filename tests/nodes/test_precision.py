"""bfloat16 rows around float32 weights: products, sums, kernels, casts, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain.nn as gtn
from geartrain.errors import GraphError
from geartrain.frames.precision import require_float32, require_precision
from geartrain.nodes import products
from geartrain.nodes.casts import Cast, CastKernel, in_bf16
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel, kernel_of

SHORT = torch.bfloat16
ROUNDING = 2.0**-8


@pytest.mark.parametrize("n", [1, 31, 64, 100, 515])
def test_products_of_short_rows_add_up_in_float32(n: int) -> None:
    torch.manual_seed(n)
    x, d = torch.randn(n, 70, dtype=SHORT), torch.randn(n, 40, dtype=SHORT)
    weight, bias = torch.randn(40, 70), torch.randn(40)
    short = weight.to(SHORT).double()
    with torch.no_grad():
        y = products.affine(x, weight, bias)
        back = products.times(d, weight)
        product = products.outer(d, x)
    assert {y.dtype, back.dtype, product.dtype} == {SHORT}
    # One rounding of the result: a sum of so many in bfloat16 would be further off.
    exact = x.double() @ short.T + bias.to(SHORT).double()
    assert_close(y.double(), exact, rtol=ROUNDING, atol=1e-3)
    assert_close(back.double(), d.double() @ short, rtol=ROUNDING, atol=1e-3)
    assert_close(product.double(), d.double().T @ x.double(), rtol=ROUNDING, atol=1e-3)


def test_a_weight_is_copied_once_for_each_version_of_it() -> None:
    weight, x = nn.Parameter(torch.randn(4, 3)), torch.randn(2, 3, dtype=SHORT)
    first = products.matching(weight, x)
    assert products.matching(weight, x) is first
    assert products.matching(weight, x.float()) is weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()
    second = products.matching(weight, x)
    assert_close(second, weight.detach().to(SHORT), rtol=0, atol=0)
    assert products.matching(weight, x) is second
    weight.data = torch.zeros(4, 3)  # torch does not count this
    products.forget_copies()
    assert not products.matching(weight, x).any()


def test_gradients_of_weights_add_up_in_float32() -> None:
    weight, bias, table = (nn.Parameter(torch.zeros(s)) for s in ((1, 1), (1,), (2, 1)))
    into = GradientSum([weight, bias, table])
    one, many = torch.ones(1, 1, dtype=SHORT), torch.full((128, 1), 2.0**-15, dtype=SHORT)
    ids = torch.zeros(1, dtype=torch.int64)
    into.add_sum(bias, one)
    into.add_sum(bias, many)  # so many are added at once, to a sum of 1
    into.add_product(weight, one, one)
    into.add_product(weight, many, torch.ones_like(many))
    for rows in (one, many[:1]):
        into.add_rows(table, ids, rows)
    sums = [into.take(p) for p in (weight, bias)]
    for found in sums:
        assert found is not None and found.dtype == torch.float32
        assert_close(found.flatten(), torch.tensor([1 + 2.0**-8]), rtol=0, atol=0)
    rows = into.take(table)
    assert rows is not None
    assert float(rows.to_dense()[0, 0]) == 1 + 2.0**-15, "which is no bfloat16"


def test_operands_of_two_dtypes_may_wait_for_one_parameter() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(3))
    into = GradientSum([weight, bias])
    pairs = [(torch.randn(2, 3).to(t), torch.randn(2, 5).to(t)) for t in (SHORT, torch.float32)]
    for d, x in pairs:
        into.add_product(weight, d, x)
        into.add_sum(bias, d)
    found, total = into.take(weight), into.take(bias)
    assert found is not None and total is not None
    assert_close(found, sum(d.float().T @ x.float() for d, x in pairs), rtol=1e-5, atol=1e-6)
    assert_close(total, sum(d.float().sum(0) for d, _ in pairs), rtol=1e-5, atol=1e-6)


def modules() -> dict[str, tuple[nn.Module, list[Tensor]]]:
    """Modules with kernels of their own for bfloat16, and inputs."""
    n, width = 70, 24
    x, h, c = (torch.randn(n, width) for _ in range(3))
    ids = torch.randint(9, (n,))
    words = nn.Sequential(nn.Embedding(9, width), nn.Linear(width, 8), nn.Tanh())
    return {
        "linear": (nn.Linear(width, 5), [x]),
        "linear of matrices": (nn.Linear(width, 5), [torch.randn(n, 3, width)]),
        "embedding": (nn.Embedding(9, width), [ids]),
        "sparse embedding": (nn.Embedding(9, width, sparse=True), [ids]),
        "sequence": (words, [ids]),
        "curves": (
            nn.Sequential(
                *(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, 8), nn.SiLU(), nn.Linear(8, 8)),
                *(nn.ELU(), nn.Linear(8, 7), nn.LeakyReLU(), nn.Linear(7, 7), nn.Softplus()),
            ),
            [x],
        ),
        "dropout in it": (nn.Sequential(nn.Linear(width, 4), gtn.RowDropout(0.0)), [x]),
        "lstm": (nn.LSTMCell(width, width), [x, h, c]),
        "gru": (nn.GRUCell(width, width), [x, h]),
    }


def run(
    kernel: AbstractKernel, module: nn.Module, inputs: list[Tensor]
) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Outputs and gradients by name, and the dtypes of all floats that a node keeps and sends."""
    into = GradientSum(module.parameters())
    with torch.no_grad():
        outputs, residuals = kernel.forward(tuple(inputs))
        torch.manual_seed(1)
        gradients = tuple(torch.randn(y.shape).to(y.dtype) for y in outputs)
        rows = torch.arange(0, inputs[0].shape[0], 2).flip(0)
        some = tuple(g.index_select(0, rows) for g in gradients)
        answers = kernel.backward(some, residuals, rows.numpy(), into)
    found = {f"output {j}": y for j, y in enumerate(outputs)}
    found |= {f"answer {j}": a for j, a in enumerate(answers) if a is not None}
    floats = {x.dtype for x in (*found.values(), *residuals) if x.is_floating_point()}
    for name, parameter in module.named_parameters():
        gradient = into.take(parameter)
        assert gradient is not None and gradient.dtype == torch.float32
        found[name] = gradient.to_dense() if gradient.is_sparse else gradient.clone()
    return found, floats


@pytest.mark.parametrize("name", modules())
def test_a_kernel_for_short_rows_is_that_of_float32_but_for_rounding(name: str) -> None:
    torch.manual_seed(3)
    module, inputs = modules()[name]
    kernel = kernel_of(module)
    assert isinstance(kernel, AbstractKernel)
    assert name == "dropout in it" or not isinstance(in_bf16(kernel), CastKernel)
    # The same values in both, so that what differs is what the kernel rounds.
    short = [x.to(SHORT) if x.is_floating_point() else x for x in inputs]
    long = [x.float() if x.is_floating_point() else x for x in short]
    want, _ = run(kernel, module, long)
    got, floats = run(in_bf16(kernel), module, short)
    assert floats == ({SHORT, torch.float32} if name == "dropout in it" else {SHORT})
    assert got.keys() == want.keys()
    for key, value in want.items():
        error = (got[key].float() - value).norm() / value.norm()
        assert float(error) < 0.01, f"{key}: {float(error)}"


def test_a_kernel_without_bfloat16_works_in_float32_between_casts() -> None:
    seen: list[torch.dtype] = []

    class Twice(AbstractKernel):
        def forward(self, inputs, inside=None, room=None):
            seen.extend(x.dtype for x in inputs)
            return (2 * inputs[0],), ()

        def backward(self, gradients, kept, rows, into, inside=None, *, wanted=True):
            seen.extend(g.dtype for g in gradients)
            return tuple(2 * g for g in gradients)

    kernel = in_bf16(Twice())
    x = torch.ones(2, 3, dtype=SHORT)
    (y,), _ = kernel.forward((x,))
    (dx,) = kernel.backward((x,), (), None, GradientSum(()))
    assert seen == [torch.float32, torch.float32]
    assert dx is not None
    assert (y.dtype, dx.dtype, float(y[0, 0]), float(dx[0, 0])) == (SHORT, SHORT, 2.0, 2.0)


def test_a_function_between_casts_is_seen_through_by_autograd() -> None:
    linear = nn.Linear(3, 2)
    x = torch.ones(4, 3, dtype=SHORT, requires_grad=True)
    y = Cast(linear)(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, linear.weight.grad.dtype) == (SHORT, SHORT, torch.float32)
    assert_close(linear.weight.grad, torch.full((2, 3), 4.0))


def test_what_is_no_precision_and_weights_of_another_are_refused() -> None:
    assert require_precision("bf16", "precision=") == "bf16"
    with pytest.raises(ValueError, match=r"precision='fp16': expected one of full, bf16"):
        require_precision("fp16", "precision=")
    require_float32("cell", dict(nn.Linear(2, 2).named_parameters()))
    with pytest.raises(GraphError, match=r"part 'cell': 'weight' is torch.float64.*\.float\(\)"):
        require_float32("cell", dict(nn.Linear(2, 2).double().named_parameters()))

"""Every native gate is its torch twin: forward, backward, over rows of a store, in any shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain.nn  # noqa: F401  (puts the kernels of torch's cells into the table)
from geartrain.errors import ProtocolError
from geartrain.native import cells, library
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel, kernel_of

Use = Callable[[library.Library | None], None]
both = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
WIDTHS = st.sampled_from([1, 2, 3, 8, 17, 32, 33])
DTYPES = st.sampled_from([torch.float32, torch.float64])


def lstm(width: int) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return nn.LSTMCell(3, width), [(3,), (width,), (width,)]


def gru(width: int) -> tuple[nn.Module, list[tuple[int, ...]]]:
    return nn.GRUCell(3, width), [(3,), (width,)]


CELLS = st.sampled_from([lstm, gru])


def run(
    module: nn.Module, inputs: list[Tensor], asked: list[bool], rows: np.ndarray
) -> dict[str, Tensor | None]:
    """Outputs, residuals, gradients of inputs and parameters for some rows of the forward."""
    kernel = kernel_of(module)
    assert isinstance(kernel, AbstractKernel)
    into = GradientSum(module.parameters())
    with torch.no_grad():
        outputs, residuals = kernel.forward(inputs)
        torch.manual_seed(1)
        gradients = tuple(
            torch.randn(rows.size, *y.shape[1:], dtype=y.dtype) if wanted else None
            for y, wanted in zip(outputs, asked, strict=False)
        )
        answers = kernel.backward(gradients, residuals, rows, into)
    found: dict[str, Tensor | None] = {f"output {j}": y for j, y in enumerate(outputs)}
    found |= {f"residual {j}": y for j, y in enumerate(residuals)}
    found |= {f"answer {j}": y for j, y in enumerate(answers)}
    return found | {name: into.take(p) for name, p in module.named_parameters()}


@both
@given(
    make=CELLS,
    width=WIDTHS,
    dtype=DTYPES,
    n=st.integers(1, 80),
    asked=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    seed=st.integers(0, 99),
)
def test_a_cell_is_the_same_with_and_without_kernels(
    native: library.Library,
    use: Use,
    make: Callable[[int], tuple[nn.Module, list[tuple[int, ...]]]],
    width: int,
    dtype: torch.dtype,
    n: int,
    asked: tuple[bool, bool],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    module, shapes = make(width)
    module = module.to(dtype)
    inputs = [2 * torch.randn(n, *shape, dtype=dtype) for shape in shapes]
    rows = np.random.default_rng(seed).permutation(n)[: max(1, n - seed % 7)]
    use(native)
    ours = run(module, inputs, list(asked), rows)
    use(None)
    torchs = run(module, inputs, list(asked), rows)
    assert ours.keys() == torchs.keys()
    precise = {"rtol": 1e-13, "atol": 1e-14} if dtype == torch.float64 else {}
    for name, expected in torchs.items():
        got = ours[name]
        assert (got is None) == (expected is None), name
        if got is not None:
            assert_close(got, expected, **precise, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("make", [lstm, gru])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_what_is_not_finite_stays_in_its_row(
    native: library.Library,
    use: Use,
    make: Callable[[int], tuple[nn.Module, list[tuple[int, ...]]]],
    value: float,
) -> None:
    torch.manual_seed(0)
    module, shapes = make(5)
    inputs = [torch.randn(3, *shape) for shape in shapes]
    inputs[-1][1].fill_(value)
    found = []
    for kernels in (native, None):
        use(kernels)
        with torch.no_grad():
            kernel = kernel_of(module)
            assert kernel is not None
            found.append(kernel.forward(inputs)[0])
    for ours, torchs in zip(*found, strict=True):
        assert_close(ours, torchs, equal_nan=True)
        assert ours[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_is_exact_to_four_units_of_rounding_of_itself(
    native: library.Library, use: Use, dtype: torch.dtype
) -> None:
    use(native)
    x = torch.cat((torch.linspace(-45, 45, 40_001), torch.logspace(-30, 1, 3001))).to(dtype)
    y = torch.empty_like(x)
    assert cells.tanh(x, y)
    exact = x.double().tanh()
    error = ((y.double() - exact) / exact)[x != 0].abs().max()
    assert error <= 4 * torch.finfo(dtype).eps


def test_sigmoids_go_to_their_limits(native: library.Library, use: Use) -> None:
    use(native)
    far = torch.tensor([1e4, -1e4, 800.0, -800.0, 90.0, -90.0, 0.0])
    for dtype in (torch.float32, torch.float64):
        kept = far.to(dtype)[:, None, None].expand(7, 5, 1).contiguous()
        assert cells.lstm_forward(kept, torch.zeros(7, 1, dtype=dtype)) is not None
        assert_close(kept[:, 0, 0], far.to(dtype).sigmoid())


def test_a_row_out_of_range_is_named(native: library.Library, use: Use) -> None:
    use(native)
    d, rows = torch.ones(2, 3), np.array([0, 7])
    with pytest.raises(ProtocolError, match=r"rows \[7\] are to be read, .* rows 0\.\.4"):
        cells.lstm_backward(d, None, torch.ones(5, 5, 3), torch.ones(5, 3), rows, 2)
    with pytest.raises(ProtocolError, match=r"rows \[7\]"):
        cells.gru_backward(d, d, torch.ones(5, 4, 3), rows, 2)


def test_other_dtypes_and_strides_are_left_to_torch(native: library.Library, use: Use) -> None:
    use(native)
    short = torch.zeros(2, 5, 3, dtype=torch.float16)
    assert cells.lstm_forward(short, short.new_zeros(2, 3)) is None
    apart = torch.zeros(2, 10, 3)[:, ::2]
    assert cells.lstm_forward(apart, torch.zeros(2, 3)) is None
    assert not cells.tanh(torch.zeros(4, 4).t()[:2], torch.zeros(2, 4))
    assert (
        cells.gru_forward(torch.zeros(2, 9), torch.zeros(2, 9), torch.zeros(2, 4), short[:, :4])
        is None
    )


def test_shapes_that_do_not_fit_are_left_to_torch_to_refuse(
    native: library.Library, use: Use
) -> None:
    use(native)
    d, of, four = torch.zeros(2, 3), torch.zeros(2, 9), torch.zeros(2, 4, 3)
    five = torch.zeros(2, 5, 3)
    assert cells.lstm_forward(five, d) is not None
    assert cells.lstm_forward(four, d) is None
    assert cells.lstm_forward(five, d[:1]) is None
    assert cells.lstm_backward(d, d, five, d, None, 2) is not None
    assert cells.lstm_backward(d, d[:1], five, d, None, 2) is None
    assert cells.lstm_backward(None, None, five, d, None, 2) is None
    assert cells.lstm_backward(d, None, four, d, None, 2) is None
    assert cells.lstm_backward(d, d[:, 1:].contiguous(), five, d, None, 2) is None
    assert cells.lstm_backward(d, None, five, d[:1], None, 2) is None
    assert cells.gru_forward(of, of[:1], d, four) is None
    assert cells.gru_backward(d, of, four, None, 2) is None


def test_row_numbers_may_lie_apart(native: library.Library, use: Use) -> None:
    use(native)
    kept, c, d = torch.rand(5, 5, 3), torch.rand(5, 3), torch.rand(2, 3)
    apart = cells.lstm_backward(d, None, kept, c, np.array([4, 9, 1, 9])[::2], 2)
    expected = cells.lstm_backward(d, None, kept, c, np.array([4, 1]), 2)
    assert apart is not None and expected is not None
    assert all(torch.equal(a, b) for a, b in zip(apart, expected, strict=True))


def test_rows_of_zeros_follow_the_gradient_at_the_gates(native: library.Library, use: Use) -> None:
    use(native)
    dh = torch.randn(3, 2)
    found = cells.lstm_backward(dh, None, torch.rand(3, 5, 2), torch.rand(3, 2), None, 8)
    assert found is not None
    d_gates, d_c, total = found
    assert d_gates.shape == (8, 8) and not d_gates[3:].any() and d_c.shape == (3, 2)
    assert_close(total, d_gates.sum(0))


def test_rows_in_bfloat16_are_computed_in_float32_and_rounded_once(
    native: library.Library, use: Use
) -> None:
    use(native)
    torch.manual_seed(0)
    kept = torch.randn(40, 5, 9, dtype=torch.bfloat16)
    below, wide = torch.randn(40, 9, dtype=torch.bfloat16), kept.float()
    short = cells.lstm_forward(kept, below)
    long = cells.lstm_forward(wide, below.float())
    assert short is not None and long is not None
    for x, y in zip((*short, kept), (*long, wide), strict=True):
        assert torch.equal(x, y.bfloat16())
    rows, dh = np.array([3, 39, 0]), torch.randn(3, 9, dtype=torch.bfloat16)
    found = cells.lstm_backward(dh, None, kept, below, rows, 4)
    want = cells.lstm_backward(dh.float(), None, kept.float(), below.float(), rows, 4)
    assert found is not None and want is not None
    assert torch.equal(found[2], want[2]), "the sum of rows is float32"
    for x, y in zip(found[:2], want[:2], strict=True):
        assert torch.equal(x, y.bfloat16())
    with pytest.raises(ProtocolError, match="40"):
        cells.lstm_backward(dh, None, kept, below, np.array([0, 40, 1]), 3)

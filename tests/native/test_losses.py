"""The native cross entropy is torch's, with autograd's gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from geartrain.native import library
from geartrain.native.losses import cross_entropy
from geartrain.nodes import loss

Use = Callable[[library.Library | None], None]
both = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@both
@given(
    n=st.integers(0, 70),
    classes=st.sampled_from([1, 2, 5, 16, 33]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.sampled_from([0.0, 1.0, 50.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_losses_and_gradients_are_torchs(
    native: library.Library,
    use: Use,
    n: int,
    classes: int,
    dtype: torch.dtype,
    size: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    z = (size * torch.randn(n, classes, dtype=dtype)).requires_grad_()
    target = torch.randint(classes, (n,))
    expected = F.cross_entropy(z, target, reduction="none")
    (d_expected,) = torch.autograd.grad(expected.sum(), [z])
    precise = {"rtol": 1e-14, "atol": 1e-14} if dtype == torch.float64 else {}
    use(native)
    found = cross_entropy(z.detach(), target)
    assert found is not None
    use(None)
    assert cross_entropy(z.detach(), target) is None
    for losses, d in (found, loss.cross_entropy.with_gradient(z.detach(), target)):
        assert_close(losses, expected.detach(), **precise)
        assert_close(d, d_expected, **precise)


@pytest.mark.parametrize(
    "row",
    [
        [float("nan"), 0.0, 1.0],
        [0.0, float("nan"), 1.0],
        [0.0, 1.0, float("inf")],
        [-float("inf"), 0.0, 1.0],
        [-float("inf")] * 3,
    ],
)
def test_what_is_not_finite_is_as_in_torch(
    native: library.Library, use: Use, row: list[float]
) -> None:
    z, target = torch.tensor([[1.0, 2.0, 3.0], row]), torch.tensor([2, 0])
    use(native)
    ours = loss.cross_entropy.with_gradient(z, target)
    use(None)
    torchs = loss.cross_entropy.with_gradient(z, target)
    for a, b in zip(ours, torchs, strict=True):
        assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_target_that_is_no_class_is_left_to_torch_to_refuse(
    native: library.Library, use: Use, wrong: int
) -> None:
    use(native)
    target = torch.tensor([0, wrong])
    assert cross_entropy(torch.zeros(2, 3), target) is None
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss.cross_entropy.with_gradient(torch.zeros(2, 3), target)

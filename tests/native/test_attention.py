"""Attention over ranges in C is that of torch, with autograd's gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from geartrain.errors import ProtocolError
from geartrain.native import library
from geartrain.native.attention import attend_backward, attend_forward

Use = Callable[[library.Library | None], None]
both = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def read(q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
    """What one query reads."""
    return torch.softmax(factor * (k @ q), 0) @ v


@both
@given(
    n=st.integers(0, 9),
    depth=st.sampled_from([1, 3, 16, 33]),
    width=st.sampled_from([1, 8, 17]),
    one=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_attention_over_ranges_is_torchs(
    native: library.Library,
    use: Use,
    n: int,
    depth: int,
    width: int,
    one: bool,
    dtype: torch.dtype,
    size: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    starts, lengths = rng.integers(0, 5, n), rng.integers(0, 8, n)
    q = (size * torch.randn(n, depth, dtype=dtype)).requires_grad_()
    k = torch.randn(12, depth, dtype=dtype).requires_grad_()
    v = k if one else torch.randn(12, width, dtype=dtype).requires_grad_()
    wanted = [
        read(q[i], k[a : a + m], v[a : a + m], 0.5)
        for i, (a, m) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))
    ]
    expected = torch.stack(wanted) if n else v.new_zeros(0, v.shape[1])
    dc = torch.randn_like(expected)
    leaves = [q, k] if one else [q, k, v]
    found = torch.autograd.grad((expected * dc).sum() + 0 * sum(x.sum() for x in leaves), leaves)
    use(native)
    plain = (q.detach(), k.detach(), v.detach())
    context = attend_forward(*plain, starts, lengths, 0.5)
    assert context is not None
    sums = [torch.zeros_like(x) for x in plain[1:]]
    to = (sums[0], sums[0] if one else sums[1])
    kept = (plain[0], *context)
    dq = attend_backward(dc, kept, plain[1], plain[2], starts, lengths, 0.5, to)
    precise = {"rtol": 1e-10, "atol": 1e-10}
    if dtype is torch.float32:
        precise = {"rtol": 1e-3, "atol": 1e-3 * max(1.0, size)}
    assert_close(context[0], expected.detach(), **precise)
    for got, want in zip((dq, *sums), found, strict=False):
        assert_close(got, want, **precise)
    again = attend_backward(dc, kept, plain[1], plain[2], starts, lengths, 0.5, None)
    assert_close(again, found[0], **precise)
    use(None)
    assert attend_forward(*plain, starts, lengths, 0.5) is None
    assert attend_backward(dc, kept, plain[1], plain[2], starts, lengths, 0.5, None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranges_that_are_not_within_the_memory_are_refused(
    native: library.Library, use: Use, dtype: torch.dtype
) -> None:
    use(native)
    x = torch.ones(4, 2, dtype=dtype)
    for start, length in ((3, 2), (-1, 1), (0, -1), (2**62, 5), (0, 5)):
        at = np.array([0, start]), np.array([1, length])
        with pytest.raises(ProtocolError, match=r"but the memory has rows 0..3"):
            attend_forward(x[:2], x, x, *at, 1.0)
        with pytest.raises(ProtocolError, match=r"but the memory has rows 0..3"):
            attend_backward(x[:2], (x[:2], x[:2], x[:2, :1].clone()), x, x, *at, 1.0, None)

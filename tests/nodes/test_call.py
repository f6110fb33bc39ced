"""How a node calls its module, and differentiates what it has made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from geartrain.nodes import call
from geartrain.nodes.call import differentiate


def made() -> tuple[list[Tensor], tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Leaves, what is made of them, and gradients of that."""
    torch.manual_seed(0)
    x, y, z = (torch.randn(4, 3, requires_grad=True) for _ in range(3))
    outputs = (x * y).tanh(), x.detach() + 1, x.sum(1)
    return [x, y, z], outputs, (torch.randn(4, 3), torch.randn(4, 3), None)


@pytest.mark.parametrize("torchs", [False, True])
def test_products_are_those_of_autograd(torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if torchs:
        monkeypatch.setattr(call, "_ENGINE", None)
    leaves, outputs, gradients = made()
    expected = torch.autograd.grad(
        outputs[0], leaves, gradients[0], retain_graph=True, allow_unused=True
    )
    kept = differentiate(outputs, gradients, leaves, retain=True)
    found = differentiate(outputs, gradients, leaves)
    for one, again, mine in zip(kept, found, expected, strict=True):
        if mine is None:
            assert one is None and again is None
        else:
            assert one is not None and again is not None
            assert torch.equal(one, mine) and torch.equal(again, mine)
    with pytest.raises(RuntimeError, match="second time"):  # its graph is gone
        differentiate(outputs, gradients, leaves)
    assert all(x.grad is None for x in leaves)


def test_of_outputs_that_nothing_comes_to_there_is_nothing() -> None:
    leaves, outputs, _ = made()
    assert differentiate(outputs, (None, torch.ones(4, 3), None), leaves) == (None, None, None)
    assert differentiate(outputs, (torch.ones(4, 3), None, None), []) == ()
